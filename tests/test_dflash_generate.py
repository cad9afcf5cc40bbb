"""Speculative decoding returns the target's own greedy output, whatever the drafter says; a trained one helps."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("click")

from click.testing import CliRunner

from mmattn.dflash import Drafter, HiddenTaps, generate
from mmattn.dflash.demo import (
    BLOCK,
    MASK_TOKEN,
    PROMPT,
    WINDOW,
    demo_drafter,
    dflash_demo,
    target_outputs,
    tiny_target,
    train,
)

TARGETS = ["qwen3", "mimo"]
NEW = 3 * WINDOW
"""Enough that the context leaves every window behind."""


@pytest.fixture(scope="module", params=TARGETS)
def pair(request, device):
    """A target, and an untrained drafter for it."""
    torch.manual_seed(0)
    target = tiny_target(request.param).to(device)
    return target, demo_drafter(target)


def padded(device, lengths, seed=0):
    """Left-padded random prompts and their attention mask."""
    g = torch.Generator().manual_seed(seed)
    width = max(lengths)
    ids = torch.randint(0, MASK_TOKEN, (len(lengths), width), generator=g)
    mask = torch.stack([(torch.arange(width) >= width - n).long() for n in lengths])
    return ids.masked_fill(mask == 0, 0).to(device), mask.to(device)


def alone(target, ids, mask, new=NEW, **kw):
    return target.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=new, pad_token_id=0, **kw)


def oracle(want, mask, right):
    """Drafts that are the target's own tokens up to `right(b, step)` of them, then wrong ones."""
    width, steps = mask.shape[1], [0]

    def draft(bonus, cache):
        steps[0] += 1
        rows = []
        for b, held in enumerate(cache.counts):
            at = held + width - int(mask[b].sum())  # of the bonus token, in the padded sequence
            row = [*want[b, at + 1 : at + BLOCK].tolist(), *[0] * BLOCK][: BLOCK - 1]
            n = right(b, steps[0])
            rows.append([token if i < n else (token + 1) % MASK_TOKEN for i, token in enumerate(row)])
        return torch.tensor(rows, device=bonus.device)

    return draft


@pytest.mark.parametrize("cache, page_size", [("paged", 4), ("paged", 16), ("contiguous", 1)])
def test_equal_to_the_target_alone(pair, cache, page_size):
    target, drafter = pair
    ids, mask = padded(target.device, [9, 5, 8, 1])
    got = generate(
        target, drafter, ids, attention_mask=mask, max_new_tokens=NEW, pad_token_id=0, cache=cache, page_size=page_size
    )
    assert torch.equal(got.sequences, alone(target, ids, mask))
    assert all(sum(kept) == NEW - 1 for kept in got.kept)


@pytest.mark.parametrize("n", [1, 2, BLOCK - 1])
def test_fewer_drafts(pair, n):
    target, drafter = pair
    ids, mask = padded(target.device, [7])
    got = generate(target, drafter, ids, max_new_tokens=NEW, pad_token_id=0, draft_tokens=n)
    assert torch.equal(got.sequences, alone(target, ids, mask))
    assert max(got.kept[0]) <= 1 + n


