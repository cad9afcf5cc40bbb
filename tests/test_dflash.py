"""The drafter against a dense computation of its hidden states, its caches, its files; masks of draft blocks."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

import mmattn
from mmattn import Mask
from mmattn.dflash import Drafter, DrafterConfig, GraphedDraft, shard_sinks
from mmattn.dflash import cache as cache_module

from .calls import skip_unsupported

transformers = pytest.importorskip("transformers")
VOCABULARY, HIDDEN, TARGET_HIDDEN, WINDOW, BLOCK = 40, 24, 16, 8, 5

BASE = {
    "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": 32, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "block_size": BLOCK, "rope_theta": 1000.0,
    "target_hidden_size": TARGET_HIDDEN, "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "dflash_config": {"mask_token_id": 39, "target_layer_ids": [0, 2]},
}  # fmt: skip


def variant(dflash=None, **fields):
    return {**BASE, **fields, "dflash_config": {**BASE["dflash_config"], **(dflash or {})}}


VARIANTS = {
    # name: (config, (window, causal) per layer as the truth table says it)
    "hybrid, not causal": (variant(is_causal=False), [(8, False), (None, False), (8, False)]),
    "hybrid, causal unset": (variant(), [(8, True), (None, False), (8, True)]),
    "hybrid, causal": (variant(is_causal=True), [(8, True), (None, True), (8, True)]),
    "as MiMo": (
        variant(
            dflash={"use_swa": True, "swa_window_size": 8, "attention_sink_bias": True, "attention_value_scale": 0.612},
            layer_types=None, partial_rotary_factor=0.5,
        ),
        [(8, False)] * 3,
    ),
    "interleaved rotary": (
        variant(is_causal=False, rope_is_neox_style=False, partial_rotary_factor=0.5),
        [(8, False), (None, False), (8, False)],
    ),
    "sinks, biases, narrow values, scaled input": (
        variant(
            dflash={"attention_sink_bias": True, "input_embedding_scale": 3.0},
            is_causal=False, attention_bias=True, v_head_dim=6,
        ),
        [(8, False), (None, False), (8, False)],
    ),
}  # fmt: skip


def make(config, dtype=torch.float64, seed=0):
    """A drafter with random weights everywhere (norms, biases and sinks too), and an embedding of its own."""
    torch.manual_seed(seed)
    drafter = Drafter(config, own_embedding=True, own_head=True)
    with torch.no_grad():
        for name, x in drafter.named_parameters():
            x.copy_(torch.randn_like(x) * (0.3 if x.dim() == 2 else 0.2) + ("norm" in name))
            if name.endswith("attention_sink_bias"):
                x[1] = -math.inf
    drafter.mask_embedding = torch.nn.Parameter(torch.randn(HIDDEN))
    return drafter.to(dtype).requires_grad_(False)


def dense_hidden(drafter, pairs, context, bonus):
    """Draft hidden states of one sequence, from the weights and the definition; shares no code with the drafter.

    `context` `[P, features]` are the target's hidden states of positions 0..P-1; `pairs` the (window, causal) of each
    layer.
    """
    w, c = drafter.state_dict(), drafter.config
    heads, heads_kv, d = c.raw["num_attention_heads"], c.raw["num_key_value_heads"], c.raw["head_dim"]
    d_v = c.raw.get("v_head_dim", d)
    rotated = int(d * c.raw.get("partial_rotary_factor", 1.0))
    nested = c.raw["dflash_config"]

    def rms(x, name):
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-6) * w[name]

    def linear(x, name):
        y = x @ w[f"{name}.weight"].T
        return y + w[f"{name}.bias"] if f"{name}.bias" in w else y

    def rope(x, positions):
        out = x.clone()
        for j in range(rotated // 2):
            angle = positions.double() * c.raw["rope_theta"] ** (-2 * j / rotated)
            first, second = (j, j + rotated // 2) if c.raw.get("rope_is_neox_style", True) else (2 * j, 2 * j + 1)
            a, b = x[..., first], x[..., second]
            cos, sin = torch.cos(angle)[:, None], torch.sin(angle)[:, None]
            out[..., first], out[..., second] = a * cos - b * sin, b * cos + a * sin
        return out

    context = rms(context @ w["fc.weight"].T, "hidden_norm.weight")
    first = w["mask_embedding"] if bonus == nested["mask_token_id"] else w["embed_tokens.weight"][bonus]
    x = torch.stack([first] + [w["mask_embedding"]] * (BLOCK - 1)) * nested.get("input_embedding_scale", 1.0)
    past, total = len(context), len(context) + BLOCK
    q_pos, k_pos = torch.arange(past, total), torch.arange(total)
    for i, (window, causal) in enumerate(pairs):
        p = f"layers.{i}"
        h = rms(x, f"{p}.input_layernorm.weight")
        rows = torch.cat([context, h])
        q = rope(rms(linear(h, f"{p}.self_attn.q_proj").view(-1, heads, d), f"{p}.self_attn.q_norm.weight"), q_pos)
        k = rope(
            rms(linear(rows, f"{p}.self_attn.k_proj").view(-1, heads_kv, d), f"{p}.self_attn.k_norm.weight"), k_pos
        )
        v = linear(rows, f"{p}.self_attn.v_proj").view(-1, heads_kv, d_v) * nested.get("attention_value_scale", 1.0)
        outs = []
        for head in range(heads):
            scores = q[:, head] @ k[:, head * heads_kv // heads].T / math.sqrt(d)
            for a, qa in enumerate(q_pos.tolist()):
                for b, kb in enumerate(k_pos.tolist()):
                    hidden = (causal and kb > qa) or (window is not None and abs(qa - kb) > window - 1)
                    if hidden:
                        scores[a, b] = -math.inf
            if nested.get("attention_sink_bias"):
                sink = w[f"{p}.self_attn.attention_sink_bias"][head].expand(BLOCK, 1)
                scores = torch.cat([scores, sink], dim=1)
            outs.append(torch.softmax(scores, -1)[:, :total] @ v[:, head * heads_kv // heads])
        x = x + linear(torch.cat(outs, -1), f"{p}.self_attn.o_proj")
        h = rms(x, f"{p}.post_attention_layernorm.weight")
        gate = linear(h, f"{p}.mlp.gate_proj")
        x = x + linear(gate * torch.sigmoid(gate) * linear(h, f"{p}.mlp.up_proj"), f"{p}.mlp.down_proj")
    return rms(x, "norm.weight")


ROUNDS = [[21, 2, 9], [3, 5, 0], [1, 4, 5], [5, 5, 5]]
"""Context rows that each of three sequences gains per round; the first is the prompt."""


def run_rounds(drafter, *, kind, page_size=4, rounds=ROUNDS, poison=True, backend="auto", causal=None):
    """Drafts after every round, with garbage in the rows that are to be dropped; yields what a dense check needs."""
    dtype = drafter.fc.weight.dtype
    g = torch.Generator().manual_seed(1)
    cache = drafter.new_cache(3, 64, kind=kind, page_size=page_size)
    context = [torch.zeros(0, drafter.fc.in_features, dtype=dtype) for _ in range(3)]
    for counts in rounds:
        rows = max(*counts, BLOCK)
        hidden = torch.randn(3, rows, drafter.fc.in_features, generator=g, dtype=torch.float64).to(dtype)
        for b, n in enumerate(counts):
            context[b] = torch.cat([context[b], hidden[b, :n]])
            if poison:
                hidden[b, n:] = math.nan  # rejected rows
        drafter.extend(hidden.to(cache.device), counts, cache)
        if poison and kind == "paged":
            for i, layer_kind in enumerate(cache.layers):
                for pages in cache._kv[i]:
                    pages[cache._free[layer_kind]] = math.nan  # given back: may hold anything
        bonus = torch.randint(VOCABULARY, (3,), generator=g)
        bonus[0] = 39  # the target may emit the mask token
        yield (
            drafter(drafter.embed(bonus.to(cache.device)), cache, causal=causal, backend=backend),
            context,
            bonus,
            cache,
        )


def worst_error(drafter, pairs, **kw):
    """Largest difference from the dense hidden states over all rounds and sequences."""
    return max(
        (got[b] - dense_hidden(drafter, pairs, context[b], int(bonus[b]))).abs().max().item()
        for got, context, bonus, _ in run_rounds(drafter, **kw)
        for b in range(3)
    )


@pytest.mark.parametrize("kind", ["paged", "contiguous"])
@pytest.mark.parametrize("name", VARIANTS)
def test_hidden_states_are_the_dense_ones(name, kind):
    config, pairs = VARIANTS[name]
    assert worst_error(make(config), pairs, kind=kind) < 1e-12


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_page_sizes(page_size):
    config, pairs = VARIANTS["hybrid, not causal"]
    assert worst_error(make(config), pairs, kind="paged", page_size=page_size) < 1e-12


def test_backends(backend, device):
    """In bfloat16 on every backend: as close to the dense hidden states in float64 as the torch backend, times two."""
    config, pairs = VARIANTS["as MiMo"]
    exact = make({**config, "head_dim": 64})
    drafter = Drafter(exact.config, own_embedding=True, own_head=True)
    drafter.mask_embedding = torch.nn.Parameter(exact.mask_embedding)
    drafter.load_state_dict(exact.state_dict())
    drafter = drafter.to(device, torch.bfloat16).requires_grad_(False)
    exact.load_state_dict(drafter.state_dict())  # the same rounded weights

    def error(backend):
        try:
            rounds = list(run_rounds(drafter, kind="paged", page_size=16, rounds=ROUNDS[:1], backend=backend))
        except mmattn.UnsupportedError as e:
            pytest.skip(str(e))
        return max(
            (got[b].cpu().double() - dense_hidden(exact, pairs, context[b].double(), int(bonus[b]))).abs().max().item()
            for got, context, bonus, _ in rounds
            for b in range(3)
        )

    assert error(backend) <= 2 * error("torch") + 2**-7


WRONG = {
    "sliding as full": lambda m: dataclasses.replace(m, window_left=None),
    "sliding as causal": lambda m: dataclasses.replace(m, causal=True) if m.window_left else m,
    "left window only": lambda m: dataclasses.replace(m, symmetrize=False) if m.window_left else m,
    "window off by one": lambda m: dataclasses.replace(m, window_left=m.window_left - 1) if m.window_left else m,
    "full as causal": lambda m: m if m.window_left else dataclasses.replace(m, causal=True),
}


@pytest.mark.parametrize("name", WRONG)
def test_the_dense_check_sees_wrong_layers(name):
    """The comparison above must fail where layers run with another mask; else it proves nothing."""
    config, pairs = VARIANTS["hybrid, not causal"]
    read = DrafterConfig.read(config)
    wrong = make(dataclasses.replace(read, layers=tuple(WRONG[name](m) for m in read.layers)))
    error = worst_error(wrong, pairs, kind="contiguous")
    if name == "left window only":
        # Every row of a block sees the whole block when the block fits the window: the two masks are one.
        assert error < 1e-12
    else:
        assert error > 1e-3


def test_causality_per_sequence():
    config, pairs = VARIANTS["hybrid, not causal"]
    drafter = make(config)
    mixed = torch.tensor([1, 0, 7], dtype=torch.int32)
    for got, context, bonus, _ in run_rounds(drafter, kind="paged", causal=mixed):
        for b in range(3):
            mine = [(window, bool(mixed[b])) for window, _ in pairs]
            torch.testing.assert_close(
                got[b], dense_hidden(drafter, mine, context[b], int(bonus[b])), rtol=0, atol=1e-12
            )


def test_one_plan_per_layer_kind_and_step(monkeypatch):
    built = []
    real = cache_module.plan
    monkeypatch.setattr(cache_module, "plan", lambda mask, **kw: built.append(mask) or real(mask, **kw))
    drafter = make(VARIANTS["hybrid, not causal"][0])
    for step, _ in enumerate(run_rounds(drafter, kind="paged"), start=1):
        assert built == [Mask.sliding_window(8, causal=False), Mask.full()] * step


def test_a_windowed_cache_group_does_not_grow():
    drafter = make(VARIANTS["hybrid, not causal"][0])
    sliding, full = drafter.config.layers[:2]
    cache = drafter.new_cache(2, 400, page_size=4)
    assert cache.pages[full] == 2 * 102 and cache.pages[sliding] == 2 * 4  # 7 + 5 keys touch at most 4 pages of 4
    for _ in range(70):
        drafter.extend(torch.randn(2, 5, drafter.fc.in_features, dtype=torch.float64), [5, 3], cache)
        for kind in (sliding, full):
            held = [page for pages in cache._held[kind] for page in pages.values()]
            assert sorted(held + cache._free[kind]) == list(range(cache.pages[kind]))
    assert (cache.tables[sliding] >= 0).sum(1).max() <= 4 and (cache.tables[full][0] >= 0).sum() == 89


def test_cache_errors():
    drafter = make(VARIANTS["hybrid, not causal"][0])
    cache = drafter.new_cache(2, 8)
    hidden = torch.randn(2, 9, drafter.fc.in_features, dtype=torch.float64)
    for counts, text in [
        ([9, 1], "sequence 0.*9.*holds 8"),
        ([1], r"per sequence \(2\), got 1"),
        ([10, 1], "10.*9 rows"),
    ]:
        with pytest.raises(ValueError, match=text):
            drafter.extend(hidden, counts, cache)
    assert cache.counts == [0, 0] and cache.lens.tolist() == [0, 0]
    with pytest.raises(ValueError, match="reserves 5 rows for a block, got 6"):
        drafter(torch.randn(2, 6, HIDDEN, dtype=torch.float64), cache)
    with pytest.raises(ValueError, match=r"2 x 16 = 32 features, got 31"):
        drafter.extend(hidden[..., 1:], [1, 1], cache)
    with pytest.raises(ValueError, match="'paged' or 'contiguous', got 'ring'"):
        drafter.new_cache(2, 8, kind="ring")
    with pytest.raises(ValueError, match="page_size must be >= 1, got 0"):
        drafter.new_cache(2, 8, page_size=0)


@pytest.mark.parametrize("kind", ["paged", "contiguous"])
def test_positions_past_the_longest_are_refused(kind):
    drafter = make({**VARIANTS["hybrid, not causal"][0], "max_position_embeddings": 32})
    with pytest.raises(ValueError, match="33 context rows .* positions end at 32"):
        drafter.new_cache(1, 33, kind=kind)
    with pytest.raises(ValueError, match="33 context rows .* positions end at 32"):
        drafter.training_keys(torch.randn(1, 33, drafter.fc.in_features, dtype=torch.float64), [0], [1])
    # Up to the last position: the rows of the block behind it stand where they would in a longer model.
    cache, longer = drafter.new_cache(1, 32, kind=kind), make(VARIANTS["hybrid, not causal"][0])
    other = longer.new_cache(1, 64, kind=kind)
    hidden = torch.randn(1, 32, drafter.fc.in_features, dtype=torch.float64)
    drafter.extend(hidden, [32], cache)
    longer.extend(hidden, [32], other)
    bonus = torch.tensor([3])
    torch.testing.assert_close(drafter(drafter.embed(bonus), cache), longer(longer.embed(bonus), other))


def test_a_cache_cuts_no_gradient_silently():
    drafter = make(VARIANTS["as MiMo"][0]).requires_grad_(True)
    cache = drafter.new_cache(1, 8)
    drafter.extend(torch.randn(1, 3, drafter.fc.in_features, dtype=torch.float64), [3], cache)
    drafter.draft(torch.tensor([1]), cache)  # drafting itself needs no gradients
    with pytest.raises(ValueError, match=r"use training_keys\(\) or torch.no_grad\(\)"):
        drafter(drafter.embed(torch.tensor([1])), cache)


def test_debug_mode_finds_every_page_it_needs(monkeypatch):
    monkeypatch.setenv("MMATTN_DEBUG", "1")
    config, pairs = VARIANTS["hybrid, not causal"]
    drafter = make(config)
    assert worst_error(drafter, pairs, kind="paged") < 1e-12
    *_, (_, _, bonus, cache) = run_rounds(drafter, kind="paged")
    cache.tables[drafter.config.layers[0]].fill_(-1)
    cache._slots = lambda kind, positions, valid: torch.zeros_like(positions)  # only the reading is of interest
    with pytest.raises(ValueError, match=r"page_table\[0, 5\] is -1"):
        drafter(drafter.embed(bonus), cache)


def test_training_keys_are_the_cached_ones_and_reach_every_parameter():
    drafter = make(VARIANTS["sinks, biases, narrow values, scaled input"][0])
    hidden = torch.randn(2, 12, drafter.fc.in_features, dtype=torch.float64)
    sequences, anchors, bonus = [0, 1, 1], [12, 3, 7], torch.tensor([4, 5, 6])
    got = drafter(drafter.embed(bonus), drafter.training_keys(hidden, sequences, anchors))
    cache = drafter.new_cache(3, 12)
    drafter.extend(hidden[sequences], anchors, cache)
    torch.testing.assert_close(got, drafter(drafter.embed(bonus), cache), rtol=0, atol=1e-12)

    drafter.requires_grad_(True)
    got = drafter.logits(drafter(drafter.embed(bonus), drafter.training_keys(hidden, sequences, anchors)))
    got.logsumexp(-1).sum().backward()
    for name, x in drafter.named_parameters():
        assert x.grad is not None and x.grad.isfinite().all() and x.grad.any(), name
    with pytest.raises(ValueError, match="anchor 13 of block 0 is outside 1..12"):
        drafter.training_keys(hidden, [0], [13])


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["paged", "contiguous"])
def test_a_graph_drafts_the_same(kind, device):
    """One capture serves every round: lengths, page tables and tokens are read at the replay."""
    drafter = make({**VARIANTS["hybrid, not causal"][0], "head_dim": 64}).to(device, torch.bfloat16)
    graphed, replayed = GraphedDraft(drafter), 0
    for _, _, bonus, cache in run_rounds(drafter, kind=kind, page_size=16):
        assert torch.equal(graphed(bonus.to(device), cache), drafter.draft(bonus.to(device), cache))
        replayed += 1
    assert replayed == len(ROUNDS)


def test_a_graph_needs_a_gpu():
    drafter = make(VARIANTS["as MiMo"][0])
    with pytest.raises(ValueError, match="needs tensors on a GPU, got bonus on cpu"):
        GraphedDraft(drafter)(torch.zeros(2, dtype=torch.long), drafter.new_cache(2, 8))


# Masks of draft blocks


def block_rows(mask, ctx, block, **kw):
    """The inclusive key range of every row of one block."""
    rows = mmattn.plan(mask, max_seqlen_q=block, seqused_k=torch.tensor([ctx + block], dtype=torch.int32), **kw).rows
    return [(lo, hi - 1) for lo, hi in rows.tolist()]


def test_published_block_ranges():
    """ctx 5000, block 16, window 2048, not causal: row 0 sees 2063 keys, row 15 sees 2048."""
    rows = block_rows(Mask.sliding_window(2048, causal=False), 5000, 16)
    assert rows[0] == (2953, 5015) and rows[15] == (2968, 5015)
    assert all(hi == 5015 for _, hi in rows)
    # A block over the window (which `DrafterConfig` refuses) is cut on both sides.
    assert block_rows(Mask.sliding_window(8, causal=False), 40, 16)[0] == (33, 47)


def test_one_past_window_for_a_whole_canvas():
    """DiffusionGemma's rectangle, every canvas row over the same W - 1 cached keys and the whole canvas, is `kv_lo`."""
    rows = block_rows(Mask.full(), 1500, 256, kv_lo=torch.tensor([1500 - 1023], dtype=torch.int32))
    assert rows == [(477, 1755)] * 256
    assert block_rows(Mask.sliding_window(1024, causal=False), 1500, 256)[255] == (732, 1755)  # and is not symmetry


