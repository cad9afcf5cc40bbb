"""What the Triton backend can run. Imports no triton."""

from __future__ import annotations

import os
from functools import cache
from importlib import metadata
from importlib.util import find_spec

import torch

from ..batch import Call

MAX_HEAD_DIM = 512
MAX_GRADIENT_HEAD_DIM = 256


def interpreting() -> bool:
    """Whether Triton kernels run on the CPU, in Triton's interpreter."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def installed() -> bool:
    """Whether the package triton is there."""
    return find_spec("triton") is not None


@cache
def _interpreter_fault() -> str | None:
    """Triton 3.6's interpreter turns one-element arrays into numbers in a way that numpy 2.4 no longer allows."""
    triton, numpy = (tuple(int(n) for n in metadata.version(name).split(".")[:2]) for name in ("triton", "numpy"))
    if triton < (3, 7) and numpy >= (2, 4):
        return (
            f"the interpreter of Triton {metadata.version('triton')} needs numpy < 2.4, got {metadata.version('numpy')}"
        )
    return None


def why_not(call: Call) -> list[str]:
    """Every reason why this backend cannot run `call`."""
    reasons = []
    if not installed():
        reasons.append("the package triton is not installed (pip install triton)")
    if call.device_type == "cpu" and not interpreting():
        reasons.append(
            "tensors are on the CPU; set TRITON_INTERPRET=1 before the first call to run it in Triton's interpreter"
        )
    elif call.device_type == "cpu" and installed() and (fault := _interpreter_fault()) is not None:
        reasons.append(fault)
    elif call.device_type not in ("cpu", "cuda"):
        reasons.append(f"no Triton backend for device {call.device_type}")
    if call.capability is not None and call.capability < (7, 5):
        reasons.append(f"compute capability {call.capability[0]}.{call.capability[1]} is below 7.5")
    if call.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        reasons.append(f"dtype {str(call.dtype).removeprefix('torch.')} is not float16, bfloat16 or float32")
    elif call.dtype is torch.bfloat16 and call.capability is not None and call.capability < (8, 0):
        reasons.append("bfloat16 needs compute capability 8.0")
    if call.kv_dtype is not call.dtype and call.capability is not None and call.capability < (8, 9):
        reasons.append("float8 keys and values need compute capability 8.9")
    if max(call.head_dim, call.head_dim_v) > MAX_HEAD_DIM:
        reasons.append(f"head dims {call.head_dim}/{call.head_dim_v} exceed {MAX_HEAD_DIM}")
    return reasons


def why_no_gradients(call: Call) -> list[str]:
    """Every reason why this backend has no gradients for `call`, beside those of `why_not`."""
    reasons = []
    if call.page_size is not None:
        reasons.append("gradients of paged keys are not supported; give k and v packed or batched")
    if call.kv_dtype is not call.dtype:
        reasons.append("gradients of float8 keys and values are not supported; give k and v in q's dtype")
    if call.scales:
        reasons.append("gradients with k_scale or v_scale are not supported; multiply k and v by them before the call")
    if max(call.head_dim, call.head_dim_v) > MAX_GRADIENT_HEAD_DIM:
        dims = f"{call.head_dim}/{call.head_dim_v}"
        reasons.append(f"head dims {dims} exceed {MAX_GRADIENT_HEAD_DIM}, the largest with gradients")
    return reasons
