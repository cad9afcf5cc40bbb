"""`IntervalMask` as the tensor that models take it for: what keeps intervals, and what is refused."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from transformers import masking_utils as hf

import mmattn
import mmattn.hf
from mmattn.hf.intervals import IntervalMask

from .hf_models import text_model
from .test_hf import assert_same, intervals, layer


@pytest.fixture
def window_mask() -> IntervalMask:
    padding = torch.ones(2, 13, dtype=torch.bool)
    padding[1, :4] = False
    return intervals(
        batch_size=2, q_length=9, kv_length=13, q_offset=4, attention_mask=padding,
        mask_function=hf.sliding_window_causal_mask_function(5),
    )  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m[:, :, -1:, :],
        lambda m: m[:, :, slice(-3, None), :],
        lambda m: m[:, :, 2:7:2],
        lambda m: m[..., :6],
        lambda m: m[:, :, :, 3:],
        lambda m: m[1:],
        lambda m: m[:, :, 5:2],
        lambda m: m.contiguous(),
        lambda m: m.clone(),
        lambda m: m.detach(),
        lambda m: m.to("cpu"),
        lambda m: m.to(torch.bool),
        lambda m: m.to("cpu", copy=True),
        lambda m: m[:1].expand(3, -1, -1, -1),
        lambda m: m.index_select(0, torch.tensor([1, 1, 0])),
        lambda m: m.index_select(2, torch.tensor([8, 0])),
        lambda m: m[:, :, 4:][:, :, 1:],
    ],
)
def test_what_models_do_with_masks_keeps_intervals(window_mask: IntervalMask, change: Any) -> None:
    expected = change(window_mask.dense())
    changed = change(window_mask)
    assert isinstance(changed, IntervalMask)
    assert_same(changed, expected)
    assert changed.plan.rows.shape == (expected.shape[0] * expected.shape[2], 2)


def lenient(mask: IntervalMask, dtype: torch.dtype = torch.bool) -> IntervalMask:
    return IntervalMask(mask.rows, mask.shape[3], replace(mask.about, fallback="sdpa"), dtype=dtype)


TOUCHES = {
    "bitwise_not": lambda m: ~m,
    "to_copy": lambda m: m.float(),
    "add": lambda m: torch.zeros(2, 4, 9, 13) + m,
    "add_": lambda m: torch.zeros(2, 1, 9, 13).add_(m),
    "sub": lambda m: 1.0 - m,
    "mul": lambda m: m * 2.0,
    "cat": lambda m: torch.cat([m, torch.zeros(2, 1, 9, 3, dtype=torch.bool)], dim=-1),
    "stack": lambda m: torch.stack([m, m]),
    "where": lambda m: torch.where(m, 0.0, 1.0),
    "masked_fill": lambda m: torch.zeros(2, 1, 9, 13).masked_fill(m, 1.0),
    "eq": lambda m: m == 0,
    "any": lambda m: m.any(),
    "select": lambda m: m[:, :, -1],
    "view": lambda m: m.reshape(2, -1),
    "item": lambda m: bool(m[:1, :, :1, :1]),
    "tolist": lambda m: m.tolist(),
    "numpy": lambda m: m.numpy(),
    "another step": lambda m: m[..., ::2],
    "another head": lambda m: m.expand(2, 4, 9, 13),
    "another rank": lambda m: m[None],
    "softmax": lambda m: torch.softmax(m, -1),
    "bmm": lambda m: torch.matmul(m, torch.zeros(13, 2)),
    "sdpa": lambda m: torch.nn.functional.scaled_dot_product_attention(
        torch.zeros(2, 1, 9, 8), torch.zeros(2, 1, 13, 8), torch.zeros(2, 1, 13, 8), attn_mask=m
    ),
}
WRITES = {
    "fill_": lambda m: m.fill_(True),
    "masked_fill_": lambda m: m.masked_fill_(torch.ones(13, dtype=torch.bool), False),
    "setitem": lambda m: m.__setitem__((slice(None), slice(None), slice(0, 3)), True),
    "logical_or_": lambda m: m.logical_or_(torch.ones(13, dtype=torch.bool)),
    "copy_": lambda m: m.copy_(torch.ones(13)),
    "out": lambda m: torch.logical_not(torch.ones(2, 1, 9, 13), out=m),
}


@pytest.mark.parametrize("touch", [*TOUCHES.values(), *WRITES.values()], ids=[*TOUCHES, *WRITES])
def test_operators_that_need_elements_are_refused(window_mask: IntervalMask, touch: Any) -> None:
    """A model that calculates with its mask would get something else than it thinks."""
    window_mask.about = replace(window_mask.about, model="GitModel")
    before = window_mask.rows.clone()
    with pytest.raises((mmattn.UnsupportedError, RuntimeError)) as error:
        touch(window_mask)
    assert torch.equal(window_mask.rows, before)
    if error.type is mmattn.UnsupportedError:
        message = str(error.value)
        assert "GitModel: aten." in message and '"vision_config": "sdpa"' in message
        assert ('fallback="sdpa"' in message) is (touch not in WRITES.values())


@pytest.mark.parametrize("touch", WRITES.values(), ids=WRITES)
def test_nobody_writes_into_a_mask(window_mask: IntervalMask, touch: Any) -> None:
    """What is written would be lost, with a fallback too."""
    with pytest.raises(mmattn.UnsupportedError, match="writes into"):
        touch(lenient(window_mask))


@pytest.mark.parametrize(
    "name", [n for n in TOUCHES if n not in ("numpy", "add", "add_", "sub", "tolist", "softmax", "bmm")]
)
def test_the_fallback_gives_the_dense_mask(
    window_mask: IntervalMask, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "mmattn.hf"):
        result = TOUCHES[name](lenient(window_mask))
    expected = TOUCHES[name](window_mask.dense())
    assert type(result) is type(expected) and "building it" in caplog.text
    assert torch.equal(torch.as_tensor(result), torch.as_tensor(expected))


@pytest.mark.parametrize("name", ["add", "add_", "sub"])
def test_who_adds_a_mask_gets_floats(window_mask: IntervalMask, name: str) -> None:
    expected = torch.zeros(2, 1, 9, 13).masked_fill(~window_mask.dense(), torch.finfo(torch.float32).min)
    if name == "sub":
        result = torch.ones(2, 1, 9, 13) - lenient(window_mask)
        assert torch.equal(result, 1 - expected)
    else:
        assert torch.equal(TOUCHES[name](lenient(window_mask)), expected.expand(2, 4 if name == "add" else 1, 9, 13))


def test_a_model_without_sdpa_gets_floats(window_mask: IntervalMask) -> None:
    """Its code is written for additive masks: `.bool()` is what is hidden, `.dtype` a float type."""
    expected = torch.zeros(2, 1, 9, 13).masked_fill(~window_mask.dense(), torch.finfo(torch.float32).min)
    mask = lenient(window_mask, torch.float32)
    assert mask.dtype == torch.float32 and mask[:, :, 2:].dtype == torch.float32
    assert torch.equal(mask.bool(), ~window_mask.dense())
    assert torch.equal(torch.cat([mask, torch.zeros(2, 1, 9, 3)], -1)[..., :13], expected)
    half = mask.to(torch.bfloat16)
    assert isinstance(half, IntervalMask) and half.dtype == torch.bfloat16
    assert torch.equal(
        half + torch.zeros(1, dtype=torch.bfloat16), expected.bfloat16().clamp(min=torch.finfo(torch.bfloat16).min)
    )
    assert intervals(batch_size=1, q_length=2, kv_length=2, config=text_model("gpt-oss").config).dtype == torch.float32
    assert intervals(batch_size=1, q_length=2, kv_length=2, config=text_model("Mistral").config).dtype == torch.bool


def test_masks_are_joined_and_cut_with_each_other(window_mask: IntervalMask) -> None:
    for dim in (0, 2):
        joined = torch.cat([window_mask, window_mask], dim=dim)
        assert isinstance(joined, IntervalMask)
        assert_same(joined, torch.cat([window_mask.dense()] * 2, dim=dim))
    other = intervals(batch_size=2, q_length=9, kv_length=13, q_offset=2)
    for both_of in (lambda a, b: a & b, torch.logical_and):
        cut = both_of(window_mask, other)
        assert isinstance(cut, IntervalMask)
        assert_same(cut, window_mask.dense() & other.dense())


def test_a_mask_comes_apart_and_together(window_mask: IntervalMask) -> None:
    """As torch.compile takes it: plain tensors and a context that compares by value."""
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    assert is_traceable_wrapper_subclass(window_mask)
    names, context = window_mask.__tensor_flatten__()
    inner = {name: getattr(window_mask, name) for name in names}
    assert all(type(x) is Tensor for x in inner.values()) and isinstance(hash(context), int)
    again = IntervalMask.__tensor_unflatten__(inner, context, window_mask.shape, window_mask.stride())
    assert_same(again, window_mask.dense())
    assert again.__tensor_flatten__()[1] == context


def test_the_plan_is_built_once(window_mask: IntervalMask) -> None:
    assert window_mask.plan is window_mask.plan
    last = window_mask[:, :, -1:]
    assert last.plan is last.plan


def test_slices_of_a_refused_mask_stay_refused() -> None:
    args = dict(batch_size=1, q_length=4, kv_length=4, mask_function=lambda b, h, q, k: k != 1)
    for mask in (intervals(**args), intervals(fallback="sdpa", **args)):
        part = mask[:, :, 2:]
        assert part.about.refusal is not None and "refused" in repr(part)
        with pytest.raises(ValueError, match="separate key ranges"):
            _ = part.plan
        if part.about.fallback is None:
            with pytest.raises(ValueError, match="separate key ranges"):
                part.dense()
        else:
            assert torch.equal(part.dense(), mask.dense()[:, :, 2:])


def test_a_mask_for_one_row_serves_all(window_mask: IntervalMask) -> None:
    """`[B, 1, 1, K]`: padding of the keys, for any number of queries."""
    q, k, v = torch.randn(2, 4, 9, 8), torch.randn(2, 4, 13, 8), torch.randn(2, 4, 13, 8)
    call, row = mmattn.hf.attention.attention_function, window_mask[:, :, -1:]
    visible = row.dense()
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=visible).transpose(1, 2)
    for mask in (row, visible, torch.zeros(visible.shape).masked_fill(~visible, -10000.0)):
        torch.testing.assert_close(call(layer(), q, k, v, mask)[0], expected)
