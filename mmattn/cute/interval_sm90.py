"""FlashAttention-4's SM90 forward kernel, driven by row intervals instead of a mask.

Everything is FA4's (TMA, warp specialisation, pipelines, GQA packing, paging, softmax, epilogue) but for what a tile
visits and what a row sees:

* `TileBlocks` answers FA4's questions about key blocks from the tile table,
* `RowIntervals` masks the accumulator of an edge block with the row table's limits,
* slots that no row of the sequence sees get their V rows zeroed, because P = 0 does not silence a NaN,
* tiles without keys write zeros and touch neither Q, K nor V,
* packed rows behind the last sequence are zeroed by warps that have nothing else to do.

A CTA works on one tile, so the tables are read once, before FA4's loops begin.
"""

import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import Optional

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from flash_attn.cute.block_sparsity import BlockSparseTensors
from flash_attn.cute.flash_fwd_sm90 import FlashAttentionForwardSm90
from flash_attn.cute.mask import mask_r2p_lambda, sm90_col_to_r2p_idx
from flash_attn.cute.named_barrier import NamedBarrierFwd
from flash_attn.cute.utils import AuxData
from quack import layout_utils
from quack.cute_dsl_utils import ParamsBase

from .common_sm90 import (
    DenseMainLoop,
    OneTile,
    keep_bits,
    rebuilt,
    softcap,
)

FAR = 2**31 - 1
CLEAR_BARRIER = max(NamedBarrierFwd) + 1  # one per consumer warp group, behind the barriers that FA4 uses


class Tables(BlockSparseTensors):
    """What the kernel reads beside FA4's arguments. It travels as FA4's block lists, so their fields hold it."""

    @staticmethod
    def create(rows, ranges, cu_seqlens_q, out, lse, sinks) -> "Tables":
        return Tables(ranges, rows, out, lse, None, None, cu_seqlens_q, sinks)

    @property
    def ranges(self) -> cute.Tensor:
        """int32 (slot, 4): first touched, first full, end of full, end of touched key block of every tile."""
        return self.mask_block_cnt

    @property
    def rows(self) -> cute.Tensor:
        """int32 (row, 2): key slots [lo, hi) of every query row."""
        return self.mask_block_idx

    @property
    def out(self) -> cute.Tensor:
        """The output as the caller sees it: (row, head, dim) when packed."""
        return self.full_block_cnt

    @property
    def lse(self) -> cute.Tensor:
        """float32 (head, row) when packed; or None."""
        return self.full_block_idx

    @property
    def cu_seqlens_q(self) -> cute.Tensor:
        """int32 (sequence + 1,), or None."""
        return self.dq_write_order

    @property
    def sinks(self) -> cute.Tensor:
        """Floating point (head,), or None."""
        return self.dq_write_order_full

    def __new_from_mlir_values__(self, values):
        return rebuilt(self, values)


@dataclass(frozen=True)
class TileBlocks:
    """Stands in for FA4's `BlockInfo`: the key blocks of this CTA's tile."""

    first: Int32
    full_first: Int32
    full_end: Int32
    end: Int32
    window_size_left: int = 0  # any value but None makes FA4 mask the blocks at the left edge too

    def get_n_block_min_max(self, seqlen_info, m_block):
        return self.first, self.end

    def get_n_block_min_causal_local_mask(self, seqlen_info, m_block, n_block_min):
        return self.full_end

    def get_n_block_min_before_local_mask(self, seqlen_info, m_block, n_block_min):
        return self.full_first


