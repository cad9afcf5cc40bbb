"""FlashAttention-4's SM90 backward kernel, driven by the transposed row intervals instead of a mask.

The kernel computes dK and dV of one key block, and adds to dQ, in a walk over row blocks. Everything is FA4's but for
what a key block visits and which rows see a key:

* `RowBlocks` answers FA4's questions about row blocks from the table of key tiles,
* `ColumnIntervals` masks the scores of an edge block with the column table: a thread's keys stay the same for the
  whole walk, so their limits are read once and stay in registers,
* keys that nobody sees, and rows of other sequences, are zeroed in shared memory, because 0 times NaN is NaN,
* key blocks that nobody sees get zeros and read neither K nor V,
* rows of dQ, dK and dV behind the last sequence are zeroed by a warp that has nothing else to do.
"""

import copy
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Optional

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from flash_attn.cute.block_sparsity import BlockSparseTensors
from flash_attn.cute.flash_bwd_sm90 import FlashAttentionBackwardSm90
from flash_attn.cute.mask import mask_r2p_lambda, sm90_col_to_r2p_idx
from flash_attn.cute.named_barrier import NamedBarrierBwd
from flash_attn.cute.utils import AuxData
from quack import layout_utils

from .common_sm90 import (
    DenseMainLoop,
    OneTile,
    clear_rows_behind,
    clear_smem_rows,
    keep_bits,
    rebuilt,
    softcap,
)

CLEAR_BARRIER = max(NamedBarrierBwd) + 1  # of all consumer warps, behind the barriers that FA4 uses


class Fields(NamedTuple):
    """What the kernel reads and writes beside FA4's arguments."""

    columns: cute.Tensor
    """int32 (key slot, 2): rows [lo, hi) of its sequence that see a key slot."""
    ranges: cute.Tensor
    """int32 (slot, 4): first touched, first full, end of full, end of touched row block of every key tile."""
    of_sequences: cute.Tensor
    """int32 (sequence, 3), see `columns.Columns`: the last says whether the rows are in order."""
    rows: cute.Tensor
    """int32 (row, 2): keys [lo, hi) that a row sees; read where the rows of a sequence are not in order."""
    row_ranges: Optional[cute.Tensor]
    """int32 (slot, 4): as `ranges` with rows and keys exchanged; None where dQ may be added up in any order."""
    cu_seqlens_q: Optional[cute.Tensor]
    """int32 (sequence + 1,)."""
    cu_seqlens_k: Optional[cute.Tensor]
    dq: Optional[cute.Tensor]
    """The gradient as the caller sees it, (row, head, dim); None where it is not packed. So are dk and dv."""
    dk: Optional[cute.Tensor]
    dv: Optional[cute.Tensor]


class Tables(Fields, BlockSparseTensors):
    """They travel as FA4's block lists, whose type the DSL asks for."""

    def __new_from_mlir_values__(self, values):
        return rebuilt(self, values)


@dataclass(frozen=True)
class RowBlocks:
    """Stands in for FA4's `BlockInfo`: the row blocks of this CTA's key tile."""

    first: Int32
    full_first: Int32
    full_end: Int32
    end: Int32
    ordered: cutlass.Boolean
    key_blocks: Int32
    row_ranges: Optional[cute.Tensor]
    first_row_slot: Int32

    def get_m_block_min_max(self, seqlen_info, n_block):
        return self.first, self.end

    @cute.jit
    def get_n_block_min_max(self, seqlen_info, m_block):
        """The key blocks that a row block touches. FA4 adds to dQ from the last one to the first."""
        end = self.row_ranges[self.first_row_slot + m_block, 3]
        return Int32(0), end if self.ordered else self.key_blocks


