"""Lowering: Mask x Batch -> Plan. A plan is all that a kernel knows of a mask.

* `rows`: the key interval of every query row,
* `tiles(...)`: for every query tile the key blocks it touches and the run of them that needs no masking,
* `columns(...)` and `column_tiles(...)`: the same two with rows and keys in each other's place, for gradients of keys.

`TorchLowering` computes both on any device. `triton/bounds.py` has the same steps as device kernels.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from .batch import Batch, debugging
from .columns import Columns, column_table, key_batch
from .mask import Mask

NO_SPAN = -1
KINDS = 64
"""Kinds of calls that a plan remembers: more would be a caller whose every call is another kind."""


@dataclass(frozen=True, eq=False)
class TileTable:
    """The key blocks of every query tile, for tiles of `tile_m` packed rows and blocks of `tile_n` keys.

    Packed rows are `position * group + head in group`, so the query heads of one KV head share a tile. Tile `m` of
    sequence `b` is slot `starts[b] + m`; some slots may be unused.
    """

    ranges: Tensor
    """int32 `[slots, 4]`: first touched, first full, end of full, end of touched block; ascending. All 0: empty."""
    index: Tensor
    """int32 `[slots, 2]`: (sequence, m); sequence `batch_size` holds the rows past `cu_seqlens_q[-1]`, -1 is unused."""
    starts: Tensor
    """int32 `[batch_size + 1]`."""


@dataclass(frozen=True, eq=False)
class Options:
    """What a call asks for beside its mask; see `attention()`."""

    scale: float
    softcap: float | None = None
    sinks: Tensor | None = None
    k_scale: Tensor | None = None
    """float32 `[B, Hkv]`, any strides."""
    v_scale: Tensor | None = None
    num_splits: int | None = None

    @property
    def holds_tensors(self) -> bool:
        """Whether they are of one call only."""
        return self.sinks is not None or self.k_scale is not None or self.v_scale is not None


class Grads(NamedTuple):
    """Gradients of a call, each in the shape and dtype of its input; None where there was no such input."""

    q: Tensor
    k: Tensor
    v: Tensor
    sinks: Tensor | None = None
    k_scale: Tensor | None = None
    """`[B, Hkv]`, as in `Options`."""
    v_scale: Tensor | None = None


class Write(Protocol):
    """Writes attention of q over k and v under a plan into `out` and, if given, `lse`; layouts as of `dispatch.Forward`."""

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, plan: Plan, page_table: Tensor | None, *,
        options: Options, out: Tensor, lse: Tensor | None,
    ) -> None: ...  # fmt: skip


class Settle(Protocol):
    """Decides on the kernels of a call by everything but the values in its tensors, and their addresses but for alignment.

    What it gives runs this call and all others that agree with it in the rest: shapes, strides, dtypes, options, plan.
    """

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, plan: Plan, page_table: Tensor | None, *,
        options: Options, out: Tensor, lse: Tensor | None,
    ) -> Write: ...  # fmt: skip


def in_turn(writes: Sequence[Write]) -> Write:
    """One after the other, each on rows of its own."""
    if len(writes) == 1:
        return writes[0]

    def write(*args, **kwargs):  # type: ignore[no-untyped-def]
        for one in writes:
            one(*args, **kwargs)

    return write


class Lowering(Protocol):
    """How row intervals and tile tables are computed on one kind of device."""

    def row_intervals(self, mask: Mask, batch: Batch) -> Tensor: ...

    def tile_table(self, rows: Tensor, batch: Batch, tile_m: int, group: int, tile_n: int) -> TileTable: ...

    def column_table(self, rows: Tensor, batch: Batch, slots: int) -> Columns: ...


@dataclass(eq=False)
class Plan:
    """A mask lowered for one batch: build it once per layer kind, use it in any number of layers.

    The plan is a snapshot: later changes of the batch's tensors do not reach it (a CUDA graph that captures `plan()`
    computes it anew at every replay).
    """

    mask: Mask
    batch: Batch
    lowering: Lowering
    rows: Tensor = field(init=False)
    """int32 `[total_q, 2]`: half-open interval of key indices (0 = the sequence's first key slot); (0, 0) is empty."""
    key: Tensor = field(init=False, repr=False)
    """An empty tensor that stands for this plan where only tensors pass; see `operator.py`."""
    forwards: dict[Hashable, Any] = field(init=False, repr=False, default_factory=dict)
    """Kind of call -> the `dispatch.Forward` that ran the first of its kind, and its `Options` unless they hold tensors;
    see `attention()`."""
    backwards: dict[Hashable, Any] = field(init=False, repr=False, default_factory=dict)
    """Kind of call -> what a kernel backend settled for its gradients."""
    debug: bool = field(init=False, repr=False)
    """Whether every call is to be checked, also on the device: `MMATTN_DEBUG` when the plan was made."""
    _tiles: dict[tuple[int, int, int], TileTable] = field(init=False, repr=False, default_factory=dict)
    _columns: dict[int, Columns] = field(init=False, repr=False, default_factory=dict)
    _column_tiles: dict[tuple[int, int, int], TileTable] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.batch.check_mask(self.mask)
        self.debug = debugging()
        self.rows = self.lowering.row_intervals(self.mask, self.batch)
        self.key = plan_key(self.rows)

    def with_rows(self, rows: Tensor) -> Plan:
        """This plan with other row intervals, int32 `[total_q, 2]`; nothing that came from the old ones is kept."""
        other = copy.copy(self)
        other.rows, other._tiles, other.forwards, other.key = rows, {}, {}, plan_key(rows)
        other._columns, other._column_tiles, other.backwards = {}, {}, {}
        return other

    def remember(self, kind: Hashable, forward: Any, options: Options) -> None:
        """Keeps what runs a kind of call."""
        if len(self.forwards) >= KINDS:
            self.forwards.clear()
        self.forwards[kind] = forward, None if options.holds_tensors else options

    @property
    def tile_shapes(self) -> tuple[tuple[int, int, int], ...]:
        """(tile_m, group, tile_n) of the tables requested so far."""
        return tuple(self._tiles)

    def tiles(self, tile_m: int, group: int, tile_n: int) -> TileTable:
        """The tile table for this shape, computed at the first request."""
        key = (tile_m, group, tile_n)
        table = self._tiles.get(key)
        if table is None:
            table = self._tiles[key] = self.lowering.tile_table(self.rows, self.batch, *key)
        return table

    def columns(self, slots: int) -> Columns:
        """Which rows see each key slot, computed at the first request; `slots` is `k.shape[-3]`, keys are not paged."""
        table = self._columns.get(slots)
        if table is None:
            table = self._columns[slots] = self.lowering.column_table(self.rows, self.batch, slots)
        return table

    def column_tiles(self, slots: int, tile_n: int, tile_m: int) -> TileTable:
        """For every tile of `tile_n` keys the blocks of `tile_m` rows that see some and all of it.

        `TileTable` with keys as rows: `index` holds (sequence, number of the key tile), where sequence `batch_size` holds
        the slots past `cu_seqlens_k[-1]`. The run of full blocks holds only where `Columns.of_sequences` says so.
        """
        key = (slots, tile_n, tile_m)
        table = self._column_tiles.get(key)
        if table is None:
            keys, columns = key_batch(self.batch, slots), self.columns(slots)
            table = self._column_tiles[key] = self.lowering.tile_table(columns.rows, keys, tile_n, 1, tile_m)
        return table


def plan_key(rows: Tensor) -> Tensor:
    """A new empty tensor; an operator where the rows are traced, so that no two plans of a graph get the same one."""
    if torch.compiler.is_compiling() or type(rows) is not Tensor:
        traced: Tensor = torch.ops.mmattn.plan_key(rows)
        return traced
    return rows.new_empty(0)


def tile_slots(batch: Batch, tile_m: int, group: int) -> int:
    """How many slots a tile table has: a bound from host sizes, so that no length is read from the device.

    Sequence `b` of a packed batch starts at slot `cu_seqlens_q[b] * group // tile_m + b`: enough room for any lengths.
    """
    if batch.seqlen_q is not None:
        return batch.batch_size * -(-batch.seqlen_q * group // tile_m)
    return batch.total_q * group // tile_m + batch.batch_size + 1


class TorchLowering:
    """Row intervals, columns and tile tables with torch operators, on any device, without reading it back."""

    def row_intervals(self, mask: Mask, batch: Batch) -> Tensor:
        if batch.batch_size == 0 or batch.total_q == 0:
            return torch.zeros(batch.total_q, 2, dtype=torch.int32, device=batch.device)
        seq = batch.row_sequences()
        beyond = seq >= batch.batch_size
        seq = seq.clamp(max=batch.batch_size - 1)
        kv_start, kv_len = batch.kv_starts()[seq], batch.kv_lens()[seq]
        row = torch.arange(batch.total_q, device=batch.device)
        q = batch.q_starts()[seq] + row - batch.row_offsets()[seq]
        start, end = self._row_spans(batch, seq, q)
        causal = mask.causal if batch.causal is None else batch.causal[seq]
        lo, hi = mask.bounds(q, span=(start, end), causal=causal)
        lo = torch.maximum(lo, batch.first_keys()[seq]) - kv_start
        hi = torch.minimum(hi - kv_start + 1, kv_len)
        empty = beyond | (lo >= hi)
        return torch.stack([lo.masked_fill(empty, 0), hi.masked_fill(empty, 0)], dim=1).to(torch.int32)

    @staticmethod
    def _row_spans(batch: Batch, seq: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
        """The candidate span of each row (it may not hold the row; `row_interval` looks)."""
        if batch.query_spans is not None:
            spans = batch.query_spans.to(torch.int64)
            return spans[:, 0], spans[:, 1]
        if batch.spans is None:
            none = torch.full_like(q, NO_SPAN)
            return none, none
        # Disjoint spans: only the last valid one that starts at or before the row can hold it. One search serves all
        # sequences, over keys (sequence, start); starts of no-op padding sort behind every position.
        beyond = 2**40
        start, end = batch.spans.to(torch.int64).unbind(-1)
        start = torch.where(start < end, start, beyond - 1)
        start, order = start.sort(dim=1)
        end = end.gather(1, order).flatten()
        keys = (start + beyond * torch.arange(batch.batch_size, device=q.device)[:, None]).flatten()
        at = torch.searchsorted(keys, beyond * seq + q.clamp(min=NO_SPAN), right=True) - 1
        mine = (at >= 0) & (torch.div(at, start.shape[1], rounding_mode="floor") == seq)
        at = at.clamp(min=0)
        return torch.where(mine, start.flatten()[at], NO_SPAN), torch.where(mine, end[at], NO_SPAN)

    def tile_table(self, rows: Tensor, batch: Batch, tile_m: int, group: int, tile_n: int) -> TileTable:
        slots = tile_slots(batch, tile_m, group)
        device = batch.device
        if batch.seqlen_q is not None:
            per_sequence = -(-batch.seqlen_q * group // tile_m)
            starts = torch.arange(batch.batch_size + 1, device=device) * per_sequence
            offsets = batch.row_offsets()
        else:
            # The rows past the last sequence count as one more, which sees nothing.
            offsets = torch.cat([batch.row_offsets(), torch.tensor([batch.total_q], device=device)])
            starts = offsets[:-1] * group // tile_m + torch.arange(batch.batch_size + 1, device=device)
        slot = torch.arange(slots, device=device)
        seq = (torch.searchsorted(starts, slot, right=True) - 1).clamp(max=offsets.numel() - 2)
        m = slot - starts[seq]
        length = (offsets[1:] - offsets[:-1])[seq]
        used = m * tile_m < length * group

        last = torch.minimum(((m + 1) * tile_m - 1) // group, length - 1)
        at = (m * tile_m // group)[:, None] + torch.arange((tile_m - 1) // group + 2, device=device)
        present = used[:, None] & (at <= last[:, None])
        padded = torch.cat([rows, rows.new_zeros(1, 2)])  # absent rows read the last one
        lo, hi = padded[(offsets[seq][:, None] + at).masked_fill(~present, batch.total_q)].to(torch.int64).unbind(-1)
        ranges = block_ranges(lo, hi, present, tile_n)
        index = torch.stack([torch.where(used, seq, -1), torch.where(used, m, 0)], dim=1)
        return TileTable(ranges.to(torch.int32), index.to(torch.int32), starts.to(torch.int32))

    def column_table(self, rows: Tensor, batch: Batch, slots: int) -> Columns:
        return column_table(rows, batch, slots)


def block_ranges(lo: Tensor, hi: Tensor, present: Tensor, tile_n: int) -> Tensor:
    """The four block numbers of each tile from the intervals of its rows (last dim); absent rows do not count."""
    far = 2**31 - 1
    seeing = present & (lo < hi)
    min_lo, max_lo = lo.masked_fill(~seeing, far).amin(-1), lo.masked_fill(~present, 0).amax(-1)
    min_hi, max_hi = hi.masked_fill(~present, far).amin(-1), hi.masked_fill(~seeing, 0).amax(-1)
    any_seeing = seeing.any(-1)
    first = torch.where(any_seeing, min_lo // tile_n, 0)
    end = torch.where(any_seeing, -(-max_hi // tile_n), 0)
    full = torch.minimum(torch.maximum(-(-max_lo // tile_n), first), end)
    full_end = torch.minimum(torch.maximum(min_hi // tile_n, full), end)
    return torch.stack([first, full, full_end, end], dim=-1)
