"""What the FlashAttention-4 backend can run, and by which module. Imports neither flash_attn nor cutlass."""

from __future__ import annotations

import re
from functools import cache
from importlib import metadata
from importlib.util import find_spec

import torch

from ..batch import Call

PACKAGE = "flash-attn-4"
PINNED = "4.0.0b36"
"""The release whose internals `interval_sm90.py` and `interval_backward_sm90.py` override."""
OLDEST = "4.0.0b34"
"""The first release whose interface takes what `fa4.py` needs: block lists at every head dim, with a block size."""
PAGED_HEAD_DIMS = frozenset((64, 80, 96, 128, 192, 256))
"""Measured against the oracle on an H200. 160 gave wrong results: FA4's copies of single page rows do not take every
width."""
ROW_INTERVALS = ".cute.sm90"
PUBLIC_API = ".cute.fa4"
BACKWARD = ".cute.backward_sm90"


@cache
def installed_version() -> str | None:
    """Version of the installed flash-attn-4 package, None where it cannot be imported."""
    if any(find_spec(module) is None for module in ("flash_attn", "cutlass", "quack")):
        return None
    try:
        return metadata.version(PACKAGE)
    except metadata.PackageNotFoundError:
        return None


def _order(version: str) -> tuple[object, ...]:
    """Sorts releases as PEP 440 does: a < b < rc < final."""
    found = re.match(r"(\d+)\.(\d+)\.(\d+)(?:(a|b|rc)(\d+))?", version)
    if found is None:
        return ()
    stage, number = found[4] or "release", found[5] or 0
    return (*(int(found[i]) for i in (1, 2, 3)), stage, int(number))


def module(call: Call) -> str:
    """The module whose `settle` runs `call`, relative to mmattn; `why_not(call)` must be empty."""
    return ROW_INTERVALS if call.capability == (9, 0) and installed_version() in (PINNED, None) else PUBLIC_API


def why_not(call: Call) -> list[str]:
    """Every reason why this backend cannot run `call`, each saying what to do; an empty list means that it can."""
    reasons = _installation_reasons(OLDEST)
    hopper = call.capability == (9, 0)
    if call.device_type != "cuda":
        reasons.append(f"tensors are on {call.device_type}; FlashAttention-4 needs an NVIDIA GPU")
    if call.capability is not None and not hopper and call.capability[0] not in (10, 11):
        major, minor = call.capability
        reasons.append(f"compute capability {major}.{minor} is not 9.0, 10.x or 11.x; use the triton backend")
    reasons += _type_reasons(call)
    if call.split_kv:
        reasons.append("few query rows need split-KV, which is not used here; use the triton backend")
    if call.num_splits:
        reasons.append("num_splits is not supported; use the triton backend")
    reasons += _head_dim_reasons(call, hopper)
    if not call.aligned:
        reasons.append(
            "q, k, v or out does not start at a multiple of 16 bytes, or has a stride that is not such a multiple; "
            "pass contiguous tensors"
        )
    if call.page_size is not None:
        if not set((call.head_dim, call.head_dim_v)) <= PAGED_HEAD_DIMS:
            listed = ", ".join(map(str, sorted(PAGED_HEAD_DIMS)))
            reasons.append(
                f"paged k and v with head dims {call.head_dim}/{call.head_dim_v}: only {listed} are known to be right; "
                "use the triton backend"
            )
        if call.capability is not None and module(call) == PUBLIC_API:
            reasons.append(
                f"FlashAttention-4 takes no block lists with paged k and v; only {PACKAGE} {PINNED} on compute "
                "capability 9.0 runs them here; use the triton backend"
            )
    return reasons


def why_no_gradients(call: Call) -> list[str]:
    """Every reason why this backend has no gradients for `call`, whose forward may have been another's.

    Strides and addresses do not matter: what the kernels cannot read is copied, as gradients from autograd may be anything.
    """
    reasons = _installation_reasons(PINNED)
    if call.device_type != "cuda" or call.capability not in (None, (9, 0)):
        where = call.device_type if call.capability is None else "compute capability {}.{}".format(*call.capability)
        reasons.append(f"gradients on {where}: only on compute capability 9.0; use the triton backend")
    reasons += _type_reasons(call)
    if call.page_size is not None:
        reasons.append("no gradients for paged k and v; pass k and v packed or batched")
    d, dv, group = call.head_dim, call.head_dim_v, call.heads_q // call.heads_kv
    if any(dim % 8 or not 8 <= dim <= 256 for dim in (d, dv)):
        reasons.append(f"gradients for head dims {d}/{dv}: only multiples of 8 up to 256; use the triton backend")
    elif d != dv and ((d, dv) != (192, 128) or group > 1):
        grouped = f" with {group} query heads per KV head" if group > 1 else ""
        reasons.append(
            f"gradients for head dims {d}/{dv}{grouped}: only equal ones, and 192/128 with one query head per KV head; "
            "use the triton backend"
        )
    return reasons


def _installation_reasons(oldest: str) -> list[str]:
    """Against the installed package. The pinned release is also the newest whose internals are known here."""
    version = installed_version()
    if version is None:
        return [f"the package {PACKAGE} is not installed (pip install {PACKAGE}=={PINNED})"]
    if oldest == PINNED and version != PINNED:
        return [f"gradients need {PACKAGE} {PINNED}, but {version} is installed (pip install {PACKAGE}=={PINNED})"]
    if _order(version) < _order(oldest):
        return [f"{PACKAGE} {version} is installed, but {oldest} or newer is needed (pip install {PACKAGE}=={PINNED})"]
    return []


def _type_reasons(call: Call) -> list[str]:
    reasons = []
    if call.dtype not in (torch.float16, torch.bfloat16):
        name = str(call.dtype).removeprefix("torch.")
        reasons.append(f"dtype {name} is not float16 or bfloat16; cast q, k and v or use the triton backend")
    if call.kv_dtype is not call.dtype or call.scales:
        reasons.append("no float8 keys and values or k_scale/v_scale; use the triton backend")
    return reasons


def _head_dim_reasons(call: Call, hopper: bool) -> list[str]:
    d, dv = call.head_dim, call.head_dim_v
    if any(dim % 8 for dim in (d, dv)):
        return [f"head dims {d}/{dv} are not multiples of 8; pad them or use the triton backend"]
    if hopper or call.capability is None:
        if not all(8 <= dim <= 256 for dim in (d, dv)):
            return [f"head dims {d}/{dv} are not between 8 and 256; use the triton backend"]
        if hopper and module(call) == PUBLIC_API and dv > d:
            return [
                f"head dims {d}/{dv}: only {PACKAGE} {PINNED} runs a wider v on compute capability 9.0; "
                "use the triton backend"
            ]
        return []
    if not (max(d, dv) <= 128 or (d, dv) in ((192, 128), (256, 256))):
        return [f"head dims {d}/{dv} are neither at most 128 nor 192/128 nor 256/256; use the triton backend"]
    return []
