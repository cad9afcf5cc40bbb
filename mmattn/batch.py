"""The batch description: which rows and keys belong to which sequence, where they stand, and where spans lie.

`Batch.build` normalises every layout of the public API to one form and checks it on the host, without reading
device memory. `MMATTN_DEBUG=1` also checks the values on the device (this synchronises).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from .mask import UNLIMITED, Mask, MaskError

BRIEF_REACH = 4096
"""Few rows that see no more keys than this are quickly done."""
FEW_ROWS = 64
"""Up to this many rows per sequence a call counts as decoding, or verifying drafts, and its keys may be split."""
MANY_TILES = 128
"""So many tall tiles of query rows keep a GPU busy."""
SHORT_ROWS = 16
"""Up to this many rows the same holds for a sequence beside longer ones in a packed batch."""

SpanLists = Sequence[Sequence[tuple[int, int]]]


def debugging() -> bool:
    """Whether `MMATTN_DEBUG` asks for checks that read device memory."""
    return os.environ.get("MMATTN_DEBUG", "0") not in ("", "0")


def _say(x: Any) -> str:
    if isinstance(x, Tensor):
        return f"{x.dtype} {list(x.shape)} on {x.device}".replace("torch.", "")
    return repr(x)


def check_tensor(name: str, x: Any, shape: tuple[int | None, ...], device: torch.device) -> None:
    """`x` must be an int32 tensor of `shape` (None = any size) on `device`."""
    fits = isinstance(x, Tensor) and x.dtype == torch.int32 and x.dim() == len(shape) and x.device == device
    if not fits or any(n is not None and n != m for n, m in zip(shape, x.shape)):
        sizes = ", ".join("any number" if n is None else f"{n}" for n in shape)
        raise ValueError(f"{name} must be an int32 tensor of shape [{sizes}] on {device}, got {_say(x)}")


@dataclass(frozen=True, eq=False)
class Batch:
    """One batch in normal form. Tensors are int32 on `device`; every per-sequence tensor has shape `[batch_size]`.

    Row `i` of sequence `b` is row `cu_seqlens_q[b] + i` (packed) or `b * seqlen_q + i` (batched) of the row table
    and stands at absolute position `q_start[b] + i`. Key `j` stands at `kv_start[b] + j`.
    """

    device: torch.device
    batch_size: int
    total_q: int
    """Rows of the row table; packed rows past `cu_seqlens_q[-1]` belong to no sequence and see nothing."""
    seqlen_q: int | None
    """Rows of every sequence, None when packed."""
    seqlen_k: int | None
    """Key slots of every sequence, None when packed or paged."""
    max_seqlen_q: int
    max_seqlen_k: int | None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    seqused_k: Tensor | None = None
    q_start: Tensor | None = None
    kv_start: Tensor | None = None
    kv_lo: Tensor | None = None
    causal: Tensor | None = None
    page_table: Tensor | None = None
    spans: Tensor | None = None
    """`[batch_size, R, 2]`, in any order, with no-op padding (`start >= end`) anywhere."""
    query_spans: Tensor | None = None
    """`[total_q, 2]`: instead of `spans`, the span of each row."""

    @property
    def packed_q(self) -> bool:
        return self.cu_seqlens_q is not None

    @property
    def uneven(self) -> bool:
        """Whether some sequences may have fewer rows than others, as far as the host knows."""
        return self.packed_q and self.batch_size > 1 and self.total_q < self.batch_size * self.max_seqlen_q

    @classmethod
    def build(
        cls,
        *,
        q_shape: Sequence[int] | None = None,
        k_shape: Sequence[int] | None = None,
        device: torch.device | str | None = None,
        batch_size: int | None = None,
        total_q: int | None = None,
        mm_prefix_range: SpanLists | Tensor | None = None,
        mm_prefix_query_range: Tensor | None = None,
        causal: Tensor | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None,
        seqused_k: Tensor | None = None,
        page_table: Tensor | None = None,
        q_start: Tensor | None = None,
        kv_start: Tensor | None = None,
        kv_lo: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None,
    ) -> Batch:
        """Checks the batch arguments of `attention()` and brings them to one form.

        Sizes come from `q_shape` and `k_shape` where they are given, else from `batch_size`, `total_q`,
        `max_seqlen_q` and `max_seqlen_k`. Raises `ValueError` (an argument does not fit) or `MaskError` (spans).
        """
        vectors = dict(seqused_k=seqused_k, q_start=q_start, kv_start=kv_start, kv_lo=kv_lo, causal=causal)
        tensors = dict(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, page_table=page_table, **vectors)
        tensors.update(mm_prefix_range=mm_prefix_range, mm_prefix_query_range=mm_prefix_query_range)  # type: ignore[arg-type]
        if device is None:
            device = next((x.device for x in tensors.values() if isinstance(x, Tensor)), torch.device("cpu"))
        device = torch.device(device)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        for name, size in (
            ("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k), ("batch_size", batch_size), ("total_q", total_q),
        ):  # fmt: skip
            if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 0):
                raise ValueError(f"{name} must be a host integer >= 0, got {_say(size)}")

        # Rows: sizes first, from whatever names them.
        if q_shape is not None and len(q_shape) not in (3, 4):
            raise ValueError(f"q must be [T, Hq, D] or [B, S, Hq, D], got shape {list(q_shape)}")
        if cu_seqlens_q is not None:
            check_tensor("cu_seqlens_q", cu_seqlens_q, (None,), device)
            if cu_seqlens_q.numel() == 0:
                raise ValueError("cu_seqlens_q must have batch_size + 1 >= 1 entries, got none")
            if q_shape is not None and len(q_shape) == 4:
                raise ValueError(f"cu_seqlens_q goes with packed q [T, Hq, D], got q of shape {list(q_shape)}")
            sizes = {"cu_seqlens_q": cu_seqlens_q.numel() - 1}
        elif q_shape is not None:
            sizes = {"q": q_shape[0] if len(q_shape) == 4 else 1}
        else:
            sizes = {}
        if batch_size is not None:
            sizes["batch_size"] = batch_size
        if not sizes:
            sizes = {
                name: len(x)
                for name, x in {**vectors, "page_table": page_table, "mm_prefix_range": mm_prefix_range}.items()
                if x is not None
            } or {"the default": 1}
        owner, b = next(iter(sizes.items()))
        if batch_size is not None and batch_size != b:
            raise ValueError(f"batch_size={batch_size}, but {owner} holds {b} sequences")

        seqlen_q = None
        if cu_seqlens_q is not None:
            if q_shape is not None:
                total_q = q_shape[0]
            elif total_q is None and mm_prefix_query_range is not None:
                total_q = mm_prefix_query_range.shape[0]
            elif total_q is None and max_seqlen_q is not None:
                total_q = b * max_seqlen_q
            if total_q is None:
                raise ValueError(
                    "planning packed rows needs q, total_q or max_seqlen_q: lengths are not read from the device"
                )
            max_seqlen_q = total_q if max_seqlen_q is None else max_seqlen_q
            # On a CPU the values are at hand; the type tells real tensors from those of tracing.
            if device.type == "cpu" and type(cu_seqlens_q) is Tensor and not torch.compiler.is_compiling():
                if (end := int(cu_seqlens_q[-1])) > total_q:
                    raise ValueError(f"cu_seqlens_q ends at {end}, but there are only {total_q} rows")
        else:
            if q_shape is not None:
                seqlen_q = q_shape[-3]
            elif max_seqlen_q is not None:
                seqlen_q = max_seqlen_q
            elif total_q is not None and b == 1:
                seqlen_q = total_q
            else:
                raise ValueError("planning batched rows needs q or max_seqlen_q (every sequence's length)")
            if max_seqlen_q is not None and max_seqlen_q < seqlen_q:
                raise ValueError(f"max_seqlen_q={max_seqlen_q} is below q's sequence length {seqlen_q}")
            total_q, max_seqlen_q = b * seqlen_q, seqlen_q

        for name, x in vectors.items():
            if x is not None:
                check_tensor(name, x, (b,), device)

        # Keys.
        seqlen_k = None
        if k_shape is not None and len(k_shape) not in (3, 4):
            raise ValueError(
                f"k must be [Tk, Hkv, D], [B, Sk, Hkv, D] or pages [P, page, Hkv, D], got shape {list(k_shape)}"
            )
        if page_table is not None:
            if cu_seqlens_k is not None:
                raise ValueError("page_table takes seqused_k, not cu_seqlens_k")
            check_tensor("page_table", page_table, (b, None), device)
            if k_shape is not None and len(k_shape) != 4:
                raise ValueError(f"page_table goes with pages [P, page, Hkv, D], got k of shape {list(k_shape)}")
            if seqused_k is None:
                raise ValueError("page_table needs seqused_k, the number of valid keys of each sequence")
            if k_shape is not None and max_seqlen_k is None:
                max_seqlen_k = page_table.shape[1] * k_shape[1]
        elif cu_seqlens_k is not None:
            check_tensor("cu_seqlens_k", cu_seqlens_k, (b + 1,), device)
            if k_shape is not None and len(k_shape) == 4:
                raise ValueError(f"cu_seqlens_k goes with packed k [Tk, Hkv, D], got k of shape {list(k_shape)}")
            if k_shape is not None and max_seqlen_k is None:
                max_seqlen_k = k_shape[0]
        elif k_shape is not None:
            held = k_shape[0] if len(k_shape) == 4 else 1
            if held != b:
                hint = (
                    "pass page_table for paged k, or cu_seqlens_k for packed k"
                    if held != 1 or len(k_shape) == 3
                    else ""
                )
                raise ValueError(
                    f"k of shape {list(k_shape)} holds {held} sequences, but {owner} holds {b}; {hint}".rstrip("; ")
                )
            seqlen_k = k_shape[-3]
        elif seqused_k is None and max_seqlen_k is None:
            raise ValueError("planning needs k, seqused_k, cu_seqlens_k or max_seqlen_k to know where the keys end")
        elif seqused_k is None:
            seqlen_k = max_seqlen_k
        if seqlen_k is not None:
            max_seqlen_k = seqlen_k

        spans = query_spans = None
        if mm_prefix_range is not None and mm_prefix_query_range is not None:
            raise ValueError("give mm_prefix_range or mm_prefix_query_range, not both")
        if isinstance(mm_prefix_range, Tensor):
            check_tensor("mm_prefix_range", mm_prefix_range, (b, None, 2), device)
            spans = mm_prefix_range.contiguous()
        elif mm_prefix_range is not None:
            upload = _spans_in_graph if torch.compiler.is_compiling() else spans_from_lists
            spans = upload(mm_prefix_range, b, device)
        if mm_prefix_query_range is not None:
            shape = (total_q, 2) if seqlen_q is None or mm_prefix_query_range.dim() == 2 else (b, seqlen_q, 2)
            check_tensor("mm_prefix_query_range", mm_prefix_query_range, shape, device)
            query_spans = mm_prefix_query_range.reshape(total_q, 2).contiguous()

        batch = cls(
            device=device, batch_size=b, total_q=total_q, seqlen_q=seqlen_q, seqlen_k=seqlen_k,
            max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k,
            cu_seqlens_q=_contiguous(cu_seqlens_q), cu_seqlens_k=_contiguous(cu_seqlens_k), page_table=page_table,
            spans=None if spans is None or spans.shape[1] == 0 else spans, query_spans=query_spans,
            **{name: _contiguous(x) for name, x in vectors.items()},
        )  # fmt: skip
        if debugging():
            batch.check_values(k_shape[0] if k_shape is not None and cu_seqlens_k is not None else None)
        return batch

    def check_mask(self, mask: Mask) -> None:
        """Raises `MaskError` where `mask` cannot be combined with this batch."""
        if self.spans is not None or self.query_spans is not None:
            mask.check_spans()

    def with_page_table(self, page_table: Tensor | None) -> Batch:
        """The same batch over other pages (layers of one kind may live in different caches)."""
        if page_table is None or page_table is self.page_table:
            return self
        if self.cu_seqlens_k is not None or self.seqlen_k is not None or self.seqused_k is None:
            raise ValueError("page_table was given, but the plan describes keys that are not paged")
        check_tensor("page_table", page_table, (self.batch_size, None), self.device)
        return replace(self, page_table=page_table)

    def q_lens(self) -> Tensor:
        """Rows of each sequence, int64 `[batch_size]` on the device."""
        if self.cu_seqlens_q is None:
            return torch.full((self.batch_size,), self.seqlen_q or 0, dtype=torch.int64, device=self.device)
        ends = self.cu_seqlens_q.to(torch.int64).clamp(max=self.total_q)
        return ends[1:] - ends[:-1]

    def q_lens_above(self, rows: int) -> Tensor:
        """`q_lens()` as int32, with 0 for sequences of at most `rows` rows."""
        lens = self.q_lens()
        return torch.where(lens > rows, lens, 0).to(torch.int32)

    def kv_lens(self) -> Tensor:
        """Valid keys of each sequence, int64 `[batch_size]` on the device, never more than the slots there are."""
        if self.seqused_k is not None:
            lens = self.seqused_k.to(torch.int64)
            if self.seqlen_k is not None:
                lens = lens.clamp(max=self.seqlen_k)
            return lens.clamp(min=0)
        if self.cu_seqlens_k is not None:
            return (self.cu_seqlens_k[1:] - self.cu_seqlens_k[:-1]).to(torch.int64)
        return torch.full((self.batch_size,), self.seqlen_k or 0, dtype=torch.int64, device=self.device)

    def kv_starts(self) -> Tensor:
        """Absolute position of key 0 of each sequence, int64 `[batch_size]`."""
        return _or_zeros(self.kv_start, self)

    def q_starts(self) -> Tensor:
        """Absolute position of row 0 of each sequence, int64 `[batch_size]`; by default the last row meets the last key."""
        if self.q_start is not None:
            return self.q_start.to(torch.int64)
        return self.kv_starts() + self.kv_lens() - self.q_lens()

    def first_keys(self) -> Tensor:
        """Absolute position of the first valid key of each sequence, int64 `[batch_size]`."""
        starts = self.kv_starts()
        return starts if self.kv_lo is None else torch.maximum(starts, self.kv_lo.to(torch.int64))

    def row_offsets(self) -> Tensor:
        """First row of each sequence in the row table, and the end: int64 `[batch_size + 1]`."""
        if self.cu_seqlens_q is not None:
            return self.cu_seqlens_q.to(torch.int64).clamp(max=self.total_q)
        return torch.arange(self.batch_size + 1, device=self.device) * (self.seqlen_q or 0)

    def row_sequences(self) -> Tensor:
        """Sequence of each row, int64 `[total_q]`; `batch_size` for rows of no sequence."""
        row = torch.arange(self.total_q, device=self.device)
        return torch.searchsorted(self.row_offsets()[1:], row, right=True)

    def check_values(self, total_k: int | None = None) -> None:
        """Reads the device (`total_k`: rows of packed k): raises `ValueError`/`MaskError` naming the sequence and the values at fault."""
        for name, cu in (("cu_seqlens_q", self.cu_seqlens_q), ("cu_seqlens_k", self.cu_seqlens_k)):
            if cu is None:
                continue
            values = cu.tolist()
            if values[0] != 0:
                raise ValueError(f"{name} must start at 0, got {values[0]}")
            for b, (start, end) in enumerate(zip(values, values[1:])):
                if end < start:
                    raise ValueError(f"{name} falls from {start} to {end} at sequence {b}")
            rows = self.total_q if name == "cu_seqlens_q" else total_k
            if rows is not None and values[-1] > rows:
                raise ValueError(f"{name} ends at {values[-1]}, but {name[-1]} has {rows} rows")
        for b, n in enumerate(self.q_lens().tolist()):
            if n > self.max_seqlen_q:
                raise ValueError(f"sequence {b} has {n} rows, more than max_seqlen_q={self.max_seqlen_q}")
        if self.seqused_k is not None:
            for b, n in enumerate(self.seqused_k.tolist()):
                if n < 0 or (self.seqlen_k is not None and n > self.seqlen_k):
                    raise ValueError(f"seqused_k of sequence {b} is {n}, outside 0..{self.seqlen_k}")
        if self.spans is not None:
            for b, spans in enumerate(self.spans.tolist()):
                _check_spans(b, [(s, e) for s, e in spans if s < e])

    def check_pages(self, page_size: int, pages: int, rows: Tensor) -> None:
        """Reads the device: every page that a row needs must be in the table and exist. Raises `ValueError`."""
        assert self.page_table is not None
        table, offsets = self.page_table.tolist(), self.row_offsets().tolist()
        held = self.page_table.shape[1] * page_size
        for b, kv_len in enumerate(self.kv_lens().tolist()):
            if kv_len > held:
                raise ValueError(f"seqused_k of sequence {b} is {kv_len}, but its page_table row holds {held} keys")
            seen = [(lo, hi) for lo, hi in rows[offsets[b] : offsets[b + 1]].tolist() if lo < hi]
            for p in sorted({p for lo, hi in seen for p in range(lo // page_size, (hi - 1) // page_size + 1)}):
                if not 0 <= table[b][p] < pages:
                    raise ValueError(f"page_table[{b}, {p}] is {table[b][p]}, but k has pages 0..{pages - 1}")


def _contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def _or_zeros(x: Tensor | None, batch: Batch) -> Tensor:
    if x is None:
        return torch.zeros(batch.batch_size, dtype=torch.int64, device=batch.device)
    return x.to(torch.int64)


def _check_spans(b: int, spans: list[tuple[int, int]]) -> None:
    spans = sorted(spans)
    for (s0, e0), (s1, e1) in zip(spans, spans[1:]):
        if s1 <= e0:
            raise MaskError(f"spans ({s0}, {e0}) and ({s1}, {e1}) of sequence {b} overlap; ends are inclusive")


def spans_from_lists(lists: SpanLists, batch_size: int, device: torch.device) -> Tensor:
    """Checks the lists and uploads them as int32 `[batch_size, R, 2]`, ascending, padded with (-1, -1)."""
    if not isinstance(lists, (list, tuple)) or len(lists) != batch_size:
        got = f"{len(lists)} lists" if isinstance(lists, (list, tuple)) else repr(type(lists).__name__)
        raise MaskError(
            f"mm_prefix_range must hold one list of (start, end) per sequence ({batch_size}; [] where there is none), got {got}"
        )
    kept: list[list[tuple[int, int]]] = []
    for b, spans in enumerate(lists):
        mine = []
        for span in spans:
            if (
                not isinstance(span, (list, tuple))
                or len(span) != 2
                or not all(isinstance(x, int) and not isinstance(x, bool) for x in span)
            ):
                raise MaskError(
                    f"a span of sequence {b} must be (start, end), two integers, got {span!r}; mm_prefix_range holds one "
                    "list of spans per sequence: [[(start, end), ...], ...]"
                )
            start, end = span
            if start > end:
                raise MaskError(f"span ({start}, {end}) of sequence {b} runs backwards; both ends are inclusive")
            if start < end:
                if start < 0 or end >= 2**31 - 1:
                    raise MaskError(f"span ({start}, {end}) of sequence {b} must lie in 0..2**31-2")
                mine.append((start, end))
        _check_spans(b, mine)
        kept.append(sorted(mine))
    width = max((len(mine) for mine in kept), default=0)
    padded = [mine + [(-1, -1)] * (width - len(mine)) for mine in kept]
    host = torch.tensor(padded, dtype=torch.int32).reshape(batch_size, width, 2)
    if device.type != "cuda" or width == 0:
        return host.to(device)
    if torch.cuda.is_current_stream_capturing():
        raise ValueError(
            "under CUDA graph capture pass mm_prefix_range as an int32 [B, R, 2] tensor on the device, not as lists"
        )
    return host.pin_memory().to(device, non_blocking=True)


def _spans_in_graph(lists: SpanLists, batch_size: int, device: torch.device) -> Tensor:
    """`spans_from_lists` as an operator: a compiled graph takes the numbers as they come, only their count is its own."""
    bounds = [bound for spans in lists for span in spans for bound in span]
    spans: Tensor = torch.ops.mmattn.span_table(bounds, [len(spans) for spans in lists], batch_size, device=device)
    return spans


def row_reach(mask: Mask, batch: Batch) -> int:
    """An upper bound, from host facts alone, on the keys that one row sees."""
    return UNLIMITED if batch.spans is not None or batch.query_spans is not None else _reach_without_spans(mask, batch)


def _reach_without_spans(mask: Mask, batch: Batch) -> int:
    left, right, chunk_size, chunk_back, _ = mask.limits
    reach = left + (0 if mask.causal and batch.causal is None else right) + 1
    return min(reach, chunk_size + chunk_back if chunk_size else UNLIMITED, UNLIMITED)


def wants_split(mask: Mask, batch: Batch, group: int, heads_kv: int, head_dim: int) -> bool:
    """Whether a kernel that gives every tall tile of query rows to one multiprocessor would waste most of a GPU.

    By host facts alone: few rows per sequence, and either too few of them to fill such a tile, or too few tiles in all,
    or, on an H200 up to 64 packed rows of head dim 128, so few keys to read that starting costs most (bench case W8b).
    """
    if batch.max_seqlen_q > FEW_ROWS:
        return False
    rows = batch.max_seqlen_q * group
    tiles = batch.batch_size * heads_kv * -(-rows // 128)
    if rows < 32 or tiles < MANY_TILES:
        return True
    return rows <= 64 and head_dim <= 128 and row_reach(mask, batch) <= BRIEF_REACH


def wants_both(mask: Mask, batch: Batch, heads_kv: int) -> bool:
    """Whether a kernel as in `wants_split` should leave the short sequences of a batch to one that splits their keys.

    By host facts alone: there may be short ones beside long ones, there are too few in all to fill a GPU with a tile for
    each, and a short one may have many keys to read. (With spans it may have more than the window; that only costs time.)
    """
    reach = _reach_without_spans(mask, batch)
    if batch.max_seqlen_k is not None:
        reach = min(reach, batch.max_seqlen_k)
    tiles = batch.batch_size * heads_kv
    return batch.uneven and batch.max_seqlen_q > FEW_ROWS and tiles < MANY_TILES and reach > BRIEF_REACH


@cache
def capability(device: torch.device) -> tuple[int, int] | None:
    """Compute capability of an NVIDIA GPU; None elsewhere."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" and torch.version.hip is None else None


