"""Gemma targets, whose embedding scales its rows; hidden states per family; drafters that were made for other targets."""

from __future__ import annotations

import json
import math

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

pytest.importorskip("transformers")
pytest.importorskip("click")

import transformers

from mmattn.dflash import Drafter, HiddenTaps, generate
from mmattn.dflash.demo import tiny_drafter_config, tiny_target
from mmattn.dflash.target import SharedModules

HIDDEN, VOCABULARY, BLOCK, NEVER, MASK = 64, 32, 5, 30, 31
"""NEVER: a token that no text here holds."""


def gemma(name, vocabulary=VOCABULARY, **fields):
    """A tiny random Gemma 3 or 4 text model: sliding and full layers, tied head, soft cap on the logits."""
    sizes = dict(
        vocab_size=vocabulary, hidden_size=HIDDEN, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=512, sliding_window=16, bos_token_id=None,
        eos_token_id=None, pad_token_id=0, final_logit_softcapping=30.0,
        layer_types=["sliding_attention", "full_attention"] * 2, **fields,
    )  # fmt: skip
    torch.manual_seed(0)
    if name == "gemma3":
        return transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**sizes)).eval().requires_grad_(False)
    config = transformers.Gemma4TextConfig(
        **sizes, global_head_dim=16, hidden_size_per_layer_input=8, vocab_size_per_layer_input=vocabulary
    )
    return transformers.Gemma4ForCausalLM(config).eval().requires_grad_(False)


GEMMAS = ["gemma3", "gemma4"]


def copying_pair(name):
    """A Gemma that repeats its last token, and a drafter that copies it, built for rows scaled by sqrt(hidden).

    Token x is `u + e_x`, the mask token `u - e_NEVER`. The target's layers add nothing. The drafter's one layer takes the
    mean of the block's rows, `u + (e_x - N e_NEVER) / (N + 1)` normalised, drops u and adds just as much e_NEVER as a mask
    row of the right scale lacks: then e_x is all that is left. Rows of any smaller scale say NEVER.
    """
    target = gemma(name)
    table = torch.zeros(VOCABULARY, HIDDEN)
    table[:, 0] = 1
    table[range(MASK), range(1, 1 + MASK)] = 1
    table[MASK, 1 + NEVER] = -1
    target.get_input_embeddings().weight.copy_(table)
    for layer_name, x in target.named_parameters():
        if any(part in layer_name for part in ("o_proj", "down_proj", "per_layer_projection")):
            x.zero_()
    n, scale = BLOCK - 1, math.sqrt(HIDDEN)
    drafter = Drafter(
        {
            "hidden_size": HIDDEN, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1,
            "head_dim": HIDDEN, "block_size": BLOCK, "rope_theta": 1e12, "vocab_size": VOCABULARY,
            "num_target_layers": 4, "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [3]},
        }
    )  # fmt: skip
    with torch.no_grad():
        for weight_name, x in drafter.named_parameters():
            x.fill_(1.0 if "norm" in weight_name else 0.0)
        heads = drafter.layers[0].self_attn
        slowest = HIDDEN // 2 - 1  # the dim that RoPE hardly turns
        heads.q_proj.weight[slowest, 0] = heads.k_proj.weight[slowest, 0] = 1
        heads.q_norm.weight.fill_(8)  # the context, whose keys are zero, has no weight
        heads.v_proj.weight.copy_(torch.eye(HIDDEN))
        move = torch.eye(HIDDEN)
        move[0, 0] = 0
        move[1 + NEVER, 1 + NEVER] = -scale * (n + 1) / (n * math.sqrt(HIDDEN / 2))
        heads.o_proj.weight.copy_(move)
    return target, drafter.requires_grad_(False)


@pytest.mark.parametrize("name", GEMMAS)
def test_a_drafter_that_copies_gemma_is_accepted_whole(name, monkeypatch):
    target, drafter = copying_pair(name)
    prompts = torch.tensor([[0, 0, 3, 7], [4, 9, 2, 11]])
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    got = generate(target, drafter, prompts, attention_mask=mask, max_new_tokens=1 + 4 * BLOCK)
    assert got.sequences[:, 4:].tolist() == [[7] * (1 + 4 * BLOCK), [11] * (1 + 4 * BLOCK)]
    assert got.acceptance_length == BLOCK and got.passes == 4
    # The bare table, which is what `weight` holds, would draft noise.
    monkeypatch.setattr(SharedModules, "embed", lambda self, ids: F.embedding(ids, self.embedding.weight))
    bare = generate(target, drafter, prompts, attention_mask=mask, max_new_tokens=1 + 4 * BLOCK)
    assert torch.equal(bare.sequences, got.sequences) and bare.acceptance_length == 1


