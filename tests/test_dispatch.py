"""Choice of a backend: reasons as data, forced backends, auto, gradients, import isolation, merging of partial results."""

from __future__ import annotations

import logging
import subprocess
import sys
from dataclasses import fields, replace
from importlib import metadata
from typing import Any

import pytest
import torch

import mmattn
from mmattn import Mask, UnsupportedError, attention, dispatch, merge_states, reference, supported
from mmattn.batch import Batch, Call, wants_both, wants_split
from mmattn.cute import support as cute_support
from mmattn.torch_backend import why_not as torch_why_not
from mmattn.triton import support as triton_support

from .budget import assert_close, expect
from .calls import hopper
from .cases import BY_NAME, Inputs, build
from .conftest import BACKENDS


@pytest.fixture
def fa4(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes it look as if a version of flash-attn-4 (None: none) were installed."""

    def pretend(version: str | None = cute_support.PINNED) -> None:
        monkeypatch.setattr(cute_support, "installed_version", lambda: version)

    pretend()
    return pretend


# One test per reason.

TRITON = [
    (dict(capability=(7, 0), dtype=torch.float16), "compute capability 7.0 is below 7.5"),
    (dict(capability=(7, 5)), "bfloat16 needs compute capability 8.0"),
    (dict(dtype=torch.float64), "dtype float64 is not float16, bfloat16 or float32"),
    (dict(head_dim=520), "head dims 520/128 exceed 512"),
    (dict(head_dim_v=513), "head dims 128/513 exceed 512"),
    (dict(device_type="mps", capability=None), "no Triton backend for device mps"),
    (dict(kv_dtype=torch.float8_e4m3fn, capability=(8, 6)), "float8 keys and values need compute capability 8.9"),
]
CUTE = [
    (dict(device_type="cpu", capability=None), "tensors are on cpu"),
    (dict(capability=(8, 0)), "compute capability 8.0 is not 9.0, 10.x or 11.x"),
    (dict(capability=(12, 0)), "compute capability 12.0 is not 9.0, 10.x or 11.x"),
    (dict(dtype=torch.float32), "dtype float32 is not float16 or bfloat16"),
    (dict(head_dim=512, head_dim_v=512), "head dims 512/512 are not between 8 and 256"),
    (dict(head_dim=68), "head dims 68/128 are not multiples of 8"),
    (dict(capability=(10, 0), head_dim=192, head_dim_v=192), "192/192 are neither at most 128 nor 192/128 nor 256/256"),
    (dict(aligned=False), "multiple of 16 bytes"),
    (dict(page_size=16, head_dim=160), "paged k and v with head dims 160/128: only 64, 80, 96, 128, 192, 256"),
    (dict(page_size=16, capability=(10, 0)), "no block lists with paged k and v"),
    (dict(split_kv=True), "few query rows need split-KV"),
    (dict(num_splits=True), "num_splits is not supported"),
    (dict(scales=True), "k_scale/v_scale"),
    (dict(kv_dtype=torch.float8_e4m3fn), "no float8 keys and values"),
]
TORCH = [
    (dict(dtype=torch.int32), "dtype torch.int32 is not a floating-point type"),
]


def test_nothing_against_a_plain_call(fa4: Any) -> None:
    assert dispatch.reasons(hopper()) == {"cute": [], "triton": [], "torch": []}


@pytest.mark.parametrize(("changes", "words"), TRITON, ids=[words for _, words in TRITON])
def test_triton_reasons(changes: dict, words: str) -> None:
    reasons = triton_support.why_not(hopper(**changes))
    assert len(reasons) == 1 and words in reasons[0]


@pytest.mark.parametrize(("changes", "words"), CUTE, ids=[words for _, words in CUTE])
def test_cute_reasons(changes: dict, words: str, fa4: Any) -> None:
    reasons = cute_support.why_not(hopper(**changes))
    assert len(reasons) == 1 and words in reasons[0]


@pytest.mark.parametrize(("changes", "words"), TORCH, ids=[words for _, words in TORCH])
def test_torch_reasons(changes: dict, words: str) -> None:
    reasons = torch_why_not(hopper(**changes))
    assert len(reasons) == 1 and words in reasons[0]


BLOCK = dict(rows=16, sequences=32, group=4, mask=Mask.sliding_window(2048, causal=False))
"""A block of drafts behind a long context: 64 packed rows in each of 256 tiles."""


@pytest.mark.parametrize(
    ("changes", "split"),
    [
        (dict(), True),
        (dict(mask=Mask.full()), False),  # long to read: FlashAttention-4's pipeline is the better one
        (dict(mask=Mask.chunked(2048)), True),
        (dict(mask=Mask.chunked(4096, 1)), False),
        (dict(head_dim=256), False),
        (dict(rows=17), False),
        (dict(spans=True), False),
        (dict(mask=Mask.full(), rows=7), True),  # 28 packed rows
        (dict(mask=Mask.full(), sequences=15), True),  # 120 tiles
        (dict(mask=Mask.full(), rows=65, group=1, sequences=1), False),
    ],
)
def test_which_calls_want_split_kv(changes: dict[str, Any], split: bool) -> None:
    case: dict[str, Any] = {**BLOCK, "head_dim": 128, "spans": False, **changes}
    n, rows = case["sequences"], case["rows"]
    spans = torch.zeros(n, 1, 2, dtype=torch.int32) if case["spans"] else None
    batch = Batch.build(q_shape=(n, rows, 32, 128), k_shape=(n, 40000, 8, 128), mm_prefix_range=spans)
    assert wants_split(case["mask"], batch, case["group"], 8, case["head_dim"]) is split


STEP = dict(mask=Mask(), sequences=15, heads_kv=8, total_q=1100, max_seqlen_q=1000, keys=40000)
"""A step of a server: chunks of prompts and decode rows, 120 KV heads of sequences."""


@pytest.mark.parametrize(
    ("changes", "both"),
    [
        (dict(), True),
        (dict(mask=Mask.sliding_window(4096)), False),  # soon read by any kernel
        (dict(mask=Mask.sliding_window(4097)), True),
        (dict(mask=Mask.sliding_window(4000), spans=True), False),
        (dict(mask=Mask.chunked(2048)), False),
        (dict(keys=4096), False),
        (dict(sequences=16), False),  # fills a GPU
        (dict(sequences=1, max_seqlen_q=1100), False),
        (dict(max_seqlen_q=64), False),  # few rows in all of them
        (dict(total_q=15000), False),  # all have 1000 rows
    ],
)
def test_which_batches_want_both_kernels(changes: dict[str, Any], both: bool) -> None:
    case: dict[str, Any] = {**STEP, "spans": False, **changes}
    n = case["sequences"]
    int32 = dict(dtype=torch.int32)
    batch = Batch.build(
        q_shape=(case["total_q"], 8 * case["heads_kv"], 128), k_shape=(4, 16, case["heads_kv"], 128),
        cu_seqlens_q=torch.zeros(n + 1, **int32), seqused_k=torch.zeros(n, **int32),
        page_table=torch.zeros(n, case["keys"] // 16, **int32), max_seqlen_q=case["max_seqlen_q"],
        mm_prefix_range=torch.zeros(n, 1, 2, **int32) if case["spans"] else None,
    )  # fmt: skip
    assert wants_both(case["mask"], batch, case["heads_kv"]) is both


def test_only_auto_shares_a_mixed_batch(fa4: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_kernel", lambda module: module)
    choose, mixed = dispatch.choose.__wrapped__, hopper(mixed=True)
    assert choose(mixed, "auto") == ".mixed"
    assert choose(mixed, "cute") == ".cute.sm90" and choose(mixed, "triton") == ".triton.forward"
    assert choose(hopper(mixed=True, capability=(8, 0)), "auto") == ".triton.forward"
    assert choose(hopper(mixed=True, capability=(10, 0)), "auto") == ".cute.fa4"
    assert choose(hopper(mixed=True, head_dim=512), "auto") == ".triton.forward"
    fa4("4.0.0")
    assert choose(mixed, "auto") == ".cute.fa4"


def test_triton_on_a_cpu_needs_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    call = hopper(device_type="cpu", capability=None)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert "set TRITON_INTERPRET=1 before" in triton_support.why_not(call)[0]
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(triton_support, "_interpreter_fault", lambda: None)
    assert triton_support.why_not(call) == []
    monkeypatch.setattr(triton_support, "_interpreter_fault", lambda: "needs another numpy")
    assert triton_support.why_not(call) == ["needs another numpy"]


def test_triton_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_support, "installed", lambda: False)
    assert triton_support.why_not(hopper()) == ["the package triton is not installed (pip install triton)"]


def test_cute_versions(fa4: Any) -> None:
    fa4(None)
    assert cute_support.why_not(hopper())[0].startswith(
        "the package flash-attn-4 is not installed (pip install flash-attn-4=="
    )
    fa4("4.0.0b1")
    assert "4.0.0b1 is installed, but 4.0.0b34 or newer is needed" in cute_support.why_not(hopper())[0]
    for version in ("4.0.0b34", "4.0.0rc1", "4.0.0", "4.1.0"):  # by the public API
        fa4(version)
        assert cute_support.why_not(hopper()) == cute_support.why_not(hopper(capability=(10, 0))) == []
        assert cute_support.module(hopper()) == cute_support.PUBLIC_API
    wider_v = cute_support.why_not(hopper(head_dim=64, head_dim_v=128))
    assert len(wider_v) == 1 and "runs a wider v on compute capability 9.0" in wider_v[0]


def test_every_reason_is_told_at_once(fa4: Any) -> None:
    fa4(None)
    call = hopper(device_type="cpu", capability=None, dtype=torch.float64, head_dim=600, grad=True)
    assert len(dispatch.reasons(call)["cute"]) >= 4
    with pytest.raises(UnsupportedError) as error:
        dispatch.choose(call, "cute")
    for listed in dispatch.reasons(call).values():
        for reason in listed:
            assert reason in str(error.value)


@pytest.mark.parametrize("field", [f.name for f in fields(Call) if f.name not in ("aligned", "packed_q", "packed_k")])
def test_the_summary_of_a_call_tells_its_facts(field: str) -> None:
    """An error shows the call as text: two calls that differ must read differently."""
    other = dict(device_type="mps", capability=(8, 0), dtype=torch.float16, kv_dtype=torch.float8_e5m2, heads_q=12,
                 heads_kv=2, head_dim=64, head_dim_v=64, page_size=16)  # fmt: skip
    packed_k = field != "page_size"
    assert str(replace(hopper(packed_k=packed_k), **{field: other.get(field, True)})) != str(hopper(packed_k=packed_k))


# Forced and automatic choice.


@pytest.mark.parametrize("name", BACKENDS)
def test_a_forced_backend_runs_or_raises(name: str, device: torch.device) -> None:
    x = torch.zeros(4, 2, 16, dtype=torch.float64, device=device)
    against = supported(x, x, x, Mask())
    if not against[name]:
        assert attention(x, x, x, Mask(), backend=name).shape == x.shape
        return
    with pytest.raises(UnsupportedError) as error:
        attention(x, x, x, Mask(), backend=name)
    text = str(error.value)
    assert f"backend='{name}' cannot run this call" in text
    assert all(reason in text for listed in against.values() for reason in listed)
    assert "torch: can run this call" in text
    assert "float64" in text and "head dim 16/16" in text


def test_no_backend_at_all(device: torch.device) -> None:
    x = torch.zeros(4, 2, 16, device=device, requires_grad=True)
    out = torch.full_like(x, 7.0, requires_grad=False)
    with pytest.raises(UnsupportedError) as error:
        attention(x, x, x, Mask(), out=out)
    for name in BACKENDS:
        assert f"  {name}: " in str(error.value)
    assert (out == 7).all()


def test_auto_explains_what_it_chose(device: torch.device, caplog: pytest.LogCaptureFixture) -> None:
    x = torch.zeros(5, 2, 24, dtype=torch.float64, device=device)
    dispatch.choose.cache_clear()
    with caplog.at_level(logging.DEBUG, "mmattn"):
        attention(x, x, x, Mask())
    assert "torch runs" in caplog.text
    assert "triton: dtype float64 is not float16, bfloat16 or float32" in caplog.text


def test_auto_takes_torch_on_a_cpu_and_a_kernel_on_a_gpu(fa4: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = []
    fake = tuple(replace(b, load=lambda call, name=b.name: chosen.append(name)) for b in dispatch.BACKENDS)
    monkeypatch.setattr(dispatch, "BACKENDS", fake)
    dispatch.choose.cache_clear()
    calls = [hopper(), hopper(split_kv=True), hopper(grad=True), hopper(device_type="cpu", capability=None)]
    for call in calls:
        dispatch.choose(call, "auto")
    dispatch.choose.cache_clear()
    assert chosen == ["cute", "triton", "cute", "torch"], "gradients may come from another backend than the forward"


def test_gradients_come_from_the_first_backend_that_has_them(fa4: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def pretend(**reasons: list[str]) -> None:
        changed = [
            replace(b, why_no_gradients=lambda call, r=reasons[b.name]: r, load_backward=lambda call, name=b.name: name)
            for b in dispatch.BACKENDS
        ]
        monkeypatch.setattr(dispatch, "BACKENDS", tuple(changed))
        dispatch.choose_backward.cache_clear()
        dispatch.choose.cache_clear()

    call, on_cpu = hopper(grad=True), hopper(grad=True, device_type="cpu", capability=None)
    pretend(cute=["no D 64"], triton=[], torch=[])
    assert dispatch.choose_backward(call, "auto") == "triton" and dispatch.choose_backward(on_cpu, "auto") == "torch"
    assert dispatch.choose_backward(call, "torch") == "torch"
    assert dispatch.reasons(call)["cute"] == ["no D 64"] and dispatch.reasons(hopper())["cute"] == []
    for forced in ("choose", "choose_backward"):
        with pytest.raises(UnsupportedError, match="backend='cute' cannot run this call.*\n  cute: no D 64"):
            getattr(dispatch, forced)(call, "cute")
    pretend(cute=["a"], triton=["b"], torch=["c"])
    with pytest.raises(UnsupportedError, match="no backend can run this call"):
        dispatch.choose(call, "auto")
    dispatch.choose_backward.cache_clear()
    dispatch.choose.cache_clear()


def test_gradients_that_no_gpu_has_checked_are_not_given(fa4: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "UNCHECKED", frozenset(("triton",)))
    dispatch.choose_backward.cache_clear()
    call = hopper(grad=True)
    against = dispatch.reasons(call)["triton"]
    assert len(against) == 1 and "have not passed the parity tests on a GPU yet" in against[0]
    assert dispatch.reasons(hopper())["triton"] == []
    with pytest.raises(UnsupportedError, match="backend='triton' cannot run this call"):
        dispatch.choose_backward(call, "triton")
    dispatch.choose_backward.cache_clear()


def test_supported_reads_the_whole_call(device: torch.device) -> None:
    x = torch.zeros(128, 2, 64, dtype=torch.float16, device=device)
    assert supported(x, x, x, Mask())["torch"] == []
    plan = mmattn.plan(Mask(), q=x, k=x)
    assert supported(x, x, x, plan) == supported(x, x, x, Mask())
    grad = supported(x.clone().requires_grad_(), x, x, Mask())
    assert any("grad" in reason for reason in grad["cute"]) and grad["torch"] == []
    assert grad["triton"] == supported(x, x, x, Mask())["triton"]
    assert grad == supported(x, x, x, Mask(), requires_grad=True)
    with torch.no_grad():
        assert supported(x.clone().requires_grad_(), x, x, Mask()) == supported(x, x, x, Mask())
    odd = torch.zeros(128, 2, 73, dtype=torch.float16, device=device)[..., :72]
    assert any("16 bytes" in reason for reason in supported(odd, odd, odd, Mask())["cute"])
    out = torch.zeros(128, 2, 65, dtype=torch.float16, device=device)[..., :64]
    assert any("16 bytes" in reason for reason in supported(x, x, x, Mask(), out=out)["cute"])


# Gradients.

GRADIENT_CASES = ("packed-spans-clamped", "paged-window", "batched-symmetric", "softcap-sinks-packed", "sinks-none-packed",
                  "rows-past-end-packed", "group-3", "kv_lo-packed")  # fmt: skip


@pytest.mark.parametrize("name", GRADIENT_CASES)
def test_gradients_equal_those_of_the_reference(name: str, device: torch.device) -> None:
    """Auto takes torch where an input requires grad. float64, so that only a wrong formula can differ."""
    inputs = build(BY_NAME[name], device)
    grads = []
    for run in (lambda *a, **kw: attention(*a, return_lse=True, **kw), reference):
        # NaN slots stay: they must not reach a gradient either.
        leaves = [x.detach().double().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
        extras = dict(inputs.extras)
        if "sinks" in extras:
            extras["sinks"] = extras["sinks"].double().requires_grad_()
            leaves.append(extras["sinks"])
        out, lse = run(*leaves[:3], inputs.mask, **inputs.batch, **extras)
        weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float64, device=device).reshape(out.shape)
        loss = (out.double() * weights).sum() + lse.masked_fill(lse == -torch.inf, 0).double().sum() / 7
        grads.append(torch.autograd.grad(loss, leaves))
    for got, want in zip(*grads):
        assert got.isfinite().all() and want.isfinite().all()
        assert (got - want).abs().max() <= 1e-6 * want.abs().max().clamp(min=1)  # the LSE is float32


@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
def test_a_scale_that_requires_grad_is_not_detached(name: str, device: torch.device) -> None:
    x = torch.randn(130, 2, 64, device=device)
    scale = torch.ones(1, device=device, requires_grad=True)
    against = supported(x, x, x, Mask(), **{name: scale})
    assert all(any("grad" in reason for reason in against[kernel]) for kernel in ("cute", "triton"))
    assert against["torch"] == [] and attention(x, x, x, Mask(), **{name: scale}).requires_grad


def test_supported_reads_the_mask_as_attention_does() -> None:
    x = torch.randn(4, 2, 16)
    ready = mmattn.plan(Mask(), q=x, k=x)
    for call in (attention, supported):
        with pytest.raises(ValueError, match="causal came with a Plan"):
            call(x, x, x, ready, causal=torch.ones(1, dtype=torch.int32))
        with pytest.raises(ValueError, match=r"mask must be a mmattn.Mask or a mmattn.Plan, got str"):
            call(x, x, x, "causal")


def test_gradcheck(device: torch.device) -> None:
    q, k, v = (torch.randn(5, 2, 4, dtype=torch.float64, device=device, requires_grad=True) for _ in range(3))
    sinks = torch.randn(2, dtype=torch.float64, device=device, requires_grad=True)

    def run(q, k, v, sinks):
        return attention(q, k, v, Mask.sliding_window(3), mm_prefix_range=[[(1, 3)]], softcap=2.0, sinks=sinks)

    assert torch.autograd.gradcheck(run, (q, k, v, sinks))


def test_a_result_is_never_silently_detached(device: torch.device) -> None:
    x = torch.randn(4, 2, 16, device=device, requires_grad=True)
    assert attention(x, x.detach(), x.detach(), Mask()).requires_grad
    assert attention(x.detach(), x.detach(), x, Mask()).requires_grad
    sinks = torch.zeros(2, device=device, requires_grad=True)
    assert attention(x.detach(), x.detach(), x.detach(), Mask(), sinks=sinks).requires_grad
    with pytest.raises(UnsupportedError, match="cute: gradients on cpu"):
        attention(x, x, x, Mask(), backend="cute")
    if not supported(x, x, x, Mask())["triton"]:
        assert attention(x, x, x, Mask(), backend="triton").requires_grad


# Partial results.


def split_call(inputs: Inputs, cuts: list[int], backend: str) -> tuple[list, list]:
    """The call over keys `cuts[i]..cuts[i+1]` each, by absolute positions."""
    outs, lses = [], []
    rows, keys = inputs.q.shape[0], inputs.k.shape[0]
    for start, end in zip(cuts, cuts[1:]):
        args = {name: torch.tensor([x], dtype=torch.int32, device=inputs.q.device)
                for name, x in (("kv_start", start), ("q_start", keys - rows))}  # fmt: skip
        out, lse = attention(inputs.q, inputs.k[start:end], inputs.v[start:end], inputs.mask, return_lse=True,
                             mm_prefix_range=inputs.batch["mm_prefix_range"], backend=backend, **args)  # fmt: skip
        outs.append(out)
        lses.append(lse)
    return outs, lses


@pytest.mark.parametrize("mask", [Mask(), Mask.sliding_window(20), Mask.full()], ids=str)
def test_merged_parts_equal_the_whole(mask: Mask, backend: str, device: torch.device) -> None:
    q, k, v = (torch.randn(n, h, 32, device=device).half() for n, h in ((70, 4), (130, 2), (130, 2)))
    inputs = Inputs(q, k, v, mask, dict(mm_prefix_range=[[(65, 100)]]), {})
    expected = expect(inputs, interpreted=False)
    out, lse = merge_states(*split_call(inputs, [0, 0, 31, 100, 130], backend))
    expected.out_budget = expected.out_budget * 2  # every part was rounded to half precision once more
    assert_close(out, lse, expected)


def test_merging_empty_parts_changes_no_bit(device: torch.device) -> None:
    """N11."""
    x = torch.randn(6, 3, 8, device=device).half()
    lse = torch.randn(3, 6, device=device)
    lse[:, ::4] = -torch.inf  # a quarter of the rows saw nothing
    x[::4] = 0
    nothing, never = torch.zeros_like(x), torch.full_like(lse, -torch.inf)
    out, merged = merge_states([nothing, nothing], [never, never])
    assert (out == 0).all() and (merged == -torch.inf).all()
    garbage = torch.full_like(x, float("nan"))  # what an empty part holds must not matter
    for outs, lses in (
        ([nothing, x], [never, lse]),
        ([x, garbage], [lse, never]),
        ([x], [lse]),
        ([garbage, x, garbage], [never, lse, never]),
    ):
        out, merged = merge_states(outs, lses)
        assert torch.equal(out, x) and torch.equal(merged, lse)


def test_merge_states_of_batched_results(device: torch.device) -> None:
    outs = [torch.randn(2, 5, 4, 16, device=device) for _ in range(2)]
    lses = [torch.randn(2, 4, 5, device=device) for _ in range(2)]
    out, lse = merge_states(outs, lses)
    weights = torch.softmax(torch.stack(lses), 0).transpose(-1, -2)[..., None]
    torch.testing.assert_close(out, (weights * torch.stack(outs)).sum(0))
    torch.testing.assert_close(lse, torch.logsumexp(torch.stack(lses), 0))


def test_merge_states_refuses_what_does_not_fit() -> None:
    x, lse = torch.zeros(4, 2, 8), torch.zeros(2, 4)
    with pytest.raises(ValueError, match="as many lses as outs, at least one; got 0 and 0"):
        merge_states([], [])
    with pytest.raises(ValueError, match="got 2 and 1"):
        merge_states([x, x], [lse])
    with pytest.raises(ValueError, match=r"lses\[1\] \[4, 2\].*must be \[2, 4\]"):
        merge_states([x, x], [lse, lse.T])
    with pytest.raises(ValueError, match=r"outs\[1\] \[3, 2, 8\]"):
        merge_states([x, x[:3]], [lse, lse[:, :3]])


# Imports.


def run_python(code: str, **environment: str) -> str:
    import os

    env = {**os.environ, **environment}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_loads_no_kernel_toolkit() -> None:
    code = """
import sys, torch
before = set(sys.modules)
import mmattn
new = {name.split(".")[0] for name in set(sys.modules) - before}
print(sorted(new & {"triton", "cutlass", "flash_attn", "quack", "transformers", "PIL", "click", "rich", "matplotlib", "numpy", "sklearn"}))
"""
    assert run_python(code).strip() == "[]"


def test_support_questions_and_the_torch_backend_load_no_kernel_toolkit() -> None:
    code = """
import sys, torch, mmattn
x = torch.zeros(4, 2, 16)
mmattn.supported(x, x, x, mmattn.Mask())
mmattn.attention(x, x, x, mmattn.Mask.sliding_window(2), mm_prefix_range=[[(1, 2)]])
mmattn.reference(x, x, x, mmattn.Mask())
print([name for name in ("triton", "cutlass", "flash_attn", "transformers") if name in sys.modules])
"""
    assert run_python(code).strip() == "[]"


def test_no_backend_imports_another() -> None:
    code = """
import sys, torch
import mmattn.triton.forward, mmattn.triton.bounds
print([name for name in sys.modules if name.startswith("mmattn.cute.") and name != "mmattn.cute.support"])
print("mmattn.reference" in {m for m in sys.modules if getattr(sys.modules[m], "reference", None) and m.startswith("mmattn.triton")})
"""
    assert run_python(code).split("\n")[:2] == ["[]", "False"]


def test_triton_interpret_decides_in_a_fresh_process() -> None:
    code = """
import torch, mmattn
x = torch.ones(4, 2, 16)
print(mmattn.supported(x, x, x, mmattn.Mask())["triton"])
try:
    print(mmattn.attention(x, x, x, mmattn.Mask(), backend="triton").sum().item())
except mmattn.UnsupportedError as error:
    print("refused")
"""
    triton, numpy = (tuple(int(n) for n in metadata.version(name).split(".")[:2]) for name in ("triton", "numpy"))
    first, second = run_python(code, TRITON_INTERPRET="1").split("\n")[:2]
    if triton < (3, 7) and numpy >= (2, 4):
        assert "needs numpy < 2.4" in first and second == "refused"
    else:
        assert (first, second) == ("[]", "128.0")
    without = run_python(code, TRITON_INTERPRET="0").split("\n")
    assert "TRITON_INTERPRET=1" in without[0] and without[1] == "refused"
