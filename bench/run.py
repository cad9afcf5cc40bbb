"""`python -m bench.run`: gates, times and compares mmattn and its peers; appends JSON lines and prints a table.

The ratio between two providers of one run is the result; absolute times are context. A row holds

    case, provider, title    what ran; or `reason`, why it could not
    ms, spread, samples      median of the time per call, (80th - 20th percentile) / median, number of blocks
    graph                    whether the blocks were CUDA graphs (decode cases and sweeps), so without the host's time
    eff_tflops, gb_s         2 (D + Dv) Hq pairs / ms, and in decode cases bytes / ms, from `bench.work`
    mask                     "case", or "without images": the floor computes another mask, and its work is counted so
    pairs, flops, bytes      the work that was counted
    mask_ms, mask_gpu_ms     what has to be built for a new batch: as called, and replayed from a CUDA graph
    first_s                  time to the first result: compilation and the plan included; imports too, but not those of mmattn
    host_us                  median host time of a call with everything ready, on a GPU: what the call costs the launching thread
    max_error                against the float64 oracle on sampled rows; `max_error_uniform` with zero queries
    device, gpu, driver, versions, commit, date
"""

from __future__ import annotations

import datetime
import gc
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from importlib import metadata
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

import mmattn

from . import cases as cases_module
from .cases import Case, Inputs, make_inputs
from .gate import Gate, sample_rows
from .peers import CannotRun, Prepared
from .providers import CPU_DEFAULT, GPU_DEFAULT, PROVIDERS, Provider
from .timing import Timing, host_us, interleaved, patience, peaks, sync
from .work import work

Row = dict[str, Any]
HERE = str(Path(__file__).parent)

SWEEP_PROVIDERS = ("mmattn", "mmattn-triton", "fa4-native", "fa4-mask-mod", "fa4-split", "flex", "sdpa-dense")
SWEEP_LIMIT = {"fa4-mask-mod": 65536, "flex": 65536, "sdpa-dense": 32768}
"""Longest sequence of the sweep for providers whose time or memory grows with its square."""
SWEEP_SPARSE = {"flex", "sdpa-dense"}
"""Providers that compile or allocate per length: every other length only, from 2k on. (At 16k Inductor's kernel for the
block mask, torch 2.11, keeps ptxas busy for minutes.)"""


class DeviceLost(RuntimeError):
    """The GPU does not answer any more; no later number can be trusted."""


@cache
def environment(device_type: str) -> Row:
    """What every row says of where it was measured."""
    packages = ("torch", "triton", "flash-attn-4", "nvidia-cutlass-dsl", "vllm", "mmattn")
    versions = {}
    for package in packages:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    if "mmattn" not in versions:
        versions["mmattn"] = mmattn.__version__
    gpu = driver = None
    if device_type == "cuda":
        gpu = torch.cuda.get_device_name()
        versions["cuda"] = str(torch.version.cuda)
        driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return {
        "device": device_type, "gpu": gpu, "driver": driver, "versions": versions,
        "commit": os.environ.get("MMATTN_COMMIT") or _output("git", "-C", HERE, "rev-parse", "HEAD") or "unknown",
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }  # fmt: skip


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = done.stdout.strip().splitlines()
    return lines[0] if done.returncode == 0 and lines else None


def reason(e: Exception) -> str:
    """An exception as one readable line; `CannotRun` speaks for itself."""
    text = " ".join(str(e).split())
    if isinstance(e, CannotRun):
        return text
    return f"{type(e).__name__}: {text[:600]}" if text else type(e).__name__


@dataclass
class Settings:
    device: torch.device
    dtype: torch.dtype
    rounds: int
    rows: int
    """Sampled rows of the gate."""
    graphs: bool = False
    """Times short calls from CUDA graphs in every case, not only in decode cases."""
    patience: float | None = None
    """Seconds that a provider gets for its first result, and for its first mask."""


HOST_TIMED = ("mmattn", "fa4-native")
"""Providers whose calls are short enough on the host to matter."""


@dataclass
class _Ready:
    provider: Provider
    prepared: Prepared
    first: Row
    """What the first calls told: `first_s` and the errors."""


