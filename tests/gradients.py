"""Gradients of the kernels against autograd through the float64 oracle, with the budget of budget.py."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mmattn import attention, plan, reference
from mmattn.batch import Batch
from mmattn.plan import Grads, Plan
from mmattn.reference import sequence_keys, visible_pairs

from .budget import _within
from .cases import Inputs

NAMES = ("q", "k", "v", "sinks")


def upstream(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Gradients of out and lse, with gaps in memory. (Rows of no sequence are padding: what reaches their lse reaches no sink.)"""
    q, v = inputs.q, inputs.v
    random = torch.Generator().manual_seed(7)
    wide = torch.randn(*q.shape[:-1], 2, v.shape[-1] + 8, generator=random).to(q)
    shape = (q.shape[1], q.shape[0]) if q.dim() == 3 else (q.shape[0], q.shape[2], q.shape[1])
    dlse = torch.randn(*shape[:-2], shape[-1], shape[-2], generator=random).to(q.device).transpose(-1, -2)
    if (cu := inputs.batch.get("cu_seqlens_q")) is not None:
        dlse[:, int(cu[-1]) :] = 0
    return wide[..., 0, : v.shape[-1]], dlse


def by_oracle(inputs: Inputs, dout: Tensor, dlse: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """dq, dk, dv (and dsinks) of the dense computation in `dtype`."""
    sinks = inputs.extras.get("sinks")
    leaves = [x.detach().clone().to(dtype).requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    args = inputs.args
    if sinks is not None:
        leaves.append(sinks.detach().clone().requires_grad_())
        args["sinks"] = leaves[-1]
    out, lse = reference(*leaves[:3], inputs.mask, dtype=dtype, **args)
    grads = torch.autograd.grad([out, lse], leaves, [dout.to(dtype), dlse.to(dtype)], allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for g, x in zip(grads, leaves)]


def magnitudes(inputs: Inputs, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor) -> list[Tensor]:
    """What each gradient is summed from, in absolute values, float64: rounding errors are proportional to it."""
    q, k, v, extras = inputs.q, inputs.k, inputs.v, inputs.extras
    batch = Batch.build(q_shape=q.shape, k_shape=k.shape, device=q.device, **inputs.batch)
    group, heads = q.shape[-2] // k.shape[-2], q.shape[-2]
    scale, cap, sinks = extras.get("scale", q.shape[-1] ** -0.5), extras.get("softcap"), extras.get("sinks")
    rows, outs, gs = (x.double().reshape(-1, heads, x.shape[-1]) for x in (q, out, dout))
    lses, dlses = (x if q.dim() == 3 else x.transpose(0, 1).reshape(heads, -1) for x in (lse.double(), dlse.double()))
    results = [torch.zeros(x.shape, dtype=torch.float64, device=q.device) for x in (rows, k, v)]
    shares = torch.zeros(heads, dtype=torch.float64, device=q.device)
    offsets = batch.row_offsets().tolist()
    for b in range(batch.batch_size):
        at = slice(offsets[b], offsets[b + 1])
        seen = visible_pairs(inputs.mask, batch, b)
        kb, vb = (sequence_keys(x, batch, b).double().masked_fill(~seen.any(0)[:, None, None], 0) for x in (k, v))
        kg, vg = (x.repeat_interleave(group, 1) for x in (kb, vb))
        s = torch.einsum("qhd,khd->hqk", rows[at], kg) * scale
        s = s if cap is None else cap * torch.tanh(s / cap)
        p = torch.where(seen, torch.exp(s - lses[:, at, None]), 0)
        delta = (gs[at] * outs[at]).abs().sum(-1).t() + dlses[:, at].abs()
        a = p * (torch.einsum("qhd,khd->hqk", gs[at].abs(), vg.abs()) + delta[..., None]) * scale
        results[0][at] = torch.einsum("hqk,khd->qhd", a, kg.abs())
        dk = torch.einsum("hqk,qhd->khd", a, rows[at].abs().masked_fill(~seen.any(1)[:, None, None], 0))
        dv = torch.einsum("hqk,qhd->khd", p, gs[at].abs())
        for x, g in ((results[1], dk), (results[2], dv)):
            if len(g):
                sequence_keys(x, batch, b)[:] = g.reshape(len(g), -1, group, g.shape[-1]).sum(2)
        if sinks is not None:
            shares += (torch.exp(sinks.double()[:, None] - lses[:, at]).nan_to_num(0) * delta).sum(-1)
    return [results[0].reshape(q.shape), *results[1:]] + ([] if sinks is None else [shares])


def budgets(want: list[Tensor], eager: list[Tensor], size: list[Tensor], dtype: torch.dtype, cut: bool) -> list[Tensor]:
    """As in budget.py, relative to `magnitudes`. `cut`: the interpreter cuts bfloat16 where a GPU rounds it."""
    kind, result = torch.finfo(dtype), []
    for w, e, s in zip(want, eager, size):
        row = s.amax(-1, keepdim=True) if s.dim() > 1 else s
        error = ((e.double() - w).abs() / row).nan_to_num(0, 0, 0)
        step = kind.eps * (w.abs().amax(-1, keepdim=True) if w.dim() > 1 else w.abs()) + kind.smallest_normal
        times = 3 if dtype is torch.float32 else 2
        floor = 4 * torch.finfo(torch.float32).eps
        budget = (times * (error.amax() if error.numel() else 0) + floor) * row + step
        if cut:
            budget = budget + step + 2 * kind.eps * row
        result.append(budget.expand_as(w))
    return result


def call(inputs: Inputs, the_plan: Plan, dout: Tensor, dlse: Tensor | None, backward: Callable[..., Grads]) -> Grads:
    """The backward's own function, on what a forward of any backend left."""
    from mmattn.checks import options_of

    q, k, v, extras = inputs.q, inputs.k, inputs.v, inputs.extras
    forward = "triton" if q.is_cuda else "torch"
    with torch.no_grad():
        out, lse = attention(q, k, v, the_plan, return_lse=True, backend=forward, **extras)
    options = options_of(
        q, k, the_plan.batch, *(extras.get(x) for x in ("scale", "softcap", "sinks")), None, None, None
    )
    return backward(q, k, v, the_plan, None, out, lse, dout, dlse, options=options)


def triton_backward() -> Callable[..., Grads]:
    from mmattn.triton.backward import backward

    return backward


def plan_of(inputs: Inputs) -> Plan:
    return plan(inputs.mask, q=inputs.q, k=inputs.k, **inputs.batch)


def assert_gradients(inputs: Inputs, grads: Grads, dout: Tensor, dlse: Tensor | None) -> None:
    """Finite, exact zeros where nothing is seen, and within budget."""
    q = inputs.q
    given = dlse if dlse is not None else torch.zeros_like(upstream(inputs)[1])
    want = by_oracle(inputs, dout, given, torch.float64)
    eager = by_oracle(inputs, dout, given, q.dtype)
    out, lse = reference(q, inputs.k, inputs.v, inputs.mask, **inputs.args)
    size = magnitudes(inputs, out, lse, dout, given)
    cut = q.dtype is torch.bfloat16 and not q.is_cuda
    for name, g, w, s, budget in zip(NAMES, grads, want, size, budgets(want, eager, size, q.dtype, cut)):
        assert g is not None and g.shape == w.shape, name
        assert g.isfinite().all(), f"d{name} is not finite at {(~g.isfinite()).nonzero()[0].tolist()}"
        nothing = s == 0
        assert (g[nothing] == 0).all(), f"d{name} is not zero where nothing is seen"
        _within(f"d{name}", g, w, budget)


def run(inputs: Inputs) -> Grads:
    dout, dlse = upstream(inputs)
    grads = call(inputs, plan_of(inputs), dout, dlse, triton_backward())
    assert_gradients(inputs, grads, dout, dlse)
    return grads
