"""A dense `mask_mod` for FlashAttention-4: what serving code hands to FA4 for image spans.

It is evaluated on every key of every block, on absolute positions, with the span of each row in aux tensors. FA4 drops
`causal` and windows beside a `mask_mod`, so both are part of it. CuTe re-reads a function's source: it lives in a file.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import cutlass
import cutlass.cute as cute
from flash_attn.cute import utils

from mmattn import Mask

from .peers import window


@cache
def mask_mod(mask: Mask) -> Callable:
    """The `mask_mod` of a mask without chunks; its aux tensors are start and end of each row's span, int32 `[rows]`."""
    (left, right), clamp = window(mask), mask.mm_prefix_clamp

    @cute.jit
    def visible(batch, head, q_idx, kv_idx, seqlen_info, aux_tensors):  # type: ignore[no-untyped-def]
        q = q_idx + utils.scalar_to_ssa(seqlen_info.seqlen_k - seqlen_info.seqlen_q, cutlass.Int32)
        keep = kv_idx >= utils.scalar_to_ssa(0, cutlass.Int32)
        in_left = keep
        if cutlass.const_expr(left is not None):
            in_left = q - kv_idx <= utils.scalar_to_ssa(left, cutlass.Int32)
            keep = keep & in_left
        if cutlass.const_expr(right is not None):
            keep = keep & (kv_idx - q <= utils.scalar_to_ssa(right, cutlass.Int32))
        row = q_idx[0] + seqlen_info.offset_q
        start = utils.scalar_to_ssa(aux_tensors[0][row], cutlass.Int32)
        end = utils.scalar_to_ssa(aux_tensors[1][row], cutlass.Int32)
        same = (kv_idx >= start) & (kv_idx <= end)
        if cutlass.const_expr(clamp):
            same = same & in_left
        return keep | same

    return visible
