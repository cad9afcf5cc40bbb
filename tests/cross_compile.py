"""Cross-compiles the Triton kernels for a GPU that need not be there: `python -m tests.cross_compile TARGET...`.

Arguments, constants and tiles are those of real launches: the host code runs on tensors without memory, and what it would
launch is recorded and compiled instead. Prints one JSON line per kernel. Must run without TRITON_INTERPRET.
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.tools.tensor_descriptor import TensorDescriptor

from mmattn import Mask, plan
from mmattn.batch import Batch
from mmattn.plan import Options
from mmattn.triton import backward, bounds, config, decode, forward
from mmattn.triton.config import Tile

KIB = 1024
# name -> (target, key of the tile table, shared memory of a block in bytes)
TARGETS = {
    "sm_80": (GPUTarget("cuda", 80, 32), "sm80", 163 * KIB),
    "sm_90": (GPUTarget("cuda", 90, 32), "sm90", 227 * KIB),
    "sm_100": (GPUTarget("cuda", 100, 32), "sm80", 227 * KIB),
    "gfx942": (GPUTarget("hip", "gfx942", 64), "small", 64 * KIB),
}
META = torch.device("meta")
Launch = tuple[Any, tuple, dict[str, Any]]


class Recorder:
    """Stands in for a kernel: `recorder[grid](*args, **kwargs)` notes the launch."""

    def __init__(self, kernel: Any, launches: list[Launch]) -> None:
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *args, **kwargs: self.launches.append((self.kernel, args, kwargs))


@contextlib.contextmanager
def recording(table: str, capability: int) -> Iterator[list[Launch]]:
    """Every launch of the package's kernels is noted, with tiles from this table, for this NVIDIA GPU (0: another)."""
    launches: list[Launch] = []
    kept = []
    for module in (bounds, forward, backward, decode):
        for name, value in vars(module).copy().items():
            if isinstance(value, triton.runtime.JITFunction) and name.endswith("_kernel"):
                kept.append((module, name, value))
                setattr(module, name, Recorder(value, launches))
        for name, value in (("architecture", table), ("ptx", capability)):
            if hasattr(module, name):
                kept.append((module, name, getattr(module, name)))
                setattr(module, name, lambda device, value=value: value)
    caches = [
        f for module in (forward, backward, decode, config) for f in vars(module).values() if hasattr(f, "cache_clear")
    ]
    for cached in caches:
        cached.cache_clear()
    try:
        yield launches
    finally:
        for module, name, value in kept:
            setattr(module, name, value)
        for cached in caches:
            cached.cache_clear()


