"""`python -m bench.targets ROWS`: the goals of the project against one file of benchmark rows, met or missed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from .compare import Key, Row, load

Value = Callable[[dict[Key, Row]], float | None]


@dataclass(frozen=True)
class Target:
    what: str
    value: Value
    """The measured number, None where a row is missing."""
    bound: float
    at_least: bool = True

    def met(self, value: float) -> bool:
        return value >= self.bound if self.at_least else value <= self.bound


def ratio(field: str, above: Key, below: Key) -> Value:
    """A field of one row over the same field of another."""

    def value(rows: dict[Key, Row]) -> float | None:
        a, b = rows.get(above, {}).get(field), rows.get(below, {}).get(field)
        return a / b if a is not None and b else None

    return value


def _eff(case: str, ours: str, floor: float) -> Target:
    return Target(
        f"{case}: eff of {ours} / eff of FA4 native", ratio("eff_tflops", (case, ours), (case, "fa4-native")), floor
    )


def _times(case: str, peer: str, ours: str, floor: float) -> Target:
    return Target(f"{case}: time of {peer} / time of {ours}", ratio("ms", (case, peer), (case, ours)), floor)


def _at_most(case: str, ours: str, peer: str, cap: float) -> Target:
    return Target(
        f"{case}: time of {ours} / time of {peer}", ratio("ms", (case, ours), (case, peer)), cap, at_least=False
    )


def _between(what: str, above: str, below: str, cap: float, provider: str = "mmattn") -> Target:
    return Target(what, ratio("ms", (above, provider), (below, provider)), cap, at_least=False)


def _bandwidth(case: str, share: float) -> Target:
    value = ratio("gb_s", (case, "mmattn"), ("peak", "copy"))
    return Target(f"{case}: bandwidth of mmattn / copy bandwidth of the run", value, share)


def _field(case: str, field: str) -> Value:
    return lambda rows: rows.get((case, "mmattn"), {}).get(field)


def _plan_us(rows: dict[Key, Row]) -> float | None:
    ms = rows.get(("W1", "mmattn"), {}).get("mask_gpu_ms")
    return None if ms is None else 1e3 * ms


TARGETS = (
    _eff("W3", "mmattn-triton", 0.72),
    _times("W3", "flex", "mmattn-triton", 1.1),
    _times("W1", "flex", "mmattn-triton", 1.4),
    Target("W1: plan for 32k rows and 64 spans, us of GPU time", _plan_us, 20, at_least=False),
    *(_eff(case, "mmattn-cute", 0.97) for case in ("W1", "W4", "W3", "W5")),
    _at_most("W1n", "mmattn-cute", "fa4-native", 1.03),
    _times("W1", "fa4-mask-mod", "mmattn-cute", 25),
    _times("W2", "fa4-mask-mod", "mmattn-cute", 100),
    _times("W2b", "fa4-mask-mod", "mmattn-cute", 100),
    _between("W2 / W2c: pages of 64 against contiguous", "W2", "W2c", 1.05, "mmattn-cute"),
    _at_most("W10", "mmattn", "fa4-native", 1.02),
    _at_most("W10b", "mmattn", "fa4-native", 1.02),
    _bandwidth("W7b", 0.80),
    _times("W7b", "fa4-native", "mmattn", 5),
    _bandwidth("W7", 0.85),
    Target("W7h: float8 against bf16, 64 x 32k", ratio("ms", ("W7", "mmattn"), ("W7h", "mmattn")), 1.6),
    Target("W7i: float8 against bf16, 1 x 128k", ratio("ms", ("W7b", "mmattn"), ("W7i", "mmattn")), 1.6),
    _between("W7e / W7b: 16 rows against 1", "W7e", "W7b", 1.15),
    _between("W7d / W7f: window decode at 128k against 4k", "W7d", "W7f", 1.05),
    _between("W7g / W7f: window decode at 256k against 4k", "W7g", "W7f", 1.05),
    *(
        Target(f"{case}: seconds to the first result", _field(case, "first_s"), 6, False)
        for case in ("W2b", "W5", "W7b")
    ),
    *(Target(f"{case}: host us of a call with a plan", _field(case, "host_us"), 30, False) for case in ("W1", "W7b")),
)


@click.command()
@click.argument("rows", type=click.Path(exists=True, dir_okay=False, path_type=Path))
def main(rows: Path) -> None:
    """Prints every target with the number that the rows hold for it."""
    held = load(rows)
    shown = Table("target", "goal", "measured", "")
    for target in TARGETS:
        value = target.value(held)
        verdict = "not measured" if value is None else "met" if target.met(value) else "missed"
        goal = f"{'>=' if target.at_least else '<='} {target.bound:g}"
        shown.add_row(target.what, goal, "" if value is None else f"{value:.3f}", verdict)
    Console().print(shown)


if __name__ == "__main__":
    main()
