"""Every model of `hf_models` gives what it gives with eager attention, without a fallback and without a dense mask."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from transformers import DynamicCache, StaticCache, masking_utils

import mmattn.hf
from mmattn.hf import attention as hf_attention
from mmattn.hf import intervals as hf_intervals
from mmattn.hf import masks as hf_masks

from .hf_models import (
    IMAGE_LENGTH,
    TEXT_MODELS,
    VISION_MODELS,
    WIDE_WINDOW,
    WINDOW,
    TextModel,
    VisionModel,
    document,
    text_model,
    vision_model,
)

PROMPT = 37
"""Longer than four windows, and no multiple of one."""


@contextmanager
def only_intervals(model: torch.nn.Module, implementation: Any = "mmattn") -> Iterator[None]:
    """Fails if anything in here takes another attention than mmattn's, evaluates a mask or builds a dense one."""
    mmattn.hf.register()
    calls = {"layers": 0, "mmattn": 0}

    def refuse(name: str) -> Any:
        def refused(*_: Any, **__: Any) -> Any:
            raise AssertionError(f"{name} was called")

        return refused

    real = hf_attention.attention

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls["mmattn"] += 1
        return real(*args, **kwargs)

    def count_layer(*_: Any) -> None:
        calls["layers"] += 1

    # The innermost modules named so: a block such as PhiDecoderAttention around another one counts once.
    layers = [m for m in model.modules() if type(m).__name__.endswith("Attention")]
    layers = [m for m in layers if not any(c is not m and type(c).__name__.endswith("Attention") for c in m.modules())]
    hooks = [layer.register_forward_pre_hook(count_layer) for layer in layers]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hf_attention, "attention", counted)
        patch.setattr(hf_attention, "_sdpa", refuse("the sdpa fallback"))
        patch.setattr(hf_attention, "rows_in_chunks", refuse("the conversion of a dense mask"))
        patch.setattr(hf_masks, "rows_in_chunks", refuse("the evaluation of a mask"))
        patch.setattr(hf_intervals.IntervalMask, "dense", refuse("IntervalMask.dense"))
        patch.setattr(masking_utils, "sdpa_mask", refuse("transformers' sdpa_mask"))
        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", refuse("sdpa"))
        model.set_attn_implementation(implementation)
        try:
            yield
        finally:
            model.set_attn_implementation("eager")
            for hook in hooks:
                hook.remove()
    assert calls["layers"] == calls["mmattn"] > 0


def both(model: torch.nn.Module, run: Any) -> tuple[Any, Any]:
    """`run()` with eager attention and with mmattn."""
    model.set_attn_implementation("eager")
    with torch.no_grad():
        expected = run()
        with only_intervals(model):
            got = run()
    return got, expected


def assert_logits(got: Tensor, expected: Tensor) -> None:
    assert torch.isfinite(got).all()
    # Float32 with another order of summation; a mask wrong by one key is off by over a hundred times this (see below).
    error, size = (got - expected).abs().max(), expected.abs().max()
    assert error <= 1e-4 * size, f"largest error {error:.2e} for logits up to {size:.2e}"


