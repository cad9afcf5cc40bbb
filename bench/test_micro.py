"""Host-side costs: `pytest bench/test_micro.py`. Plans, checks, dispatch and the overhead of a call with a ready plan.

On CPU tensors the kernel is replaced by one that does nothing, so that what is left is the host's work. On a GPU the
real call is timed without waiting for the device: the queue never fills within a round.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

import mmattn
from bench.cases import Case, Inputs, Sequence, images, make_inputs
from bench.timing import sync
from mmattn import dispatch

pytest.importorskip("pytest_benchmark")

LENGTH = 2048
GPU = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))
MASK = mmattn.Mask.sliding_window(1024, mm_prefix_clamp=True)
DECODE = Case("decode", "8 requests, pages of 16", "host costs", 32, 8, 128, 128, MASK, (Sequence(1, 4096),) * 8, 16)
PREFILL = Case(
    "prefill", "one sequence with images", "host costs", 32, 8, 128, 128, MASK,
    (Sequence(LENGTH, LENGTH, images(LENGTH, every=512, size=280)),),
)  # fmt: skip


def _inputs(case: Case, device: str) -> Inputs:
    return make_inputs(case, device, torch.bfloat16)


def _drained(benchmark: Any, call: Any, device: str) -> None:
    """Rounds of few calls each, with the device idle before each round."""
    idle = partial(sync, torch.device(device))
    call()
    benchmark.pedantic(call, setup=idle, rounds=300, warmup_rounds=20)
    idle()


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("case", [PREFILL, DECODE], ids=lambda case: case.name)
def test_plan(benchmark: Any, case: Case, device: str) -> None:
    """`plan()`: checks, lowering, upload of nothing (lengths and spans are on the device)."""
    inputs = _inputs(case, device)
    args = inputs.batch_args()
    _drained(benchmark, lambda: mmattn.plan(case.mask, q=inputs.q, k=inputs.k, **args), device)


@pytest.mark.parametrize("case", [PREFILL, DECODE], ids=lambda case: case.name)
def test_checks_and_dispatch(benchmark: Any, case: Case) -> None:
    """`supported()` with a ready plan: the checks of every tensor and the reasons of every backend."""
    inputs = _inputs(case, "cpu")
    plan = mmattn.plan(case.mask, q=inputs.q, k=inputs.k, **inputs.batch_args())
    benchmark(lambda: mmattn.supported(inputs.q, inputs.k, inputs.v, plan))


@pytest.mark.parametrize("case", [PREFILL, DECODE], ids=lambda case: case.name)
def test_call_without_kernel(benchmark: Any, monkeypatch: pytest.MonkeyPatch, case: Case) -> None:
    """`attention()` with a ready plan, down to the kernel, which does nothing: target 40 us."""
    inputs = _inputs(case, "cpu")
    plan = mmattn.plan(case.mask, q=inputs.q, k=inputs.k, **inputs.batch_args())
    result = torch.empty_like(inputs.q)
    seen = []

    def nothing(q: torch.Tensor, *args: Any, **kw: Any) -> tuple[torch.Tensor, None]:
        seen.append(q.shape)
        return result, None

    silent = replace(dispatch.BACKENDS[-1], why_not=lambda call: [], load=lambda call: lambda: nothing)
    dispatch.choose.cache_clear()
    monkeypatch.setattr(dispatch, "BACKENDS", (*dispatch.BACKENDS[:-1], silent))
    try:
        assert benchmark(lambda: mmattn.attention(inputs.q, inputs.k, inputs.v, plan)) is result
        assert seen
    finally:
        dispatch.choose.cache_clear()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("backend", ["auto", "cute", "triton"])
@pytest.mark.parametrize("case", [PREFILL, DECODE], ids=lambda case: case.name)
def test_call_on_gpu(benchmark: Any, case: Case, backend: str) -> None:
    """Host time of `attention()` with a ready plan: target 40 us."""
    inputs = _inputs(case, "cuda")
    plan = mmattn.plan(case.mask, q=inputs.q, k=inputs.k, **inputs.batch_args())
    against = mmattn.supported(inputs.q, inputs.k, inputs.v, plan).get(backend, [])
    if against:
        pytest.skip("; ".join(against))
    _drained(benchmark, lambda: mmattn.attention(inputs.q, inputs.k, inputs.v, plan, backend=backend), "cuda")
