"""The transformers integration piece by piece; `test_hf_models.py` has the models."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("transformers")

from transformers import StaticCache
from transformers import masking_utils as hf

import mmattn
import mmattn.hf
from mmattn.hf import masks
from mmattn.hf.intervals import IntervalMask, rows_of

from .hf_models import text_model
from .test_hf_models import PROMPT, assert_logits, both, only_intervals, text


def dense(**args: Any) -> Tensor:
    """What transformers makes of the same arguments, element by element."""
    mask = hf.sdpa_mask(**args, allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
    return mask.expand(args["batch_size"], 1, args["q_length"], args["kv_length"])


def intervals(**args: Any) -> IntervalMask:
    return masks.mask_function(**args)


def assert_same(mask: IntervalMask, expected: Tensor) -> None:
    assert mask.shape == expected.shape and mask.dtype == expected.dtype == torch.bool
    assert torch.equal(mask.dense(), expected), f"{mask}\n{mask.dense().int()}\n{expected.int()}"


def bidirectional_blocks(*ids: int) -> Tensor:
    return torch.tensor([ids])


def packed(function: Any, positions: list[int]) -> Any:
    """Two documents, of 3 and 5 tokens; older versions of transformers do not restart the positions."""
    documents, restart = torch.tensor([[0] * 3 + [1] * 5]), getattr(hf, "packed_sequence_compatibility_function", None)
    if restart is None:
        return hf.and_masks(function, hf.packed_sequence_mask_function(documents))
    return restart(function, torch.tensor([positions]), documents)


# The closures of transformers


@st.composite
def mask_arguments(draw: Any) -> dict[str, Any]:
    """Arguments as transformers' mask builders compose them, over all their ingredients."""
    batch, q, before = draw(st.integers(1, 3)), draw(st.integers(1, 12)), draw(st.integers(0, 9))
    kv_offset = draw(st.integers(0, before))
    kv = before + q - kv_offset + draw(st.integers(0, 5))  # a static cache holds slots that are not filled yet
    total = kv_offset + kv
    window = draw(st.integers(1, 8))
    left_padding = torch.tensor([draw(st.integers(0, 3)) for _ in range(batch)])
    kinds = {
        "causal": hf.causal_mask_function,
        "bidirectional": hf.bidirectional_mask_function,
        "sliding": hf.sliding_window_causal_mask_function(window),
        "bidirectional sliding": hf.sliding_window_bidirectional_mask_function(window),
        "chunked": hf.chunked_causal_mask_function(window, left_padding),
    }
    kind = draw(st.sampled_from(sorted(kinds)))
    function = kinds[kind]
    if draw(st.booleans()):
        lengths = draw(st.lists(st.integers(1, 5), min_size=1, max_size=total))
        ids = torch.full((batch, total), -1)
        for b in range(batch):
            at = 0
            for block, n in enumerate(lengths):
                if draw(st.booleans()):
                    ids[b, at : at + n] = block
                at += n
        function = hf.or_masks(function, hf.blockwise_overlay(ids))
        if kind != "chunked" and draw(st.booleans()):
            function = hf.and_masks(function, hf.sliding_window_overlay(draw(st.integers(1, 8))))
    padding = None
    if draw(st.booleans()):
        padding = torch.ones(batch, draw(st.integers(1, total)), dtype=torch.bool)
        for b in range(batch):
            padding[b, : draw(st.integers(0, padding.shape[1]))] = False
    offset = torch.tensor(before) if draw(st.booleans()) else before
    return dict(
        batch_size=batch, q_length=q, kv_length=kv, q_offset=offset, kv_offset=kv_offset, mask_function=function,
        attention_mask=padding,
    )  # fmt: skip


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(mask_arguments())
def test_masks_equal_those_of_transformers(args: dict[str, Any]) -> None:
    expected = dense(**args)
    mask = intervals(**args)
    if mask.about.refusal is not None:  # a small window inside, blocks, and a larger window around them leave a hole
        assert rows_of(expected[:, 0])[1].any()
        return
    assert_same(mask, expected)


