"""The CuTe backend without a GPU: every kernel variant compiles, and what needs no kernel is right.

Kernels are compiled from fake tensors by `python -m tests.test_cute_compile KERNELS NAME...`, in processes of their
own: environment variables tell FlashAttention-4 and the CuTe DSL what GPU to compile for.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

import mmattn
from mmattn import Mask
from mmattn.cute import support
from mmattn.plan import Options

from .calls import hopper

ROOT = Path(__file__).resolve().parent.parent
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

needs_fa4 = pytest.mark.skipif(
    support.installed_version() is None, reason=f"the package {support.PACKAGE} is not installed"
)


class Kernel(NamedTuple):
    """One variant to compile."""

    head_dim: int
    head_dim_v: int
    group: int = 1
    packed: bool = True
    page: int | None = None
    windowed: bool = False
    softcap: float | None = None
    sinks: torch.dtype | None = None
    lse: bool = False
    dtype: torch.dtype = BF16
    some_sequences: bool = False
    deterministic: bool = False


ROWS = {
    "D64": Kernel(64, 64),
    "D96 batched": Kernel(96, 96, group=2, packed=False, lse=True),
    "D128": Kernel(128, 128, group=4, lse=True),
    "D128 float16 sinks": Kernel(128, 128, group=8, sinks=FP32, lse=True, dtype=FP16),
    "D128 long sequences only": Kernel(128, 128, group=4, page=16, some_sequences=True),
    "D192": Kernel(192, 192, windowed=True),
    "D192/128": Kernel(192, 128),
    "D256 softcap": Kernel(256, 256, group=2, softcap=50.0),
    "D256 batched window": Kernel(256, 256, group=2, packed=False, windowed=True, lse=True),
    "wider v": Kernel(64, 128, lse=True),
    "group that does not divide the tile": Kernel(128, 128, group=3, windowed=True),
    "pages by TMA": Kernel(128, 128, group=4, page=128, sinks=BF16),
    "pages by TMA D256": Kernel(256, 256, group=2, page=64, windowed=True, lse=True),
    "pages by cp.async": Kernel(64, 64, group=5, page=16, packed=False),
    "pages by cp.async D256": Kernel(256, 256, group=2, page=16, windowed=True, softcap=30.0, sinks=BF16, lse=True),
}
PUBLIC = {
    "D64 batched softcap sinks": Kernel(64, 64, group=2, packed=False, softcap=30.0, sinks=BF16, lse=True),
    "D192/128 group that does not divide the tile": Kernel(192, 128, group=3, lse=True),
    "D128": Kernel(128, 128),
    "D256": Kernel(256, 256, group=2, lse=True),
}
BACKWARD = {
    "D64 sinks": Kernel(64, 64, group=8, windowed=True, sinks=FP32),
    "D72 softcap, in order": Kernel(72, 72, windowed=True, softcap=50.0, deterministic=True),
    "D128 full mask, batched": Kernel(128, 128, packed=False, lse=True),
    "D128 in order": Kernel(128, 128, group=4, windowed=True, deterministic=True, dtype=FP16),
    "D192/128": Kernel(192, 128, windowed=True),
    "D256": Kernel(256, 256, group=2, windowed=True, lse=True),
}
KERNELS = {"rows sm_90": ROWS, "backward sm_90": BACKWARD, "public sm_90": PUBLIC, "public sm_100": PUBLIC}
"""Path and arch -> the kernels to compile."""


@needs_fa4
@pytest.mark.slow
@pytest.mark.parametrize("kernels", KERNELS)
def test_compiles(kernels: str) -> None:
    if kernels.startswith(("rows", "backward")) and support.installed_version() != support.PINNED:
        pytest.skip(f"{support.PACKAGE} {support.installed_version()} is installed, not {support.PINNED}")
    arch = kernels.split()[1]
    env = {
        **os.environ, "FLASH_ATTENTION_ARCH": arch, "CUTE_DSL_ARCH": f"{arch}a",
        "FLASH_ATTENTION_NUM_SMS": "132" if arch == "sm_90" else "148", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
    }  # fmt: skip
    names = list(KERNELS[kernels])
    running = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.test_cute_compile", kernels, *half],
            cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for half in (names[::2], names[1::2])
    ]  # fmt: skip
    ends = [process.communicate(timeout=600) for process in running]
    lines = [line for out, _ in ends for line in out.splitlines() if line.startswith("{")]
    errors = {report["name"]: report["error"] for report in map(json.loads, lines)}
    assert list(sorted(errors)) == sorted(names), "\n".join(err[-3000:] for _, err in ends)
    failed = [f"{kernels}, {name}:\n{error}" for name, error in errors.items() if error]
    assert not failed, "\n".join(failed)


def compile_rows(kernel: Kernel) -> None:
    from mmattn.cute import sm90

    tile = sm90.tile_shape(kernel.head_dim, kernel.head_dim_v, kernel.windowed, kernel.page)
    paged = kernel.page is not None
    sm90.compiled(
        sm90.Variant(
            kernel.dtype, kernel.head_dim, kernel.head_dim_v, kernel.group, tile, kernel.packed, kernel.packed and not paged,
            kernel.some_sequences, paged, kernel.page == tile.n, kernel.softcap is not None, kernel.sinks, kernel.lse,
        )
    )  # fmt: skip


def compile_backward(kernel: Kernel) -> None:
    """All kernels of a backward; `lse` says that the LSE has a gradient."""
    from mmattn.cute import backward_sm90

    variant = backward_sm90.Variant(
        kernel.dtype, kernel.head_dim, kernel.head_dim_v, kernel.group, kernel.windowed, kernel.packed, kernel.packed,
        kernel.softcap is not None, kernel.deterministic,
    )  # fmt: skip
    backward_sm90.compiled(variant)
    backward_sm90.preprocess(variant, kernel.lse)
    backward_sm90.postprocess_q(variant, kernel.sinks)
    if kernel.group > 1:
        backward_sm90.postprocess_kv(variant)


def compile_public(kernel: Kernel) -> None:
    """Calls `forward` on fake tensors; the plan is lowered on the CPU, because fake CUDA tensors cannot be indexed."""
    from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

    from mmattn.cute import fa4

    heads = 2 * kernel.group
    sizes_q, sizes_k = ((1000,), (1500,)) if kernel.packed else ((2, 300), (2, 500))
    lengths = ints(0, 300, 1000) if kernel.packed else ints(500, 33)
    batch = dict(cu_seqlens_q=lengths, cu_seqlens_k=lengths) if kernel.packed else dict(seqused_k=lengths)
    q, k = torch.empty(*sizes_q, heads, kernel.head_dim), torch.empty(*sizes_k, 2, kernel.head_dim)
    plan = mmattn.plan(Mask(), q=q, k=k, **batch)
    lower = fa4.lower

    def on_fake_gpu(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            return torch.empty(x.shape, dtype=x.dtype, device="cuda")
        return type(x)(*map(on_fake_gpu, x)) if hasattr(x, "_fields") else x

    def lower_on_cpu(*args: Any) -> Any:
        with unset_fake_temporarily():
            lowered = lower(*args)
        return on_fake_gpu(lowered)

    fa4.lower = lower_on_cpu
    with FakeTensorMode():

        def fake(*shape: int, dtype: torch.dtype = kernel.dtype) -> torch.Tensor:
            return torch.empty(*shape, dtype=dtype, device="cuda")

        rows = (heads, *sizes_q) if kernel.packed else (sizes_q[0], heads, sizes_q[1])
        sinks = None if kernel.sinks is None else fake(heads, dtype=kernel.sinks)
        fa4.forward(
            fake(*q.shape), fake(*k.shape), fake(*sizes_k, 2, kernel.head_dim_v), plan, None,
            options=Options(0.1, kernel.softcap, sinks),
            out=fake(*sizes_q, heads, kernel.head_dim_v), lse=fake(*rows, dtype=FP32) if kernel.lse else None,
        )  # fmt: skip
    fa4.lower = lower
    fa4._lowered.clear()


class FakeHardware:
    """Stands in for `cutlass.utils.HardwareInfo`, which asks the driver."""

    def __init__(self, *args: Any, **kwargs: Any):
        pass

    def get_max_active_clusters(self, *args: Any, **kwargs: Any) -> int:
        return 148

    def get_device_multiprocessor_count(self) -> int:
        return 148


def main(kernels: str, names: list[str]) -> None:
    path, arch = kernels.split()
    major = int(arch.removeprefix("sm_")) // 10
    torch.cuda.get_device_capability = lambda *args: (major, 0)
    if major != 9:
        import cutlass.utils.hardware_info

        cutlass.utils.HardwareInfo = cutlass.utils.hardware_info.HardwareInfo = FakeHardware
    compilers = dict(rows=compile_rows, backward=compile_backward, public=compile_public)
    for name in names:
        error = None
        try:
            compilers[path](KERNELS[kernels][name])
        except Exception:
            error = traceback.format_exc(limit=-6)
        print(json.dumps(dict(name=name, error=error)), flush=True)


# What needs no kernel


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes it look as if a version of flash-attn-4 (None: none) were installed."""
    return lambda version: monkeypatch.setattr(support, "installed_version", lambda: version)


