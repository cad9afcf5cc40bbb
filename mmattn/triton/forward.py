"""The Triton forward: attention over row intervals. One kernel source for CUDA and ROCm.

A program owns one tile of packed query rows (position * group + head in group) of one KV head. It walks the key blocks
of its tile in three runs: an edge that is masked, an interior in which every row sees every key, and an edge again.
It knows nothing of masks beyond `[lo, hi)` per row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents

from ..batch import FEW_ROWS, SHORT_ROWS, Batch, row_reach
from ..plan import Options, Plan, Write, in_turn
from . import decode
from .bounds import sequence_rows, tile_at
from .config import Tile, architecture, choose_short_tile, choose_tile, ptx, split_head_dim
from .decode import lse_of_parts
from .launch import Descriptor, Launch
from .layout import lse_strides, matrix, scale_strides, strides, vectorises

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
_FLOAT8 = {torch.float8_e4m3fn: tl.float8e4nv, torch.float8_e5m2: tl.float8e5}


@triton.jit
def _dot(a, b, c, PRECISION: tl.constexpr):
    if PRECISION == "interpreted bf16":  # the interpreter holds bf16 as bit patterns, which its dot does not know
        return tl.dot(a.to(tl.float32), b.to(tl.float32), c, input_precision="ieee")
    return tl.dot(a, b, c, input_precision=PRECISION)


@triton.jit
def _load(
    x, row, col, n, first, end, pages, page_stride, row_stride,
    D: tl.constexpr, OFFSET: tl.constexpr, WIDTH: tl.constexpr,
    TILE_N: tl.constexpr, PAGE: tl.constexpr, TMA: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """Columns `OFFSET..OFFSET+WIDTH` of keys `n..n+TILE_N`; on edge blocks only keys `first..end` are touched."""
    if TMA:
        result = x.load([row + n, col])
    else:
        d = OFFSET + tl.arange(0, WIDTH)
        keys = tl.arange(0, TILE_N)
        key = n + keys
        if PAGE == 0:
            at = x + n.to(tl.int64) * row_stride + (keys[:, None] * row_stride + d[None, :])
        elif PAGE % TILE_N == 0:  # the block lies within one page; an edge block exists only if a row needs it
            page = tl.load(pages + n // PAGE).to(tl.int64)
            at = (
                x
                + page * page_stride
                + (n % PAGE).to(tl.int64) * row_stride
                + (keys[:, None] * row_stride + d[None, :])
            )
        else:
            page_at = pages + key // PAGE
            within = key % PAGE
            if TILE_N % PAGE == 0:  # the same in every block: hoisted out of the loop
                page_at = pages + n // PAGE + keys // PAGE
                within = keys % PAGE
            if EDGE:
                page = tl.load(page_at, mask=(key >= first) & (key < end), other=0)
            else:
                page = tl.load(page_at)
            at = x + (within.to(tl.int64) * row_stride)[:, None] + d[None, :]
            at += (page.to(tl.int64) * page_stride)[:, None]
        if EDGE:
            needed = (key >= first) & (key < end)
            if OFFSET + WIDTH > D:
                result = tl.load(at, mask=needed[:, None] & (d[None, :] < D), other=0.0)
            else:
                result = tl.load(at, mask=needed[:, None], other=0.0)
        elif OFFSET + WIDTH > D:
            result = tl.load(at, mask=d[None, :] < D, other=0.0)
        else:
            result = tl.load(at)
    return result


@triton.constexpr_function
def _take(byte, float8):
    """PTX that turns byte 0 or 1 of two int16 into two fp16. (e5m2 is the upper half of an fp16.)"""
    if float8 == tl.float8e5:
        return f"prmt.b32 $0, $1, 0, {'0x3414' if byte else '0x2404'};"
    pick = f"prmt.b32 both, $1, 0, {'0x4431' if byte else '0x4420'};"
    return f"{{ .reg .b32 both; .reg .b16 low; {pick} cvt.u16.u32 low, both; cvt.rn.f16x2.e4m3x2 $0, low; }}"


@triton.jit
def _byte(pairs, BYTE: tl.constexpr, PAIRS: tl.constexpr, PTX: tl.constexpr):
    """One float8 of every int16 pair, as fp16, in a layout that tensor cores take: `ldmatrix` transposes no single bytes.

    So the even columns of V fill the head of the output's columns, the odd ones its tail. `PAIRS` is the float8 type.
    """
    if PTX > 0:
        half = tl.inline_asm_elementwise(_take(BYTE, PAIRS), "=r,r", [pairs], dtype=tl.float16, is_pure=True, pack=2)
    else:
        half = (pairs >> (8 * BYTE)).to(tl.int8).to(PAIRS, bitcast=True).to(tl.float16)
    return half


@triton.jit
def _scores(
    q, q_tail, block, first, end, k, k_row, k_col, pages, k_page_stride, k_stride,
    D: tl.constexpr, K_HEAD: tl.constexpr, K_TAIL: tl.constexpr, TILE_N: tl.constexpr, PAGE: tl.constexpr,
    TMA: tl.constexpr, PRECISION: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """q times the keys of one block."""
    n = block * TILE_N
    kt = _load(k, k_row, k_col, n, first, end, pages, k_page_stride, k_stride, D, 0, K_HEAD, TILE_N, PAGE, TMA, EDGE)
    s = _dot(q, kt.to(q.dtype).T, tl.zeros([q.shape[0], TILE_N], tl.float32), PRECISION)
    if K_TAIL > 0:
        kt = _load(k, k_row, k_col, n, first, end, pages, k_page_stride, k_stride,
                   D, K_HEAD, K_TAIL, TILE_N, PAGE, TMA, EDGE)  # fmt: skip
        s = _dot(q_tail, kt.to(q.dtype).T, s, PRECISION)
    return s


@triton.jit
def _gather(
    acc, acc_tail, total, top, s, q, lo, hi, block, first, end,
    v, v_row, v_col, pages, v_page_stride, v_stride, scale, cap,
    DV: tl.constexpr, V_HEAD: tl.constexpr, V_TAIL: tl.constexpr, TILE_N: tl.constexpr, PAGE: tl.constexpr,
    SOFTCAP: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr, PAIRS: tl.constexpr, PTX: tl.constexpr,
    EDGE: tl.constexpr,
):  # fmt: skip
    """Online softmax over the scores of one block in base 2, and its values. V may come in float8 pairs; see `_byte`."""
    keys = tl.arange(0, TILE_N)
    n = block * TILE_N
    V_COLUMNS: tl.constexpr = DV if PAIRS is None else DV // 2
    if SOFTCAP:
        # tanh(x) = 1 - 2 / (1 + exp(2x)): right at both ends, where exp gives inf or 0.
        s = cap * LOG2E * (1 - 2 / (1 + tl.exp2(s * (scale * 2 / cap))))
    if EDGE:
        if not SOFTCAP:
            s = s * scale
        key = n + keys[None, :]
        s = tl.where((key >= lo[:, None]) & (key < hi[:, None]), s, float("-inf"))
        new_top = tl.maximum(top, tl.max(s, 1))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        p = tl.exp2(s - base[:, None])
        alpha = tl.exp2(top - base)
    elif SOFTCAP:
        new_top = tl.maximum(top, tl.max(s, 1))
        p = tl.exp2(s - new_top[:, None])
        alpha = tl.exp2(top - new_top)
    else:
        new_top = tl.maximum(top, tl.max(s, 1) * scale)
        p = tl.exp2(s * scale - new_top[:, None])
        alpha = tl.exp2(top - new_top)
    total = total * alpha + tl.sum(p, 1)
    acc = acc * alpha[:, None]
    vt = _load(v, v_row, v_col, n, first, end, pages, v_page_stride, v_stride,
               V_COLUMNS, 0, V_HEAD, TILE_N, PAGE, TMA, EDGE)  # fmt: skip
    if TMA and EDGE:  # TMA loads whole blocks; 0 * NaN from a slot that no row needs would be NaN
        needed = (n + keys >= first) & (n + keys < end)
        vt = tl.where(needed[:, None], vt, 0)
    p = p.to(q.dtype)
    acc = _dot(p, vt.to(q.dtype) if PAIRS is None else _byte(vt, 0, PAIRS, PTX), acc, PRECISION)
    if V_TAIL > 0:
        acc_tail = acc_tail * alpha[:, None]
        if PAIRS is None:
            vt = _load(v, v_row, v_col, n, first, end, pages, v_page_stride, v_stride,
                       V_COLUMNS, V_HEAD, V_TAIL, TILE_N, PAGE, TMA, EDGE).to(q.dtype)  # fmt: skip
        else:
            vt = _byte(vt, 1, PAIRS, PTX)
        acc_tail = _dot(p, vt, acc_tail, PRECISION)
    return acc, acc_tail, total, new_top


@triton.jit
def _walk(
    acc, acc_tail, total, top, s, q, q_tail, lo, hi, begin, stop, first, end,
    k, v, k_row, k_col, v_row, v_col, pages, k_page_stride, k_stride, v_page_stride, v_stride, scale, cap,
    D: tl.constexpr, DV: tl.constexpr, K_HEAD: tl.constexpr, K_TAIL: tl.constexpr,
    V_HEAD: tl.constexpr, V_TAIL: tl.constexpr, TILE_N: tl.constexpr, PAGE: tl.constexpr,
    SOFTCAP: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr, PAIRS: tl.constexpr,
    PTX: tl.constexpr, EDGE: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """One run of key blocks `begin..stop`. With AHEAD `s` comes in as the scores of the first block, and those of the next
    one are computed beside each softmax, also of the block behind the run: Hopper's tensor cores work in the background."""
    for block in tl.range(begin, stop):
        now = _scores(q, q_tail, block + 1 if AHEAD else block, first, end, k, k_row, k_col, pages, k_page_stride, k_stride,
                      D, K_HEAD, K_TAIL, TILE_N, PAGE, TMA, PRECISION, EDGE)  # fmt: skip
        acc, acc_tail, total, top = _gather(
            acc, acc_tail, total, top, s if AHEAD else now, q, lo, hi, block, first, end,
            v, v_row, v_col, pages, v_page_stride, v_stride, scale, cap,
            DV, V_HEAD, V_TAIL, TILE_N, PAGE, SOFTCAP, TMA, PRECISION, PAIRS, PTX, EDGE)  # fmt: skip
        if AHEAD:
            s = now
    return acc, acc_tail, total, top, s


