"""Sampling with drafts is sampling from the target: the acceptance rule alone, and the whole loop; requests in turn."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("click")

import transformers

from mmattn.dflash import Drafter, Sampling, generate
from mmattn.dflash.demo import MASK_TOKEN, WINDOW, demo_drafter, tiny_drafter_config, tiny_target

SURE = 1e-4
"""Chi-square tests with fixed seeds: a right rule is below it once in ten thousand seeds, a wrong one always here."""


def chi_square(counts, expected):
    """p-value of `counts` under `expected`; cells that expect fewer than 5 are put together."""
    small = expected < 5
    if small.any():
        counts = torch.cat([counts[~small], counts[small].sum()[None]])
        expected = torch.cat([expected[~small], expected[small].sum()[None]])
        if expected[-1] == 0:
            if counts[-1] > 0:
                return 0.0  # what has probability 0 came up
            counts, expected = counts[:-1], expected[:-1]
    statistic = ((counts - expected) ** 2 / expected).sum()
    freedom = torch.tensor((len(counts) - 1) / 2, dtype=torch.float64)
    return torch.special.gammaincc(freedom, statistic / 2).item()


def p_value(tokens, p):
    counts = torch.bincount(tokens, minlength=len(p)).double()
    return chi_square(counts, p.double() * len(tokens))


# The rule

VOCABULARY, ROWS = 6, 60000
SCORES = torch.tensor(
    [[2.0, 1.0, 0.5, 0.0, -1.0, -2.0], [0.0, 0.3, -0.3, 2.0, 1.0, 0.1], [1.0, -1.0, 0.0, 0.2, 0.4, 1.5]]
)
PROPOSALS = {
    "unlike the target": torch.tensor([[0.05, 0.05, 0.1, 0.2, 0.2, 0.4], [0.3, 0.3, 0.3, 0.05, 0.03, 0.02]]),
    "some tokens never drafted": torch.tensor([[0.0, 0.5, 0.5, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0, 0.0, 1.0]]),
    "the target itself": SCORES[:2].softmax(-1),
    "not drawn": None,
}


def run_rule(sampling, proposal, accept=Sampling.accept):
    """Tokens at the first and, where the first draft was taken, the second place; how many drafts were taken."""
    if proposal is None:
        drafts, q = torch.tensor([0, 3]).expand(ROWS, 2), None
    else:
        q = proposal.expand(ROWS, 2, VOCABULARY)
        drafts = sampling.draw(q)
    taken, following = accept(sampling, SCORES.expand(ROWS, 3, VOCABULARY), drafts, q)
    assert taken.min() >= 0 and taken.max() <= 2
    first = torch.where(taken > 0, drafts[:, 0], following)
    more = taken > 0
    second = torch.where(taken > 1, drafts[:, 1], following)[more]
    return first, second, following[taken == 2], taken


@pytest.mark.parametrize("temperature, top_p", [(1.0, 1.0), (0.5, 1.0), (1.5, 0.8)])
@pytest.mark.parametrize("name", PROPOSALS)
def test_tokens_are_distributed_as_the_target_says(name, temperature, top_p):
    sampling = Sampling(temperature, top_p, torch.Generator().manual_seed(3))
    first, second, third, taken = run_rule(sampling, PROPOSALS[name])
    p = sampling.probabilities(SCORES)
    for place, tokens in enumerate((first, second, third)):
        if len(tokens) > 1000:
            assert p_value(tokens, p[place]) > SURE, place
    assert len(second) > 1000
    if name == "the target itself" and temperature == top_p == 1:
        assert (taken == 2).float().mean() > 0.999
    if name == "not drawn":
        want = p[0, 0].item()
        assert abs((taken > 0).float().mean().item() - want) < 4 * (want * (1 - want) / ROWS) ** 0.5


def test_the_share_of_accepted_drafts_is_the_overlap():
    sampling = Sampling(1.0, generator=torch.Generator().manual_seed(4))
    q = PROPOSALS["unlike the target"]
    taken = run_rule(sampling, q)[3]
    want = torch.minimum(SCORES[0].softmax(-1), q[0]).sum().item()
    assert abs((taken > 0).float().mean().item() - want) < 4 * (want * (1 - want) / ROWS) ** 0.5


def always(self, scores, drafts, proposal):
    return torch.full((len(drafts),), 2), self.next(scores[:, 2])


def without_residual(self, scores, drafts, proposal):
    """Right acceptance, but the token after a refused draft is drawn from p."""
    taken, _ = Sampling.accept(self, scores, drafts, proposal)
    return taken, self.next(scores.gather(1, taken[:, None, None].expand(-1, 1, VOCABULARY))[:, 0])


@pytest.mark.parametrize("wrong", [always, without_residual])
def test_a_wrong_rule_is_seen(wrong):
    sampling = Sampling(1.0, generator=torch.Generator().manual_seed(3))
    first = run_rule(sampling, PROPOSALS["unlike the target"], wrong)[0]
    assert p_value(first, SCORES[0].softmax(-1)) < 1e-30


def test_greedy_takes_the_longest_run():
    scores = torch.nn.functional.one_hot(torch.tensor([[1, 2, 3], [1, 2, 3], [1, 2, 3]]), 6).float()
    drafts = torch.tensor([[1, 2], [1, 5], [0, 2]])
    taken, following = Sampling().accept(scores, drafts)
    assert taken.tolist() == [2, 1, 0] and following.tolist() == [3, 2, 1]


@pytest.mark.parametrize("temperature, top_p", [(1.0, 1.0), (0.7, 0.9), (1.3, 0.3), (1.0, 1e-6)])
def test_probabilities_are_those_of_transformers(temperature, top_p):
    from transformers.generation.logits_process import TemperatureLogitsWarper, TopPLogitsWarper

    scores = 2 * torch.randn(50, 40, generator=torch.Generator().manual_seed(0))
    want = TemperatureLogitsWarper(temperature)(None, scores) if temperature != 1 else scores
    want = TopPLogitsWarper(top_p)(None, want).softmax(-1) if top_p < 1 else want.softmax(-1)
    torch.testing.assert_close(Sampling(temperature, top_p).probabilities(scores), want)


@pytest.mark.parametrize(
    "given, text",
    [
        (dict(temperature=-1.0), "temperature must be finite and >= 0, got -1.0"),
        (dict(temperature=float("nan")), "temperature must be finite"),
        (dict(top_p=0.0), r"top_p must lie in \(0, 1\], got 0.0"),
        (dict(top_p=1.1), "top_p"),
    ],
)
def test_bad_sampling(given, text):
    target = tiny_target("qwen3")
    with pytest.raises(ValueError, match=text):
        generate(target, demo_drafter(target), torch.tensor([[1, 2]]), **given)


def test_a_proposal_of_the_wrong_shape():
    target = tiny_target("qwen3")

    def draft(bonus, cache):
        return torch.zeros(1, 2, dtype=torch.long), torch.ones(1, 2, 63)

    with pytest.raises(ValueError, match=r"must be \[1, 2, 64\], as the target's, got \[1, 2, 63\]"):
        generate(target, demo_drafter(target), torch.tensor([[1, 2]]), temperature=1.0, draft=draft)


# The loop

SMALL, BATCH, NEW = 6, 500, 4


@pytest.fixture(scope="module")
def small_pair():
    """A target over six tokens, peaked enough that its tokens depend on each other, and a random drafter for it."""
    torch.manual_seed(0)
    target = transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(
            vocab_size=SMALL, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, head_dim=16, bos_token_id=None, eos_token_id=None, pad_token_id=None,
            max_position_embeddings=64,
        )
    ).eval()  # fmt: skip
    target.lm_head.weight.data.mul_(20)
    config = tiny_drafter_config(target)
    config |= {"block_size": 4, "num_target_layers": 2, "intermediate_size": 32}
    config["dflash_config"] = {"mask_token_id": SMALL - 1, "target_layer_ids": [0, 1], "output_multiplier": 1.0}
    return target.requires_grad_(False), Drafter(config).requires_grad_(False)


@torch.no_grad()
def exact(target, prompt, sampling, new):
    """The probability of every continuation of `new` tokens, `[SMALL ** new]`."""
    tokens = torch.tensor(list(itertools.product(range(SMALL), repeat=new)))
    logits = target(torch.cat([prompt.expand(len(tokens), -1), tokens], dim=1)).logits
    rows = sampling.probabilities(logits[:, len(prompt) - 1 : -1])
    return rows.gather(-1, tokens[..., None]).double().prod(1)[:, 0]


@pytest.mark.parametrize("temperature, top_p, drawn", [(1.0, 1.0, True), (0.8, 0.9, True), (1.0, 1.0, False)])
def test_what_is_generated_is_distributed_as_the_targets_own(small_pair, temperature, top_p, drawn):
    """Two prompts of different lengths in one batch, many times; all continuations of three tokens counted."""
    target, drafter = small_pair
    prompts = [torch.tensor([3, 1, 4, 1, 5]), torch.tensor([2, 0])]
    ids = torch.stack([prompts[0], torch.cat([torch.zeros(3, dtype=torch.long), prompts[1]])]).repeat(BATCH, 1)
    mask = torch.tensor([[1] * 5, [0, 0, 0, 1, 1]]).repeat(BATCH, 1)
    generator = torch.Generator().manual_seed(5)
    own = None if drawn else lambda bonus, cache: drafter.draft(bonus, cache)
    got = generate(
        target, drafter, ids, attention_mask=mask, max_new_tokens=NEW, temperature=temperature, top_p=top_p,
        generator=generator, cache="contiguous", draft=own, pad_token_id=0,
    )  # fmt: skip
    assert 1.02 < got.acceptance_length < 3  # drafts were taken, and refused
    sampling = Sampling(temperature, top_p)
    for i, prompt in enumerate(prompts):
        tokens = got.sequences[i::2, 5 : 5 + NEW - 1]
        cells = (tokens * torch.tensor([SMALL**2, SMALL, 1])).sum(1)
        want = exact(target, prompt, sampling, NEW - 1)
        assert abs(want.sum().item() - 1) < 1e-4
        assert p_value(cells, want) > SURE
        assert p_value(cells, exact(target, prompts[1 - i], sampling, NEW - 1)) < 1e-6  # prompts are told apart


def test_a_cold_temperature_and_a_narrow_nucleus_are_greedy(small_pair):
    target, drafter = small_pair
    prompt = torch.tensor([[3, 1, 4]])
    want = generate(target, drafter, prompt, max_new_tokens=12, pad_token_id=0).sequences
    for kw in (dict(temperature=1e-4), dict(temperature=1.0, top_p=1e-6)):
        assert torch.equal(generate(target, drafter, prompt, max_new_tokens=12, pad_token_id=0, **kw).sequences, want)


# One drafter, several requests


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", ["qwen3", "mimo"])
def test_requests_in_turn_equal_fresh_objects(name, temperature):
    """Longer, shorter, batched, shortest: one drafter and one target for all, against new ones for each."""
    torch.manual_seed(0)
    target = tiny_target(name)
    drafter = demo_drafter(target).requires_grad_(False)
    g = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, MASK_TOKEN, size, generator=g) for size in ((1, 2 * WINDOW), (1, 3), (3, 7), (1, 1))]

    def run(target, drafter, prompt):
        return generate(
            target, drafter, prompt, max_new_tokens=WINDOW, temperature=temperature, pad_token_id=0,
            generator=torch.Generator().manual_seed(7),
        )  # fmt: skip

    for prompt in prompts:
        fresh_target = copy.deepcopy(target)
        fresh = Drafter(drafter.config).requires_grad_(False)
        fresh.load_state_dict(drafter.state_dict(), strict=False)
        fresh.mask_embedding = drafter.mask_embedding
        got, want = run(target, drafter, prompt), run(fresh_target, fresh, prompt)
        assert torch.equal(got.sequences, want.sequences) and got.kept == want.kept