@pytest.mark.parametrize("static", [True, False])
def test_symmetrisation_per_sequence(static):
    """(w, 0) is (w, w) on the rows of sequences that are not causal, whatever the mask says itself."""
    causal = torch.tensor([0, 1, 5, 0], dtype=torch.int32)
    used = torch.tensor([30, 30, 17, 5], dtype=torch.int32)
    plan = mmattn.plan(Mask.sliding_window(8, causal=static), max_seqlen_q=12, seqused_k=used, causal=causal)
    for b, rows in enumerate(plan.rows.view(4, 12, 2).tolist()):
        for i, (lo, hi) in enumerate(rows):
            q = int(used[b]) - 12 + i
            last = min(q if causal[b] else q + 7, int(used[b]) - 1)
            first = max(q - 7, 0)
            assert (lo, hi) == ((first, last + 1) if first <= last else (0, 0))


def test_symmetrisation_reads_nothing_back():
    """Under fake tensors there is nothing to read: `.item()`, `.tolist()` and branches on values raise."""
    from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

    from mmattn.batch import Batch
    from mmattn.plan import TorchLowering

    with FakeTensorMode():
        causal, used = (torch.zeros(4, dtype=torch.int32) for _ in range(2))
        with pytest.raises(DataDependentOutputException):
            causal[0].item()
        batch = Batch.build(max_seqlen_q=12, seqused_k=used, causal=causal)
        rows = TorchLowering().row_intervals(Mask.sliding_window(8), batch)
        assert rows.shape == (48, 2)