@torch.no_grad()
def run_case(
    case: Case, providers: list[Provider], settings: Settings, note: Callable[[str], None] = lambda text: None
) -> Iterator[Row]:
    """Gates and times `providers` on one case; yields a row for each, those that cannot run first."""
    device = settings.device
    on_gpu = device.type == "cuda"
    counted = work(case)
    l2 = torch.cuda.get_device_properties(device).L2_cache_size if on_gpu else 0
    inputs = make_inputs(case, device, settings.dtype, touched=counted.kv_bytes, l2=l2)
    rows = sample_rows(case, settings.rows)
    gates: dict[Case, Gate] = {}
    ready: list[_Ready] = []
    for provider in providers:
        note(f"{provider.name}: gate")
        try:
            ready.append(_gated(provider, inputs, gates, rows, settings.patience))
        except Exception as e:
            yield _row(case, provider, reason=reason(e))
            _check_alive(device, case, provider)
    gates.clear()
    if on_gpu:
        torch.cuda.empty_cache()

    note("timing")
    rotate = max(1, len(inputs.page_tables))
    q = inputs.q

    def bound(prepared: Prepared) -> Callable[[int], object]:
        timed = prepared.timed or prepared.call
        return lambda i: timed(q, i)

    times = interleaved(
        {r.provider.name: bound(r.prepared) for r in ready},
        device,
        rounds=settings.rounds,
        rotate=rotate,
        graph=case.decode or settings.graphs,
    )
    builds = {r.provider.name: r.prepared.build for r in ready if r.prepared.build is not None}

    def building(build: Callable[[], Any]) -> Callable[[int], object]:
        return lambda i: build()

    calls = {name: building(build) for name, build in builds.items()}
    built = interleaved(calls, device, rounds=min(5, settings.rounds), first=settings.patience)
    ours = {name: call for name, call in calls.items() if name.startswith("mmattn")} if on_gpu else {}
    replayed = interleaved(ours, device, rounds=min(5, settings.rounds), graph=True)  # GPU time, without the host's
    for r in ready:
        name = r.provider.name
        timing = times[name]
        if isinstance(timing, Exception):
            yield _row(case, r.provider, reason=f"failed after the gate: {reason(timing)}", **r.first)
            _check_alive(device, case, r.provider)
            continue
        mine = work(r.prepared.case)
        row = _row(
            case, r.provider, ms=round(timing.ms, 5), spread=round(timing.spread, 4), samples=timing.samples,
            eff_tflops=round(mine.tflops(timing.ms), 2), mask="case" if r.prepared.case == case else "without images",
            pairs=mine.pairs, flops=mine.flops, bytes=mine.bytes, graph=timing.graph, **r.first,
        )  # fmt: skip
        if on_gpu and name.startswith(HOST_TIMED):
            row["host_us"] = round(host_us(bound(r.prepared), device), 1)
        if case.decode:
            row["gb_s"] = round(mine.gb_s(timing.ms), 1)
        for field, measured in (("mask_ms", built.get(name)), ("mask_gpu_ms", replayed.get(name))):
            if isinstance(measured, Timing) and (field == "mask_ms" or measured.graph):
                row[field] = round(measured.ms, 5)
            elif isinstance(measured, Exception):
                row[f"{field}_reason"] = reason(measured)
        yield row


@torch.no_grad()
def _gated(
    provider: Provider,
    inputs: Inputs,
    gates: dict[Case, Gate],
    rows: list[tuple[int, int]],
    first_result: float | None = None,
) -> _Ready:
    """The provider, ready and checked: raises where it cannot run the case, takes longer than `first_result` seconds, or
    gives another answer than the oracle."""
    sync(inputs.device)
    begin = time.perf_counter()
    with patience(first_result):
        prepared = provider.prepare(inputs)
        prepared.call(inputs.q, 0)
        sync(inputs.device)
    first = time.perf_counter() - begin
    if prepared.case not in gates:
        gates[prepared.case] = Gate(prepared.case, inputs, rows)
    gate = gates[prepared.case]
    uniform = gate.check(prepared.call(gate.queries(zero=True), 0), zero=True)
    error = gate.check(prepared.call(gate.queries(zero=False), 0), zero=False)
    errors = {"max_error": float(f"{error:.3e}"), "max_error_uniform": float(f"{uniform:.3e}")}
    return _Ready(provider, prepared, {"first_s": round(first, 2), **errors})


def _row(case: Case, provider: Provider, **fields: Any) -> Row:
    return {"case": case.name, "provider": provider.name, "title": case.title, **fields}


def _check_alive(device: torch.device, case: Case, provider: Provider) -> None:
    try:
        sync(device)
    except Exception as e:
        raise DeviceLost(
            f"the GPU failed under {provider.name} in case {case.name}: {e}; leave that provider out and run again"
        ) from e


