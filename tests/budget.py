"""How close is close enough: an error budget per row, made from what the same precision costs in plain PyTorch.

    |backend - fp64|  <=  2 x |eager in q's dtype - fp64|  +  one rounding step of the output dtype

In float32 3 x: there only sums are rounded, and eager shows but one of their many orders.

Rounding errors of a row are proportional to its weights over |V|, so the eager error is taken relative to that, at the
worst row of the case (one row alone can be exact by luck), and applied to every row. The rounding step is that of the
row's largest element. Every element counts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mmattn import reference

from .cases import Inputs

LSE_STEPS = 8
"""Rounding steps of float32 that an LSE may lie off: scores are scaled into base 2 and back, and hardware exp2 and
log2 are good to about two steps each."""


@dataclass
class Expected:
    out: Tensor
    lse: Tensor
    out_budget: Tensor
    lse_budget: Tensor


def expect(inputs: Inputs, interpreted: bool) -> Expected:
    """The oracle's result for these inputs and how far a backend may be from it.

    `interpreted`: the budget for bfloat16 in Triton's interpreter, whose conversion from float32 cuts the low bits off
    where every GPU rounds to nearest. Cutting the result costs one more step, and cutting the weights up to one step
    of each weight, which is bounded by the same weights over the absolute values.
    """
    q, k, v, mask = inputs.q, inputs.k, inputs.v, inputs.mask
    out, lse = reference(q, k, v, mask, **inputs.args)
    eager, _ = reference(q, k, v, mask, dtype=q.dtype, **inputs.args)
    _, eager_lse = reference(q, k, v, mask, dtype=torch.float32, **inputs.args)  # LSE is float32 for every dtype
    scale = reference(q, k, v.abs(), mask, **inputs.args)[0].amax(-1, keepdim=True)
    kind = torch.finfo(q.dtype)
    error = ((eager - out).abs().amax(-1, keepdim=True) / scale).nan_to_num(0)  # 0 / 0: nothing is visible
    step = kind.eps * out.abs().amax(-1, keepdim=True) + kind.smallest_normal * kind.eps
    times = 3 if q.dtype is torch.float32 else 2
    out_budget = times * (error.amax() if error.numel() else 0) * scale + step
    if interpreted and q.dtype is torch.bfloat16:
        out_budget = out_budget + step + kind.eps * scale
    single = torch.finfo(torch.float32)
    lse_error = (eager_lse - lse).nan_to_num(0, 0, 0).abs()  # -inf - -inf
    lse_budget = 2 * lse_error + LSE_STEPS * single.eps * lse.nan_to_num(0, 0, 0).abs().clamp(min=1)
    return Expected(out, lse, out_budget.expand_as(out), lse_budget)


def assert_close(out: Tensor, lse: Tensor | None, expected: Expected) -> None:
    """Finite first, then element by element. The message says where the worst element is."""
    assert out.shape == expected.out.shape, f"out is {list(out.shape)}, not {list(expected.out.shape)}"
    bad = ~out.isfinite()
    assert not bad.any(), f"{int(bad.sum())} elements of out are not finite, first at {bad.nonzero()[0].tolist()}"
    _within("out", out, expected.out, expected.out_budget)
    if lse is None:
        return
    assert lse.shape == expected.lse.shape and lse.dtype == torch.float32, f"lse is {lse.dtype} {list(lse.shape)}"
    empty = expected.lse == -torch.inf
    wrong = (lse == -torch.inf) != empty
    assert not wrong.any(), f"lse is -inf, or is not, against the oracle at {wrong.nonzero()[0].tolist()}"
    assert not lse.isnan().any(), f"lse is NaN at {lse.isnan().nonzero()[0].tolist()}"
    _within("lse", lse.masked_fill(empty, 0), expected.lse.masked_fill(empty, 0), expected.lse_budget)


def _within(name: str, got: Tensor, want: Tensor, budget: Tensor) -> None:
    excess = (got.double() - want.double()).abs() - budget.double()
    if excess.numel() == 0 or excess.max() <= 0:
        return
    at = tuple(int(i) for i in torch.unravel_index(excess.argmax(), excess.shape))
    raise AssertionError(
        f"{name}{list(at)} is {float(got[at]):.9g}, the oracle says {float(want[at]):.9g}: off by "
        f"{abs(float(got[at]) - float(want[at])):.3g}, budget {float(budget[at]):.3g} "
        f"({int((excess > 0).sum())} of {excess.numel()} elements over budget)"
    )
