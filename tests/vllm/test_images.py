"""Models with images in vLLM's engine equal transformers with eager attention."""

from __future__ import annotations

from pathlib import Path

import pytest

from . import vision
from .engine import NEW_TOKENS, Answer, ask, check, engine, load_eager
from .vision import Prompt

IMAGES = dict(skip_tokenizer_init=False, disable_chunked_mm_input=True, limit_mm_per_prompt={"image": 4})
LAYOUTS: list[list[int | str]] = [
    [5, "image", 9],
    [40],
    [50, "image", 3, "image", 30],
    ["image", 1],
    [11, "image", "image", 20],
]


@pytest.fixture(scope="module")
def gemma3(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Answer]]:
    folder = vision.gemma3(tmp_path_factory.mktemp("gemma3"), window=24)
    reference = load_eager(folder, "Gemma3ForConditionalGeneration")
    return folder, [prompt.eager(folder, reference, NEW_TOKENS) for prompt in prompts()]


def prompts() -> list[Prompt]:
    return [Prompt(layout, seed=10 * i) for i, layout in enumerate(LAYOUTS)]


def test_gemma3(gemma3: tuple[Path, list[Answer]]) -> None:
    folder, want = gemma3
    with engine(folder, **IMAGES, max_num_batched_tokens=64) as llm:
        check(ask(llm, [p.for_vllm for p in prompts()]), want)


def test_vllms_own_attention_is_causal_in_images(gemma3: tuple[Path, list[Answer]]) -> None:
    """The same engine with vLLM's CPU attention: the reason for this backend."""
    folder, want = gemma3
    with engine(folder, mmattn_backend=False, **IMAGES, max_num_batched_tokens=64) as llm:
        got = ask(llm, [p.for_vllm for p in prompts()])
    check([got[1]], [want[1]])  # text alone is right
    with pytest.raises(AssertionError, match="tokens|log-probability"):
        check([got[0]], [want[0]])
