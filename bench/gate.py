"""The oracle gate: a provider is timed only after its output matched `Mask.visible` on sampled rows.

A dense float64 mask of a 32k case does not fit, so a few hundred rows are compared, those at span borders first. Two
probes: random inputs, judged by the error budget of the tests, and zero queries, where every visible key weighs the
same and one key too many or too few shows at any length.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .cases import Case, Inputs

ROWS_AT_ONCE = 16


class GateError(AssertionError):
    """A provider's output is not what the mask says."""


def sample_rows(case: Case, count: int = 192, seed: int = 0) -> list[tuple[int, int]]:
    """Rows `(sequence, row)`: ends, both sides of span borders, random ones; ascending, at most about `count`."""
    generator = torch.Generator().manual_seed(seed)
    total = len(case.sequences)
    with_spans = [b for b, s in enumerate(case.sequences) if s.spans]
    chosen = sorted({0, total - 1, *_spread(list(range(total)), 6), *_spread(with_spans, 4)})
    rows: set[tuple[int, int]] = set()
    per_sequence = max(4, count // len(chosen))
    for b in chosen:
        s = case.sequences[b]
        met = [span for span in s.spans if span[1] + 1 >= s.context and span[0] - 1 < s.kv_len]
        some = _spread(met, max(1, per_sequence // 8))
        borders = [p + d for start, end in some for p in (start, end) for d in (-1, 0, 1)]
        mine = {0, s.q_len - 1, *(p - s.context for p in borders)}
        mine.update(torch.randint(s.q_len, (per_sequence // 4,), generator=generator).tolist())
        rows.update((b, i) for i in mine if 0 <= i < s.q_len)
    return sorted(rows)


def _spread(items: list[Any], count: int) -> list[Any]:
    if len(items) <= count:
        return items
    return [items[i * (len(items) - 1) // max(count - 1, 1)] for i in range(count)]


def _keys(x: Tensor, inputs: Inputs, b: int, at: Tensor) -> Tensor:
    """Keys or values `at` of sequence `b`, `[n, Hkv, D]`."""
    case = inputs.case
    if case.page_size is not None:
        page = inputs.page_tables[0][b][at // case.page_size].long()
        return x[page, at % case.page_size]
    return x[b, at] if x.dim() == 4 else x[int(inputs.cu_seqlens_k[b]) + at]


def sampled_reference(case: Case, inputs: Inputs, q: Tensor, rows: list[tuple[int, int]], dtype: torch.dtype) -> Tensor:
    """The rows of the output, computed densely in `dtype` from `Mask.visible`: `[len(rows), Hq, Dv]`.

    `case` gives mask and spans (a floor has others than `inputs.case`), `q` the queries in the inputs' layout.
    """
    group, device = case.heads_q // case.heads_kv, inputs.device
    flat = q.reshape(-1, *q.shape[-2:])
    first_rows = inputs.cu_seqlens_q.tolist()
    outs = []
    for i in range(0, len(rows), ROWS_AT_ONCE):
        for b in sorted({b for b, _ in rows[i : i + ROWS_AT_ONCE]}):
            s = case.sequences[b]
            mine = torch.tensor([r for bb, r in rows[i : i + ROWS_AT_ONCE] if bb == b], device=device)
            position = mine + s.context
            low, high = int(position.min()), int(position.max())
            spans = [span for span in s.spans if span[0] <= high and span[1] >= low]  # no other can hold a row
            seen = case.mask.visible(position[:, None], torch.arange(s.kv_len, device=device)[None], spans=spans)
            at = seen.any(0).nonzero().squeeze(1)
            seen = seen[:, at]
            kb, vb = (_keys(x, inputs, b, at).to(dtype).permute(1, 0, 2)[:, None] for x in (inputs.k, inputs.v))
            qb = flat[first_rows[b] + mine].to(dtype).reshape(len(mine), case.heads_kv, group, -1).permute(1, 2, 0, 3)
            scores = (qb @ kb.transpose(-1, -2) * case.head_dim**-0.5).masked_fill(~seen, -math.inf)
            if inputs.sinks is not None:
                sink = inputs.sinks.to(dtype).reshape(case.heads_kv, group, 1, 1).expand(-1, -1, len(mine), 1)
                scores = torch.cat([scores, sink], dim=-1)
            weights = scores.softmax(-1)[..., : len(at)]
            outs.append((weights @ vb).permute(2, 0, 1, 3).reshape(len(mine), case.heads_q, -1))
    return torch.cat(outs)


@dataclass
class Gate:
    """Judges outputs for one case (mask and spans) and one set of inputs; its references are computed once."""

    case: Case
    inputs: Inputs
    rows: list[tuple[int, int]]
    _expected: dict[bool, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def queries(self, zero: bool) -> Tensor:
        return torch.zeros_like(self.inputs.q) if zero else self.inputs.q

    def check(self, out: Tensor, *, zero: bool) -> float:
        """Largest error on the sampled rows, in the unit of `out`. Raises `GateError`.

        `zero` says that the queries were zero.
        """
        inputs, dtype = self.inputs, self.inputs.q.dtype
        want_shape = (*inputs.q.shape[:-1], self.case.head_dim_v)
        if tuple(out.shape) != want_shape:
            raise GateError(f"output has shape {list(out.shape)}, expected {list(want_shape)}")
        if zero not in self._expected:
            q = self.queries(zero)
            exact = sampled_reference(self.case, inputs, q, self.rows, torch.float64)
            eager = sampled_reference(self.case, inputs, q, self.rows, dtype) if not zero else exact
            self._expected[zero] = exact, eager.double()
        exact, eager = self._expected[zero]
        first = inputs.cu_seqlens_q.tolist()
        at = torch.tensor([first[b] + i for b, i in self.rows], device=out.device)
        got = out.reshape(-1, *out.shape[-2:])[at].double()
        if not bool(got.isfinite().all()):
            lost = int((~got.isfinite()).any(-1).any(-1).sum())
            raise GateError(f"{lost} of {len(self.rows)} sampled rows are not finite")
        error = (got - exact).abs()
        worst = float(error.max())
        eps = torch.finfo(dtype).eps
        if zero:
            allowed = max(1.5 * eps, 1e-5) * exact.abs() + 2**-10 * exact.abs().amax(-1, keepdim=True)
            wrong = (error > allowed).any(-1).any(-1)
            if bool(wrong.any()):
                b, i = self.rows[int(wrong.nonzero()[0])]
                raise GateError(
                    f"{int(wrong.sum())} of {len(self.rows)} sampled rows see other keys than the mask says "
                    f"(first: row {i} of sequence {b}; largest error {worst:.2e} with equal weights)"
                )
        else:
            budget = 2 * float((eager - exact).abs().max()) + eps * float(exact.abs().max())
            if worst > budget:
                raise GateError(f"largest error {worst:.2e} on sampled rows is over the budget {budget:.2e}")
        return worst
