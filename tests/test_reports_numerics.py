"""Public bug reports about numerics (N): unwritten memory, padding, softcap, sinks, empty rows; and C05, same bits."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from mmattn import Mask, attention, merge_states, plan

from .calls import skip_unsupported
from .cases import WILD, guarded
from .probes import MANY_ROWS

STEP = torch.finfo(torch.float16).eps


def run(q: Tensor, k: Tensor, v: Tensor, mask: Any, backend: str, **args: Any) -> Any:
    """Packed rows, over the path for many rows where the backend has no other."""
    if backend == "cute":
        args["max_seqlen_q"] = max(MANY_ROWS, q.shape[0])
    call = {name: x for name, x in args.items() if name != "return_lse"}
    skip_unsupported(backend, q, k, v, mask, **call)
    return attention(q, k, v, mask, backend=backend, **args)


# N01: whatever lies past the keys, not a bit changes.


@pytest.mark.parametrize(
    "mask", [Mask(), Mask.full(), Mask.sliding_window(9), Mask.sliding_window(9, causal=False)], ids=str
)
@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), -float("inf")])
def test_n01_unwritten_slots(mask: Mask, garbage: float, backend: str, device: torch.device) -> None:
    lens = [32, 64, 96, 48, 1, 3]
    q = torch.randn(len(lens) * 2, 4, 64, device=device).half()
    args = dict(cu_seqlens_q=guarded([2 * i for i in range(len(lens) + 1)], device), seqused_k=guarded(lens, device),
                mm_prefix_range=[[(max(n - 2, 0), n + 5)] for n in lens])  # fmt: skip
    results = []
    for tail in (0.0, garbage):
        k, v = (torch.full((len(lens), 128, 2, 64), tail, dtype=torch.float16, device=device) for _ in range(2))
        random = torch.Generator().manual_seed(1)
        for b, n in enumerate(lens):
            for x in (k, v):
                x[b, :n] = torch.randn(n, 2, 64, generator=random).half()
        results.append(run(q, k, v, mask, backend, return_lse=True, **args))
    for clean, dirty in zip(*results):
        assert torch.equal(clean, dirty)


@pytest.mark.parametrize("kv_len", [1, 15, 16, 17, 31, 47])
@pytest.mark.parametrize("mask", [Mask.full(), Mask.sliding_window(5)], ids=str)
def test_n01_unwritten_pages(mask: Mask, kv_len: int, backend: str, device: torch.device) -> None:
    q = torch.randn(1, 4, 64, device=device).half()
    args = dict(cu_seqlens_q=guarded([0, 1], device), seqused_k=guarded([kv_len], device))
    results = []
    for tail, spare in ((0.0, 0), (float("nan"), WILD)):
        pages = torch.full((4, 16, 2, 64), tail, dtype=torch.float16, device=device)
        keys = torch.randn(kv_len, 2, 64, generator=torch.Generator().manual_seed(2)).half().to(device)
        order = [2, 0, 3]
        for j in range(-(-kv_len // 16)):
            part = keys[16 * j : 16 * (j + 1)]
            pages[order[j], : len(part)] = part
        needed = range(0 if mask.window_left is None else max(0, kv_len - 5) // 16, -(-kv_len // 16))
        table = [order[j] if j in needed else spare for j in range(3)]
        table = torch.tensor([table], dtype=torch.int32, device=device)
        results.append(run(q, pages, pages, mask, backend, return_lse=True, page_table=table, **args))
    for clean, dirty in zip(*results):
        assert torch.equal(clean, dirty)


@pytest.mark.parametrize("kv_len", [1, 16, 64, 255, 256, 257])
@pytest.mark.parametrize("page", [None, 16])
def test_n02_padding_lanes_stay_out_of_the_denominator(
    kv_len: int, page: int | None, backend: str, device: torch.device
) -> None:
    q = torch.zeros(1, 4, 128, dtype=torch.float16, device=device)
    args = dict(cu_seqlens_q=guarded([0, 1], device), seqused_k=guarded([kv_len], device))
    slots = -(-(kv_len + 3) // 16) * 16
    v = torch.full((slots, 1, 128), float("nan"), dtype=torch.float16, device=device)
    v[:kv_len] = 1
    k = v * 3
    if page is None:
        k, v = k[None], v[None]
    else:
        k, v = (x.unflatten(0, (-1, page)) for x in (k, v))
        args["page_table"] = torch.arange(slots // page, dtype=torch.int32, device=device)[None]
    out, lse = run(q, k, v, Mask.full(), backend, return_lse=True, **args)
    assert (out == 1).all()
    assert (lse - math.log(kv_len)).abs().max() < 1e-5


@pytest.mark.parametrize("length", [32, 33, 34, 35])
def test_n03_left_padding_leaves_empty_rows(length: int, backend: str, device: torch.device) -> None:
    """Hugging Face #47678: image mask and left padding, rows without any key."""
    x = torch.randn(length, 2, 64, device=device).half()
    args = dict(cu_seqlens_q=guarded([0, length], device), cu_seqlens_k=guarded([0, length], device))
    padded, lse = run(x, x, x, Mask.sliding_window(9), backend, mm_prefix_range=[[(8, 20)]], kv_lo=guarded([5], device),
                      return_lse=True, **args)  # fmt: skip
    assert (padded[:5] == 0).all() and (lse[:, :5] == -torch.inf).all()
    n = length - 5
    args = dict(cu_seqlens_q=guarded([0, n], device), cu_seqlens_k=guarded([0, n], device))
    plain = run(x[5:], x[5:], x[5:], Mask.sliding_window(9), backend, mm_prefix_range=[[(3, 15)]], **args)
    assert (padded[5:].float() - plain.float()).abs().max() <= 2 * STEP * x.abs().max()


