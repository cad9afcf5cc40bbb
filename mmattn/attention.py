"""The public operator: `attention()`, `plan()`, `supported()`, `merge_states()`."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from . import dispatch, operator
from .batch import Batch
from .checks import check, facts_of, options_of
from .mask import Mask
from .plan import Plan

_BATCH_ARGUMENTS = frozenset(
    "mm_prefix_range mm_prefix_query_range causal cu_seqlens_q cu_seqlens_k seqused_k page_table q_start kv_start "
    "kv_lo max_seqlen_q max_seqlen_k".split()
)


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
    requires_grad = operator.wants_grad(q, k, v, sinks, k_scale, v_scale)
    if isinstance(mask, Plan):
        _check_beside_plan(batch_args)
        the_plan = mask
    else:
        the_plan = operator.lowered(*_resolve(q, k, mask, batch_args))
    if not q.is_meta and torch.is_autocast_enabled(q.device.type):
        q, k, v = _autocast(q, k, v)
    page_table = batch_args.get("page_table")
    options: dict[str, Any] = dict(
        scale=scale, softcap=softcap, sinks=sinks, k_scale=k_scale, v_scale=v_scale, num_splits=num_splits, out=out,
        requires_grad=requires_grad, backend=backend,
    )  # fmt: skip
    if requires_grad or operator.seen(q, k, v, the_plan.rows):
        result, lse = operator.attend(q, k, v, the_plan, page_table, return_lse=return_lse, **options)
    else:
        keep = the_plan is mask
        result, lse = dispatch.attend(q, k, v, the_plan, page_table, with_lse=return_lse, keep=keep, **options)
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
    return operator.lowered(mask, batch)


def supported(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask | Plan, *, scale: float | None = None, softcap: float | None = None,
    sinks: Tensor | None = None, k_scale: Tensor | float | None = None, v_scale: Tensor | float | None = None,
    num_splits: int | None = None, out: Tensor | None = None, return_lse: bool = False, requires_grad: bool | None = None,
    **batch_args: Any,
) -> dict[str, list[str]]:  # fmt: skip
    """Backend -> every reason why it cannot run this call; `[]` means that it can.

    Takes the arguments of `attention()` and raises `ValueError` where no backend could make sense of them. With
    `requires_grad` the reasons are also about gradients; default: as the tensors and torch's grad mode say.
    """
    plain_mask, batch = _resolve(q, k, mask, batch_args)
    if requires_grad is None:
        requires_grad = operator.wants_grad(q, k, v, sinks, k_scale, v_scale)
    check(q, k, v, batch, scale, softcap, sinks, num_splits, out)
    options_of(q, k, batch, scale, softcap, sinks, k_scale, v_scale, num_splits)
    call = facts_of(
        q, k, v, plain_mask, batch, softcap, sinks, k_scale, v_scale, num_splits, out, requires_grad,
        traced=operator.seen(q, k, v),
    )  # fmt: skip
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
    top = states.detach().amax(0)  # it only steadies the exponentials: no gradient flows through it
    base = top.masked_fill(top == -math.inf, 0)
    weights = torch.exp(states - base)
    total = weights.sum(0)
    empty = total == 0
    total = total.masked_fill(empty, 1)
    # A part that saw nothing must not matter, whatever its output holds; neither must its gradient.
    columns = weights.transpose(-1, -2).unsqueeze(-1)
    parts = torch.stack([o.float() for o in outs]).masked_fill(columns == 0, 0)
    out = (columns * parts).sum(0) / total.transpose(-1, -2).unsqueeze(-1)
    return out.to(outs[0].dtype), (base + torch.log(total)).masked_fill(empty, -math.inf)


def _check_names(batch_args: dict[str, Any]) -> None:
    unknown = batch_args.keys() - _BATCH_ARGUMENTS
    if unknown:
        raise TypeError(
            f"unknown argument {', '.join(sorted(unknown))}; the batch arguments are {', '.join(sorted(_BATCH_ARGUMENTS))}"
        )


def _resolve(q: Tensor, k: Tensor, mask: Mask | Plan, batch_args: dict[str, Any]) -> tuple[Mask, Batch]:
    """Mask and batch of a call: the plan's, with the pages of this call, or the batch made from the batch arguments."""
    if isinstance(mask, Plan):
        _check_beside_plan(batch_args)
        return mask.mask, mask.batch.with_page_table(batch_args.get("page_table"))
    _check_names(batch_args)
    if not isinstance(mask, Mask):
        raise ValueError(f"mask must be a mmattn.Mask or a mmattn.Plan, got {type(mask).__name__}")
    for name, x in (("q", q), ("k", k)):
        if not isinstance(x, Tensor):
            raise ValueError(f"{name} must be a tensor, got {type(x).__name__}")
    batch = Batch.build(q_shape=q.shape, k_shape=k.shape, device=q.device, **batch_args)
    batch.check_mask(mask)
    return mask, batch


def _check_beside_plan(batch_args: dict[str, Any]) -> None:
    if len(batch_args) == ("page_table" in batch_args):
        return
    _check_names(batch_args)
    extra = [name for name, x in batch_args.items() if x is not None and name != "page_table"]
    if extra:
        raise ValueError(f"{', '.join(extra)} came with a Plan, which already holds the batch; pass them to plan()")


def _autocast(*inputs: Tensor) -> list[Tensor]:
    """q, k and v as autocast gives them to scaled_dot_product_attention: floating types but float64 become its type."""
    dtype = torch.get_autocast_dtype(inputs[0].device.type)
    wide = (torch.float16, torch.bfloat16, torch.float32)
    return [x.to(dtype) if x.dtype in wide else x for x in inputs]
