"""Mask faults that shipped in public software, to be put into a plan on purpose.

A test suite that cannot tell a faulty plan from a right one proves nothing; `inject` gives it the faulty ones. Each fault
is written from the description in its report and shares no code with the lowering. It lives in the plan's row intervals,
so `attention(q, k, v, inject(plan, name))` shows it on every backend.

>>> import mmattn
>>> plan = mmattn.plan(mmattn.Mask.sliding_window(3), max_seqlen_q=6, max_seqlen_k=6)
>>> plan.rows[5].tolist(), inject(plan, "window-off-by-one").rows[5].tolist()
([3, 6], [2, 6])
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .batch import Batch
from .mask import Mask
from .plan import Plan

FAR = 2**40
"""A position that no row or key reaches."""
LOOP_ROWS = 16
"""Rows of a tile in "causal-end": few, so that short sequences show the fault too."""


@dataclass(frozen=True)
class _Rows:
    """The rows of a batch as columns `[total_q]`, int64 or bool. Positions are absolute."""

    mask: Mask
    q: Tensor
    local: Tensor
    """Index of the row in its sequence."""
    causal: Tensor
    in_span: Tensor
    start: Tensor
    end: Tensor
    """The span that holds the row, where `in_span`."""
    first_start: Tensor
    last_end: Tensor
    """The outermost ends of all spans of the row's sequence."""
    spans_in_call: bool

    def interval(
        self, *, q: Tensor | None = None, left: int | None = None, right: Tensor | None = None,
        start: Tensor | None = None, end: Tensor | None = None, clamp: bool | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Inclusive `(lo, hi)` of every row by the rules of the mask, with any of their inputs replaced."""
        mask = self.mask
        q = self.q if q is None else q
        left = (FAR if mask.window_left is None else mask.window_left) if left is None else left
        if right is None:
            ahead = mask.window_right
            if ahead is None:
                ahead = mask.window_left if mask.symmetrize and mask.window_left is not None else FAR
            right = torch.where(self.causal, 0, ahead)
        lo, hi = q - left, q + right
        if mask.chunk_size is not None:
            chunk = torch.div(q, mask.chunk_size, rounding_mode="floor")
            lo = torch.maximum(lo, (chunk - mask.chunk_lookback) * mask.chunk_size)
            hi = torch.minimum(hi, (chunk + 1) * mask.chunk_size - 1)
        start, end = self.start if start is None else start, self.end if end is None else end
        holds = self.in_span & (start <= q) & (q <= end)
        if not (mask.mm_prefix_clamp if clamp is None else clamp):
            lo = torch.where(holds, torch.minimum(lo, start), lo)
        return lo, torch.where(holds, torch.maximum(hi, end), hi)


def _window_dropped(rows: _Rows) -> tuple[Tensor, Tensor]:
    # The kernel gave its own window up as soon as it was handed a mask function, and that one had no window.
    return rows.interval(left=FAR, clamp=False) if rows.spans_in_call else rows.interval()


def _chunk_local_q(rows: _Rows) -> tuple[Tensor, Tensor]:
    return rows.interval(q=rows.local)


def _missing_clamp(rows: _Rows) -> tuple[Tensor, Tensor]:
    return rows.interval(clamp=False)


def _two_sided_clamp(rows: _Rows) -> tuple[Tensor, Tensor]:
    lo, hi = rows.interval()
    if rows.mask.mm_prefix_clamp and rows.mask.window_left is not None:
        hi = torch.minimum(hi, rows.q + rows.mask.window_left)
    return lo, hi


def _left_only_window(rows: _Rows) -> tuple[Tensor, Tensor]:
    if rows.mask.window_left is None:
        return rows.interval()
    return rows.interval(right=torch.zeros_like(rows.q))


def _causal_end(rows: _Rows) -> tuple[Tensor, Tensor]:
    lo, hi = rows.interval()
    last_of_tile = rows.q - rows.local % LOOP_ROWS + LOOP_ROWS - 1
    return lo, torch.where(rows.causal, torch.minimum(hi, last_of_tile), hi)


def _window_off_by_one(rows: _Rows) -> tuple[Tensor, Tensor]:
    # The number of keys was passed where the distance to the last one belongs.
    if rows.mask.window_left is None:
        return rows.interval()
    return rows.interval(left=rows.mask.window_left + 1)


def _spans_merged(rows: _Rows) -> tuple[Tensor, Tensor]:
    return rows.interval(start=rows.first_start, end=rows.last_end)


@dataclass(frozen=True)
class Fault:
    """One historical mask fault."""

    name: str
    description: str
    """What goes wrong, in one line."""
    source: str
    """The public report."""
    intervals: Callable[[_Rows], tuple[Tensor, Tensor]]
    """Inclusive absolute `(lo, hi)` of every row under the fault."""


FAULTS: dict[str, Fault] = {
    fault.name: fault
    for fault in (
        Fault("window-dropped", "the window is gone from every row as soon as a span is in the call",
              "vllm-project/vllm #47300, #47332", _window_dropped),
        Fault("chunk-local-q", "row positions start at 0 in every chunk while key positions are absolute",
              "vllm-project/vllm #47332", _chunk_local_q),
        Fault("missing-clamp", "a span reaches back past the window although the mask clamps it",
              "huggingface/transformers #46850, vllm-project/vllm #47217", _missing_clamp),
        Fault("two-sided-clamp", "the window cuts the later keys of a span as well as the earlier ones",
              "vllm-project/vllm #47217, against google-deepmind/gemma gm/nn/gemma4/_modules.py", _two_sided_clamp),
        Fault("left-only-window", "a window on rows that are not causal keeps only its left half",
              "sgl-project/sglang #39300, flashinfer-ai/flashinfer #4893", _left_only_window),
        Fault("causal-end", f"the key loop of a tile of {LOOP_ROWS} rows stops where a causal mask would end",
              "vllm-project/flash-attention #155, vllm-project/vllm #50294", _causal_end),
        Fault("window-off-by-one", "the window keeps one key too many",
              "huggingface/transformers #39408, #40163", _window_off_by_one),
        Fault("spans-merged", "a row in a span sees all keys from the first span of its sequence to the last",
              "huggingface/transformers #38080, NVIDIA/TensorRT-LLM #5976", _spans_merged),
    )
}  # fmt: skip
"""Name -> fault, in the order of the design's list."""


def inject(plan: Plan, name: str) -> Plan:
    """A copy of `plan` whose row intervals (and with them its tiles) have the fault `name`.

    The result equals the plan where the fault cannot show: no span, no window, no clamp, rows at position 0.
    Raises `ValueError` for an unknown name. For tests and demonstrations: reads device memory.
    """
    if name not in FAULTS:
        raise ValueError(f"fault must be one of {', '.join(FAULTS)}, got {name!r}")
    batch = plan.batch
    if batch.total_q == 0 or batch.batch_size == 0:
        return plan.with_rows(plan.rows)
    offsets = batch.row_offsets()
    row = torch.arange(batch.total_q, device=batch.device)
    owned = (row[:, None] >= offsets[:-1]) & (row[:, None] < offsets[1:])  # [total_q, batch_size]
    seq = owned.to(torch.int8).argmax(1)
    lo, hi = FAULTS[name].intervals(_rows(plan.mask, batch, seq, row - offsets[seq]))
    kv_start = batch.kv_starts()[seq]
    lo = torch.maximum(lo, batch.first_keys()[seq]) - kv_start
    hi = torch.minimum(hi + 1 - kv_start, batch.kv_lens()[seq])
    nothing = ~owned.any(1) | (lo >= hi)
    return plan.with_rows(torch.stack([lo.masked_fill(nothing, 0), hi.masked_fill(nothing, 0)], dim=1).to(torch.int32))


def _rows(mask: Mask, batch: Batch, seq: Tensor, local: Tensor) -> _Rows:
    q = batch.q_starts()[seq] + local
    causal = torch.full_like(q, mask.causal) if batch.causal is None else batch.causal[seq]
    none = torch.full_like(q, -1)
    start = end = first_start = last_end = none
    if batch.spans is not None:
        starts, ends = batch.spans.to(torch.int64).unbind(-1)  # [batch_size, R]
        valid = starts < ends
        first_start = starts.masked_fill(~valid, FAR).amin(1)[seq]
        last_end = ends.masked_fill(~valid, -1).amax(1)[seq]
        holds = valid[seq] & (starts[seq] <= q[:, None]) & (q[:, None] <= ends[seq])
        start = starts[seq].masked_fill(~holds, -1).amax(1)
        end = ends[seq].masked_fill(~holds, -1).amax(1)
    elif batch.query_spans is not None:
        start, end = batch.query_spans.to(torch.int64).unbind(-1)
        valid = start < end
        same = seq[:, None] == torch.arange(batch.batch_size, device=seq.device)  # [total_q, batch_size]
        first_start = start[:, None].masked_fill(~(same & valid[:, None]), FAR).amin(0)[seq]
        last_end = end[:, None].masked_fill(~(same & valid[:, None]), -1).amax(0)[seq]
    in_span = (start < end) & (start <= q) & (q <= end)
    return _Rows(
        mask=mask, q=q, local=local, causal=causal != 0, in_span=in_span, start=start, end=end,
        first_start=first_start, last_end=last_end, spans_in_call=bool((last_end > 0).any()),
    )  # fmt: skip
