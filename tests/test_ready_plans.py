"""Calls with a plan that has run such a call before: they skip the checks, and must not skip anything else."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

import mmattn
from mmattn import Mask, UnsupportedError, attention, dispatch, plan
from mmattn.plan import KINDS

from .calls import skip_unsupported
from .cases import guarded

HEADS = 2
MASK = Mask.sliding_window(40)


def rows(device: torch.device, dtype: torch.dtype = torch.float16, count: int = 130, offset: int = 0) -> Tensor:
    """`[1, count, HEADS, 64]` random values, `offset` elements away from an aligned address."""
    flat = torch.randn(count * HEADS * 64 + offset, device=device).to(dtype)
    return flat[offset:].view(1, count, HEADS, 64)


def heads_first(x: Tensor) -> Tensor:
    """The same values in `[B, H, S, D]` memory."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def wide(x: Tensor) -> Tensor:
    """The same values with gaps between the heads, which no 16-byte load takes."""
    around = x.new_full((*x.shape[:-1], x.shape[-1] + 3), float("nan"))
    around[..., : x.shape[-1]] = x
    return around[..., : x.shape[-1]]


def test_one_plan_serves_calls_of_many_kinds(backend: str, device: torch.device) -> None:
    """Strides, alignment, dtype and options change from call to call; every answer is that of a fresh call."""
    x = rows(device)
    the_plan = plan(MASK, q=x, k=x)
    kinds: list[tuple[Any, dict[str, Any]]] = [
        (lambda t: t, {}),
        (heads_first, {}),
        (wide, {}),
        (lambda t: t, dict(softcap=5.0)),
        (lambda t: t, dict(softcap=7.0)),
        (lambda t: t, dict(scale=0.3)),
        (lambda t: t, dict(sinks=torch.tensor([0.5, -1.0], device=device))),
        (lambda t: t, dict(sinks=torch.tensor([0.5, -1.0], device=device).half())),
        (lambda t: rows(device, offset=1).copy_(t), {}),
        (lambda t: t.bfloat16(), {}),
    ]
    for _ in range(3):  # the second and third time around every kind is known
        q, k, v = (rows(device) for _ in range(3))
        for change, options in kinds:
            inputs = [change(t) for t in (q, k, v)]
            if mmattn.supported(*inputs, the_plan, **options)[backend]:
                continue  # FlashAttention-4 takes no unaligned tensors
            got, lse = attention(*inputs, the_plan, backend=backend, return_lse=True, **options)
            fresh, fresh_lse = attention(*inputs, MASK, backend=backend, return_lse=True, **options)
            assert torch.equal(got, fresh) and torch.equal(lse, fresh_lse)
        assert torch.equal(attention(q, k, v, the_plan, backend=backend), attention(q, k, v, MASK, backend=backend))


def test_one_plan_serves_decoding_over_many_pages(device: torch.device) -> None:
    """The split path: pages of another stride or alignment, another page table, float8 with scales."""
    backend = "triton"
    skip_unsupported(backend, *(rows(device) for _ in range(3)), MASK)
    q = rows(device, count=1)[0]
    lens, row = guarded([90], device), guarded([0, 1], device)
    args = dict(cu_seqlens_q=row, seqused_k=lens, max_seqlen_q=1)
    tables = [torch.tensor([t], dtype=torch.int32, device=device) for t in ([0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0, 0])]
    pages = rows(device, count=96)[0].view(6, 16, HEADS, 64)
    ready = plan(MASK, q=q, k=pages, page_table=tables[0], **args)
    unaligned = rows(device, count=96, offset=1)[0].view(6, 16, HEADS, 64).copy_(pages)
    float8 = pages.to(torch.float8_e4m3fn)
    half = torch.tensor([0.5], device=device)
    for _ in range(2):
        for kv, scales in ((pages, {}), (unaligned, {}), (float8, {}), (float8, dict(k_scale=0.5, v_scale=half))):
            for table in tables:
                for splits in (None, 3):
                    call = dict(page_table=table, num_splits=splits, backend=backend, **scales)
                    assert torch.equal(attention(q, kv, kv, ready, **call), attention(q, kv, kv, MASK, **call, **args))