@pytest.mark.parametrize("causal", [False, True])
def test_poison_and_needle_of_a_draft_block(backend, causal, device):
    """MiMo's shape, ctx 5000, block 8, window 1024: older keys change nothing, the newest reaches the first row."""
    heads, heads_kv, ctx = 64, 8, 5000
    if backend == "triton" and device.type == "cpu":
        heads, heads_kv, ctx = 4, 1, 1400  # the interpreter is slow
    g = torch.Generator().manual_seed(0)
    q = torch.randn(1, 8, heads, 128, generator=g).to(device, torch.bfloat16)
    k, v = (torch.randn(1, ctx + 8, heads_kv, 128, generator=g).to(device, torch.bfloat16) for _ in range(2))
    sinks = torch.randn(heads, generator=g).to(device)
    sinks[0] = -math.inf
    mask = Mask.sliding_window(1024, causal=causal)
    skip_unsupported(backend, q, k, v, mask, sinks=sinks)

    def run():
        return mmattn.attention(q, k, v, mask, sinks=sinks, backend=backend)

    want = run()
    assert want.isfinite().all()
    k[:, : ctx - 1023] = v[:, : ctx - 1023] = math.nan
    assert torch.equal(run(), want)
    v[:, -1] += 100
    moved = (run() - want).abs().amax((0, 2, 3))
    assert (moved[:7] == 0).all() if causal else (moved > 0.01).all()
    assert moved[7] > 0.01


