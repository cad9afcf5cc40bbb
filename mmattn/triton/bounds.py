"""The lowering as device kernels: row intervals and tile tables in one launch each, columns in two, without reading the device.

Grids come from host sizes alone and lengths are read on the device, so both can be captured in a CUDA graph.
"""

from __future__ import annotations

import types

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import mask as mask_module
from ..batch import Batch, current
from ..columns import Columns, key_batch
from ..mask import Mask
from ..plan import TileTable, tile_slots

ROWS = 128
SPANS = 256
SPANS_AT_ONCE = 32
COLUMNS = 128
ORDER_ROWS = 4096


@triton.jit
def _where(condition, a, b):
    return tl.where(condition, a, b)


# The closed form has one source, in mask.py; here Triton compiles it, with `where` bound to Triton's.
_form = types.FunctionType(
    mask_module.row_interval.__code__,
    {"tl": tl, "where": _where, "__name__": __name__},
    mask_module.row_interval.__name__,
)
_form.__module__ = __name__
_row_interval = triton.jit(_form)


@triton.jit
def sequence_rows(seq, cu_seqlens_q, batch_size, total_q, seqlen_q):
    """First row and length of a sequence; packed sequence `batch_size` is the rows behind all others."""
    if cu_seqlens_q is not None:
        row0 = tl.minimum(tl.load(cu_seqlens_q + seq), total_q)
        end = total_q
        if seq < batch_size:
            end = tl.minimum(tl.load(cu_seqlens_q + seq + 1), total_q)
        length = end - row0
    else:
        row0 = seq * seqlen_q
        length = seqlen_q
    return row0, length


@triton.jit
def tile_at(slot, index, starts, TILES: tl.constexpr):
    """Slot, sequence (-1: unused) and number within the sequence of a tile of a table.

    With `starts`, `slot` counts `TILES` for every sequence, which may have fewer: one load less to wait for.
    """
    if starts is not None:
        seq = slot // TILES
        m = slot % TILES
        slot = tl.load(starts + seq) + m
    else:
        seq = tl.load(index + slot * 2)
        m = tl.load(index + slot * 2 + 1)
    return slot, seq, m


