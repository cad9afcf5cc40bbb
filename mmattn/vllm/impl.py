"""One attention layer of vLLM on mmattn."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backend import AttentionImpl, AttentionType

from ..attention import attention
from ..engines import layer_mask, write_pages
from .builder import MMAttentionMetadata

FLOAT8 = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
"""Names of vLLM's cache dtypes -> what the cache holds, with one scale for each of keys and values."""
_ENCODER = (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)


class MMAttentionImpl(AttentionImpl[MMAttentionMetadata]):
    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
        **others: Any,
    ) -> None:
        reasons = []
        if alibi_slopes is not None:
            reasons.append("ALiBi: mmattn has no bias on scores")
        if kv_cache_dtype not in ("auto", "float16", "bfloat16", *FLOAT8):
            reasons.append(f"kv_cache_dtype {kv_cache_dtype!r}: only auto, float16, bfloat16 and {', '.join(FLOAT8)}")
        if attn_type in _ENCODER and kv_cache_dtype in FLOAT8:
            reasons.append("float8 keys in encoder attention")
        given = {name: x for name, x in others.items() if x is not None and x is not False and x != -1}
        reasons += [f"{name}={x!r}, which mmattn does not know" for name, x in given.items()]
        if reasons:
            raise ValueError("MMATTN cannot run this layer:\n" + "\n".join(f"  {reason}" for reason in reasons))
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.sliding_window, self.attn_type, self.sinks = sliding_window, attn_type, sinks
        self.kv_cache_dtype = kv_cache_dtype
        self.softcap = logits_soft_cap or None
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name

    def _pages(self, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of a cache `[P, Hkv, page, D + Dv]`, in any layout, as pages `[P, page, Hkv, ...]`."""
        if self.kv_cache_dtype in FLOAT8:
            kv_cache = kv_cache.view(FLOAT8[self.kv_cache_dtype])
        pages = kv_cache.transpose(1, 2)
        return pages[..., : self.head_size], pages[..., self.head_size :]

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: MMAttentionMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """query `[T, Hq, D]`, key and value `[T, Hkv, ...]`, kv_cache as in `_pages`; writes `output` `[T, Hq, Dv]`."""
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("MMATTN does not quantise its output")
        if attn_metadata is None:  # vLLM measures memory
            return output.fill_(0)
        step, rows = attn_metadata.step, attn_metadata.num_actual_tokens
        clamp = bool(getattr(layer, "mm_prefix_clamp_sliding_window", False))
        # A model clears the spans of a group for the sake of its layers without spans. Where one group holds both kinds,
        # the layers that clamp are those which keep them.
        spans = attn_metadata.mm_prefix_range is not None or clamp
        mask = layer_mask(sliding_window=self.sliding_window, causal=attn_metadata.causal, clamp=clamp)
        options: dict[str, Any] = {}
        if self.attn_type in _ENCODER:
            k, v = key[:rows], value[:rows]
        else:
            k, v = self._pages(kv_cache)
            options["page_table"] = step.page_table
            if self.kv_cache_dtype in FLOAT8:
                options.update(k_scale=layer._k_scale, v_scale=layer._v_scale)
        attention(
            query[:rows], k, v, step.plan(mask, spans=spans), scale=self.scale, softcap=self.softcap, sinks=self.sinks,
            out=output[:rows], **options,
        )  # fmt: skip
        return output

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        if self.attn_type in _ENCODER:
            return
        k, v = self._pages(kv_cache)
        if kv_cache.device.type == "cuda" and k.shape[-1] == v.shape[-1]:
            from vllm.v1.attention.ops.triton_reshape_and_cache_flash import triton_reshape_and_cache_flash

            triton_reshape_and_cache_flash(
                key, value, k, v, slot_mapping, self.kv_cache_dtype, layer._k_scale, layer._v_scale
            )
        else:
            write_pages(key, value, k, v, slot_mapping, layer._k_scale_float, layer._v_scale_float)
