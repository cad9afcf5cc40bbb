"""The models of `docs/models.md`: tiny random versions of real transformers models, and inputs for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from . import hf_table

WINDOW = 8
VOCAB = 96
IMAGE_TOKEN = 90
IMAGE_LENGTH = 16
"""Tokens of one image: twice WINDOW."""
WIDE_WINDOW = 24

COMMON: dict[str, Any] = dict(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=512, attention_dropout=0.0, bos_token_id=1, eos_token_id=2, pad_token_id=0,
)  # fmt: skip
_ON_GPU: dict[str, dict[int, int]] = {
    "hidden_size": {32: 256},
    "head_dim": {8: 64, 12: 192},
    "v_head_dim": {8: 128},
    "global_head_dim": {16: 128},
    "query_pre_attn_scalar": {8: 64},
    "sliding_window": {WINDOW: 64},
    "attention_chunk_size": {WINDOW: 64},
    "local_attention": {2 * WINDOW: 128},
}
"""Option -> tiny value -> value for GPU kernels."""
ALTERNATING = ["sliding_attention", "full_attention"] * 2


@dataclass(frozen=True)
class TextModel:
    name: str
    """As people call it."""
    architecture: str
    config: str
    masks: str
    """What its layers see, for the documentation."""
    options: dict[str, Any] = field(default_factory=dict)
    packing: str = ""
    """Why documents packed in one row do not come out as they would alone, in transformers itself."""

    def build(self, gpu_sizes: bool = False) -> torch.nn.Module:
        """`gpu_sizes`: head dims and windows that GPU kernels are made for."""
        if not hasattr(transformers, self.architecture):
            pytest.skip(f"transformers {transformers.__version__} has no {self.architecture}")
        options = {**COMMON, **self.options}
        if gpu_sizes:
            options = {
                name: _ON_GPU.get(name, {}).get(value, value) if isinstance(value, int) else value
                for name, value in options.items()
            }
        return _randomised(getattr(transformers, self.architecture)(getattr(transformers, self.config)(**options)))


TEXT_MODELS = [
    TextModel(
        "Gemma 2", "Gemma2ForCausalLM", "Gemma2Config", "sliding and full, softcap",
        dict(num_hidden_layers=4, head_dim=8, sliding_window=WINDOW, layer_types=ALTERNATING, attn_logit_softcapping=3.0),
    ),
    TextModel(
        "Gemma 3 text", "Gemma3ForCausalLM", "Gemma3TextConfig", "sliding and full",
        dict(num_hidden_layers=4, head_dim=8, query_pre_attn_scalar=8, sliding_window=WINDOW, layer_types=ALTERNATING),
    ),
    TextModel(
        "Gemma 4 text", "Gemma4ForCausalLM", "Gemma4TextConfig",
        "sliding and full, head dims 8 and 16, the last two layers share keys and values",
        dict(
            num_hidden_layers=4, head_dim=8, global_head_dim=16, sliding_window=WINDOW, layer_types=ALTERNATING,
            num_kv_shared_layers=2, hidden_size_per_layer_input=8, vocab_size_per_layer_input=VOCAB,
        ),
    ),
    TextModel(
        "gpt-oss", "GptOssForCausalLM", "GptOssConfig", "sliding and full, sinks",
        dict(
            num_hidden_layers=4, head_dim=8, sliding_window=WINDOW, layer_types=ALTERNATING, num_local_experts=4,
            num_experts_per_tok=2, rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        ),
        packing="the model keeps position_ids from its masks; pass cu_seq_lens_q and cu_seq_lens_k too",
    ),
    TextModel(
        "Llama 4", "Llama4ForCausalLM", "Llama4TextConfig", "chunked and full",
        dict(
            num_hidden_layers=4, head_dim=8, attention_chunk_size=WINDOW, no_rope_layers=[1, 0, 1, 0], floor_scale=16,
            layer_types=["chunked_attention", "full_attention"] * 2, intermediate_size_mlp=48, num_local_experts=2,
        ),
        packing="the temperature of its full layers follows the place in the row",
    ),
    TextModel(
        "Mistral", "MistralForCausalLM", "MistralConfig", "sliding",
        dict(num_hidden_layers=2, head_dim=8, sliding_window=WINDOW),
    ),
    TextModel(
        "Qwen 3", "Qwen3ForCausalLM", "Qwen3Config", "full and sliding",
        dict(num_hidden_layers=4, head_dim=8, use_sliding_window=True, sliding_window=WINDOW, layer_types=ALTERNATING),
    ),
    TextModel("Phi-3", "Phi3ForCausalLM", "Phi3Config", "sliding", dict(num_hidden_layers=2, sliding_window=WINDOW)),
    TextModel(
        "ModernBERT decoder", "ModernBertDecoderForCausalLM", "ModernBertDecoderConfig", "sliding and full",
        dict(num_hidden_layers=4, local_attention=2 * WINDOW, layer_types=ALTERNATING, cls_token_id=1, sep_token_id=2),
    ),
    TextModel(
        "MiMo-V2-Flash", "MiMoV2FlashForCausalLM", "MiMoV2FlashConfig",
        "sliding with sinks and full, value head dim 8 of 12",
        dict(
            num_hidden_layers=4, head_dim=12, v_head_dim=8, sliding_window=WINDOW, layer_types=ALTERNATING,
            moe_intermediate_size=16, n_routed_experts=4, num_experts_per_tok=2,
        ),
    ),
    TextModel(
        "Cohere 2", "Cohere2ForCausalLM", "Cohere2Config", "sliding and full",
        dict(num_hidden_layers=4, head_dim=8, sliding_window=WINDOW, layer_types=ALTERNATING),
    ),
]  # fmt: skip


@dataclass(frozen=True)
class VisionModel:
    name: str
    architecture: str
    masks: str
    make_config: Callable[[int, int], Any]
    """(sliding window, head dim) -> config."""
    token_types: str
    """Name of the argument that tells image tokens."""
    windows: tuple[int, ...] = (WINDOW, WIDE_WINDOW)
    static_cache: bool = True
    """Whether stock eager generates with a static cache (a test proves it where not)."""

    def build(self, window: int, head_dim: int = 8) -> torch.nn.Module:
        return _randomised(getattr(transformers, self.architecture)(self.make_config(window, head_dim)))

    def inputs(self, layout: list[str | int], batch: int = 1, left_padding: int = 0) -> dict[str, Tensor]:
        """`layout` holds "image" or a number of text tokens. The first row gets `left_padding` padding tokens."""
        generator = torch.Generator().manual_seed(len(layout) + 7 * batch)
        is_image = torch.cat(
            [
                torch.ones(IMAGE_LENGTH, dtype=torch.bool)
                if part == "image"
                else torch.zeros(int(part), dtype=torch.bool)
                for part in layout
            ]
        ).repeat(batch, 1)
        ids = torch.randint(3, IMAGE_TOKEN, is_image.shape, generator=generator).masked_fill(is_image, IMAGE_TOKEN)
        mask = torch.ones_like(ids)
        if left_padding:
            pad = (batch, left_padding)
            ids = torch.cat([torch.randint(3, IMAGE_TOKEN, pad, generator=generator), ids], 1)
            is_image = torch.cat([torch.zeros(pad, dtype=torch.bool), is_image], 1)
            mask = torch.ones_like(ids)
            mask[0, :left_padding] = 0
            ids[0, :left_padding] = 0
        images = batch * layout.count("image")
        inputs = {"input_ids": ids, "attention_mask": mask}
        if self.name.startswith("Gemma 4"):
            grid = torch.stack(torch.meshgrid(torch.arange(8), torch.arange(8), indexing="xy"), -1).reshape(1, 64, 2)
            inputs["pixel_values"] = torch.rand(images, 64, 3 * 2 * 2, generator=generator)
            inputs["image_position_ids"] = grid.repeat(images, 1, 1)
            inputs["mm_token_type_ids"] = is_image.long()
        else:
            inputs["pixel_values"] = torch.rand(images, 3, 12, 12, generator=generator)
            inputs["token_type_ids"] = is_image.long()
        if self.name.startswith("PaliGemma"):
            # Type 0 is the bidirectional prefix: all images and text up to three tokens from the end.
            inputs["token_type_ids"] = torch.zeros_like(ids)
            inputs["token_type_ids"][:, -3:] = 1
        return inputs


_TEXT = {**COMMON, "num_hidden_layers": 4}
_SIGLIP: dict[str, Any] = dict(
    hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, image_size=12, patch_size=3,
    vision_use_head=False,
)  # fmt: skip


def _gemma3(window: int, head_dim: int) -> Any:
    text = dict(
        _TEXT, head_dim=head_dim, query_pre_attn_scalar=head_dim, sliding_window=window, layer_types=ALTERNATING
    )
    return transformers.Gemma3Config(
        text_config=text, vision_config=dict(_SIGLIP, model_type="siglip_vision_model"),
        mm_tokens_per_image=IMAGE_LENGTH, image_token_index=IMAGE_TOKEN, boi_token_index=91, eoi_token_index=92,
    )  # fmt: skip


def _gemma4(window: int, head_dim: int, shared: int = 0) -> Any:
    text = dict(
        _TEXT, head_dim=head_dim, global_head_dim=2 * head_dim, sliding_window=window, layer_types=ALTERNATING,
        use_bidirectional_attention="vision", num_kv_shared_layers=shared, hidden_size_per_layer_input=8 if shared else 0, vocab_size_per_layer_input=VOCAB,
    )  # fmt: skip
    vision = dict(
        hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, head_dim=8,
        patch_size=2, pooling_kernel_size=2, position_embedding_size=16,
    )  # fmt: skip
    return transformers.Gemma4Config(
        text_config=text, vision_config=vision, audio_config=None, image_token_id=IMAGE_TOKEN, boi_token_id=91,
        eoi_token_id=92, video_token_id=93, audio_token_id=94, boa_token_id=95,
    )  # fmt: skip


def _paligemma(window: int, head_dim: int, version: int) -> Any:
    text = dict(_TEXT, head_dim=head_dim, model_type="gemma" if version == 1 else "gemma2")
    if version == 2:
        text.update(sliding_window=window, layer_types=ALTERNATING, attn_logit_softcapping=3.0)
    return transformers.PaliGemmaConfig(
        text_config=text, vision_config=dict(_SIGLIP, model_type="siglip_vision_model", projection_dim=32),
        image_token_index=IMAGE_TOKEN, projection_dim=32, hidden_size=32, vocab_size=VOCAB,
    )  # fmt: skip


VISION_MODELS = [
    VisionModel(
        "Gemma 3", "Gemma3ForConditionalGeneration",
        "image spans on every layer, cut by the window on sliding layers", _gemma3, "token_type_ids",
    ),
    VisionModel(
        "Gemma 4", "Gemma4ForConditionalGeneration",
        "image spans on sliding layers, cut by the window; full layers plain causal", _gemma4, "mm_token_type_ids",
    ),
    VisionModel(
        "Gemma 4 with KV sharing", "Gemma4ForConditionalGeneration",
        "as Gemma 4; the last two layers share keys and values", lambda window, head_dim: _gemma4(window, head_dim, 2), "mm_token_type_ids",
    ),
    VisionModel(
        "PaliGemma", "PaliGemmaForConditionalGeneration", "bidirectional prefix (images and text), then causal",
        lambda window, head_dim: _paligemma(window, head_dim, 1), "token_type_ids", windows=(WINDOW,),
    ),
    VisionModel(
        "PaliGemma 2", "PaliGemmaForConditionalGeneration",
        "bidirectional prefix on every layer, not cut by the window of sliding layers; softcap",
        lambda window, head_dim: _paligemma(window, head_dim, 2), "token_type_ids", static_cache=False,
    ),
]  # fmt: skip


def _randomised(model: torch.nn.Module) -> torch.nn.Module:
    """Weights large enough that a mask wrong by one key shows in the logits; without them attention is nearly flat."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() >= 2:
                weight.normal_(0, 1.5 * weight.shape[-1] ** -0.5, generator=generator)
            elif "sink" in name:
                weight.normal_(0, 1.0, generator=generator)
    model.generation_config.eos_token_id = None  # every run generates the same number of tokens
    model.generation_config.pad_token_id = 0
    return model.eval()


