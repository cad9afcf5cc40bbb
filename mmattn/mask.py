"""The mask description: what a query row may see, and the one key interval that this amounts to.

`Mask.visible` is the definition, inequality by inequality. `row_interval` is its closed form. They share no
code and are proven equal by the tests. A mask feature exists in these two functions and nowhere else: the torch
lowering calls `row_interval`, and the Triton lowering compiles the very same function (`triton/bounds.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import where

UNLIMITED = 2**31 - 1
"""Stands for "no limit" in `Limits`: no position and no distance reaches it."""


class MaskError(ValueError):
    """A mask that cannot be: contradictory fields, or spans that overlap or run backwards."""


class Limits(NamedTuple):
    """A mask as plain integers, the form that `row_interval` and device kernels take."""

    left: int
    """Largest `q - k`."""
    right: int
    """Largest `k - q` on rows that are not causal."""
    chunk_size: int
    """0 = no chunks."""
    chunk_back: int
    """How many keys before the row's own chunk are visible."""
    clamp: int
    """1 = a span does not reach past `left`."""


def row_interval(q, causal, span_start, span_end, left, right, chunk_size, chunk_back, clamp):
    """The keys `lo..hi` (inclusive absolute positions) that a row at absolute position `q` may see.

    `q`, `causal`, `span_start` and `span_end` are per row (64-bit), the rest are the integers of `Limits`. The
    span is the one that holds `q`; any other is ignored. The caller cuts the result to the keys that exist.

    Only arithmetic and `where` may stand here: torch runs this function, and Triton compiles it.
    """
    lo = q - left
    hi = where(causal != 0, q, q + right)
    if chunk_size > 0:
        # The inner form is the floor modulo whether `%` floors (torch) or truncates (Triton).
        chunk_start = q - ((q % chunk_size) + chunk_size) % chunk_size
        lo = where(lo < chunk_start - chunk_back, chunk_start - chunk_back, lo)
        hi = where(hi > chunk_start + (chunk_size - 1), chunk_start + (chunk_size - 1), hi)
    in_span = (span_start < span_end) & (span_start <= q) & (q <= span_end)
    if clamp == 0:
        lo = where(in_span & (span_start < lo), span_start, lo)
    hi = where(in_span & (span_end > hi), span_end, hi)
    return lo, hi


def _check_count(name: str, value: Any, least: int) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
        raise MaskError(f"Mask.{name} must be None or an integer >= {least}, got {value!r}")


