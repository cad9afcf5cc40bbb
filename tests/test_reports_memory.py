"""Public bug reports about memory and shapes (P) and about compilation and size (C)."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from mmattn import Mask, attention, plan, reference

from .budget import assert_close, expect
from .calls import skip_unsupported
from .cases import WILD, Inputs, guarded, neighboured
from .cases import Case as Shape
from .probes import MANY_ROWS, Setup, assert_sees


def check(inputs: Inputs, backend: str, device: torch.device) -> None:
    """The parity rule for hand-made inputs."""
    args = dict(inputs.args)
    if backend == "cute":
        args["max_seqlen_q"] = max(MANY_ROWS, inputs.q.shape[0])
    skip_unsupported(backend, inputs.q, inputs.k, inputs.v, inputs.mask, **args)
    out, lse = attention(inputs.q, inputs.k, inputs.v, inputs.mask, return_lse=True, backend=backend, **args)
    assert_close(out, lse, expect(inputs, interpreted=backend == "triton" and device.type == "cpu"))


@pytest.mark.gpu
@pytest.mark.slow
def test_p02_rows_beyond_2_31_elements(backend: str, device: torch.device) -> None:
    """sglang #20389: row offsets past 2^31 elements (262,144 rows of 32 heads x 256)."""
    if backend == "torch":
        pytest.skip("torch: not a kernel; its offsets are PyTorch's own")
    length, count = 176, 1490
    q = torch.empty(length * count, 32, 256, dtype=torch.bfloat16, device=device)
    assert q.numel() > 2**31
    q[-length:].normal_()
    q[:-length] = 1
    k, v = (torch.randn(length * count, 2, 256, dtype=torch.bfloat16, device=device) for _ in range(2))
    cu = torch.arange(count + 1, dtype=torch.int32, device=device) * length
    mask = Mask.sliding_window(16)
    out = attention(q, k, v, mask, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=length, backend=backend)
    last = slice(-length, None)
    own = guarded([0, length], device)
    alone = attention(
        q[last], k[last], v[last], mask, cu_seqlens_q=own, cu_seqlens_k=own, max_seqlen_q=length, backend=backend
    )
    assert (out[last].float() - alone.float()).abs().max() <= 2 * torch.finfo(torch.bfloat16).eps * v[last].abs().max()


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("page", [None, 16, 64])
def test_keys_beyond_2_31_elements(page: int | None, backend: str, device: torch.device) -> None:
    heads, d = 8, 128
    slots = 2**31 // (heads * d) + 4096
    k = torch.zeros(slots, heads, d, dtype=torch.bfloat16, device=device)
    q = torch.randn(129, heads, d, dtype=torch.bfloat16, device=device)
    k[-512:].normal_()
    if page is None:
        args: dict[str, Any] = dict(cu_seqlens_k=guarded([0, slots - 512, slots], device),
                                    cu_seqlens_q=guarded([0, 0, 129], device))  # fmt: skip
        got = attention(q, k, k, Mask(), max_seqlen_q=129, backend=backend, **args)
    else:
        pages = k.unflatten(0, (-1, page))
        table = torch.arange(pages.shape[0] - 512 // page, pages.shape[0], dtype=torch.int32, device=device)[None]
        got = attention(q, pages, pages, Mask(), page_table=table, seqused_k=guarded([512], device),
                        cu_seqlens_q=guarded([0, 129], device), max_seqlen_q=129, backend=backend)  # fmt: skip
    small = dict(cu_seqlens_q=guarded([0, 129], device), cu_seqlens_k=guarded([0, 512], device))
    check_against = expect(Inputs(q, k[-512:], k[-512:], Mask(), small, {}), interpreted=False)
    assert_close(got, None, check_against)


@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_p04_more_keys_than_the_table_holds(
    backend: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM #53658: seqused_k of 80 and a table of 4 pages of 16. Debug mode says so; a kernel never reads past the row."""
    q = torch.randn(2, 2, 64, device=device).half()
    pages = torch.randn(6, 16, 2, 64, device=device).half()
    pages[4:] = float("nan")
    wide = torch.tensor([[0, 1, 2, 3, WILD, WILD], [3, 2, 1, 0, WILD, WILD]], dtype=torch.int32, device=device)
    args = dict(cu_seqlens_q=guarded([0, 1, 2], device), seqused_k=guarded([80, 64], device), page_table=wide[:, :4])
    monkeypatch.setenv("MMATTN_DEBUG", "1")
    with pytest.raises(ValueError, match="seqused_k of sequence 0 is 80, but its page_table row holds 64 keys"):
        attention(q, pages, pages, Mask(), backend=backend, **args)
    monkeypatch.delenv("MMATTN_DEBUG")
    if backend == "triton":
        out = attention(q, pages, pages, Mask(), backend=backend, **args)
        assert out.isfinite().all()


def test_p07_spare_tiles_and_garbage_behind_cu_seqlens(backend: str, device: torch.device) -> None:
    lens = [0, 1, 129, 0, 65, 3]
    cu = [sum(lens[:i]) for i in range(7)]
    shape = Shape("p07")
    q, k, v = (neighboured((cu[-1], h, 64), shape, device) for h in (4, 2, 2))
    for x in (q, k, v):
        x.normal_()
    args = dict(cu_seqlens_q=guarded(cu, device), cu_seqlens_k=guarded(cu, device))
    check(Inputs(q, k, v, Mask.sliding_window(40), args, {}), backend, device)


P08 = {
    "zero rows, D 256": ([0, 0, 1208, 2048, 2048], [0, 2538, 4280, 5120, 8192], (4, 1), 256),
    "zero rows and keys, D 64": ([0, 0, 1, 1, 2], [0, 0, 3, 3, 8], (9, 3), 64),
    "rows without keys": ([0, 3, 5], [0, 0, 0], (4, 2), 64),
    "zero rows, D 256, small": ([0, 0, 19, 31, 31], [0, 38, 60, 72, 120], (4, 1), 256),
}


@pytest.mark.parametrize("name", P08)
def test_p08_zero_length_sequences(name: str, backend: str, device: torch.device) -> None:
    cu_q, cu_k, heads, d = P08[name]
    if device.type == "cpu" and cu_q[-1] > 100:
        pytest.skip("too large for a CPU; its small twin runs")
    q, k, v = (
        torch.randn(n, h, d, device=device).half()
        for n, h in ((cu_q[-1], heads[0]), (cu_k[-1], heads[1]), (cu_k[-1], heads[1]))
    )
    args = dict(cu_seqlens_q=guarded(cu_q, device), cu_seqlens_k=guarded(cu_k, device))
    check(Inputs(q, k, v, Mask(), args, {}), backend, device)


def test_p08_all_padding_and_nothing_at_all(backend: str, device: torch.device) -> None:
    nan = float("nan")
    q = torch.full((4, 2, 64), nan, dtype=torch.float16, device=device)
    pages = torch.full((2, 16, 2, 64), nan, dtype=torch.float16, device=device)
    table = torch.full((4, 1), WILD, dtype=torch.int32, device=device)
    args: dict[str, Any] = dict(seqused_k=guarded([0] * 4, device), page_table=table, backend=backend, return_lse=True)
    out, lse = attention(
        q, pages, pages, Mask(), cu_seqlens_q=guarded([0, 1, 2, 3, 4], device), max_seqlen_q=MANY_ROWS, **args
    )
    assert (out == 0).all() and (lse == -torch.inf).all()
    out, lse = attention(
        q[:0], pages, pages, Mask(), cu_seqlens_q=guarded([0] * 5, device), max_seqlen_q=MANY_ROWS, **args
    )
    assert out.shape == (0, 2, 64) and lse.shape == (2, 0)


def test_p09_rows_past_the_last_sequence(backend: str, device: torch.device) -> None:
    """PyTorch #186786: cu_seqlens ends at 944, q has 946 rows (a captured graph's padding). Documented: 0 and -inf."""
    cu, rows = ([0, 144, 432, 944], 946) if device.type == "cuda" else ([0, 14, 43, 94], 166)
    q, k = (torch.randn(n, 2, 64, device=device).half() for n in (rows, cu[-1]))
    q[cu[-1] :] = float("nan")
    out = torch.full_like(q, 7)
    args = dict(cu_seqlens_q=guarded(cu, device), cu_seqlens_k=guarded(cu, device), max_seqlen_q=rows)
    _, lse = attention(q, k, k, Mask(), out=out, return_lse=True, backend=backend, **args)
    assert (out[cu[-1] :] == 0).all() and (lse[:, cu[-1] :] == -torch.inf).all()
    short = attention(q[: cu[-1]], k, k, Mask(), backend=backend, **args)
    assert torch.equal(out[: cu[-1]], short)


@pytest.mark.parametrize("rows", [1, 20], ids=["decode", "prefill"])
@pytest.mark.parametrize("d", [72, 80, 96, 160, 192])
def test_p10_head_dims_that_are_no_power_of_two(d: int, rows: int, backend: str, device: torch.device) -> None:
    """Paged, with NaN in the memory next to every row: a padded load without a mask would show."""
    shape = Shape("p10", page=16)
    q = neighboured((rows, 2, d), shape, device)
    pages = [neighboured((4, 16, 1, d), shape, device) for _ in range(2)]
    for x in (q, *pages):
        x.normal_()
    args = dict(cu_seqlens_q=guarded([0, rows], device), seqused_k=guarded([50], device),
                page_table=torch.tensor([[2, 0, 3, 1]], dtype=torch.int32, device=device))  # fmt: skip
    check(Inputs(q, pages[0], pages[1], Mask(), args, {}), backend, device)


@pytest.mark.parametrize("rows", [1, 300])
def test_p11_head_dim_512(rows: int, backend: str, device: torch.device) -> None:
    if backend == "cute":
        pytest.skip("cute: head dims 512/512 are not between 8 and 256")  # the reason is tested in test_dispatch.py
    if device.type == "cpu":
        rows = min(rows, 30)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
    q, k, v = (torch.randn(n, h, 512, device=device).to(dtype) for n, h in ((rows, 4), (rows + 40, 2), (rows + 40, 2)))
    args = dict(cu_seqlens_q=guarded([0, rows], device), cu_seqlens_k=guarded([0, rows + 40], device))
    check(Inputs(q, k, v, Mask(), args, {}), backend, device)


@pytest.mark.parametrize("d", [64, 128, 256])
def test_p12_all_page_sizes_agree(d: int, backend: str, device: torch.device) -> None:
    rows, kv_len = (130, 300) if device.type == "cuda" else (7, 300)
    q, k, v = (torch.randn(n, h, d, device=device).half() for n, h in ((rows, 2), (kv_len, 1), (kv_len, 1)))
    results = []
    for page in (1, 16, 48, 64, 128, 256):
        count = -(-kv_len // page)
        order = torch.randperm(count)
        pages = []
        for x in (k, v):
            padded = torch.full((count * page, 1, d), float("nan"), dtype=torch.float16, device=device)
            padded[:kv_len] = x
            stored = torch.empty(count, page, 1, d, dtype=torch.float16, device=device)
            stored[order] = padded.unflatten(0, (count, page))
            pages.append(stored)
        table = order.to(torch.int32)[None].to(device)
        args = dict(cu_seqlens_q=guarded([0, rows], device), seqused_k=guarded([kv_len], device), page_table=table,
                    max_seqlen_q=MANY_ROWS + rows, backend=backend)  # fmt: skip
        results.append(attention(q, *pages, Mask.sliding_window(150), **args))
    want, _ = reference(q, k, v, Mask.sliding_window(150))
    for out in results:
        assert (out.double() - want).abs().max() <= 4 * torch.finfo(torch.float16).eps * want.abs().max()


# C: compilation and size


@pytest.mark.gpu
def test_c02_batches_do_not_recompile(device: torch.device) -> None:
    """20 calls with batches of 1..20, random lengths and 0..20 spans, twice.

    By host sizes a call takes one or two of three kernels: tiles of many rows, of few rows, and of few rows with split
    keys. Each compiles once, whatever the lengths.
    """
    from mmattn.triton import bounds, forward

    def step(b: int, choose: random.Random) -> None:
        lens = [choose.randrange(1, 400) for _ in range(b)]
        cu = guarded([sum(lens[:i]) for i in range(b + 1)], device)
        x = torch.randn(sum(lens), 2, 64, dtype=torch.bfloat16, device=device)
        spans = [[(9 * i, 9 * i + 5) for i in range(choose.randrange(1, 21))] for _ in lens]
        attention(x, x, x, Mask.sliding_window(50), cu_seqlens_q=cu, cu_seqlens_k=cu, mm_prefix_range=spans,
                  max_seqlen_q=400, backend="triton")  # fmt: skip

    def compiled(*kernels: Any) -> int:
        return sum(len(entry[0]) for kernel in kernels for entry in kernel.device_caches.values())

    forwards, lowering = [forward._forward_kernel], [bounds._row_kernel, bounds._tile_kernel]
    before = compiled(*forwards)
    for b in range(1, 21):
        step(b, random.Random(b))
    assert compiled(*forwards) - before <= 3
    before = compiled(*forwards, *lowering)
    for b in range(1, 21):
        step(b, random.Random(100 + b))
    assert compiled(*forwards, *lowering) == before


def test_c02_a_tensor_is_no_size() -> None:
    with pytest.raises(ValueError, match="max_seqlen_q must be a host integer"):
        plan(Mask(), batch_size=1, max_seqlen_q=torch.tensor(4), max_seqlen_k=4)  # type: ignore[arg-type]


@pytest.mark.gpu
def test_c04_memory_of_a_call(backend: str, device: torch.device) -> None:
    """No dense mask: 16k rows over 128k keys and 8 spans take less than 64 MiB beside their inputs and outputs."""
    if backend == "torch":
        pytest.skip("torch: bounded by its block size; tested on its own")
    q = torch.randn(16384, 8, 128, dtype=torch.bfloat16, device=device)
    k, v = (torch.randn(131072, 2, 128, dtype=torch.bfloat16, device=device) for _ in range(2))
    out = torch.empty_like(q)
    spans = [[(120000 + 1000 * i, 120000 + 1000 * i + 279) for i in range(8)]]
    args = dict(
        cu_seqlens_q=guarded([0, 16384], device), cu_seqlens_k=guarded([0, 131072], device), mm_prefix_range=spans
    )
    attention(q, k, v, Mask.sliding_window(1024), out=out, backend=backend, **args)  # compiles
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    attention(q, k, v, Mask.sliding_window(1024), out=out, backend=backend, **args)
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < 64 * 2**20


@pytest.mark.gpu
def test_c04_the_size_of_the_page_pool_does_not_matter(device: torch.device) -> None:
    q = torch.randn(200, 4, 128, dtype=torch.bfloat16, device=device)
    table = torch.arange(64, dtype=torch.int32, device=device)[None]
    extra = []
    for pages in (64, 40000):
        k = torch.zeros(pages, 16, 2, 128, dtype=torch.bfloat16, device=device)
        args = dict(cu_seqlens_q=guarded([0, 200], device), seqused_k=guarded([1000], device), page_table=table)
        attention(q, k, k, Mask(), backend="triton", **args)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        attention(q, k, k, Mask(), backend="triton", **args)
        torch.cuda.synchronize()
        extra.append(torch.cuda.max_memory_allocated() - before)
    assert extra[0] == extra[1]


@pytest.mark.slow
def test_a_long_windowed_sequence_on_a_cpu() -> None:
    """The torch backend skips what no row sees: 16k rows in bounded memory, and right at the far end."""
    import resource

    n, window = 16384, 512
    x = torch.randn(1, n, 2, 64)
    spans = [(i * 2000 + 100, i * 2000 + 379) for i in range(8)]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    out = attention(x, x, x, Mask.sliding_window(window), mm_prefix_range=[spans], backend="torch")
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024  # MiB
    assert grown < 600, f"{grown:.0f} MiB"
    tail = x[:, n - 700 :]
    want, _ = reference(tail[:, -100:], tail, tail, Mask.sliding_window(window))
    assert (out[:, -100:] - want).abs().max() < 1e-5


@pytest.mark.gpu
def test_c04_probes_at_64k(device: torch.device) -> None:
    """The probes at a size that a dense mask could not reach."""
    call = Setup(
        Mask.sliding_window(1024), 4096, 65536, "triton", device, spans=[(62000, 63500)], page=64, head_dim=128
    )
    assert_sees(call, {61999: (60976, 61999), 62000: (60977, 63500), 63500: (62000, 63500), 65535: (64512, 65535)})
