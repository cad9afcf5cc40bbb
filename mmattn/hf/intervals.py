"""`IntervalMask`: a 4-D attention mask for transformers that holds one key interval per row and no Q x K elements."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from .. import dispatch
from ..batch import Batch
from ..mask import Mask
from ..plan import Lowering, Plan, TileTable

log = logging.getLogger(__name__)
aten = torch.ops.aten

CHUNK_ELEMENTS = 2**24
"""Row chunks of a dense mask hold about this many elements."""


@dataclass(frozen=True)
class Refusal:
    """Why a mask is not one interval per row, and how to get it in dense form after all."""

    reason: str
    dense: Callable[[], Tensor]
    """Builds the bool `[B, 1, Q, K]` mask; called only where the user asked for a fallback or a model needs elements."""


class GivenRows:
    """A lowering whose row intervals are known already."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows
        self.inner: Lowering = dispatch.lowering(rows.device.type)

    def row_intervals(self, mask: Mask, batch: Batch) -> Tensor:
        return self.rows

    def tile_table(self, rows: Tensor, batch: Batch, tile_m: int, group: int, tile_n: int) -> TileTable:
        return self.inner.tile_table(rows, batch, tile_m, group, tile_n)


class IntervalMask(Tensor):
    """A bool mask `[B, 1, Q, K]` of which only `rows` exists: int32 `[B, Q, 2]`, half-open key-index intervals.

    Models pass it around like a tensor. Slices, moves and batch expansions stay intervals; every other operator builds
    the dense mask, with a warning, so that no model breaks. The plan is built once and shared by the layers that
    get this object.
    """

    rows: Tensor
    origin: str
    """What the intervals came from, for people."""
    documents: int | None
    """Packed documents in the batch, None where the mask is not packed."""
    refusal: Refusal | None
    _plan: Plan | None
    _within: tuple[Tensor, IntervalMask] | None

    @staticmethod
    def __new__(
        cls,
        rows: Tensor,
        kv_length: int,
        origin: str = "",
        documents: int | None = None,
        refusal: Refusal | None = None,
        plan: Plan | None = None,
    ) -> IntervalMask:
        batch, q_length, _ = rows.shape
        self = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, (batch, 1, q_length, kv_length), dtype=torch.bool, device=rows.device
        )
        self.rows, self.origin, self.documents, self.refusal = rows, origin, documents, refusal
        self._plan, self._within = plan, None
        return self

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        kind = f"refused: {self.refusal.reason}" if self.refusal else self.origin
        return f"IntervalMask({list(self.shape)}, {self.device}, {kind})"

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Any, ...]]:
        return ["rows"], (self.origin, self.documents, self.refusal)

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], ctx: tuple[Any, ...], size: Any, stride: Any) -> IntervalMask:
        return IntervalMask(inner["rows"], size[3], *ctx)

    @property
    def plan(self) -> Plan:
        """The plan for q `[B, Q, Hq, D]` and k `[B, K, Hkv, D]`; raises `ValueError` for a refused mask."""
        if self.refusal is not None:
            raise ValueError(self.refusal.reason)
        if self._plan is None:
            self._plan = plan_from_rows(self.rows, self.shape[3])
        return self._plan

    def dense(self) -> Tensor:
        """The elements, a plain bool tensor `[B, 1, Q, K]`."""
        if self.refusal is not None:
            return self.refusal.dense()
        key = torch.arange(self.shape[3], device=self.rows.device)
        lo, hi = self.rows[:, None, :, :, None].unbind(3)
        return (key >= lo) & (key < hi)

    def within(self, cu_seqlens: Tensor) -> IntervalMask:
        """The part of this `[1, 1, S, S]` mask inside packed sequences that start at `cu_seqlens` (`[n + 1]`)."""
        if self._within is None or self._within[0] is not cu_seqlens:
            ends = cu_seqlens.to(self.rows.device, torch.int64)
            row = torch.arange(self.shape[2], device=self.rows.device)
            at = torch.searchsorted(ends[1:], row, right=True).clamp(max=ends.numel() - 2)
            first, end = ends[at], ends[at + 1].masked_fill(row >= ends[-1], 0)
            lo = torch.maximum(self.rows[..., 0], first)
            hi = torch.maximum(torch.minimum(self.rows[..., 1], end), lo)
            rows = torch.stack([lo, hi], dim=-1).to(torch.int32)
            self._within = cu_seqlens, IntervalMask(rows, self.shape[3], self.origin, documents=ends.numel() - 1)
        return self._within[1]

    def _with_rows(self, rows: Tensor, kv_length: int) -> IntervalMask:
        return IntervalMask(rows, kv_length, self.origin)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        handler = _KEPT.get(func)
        if handler is not None:
            result = handler(*args, **kwargs)
            if result is not NotImplemented:
                return result
        log.warning("%s needs the elements of %s: building the dense mask", func, tuple(args[0].shape) if args else "")
        args, kwargs = tree_map(lambda x: x.dense() if isinstance(x, IntervalMask) else x, (args, kwargs))
        return func(*args, **kwargs)


def _refused_part(mask: IntervalMask, part: Callable[[Tensor], Tensor], rows: Tensor, kv_length: int) -> IntervalMask:
    assert mask.refusal is not None
    whole = mask.refusal
    return IntervalMask(rows, kv_length, mask.origin, refusal=Refusal(whole.reason, lambda: part(whole.dense())))


