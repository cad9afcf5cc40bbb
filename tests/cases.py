"""Named cases: what a call of `attention()` can look like, built with hostile memory around everything it may read.

Every tensor is a view whose neighbours are NaN (or wild integers): rows have stride `D + 8`, key slots past the valid
ones, pages that no row needs, rows past `cu_seqlens_q[-1]` and table entries behind the last page hold garbage.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from mmattn import Mask
from mmattn.batch import Batch
from mmattn.reference import visible_pairs

WILD = 2**31 - 1
NEIGHBOUR = 8
"""Elements of NaN after every row of q, k and v."""

LENS = ((37, 37), (5, 61), (1, 29), (0, 6), (9, 4), (3, 0))
"""(rows, keys) of each sequence: self, a later chunk, decode, no rows, more rows than keys, no keys."""
LARGE = ((1, 1), (31, 31), (129, 300), (300, 300), (1000, 1000), (17, 1000), (0, 64), (64, 2100), (40, 9), (5, 0))

SMALL = (32, 32)
"""The head dims of a case that does not say."""


@dataclass(frozen=True)
class Case:
    name: str
    mask: Mask = field(default_factory=Mask)
    lens: tuple[tuple[int, int], ...] = LENS
    layout: str = "packed"
    """packed, padded (packed rows, [B, Sk] keys), paged (packed rows), batched, strided ([B, H, S, D] memory),
    batched_padded, batched_paged. Layouts with batched rows give every sequence the rows and keys of the first."""
    heads: tuple[int, int] = (4, 2)
    dims: tuple[int, int] = SMALL
    dtype: torch.dtype = torch.float16
    page: int = 16
    spans: str | None = None
    span_form: str = "lists"
    positions: str | None = None
    causal_flags: bool = False
    softcap: float | None = None
    sinks: str | None = None
    scale: float | None = None
    rows_past_end: int = 0
    neighbour: int = NEIGHBOUR

    def grown(self) -> Case:
        """The same case at the sizes of a GPU run: longer sequences, a window of some hundred keys."""
        mask = self.mask
        changes: dict[str, Any] = {
            name: value * 24 + 3
            for name in ("window_left", "window_right", "chunk_size")
            if (value := getattr(mask, name))
        }
        lens = LARGE if not self.layout.startswith(("batched", "strided")) else ((300, 777),) * 3
        return replace(self, name=self.name + "-large", mask=replace(mask, **changes), lens=lens)


@dataclass
class Inputs:
    q: Tensor
    k: Tensor
    v: Tensor
    mask: Mask
    batch: dict[str, Any]
    extras: dict[str, Any]

    @property
    def args(self) -> dict[str, Any]:
        return {**self.batch, **self.extras}


def make_spans(style: str, first: int, length: int) -> list[tuple[int, int]]:
    """Spans over keys `first..first+length-1`, ascending; of a short sequence, one over all of it."""
    if length < 24:
        return [(first, first + length - 1)] if length > 1 else []
    a, b, c = first + length // 6, first + length // 3, first + 2 * length // 3
    styles = {
        "short": [(a, a + 3), (b, b + length // 8), (c, c + 2)],
        "long": [(a, c + length // 8)],  # longer than the window of any case
        "touching": [(a, b), (b + 1, c), (c + 1, c + 1 + length // 8)],
        "one_token": [(a, a), (b, b), (c, c)],
        "prefix": [(first, b)],
        "past_end": [(a, a + 2), (c, first + length + 50)],
        "many": [(p, p + 2) for p in range(first + 1, first + length - 2, 4)],
        "padding": [(a, a + 3), (c, c + 3)],  # the tensor form adds no-op entries around them
    }
    return styles[style]


def neighboured(shape: tuple[int, ...], case: Case, device: torch.device) -> Tensor:
    """Uninitialised rows with NaN between them."""
    wide = torch.full((*shape[:-1], shape[-1] + case.neighbour), float("nan"), dtype=case.dtype, device=device)
    return wide[..., : shape[-1]]


def guarded(values: list[int], device: torch.device) -> Tensor:
    """An int32 vector with wild values before and after it in memory."""
    around = torch.tensor([WILD, -WILD, *values, WILD, -WILD, WILD], dtype=torch.int32)
    return around.to(device)[2 : 2 + len(values)]


def build(case: Case, device: torch.device) -> Inputs:
    """The tensors of a case; the same for every backend."""
    random = torch.Generator().manual_seed(zlib.crc32(case.name.encode()))

    def fill(x: Tensor) -> None:
        x.copy_(torch.randn(x.shape, generator=random, dtype=torch.float32).to(x.dtype))

    def integers(n: int) -> list[int]:
        return torch.randperm(n, generator=random).tolist()

    heads_q, heads_kv = case.heads
    d, dv = case.dims
    batched_q = case.layout.startswith(("batched", "strided"))
    lens = [case.lens[0]] * min(3, len(case.lens)) if batched_q else list(case.lens)
    if case.layout in ("batched_padded", "batched_paged"):
        lens = [(q_len, max(0, kv_len - 7 * b)) for b, (q_len, kv_len) in enumerate(lens)]
    q_lens, kv_lens = [n for n, _ in lens], [n for _, n in lens]
    b = len(lens)
    args: dict[str, Any] = {}

    # Rows.
    total = sum(q_lens) + case.rows_past_end
    if batched_q:
        shape: tuple[int, ...] = (b, q_lens[0], heads_q, d)
        if case.layout == "strided":
            q = neighboured((b, heads_q, q_lens[0], d), case, device).transpose(1, 2)
        else:
            q = neighboured(shape, case, device)
        fill(q)
    else:
        q = neighboured((total, heads_q, d), case, device)
        fill(q[: sum(q_lens)])
        args["cu_seqlens_q"] = guarded([sum(q_lens[:i]) for i in range(b + 1)], device)

    # Absolute positions.
    kv_start, q_start = [0] * b, [kv_lens[i] - q_lens[i] for i in range(b)]
    if case.positions is not None:
        kv_start = [1000 * i + 17 for i in range(b)]
        args["kv_start"] = guarded(kv_start, device)
        q_start = [kv_start[i] + kv_lens[i] - q_lens[i] for i in range(b)]
    if case.positions == "q_start":  # rows that stand before the end of the keys
        q_start = [max(x - 4, 0) for x in q_start]
        args["q_start"] = guarded(q_start, device)
    if case.positions == "kv_lo":
        args["kv_lo"] = guarded([start + 2 + 3 * i for i, start in enumerate(kv_start)], device)
    if case.causal_flags:
        args["causal"] = guarded([2 * (i % 2) for i in range(b)], device)  # any non-zero value means causal

    # Spans.
    if case.spans is not None:
        spans = [make_spans(case.spans, kv_start[i], kv_lens[i]) for i in range(b)]
        if case.span_form == "lists":
            args["mm_prefix_range"] = spans
        elif case.span_form == "tensor":
            width = max(map(len, spans)) + 3
            padded = []
            for mine in spans:
                filler = [((-1, -1), (0, 0), (9, 3))[i % 3] for i in range(width - len(mine))]
                every = mine + filler
                padded.append([every[i] for i in integers(width)])
            args["mm_prefix_range"] = torch.tensor(padded, dtype=torch.int32).to(device)
        else:
            per_row = []
            for i in range(b):
                for row in range(q_start[i], q_start[i] + q_lens[i]):
                    per_row.append(next((s for s in spans[i] if s[0] <= row <= s[1]), (-1, -1)))
            per_row += [(0, WILD - 1)] * (0 if batched_q else case.rows_past_end)
            args["mm_prefix_query_range"] = torch.tensor(per_row, dtype=torch.int32).reshape(-1, 2).to(device)

    # Keys.
    widest = max(kv_lens, default=0)
    k = v = q
    if case.layout in ("batched", "strided"):
        if case.layout == "strided":
            k, v = (neighboured((b, heads_kv, widest, n), case, device).transpose(1, 2) for n in (d, dv))
        else:
            k, v = (neighboured((b, widest, heads_kv, n), case, device) for n in (d, dv))
        fill(k)
        fill(v)
    elif case.layout in ("padded", "batched_padded"):
        k, v = (neighboured((b, widest + 5, heads_kv, n), case, device) for n in (d, dv))
        for i in range(b):
            fill(k[i, : kv_lens[i]])
            fill(v[i, : kv_lens[i]])
        args["seqused_k"] = guarded(kv_lens, device)
    elif case.layout == "packed":
        k, v = (neighboured((sum(kv_lens) + 5 * any(kv_lens), heads_kv, n), case, device) for n in (d, dv))
        fill(k[: sum(kv_lens)])
        fill(v[: sum(kv_lens)])
        args["cu_seqlens_k"] = guarded([sum(kv_lens[:i]) for i in range(b + 1)], device)
    else:
        args["seqused_k"] = guarded(kv_lens, device)
        k, v, args["page_table"] = _pages(case, q, kv_lens, args, fill, integers)

    extras: dict[str, Any] = {}
    if case.softcap is not None:
        extras["softcap"] = case.softcap
    if case.scale is not None:
        extras["scale"] = case.scale
    if case.sinks is not None:
        sinks = torch.randn(heads_q, generator=random)
        if case.sinks == "some -inf":
            sinks[::2] = -float("inf")
        extras["sinks"] = sinks.to(device)
    return Inputs(q, k, v, case.mask, args, extras)


def _pages(
    case: Case, q: Tensor, kv_lens: list[int], args: dict[str, Any], fill: Any, integers: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Pages in random order. Slots past the keys, pages that no row needs and spare pages are NaN; table entries that
    no row needs are wild."""
    size, device = case.page, q.device
    counts = [-(-n // size) for n in kv_lens]
    pool = integers(sum(counts) + 3)
    width = max(counts, default=0) + 2
    pages = [neighboured((len(pool), size, case.heads[1], n), case, device) for n in case.dims]
    table = [[(WILD, -WILD, -1)[(i + j) % 3] for j in range(width)] for i in range(len(kv_lens))]
    # Only sizes matter for the sight of a row, so a table of the right width stands in for the real one.
    stand_in = torch.zeros(len(kv_lens), width, dtype=torch.int32, device=device)
    sight = Batch.build(q_shape=q.shape, k_shape=pages[0].shape, device=device, page_table=stand_in, **args)
    for i, n in enumerate(kv_lens):
        seen = visible_pairs(case.mask, sight, i).any(0).tolist()
        for j in range(counts[i]):
            page = pool.pop()
            if any(seen[j * size : (j + 1) * size]):
                table[i][j] = page
                for x in pages:
                    fill(x[page, : min(size, n - j * size)])
    return pages[0], pages[1], torch.tensor(table, dtype=torch.int32).reshape(len(kv_lens), width).to(device)


FEATURES: dict[str, dict[str, Any]] = {
    "causal": dict(mask=Mask()),
    "full": dict(mask=Mask.full()),
    "window": dict(mask=Mask.sliding_window(8)),
    "window-self": dict(mask=Mask.sliding_window(1)),
    "symmetric": dict(mask=Mask.sliding_window(8, causal=False)),
    "left-only": dict(mask=Mask.sliding_window(8, causal=False, symmetrize=False)),
    "window-right": dict(mask=Mask(causal=False, window_right=5)),
    "window-both": dict(mask=Mask(causal=False, window_left=0, window_right=6)),
    "chunked": dict(mask=Mask.chunked(8)),
    "chunked-lookback": dict(mask=Mask.chunked(5, 2)),
    "chunked-full": dict(mask=Mask.chunked(7, 1, causal=False)),
    "chunked-spans": dict(mask=Mask.chunked(8), spans="short"),
    "spans": dict(mask=Mask(), spans="short"),
    "spans-window": dict(mask=Mask.sliding_window(8), spans="short"),
    "spans-window-long": dict(mask=Mask.sliding_window(8), spans="long"),
    "spans-clamped": dict(mask=Mask.sliding_window(8, mm_prefix_clamp=True), spans="long"),
    "spans-symmetric": dict(mask=Mask.sliding_window(8, causal=False), spans="long"),
    "spans-symmetric-clamped": dict(mask=Mask.sliding_window(8, causal=False, mm_prefix_clamp=True), spans="long"),
    "spans-by-row": dict(mask=Mask.sliding_window(8, mm_prefix_clamp=True), spans="long", span_form="rows"),
    "mixed-causality": dict(mask=Mask.sliding_window(8, mm_prefix_clamp=True), spans="short", causal_flags=True),
}  # fmt: skip
LAYOUTS = ("packed", "padded", "paged", "batched", "strided", "batched_padded", "batched_paged")
KEY_FEATURES = ("full", "window", "symmetric", "chunked-lookback", "spans-clamped", "mixed-causality")
"""The features that meet every layout."""
SHORT = ((19, 19), (4, 45), (1, 31))
GEMMA: dict[str, Any] = dict(mask=Mask.sliding_window(8, mm_prefix_clamp=True), spans="long", lens=SHORT)


def _cases() -> list[Case]:
    cases = [
        Case(f"{layout}-{name}", layout=layout, **feature)
        for layout in LAYOUTS
        for name, feature in FEATURES.items()
        if layout in ("packed", "paged") or name in KEY_FEATURES
    ]
    # Spans, in every form.
    for style in ("touching", "one_token", "prefix", "past_end", "many", "padding"):
        for form in ("lists", "tensor", "rows"):
            cases.append(Case(f"spans-{style}-{form}", mask=Mask.sliding_window(8), spans=style, span_form=form))
    # Absolute positions, and rows that belong to no sequence.
    for positions in ("kv_start", "q_start", "kv_lo"):
        for layout in ("packed", "paged", "batched_padded"):
            cases.append(Case(f"{positions}-{layout}", positions=positions, layout=layout, **FEATURES["spans-clamped"]))
        cases.append(Case(f"{positions}-chunked", positions=positions, mask=Mask.chunked(8)))
        cases.append(Case(f"{positions}-symmetric", positions=positions, **FEATURES["symmetric"]))
        cases.append(Case(f"{positions}-by-row", positions=positions, **FEATURES["spans-by-row"]))
    for layout in ("packed", "padded", "paged"):
        cases.append(Case(f"rows-past-end-{layout}", layout=layout, rows_past_end=70, **FEATURES["spans"]))
    cases.append(Case("rows-past-end-by-row", rows_past_end=3, **FEATURES["spans-by-row"]))
    cases.append(Case("rows-past-end-sinks", rows_past_end=3, sinks="finite"))
    # Head dims, heads, dtypes, page sizes.
    for dims in (16, 64, 72, 80, 96, 128, 160, 192, 256, 512, (192, 128), (64, 128), (40, 24)):
        pair = dims if isinstance(dims, tuple) else (dims, dims)
        for layout in ("packed", "paged"):
            cases.append(Case(f"dims-{pair[0]}-{pair[1]}-{layout}", dims=pair, layout=layout, **GEMMA))
    for dims in (64, 128, 256):
        cases.append(Case(f"dims-{dims}-tight-batched", dims=(dims, dims), neighbour=0, layout="batched", **GEMMA))
        cases.append(Case(f"dims-{dims}-strided", dims=(dims, dims), layout="strided", **GEMMA))
        cases.append(Case(f"dims-{dims}-tight-packed", dims=(dims, dims), neighbour=0, heads=(6, 3), **GEMMA))
    for group in (1, 3, 5, 8, 12):
        cases.append(Case(f"group-{group}", heads=(2 * group, 2), **GEMMA))
        cases.append(Case(f"group-{group}-paged-full", heads=(group, 1), layout="paged", mask=Mask.full()))
    for dtype in (torch.bfloat16, torch.float32):
        name = str(dtype).removeprefix("torch.")
        for layout in ("packed", "paged", "strided"):
            for feature in ("full", "spans-clamped"):
                cases.append(Case(f"{name}-{layout}-{feature}", dtype=dtype, layout=layout, **FEATURES[feature]))
        for d in (72, 128, 256, 512):
            cases.append(Case(f"{name}-dims-{d}", dtype=dtype, dims=(d, d), **GEMMA))
    for page in (1, 16, 48, 64, 128, 256):
        for feature in ("causal", "spans-clamped"):
            cases.append(Case(f"page-{page}-{feature}", layout="paged", page=page, dims=(64, 64),
                              lens=((9, 300), (1, 65), (40, 64)), **FEATURES[feature]))  # fmt: skip
    # Softcap, sinks, scale.
    for layout in ("packed", "paged"):
        cases.append(Case(f"softcap-{layout}", layout=layout, softcap=2.0, **FEATURES["spans-window"]))
        cases.append(Case(f"sinks-{layout}", layout=layout, sinks="finite", **FEATURES["spans-window"]))
        cases.append(Case(f"sinks-none-{layout}", layout=layout, sinks="some -inf", **FEATURES["window"]))
        cases.append(Case(f"softcap-sinks-{layout}", layout=layout, softcap=3.0, sinks="finite", scale=0.5,
                          **FEATURES["spans-clamped"]))  # fmt: skip
    cases.append(Case("scale-zero", scale=0.0, **FEATURES["window"]))
    cases.append(Case("scale-large", scale=3.0))
    # Nothing to do.
    cases.append(Case("no-rows", lens=((0, 5), (0, 0))))
    cases.append(Case("no-keys", lens=((3, 0), (1, 0)), layout="padded", sinks="finite"))
    cases.append(Case("no-keys-rows-past-end", lens=((3, 0), (1, 0)), rows_past_end=3, sinks="finite"))
    cases.append(Case("no-keys-paged", lens=((3, 0), (1, 0)), layout="paged"))
    cases.append(Case("more-rows-than-keys", lens=((70, 20), (33, 1)), **FEATURES["window-both"]))
    # Paged keys at a head dim that every kernel takes.
    paged = ("paged", "batched_paged")
    return [replace(c, dims=(64, 64)) if c.layout in paged and c.dims == SMALL else c for c in cases]


CASES = _cases()
BY_NAME = {case.name: case for case in CASES}
assert len(BY_NAME) == len(CASES)
