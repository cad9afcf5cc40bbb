"""FlashAttention-4 through its own interface: a mask function, and block lists made from the plan's rows.

For SM100 and SM110, and for SM90 under another release than the one that `sm90` overrides.

FlashAttention-4 gets to see fixed-length sequences only, without lengths. Packed rows or keys become one sequence:
a row sees one interval of the concatenated keys, wherever its own sequence lies. So the mask function has nothing to
do but compare a key with the limits of its row, is the same for every batch, and no batch compiles anything anew.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

import cutlass
import cutlass.cute as cute
import torch
from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch
from flash_attn.cute.interface import _flash_attn_fwd  # the public functions call it, and have no `out` and `lse`
from flash_attn.cute.utils import scalar_to_ssa
from torch import Tensor

from .common import LEAST_SCALE, kernel_sinks, nothing_to_see

if TYPE_CHECKING:
    from ..batch import Batch
    from ..plan import Options, Plan, Write


class Lowered(NamedTuple):
    """A plan in the form that FlashAttention-4 takes."""

    rows: Tensor
    """int32 `[rows, 2]`: interval [lo, hi) of every row, counted from the first key that FlashAttention-4 sees."""
    blocks: BlockSparseTensorsTorch
    unseen: Tensor | None
    """bool, the shape of k without heads and head dim: key slots that hold no key. None: all slots hold one."""


_lowered: WeakKeyDictionary[Plan, dict[tuple[int, ...], Lowered]] = WeakKeyDictionary()


@cute.jit
def row_sees_key(batch_idx, head_idx, q_idx, kv_idx, seqlen_info, aux_tensors):
    """FlashAttention-4's mask_mod. Rows of a tile behind the sequence repeat its last one; nobody reads them."""
    rows = aux_tensors[0]
    seqlen_q = seqlen_info.seqlen_q
    row = batch_idx[0] * seqlen_q + cutlass.min(q_idx[0], seqlen_q - 1)
    return (kv_idx >= scalar_to_ssa(rows[row, 0], cutlass.Int32)) & (
        kv_idx < scalar_to_ssa(rows[row, 1], cutlass.Int32)
    )


@cute.jit
def softcap(score, batch_idx, head_idx, q_idx, kv_idx, seqlen_info, aux_tensors):
    """FlashAttention-4's score_mod: `cap * tanh(score / cap)`, with the cap in memory so that it is not compiled in."""
    cap = aux_tensors[1][0]
    return cute.math.tanh(score / cap) * cap


softcap.__vec_size__ = 2  # scores per call: the most that SM90 takes


def block_shape(major: int, head_dim: int, head_dim_v: int) -> tuple[int, int]:
    """Rows and keys of a block of the lists, such that FlashAttention-4 picks (or shrinks to) a tile that divides it.

    SM90 wants its tile's exact number of keys; the choices are its own for these head dims. SM100 has tiles of 128
    keys and, with two query stages, of 256 rows.
    """
    if major != 9:
        return 256, 128
    widest = max(head_dim, head_dim_v)
    if widest <= 96:
        return 192, 128
    if widest <= 128 or (widest <= 192 and head_dim_v <= 128):
        return 128, 128
    return 128, 96 if widest <= 192 else 64


def settle(
    q: Tensor, k: Tensor, v: Tensor, plan: Plan, page_table: Tensor | None, *, options: Options, out: Tensor,
    lse: Tensor | None,
) -> Write:  # fmt: skip
    """See `plan.Settle`. FlashAttention-4's interface looks at every call anew."""
    return forward


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: Plan,
    page_table: Tensor | None,
    *,
    options: Options,
    out: Tensor,
    lse: Tensor | None,
) -> None:
    """Writes attention of `q` over `k`, `v` under `plan` into `out` and `lse`; see `sm90.forward`, but no pages.

    Costs one pass over v where some key slots may hold no key (`seqused_k`, `kv_lo`, `cu_seqlens_k`): FlashAttention-4
    multiplies them by 0, which does not silence a NaN. For the same reason a NaN in v of one packed sequence may reach
    rows of its neighbours in the same tile.
    """
    batch = plan.batch
    if q.numel() == 0:
        return
    if k.numel() == 0 or batch.batch_size == 0:
        nothing_to_see(options.sinks, out, lse)
        return
    shape = block_shape(torch.cuda.get_device_capability(q.device)[0], q.shape[-1], v.shape[-1])
    per_plan = _lowered.setdefault(plan, {})
    key = (*shape, *k.shape[:-2])
    lowered = per_plan.get(key)
    if lowered is None:
        lowered = per_plan[key] = lower(plan, k.shape[:-2], *shape)
    if q.dim() == 3:
        q, out, lse = q.unsqueeze(0), out.unsqueeze(0), None if lse is None else lse.unsqueeze(0)
    q, k, v = q.detach(), k.detach(), v.detach()
    if lowered.unseen is not None:
        v = v.masked_fill(lowered.unseen.unsqueeze(-1).unsqueeze(-1), 0)
    sinks = kernel_sinks(options.sinks)
    aux_tensors = [lowered.rows]
    if options.softcap is not None:
        aux_tensors.append(torch.full((1,), options.softcap, dtype=torch.float32, device=q.device))
    _flash_attn_fwd(
        q,
        _like_rows(k, batch),
        _like_rows(v, batch),
        softmax_scale=max(options.scale, LEAST_SCALE),
        causal=False,  # FlashAttention-4 drops it, and windows, beside a mask_mod: the rows hold all of the mask
        window_size_left=None,
        window_size_right=None,
        learnable_sink=sinks,
        score_mod=None if options.softcap is None else softcap,
        mask_mod=row_sees_key,
        block_sparse_tensors=lowered.blocks,
        aux_tensors=aux_tensors,
        out=out,
        lse=lse,
    )
    if lse is not None and sinks is not None:
        # Exact also where the sink outweighs every score so far that the sum over both overflows.
        torch.where(lse == float("inf"), sinks.float().unsqueeze(-1), lse, out=lse)