def generate(model: Any, cache: str, new_tokens: int = 6, **inputs: Any) -> tuple[Tensor, Tensor]:
    """Greedy tokens and the logits of each step, with a named kind of cache."""
    # "full": every layer keeps all keys. "dynamic": sliding layers keep a window. "static": fixed buffers of both kinds.
    # On a GPU `generate` would compile the model for the latter; `test_hf.py` has that.
    options: dict[str, Any] = {"disable_compile": True}
    if cache == "full":
        options["past_key_values"] = DynamicCache()
    elif cache == "static":
        options["cache_implementation"] = "static"
        vars(model).pop("_cache", None)  # transformers 5.10 cannot take up again one that a failed call left unfilled
    out = model.generate(
        **inputs,
        **options,
        max_new_tokens=new_tokens,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return out.sequences, torch.stack(out.logits, 1)


def assert_generates(model: torch.nn.Module, cache: str, **inputs: Any) -> None:
    (tokens, logits), (expected_tokens, expected) = both(model, lambda: generate(model, cache, **inputs))
    assert torch.equal(tokens, expected_tokens)
    assert_logits(logits, expected)


def skip_if_it_cannot_generate(case: TextModel) -> None:
    """Older versions of transformers hand their chunked mask builder an argument that it does not take."""
    parameters = inspect.signature(masking_utils.create_chunked_causal_mask).parameters
    if "chunked" in case.masks and "block_sequence_ids" not in parameters:
        with pytest.raises(TypeError, match="block_sequence_ids"):
            model = text_model(case.name)
            model.set_attn_implementation("eager")
            generate(model, "static", input_ids=text(1, 5))
        pytest.skip("this version of transformers cannot generate with chunked layers, whatever the attention")


def text(batch: int, length: int) -> Tensor:
    return torch.randint(3, 90, (batch, length), generator=torch.Generator().manual_seed(length))


each_text_model = pytest.mark.parametrize("case", TEXT_MODELS, ids=lambda m: m.name)
each_vision_model = pytest.mark.parametrize("case", VISION_MODELS, ids=lambda m: m.name)
each_cache = pytest.mark.parametrize("cache", ["full", "dynamic", "static"])


@each_text_model
class TestText:
    def test_prefill_longer_than_the_window(self, case: TextModel) -> None:
        model = text_model(case.name)
        got, expected = both(model, lambda: model(text(2, PROMPT)).logits)
        assert_logits(got, expected)

    def test_a_mask_wrong_by_one_key_shows(self, case: TextModel, monkeypatch: pytest.MonkeyPatch) -> None:
        """The tolerance of every other test here is worth something."""
        model = text_model(case.name)
        lower = hf_masks._lower

        def one_key_short(*args: Any) -> Any:
            mask = lower(*args)
            rows = mask.rows.clone()
            rows[..., 0] += (rows[..., 1] - rows[..., 0] > 1).int()
            return hf_intervals.IntervalMask(rows, mask.shape[3])

        monkeypatch.setattr(hf_masks, "_lower", one_key_short)
        got, expected = both(model, lambda: model(text(2, PROMPT)).logits)
        assert (got - expected).abs().max() > 1e-2 * expected.abs().max()

    @each_cache
    @pytest.mark.parametrize("prompt", [5, PROMPT])
    def test_generate(self, case: TextModel, cache: str, prompt: int) -> None:
        """The short prompt crosses the window while decoding."""
        if cache == "static":
            skip_if_it_cannot_generate(case)
        assert_generates(
            text_model(case.name), cache, input_ids=text(2, prompt), attention_mask=torch.ones(2, prompt).long()
        )

    def test_left_padding(self, case: TextModel) -> None:
        model = text_model(case.name)
        ids, mask = text(2, PROMPT), torch.ones(2, PROMPT).long()
        mask[0, :11] = 0
        got, expected = both(model, lambda: model(ids, attention_mask=mask).logits)
        assert torch.isfinite(got).all()
        assert_logits(got[mask.bool()], expected[mask.bool()])  # rows of padding tokens mean nothing
        skip_if_it_cannot_generate(case)
        for cache in ("dynamic", "static"):
            assert_generates(model, cache, input_ids=ids, attention_mask=mask)

    def test_right_padding(self, case: TextModel) -> None:
        model = text_model(case.name)
        ids, mask = text(2, PROMPT), torch.ones(2, PROMPT).long()
        mask[1, -9:] = 0
        got, expected = both(model, lambda: model(ids, attention_mask=mask).logits)
        assert_logits(got[mask.bool()], expected[mask.bool()])

    @pytest.mark.parametrize("cache", ["dynamic", "static"])
    def test_prefill_in_chunks(self, case: TextModel, cache: str) -> None:
        model = text_model(case.name)
        ids = text(2, PROMPT)

        def run() -> Tensor:
            kept = (
                DynamicCache(config=model.config)
                if cache == "dynamic"
                else StaticCache(config=model.config, max_cache_len=PROMPT + 3)
            )
            return torch.cat([model(part, past_key_values=kept).logits for part in ids.split([3, 13, 1, 20], 1)], 1)

        got, expected = both(model, run)
        assert_logits(got, expected)
        model.set_attn_implementation("eager")
        with torch.no_grad():
            assert_logits(got, model(ids).logits)

    def test_packed_documents(self, case: TextModel) -> None:
        """Documents of 5, 19 and 13 tokens in one row, told apart by positions alone."""
        model = text_model(case.name)
        positions = torch.cat([torch.arange(n) for n in (5, 19, 13)])[None]
        got, expected = both(model, lambda: model(text(1, PROMPT), position_ids=positions, use_cache=False).logits)
        assert_logits(got, expected)
        if not case.packing:
            with torch.no_grad(), only_intervals(model):
                alone = model(text(1, PROMPT)[:, 5:24]).logits
            assert_logits(got[:, 5:24], alone)


LAYOUTS: dict[str, tuple[int, list[str | int]]] = {
    "two images": (WIDE_WINDOW, [5, "image", 6, "image", 9]),
    "touching images": (WIDE_WINDOW, [5, "image", "image", 9]),
    "image longer than the window": (WINDOW, [5, "image", 6, "image", 9]),
    "touching images longer than the window": (WINDOW, [5, "image", "image", 9]),
    "image late in the context": (WINDOW, [40, "image", 5]),
}
"""Sliding window and layout."""


@each_vision_model
class TestVision:
    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_prefill(self, case: VisionModel, layout: str) -> None:
        window, parts = LAYOUTS[layout]
        model = vision_model(case.name, window if window in case.windows else case.windows[0])
        inputs = case.inputs(parts)
        got, expected = both(model, lambda: model(**inputs).logits)
        assert_logits(got, expected)

    def test_images_matter(self, case: VisionModel) -> None:
        """Without their spans the same inputs give something else, so the tests above look at spans."""
        model = vision_model(case.name, case.windows[0])
        inputs = case.inputs([5, "image", 6])
        with torch.no_grad():
            expected = model(**inputs).logits
            inputs[case.token_types] = torch.full_like(
                inputs[case.token_types], 1 if case.name.startswith("Pali") else 0
            )
            if case.name.startswith("Gemma 4"):
                # Image tokens are found by type there too: keep the features and drop the bidirectional mask.
                inputs = case.inputs([5, "image", 6])
                model.config.text_config.use_bidirectional_attention = None
                try:
                    causal = model(**inputs).logits
                finally:
                    model.config.text_config.use_bidirectional_attention = "vision"
            else:
                causal = model(**inputs).logits
        assert (causal - expected).abs().max() > 1e-2 * expected.abs().max()

    @each_cache
    @pytest.mark.parametrize("layout", ["image longer than the window", "image late in the context"])
    def test_generate(self, case: VisionModel, cache: str, layout: str) -> None:
        window, parts = LAYOUTS[layout]
        model = vision_model(case.name, window)
        if cache == "static" and not case.static_cache:
            with pytest.raises(AttributeError, match="'dict' object has no attribute"), torch.no_grad():
                model.set_attn_implementation("eager")
                generate(model, cache, **case.inputs(parts))
            pytest.skip("transformers cannot generate with a static cache here, whatever the attention")
        assert_generates(model, cache, **case.inputs(parts))

    def test_left_padded_batch(self, case: VisionModel) -> None:
        model = vision_model(case.name, WINDOW)
        inputs = case.inputs([5, "image", 6], batch=2, left_padding=7)
        mask = inputs["attention_mask"].bool()
        got, expected = both(model, lambda: model(**inputs).logits)
        assert torch.isfinite(got).all()
        assert_logits(got[mask], expected[mask])
        assert_generates(model, "dynamic", **inputs)

    def test_prefill_in_chunks(self, case: VisionModel) -> None:
        """The second image comes with the second chunk, far behind the window."""
        model = vision_model(case.name, WINDOW)
        inputs = case.inputs([5, "image", 12, "image", 9])
        ends = [5 + IMAGE_LENGTH + 5, inputs["input_ids"].shape[1]]
        per_image = [name for name in inputs if name in ("pixel_values", "image_position_ids")]

        def run() -> Tensor:
            cache, logits, start = DynamicCache(config=model.config.get_text_config()), [], 0
            for i, end in enumerate(ends):
                part = {name: inputs[name][i : i + 1] for name in per_image}
                part["input_ids"] = inputs["input_ids"][:, start:end]
                part["attention_mask"] = inputs["attention_mask"][:, :end]
                part[case.token_types] = inputs[case.token_types][:, :end]
                logits.append(model(**part, past_key_values=cache).logits)
                start = end
            return torch.cat(logits, 1)

        got, expected = both(model, run)
        assert_logits(got, expected)


def test_the_document_is_up_to_date() -> None:
    path = Path(__file__).parent.parent / "docs" / "models.md"
    assert path.read_text(encoding="utf-8") == document(), "run: python -m tests.hf_models > docs/models.md"