NEWER = "4.1.0"


@pytest.mark.parametrize(
    ("version", "capability", "module"),
    [
        (support.PINNED, (9, 0), support.ROW_INTERVALS),
        (support.PINNED, (10, 0), support.PUBLIC_API),
        (support.PINNED, (11, 0), support.PUBLIC_API),
        (support.OLDEST, (9, 0), support.PUBLIC_API),
        (NEWER, (9, 0), support.PUBLIC_API),
        (NEWER, (10, 3), support.PUBLIC_API),
    ],
)
def test_module(version: str, capability: tuple[int, int], module: str, installed: Any) -> None:
    installed(version)
    call = hopper(capability=capability)
    assert support.why_not(call) == []
    assert support.module(call) == module


@pytest.mark.parametrize("capability", [(9, 0), (10, 0)])
@pytest.mark.parametrize("version", ["4.0.0b1", "4.0.0b33", "4.0.0a99", "3.9.0", "unknown"])
def test_version_that_is_too_old(version: str, capability: tuple[int, int], installed: Any) -> None:
    installed(version)
    (reason,) = support.why_not(hopper(capability=capability))
    assert f"{support.PACKAGE} {version} is installed" in reason
    assert f"{support.OLDEST} or newer" in reason and f"pip install {support.PACKAGE}=={support.PINNED}" in reason


