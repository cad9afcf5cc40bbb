"""FlashAttention-4 on SM90 over row intervals: kernel choice, compilation and launch."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from .support import PACKAGE, PINNED, installed_version

if installed_version() != PINNED:
    raise ImportError(
        f"mmattn.cute.sm90 overrides internals of {PACKAGE} {PINNED}, but {installed_version() or 'none'} is "
        f"installed: pip install {PACKAGE}=={PINNED}"
    )

import cutlass
import cutlass.cute as cute
from flash_attn.cute.interface import _tile_size_fwd_sm90
from quack.compile_utils import make_fake_tensor

from .common import LEAST_SCALE, kernel_sinks, nothing_to_see
from .interval_sm90 import IntervalForwardSm90

if TYPE_CHECKING:
    from ..plan import Options, Plan, Write

compilations = 0
"""Kernels compiled by this process."""

DTYPES = {torch.float16: cutlass.Float16, torch.bfloat16: cutlass.BFloat16, torch.float32: cutlass.Float32}
_kernels: dict[Variant, Callable[..., None]] = {}
_compiling = threading.Lock()


class Tile(NamedTuple):
    """Shape of a tile: packed query rows, keys per block; and whether P stays in registers for the second product."""

    m: int
    n: int
    p_in_registers: bool


class Variant(NamedTuple):
    """All that is compiled into a kernel. Nothing here depends on a length, a count, a stride or a scalar's value."""

    dtype: torch.dtype
    head_dim: int
    head_dim_v: int
    group: int
    tile: Tile
    packed_q: bool
    packed_k: bool
    some_sequences: bool
    paged: bool
    page_is_block: bool
    softcap: bool
    sinks: torch.dtype | None
    lse: bool


@cache
def tile_shape(head_dim: int, head_dim_v: int, windowed: bool, page_size: int | None) -> Tile:
    """FA4's tile for these head dims.

    Of its two choices (with and without a window) the one whose block is a page wins: TMA loads such pages.
    """
    choices = [
        _tile_size_fwd_sm90(max(head_dim, head_dim_v), head_dim_v, True, local) for local in (windowed, not windowed)
    ]
    config = next((c for c in choices if c.n_block_size == page_size), choices[0])
    return Tile(config.m_block_size, config.n_block_size, config.mma_pv_is_rs)


def settle(
    q: Tensor, k: Tensor, v: Tensor, plan: Plan, page_table: Tensor | None, *, options: Options, out: Tensor,
    lse: Tensor | None, rows_above: int = 0,
) -> Write:  # fmt: skip
    """The kernel of this call and of others like it; see `plan.Settle`. Sequences of up to `rows_above` rows are not written.

    q `[T, Hq, D]` or `[B, S, Hq, D]`; k, v `[Tk, Hkv, D]`, `[B, Sk, Hkv, D]` or paged `[P, page, Hkv, D]` with
    `page_table` int32 `[B, max_pages]`; out like q with v's last dim; lse fp32 `[Hq, T]` or `[B, Hq, S]`, natural log.
    float16 or bfloat16; last dims contiguous, other strides multiples of 16 bytes. `support.why_not` must have no
    reason against the call.
    """
    batch, mask = plan.batch, plan.mask
    if q.numel() == 0 or k.numel() == 0 or batch.batch_size == 0:
        return _write_nothing
    packed_k = batch.cu_seqlens_k is not None and page_table is None
    unsqueeze_q = batch.cu_seqlens_q is None and q.dim() == 3
    unsqueeze_k = not packed_k and k.dim() == 3
    sinks = kernel_sinks(options.sinks)
    group = q.shape[-2] // k.shape[-2]
    page_size = k.shape[1] if page_table is not None else None
    windowed = mask.window_left is not None or mask.chunk_size is not None
    tile = tile_shape(q.shape[-1], v.shape[-1], windowed, page_size)
    variant = Variant(
        q.dtype,
        q.shape[-1],
        v.shape[-1],
        group,
        tile,
        batch.cu_seqlens_q is not None,
        packed_k,
        rows_above > 0,
        page_table is not None,
        page_size == tile.n,
        options.softcap is not None,
        None if sinks is None else sinks.dtype,
        lse is not None,
    )
    kernel = compiled(variant)
    table, intervals = plan.tiles(tile.m, group, tile.n), plan.rows
    cu_seqlens_k = batch.cu_seqlens_k if packed_k else None
    seqused_q = batch.q_lens_above(rows_above) if rows_above else None

    def write(q, k, v, plan, page_table, *, options, out, lse):  # type: ignore[no-untyped-def]
        if unsqueeze_q:
            q, out, lse = q[None], out[None], lse if lse is None else lse[None]
        if unsqueeze_k:
            k, v = k[None], v[None]
        kernel(
            q.detach() if q.requires_grad else q,
            k.detach() if k.requires_grad else k,
            v.detach() if v.requires_grad else v,
            out,
            lse,
            max(options.scale, LEAST_SCALE),
            batch.cu_seqlens_q,
            cu_seqlens_k,
            seqused_q,
            page_table,
            kernel_sinks(options.sinks),
            intervals,
            table.ranges,
            options.softcap,
        )

    return write


def _write_nothing(q, k, v, plan, page_table, *, options, out, lse):  # type: ignore[no-untyped-def]
    if q.numel():
        nothing_to_see(options.sinks, out, lse)


def compiled(variant: Variant) -> Callable[..., None]:
    """The kernel of this variant, compiled at the first request (2 to 5 s). Needs no GPU."""
    global compilations
    with _compiling:
        kernel = _kernels.get(variant)
        if kernel is None:
            kernel = _kernels[variant] = _compile(variant)
            compilations += 1
    return kernel


def _compile(variant: Variant):
    dtype = DTYPES[variant.dtype]
    kernel = IntervalForwardSm90(
        dtype,
        variant.head_dim,
        variant.head_dim_v,
        variant.group,
        tile_m=variant.tile.m,
        tile_n=variant.tile.n,
        mma_pv_is_rs=variant.tile.p_in_registers,
        paged_kv_non_tma=variant.paged and not variant.page_is_block,
        has_softcap=variant.softcap,
    )

    def data(ndim: int):
        return make_fake_tensor(dtype, tuple(cute.sym_int() for _ in range(ndim)), divisibility=8)

    def vector(element, size=None):
        return make_fake_tensor(element, (cute.sym_int(),) if size is None else size)

    def table(columns: int):
        return cute.runtime.make_fake_tensor(
            cutlass.Int32, (cute.sym_int(), columns), stride=(columns, 1), assumed_align=4 * columns
        )

    q_dims, k_dims = 3 if variant.packed_q else 4, 3 if variant.packed_k else 4
    lse = make_fake_tensor(cutlass.Float32, tuple(cute.sym_int() for _ in range(q_dims - 1))) if variant.lse else None
    return cute.compile(
        kernel,
        data(q_dims),
        data(k_dims),
        data(k_dims),
        data(q_dims),
        lse,
        1.0,
        vector(cutlass.Int32) if variant.packed_q else None,
        vector(cutlass.Int32) if variant.packed_k else None,
        vector(cutlass.Int32) if variant.some_sequences else None,
        vector(cutlass.Int32, (cute.sym_int(), cute.sym_int())) if variant.paged else None,
        None if variant.sinks is None else vector(DTYPES[variant.sinks]),
        table(2),
        table(4),
        cutlass.Float32(1.0) if variant.softcap else None,
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
        options="--enable-tvm-ffi",
    )
