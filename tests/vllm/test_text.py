"""Text models in vLLM's engine equal transformers with eager attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers

from .engine import ALTERNATING, HEAD_DIM, SIZES, WINDOW, ask, check, eager, engine, load_eager, prompts, save

GEMMA3 = dict(SIZES, num_hidden_layers=4, head_dim=HEAD_DIM, query_pre_attn_scalar=HEAD_DIM, sliding_window=WINDOW, layer_types=ALTERNATING)  # fmt: skip
MODELS: dict[str, tuple[str, Any]] = {
    "gemma3": ("Gemma3ForCausalLM", lambda: transformers.Gemma3TextConfig(**GEMMA3)),
    "gemma2": (
        "Gemma2ForCausalLM",
        lambda: transformers.Gemma2Config(**GEMMA3, attn_logit_softcapping=3.0, final_logit_softcapping=None),
    ),
    "mistral": (
        "MistralForCausalLM",
        lambda: transformers.MistralConfig(**SIZES, num_hidden_layers=2, head_dim=HEAD_DIM, sliding_window=WINDOW),
    ),
    "gpt-oss": (
        "GptOssForCausalLM",
        lambda: transformers.GptOssConfig(
            **SIZES, num_hidden_layers=2, head_dim=HEAD_DIM, sliding_window=WINDOW, layer_types=ALTERNATING[:2],
            num_local_experts=4, num_experts_per_tok=2, rope_parameters=dict(
                rope_type="yarn", rope_theta=1e4, factor=4.0, beta_fast=32.0, beta_slow=1.0, truncate=False,
                original_max_position_embeddings=256,
            ),
        ),
    ),
}  # fmt: skip
PROMPTS = prompts(3, 150, 64, 97, 1, 33)


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    architecture, config = MODELS[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    return save(getattr(transformers, architecture)(config()), folder), architecture


def test_text(model: tuple[Path, str]) -> None:
    folder, architecture = model
    reference = load_eager(folder, architecture)
    want = [eager(reference, ids) for ids in PROMPTS]
    with engine(folder, max_num_batched_tokens=64) as llm:
        check(ask(llm, PROMPTS), want)