@cache
def text_model(name: str) -> torch.nn.Module:
    return next(m for m in TEXT_MODELS if m.name == name).build()


@cache
def vision_model(name: str, window: int) -> torch.nn.Module:
    return next(m for m in VISION_MODELS if m.name == name).build(window)


def document() -> str:
    """The text of `docs/models.md`."""
    from . import test_hf_models as tests

    def checks(tested: type) -> str:
        names = [name.removeprefix("test_").replace("_", " ") for name in vars(tested) if name.startswith("test_")]
        return ", ".join(names)

    text = [
        f"| {m.name} | `{m.architecture}` | {m.masks} |{f' packing: {m.packing}' if m.packing else ''} |"
        for m in TEXT_MODELS
    ]
    vision = [
        f"| {m.name} | `{m.architecture}` | {m.masks} |{'' if m.static_cache else ' transformers cannot generate with a static cache'} |"
        for m in VISION_MODELS
    ]
    head = "| model | class | what its layers see | note |\n|---|---|---|---|"
    parts = (DOCUMENT_HEAD, "## Text models", checks(tests.TestText), head, *text, "## Vision-language models")
    layouts = "Prefill layouts: " + ", ".join(tests.LAYOUTS) + "."
    lines = [
        *parts[:2],
        f"Each one is tested for: {parts[2]}, and a step of training.",
        "\n".join(parts[3:-1]),
        parts[-1],
    ]
    lines += [
        f"Each one is tested for: {checks(tests.TestVision)}, and a step of training. {layouts}",
        "\n".join([head, *vision]),
        DOCUMENT_REFUSED,
        hf_table.document(),
        DOCUMENT_TAIL,
    ]
    return "\n\n".join(lines) + "\n"