@pytest.mark.parametrize(
    "function",
    [
        hf.causal_mask_function,
        hf.bidirectional_mask_function,
        hf.sliding_window_causal_mask_function(3),
        hf.sliding_window_bidirectional_mask_function(3),
        hf.chunked_causal_mask_function(3, torch.tensor([1])),
        hf.or_masks(hf.causal_mask_function, hf.blockwise_overlay(bidirectional_blocks(-1, 0, 0, -1, 1, 1, 1, -1))),
        hf.or_masks(
            hf.sliding_window_causal_mask_function(2), hf.blockwise_overlay(bidirectional_blocks(0, 0, 0, 0, 0, -1, -1, -1))
        ),
        hf.and_masks(
            hf.or_masks(hf.causal_mask_function, hf.blockwise_overlay(bidirectional_blocks(-1, 0, 0, 0, 0, 0, -1, -1))),
            hf.sliding_window_overlay(3),
        ),
        hf.and_masks(hf.causal_mask_function, hf.padding_mask_function(torch.arange(8)[None] > 2)),
        packed(hf.sliding_window_causal_mask_function(3), [0, 1, 2, 0, 1, 2, 3, 4]),
        packed(hf.chunked_causal_mask_function(2, torch.tensor([0])), [3, 4, 5, 0, 1, 2, 3, 4]),
        hf.and_masks(hf.bidirectional_mask_function, hf.packed_sequence_mask_function(torch.tensor([[0, 0, 0, -1, -1, 2, 2, 2]]))),
    ],
)  # fmt: skip
def test_known_closures_are_not_evaluated(function: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    args = dict(batch_size=1, q_length=8, kv_length=8, mask_function=function)
    expected = dense(**args)
    monkeypatch.setattr(hf, "sdpa_mask", None)
    assert_same(intervals(**args), expected)


def test_a_block_longer_than_the_window_is_cut_on_the_left_only() -> None:
    function = hf.and_masks(
        hf.or_masks(hf.causal_mask_function, hf.blockwise_overlay(bidirectional_blocks(-1, 0, 0, 0, 0, 0, -1))),
        hf.sliding_window_overlay(3),
    )
    mask = intervals(batch_size=1, q_length=7, kv_length=7, mask_function=function)
    assert mask.rows[0].tolist() == [[0, 1], [0, 6], [0, 6], [1, 6], [2, 6], [3, 6], [4, 7]]


def test_a_wider_window_around_a_narrow_one_and_blocks() -> None:
    """Two left bounds, one for plain keys and one for blocks: not a `Mask`, so it is evaluated."""
    blocks = hf.blockwise_overlay(bidirectional_blocks(-1, 0, 0, 0, 0, 0, -1))
    narrow = hf.or_masks(hf.sliding_window_causal_mask_function(2), blocks)
    args = dict(batch_size=1, q_length=7, kv_length=7, mask_function=hf.and_masks(narrow, hf.sliding_window_overlay(4)))
    mask = intervals(**args)
    assert mask.rows[0, 5].tolist() == [2, 6]
    assert_same(mask, dense(**args))


def test_bidirectional_windows_are_inclusive() -> None:
    """transformers sees `|q - k| <= W` there, 2W + 1 keys, where flash-attention and vLLM see 2W - 1."""
    function = hf.sliding_window_bidirectional_mask_function(2)
    mask = intervals(batch_size=1, q_length=9, kv_length=9, mask_function=function)
    assert mask.rows[0, 4].tolist() == [2, 7]


def test_unknown_closures_are_evaluated() -> None:
    def every_third_start(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (k >= q // 3 * 3) & (k <= q + 1)

    for function in (every_third_start, hf.and_masks(hf.causal_mask_function, every_third_start)):
        args = dict(
            batch_size=2, q_length=11, kv_length=13, q_offset=torch.tensor(2), mask_function=function, use_vmap=True
        )
        mask = intervals(**args)
        assert_same(mask, dense(**args))
        assert "every_third_start" in mask.about.origin


def test_evaluation_goes_in_row_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmattn.hf.intervals.CHUNK_ELEMENTS", 64)
    args = dict(
        batch_size=2, q_length=29, kv_length=31, q_offset=2, mask_function=lambda b, h, q, k: (k <= q) & (k > q - 5)
    )
    expected, sizes, real = dense(**args), [], hf.sdpa_mask

    def watched(**kwargs: Any) -> Tensor:
        sizes.append(kwargs["q_length"] * kwargs["kv_length"])
        return real(**kwargs)

    monkeypatch.setattr(hf, "sdpa_mask", watched)
    assert_same(intervals(**args), expected)
    assert len(sizes) == 29 and max(sizes) == 31


def test_a_hole_in_the_padding_is_refused_with_its_row() -> None:
    padding = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 0, 0, 1, 1]]).bool()
    mask = intervals(batch_size=2, q_length=2, kv_length=6, q_offset=4, attention_mask=padding)
    assert mask.about.refusal is not None
    assert mask.about.refusal == "row 4 of sequence 1 sees 2 separate key ranges (0..1, 4..4)"
    # Only rows that see both sides of the hole are at fault.
    assert_same(
        intervals(batch_size=2, q_length=2, kv_length=6, q_offset=0, attention_mask=padding),
        dense(batch_size=2, q_length=2, kv_length=6, q_offset=0, attention_mask=padding),
    )


