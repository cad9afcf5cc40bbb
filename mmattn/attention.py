"""The public operator: `attention()`, `plan()`, `supported()`, `merge_states()`."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from . import dispatch
from .batch import Batch, Call, capability, debugging, wants_both, wants_split
from .mask import Mask
from .plan import Options, Plan

_BATCH_ARGUMENTS = frozenset(
    "mm_prefix_range mm_prefix_query_range causal cu_seqlens_q cu_seqlens_k seqused_k page_table q_start kv_start "
    "kv_lo max_seqlen_q max_seqlen_k".split()
)


_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_HALF = (torch.float16, torch.bfloat16)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | Plan,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | float | None = None,
    v_scale: Tensor | float | None = None,
    num_splits: int | None = None,
    out: Tensor | None = None,
    return_lse: bool = False,
    backend: str = "auto",
    **batch_args: Any,
) -> Any:
    """Attention in which every query row sees what `mask` says, in absolute positions.

    Args:
        q: `[T, Hq, D]` packed, or `[B, S, Hq, D]`. float16, bfloat16 or float32 (torch backend: any floating type).
        k, v: `[Tk, Hkv, D]` packed, `[B, Sk, Hkv, D]`, or pages `[P, page, Hkv, D]` with `page_table`. The last dim of v
            may differ. Hkv divides Hq. A last stride other than 1 is refused; every other stride is free.
        mask: a `Mask`, or a `Plan` from `plan()`, which carries the batch arguments already.
        scale: multiplies the scores; default `D**-0.5`.
        softcap: `softcap * tanh(score / softcap)` on scaled scores, before the mask.
        sinks: `[Hq]`, one value-less logit per head in the softmax denominator; not scaled or capped; `-inf` = none.
        k_scale, v_scale: what stored keys and values are multiplied by: float32 `[B, Hkv]`, a one-element tensor, or a number.
            With or without them k and v may be float8_e4m3fn or float8_e5m2 while q is float16 or bfloat16; Triton then
            multiplies in float16.
        num_splits: cut the keys of every sequence into this many parts, and choose tiles without regard to the batch:
            the bits of a sequence then do not depend on its batch mates. Default: as many as the batch needs.
        out: where to write the result. Not together with inputs that require grad.
        return_lse: also return the log-sum-exp.
        backend: "auto", "cute", "triton" or "torch". A backend that is named and cannot run the call raises.

    Batch arguments (int32 tensors on q's device; `[B]` unless said otherwise):
        mm_prefix_range: spans that see themselves in both directions: per sequence a list of inclusive absolute
            `(start, end)`, or `[B, R, 2]` in any order with no-op padding (`start >= end`).
        mm_prefix_query_range: instead, the span of each row, `[T, 2]` or `[B, S, 2]`, `(-1, -1)` = none.
        causal: non-zero = causal; overrides `mask.causal` per sequence.
        cu_seqlens_q, cu_seqlens_k: `[B + 1]`, where each packed sequence starts. Rows of q past the last sequence get
            output 0 and LSE -inf (or the sink).
        seqused_k: valid keys of each sequence, of batched or paged k. Slots behind them may hold anything.
        page_table: `[B, max_pages]`. Entries that no row needs may hold anything.
        q_start: absolute position of row 0; default `kv_start + kv_len - q_len` (the last row meets the last key).
        kv_start: absolute position of key 0; default 0.
        kv_lo: absolute position of the first valid key (left padding); default `kv_start`.
        max_seqlen_q, max_seqlen_k: host integers, upper bounds for scheduling. Lengths are never read from the device.

    Returns:
        out, in q's shape with v's last dim and q's dtype; with `return_lse` the pair (out, lse), where lse is natural log,
        float32, `[Hq, T]` packed or `[B, Hq, S]` batched. A row that sees no key gives 0 and LSE -inf (with a sink: the sink).

    Raises:
        ValueError: an argument does not fit; names it, what was expected and what came. Nothing was written.
        MaskError: an impossible mask; names the sequence and the span.
        UnsupportedError: no backend can run the call; lists each with every reason.
    """
    given = mask if isinstance(mask, Plan) else None
    page_table = batch_args.get("page_table")
    kind = known = None
    if given is not None and len(batch_args) == ("page_table" in batch_args) and not given.debug:
        facts = (q, k, v, page_table, sinks, k_scale, v_scale, out, scale, softcap, num_splits)
        kind = (backend, return_lse, torch.is_grad_enabled(), *[None if x is None else _kind(x) for x in facts])
        known = given.forwards.get(kind)
    if given is not None and known is not None:  # a call like one before with this plan: checked, its kernel is ready
        forward, options = known
        the_plan = given
        if page_table is None:
            page_table = given.batch.page_table
    else:
        plain_mask, batch = _resolve(q, k, mask, batch_args)
        call = _check(q, k, v, plain_mask, batch, scale, softcap, sinks, k_scale, v_scale, num_splits, out)
        forward, options = dispatch.choose(call, backend)(), None
        the_plan = given or Plan(plain_mask, batch, dispatch.lowering(q.device.type))
        page_table = batch.page_table
        if page_table is not None and debugging():
            batch.check_pages(k.shape[1], k.shape[0], the_plan.rows)
    if options is None:
        options = _options(q, k, the_plan.batch, scale, softcap, sinks, k_scale, v_scale, num_splits)
    if kind is not None and known is None:
        the_plan.remember(kind, forward, options)
    result, lse = forward(q, k, v, the_plan, page_table, options=options, out=out, with_lse=return_lse)
    return (result, lse) if return_lse else result


def plan(
    mask: Mask,
    *,
    q: Tensor | None = None,
    k: Tensor | None = None,
    batch_size: int | None = None,
    total_q: int | None = None,
    device: torch.device | str | None = None,
    **batch_args: Any,
) -> Plan:
    """Lowers `mask` for one batch. Build it once per layer kind and pass it to `attention()` in every layer.

    Takes the batch arguments of `attention()`. Sizes that those do not tell come from `q` and `k` (only shapes and
    device are looked at) or from `total_q` (packed rows), `max_seqlen_q`, `max_seqlen_k` and `batch_size`: without
    `cu_seqlens_q` every sequence has exactly `max_seqlen_q` rows, and without any length of k exactly `max_seqlen_k`
    keys. The plan is a snapshot of the lengths and spans; a CUDA graph that captures `plan()` recomputes it at replay.
    """
    _check_names(batch_args)
    if not isinstance(mask, Mask):
        raise ValueError(f"mask must be a mmattn.Mask, got {type(mask).__name__}")
    if q is not None:
        device = q.device
    batch = Batch.build(
        q_shape=None if q is None else q.shape, k_shape=None if k is None else k.shape,
        device=device, batch_size=batch_size, total_q=total_q, **batch_args,
    )  # fmt: skip
    return Plan(mask, batch, dispatch.lowering(batch.device.type))


def supported(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask | Plan, *, scale: float | None = None, softcap: float | None = None,
    sinks: Tensor | None = None, k_scale: Tensor | float | None = None, v_scale: Tensor | float | None = None,
    num_splits: int | None = None, out: Tensor | None = None, return_lse: bool = False, **batch_args: Any,
) -> dict[str, list[str]]:  # fmt: skip
    """Backend -> every reason why it cannot run this call; `[]` means that it can.

    Takes the arguments of `attention()` and raises `ValueError` where no backend could make sense of them.
    """
    plain_mask, batch = _resolve(q, k, mask, batch_args)
    call = _check(q, k, v, plain_mask, batch, scale, softcap, sinks, k_scale, v_scale, num_splits, out)
    _options(q, k, batch, scale, softcap, sinks, k_scale, v_scale, num_splits)
    return dispatch.reasons(call)


def merge_states(outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Combines partial results over disjoint keys into the result over all of them.

    `outs` are `[T, Hq, D]` or `[B, S, Hq, D]`, `lses` natural log `[Hq, T]` or `[B, Hq, S]`, as `attention()` returns
    them. Returns out (dtype of the first) and lse (float32). Empty parts (LSE -inf) change no bit; all empty gives 0
    and -inf. Parts that hold a sink would count it once each: give the sink to one part only.
    """
    if not outs or len(outs) != len(lses):
        raise ValueError(f"merge_states needs as many lses as outs, at least one; got {len(outs)} and {len(lses)}")
    for i, (o, s) in enumerate(zip(outs, lses)):
        want = (o.shape[1], o.shape[0]) if o.dim() == 3 else (o.shape[0], *o.shape[-2:-4:-1])
        if o.shape != outs[0].shape or tuple(s.shape) != want:
            raise ValueError(
                f"outs[{i}] {list(o.shape)} and lses[{i}] {list(s.shape)} do not fit outs[0] {list(outs[0].shape)}: "
                f"lses[{i}] must be {list(want)}"
            )
    states = torch.stack([s.float() for s in lses])
    top = states.amax(0)
    base = top.masked_fill(top == -math.inf, 0)
    weights = torch.exp(states - base)
    total = weights.sum(0)
    # A part that saw nothing must not matter, whatever its output holds.
    columns = weights.transpose(-1, -2).unsqueeze(-1)
    merged = torch.where(columns > 0, columns * torch.stack([o.float() for o in outs]), 0).sum(0)
    out = merged / total.masked_fill(total == 0, 1).transpose(-1, -2).unsqueeze(-1)
    return out.to(outs[0].dtype), base + torch.log(total)


def _check_names(batch_args: dict[str, Any]) -> None:
    unknown = batch_args.keys() - _BATCH_ARGUMENTS
    if unknown:
        raise TypeError(
            f"unknown argument {', '.join(sorted(unknown))}; the batch arguments are {', '.join(sorted(_BATCH_ARGUMENTS))}"
        )


def _resolve(q: Tensor, k: Tensor, mask: Mask | Plan, batch_args: dict[str, Any]) -> tuple[Mask, Batch]:
    """Mask and batch of a call: the plan's, with the pages of this call, or the batch made from the batch arguments."""
    _check_names(batch_args)
    if isinstance(mask, Plan):
        extra = [name for name, x in batch_args.items() if x is not None and name != "page_table"]
        if extra:
            raise ValueError(f"{', '.join(extra)} came with a Plan, which already holds the batch; pass them to plan()")
        return mask.mask, mask.batch.with_page_table(batch_args.get("page_table"))
    if not isinstance(mask, Mask):
        raise ValueError(f"mask must be a mmattn.Mask or a mmattn.Plan, got {type(mask).__name__}")
    for name, x in (("q", q), ("k", k)):
        if not isinstance(x, Tensor):
            raise ValueError(f"{name} must be a tensor, got {type(x).__name__}")
    batch = Batch.build(q_shape=q.shape, k_shape=k.shape, device=q.device, **batch_args)
    batch.check_mask(mask)
    return mask, batch


def _check(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, batch: Batch, scale: float | None, softcap: float | None,
    sinks: Tensor | None, k_scale: Tensor | float | None, v_scale: Tensor | float | None, num_splits: int | None,
    out: Tensor | None,
) -> Call:  # fmt: skip
    """Checks everything but the scales of k and v against the batch, on the host; returns the call's static facts."""
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
    inputs = (q, k, v, sinks, k_scale, v_scale)
    grad = torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in inputs)
    return Call(
        device_type=device.type, capability=capability(device), dtype=dtype, kv_dtype=kv_dtype,
        heads_q=heads_q, heads_kv=heads_kv, head_dim=head_dim, head_dim_v=head_dim_v,
        packed_q=batch.cu_seqlens_q is not None, packed_k=batch.cu_seqlens_k is not None,
        page_size=k_shape[1] if paged else None, aligned=all(x is None or _aligned(x) for x in (q, k, v, out)),
        split_kv=wants_split(mask, batch, heads_q // heads_kv, heads_kv, max(head_dim, head_dim_v)),
        mixed=wants_both(mask, batch, heads_kv),
        softcap=softcap is not None, sinks=sinks is not None, scales=k_scale is not None or v_scale is not None,
        num_splits=num_splits is not None, out=out is not None, grad=grad,
    )  # fmt: skip


def _options(
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


def _kind(x: Any) -> Any:
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
