"""One step of a serving engine: the requests it runs, where they stand, which pages hold their keys, and their spans.

An engine keeps its layers in groups that share pages. A group has one `Step`, and the layers that see the same share one
plan of it, so that a layer only launches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..attention import plan
from ..mask import Mask
from ..plan import Plan


class SplitSpanError(RuntimeError):
    """A step ends within a span: its rows would need keys that do not exist yet."""


def layer_mask(*, sliding_window: int | None = None, causal: bool = True, clamp: bool = False) -> Mask:
    """The mask of a layer whose window counts keys, self included, as in vLLM and transformers (None: no window).

    Rows that are not causal see the window on both sides. `clamp` keeps the window also within a span (Gemma 4).
    """
    if sliding_window is None:
        return Mask(causal=causal)
    return Mask.sliding_window(sliding_window, causal=causal, mm_prefix_clamp=clamp)


def fill_row_spans(
    out: Tensor,
    spans: Mapping[int, Sequence[tuple[int, int]]],
    row_offsets: Sequence[int],
    kv_lens: Sequence[int],
) -> bool:
    """Writes the span of every row of a step.

    Args:
        out: int32 `[T, 2]` on the host, at least `row_offsets[-1]` rows; all of it is written, `(-1, -1)` where there is none.
        spans: request -> inclusive absolute `(start, end)`, not overlapping; only `start < end` counts.
        row_offsets: first row of every request, and the end of the last one.
        kv_lens: keys of every request with this step's own; its rows are the last of them. May be too large where no row
            lies in a span (drafts that may yet be rejected).

    Returns:
        Whether any row lies in a span.

    Raises:
        SplitSpanError: names the request and the span that its last row leaves unfinished.
    """
    out.fill_(-1)
    found = False
    for request, ranges in spans.items():
        row0, end = row_offsets[request], row_offsets[request + 1]
        if end <= row0:
            continue
        q0, q1 = kv_lens[request] - (end - row0), kv_lens[request] - 1
        for s, e in ranges:
            if s >= e or e < q0 or s > q1:
                continue
            if e > q1:
                raise SplitSpanError(
                    f"request {request} runs positions {q0}..{q1} in this step, which ends within the span ({s}, {e}): its "
                    "rows see keys that are not computed yet. A span must be scheduled to its end in one step: let a step "
                    "hold more tokens, or turn prefix caching off"
                )
            out[row0 + max(s - q0, 0) : row0 + e - q0 + 1] = torch.tensor([s, e], dtype=out.dtype)
            found = True
    return found


def capturing(device: torch.device) -> bool:
    """Whether a CUDA graph records what is launched."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


@dataclass(eq=False)
class Step:
    """The batch of one group of layers in one step. Tensors are int32 on the device; see `mmattn.attention`."""

    cu_seqlens_q: Tensor
    total_q: int
    """Rows of q; those past `cu_seqlens_q[-1]` belong to no request."""
    max_seqlen_q: int
    max_seqlen_k: int
    seqused_k: Tensor | None = None
    """With `page_table`; else `cu_seqlens_k`."""
    page_table: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    causal: Tensor | None = None
    row_spans: Tensor | None = None
    """`[total_q, 2]`, the span of every row."""
    _plans: dict[Any, Plan] = field(init=False, repr=False, default_factory=dict)

    def plan(self, mask: Mask, *, spans: bool = True) -> Plan:
        """The plan of all layers with this mask; `spans=False` for layers that have none.

        Made at the first request. While a CUDA graph records, a plan from before is made anew: a replay must compute it
        from the lengths and spans that then stand in the tensors.
        """
        spans = spans and self.row_spans is not None
        key = (mask, spans, capturing(self.cu_seqlens_q.device))
        known = self._plans.get(key)
        if known is None:
            known = self._plans[key] = plan(
                mask, total_q=self.total_q, device=self.cu_seqlens_q.device, cu_seqlens_q=self.cu_seqlens_q,
                cu_seqlens_k=self.cu_seqlens_k, seqused_k=self.seqused_k, page_table=self.page_table, causal=self.causal,
                mm_prefix_query_range=self.row_spans if spans else None,
                max_seqlen_q=self.max_seqlen_q, max_seqlen_k=self.max_seqlen_k,
            )  # fmt: skip
        return known