def test_sharded_sinks_give_the_heads_of_the_whole(backend, device):
    g = torch.Generator().manual_seed(0)
    shapes = ((5, 8), (20, 4), (20, 4))
    q, k, v = (torch.randn(2, n, h, 64, generator=g).to(device, torch.bfloat16) for n, h in shapes)
    sinks = torch.randn(8, generator=g).to(device)
    sinks[2:4] = -math.inf
    mask = Mask.sliding_window(8, causal=False)
    skip_unsupported(backend, q, k, v, mask, sinks=sinks, return_lse=True)
    whole, lse = mmattn.attention(q, k, v, mask, sinks=sinks, return_lse=True, backend=backend)
    assert whole.isfinite().all() and lse.isfinite().all()
    plain = mmattn.attention(q, k, v, mask, backend=backend)
    torch.testing.assert_close(whole[:, :, 2:4], plain[:, :, 2:4])  # -inf = none
    for rank in range(4):
        mine, keys = slice(2 * rank, 2 * rank + 2), slice(rank, rank + 1)
        part = mmattn.attention(
            q[:, :, mine], k[:, :, keys], v[:, :, keys], mask, sinks=shard_sinks(sinks, rank, 4), backend=backend
        )
        torch.testing.assert_close(part, whole[:, :, mine])