@pytest.mark.parametrize("name", GEMMAS)
def test_rows_and_scores_are_those_of_gemma(name):
    """Embedding with its scale, tied head, soft cap; a random target's greedy output, batched, is its own."""
    target = gemma(name)
    target.get_input_embeddings().weight.mul_(100)  # so that the soft cap bends the logits
    config = {**tiny_drafter_config(target), "vocab_size": VOCABULARY}
    config["dflash_config"] = {**config["dflash_config"], "mask_token_id": MASK, "output_multiplier": 1.0}
    drafter = Drafter(config).attach(target).requires_grad_(False)
    ids = torch.tensor([[5, 9, 3]])
    with HiddenTaps(target, [0, 4], final_norm=True) as taps:
        logits = target(ids).logits
        rows, last = taps.read().chunk(2, dim=-1)
    block = drafter.embed(ids[:, 0], 2)
    assert torch.equal(block[:, 0], rows[:, 0]) and rows.std() > 7 * target.get_input_embeddings().weight.std()
    assert torch.equal(block[:, 1], target.get_input_embeddings()(torch.tensor([MASK])))
    torch.testing.assert_close(drafter.logits(last), logits)
    assert logits.abs().max() > 10
    own = Drafter({**config, "final_logit_softcapping": 5.0}).attach(target)
    assert own.logits(last).abs().max() <= 5  # the drafter's own cap comes first
    prompts = torch.tensor([[0, 0, 3, 7], [4, 9, 2, 11]])
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    got = generate(target, drafter, prompts, attention_mask=mask, max_new_tokens=24)
    want = target.generate(prompts, attention_mask=mask, do_sample=False, max_new_tokens=24)
    assert torch.equal(got.sequences, want)