def test_one_block_in_two_pieces_is_refused() -> None:
    """Molmo 2 gives all of its images one id."""
    function = hf.or_masks(hf.causal_mask_function, hf.blockwise_overlay(bidirectional_blocks(0, 0, -1, 0, 0)))
    mask = intervals(batch_size=1, q_length=5, kv_length=5, mask_function=function)
    assert (
        mask.about.refusal is not None
        and "row 0 of sequence 0 sees 2 separate key ranges (0..1, 3..4)" in mask.about.refusal
    )


def test_the_live_offset_of_a_static_cache_is_copied() -> None:
    offset = torch.tensor(3)
    mask = intervals(batch_size=1, q_length=2, kv_length=8, q_offset=offset)
    offset.add_(2)
    assert mask.plan.rows.tolist() == [[0, 4], [0, 5]]


def test_a_refused_mask_keeps_the_offset_it_was_made_with() -> None:
    offset = torch.tensor(3)
    args = dict(batch_size=1, q_length=2, kv_length=8, mask_function=lambda b, h, q, k: (k <= q) & (k != 1))
    mask, expected = intervals(q_offset=offset, fallback="sdpa", **args), dense(q_offset=3, **args)
    offset.add_(2)
    assert mask.about.refusal is not None and torch.equal(mask.dense(), expected)


