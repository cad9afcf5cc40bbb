"""Tiny models with images: checkpoints with their real processors, over a tokenizer of letters that is built here."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from .engine import ALTERNATING, HEAD_DIM, SIZES, Answer, eager, save

IMAGE_SIZE, PATCH = 16, 4
IMAGE_TOKENS = (IMAGE_SIZE // PATCH) ** 2
LETTERS = "abcdefghijklmnopqrstuvwxyz ."
SPECIAL = {
    "pad": "<pad>", "bos": "<bos>", "eos": "<eos>", "unk": "<unk>", "boi": "<boi>", "eoi": "<eoi>", "image": "<image>",
    "audio": "<audio>", "boa": "<boa>", "eoa": "<eoa>", "video": "<|video|>",
}  # fmt: skip
IDS = {name: i for i, name in enumerate(SPECIAL)}


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    vocab = {text: IDS[name] for name, text in SPECIAL.items()}
    for piece in [*LETTERS, "\n", "\n\n", "\n\n\n", "\n\n\n\n"]:
        vocab[piece] = len(vocab)
    core = Tokenizer(models.WordLevel(vocab, unk_token=SPECIAL["unk"]))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n{1,4}|[^\n]"), "isolated")
    core.decoder = decoders.Fuse()
    special = {f"{name}_token": SPECIAL[name] for name in ("pad", "bos", "eos", "unk")}
    extra = {f"{name}_token": SPECIAL[name] for name in ("boi", "eoi", "image", "audio", "boa", "eoa")}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=core, **special, extra_special_tokens=extra)


def _text(window: int, **options: Any) -> dict[str, Any]:
    sizes = {**SIZES, "bos_token_id": IDS["bos"], "eos_token_id": IDS["eos"], "pad_token_id": IDS["pad"]}
    return dict(
        sizes, num_hidden_layers=4, head_dim=HEAD_DIM, sliding_window=window, layer_types=ALTERNATING, **options
    )


def gemma3(folder: Path, window: int) -> Path:
    vision = dict(
        model_type="siglip_vision_model", hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        image_size=IMAGE_SIZE, patch_size=PATCH, vision_use_head=False,
    )  # fmt: skip
    config = transformers.Gemma3Config(
        text_config=_text(window, query_pre_attn_scalar=HEAD_DIM), vision_config=vision,
        mm_tokens_per_image=IMAGE_TOKENS, image_token_index=IDS["image"], boi_token_index=IDS["boi"],
        eoi_token_index=IDS["eoi"],
    )  # fmt: skip
    save(transformers.Gemma3ForConditionalGeneration(config), folder)
    _rename(folder, "vision_tower.", "vision_tower.vision_model.")
    images = transformers.Gemma3ImageProcessorPil(size={"height": IMAGE_SIZE, "width": IMAGE_SIZE})
    transformers.Gemma3Processor(images, tokenizer(), image_seq_length=IMAGE_TOKENS).save_pretrained(folder)
    return folder


def gemma4(folder: Path, window: int, *, global_head_dim: int = 2 * HEAD_DIM, kv_shared: int = 0) -> Path:
    """Images of 64 tokens, whatever their size: the fewest that its processor knows."""
    text = _text(
        window, global_head_dim=global_head_dim, use_bidirectional_attention="vision", num_kv_shared_layers=kv_shared,
        hidden_size_per_layer_input=8, vocab_size_per_layer_input=SIZES["vocab_size"],
    )  # fmt: skip
    vision = dict(
        hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, head_dim=8,
        patch_size=2, pooling_kernel_size=2, position_embedding_size=16, default_output_length=70,
    )  # fmt: skip
    config = transformers.Gemma4Config(
        text_config=text, vision_config=vision, audio_config=None, image_token_id=IDS["image"], boi_token_id=IDS["boi"],
        eoi_token_id=IDS["eoi"], video_token_id=IDS["video"], audio_token_id=IDS["audio"], boa_token_id=IDS["boa"],
    )  # fmt: skip
    save(transformers.Gemma4ForConditionalGeneration(config), folder)
    sizes: dict[str, Any] = dict(patch_size=2, pooling_kernel_size=2, max_soft_tokens=70)
    transformers.Gemma4Processor(
        feature_extractor=transformers.Gemma4AudioFeatureExtractor(),
        image_processor=transformers.Gemma4ImageProcessor(**sizes), tokenizer=tokenizer(),
        video_processor=transformers.Gemma4VideoProcessor(**sizes), image_seq_length=70,
    ).save_pretrained(folder)  # fmt: skip
    return folder


def _rename(folder: Path, prefix: str, published: str) -> None:
    """Names weights as published checkpoints have them: transformers reads these too, vLLM no others."""
    path = folder / "model.safetensors"
    weights = {re.sub(rf"(^|\.){re.escape(prefix)}", rf"\1{published}", name): x for name, x in load_file(path).items()}
    save_file(weights, path, metadata={"format": "pt"})


@cache
def picture(seed: int) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (IMAGE_SIZE, IMAGE_SIZE, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def words(n: int, seed: int) -> str:
    letters = np.random.default_rng(seed).choice(list(LETTERS), n)
    return "".join(letters)


class Prompt:
    """Text with pictures in it: a number is so many letters, "image" is a picture."""

    def __init__(self, layout: list[int | str], seed: int = 0, marker: str = SPECIAL["boi"]) -> None:
        parts = [words(part, seed + i) if isinstance(part, int) else marker for i, part in enumerate(layout)]
        self.text = "".join(parts)
        self.pictures = [picture(seed + i) for i, part in enumerate(layout) if part == "image"]

    @property
    def for_vllm(self) -> dict[str, Any]:
        return {"prompt": self.text, "multi_modal_data": {"image": self.pictures} if self.pictures else {}}

    def eager(self, folder: Path, model: torch.nn.Module, new_tokens: int) -> Answer:
        processor = transformers.AutoProcessor.from_pretrained(folder)
        inputs = processor(text=self.text, images=self.pictures or None, return_tensors="pt")
        inputs.pop("attention_mask", None)
        ids = inputs.pop("input_ids")[0].tolist()
        inputs.pop("num_soft_tokens_per_image", None)
        return eager(model, ids, new_tokens, **inputs)