def _slice(mask: IntervalMask, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    dim %= 4
    size = mask.shape[dim]
    start, end, step = slice(start, end, step).indices(size)
    if (dim == 1 and (start, end) != (0, 1)) or (dim == 3 and step != 1):
        return NotImplemented
    if (start, end, step) == (0, size, 1):
        return _same(mask)
    end = max(start, end)
    rows, kv_length = mask.rows, mask.shape[3]
    if dim == 3:
        kv_length = end - start
        rows = (rows - start).clamp(0, kv_length)
    else:
        rows = rows[start:end:step] if dim == 0 else rows[:, start:end:step]
    if mask.refusal is not None:
        return _refused_part(mask, lambda dense: aten.slice.Tensor(dense, dim, start, end, step), rows, kv_length)
    return mask._with_rows(rows, kv_length)


def _same(mask: IntervalMask, *_: Any, **__: Any) -> IntervalMask:
    return IntervalMask(mask.rows, mask.shape[3], mask.origin, mask.documents, mask.refusal, mask._plan)


def _to_copy(mask: IntervalMask, *, dtype: Any = None, device: Any = None, **_: Any) -> Any:
    if dtype not in (None, torch.bool):
        return NotImplemented
    if device is None or torch.device(device) == mask.device:
        return _same(mask)
    refusal = mask.refusal and Refusal(mask.refusal.reason, lambda: mask.dense().to(device))
    return IntervalMask(mask.rows.to(device), mask.shape[3], mask.origin, mask.documents, refusal)


def _expand(mask: IntervalMask, size: Any, **_: Any) -> Any:
    want = [have if n == -1 else n for n, have in zip(size, mask.shape)]
    if len(size) != 4 or want[1:] != list(mask.shape[1:]):
        return NotImplemented
    if mask.refusal is not None:
        return _refused_part(mask, lambda dense: dense.expand(want), mask.rows.expand(want[0], -1, -1), mask.shape[3])
    return mask._with_rows(mask.rows.expand(want[0], -1, -1), mask.shape[3])


def _index_select(mask: IntervalMask, dim: int, index: Tensor) -> Any:
    if dim % 4 not in (0, 2):
        return NotImplemented
    rows = mask.rows.index_select(0 if dim % 4 == 0 else 1, index)
    if mask.refusal is not None:
        return _refused_part(mask, lambda dense: dense.index_select(dim, index), rows, mask.shape[3])
    return mask._with_rows(rows, mask.shape[3])


_KEPT: dict[Any, Callable[..., Any]] = {
    aten.slice.Tensor: _slice,
    aten.alias.default: _same,
    aten.detach.default: _same,
    aten.clone.default: _same,
    aten._to_copy.default: _to_copy,
    aten.expand.default: _expand,
    aten.index_select.default: _index_select,
}
"""Operators that keep a mask in interval form. Masks are never written to, so copies may share their rows."""


def plan_from_rows(rows: Tensor, kv_length: int) -> Plan:
    """A plan whose row intervals are `rows`, int32 `[B, Q, 2]`, half-open key indices."""
    batch_size, q_length, _ = rows.shape
    batch = Batch.build(
        batch_size=batch_size, max_seqlen_q=q_length, k_shape=(batch_size, kv_length, 1, 1), device=rows.device
    )
    return Plan(Mask.full(), batch, GivenRows(rows.reshape(-1, 2).contiguous()))


def rows_of(dense: Tensor) -> tuple[Tensor, Tensor]:
    """The interval of each row of a bool `[B, Q, K]` mask, int32 `[B, Q, 2]`, and where it is not one: bool `[B, Q]`."""
    keys = dense.shape[-1]
    seen = dense.sum(-1)
    if keys == 0:
        return seen.new_zeros((*seen.shape, 2), dtype=torch.int32), seen > 0
    flags = dense.to(torch.uint8)
    lo, hi = flags.argmax(-1), keys - flags.flip(-1).argmax(-1)
    empty = seen == 0
    rows = torch.stack([lo.masked_fill(empty, 0), hi.masked_fill(empty, 0)], dim=-1)
    return rows.to(torch.int32), ~empty & (hi - lo != seen)


def rows_in_chunks(
    chunk: Callable[[int, int], Tensor],
    batch_size: int,
    q_length: int,
    kv_length: int,
    first_row: int | Tensor,
    kv_start: int,
) -> tuple[Tensor, str | None]:
    """The intervals of a mask that is only known densely, from `chunk(start, end)` = bool `[B, end - start, K]`.

    Returns rows int32 `[B, Q, 2]`, and None or what is wrong with the first row that is not one interval, in absolute
    positions (`first_row` and `kv_start` are those of row 0 and key 0). Reads the device once.
    """
    step = max(1, CHUNK_ELEMENTS // max(batch_size * kv_length, 1))
    found = [rows_of(chunk(at, min(at + step, q_length))) for at in range(0, q_length, step)]
    rows, bad = (torch.cat(parts, dim=1) for parts in zip(*found))
    if not bad.any():
        return rows, None
    b, row = bad.nonzero()[0].tolist()
    keys = chunk(row, row + 1)[b, 0].nonzero().flatten().tolist()
    breaks = [0, *(i for i in range(1, len(keys)) if keys[i] != keys[i - 1] + 1), len(keys)]
    ranges = [f"{keys[s] + kv_start}..{keys[e - 1] + kv_start}" for s, e in zip(breaks, breaks[1:])]
    shown = ", ".join(ranges[:4]) + (", ..." if len(ranges) > 4 else "")
    return rows, f"row {row + int(first_row)} of sequence {b} sees {len(ranges)} separate key ranges ({shown})"