@pytest.mark.parametrize("debug", ["0", "1"])
def test_closures_are_verified_in_debug_mode(debug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A transformers whose window meant one key more would not go unnoticed."""
    monkeypatch.setenv("MMATTN_DEBUG", debug)
    padding = torch.ones(2, 200, dtype=torch.bool)
    padding[0, :7] = False
    args = dict(
        batch_size=2, q_length=150, kv_length=200, q_offset=torch.tensor(50), attention_mask=padding,
        mask_function=hf.sliding_window_causal_mask_function(9),
    )  # fmt: skip
    assert_same(intervals(**args), dense(**args))
    monkeypatch.setitem(
        masks._leaves(), hf.sliding_window_overlay(1).__code__, (("sliding_window",), lambda w: masks.Rule(left=w))
    )
    if debug == "0":
        intervals(**args)
    else:
        with pytest.raises(
            RuntimeError, match="row 0 of sequence 0 it shows 10 keys from 41 to 50, not 9 keys from 42"
        ):
            intervals(**args)


class _Sizes(TorchDispatchMode):
    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(x, Tensor) and not isinstance(x, IntervalMask):
                self.largest = max(self.largest, x.untyped_storage().nbytes() if x.device.type != "meta" else 0)
        return result


def test_memory_follows_the_rows() -> None:
    length = 32768
    ids = torch.full((1, length), -1)
    ids[0, 1000:3000], ids[0, 20000:20500] = 0, 1
    function = hf.and_masks(
        hf.or_masks(hf.causal_mask_function, hf.blockwise_overlay(ids)), hf.sliding_window_overlay(1024)
    )
    padding = torch.ones(1, length, dtype=torch.bool)
    with _Sizes() as sizes:
        mask = intervals(
            batch_size=1, q_length=length, kv_length=length, mask_function=function, attention_mask=padding
        )
    assert mask.rows.numel() * 4 == 256 * 1024  # a bool mask would have 1 GiB
    assert sizes.largest <= 64 * length


# Whole models


def test_a_refusal_names_model_layer_and_row() -> None:
    model, mask = text_model("Mistral"), torch.ones(1, PROMPT).long()
    mask[0, 20] = 0
    mmattn.hf.register()
    model.set_attn_implementation("mmattn")
    with pytest.raises(mmattn.UnsupportedError) as error:
        model(text(1, PROMPT), attention_mask=mask)
    message = str(error.value)
    assert "Mistral" in message and "layer 0" in message and "fallback" in message
    assert "row 21 of sequence 0 sees 2 separate key ranges (14..19, 21..21)" in message


def test_the_fallback_is_opt_in_and_loud(caplog: pytest.LogCaptureFixture) -> None:
    model, mask = text_model("Mistral"), torch.ones(1, PROMPT).long()
    mask[0, 20] = 0
    mmattn.hf.register("mmattn_lenient", fallback="sdpa")
    with torch.no_grad():
        model.set_attn_implementation("eager")
        expected = model(text(1, PROMPT), attention_mask=mask).logits
        model.set_attn_implementation("mmattn_lenient")
        with caplog.at_level(logging.WARNING, "mmattn.hf"):
            got = model(text(1, PROMPT), attention_mask=mask).logits
    assert_logits(got, expected)
    assert "runs with sdpa and a dense mask" in caplog.text


def test_the_fallback_does_not_drop_sinks() -> None:
    model, mask = text_model("gpt-oss"), torch.ones(1, PROMPT).long()
    mask[0, 20] = 0
    mmattn.hf.register("mmattn_lenient", fallback="sdpa")
    model.set_attn_implementation("mmattn_lenient")
    with pytest.raises(mmattn.UnsupportedError, match="sinks"):
        model(text(1, PROMPT), attention_mask=mask)


def own_mask(kind: str) -> Tensor:
    q, k = torch.arange(PROMPT)[:, None], torch.arange(PROMPT)
    seen = ((k <= q) & (k > q - 11))[None, None]
    return seen if kind == "bool" else torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)


def test_a_dense_mask_of_the_user_is_read_once() -> None:
    model = text_model("Mistral")
    mmattn.hf.register()
    for kind in ("bool", "float"):
        mask = own_mask(kind)
        with torch.no_grad():
            model.set_attn_implementation("sdpa")
            expected = model(text(2, PROMPT), attention_mask=mask).logits
            model.set_attn_implementation("mmattn")
            got = model(text(2, PROMPT), attention_mask=mask).logits
            assert_logits(got, expected)
            mask[..., :30] = 0 if kind == "bool" else torch.finfo(torch.float32).min  # changed in place: read again
            assert not torch.allclose(model(text(2, PROMPT), attention_mask=mask).logits, got)


@pytest.mark.parametrize(
    ("mask", "problem"),
    [
        (own_mask("float") * 1e-38 + 0.5, "biases"),
        (own_mask("bool").expand(1, 4, -1, -1) & (torch.arange(4)[:, None, None] > 0), "between heads"),
        (own_mask("bool") & (torch.arange(PROMPT) != 20), "separate key ranges"),
        (own_mask("bool")[..., :5], "must be"),
        (own_mask("bool").int(), "bool or floating-point"),
    ],
)
def test_dense_masks_that_are_refused(mask: Tensor, problem: str) -> None:
    model = text_model("Mistral")
    mmattn.hf.register()
    model.set_attn_implementation("mmattn")
    with pytest.raises(mmattn.UnsupportedError, match=problem):
        model(text(1, PROMPT), attention_mask=mask)


def layer(**attributes: Any) -> torch.nn.Module:
    module = torch.nn.Module()
    for name, value in {"layer_idx": 3, "is_causal": True, **attributes}.items():
        setattr(module, name, value)
    return module


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (dict(dropout=0.1), "dropout=0.1"),
        (dict(output_attentions=True), "eager"),
        (dict(position_bias=torch.zeros(1)), "position_bias"),
        (dict(cache=object()), "cache"),
    ],
)
def test_what_is_not_supported_is_refused(options: dict[str, Any], problem: str) -> None:
    x = torch.zeros(1, 2, 4, 8)
    with pytest.raises(mmattn.UnsupportedError, match=f"layer 3.*\n.*{problem}"):
        mmattn.hf.attention.attention_function(layer(), x, x, x, None, **options)


def test_without_a_mask() -> None:
    """Vision towers pass none; causality and a window then come from the module and the arguments."""
    q, k, v = torch.randn(3, 2, 4, 10, 8).unbind(0)
    call = mmattn.hf.attention.attention_function
    x = [t.transpose(1, 2) for t in (q, k, v)]
    for module, options, mask in (
        (layer(is_causal=False), {}, mmattn.Mask.full()),
        (layer(), {}, mmattn.Mask.causal_()),
        (layer(), dict(is_causal=False, sliding_window=3), mmattn.Mask.sliding_window(3, causal=False)),
        (layer(), dict(sliding_window=3), mmattn.Mask.sliding_window(3)),
    ):
        out, weights = call(module, q, k, v, None, **options)
        assert weights is None and out.shape == (2, 10, 4, 8) and out.is_contiguous()
        torch.testing.assert_close(out, mmattn.reference(*x, mask)[0].float())
    with pytest.raises(mmattn.UnsupportedError, match="positions"):
        call(layer(), q[:, :, :4], k, v, None)
    out, _ = call(layer(), q[:, :, -1:], k, v, None)
    torch.testing.assert_close(out, mmattn.reference(x[0][:, -1:], x[1], x[2], mmattn.Mask())[0].float())


@pytest.mark.parametrize("name", ["Mistral", "gpt-oss"])
def test_cu_seq_lens(name: str) -> None:
    """What a padding-free data collator passes; gpt-oss keeps position_ids from its masks."""
    model = text_model(name)
    starts = torch.tensor([0, 5, 24, PROMPT], dtype=torch.int32)
    positions = torch.cat([torch.arange(n) for n in (5, 19, 13)])[None]
    packing = dict(cu_seq_lens_q=starts, cu_seq_lens_k=starts, max_length_q=19, max_length_k=19)
    with torch.no_grad(), only_intervals(model):
        got = model(text(1, PROMPT), position_ids=positions, use_cache=False, **packing).logits
        alone = [model(part).logits for part in text(1, PROMPT).split([5, 19, 13], 1)]
    assert_logits(got, torch.cat(alone, 1))
    model.set_attn_implementation("mmattn")
    with pytest.raises(mmattn.UnsupportedError, match="cu_seq_lens_q"):
        two = torch.zeros(2, PROMPT).long()
        model(two, position_ids=positions.expand(2, -1), use_cache=False, cu_seq_lens_q=starts[:2])


def test_cu_seq_lens_without_a_mask() -> None:
    """Vision towers with images packed into one row."""
    q, k, v = torch.randn(3, 1, 2, 12, 8).unbind(0)
    ends = torch.tensor([0, 5, 12], dtype=torch.int32)
    options = dict(cu_seq_lens_q=ends, cu_seq_lens_k=ends, max_length_q=7, max_length_k=torch.tensor(7))
    out, _ = mmattn.hf.attention.attention_function(layer(is_causal=False), q, k, v, None, **options)
    for s, e in ((0, 5), (5, 12)):
        x = [t[0, :, s:e].transpose(0, 1) for t in (q, k, v)]
        torch.testing.assert_close(out[0, s:e], mmattn.reference(*x, mmattn.Mask.full())[0].float())


def test_views_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Tensor] = []
    real = mmattn.hf.attention.attention

    def watched(q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Any:
        seen.extend([q, k, v])
        return real(q, k, v, *args, **kwargs)

    monkeypatch.setattr(mmattn.hf.attention, "attention", watched)
    qkv = torch.randn(1, 6, 8, 8)  # heads side by side, as fused projections leave them
    parts = qkv.split([4, 2, 2], dim=2)
    mmattn.hf.attention.attention_function(layer(), *(p.transpose(1, 2) for p in parts), None)
    assert [x.data_ptr() for x in seen] == [p.data_ptr() for p in parts]


def test_chunked_prefill_of_generate() -> None:
    model = text_model("Gemma 3 text")
    for options in ({}, {"cache_implementation": "static"}):
        inputs = dict(input_ids=text(1, PROMPT), max_new_tokens=4, do_sample=False, prefill_chunk_size=10, **options)
        got, expected = both(model, lambda: model.generate(**inputs))
        assert torch.equal(got, expected)


# torch.compile: graph breaks are fine, wrong answers are not


def test_compiled_forward() -> None:
    model = text_model("Gemma 3 text")
    mmattn.hf.register()
    model.set_attn_implementation("mmattn")
    with torch.no_grad():
        expected = model(text(1, PROMPT)).logits
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="aot_eager")
        assert_logits(compiled(text(1, PROMPT)).logits, expected)


def test_compiled_decode_with_masks_made_outside() -> None:
    """`generate` builds the masks of a static cache and hands them to the compiled model."""
    model = text_model("Mistral")
    mmattn.hf.register()
    model.set_attn_implementation("mmattn")
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager")
    ids, tokens = text(1, PROMPT), text(1, PROMPT + 4)[:, -4:]
    results = []
    for forward in (model, compiled):
        cache = StaticCache(config=model.config, max_cache_len=PROMPT + 8)
        with torch.no_grad():
            model(ids, past_key_values=cache)
            steps = []
            for i in range(4):
                mask = hf.create_masks_for_generate(model.config, torch.empty(1, 1, 0), None, cache)
                steps.append(forward(tokens[:, i : i + 1], attention_mask=mask, past_key_values=cache).logits)
        results.append(torch.cat(steps, 1))
    assert_logits(results[1], results[0])


# Registration


@pytest.mark.parametrize(
    "options", [{"name": "flash_mmattn"}, {"name": "sdpa"}, {"name": "a/b"}, {"backend": "cuda"}, {"fallback": "eager"}]
)
def test_registration_refuses(options: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        mmattn.hf.register(**options)  # type: ignore[arg-type]


def test_an_old_transformers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf, "sdpa_mask", lambda batch_size, cache_position, kv_length: None)
    with pytest.raises(ImportError, match="transformers >= 5.10"):
        mmattn.hf.register()


@pytest.mark.parametrize("version", ["4.57.1", "5.9.0", "5.10.0.dev0", "5.23.4", "5.24.0", "6.0.0rc1"])
def test_the_tested_range_is_told(
    version: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(mmattn.hf.versions.transformers, "__version__", version)
    if version in ("4.57.1", "5.9.0"):
        with pytest.raises(ImportError, match=f"transformers >= 5.10, found {version} .*tested: 5.10 to 5.23"):
            mmattn.hf.register()
        return
    with caplog.at_level(logging.WARNING, "mmattn.hf"):
        mmattn.hf.register()
    assert ("newer than what mmattn.hf was tested with" in caplog.text) is (version in ("5.24.0", "6.0.0rc1"))


def test_importing_beside_an_old_transformers_names_the_version() -> None:
    """It has nothing of what mmattn.hf imports from it."""
    code = "import sys, types; t = sys.modules['transformers'] = types.ModuleType('transformers'); t.__version__ = '4.40.2'"
    result = subprocess.run(
        [sys.executable, "-c", f"{code}; import mmattn.hf"], capture_output=True, text=True, check=False
    )
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: mmattn.hf needs transformers >= 5.10, found 4.40.2 (tested: 5.10 to 5.23)"), (
        last
    )


def test_the_tested_range_is_the_same_everywhere() -> None:
    (oldest, newest), root = mmattn.hf.versions.TESTED, Path(__file__).parent.parent
    first, last = (".".join(map(str, version)) for version in (oldest, newest))
    assert f'"transformers>={first},<6"' in (root / "pyproject.toml").read_text(encoding="utf-8")
    assert f"({first} to {last} are tested)" in (root / "docs" / "models.md").read_text(encoding="utf-8")
    assert f"transformers=={last}." in (root / "constraints.txt").read_text(encoding="utf-8")
    assert f"HF_OLDEST := {first}." in (root / "Makefile").read_text(encoding="utf-8")


def test_import_mmattn_does_not_import_transformers() -> None:
    code = "import sys, mmattn, mmattn.spans; sys.exit(any(m in sys.modules for m in ('transformers', 'mmattn.hf')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("without", "run", "message"),
    [
        ("transformers", "import mmattn.hf", "mmattn.hf needs transformers: pip install 'mmattn[hf]'"),
        (
            "safetensors",
            "from mmattn.dflash.weights import read_tensors; import pathlib; read_tensors(pathlib.Path('.'))",
            "reading .safetensors needs safetensors: pip install 'mmattn[hf]'",
        ),
        ("click", "sys.argv = ['-m']; import bench.run", "needs click: pip install 'mmattn[bench]'"),
        ("rich", "import runpy; runpy.run_module('mmattn', run_name='__main__')", "needs rich: pip install 'mmattn[demo]'"),
    ],
)  # fmt: skip
def test_a_missing_extra_is_named(without: str, run: str, message: str) -> None:
    code = f"import sys; sys.modules[{without!r}] = None; {run}"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode != 0 and result.stderr.strip().splitlines()[-1].endswith(message), result.stderr


@pytest.mark.parametrize(
    ("family", "option"), [("GPTJ", {"n_embd": 32, "n_head": 2, "n_layer": 1, "rotary_dim": 8}), ("Falcon", {})]
)
def test_a_model_with_a_table_of_its_own_says_so(family: str, option: dict[str, int]) -> None:
    """It would end in `KeyError: 'mmattn'`."""
    import transformers

    mmattn.hf.register()
    config = getattr(transformers, f"{family}Config")(
        vocab_size=16, **(option or {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1})
    )
    with pytest.raises(mmattn.UnsupportedError, match=f"{family}ForCausalLM .*table of its own.*'mmattn'"):
        transformers.AutoModelForCausalLM.from_config(config, attn_implementation="mmattn")
    with pytest.raises(KeyError, match="something_else"):
        explained = mmattn.hf.model_classes._explaining(lambda cls: {}["something_else"], {"mmattn"})
        explained(object)


def test_padding_with_holes_that_no_row_sees_twice() -> None:
    """Right-padded prompts that are continued: with a window, later rows see one range again."""
    padding = torch.ones(1, 40, dtype=torch.bool)
    padding[0, 10:18] = False
    args = dict(
        batch_size=1, kv_length=40, attention_mask=padding, mask_function=hf.sliding_window_causal_mask_function(6)
    )
    later = intervals(q_length=17, q_offset=23, **args)
    assert later.about.refusal is None
    assert_same(later, dense(q_length=17, q_offset=23, **args))
    assert intervals(q_length=40, q_offset=0, **args).about.refusal is None
    args["mask_function"] = hf.causal_mask_function
    assert "row 23 of sequence 0 sees 2 separate key ranges (0..9, 18..23)" in str(
        intervals(q_length=17, q_offset=23, **args).about.refusal
    )


def test_cross_attention() -> None:
    """Decoder rows over encoder keys, with the encoder's padding and without a mask."""
    q, k, v = torch.randn(2, 4, 5, 8), torch.randn(2, 4, 13, 8), torch.randn(2, 4, 13, 8)
    call, sdpa = mmattn.hf.attention.attention_function, torch.nn.functional.scaled_dot_product_attention
    padding = torch.ones(2, 13, dtype=torch.bool)
    padding[1, 9:] = False
    mask = intervals(
        batch_size=2, q_length=5, kv_length=13, attention_mask=padding, mask_function=hf.bidirectional_mask_function
    )
    expected = sdpa(q, k, v, attn_mask=padding[:, None, None]).transpose(1, 2)
    torch.testing.assert_close(call(layer(is_causal=False), q, k, v, mask)[0], expected)
    torch.testing.assert_close(call(layer(is_causal=False), q, k, v, None)[0], sdpa(q, k, v).transpose(1, 2))


class _OfBridgeTower(torch.nn.Module):
    """A layer of a module whose `eager_attention_forward` adds nothing where no mask comes."""

    __module__ = "transformers.models.bridgetower.modeling_bridgetower"


@pytest.mark.parametrize("compiled", [False, True])
def test_an_encoder_without_a_mask_that_says_is_causal_follows_its_eager_attention(compiled: bool) -> None:
    """BridgeTower's image layers: eager attention shows them everything, sdpa what is before them."""
    eager = pytest.importorskip(_OfBridgeTower.__module__).eager_attention_forward
    module = _OfBridgeTower().eval()
    module.is_causal, module.config = True, type("Config", (), {"is_decoder": False})()  # type: ignore[assignment]

    def call(x: Tensor) -> Tensor:
        return mmattn.hf.attention.attention_function(module, x, x, x, None)[0]

    x = torch.randn(1, 2, 4, 8)
    run = torch.compile(call, backend="eager", fullgraph=True) if compiled else call
    torch.testing.assert_close(run(x), eager(module, x, x, x, None)[0])


def test_an_encoder_without_a_mask_and_without_eager_attention_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    module = layer(config=type("Config", (), {"is_decoder": False})())
    call, x = mmattn.hf.attention.attention_function, torch.randn(1, 2, 4, 8)
    with pytest.raises(mmattn.UnsupportedError, match="is_decoder=False"):
        call(module, x, x, x, None)
    call(module, x[:, :, :1], x, x, None)
    module.config.is_decoder = True
    call(module, x, x, x, None)
    bridgetower = pytest.importorskip(_OfBridgeTower.__module__)
    causal = mmattn.hf.attention.attention_function
    for answer in (lambda module, q, k, v, mask, **_: causal(torch.nn.Module(), q, k, v, None), lambda: None):
        mmattn.hf.model_classes._eager_shows_all_keys.cache_clear()
        monkeypatch.setattr(bridgetower, "eager_attention_forward", answer)
        assert not mmattn.hf.model_classes.eager_shows_all_keys(bridgetower.__name__)
    mmattn.hf.model_classes._eager_shows_all_keys.cache_clear()


def test_a_dense_mask_that_is_something_else_runs_with_the_fallback() -> None:
    q, k, v = torch.randn(2, 4, 9, 8), torch.randn(2, 4, 9, 8), torch.randn(2, 4, 9, 8)
    call, sdpa = mmattn.hf.attention.attention_function, torch.nn.functional.scaled_dot_product_attention
    for mask in (torch.randn(1, 1, 9, 9), torch.randn(2, 4, 9, 9), torch.rand(2, 1, 9, 9) > 0.5):
        with pytest.raises(mmattn.UnsupportedError):
            call(layer(), q, k, v, mask)
        out = call(layer(), q, k, v, mask, fallback="sdpa")[0]
        torch.testing.assert_close(out, sdpa(q, k, v, attn_mask=mask).transpose(1, 2))
