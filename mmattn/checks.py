"""What a call must be: tensors against the batch and each other, on the host and before anything is written."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .batch import Batch, Call, capability, wants_both, wants_split
from .mask import Mask
from .plan import Options

_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_HALF = (torch.float16, torch.bfloat16)


def check(
    q: Tensor, k: Tensor, v: Tensor, batch: Batch, scale: float | None, softcap: float | None, sinks: Tensor | None,
    num_splits: int | None, out: Tensor | None,
) -> None:  # fmt: skip
    """Checks everything but the scales of k and v against the batch, on the host. Raises `ValueError`."""
    dtype, kv_dtype, device = q.dtype, k.dtype, q.device
    for name, x in (("k", k), ("v", v)):
        if x.dtype is not kv_dtype or (kv_dtype is not dtype and (kv_dtype not in _FLOAT8 or dtype not in _HALF)):
            raise ValueError(
                f"{name} must have q's dtype {dtype} (or both k and v one float8 type, with half-precision q), got {x.dtype}"
            )
        if x.device != device:
            raise ValueError(f"{name} must be on q's device {device}, got {x.device}")
    if batch.device != device:
        raise ValueError(f"the plan is on {batch.device}, but q is on {device}")
    q_shape, k_shape, v_shape = q.shape, k.shape, v.shape
    dims_q, dims_k = len(q_shape), len(k_shape)
    if dims_q not in (3, 4) or dims_k not in (3, 4):
        raise ValueError(f"q and k must have 3 or 4 dims, got {list(q_shape)} and {list(k_shape)}")
    heads_q, head_dim = q_shape[-2:]
    heads_kv, head_dim_v = v_shape[-2:]
    if v_shape[:-1] != k_shape[:-1]:
        raise ValueError(f"v must have k's shape up to the last dim, {list(k_shape[:-1])}, got {list(v_shape)}")
    if k_shape[-1] != head_dim:
        raise ValueError(f"k must have q's head dim {head_dim}, got {k_shape[-1]} (only v's may differ)")
    if heads_kv == 0 or heads_q % heads_kv:
        raise ValueError(f"the {heads_kv} heads of k and v must divide the {heads_q} heads of q")
    if head_dim == 0 or head_dim_v == 0:
        raise ValueError(f"head dims must be positive, got {head_dim} and {head_dim_v}")
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.stride(-1) != 1 and x.shape[-1] != 1:
            raise ValueError(f"{name} must have last stride 1, got strides {x.stride()}; call .contiguous()")

    rows = q_shape[0] if dims_q == 3 else q_shape[0] * q_shape[1]
    if batch.seqlen_q is None:
        if dims_q != 3 or rows != batch.total_q:
            raise ValueError(
                f"the plan holds {batch.total_q} packed rows, got q of shape {list(q_shape)} (plan() takes q or total_q)"
            )
    elif (
        (q_shape[0], q_shape[1]) != (batch.batch_size, batch.seqlen_q)
        if dims_q == 4
        else (batch.batch_size, batch.seqlen_q) != (1, rows)
    ):
        raise ValueError(
            f"the plan holds {batch.batch_size} sequences of {batch.seqlen_q} rows, got q of shape {list(q_shape)}"
        )
    paged = batch.page_table is not None
    if paged:
        if dims_k != 4:
            raise ValueError(f"page_table goes with pages [P, page, Hkv, D], got k of shape {list(k_shape)}")
        if k_shape[1] == 0:
            raise ValueError(f"pages must hold at least one key, got k of shape {list(k_shape)}")
    elif batch.cu_seqlens_k is not None:
        if dims_k != 3:
            raise ValueError(f"cu_seqlens_k goes with packed k [Tk, Hkv, D], got {list(k_shape)}")
    else:
        held = (k_shape[0], k_shape[1]) if dims_k == 4 else (1, k_shape[0])
        if held[0] != batch.batch_size or (batch.seqlen_k is not None and held[1] != batch.seqlen_k):
            want = f"{batch.batch_size} sequences" + ("" if batch.seqlen_k is None else f" of {batch.seqlen_k} keys")
            raise ValueError(f"k must hold {want}, got shape {list(k_shape)} (paged k needs page_table)")

    if sinks is not None and (
        tuple(sinks.shape) != (heads_q,) or sinks.device != device or not sinks.dtype.is_floating_point
    ):
        raise ValueError(
            f"sinks must be a floating-point tensor [{heads_q}] on {device}, got {sinks.dtype} {list(sinks.shape)} on {sinks.device}"
        )
    if num_splits is not None and (
        isinstance(num_splits, bool) or not isinstance(num_splits, int) or not 1 <= num_splits <= 256
    ):
        raise ValueError(f"num_splits must be None or an integer in 1..256, got {num_splits!r}")
    if scale is not None and not 0 <= scale < math.inf:
        raise ValueError(f"scale must be finite and >= 0, got {scale}")
    if softcap is not None and not 0 < softcap < math.inf:
        raise ValueError(f"softcap must be None or a finite number > 0, got {softcap}")
    if out is not None:
        want_shape = (*q_shape[:-1], head_dim_v)
        if (
            tuple(out.shape) != want_shape
            or out.dtype is not dtype
            or out.device != device
            or (out.stride(-1) != 1 and head_dim_v != 1)
        ):
            raise ValueError(
                f"out must be {dtype} {list(want_shape)} on {device} with last stride 1, "
                f"got {out.dtype} {list(out.shape)} on {out.device} with strides {out.stride()}"
            )


def facts_of(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, batch: Batch, softcap: float | None, sinks: Tensor | None,
    k_scale: Tensor | float | None, v_scale: Tensor | float | None, num_splits: int | None, out: Tensor | None,
    requires_grad: bool, traced: bool = False,
) -> Call:  # fmt: skip
    """The static facts of a checked call.

    With `traced` lengths may be symbols and tensors may have no address: facts that would tie a graph to them are left at what
    most backends can run.
    """
    heads_q, head_dim, heads_kv, head_dim_v = (int(n) for n in (*q.shape[-2:], *v.shape[-2:]))
    return Call(
        device_type=q.device.type, capability=capability(q.device), dtype=q.dtype, kv_dtype=k.dtype,
        heads_q=heads_q, heads_kv=heads_kv, head_dim=head_dim, head_dim_v=head_dim_v,
        packed_q=batch.cu_seqlens_q is not None, packed_k=batch.cu_seqlens_k is not None,
        page_size=None if batch.page_table is None else int(k.shape[1]),
        aligned=traced or all(x is None or _aligned(x) for x in (q, k, v, out)),
        split_kv=not traced and wants_split(mask, batch, heads_q // heads_kv, heads_kv, max(head_dim, head_dim_v)),
        mixed=not traced and wants_both(mask, batch, heads_kv),
        softcap=softcap is not None, sinks=sinks is not None, scales=k_scale is not None or v_scale is not None,
        num_splits=num_splits is not None, out=out is not None, grad=requires_grad,
    )  # fmt: skip


def options_of(
    q: Tensor, k: Tensor, batch: Batch, scale: float | None, softcap: float | None, sinks: Tensor | None,
    k_scale: Tensor | float | None, v_scale: Tensor | float | None, num_splits: int | None,
) -> Options:  # fmt: skip
    """The options of a checked call; checks the scales of k and v."""
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    shape = batch.batch_size, k.shape[-2]
    if k_scale is not None:
        k_scale = _kv_scale("k_scale", k_scale, *shape, q.device)
    if v_scale is not None:
        v_scale = _kv_scale("v_scale", v_scale, *shape, q.device)
    return Options(scale, softcap, sinks, k_scale, v_scale, num_splits)


def kind_of(x: Any) -> Any:
    """What a kernel may be chosen and compiled by: all of a tensor but its values. Calls of one kind need one check."""
    if isinstance(x, Tensor):
        return x.dtype, x.device, x.shape, x.stride(), x.data_ptr() % 16, x.requires_grad
    if type(x) in (int, float):
        return x
    return object()  # whatever it is, it is of no kind seen before


def _kv_scale(name: str, x: Any, batch_size: int, heads_kv: int, device: torch.device) -> Tensor:
    """A scale as a float32 `[B, Hkv]` view."""
    if isinstance(x, (int, float)) and not isinstance(x, bool):
        x = torch.full((1, 1), float(x), device=device)
    fits = isinstance(x, Tensor) and x.dtype is torch.float32 and x.device == device
    if not fits or (x.numel() != 1 and tuple(x.shape) != (batch_size, heads_kv)):
        got = f"{x.dtype} {list(x.shape)} on {x.device}" if isinstance(x, Tensor) else repr(x)
        raise ValueError(
            f"{name} must be a number, or a float32 tensor of one element or [{batch_size}, {heads_kv}] on {device}, got {got}"
        )
    if x.numel() == 1:
        x = x.reshape(1, 1)
    view: Tensor = x.expand(batch_size, heads_kv)
    return view


def _aligned(x: Tensor) -> bool:
    size = x.element_size()
    return x.data_ptr() % 16 == 0 and all(stride * size % 16 == 0 for stride in x.stride()[:-1])
