"""Where the drafter's keys live: the projected context of the target, and behind it the rows of the block in flight.

A cache lays out three things for each layer kind (a `Mask`): slots to write to, keys to read, and the plan over them.
Lengths and page tables are device tensors of fixed address, written in place by `advance`; everything that happens
between two calls of `advance` is device work of fixed shapes, so a CUDA graph can hold it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from ..attention import plan
from ..mask import Mask
from ..plan import Plan


class Keys(Protocol):
    """What the draft layers see of a cache during one forward over `rows` rows per sequence."""

    def positions(self, rows: int) -> Tensor:
        """Absolute positions of the block's rows, `[B, rows]`."""

    def plan(self, kind: Mask, rows: int, causal: Tensor | None) -> Plan:
        """The plan of one layer kind."""

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Adds the block's `[B, rows, Hkv, D]` keys and values; returns all that `attention` is to read."""


class DraftCache:
    """Common part of the two caches: lengths, and K/V storage of every layer behind a flat slot index.

    Args:
        layers: the mask of each layer.
        batch_size: sequences.
        capacity: context rows that each sequence may hold.
        lookahead: rows of a block (1 + N), which stand behind the context.
        heads_kv, head_dim, head_dim_v, dtype, device: of keys and values.
    """

    def __init__(
        self, layers: Sequence[Mask], *, batch_size: int, capacity: int, lookahead: int, heads_kv: int, head_dim: int,
        head_dim_v: int, dtype: torch.dtype, device: torch.device,
    ) -> None:  # fmt: skip
        self.layers = tuple(layers)
        self.kinds = tuple(dict.fromkeys(layers))
        self.batch_size, self.capacity, self.lookahead = batch_size, capacity, lookahead
        self.device = device
        self.counts = [0] * batch_size
        """Context rows of each sequence, on the host."""
        self.start = torch.zeros(batch_size, dtype=torch.int32, device=device)
        """Context rows before the last `advance`, `[B]`."""
        self.lens = torch.zeros(batch_size, dtype=torch.int32, device=device)
        """Context rows, `[B]`."""
        self._kv = [
            tuple(
                torch.zeros(*self._shape(kind), heads_kv, dim, dtype=dtype, device=device)
                for dim in (head_dim, head_dim_v)
            )
            for kind in layers
        ]
        self._block_slots: dict[Mask, Tensor] = {}

    def _shape(self, kind: Mask) -> tuple[int, int]:
        raise NotImplementedError

    def _slots(self, kind: Mask, positions: Tensor, valid: Tensor | None) -> Tensor:
        """Flat slots of absolute positions `[B, S]`; rows that are not valid or have no slot go to the waste slot."""
        raise NotImplementedError

    def advance(self, counts: Sequence[int]) -> None:
        """Makes the context `counts[b]` rows longer; the rows themselves come with `write_context`.

        A count of 0 leaves a sequence where it is. Raises `ValueError` past the capacity.
        """
        if len(counts) != self.batch_size:
            raise ValueError(f"counts must hold one number per sequence ({self.batch_size}), got {len(counts)}")
        after = [held + n for held, n in zip(self.counts, counts)]
        for b, (n, end) in enumerate(zip(counts, after)):
            if n < 0 or end > self.capacity:
                raise ValueError(f"sequence {b} cannot grow by {n} rows to {end}: the cache holds {self.capacity}")
        self.counts = after
        self.start.copy_(self.lens)
        self.lens.copy_(torch.tensor(after, dtype=torch.int32))

    def context_slots(self, rows: int) -> dict[Mask, Tensor]:
        """Where rows `[B, rows]` of new context go; those past a sequence's count (rejected drafts) are dropped."""
        offset = torch.arange(rows, device=self.device)
        positions = self.start[:, None] + offset
        valid = positions < self.lens[:, None]
        return {kind: self._slots(kind, positions, valid) for kind in self.kinds}

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Writes `[B, rows, Hkv, D]` keys and values of one layer to `slots`."""
        if k.requires_grad or v.requires_grad:
            raise ValueError(
                "a cache would cut the gradients of keys and values; use training_keys() or torch.no_grad()"
            )
        for held, new in zip(self._kv[layer], (k, v)):
            held.flatten(0, 1).index_copy_(0, slots.flatten(), new.flatten(0, 1))

    def positions(self, rows: int) -> Tensor:
        return self.lens[:, None] + torch.arange(rows, device=self.device)

    def plan(self, kind: Mask, rows: int, causal: Tensor | None) -> Plan:
        if rows > self.lookahead:
            raise ValueError(f"the cache reserves {self.lookahead} rows for a block, got {rows}")
        self._block_slots[kind] = self._slots(kind, self.positions(rows), None)
        return self._plan(kind, rows, causal, self.lens + rows)

    def _plan(self, kind: Mask, rows: int, causal: Tensor | None, seqused_k: Tensor) -> Plan:
        raise NotImplementedError

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        self.write(layer, self._block_slots[self.layers[layer]], k, v)
        return self._kv[layer]  # type: ignore[return-value]


class ContiguousCache(DraftCache):
    """`[B, capacity + lookahead + 1, Hkv, D]` per layer; the last slot of a sequence takes what is to be dropped."""

    def _shape(self, kind: Mask) -> tuple[int, int]:
        return self.batch_size, self.capacity + self.lookahead + 1

    def _slots(self, kind: Mask, positions: Tensor, valid: Tensor | None) -> Tensor:
        width = self.capacity + self.lookahead + 1
        if valid is not None:
            positions = positions.masked_fill(~valid, width - 1)
        return torch.arange(self.batch_size, device=self.device)[:, None] * width + positions

    def _plan(self, kind: Mask, rows: int, causal: Tensor | None, seqused_k: Tensor) -> Plan:
        k = self._kv[self.layers.index(kind)][0]
        return plan(kind, k=k, device=self.device, max_seqlen_q=rows, seqused_k=seqused_k, causal=causal)


class PagedCache(DraftCache):
    """Pages `[pages, page_size, Hkv, D]` per layer and one page table per layer kind (a cache group).

    A windowed kind gives pages back as soon as its window has passed them, so it never holds more than the window and
    the block, however long the context. Table entries without a page are -1. The last page takes what is to be dropped.
    """

    def __init__(
        self, layers: Sequence[Mask], *, page_size: int = 16, batch_size: int, capacity: int, lookahead: int, **kw
    ) -> None:  # type: ignore[no-untyped-def]
        if page_size < 1:
            raise ValueError(f"page_size must be >= 1, got {page_size}")
        self.page_size = page_size
        self._columns = -(-(capacity + lookahead) // page_size)
        kinds = tuple(dict.fromkeys(layers))
        self.pages = {kind: batch_size * self._pages_of(kind, lookahead) for kind in kinds}
        """Pages of each kind, without the waste page."""
        super().__init__(layers, batch_size=batch_size, capacity=capacity, lookahead=lookahead, **kw)
        self._free = {kind: list(range(n)) for kind, n in self.pages.items()}
        self._held: dict[Mask, list[dict[int, int]]] = {kind: [{} for _ in range(batch_size)] for kind in kinds}
        self.tables = {
            kind: torch.full((batch_size, self._columns), -1, dtype=torch.int32, device=self.device) for kind in kinds
        }
        """int32 `[B, columns]` per layer kind, changed in place by `advance`."""

    def _pages_of(self, kind: Mask, lookahead: int) -> int:
        if kind.window_left is None:
            return self._columns
        # A run of keys may begin and end inside a page.
        return min(self._columns, -(-(kind.window_left + lookahead) // self.page_size) + 1)

    def _shape(self, kind: Mask) -> tuple[int, int]:
        return self.pages[kind] + 1, self.page_size

    def _needed(self, kind: Mask, length: int) -> range:
        """The columns of the page table that a block behind `length` context rows reads or writes."""
        first = 0 if kind.window_left is None else max(0, length - kind.window_left)
        return range(first // self.page_size, -(-(length + self.lookahead) // self.page_size))

    def advance(self, counts: Sequence[int]) -> None:
        super().advance(counts)
        for kind in self.kinds:
            needed = [self._needed(kind, length) for length in self.counts]
            for held, columns in zip(self._held[kind], needed):
                for column in [c for c in held if c not in columns]:
                    self._free[kind].append(held.pop(column))
            for held, columns in zip(self._held[kind], needed):
                for column in columns:
                    if column not in held:
                        held[column] = self._free[kind].pop()
            table = torch.full((self.batch_size, self._columns), -1, dtype=torch.int32)
            for b, held in enumerate(self._held[kind]):
                for column, page in held.items():
                    table[b, column] = page
            self.tables[kind].copy_(table)

    def _slots(self, kind: Mask, positions: Tensor, valid: Tensor | None) -> Tensor:
        column = torch.div(positions, self.page_size, rounding_mode="floor")
        # A rejected row may stand past the last column; it is dropped, so any column will do.
        page = self.tables[kind].gather(1, column.clamp(max=self._columns - 1).long())
        keep = page >= 0 if valid is None else (page >= 0) & valid
        page = torch.where(keep, page, self.pages[kind]).long()
        return page * self.page_size + positions % self.page_size

    def _plan(self, kind: Mask, rows: int, causal: Tensor | None, seqused_k: Tensor) -> Plan:
        k = self._kv[self.layers.index(kind)][0]
        return plan(
            kind,
            k=k,
            device=self.device,
            max_seqlen_q=rows,
            seqused_k=seqused_k,
            page_table=self.tables[kind],
            causal=causal,
        )


class TrainingKeys:
    """Keys of many blocks over whole sequences at once, without a cache and differentiable.

    Block `m` stands at position `anchors[m]` of sequence `sequences[m]` and sees the context before it and itself.

    Args:
        context: per layer the `(k, v)` of the context, each `[B, S, Hkv, D]`.
        sequences, anchors: of each block, host integers.
        rows: rows of a block.
    """

    def __init__(
        self, context: Sequence[tuple[Tensor, Tensor]], sequences: Sequence[int], anchors: Sequence[int], rows: int
    ) -> None:
        k = context[0][0]
        length, device = k.shape[1], k.device
        self._context, self.batch_size = context, len(anchors)
        self._anchors = torch.tensor(anchors, device=device)
        self._max_keys = max(anchors) + rows
        index, lens = [], [0]
        for m, (b, anchor) in enumerate(zip(sequences, anchors)):
            if not 0 < anchor <= length:
                raise ValueError(f"anchor {anchor} of block {m} is outside 1..{length}, the context")
            block = k.shape[0] * length + m * rows
            index += [torch.arange(b * length, b * length + anchor), torch.arange(block, block + rows)]
            lens.append(lens[-1] + anchor + rows)
        self._index = torch.cat(index).to(device)
        self._cu_seqlens_k = torch.tensor(lens, dtype=torch.int32, device=device)

    def positions(self, rows: int) -> Tensor:
        return self._anchors[:, None] + torch.arange(rows, device=self._anchors.device)

    def plan(self, kind: Mask, rows: int, causal: Tensor | None) -> Plan:
        return plan(
            kind, batch_size=self.batch_size, max_seqlen_q=rows, cu_seqlens_k=self._cu_seqlens_k, causal=causal,
            max_seqlen_k=self._max_keys,
        )  # fmt: skip

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        k_all, v_all = (
            torch.cat([held.flatten(0, 1), new.flatten(0, 1)]).index_select(0, self._index)
            for held, new in zip(self._context[layer], (k, v))
        )
        return k_all, v_all
