"""What both FlashAttention-4 paths share. Imports neither flash_attn nor cutlass."""

from __future__ import annotations

import torch
from torch import Tensor

LEAST_SCALE = 1e-30
"""Stands for a scale of 0, which FlashAttention-4 would multiply with the -inf of masked scores to NaN."""
SINK_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def kernel_sinks(sinks: Tensor | None) -> Tensor | None:
    """The sinks as FlashAttention-4 takes them: contiguous, in a dtype that it reads."""
    if sinks is None:
        return None
    return sinks.detach().to(sinks.dtype if sinks.dtype in SINK_DTYPES else torch.float32).contiguous()


def nothing_to_see(sinks: Tensor | None, out: Tensor, lse: Tensor | None) -> None:
    """Writes the result where no key exists at all: zeros, and LSE -inf or the sink."""
    out.zero_()
    if lse is not None:
        lse.copy_(torch.full_like(lse, float("-inf")) if sinks is None else sinks[:, None].expand_as(lse))
