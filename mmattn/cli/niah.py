"""`python -m mmattn niah`: needles in a haystack of text and images, one-shot and in chunks over a paged cache."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import click
import torch
from rich.table import Table
from torch import Tensor

import mmattn

from ..mask import Mask
from ..plan import Plan
from .common import BACKEND_NAMES, Ran, common_options, open_console, pick_device, progress
from .haystack import Haystack, Planted


class Defaults(NamedTuple):
    """What the options are when they are left out."""

    context: int
    window: int
    heads: int
    kv_heads: int
    head_dim: int
    chunks: tuple[int, ...]


_CPU = Defaults(1024, 96, 4, 2, 64, (0, 384, 250, 96))
_GPU = Defaults(16384, 1024, 32, 16, 256, (0, 8192, 2000, 512))
"""Heads, head dim and window of the sliding layers of Gemma 4 31B."""


TORCH_LONGEST = 16384
"""Tokens up to which the torch backend, which has no fused kernel, is among the default backends of a GPU."""


def _too_long(backend: str, length: int, device: torch.device) -> bool:
    return backend == "torch" and length > TORCH_LONGEST and device.type != "cpu"


@dataclass(frozen=True)
class LayerKind:
    name: str
    mask: Mask
    spans: bool


def layer_kinds(window: int) -> list[LayerKind]:
    """The kinds of layers that read the haystack."""
    return [
        LayerKind("Gemma 4 sliding", Mask.sliding_window(window, mm_prefix_clamp=True), True),
        LayerKind("Gemma 4 global", Mask.causal_(), False),
        LayerKind("Gemma 3 sliding", Mask.sliding_window(window), True),
        LayerKind("Gemma 3 global", Mask.causal_(), True),
        LayerKind("DFlash draft sliding", Mask.sliding_window(window, causal=False), False),
    ]


@dataclass
class Verdict:
    """What one backend found in one layer with one way of chunking."""

    needles: int = 0
    decoys: int = 0
    lost: list[str] = field(default_factory=list)
    found_decoys: list[str] = field(default_factory=list)
    not_finite: int = 0
    """Outputs that are NaN or infinite."""
    refused_rows: int = 0
    """Rows of chunks that the backend does not take."""

    @property
    def right(self) -> bool:
        return not (self.lost or self.found_decoys or self.not_finite)

    def __str__(self) -> str:
        text = f"{self.needles - len(self.lost)}/{self.needles} {self.decoys - len(self.found_decoys)}/{self.decoys}"
        if not self.needles and not self.decoys:
            return "not run"
        text += f", {self.not_finite} not finite" if self.not_finite else ""
        return text + (f", {self.refused_rows} rows not run" if self.refused_rows else "")


class Cache:
    """K and V as a server keeps them: pages in any order; a slot that has not been written holds NaN."""

    def __init__(self, k: Tensor, v: Tensor, page_size: int, seed: int) -> None:
        self.page_size = page_size
        pages = -(-len(k) // page_size)
        self.k, self.v = (x.new_full((pages, page_size, *x.shape[1:]), float("nan")) for x in (k, v))
        order = torch.randperm(pages, generator=torch.Generator().manual_seed(seed))
        self.page_table = order.to(k.device, torch.int32)[None]

    def write(self, first: int, k: Tensor, v: Tensor) -> None:
        position = first + torch.arange(len(k), device=k.device)
        page, slot = self.page_table[0, position // self.page_size].long(), position % self.page_size
        self.k[page, slot], self.v[page, slot] = k, v


def _plan(mask: Mask, fault: str | None, **batch_args: Any) -> Plan:
    plan = mmattn.plan(mask, **batch_args)
    if fault is None:
        return plan
    from ..faults import inject

    return inject(plan, fault)


def _prefill(
    planted: Planted, layer: LayerKind, chunk: int, page_size: int, backend: str, fault: str | None, ran: Ran
) -> Verdict:
    """The whole haystack, `chunk` rows at a time over a paged cache; 0: in one call over contiguous k and v."""
    hay, verdict = planted.hay, Verdict()
    spans = hay.spans if layer.spans else []
    cache = Cache(planted.k, planted.v, page_size, planted.seed) if chunk else None
    for first in range(0, hay.length, chunk or hay.length):
        end = min(first + (chunk or hay.length), hay.length)
        q = planted.queries(first, end)
        if cache is None:
            k, v = planted.k, planted.v
            plan = _plan(layer.mask, fault, q=q, k=k, mm_prefix_range=[spans])
        else:
            cache.write(first, planted.k[first:end], planted.v[first:end])
            k, v = cache.k, cache.v
            plan = _plan(
                layer.mask, fault, q=q, k=k, mm_prefix_range=[spans], page_table=cache.page_table,
                cu_seqlens_q=torch.tensor([0, end - first], dtype=torch.int32, device=q.device),
                seqused_k=torch.tensor([end], dtype=torch.int32, device=q.device),
            )  # fmt: skip
        where = f"{end - first} rows in one call" if cache is None else f"{end - first} rows, pages of {page_size}"
        if backend not in ran.usable({backend: mmattn.supported(q, k, v, plan)[backend]}, where):
            verdict.refused_rows += end - first
            continue
        out = mmattn.attention(q, k, v, plan, backend=backend)
        verdict.not_finite += int((~out.isfinite()).sum())
        for row in planted.rows:
            if first <= row < end:
                _judge(verdict, planted, layer.mask, spans, row, end, out[row - first])
    return verdict


def _judge(
    verdict: Verdict, planted: Planted, mask: Mask, spans: list[tuple[int, int]], row: int, kv_len: int, out: Tensor
) -> None:
    """Adds the keys of one question. The keys that a row may see share its weight evenly: a needle is lost when its
    share is smaller, be it that it was not read or that a decoy was."""
    texts = planted.hay.questions[row]
    weights = planted.read(row, out.nan_to_num())
    expected = planted.hay.expected(mask, spans, row, kv_len)
    share = 1 / max(1, sum(expected.values()))
    for key, visible in expected.items():
        least, most = weights[key]
        line = f"row {row}, key {key}: {texts[key]}"
        if visible:
            verdict.needles += 1
            if least < 0.9 * share:
                verdict.lost.append(f"{line} (weight {least:.2f} of {share:.2f})")
        else:
            verdict.decoys += 1
            if most > 0.5 / len(texts):
                verdict.found_decoys.append(f"{line} (weight {most:.2f})")


def _list_faults(context: click.Context, parameter: click.Parameter, wanted: bool) -> None:
    if not wanted or context.resilient_parsing:
        return
    from ..faults import FAULTS

    table = Table("name", "what goes wrong", "seen in", title="Historical faults")
    for name, fault in FAULTS.items():
        table.add_row(name, fault.description, fault.source)
    open_console().print(table)
    context.exit()


def _check_fault(context: click.Context, parameter: click.Parameter, name: str | None) -> str | None:
    if name is not None:
        from ..faults import FAULTS

        if name not in FAULTS:
            raise click.BadParameter(f"{name!r} is none of {', '.join(FAULTS)} (--list-faults says what they are)")
    return name


@click.command()
@common_options
@click.option(
    "--context",
    "length",
    type=click.IntRange(min=1),
    help="Tokens in the haystack. Default: 16384 on a GPU, 1024 on a CPU.",
)
@click.option(
    "--window", type=click.IntRange(min=4), help="Keys that a sliding layer keeps, self included. Default: 1024 or 96."
)
@click.option(
    "--chunk",
    "chunks",
    multiple=True,
    type=click.IntRange(min=0),
    help="Rows per prefill step, 0 = all in one call; may be repeated. Default: several.",
)
@click.option(
    "--page-size", type=click.IntRange(min=1), default=16, help="Keys per page of the cache in chunked prefill."
)
@click.option("--heads", type=click.IntRange(min=1), help="Query heads. Default: 32 or 4.")
@click.option("--kv-heads", type=click.IntRange(min=1), help="Key and value heads. Default: 16 or 2.")
@click.option("--head-dim", type=click.IntRange(min=1), help="Default: 256 or 64.")
@click.option("--seed", type=int, default=0)
@click.option("--fault", metavar="NAME", callback=_check_fault, help="Put a historical fault into the plan.")
@click.option(
    "--list-faults",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_list_faults,
    help="Say which faults there are.",
)
def niah(
    length: int | None, window: int | None, chunks: tuple[int, ...], page_size: int, heads: int | None,
    kv_heads: int | None, head_dim: int | None, seed: int, fault: str | None, device: str | None, dtype: str | None,
    backends: tuple[str, ...],
) -> None:  # fmt: skip
    """Needles in a haystack of text and images: what the mask allows must be read, what it forbids must not.

    The haystack is longer than the window. It is read in one call, and in chunks over a paged cache whose borders cross
    images, by every backend and every kind of layer. Exits with 1 if a needle is lost or a decoy is read, which is what
    each --fault must lead to.
    """
    console = open_console()
    place, number = pick_device(device, dtype)
    default = _CPU if place.type == "cpu" else _GPU
    length, window = length or default.context, window or default.window
    heads, kv_heads, head_dim = (
        heads or default.heads,
        kv_heads or default.kv_heads,
        head_dim or default.head_dim,
    )
    # A chunk as long as the context is one call, over the paged cache.
    ways = list(dict.fromkeys(min(chunk, length) for chunk in chunks or default.chunks))
    if heads % kv_heads:
        raise click.BadParameter(
            f"{kv_heads} key and value heads must divide {heads} query heads", param_hint="--kv-heads"
        )
    try:
        hay = Haystack.build(length, window, ways)
        planted = Planted(hay, heads, kv_heads, head_dim, place, number, seed)
    except ValueError as error:
        raise click.UsageError(str(error)) from error

    names = [name for name in BACKEND_NAMES if name in backends or not (backends or _too_long(name, length, place))]
    kinds = layer_kinds(window)
    click.echo(
        f"{length} tokens, {len(hay.spans)} images, window {window}, heads {heads}/{kv_heads} x {head_dim}, "
        f"{str(number).removeprefix('torch.')} on {place}, pages of {page_size}"
        + (f"\nwith the fault {fault}" if fault else "")
    )  # fmt: skip
    titles = ["one call" if way == 0 else f"chunks of {way}" for way in ways]
    table = Table("backend", "layer", *titles, title="Needles retrieved / planted, decoys kept out / planted")
    wrong: list[tuple[str, Verdict]] = []
    ran = Ran(backends)
    with progress(console, len(names) * len(kinds) * len(ways), "starting") as advance:
        for name in names:
            for layer in kinds:
                cells = []
                for way, title in zip(ways, titles):
                    advance(f"{name}, {layer.name}, {title}")
                    verdict = _prefill(planted, layer, way, page_size, name, fault, ran)
                    cells.append(f"[{'green' if verdict.right else 'red'}]{verdict}[/]")
                    if not verdict.right:
                        wrong.append((f"{name}, {layer.name}, {title}", verdict))
                if name in ran.names:
                    table.add_row(name, layer.name, *cells)
            table.add_section()
    console.print(table)
    ran.report()
    if not backends and _too_long("torch", length, place):
        click.echo(f"not run: torch: slow at more than {TORCH_LONGEST} tokens (--backend torch runs it)")
    _report(wrong, fault)
    if wrong:
        sys.exit(1)


def _report(wrong: list[tuple[str, Verdict]], fault: str | None) -> None:
    shown = 20
    lines = [
        f"{where}: {what} {line}"
        for where, verdict in wrong
        for what, listed in (("lost", verdict.lost), ("read a decoy,", verdict.found_decoys))
        for line in listed
    ]
    for line in lines[:shown]:
        click.echo(line)
    if len(lines) > shown:
        click.echo(f"and {len(lines) - shown} more")
    lost = sum(len(verdict.lost) for _, verdict in wrong)
    decoys = sum(len(verdict.found_decoys) for _, verdict in wrong)
    if wrong:
        click.echo(f"{'with the fault ' + fault + ': ' if fault else ''}{lost} needles lost, {decoys} decoys read")
    elif fault:
        click.echo(f"the fault {fault} changed nothing here")
    else:
        click.echo("every needle was retrieved and every decoy kept out")
