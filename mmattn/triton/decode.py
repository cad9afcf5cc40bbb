"""Split-KV: few query rows against many keys. Each split of a tile's key blocks gives a partial result; `combine` merges.

Splits divide the row interval, not the cache, so a window costs the same at any context length. Their number follows
from host sizes alone, so that a captured grid stays valid.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from ..batch import Batch
from .bounds import sequence_rows, tile_at
from .config import Tile, ptx
from .launch import Launch
from .layout import lse_strides, strides

FEWEST_KEYS = 64
"""A split with fewer keys costs more in combining than it gains."""
LONG = 128
"""Fewest keys of a split, for every row of its tile, where programs abound: splits then only level out the end, and must
cost little. What they cost is to write and to read a partial result of every row."""
MAX_SPLITS = 128


def choose_splits(device: torch.device, programs: int, tile: Tile, keys: int) -> int:
    """How many splits fill a GPU whose multiprocessors hold `tile.programs` programs each.

    Few programs are cut to make one even wave; many, which end at different times, into several long ones.
    """
    if device.type != "cuda":
        return 1
    slots = _multiprocessors(device) * tile.programs
    if programs * 2 <= slots:
        wanted, fewest = slots // max(programs, 1), FEWEST_KEYS
    else:
        wanted, fewest = -(-3 * slots // programs), LONG * tile.tile_m
    return max(1, min(wanted, keys // fewest, MAX_SPLITS))


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@triton.jit
def lse_of_parts(part, splits, part_split):
    """Where the LSEs begin in the scratch of `Parts`."""
    return part + splits.to(tl.int64) * part_split


@triton.jit(do_not_specialize=["part_split", "part_lse_split", "part_lse_head", "part_rows", "lse_batch", "lse_head",
                               "splits", "seqlen_q", "total_q", "heads_kv", "batch_size", "rows_upto"])  # fmt: skip
def _combine_kernel(
    part, out, lse, sinks, index, starts, cu_seqlens_q,
    part_split, part_row, part_head, part_lse_split, part_lse_head, part_rows, out_batch, out_row, out_head,
    lse_batch, lse_head, splits, seqlen_q, total_q, heads_kv, batch_size, rows_upto,
    GROUP: tl.constexpr, DV: tl.constexpr, TILE_M: tl.constexpr, TILES: tl.constexpr, WIDTH: tl.constexpr,
    SPLITS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Grid: (tiles * heads_kv, TILE_M, columns / WIDTH): one packed row each."""
    head_kv = tl.program_id(0) % heads_kv
    _, seq, m = tile_at(tl.program_id(0) // heads_kv, index, starts, TILES)
    row0, length = sequence_rows(tl.maximum(seq, 0), cu_seqlens_q, batch_size, total_q, seqlen_q)
    if PTX >= 90:  # launched while the splits still run; all programs wait, so that none of this ends before them
        gdc_wait()
    if seq < 0:
        return
    batch = seq * 0
    if cu_seqlens_q is None:
        row0 = row0 * 0
        batch = seq
    packed = m * TILE_M + tl.program_id(1)
    i = packed // GROUP
    if (i >= length) | (length * GROUP > rows_upto):
        return
    part_lse = lse_of_parts(part, splits, part_split)
    if seq >= batch_size:  # rows of no sequence see nothing
        splits = splits * 0
    elif i >= part_rows:
        return
    row = (row0 + i).to(tl.int64)
    head = head_kv * GROUP + packed % GROUP
    d = tl.program_id(2) * WIDTH + tl.arange(0, WIDTH)
    part_at = seq.to(tl.int64) * part_rows + i
    part_lse += part_at + head.to(tl.int64) * part_lse_head
    part += part_at * part_row + head.to(tl.int64) * part_head

    top = tl.full([], float("-inf"), tl.float32)
    total = tl.zeros([], tl.float32)
    if sinks is not None:
        top = tl.load(sinks + head).to(tl.float32)
        total = tl.where(top > float("-inf"), 1.0, 0.0)
    acc = tl.zeros([WIDTH], tl.float32)
    for s0 in range(0, splits, SPLITS):  # as a rule one round
        s = s0 + tl.arange(0, SPLITS)
        value = tl.load(part_lse + s.to(tl.int64) * part_lse_split, mask=s < splits, other=float("-inf"))
        wanted = (value > float("-inf"))[:, None] & (d < DV)[None, :]  # an empty split wrote no output
        x = tl.load(part + s.to(tl.int64)[:, None] * part_split + d[None, :], mask=wanted, other=0.0)
        new_top = tl.maximum(top, tl.max(value, 0))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weight = tl.exp(value - base)
        alpha = tl.exp(top - base)
        total = total * alpha + tl.sum(weight, 0)
        acc = acc * alpha + tl.sum(x * weight[:, None], 0)
        top = new_top
    at = out + batch.to(tl.int64) * out_batch + row * out_row + head.to(tl.int64) * out_head
    tl.store(at + d, tl.where(total > 0, acc / total, 0.0).to(out.dtype.element_ty), mask=d < DV)
    if lse is not None:
        if tl.program_id(2) == 0:
            value = tl.where(total > 0, top + tl.log(total), float("-inf"))
            tl.store(lse + batch.to(tl.int64) * lse_batch + head.to(tl.int64) * lse_head + row, value)


class Parts(NamedTuple):
    """Scratch for partial results in float32, equally many rows for every sequence.

    First out `[splits, sequences * rows, Hq, Dv]`, behind it the natural-log LSE `[splits, Hq, sequences * rows]`, -inf
    where a split had no keys (it then wrote no output).
    """

    splits: int
    sequences: int
    rows: int
    heads: int
    head_dim_v: int

    def allocate(self, device: torch.device) -> Tensor:
        size = self.splits * self.sequences * self.rows * self.heads * (self.head_dim_v + 1)
        return torch.empty(size, dtype=torch.float32, device=device)

    @property
    def out_strides(self) -> tuple[int, int, int]:
        """Strides of (split, row, head)."""
        row = self.heads * self.head_dim_v
        return self.sequences * self.rows * row, row, self.head_dim_v

    @property
    def lse_strides(self) -> tuple[int, int]:
        """Strides of (split, head)."""
        rows = self.sequences * self.rows
        return self.heads * rows, rows


def combine(
    parts: Parts, out: Tensor, lse: Tensor | None, batch: Batch, index: Tensor, starts: Tensor | None, tiles: int,
    tile_m: int, group: int, rows_upto: int, by_sequence: int,
) -> Launch:  # fmt: skip
    """A function of (part, out, lse, sinks) that merges partial results into `out` and `lse`, for tensors like
    these. A sink counts once. `index` and `starts` are those of the tile table, `starts` only where there are so many
    tiles `by_sequence`."""
    heads_kv, width = out.shape[-2] // group, 64
    at_once = 32 if parts.splits <= 32 else MAX_SPLITS
    arch = ptx(out.device)
    # Rows of no sequence may fill a tile, whatever the longest sequence is.
    rows = tile_m if batch.packed_q else min(tile_m, batch.max_seqlen_q * group)
    scalars = (
        *parts.out_strides, *parts.lse_strides, parts.rows, *strides(out), *lse_strides(lse), parts.splits,
        batch.seqlen_q or 0, batch.total_q, heads_kv, batch.batch_size, rows_upto,
    )  # fmt: skip
    constants = dict(
        GROUP=group, DV=out.shape[-1], TILE_M=tile_m, TILES=by_sequence, WIDTH=width, SPLITS=at_once, PTX=arch
    )
    options: dict[str, Any] = dict(num_warps=2 if at_once == 32 else 4)
    if arch >= 90:
        options["launch_pdl"] = True
    grid = (tiles * heads_kv, rows, triton.cdiv(out.shape[-1], width))
    return Launch(_combine_kernel, grid, (index, starts, batch.cu_seqlens_q), scalars, constants, **options)