@dataclass(frozen=True)
class Mask:
    """What a query row may see; one per layer kind. Hashable and immutable.

    All rules are inequalities between absolute positions `q` (row) and `k` (key). A key is visible if

        (causal rule and window and chunk)   or   both lie in one span

    * causal rows: `k <= q`. Other rows: `k - q <= window_right`, or `<= window_left` when `window_right` is None and
      `symmetrize` is set, or any `k`.
    * window: `q - k <= window_left`. None is no limit, 0 is self only. There is no -1.
    * chunk: `k` is in the row's chunk of `chunk_size` keys or in one of the `chunk_lookback` chunks before it.
    * spans (`mm_prefix_range` of `attention()`) are inclusive `(start, end)`, valid iff `start < end`.
      `mm_prefix_clamp` keeps the left bound `q - k <= window_left` inside a span too, as Gemma 4 wants it.

    Rows are queries, columns keys, `x` is visible:

    >>> print(Mask.causal_().matrix(4))
    x . . .
    x x . .
    x x x .
    x x x x
    >>> print(Mask.sliding_window(2).matrix(4))  # 2 keys, self included
    x . . .
    x x . .
    . x x .
    . . x x
    >>> print(Mask.sliding_window(2, causal=False).matrix(4))  # symmetrised: |q - k| < 2
    x x . .
    x x x .
    . x x x
    . . x x
    >>> print(Mask.chunked(2).matrix(4))
    x . . .
    x x . .
    . . x .
    . . x x
    >>> print(Mask.causal_().matrix(5, spans=[(1, 3)]))
    x . . . .
    x x x x .
    x x x x .
    x x x x .
    x x x x x
    >>> print(Mask.sliding_window(2).matrix(5, spans=[(1, 3)]))  # a span ignores the window ...
    x . . . .
    x x x x .
    . x x x .
    . x x x .
    . . . x x
    >>> print(Mask.sliding_window(2, mm_prefix_clamp=True).matrix(5, spans=[(1, 3)]))  # ... unless clamped
    x . . . .
    x x x x .
    . x x x .
    . . x x .
    . . . x x
    """

    causal: bool = True
    window_left: int | None = None
    window_right: int | None = None
    symmetrize: bool = True
    mm_prefix_clamp: bool = False
    chunk_size: int | None = None
    chunk_lookback: int = 0

    def __post_init__(self) -> None:
        for name in ("causal", "symmetrize", "mm_prefix_clamp"):
            if not isinstance(getattr(self, name), bool):
                raise MaskError(f"Mask.{name} must be a bool, got {getattr(self, name)!r}")
        for name in ("window_left", "window_right"):
            _check_count(name, getattr(self, name), 0)
        _check_count("chunk_size", self.chunk_size, 1)
        _check_count("chunk_lookback", self.chunk_lookback, 0)
        if self.chunk_size is None and self.chunk_lookback:
            raise MaskError(f"Mask.chunk_lookback={self.chunk_lookback} needs a chunk_size")
        if self.chunk_size is not None and (self.window_left is not None or self.window_right is not None):
            raise MaskError(
                f"a chunked mask takes no window: chunk_size={self.chunk_size}, "
                f"window_left={self.window_left}, window_right={self.window_right}"
            )

    @classmethod
    def causal_(cls, **kw: Any) -> Mask:
        """Every key up to the row itself."""
        return cls(causal=True, **kw)

    @classmethod
    def full(cls, **kw: Any) -> Mask:
        """Every key."""
        return cls(causal=False, **kw)

    @classmethod
    def sliding_window(cls, window: int, **kw: Any) -> Mask:
        """Keeps `window` keys, self included (Hugging Face's `sliding_window`); 2*window - 1 on non-causal rows."""
        _check_count("sliding_window", window, 1)
        return cls(window_left=window - 1, **kw)

    @classmethod
    def from_fa_window(cls, causal: bool, window: tuple[int | None, int | None], **kw: Any) -> Mask:
        """FlashAttention's `(window_size_left, window_size_right)`, where -1 or None means no limit.

        Taken literally: the right side is never symmetrised, and a causal mask ignores it, as FlashAttention does.
        """
        left, right = (None if side in (-1, None) else side for side in window)
        return cls(causal=causal, window_left=left, window_right=right, symmetrize=False, **kw)

    @classmethod
    def chunked(cls, chunk_size: int, lookback: int = 0, **kw: Any) -> Mask:
        """Keys of the row's own chunk and of `lookback` chunks before it (Llama 4: lookback 0)."""
        return cls(chunk_size=chunk_size, chunk_lookback=lookback, **kw)

    def visible(self, q: Any, k: Any, *, spans: Iterable[tuple[Any, Any]] = (), causal: Any = None) -> torch.Tensor:
        """The definition: whether the row at absolute position `q` may see the key at absolute position `k`.

        `q`, `k`, the span ends and `causal` (non-zero = causal; default: the mask's own) are integers or integer
        tensors that broadcast. Returns a bool tensor of the broadcast shape.
        """
        q, k = torch.as_tensor(q), torch.as_tensor(k)
        is_causal = torch.as_tensor(self.causal if causal is None else causal) != 0
        anywhere = torch.ones(torch.broadcast_shapes(q.shape, k.shape), dtype=torch.bool, device=k.device)

        in_left_window = anywhere if self.window_left is None else (q - k <= self.window_left)
        if self.window_right is not None:
            ahead_allowed = k - q <= self.window_right
        elif self.symmetrize and self.window_left is not None:
            ahead_allowed = k - q <= self.window_left
        else:
            ahead_allowed = anywhere
        in_order = (is_causal & (k <= q)) | (~is_causal & ahead_allowed)

        in_chunk = anywhere
        if self.chunk_size is not None:
            chunks_back = torch.div(q, self.chunk_size, rounding_mode="floor") - torch.div(
                k, self.chunk_size, rounding_mode="floor"
            )
            in_chunk = (chunks_back >= 0) & (chunks_back <= self.chunk_lookback)

        in_same_span = ~anywhere
        for start, end in spans:
            start, end = torch.as_tensor(start), torch.as_tensor(end)
            in_same_span = in_same_span | ((start < end) & (start <= q) & (q <= end) & (start <= k) & (k <= end))
        if self.mm_prefix_clamp:
            in_same_span = in_same_span & in_left_window

        return (in_order & in_left_window & in_chunk) | in_same_span

    @property
    def limits(self) -> Limits:
        """The mask as the integers that `row_interval` takes."""
        left = UNLIMITED if self.window_left is None else min(self.window_left, UNLIMITED)
        if self.window_right is not None:
            right = min(self.window_right, UNLIMITED)
        else:
            right = left if self.symmetrize else UNLIMITED
        chunk_size = 0 if self.chunk_size is None else min(self.chunk_size, UNLIMITED)
        return Limits(
            left, right, chunk_size, min(chunk_size * self.chunk_lookback, UNLIMITED), int(self.mm_prefix_clamp)
        )

    @property
    def numbers(self) -> tuple[int, ...]:
        """Whether it is causal, and the `Limits`: all that kernels and operators are told of a mask."""
        return (int(self.causal), *self.limits)

    @classmethod
    def of_numbers(cls, causal: int, left: int, right: int, chunk_size: int, chunk_back: int, clamp: int) -> Mask:
        """A mask with these `numbers`: it shows the same keys as the one that they come from."""
        return cls(
            causal=bool(causal), symmetrize=False, mm_prefix_clamp=bool(clamp),
            window_left=None if left >= UNLIMITED else left, window_right=None if right >= UNLIMITED else right,
            chunk_size=chunk_size or None, chunk_lookback=-(-chunk_back // chunk_size) if chunk_size else 0,
        )  # fmt: skip

    def bounds(
        self, q: torch.Tensor, *, span: tuple[Any, Any] = (-1, -1), causal: Any = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The closed form: inclusive absolute `(lo, hi)` of what each row sees, as int64 tensors of `q`'s shape.

        `q` holds absolute positions; `span` is the one that holds the row, `(-1, -1)` for none. Sides without a limit
        lie beyond every position; cut the result to the keys that exist.
        """
        q = q.to(torch.int64)
        start, end = (torch.as_tensor(x, dtype=torch.int64, device=q.device).expand_as(q) for x in span)
        is_causal = torch.as_tensor(self.causal if causal is None else causal, device=q.device).expand_as(q)
        lo, hi = row_interval(q, is_causal, start, end, *self.limits)
        return lo, hi

    def check_spans(self) -> None:
        """Raises `MaskError` if this mask cannot be combined with spans."""
        if self.chunk_size is not None and self.mm_prefix_clamp:
            raise MaskError(
                f"chunk_size={self.chunk_size} with mm_prefix_clamp and spans is not one interval per row; "
                "drop the clamp or the chunks, or call once without spans"
            )

    def matrix(
        self,
        q_len: int,
        kv_len: int | None = None,
        *,
        spans: Iterable[tuple[int, int]] = (),
        q_start: int | None = None,
    ) -> str:
        """The mask as text, `x` where visible: rows `q_start..`, by default aligned to the last key."""
        kv_len = q_len if kv_len is None else kv_len
        q_start = kv_len - q_len if q_start is None else q_start
        seen = self.visible(torch.arange(q_start, q_start + q_len)[:, None], torch.arange(kv_len)[None, :], spans=spans)
        return "\n".join(" ".join("x" if cell else "." for cell in row) for row in seen.tolist())