@dataclass(frozen=True)
class RowIntervals:
    """Stands in for FA4's `AttentionMask`.

    `limits` holds [lo, hi) of each accumulator row of this thread, counted in the elements that the thread owns of a
    row of scores that starts at key slot 0 (a thread owns a quarter of every row, see `sm90_col_to_r2p_idx`).
    """

    tile_n: cutlass.Constexpr[int]
    limits: tuple

    @cute.jit
    def apply_mask(
        self,
        acc_S: cute.Tensor,
        n_block: Int32,
        batch_idx=None,
        head_idx=None,
        m_block=None,
        thr_mma=None,
        mask_seqlen: cutlass.Constexpr = True,
        mask_causal: cutlass.Constexpr = False,
        mask_local: cutlass.Constexpr = True,
        mask_mod: cutlass.Constexpr = None,
        aux_data=None,
        fastdiv_mods=None,
    ) -> None:
        scores = layout_utils.reshape_acc_to_mn(acc_S)
        shift = n_block * (self.tile_n // 4)
        for r in cutlass.range_constexpr(len(self.limits)):
            lo, hi = self.limits[r][0] - shift, self.limits[r][1] - shift
            mask_r2p_lambda(scores[r, None], partial(keep_bits, lo, hi), rank1=True)


@dataclass
class NeededPages(ParamsBase):
    """A page table that is never read in front of the first page that the tile needs."""

    table: cute.Tensor
    first: Int32

    def __getitem__(self, coord):
        if isinstance(coord, tuple):
            return NeededPages(self.table[coord], self.first)
        return self.table[cutlass.max(coord, self.first)]


class IntervalForwardSm90(DenseMainLoop, FlashAttentionForwardSm90):
    """FA4's forward over row intervals.

    Arguments of the constructor are FA4's `dtype`, `head_dim`, `head_dim_v`, `qhead_per_kvhead`, `tile_m`, `tile_n`,
    `mma_pv_is_rs` and `paged_kv_non_tma`; `has_softcap` says that the kernel gets a cap.
    """

    def __init__(self, dtype, head_dim: int, head_dim_v: int, qhead_per_kvhead: int, *, has_softcap: bool, **config):
        super().__init__(
            dtype,
            head_dim,
            head_dim_v,
            qhead_per_kvhead,
            is_causal=True,  # only FA4's choice of the longest-first scheduler sees this; see `_for_tile`
            is_local=False,
            pack_gqa=qhead_per_kvhead > 1,
            num_stages=2,
            num_threads=384,
            Q_in_regs=False,
            intra_wg_overlap=True,
            score_mod=softcap if has_softcap else None,
            mask_mod=None,
            **config,
        )
        self.group = qhead_per_kvhead

    def _get_shared_storage_cls(self):
        """FA4's shared memory, with room for the output tile, which takes Q's place, where v is the wider one."""
        layout = self.sQ_layout
        if cute.cosize(self.sO_layout) > cute.cosize(layout):
            self.sQ_layout = self.sO_layout
        storage = super()._get_shared_storage_cls()
        self.sQ_layout = layout
        return storage

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mO: cute.Tensor,
        mLSE: Optional[cute.Tensor],
        softmax_scale: Float32,
        mCuSeqlensQ: Optional[cute.Tensor],
        mCuSeqlensK: Optional[cute.Tensor],
        mSeqUsedQ: Optional[cute.Tensor],
        mPageTable: Optional[cute.Tensor],
        mSinks: Optional[cute.Tensor],
        mRows: cute.Tensor,
        mRanges: cute.Tensor,
        cap: Optional[Float32],
        stream: cuda.CUstream = None,
    ):
        """Tensors as FA4's `__call__` takes them, the two tables, and the softcap in score units.

        `mSeqUsedQ` holds the rows of each sequence, 0 for those that are to be left alone.
        """
        tables = Tables.create(mRows, mRanges, mCuSeqlensQ, mO, mLSE, mSinks)
        scalars = (cap,) if const_expr(cap is not None) else None
        FlashAttentionForwardSm90.__call__(
            self,
            mQ,
            mK,
            mV,
            mO,
            mLSE,
            softmax_scale,
            mCuSeqlensQ,
            mCuSeqlensK,
            mSeqUsedQ,
            None,
            mPageTable,
            None,
            None,
            mSinks,
            tables,
            AuxData(None, scalars),
            None,
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
        sQ,
        sK,
        sV,
        tma_atom_Q,
        tma_atom_K,
        tma_atom_V,
        pipeline_k,
        pipeline_v,
        pipeline_q,
        gmem_tiled_copy_Q,
        mPageTable,
        tables,
        block_info,
        SeqlenInfoCls,
        TileSchedulerCls,
    ):
        work = TileSchedulerCls().initial_work_tile_info()
        if work.is_valid_tile:
            m_block, _, batch_idx, _ = work.tile_idx
            seqlen = SeqlenInfoCls(batch_idx)
            blocks = self._tile_blocks(tables, seqlen, batch_idx, m_block)
            if blocks.first < blocks.end:
                pages, keys = mPageTable, seqlen
                if const_expr(not self.use_tma_KV):
                    # cp.async follows single rows: keep it inside the slots that the tile needs.
                    lo, hi = self._needed_slots(tables, seqlen, batch_idx, m_block)
                    pages, keys = NeededPages(mPageTable, lo // mK.shape[0]), replace(seqlen, seqlen_k=hi)
                FlashAttentionForwardSm90.load(
                    self,
                    mQ,
                    mK,
                    mV,
                    sQ,
                    sK,
                    sV,
                    tma_atom_Q,
                    tma_atom_K,
                    tma_atom_V,
                    pipeline_k,
                    pipeline_v,
                    pipeline_q,
                    gmem_tiled_copy_Q,
                    pages,
                    tables,
                    blocks,
                    lambda _: keys,
                    lambda: OneTile(work.tile_idx),
                )
        if const_expr(tables.cu_seqlens_q is not None):
            self._fill_padding(tables)

    @cute.jit
    def _fill_padding(self, tables: Tables):
        """Writes the rows behind the last sequence, which see nothing (CUDA graphs pad; as a rule there are none)."""
        tidx = cute.arch.thread_idx()[0]
        rows, heads, dim = tables.out.shape
        row = tables.cu_seqlens_q[cute.size(tables.cu_seqlens_q) - 1] + cute.arch.block_idx()[0]
        while row < rows:
            for i in cutlass.range(tidx, heads * dim, self.num_threads_per_warp_group, unroll=1):
                tables.out[row, i // dim, i % dim] = self.dtype(0.0)
            if const_expr(tables.lse is not None):
                for head in cutlass.range(tidx, heads, self.num_threads_per_warp_group, unroll=1):
                    tables.lse[head, row] = (
                        Float32(tables.sinks[head]) if const_expr(tables.sinks is not None) else -Float32.inf
                    )
            row += cute.arch.grid_dim()[0]

    # Consumer warp groups

    @cute.jit
    def mma(
        self,
        tiled_mma_qk,
        tiled_mma_pv,
        mO,
        mLSE,
        sQ,
        sK,
        sVt,
        sP,
        sO,
        learnable_sink,
        pipeline_k,
        pipeline_v,
        pipeline_q,
        gmem_tiled_copy_O,
        tma_atom_O,
        tidx,
        softmax_scale_log2,
        softmax_scale,
        block_info,
        SeqlenInfoCls,
        AttentionMaskCls,
        TileSchedulerCls,
        tables,
        aux_data=AuxData(),
        fastdiv_mods=None,
    ):
        work = TileSchedulerCls().initial_work_tile_info()
        if work.is_valid_tile:
            m_block, head_idx, batch_idx, _ = work.tile_idx
            seqlen = SeqlenInfoCls(batch_idx)
            blocks = self._tile_blocks(tables, seqlen, batch_idx, m_block)
            tile_rows, columns = self._thread_rows(tiled_mma_qk.get_slice(tidx), m_block)
            sinks = self._row_sinks(learnable_sink, head_idx, tile_rows)
            if blocks.first < blocks.end:
                limits = self._row_limits(tables, seqlen, batch_idx, tile_rows, columns)
                lo, hi = self._trusted_slots(tables, seqlen, batch_idx, m_block, blocks)
                sV = layout_utils.transpose_view(sVt)
                tile = self._for_tile(blocks, lo, hi, tidx, sV, pipeline_v, sinks)
                FlashAttentionForwardSm90.mma(
                    tile,
                    tiled_mma_qk,
                    tiled_mma_pv,
                    mO,
                    mLSE,
                    sQ,
                    sK,
                    sVt,
                    sP,
                    sO,
                    learnable_sink,
                    pipeline_k,
                    pipeline_v,
                    pipeline_q,
                    gmem_tiled_copy_O,
                    tma_atom_O,
                    tidx,
                    softmax_scale_log2,
                    softmax_scale,
                    blocks,
                    lambda _: seqlen,
                    lambda _: RowIntervals(self.tile_n, limits),
                    lambda: OneTile(work.tile_idx),
                    tables,
                    aux_data,
                    fastdiv_mods,
                )
            else:
                acc_O = cute.make_rmem_tensor(
                    tiled_mma_pv.get_slice(tidx).partition_shape_C((self.tile_m, self.tile_hdimv)), Float32
                )
                acc_O.fill(0.0)
                lse = cute.make_rmem_tensor(len(tile_rows), Float32)
                for r in cutlass.range_constexpr(len(tile_rows)):
                    lse[r] = sinks[r] if const_expr(learnable_sink is not None) else -Float32.inf
                FlashAttentionForwardSm90.epilogue(
                    self,
                    acc_O,
                    lse,
                    mO,
                    mLSE,
                    sO,
                    seqlen,
                    gmem_tiled_copy_O,
                    tma_atom_O,
                    tiled_mma_pv,
                    tidx,
                    m_block,
                    head_idx,
                    batch_idx,
                )

    def _for_tile(self, blocks, lo, hi, tidx, sV, pipeline_v, sinks):
        """This kernel with what the overridden steps of FA4's main loop need to know of the tile."""
        tile = copy.copy(self)
        # The main loop with masked blocks at both ends is FA4's local one; its scheduler was chosen before.
        tile.is_causal, tile.is_local = False, True
        tile.blocks, tile.lo, tile.hi = blocks, lo, hi
        tile.tidx, tile.sV, tile.pipeline_v, tile.sinks = tidx, sV, pipeline_v, sinks
        return tile

    def first_half_block_overlap(self, n_block, *args, **kwargs):
        """FA4's step, then the last touched block's untrusted V rows are zeroed."""
        state = super().first_half_block_overlap(n_block, *args, **kwargs)
        self._clear_values(state, self.hi - n_block * self.tile_n, Int32(self.tile_n))
        return state

    def last_half_block_overlap(self, kv_consumer_state, *args, **kwargs):
        """The first touched block's untrusted V rows are zeroed, then FA4's step."""
        self._clear_values(kv_consumer_state, Int32(0), self.lo - self.blocks.first * self.tile_n)
        return super().last_half_block_overlap(kv_consumer_state, *args, **kwargs)

    @cute.jit
    def _clear_values(self, state, begin: Int32, end: Int32):
        """Zeroes rows [begin, end) of the V tile that `state` is about to read.

        Each warp group does so for itself: FA4 lets the groups take turns, so they must not wait for one another here,
        and writing the same zeros twice is harmless.
        """
        if begin < end:
            self.pipeline_v.consumer_wait(state, self.pipeline_v.consumer_try_wait(state))
            # A swizzle permutes the bytes of a row within the row, so whole rows may be cleared without it.
            sV = cute.recast_tensor(self.sV[None, None, state.index], Int64)
            per_row = cute.size(sV, mode=[1])
            threads = self.num_threads_per_warp_group
            for i in cutlass.range(self.tidx % threads, (end - begin) * per_row, threads, unroll=1):
                sV[begin + i // per_row, i % per_row] = Int64(0)
            cute.arch.fence_view_async_shared()
            cute.arch.barrier(barrier_id=CLEAR_BARRIER + self.tidx // threads, number_of_threads=threads)

    @cute.jit
    def apply_score_mod(
        self,
        thr_mma_qk,
        batch_idx,
        head_idx,
        m_block,
        acc_S,
        n_block,
        softmax_scale,
        seqlen,
        aux_data=AuxData(),
        fastdiv_mods=None,
    ):
        """Scores become `cap * tanh(scale * score / cap)`."""
        cap = aux_data.scalars[0]
        acc_S.store(
            cute.math.tanh(acc_S.load() * (softmax_scale / cap)) * cap
        )  # the fast form is off by 1e-5 of the cap

    def epilogue(self, acc_O, lse, *args):
        """FA4's step, with an exact LSE where a sink outweighs every score so far that FA4's sum overflows."""
        if self.sinks is not None:
            self._repair_lse(lse)
        super().epilogue(acc_O, lse, *args)

    @cute.jit
    def _repair_lse(self, lse):
        for r in cutlass.range_constexpr(cute.size(lse)):
            lse[r] = self.sinks[r] if lse[r] == Float32.inf else lse[r]

    # Reading the tables

    @cute.jit
    def _tile_blocks(self, tables: Tables, seqlen, batch_idx: Int32, m_block: Int32):
        # The slot of a tile as `plan.tile_slots` counts it: computed, since every tile waits for this.
        if const_expr(seqlen.has_cu_seqlens_q):
            slot = seqlen.offset_q * self.group // self.tile_m + batch_idx + m_block
        else:
            slot = batch_idx * cute.ceil_div(seqlen.seqlen_q * self.group, self.tile_m) + m_block
        return TileBlocks(*[tables.ranges[slot, i] for i in range(4)])

    def _first_row(self, seqlen, batch_idx: Int32):
        return seqlen.offset_q if seqlen.has_cu_seqlens_q else batch_idx * seqlen.seqlen_q

    @cute.jit
    def _thread_rows(self, thr_mma, m_block: Int32):
        """Packed row numbers of this thread's accumulator rows, and the first score column that it owns."""
        coords = layout_utils.reshape_acc_to_mn(
            thr_mma.partition_C(cute.make_identity_tensor((self.tile_m, self.tile_n)))
        )
        rows = [coords[r, 0][0] + m_block * self.tile_m for r in range(cute.size(coords, mode=[0]))]
        return rows, coords[0, 0][1]

    def _row_sinks(self, sinks, head_idx: Int32, tile_rows: list):
        if sinks is None:
            return None
        if not self.pack_gqa:
            return [Float32(sinks[head_idx]) for _ in tile_rows]
        return [Float32(sinks[head_idx * self.group + row % self.group]) for row in tile_rows]

    @cute.jit
    def _row_limits(self, tables: Tables, seqlen, batch_idx: Int32, tile_rows: list, first_column: Int32):
        limits = []
        for row in tile_rows:
            # Rows of the tile behind the sequence repeat its last row; nobody reads them.
            at = cutlass.min(row // self.group, seqlen.seqlen_q - 1) + self._first_row(seqlen, batch_idx)
            limits.append(tuple(sm90_col_to_r2p_idx(tables.rows[at, side] - first_column) for side in range(2)))
        return tuple(limits)

    @cute.jit
    def _trusted_slots(self, tables: Tables, seqlen, batch_idx: Int32, m_block: Int32, blocks: TileBlocks):
        """Key slots [lo, hi) of the touched blocks that hold no garbage, because some row of the sequence sees them.

        Positions of a sequence's rows are consecutive and a row sees an interval around its own, so what its rows see
        has no holes: everything between what the first and the last row see. Only tiles at the ends look at each row.
        """
        first_row = self._first_row(seqlen, batch_idx)
        lo, hi = blocks.first * self.tile_n, blocks.end * self.tile_n
        seen_from, seen_past = tables.rows[first_row, 0], tables.rows[first_row, 1]
        last_seen_past = tables.rows[first_row + seqlen.seqlen_q - 1, 1]
        if seen_from >= seen_past or lo < seen_from or hi > last_seen_past:
            lo, hi = self._needed_slots(tables, seqlen, batch_idx, m_block)
        return lo, hi

    @cute.jit
    def _needed_slots(self, tables: Tables, seqlen, batch_idx: Int32, m_block: Int32):
        """The smallest interval of key slots that holds those of all rows of the tile; for all lanes of a warp."""
        first = m_block * self.tile_m // self.group
        last = cutlass.min(((m_block + 1) * self.tile_m - 1) // self.group, seqlen.seqlen_q - 1)
        positions = self.tile_m // self.group if self.tile_m % self.group == 0 else (self.tile_m - 1) // self.group + 2
        lo, hi = Int32(FAR), Int32(0)
        for i in cutlass.range_constexpr(cute.ceil_div(positions, cute.arch.WARP_SIZE)):
            at = cutlass.min(first + i * cute.arch.WARP_SIZE + cute.arch.lane_idx(), last) + self._first_row(
                seqlen, batch_idx
            )
            row_lo, row_hi = tables.rows[at, 0], tables.rows[at, 1]
            lo = cutlass.min(lo, row_lo) if row_lo < row_hi else lo
            hi = cutlass.max(hi, row_hi)
        return cute.arch.warp_redux_sync(lo, kind="min"), cute.arch.warp_redux_sync(hi, kind="max")