@pytest.mark.parametrize(
    "version", ["4.0.0b34", "4.0.0b36+cu13", "4.0.0b100", "4.0.0rc1", "4.0.0", "4.0.1a1", "10.0.0"]
)
def test_version_that_is_new_enough(version: str, installed: Any) -> None:
    installed(version)
    assert support.why_not(hopper(capability=(10, 0))) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(page_size=64), f"no block lists with paged k and v; only {support.PACKAGE} {support.PINNED}"),
        (dict(head_dim=64), f"head dims 64/128: only {support.PACKAGE} {support.PINNED} runs a wider v"),
    ],
)
def test_what_only_the_pinned_release_runs(changes: dict[str, Any], words: str, installed: Any) -> None:
    installed(NEWER)
    (reason,) = support.why_not(hopper(**changes))
    assert words in reason
    installed(support.PINNED)
    assert support.why_not(hopper(**changes)) == []


@pytest.mark.skipif(support.installed_version() != support.PINNED, reason=f"needs {support.PACKAGE} {support.PINNED}")
def test_row_intervals_refuse_another_release(monkeypatch: pytest.MonkeyPatch, installed: Any) -> None:
    monkeypatch.delitem(sys.modules, "mmattn.cute.sm90", raising=False)
    installed(NEWER)
    with pytest.raises(ImportError, match=f"{support.PINNED}, but {NEWER} is installed"):
        import mmattn.cute.sm90  # noqa: F401


