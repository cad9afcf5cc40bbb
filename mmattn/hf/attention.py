"""The attention side: what transformers calls in every layer."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ..attention import attention
from ..dispatch import UnsupportedError
from ..mask import Mask
from .intervals import HIDDEN, About, IntervalMask, rows_in_chunks
from .model_classes import eager_shows_all_keys, is_encoder, model_name
from .traced import traced_dense, traced_plan

log = logging.getLogger(__name__)

_CHANGES_THE_RESULT = ("position_bias", "cache", "head_mask", "alibi", "sinks", "indices", "block_indices")
"""Keyword arguments of some models that this attention has no answer to."""

_converted: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Dense mask -> (version, fallback, the same mask in intervals): the layers of a model share one tensor."""


def attention_function(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    *,
    backend: str = "auto",
    fallback: str | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """An attention function for `transformers.AttentionInterface`.

    Args:
        query: `[B, Hq, Q, D]`; key: `[B, Hkv, K, D]`; value: `[B, Hkv, K, Dv]`, strided as the model has them.
        attention_mask: an `IntervalMask`; a dense `[B, 1, Q, K]` mask (bool, or float of zeros and numbers up to `HIDDEN`)
            that is one key interval per row; or None.
        is_causal, sliding_window: only used without a mask, which holds them already. The window is then
            `q - k < sliding_window`, on both sides where not causal.
        s_aux: sinks, `[Hq]`.

    Returns:
        `([B, Q, Hq, Dv], None)`: attention weights are never formed.

    Raises:
        UnsupportedError: names the layer and what it cannot do: dropout, a bias, several key ranges in a row, ...
    """
    where = _name(module)
    reasons = [f"{name} is given" for name in _CHANGES_THE_RESULT if kwargs.get(name) is not None]
    if dropout:
        reasons.append(f"dropout={dropout}; set attention_dropout=0 in the config, or train with sdpa or eager")
    if kwargs.get("output_attentions"):
        reasons.append("output_attentions=True: the weights are never formed; load the model with eager attention")
    if reasons:
        raise UnsupportedError(f"{where}: mmattn does not support this call:\n" + "\n".join(f"  {r}" for r in reasons))
    q, k, v = (_rows_first(x) for x in (query, key, value))
    options: dict[str, Any] = dict(scale=scaling, softcap=softcap, sinks=s_aux, backend=backend)
    cu_seqlens = kwargs.get("cu_seq_lens_q")

    if attention_mask is None:
        causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
        if causal and is_causal is None and q.shape[1] > 1 and is_encoder(getattr(module, "config", None)):
            if not eager_shows_all_keys(type(module).__module__):
                raise UnsupportedError(
                    f"{where}: no attention mask came, the module says is_causal and its config is_decoder=False: such rows "
                    "see all keys or only those before them, and its eager attention does not tell. Load this model with "
                    "the attention that you trust"
                )
            causal = False
        mask = Mask(causal=causal, window_left=None if sliding_window is None else sliding_window - 1)
        if cu_seqlens is not None:
            return _packed(where, q, k, v, mask, cu_seqlens, kwargs, options), None
        if causal and q.shape[1] not in (1, k.shape[1]):
            raise UnsupportedError(
                f"{where}: {q.shape[1]} causal rows over {k.shape[1]} keys came without an attention_mask, so the positions "
                "of the rows are unknown; the model must build its mask with transformers.masking_utils"
            )
        return attention(q, k, v, mask, **options), None

    intervals = _as_intervals(where, attention_mask, query, key, fallback)
    if torch.compiler.is_compiling():
        return attention(q, k, v, traced_plan(where, intervals, cu_seqlens), **options), None
    if cu_seqlens is not None:
        intervals = _within_documents(where, intervals, cu_seqlens)
    if intervals.about.refusal is not None:
        if intervals.elements is None:
            raise UnsupportedError(
                f"{where}: {intervals.about.refusal}, but mmattn needs one contiguous range of keys per row "
                f"({intervals.about.origin}). Load this model with another attn_implementation, or call "
                'mmattn.hf.register(fallback="sdpa") to run such layers with sdpa and a dense mask'
            )
        return _sdpa(where, module, query, key, value, intervals, scaling, softcap, s_aux)
    return attention(q, k, v, intervals.plan, **options), None


def _name(module: torch.nn.Module) -> str:
    model, layer = model_name(getattr(module, "config", None)), getattr(module, "layer_idx", None)
    return f"{model or 'a model'}, layer {'?' if layer is None else layer} ({type(module).__name__})"


def _rows_first(x: Tensor) -> Tensor:
    """`[B, H, S, D]` -> `[B, S, H, D]`: a view, except where the elements of a head lie apart, which no kernel takes."""
    x = x.transpose(1, 2)
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _packed(
    where: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    cu_seqlens: Tensor,
    kwargs: dict[str, Any],
    options: dict[str, Any],
) -> Tensor:
    """Sequences packed in one batch row, told apart by `cu_seq_lens_q` and `cu_seq_lens_k` alone."""
    if q.shape[0] != 1:
        raise UnsupportedError(f"{where}: cu_seq_lens_q goes with one packed batch row, got a batch of {q.shape[0]}")
    cu_seqlens_k = kwargs.get("cu_seq_lens_k")
    ends = [x.to(q.device, torch.int32) for x in (cu_seqlens, cu_seqlens if cu_seqlens_k is None else cu_seqlens_k)]
    longest: dict[str, Any] = {
        f"max_seqlen_{side}": None if (n := kwargs.get(f"max_length_{side}")) is None else int(n) for side in "qk"
    }
    out = attention(q[0], k[0], v[0], mask, cu_seqlens_q=ends[0], cu_seqlens_k=ends[1], **longest, **options)
    return out[None]


def _within_documents(where: str, mask: IntervalMask, cu_seqlens: Tensor) -> IntervalMask:
    """The mask, with packed sequences also told apart where the model left them out of its mask (gpt-oss does)."""
    count = cu_seqlens.numel() - 1
    if mask.about.documents is not None:
        if mask.about.documents != count:
            raise UnsupportedError(
                f"{where}: cu_seq_lens_q describes {count} sequences, but the position_ids restart {mask.about.documents} times"
            )
        return mask
    if mask.shape[0] != 1 or mask.shape[2] != mask.shape[3]:
        raise UnsupportedError(
            f"{where}: cu_seq_lens_q goes with one packed batch row and no cache, got a mask of shape {list(mask.shape)}"
        )
    if count <= 1 or mask.about.refusal is not None:
        return mask
    return mask.within(cu_seqlens)


def _as_intervals(where: str, mask: Tensor, query: Tensor, key: Tensor, fallback: str | None) -> IntervalMask:
    """The mask of this call in intervals, in the size of the call. Raises `UnsupportedError`."""
    want = (query.shape[0], 1, query.shape[2], key.shape[2])
    if not isinstance(mask, IntervalMask) and torch.compiler.is_compiling():
        return traced_dense(mask, want, About("a dense mask", model=where.split(",")[0], fallback=fallback))
    if not isinstance(mask, IntervalMask):
        entry = _converted.get(mask)
        if entry is not None and entry[:2] == (mask._version, fallback) and tuple(entry[2].shape) == want:
            return entry[2]
        intervals = _from_dense(where, mask, want, fallback)
        _converted[mask] = (mask._version, fallback, intervals)
        return intervals
    if any(have == 1 != n for have, n in zip(mask.shape, want)):
        mask = cast(IntervalMask, mask.expand(want[0], -1, want[2] if mask.shape[2] == 1 else -1, -1))
    if tuple(mask.shape) != want:
        raise UnsupportedError(
            f"{where}: the attention mask is {list(mask.shape)}, but the layer's q and k need {list(want)}"
        )
    return mask


def _from_dense(where: str, mask: Tensor, want: tuple[int, int, int, int], fallback: str | None) -> IntervalMask:
    """A dense mask in intervals. With a fallback, one that is something else comes back with its elements."""
    if mask.dtype != torch.bool and not mask.dtype.is_floating_point:
        raise UnsupportedError(f"{where}: the attention mask must be bool or floating-point, got {mask.dtype}")
    try:
        heads = mask.shape[1] if mask.dim() == 4 else 0
        visible = mask.expand(want[0], heads, *want[2:])
    except RuntimeError:
        heads = 0
    if heads == 0:
        raise UnsupportedError(
            f"{where}: the attention mask must be {list(want)} (or broadcast to it), got {list(mask.shape)}"
        )
    problem = None
    if heads > 1 and not bool((mask == mask[:, :1]).all()):
        problem = "the attention mask differs between heads"
    elif mask.dtype != torch.bool:
        hidden = mask <= HIDDEN
        visible = (~hidden).expand(want[0], heads, *want[2:])
        if not bool((hidden | (mask == 0)).all()):
            problem = "the attention mask holds biases, not only zeros and minus infinities"
    about = About("a dense mask", model=where.split(",")[0], fallback=fallback)
    if problem is not None:
        rows = torch.zeros(want[0], want[2], 2, dtype=torch.int32, device=mask.device)
        elements = mask
    else:
        elements = visible[:, :1]
        rows, problem = rows_in_chunks(lambda s, e: elements[:, 0, s:e], want[0], want[2], want[3], 0, 0)
    # A copy: `_converted` must not keep its own key alive, and the user may write into the mask.
    kept = elements.clone() if problem and fallback == "sdpa" else None
    return IntervalMask(rows, want[3], replace(about, refusal=problem), elements=kept)


def _sdpa(
    where: str, module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: IntervalMask,
    scaling: float | None, softcap: float | None, s_aux: Tensor | None,
) -> tuple[Tensor, None]:  # fmt: skip
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    why = mask.about.refusal
    lost = [name for name, x in (("softcap", softcap), ("s_aux (sinks)", s_aux)) if x is not None]
    if lost:
        raise UnsupportedError(f"{where}: {why}, and sdpa has no {' and no '.join(lost)} to fall back on")
    log.warning("%s: %s; this layer runs with sdpa and a dense mask", where, why)
    return sdpa_attention_forward(module, query, key, value, mask.dense(), scaling=scaling, is_causal=False)
