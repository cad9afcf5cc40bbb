"""What single families of the sweep need besides the rules: other classes, sizes and inputs."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import transformers

from .hf_inputs import BATCH, LENGTH, find, make, randn, tokens
from .hf_tiny import tiny

CLASSES: dict[str, tuple[str, ...]] = {
    "qwen2_5_omni": ("Qwen2_5OmniThinkerForConditionalGeneration",),
    "qwen3_omni_moe": ("Qwen3OmniMoeThinkerForConditionalGeneration",),
    "idefics": ("IdeficsForVisionText2Text",),
    "sam": ("SamModel",),
    "sam_hq": ("SamHQModel",),
    "mimi": ("MimiModel",),
    "omdet_turbo": ("OmDetTurboForObjectDetection",),
    "lightglue": ("LightGlueForKeypointMatching",),
}
"""Where the class that ranks first is not the telling one."""


def _mrope(*section: int, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": list(section), **more}}


def _resnet(stages: int = 4) -> Any:
    return transformers.ResNetConfig(
        embedding_size=16, hidden_sizes=[16] * stages, depths=[1] * stages, layer_type="basic",
        out_features=[f"stage{i}" for i in range(stages - 2, stages + 1)],
    )  # fmt: skip


def _backbone() -> dict[str, Any]:
    config = transformers.ResNetConfig(
        embedding_size=16,
        hidden_sizes=[16, 16, 16, 16],
        depths=[1, 1, 1, 1],
        layer_type="basic",
        out_features=["stage4"],
    )
    return {"use_timm_backbone": False, "backbone": None, "backbone_config": config}


_SERIES = dict(prediction_length=4, context_length=8, num_time_features=2, lags_sequence=[1, 2, 3])

CONFIGS: dict[str, Any] = {
    "bamba": {"attn_layer_indices": [1]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "zamba": {"num_hidden_layers": 5, "layer_types": ["mamba", "mamba", "hybrid", "mamba", "hybrid"]},
    "qwen2_vl": {"text_config": _mrope(2, 3, 3)},
    "qwen2_5_vl": {"text_config": _mrope(2, 3, 3)},
    "paddleocr_vl": {"text_config": _mrope(2, 3, 3)},
    "glm4v": {"text_config": _mrope(2, 3, 3)},
    "glm_ocr": {"text_config": _mrope(2, 3, 3)},
    "glm4v_moe": {"text_config": _mrope(1, 1, 2, partial_rotary_factor=0.5)},
    "cosmos3_edge": {"text_config": _mrope(2, 3, 3)},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "ministral": {"head_dim": 16},
    "nemotron": {"num_key_value_heads": 2},
    "dots1": {
        "n_shared_experts": 1,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 32,
        "num_experts_per_tok": 2,
    },
    "deepseek_v2": {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "topk_method": "greedy"},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 8},
    "esm": {"vocab_size": 128, "position_embedding_type": "rotary", "pad_token_id": 1},
    "wav2vec2_bert": {"vocab_size": 64, "feature_projection_input_dim": 80},
    "xmod": {"default_language": "en_XX", "languages": ["en_XX"]},
    "autoformer": _SERIES,
    "informer": _SERIES,
    "time_series_transformer": _SERIES,
    "detr": _backbone,
    "conditional_detr": _backbone,
    "dab_detr": _backbone,
    "table_transformer": _backbone,
    "deformable_detr": lambda: {
        **_backbone(),
        "backbone_config": _resnet(),
        "num_feature_levels": 3,
    },
    "gemma4_assistant": {"text_config": {"hidden_size_per_layer_input": 0}},
    "layoutlmv3": {"coordinate_size": 10, "shape_size": 12, "input_size": 32, "patch_size": 8},
    "lilt": {"hidden_size": 96, "num_attention_heads": 4},
    "decision_transformer": {"vocab_size": 128},
    "vits": {"vocab_size": 128},
    "blt": {"encoder_hash_byte_group_vocab": 64},
    "efficientloftr": {"hidden_size": 256},
    "florence2": {
        "vision_config": {
            "embed_dim": [16, 32, 64, 64],
            "num_heads": [2, 2, 4, 4],
            "num_groups": [2, 2, 4, 4],
            "depths": [1, 1, 1, 1],
        },
    },
    "fun_asr_nano": {"adaptor_config": {"intermediate_size": 16}},
    "perceiver": {"d_latents": 64, "num_latents": 16, "d_model": 64, "num_self_attends_per_block": 1},
    "swin": {
        "image_size": 32,
        "patch_size": 2,
        "window_size": 4,
        "depths": [1, 1],
        "num_heads": [2, 4],
        "embed_dim": 16,
    },
    "gemma3": {"mm_tokens_per_image": 4},
    "t5gemma2": {"encoder": {"mm_tokens_per_image": 4}},
    "llama4": {
        "vision_config": {
            "projector_input_dim": 64,
            "projector_output_dim": 64,
            "vision_output_dim": 64,
            "intermediate_size": 256,
        }
    },
    "idefics2": {"perceiver_config": {"resampler_n_latents": 4}},
    "mllama": {"vision_config": {"vision_output_dim": 64, "intermediate_layers_indices": [0], "max_num_tiles": 4}},
}
"""Options that the rules do not find; a callable makes them late."""


def config(family: str, cls: Any) -> Any:
    changes = CONFIGS.get(family)
    return tiny(cls.config_class, changes() if callable(changes) else changes)


_ARGUMENTS = {
    "text": "input_ids", "image": "pixel_values", "video": "pixel_values_videos", "audio": "input_features",
    "wave": "input_values", "series": "past_values",
}  # fmt: skip


def kinds(model: Any) -> list[str]:
    """The kinds of inputs that a model takes, with and without generation."""
    known = inspect.signature(model.forward).parameters
    found = [kind for kind, name in _ARGUMENTS.items() if name in known] or ["text"]
    if "video_grid_thw" in known and "video" in found:
        found.remove("video")  # the same path as images
    if model.can_generate():
        found += [f"{kind}+generate" for kind in found if kind in ("text", "image", "audio")]
    return found


def inputs(model: Any, kind: str) -> dict[str, Any]:
    """Padded on the left for decoders, on the right for the rest."""
    left = model.can_generate() and not getattr(model.config, "is_encoder_decoder", False)
    made = make(model, kind, "left" if left else "right")
    special = _INPUTS.get(model.config.model_type)
    if special is not None:
        special(model, kind, made)
    return made


def _mllama(model: Any, kind: str, made: dict[str, Any]) -> None:
    if kind == "image":
        made["pixel_values"] = randn(BATCH, 1, 4, 3, 32, 32)
        made["aspect_ratio_ids"] = torch.tensor([[1], [2]])
        made["aspect_ratio_mask"] = torch.tensor([[[1, 0, 0, 0]], [[1, 1, 0, 0]]])
        made["cross_attention_mask"] = torch.ones(BATCH, LENGTH, 1, 4).long()
        made["cross_attention_mask"][:, :15] = 0
        made["cross_attention_mask"][0, :, :, 1:] = 0
        made["cross_attention_mask"][1, :, :, 2:] = 0


def _idefics(model: Any, kind: str, made: dict[str, Any]) -> None:
    """One image a row, the first one narrow."""
    if kind == "image":
        made["pixel_values"] = made["pixel_values"][:, None]
        made["pixel_attention_mask"] = torch.ones(BATCH, 1, 32, 32, dtype=torch.bool)
        made["pixel_attention_mask"][0, :, :, 16:] = False


def _codebooks(model: Any, kind: str, made: dict[str, Any]) -> None:
    made["decoder_input_ids"] = tokens(BATCH * 4, 9)


def _spectrogram(model: Any, kind: str, made: dict[str, Any]) -> None:
    made["input_values"] = randn(BATCH, model.config.max_length, model.config.num_mel_bins)


def _pix2struct(model: Any, kind: str, made: dict[str, Any]) -> None:
    size = find(model.config, "patch_embed_hidden_size", default=768)
    made["flattened_patches"] = torch.cat([torch.ones(BATCH, 12, 2), randn(BATCH, 12, size)], dim=-1)
    made["attention_mask"] = torch.ones(BATCH, 12).long()
    made["attention_mask"][0, -4:] = 0


def _sound(model: Any, kind: str, made: dict[str, Any]) -> None:
    if "input_values" in made:
        made["input_values"] = made["input_values"].reshape(BATCH, 1, -1)


_INPUTS: dict[str, Any] = {
    "mllama": _mllama,
    "idefics2": _idefics,
    "idefics3": _idefics,
    "smolvlm": _idefics,
    "musicgen": _codebooks,
    "musicgen_melody": _codebooks,
    "audio-spectrogram-transformer": _spectrogram,
    "pix2struct": _pix2struct,
    "mimi": _sound,
}
