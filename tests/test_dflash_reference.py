"""`mmattn.dflash` against the published implementation, run from its own code.

Skipped where that code is not at hand: set MMATTN_DFLASH_REFERENCE to a checkout of github.com/z-lab/dflash (the figures in
docs/dflash.md are of commit 44947fb), which is imported from there. `-s` prints the figures.
"""

from __future__ import annotations

import importlib.util
import os
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("click")

import transformers

from mmattn.dflash import Drafter, HiddenTaps, generate
from mmattn.dflash.demo import BLOCK, MASK_TOKEN, WINDOW, target_outputs, tiny_target, train

CHECKOUT = os.environ.get("MMATTN_DFLASH_REFERENCE", "")
NEW = 3 * WINDOW


class Cache(transformers.DynamicCache):
    """Lets the published loop run on transformers 5, whose `crop` takes no length to keep any more."""

    def crop(self, length: int) -> None:
        if length < self.get_seq_length():
            super().crop(length - self.get_seq_length())


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    file = Path(CHECKOUT) / "dflash" / "model.py"
    if not CHECKOUT:
        pytest.skip(
            "the published code is absent: MMATTN_DFLASH_REFERENCE names no checkout of github.com/z-lab/dflash"
        )
    spec = importlib.util.spec_from_file_location("published_dflash", file)
    assert spec is not None and spec.loader is not None, f"{file} cannot be imported"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module._cuda_time = time.perf_counter  # type: ignore[attr-defined]
    module.DynamicCache = Cache  # type: ignore[attr-defined]
    return module


def config(target: Any, kinds: list[str], window: int = WINDOW) -> dict[str, Any]:
    """A drafter's configuration that both sides read: the published form, without parts that only engines have."""
    text = target.config.get_text_config()
    return {
        "vocab_size": text.vocab_size, "hidden_size": text.hidden_size, "intermediate_size": 96,
        "num_hidden_layers": len(kinds), "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "layer_types": kinds, "sliding_window": window, "use_sliding_window": True, "max_window_layers": 0,
        "block_size": BLOCK, "num_target_layers": text.num_hidden_layers, "rope_theta": 10000.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "max_position_embeddings": 4096,
        "dflash_config": {"mask_token_id": MASK_TOKEN},
    }  # fmt: skip


def both(reference: ModuleType, target: Any, fields: dict[str, Any], attention: str) -> tuple[Drafter, Any]:
    """The same random weights on both sides."""
    torch.manual_seed(1)
    theirs = reference.DFlashDraftModel(transformers.Qwen3Config(**fields, attn_implementation=attention)).eval()
    ours = (
        Drafter(fields) if "sliding_attention" not in fields["layer_types"] else Drafter({**fields, "is_causal": False})
    )
    assert ours.config.target_hidden_ids == tuple(i + 1 for i in theirs.target_layer_ids)
    with torch.no_grad():
        for name, x in theirs.named_parameters():
            x.copy_(torch.randn_like(x) * (0.2 if x.dim() == 2 else 0.1) + ("norm" in name))
    assert {n: x.shape for n, x in theirs.state_dict().items()} == {n: x.shape for n, x in ours.state_dict().items()}
    ours.load_state_dict(theirs.state_dict())
    return ours.attach(target).requires_grad_(False), theirs


@torch.no_grad()
def hidden_states(ours: Drafter, theirs: Any, target: Any, prompt: torch.Tensor, mask: torch.Tensor | None) -> Any:
    """Draft hidden states of one block behind the prompt, ours and theirs."""
    with HiddenTaps(target, ours.config.target_hidden_ids) as taps:
        bonus = target(prompt).logits[:, -1].argmax(-1)
        context = taps.read()
    length = prompt.shape[1]
    cache = ours.new_cache(1, length)
    ours.extend(context, [length], cache)
    block = ours.embed(bonus)
    want = theirs(
        target_hidden=context, noise_embedding=block, position_ids=torch.arange(length + BLOCK)[None],
        past_key_values=transformers.DynamicCache(), use_cache=True, attention_mask=mask, is_causal=False,
    )  # fmt: skip
    return ours(block, cache), want


def window_mask(rows: int, keys: int, window: int) -> torch.Tensor:
    q, k = torch.arange(keys - rows, keys)[:, None], torch.arange(keys)
    return torch.zeros(1, 1, rows, keys).masked_fill((q - k).abs() >= window, -torch.inf)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["full", "sliding"])
def test_hidden_states(reference: ModuleType, kind: str, attention: str) -> None:
    """Three layers of one kind. A window the published code leaves to its attention function, so we hand it a mask."""
    target = tiny_target("qwen3")
    prompt = torch.randint(0, MASK_TOKEN, (1, 50), generator=torch.Generator().manual_seed(0))
    ours, theirs = both(reference, target, config(target, [f"{kind}_attention"] * 3), attention)
    mask = window_mask(BLOCK, 50 + BLOCK, WINDOW) if kind == "sliding" else None
    got, want = hidden_states(ours, theirs, target, prompt, mask)
    error = (got - want).abs().max().item()
    print(f"\n{kind} layers, {attention}: max difference {error:.1e} of values to {want.abs().max().item():.1f}")
    assert error < 2e-5
    if kind == "sliding":
        # Without a mask its sdpa and eager attention know no window: the sliding layers are full ones.
        full, _ = both(reference, target, config(target, ["full_attention"] * 3), attention)
        ignored = hidden_states(ours, theirs, target, prompt, None)[1]
        assert (ignored - want).abs().max() > 0.01
        assert (hidden_states(full, theirs, target, prompt, None)[0] - ignored).abs().max() < 2e-5


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_accepted_tokens(reference: ModuleType, seed: int) -> None:
    """The published loop and ours, with a drafter that has learnt a little: the same tokens, pass for pass."""
    target = tiny_target("qwen3").requires_grad_(False)
    ours, theirs = both(reference, target, config(target, ["full_attention"] * 3), "sdpa")
    prompts = torch.randint(0, MASK_TOKEN, (8, 8), generator=torch.Generator().manual_seed(seed))
    ours.requires_grad_(True)
    tokens, hidden = target_outputs(target, ours, prompts, NEW)
    train(ours, tokens, hidden, seconds=600, max_steps=25)
    ours.requires_grad_(False)
    theirs.load_state_dict(ours.state_dict())
    accepted = []
    for prompt in prompts[:2]:
        got = generate(target, ours, prompt[None], max_new_tokens=NEW, pad_token_id=0)
        want = reference.dflash_generate(
            theirs, target=target, input_ids=prompt[None], max_new_tokens=NEW, stop_token_ids=None, temperature=0.0,
            return_stats=True,
        )  # fmt: skip
        assert torch.equal(got.sequences, want.output_ids[:, : got.sequences.shape[1]])
        # Its last pass is not cut to the length asked for, as ours is.
        lengths = want.acceptance_lengths[: len(got.kept[0])]
        assert got.kept[0][:-1] == lengths[:-1] and got.kept[0][-1] <= lengths[-1]
        accepted.append((got.kept[0], got.acceptance_length))
    print(f"\nseed {seed}: tokens per pass {[kept for kept, _ in accepted]}")
    assert max(length for _, length in accepted) > 1.2  # something was accepted, so that there is something to compare