def compile_launch(launch: Launch, target: GPUTarget) -> dict[str, Any]:
    """Compiles what a launch with these arguments would compile: same types, constants and alignments."""
    kernel, args, kwargs = launch
    options = {name: kwargs[name] for name in ("num_warps", "num_stages", "launch_pdl", "maxnreg") if name in kwargs}
    values = dict(zip(kernel.arg_names, args), **{k: v for k, v in kwargs.items() if k in kernel.arg_names})
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int, ...], list] = {}
    for at, parameter in enumerate(kernel.params):
        name, value = parameter.name, values[parameter.name]
        if parameter.is_constexpr or value is None:
            signature[name], constants[name] = "constexpr", value
        elif isinstance(value, TensorDescriptor):
            signature[name] = f"tensordesc<{element(value.base.dtype)}{list(value.block_shape)}>"
        elif isinstance(value, torch.Tensor):
            signature[name] = f"*{element(value.dtype)}"
            if not parameter.do_not_specialize:
                attributes[(at,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[name] = "fp32"
        else:
            signature[name] = "i64" if abs(value) >= 2**31 else "i32"
            if not parameter.do_not_specialize and value == 1:
                signature[name], constants[name] = "constexpr", 1
            elif not parameter.do_not_specialize and value % 16 == 0:
                attributes[(at,)] = [["tt.divisibility", 16]]
    done = triton.compile(ASTSource(kernel, signature, constants, attributes), target=target, options=options)
    return dict(kernel=kernel.__name__, shared=done.metadata.shared, **options, **usage(done, target))


def usage(done: Any, target: GPUTarget) -> dict[str, int]:
    """Registers of a thread, and how many programs a multiprocessor of an H100 (64 Ki registers, 228 KiB) then holds."""
    if target.backend != "cuda" or target.arch != 90:
        return {}
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(done.asm["cubin"])
        file.flush()
        tool = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        told = subprocess.run(tool, capture_output=True, text=True, check=True).stdout
    registers = int(re.findall(r"REG:(\d+)", told)[0])
    threads = 32 * done.metadata.num_warps
    return dict(
        registers=registers,
        spilled=int(re.findall(r"STACK:(\d+)", told)[0]),
        held=min(64 * KIB // (-(-registers // 8) * 8 * threads), 228 * KIB // (done.metadata.shared + KIB)),
    )


def element(dtype: torch.dtype) -> str:
    names = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.int16: "i16", torch.int32: "i32",
             torch.float8_e4m3fn: "fp8e4nv", torch.float8_e5m2: "fp8e5"}  # fmt: skip
    return names[dtype]


def forward_launches(
    d: int, dv: int, dtype: torch.dtype = torch.bfloat16, page: int = 0, softcap: bool = False, sinks: bool = False,
    strided: bool = False, rows: int = 512, group: int = 4, num_splits: int | None = None,
    keys_dtype: torch.dtype | None = None,
) -> None:  # fmt: skip
    """A forward over two sequences, on tensors without memory; `recording` notes what it launches."""
    half = torch.tensor([0, rows // 2, rows], dtype=torch.int32)
    keys = torch.tensor([0, 1024, 2048], dtype=torch.int32)
    q = torch.empty(rows, 2 * group, d, dtype=dtype, device=META)
    page_table = None
    if page:
        k, v = (torch.empty(256, page, 2, n, dtype=keys_dtype or dtype, device=META) for n in (d, dv))
        page_table = torch.zeros(2, 64, dtype=torch.int32)
        args: dict[str, Any] = dict(seqused_k=keys[1:] - keys[:-1], page_table=page_table)
    elif strided:
        k, v = (torch.empty(2, 2, 1024, n, dtype=dtype, device=META).transpose(1, 2) for n in (d, dv))
        args = dict(seqused_k=keys[1:] - keys[:-1])
    else:
        k, v = (torch.empty(2048, 2, n, dtype=dtype, device=META) for n in (d, dv))
        args = dict(cu_seqlens_k=keys)
    the_plan = plan(Mask.sliding_window(256), q=torch.empty(rows, 1, 1), k=torch.empty(k.shape, device=META),
                    cu_seqlens_q=half, max_seqlen_q=rows // 2, **args)  # fmt: skip
    options = Options(d**-0.5, softcap=30.0 if softcap else None, num_splits=num_splits,
                      sinks=torch.empty(2 * group, device=META) if sinks else None)  # fmt: skip
    out = torch.empty(rows, 2 * group, dv, dtype=dtype, device=META)
    lse = torch.empty(2 * group, rows, device=META)
    write = forward.settle(q, k, v, the_plan, page_table, options=options, out=out, lse=lse)
    write(q, k, v, the_plan, page_table, options=options, out=out, lse=lse)


def decode_launches(
    d: int, dv: int, keys_dtype: torch.dtype, rows: int, paged: bool = True, window: int | None = None
) -> Tile:
    """One row (or several) of one sequence against 128k keys, cut into splits; returns the tile."""
    q = torch.empty(1, rows, 8, d, dtype=torch.bfloat16, device=META)
    held = (8192, 16) if paged else (1, 131072)
    k, v = (torch.empty(*held, 2, n, dtype=keys_dtype, device=META) for n in (d, dv))
    pages = torch.zeros(1, 8192, dtype=torch.int32) if paged else None
    used = torch.tensor([131072], dtype=torch.int32)
    shape = torch.empty(1, rows, 1, 1)
    mask = Mask.causal_() if window is None else Mask.sliding_window(window)
    the_plan = plan(mask, q=shape, k=torch.empty(k.shape, device=META), page_table=pages, seqused_k=used)
    out = torch.empty(1, rows, 8, dv, dtype=torch.bfloat16, device=META)
    options = Options(d**-0.5)
    kept, decode.choose_splits = decode.choose_splits, lambda *_: 48
    try:
        write = forward.settle(q, k, v, the_plan, pages, options=options, out=out, lse=None)
    finally:
        decode.choose_splits = kept
    write(q, k, v, the_plan, pages, options=options, out=out, lse=None)
    return forward._short_tile(q, k, v, rows * 4, window or 131072, paged)


def backward_launches(
    d: int, dv: int, dtype: torch.dtype = torch.bfloat16, softcap: bool = False, sinks: bool = False, strided: bool = False,
    group: int = 4, tiles: config.BackwardTiles | None = None,
) -> None:  # fmt: skip
    """A backward over two sequences, on tensors without memory."""
    rows = torch.tensor([0, 256, 512], dtype=torch.int32)
    heads = 2 * group
    if strided:
        q, out = (torch.empty(2, heads, 256, n, dtype=dtype, device=META).transpose(1, 2) for n in (d, dv))
        k, v = (torch.empty(2, 2, 1024, n, dtype=dtype, device=META).transpose(1, 2) for n in (d, dv))
        lse, args = torch.empty(2, heads, 256, device=META), {}
    else:
        q, out = (torch.empty(512, heads, n, dtype=dtype, device=META) for n in (d, dv))
        k, v = (torch.empty(2048, 2, n, dtype=dtype, device=META) for n in (d, dv))
        lse = torch.empty(heads, 512, device=META)
        args = dict(cu_seqlens_q=rows, cu_seqlens_k=rows * 4, max_seqlen_q=256)
    the_plan = plan(
        Mask.sliding_window(256), q=torch.empty((*q.shape[:-2], 1, 1)), k=torch.empty(k.shape, device=META), **args
    )
    options = Options(d**-0.5, 30.0 if softcap else None, torch.empty(heads, device=META) if sinks else None)
    into = dict(dq=q, dk=k, dv=v, dsinks=options.sinks)
    call = (q, k, v, the_plan, out, lse, out, lse if sinks else None)
    backward.settle_backward(*call, options=options, tiles=tiles, **into)(*call, options=options, **into)


def bounds_launches(packed: bool) -> None:
    lens = torch.tensor([0, 40, 100], dtype=torch.int32)
    each = torch.tensor([40, 60], dtype=torch.int32)
    spans = torch.zeros(2, 5, 2, dtype=torch.int32)
    if packed:
        batch = Batch.build(q_shape=(100, 1, 1), k_shape=(100, 1, 1), cu_seqlens_q=lens, cu_seqlens_k=lens,
                            mm_prefix_range=spans)  # fmt: skip
    else:
        batch = Batch.build(q_shape=(2, 100, 1, 1), k_shape=(2, 100, 1, 1), seqused_k=each, q_start=each, kv_start=each,
                            kv_lo=each, causal=each, mm_prefix_query_range=torch.zeros(200, 2, dtype=torch.int32))  # fmt: skip
    lowering = bounds.DeviceLowering()
    for mask in (Mask.sliding_window(9), Mask.chunked(8)):
        rows = lowering.row_intervals(mask, batch)
    lowering.tile_table(rows, batch, 128, 4, 64)
    lowering.tile_table(rows, batch, 64, 3, 32)
    lowering.column_table(rows, batch, 100)


# What is compiled for every target. Head dims: each row of the tile tables and the ones with a tail.
EVERYWHERE: list[dict[str, Any]] = [
    dict(d=64, dv=64), dict(d=128, dv=128), dict(d=128, dv=128, page=16, softcap=True, sinks=True), dict(d=256, dv=256),
    dict(d=256, dv=256, page=64), dict(d=72, dv=72, page=16), dict(d=192, dv=128), dict(d=512, dv=512, page=16),
    dict(d=128, dv=128, dtype=torch.float32), dict(d=128, dv=128, rows=2, page=16, num_splits=4),
]  # fmt: skip
ONLY: dict[str, list[dict[str, Any]]] = {
    "sm_80": [dict(d=80, dv=80, strided=True), dict(d=512, dv=512, dtype=torch.float32)],
    # TMA descriptors, in each of the layouts that they describe
    "sm_90": [dict(d=128, dv=128, strided=True), dict(d=256, dv=256, strided=True), dict(d=256, dv=256, softcap=True),
              dict(d=512, dv=512), dict(d=256, dv=256, dtype=torch.float32),
              dict(d=128, dv=128, rows=2, page=16, num_splits=4, keys_dtype=torch.float8_e4m3fn),
              dict(d=192, dv=96, page=64, keys_dtype=torch.float8_e5m2)],
    "sm_100": [dict(d=256, dv=256, rows=2, page=16, num_splits=4, keys_dtype=torch.float8_e4m3fn)],
    "gfx942": [dict(d=256, dv=256, dtype=torch.float32),
               dict(d=128, dv=128, rows=2, page=16, num_splits=4, keys_dtype=torch.float8_e5m2)],
}  # fmt: skip


BACKWARD: list[dict[str, Any]] = [
    dict(d=64, dv=64, sinks=True), dict(d=128, dv=128), dict(d=128, dv=128, strided=True, softcap=True), dict(d=256, dv=256),
    dict(d=72, dv=72, group=1), dict(d=192, dv=128, group=3), dict(d=64, dv=64, dtype=torch.float32),
    dict(d=128, dv=128, dtype=torch.float32), dict(d=256, dv=256, dtype=torch.float32),
]  # fmt: skip


# (head dim of K, of V, dtype of the keys, rows, whether there are pages, window)
DECODE = [(d, dv, dtype, rows) for d, dv in ((64, 64), (128, 128), (192, 128), (256, 256), (512, 512))
          for dtype in (torch.bfloat16, torch.float8_e4m3fn) for rows in (1, 8)]  # fmt: skip
DECODE += [(d, d, torch.bfloat16, rows, False) for d in (128, 512) for rows in (1, 8)]
DECODE += [(d, d, dtype, 1, True, 1024) for d in (64, 128) for dtype in (torch.bfloat16, torch.float8_e4m3fn)]
DECODE += [(64, 64, torch.bfloat16, 16), (128, 128, torch.bfloat16, 16), (128, 128, torch.float8_e4m3fn, 16)]


def main(names: list[str]) -> None:
    for name in names:
        target, table, limit = TARGETS[name]
        jobs: list[tuple[str, Callable[[], Tile | None]]] = [
            (f"bounds packed={packed}", lambda packed=packed: bounds_launches(packed)) for packed in (True, False)
        ]
        jobs += [
            (f"forward {variant}", lambda variant=variant: forward_launches(**variant))
            for variant in EVERYWHERE + ONLY[name]
        ]
        jobs += [
            (f"decode {each}", lambda each=each: decode_launches(*each))
            for each in DECODE
            if name == "sm_90" or (target.backend == "cuda" and each[2:4] == (torch.bfloat16, 1))
        ]
        jobs += [(f"backward {variant}", lambda variant=variant: backward_launches(**variant)) for variant in BACKWARD]
        for job, launch in jobs:
            with recording(table, target.arch if target.backend == "cuda" else 0) as launches:
                tile = launch()
            assert launches, job
            for each in launches:
                done = compile_launch(each, target)
                if tile is not None and done["kernel"] == "_forward_kernel" and "held" in done:
                    done["programs"] = tile.programs
                uses_tma = any(isinstance(x, TensorDescriptor) for x in each[1])
                ahead = bool(each[2].get("AHEAD"))
                print(
                    json.dumps(dict(target=name, job=job, limit=limit, tma=uses_tma, ahead=ahead, **done)), flush=True
                )


if __name__ == "__main__":
    main(sys.argv[1:])