def start_backends(device: torch.device) -> None:
    """One small call of each backend of mmattn: `first_s` is to say what a kernel costs, not what a process does."""
    x = torch.zeros(1, 256, 2, 64, dtype=torch.bfloat16, device=device)
    for backend, against in mmattn.supported(x, x, x, mmattn.Mask()).items():
        if not against:
            mmattn.attention(x, x, x, mmattn.Mask(), backend=backend)


def peak_rows(device: torch.device) -> Iterator[Row]:
    """What the GPU does at best in the same run: a large matmul and a large copy."""
    matmul, tflops, copy, gb_s = peaks(device)
    for name, timing, rate in (
        ("matmul-8192", matmul, {"eff_tflops": round(tflops, 1)}),
        ("copy", copy, {"gb_s": round(gb_s, 1)}),
    ):
        yield {"case": "peak", "provider": name, "ms": round(timing.ms, 5), "spread": round(timing.spread, 4), **rate}


def table(title: str, rows: list[Row]) -> Table:
    """Rows of one case as a table, best first; ratios are time over that of the fastest mmattn."""
    ours = [row["ms"] for row in rows if row["provider"].startswith("mmattn") and "ms" in row]
    shown = Table(title=title, title_justify="left")
    for column in ("provider", "ms", "± %", "eff TF/s", "GB/s", "mask ms", "x mmattn", "max error", "note"):
        shown.add_column(column, justify="left" if column in ("provider", "note") else "right", overflow="fold")

    def number(row: Row, field: str, digits: str) -> str:
        return f"{row[field]:{digits}}" if row.get(field) is not None else ""

    for row in sorted(rows, key=lambda r: r.get("ms", float("inf"))):
        ratio = f"{row['ms'] / min(ours):.2f}" if ours and "ms" in row else ""
        remark = row.get("reason") or (row["mask"] if row.get("mask", "case") != "case" else "")
        shown.add_row(
            row["provider"], number(row, "ms", ".4f"), f"{100 * row['spread']:.1f}" if "spread" in row else "",
            number(row, "eff_tflops", ".1f"), number(row, "gb_s", ".0f"), number(row, "mask_ms", ".4f"), ratio,
            number(row, "max_error", ".1e"), remark if len(remark) < 160 else remark[:157] + "...",
        )  # fmt: skip
    return shown


def plan_of_run(
    wanted_cases: tuple[str, ...], wanted_providers: tuple[str, ...], *, sweep: bool, reduced: bool, on_gpu: bool
) -> list[tuple[Case, list[Provider]]]:
    """Which providers run which cases. Raises `click.BadParameter` for unknown names."""
    unknown = [name for name in wanted_providers if name not in PROVIDERS]
    if unknown:
        raise click.BadParameter(f"no provider {', '.join(unknown)}; there are {', '.join(PROVIDERS)}")
    if sweep:
        chosen = [name for name in SWEEP_PROVIDERS if not wanted_providers or name in wanted_providers]
        pairs = []
        for n, length in enumerate(cases_module.SWEEP_LENGTHS):
            fit = [
                name
                for name in chosen
                if length <= SWEEP_LIMIT.get(name, length) and not (name in SWEEP_SPARSE and n % 2 == 0)
            ]
            pairs.append((cases_module.sweep(length), [PROVIDERS[name] for name in fit]))
        return pairs
    try:
        names = cases_module.select(wanted_cases)
    except KeyError as e:
        raise click.BadParameter(str(e.args[0])) from e
    default = GPU_DEFAULT if on_gpu else CPU_DEFAULT
    providers = [PROVIDERS[name] for name in (wanted_providers or default)]
    return [(cases_module.make(name, reduced=reduced), providers) for name in names]


def _describe(progress: Progress, bar: TaskID, name: str, text: str) -> None:
    progress.update(bar, description=f"{name} {text}")