@pytest.mark.parametrize(
    "right",
    [lambda b, step: BLOCK, lambda b, step: 0, lambda b, step: (b + step) % BLOCK, lambda b, step: BLOCK * (b % 2)],
    ids=["all right", "all wrong", "mixed", "some sequences much faster"],
)
def test_any_acceptance_gives_the_same_output(pair, right):
    """Sequences of one batch that advance by different numbers of tokens, past the target's own windows."""
    target, drafter = pair
    ids, mask = padded(target.device, [9, 5, 8])
    want = alone(target, ids, mask)
    got = generate(
        target, drafter, ids, attention_mask=mask, max_new_tokens=NEW, pad_token_id=0, draft=oracle(want, mask, right)
    )
    assert torch.equal(got.sequences, want)
    for b, kept in enumerate(got.kept):
        assert sum(kept) == NEW - 1
        for step, n in enumerate(kept[:-1], start=1):  # the last may be cut by max_new_tokens
            assert n == min(right(b, step), BLOCK - 1) + 1
    if right(0, 1) == BLOCK:
        assert got.acceptance_length > BLOCK - 1 and got.passes == -(-(NEW - 1) // BLOCK)
    if right(1, 1) == 0:
        assert got.acceptance_length == 1


def test_a_target_that_runs_on_mmattn_too(pair):
    """Target and drafter on one attention operator; the output is still that of the target in eager attention."""
    import mmattn.hf

    target, drafter = pair
    ids, mask = padded(target.device, [9, 5, 8])
    want = alone(target, ids, mask)
    before = target.config._attn_implementation
    mmattn.hf.register()
    target.set_attn_implementation("mmattn")
    try:
        draft = oracle(want, mask, lambda b, step: (b + step) % BLOCK)
        got = generate(target, drafter, ids, attention_mask=mask, max_new_tokens=NEW, pad_token_id=0, draft=draft)
    finally:
        target.set_attn_implementation(before)
    assert torch.equal(got.sequences, want) and got.acceptance_length > 1.5


def test_early_eos(pair):
    """Sequences that end at different times, inside accepted drafts too; several eos ids."""
    target, drafter = pair
    ids, mask = padded(target.device, [9, 5, 8], seed=3)
    free = alone(target, ids, mask)
    stops = [int(free[0, ids.shape[1] + 6]), int(free[1, ids.shape[1] + 11])]
    for eos in (stops[0], stops):
        want = alone(target, ids, mask, eos_token_id=eos)
        assert (want != free[:, : want.shape[1]]).any()  # something did end early
        for draft in (None, oracle(free, mask, lambda b, step: (2 * b + step) % (BLOCK + 1))):
            got = generate(
                target,
                drafter,
                ids,
                attention_mask=mask,
                max_new_tokens=NEW,
                pad_token_id=0,
                eos_token_id=eos,
                draft=draft,
            )
            assert torch.equal(got.sequences, want)
    first = int(free[2, ids.shape[1]])
    got = generate(target, drafter, ids[2:], attention_mask=mask[2:], max_new_tokens=NEW, eos_token_id=first)
    assert got.sequences[0].tolist() == [*ids[2].tolist(), first] and got.passes == 0 and got.acceptance_length == 0


def test_one_token(pair):
    target, drafter = pair
    ids, mask = padded(target.device, [4, 2])
    got = generate(target, drafter, ids, attention_mask=mask, max_new_tokens=1, pad_token_id=0)
    assert torch.equal(got.sequences, alone(target, ids, mask, new=1)) and got.kept == [[], []]


def test_taps_are_the_residual_stream(pair):
    target, _ = pair
    ids, _ = padded(target.device, [6])
    layers = target.config.num_hidden_layers

    def hooks():
        return [(len(layer._forward_hooks), len(layer._forward_pre_hooks)) for layer in target.get_decoder().layers]

    with torch.no_grad():
        out = target(ids, output_hidden_states=True)  # transformers leaves hooks of its own
    found = hooks()
    with torch.no_grad(), HiddenTaps(target, [layers, 0, 2]) as taps:
        target(ids)
        last, first, middle = taps.read().chunk(3, dim=-1)
        assert torch.equal(first, out.hidden_states[0]) and torch.equal(middle, out.hidden_states[2])
        # transformers puts the final norm on the last one
        assert torch.equal(target.get_decoder().norm(last), out.hidden_states[-1]) and not torch.equal(
            last, out.hidden_states[-1]
        )
        assert hooks() != found
    assert hooks() == found
    with pytest.raises(ValueError, match=f"hidden state 9 was asked for, but the target has {layers} layers"):
        HiddenTaps(target, [9])


@pytest.mark.parametrize(
    "given, text",
    [
        (dict(max_new_tokens=0), "max_new_tokens must be >= 1, got 0"),
        (dict(draft_tokens=BLOCK), rf"1..{BLOCK - 1} \(block_size {BLOCK}\), got {BLOCK}"),
        (dict(attention_mask=torch.tensor([[1, 1, 0]])), "prompt 0 must be padded on the left"),
        (dict(attention_mask=torch.tensor([[0, 0, 0]])), "prompt 0 must be padded on the left only and hold a token"),
        (dict(attention_mask=torch.ones(1, 2)), r"shape \[1, 3\], got \[1, 2\]"),
        (dict(cache="ring"), "'paged' or 'contiguous', got 'ring'"),
    ],
)
def test_bad_arguments(pair, given, text):
    with pytest.raises(ValueError, match=text):
        generate(*pair, torch.tensor([[1, 2, 3]], device=pair[0].device), **given)
    with pytest.raises(ValueError, match=r"\[B, S\] with at least one token, got \[1, 0\]"):
        generate(*pair, torch.zeros(1, 0, dtype=torch.long))


def test_a_target_whose_cache_cannot_drop_tokens():
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    config = Qwen3NextConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, linear_num_value_heads=2, linear_num_key_heads=2, linear_key_head_dim=16,
        linear_value_head_dim=16,
        num_experts=2, num_experts_per_tok=1, moe_intermediate_size=16, shared_expert_intermediate_size=16,
    )  # fmt: skip
    target = Qwen3NextForCausalLM(config).eval()
    with pytest.raises(
        ValueError, match="layer 0 of Qwen3NextForCausalLM keeps its state in a .*cannot drop rejected tokens"
    ):
        generate(target, demo_drafter(target), torch.tensor([[1, 2, 3]]))