@dataclass(frozen=True)
class ColumnIntervals:
    """Stands in for FA4's `AttentionMask`.

    `limits` holds rows [lo, hi) of each accumulator key of this thread, `keys` the number of that key in its sequence and
    `rows` the number within a block of each accumulator row. Where FA4 computes S transposed, a thread owns a quarter of
    all rows and the limits count in those (see `sm90_col_to_r2p_idx`).
    """

    tile_m: cutlass.Constexpr[int]
    transposed: cutlass.Constexpr[bool]
    blocks: RowBlocks
    limits: tuple
    keys: tuple
    rows: tuple
    row_table: cute.Tensor
    """int32 (row of this sequence, 2); its last row is `last_row`."""
    last_row: Int32

    @cute.jit
    def apply_mask(
        self,
        acc_S: cute.Tensor,
        batch_idx,
        head_idx,
        m_block,
        n_block,
        thr_mma,
        mask_seqlen: cutlass.Constexpr = True,
        mask_causal: cutlass.Constexpr = False,
        mask_local: cutlass.Constexpr = True,
        mask_mod: cutlass.Constexpr = None,
        aux_data=None,
        fastdiv_mods=None,
    ) -> None:
        scores = layout_utils.reshape_acc_to_mn(acc_S, transpose=self.transposed)
        if m_block < self.blocks.full_first or m_block >= self.blocks.full_end:
            if const_expr(self.transposed):
                shift = m_block * (self.tile_m // 4)
                for c in cutlass.range_constexpr(len(self.limits)):
                    lo, hi = self.limits[c][0] - shift, self.limits[c][1] - shift
                    mask_r2p_lambda(scores[None, c], partial(keep_bits, lo, hi), rank1=True)
            else:
                for r in cutlass.range_constexpr(len(self.rows)):
                    row = self.rows[r] + m_block * self.tile_m
                    for c in cutlass.range_constexpr(len(self.limits)):
                        hidden = row < self.limits[c][0] or row >= self.limits[c][1]
                        scores[r, c] = -Float32.inf if hidden else scores[r, c]
        if not self.blocks.ordered:
            # The rows that see a key have holes.
            for r in cutlass.range_constexpr(len(self.rows)):
                row = cutlass.min(self.rows[r] + m_block * self.tile_m, self.last_row)
                lo, hi = self.row_table[row, 0], self.row_table[row, 1]
                for c in cutlass.range_constexpr(len(self.keys)):
                    hidden = self.keys[c] < lo or self.keys[c] >= hi
                    scores[r, c] = -Float32.inf if hidden else scores[r, c]


def accumulator_multiple(swapped: bool) -> int:
    """What columns of float32 sums are rounded up to; `swapped` is `dKV_swapAB` of the tile configuration."""
    return 64 if swapped else 32


def accumulator_dims(head_dim: int, head_dim_v: int, swapped: bool) -> tuple[int, int]:
    """Columns of the float32 sums of dQ and dK, and of dV."""
    multiple = accumulator_multiple(swapped)
    return -(-head_dim // multiple) * multiple, -(-head_dim_v // multiple) * multiple


class IntervalBackwardSm90(DenseMainLoop, FlashAttentionBackwardSm90):
    """FA4's backward over row intervals.

    Arguments of the constructor are FA4's `dtype`, `head_dim`, `head_dim_v`, `qhead_per_kvhead`, `deterministic` and the
    fields of its tile configuration; `has_softcap` says that the kernel gets a cap.
    """

    def __init__(self, dtype, head_dim: int, head_dim_v: int, qhead_per_kvhead: int, *, has_softcap: bool, **config):
        super().__init__(
            dtype,
            head_dim,
            head_dim_v,
            qhead_per_kvhead,
            is_causal=False,
            is_local=True,  # FA4 then expects key tiles without rows, and in order adds from the last tile to the first
            score_mod=softcap if has_softcap else None,
            score_mod_bwd=softcap if has_softcap else None,
            mask_mod=None,
            **config,
        )
        # FA4's other two kernels round head dims to the same multiple; here it would take 16, which they cannot read.
        self.tile_hdim, self.tile_hdimv = accumulator_dims(head_dim, head_dim_v, self.dKV_swapAB)
        self.check_hdim_oob, self.check_hdim_v_oob = head_dim != self.tile_hdim, head_dim_v != self.tile_hdimv

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mdO: cute.Tensor,
        mLSE: cute.Tensor,
        mdPsum: cute.Tensor,
        mdQaccum: cute.Tensor,
        mdK: cute.Tensor,
        mdV: cute.Tensor,
        softmax_scale: Float32,
        mCuSeqlensQ: Optional[cute.Tensor],
        mCuSeqlensK: Optional[cute.Tensor],
        mColumns: cute.Tensor,
        mRanges: cute.Tensor,
        mOfSequences: cute.Tensor,
        mRows: cute.Tensor,
        mRowRanges: Optional[cute.Tensor],
        mdQ_semaphore: Optional[cute.Tensor],
        mdK_semaphore: Optional[cute.Tensor],
        mdV_semaphore: Optional[cute.Tensor],
        packed_dq: Optional[cute.Tensor],
        packed_dk: Optional[cute.Tensor],
        packed_dv: Optional[cute.Tensor],
        cap: Optional[Float32],
        stream: cuda.CUstream = None,
    ):
        """Tensors as FA4's `__call__` takes them, the tables, the final gradients so far as they are packed, and the
        softcap in score units."""
        tables = Tables(
            mColumns,
            mRanges,
            mOfSequences,
            mRows,
            mRowRanges,
            mCuSeqlensQ,
            mCuSeqlensK,
            packed_dq,
            packed_dk,
            packed_dv,
        )
        scalars = (cap,) if const_expr(cap is not None) else None
        FlashAttentionBackwardSm90.__call__(
            self,
            mQ,
            mK,
            mV,
            mdO,
            mLSE,
            mdPsum,
            mdQaccum,
            mdK,
            mdV,
            softmax_scale,
            mCuSeqlensQ,
            mCuSeqlensK,
            None,
            None,
            None,
            None,
            mdQ_semaphore,
            mdK_semaphore,
            mdV_semaphore,
            AuxData(None, scalars),
            tables,
            None,
            stream,
        )

    # Producer warps

    @cute.jit
    def load(
        self,
        mQ,
        mK,
        mV,
        mdO,
        mLSE,
        mdPsum,
        sQ,
        sK,
        sV,
        sdO,
        sLSE,
        sdPsum,
        tma_atom_Q,
        tma_atom_K,
        tma_atom_V,
        tma_atom_dO,
        pipeline_Q,
        pipeline_dO,
        block_info,
        SeqlenInfoCls,
        TileSchedulerCls,
        tables,
        qhead_per_kvhead_divmod=None,
    ):
        work = TileSchedulerCls().initial_work_tile_info()
        if work.is_valid_tile:
            n_block, _, batch_idx, _ = work.tile_idx
            seqlen = SeqlenInfoCls(batch_idx)
            FlashAttentionBackwardSm90.load(
                self,
                mQ,
                mK,
                mV,
                mdO,
                mLSE,
                mdPsum,
                sQ,
                sK,
                sV,
                sdO,
                sLSE,
                sdPsum,
                tma_atom_Q,
                tma_atom_K,
                tma_atom_V,
                tma_atom_dO,
                pipeline_Q,
                pipeline_dO,
                self._row_blocks(tables, seqlen, batch_idx, n_block),
                lambda _: seqlen,
                lambda: OneTile(work.tile_idx),
                tables,
                qhead_per_kvhead_divmod,
            )
        if const_expr(tables.cu_seqlens_q is not None):
            clear_rows_behind(tables.dq, tables.cu_seqlens_q, cute.arch.lane_idx(), cute.arch.WARP_SIZE)
        if const_expr(tables.cu_seqlens_k is not None):
            for gradient in (tables.dk, tables.dv):
                clear_rows_behind(gradient, tables.cu_seqlens_k, cute.arch.lane_idx(), cute.arch.WARP_SIZE)

    @cute.jit
    def dQaccum_store(
        self, mdQaccum, sdQaccum, block_info, TileSchedulerCls, SeqlenInfoCls, tables, mdQ_semaphore=None
    ):
        work = TileSchedulerCls().initial_work_tile_info()
        if work.is_valid_tile:
            n_block, _, batch_idx, _ = work.tile_idx
            seqlen = SeqlenInfoCls(batch_idx)
            FlashAttentionBackwardSm90.dQaccum_store(
                self,
                mdQaccum,
                sdQaccum,
                self._row_blocks(tables, seqlen, batch_idx, n_block),
                lambda: OneTile(work.tile_idx),
                lambda _: seqlen,
                tables,
                mdQ_semaphore,
            )

    # Consumer warp groups

    @cute.jit
    def mma(
        self,
        tiled_mma_SdP,
        tiled_mma_dK,
        tiled_mma_dV,
        tiled_mma_dQ,
        mdK,
        mdV,
        mdK_semaphore,
        mdV_semaphore,
        mdQaccum,
        sQ,
        sK,
        sV,
        sdO,
        sP,
        sdS,
        sLSE,
        sdPsum,
        sdQaccum,
        pipeline_Q,
        pipeline_dO,
        tidx,
        tma_atom_dK,
        tma_atom_dV,
        r2s_tiled_copy_dQaccum,
        softmax_scale_log2,
        softmax_scale,
        block_info,
        SeqlenInfoCls,
        AttentionMaskCls,
        TileSchedulerCls,
        aux_data=AuxData(),
        fastdiv_mods=None,
        tables=None,
        qhead_per_kvhead_divmod=None,
        is_dQ_wg: cutlass.Constexpr[bool] = True,
    ):
        work = TileSchedulerCls().initial_work_tile_info()
        if work.is_valid_tile:
            n_block, _, batch_idx, _ = work.tile_idx
            seqlen = SeqlenInfoCls(batch_idx)
            blocks = self._row_blocks(tables, seqlen, batch_idx, n_block)
            mask = self._column_intervals(tables, seqlen, batch_idx, n_block, blocks, tiled_mma_SdP.get_slice(tidx))
            tile = copy.copy(self)  # with what `mma_one_m_block` needs to know of the tile
            tile.column = partial(self._column, tables, seqlen, batch_idx, n_block)
            # What the rows of a sequence see has no holes if they are in order, so the outermost keys tell.
            front, back = tile.column(Int32(0)), tile.column(Int32(self.tile_n - 1))
            tile.some_unseen = front[0] >= front[1] or back[0] >= back[1] or not blocks.ordered
            tile.blocks, tile.seqlen, tile.tidx = blocks, seqlen, tidx
            tile.pipelines, tile.keys, tile.rows = (pipeline_Q, pipeline_dO), (sK, sV), (sQ, sdO)
            FlashAttentionBackwardSm90.mma(
                tile,
                tiled_mma_SdP,
                tiled_mma_dK,
                tiled_mma_dV,
                tiled_mma_dQ,
                mdK,
                mdV,
                mdK_semaphore,
                mdV_semaphore,
                mdQaccum,
                sQ,
                sK,
                sV,
                sdO,
                sP,
                sdS,
                sLSE,
                sdPsum,
                sdQaccum,
                pipeline_Q,
                pipeline_dO,
                tidx,
                tma_atom_dK,
                tma_atom_dV,
                r2s_tiled_copy_dQaccum,
                softmax_scale_log2,
                softmax_scale,
                blocks,
                lambda _: seqlen,
                lambda _: mask,
                lambda: OneTile(work.tile_idx),
                aux_data,
                fastdiv_mods,
                tables,
                qhead_per_kvhead_divmod,
                is_dQ_wg,
            )

    def mma_one_m_block(self, m_block, consumer_state_Q, consumer_state_dO, *args, **kwargs):
        """FA4's step, after what nobody may look at was zeroed in shared memory."""
        self._clear_garbage(m_block, consumer_state_Q, consumer_state_dO)
        return super().mma_one_m_block(m_block, consumer_state_Q, consumer_state_dO, *args, **kwargs)

    @cute.jit
    def _clear_garbage(self, m_block, state_Q, state_dO):
        clear_keys = m_block == self.blocks.first and self.some_unseen
        end_row = self.seqlen.seqlen_q - m_block * self.tile_m
        # Behind batched rows TMA writes zeros by itself.
        clear_rows = const_expr(self.seqlen.has_cu_seqlens_q) and end_row < self.tile_m
        if clear_keys or clear_rows:
            states = (state_Q, state_Q if const_expr(self.Q_stage == self.dO_stage) else state_dO)
            for pipeline, state in zip(self.pipelines, states):
                pipeline.consumer_wait(state, pipeline.consumer_try_wait(state))
            threads = self.num_mma_threads
            if clear_keys:
                for key in cutlass.range(self.tidx // cute.arch.WARP_SIZE, self.tile_n, threads // cute.arch.WARP_SIZE):
                    lo, hi = self.column(key)
                    if lo >= hi:
                        for keys in self.keys:
                            clear_smem_rows(keys, key, key + 1, cute.arch.lane_idx(), cute.arch.WARP_SIZE)
            if clear_rows:
                for rows, state in zip(self.rows, states):
                    clear_smem_rows(rows[None, None, state.index], end_row, Int32(self.tile_m), self.tidx, threads)
            cute.arch.fence_view_async_shared()
            cute.arch.barrier(barrier_id=CLEAR_BARRIER, number_of_threads=threads)

    @cute.jit
    def apply_score_mod(
        self,
        acc_S,
        thr_mma_SdP,
        batch_idx,
        head_idx,
        m_block,
        n_block,
        softmax_scale,
        seqlen_info,
        aux_data=AuxData(),
        fastdiv_mods=None,
    ):
        """Scores become `cap * tanh(scale * score / cap)`."""
        cap = aux_data.scalars[0]
        acc_S.store(cute.math.tanh(acc_S.load() * (softmax_scale / cap)) * cap)

    @cute.jit
    def apply_score_mod_bwd(
        self,
        grad_tensor,
        score_tensor,
        thr_mma_SdP,
        batch_idx,
        head_idx,
        m_block,
        n_block,
        softmax_scale,
        seqlen_info,
        aux_data=AuxData(),
        fastdiv_mods=None,
    ):
        """Gradients of capped scores become gradients of scaled ones."""
        tanh = cute.math.tanh(score_tensor.load() * (softmax_scale / aux_data.scalars[0]))
        grad_tensor.store(grad_tensor.load() * (1.0 - tanh * tanh))

    # Reading the tables

    @cute.jit
    def _row_blocks(self, tables: Tables, seqlen, batch_idx: Int32, n_block: Int32):
        # The slots of tiles as `plan.tile_slots` counts them.
        if const_expr(seqlen.has_cu_seqlens_k):
            slot = seqlen.offset_k // self.tile_n + batch_idx + n_block
        else:
            slot = batch_idx * cute.ceil_div(seqlen.seqlen_k, self.tile_n) + n_block
        if const_expr(seqlen.has_cu_seqlens_q):
            first_row_slot = seqlen.offset_q // self.tile_m + batch_idx
        else:
            first_row_slot = batch_idx * cute.ceil_div(seqlen.seqlen_q, self.tile_m)
        first, full_first, full_end, end = [tables.ranges[slot, i] for i in range(4)]
        ordered = tables.of_sequences[batch_idx, 2] != 0
        if not ordered:
            full_first, full_end = first, first
            if const_expr(self.deterministic):
                # Key blocks and row blocks must agree on who meets whom, or one would wait for ever: all meet.
                first, full_first, full_end = Int32(0), Int32(0), Int32(0)
                end = cute.ceil_div(seqlen.seqlen_q, self.tile_m)
        key_blocks = cute.ceil_div(seqlen.seqlen_k, self.tile_n)
        return RowBlocks(first, full_first, full_end, end, ordered, key_blocks, tables.row_ranges, first_row_slot)

    @cute.jit
    def _column_intervals(self, tables: Tables, seqlen, batch_idx: Int32, n_block: Int32, blocks: RowBlocks, thr_mma):
        transposed = self.SdP_swapAB
        coords = layout_utils.reshape_acc_to_mn(
            thr_mma.partition_C(
                cute.make_identity_tensor(
                    (self.tile_n, self.tile_m) if const_expr(transposed) else (self.tile_m, self.tile_n)
                )
            ),
            transpose=transposed,
        )
        row_mode, key_mode = (1, 0) if const_expr(transposed) else (0, 1)
        local_keys = [coords[0, c][key_mode] for c in range(cute.size(coords, mode=[1]))]
        limits = []
        for key in local_keys:
            lo, hi = self._column(tables, seqlen, batch_idx, n_block, key)
            if const_expr(transposed):
                lo, hi = sm90_col_to_r2p_idx(lo - coords[0, 0][1]), sm90_col_to_r2p_idx(hi - coords[0, 0][1])
            limits.append((lo, hi))
        first_row = seqlen.offset_q if const_expr(seqlen.has_cu_seqlens_q) else batch_idx * seqlen.seqlen_q
        return ColumnIntervals(
            self.tile_m,
            transposed,
            blocks,
            tuple(limits),
            tuple(n_block * self.tile_n + key for key in local_keys),
            tuple(coords[r, 0][row_mode] for r in range(cute.size(coords, mode=[0]))),
            cute.domain_offset((first_row, 0), tables.rows),
            seqlen.seqlen_q - 1,
        )

    @cute.jit
    def _column(self, tables: Tables, seqlen, batch_idx: Int32, n_block: Int32, key: Int32):
        """The rows [lo, hi) that see a key of the tile; none for keys behind the sequence."""
        at = n_block * self.tile_n + key
        first = seqlen.offset_k if const_expr(seqlen.has_cu_seqlens_k) else batch_idx * seqlen.seqlen_k
        slot = first + cutlass.min(at, seqlen.seqlen_k - 1)
        lo = tables.columns[slot, 0]
        hi = tables.columns[slot, 1] if at < seqlen.seqlen_k else lo
        return lo, hi
