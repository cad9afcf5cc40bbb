"""Text models in vLLM's engine equal transformers with eager attention: chunks, mixed batches, prefix cache, preemption."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers

from .engine import ALTERNATING, HEAD_DIM, SIZES, WINDOW, Answer, ask, check, eager, engine, load_eager, prompts, save

GEMMA: dict[str, Any] = dict(
    SIZES, num_hidden_layers=4, head_dim=HEAD_DIM, query_pre_attn_scalar=HEAD_DIM, sliding_window=WINDOW,
    layer_types=ALTERNATING,
)  # fmt: skip
MODELS: dict[str, tuple[str, Any]] = {
    "gemma3": ("Gemma3ForCausalLM", lambda: transformers.Gemma3TextConfig(**GEMMA)),
    "gemma2": (
        "Gemma2ForCausalLM",
        lambda: transformers.Gemma2Config(**GEMMA, attn_logit_softcapping=3.0, final_logit_softcapping=None),
    ),
    "mistral": (
        "MistralForCausalLM",
        lambda: transformers.MistralConfig(**SIZES, num_hidden_layers=2, head_dim=HEAD_DIM, sliding_window=WINDOW),
    ),
    "gpt-oss": (
        "GptOssForCausalLM",
        lambda: transformers.GptOssConfig(
            **SIZES, num_hidden_layers=2, head_dim=HEAD_DIM, sliding_window=WINDOW, layer_types=ALTERNATING[:2],
            num_local_experts=4, num_experts_per_tok=2,
            rope_parameters=dict(
                rope_type="yarn", rope_theta=1e4, factor=4.0, beta_fast=32.0, beta_slow=1.0, truncate=False,
                original_max_position_embeddings=256,
            ),
        ),
    ),
}  # fmt: skip
PROMPTS = prompts(3, 150, 64, 97, 1, 33)


def make(name: str, folder: Path) -> list[Answer]:
    """Writes a checkpoint; what transformers says to the prompts."""
    architecture, config = MODELS[name]
    save(getattr(transformers, architecture)(config()), folder)
    reference = load_eager(folder, architecture)
    return [eager(reference, ids) for ids in PROMPTS]


@pytest.mark.parametrize("name", ["gemma2", "mistral", "gpt-oss"])
def test_model(name: str, tmp_path: Path) -> None:
    """Softcap; a window on every layer; sinks. Chunks of at most 64 tokens, with decode rows beside them."""
    want = make(name, tmp_path)
    with engine(tmp_path, max_num_batched_tokens=64) as llm:
        check(ask(llm, PROMPTS), want)


class TestGemma3:
    @pytest.fixture(scope="class")
    def gemma3(self, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Answer]]:
        folder = tmp_path_factory.mktemp("gemma3")
        return folder, make("gemma3", folder)

    @pytest.mark.parametrize("tokens", [13, 512])
    def test_chunks(self, gemma3: tuple[Path, list[Answer]], tokens: int) -> None:
        """Chunks that fit no block, and whole prompts."""
        folder, want = gemma3
        with engine(folder, max_num_batched_tokens=tokens) as llm:
            check(ask(llm, PROMPTS), want)

    def test_prefix_cache_and_preemption(
        self, gemma3: tuple[Path, list[Answer]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Prompts come back and find their blocks; and there are too few blocks for five requests that all need another one
        after a few tokens."""
        from vllm.v1.core.sched.scheduler import Scheduler

        folder, _ = gemma3
        asked = prompts(62, 62, 62, 62, 62, 33)
        reference = load_eager(folder, MODELS["gemma3"][0])
        want = [Answer(eager(reference, ids).tokens, []) for ids in asked]
        preempted: list[str] = []
        theirs = Scheduler._preempt_request

        def preempt(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
            preempted.append(request.request_id)
            return theirs(self, request, *args, **kwargs)

        monkeypatch.setattr(Scheduler, "_preempt_request", preempt)
        options = dict(enable_prefix_caching=True, num_gpu_blocks_override=14, max_model_len=96)
        with engine(folder, **options, max_num_batched_tokens=64) as llm:
            check(ask(llm, asked, logprobs=False), want)
            assert preempted
            check(ask(llm, asked[-1:], logprobs=False), want[-1:])
            cached = llm.generate([{"prompt_token_ids": asked[-1]}], sampling(), use_tqdm=False)[0].num_cached_tokens
        assert cached == 32


def sampling() -> Any:
    from vllm import SamplingParams

    return SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
