"""Attention from row intervals with torch operators, and its gradients: any device, no custom kernel.

Every block of query rows meets only its own slice of keys, and blocks shrink until the scores of one fit
`SCORE_ELEMENTS`, so time follows the visible area and memory is bounded, backwards too: there every block is computed
again. The row table is read on the host: on a GPU that synchronises, which is why the kernels come first there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import wraps
from typing import NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from .batch import Batch, Call
from .plan import Grads, Options, Plan

P = ParamSpec("P")
R = TypeVar("R")
BLOCK_ROWS = 128
SCORE_ELEMENTS = 2**23


def why_not(call: Call) -> list[str]:
    """Every reason why this backend cannot run `call`."""
    reasons = []
    if not call.dtype.is_floating_point:
        reasons.append(f"dtype {call.dtype} is not a floating-point type")
    return reasons


def why_no_gradients(call: Call) -> list[str]:
    """Every reason why this backend has no gradients for `call`."""
    return why_not(call)


class Block(NamedTuple):
    """Rows `first..last` of the batch and the keys `lo..hi` of their sequence that they see, all half-open."""

    sequence: int
    first: int
    last: int
    lo: int
    hi: int
    offset: int
    """Where the keys of the sequence start in packed k."""


def _in_its_own_precision(run: Callable[P, R]) -> Callable[P, R]:
    """autocast changes the inputs of `attention()`, not the sums in here."""

    @wraps(run)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch.autocast(args[0].device.type, enabled=False):  # type: ignore[attr-defined]
            return run(*args, **kwargs)

    return wrapped


@_in_its_own_precision
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
    """See `dispatch.Forward`. Not to be traced for gradients: those are `backward`'s."""
    batch, sinks = plan.batch, options.sinks
    heads = q.shape[-2]
    rows = q.reshape(-1, heads, q.shape[-1])
    outs, lses, done = [], [], 0
    for block in _blocks(plan, heads):
        piece = _Scores(block, rows, k, v, plan, page_table, options)
        outs.append(piece.out().to(q.dtype))
        lses.append(piece.lse())
        done = block.last
    rest = batch.total_q - done  # rows of no sequence see nothing
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


@_in_its_own_precision
def backward(
    q: Tensor, k: Tensor, v: Tensor, plan: Plan, page_table: Tensor | None, out: Tensor, lse: Tensor, dout: Tensor,
    dlse: Tensor | None, *, options: Options,
) -> Grads:  # fmt: skip
    """See `dispatch.Backward`. The stored lse has float32's precision, so every block takes its own again from its scores.

    With p = exp(s - lse) and delta = sum(dout * out) - dlse, the gradient of a score is p * (dout . v - delta). A sink is a
    score whose value is 0.
    """
    heads = q.shape[-2]
    compute = torch.promote_types(q.dtype, torch.float32)
    rows, out, dout = (x.reshape(-1, heads, x.shape[-1]) for x in (q, out, dout))
    if dlse is not None and q.dim() == 4:
        dlse = dlse.transpose(0, 1).reshape(heads, -1)
    dq = torch.zeros_like(rows, memory_format=torch.contiguous_format)
    zeros = [None if x is None else torch.zeros_like(x, dtype=compute, memory_format=torch.contiguous_format)
             for x in (k, v, options.sinks, options.k_scale, options.v_scale)]  # fmt: skip
    dk, dv, dsinks, dk_scale, dv_scale = zeros
    assert dk is not None and dv is not None
    for block in _blocks(plan, heads):
        b, at = block.sequence, slice(block.first, block.last)
        piece = _Scores(block, rows, k, v, plan, page_table, options)
        share = dout[at].to(compute)
        delta = (share * out[at].to(compute)).sum(-1)
        if dlse is not None:
            delta = delta - dlse[:, at].to(compute).t()
        # (Rows that see nothing add nothing, whatever reaches them.)
        share, delta = (piece.by_head(x).masked_fill(piece.nothing, 0) for x in (share, delta[..., None]))
        if dsinks is not None:
            dsinks -= (piece.sink_share * delta).sum((-2, -1)).flatten()
        if dv_scale is not None:
            dv_scale[b] += (share * (piece.p @ piece.v)).sum((1, 2, 3))
        if piece.v_scale is not None:
            share = share * piece.v_scale
        _add(dv, (piece.p.mT @ share).sum(1), block, plan.batch, page_table)
        ds = piece.p * (share @ piece.v.mT - delta)
        if options.softcap is not None:
            ds = ds * (1 - (piece.capped / options.softcap).square())
        if dk_scale is not None:
            dk_scale[b] += (ds * piece.plain).sum((1, 2, 3))
        if piece.k_scale is not None:
            ds = ds * piece.k_scale
        ds = ds * options.scale
        dq[at] = (ds @ piece.k).permute(2, 0, 1, 3).reshape(dq[at].shape).to(dq.dtype)
        _add(dk, (ds.mT @ piece.q).sum(1), block, plan.batch, page_table)
    grads = [None if g is None or x is None else g.to(x.dtype)
             for g, x in zip(zeros, (k, v, options.sinks, options.k_scale, options.v_scale))]  # fmt: skip
    return Grads(dq.reshape(q.shape), *grads)  # type: ignore[arg-type]