# Files


def test_importing_loads_no_extra():
    code = "import sys, mmattn.dflash; print([m for m in ('transformers', 'click', 'rich', 'safetensors') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"


def test_checkpoint_round_trip(tmp_path):
    drafter = make(VARIANTS["as MiMo"][0], torch.bfloat16)
    drafter.save_pretrained(tmp_path)
    assert {f.name for f in tmp_path.iterdir()} == {"config.json", "model.safetensors", "mask_embedding.pt"}
    loaded = Drafter.from_pretrained(tmp_path)
    assert loaded.config.raw == drafter.config.raw
    assert loaded.state_dict().keys() == drafter.state_dict().keys()
    for name, x in drafter.state_dict().items():
        assert loaded.state_dict()[name].dtype is torch.bfloat16 and torch.equal(loaded.state_dict()[name], x)
    assert loaded._inv_freq.dtype is torch.float64
    assert Drafter.from_pretrained(tmp_path, dtype=torch.float32).fc.weight.dtype is torch.float32


MIMO_LAYER = (
    "input_layernorm post_attention_layernorm mlp.down_proj mlp.gate_proj mlp.up_proj self_attn.attention_sink_bias "
    "self_attn.k_norm self_attn.k_proj self_attn.o_proj self_attn.q_norm self_attn.q_proj self_attn.v_proj"
).split()
MIMO_TENSORS = ["fc", "hidden_norm", "norm"] + [f"layers.{i}.{name}" for i in range(3) for name in MIMO_LAYER]