DOCUMENT_HEAD = """# Models

<!-- Made by `python -m tests.hf_models > docs/models.md` from the table of the tests; `tests/test_hf_models.py` checks it. -->

`import mmattn.hf; mmattn.hf.register()` makes `attn_implementation="mmattn"` work for models of transformers 5 (5.10 to 5.23 are tested), with no change to the model:

```python
import mmattn.hf
from transformers import AutoConfig, AutoModelForCausalLM

mmattn.hf.register()
config = AutoConfig.for_model(
    "mistral",
    num_hidden_layers=2,
    hidden_size=64,
    intermediate_size=64,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=128,
    sliding_window=16,
    bos_token_id=1,
    eos_token_id=2,
)
model = AutoModelForCausalLM.from_config(config, attn_implementation="mmattn")
```

(`AutoModelForCausalLM.from_pretrained(name, attn_implementation="mmattn")` for a trained one,
`model.set_attn_implementation("mmattn")` for one that is loaded.)

transformers composes a mask from small closures. mmattn reads them as a `Mask` and batch arguments and hands the model an
object that looks like the usual 4-D tensor but holds one key interval per row: 256 KiB instead of 1 GiB for 32k x 32k. A
closure that it does not know is evaluated in row chunks and kept if every row sees one interval. A mask that is not one
interval per row is refused when a layer uses it, with the model, the layer and the row in the message;
`register(fallback="sdpa")` runs such layers with sdpa and a dense mask instead, and logs it. `MMATTN_DEBUG=1` compares about 64
rows of every mask with what the closures of the installed transformers give, and raises where they differ.

The models below match eager attention with tiny random weights, on the CPU in every run of the tests;
`tests/test_hf_gpu.py` has them on a GPU in bfloat16. A test fails if the model took another attention, evaluated a mask or built a dense one."""

