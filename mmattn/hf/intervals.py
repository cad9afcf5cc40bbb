"""`IntervalMask`: a 4-D attention mask for transformers that holds one key interval per row and no Q x K elements."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from ..batch import Batch
from ..dispatch import GivenRows, UnsupportedError
from ..mask import Mask
from ..plan import Plan, plan_key

log = logging.getLogger(__name__)
aten = torch.ops.aten

HIDDEN = -10000.0
"""An additive mask hides a key with this or less: what older models use, and far beyond any score."""
CHUNK_ELEMENTS = 2**24
"""Row chunks of a dense mask hold about this many elements."""


@dataclass(frozen=True)
class About:
    """What a mask is besides its tensors. Hashable and comparable: compiled code may depend on it."""

    origin: str = field(default="", compare=False)
    """What the intervals came from, for people."""
    documents: int | None = None
    """Packed documents in the batch, None where the mask is not packed."""
    refusal: str | None = None
    """Why the mask is not one interval per row. It raises where a layer uses it, unless it has `elements`."""
    model: str = ""
    """Class of the model that asked for the mask, as far as its config tells."""
    fallback: str | None = None
    """"sdpa": where the elements are needed, they are formed. None: that raises."""


class IntervalMask(Tensor):
    """A mask `[B, 1, Q, K]` of which only `rows` exists: int32 `[B, Q, 2]`, half-open key-index intervals.

    Models pass it around like a tensor. Operators that keep intervals intervals work: slices, moves, expansions,
    concatenation along the batch or the rows, the intersection of two masks. Every other operator raises
    `UnsupportedError`, since a model that calculates with its mask would get something else than it thinks; with
    `fallback="sdpa"` it gets a dense mask of the type that its class is written for, with a warning. Nobody can
    write into the mask.

    The dtype is what the mask stands for: bool (True = visible), or a float type (0 = visible, its lowest number =
    hidden) for models whose classes know no sdpa. `elements`, a tensor for sdpa, exists only if the mask is not one
    interval per row and a fallback was asked for. The plan is built once and shared by the layers that get
    this object.
    """

    rows: Tensor
    key: Tensor | None
    """Stands for the plan in compiled graphs, see `mmattn.plan.Plan.key`; None for a refused mask, which has none."""
    elements: Tensor | None
    about: About
    _plan: Plan | None
    _within: tuple[Tensor, IntervalMask] | None

    @staticmethod
    def __new__(
        cls,
        rows: Tensor,
        kv_length: int,
        about: About | None = None,
        *,
        dtype: torch.dtype = torch.bool,
        elements: Tensor | None = None,
        plan: Plan | None = None,
        key: Tensor | None = None,
    ) -> IntervalMask:
        batch, q_length, _ = rows.shape
        self = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, (batch, 1, q_length, kv_length), dtype=dtype, device=rows.device
        )
        self.rows, self.elements, self.about = rows, elements, about or About()
        self._plan, self._within = plan, None
        if key is None and self.about.refusal is None:
            key = plan_key(rows) if plan is None else plan.key
        self.key = key
        return self

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        kind = f"refused: {self.about.refusal}" if self.about.refusal else self.about.origin
        return f"IntervalMask({list(self.shape)}, {self.dtype}, {self.device}, {kind})"

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Any, ...]]:
        inner = [name for name in ("rows", "key", "elements") if getattr(self, name) is not None]
        return inner, (self.about, self.dtype)

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], ctx: tuple[Any, ...], size: Any, stride: Any) -> IntervalMask:
        about, dtype = ctx
        return IntervalMask(
            inner["rows"], size[3], about, dtype=dtype, elements=inner.get("elements"), key=inner.get("key")
        )

    @property
    def plan(self) -> Plan:
        """The plan for q `[B, Q, Hq, D]` and k `[B, K, Hkv, D]`; raises `ValueError` for a refused mask."""
        if self.about.refusal is not None:
            raise ValueError(self.about.refusal)
        if self._plan is None:
            self._plan = plan_from_rows(self.rows, self.shape[3], self.key)
        return self._plan

    def dense(self) -> Tensor:
        """The elements, a plain bool tensor `[B, 1, Q, K]`; `ValueError` where they are not known."""
        if self.about.refusal is not None:
            if self.elements is None:
                raise ValueError(self.about.refusal)
            return self.elements
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
            rows = _intersection(self.rows, torch.stack([first, end], dim=-1)[None])
            about = replace(self.about, documents=ends.numel() - 1)
            self._within = cu_seqlens, IntervalMask(rows, self.shape[3], about, dtype=self.dtype)
        return self._within[1]

    def changed(
        self, rows: Callable[[Tensor], Tensor], elements: Callable[[Tensor], Tensor], kv_length: int | None = None
    ) -> IntervalMask:
        """This mask after an operator that does `rows` to its rows and would do `elements` to its elements."""
        about = replace(self.about, documents=None)  # they count tokens of the whole mask
        new = None if self.elements is None else elements(self.elements)
        kv_length = self.shape[3] if kv_length is None else kv_length
        return IntervalMask(rows(self.rows), kv_length, about, dtype=self.dtype, elements=new)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        handler = _KEPT.get(func)
        if handler is not None:
            result = handler(*args, **kwargs)
            if result is not NotImplemented:
                return result
        return _with_elements(func, args, kwargs)


# Operators that need the elements


def additive(dense: Tensor, dtype: torch.dtype) -> Tensor:
    """A bool mask as transformers' eager attention adds it to its scores: 0 = visible, the lowest number = hidden."""
    return torch.zeros_like(dense, dtype=dtype).masked_fill(~dense, torch.finfo(dtype).min)


