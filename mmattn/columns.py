"""The transposed table: which rows see each key.

In a sequence `lo` and `hi` of the rows that see anything do not fall from row to row, for every `Mask` with disjoint spans,
and the rows that see nothing lie at its two ends (tests/test_columns.py). So the rows that see a key are one interval too,
and the tile tables of keys over blocks of rows are made by the code that makes those of rows over blocks of keys.

Row tables from elsewhere (`Plan.with_rows`, dense masks, spans given per row) need not be so. Then the interval of a key
reaches from the first row that sees it to the last, other rows may lie between, and `Columns.of_sequences` says so.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .batch import Batch


@dataclass(frozen=True, eq=False)
class Columns:
    """What `Plan.columns` gives."""

    rows: Tensor
    """int32 `[total_k, 2]`: half-open interval of row numbers within the sequence that see a key slot, (0, 0) = nobody.
    Slots lie as in k: packed, or `b * seqlen_k + j`."""
    of_sequences: Tensor
    """int32 `[batch_size, 3]`: the first row that sees anything, the end of those rows (0, 0: none), and 1 where the rows
    between are in order, so that the intervals of keys have no holes."""


def key_batch(batch: Batch, slots: int) -> Batch:
    """Keys in the role of rows, for tile tables: `slots` of every sequence, or in all where they are packed."""
    packed = batch.cu_seqlens_k is not None
    return Batch(
        device=batch.device, batch_size=batch.batch_size, total_q=slots if packed else batch.batch_size * slots,
        seqlen_q=None if packed else slots, seqlen_k=None, max_seqlen_q=slots, max_seqlen_k=batch.max_seqlen_q,
        cu_seqlens_q=batch.cu_seqlens_k,
    )  # fmt: skip


def column_table(rows: Tensor, batch: Batch, slots: int) -> Columns:
    """With torch operators, for rows in any order, on any device, without reading it back."""
    keys, device = key_batch(batch, slots), rows.device
    count, total_k = batch.batch_size, keys.total_q
    if count == 0 or batch.total_q == 0 or total_k == 0:
        nothing = torch.zeros(total_k, 2, dtype=torch.int32, device=device)
        return Columns(nothing, _of_sequences(rows, batch))
    seq = batch.row_sequences()
    real = seq < count
    seq = seq.clamp(max=count - 1)
    number = torch.arange(batch.total_q, device=device) - batch.row_offsets()[seq]
    key0 = keys.row_offsets()
    lo, hi = rows.to(torch.int64).unbind(-1)
    hi = torch.minimum(hi, (key0[1:] - key0[:-1])[seq])
    real = real & (lo < hi)
    start, length = key0[seq] + lo, (hi - lo).clamp(min=1)
    # Each interval is covered by two of 2**level keys; then those of every level hand down to their halves.
    levels = max(1, total_k).bit_length()
    level = torch.floor(torch.log2(length.double())).to(torch.int64)
    far = 2**31 - 1
    first = torch.full((levels * total_k + 1,), far, dtype=torch.int64, device=device)
    last = torch.full((levels * total_k + 1,), -1, dtype=torch.int64, device=device)
    for at in (start, start + length - 2**level):
        at = torch.where(real, level * total_k + at, levels * total_k)
        first.scatter_reduce_(0, at, number, "amin")
        last.scatter_reduce_(0, at, number, "amax")
    first, last = (x[:-1].view(levels, total_k) for x in (first, last))
    for i in range(levels - 1, 0, -1):
        half = 2 ** (i - 1)
        for x, better in ((first, torch.minimum), (last, torch.maximum)):
            x[i - 1] = better(x[i - 1], x[i])
            if half < total_k:
                x[i - 1, half:] = better(x[i - 1, half:], x[i, : total_k - half])
    seen = last[0] >= 0
    table = torch.stack([first[0].masked_fill(~seen, 0), (last[0] + 1).masked_fill(~seen, 0)], dim=1)
    return Columns(table.to(torch.int32), _of_sequences(rows, batch))


def _of_sequences(rows: Tensor, batch: Batch) -> Tensor:
    count, device = batch.batch_size, rows.device
    result = torch.zeros(count, 3, dtype=torch.int64, device=device)
    result[:, 2] = 1
    if count == 0 or batch.total_q == 0:
        return result.to(torch.int32)
    seq = batch.row_sequences()
    number = torch.arange(batch.total_q, device=device) - batch.row_offsets()[seq.clamp(max=count - 1)]
    lo, hi = rows.to(torch.int64).unbind(-1)
    seeing = (lo < hi) & (seq < count)
    into = torch.where(seeing, seq, count)
    first = torch.full((count + 1,), 2**31 - 1, dtype=torch.int64, device=device).scatter_reduce_(
        0, into, number, "amin"
    )
    end = torch.zeros(count + 1, dtype=torch.int64, device=device).scatter_reduce_(0, into, number + 1, "amax")
    found = torch.zeros(count + 1, dtype=torch.int64, device=device).index_add_(0, into, torch.ones_like(into))
    falls = seeing[1:] & seeing[:-1] & (seq[1:] == seq[:-1]) & ((lo[1:] < lo[:-1]) | (hi[1:] < hi[:-1]))
    fallen = torch.zeros(count + 1, dtype=torch.int64, device=device).index_add_(0, into[1:], falls.to(torch.int64))
    first = torch.where(end > 0, first, 0)
    ordered = (fallen == 0) & (found == end - first)
    return torch.stack([first, end, ordered.to(torch.int64)], dim=1)[:count].to(torch.int32)
