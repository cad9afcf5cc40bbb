"""FlashAttention-4 as a peer, through its public functions: without images, with a mask_mod, split at spans."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .cases import Case, Inputs
from .peers import CannotRun, Prepared, needs_gpu, window


def _window(case: Case) -> dict[str, Any]:
    """`causal` and `window_size` of a mask without spans, in FA4's terms."""
    left, right = window(case.mask)
    return dict(causal=case.mask.causal, window_size=(left, None if case.mask.causal else right))


def _varlen_keys(inputs: Inputs, i: int) -> dict[str, Any]:
    lengths = dict(max_seqlen_q=inputs.max_seqlen_q, max_seqlen_k=inputs.max_seqlen_k, cu_seqlens_q=inputs.cu_seqlens_q)
    if inputs.page_tables:
        return dict(lengths, seqused_k=inputs.seqused_k, page_table=inputs.page_table(i))
    return dict(lengths, cu_seqlens_k=inputs.cu_seqlens_k)


def _packed(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """k and v as the varlen function takes them: packed, or pages."""
    if inputs.case.batched:
        return inputs.k.flatten(0, 1), inputs.v.flatten(0, 1)
    return inputs.k, inputs.v


def native(inputs: Inputs) -> Prepared:
    """The floor: causal and window as FA4 itself knows them, images ignored."""
    needs_gpu(inputs)
    from flash_attn.cute import flash_attn_func, flash_attn_varlen_func

    floor = inputs.case.without_spans()
    rest = dict(_window(floor), learnable_sink=inputs.sinks)
    if floor.batched:

        def call(q: Tensor, i: int) -> Tensor:
            return flash_attn_func(q, inputs.k, inputs.v, **rest)[0]
    else:

        def call(q: Tensor, i: int) -> Tensor:
            return flash_attn_varlen_func(q, inputs.k, inputs.v, **_varlen_keys(inputs, i), **rest)[0]

    return Prepared(floor, call)


def row_spans(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """Start and end of the span of every row, (-1, -1) = none."""
    start, end = (np.full(case.total_q, -1, dtype=np.int32) for _ in range(2))
    first = 0
    for s in case.sequences:
        for lo, hi in s.spans:
            mine = slice(first + max(lo - s.context, 0), first + max(min(hi + 1, s.kv_len) - s.context, 0))
            start[mine], end[mine] = lo, hi
        first += s.q_len
    return start, end


def dense_mask_mod(inputs: Inputs) -> Prepared:
    """FA4 with a dense `mask_mod`: every key of every block is looked at."""
    needs_gpu(inputs)
    from flash_attn.cute import flash_attn_varlen_func

    from .mask_mod import mask_mod

    case = inputs.case
    if not case.has_spans:
        raise CannotRun("no images in this case: serving code takes FA4 native")
    visible = mask_mod(case.mask)
    k, v = _packed(inputs)

    def build() -> list[Tensor]:
        # Serving code knows the spans on the host and uploads a table of rows, as here.
        return [torch.from_numpy(x).to(inputs.device, non_blocking=True) for x in row_spans(case)]

    aux = build()

    def call(q: Tensor, i: int) -> Tensor:
        # causal and window stay off: FA4 drops them beside a mask_mod, another distribution drops the mask_mod.
        out = flash_attn_varlen_func(
            q.reshape(-1, *q.shape[-2:]), k, v, mask_mod=visible, aux_tensors=aux, causal=False,
            learnable_sink=inputs.sinks, **_varlen_keys(inputs, i),
        )[0]  # fmt: skip
        return out.reshape(*q.shape[:-1], out.shape[-1])

    return Prepared(case, call, build)


@dataclass(frozen=True)
class Segment:
    """Rows of one sequence that a kernel without spans does in one go: causal text, or one image that sees its end."""

    sequence: int
    first: int
    count: int
    keys: int
    """The segment sees keys `0..keys-1`; its last row stands at the last of them."""
    image: bool


def segments(case: Case) -> list[Segment]:
    """Cuts every sequence at span borders into virtual sequences that share K and V. Exact, or raises `CannotRun`.

    Text rows see causally, image rows everything up to the end of their image; the left window holds on both.
    """
    mask = case.mask
    if not mask.causal or mask.chunk_size is not None:
        raise CannotRun("the split is for causal masks, with or without a window")
    parts = []
    for b, s in enumerate(case.sequences):
        at = s.context
        for start, end in sorted(s.spans):
            if end < at or start >= s.kv_len or start >= end:
                continue
            if mask.window_left is not None and not mask.mm_prefix_clamp and end - start > mask.window_left:
                raise CannotRun(f"span ({start}, {end}) is longer than the window and not clamped: no split is exact")
            start, end = max(start, at), min(end + 1, s.kv_len)
            if at < start:
                parts.append(Segment(b, at - s.context, start - at, start, False))
            parts.append(Segment(b, start - s.context, end - start, end, True))
            at = end
        if at < s.kv_len:
            parts.append(Segment(b, at - s.context, s.kv_len - at, s.kv_len, False))
    return parts


@dataclass
class Launch:
    """One varlen call over segments of one kind."""

    rows: Tensor
    """Which packed rows, in order."""
    args: dict[str, Any]
    tables: list[Tensor]
    """The page tables of the inputs, a row per segment."""

    @classmethod
    def build(cls, inputs: Inputs, parts: list[Segment], image: bool) -> Launch:
        mask, device = inputs.case.mask, inputs.device
        owners = np.array([p.sequence for p in parts])
        counts = np.array([p.count for p in parts])
        cu = np.concatenate([[0], counts.cumsum()])
        q_lens = np.array([s.q_len for s in inputs.case.sequences])
        base = np.concatenate([[0], q_lens.cumsum()])[owners] + np.array([p.first for p in parts])
        rows = np.repeat(base - cu[:-1], counts) + np.arange(cu[-1])

        def up(x: np.ndarray) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(x, dtype=np.int32)).to(device, non_blocking=True)

        args: dict[str, Any] = dict(
            cu_seqlens_q=up(cu), seqused_k=up(np.array([p.keys for p in parts])),
            max_seqlen_q=int(counts.max()), max_seqlen_k=max(p.keys for p in parts),
            causal=not image, window_size=(mask.window_left, None),
        )  # fmt: skip
        if not inputs.page_tables:
            # Segments of a sequence share its keys: only their offset is read, the length comes from seqused_k.
            kv_lens = np.array([s.kv_len for s in inputs.case.sequences])
            starts = np.concatenate([[0], kv_lens.cumsum()])[:-1][owners]
            args["cu_seqlens_k"] = up(np.concatenate([starts, [kv_lens.sum()]]))
        at = up(owners).long()
        return cls(up(rows).long(), args, [table.index_select(0, at) for table in inputs.page_tables])

    def run(self, attention: Callable, q: Tensor, k: Tensor, v: Tensor, i: int, sinks: Tensor | None) -> Tensor:
        pages = dict(page_table=self.tables[i % len(self.tables)]) if self.tables else {}
        return attention(q, k, v, learnable_sink=sinks, **pages, **self.args)[0]


def split(inputs: Inputs, *, gather: bool = True) -> Prepared:
    """The virtual-sequence split on stock FA4: one launch for text, one for images.

    With `gather` rows are gathered before and scattered after, which the public functions need. Without it the call is
    timed on rows that lie in the order of the segments already: the kernels alone, a lower bound.
    """
    needs_gpu(inputs)
    from flash_attn.cute import flash_attn_varlen_func

    case = inputs.case
    if not case.has_spans:
        raise CannotRun("no images in this case: the split is FA4 native")
    k, v = _packed(inputs)

    def build() -> list[Launch]:
        parts = segments(case)
        kinds = [[p for p in parts if p.image is image] for image in (False, True)]
        return [Launch.build(inputs, mine, image) for image, mine in zip((False, True), kinds) if mine]

    launches = build()

    def call(q: Tensor, i: int) -> Tensor:
        flat = q.reshape(-1, *q.shape[-2:])
        out = flat.new_empty(*flat.shape[:-1], v.shape[-1])
        for launch in launches:
            part = launch.run(flash_attn_varlen_func, flat.index_select(0, launch.rows), k, v, i, inputs.sinks)
            out.index_copy_(0, launch.rows, part)
        return out.reshape(*q.shape[:-1], out.shape[-1])

    if gather:
        return Prepared(case, call, build)
    ordered = [inputs.q.reshape(-1, *inputs.q.shape[-2:]).index_select(0, launch.rows) for launch in launches]

    def kernels(q: Tensor, i: int) -> Tensor:
        for launch, mine in zip(launches, ordered):
            out = launch.run(flash_attn_varlen_func, mine, k, v, i, inputs.sinks)
        return out

    return Prepared(case, call, build, timed=kernels)