# N05, N06: softcap.


@pytest.mark.parametrize("score", [1000, 3000, 4400, 5000, 10000, -10000])
def test_n05_softcap_of_large_scores(score: float, backend: str, device: torch.device) -> None:
    """The cap of a score of +-10000 is +-50, not NaN: equal scores give the mean of the values."""
    d = 64
    q = torch.full((1, 1, d), abs(score) ** 0.5 * d**-0.25, device=device).half()
    k = torch.full((2, 1, d), math.copysign(abs(score) ** 0.5 * d**-0.25, score), device=device).half()
    v = torch.tensor([1.0, 3.0], device=device).half()[:, None, None].expand(2, 1, d).contiguous()
    out, lse = run(q, k, v, Mask.full(), backend, softcap=50.0, return_lse=True)
    assert (out == 2).all()
    want = math.copysign(50 * math.tanh(abs(score) / 50), score) + math.log(2)
    assert (lse - want).abs().max() < 1e-4


@pytest.mark.parametrize("caps", [(15.0, 30.0), (30.0, 15.0)])
def test_n06_two_caps_in_one_process(caps: tuple[float, float], backend: str, device: torch.device) -> None:
    """cap * tanh(score / cap): a score of 40 gives 14.856 under 15 and 26.102 under 30."""
    q = torch.zeros(1, 1, 64, device=device).half()
    q[..., 0] = 20
    k = torch.zeros_like(q)
    k[..., 0] = 16  # 20 * 16 / 8 = 40
    right = {15.0: 14.856, 30.0: 26.102}
    for cap in caps:
        lse = run(q, k, k, Mask.full(), backend, softcap=cap, return_lse=True)[1]
        assert abs(float(lse) - right[cap]) < 1e-3


# N09: what a sink means.


def test_n09_a_sink_is_a_logit_without_a_value(backend: str, device: torch.device) -> None:
    """10 keys of score 0 and a sink of 3: every key weighs 0.0332. As a bias on key 0 it would be 0.69 and 0.034."""
    q = torch.zeros(1, 8, 64, dtype=torch.float16, device=device)
    v = torch.zeros(10, 8, 64, dtype=torch.float16, device=device)
    for key in range(10):
        v[key, :, key] = 1
    sinks = torch.full((8,), 3.0, device=device)
    out, lse = run(q, torch.randn_like(v), v, Mask.full(), backend, sinks=sinks, return_lse=True)
    assert (out[..., :10].float() - 0.0332).abs().max() < 1e-4
    assert (out[..., 10:] == 0).all()
    assert (lse - math.log(10 + math.exp(3))).abs().max() < 1e-5


