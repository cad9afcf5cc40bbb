"""FlashAttention-4's backward on SM90 over row intervals: kernel choice, compilation and launches.

Three kernels, as in FA4: one makes delta and the base-2 LSE and clears the sums of dQ, one computes dK, dV and sums of
dQ, and one turns float32 sums into gradients (dQ, and with grouped heads dK and dV).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import cutlass
import cutlass.cute as cute
import torch
from flash_attn.cute.flash_bwd_postprocess import LearnableSinkBwdTensors
from flash_attn.cute.interface import (
    _compile_bwd_postprocess,
    _compile_bwd_preprocess,
    _tile_size_bwd_sm90,
)
from quack.compile_utils import make_fake_tensor
from torch import Tensor

from ..batch import current
from ..plan import Grads
from .common import LEAST_SCALE, kernel_sinks
from .interval_backward_sm90 import IntervalBackwardSm90, accumulator_dims, accumulator_multiple
from .sm90 import DTYPES

if TYPE_CHECKING:
    from ..mask import Mask
    from ..plan import Options, Plan

compilations = 0
"""Main kernels compiled by this process."""

_kernels: dict[Variant, Callable[..., None]] = {}
_compiling = threading.Lock()


class Variant(NamedTuple):
    """All that is compiled into the main kernel. Nothing here depends on a length, a count, a stride or a scalar's value."""

    dtype: torch.dtype
    head_dim: int
    head_dim_v: int
    group: int
    local: bool
    """Whether tiles are those that FA4 takes for causal or windowed masks."""
    packed_q: bool
    packed_k: bool
    softcap: bool
    deterministic: bool


@cache
def tile_config(head_dim: int, head_dim_v: int, local: bool) -> Any:
    """FA4's tile, stages and layouts for these head dims: `BwdConfig`."""
    return _tile_size_bwd_sm90(head_dim, head_dim_v, False, local)


def backward(
    q: Tensor, k: Tensor, v: Tensor, plan: Plan, page_table: Tensor | None, out: Tensor, lse: Tensor, dout: Tensor,
    dlse: Tensor | None, *, options: Options,
) -> Grads:  # fmt: skip
    """See `dispatch.Backward`."""
    assert page_table is None and options.k_scale is None and options.v_scale is None, "see support.why_no_gradients"
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    dsinks = None if options.sinks is None else torch.empty_like(options.sinks)
    with current(q.device):
        write = settle_backward(
            q, k, v, plan, out, lse, dout, dlse, options=options, dq=dq, dk=dk, dv=dv, dsinks=dsinks
        )
        write(q, k, v, plan, out, lse, dout, dlse, options=options, dq=dq, dk=dk, dv=dv, dsinks=dsinks)
    return Grads(dq, dk, dv, dsinks)