@triton.jit
def _find_tile(slot, cu_seqlens_q, batch_size, total_q, seqlen_q, tile_m, group, PACKED: tl.constexpr):
    """Sequence, tile within it, first row and length of the sequence that owns this slot (see plan.tile_slots)."""
    if PACKED:
        low = slot * 0
        high = low + batch_size
        while low < high:
            middle = (low + high + 1) // 2
            start = tl.minimum(tl.load(cu_seqlens_q + middle), total_q).to(tl.int64) * group // tile_m + middle
            if start <= slot:
                low = middle
            else:
                high = middle - 1
        seq = low
        row0, length = sequence_rows(seq, cu_seqlens_q, batch_size, total_q, seqlen_q)
        m = slot - (row0.to(tl.int64) * group // tile_m).to(tl.int32) - seq
    else:
        tiles = (seqlen_q * group + tile_m - 1) // tile_m
        seq = slot // tiles
        m = slot % tiles
        row0, length = sequence_rows(seq, None, batch_size, total_q, seqlen_q)
    return seq, m, row0, length


@triton.jit(do_not_specialize=["batch_size", "total_q", "seqlen_q", "seqlen_k", "n_spans", "causal",
                               "left", "right", "chunk_size", "chunk_back", "clamp"])  # fmt: skip
def _row_kernel(
    rows, cu_seqlens_q, cu_seqlens_k, seqused_k, q_start, kv_start, kv_lo, causal_of, spans, query_spans,
    batch_size, total_q, seqlen_q, seqlen_k, n_spans, causal, left, right, chunk_size, chunk_back, clamp,
    PACKED: tl.constexpr, R: tl.constexpr, S: tl.constexpr, S1: tl.constexpr,
):  # fmt: skip
    seq, m, row0, length = _find_tile(tl.program_id(0), cu_seqlens_q, batch_size, total_q, seqlen_q, R, 1, PACKED)
    i = m * R + tl.arange(0, R)
    if m * R >= length:
        return
    out = rows + (row0 + i).to(tl.int64) * 2
    if seq >= batch_size:  # rows past cu_seqlens_q[-1]
        tl.store(out, tl.zeros([R], tl.int32), mask=i < length)
        tl.store(out + 1, tl.zeros([R], tl.int32), mask=i < length)
        return

    kv_len = seqlen_k
    if seqused_k is not None:
        kv_len = tl.maximum(tl.minimum(tl.load(seqused_k + seq), seqlen_k), 0)
    elif cu_seqlens_k is not None:
        kv_len = tl.load(cu_seqlens_k + seq + 1) - tl.load(cu_seqlens_k + seq)
    kv0 = tl.zeros([], tl.int64)
    if kv_start is not None:
        kv0 = tl.load(kv_start + seq).to(tl.int64)
    first = kv0
    if kv_lo is not None:
        first = tl.maximum(first, tl.load(kv_lo + seq).to(tl.int64))
    q0 = kv0 + kv_len - length
    if q_start is not None:
        q0 = tl.load(q_start + seq).to(tl.int64)
    q = q0 + i
    row_causal = causal
    if causal_of is not None:
        row_causal = tl.load(causal_of + seq)

    span_start = tl.full([R], -1, tl.int32)
    span_end = tl.full([R], -1, tl.int32)
    if query_spans is not None:
        at = query_spans + (row0 + i).to(tl.int64) * 2
        span_start = tl.load(at, mask=i < length, other=-1)
        span_end = tl.load(at + 1, mask=i < length, other=-1)
    if spans is not None:
        # Spans may come in any order. The tile tests S at once, and compares them row by row only where some meet it.
        mine = spans + seq.to(tl.int64) * n_spans * 2
        q_first = q0 + m * R
        q_last = q0 + tl.minimum(m * R + R, length) - 1
        for s0 in range(0, n_spans, S):
            s = s0 + tl.arange(0, S)
            start = tl.load(mine + s * 2, mask=s < n_spans, other=-1)
            end = tl.load(mine + s * 2 + 1, mask=s < n_spans, other=-1)
            meets = (start < end) & (start <= q_last) & (end >= q_first)
            if tl.max(meets.to(tl.int32), 0) > 0:
                for s1 in range(s0, tl.minimum(s0 + S, n_spans), S1):
                    t = s1 + tl.arange(0, S1)
                    start1 = tl.load(mine + t * 2, mask=t < n_spans, other=-1)[None, :]
                    end1 = tl.load(mine + t * 2 + 1, mask=t < n_spans, other=-1)[None, :]
                    holds = (start1 < end1) & (start1 <= q[:, None]) & (q[:, None] <= end1)
                    span_start = tl.maximum(span_start, tl.max(tl.where(holds, start1, -1), 1))
                    span_end = tl.maximum(span_end, tl.max(tl.where(holds, end1, -1), 1))

    lo, hi = _row_interval(
        q, row_causal, span_start.to(tl.int64), span_end.to(tl.int64), left, right, chunk_size, chunk_back, clamp
    )
    lo = tl.maximum(lo, first) - kv0
    hi = tl.minimum(hi - kv0 + 1, kv_len)
    empty = lo >= hi
    tl.store(out, tl.where(empty, 0, lo).to(tl.int32), mask=i < length)
    tl.store(out + 1, tl.where(empty, 0, hi).to(tl.int32), mask=i < length)


@triton.jit(do_not_specialize=["batch_size", "total_q", "seqlen_q"])
def _tile_kernel(
    rows, ranges, index, starts, cu_seqlens_q, batch_size, total_q, seqlen_q,
    PACKED: tl.constexpr, TILE_M: tl.constexpr, GROUP: tl.constexpr, TILE_N: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0)
    seq, m, row0, length = _find_tile(slot, cu_seqlens_q, batch_size, total_q, seqlen_q, TILE_M, GROUP, PACKED)
    used = m.to(tl.int64) * TILE_M < length.to(tl.int64) * GROUP
    if m == 0:  # every sequence has a slot of its own for m = 0, used or not
        tl.store(starts + seq, slot)
    if slot == tl.num_programs(0) - 1:  # batched rows: no sequence starts at the end
        tl.store(starts + batch_size, slot + 1, mask=not PACKED)
    i = (m.to(tl.int64) * TILE_M // GROUP).to(tl.int32) + tl.arange(0, P)
    last = tl.minimum(((m + 1).to(tl.int64) * TILE_M - 1) // GROUP, length - 1)
    present = used & (i <= last)
    at = rows + (row0 + i).to(tl.int64) * 2
    lo = tl.load(at, mask=present, other=0)
    hi = tl.load(at + 1, mask=present, other=0)
    seeing = lo < hi
    FAR: tl.constexpr = 2147483647
    min_lo = tl.min(tl.where(seeing, lo, FAR), 0)
    max_hi = tl.max(hi, 0)
    first = tl.where(max_hi > 0, min_lo // TILE_N, 0)
    end = (max_hi + TILE_N - 1) // TILE_N
    full = tl.minimum(tl.maximum((tl.max(lo, 0) + TILE_N - 1) // TILE_N, first), end)
    full_end = tl.minimum(tl.maximum(tl.min(tl.where(present, hi, FAR), 0) // TILE_N, full), end)
    tl.store(ranges + slot * 4, first)
    tl.store(ranges + slot * 4 + 1, full)
    tl.store(ranges + slot * 4 + 2, full_end)
    tl.store(ranges + slot * 4 + 3, end)
    tl.store(index + slot * 2, tl.where(used, seq, -1))
    tl.store(index + slot * 2 + 1, tl.where(used, m, 0))


@triton.jit(do_not_specialize=["batch_size", "total_q", "seqlen_q"])
def _order_kernel(rows, of_sequences, cu_seqlens_q, batch_size, total_q, seqlen_q, R: tl.constexpr):
    """One program per sequence: its entry of `Columns.of_sequences`."""
    seq = tl.program_id(0)
    row0, length = sequence_rows(seq, cu_seqlens_q, batch_size, total_q, seqlen_q)
    FAR: tl.constexpr = 2147483647
    first = row0 * 0 + FAR
    end = row0 * 0
    found = row0 * 0
    falls = row0 * 0
    for i0 in range(0, length, R):
        i = i0 + tl.arange(0, R)
        at = rows + (row0 + i).to(tl.int64) * 2
        lo = tl.load(at, mask=i < length, other=0)
        hi = tl.load(at + 1, mask=i < length, other=0)
        lo_before = tl.load(at - 2, mask=(i > 0) & (i < length), other=0)
        hi_before = tl.load(at - 1, mask=(i > 0) & (i < length), other=0)
        seeing = lo < hi
        both = seeing & (lo_before < hi_before)
        falls += tl.sum((both & ((lo < lo_before) | (hi < hi_before))).to(tl.int32), 0)
        found += tl.sum(seeing.to(tl.int32), 0)
        first = tl.minimum(first, tl.min(tl.where(seeing, i, FAR), 0))
        end = tl.maximum(end, tl.max(tl.where(seeing, i + 1, 0), 0))
    first = tl.minimum(first, end)
    tl.store(of_sequences + seq * 3, first)
    tl.store(of_sequences + seq * 3 + 1, end)
    tl.store(of_sequences + seq * 3 + 2, ((falls == 0) & (found == end - first)).to(tl.int32))


@triton.jit(do_not_specialize=["batch_size", "total_q", "seqlen_q", "total_k", "slots", "steps"])
def _column_kernel(
    columns, rows, of_sequences, cu_seqlens_q, cu_seqlens_k, batch_size, total_q, seqlen_q, total_k, slots, steps,
    PACKED: tl.constexpr, C: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Searches the rows of a sequence in order for each of `C` keys; looks at all of them where they are in no order."""
    seq, n, key0, keys = _find_tile(tl.program_id(0), cu_seqlens_k, batch_size, total_k, slots, C, 1, PACKED)
    j = n * C + tl.arange(0, C)
    if n * C >= keys:
        return
    first = tl.zeros([C], tl.int32)
    end = tl.zeros([C], tl.int32)
    if seq < batch_size:
        row0, _ = sequence_rows(seq, cu_seqlens_q, batch_size, total_q, seqlen_q)
        begin = tl.load(of_sequences + seq * 3)
        stop = tl.load(of_sequences + seq * 3 + 1)
        at = rows + row0.to(tl.int64) * 2
        if tl.load(of_sequences + seq * 3 + 2) != 0:
            # The first row that ends behind the key, and the first that begins behind it.
            first += begin
            end += begin
            first_high = first * 0 + stop
            end_high = first_high
            for _ in range(0, steps):
                middle = (first + first_high) // 2
                behind = tl.load(at + middle * 2 + 1, mask=first < first_high, other=0) > j
                first_high = tl.where(behind, middle, first_high)
                first = tl.where(behind | (first >= first_high), first, middle + 1)
                middle = (end + end_high) // 2
                behind = tl.load(at + middle * 2, mask=end < end_high, other=0) > j
                end_high = tl.where(behind, middle, end_high)
                end = tl.where(behind | (end >= end_high), end, middle + 1)
        else:
            first += 2147483647
            for i0 in range(begin, stop, R):
                i = i0 + tl.arange(0, R)
                lo = tl.load(at + i * 2, mask=i < stop, other=0)
                hi = tl.load(at + i * 2 + 1, mask=i < stop, other=0)
                seen = (lo[:, None] <= j[None, :]) & (j[None, :] < hi[:, None])
                first = tl.minimum(first, tl.min(tl.where(seen, i[:, None], 2147483647), 0))
                end = tl.maximum(end, tl.max(tl.where(seen, i[:, None] + 1, 0), 0))
    nobody = first >= end
    out = columns + (key0 + j).to(tl.int64) * 2
    tl.store(out, tl.where(nobody, 0, first), mask=j < keys)
    tl.store(out + 1, tl.where(nobody, 0, end), mask=j < keys)


class DeviceLowering:
    """`plan.Lowering` with the kernels above."""

    def row_intervals(self, mask: Mask, batch: Batch) -> Tensor:
        rows = torch.empty(batch.total_q, 2, dtype=torch.int32, device=batch.device)
        slots = tile_slots(batch, ROWS, 1)
        if batch.total_q == 0:
            return rows
        seqlen_k = 2**31 - 1 if batch.seqlen_k is None else batch.seqlen_k
        n_spans = 0 if batch.spans is None else batch.spans.shape[1]
        with current(batch.device):
            _row_kernel[(slots,)](
                rows, batch.cu_seqlens_q, batch.cu_seqlens_k, batch.seqused_k, batch.q_start, batch.kv_start, batch.kv_lo,
                batch.causal, batch.spans, batch.query_spans,
                batch.batch_size, batch.total_q, batch.seqlen_q or 0, seqlen_k, n_spans, int(mask.causal), *mask.limits,
                PACKED=batch.packed_q, R=ROWS, S=SPANS, S1=SPANS_AT_ONCE,
            )  # fmt: skip
        return rows

    def tile_table(self, rows: Tensor, batch: Batch, tile_m: int, group: int, tile_n: int) -> TileTable:
        slots = tile_slots(batch, tile_m, group)
        new = rows.new_empty
        table = TileTable(new(slots, 4), new(slots, 2), (new if slots else rows.new_zeros)(batch.batch_size + 1))
        if slots:
            positions = triton.next_power_of_2((tile_m - 1) // group + 2 if tile_m % group else tile_m // group)
            with current(batch.device):
                _tile_kernel[(slots,)](
                    rows, table.ranges, table.index, table.starts, batch.cu_seqlens_q,
                    batch.batch_size, batch.total_q, batch.seqlen_q or 0,
                    PACKED=batch.packed_q, TILE_M=tile_m, GROUP=group, TILE_N=tile_n, P=positions,
                )  # fmt: skip
        return table

    def column_table(self, rows: Tensor, batch: Batch, slots: int) -> Columns:
        keys = key_batch(batch, slots)
        columns = Columns(rows.new_empty(keys.total_q, 2), rows.new_empty(batch.batch_size, 3))
        where = (batch.batch_size, batch.total_q, batch.seqlen_q or 0)
        with current(batch.device):
            if batch.batch_size:
                _order_kernel[(batch.batch_size,)](
                    rows, columns.of_sequences, batch.cu_seqlens_q, *where, R=ORDER_ROWS, num_warps=8
                )
            if keys.total_q:
                _column_kernel[(tile_slots(keys, COLUMNS, 1),)](
                    columns.rows, rows, columns.of_sequences, batch.cu_seqlens_q, batch.cu_seqlens_k, *where,
                    keys.total_q, slots, batch.max_seqlen_q.bit_length() + 1,
                    PACKED=batch.cu_seqlens_k is not None, C=COLUMNS, R=32,
                )  # fmt: skip
        return columns
