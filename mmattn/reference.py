"""The dense float64 oracle, straight from `Mask.visible`. Slow and plain on purpose; no kernel file imports it."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .batch import Batch
from .mask import Mask


def visible_pairs(mask: Mask, batch: Batch, b: int) -> Tensor:
    """The dense bool mask `[q_len, kv_len]` of sequence `b`. Reads the device."""
    q_len, kv_len = int(batch.q_lens()[b]), int(batch.kv_lens()[b])
    q = int(batch.q_starts()[b]) + torch.arange(q_len, device=batch.device)[:, None]
    k = int(batch.kv_starts()[b]) + torch.arange(kv_len, device=batch.device)[None, :]
    spans: list[tuple[Any, Any]] = []
    if batch.spans is not None:
        spans = [(start, end) for start, end in batch.spans[b].tolist()]
    if batch.query_spans is not None:
        row0 = int(batch.row_offsets()[b])
        mine = batch.query_spans[row0 : row0 + q_len]
        spans = [(mine[:, :1], mine[:, 1:])]
    causal = None if batch.causal is None else batch.causal[b]
    seen = mask.visible(q, k, spans=spans, causal=causal)
    if batch.kv_lo is not None:
        seen = seen & (k >= batch.kv_lo[b])
    return seen


def sequence_keys(x: Tensor, batch: Batch, b: int) -> Tensor:
    """The valid keys (or values) of sequence `b` as `[kv_len, Hkv, D]`. Reads the device."""
    kv_len = int(batch.kv_lens()[b])
    if batch.page_table is not None:
        pages = batch.page_table[b, : -(-kv_len // x.shape[1])]
        safe = pages.clamp(0, max(x.shape[0] - 1, 0))  # an entry that no row needs may hold anything
        return x[safe.long()].flatten(0, 1)[:kv_len]
    if batch.cu_seqlens_k is not None:
        return x[int(batch.cu_seqlens_k[b]) :][:kv_len]
    return (x if x.dim() == 4 else x[None])[b, :kv_len]


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | float | None = None,
    v_scale: Tensor | float | None = None,
    dtype: torch.dtype = torch.float64,
    **batch_args: Any,
) -> tuple[Tensor, Tensor]:
    """What `attention()` must return, computed densely: `(out, lse)` in `dtype`.

    Takes the arguments of `attention()`, except `out`, `return_lse`, `backend` and `num_splits`, and computes in `dtype`
    throughout (the eager computation of a lower precision is the yardstick of the error budget). Differentiable.

    `out` has q's shape with v's last dim, `lse` is `[Hq, T]` (packed) or `[B, Hq, S]`, natural log.
    """
    batch = Batch.build(q_shape=q.shape, k_shape=k.shape, device=q.device, **batch_args)
    batch.check_mask(mask)
    heads, group = q.shape[-2], q.shape[-2] // k.shape[-2]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    rows = q.reshape(-1, *q.shape[-2:])
    out = torch.zeros(rows.shape[0], heads, v.shape[-1], dtype=dtype, device=q.device)
    lse = torch.full((heads, rows.shape[0]), -math.inf, dtype=dtype, device=q.device)
    if sinks is not None:
        lse = sinks.to(dtype)[:, None].expand_as(lse).clone()
    offsets = batch.row_offsets().tolist()
    for b in range(batch.batch_size):
        mine = slice(offsets[b], offsets[b + 1])
        kb = sequence_keys(k, batch, b).to(dtype).repeat_interleave(group, dim=1)
        vb = sequence_keys(v, batch, b).to(dtype).repeat_interleave(group, dim=1)
        for x, x_scale in ((kb, k_scale), (vb, v_scale)):
            if x_scale is not None:
                x *= (
                    torch.as_tensor(x_scale, dtype=dtype, device=q.device)
                    .expand(batch.batch_size, k.shape[-2])[b]
                    .repeat_interleave(group)[:, None]
                )
        seen = visible_pairs(mask, batch, b)
        # A slot that no row sees may hold anything, NaN included.
        kb, vb = (x.masked_fill(~seen.any(0)[:, None, None], 0) for x in (kb, vb))
        scores = torch.einsum("qhd,khd->hqk", rows[mine].to(dtype), kb) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~seen, -math.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks.to(dtype)[:, None, None].expand(-1, scores.shape[1], 1)], dim=2)
        top = scores.amax(-1, keepdim=True) if scores.shape[-1] else scores.new_full((*scores.shape[:2], 1), -math.inf)
        top = top.masked_fill(top == -math.inf, 0)
        weights = torch.exp(scores - top)
        total = weights.sum(-1, keepdim=True)
        empty = total == 0
        total = total.masked_fill(empty, 1)
        share = weights / total
        out[mine] = torch.einsum("hqk,khd->qhd", share[..., : kb.shape[0]], vb)
        lse[:, mine] = (top + torch.log(total)).masked_fill(empty, -math.inf).squeeze(-1)
    if q.dim() == 4:
        return out.reshape(*q.shape[:-1], -1), lse.reshape(heads, *q.shape[:2]).transpose(0, 1)
    return out, lse
