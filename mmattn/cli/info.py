"""`python -m mmattn info`: the facts that a bug report needs, as plain text."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from typing import Any

import click
import torch

import mmattn

from .. import dispatch
from ..mask import Mask

_PACKAGES = (
    "torch", "triton", "flash-attn-4", "nvidia-cutlass-dsl", "quack-kernels", "transformers", "numpy", "Pillow",
)  # fmt: skip
_ENVIRONMENT = (
    "MMATTN_", "TRITON_", "FLASH_ATTENTION_", "CUTE_DSL_", "CUDA_VISIBLE_DEVICES", "CUDA_LAUNCH_BLOCKING",
    "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "OMP_NUM_THREADS",
)  # fmt: skip
"""Names and beginnings of names of the variables that change what mmattn or its kernels do."""


_CAUSAL = Mask.causal_()


def _calls() -> list[tuple[str, dict[str, Any]]]:
    """The calls that are asked about: (name, what differs from a packed bfloat16 prefill)."""
    sliding = Mask.sliding_window(1024, mm_prefix_clamp=True)
    gemma4 = dict(mask=sliding, heads=(32, 16), dims=(256, 256), spans=True)
    return [
        ("Gemma 4 sliding, prefill", gemma4),
        ("Gemma 4 sliding, prefill, page size 16", {**gemma4, "page_size": 16}),
        ("Gemma 4 sliding, decode, page size 64", {**gemma4, "page_size": 64, "rows": 1}),
        ("Gemma 4 global, prefill", dict(heads=(32, 4), dims=(512, 512))),
        ("Gemma 3 global, prefill", dict(heads=(32, 16), dims=(128, 128), spans=True)),
        ("Gemma 2, soft cap", dict(mask=Mask.sliding_window(4096), heads=(16, 8), dims=(256, 256), softcap=50.0)),
        ("MiMo, sinks", dict(mask=Mask.sliding_window(128), heads=(64, 8), dims=(192, 128), sinks=True)),
        ("Gemma 4 sliding, float16", {**gemma4, "dtype": torch.float16}),
        ("Gemma 4 sliding, float32", {**gemma4, "dtype": torch.float32}),
        ("Gemma 4 sliding, inputs require grad", {**gemma4, "grad": True}),
    ]


def _supported(
    device: torch.device, *, mask: Mask = _CAUSAL, heads: tuple[int, int], dims: tuple[int, int], rows: int = 128,
    spans: bool = False, page_size: int | None = None, dtype: torch.dtype = torch.bfloat16, softcap: float | None = None,
    sinks: bool = False, grad: bool = False,
) -> dict[str, list[str]]:  # fmt: skip
    """Backend -> reasons, for tensors of this kind; their lengths do not matter."""

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device, requires_grad=grad)

    def numbers(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    keys = (128,) if page_size is None else (128 // page_size, page_size)
    batch: dict[str, Any] = dict(cu_seqlens_q=numbers(0, rows), mm_prefix_range=[[(4, 20)] if spans else []])
    if page_size is None:
        batch["cu_seqlens_k"] = numbers(0, 128)
    else:
        batch["seqused_k"] = numbers(128)
        batch["page_table"] = torch.arange(keys[0], dtype=torch.int32, device=device)[None]
    k, v = (empty(*keys, heads[1], dim) for dim in dims)
    return mmattn.supported(
        empty(rows, heads[0], dims[0]), k, v, mask, softcap=softcap,
        sinks=torch.empty(heads[0], device=device) if sinks else None, **batch,
    )  # fmt: skip


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _devices() -> list[tuple[torch.device, str]]:
    found = [(torch.device("cpu"), f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads")]
    for i in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(i)
        arch = f"compute capability {properties.major}.{properties.minor}"
        if torch.version.hip is not None:
            arch = getattr(properties, "gcnArchName", arch)
        text = f"{properties.name}, {arch}, {properties.total_memory / 2**30:.0f} GiB, {properties.multi_processor_count} processors"
        found.append((torch.device("cuda", i), text))
    return found


@click.command()
def info() -> None:
    """Versions, devices, and which backend runs what and why not: paste this into a bug report."""
    click.echo(f"mmattn {mmattn.__version__}")
    click.echo(f"Python {platform.python_version()} on {platform.platform()}")
    for package in _PACKAGES:
        click.echo(f"{package} {_version(package)}")
    runtime = (
        f"CUDA {torch.version.cuda}"
        if torch.version.cuda
        else f"ROCm {torch.version.hip}"
        if torch.version.hip
        else "CPU only"
    )
    click.echo(f"torch build: {runtime}")
    set_here = sorted(name for name in os.environ if name.startswith(_ENVIRONMENT))
    click.echo("\nenvironment: " + (", ".join(f"{name}={os.environ[name]}" for name in set_here) or "nothing set"))

    devices = _devices()
    click.echo("\ndevices")
    for device, text in devices:
        click.echo(f"  {device}: {text}")
    told: set[str] = set()
    for device, text in devices:
        if text in told:  # several GPUs of one kind
            continue
        told.add(text)
        click.echo(f"\nbackends on {device}")
        for name, call in _calls():
            click.echo(f"  {name}")
            click.echo("  " + dispatch.explain(_supported(device, **call)).replace("\n", "\n  "))
