"""The Triton backward: gradients over row intervals and their transpose. Deterministic: no sum is shared between programs.

Three launches: the row sums `delta = sum(dout * out) - dlse` and the shares of the sinks; dK and dV, where a program owns a
tile of keys of one KV head and walks the blocks of rows that see it, of all query heads of the group; dQ, where a program owns
a tile of packed query rows as in forward.py and walks its key blocks. Edges are masked with the row table, the interior is not.
With p = exp(s - lse), the gradient of a score is p * (dout . v - delta).
"""

from __future__ import annotations

from typing import Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..checks import kind_of
from ..plan import KINDS, Grads, Options, Plan
from .bounds import sequence_rows
from .config import BackwardTiles, architecture, choose_backward_tiles, split_head_dim
from .forward import LOG2E, _dot
from .launch import Descriptor, Launch
from .layout import matrix, strides

PREPARED_ROWS = 64


class WriteGrads(Protocol):
    """Writes the gradients of a call into tensors of the shapes of its inputs, of any strides but 1 in the last dim."""

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, plan: Plan, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None,
        *, options: Options, dq: Tensor, dk: Tensor, dv: Tensor, dsinks: Tensor | None,
    ) -> None: ...  # fmt: skip


@triton.jit(do_not_specialize=["out_batch", "dout_batch", "lse_batch", "lse_head", "lse_row", "dlse_batch", "dlse_head",
                               "dlse_row", "seqlen_q", "total_q", "batch_size"])  # fmt: skip