@pytest.fixture
def fa4(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The public-API path, with a model of FlashAttention-4 in the place of its kernels."""
    from mmattn.cute import fa4

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *args: (9, 0))
    monkeypatch.setattr(fa4, "block_shape", lambda *args: (16, 8))
    monkeypatch.setattr(fa4, "_flash_attn_fwd", flash_attn_fwd)
    return fa4


def flash_attn_fwd(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, softmax_scale: float, causal: bool, window_size_left: None,
    window_size_right: None, learnable_sink: torch.Tensor | None, score_mod: Any, mask_mod: Any, block_sparse_tensors: Any,
    aux_tensors: list[torch.Tensor], out: torch.Tensor, lse: torch.Tensor | None,
) -> None:  # fmt: skip
    """What FlashAttention-4 computes: it reads all of a listed block, and asks mask_mod in partial ones only."""
    b, s, h, _ = q.shape
    assert k.shape[0] == v.shape[0] == b and not causal and (window_size_left, window_size_right) == (None, None)
    rows = aux_tensors[0].view(b, s, 2)
    block_m, block_n = block_sparse_tensors.block_size
    seen = torch.zeros(b, s, k.shape[1], dtype=torch.bool)
    read = seen.clone()
    for partial in (True, False):
        counts, index = block_sparse_tensors[:2] if partial else block_sparse_tensors[2:4]
        for i, _, m in counts.nonzero().tolist():
            for n in index[i, 0, m, : counts[i, 0, m]].tolist():
                r, c = slice(m * block_m, (m + 1) * block_m), slice(n * block_n, (n + 1) * block_n)
                key = torch.arange(k.shape[1])[c]
                read[i, r, c] = True
                seen[i, r, c] = ((key >= rows[i, r, :1]) & (key < rows[i, r, 1:])) if partial else True
    group = h // k.shape[2]
    keys, values = k.double().repeat_interleave(group, 2), v.double().repeat_interleave(group, 2)
    scores = torch.einsum("bshd,bthd->bhst", q.double(), keys) * softmax_scale
    if score_mod is not None:
        scores = aux_tensors[1] * torch.tanh(scores / aux_tensors[1])
    scores = scores.masked_fill(~seen[:, None], -math.inf)
    if learnable_sink is None:
        sums = torch.logsumexp(scores, -1)
    else:
        sinks = learnable_sink.double()[None, :, None, None].expand(b, h, s, 1)
        sums = torch.logsumexp(torch.cat([scores, sinks], -1), -1)
        top = scores.amax(-1)
        overflow = (sinks[..., 0] - top > 88) & (top > -math.inf)  # it adds up exp(score - top) in float32
    weights = torch.exp(scores - sums.masked_fill(sums == -math.inf, 0)[..., None])
    products = weights[..., None] * values.permute(0, 2, 1, 3)[:, :, None]  # 0 * NaN is NaN in blocks that are read
    out.copy_(products.masked_fill(~read[:, None, ..., None], 0).sum(3).permute(0, 2, 1, 3))
    if lse is not None:
        lse.copy_(sums if learnable_sink is None else sums.masked_fill(overflow, math.inf))


CU_Q, CU_K = (0, 30, 30, 47, 80), (0, 40, 50, 100, 120)
SPANS = [[(3, 20)], [], [(20, 45)], [(0, 3), (5, 19)]]
LAYOUTS: dict[str, SimpleNamespace] = {
    "batched": SimpleNamespace(q=(2, 37), k=(2, 41), args=dict(mm_prefix_range=[[(3, 20)], []])),
    "batched, lengths and left padding": SimpleNamespace(
        q=(4, 20), k=(4, 50), args=dict(seqused_k=ints(50, 0, 3, 21), kv_lo=ints(7, 0, 1, 0), mm_prefix_range=SPANS)
    ),
    "packed": SimpleNamespace(
        q=(80,), k=(120,), args=dict(cu_seqlens_q=ints(*CU_Q), cu_seqlens_k=ints(*CU_K), mm_prefix_range=SPANS)
    ),
    "packed, padding behind": SimpleNamespace(
        q=(99,), k=(133,), args=dict(cu_seqlens_q=ints(*CU_Q), cu_seqlens_k=ints(*CU_K), kv_lo=ints(2, 0, 30, 0))
    ),
    "packed rows over batched keys": SimpleNamespace(
        q=(80,), k=(4, 45), args=dict(cu_seqlens_q=ints(*CU_Q), seqused_k=ints(45, 1, 17, 33), mm_prefix_range=SPANS)
    ),
    "batched rows over packed keys": SimpleNamespace(q=(4, 12), k=(120,), args=dict(cu_seqlens_k=ints(*CU_K))),
    "one sequence without batch dims": SimpleNamespace(q=(33,), k=(64,), args=dict(seqused_k=ints(50))),
}


def slots_without_a_key(layout: SimpleNamespace) -> torch.Tensor:
    """Which slots of k lie in front of or behind the keys of every sequence."""
    dead = torch.ones(layout.k, dtype=torch.bool)
    cu = layout.args.get("cu_seqlens_k")
    sequences = [dead[None]] if len(layout.k) == 1 and cu is None else dead
    if cu is not None:
        sequences = [dead[start:end] for start, end in zip(cu[:-1], cu[1:])]
    for b, slots in enumerate(sequences):
        first = layout.args["kv_lo"][b] if "kv_lo" in layout.args else 0
        end = layout.args["seqused_k"][b] if "seqused_k" in layout.args else None
        slots.view(-1)[first:end] = False
    return dead


@needs_fa4
@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("mask", [Mask(), Mask.sliding_window(9), Mask.full()], ids=["causal", "window", "full"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_public_path_gives_fa4_the_right_work(layout: SimpleNamespace, mask: Mask, sinks: bool, fa4: Any) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(*layout.q, 4, 8), torch.randn(*layout.k, 2, 8), torch.randn(*layout.k, 2, 8)
    extra = dict(softcap=2.0, sinks=torch.tensor([-math.inf, 0.5, -2.0, 300.0])) if sinks else {}
    want, want_lse = mmattn.reference(q, k, v, mask, **layout.args, **extra)
    plan = mmattn.plan(mask, q=q, k=k, **layout.args)
    dead = slots_without_a_key(layout)
    assert dead.any() or not layout.args.keys() & {"seqused_k", "kv_lo"}
    k[dead], v[dead] = math.nan, math.nan
    out = torch.full_like(q, math.nan)
    lse = torch.full((4, *layout.q) if len(layout.q) == 1 else (layout.q[0], 4, layout.q[1]), math.nan)
    options = Options(8**-0.5, extra.get("softcap"), extra.get("sinks"))
    for _ in range(2):  # the second call finds the plan lowered
        fa4.forward(q, k, v, plan, None, options=options, out=out, lse=lse)
        torch.testing.assert_close(out.double(), want, rtol=0, atol=1e-5)
        torch.testing.assert_close(lse.double(), want_lse, rtol=0, atol=1e-5)


@needs_fa4
def test_public_path_without_keys_or_rows(fa4: Any) -> None:
    q, k = torch.randn(2, 3, 4, 8), torch.randn(2, 0, 2, 8)
    out, lse = torch.full_like(q, math.nan), torch.full((2, 4, 3), math.nan)
    sinks = torch.tensor([1.0, 2.0, 3.0, -math.inf], dtype=torch.float64)
    fa4.forward(q, k, k, mmattn.plan(Mask(), q=q, k=k), None, options=Options(1.0, sinks=sinks), out=out, lse=lse)
    assert (out == 0).all() and (lse == sinks[None, :, None]).all()
    q = q[:, :0]
    fa4.forward(q, k, k, mmattn.plan(Mask(), q=q, k=k), None, options=Options(1.0), out=q.clone(), lse=None)


@needs_fa4
@pytest.mark.parametrize("seed", range(20))
def test_block_lists(seed: int) -> None:
    from mmattn.cute.fa4 import block_lists

    torch.manual_seed(seed)
    sequences, seqlen, keys = (int(torch.randint(1, most, ())) for most in (4, 50, 70))
    block_m, block_n = 4 << seed % 3, 4 << seed % 2
    lo = torch.randint(0, keys, (sequences, seqlen))
    hi = (lo + torch.randint(0, 60, (sequences, seqlen))).clamp(max=keys)
    if seed % 4:
        lo, hi = lo // 8, torch.maximum(hi, torch.tensor(keys - 3 * (seed % 4 - 1)))
    empty = torch.rand(sequences, seqlen) < 0.1 * (seed % 3)
    lo, hi = lo.masked_fill(empty, 0), hi.masked_fill(empty, 0)
    lists = block_lists(torch.stack([lo, hi], -1), keys, block_m, block_n)
    key = torch.arange(-(-keys // block_n) * block_n)
    for b in range(sequences):
        for m in range(-(-seqlen // block_m)):
            rows = slice(m * block_m, (m + 1) * block_m)
            seen = ((key >= lo[b, rows, None]) & (key < hi[b, rows, None])).unflatten(1, (-1, block_n))
            full = seen.all(2).all(0)
            partial = seen.any(2).any(0) & ~full
            for chosen, counts, index in ((partial, *lists[:2]), (full, *lists[2:4])):
                assert index[b, 0, m, : counts[b, 0, m]].tolist() == chosen.nonzero().flatten().tolist()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
