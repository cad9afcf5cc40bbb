"""Attention from row intervals with torch operators: any device, no custom kernel, differentiable.

Every block of query rows meets only its own slice of keys, and blocks shrink until the scores of one fit
`SCORE_ELEMENTS`, so time follows the visible area and memory is bounded. The tile table is read on the host: on a GPU
that synchronises, which is why the kernels come first there.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .batch import Batch, Call
from .plan import Options, Plan

BLOCK_ROWS = 128
SCORE_ELEMENTS = 2**23


def why_not(call: Call) -> list[str]:
    """Every reason why this backend cannot run `call`."""
    reasons = []
    if not call.dtype.is_floating_point:
        reasons.append(f"dtype {call.dtype} is not a floating-point type")
    if call.out and call.grad:
        reasons.append("out= does not work with inputs that require grad; use the returned tensor")
    return reasons


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: Plan,
    page_table: Tensor | None,
    *,
    options: Options,
    out: Tensor | None,
    with_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """See `dispatch.Forward`. Differentiable in q, k, v, sinks and the scales; backward recomputes the scores block by block."""
    batch, sinks = plan.batch, options.sinks
    heads = q.shape[-2]
    rows = q.reshape(-1, heads, q.shape[-1])
    outs, lses = [], []
    offsets, kv_lens = batch.row_offsets().tolist(), batch.kv_lens().tolist()
    k_offsets = None if batch.cu_seqlens_k is None else batch.cu_seqlens_k.tolist()
    intervals = plan.rows.to("cpu")
    grad = torch.is_grad_enabled() and any(
        x is not None and x.requires_grad for x in (q, k, v, sinks, options.k_scale, options.v_scale)
    )
    for b in range(batch.batch_size):
        first = offsets[b]
        while first < offsets[b + 1]:
            last, lo, hi = _block(intervals, first, offsets[b + 1], heads, kv_lens[b])
            keys, values = (
                _slice(x, batch, page_table, b, lo, hi, 0 if k_offsets is None else k_offsets[b]) for x in (k, v)
            )
            seen = plan.rows[first:last] - lo
            k_scale, v_scale = (None if x is None else x[b] for x in (options.k_scale, options.v_scale))
            attend = partial(_attend, scale=options.scale, softcap=options.softcap)
            if grad:
                attend = partial(checkpoint, attend, use_reentrant=False)
            piece = attend(rows[first:last], keys, values, seen, sinks, k_scale, v_scale)
            outs.append(piece[0])
            lses.append(piece[1])
            first = last
    rest = batch.total_q - (offsets[-1] if batch.batch_size else 0)  # rows of no sequence see nothing
    if rest or not outs:
        nothing = torch.full((heads, rest), -math.inf, dtype=torch.float32, device=q.device)
        outs.append(torch.zeros(rest, heads, v.shape[-1], dtype=q.dtype, device=q.device))
        lses.append(nothing if sinks is None else sinks.float()[:, None].expand_as(nothing))
    result = torch.cat(outs).reshape(*q.shape[:-1], v.shape[-1])
    if out is not None:
        result = out.copy_(result)
    if not with_lse:
        return result, None
    lse = torch.cat(lses, dim=1)
    return result, lse if q.dim() == 3 else lse.reshape(heads, *q.shape[:2]).transpose(0, 1).contiguous()


def _block(intervals: Tensor, first: int, end: int, heads: int, kv_len: int) -> tuple[int, int, int]:
    """How far a block from row `first` reaches, and the keys `[lo, hi)` that its rows see."""
    size = BLOCK_ROWS
    while True:
        mine = intervals[first : min(first + size, end)].to(torch.int64)
        mine = mine[mine[:, 0] < mine[:, 1]]
        lo, hi = (int(mine[:, 0].min()), min(int(mine[:, 1].max()), kv_len)) if len(mine) else (0, 0)
        if size == 1 or heads * size * (hi - lo) <= SCORE_ELEMENTS:
            return min(first + size, end), lo, hi
        size //= 2


def _slice(x: Tensor, batch: Batch, page_table: Tensor | None, b: int, lo: int, hi: int, offset: int) -> Tensor:
    """Keys or values `[lo, hi)` of sequence `b`, as `[hi - lo, Hkv, D]`; touches no other slot."""
    if page_table is not None:
        size = x.shape[1]
        first = lo // size
        pages = x[page_table[b, first : -(-hi // size)].long()] if lo < hi else x[:0]
        return pages.flatten(0, 1)[lo - first * size : hi - first * size]
    if batch.cu_seqlens_k is not None:
        return x[offset + lo : offset + hi]
    return (x if x.dim() == 4 else x[None])[b, lo:hi]


def _attend(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, sinks: Tensor | None, k_scale: Tensor | None, v_scale: Tensor | None,
    *, scale: float, softcap: float | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """One block: `[m, Hq, D]` rows over `[n, Hkv, D]` keys; row i sees keys `seen[i, 0] <= j < seen[i, 1]`."""
    (m, heads, _), heads_kv = q.shape, k.shape[1]
    compute = torch.promote_types(q.dtype, torch.float32)
    qs = q.to(compute).reshape(m, heads_kv, heads // heads_kv, -1).permute(1, 2, 0, 3)
    scores = qs @ k.to(compute).permute(1, 2, 0)[:, None] * scale
    if k_scale is not None:
        scores = scores * k_scale.to(compute)[:, None, None, None]
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    key = torch.arange(k.shape[0], device=q.device)
    scores = scores.masked_fill((key < seen[:, :1]) | (key >= seen[:, 1:]), -math.inf)
    # The maximum only steadies the exponentials and drops out of the result: no gradient flows through it.
    top = scores.detach().amax(-1, keepdim=True) if k.shape[0] else scores.new_full((*scores.shape[:-1], 1), -math.inf)
    if sinks is not None:
        sink = sinks.to(compute).reshape(heads_kv, -1, 1, 1)
        top = torch.maximum(top, sink.detach())
    top = top.masked_fill(top == -math.inf, 0)
    weights = torch.exp(scores - top)
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sink - top)
    empty = total == 0
    total = total.masked_fill(empty, 1)
    out = weights @ v.to(compute).permute(1, 0, 2)[:, None] / total
    if v_scale is not None:
        out = out * v_scale.to(compute)[:, None, None, None]
    lse = (top + torch.log(total)).masked_fill(empty, -math.inf).to(torch.float32).reshape(heads, m)
    return out.permute(2, 0, 1, 3).reshape(m, heads, -1).to(q.dtype), lse