def _prepare_kernel(
    out, dout, lse, dlse, sinks, sums, shares, rows, cu_seqlens_q,
    out_batch, out_row, out_head, dout_batch, dout_row, dout_head, lse_batch, lse_head, lse_row,
    dlse_batch, dlse_head, dlse_row, seqlen_q, total_q, batch_size,
    DV: tl.constexpr, V: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Of every row: lse in base 2 (inf where it sees nothing) and delta, into `sums` [2, Hq, total_q]."""
    head = tl.program_id(1)
    row = tl.program_id(0) * R + tl.arange(0, R)
    end = total_q
    seq = row * 0
    i = row
    if cu_seqlens_q is not None:
        end = tl.minimum(tl.load(cu_seqlens_q + batch_size), total_q)
    else:
        seq = row // seqlen_q
        i = row % seqlen_q
    exists = row < end
    lo = tl.load(rows + row.to(tl.int64) * 2, mask=exists, other=0)
    hi = tl.load(rows + row.to(tl.int64) * 2 + 1, mask=exists, other=0)
    seeing = lo < hi
    seq = seq.to(tl.int64)
    i = i.to(tl.int64)
    d = tl.arange(0, V)
    needed = seeing[:, None] & (d[None, :] < DV)
    o = tl.load(
        out + (seq * out_batch + i * out_row)[:, None] + head.to(tl.int64) * out_head + d[None, :],
        mask=needed,
        other=0.0,
    )
    g = tl.load(
        dout + (seq * dout_batch + i * dout_row)[:, None] + head.to(tl.int64) * dout_head + d[None, :],
        mask=needed,
        other=0.0,
    )
    delta = tl.sum(o.to(tl.float32) * g.to(tl.float32), 1)
    if dlse is not None:
        delta -= tl.load(dlse + seq * dlse_batch + head.to(tl.int64) * dlse_head + i * dlse_row, mask=exists, other=0.0)
    value = tl.load(
        lse + seq * lse_batch + head.to(tl.int64) * lse_head + i * lse_row, mask=exists, other=float("-inf")
    ) * LOG2E  # fmt: skip
    if sinks is not None:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2E
        share = tl.where(value == float("-inf"), 0.0, tl.exp2(sink - value) * delta)
        tl.store(shares + tl.program_id(0) * tl.num_programs(1) + head, -tl.sum(share, 0))
    at = sums + head.to(tl.int64) * total_q + row
    tl.store(at, tl.where(seeing, value, float("inf")), mask=row < total_q)
    at += tl.num_programs(1).to(tl.int64) * total_q
    tl.store(at, tl.where(seeing, delta, 0.0), mask=row < total_q)


@triton.jit
def _weights(s, top, scale, cap, SOFTCAP: tl.constexpr):
    """exp2(scores - top), for scores before scaling, and the same times the derivative of the cap."""
    if SOFTCAP:
        t = 1 - 2 / (1 + tl.exp2(s * (scale * 2 / cap)))
        p = tl.exp2(t * (cap * LOG2E) - top)
        sloped = p * (1 - t * t)
    else:
        p = tl.exp2(s * scale - top)
        sloped = p
    return p, sloped


@triton.jit
def _column_walk(
    dk, dv, k, v, key, q, dout, sums, rows, b0, b1, b2, b3, length, total_q, heads,
    q_row, q_head, dout_row, dout_head, q_at_row, q_at_column, q_rows_head, q_cols_head,
    dout_at_row, dout_at_column, dout_rows_head, dout_cols_head, scale, cap,
    GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    TILE_M: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """The blocks of rows `b1..b2` that see all keys of a tile, or with EDGE those before and after, of all heads in turn."""
    m = tl.arange(0, TILE_M)
    d = tl.arange(0, K)
    dv_column = tl.arange(0, V)
    before = b1 - b0
    blocks = before + (b3 - b2) if EDGE else b2 - b1
    for t in tl.range(0, blocks * GROUP):
        head = t // blocks
        block = t % blocks
        if EDGE:
            block = tl.where(block < before, b0 + block, b2 + block - before)
        else:
            block += b1
        i0 = block * TILE_M
        at = sums + head.to(tl.int64) * total_q + (i0 + m)
        heads_on = heads.to(tl.int64) * total_q
        if EDGE:
            exists = i0 + m < length
            lo = tl.load(rows + (i0 + m) * 2, mask=exists, other=0)
            hi = tl.load(rows + (i0 + m) * 2 + 1, mask=exists, other=0)
            seeing = lo < hi  # what other rows hold may be anything
            top = tl.load(at, mask=exists, other=float("inf"))
            delta = tl.load(at + heads_on, mask=exists, other=0.0)
        else:
            top = tl.load(at)
            delta = tl.load(at + heads_on)
        if TMA:
            qs = q.load([q_at_row + head * q_rows_head + i0, q_at_column + head * q_cols_head])
            g = dout.load([dout_at_row + head * dout_rows_head + i0, dout_at_column + head * dout_cols_head])
            if EDGE:
                qs = tl.where(seeing[:, None], qs, 0)
                g = tl.where(seeing[:, None], g, 0)
        else:
            q_at = q + head.to(tl.int64) * q_head + i0.to(tl.int64) * q_row + (m[:, None] * q_row + d[None, :])
            g_at = dout + head.to(tl.int64) * dout_head + i0.to(tl.int64) * dout_row
            g_at += m[:, None] * dout_row + dv_column[None, :]
            if EDGE:
                qs = tl.load(q_at, mask=seeing[:, None] & (d[None, :] < D), other=0.0)
                g = tl.load(g_at, mask=seeing[:, None] & (dv_column[None, :] < DV), other=0.0)
            else:
                if K > D:
                    qs = tl.load(q_at, mask=d[None, :] < D, other=0.0)
                else:
                    qs = tl.load(q_at)
                if V > DV:
                    g = tl.load(g_at, mask=dv_column[None, :] < DV, other=0.0)
                else:
                    g = tl.load(g_at)
        s = _dot(k, qs.T, tl.zeros([k.shape[0], TILE_M], tl.float32), PRECISION)
        p, sloped = _weights(s, top[None, :], scale, cap, SOFTCAP)
        if EDGE:
            visible = (key[:, None] >= lo[None, :]) & (key[:, None] < hi[None, :])
            p = tl.where(visible, p, 0.0)
            sloped = tl.where(visible, sloped, 0.0)
        dv = _dot(p.to(g.dtype), g, dv, PRECISION)
        dp = _dot(v, g.T, tl.zeros([k.shape[0], TILE_M], tl.float32), PRECISION)
        ds = sloped * (dp - delta[None, :])
        dk = _dot(ds.to(qs.dtype), qs, dk, PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=["q_batch", "k_batch", "v_batch", "dout_batch", "dk_batch", "dv_batch", "slots", "total_k",
                               "q_rows_batch", "q_rows_head", "q_cols_head", "dout_rows_batch", "dout_rows_head",
                               "dout_cols_head", "seqlen_q", "total_q", "heads_kv", "batch_size"])  # fmt: skip
def _key_kernel(
    q, k, v, dout, sums, dk, dv, rows, columns, of_sequences, ranges, index, cu_seqlens_q, cu_seqlens_k,
    q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head, dout_batch, dout_row, dout_head,
    dk_batch, dk_row, dk_head, dv_batch, dv_row, dv_head,
    q_rows_batch, q_rows_head, q_cols_head, dout_rows_batch, dout_rows_head, dout_cols_head,
    slots, total_k, seqlen_q, total_q, heads_kv, batch_size, score_scale, scale, cap,
    GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """dK and dV of a tile of keys. Grid: (tiles * heads_kv,)."""
    # Heads vary fastest; under a causal mask the first keys are seen by the most rows and start first.
    head_kv = (tl.program_id(0) % heads_kv).to(tl.int64)
    slot = tl.program_id(0) // heads_kv
    seq = tl.load(index + slot * 2)
    n = tl.load(index + slot * 2 + 1)
    if seq < 0:
        return
    key0, keys = sequence_rows(seq, cu_seqlens_k, batch_size, total_k, slots)
    if cu_seqlens_k is not None:
        k += key0.to(tl.int64) * k_row
        v += key0.to(tl.int64) * v_row
        dk += key0.to(tl.int64) * dk_row
        dv += key0.to(tl.int64) * dv_row
    else:
        k += seq.to(tl.int64) * k_batch
        v += seq.to(tl.int64) * v_batch
        dk += seq.to(tl.int64) * dk_batch
        dv += seq.to(tl.int64) * dv_batch
    key = n * TILE_N + tl.arange(0, TILE_N)
    exists = key < keys
    first = tl.load(columns + (key0 + key).to(tl.int64) * 2, mask=exists, other=0)
    end = tl.load(columns + (key0 + key).to(tl.int64) * 2 + 1, mask=exists, other=0)
    seen = first < end
    d = tl.arange(0, K)
    dv_column = tl.arange(0, V)
    k_at = k + head_kv * k_head + key[:, None].to(tl.int64) * k_row + d[None, :]
    v_at = v + head_kv * v_head + key[:, None].to(tl.int64) * v_row + dv_column[None, :]
    kt = tl.load(k_at, mask=seen[:, None] & (d[None, :] < D), other=0.0)
    vt = tl.load(v_at, mask=seen[:, None] & (dv_column[None, :] < DV), other=0.0)

    acc_k = tl.zeros([TILE_N, K], tl.float32)
    acc_v = tl.zeros([TILE_N, V], tl.float32)
    if seq < batch_size:
        row0, length = sequence_rows(seq, cu_seqlens_q, batch_size, total_q, seqlen_q)
        q_at_row = 0
        q_at_column = 0
        dout_at_row = 0
        dout_at_column = 0
        if TMA:
            head = (head_kv * GROUP).to(tl.int32)
            q_at_row = head * q_rows_head
            dout_at_row = head * dout_rows_head
            q_at_column = head * q_cols_head
            dout_at_column = head * dout_cols_head
            if cu_seqlens_q is not None:
                q_at_row += row0
                dout_at_row += row0
            else:
                q_at_row += seq * q_rows_batch
                dout_at_row += seq * dout_rows_batch
        else:
            if cu_seqlens_q is not None:
                q += row0.to(tl.int64) * q_row
                dout += row0.to(tl.int64) * dout_row
            else:
                q += seq.to(tl.int64) * q_batch
                dout += seq.to(tl.int64) * dout_batch
            q += head_kv * GROUP * q_head
            dout += head_kv * GROUP * dout_head
        sums += head_kv * GROUP * total_q + row0
        rows += row0.to(tl.int64) * 2
        b0 = tl.load(ranges + slot * 4)
        b1 = tl.load(ranges + slot * 4 + 1)
        b2 = tl.load(ranges + slot * 4 + 2)
        b3 = tl.load(ranges + slot * 4 + 3)
        if tl.load(of_sequences + seq * 3 + 2) == 0:  # the rows between may see anything
            b1 = b0
            b2 = b0
        acc_k, acc_v = _column_walk(
            acc_k, acc_v, kt, vt, key, q, dout, sums, rows, b0, b1, b2, b3, length, total_q, heads_kv * GROUP,
            q_row, q_head, dout_row, dout_head, q_at_row, q_at_column, q_rows_head, q_cols_head,
            dout_at_row, dout_at_column, dout_rows_head, dout_cols_head, score_scale, cap,
            GROUP, D, DV, K, V, TILE_M, SOFTCAP, PRECISION, TMA, True)  # fmt: skip
        acc_k, acc_v = _column_walk(
            acc_k, acc_v, kt, vt, key, q, dout, sums, rows, b0, b1, b2, b3, length, total_q, heads_kv * GROUP,
            q_row, q_head, dout_row, dout_head, q_at_row, q_at_column, q_rows_head, q_cols_head,
            dout_at_row, dout_at_column, dout_rows_head, dout_cols_head, score_scale, cap,
            GROUP, D, DV, K, V, TILE_M, SOFTCAP, PRECISION, TMA, False)  # fmt: skip

    at = dk + head_kv * dk_head + key[:, None].to(tl.int64) * dk_row + d[None, :]
    tl.store(at, (acc_k * scale).to(dk.dtype.element_ty), mask=exists[:, None] & (d[None, :] < D))
    at = dv + head_kv * dv_head + key[:, None].to(tl.int64) * dv_row + dv_column[None, :]
    tl.store(at, acc_v.to(dv.dtype.element_ty), mask=exists[:, None] & (dv_column[None, :] < DV))


@triton.jit
def _row_walk(
    dq, q, dout, top, delta, lo, hi, begin, stop, first, end, k, v, k_row, v_row,
    k_at_row, k_at_column, v_at_row, v_at_column, scale, cap,
    D: tl.constexpr, DV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    TILE_N: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """One run of key blocks `begin..stop`; on edge blocks only keys `first..end` are touched."""
    keys = tl.arange(0, TILE_N)
    d = tl.arange(0, K)
    dv_column = tl.arange(0, V)
    for block in tl.range(begin, stop):
        n = block * TILE_N
        key = n + keys
        needed = (key >= first) & (key < end)
        if TMA:
            kt = k.load([k_at_row + n, k_at_column])
            vt = v.load([v_at_row + n, v_at_column])
            if EDGE:  # (of v only dp knows, and `visible` cuts that)
                kt = tl.where(needed[:, None], kt, 0)
        else:
            k_at = k + n.to(tl.int64) * k_row + (keys[:, None] * k_row + d[None, :])
            v_at = v + n.to(tl.int64) * v_row + (keys[:, None] * v_row + dv_column[None, :])
            if EDGE:
                kt = tl.load(k_at, mask=needed[:, None] & (d[None, :] < D), other=0.0)
                vt = tl.load(v_at, mask=needed[:, None] & (dv_column[None, :] < DV), other=0.0)
            else:
                if K > D:
                    kt = tl.load(k_at, mask=d[None, :] < D, other=0.0)
                else:
                    kt = tl.load(k_at)
                if V > DV:
                    vt = tl.load(v_at, mask=dv_column[None, :] < DV, other=0.0)
                else:
                    vt = tl.load(v_at)
        s = _dot(q, kt.T, tl.zeros([q.shape[0], TILE_N], tl.float32), PRECISION)
        _, sloped = _weights(s, top[:, None], scale, cap, SOFTCAP)
        dp = _dot(dout, vt.T, tl.zeros([q.shape[0], TILE_N], tl.float32), PRECISION)
        ds = sloped * (dp - delta[:, None])
        if EDGE:
            ds = tl.where((key[None, :] >= lo[:, None]) & (key[None, :] < hi[:, None]), ds, 0.0)
        dq = _dot(ds.to(kt.dtype), kt, dq, PRECISION)
    return dq


@triton.jit(do_not_specialize=["q_batch", "k_batch", "v_batch", "dout_batch", "dq_batch", "capacity",
                               "k_rows_batch", "k_rows_head", "k_cols_head", "v_rows_batch", "v_rows_head", "v_cols_head",
                               "seqlen_q", "total_q", "heads_kv", "batch_size"])  # fmt: skip
def _query_kernel(
    q, k, v, dout, sums, dq, rows, ranges, index, cu_seqlens_q, cu_seqlens_k,
    q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head, dout_batch, dout_row, dout_head,
    dq_batch, dq_row, dq_head, k_rows_batch, k_rows_head, k_cols_head, v_rows_batch, v_rows_head, v_cols_head,
    capacity, seqlen_q, total_q, heads_kv, batch_size, score_scale, scale, cap,
    GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """dQ of a tile of packed query rows. Grid: (tiles * heads_kv,)."""
    head_kv = (tl.program_id(0) % heads_kv).to(tl.int64)
    slot = tl.num_programs(0) // heads_kv - 1 - tl.program_id(0) // heads_kv
    seq = tl.load(index + slot * 2)
    m = tl.load(index + slot * 2 + 1)
    if seq < 0:
        return
    row0, length = sequence_rows(seq, cu_seqlens_q, batch_size, total_q, seqlen_q)
    if cu_seqlens_q is not None:
        q += row0.to(tl.int64) * q_row
        dout += row0.to(tl.int64) * dout_row
        dq += row0.to(tl.int64) * dq_row
    else:
        q += seq.to(tl.int64) * q_batch
        dout += seq.to(tl.int64) * dout_batch
        dq += seq.to(tl.int64) * dq_batch
    key0 = seq * 0
    if cu_seqlens_k is not None:
        if seq < batch_size:
            key0 = tl.load(cu_seqlens_k + seq)
            capacity = tl.load(cu_seqlens_k + seq + 1) - key0
    k_at_row = 0
    k_at_column = 0
    v_at_row = 0
    v_at_column = 0
    if TMA:
        kv = head_kv.to(tl.int32)
        k_at_row = key0 + seq * k_rows_batch + kv * k_rows_head
        v_at_row = key0 + seq * v_rows_batch + kv * v_rows_head
        k_at_column = kv * k_cols_head
        v_at_column = kv * v_cols_head
    else:
        k += key0.to(tl.int64) * k_row + seq.to(tl.int64) * k_batch + head_kv * k_head
        v += key0.to(tl.int64) * v_row + seq.to(tl.int64) * v_batch + head_kv * v_head

    packed = m * TILE_M + tl.arange(0, TILE_M)
    i = packed // GROUP
    head = head_kv * GROUP + packed % GROUP
    exists = i < length
    lo = tl.load(rows + (row0 + i).to(tl.int64) * 2, mask=exists, other=0)
    hi = tl.load(rows + (row0 + i).to(tl.int64) * 2 + 1, mask=exists, other=0)
    hi = tl.minimum(hi, capacity)
    seeing = lo < hi
    first = tl.min(tl.where(seeing, lo, 2147483647), 0)
    end = tl.max(tl.where(seeing, hi, 0), 0)
    b0 = tl.load(ranges + slot * 4)
    b3 = tl.minimum(tl.load(ranges + slot * 4 + 3), (end + TILE_N - 1) // TILE_N)
    b1 = tl.minimum(tl.load(ranges + slot * 4 + 1), b3)
    b2 = tl.minimum(tl.load(ranges + slot * 4 + 2), tl.maximum(capacity // TILE_N, b1))
    b2 = tl.minimum(tl.maximum(b2, b1), tl.maximum(b3, b1))

    i = i.to(tl.int64)
    d = tl.arange(0, K)
    dv_column = tl.arange(0, V)
    at = q + (i * q_row + head * q_head)[:, None] + d[None, :]
    qs = tl.load(at, mask=seeing[:, None] & (d[None, :] < D), other=0.0)
    at = dout + (i * dout_row + head * dout_head)[:, None] + dv_column[None, :]
    g = tl.load(at, mask=seeing[:, None] & (dv_column[None, :] < DV), other=0.0)
    at = sums + head * total_q + row0 + i
    top = tl.load(at, mask=seeing, other=float("inf"))
    delta = tl.load(at + heads_kv.to(tl.int64) * GROUP * total_q, mask=seeing, other=0.0)
    acc = tl.zeros([TILE_M, K], tl.float32)
    acc = _row_walk(acc, qs, g, top, delta, lo, hi, b0, b1, first, end, k, v, k_row, v_row,
                    k_at_row, k_at_column, v_at_row, v_at_column, score_scale, cap,
                    D, DV, K, V, TILE_N, SOFTCAP, PRECISION, TMA, True)  # fmt: skip
    acc = _row_walk(acc, qs, g, top, delta, lo, hi, b1, b2, first, end, k, v, k_row, v_row,
                    k_at_row, k_at_column, v_at_row, v_at_column, score_scale, cap,
                    D, DV, K, V, TILE_N, SOFTCAP, PRECISION, TMA, False)  # fmt: skip
    acc = _row_walk(acc, qs, g, top, delta, lo, hi, b2, b3, first, end, k, v, k_row, v_row,
                    k_at_row, k_at_column, v_at_row, v_at_column, score_scale, cap,
                    D, DV, K, V, TILE_N, SOFTCAP, PRECISION, TMA, True)  # fmt: skip
    at = dq + (i * dq_row + head * dq_head)[:, None] + d[None, :]
    tl.store(at, (acc * scale).to(dq.dtype.element_ty), mask=exists[:, None] & (d[None, :] < D))


def backward(
    q: Tensor, k: Tensor, v: Tensor, plan: Plan, page_table: Tensor | None, out: Tensor, lse: Tensor, dout: Tensor,
    dlse: Tensor | None, *, options: Options,
) -> Grads:  # fmt: skip
    """See `dispatch.Backward`."""
    assert page_table is None and options.k_scale is None and options.v_scale is None, "see support.why_no_gradients"
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    dsinks = None if options.sinks is None else torch.empty_like(options.sinks)
    call = (q, k, v, plan, out, lse, dout, dlse)
    kind = (options.scale, options.softcap, *map(_kind, (q, k, v, out, lse, dout, dlse, options.sinks)))
    write = plan.backwards.get(kind)
    if write is None:
        if len(plan.backwards) >= KINDS:
            plan.backwards.clear()
        write = settle_backward(*call, options=options, dq=dq, dk=dk, dv=dv, dsinks=dsinks)
        plan.backwards[kind] = write
    write(*call, options=options, dq=dq, dk=dk, dv=dv, dsinks=dsinks)
    return Grads(dq, dk, dv, dsinks)


def settle_backward(
    q: Tensor, k: Tensor, v: Tensor, plan: Plan, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None, *,
    options: Options, dq: Tensor, dk: Tensor, dv: Tensor, dsinks: Tensor | None, tiles: BackwardTiles | None = None,
) -> WriteGrads:  # fmt: skip
    """The launches of this call and of others like it, as `plan.Settle` for a forward; `tiles` instead of those of the table."""
    batch, device = plan.batch, q.device
    heads, heads_kv, head_dim, head_dim_v = q.shape[-2], k.shape[-2], k.shape[-1], v.shape[-1]
    if tiles is None:
        tiles = choose_backward_tiles(architecture(device), max(head_dim, head_dim_v), q.element_size())
    out, dout = _dense(out), _dense(dout)
    precision = "ieee" if q.dtype is torch.float32 else "tf32"
    if q.dtype is torch.bfloat16 and device.type == "cpu":
        precision = "interpreted bf16"
    group, slots, packed_k = heads // heads_kv, k.shape[-3], batch.cu_seqlens_k is not None
    blocks = -(-batch.total_q // PREPARED_ROWS)
    dims = dict(D=head_dim, DV=head_dim_v, K=split_head_dim(head_dim, True)[0], V=split_head_dim(head_dim_v, True)[0])
    shared = dict(GROUP=group, **dims, SOFTCAP=options.softcap is not None, PRECISION=precision)
    cap = 1.0 if options.softcap is None else options.softcap
    scales = (options.scale * LOG2E.value, options.scale, cap)
    of_rows = (batch.seqlen_q or 0, batch.total_q, heads_kv, batch.batch_size)

    prepare = Launch(
        _prepare_kernel, (blocks, heads), (plan.rows, batch.cu_seqlens_q),
        (*strides(out), *strides(dout), *_row_strides(lse), *_row_strides(dlse),
         batch.seqlen_q or 0, batch.total_q, batch.batch_size),
        dict(DV=head_dim_v, V=dims["V"], R=PREPARED_ROWS), num_warps=4,
    )  # fmt: skip

    n_tile, m_tile = tiles.keys, tiles.queries
    n_forms, n_rows = _matrices(n_tile.tma, (q, dout), n_tile.tile_m, dims)
    m_forms, m_rows = _matrices(m_tile.tma, (k, v), m_tile.tile_n, dims)
    columns, table = plan.columns(slots), plan.column_tiles(slots, n_tile.tile_n, n_tile.tile_m)
    total_k = slots if packed_k else batch.batch_size * slots
    by_keys = Launch(
        _key_kernel, (table.ranges.shape[0] * heads_kv,),
        (plan.rows, columns.rows, columns.of_sequences, table.ranges, table.index, batch.cu_seqlens_q, batch.cu_seqlens_k),
        (*strides(q), *strides(k), *strides(v), *strides(dout), *strides(dk), *strides(dv),
         *n_rows, slots, total_k, *of_rows, *scales),
        dict(shared, TILE_M=n_tile.tile_m, TILE_N=n_tile.tile_n, TMA=n_forms is not None), num_warps=n_tile.warps, num_stages=n_tile.stages,
    )  # fmt: skip

    table = plan.tiles(m_tile.tile_m, group, m_tile.tile_n)
    by_queries = Launch(
        _query_kernel, (table.ranges.shape[0] * heads_kv,),
        (plan.rows, table.ranges, table.index, batch.cu_seqlens_q, batch.cu_seqlens_k),
        (*strides(q), *strides(k), *strides(v), *strides(dout), *strides(dq), *m_rows,
         0 if packed_k else slots, *of_rows, *scales),
        dict(shared, TILE_M=m_tile.tile_m, TILE_N=m_tile.tile_n, TMA=m_forms is not None), num_warps=m_tile.warps, num_stages=m_tile.stages,
    )  # fmt: skip

    def write(q, k, v, plan, out, lse, dout, dlse, *, options, dq, dk, dv, dsinks):  # type: ignore[no-untyped-def]
        out, dout = _dense(out), _dense(dout)
        sums = torch.empty(2, heads, batch.total_q, dtype=torch.float32, device=device)
        sinks = options.sinks
        shares = None if sinks is None else torch.empty(blocks, heads, dtype=torch.float32, device=device)
        if batch.total_q:
            prepare(out, dout, lse, dlse, sinks, sums, shares)
        if shares is not None:
            dsinks.copy_(shares.sum(0))
        if k.numel() or v.numel():
            walked = (q, dout) if n_forms is None else (Descriptor(q, *n_forms[0]), Descriptor(dout, *n_forms[1]))
            by_keys(walked[0], k, v, walked[1], sums, dk, dv)
        if batch.total_q:
            walked = (k, v) if m_forms is None else (Descriptor(k, *m_forms[0]), Descriptor(v, *m_forms[1]))
            by_queries(q, *walked, dout, sums, dq)

    return write


def _matrices(
    wanted: bool, walked: tuple[Tensor, Tensor], rows: int, dims: dict[str, int]
) -> tuple[list[list[list[int]]] | None, tuple[int, ...]]:
    """TMA descriptors of the two tensors that a kernel walks in blocks of `rows`, and where sequences and heads lie in them;
    None where they cannot be described or their dims are not whole blocks."""
    if wanted and (dims["D"], dims["DV"]) == (dims["K"], dims["V"]) and all(x.numel() for x in walked):
        views = [matrix(x) for x in walked]
        if views[0] is not None and views[1] is not None:
            forms = [[*map(list, view[:2]), [rows, x.shape[-1]]] for view, x in zip(views, walked) if view is not None]
            return forms, (*views[0][2], *views[1][2])
    return None, (0,) * 6


def _kind(x: Tensor | None) -> object:
    return None if x is None else kind_of(x)


def _dense(x: Tensor) -> Tensor:
    """`x` with neighbours in the last dim, which autograd's expanded gradients have not."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _row_strides(lse: Tensor | None) -> tuple[int, int, int]:
    """Strides of (batch, head, row)."""
    if lse is None:
        return 0, 0, 0
    return (0, lse.stride(0), lse.stride(1)) if lse.dim() == 2 else (lse.stride(0), lse.stride(1), lse.stride(2))