def test_published_layout_with_an_index(tmp_path):
    """The published MiMo-V2.5 drafter: these tensors, in files that only the index names, and a mask embedding."""
    config = VARIANTS["as MiMo"][0]
    tensors = {
        name: x
        for name, x in make(config).state_dict().items()
        if name not in ("embed_tokens.weight", "lm_head.weight", "mask_embedding")
    }
    assert {name.removesuffix(".weight") for name in tensors} == set(MIMO_TENSORS)
    names = sorted(tensors)
    for part, mine in enumerate((names[:9], names[9:])):
        save_file({name: tensors[name] for name in mine}, tmp_path / f"dflash_draft_model-{part}.safetensors")
    weight_map = {name: f"dflash_draft_model-{int(name in names[9:])}.safetensors" for name in names}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (tmp_path / "config.json").write_text(json.dumps(config))
    torch.save({"mask_token_id": 39, "embedding": torch.ones(HIDDEN)}, tmp_path / "mask_embedding.pt")
    loaded = Drafter.from_pretrained(tmp_path)
    assert loaded.mask_embedding.eq(1).all() and loaded.embed_tokens is None and loaded.lm_head is None
    assert all(torch.equal(loaded.state_dict()[name], x) for name, x in tensors.items())


def test_strict_loading_lists_everything(tmp_path):
    make(VARIANTS["as MiMo"][0]).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors["layers.1.self_attn.attention_sink_bias"], tensors["fc.weight"]
    tensors["layers.0.attention_conv.base_kernel"] = torch.zeros(2)
    tensors["layers.2.self_attn.q_norm.weight"] = torch.ones(7)
    save_file(tensors, file)
    with pytest.raises(ValueError) as error:
        Drafter.from_pretrained(tmp_path)
    assert str(error.value).split("\n  ")[1:] == [
        "missing: fc.weight, layers.1.self_attn.attention_sink_bias",
        "unknown: layers.0.attention_conv.base_kernel",
        "layers.2.self_attn.q_norm.weight is [7], but the config makes it [8]",
    ]
    file.unlink()
    with pytest.raises(FileNotFoundError, match="no .safetensors file"):
        Drafter.from_pretrained(tmp_path)