_HERE = nullcontext()


def current(device: torch.device) -> AbstractContextManager[object]:
    """Makes a GPU the current one while kernels are launched on it: they run on the current one, whatever their tensors say."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return _HERE
    return torch.cuda.device(device)


@dataclass(frozen=True)
class Call:
    """The static facts of one call: all that a backend may look at to say whether it can run it."""

    device_type: str
    capability: tuple[int, int] | None
    """See `capability()`."""
    dtype: torch.dtype
    kv_dtype: torch.dtype
    heads_q: int
    heads_kv: int
    head_dim: int
    head_dim_v: int
    packed_q: bool
    packed_k: bool
    page_size: int | None
    """None when k is not paged."""
    aligned: bool
    """Whether q, k, v and out start at multiples of 16 bytes and all their strides are such multiples."""
    split_kv: bool
    """Whether the rows are too few to fill a GPU unless the keys are split (see `wants_split`)."""
    mixed: bool
    """Whether that holds for some sequences only (see `wants_both`)."""
    softcap: bool
    sinks: bool
    scales: bool
    num_splits: bool
    out: bool
    grad: bool

    def __str__(self) -> str:
        arch = "" if self.capability is None else f" sm_{self.capability[0]}{self.capability[1]}"
        dtype = str(self.dtype).removeprefix("torch.")
        if self.kv_dtype is not self.dtype:
            dtype += f" over {str(self.kv_dtype).removeprefix('torch.')}"
        kv = "packed" if self.packed_k else "batched" if self.page_size is None else f"paged({self.page_size})"
        extras = [
            name
            for name in ("split_kv", "mixed", "softcap", "sinks", "scales", "num_splits", "out", "grad")
            if getattr(self, name)
        ]
        return (
            f"{self.device_type}{arch} {dtype}, heads {self.heads_q}/{self.heads_kv}, "
            f"head dim {self.head_dim}/{self.head_dim_v}, q {'packed' if self.packed_q else 'batched'}, k {kv}"
            + (f", {', '.join(extras)}" if extras else "")
        )