def test_a_head_that_the_target_only_ties(monkeypatch):
    target = gemma("gemma3")
    config = {**tiny_drafter_config(target), "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [0]}}
    hidden = torch.randn(3, HIDDEN)
    want = Drafter(config).attach(target).logits(hidden)
    monkeypatch.setattr(type(target), "get_output_embeddings", lambda self: None)
    torch.testing.assert_close(Drafter(config).attach(target).logits(hidden), want)
    target.config.tie_word_embeddings = False
    with pytest.raises(ValueError, match="no output embedding and ties none"):
        Drafter(config).attach(target)


def test_a_drafters_own_tied_embedding_is_its_head():
    target = tiny_target("qwen3")
    config = {**tiny_drafter_config(target), "tie_word_embeddings": True}
    drafter = Drafter(config, own_embedding=True).attach(target)
    hidden = torch.randn(2, 64)
    torch.testing.assert_close(drafter.logits(hidden), 16 * hidden @ drafter.embed_tokens.weight.T)


def test_scales_that_would_be_applied_twice_or_not_at_all():
    target = gemma("gemma3")
    config = {**tiny_drafter_config(target), "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [0]}}
    with pytest.raises(
        ValueError, match="input_embedding_scale is 8, but the target's embedding already scales .* by 8"
    ):
        Drafter({**config, "input_embedding_scale": 8.0}).attach(target)
    with pytest.raises(ValueError, match="own embedding, but Gemma3ForCausalLM scales its rows by 8"):
        Drafter(config, own_embedding=True).attach(target)
    drafter = Drafter({**config, "input_embedding_scale": 1.0}, own_embedding=True).attach(target)
    assert torch.equal(drafter.embed(torch.tensor([3]))[0, 0], drafter.embed_tokens.weight[3])


def test_a_norm_of_the_embedding_module_is_left_out():
    class Normed(torch.nn.Embedding):
        embed_norm = torch.nn.RMSNorm(8)

        def forward(self, ids):
            return self.embed_norm(super().forward(ids))

    rows = Normed(4, 8)
    ids = torch.tensor([[1, 2]])
    assert torch.equal(SharedModules(rows, None, None).embed(ids), rows.weight[ids])


FAMILIES = {
    "qwen3": lambda: tiny_target("qwen3"),
    "mimo": lambda: tiny_target("mimo"),
    "gemma3": lambda: gemma("gemma3"),
    "gemma4": lambda: gemma("gemma4"),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_final_norm_of_the_last_hidden_state(family):
    """Before the norm, as vLLM has it for each of these; after it, as transformers and so the published loop have it."""
    target = FAMILIES[family]()
    layers, ids = target.config.num_hidden_layers, torch.tensor([[3, 1, 4, 1, 5]])
    with torch.no_grad():
        states = target(ids, output_hidden_states=True).hidden_states
        seen = {}
        for after in (False, True):
            with HiddenTaps(target, [0, 2, layers], final_norm=after) as taps:
                target(ids)
                first, middle, seen[after] = taps.read().chunk(3, dim=-1)
            assert torch.equal(first, states[0]) and torch.equal(middle, states[2])
        assert torch.equal(seen[True], states[-1]) and not torch.equal(seen[False], states[-1])
        assert torch.equal(target.get_decoder().norm(seen[False]), states[-1])


def test_the_final_norm_is_a_setting_of_the_drafter(monkeypatch):
    from mmattn.dflash import generate as package_generate  # noqa: F401
    from mmattn.dflash.generate import HiddenTaps as used

    target, given = tiny_target("qwen3"), []
    original = used.__init__

    def recorded(self, *args, **kw):
        given.append(kw["final_norm"])
        original(self, *args, **kw)

    monkeypatch.setattr(used, "__init__", recorded)
    config = tiny_drafter_config(target)
    for fields, want in ((config, False), ({**config, "target_final_norm": True}, True)):
        generate(target, Drafter(fields).requires_grad_(False), torch.tensor([[1, 2]]), max_new_tokens=2)
        assert given.pop() is want


# Drafters for other targets


def checkpoint(path, target, **fields):
    """A directory with a config, and no weights: whatever is refused is refused before any is read."""
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({**tiny_drafter_config(target), **fields}))
    return path


@pytest.mark.parametrize(
    "fields, values",
    [
        ({"vocab_size": 100}, ("vocabulary of 100", "64")),
        ({"target_hidden_size": 96}, ("hidden size 96", "64")),
        ({"num_target_layers": 6}, ("num_target_layers is 6", "4 layers")),
        (
            {"num_target_layers": None, "dflash_config": {"mask_token_id": 63, "target_layer_ids": [5]}},
            ("hidden state 6", "4 layers"),
        ),
        ({"dflash_config": {"mask_token_id": 64, "target_layer_ids": [3]}}, ("mask_token_id 64", "vocabulary of 64")),
        (
            {"speculators_config": {"verifier": {"architectures": ["LlamaForCausalLM"]}}},
            ("LlamaForCausalLM", "Qwen3ForCausalLM"),
        ),
    ],
)
@pytest.mark.parametrize("given", ["model", "config"])
def test_a_drafter_for_another_target_is_refused_before_weights_are_read(fields, values, given, tmp_path):
    target = tiny_target("qwen3")
    target.config.architectures = ["Qwen3ForCausalLM"]
    path = checkpoint(tmp_path / "drafter", target, **fields)
    with pytest.raises(ValueError) as error:
        Drafter.from_pretrained(path, target=target if given == "model" else target.config)
    assert all(value in str(error.value) for value in values), str(error.value)
    with pytest.raises(ValueError) as error:  # and when it is attached later
        Drafter(path).attach(target)
    assert all(value in str(error.value) for value in values), str(error.value)


def test_vocabularies_may_differ_by_padding_where_the_tables_are_shared(tmp_path):
    """The published drafter of MiMo-V2.5-Pro says 152064, its target 152576. With tables of its own each row counts."""
    target = tiny_target("qwen3")
    config = {**tiny_drafter_config(target), "vocab_size": 152064}
    target.config.vocab_size = 152576
    Drafter(config).attach(target)
    target.config.vocab_size = 153000
    with pytest.raises(ValueError, match="a vocabulary of 152064, but the target's holds 153000"):
        Drafter(config).attach(target)
    target.config.vocab_size = 152576
    path = checkpoint(tmp_path, target, vocab_size=152064)
    save_file({"lm_head.weight": torch.zeros(1)}, path / "model.safetensors")  # refused before its shape is looked at
    with pytest.raises(ValueError, match="a vocabulary of 152064, but the target's holds 152576"):
        Drafter.from_pretrained(path, target=target)


def test_a_drafter_for_this_target_is_loaded_and_attached(tmp_path):
    target = tiny_target("qwen3")
    verifier = {"verifier": {"architectures": ["Qwen3ForConditionalGeneration"]}}
    path = checkpoint(tmp_path / "drafter", target, speculators_config=verifier)
    with pytest.raises(FileNotFoundError, match="no .safetensors file"):
        Drafter.from_pretrained(path, target=target)
    Drafter(path).save_pretrained(path)
    drafter = Drafter.from_pretrained(path, target=target).requires_grad_(False)
    prompt = torch.tensor([[1, 2, 3]])
    got = generate(target, drafter, prompt, max_new_tokens=8, pad_token_id=0).sequences
    assert torch.equal(got, target.generate(prompt, do_sample=False, max_new_tokens=8, pad_token_id=0))


# Part of the vocabulary

DRAFTED = [0, 2, 3, 7, 20, 41, 42, 60]


def partial_drafter(path, target, ids=DRAFTED, t2d=None, **fields):
    config = {**tiny_drafter_config(target), "draft_vocab_size": len(ids), **fields}
    torch.manual_seed(2)
    drafter = Drafter(config, own_head=True)
    drafter.d2t.copy_(torch.tensor(ids) - torch.arange(len(ids)))
    drafter.save_pretrained(path)
    if t2d is not None:
        tensors = drafter.state_dict() | {"t2d": t2d}
        save_file(tensors, path / "model.safetensors")
    return drafter


def test_a_drafter_for_part_of_the_vocabulary(tmp_path):
    target = tiny_target("qwen3")
    t2d = torch.zeros(64, dtype=torch.bool)
    t2d[DRAFTED] = True
    made = partial_drafter(tmp_path, target, t2d=t2d)
    drafter = Drafter.from_pretrained(tmp_path, target=target, dtype=torch.float32).requires_grad_(False)
    assert drafter.d2t.dtype is torch.int64 and torch.equal(drafter.d2t, made.d2t)
    hidden = torch.randn(2, 3, 64)
    logits = drafter.logits(hidden)
    assert logits.shape == (2, 3, 64) and (logits.isfinite().sum(-1) == len(DRAFTED)).all()
    torch.testing.assert_close(logits[..., DRAFTED], 16 * drafter.lm_head(hidden))
    cache = drafter.new_cache(1, 8)
    drafter.extend(torch.randn(1, 4, drafter.fc.in_features), [4], cache)
    tokens = drafter.draft(torch.tensor([5]), cache)
    with torch.no_grad():
        states = drafter(drafter.embed(torch.tensor([5])), cache)[:, 1:]
    assert torch.equal(tokens, drafter.logits(states).argmax(-1)) and set(tokens[0].tolist()) <= set(DRAFTED)
    prompt = torch.tensor([[1, 2, 3]])
    got = generate(target, drafter, prompt, max_new_tokens=8, pad_token_id=0).sequences
    assert torch.equal(got, target.generate(prompt, do_sample=False, max_new_tokens=8, pad_token_id=0))
    sampled = generate(
        target, drafter, prompt, max_new_tokens=8, pad_token_id=0, temperature=1.0, generator=torch.Generator()
    )
    assert sampled.sequences.shape == (1, 11)


@pytest.mark.parametrize(
    "ids, t2d, text",
    [
        ([0, 2, 64], None, r"d2t maps to tokens 0..64, but the target's vocabulary holds 64"),
        ([0, 2, 2], None, "3 drafted tokens to 2 tokens"),
        ([0, 2, 3], torch.arange(64) < 3, "t2d"),
        ([0, 2, 3], torch.arange(32) < 3, r"t2d \[32\]"),
    ],
)
def test_maps_that_do_not_fit(ids, t2d, text, tmp_path):
    target = tiny_target("qwen3")
    partial_drafter(tmp_path, target, ids, t2d=t2d)
    with pytest.raises(ValueError, match=text):
        Drafter.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    "fields, own, text",
    [
        ({"draft_vocab_size": 8}, False, "draft_vocab_size 8 is not vocab_size 64.*lm_head of its own"),
        ({"draft_vocab_size": 65}, True, "draft_vocab_size 65 is over vocab_size 64"),
        ({"draft_vocab_size": 8, "vocab_size": None}, True, "draft_vocab_size is 8, but the config lacks vocab_size"),
    ],
)
def test_vocabularies_that_do_not_fit(fields, own, text):
    with pytest.raises(ValueError, match=text):
        Drafter({**tiny_drafter_config(tiny_target("qwen3")), **fields}, own_head=own)