def test_a_mask_embedding_for_another_id_is_refused(tmp_path):
    drafter = make(VARIANTS["as MiMo"][0])
    drafter.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(
        json.dumps(
            variant(
                **{**VARIANTS["as MiMo"][0], "dflash_config": None},
                dflash={**VARIANTS["as MiMo"][0]["dflash_config"], "mask_token_id": 38},
            )
        )
    )
    with pytest.raises(ValueError, match="mask_token_id 39, but the config says 38"):
        Drafter.from_pretrained(tmp_path)


# The target


def target(layers=3, hidden=TARGET_HIDDEN, vocabulary=VOCABULARY):
    config = transformers.Qwen3Config(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=32, num_hidden_layers=layers,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8,
    )  # fmt: skip
    return transformers.Qwen3ForCausalLM(config)


@pytest.mark.parametrize(
    "fields, made, values",
    [
        ({}, dict(layers=2), ("hidden state 3", "2 layers")),
        ({"num_target_layers": 4}, {}, ("num_target_layers is 4", "3 layers")),
        ({}, dict(hidden=32), ("16", "32")),
        ({}, {}, ("hidden size 24", "16")),
        ({"hidden_size": 16, "dflash": {"mask_token_id": 40}}, {}, ("mask_token_id 40", "vocabulary of 40")),
    ],
)
def test_targets_that_do_not_fit(fields, made, values):
    with pytest.raises(ValueError) as error:
        Drafter(variant(**fields)).attach(target(**made))
    assert all(value in str(error.value) for value in values), str(error.value)


def test_the_target_stays_its_own():
    drafter = Drafter(variant(hidden_size=16))
    with pytest.raises(ValueError, match="no embedding yet; call attach"):
        drafter.embed(torch.tensor([1]))
    model = target()
    names = set(drafter.state_dict())
    block = drafter.attach(model).embed(torch.tensor([1, 39]))
    assert set(drafter.state_dict()) == names and all(p is not model.lm_head.weight for p in drafter.parameters())
    table = model.get_input_embeddings().weight
    assert torch.equal(block[0, 0], table[1]) and torch.equal(block[:, 1:], table[39].expand(2, 4, -1))
    assert drafter.logits(torch.zeros(2, 16)).shape == (2, VOCABULARY)
