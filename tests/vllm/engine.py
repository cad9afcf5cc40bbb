"""Tiny random models in vLLM's engine and in transformers, and what both say to the same prompts."""

from __future__ import annotations

import gc
import json
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import transformers

import mmattn.vllm

BLOCK = 32
NEW_TOKENS = 6
WINDOW = 40
VOCAB = 128
HEAD_DIM = 32
"""The least that vLLM's own CPU attention takes, so that the two can be compared."""

SIZES: dict[str, Any] = dict(
    vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=1024, attention_dropout=0.0, bos_token_id=1, eos_token_id=2, pad_token_id=0,
)  # fmt: skip
ALTERNATING = ["sliding_attention", "full_attention"] * 2


@dataclass
class Answer:
    tokens: list[int]
    """Greedy continuation."""
    logprobs: list[float]
    """Of prompt tokens 1, 2, ..."""


def randomise(model: torch.nn.Module) -> torch.nn.Module:
    """Weights large enough that a mask wrong by one key shows in the log-probabilities."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() >= 2:
                weight.normal_(0, 1.5 * weight.shape[-1] ** -0.5, generator=generator)
            elif "sink" in name:
                weight.normal_(0, 1.0, generator=generator)
    model.generation_config.eos_token_id = None
    return model.eval()


def save(model: torch.nn.Module, folder: Path) -> Path:
    """The model as a checkpoint that both sides load."""
    randomise(model).save_pretrained(folder)
    return folder


def _known_here(folder: Path) -> None:
    """Gives vLLM the model's class. Otherwise it asks a process of its own about it, which imports all of vLLM again."""
    from vllm import ModelRegistry
    from vllm.model_executor.models.registry import _VLLM_MODELS

    (architecture,) = json.loads((folder / "config.json").read_text())["architectures"]
    module, name = _VLLM_MODELS[architecture][:2]
    ModelRegistry.register_model(architecture, getattr(import_module(f"vllm.model_executor.models.{module}"), name))


@contextmanager
def engine(folder: Path, *, mmattn_backend: bool = True, **options: Any):
    """vLLM's engine over a checkpoint, in float32 in this process, with mmattn or with vLLM's own CPU attention."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    settings: dict[str, Any] = dict(
        model=str(folder), dtype="float32", enforce_eager=True, skip_tokenizer_init=True, max_model_len=512,
        block_size=BLOCK, max_num_seqs=8, enable_prefix_caching=False, seed=0, disable_log_stats=True,
    )  # fmt: skip
    _known_here(folder)
    mmattn.vllm.use(mmattn_backend)
    llm = LLM(**{**settings, **options})
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        cleanup_dist_env_and_memory()
        gc.collect()
        mmattn.vllm.use(False)


def ask(llm: Any, prompts: list[Any], new_tokens: int = NEW_TOKENS, logprobs: bool = True) -> list[Answer]:
    """What vLLM says; a prompt is token ids, or vLLM's dict of token ids and multimodal data."""
    from vllm import SamplingParams

    sampling = SamplingParams(
        temperature=0.0,
        max_tokens=new_tokens,
        ignore_eos=True,
        detokenize=False,
        prompt_logprobs=0 if logprobs else None,
    )
    prompts = [p if isinstance(p, dict) else {"prompt_token_ids": p} for p in prompts]
    answers = []
    for output in llm.generate(prompts, sampling, use_tqdm=False):
        rows = output.prompt_logprobs or []
        scores = [row[token].logprob for token, row in zip(output.prompt_token_ids[1:], rows[1:])]
        answers.append(Answer(list(output.outputs[0].token_ids), scores))
    return answers


@torch.no_grad()
def eager(model: torch.nn.Module, ids: list[int], new_tokens: int = NEW_TOKENS, **inputs: Any) -> Answer:
    """What transformers says, with eager attention and without a cache: the plainest computation there is.

    `inputs` whose second dimension is the prompt's (token types) grow with zeros.
    """
    tokens: list[int] = []
    for _ in range(new_tokens + 1):
        row = torch.tensor([ids + tokens])
        grown = {
            name: torch.nn.functional.pad(x, (0, len(tokens))) if x.dim() == 2 and x.shape[1] == len(ids) else x
            for name, x in inputs.items()
        }
        logits = model(input_ids=row, use_cache=False, **grown).logits[0].float()
        tokens.append(int(logits[-1].argmax()))
    scores = logits.log_softmax(-1)
    # The last pass holds prompt and continuation; causal rows of the prompt do not change with it.
    return Answer(tokens[:-1], [float(scores[i, ids[i + 1]]) for i in range(len(ids) - 1)])


def load_eager(folder: Path, architecture: str) -> torch.nn.Module:
    model = getattr(transformers, architecture).from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    )
    return model.eval()


def check(got: list[Answer], want: list[Answer], tolerance: float = 2e-4) -> None:
    """Same tokens, and log-probabilities as near as two float32 computations of one model are."""
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        assert a.tokens == b.tokens, f"prompt {i}: tokens {a.tokens}, transformers {b.tokens}"
        worst = max(abs(x - y) for x, y in zip(a.logprobs, b.logprobs, strict=True)) if b.logprobs else 0.0
        assert worst < tolerance, f"prompt {i}: a log-probability is off by {worst}"


def prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, VOCAB - 8, (n,), generator=generator).tolist() for n in lengths]