@pytest.mark.slow
def test_training_raises_acceptance(pair, tmp_path):
    """A few outputs of the target, learnt by heart; also after a round trip through a checkpoint."""
    target, _ = pair
    torch.manual_seed(1)
    drafter = demo_drafter(target)
    ids, mask = padded(target.device, [PROMPT] * 4, seed=5)
    before = generate(target, drafter, ids, max_new_tokens=NEW, pad_token_id=0)
    frozen = {name: x.clone() for name, x in target.state_dict().items()}
    tokens, hidden = target_outputs(target, drafter, ids, NEW)
    assert train(drafter, tokens, hidden, seconds=600, max_steps=80) == 80
    assert all(torch.equal(x, frozen[name]) for name, x in target.state_dict().items())
    after = generate(target, drafter, ids, max_new_tokens=NEW, pad_token_id=0)
    assert torch.equal(after.sequences, alone(target, ids, mask)) and torch.equal(before.sequences, after.sequences)
    assert before.acceptance_length < 1.3 < 2 < after.acceptance_length
    drafter.save_pretrained(tmp_path)
    again = generate(
        target, Drafter.from_pretrained(tmp_path, device=target.device), ids, max_new_tokens=NEW, pad_token_id=0
    )
    assert again.kept == after.kept


def test_training_checks_its_data(pair):
    _, drafter = pair
    with pytest.raises(
        ValueError, match=f"sequences of 10 tokens are too short for blocks of {BLOCK - 1} drafts behind token {PROMPT}"
    ):
        train(drafter, torch.zeros(2, 10, dtype=torch.long), torch.zeros(2, 10, 3 * 64), seconds=1)


@pytest.mark.parametrize("target", TARGETS)
def test_demo_command(target):
    result = CliRunner().invoke(
        dflash_demo, ["--target", target, "--seconds", "2", "--sequences", "16", "--batch", "2", "--new-tokens", "16"]
    )
    assert result.exit_code == 0, result.output
    assert (
        result.output.count("equal") == 2 and "DIFFERENT" not in result.output and "acceptance length" in result.output
    )


def test_demo_refuses_a_wrong_output(monkeypatch):
    from mmattn.dflash import demo

    real = demo.generate

    def broken(*args, **kw):
        result = real(*args, **kw)
        result.sequences[0, -1] += 1
        return result

    monkeypatch.setattr(demo, "generate", broken)
    result = CliRunner().invoke(
        dflash_demo, ["--seconds", "0", "--sequences", "2", "--batch", "1", "--new-tokens", "8"]
    )
    assert result.exit_code == 1 and "did not return the target's own output" in result.output
