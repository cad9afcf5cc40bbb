"""Masks inside a compiled graph, where closures cannot be read and no value is known.

The mask's elements are computed by transformers' own functions and reduced to row intervals at once; Inductor fuses the two, so
that time is Q x K element tests a mask and no Q x K tensor exists. A row that is not one interval cannot be refused while
tracing: it stops the program where the graph runs (`torch._assert_async`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import masking_utils as hf

from ..dispatch import UnsupportedError
from ..plan import Plan
from .intervals import HIDDEN, About, IntervalMask, plan_from_rows

_HOLES = (
    "mmattn: a row of the attention mask sees more than one range of keys; run the model without torch.compile to learn which, "
    "or load it with another attn_implementation"
)


def traced_mask(
    batch_size: int, q_length: int, kv_length: int, q_offset: int | Tensor, kv_offset: int | Tensor,
    mask_function: Callable[..., Any], attention_mask: Tensor | None, device: torch.device, about: About,
) -> IntervalMask:  # fmt: skip
    """`masks.mask_function` in a graph."""
    arguments: dict[str, Any] = dict(
        batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset,
        mask_function=mask_function, attention_mask=attention_mask, use_vmap=False,
        allow_is_causal_skip=False, allow_is_bidirectional_skip=False, device=device,
    )  # fmt: skip
    dense: Any = hf.sdpa_mask(**arguments)
    return _reduced(dense.expand(batch_size, 1, q_length, kv_length), about)


def traced_dense(mask: Tensor, want: tuple[int, int, int, int], about: About) -> IntervalMask:
    """`attention._from_dense` in a graph: a 4-D mask, bool or of zeros and minus infinities, that a model made itself."""
    visible = mask
    if mask.dtype != torch.bool:
        hidden = mask <= HIDDEN
        torch._assert_async(
            (hidden | (mask == 0)).all(),
            "mmattn: the attention mask holds biases, not only zeros and minus infinities; load the model with sdpa",
        )
        visible = ~hidden
    if mask.shape[1] > 1:
        torch._assert_async(
            (visible == visible[:, :1]).all(),
            "mmattn: the attention mask differs between heads; load the model with sdpa",
        )
    return _reduced(visible[:, :1].expand(want), about)


def traced_plan(where: str, mask: IntervalMask, cu_seqlens: Tensor | None) -> Plan:
    """The plan of a mask in a graph: of its tensors alone, since the graph may keep nothing else of an example."""
    if mask.key is None:
        raise UnsupportedError(
            f"{where}: the attention mask is not one range of keys per row; call the model without torch.compile to learn "
            "which row, or load it with another attn_implementation"
        )
    if cu_seqlens is not None:
        raise UnsupportedError(
            f"{where}: cu_seq_lens_q beside an attention mask is not supported under torch.compile; leave it out, or pass no mask"
        )
    return plan_from_rows(mask.rows, mask.shape[3], mask.key)


def _reduced(dense: Tensor, about: About) -> IntervalMask:
    keys = dense.shape[-1]
    key = torch.arange(keys, dtype=torch.int32, device=dense.device)
    lo = torch.where(dense, key, keys).amin(-1)
    hi = torch.where(dense, key + 1, 0).amax(-1)
    seen = dense.sum(-1, dtype=torch.int32)
    torch._assert_async(((hi - lo == seen) | (seen == 0)).all(), _HOLES)
    rows = torch.stack([torch.where(seen > 0, lo, 0), hi], dim=-1)[:, 0]
    return IntervalMask(rows.to(torch.int32).contiguous(), keys, about)