@triton.jit(do_not_specialize=["seqlen_q", "total_q", "heads_kv", "batch_size", "capacity", "page_table_stride",
                               "k_rows_batch", "k_rows_head", "k_cols_head", "v_rows_batch", "v_rows_head", "v_cols_head",
                               "lse_batch", "lse_head", "lse_split", "out_split", "k_scale_batch", "k_scale_head",
                               "v_scale_batch", "v_scale_head", "rows_above", "rows_upto", "part_rows"])  # fmt: skip
def _forward_kernel(
    q, k, v, out, lse, page_table, sinks, k_scale, v_scale, rows, ranges, index, starts, cu_seqlens_q, cu_seqlens_k,
    q_batch, q_row, q_head, k_batch, k_stride, k_head, v_batch, v_stride, v_head, out_batch, out_row, out_head,
    lse_batch, lse_head, out_split, lse_split, page_table_stride,
    k_scale_batch, k_scale_head, v_scale_batch, v_scale_head,
    k_rows_batch, k_rows_head, k_cols_head, v_rows_batch, v_rows_head, v_cols_head,
    seqlen_q, total_q, heads_kv, batch_size, capacity, rows_above, rows_upto, part_rows, scale, cap,
    GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, K_HEAD: tl.constexpr, K_TAIL: tl.constexpr,
    V_HEAD: tl.constexpr, V_TAIL: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILES: tl.constexpr,
    PAGE: tl.constexpr, SOFTCAP: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr, SPLIT: tl.constexpr, KEYS8: tl.constexpr,
    PAIRS: tl.constexpr, PTX: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Grid: (tiles * heads_kv, splits). With SPLIT, split s covers its share of the tile's key blocks and writes a
    partial result to `out` in the form of `decode.Parts`, where each sequence has `part_rows` rows."""
    # Heads vary fastest and tiles run backwards: on causal masks the longest tiles start first.
    head_kv = tl.program_id(0) % heads_kv
    slot = tl.num_programs(0) // heads_kv - 1 - tl.program_id(0) // heads_kv
    slot, seq, m = tile_at(slot, index, starts, TILES)
    if SPLIT and PTX >= 90:  # `combine` may be launched
        gdc_launch_dependents()
    if seq < 0:
        return

    # Rows of this tile.
    row0, length = sequence_rows(seq, cu_seqlens_q, batch_size, total_q, seqlen_q)
    if cu_seqlens_q is not None:
        q += row0.to(tl.int64) * q_row
        out_start = row0.to(tl.int64) * out_row
        lse_row = row0.to(tl.int64)
    else:
        q += seq.to(tl.int64) * q_batch
        out_start = seq.to(tl.int64) * out_batch
        lse_row = seq.to(tl.int64) * lse_batch
    if (length * GROUP <= rows_above) | (length * GROUP > rows_upto):  # the other launch's sequences
        return
    if TILES > 1:
        if m * TILE_M >= length * GROUP:
            return
    packed = m * TILE_M + tl.arange(0, TILE_M)
    i = packed // GROUP
    head = head_kv * GROUP + packed % GROUP
    exists = i < length
    if SPLIT:
        if seq >= batch_size:  # rows of no sequence have no partial results
            return
        exists = exists & (i < part_rows)
        lse_row = seq.to(tl.int64) * part_rows
        out_start = lse_row * out_row + tl.program_id(1).to(tl.int64) * out_split
        parts = out
    out += out_start
    lo = tl.load(rows + (row0 + i) * 2, mask=exists, other=0)
    hi = tl.load(rows + (row0 + i) * 2 + 1, mask=exists, other=0)

    # Keys of this sequence. `capacity` bounds them even where a plan was made for longer ones: never a wild read.
    if cu_seqlens_k is not None:
        key0 = seq * 0
        if seq < batch_size:
            key0 = tl.load(cu_seqlens_k + seq)
            capacity = tl.load(cu_seqlens_k + seq + 1) - key0
    hi = tl.minimum(hi, capacity)
    seeing = lo < hi
    first = tl.min(tl.where(seeing, lo, 2147483647), 0)
    end = tl.max(tl.where(seeing, hi, 0), 0)
    b0 = tl.load(ranges + slot * 4)
    b1 = tl.load(ranges + slot * 4 + 1)
    b2 = tl.load(ranges + slot * 4 + 2)
    b3 = tl.minimum(tl.load(ranges + slot * 4 + 3), (end + TILE_N - 1) // TILE_N)
    b1 = tl.minimum(b1, b3)
    b2 = tl.minimum(b2, tl.maximum(capacity // TILE_N, b1))
    if SPLIT:
        share = (b3 - b0 + tl.num_programs(1) - 1) // tl.num_programs(1)
        b0 = tl.minimum(b0 + tl.program_id(1) * share, b3)
        b3 = tl.minimum(b0 + share, b3)
        b1 = tl.minimum(tl.maximum(b1, b0), b3)
        b2 = tl.minimum(tl.maximum(b2, b0), b3)
        if b0 >= b3:  # nothing to do for this split: its LSE says so, and nobody reads its output
            lses = lse_of_parts(parts, tl.num_programs(1), out_split) + tl.program_id(1).to(tl.int64) * lse_split
            tl.store(
                lses + lse_row + head.to(tl.int64) * lse_head + i,
                tl.full([TILE_M], float("-inf"), tl.float32),
                mask=exists,
            )
            return
    if k_scale is not None:
        scale *= tl.load(k_scale + seq * k_scale_batch + head_kv * k_scale_head, mask=seq < batch_size, other=0.0)

    k_row = 0
    k_col = 0
    v_row = 0
    v_col = 0
    pages = page_table
    if PAGE > 0:
        pages = page_table + seq.to(tl.int64) * page_table_stride
        k += head_kv.to(tl.int64) * k_head
        v += head_kv.to(tl.int64) * v_head
    elif TMA:
        k_row = seq * k_rows_batch + head_kv * k_rows_head
        k_col = head_kv * k_cols_head
        v_row = seq * v_rows_batch + head_kv * v_rows_head
        v_col = head_kv * v_cols_head
        if cu_seqlens_k is not None:
            k_row += key0
            v_row += key0
    else:
        k += head_kv.to(tl.int64) * k_head
        v += head_kv.to(tl.int64) * v_head
        if cu_seqlens_k is not None:
            k += key0.to(tl.int64) * k_stride
            v += key0.to(tl.int64) * v_stride
        else:
            k += seq.to(tl.int64) * k_batch
            v += seq.to(tl.int64) * v_batch

    at = q + i[:, None].to(tl.int64) * q_row + head[:, None].to(tl.int64) * q_head
    d = tl.arange(0, K_HEAD)
    qh = tl.load(at + d[None, :], mask=exists[:, None] & (d[None, :] < D), other=0.0)
    qt = qh
    if K_TAIL > 0:
        d = K_HEAD + tl.arange(0, K_TAIL)
        qt = tl.load(at + d[None, :], mask=exists[:, None] & (d[None, :] < D), other=0.0)

    if KEYS8:  # float8 becomes fp16 in one instruction, bf16 in three
        qh = qh.to(tl.float16)
        qt = qt.to(tl.float16)

    acc = tl.zeros([TILE_M, V_HEAD], tl.float32)
    acc_tail = tl.zeros([TILE_M, V_TAIL if V_TAIL > 0 else 16], tl.float32)
    total = tl.zeros([TILE_M], tl.float32)
    top = tl.full([TILE_M], float("-inf"), tl.float32)
    s = total  # stands for scores where none are computed ahead
    edge, full, last = b1, b2, b3
    if AHEAD:
        # Shared memory has no room for q in two programs. Triton puts the left side of a product there if it comes straight
        # from a load; this one does not, so it stays in registers.
        qh = tl.where(exists[:, None], qh, 0.0)
        # The last block has none behind it.
        last = b3 - 1
        edge, full = tl.minimum(b1, last), tl.minimum(b2, last)
        s = _scores(qh, qt, b0, first, end, k, k_row, k_col, pages, k_batch, k_stride,
                    D, K_HEAD, K_TAIL, TILE_N, PAGE, TMA, PRECISION, True)  # fmt: skip
    acc, acc_tail, total, top, s = _walk(
        acc, acc_tail, total, top, s, qh, qt, lo, hi, b0, edge, first, end,
        k, v, k_row, k_col, v_row, v_col, pages, k_batch, k_stride, v_batch, v_stride, scale, cap,
        D, DV, K_HEAD, K_TAIL, V_HEAD, V_TAIL, TILE_N, PAGE, SOFTCAP, TMA, PRECISION, PAIRS, PTX, True, AHEAD)  # fmt: skip
    acc, acc_tail, total, top, s = _walk(
        acc, acc_tail, total, top, s, qh, qt, lo, hi, b1, full, first, end,
        k, v, k_row, k_col, v_row, v_col, pages, k_batch, k_stride, v_batch, v_stride, scale, cap,
        D, DV, K_HEAD, K_TAIL, V_HEAD, V_TAIL, TILE_N, PAGE, SOFTCAP, TMA, PRECISION, PAIRS, PTX, False, AHEAD)  # fmt: skip
    acc, acc_tail, total, top, s = _walk(
        acc, acc_tail, total, top, s, qh, qt, lo, hi, b2, last, first, end,
        k, v, k_row, k_col, v_row, v_col, pages, k_batch, k_stride, v_batch, v_stride, scale, cap,
        D, DV, K_HEAD, K_TAIL, V_HEAD, V_TAIL, TILE_N, PAGE, SOFTCAP, TMA, PRECISION, PAIRS, PTX, True, AHEAD)  # fmt: skip
    if AHEAD:
        if b0 < b3:
            acc, acc_tail, total, top = _gather(
                acc, acc_tail, total, top, s, qh, lo, hi, last, first, end,
                v, v_row, v_col, pages, v_batch, v_stride, scale, cap,
                DV, V_HEAD, V_TAIL, TILE_N, PAGE, SOFTCAP, TMA, PRECISION, PAIRS, PTX, True)  # fmt: skip

    if sinks is not None:  # one more logit in the denominator, without a value
        sink = tl.load(sinks + head).to(tl.float32) * LOG2E
        new_top = tl.maximum(top, sink)
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        alpha = tl.exp2(top - base)
        total = total * alpha + tl.exp2(sink - base)
        acc = acc * alpha[:, None]
        acc_tail = acc_tail * alpha[:, None]
        top = new_top
    inverse = tl.where(total > 0, 1 / total, 0.0)
    if v_scale is not None:
        inverse *= tl.load(v_scale + seq * v_scale_batch + head_kv * v_scale_head, mask=seq < batch_size, other=0.0)
    if SPLIT:  # (Any earlier, and ptxas takes so many registers that one program less fits on a multiprocessor.)
        lse = lse_of_parts(parts, tl.num_programs(1), out_split) + tl.program_id(1).to(tl.int64) * lse_split
    if lse is not None:
        value = tl.where(total > 0, (top + tl.log2(total)) * LN2, float("-inf"))
        tl.store(lse + lse_row + head.to(tl.int64) * lse_head + i, value, mask=exists)
    at = out + i[:, None].to(tl.int64) * out_row + head[:, None].to(tl.int64) * out_head
    d = tl.arange(0, V_HEAD) if PAIRS is None else 2 * tl.arange(0, V_HEAD)
    tl.store(
        at + d[None, :], (acc * inverse[:, None]).to(out.dtype.element_ty), mask=exists[:, None] & (d[None, :] < DV)
    )
    if V_TAIL > 0:
        d = V_HEAD + tl.arange(0, V_TAIL) if PAIRS is None else 2 * tl.arange(0, V_TAIL) + 1
        tl.store(
            at + d[None, :],
            (acc_tail * inverse[:, None]).to(out.dtype.element_ty),
            mask=exists[:, None] & (d[None, :] < DV),
        )


def settle(
    q: Tensor, k: Tensor, v: Tensor, plan: Plan, page_table: Tensor | None, *, options: Options, out: Tensor,
    lse: Tensor | None,
) -> Write:  # fmt: skip
    """The launches of this call and of others like it; see `plan.Settle`.

    Few rows against many keys take the split path of decode.py. A packed batch whose lengths differ may hold both long
    and short sequences: it takes both launches, each of which leaves the other's sequences alone. All of this follows
    from host sizes; lengths are read on the device.
    """
    batch = plan.batch
    group = q.shape[-2] // k.shape[-2]
    rows, few_rows = batch.max_seqlen_q * group, FEW_ROWS * group
    call = (q, k, v, plan, page_table, options, out, lse)
    passes: list[Write] = []
    if batch.total_q == 0:
        pass
    elif options.num_splits is not None:
        # Nothing may depend on the batch: a sequence's own length decides, and tiles are the tallest.
        longest = max(rows, batch.total_q * group) if batch.packed_q else rows  # rows of no sequence count too
        if longest > few_rows:
            passes.append(_settle_pass(*call, _long_tile(q, v, 2**31), 1, rows_above=few_rows))
        tile = _short_tile(q, k, v, 2**31, 2**31, page_table is not None)
        passes.append(_settle_pass(*call, tile, options.num_splits, rows_upto=few_rows))
    elif rows <= few_rows:
        passes.append(_settle_short(*call, batch.max_seqlen_q))
    elif batch.uneven:
        passes.append(_settle_pass(*call, _long_tile(q, v, rows), 1, rows_above=SHORT_ROWS * group))
        passes.append(_settle_short(*call, SHORT_ROWS, beside_long=True))
    else:
        passes.append(_settle_pass(*call, _long_tile(q, v, rows), 1))
    return in_turn(passes)


def settle_short(
    q: Tensor, k: Tensor, v: Tensor, plan: Plan, page_table: Tensor | None, *, options: Options, out: Tensor,
    lse: Tensor | None,
) -> Write:  # fmt: skip
    """`settle` for the sequences of up to `SHORT_ROWS` rows in an uneven batch; rows of the others are not written."""
    return _settle_short(q, k, v, plan, page_table, options, out, lse, SHORT_ROWS, beside_long=True)


def _settle_short(
    q: Tensor, k: Tensor, v: Tensor, plan: Plan, page_table: Tensor | None, options: Options, out: Tensor,
    lse: Tensor | None, most_rows: int, beside_long: bool = False,
) -> Write:  # fmt: skip
    """The split pass over sequences of up to `most_rows` rows, which are all, or else stand beside longer ones."""
    batch, heads_kv = plan.batch, k.shape[-2]
    rows = most_rows * (q.shape[-2] // heads_kv)
    reach = row_reach(plan.mask, batch)
    # (Float8 gains nothing in taller tiles, but sequences of one row would lose.)
    packed_rows = min(rows, 32) if beside_long and k.element_size() == 1 else rows
    tile = _short_tile(q, k, v, packed_rows, reach, page_table is not None)
    tiles = -(-rows // tile.tile_m)
    keys = min(_held_keys(k, batch, page_table), reach + most_rows - 1)  # (A tile that spans two chunks may meet more.)
    programs = batch.batch_size * heads_kv * (1 if beside_long else tiles)  # beside long ones, few fill a second tile
    splits = decode.choose_splits(q.device, programs, tile, keys)
    limit = dict(rows_upto=rows, by_sequence=tiles) if beside_long else {}
    return _settle_pass(q, k, v, plan, page_table, options, out, lse, tile, splits, **limit)


def _settle_pass(
    q: Tensor, k: Tensor, v: Tensor, plan: Plan, page_table: Tensor | None, options: Options, out: Tensor,
    lse: Tensor | None, tile: Tile, splits: int, rows_above: int = 0, rows_upto: int = 2**31 - 1, by_sequence: int = 0,
) -> Write:  # fmt: skip
    """One pass over the sequences with `rows_above < packed rows <= rows_upto`, in `splits` parts.

    With `by_sequence` the grid has that many tiles for each of them, else as many as the tile table has slots.
    """
    batch, device = plan.batch, q.device
    heads, heads_kv, head_dim, head_dim_v = q.shape[-2], k.shape[-2], k.shape[-1], v.shape[-1]
    group = heads // heads_kv
    table = plan.tiles(tile.tile_m, group, tile.tile_n)
    tiles = (batch.batch_size + batch.packed_q) * by_sequence or table.ranges.shape[0]
    starts = table.starts if by_sequence else None
    # Triton 3.6 miscompiles two products with one row block (wrong rows, wild reads) where their operands pass through
    # registers: loads that cannot be vectorised, and float8 in tiles that fill Hopper's matrix instruction.
    keys8 = k.element_size() == 1
    whole = not (vectorises(k) and vectorises(v)) or (keys8 and tile.tile_m >= 64)
    k_split, v_split = split_head_dim(head_dim, whole), split_head_dim(head_dim_v, whole)
    pairs = _FLOAT8[k.dtype] if keys8 and not whole else None
    v_strides = strides(v)
    if pairs is not None:  # v's even and odd columns
        v_strides = strides(v.view(torch.int16))
        v_split = (max(16, split_head_dim(head_dim_v, True)[0] // 2),) * 2
    packed_k = batch.cu_seqlens_k is not None
    page = k.shape[1] if page_table is not None else 0
    capacity = 0  # packed keys: each sequence's own length, read on the device
    if not packed_k:
        capacity = page_table.shape[1] * page if page_table is not None else k.shape[-3]

    tma_rows, forms = (0,) * 6, None
    if tile.tma and page == 0 and k.numel() > 0 and (k_split, v_split) == ((head_dim, 0), (head_dim_v, 0)):
        k_view, v_view = matrix(k), matrix(v)
        if k_view is not None and v_view is not None:
            tma_rows = *k_view[2], *v_view[2]
            forms = [[*map(list, view[:2]), [tile.tile_n, x.shape[-1]]] for x, view in ((k, k_view), (v, v_view))]

    parts = None
    results = (*strides(out), *lse_strides(lse), 0, 0)
    if splits > 1:
        parts = decode.Parts(splits, batch.batch_size, min(batch.max_seqlen_q, rows_upto // group), heads, head_dim_v)
        (out_split, out_row, out_head), (lse_split, lse_head) = parts.out_strides, parts.lse_strides
        results = (0, out_row, out_head, 0, lse_head, out_split, lse_split)
        combine = decode.combine(parts, out, lse, batch, table.index, starts, tiles, tile.tile_m, group, rows_upto,
                                 by_sequence)  # fmt: skip
    precision = "ieee" if q.dtype is torch.float32 else "tf32"
    if q.dtype is torch.bfloat16 and device.type == "cpu" and not keys8:
        precision = "interpreted bf16"

    scalars = (
        *strides(q), *strides(k), *v_strides, *results,
        0 if page_table is None else page_table.stride(0),
        *scale_strides(options.k_scale), *scale_strides(options.v_scale),
        *tma_rows,
        batch.seqlen_q or 0, batch.total_q, heads_kv, batch.batch_size, capacity, rows_above, rows_upto,
        0 if parts is None else parts.rows,
        options.scale * LOG2E.value, 1.0 if options.softcap is None else options.softcap,
    )  # fmt: skip
    constants = dict(
        GROUP=group, D=head_dim, DV=head_dim_v, K_HEAD=k_split[0], K_TAIL=k_split[1], V_HEAD=v_split[0], V_TAIL=v_split[1],
        TILE_M=tile.tile_m, TILE_N=tile.tile_n, TILES=by_sequence,
        PAGE=page, SOFTCAP=options.softcap is not None, TMA=forms is not None, PRECISION=precision,
        SPLIT=splits > 1, KEYS8=keys8, PAIRS=pairs, PTX=ptx(device), AHEAD=tile.ahead and forms is not None,
    )  # fmt: skip
    grid = (tiles * heads_kv, splits)
    of_plan = (plan.rows, table.ranges, table.index, starts, batch.cu_seqlens_q, batch.cu_seqlens_k)
    compiling = dict(num_warps=tile.warps, num_stages=tile.stages)
    if tile.registers is not None and ptx(device) > 0:
        compiling["maxnreg"] = tile.registers
    launch = Launch(_forward_kernel, grid, of_plan, scalars, constants, **compiling)

    def write(q, k, v, plan, page_table, *, options, out, lse):  # type: ignore[no-untyped-def]
        if forms is not None:
            k, v = Descriptor(k, *forms[0]), Descriptor(v, *forms[1])
        elif pairs is not None:
            v = v.view(torch.int16)
        if parts is None:
            launch(q, k, v, out, lse, page_table, options.sinks, options.k_scale, options.v_scale)
        else:
            part = parts.allocate(device)
            launch(q, k, v, part, None, page_table, None, options.k_scale, options.v_scale)
            combine(part, out, lse, options.sinks)

    return write


def _held_keys(k: Tensor, batch: Batch, page_table: Tensor | None) -> int:
    """An upper bound, from host sizes, on the keys of one sequence."""
    if page_table is not None:
        keys = page_table.shape[1] * k.shape[1]
    else:
        keys = k.shape[-3] if batch.cu_seqlens_k is None else k.shape[0]
    return keys if batch.max_seqlen_k is None else min(keys, batch.max_seqlen_k)


def _long_tile(q: Tensor, v: Tensor, packed_rows: int) -> Tile:
    return choose_tile(architecture(q.device), max(q.shape[-1], v.shape[-1]), q.element_size(), packed_rows)


def _short_tile(q: Tensor, k: Tensor, v: Tensor, packed_rows: int, reach: int, paged: bool) -> Tile:
    head_dim = max(q.shape[-1], v.shape[-1])
    return choose_short_tile(architecture(q.device), head_dim, k.element_size(), packed_rows, reach, paged)
