"""Prompt chunks and decode rows in one call on Hopper: each kind of sequence goes to the kernel that is made for it.

FlashAttention-4's kernel takes the long sequences in tall tiles; one decode row would keep one multiprocessor busy with all
of its keys. So the short sequences go to Triton's split-KV kernel. Both run one after the other and write rows of
their own; which sequences are short is read on the device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from .batch import SHORT_ROWS
from .cute import sm90
from .plan import in_turn
from .triton import forward

if TYPE_CHECKING:
    from .plan import Options, Plan, Write


def settle(
    q: Tensor, k: Tensor, v: Tensor, plan: Plan, page_table: Tensor | None, *, options: Options, out: Tensor,
    lse: Tensor | None,
) -> Write:  # fmt: skip
    """See `plan.Settle`; for calls that both backends can run, with packed rows."""
    call = (q, k, v, plan, page_table)
    long = sm90.settle(*call, options=options, out=out, lse=lse, rows_above=SHORT_ROWS)
    return in_turn([long, forward.settle_short(*call, options=options, out=out, lse=lse)])