def test_a_call_of_a_known_kind_is_not_checked_again(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    checked = []
    check = dispatch.check
    monkeypatch.setattr(dispatch, "check", lambda *a: (checked.append(1), check(*a))[1])
    x = rows(device)
    the_plan = plan(MASK, q=x, k=x)
    for _ in range(3):
        attention(x, x, x, the_plan)
    assert len(checked) == 1
    monkeypatch.setenv("MMATTN_DEBUG", "1")
    the_plan = plan(MASK, q=x, k=x)
    for _ in range(3):
        attention(x, x, x, the_plan)
    assert len(checked) == 4, "a plan made under MMATTN_DEBUG=1 trusts no call"


WRONG = {
    "q dtype": (lambda c, x: c.update(q=x.bfloat16()), ValueError, "dtype"),
    "k rows": (lambda c, x: c.update(k=x[:, :-1]), ValueError, "v must have k's shape"),
    "v dim": (lambda c, x: c.update(v=x[..., :0]), ValueError, "head dims must be positive"),
    "last stride": (lambda c, x: c.update(q=x.transpose(2, 3).contiguous().transpose(2, 3)), ValueError, "last stride"),
    "sinks": (lambda c, x: c.update(sinks=torch.zeros(3, device=x.device)), ValueError, "sinks must be"),
    "out": (lambda c, x: c.update(out=x.float()), ValueError, "out must be"),
    "scale": (lambda c, x: c.update(scale=-1.0), ValueError, "scale must be finite"),
    "softcap": (lambda c, x: c.update(softcap=0.0), ValueError, "softcap must be"),
    "num_splits": (lambda c, x: c.update(num_splits=[2]), ValueError, "num_splits must be"),
    "num_splits bool": (lambda c, x: c.update(num_splits=True), ValueError, "num_splits must be"),
    "k_scale": (lambda c, x: c.update(k_scale=torch.ones(5, device=x.device)), ValueError, "k_scale must be"),
    "q_start": (lambda c, x: c.update(q_start=guarded([0], x.device)), ValueError, "q_start came with a Plan"),
    "unknown": (lambda c, x: c.update(windowleft=3), TypeError, "unknown argument windowleft"),
    "backend": (lambda c, x: c.update(backend="flash"), ValueError, "backend must be"),
    "grad": (lambda c, x: c.update(q=x.clone().requires_grad_(), k_scale=2.0, backend="triton"), UnsupportedError,
             "gradients with k_scale"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_call_after_right_ones_is_refused(name: str, device: torch.device) -> None:
    spoil, error, text = WRONG[name]
    x = rows(device)
    the_plan = plan(MASK, q=x, k=x)
    attention(x, x, x, the_plan)
    attention(x, x, x, the_plan, num_splits=None if device.type == "cpu" else 1)
    call: dict[str, Any] = dict(q=x, k=x, v=x, mask=the_plan)
    spoil(call, x)
    with pytest.raises(error, match=text):
        attention(**call)
    attention(x, x, x, the_plan)


def test_a_plan_holds_no_cycle(device: torch.device) -> None:
    """Its tensors are freed with the last reference, not when the collector comes by."""
    x = rows(device)
    the_plan = plan(MASK, q=x, k=x)
    attention(x, x, x, the_plan)
    attention(x, x, x, the_plan)
    gone = weakref.ref(the_plan)
    gc.disable()
    try:
        del the_plan
        assert gone() is None
    finally:
        gc.enable()


def test_a_plan_forgets_kinds_beyond_a_limit(device: torch.device) -> None:
    x = rows(device, count=2)
    the_plan = plan(MASK, q=x, k=x)
    for n in range(KINDS + 5):
        attention(x, x, x, the_plan, scale=1.0 + n, backend="torch")
    assert 0 < len(the_plan.forwards) <= KINDS


@pytest.mark.gpu
def test_a_gpu_that_is_not_the_current_one(backend: str) -> None:
    """Layers of a model on several GPUs: kernels run where the tensors are, whatever the current device is."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    torch.manual_seed(0)
    here = [rows(torch.device("cuda", 0), count=200) for _ in range(3)]
    there = [t.to("cuda:1") for t in here]
    spans = [[(20, 120)]]
    wanted = attention(*here, MASK, mm_prefix_range=spans, backend=backend)
    assert torch.cuda.current_device() == 0
    ready = plan(MASK, q=there[0], k=there[1], mm_prefix_range=spans)
    for _ in range(2):
        got = attention(*there, ready, backend=backend)
        assert got.device == there[0].device and torch.equal(got.cpu(), wanted.cpu())
    assert torch.equal(attention(*there, MASK, mm_prefix_range=spans, backend=backend).cpu(), wanted.cpu())
    few = [t[:, -1:] if n == 0 else t for n, t in enumerate(there)]
    close = attention(*few, MASK, mm_prefix_range=spans).float() - wanted[:, -1:].to("cuda:1").float()
    assert close.abs().max() < 2e-3 and torch.cuda.current_device() == 0


@pytest.mark.gpu
def test_profilers_hear_of_every_launch(device: torch.device) -> None:
    """Launch hooks that a profiler adds or removes between two calls with the same plan."""
    from triton import knobs

    heard: list[str] = []

    def hook(metadata: Any) -> None:
        heard.append(metadata.get()["name"])

    x = rows(device, count=300)
    the_plan = plan(MASK, q=x, k=x)
    wanted = attention(x, x, x, the_plan, backend="triton")
    assert torch.equal(attention(x, x, x, the_plan, backend="triton"), wanted) and not heard
    knobs.runtime.launch_enter_hook.add(hook)
    try:
        assert torch.equal(attention(x, x, x, the_plan, backend="triton"), wanted)
    finally:
        knobs.runtime.launch_enter_hook.remove(hook)
    assert heard == ["_forward_kernel"]
    assert torch.equal(attention(x, x, x, the_plan, backend="triton"), wanted) and len(heard) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("known", [True, False])
def test_launches_of_any_release_of_triton(known: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the launch convention of the releases that were read, and through Triton's own entry."""
    from mmattn.triton import launch

    monkeypatch.setattr(launch, "KNOWN", known)
    x = rows(device, count=2000)
    for count in (300, 3):  # one launch, and splits with their merge
        q = x[:, :count]
        wanted = attention(q, x, x, Mask(), backend="triton")
        ready = plan(Mask(), q=q, k=x)
        for _ in range(3):
            assert torch.equal(attention(q, x, x, ready, backend="triton"), wanted)
