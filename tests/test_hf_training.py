"""Training transformers models: a step with mmattn leaves the parameters that a step with eager attention leaves."""

from __future__ import annotations

from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from transformers import DataCollatorWithFlattening

import mmattn.hf
from mmattn.hf import attention as hf_attention
from mmattn.hf import intervals as hf_intervals
from mmattn.hf import masks as hf_masks

from .hf_models import TEXT_MODELS, VISION_MODELS, WINDOW, text_model, vision_model
from .test_hf_models import PROMPT, only_intervals, text

IMAGES = {case.name: case for case in VISION_MODELS}
each_model = pytest.mark.parametrize("name", [case.name for case in (*TEXT_MODELS, *VISION_MODELS)])


def model_of(name: str) -> Any:
    """A copy to train."""
    return deepcopy(vision_model(name, WINDOW) if name in IMAGES else text_model(name)).train()


def inputs_of(name: str) -> dict[str, Tensor]:
    """A batch of two rows. With images, two in each, longer than the window; the first row is padded on the left."""
    if name not in IMAGES:
        return {"input_ids": text(2, PROMPT), "labels": text(2, PROMPT)}
    inputs = IMAGES[name].inputs([5, "image", 6, "image", 9], batch=2, left_padding=7)
    labels = inputs["input_ids"].clone()
    labels[0, :8] = -100  # the first token after the padding too: the last row of the padding would predict it
    return {**inputs, "labels": labels}


@dataclass
class Step:
    loss: float
    changed: dict[str, Tensor]
    """Parameter that the loss depends on -> what the step added to it."""
    after: dict[str, Tensor]


def take_step(model: Any, inputs: dict[str, Any], implementation: str = "mmattn", run: Any = None) -> Step:
    """One step of SGD, with clipped gradients. `run`: what to call instead of the model; nothing then watches for dense masks.

    Not Adam's: its first step is the sign of the gradient, also where the gradient is nothing but rounding.
    """
    mmattn.hf.register()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    model.set_attn_implementation(implementation)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with only_intervals(model) if implementation == "mmattn" and run is None else nullcontext():
        loss = (model if run is None else run)(**inputs, use_cache=False).loss
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    after = {name: p.detach() for name, p in model.named_parameters() if p.grad is not None}
    return Step(loss.item(), {name: p - before[name] for name, p in after.items()}, after)


def errors(got: Step, expected: Step) -> dict[str, float]:
    """How far each change is off, as a share of the largest one in the tensor. Two float32 steps of the parameter are free."""
    assert got.changed.keys() == expected.changed.keys()
    # A gradient that is zero but for rounding, as that of a bias of all keys: only its size counts.
    least = 1e-3 * max(float(x.abs().max()) for x in expected.changed.values())
    result = {}
    for name, want in expected.changed.items():
        assert got.changed[name].isfinite().all(), name
        rounding = 2 * torch.finfo(torch.float32).eps * float(expected.after[name].abs().max())
        error = float((got.changed[name] - want).abs().max()) - rounding
        result[name] = error / max(float(want.abs().max()), least)
    return result


def assert_same_step(got: Step, expected: Step) -> None:
    assert got.loss == pytest.approx(expected.loss, rel=1e-4)
    worst, name = max((error, name) for name, error in errors(got, expected).items())
    assert worst <= 1e-4, f"{name}: the step is off by {worst:.1e} of its size"
    assert max(float(x.abs().max()) for x in expected.changed.values()) > 1e-2, "the step changed nothing"


@each_model
def test_one_step(name: str) -> None:
    inputs = inputs_of(name)
    assert_same_step(take_step(model_of(name), inputs), take_step(model_of(name), inputs, "eager"))


@pytest.mark.parametrize("name", ["Mistral", "gpt-oss", "Gemma 3", "Gemma 4", "PaliGemma"])
def test_a_mask_wrong_by_one_key_shows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tolerance of the other tests is worth something."""
    inputs, lower = inputs_of(name), hf_masks._lower
    expected = take_step(model_of(name), inputs, "eager")

    def one_key_short(*args: Any) -> Any:
        mask = lower(*args)
        rows = mask.rows.clone()
        rows[..., 0] += (rows[..., 1] - rows[..., 0] > 1).int()
        return hf_intervals.IntervalMask(rows, mask.shape[3])

    monkeypatch.setattr(hf_masks, "_lower", one_key_short)
    assert max(errors(take_step(model_of(name), inputs), expected).values()) > 1e-2


def test_lost_gradients_of_sinks_show(monkeypatch: pytest.MonkeyPatch) -> None:
    real = hf_attention.attention
    monkeypatch.setattr(hf_attention, "attention", lambda *args, sinks, **o: real(*args, sinks=sinks.detach(), **o))
    inputs = inputs_of("gpt-oss")
    got, expected = take_step(model_of("gpt-oss"), inputs), take_step(model_of("gpt-oss"), inputs, "eager")
    assert {name for name in expected.changed.keys() - got.changed.keys()} == {
        f"model.layers.{i}.self_attn.sinks" for i in range(4)
    }


@pytest.mark.parametrize("name", ["Mistral", "gpt-oss"])
def test_sample_packing(name: str) -> None:
    """Documents in one row as transformers' collator packs them: the step that eager takes for each of them alone.

    Mistral tells them apart by `position_ids`; gpt-oss needs `cu_seq_lens_q` too.
    """
    documents = [ids.tolist() for ids in text(1, PROMPT)[0].split([5, 19, 13])]
    packed = DataCollatorWithFlattening(return_flash_attn_kwargs=name == "gpt-oss")(
        [{"input_ids": d} for d in documents]
    )
    assert packed["position_ids"][0, 5] == 0 and ("cu_seq_lens_q" in packed) is (name == "gpt-oss")
    count = PROMPT - len(documents)  # the first token of a document is predicted by nothing

    def each_alone(**_: Any) -> Any:
        rows = [torch.tensor([d]) for d in documents]
        losses = [alone(input_ids=row, labels=row, num_items_in_batch=count).loss for row in rows]
        return SimpleNamespace(loss=sum(losses))

    alone = model_of(name)
    expected = take_step(alone, {}, "eager", each_alone)
    assert_same_step(take_step(model_of(name), packed), expected)
    if name == "Mistral":
        del packed["position_ids"]
        assert max(errors(take_step(model_of(name), packed), expected).values()) > 1e-2, "packing makes no difference"


@pytest.mark.parametrize("name", ["Mistral", "gpt-oss", "Gemma 3", "Gemma 4 with KV sharing", "PaliGemma"])
def test_gradient_checkpointing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers run again in the backward pass, and the step stays."""
    inputs, calls, real = inputs_of(name), [0], hf_attention.attention

    def counted(*args: Any, **options: Any) -> Any:
        calls[0] += 1
        return real(*args, **options)

    monkeypatch.setattr(hf_attention, "attention", counted)
    expected, plain = take_step(model_of(name), inputs, "eager"), model_of(name)
    assert_same_step(take_step(plain, inputs), expected)
    once, model = calls[0], model_of(name)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert_same_step(take_step(model, inputs), expected)
    assert calls[0] - once > 1.5 * once, "nothing was computed again"


@pytest.mark.parametrize("name", ["Mistral", pytest.param("Gemma 3", marks=pytest.mark.slow)])
def test_one_graph(name: str) -> None:
    torch._dynamo.reset()
    model, inputs = model_of(name), inputs_of(name)
    graph = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_same_step(take_step(model, inputs, run=graph), take_step(model_of(name), inputs, "eager"))
    torch._dynamo.reset()
