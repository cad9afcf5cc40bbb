"""`python -m bench.compare OLD NEW`: what got slower, what got lost. Exit 1 on a regression beyond the spread."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

Row = dict[str, Any]
Key = tuple[str, str]

FLOOR = 0.02
"""Changes below this share are noise whatever the spread says."""


def load(path: Path) -> dict[Key, Row]:
    """The last row of every (case, provider) of a file of JSON lines. Raises `click.BadParameter`."""
    rows: dict[Key, Row] = {}
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            rows[row["case"], row["provider"]] = row
        except (json.JSONDecodeError, KeyError, TypeError) as e:
            raise click.BadParameter(f"{path}:{number} is not a row of a benchmark: {e}") from e
    return rows


def allowance(old: Row, new: Row) -> float:
    """The share by which a time may grow: the spreads of both rows together, at least `FLOOR`."""
    return max(FLOOR, float(old.get("spread", 0)) + float(new.get("spread", 0)))


def verdict(old: Row | None, new: Row | None) -> str:
    """`slower`, `faster`, `same`, `lost` (ran, runs no more), `new` (ran not, runs) or `none` (runs in neither)."""
    ran, runs = old is not None and "ms" in old, new is not None and "ms" in new
    if not (ran and runs):
        # A row that the new file does not hold was not asked for; a row with a reason was, and failed.
        return "new" if runs else "lost" if ran and new is not None else "none"
    assert old is not None and new is not None
    change = new["ms"] / old["ms"] - 1
    allowed = allowance(old, new)
    return "slower" if change > allowed else "faster" if change < -allowed else "same"


def compare(old: dict[Key, Row], new: dict[Key, Row]) -> list[tuple[Key, str]]:
    """The verdict on every (case, provider) of both files."""
    keys: Iterable[Key] = dict.fromkeys([*old, *new])
    return [(key, verdict(old.get(key), new.get(key))) for key in keys]


@click.command()
@click.argument("old", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("new", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--all", "everything", is_flag=True, help="Also rows that did not change.")
@click.option("--only", default="mmattn", show_default=True, help="Providers that start so can fail it.")
def main(old: Path, new: Path, everything: bool, only: str) -> None:
    """Compares two files of benchmark rows from the same kind of GPU."""
    before, after = load(old), load(new)
    gpus = [{row.get("gpu") for row in rows.values()} for rows in (before, after)]
    if gpus[0] != gpus[1]:
        said = " and ".join(", ".join(str(x) for x in sorted(gpu, key=str)) for gpu in gpus)
        raise click.UsageError(f"rows come from different GPUs ({said}); times of different GPUs do not compare")
    shown = Table("case", "provider", "old ms", "new ms", "change", "allowed", "verdict")
    failed = False
    for key, judged in compare(before, after):
        failed |= judged in ("slower", "lost") and key[1].startswith(only)
        if judged in ("same", "none") and not everything:
            continue
        a, b = before.get(key, {}), after.get(key, {})
        both = "ms" in a and "ms" in b
        shown.add_row(
            *key, f"{a['ms']:.4f}" if "ms" in a else "", f"{b['ms']:.4f}" if "ms" in b else "",
            f"{100 * (b['ms'] / a['ms'] - 1):+.1f} %" if both else "", f"{100 * allowance(a, b):.1f} %" if both else "",
            judged + (f": {b['reason']}" if judged == "lost" else ""),
        )  # fmt: skip
    console = Console()
    console.print(shown)
    if failed:
        console.print(f"regression: a provider {only}* is slower than its spread allows, or runs no more")
        raise SystemExit(1)


if __name__ == "__main__":
    main()
