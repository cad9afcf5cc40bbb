"""Tensors as the kernels address them: strides, alignment, and matrices for TMA descriptors."""

from __future__ import annotations

from torch import Tensor


def strides(x: Tensor) -> tuple[int, int, int]:
    """Strides of (batch or page, row, head)."""
    return (0, x.stride(0), x.stride(1)) if x.dim() == 3 else (x.stride(0), x.stride(1), x.stride(2))


def vectorises(x: Tensor) -> bool:
    """Whether Triton knows that every row starts at a multiple of 16 bytes: it looks at divisibility by 16 elements."""
    return x.data_ptr() % 16 == 0 and all(stride % 16 == 0 for stride in x.stride()[:-1])


def lse_strides(lse: Tensor | None) -> tuple[int, int]:
    """Strides of (batch, head)."""
    if lse is None:
        return 0, 0
    return (0, lse.stride(0)) if lse.dim() == 2 else (lse.stride(0), lse.stride(1))


def scale_strides(x: Tensor | None) -> tuple[int, int]:
    return (0, 0) if x is None else (x.stride(0), x.stride(1))


def matrix(x: Tensor) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int, int]] | None:
    """`x` as one matrix for a TMA descriptor: shape, strides, and (rows per sequence, rows per head, columns per head).

    A head is either a range of columns (packed and [B, S, H, D] layouts) or of rows ([B, H, S, D] layouts). None where
    the strides allow neither, or are not the multiples of 16 bytes that TMA wants.
    """
    batch, row, head = strides(x)
    size, heads, d = x.element_size(), x.shape[-2], x.shape[-1]
    sequences = 1 if x.dim() == 3 else x.shape[0]
    if row == 0 or batch % row or any(n * size % 16 for n in (batch, row, head)) or x.data_ptr() % 16:
        return None
    in_rows = head % row == 0 and head > 0
    if not in_rows and (heads - 1) * head + d > row:
        return None
    rows = (sequences - 1) * (batch // row) + x.shape[-3] + ((heads - 1) * (head // row) if in_rows else 0)
    columns = d if in_rows else (heads - 1) * head + d
    return (rows, columns), (row, 1), (batch // row, head // row if in_rows else 0, 0 if in_rows else head)
