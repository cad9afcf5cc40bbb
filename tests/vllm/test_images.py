"""Models with images in vLLM's engine equal transformers with eager attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mmattn.engines import SplitSpanError
from mmattn.vllm import builder, scheduler

from . import vision
from .engine import HEAD_DIM, NEW_TOKENS, Answer, ask, check, engine, load_eager
from .vision import IMAGE_TOKENS, Prompt

IMAGES: dict[str, Any] = dict(
    skip_tokenizer_init=False, disable_chunked_mm_input=True, limit_mm_per_prompt={"image": 4, "video": 0, "audio": 0}
)
LAYOUTS: list[list[int | str]] = [
    [5, "image", 9],
    [40],
    [50, "image", 3, "image", 30],
    ["image", 1],
    [11, "image", "image", 20],
]


def prompts() -> list[Prompt]:
    return [Prompt(layout, seed=10 * i) for i, layout in enumerate(LAYOUTS)]


class TestGemma3:
    """Images of 16 tokens in a window of 24."""

    @pytest.fixture(scope="class")
    def gemma3(self, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Answer]]:
        folder = vision.gemma3(tmp_path_factory.mktemp("gemma3"), window=24)
        reference = load_eager(folder, "Gemma3ForConditionalGeneration")
        return folder, [prompt.eager(folder, reference, NEW_TOKENS) for prompt in prompts()]

    def test_vllms_own_attention_is_causal_in_images(self, gemma3: tuple[Path, list[Answer]]) -> None:
        """The same engine with vLLM's CPU attention: the reason for this backend."""
        folder, want = gemma3
        with engine(folder, mmattn_backend=False, **IMAGES, max_num_batched_tokens=64) as llm:
            got = ask(llm, [p.for_vllm for p in prompts()])
        check([got[1]], [want[1]])  # text alone is right
        with pytest.raises(AssertionError, match="tokens|log-probability"):
            check([got[0]], [want[0]])

    def test_equal_and_never_split(self, gemma3: tuple[Path, list[Answer]], monkeypatch: pytest.MonkeyPatch) -> None:
        """Chunks of few tokens, a prefix cache whose blocks end within images, and the same prompts again."""
        folder, want = gemma3
        whole: set[tuple[int, int]] = set()
        theirs = builder.fill_row_spans

        def watch(out: Any, spans: Any, row_offsets: Any, kv_lens: Any) -> bool:
            for request, ranges in spans.items():
                rows = row_offsets[request + 1] - row_offsets[request] if request + 1 < len(row_offsets) else 0
                first, last = kv_lens[request] - rows, kv_lens[request] - 1
                for start, end in ranges if rows else ():
                    if first <= end and start <= last:
                        assert end <= last, f"rows {first}..{last} end within the image ({start}, {end})"
                        whole.add((start, end))
            return theirs(out, spans, row_offsets, kv_lens)

        monkeypatch.setattr(builder, "fill_row_spans", watch)
        with engine(folder, **IMAGES, max_num_batched_tokens=40, enable_prefix_caching=True) as llm:
            check(ask(llm, [p.for_vllm for p in prompts()]), want)
            tokens = [Answer(a.tokens, []) for a in want]
            check(ask(llm, [p.for_vllm for p in prompts()], logprobs=False), tokens)
        assert {end - start + 1 for start, end in whole} == {IMAGE_TOKENS}

    def test_without_the_rule_of_the_scheduler(
        self, gemma3: tuple[Path, list[Answer]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """vLLM alone splits an image at which a chunk begins. Such a step is refused, not computed wrongly."""
        folder, _ = gemma3
        monkeypatch.setattr(scheduler, "wanted", lambda config: False)
        with engine(folder, **IMAGES, max_num_batched_tokens=40) as llm:
            with pytest.raises(SplitSpanError, match="ends within the span"):
                ask(llm, [p.for_vllm for p in prompts()])

    def test_chunked_images_are_refused_at_the_start(self, gemma3: tuple[Path, list[Answer]]) -> None:
        folder, _ = gemma3
        with pytest.raises(ValueError, match="--disable-chunked-mm-input"):
            with engine(folder, **{**IMAGES, "disable_chunked_mm_input": False}):
                pass


@pytest.mark.parametrize("separate_groups", [True, False])
def test_gemma4_with_images_longer_than_the_window(
    tmp_path: Path, separate_groups: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Images of 64 tokens in a window of 40, on sliding layers only: the model clears the spans of its global layers in
    every step, also where both kinds of layers, of one head dim, share a group. In separate groups the last two layers share
    keys and values (which vLLM 0.32 cannot do in one group)."""
    groups: list[int] = []
    theirs = builder.MMAttentionMetadataBuilder.__init__

    def count(self: Any, spec: Any, layers: list[str], *args: Any) -> None:
        groups.append(len(layers))
        theirs(self, spec, layers, *args)

    monkeypatch.setattr(builder.MMAttentionMetadataBuilder, "__init__", count)
    shape = dict(kv_shared=2) if separate_groups else dict(global_head_dim=HEAD_DIM)
    folder = vision.gemma4(tmp_path, window=40, **shape)
    layouts: list[list[int | str]] = [[5, "image", 9], [90], [30, "image", 3, "image", 30], ["image", 1]]
    asked = [Prompt(layout, seed=10 * i, marker="<image>") for i, layout in enumerate(layouts)]
    reference = load_eager(folder, "Gemma4ForConditionalGeneration")
    want = [prompt.eager(folder, reference, NEW_TOKENS) for prompt in asked]
    with engine(
        folder, **IMAGES, max_num_batched_tokens=128, disable_hybrid_kv_cache_manager=not separate_groups
    ) as llm:
        check(ask(llm, [p.for_vllm for p in asked]), want)
    assert len(groups) == (2 if separate_groups else 1), groups