class _Scores:
    """One block's scores and probabilities, `[Hkv, group, rows, keys]`, in float32 or the wider type of q."""

    def __init__(
        self, block: Block, rows: Tensor, k: Tensor, v: Tensor, plan: Plan, page_table: Tensor | None, options: Options
    ) -> None:
        compute = torch.promote_types(rows.dtype, torch.float32)
        self.heads_kv = k.shape[-2]
        self.q = self.by_head(rows[block.first : block.last].to(compute))
        seen = plan.rows[block.first : block.last] - block.lo
        key = torch.arange(block.hi - block.lo, device=rows.device)
        hidden = (key < seen[:, :1]) | (key >= seen[:, 1:])
        keys, values = (_slice(x, block, plan.batch, page_table).to(compute) for x in (k, v))
        # What no row sees may hold anything, and 0 * NaN is not 0.
        keys, values = (x.masked_fill(hidden.all(0)[:, None, None], 0) for x in (keys, values))
        self.k, self.v = (x.transpose(0, 1)[:, None] for x in (keys, values))
        self.k_scale, self.v_scale = (
            None if x is None else x[block.sequence].to(compute)[:, None, None, None]
            for x in (options.k_scale, options.v_scale)
        )
        self.plain = self.q @ self.k.mT * options.scale
        """Scores before `k_scale`."""
        scores = self.plain if self.k_scale is None else self.plain * self.k_scale
        if options.softcap is not None:
            scores = options.softcap * torch.tanh(scores / options.softcap)
        self.capped = scores
        scores = scores.masked_fill(hidden, -math.inf)
        empty = scores.new_full((*scores.shape[:-1], 1), -math.inf)
        top = scores.amax(-1, keepdim=True) if keys.shape[0] else empty
        if options.sinks is not None:
            sink = options.sinks.to(compute).reshape(self.heads_kv, -1, 1, 1)
            top = torch.maximum(top, sink)
        top = top.masked_fill(top == -math.inf, 0)
        weights = torch.exp(scores - top)
        total = weights.sum(-1, keepdim=True)
        if options.sinks is not None:
            share = torch.exp(sink - top)
            total = total + share
        self.nothing = total == 0
        total = total.masked_fill(self.nothing, 1)
        self.p = weights / total
        if options.sinks is not None:
            self.sink_share = share / total
        self._lse = (top + torch.log(total)).masked_fill(self.nothing, -math.inf)

    def by_head(self, x: Tensor) -> Tensor:
        """`[rows, Hq, D]` -> `[Hkv, group, rows, D]`."""
        rows, heads, d = x.shape
        return x.reshape(rows, self.heads_kv, heads // self.heads_kv, d).permute(1, 2, 0, 3)

    def out(self) -> Tensor:
        """`[rows, Hq, Dv]`."""
        out = self.p @ self.v
        if self.v_scale is not None:
            out = out * self.v_scale
        return out.permute(2, 0, 1, 3).flatten(1, 2)

    def lse(self) -> Tensor:
        """float32 `[Hq, rows]`."""
        return self._lse.flatten(0, 1)[..., 0].to(torch.float32)


def _blocks(plan: Plan, heads: int) -> Iterator[Block]:
    """The rows of all sequences in order, in blocks whose scores are few enough. Reads the device."""
    batch = plan.batch
    offsets, kv_lens = batch.row_offsets().tolist(), batch.kv_lens().tolist()
    k_offsets = None if batch.cu_seqlens_k is None else batch.cu_seqlens_k.tolist()
    intervals = plan.rows.to("cpu")
    for b in range(batch.batch_size):
        first = offsets[b]
        while first < offsets[b + 1]:
            last, lo, hi = _reach(intervals, first, offsets[b + 1], heads, kv_lens[b])
            yield Block(b, first, last, lo, hi, 0 if k_offsets is None else k_offsets[b])
            first = last


def _reach(intervals: Tensor, first: int, end: int, heads: int, kv_len: int) -> tuple[int, int, int]:
    """How far a block from row `first` reaches, and the keys `[lo, hi)` that its rows see."""
    size = BLOCK_ROWS
    while True:
        mine = intervals[first : min(first + size, end)].to(torch.int64)
        mine = mine[mine[:, 0] < mine[:, 1]]
        lo, hi = (int(mine[:, 0].min()), min(int(mine[:, 1].max()), kv_len)) if len(mine) else (0, 0)
        if size == 1 or heads * size * (hi - lo) <= SCORE_ELEMENTS:
            return min(first + size, end), lo, hi
        size //= 2


def _slots(x: Tensor, block: Block, page_table: Tensor) -> Tensor:
    """Where a block's keys lie in pages whose first two dims are flattened; reads no other entry of the table."""
    size = x.shape[1]
    at = torch.arange(block.lo, block.hi, device=x.device)
    return page_table[block.sequence, at // size].long() * size + at % size


def _slice(x: Tensor, block: Block, batch: Batch, page_table: Tensor | None) -> Tensor:
    """Keys or values of a block, `[hi - lo, Hkv, D]`; touches no other slot. A view unless paged."""
    if page_table is not None:
        slots = _slots(x, block, page_table)
        return x[slots // x.shape[1], slots % x.shape[1]]
    if batch.cu_seqlens_k is not None:
        return x[block.offset + block.lo : block.offset + block.hi]
    return (x if x.dim() == 4 else x[None])[block.sequence, block.lo : block.hi]


def _add(grad: Tensor, part: Tensor, block: Block, batch: Batch, page_table: Tensor | None) -> None:
    """Adds `[Hkv, keys, D]` to the gradient of k or v, which is contiguous."""
    part = part.transpose(0, 1)
    if page_table is not None:
        grad.flatten(0, 1).index_add_(0, _slots(grad, block, page_table), part)
    else:
        _slice(grad, block, batch, None).add_(part)
