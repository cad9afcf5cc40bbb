"""Continuous batching of transformers: with mmattn it generates what it does with transformers' own paged attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers.generation.continuous_batching")

from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

import mmattn.hf
from mmattn.hf import paged

from .hf_models import TEXT_MODELS, VOCAB

OWN = {"Gemma 3 text": "sdpa", "Mistral": "sdpa", "Qwen 3": "sdpa", "gpt-oss": "paged|eager"}
"""transformers' sdpa has no sinks."""
LENGTHS = (3, 40, 17, 29, 1, 12)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    made = [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in LENGTHS]
    return [*made, made[1][:32] + made[2]]  # shares a prefix


def build(name: str, **options: Any) -> Any:
    known = next(m for m in TEXT_MODELS if m.name == name)
    return replace(known, options={**known.options, **options}).build()


def run(model: Any, implementation: str, **config: Any) -> list[list[int]]:
    mmattn.hf.register()
    model.set_attn_implementation(implementation)
    settings = dict(
        page_size=16, num_blocks=64, max_batch_tokens=24, use_async_batching=False, auto_switch_to_flash=False
    )
    generation = GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0)
    answers = model.generate_batch(
        prompts(), generation_config=generation,
        continuous_batching_config=ContinuousBatchingConfig(**{**settings, **config}),
    )  # fmt: skip
    assert all(answer.error is None for answer in answers.values()), [answer.error for answer in answers.values()]
    by_prompt = {tuple(answer.prompt_ids): answer.generated_tokens for answer in answers.values()}
    return [by_prompt[tuple(ids)] for ids in prompts()]


@pytest.mark.parametrize("name", OWN)
def test_same_tokens(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts in chunks, decode rows beside them, full and sliding groups."""
    model = build(name)
    want = run(model, OWN[name])
    calls = []
    theirs = paged.attention
    monkeypatch.setattr(paged, "attention", lambda *a, **k: calls.append(a[0].shape[0]) or theirs(*a, **k))
    assert run(model, "mmattn") == want
    assert calls and max(calls) > len(LENGTHS) + 1  # it ran here, and chunks were longer than one token for each


def test_decode_with_block_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of full layers: when every request decodes, keys are read from their pages."""
    model = build("Qwen 3", layer_types=["full_attention"] * 4, use_sliding_window=False)
    want = run(model, "sdpa", max_batch_tokens=128)
    seen = []
    theirs = paged._append
    monkeypatch.setattr(paged, "_append", lambda *a: seen.append(1) or theirs(*a))
    assert run(model, "mmattn", max_batch_tokens=128, max_blocks_per_request=8) == want
    assert len(seen) >= 4 * 4


def test_other_names_are_still_refused() -> None:
    from transformers import AttentionInterface

    AttentionInterface.register("stranger", lambda *a, **k: None)
    with pytest.raises(ValueError, match="stranger is not supported for continuous batching"):
        run(build("Mistral"), "stranger")


def test_the_plan_is_made_once_per_group(monkeypatch: pytest.MonkeyPatch) -> None:
    from mmattn.engines import step

    made = []
    theirs = step.plan
    monkeypatch.setattr(step, "plan", lambda mask, **k: made.append(mask) or theirs(mask, **k))
    steps = []
    compute = paged.import_module(f"{paged._PACKAGE}.model_runner").ModelRunner.compute_batch
    runner = paged.import_module(f"{paged._PACKAGE}.model_runner").ModelRunner
    monkeypatch.setattr(runner, "compute_batch", lambda *a: steps.append(1) or compute(*a))
    run(build("Gemma 3 text"), "mmattn")
    assert len(made) == 2 * len(steps)