_ADDS = {aten.add.Tensor, aten.add_.Tensor, aten.sub.Tensor, aten.sub_.Tensor, aten.rsub.Tensor}


def _with_elements(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs an operator on the dense mask where a fallback was asked for, else raises `UnsupportedError`."""
    leaves = tree_leaves((args, kwargs))
    masks = [x for x in leaves if isinstance(x, IntervalMask)]
    written = [x for a, x in _arguments(func, args, kwargs) if a.alias_info is not None and a.alias_info.is_write]
    mask = masks[0]
    model = mask.about.model or "the model"
    if any(isinstance(x, IntervalMask) for x in tree_leaves(written)):
        raise UnsupportedError(
            f"{model}: {func} writes into the attention mask, which mmattn keeps as one key interval per row; "
            + _ELSEWHERE
        )
    if mask.about.fallback != "sdpa":
        raise UnsupportedError(
            f"{model}: {func} calculates with the attention mask, of which mmattn only keeps one key interval per row; "
            f'{_ELSEWHERE}, or call mmattn.hf.register(fallback="sdpa") to give such models a dense mask'
        )
    # Whoever adds a mask to scores means floats, whatever its class says about sdpa.
    floats = [x.dtype for x in leaves if isinstance(x, Tensor) and x.dtype.is_floating_point]
    dtype = floats[0] if func in _ADDS and floats else mask.dtype
    log.warning("%s: %s needs the elements of a mask %s: building it", model, func, list(mask.shape))

    def elements(x: Any) -> Any:
        if not isinstance(x, IntervalMask):
            return x
        return x.dense() if dtype == torch.bool else additive(x.dense(), dtype)

    args, kwargs = tree_map(elements, (args, kwargs))
    return func(*args, **kwargs)


def _arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[Any, Any]]:
    """The declared arguments of an operator with what was given for them."""
    declared = func._schema.arguments
    return [*zip(declared, args), *((a, kwargs[a.name]) for a in declared[len(args) :] if a.name in kwargs)]


_ELSEWHERE = (
    'load that part of the model with another attention, as in attn_implementation={"text_config": "mmattn", '
    '"vision_config": "sdpa"} with the names of its sub-configs'
)


# Operators that keep a mask in intervals: pure functions of rows and elements


def _same(mask: IntervalMask, *_: Any, **__: Any) -> IntervalMask:
    # Nobody writes into a mask, so copies share their rows.
    return IntervalMask(
        mask.rows, mask.shape[3], mask.about, dtype=mask.dtype, elements=mask.elements, plan=mask._plan, key=mask.key
    )


def _within(at: Any, default: Any, size: Any) -> Any:
    """An end of a slice as `slice.indices` gives it, which would tie a compiled graph to this size."""
    if at is None or at == 2**63 - 1:
        return default if at is None else size
    return min(max(at + size if at < 0 else at, 0), size)


def _slice(mask: IntervalMask, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    dim %= 4
    size = mask.shape[dim]
    start, end = _within(start, 0, size), _within(end, size, size)
    if (dim == 1 and (start, end) != (0, 1)) or (dim == 3 and step != 1):
        return NotImplemented
    if (start, end, step) == (0, size, 1):
        return _same(mask)
    end = max(start, end)

    def elements(dense: Tensor) -> Tensor:
        return dense.narrow(dim, start, end - start) if step == 1 else aten.slice.Tensor(dense, dim, start, end, step)

    if dim == 3:
        return mask.changed(lambda rows: (rows - start).clamp(0, end - start), elements, end - start)
    return mask.changed(lambda rows: rows[start:end:step] if dim == 0 else rows[:, start:end:step], elements)


def _to_copy(mask: IntervalMask, *, dtype: Any = None, device: Any = None, **_: Any) -> Any:
    dtype = mask.dtype if dtype is None else dtype
    # An additive mask stays one in another float type. A bool mask as floats would be 0 and 1.
    if dtype != mask.dtype and not (dtype.is_floating_point and mask.dtype.is_floating_point):
        return NotImplemented
    if device is None or torch.device(device) == mask.device:
        return IntervalMask(mask.rows, mask.shape[3], mask.about, dtype=dtype, elements=mask.elements, plan=mask._plan)
    elements = None if mask.elements is None else mask.elements.to(device)
    return IntervalMask(mask.rows.to(device), mask.shape[3], mask.about, dtype=dtype, elements=elements)


def _expand(mask: IntervalMask, size: Any, **_: Any) -> Any:
    if len(size) != 4:
        return NotImplemented
    want = [have if n == -1 else n for n, have in zip(size, mask.shape)]
    if want[1] != 1 or want[3] != mask.shape[3]:
        return NotImplemented
    return mask.changed(lambda rows: rows.expand(want[0], want[2], -1), lambda dense: dense.expand(want))


def _index_select(mask: IntervalMask, dim: int, index: Tensor) -> Any:
    if dim % 4 not in (0, 2):
        return NotImplemented
    return mask.changed(
        lambda rows: rows.index_select(0 if dim % 4 == 0 else 1, index), lambda dense: dense.index_select(dim, index)
    )


def _cat(masks: list[Any], dim: int = 0) -> Any:
    dim %= 4
    first = masks[0]
    alike = all(
        isinstance(m, IntervalMask)
        and m.about == first.about
        and m.dtype == first.dtype
        and (m.elements is None) == (first.elements is None)
        for m in masks
    )
    if dim not in (0, 2) or not alike or len({m.shape[3] for m in masks}) > 1:
        return NotImplemented
    return first.changed(
        lambda _: torch.cat([m.rows for m in masks], dim=0 if dim == 0 else 1),
        lambda _: torch.cat([m.elements for m in masks], dim=dim),
    )


def _and(mask: Any, other: Any) -> Any:
    if not (isinstance(mask, IntervalMask) and isinstance(other, IntervalMask)):
        return NotImplemented
    refused = mask.about.refusal is not None or other.about.refusal is not None
    if mask.shape != other.shape or {mask.dtype, other.dtype} != {torch.bool} or refused:
        return NotImplemented
    about = replace(mask.about, documents=None, origin=f"{mask.about.origin} and {other.about.origin}")
    return IntervalMask(_intersection(mask.rows, other.rows), mask.shape[3], about)


_KEPT: dict[Any, Callable[..., Any]] = {
    aten.slice.Tensor: _slice,
    aten.alias.default: _same,
    aten.detach.default: _same,
    aten.clone.default: _same,
    aten._to_copy.default: _to_copy,
    aten.expand.default: _expand,
    aten.index_select.default: _index_select,
    aten.cat.default: _cat,
    aten.bitwise_and.Tensor: _and,
    aten.logical_and.default: _and,
}


# Rows


def _intersection(rows: Tensor, others: Tensor) -> Tensor:
    """Two tables of intervals, `[B, Q, 2]`, cut with each other: int32."""
    lo = torch.maximum(rows[..., 0], others[..., 0])
    hi = torch.maximum(torch.minimum(rows[..., 1], others[..., 1]), lo)
    return torch.stack([lo, hi], dim=-1).to(torch.int32)


def plan_from_rows(rows: Tensor, kv_length: int, key: Tensor | None = None) -> Plan:
    """A plan whose row intervals are `rows`, int32 `[B, Q, 2]`, half-open key indices, and whose key is `key`."""
    batch_size, q_length, _ = rows.shape
    batch = Batch.build(
        batch_size=batch_size, max_seqlen_q=q_length, k_shape=(batch_size, kv_length, 1, 1), device=rows.device
    )
    plan = Plan(Mask.full(), batch, GivenRows(rows.reshape(-1, 2).contiguous()))
    if key is not None:
        plan.key = key
    return plan


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
