"""The work of a case: visible pairs, FLOPs and bytes, counted from its mask. The same for whoever runs it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

import mmattn

from .cases import Case


@dataclass(frozen=True)
class Work:
    pairs: int
    """Visible (row, key) pairs, of one head."""
    flops: int
    """Of the two products over visible pairs: 2 (D + Dv) Hq pairs."""
    kv_bytes: int
    """Of K and V slots that at least one row sees, each read once."""
    bytes: int
    """`kv_bytes` + q + out."""

    def tflops(self, ms: float) -> float:
        """Effective TFLOP/s."""
        return self.flops / ms / 1e9

    def gb_s(self, ms: float) -> float:
        """Effective GB/s."""
        return self.bytes / ms / 1e6


def row_intervals(case: Case) -> Tensor:
    """The key interval of every row on the CPU, `[total_q, 2]`, rows of all sequences in order."""
    cu = [0, *torch.tensor([s.q_len for s in case.sequences]).cumsum(0).tolist()]
    return mmattn.plan(
        case.mask, device="cpu", total_q=cu[-1], cu_seqlens_q=torch.tensor(cu, dtype=torch.int32),
        seqused_k=torch.tensor([s.kv_len for s in case.sequences], dtype=torch.int32),
        mm_prefix_range=[list(s.spans) for s in case.sequences] if case.has_spans else None,
    ).rows  # fmt: skip


@lru_cache(maxsize=256)
def work(case: Case, element_bytes: int = 2) -> Work:
    """Counts the work of `case`, exactly."""
    rows = row_intervals(case).to(torch.int64)
    pairs = int((rows[:, 1] - rows[:, 0]).sum())
    keys = first = 0
    for s in case.sequences:
        mine = rows[first : first + s.q_len]
        first += s.q_len
        steps = torch.zeros(s.kv_len + 1, dtype=torch.int64)
        one = torch.ones(len(mine), dtype=torch.int64)
        steps.index_add_(0, mine[:, 0], one).index_add_(0, mine[:, 1], -one)
        keys += int((steps.cumsum(0) > 0).sum())
    dims = case.head_dim + case.head_dim_v
    kv_bytes = keys * case.heads_kv * dims * (1 if case.float8 else element_bytes)
    return Work(
        pairs, 2 * dims * case.heads_q * pairs, kv_bytes, kv_bytes + case.total_q * case.heads_q * dims * element_bytes
    )
