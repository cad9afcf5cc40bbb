"""Inputs for any transformers model, from the arguments of its forward."""

from __future__ import annotations

import inspect
import re
from typing import Any

import torch
from torch import Tensor

BATCH, LENGTH, PADDING, TARGET = 2, 37, 11, 9


def find(config: Any, *names: str, default: Any = None) -> Any:
    """The first of these fields that the config or one of its sub-configs has."""
    for name in names:
        for part in parts(config):
            value = part.__dict__.get(name)
            if value is not None and not isinstance(value, bool):
                return value
    return default


def parts(config: Any) -> list[Any]:
    """The config and all configs inside it."""
    found = [config]
    for value in list(vars(config).values()):
        if hasattr(value, "sub_configs") and hasattr(value, "__dict__"):
            found += parts(value)
    return found


def vision_config(config: Any) -> Any:
    for part in parts(config):
        if part.__dict__.get("image_size") is not None or part.__dict__.get("patch_size") is not None:
            return part
    return config


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def tokens(batch: int, length: int) -> Tensor:
    return torch.randint(3, 60, (batch, length), generator=torch.Generator().manual_seed(length))


def padding(side: str, batch: int = BATCH, length: int = LENGTH) -> Tensor:
    mask = torch.ones(batch, length).long()
    if side == "left":
        mask[0, :PADDING] = 0
    else:
        mask[0, -PADDING:] = 0
    return mask


def pair(size: Any) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (int(size[0]), int(size[-1]))


def image(config: Any, batch: int = BATCH) -> Tensor:
    vision = vision_config(config)
    height, width = pair(vision.__dict__.get("image_size") or 32)
    channels = find(vision, "num_channels", "in_channels", "in_chans", default=3)
    return randn(batch, channels if isinstance(channels, int) else 3, height, width)


def make(model: torch.nn.Module, name: str, side: str) -> dict[str, Any]:
    """The inputs for one kind of run: "text", "image", "audio", ..."""
    config, known = model.config, inspect.signature(model.forward).parameters
    inputs: dict[str, Any] = {}
    if "input_ids" in known:
        inputs["input_ids"] = tokens(BATCH, LENGTH)
        if "attention_mask" in known:
            inputs["attention_mask"] = padding(side)
        if "bbox" in known:
            corner = torch.arange(BATCH * LENGTH * 2).reshape(BATCH, LENGTH, 2) % 50
            inputs["bbox"] = torch.cat([corner, corner + 9], dim=-1)
    if "decoder_input_ids" in known:
        inputs["decoder_input_ids"] = tokens(BATCH, TARGET)
    if name == "image":
        inputs.update(_image(model, known))
    if name == "video" and "pixel_values_videos" in known:
        frames = find(config, "num_frames", "frames_per_clip", default=2)
        inputs["pixel_values_videos"] = image(config)[:, None].repeat(1, frames, 1, 1, 1)
    if name == "audio":
        mel = find(config, "num_mel_bins", "feature_size", "mel_bins", "input_dim", "input_feat_size", default=80)
        frames = 2 * min(find(config, "max_source_positions", default=32), 512)
        inputs["input_features"] = randn(BATCH, mel, frames)
        for mask in ("feature_attention_mask", "input_features_mask"):
            if mask in known:
                inputs[mask] = torch.ones(BATCH, frames).long()
    if name == "wave":
        inputs["input_values"] = randn(BATCH, 4000)
        if "padding_mask" in known:
            inputs["input_values"] = inputs["input_values"][:, None]
    if name == "series":
        inputs.update(_series(config, known))
    if "noise_embeds" in known:
        inputs["noise_embeds"], inputs["context_hidden_states"] = randn(BATCH, 8, 64), randn(BATCH, LENGTH, 64)
    for types in ("token_type_ids", "mm_token_type_ids"):
        if types in known and ("pixel_values" in known or "input_features" in known) and "input_ids" in inputs:
            inputs[types] = torch.zeros_like(inputs["input_ids"])
    return inputs