DOCUMENT_REFUSED = """## What is refused

* Several key ranges in one row: a 2-D `attention_mask` with a hole that a row sees both sides of (right-padded prompts that are
  then continued; with a window, later rows are fine again), Molmo 2 with more than one image (all image tokens share one block),
  R-SWA (Unlimited-OCR). A 4-D mask of the user, bool or float, is read once and kept if every row sees one interval; else the
  message names the row. In a float mask 0 is visible and -10000 or less is hidden; anything between is a bias and refused.
* A model that calculates with its mask: adds it to scores of its own, joins it with others, looks into it, writes into it. The mask has no elements to
  give, so the operator raises, with the class of the model. Where only a part of a model does that, the rest can still run with
  mmattn: `attn_implementation={"text_config": "mmattn", "vision_config": "sdpa"}`, with the names of its sub-configs. With
  `register(fallback="sdpa")` such models get a dense mask of the kind they are written for; only writes stay refused.
* Dropout in training, `output_attentions=True`, position biases, dense masks that differ between heads.
* Models that pick their attention from a table of their own instead of asking transformers' `AttentionInterface`.
* Images in transformers' continuous batching, which takes text only ([docs/vllm.md](vllm.md#other-engines))."""

DOCUMENT_TAIL = """## Where transformers and vLLM differ

mmattn follows transformers when it runs a transformers model. Whoever passes spans directly chooses.

| | transformers (here) | vLLM 0.33 |
|---|---|---|
| touching images, Gemma 3 and 4 | one span: runs of image tokens merge, in Gemma 4 with video tokens too | one span per item |
| Gemma 3, span longer than the window | kept; cut on the left by the window of sliding layers | dropped on all layers (`spans_from_vllm` in `mmattn.spans` has the rule) |
| PaliGemma | text of the prefix is bidirectional too | only the image |
| PaliGemma 2, sliding layers | the span ignores the window | the same, unless the span is longer than the window: dropped |
| row-separator tokens inside an image | by token type | split the image into several spans |
| bidirectional sliding window `W` | `abs(q - k) <= W`, 2W + 1 keys | `abs(q - k) < W` |
| Llama 4 chunks of a left-padded row | counted from its first real token | rows are not padded |
| rows of padding tokens | eager averages all values, sdpa and mmattn give 0. Who reads them: a loss whose labels are not -100 there (and at the first token after padding on the left, which its last row predicts), and recurrent layers (Mamba hybrids) that do not zero them | rows are not padded |
| documents packed in one row | told apart by `position_ids` that restart (no 2-D mask, no cache), or by `cu_seq_lens_q` | one request each |

Packed documents with images use the block ids of transformers as they are: they count positions from the start of the row,
and such masks are evaluated, so a combination that is not one interval per row is refused."""


if __name__ == "__main__":
    print(document(), end="")
