"""Tiny versions of any transformers config: sizes are recognised by the names of their fields."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

VOCAB = 128
WINDOW = 8
HIDDEN = 64
HEADS = 4
IMAGE = 32
PATCH = 8

_RULES: list[tuple[str, Any]] = [
    (r"(.*_)?vocab_size(_per_layer_input)?", VOCAB),
    (r"max_position_embeddings|n_positions|max_seq_len|max_seq_length|max_(source|target)_positions", 512),
    (r"sliding_window(_size)?", WINDOW),
    (r"attention_chunk_size", WINDOW),
    (r"local_attention", 2 * WINDOW),
    (r"(.*_)?(num_key_value_heads|num_kv_heads|n_kv_heads|key_value_heads|kv_heads)", 2),
    (r"(.*_)?(num_attention_heads|attention_heads|num_heads|n_heads?|num_query_heads|num_head|n_query_heads)", HEADS),
    (r"linear_num_key_heads|linear_num_heads", 2),
    (r"linear_num_value_heads", HEADS),
    (r"(linear_(key_|value_)?head_dim|index_head_dim|head_dim|.*_head_dim|d_kv|kv_channels|attention_head_size)", 16),
    (r"qk_rope_head_dim|qk_nope_head_dim", 8),
    (r"query_pre_attn_scalar", 16),
    (r"(kv|q|o)_lora_rank", 16),
    (r"(num_hidden_layers|num_layers|n_layers?|depth|layers|.*_layers|.*_depth|num_blocks|.*_num_layers)", 2),
    (r"intermediate_size|.*_intermediate_size|.*ffn_dim|.*ffn_hidden_size|d_ff|mlp_dim|d_inner|n_inner|dim_feedforward|intermediate_size_mlp", 64),
    (r"(hidden_size|.*_hidden_size|d_model|n_embd|embed_dim|.*_embed_dim|hidden_dim|.*_hidden_dim|embedding_size|dim|width|.*_width|projection_dim|projection_size|output_dim|.*_output_dim|out_hidden_size|latent_dim|d_embed|embedding_dim|vision_output_dim|text_hidden_dim|proj_hidden_size)", HIDDEN),
    (r"num_experts|n_routed_experts|num_local_experts|moe_num_experts", 4),
    (r"num_experts_per_tok|moe_k|moe_topk|num_experts_per_token|experts_per_token", 2),
    (r"n_group|topk_group|moe_n_group|n_groups?", 1),
    (r"(image_size|.*_image_size|input_size|img_size|crop_size)", IMAGE),
    (r"patch_size|vision_patch_size", PATCH),
    (r"upsample_groups", HIDDEN),
    (r"rotary_dim", 8),
    (r"index_topk", 512),
    (r"codebook_size|codebook_dim", 64),
    (r"mamba_d_state|state_size|ssm_state_size", 8),
    (r".*sparse_step", 1),
    (r"num_queries", 10),
    (r"num_denoising", 0),
]  # fmt: skip
RULES = [(re.compile(pattern), value) for pattern, value in _RULES]
KEEP = {"num_hidden_layers_per_stage", "shared_expert_intermediate_size" + "_", "hidden_size_per_layer_input"}
_TOKENS = re.compile(r".*(_token_id|_token_index|_id)s?$")


def tiny(config_class: Any, changes: dict[str, Any] | None = None, default: Any = None) -> Any:
    """A small config. `changes` are set as they are; a dict in it goes to the sub-config of that name."""
    changes = dict(changes or {})
    options: dict[str, Any] = {}
    if default is None:
        default = config_class()
    subs = getattr(config_class, "sub_configs", {})
    used_ids: dict[int, int] = {}
    for field in dataclasses.fields(config_class):
        name = field.name
        if not field.init or (name in changes and name not in subs):
            continue
        try:
            value = getattr(default, name, None)
        except Exception:  # a size that differs between layers
            value = field.default
        if hasattr(value, "sub_configs"):  # a config of its own
            inner = changes.pop(name, {})
            options[name] = tiny(type(value), inner, value) if isinstance(inner, dict) else inner
            continue
        if name in changes or name in subs:
            continue
        raw = field.default
        if raw is dataclasses.MISSING and isinstance(value, (list, tuple)):
            raw = tuple(value)
        if isinstance(raw, bool) or raw is dataclasses.MISSING:
            continue
        if name.startswith("num_kv_shared") or name in KEEP:
            continue
        if isinstance(raw, (int, float)) and raw == 0:
            continue
        if name == "num_key_value_heads" and raw == _raw(config_class, "num_attention_heads"):
            options[name] = HEADS
            continue
        if isinstance(raw, int) and raw >= VOCAB and _TOKENS.fullmatch(name):
            # Special tokens, each a number of its own below the vocabulary.
            options[name] = used_ids.setdefault(raw, VOCAB - 1 - len(used_ids))
            continue
        number = isinstance(raw, (int, float)) and not isinstance(raw, bool)
        if number or (
            isinstance(raw, (list, tuple)) and len(set(map(str, raw))) >= 1 and all(type(x) is int for x in raw)
        ):
            for pattern, small in RULES:
                if pattern.fullmatch(name):
                    if number:
                        options[name] = type(raw)(min(raw, small))
                    elif "image_size" in name or "patch_size" in name:
                        options[name] = [small] * len(raw)
                    break
    kinds = getattr(default, "__dict__", {}).get("layer_types")
    if kinds and "layer_types" not in changes and _raw(config_class, "layer_types") is None:
        names = list(dict.fromkeys(kinds))
        count = max(2, len(names))
        if len(names) > 1:
            options["layer_types"] = names
            options.update({n: count for n in ("num_hidden_layers", "num_layers", "n_layer") if n in options})
    return config_class(**{**options, **changes})


def _raw(config_class: Any, name: str) -> Any:
    return next((f.default for f in dataclasses.fields(config_class) if f.name == name), None)