def _image(model: Any, known: Any) -> dict[str, Any]:
    config = model.config
    grid = next((n for n in ("image_grid_thw", "grid_thw", "image_grid_hws") if n in known), None)
    if grid is not None:
        vision = vision_config(config)
        patch, temporal = pair(vision.patch_size)[0], find(vision, "temporal_patch_size", default=1)
        channels = find(vision, "in_channels", "num_channels", "in_chans", default=3)
        merge = pair(find(config, "spatial_merge_size", "merge_size", "merge_kernel_size", default=2))[0]
        size = 2 * merge
        return {
            "pixel_values": randn(BATCH * size * size, channels * temporal * patch * patch),
            grid: torch.tensor([[1, size, size]] * BATCH),
        }
    inputs = {"pixel_values": image(config)}
    if "image_sizes" in known:
        height, width = inputs["pixel_values"].shape[-2:]
        inputs["image_sizes"] = torch.tensor([[height, width]] * BATCH)
    return inputs


def _series(config: Any, known: Any) -> dict[str, Any]:
    """Time series."""
    length = find(config, "context_length", default=32)
    if "past_time_features" not in known:
        channels = find(config, "num_input_channels", default=0)
        values = {"past_values": randn(BATCH, length, channels) if channels else randn(BATCH, length)}
        if "past_values_padding" in known:
            values["past_values_padding"], values["freq"] = (
                torch.zeros(BATCH, length).long(),
                torch.zeros(BATCH, 1).long(),
            )
        return values
    past = length + max(config.lags_sequence)
    features, future = config.num_time_features, config.prediction_length
    return {
        "past_values": randn(BATCH, past),
        "past_time_features": randn(BATCH, past, features),
        "past_observed_mask": torch.ones(BATCH, past),
        "future_values": randn(BATCH, future),
        "future_time_features": randn(BATCH, future, features),
    }


_MISMATCH = re.compile(r"tokens:? (\d+),? (?:and )?(?:image |audio |video )?features:? (\d+)")


def repair(model: Any, inputs: dict[str, Any], kind: str, error: Exception) -> bool:
    """Changes the inputs by what the model complains about: image tokens to place, another rank. False: it cannot."""
    text, config = str(error), model.config
    features = inputs.get("input_features")
    size = re.search(r"normalized_shape=\[(\d+)\]", text)
    if features is not None and (size or "shapes cannot be multiplied" in text) and inputs.get("_placed", 0) == 0:
        inputs["input_features"] = randn(BATCH, features.shape[2], int(size[1])) if size else features.transpose(1, 2)
        inputs["_placed"] = 1
        return True
    if "pixel_values" in inputs and "5D tensor of shape (batch_size, 2" in text:
        inputs["pixel_values"] = torch.stack([inputs["pixel_values"], inputs["pixel_values"].flip(0)], dim=1)
        return inputs["pixel_values"].dim() == 5
    if "pixel_values" in inputs and "expected 5, got 4" in text:
        frames = find(config, "num_frames", default=1)
        inputs["pixel_values"] = inputs["pixel_values"][:, None].repeat(1, frames, 1, 1, 1)
        return True
    found = _MISMATCH.search(text)
    if found is None or "input_ids" not in inputs or inputs.get("_placed", 0) > 2:
        return False
    inputs["_placed"] = inputs.get("_placed", 0) + 1
    count = int(found[2]) // BATCH
    if count > LENGTH - PADDING - 2:  # some count numbers, not tokens
        count //= 64
    names = {"image": ("image_token_id", "image_token_index"), "video": ("video_token_id", "video_token_index")}
    token = find(config, *names.get(kind, ("audio_token_id", "audio_token_index")))
    if token is None or not 0 < count <= LENGTH - PADDING - 2:
        return False
    start = LENGTH - PADDING - 1 - count if bool(inputs.get("attention_mask", torch.ones(1, 1))[0, 0]) else PADDING + 1
    place = torch.zeros(BATCH, LENGTH, dtype=torch.bool)
    place[:, start : start + count] = True
    inputs["input_ids"] = tokens(BATCH, LENGTH).masked_fill(place, token)
    for types in ("token_type_ids", "mm_token_type_ids"):
        if types in inputs:
            inputs[types] = place.long()
            if config.model_type.startswith("paligemma"):  # type 0 is the prefix, of images and text
                inputs[types] = (torch.arange(LENGTH) >= LENGTH - 3).long().repeat(BATCH, 1)
    return True
