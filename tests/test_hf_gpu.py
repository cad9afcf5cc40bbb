"""The models of `hf_models` on a GPU, in bfloat16, with each kernel backend forced."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from transformers import DynamicCache, StaticCache

import mmattn
import mmattn.hf

from .hf_models import TEXT_MODELS, VISION_MODELS, WINDOW, TextModel, VisionModel
from .test_hf_models import only_intervals

pytestmark = pytest.mark.gpu

LENGTH = 300
each_backend = pytest.mark.parametrize("kernels", ["triton", "cute"])


def named(kernels: str) -> str:
    """Registers the backend under its own name, so that it is forced: nothing else can run in its place."""
    name = f"mmattn_{kernels}"
    mmattn.hf.register(name, backend=kernels)
    mmattn.hf.register()
    return name


def assert_in_budget(run: Any, model: Any, implementation: Any) -> None:
    """Against eager in float32, mmattn in bfloat16 may be twice as far off as eager in bfloat16."""
    model.set_attn_implementation("eager")
    with torch.no_grad():
        expected = run(model.float())
        model.to(torch.bfloat16)
        eager = run(model).float()
        try:
            with only_intervals(model, implementation):
                got = run(model).float()
        except mmattn.UnsupportedError as error:
            pytest.skip(str(error))
    assert torch.isfinite(got).all()

    def far(x: Tensor) -> float:
        return float((x - expected).square().mean().sqrt() / expected.square().mean().sqrt())

    assert far(got) <= 2 * far(eager) + 2**-8, f"mmattn is {far(got):.2e} off, eager {far(eager):.2e}"


@each_backend
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("case", TEXT_MODELS, ids=lambda m: m.name)
def test_text(case: TextModel, cache: str, kernels: str) -> None:
    """A left-padded batch: prefill in two chunks beyond the window, then four steps."""
    ids = torch.randint(3, 90, (2, LENGTH), generator=torch.Generator().manual_seed(0)).cuda()
    mask = torch.ones_like(ids)
    mask[0, :11] = 0

    def run(model: Any) -> Tensor:
        kept = (
            DynamicCache(config=model.config)
            if cache == "dynamic"
            else StaticCache(config=model.config, max_cache_len=LENGTH + 20)
        )
        logits, start = [], 0
        for part in ids.split([200, LENGTH - 204, 1, 1, 1, 1], 1):
            end = start + part.shape[1]
            logits.append(model(part, attention_mask=mask[:, :end], past_key_values=kept).logits)
            start = end
        return torch.cat(logits, 1)[mask.bool()]

    assert_in_budget(run, case.build(gpu_sizes=True).cuda(), named(kernels))


@each_backend
@pytest.mark.parametrize("case", VISION_MODELS, ids=lambda m: m.name)
def test_vision(case: VisionModel, kernels: str) -> None:
    """Touching images, each longer than the window, and a late one, in a left-padded batch."""
    inputs = case.inputs([5, "image", "image", 130, "image", 9], batch=2, left_padding=7)
    inputs = {name: x.cuda() for name, x in inputs.items()}
    mask = inputs["attention_mask"].bool()

    def run(model: Any) -> Tensor:
        cast = {n: x.to(model.dtype) if x.is_floating_point() else x for n, x in inputs.items()}
        return model(**cast).logits[mask]

    # The tower of this tiny model has heads that no kernel takes: it may run on any backend.
    implementation = {"": named(kernels), "text_config": named(kernels), "vision_config": "mmattn"}
    assert_in_budget(run, case.build(WINDOW, head_dim=64).cuda(), implementation)


@pytest.mark.parametrize("name", ["Gemma 3 text", "Mistral"])
def test_generate_compiles_itself_with_a_static_cache(name: str) -> None:
    """transformers compiles the decoding steps on a GPU: they must give the same logits, up to how it fuses the rest.

    Of each row the steps count up to the first token that differs, which a near tie may cause. Measured in bfloat16: 2 %
    of the logits, as rounding gives; a mask that is wrong changes them by half.
    """
    mmattn.hf.register()
    model: Any = next(m for m in TEXT_MODELS if m.name == name).build(gpu_sizes=True).cuda().to(torch.bfloat16)
    model.set_attn_implementation("mmattn")
    ids = torch.randint(3, 90, (2, LENGTH), generator=torch.Generator().manual_seed(0)).cuda()
    options: dict[str, Any] = dict(cache_implementation="static", max_new_tokens=8, do_sample=False)
    options.update(attention_mask=torch.ones_like(ids), return_dict_in_generate=True, output_logits=True)
    plain, compiled = model.generate(ids, disable_compile=True, **options), model.generate(ids, **options)
    want, got = (torch.stack(run.logits, 1).float() for run in (plain, compiled))
    agree = (plain.sequences == compiled.sequences)[:, LENGTH:].long().cumprod(1)
    same_prefix = torch.cat([torch.ones_like(agree[:, :1]), agree[:, :-1]], 1).bool()
    assert same_prefix[:, 1].all(), "the prefill, which is not compiled, differs"
    error = (got - want)[same_prefix].square().mean().sqrt() / want[same_prefix].square().mean().sqrt()
    assert error <= 2**-5, f"logits of compiled steps are off by {error:.1e}"