def _words(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(word for value in values for word in value.replace(",", " ").split())


class _Greedy(click.Command):
    """Lets an option take several words: `--case W1 W3`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        spread, option = [], None
        for arg in args:
            if arg.startswith("-"):
                option = arg if arg in ("--case", "--provider") else None
                spread.append(arg)
            elif option is not None and spread[-1] != option:
                spread += [option, arg]
            else:
                spread.append(arg)
        return super().parse_args(ctx, spread)


@click.command(cls=_Greedy)
@click.option(
    "--case",
    "wanted_cases",
    multiple=True,
    callback=_words,
    metavar="NAME...",
    help="Cases or families (W2 = W2, W2b); default: all.",
)
@click.option(
    "--provider",
    "wanted_providers",
    multiple=True,
    callback=_words,
    metavar="NAME...",
    help="Providers; default: all that make sense here.",
)
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    help="JSON lines to append to; default: bench/results/<date>-<gpu>.jsonl.",
)
@click.option("--quick", is_flag=True, help="Fewer samples and gate rows: for a look, not for a result.")
@click.option("--sweep", is_flag=True, help="One windowed layer with images from 1k to 256k tokens, for plot.py.")
@click.option("--minutes", type=float, default=None, help="Start no further case after this time.")
@click.option(
    "--patience",
    "seconds",
    type=float,
    default=180,
    show_default=True,
    help="Seconds to the first result (or mask) after which a provider is left out: some compilers take minutes.",
)
@click.option("--list", "listing", is_flag=True, help="Print cases and providers and exit.")
@click.option("--device", default=None, help="cuda or cpu; default: cuda where there is one. A CPU runs reduced cases.")
def main(
    wanted_cases: tuple[str, ...],
    wanted_providers: tuple[str, ...],
    out: Path | None,
    quick: bool,
    sweep: bool,
    minutes: float | None,
    seconds: float,
    listing: bool,
    device: str | None,
) -> None:
    """Times mmattn and its peers on named workloads; each is checked against the oracle first."""
    console = Console(width=None if sys.stdout.isatty() else 170)
    if listing:
        for name in cases_module.names():
            case = cases_module.make(name)
            console.print(f"{name:5} {case.title}", highlight=False)
        for provider in PROVIDERS.values():
            console.print(f"{provider.name:18} {provider.about}", highlight=False)
        return
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    on_gpu = where.type == "cuda"
    if on_gpu:
        where = torch.device("cuda", where.index or 0)
    if sweep and not on_gpu:
        raise click.UsageError("--sweep needs a GPU")
    warnings.filterwarnings("ignore", message="Argument aux_data|flex_attention called without torch.compile")
    settings = Settings(
        where,
        torch.bfloat16 if on_gpu else torch.float32,
        rounds=1 if not on_gpu else 5 if quick else 11,
        rows=64 if quick else 192,
        graphs=sweep,
        patience=seconds,
    )
    todo = plan_of_run(wanted_cases, wanted_providers, sweep=sweep, reduced=not on_gpu, on_gpu=on_gpu)
    about = environment(where.type)
    if out is None:
        gpu = "-".join((about["gpu"] or "cpu").lower().split()[-2:])
        out = Path(__file__).parent / "results" / f"{about['date'][:10]}-{gpu}{'-sweep' if sweep else ''}.jsonl"
    out.parent.mkdir(parents=True, exist_ok=True)
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    console.print(f"{about['gpu'] or 'CPU, reduced cases'}; {versions}; commit {about['commit'][:12]}")

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    progress = Progress(*columns, console=console, transient=True)
    started = time.monotonic()
    with out.open("a") as file, progress:

        def keep(row: Row) -> Row:
            row = {**row, **about, **({"quick": True} if quick else {})}
            file.write(json.dumps(row) + "\n")
            file.flush()
            return row

        bar = progress.add_task("peaks", total=len(todo))
        if on_gpu:
            start_backends(where)
            best = [keep(row) for row in peak_rows(where)]
            console.print(f"same-run peaks: matmul {best[0]['eff_tflops']} TFLOP/s, copy {best[1]['gb_s']} GB/s")
        for n, (case, providers) in enumerate(todo):
            begin = time.monotonic()
            if minutes is not None and begin - started > 60 * minutes:
                console.print(f"{minutes:g} minutes are over; not run: {', '.join(c.name for c, _ in todo[n:])}")
                break
            progress.update(bar, description=case.name)
            rows: list[Row] = []
            say = partial(_describe, progress, bar, case.name)
            try:
                for row in run_case(case, providers, settings, say):
                    rows.append(keep(row))
            except DeviceLost as e:
                raise click.ClickException(str(e)) from e
            except Exception as e:  # the case itself cannot be set up, out of memory for one
                rows.append(keep({"case": case.name, "provider": "all", "title": case.title, "reason": reason(e)}))
            console.print(table(f"{case.name}: {case.title} ({time.monotonic() - begin:.0f} s)", rows))
            progress.advance(bar)
            gc.collect()
            if on_gpu:
                torch.cuda.empty_cache()
    console.print(f"rows are in {out}")


if __name__ == "__main__":
    main()
