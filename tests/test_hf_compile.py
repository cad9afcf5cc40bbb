"""transformers models as one compiled graph: the models of docs/models.md against the same models without torch.compile."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor

pytest.importorskip("transformers")

import mmattn.hf

from .hf_models import TEXT_MODELS, VISION_MODELS, TextModel, VisionModel, text_model
from .test_hf_models import assert_logits, text


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    torch._dynamo.reset()
    mmattn.hf.register()
    yield
    torch._dynamo.reset()


def logits(model: Any, **inputs: Any) -> Tensor:
    with torch.no_grad():
        return model(**inputs, use_cache=False).logits


def compiled(model: Any) -> tuple[Any, Any]:
    """The model as one graph, and the counter of its compilations."""
    counter = torch._dynamo.testing.CompileCounterWithBackend("eager")
    return torch.compile(model, fullgraph=True, backend=counter, dynamic=True), counter


@pytest.mark.slow
@pytest.mark.parametrize("case", TEXT_MODELS, ids=lambda case: case.name)
def test_prefill_of_a_text_model(case: TextModel) -> None:
    """Several lengths, with and without left padding."""
    model = text_model(case.name)
    model.set_attn_implementation("mmattn")
    graph, counter = compiled(model)
    for length in (20, 27, 33):
        ids = text(2, length)
        mask = torch.ones_like(ids)
        mask[0, :5] = 0
        kept = mask.bool()
        want = logits(model, input_ids=ids, attention_mask=mask)
        assert_logits(logits(graph, input_ids=ids, attention_mask=mask)[kept], want[kept])
    assert counter.frame_count <= 2


@pytest.mark.slow
@pytest.mark.parametrize("case", VISION_MODELS, ids=lambda case: case.name)
def test_prefill_of_a_vision_model(case: VisionModel) -> None:
    model = case.build(case.windows[0])
    model.set_attn_implementation("mmattn")
    inputs = case.inputs([5, "image", 6], batch=2, left_padding=3)
    kept = inputs["attention_mask"].bool()
    graph = torch.compile(model, fullgraph=True, backend="eager")
    assert_logits(logits(graph, **inputs)[kept], logits(model, **inputs)[kept])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Gemma 3 text", "gpt-oss"])
def test_generation_with_a_static_cache(name: str) -> None:
    model = text_model(name)
    model.set_attn_implementation("mmattn")
    ids = text(2, 12)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    args = dict(input_ids=ids, attention_mask=mask, max_new_tokens=5, do_sample=False, cache_implementation="static")
    want = model.generate(**args, disable_compile=True)
    forward = model.forward
    model.forward = torch.compile(forward, fullgraph=True, backend="eager")
    try:
        assert torch.equal(model.generate(**args, disable_compile=True), want)
    finally:
        model.forward = forward


def test_a_graph_stops_at_a_row_with_a_hole() -> None:
    """While tracing nobody can know; nothing wrong comes out."""
    model = text_model("Mistral")
    model.set_attn_implementation("mmattn")
    graph, _ = compiled(model)
    ids = text(1, 20)
    mask = torch.ones_like(ids)
    assert logits(graph, input_ids=ids, attention_mask=mask).isfinite().all()
    mask[0, 6:9] = 0
    with pytest.raises(RuntimeError, match="sees more than one range of keys"):
        logits(graph, input_ids=ids, attention_mask=mask)