def settle_backward(
    q: Tensor, k: Tensor, v: Tensor, plan: Plan, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None, *,
    options: Options, dq: Tensor, dk: Tensor, dv: Tensor, dsinks: Tensor | None,
) -> Callable[..., None]:  # fmt: skip
    """The kernels of this call and of others like it; layouts as of `sm90.settle`, no pages."""
    batch, mask = plan.batch, plan.mask
    if q.numel() == 0 or k.numel() == 0 or batch.batch_size == 0:
        return _write_zeros
    deterministic = torch.are_deterministic_algorithms_enabled()
    packed_q, packed_k = batch.cu_seqlens_q is not None, batch.cu_seqlens_k is not None
    unsqueeze_q, unsqueeze_k = not packed_q and q.dim() == 3, not packed_k and k.dim() == 3
    (heads, head_dim), head_dim_v, heads_kv = q.shape[-2:], v.shape[-1], k.shape[-2]
    group = heads // heads_kv
    local = is_local(mask)
    config = tile_config(head_dim, head_dim_v, local)
    tile_m, tile_n = config.m_block_size, config.n_block_size
    variant = Variant(
        q.dtype, head_dim, head_dim_v, group, local, packed_q, packed_k, options.softcap is not None, deterministic
    )  # fmt: skip
    sinks = kernel_sinks(options.sinks) if dsinks is not None else None
    sink_dtype = None if sinks is None else sinks.dtype
    kernel = compiled(variant)
    prepare = preprocess(variant, dlse is not None)
    finish_q = postprocess_q(variant, sink_dtype)
    finish_k, finish_v = postprocess_kv(variant) if group > 1 else (None, None)

    slots = k.shape[-3]
    columns, ranges, intervals = plan.columns(slots), plan.column_tiles(slots, tile_n, tile_m).ranges, plan.rows
    row_ranges = plan.tiles(tile_m, 1, tile_n).ranges if deterministic else None
    rows = _accumulated(batch.batch_size, q.shape[0] if packed_q else q.shape[-3], tile_m, packed_q)
    keys = _accumulated(batch.batch_size, k.shape[0] if packed_k else k.shape[-3], tile_n, packed_k)
    dim, dim_v = accumulator_dims(head_dim, head_dim_v, config.dKV_swapAB)
    row_blocks = -(-min(batch.max_seqlen_q, q.shape[-3]) // tile_m)
    max_k = k.shape[-3] if batch.max_seqlen_k is None else min(batch.max_seqlen_k, k.shape[-3])
    key_blocks = -(-max_k // tile_n)
    q_lead = (heads,) if packed_q else (batch.batch_size, heads)
    k_lead = (heads_kv,) if packed_k else (batch.batch_size, heads_kv)

    def write(q, k, v, plan, out, lse, dout, dlse, *, options, dq, dk, dv, dsinks):  # type: ignore[no-untyped-def]
        if unsqueeze_q:
            q, out, dout, dq, lse = q[None], out[None], dout[None], dq[None], lse[None]
            dlse = None if dlse is None else dlse[None]
        if unsqueeze_k:
            k, v, dk, dv = k[None], v[None], dk[None], dv[None]
        q, k, v, out, dout = (_readable(x.detach()) for x in (q, k, v, out, dout))
        dlse = None if dlse is None else dlse.detach().float().contiguous()
        lse = lse.detach().contiguous()
        device, scale = q.device, max(options.scale, LEAST_SCALE)
        cu_q, cu_k = batch.cu_seqlens_q, batch.cu_seqlens_k

        def floats(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.float32, device=device)

        def flags(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        dq_sums, delta, lse_log2 = floats(*q_lead, rows * dim), floats(*q_lead, rows), floats(*q_lead, rows)
        dk_sums, dv_sums = dk, dv
        if group > 1:
            dk_sums = torch.zeros(*k_lead, keys * dim, dtype=torch.float32, device=device)
            dv_sums = torch.zeros(*k_lead, keys * dim_v, dtype=torch.float32, device=device)
        dq_turn = dk_turn = dv_turn = None
        if deterministic:
            dq_turn = flags(batch.batch_size, heads, row_blocks, 1)
            if group > 1:
                dk_turn, dv_turn = (flags(batch.batch_size, heads_kv, key_blocks, 2) for _ in range(2))
        prepare(out, dout, delta, lse, lse_log2, dq_sums, cu_q, None, dlse, None, None, 1.0, None, None)
        kernel(
            q, k, v, dout, lse_log2, delta, dq_sums, dk_sums, dv_sums, scale, cu_q, cu_k, columns.rows, ranges,
            columns.of_sequences, intervals, row_ranges, dq_turn, dk_turn, dv_turn, dq if packed_q else None, dk if packed_k else None, dv if packed_k else None,
            options.softcap,
        )  # fmt: skip
        sink_tensors = None
        if sink_dtype is not None:
            sinks = kernel_sinks(options.sinks)
            sink_tensors = LearnableSinkBwdTensors(delta, lse, sinks, torch.empty_like(sinks))
        finish_q(dq_sums, dq, scale, cu_q, None, sink_tensors, None)
        if group > 1:
            finish_k(dk_sums, dk, scale, cu_k, None, None, None)
            finish_v(dv_sums, dv, 1.0, cu_k, None, None, None)
        if sink_tensors is not None:
            # A sink of -inf is none; FA4 would give it the weight 1 in rows that see nothing.
            dsinks.copy_(torch.where(sink_tensors.sink == float("-inf"), 0, sink_tensors.dsink))

    return write


def is_local(mask: Mask) -> bool:
    """Whether FA4 would call the mask causal or local: few blocks of a tile are full then."""
    return bool(mask.causal) or mask.window_left is not None or mask.chunk_size is not None


def _write_zeros(q, k, v, plan, out, lse, dout, dlse, *, options, dq, dk, dv, dsinks):  # type: ignore[no-untyped-def]
    """No row sees a key."""
    for gradient in (dq, dk, dv):
        gradient.zero_()
    if dsinks is not None:
        # The LSE of every row is its sink.
        dsinks.zero_()
        if dlse is not None:
            dsinks.copy_(dlse.sum([d for d in range(dlse.dim()) if d != dlse.dim() - 2]))


def _accumulated(batch_size: int, length: int, tile: int, packed: bool) -> int:
    """Rows of a float32 sum: whole tiles, with room for every packed sequence to start at one."""
    return -(-(length + batch_size * tile) // tile) * tile if packed else -(-length // tile) * tile


def _readable(x: Tensor) -> Tensor:
    """`x` as TMA reads it; gradients from autograd may be expanded or lie anywhere."""
    strides = x.stride()
    if (
        strides[-1] == 1
        and x.data_ptr() % 16 == 0
        and all(s > 0 and s * x.element_size() % 16 == 0 for s in strides[:-1])
    ):
        return x
    return x.contiguous()


def compiled(variant: Variant) -> Callable[..., None]:
    """The main kernel of this variant, compiled at the first request (3 to 6 s). Needs no GPU."""
    global compilations
    with _compiling:
        kernel = _kernels.get(variant)
        if kernel is None:
            kernel = _kernels[variant] = _compile(variant)
            compilations += 1
    return kernel


def _compile(variant: Variant):
    dtype, config = DTYPES[variant.dtype], tile_config(variant.head_dim, variant.head_dim_v, variant.local)
    kernel = IntervalBackwardSm90(
        dtype,
        variant.head_dim,
        variant.head_dim_v,
        variant.group,
        has_softcap=variant.softcap,
        deterministic=variant.deterministic,
        tile_m=config.m_block_size,
        tile_n=config.n_block_size,
        Q_stage=config.num_stages_Q,
        dO_stage=config.num_stages_dO,
        PdS_stage=config.num_stages_PdS,
        SdP_swapAB=config.SdP_swapAB,
        dKV_swapAB=config.dKV_swapAB,
        dQ_swapAB=config.dQ_swapAB,
        AtomLayoutMSdP=config.AtomLayoutMSdP,
        AtomLayoutNdKV=config.AtomLayoutNdKV,
        AtomLayoutMdQ=config.AtomLayoutMdQ,
        num_threads=(config.num_wg + 1) * 128,
        dQ_single_wg=config.dQ_single_wg,
    )

    def tensor(element, ndim: int, divisibility: int):
        return make_fake_tensor(element, tuple(cute.sym_int() for _ in range(ndim)), divisibility)

    def table(columns: int):
        align = 4 if columns % 2 else 4 * columns
        return cute.runtime.make_fake_tensor(
            cutlass.Int32, (cute.sym_int(), columns), stride=(columns, 1), assumed_align=align
        )

    def turns(needed: bool):
        return tensor(cutlass.Int32, 4, 1) if needed else None

    def offsets(packed: bool):
        return tensor(cutlass.Int32, 1, 1) if packed else None

    q_dims, k_dims = 3 if variant.packed_q else 4, 3 if variant.packed_k else 4
    stats = [tensor(cutlass.Float32, q_dims - 1, 4) for _ in range(3)]
    grouped = variant.group > 1
    dk, dv = (tensor(cutlass.Float32, k_dims - 1, 4) if grouped else tensor(dtype, k_dims, 8) for _ in range(2))
    return cute.compile(
        kernel,
        tensor(dtype, q_dims, 8),
        tensor(dtype, k_dims, 8),
        tensor(dtype, k_dims, 8),
        tensor(dtype, q_dims, 8),
        *stats,
        dk,
        dv,
        1.0,
        offsets(variant.packed_q),
        offsets(variant.packed_k),
        table(2),
        table(4),
        table(3),
        table(2),
        table(4) if variant.deterministic else None,
        turns(variant.deterministic),
        turns(variant.deterministic and grouped),
        turns(variant.deterministic and grouped),
        tensor(dtype, 3, 8) if variant.packed_q else None,
        tensor(dtype, 3, 8) if variant.packed_k else None,
        tensor(dtype, 3, 8) if variant.packed_k else None,
        cutlass.Float32(1.0) if variant.softcap else None,
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
        options="--enable-tvm-ffi",
    )


def preprocess(variant: Variant, with_dlse: bool):
    """FA4's kernel for delta = rowsum(dO * O) - dLSE, the base-2 LSE (0 for -inf) and cleared sums of dQ."""
    config = tile_config(variant.head_dim, variant.head_dim_v, variant.local)
    return _preprocess(
        variant.dtype, variant.head_dim, variant.head_dim_v, config.m_block_size, variant.packed_q, with_dlse,
        accumulator_multiple(config.dKV_swapAB),
    )  # fmt: skip


@cache
def _preprocess(dtype, head_dim, head_dim_v, tile_m, packed, with_dlse, multiple):  # type: ignore[no-untyped-def]
    return _compile_bwd_preprocess(
        DTYPES[dtype], head_dim, head_dim_v, tile_m, packed, has_seqused_q=False, has_dlse=with_dlse,
        has_dq_accum=True, has_scaleP=False, has_lse_log2=True, use_padded_offsets=True, nheads_major=False,
        pack_gqa=False, qhead_per_kvhead=1, nheads_kv=1, has_cu_total_m_blocks=False, hdim_multiple_of=multiple,
    )  # fmt: skip


def postprocess_q(variant: Variant, sinks: torch.dtype | None):
    """FA4's kernel that makes dQ of its sums, and the sinks' gradient of delta and LSE."""
    config = tile_config(variant.head_dim, variant.head_dim_v, variant.local)
    return _postprocess(
        variant.dtype, variant.head_dim, config.m_block_size, 128 if config.dQ_single_wg else config.num_wg * 128,
        config.AtomLayoutMdQ, config.dQ_swapAB, variant.packed_q, sinks, accumulator_multiple(config.dKV_swapAB),
    )  # fmt: skip


def postprocess_kv(variant: Variant):
    """FA4's kernels that make dK and dV of their sums over the heads of a group."""
    config = tile_config(variant.head_dim, variant.head_dim_v, variant.local)
    return tuple(
        _postprocess(
            variant.dtype, dim, config.n_block_size, config.num_wg * 128, config.AtomLayoutNdKV, config.dKV_swapAB,
            variant.packed_k, None, accumulator_multiple(config.dKV_swapAB),
        )
        for dim in (variant.head_dim, variant.head_dim_v)
    )  # fmt: skip


@cache
def _postprocess(dtype, dim, tile, threads, atom_layout, swapped, packed, sinks, multiple):  # type: ignore[no-untyped-def]
    return _compile_bwd_postprocess(
        DTYPES[dtype], dim, tile, threads, atom_layout, swapped, packed, has_seqused_q=False, use_2cta_instrs=False,
        cluster_size=1, arch=90, has_cu_total_m_blocks=False,
        learnable_sink_dtype=None if sinks is None else DTYPES[sinks], hdim_multiple_of=multiple,
    )  # fmt: skip