def _like_rows(x: Tensor, batch: Batch) -> Tensor:
    """k or v as `[B, Sk, Hkv, D]` with the B of FlashAttention-4's q: 1 for packed rows."""
    if x.dim() == 3:
        x = x.unsqueeze(0)
    if batch.packed_q:
        return x.reshape(1, -1, *x.shape[2:])  # a view, unless there are gaps between the sequences
    return x.expand(batch.batch_size, -1, -1, -1)


def lower(plan: Plan, slots: torch.Size, block_m: int, block_n: int) -> Lowered:
    """`plan` for FlashAttention-4, over keys of shape `slots` (k without heads and head dim)."""
    batch = plan.batch
    rows = plan.rows.to(torch.int64)
    shift = None
    if batch.cu_seqlens_k is not None:
        shift = batch.cu_seqlens_k[:-1].to(torch.int64)
    elif batch.packed_q and batch.batch_size > 1:
        shift = torch.arange(batch.batch_size, device=batch.device) * slots[-1]
    if shift is not None:
        rows = rows + shift[batch.row_sequences().clamp(max=batch.batch_size - 1), None]
    by_sequence = rows.view(1 if batch.packed_q else batch.batch_size, -1, 2)
    keys = slots.numel() if batch.packed_q or batch.cu_seqlens_k is not None else slots[-1]
    return Lowered(rows.to(torch.int32), block_lists(by_sequence, keys, block_m, block_n), _unseen(batch, slots))


def _unseen(batch: Batch, slots: torch.Size) -> Tensor | None:
    """Which key slots hold no key: those behind a sequence, in front of its first key, or of no sequence."""
    if batch.cu_seqlens_k is None and batch.seqused_k is None and batch.kv_lo is None:
        return None
    if batch.cu_seqlens_k is not None:
        starts = batch.cu_seqlens_k.to(torch.int64)
        at = torch.arange(slots[0], device=batch.device)
        sequence = torch.searchsorted(starts[1:], at, right=True).clamp(max=batch.batch_size - 1)
        at = at - starts[sequence]
    else:
        at = torch.arange(slots[-1], device=batch.device)[None]
        sequence = torch.arange(batch.batch_size, device=batch.device)[:, None]
    first = batch.first_keys() - batch.kv_starts()
    return ((at < first[sequence]) | (at >= batch.kv_lens()[sequence])).view(slots)


def block_lists(rows: Tensor, keys: int, block_m: int, block_n: int) -> BlockSparseTensorsTorch:
    """FlashAttention-4's lists for row intervals `[B, S, 2]` over `keys` keys: partial and full blocks, the same for
    all heads.

    The rows of a block of packed rows may belong to several sequences, so its lists may have gaps: a block is touched
    if some row sees some of it, and full if all rows that exist see all of it.
    """
    sequences, seqlen, _ = rows.shape
    m, n = -(-seqlen // block_m), -(-keys // block_n)
    lo, hi = rows.unbind(-1)
    seeing = lo < hi
    block = torch.arange(seqlen, device=rows.device).expand(sequences, -1) // block_m
    block = block + torch.arange(sequences, device=rows.device)[:, None] * m

    def rows_over(first: Tensor, end: Tensor) -> Tensor:
        """How many rows' ranges [first, end) hold each key block: int32 `[B * m, n]`."""
        change = torch.zeros(sequences * m * (n + 1), dtype=torch.int32, device=rows.device)
        one = (seeing & (first < end)).to(torch.int32).flatten()
        change.scatter_add_(0, (block * (n + 1) + first).flatten(), one)
        change.scatter_add_(0, (block * (n + 1) + end).flatten(), -one)
        return change.view(-1, n + 1).cumsum(1, dtype=torch.int32)[:, :n]

    there = torch.full((sequences, m), block_m, dtype=torch.int32, device=rows.device)
    there[:, -1] = seqlen - (m - 1) * block_m
    full = rows_over((-(-lo // block_n)).clamp(max=n), hi // block_n) == there.view(-1, 1)
    partial = (rows_over(lo // block_n, -(-hi // block_n)) > 0) & ~full

    def listed(chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Counts `[B, 1, m]` and ascending block numbers `[B, 1, m, n]`, int32."""
        place = torch.where(chosen, chosen.cumsum(1) - 1, n)
        number = torch.arange(n, dtype=torch.int32, device=rows.device).expand_as(chosen)
        index = torch.zeros(chosen.shape[0], n + 1, dtype=torch.int32, device=rows.device).scatter_(1, place, number)
        counts = chosen.sum(1, dtype=torch.int32)
        return counts.view(sequences, 1, m), index[:, :n].contiguous().view(sequences, 1, m, n)

    return BlockSparseTensorsTorch(*listed(partial), *listed(full), block_size=(block_m, block_n))