def test_n09_sinks_are_neither_scaled_nor_capped(backend: str, device: torch.device) -> None:
    x = torch.zeros(1, 2, 64, dtype=torch.float16, device=device)
    sinks = torch.tensor([8.0, -3.0], device=device)
    lse = run(x, x, x, Mask.full(), backend, sinks=sinks, softcap=2.0, scale=0.1, return_lse=True)[1]
    want = torch.logaddexp(sinks, torch.zeros_like(sinks))
    assert (lse[:, 0] - want).abs().max() < 1e-5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_sinks_of_rows_without_keys(dtype: torch.dtype, backend: str, device: torch.device) -> None:
    """Output 0; LSE is the sink, and -inf where there is none. Rows of no sequence are no different."""
    q = torch.randn(9, 2, 64, device=device).half()
    k = torch.randn(4, 2, 64, device=device).half()
    sinks = torch.tensor([1.5, -torch.inf], device=device).to(dtype)
    args = dict(cu_seqlens_q=guarded([0, 6, 7], device), cu_seqlens_k=guarded([0, 4, 4], device))
    out, lse = run(q, k, k, Mask(), backend, sinks=sinks, return_lse=True, **args)
    empty = [0, 1, 6, 7, 8]  # before position 0, a sequence without keys, past the last sequence
    assert (out[empty] == 0).all()
    assert (lse[0, empty] == 1.5).all() and (lse[1, empty] == -torch.inf).all()
    assert lse[:, 2:6].isfinite().all()


# N11: merging.


def test_n11_merging_results_of_a_backend(backend: str, device: torch.device) -> None:
    q, k = (torch.randn(n, 2, 64, device=device).half() for n in (12, 40))
    out, lse = run(q, k, k, Mask.sliding_window(8), backend, return_lse=True)
    # A part whose keys no row sees.
    far = run(q, k, k, Mask.sliding_window(8), backend, return_lse=True, q_start=guarded([500], device))
    assert (far[0] == 0).all() and (far[1] == -torch.inf).all()
    for outs, lses in (((out, far[0]), (lse, far[1])), ((far[0], out, far[0]), (far[1], lse, far[1]))):
        merged = merge_states(list(outs), list(lses))
        assert torch.equal(merged[0], out) and torch.equal(merged[1], lse)
    merged = merge_states([far[0], far[0]], [far[1], far[1]])
    assert (merged[0] == 0).all() and (merged[1] == -torch.inf).all()


# C05: bits.


def test_c05_the_same_call_twice_gives_the_same_bits(backend: str, device: torch.device) -> None:
    n = 2000 if device.type == "cuda" else 150
    x = torch.randn(n, 2, 64, device=device).half()
    args = dict(cu_seqlens_q=guarded([0, n], device), cu_seqlens_k=guarded([0, n], device), mm_prefix_range=[[(9, 80)]])
    first = run(x, x, x, Mask.sliding_window(70), backend, return_lse=True, **args)
    again = run(x, x, x, Mask.sliding_window(70), backend, return_lse=True, **args)
    the_plan = plan(Mask.sliding_window(70), q=x, k=x, **args)
    planned = attention(x, x, x, the_plan, backend=backend, return_lse=True)
    for other in (again, planned):
        assert torch.equal(first[0], other[0]) and torch.equal(first[1], other[1])


@pytest.mark.parametrize("place", ["first", "last"])
def test_c05_batch_mates_change_little(place: str, backend: str, device: torch.device) -> None:
    """A long sequence alone and among 31 short ones: within one rounding step (bit-equality is opt-in)."""
    n = 2000 if device.type == "cuda" else 100
    lens = [n] + [5] * 31 if place == "first" else [5] * 31 + [n]
    cu = [sum(lens[:i]) for i in range(33)]
    x = torch.randn(cu[-1], 2, 64, device=device).half()
    mine = slice(0, n) if place == "first" else slice(cu[-2], None)
    args = dict(cu_seqlens_q=guarded(cu, device), cu_seqlens_k=guarded(cu, device))
    together = run(x, x, x, Mask.sliding_window(90), backend, **args)[mine]
    args = dict(cu_seqlens_q=guarded([0, n], device), cu_seqlens_k=guarded([0, n], device))
    alone = run(x[mine], x[mine], x[mine], Mask.sliding_window(90), backend, **args)
    assert (together.float() - alone.float()).abs().max() <= 2 * STEP * x.abs().max()
