"""A drafter's configuration and its files: layer resolution, mask token, mask embedding, sinks, contradictions."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from mmattn import Mask
from mmattn.dflash import (
    DrafterConfig,
    load_mask_embedding,
    mask_token_id,
    resolve_layers,
    shard_sinks,
    target_hidden_ids,
)

W = 1024
S, F = "sliding_attention", "full_attention"


def config(layer_types=None, *, use_swa=None, causal=None, nested_causal=None, window=W, **more):
    dflash = {"use_swa": use_swa, "swa_window_size": window, "causal": nested_causal}
    return {
        "num_hidden_layers": 3 if layer_types is None else len(layer_types),
        "layer_types": layer_types,
        "is_causal": causal,
        "dflash_config": {name: value for name, value in dflash.items() if value is not None},
        **more,
    }


def pairs(masks):
    """(window, causal) of each layer; every window must be symmetric on rows that are not causal."""
    assert all(m.symmetrize and m.window_right is None and m.chunk_size is None for m in masks)
    return [(None if m.window_left is None else m.window_left + 1, m.causal) for m in masks]


FULL3, SLIDING3, MIXED = [F] * 3, [S] * 3, [S, F, S]
TABLE = [
    # layer_types, use_swa, causal unset, causal = True, causal = False
    (None, None, [(None, False)] * 3, [(None, True)] * 3, [(None, False)] * 3),
    (None, False, [(None, False)] * 3, [(None, True)] * 3, [(None, False)] * 3),
    (None, True, [(W, False)] * 3, [(W, True)] * 3, [(W, False)] * 3),
    (FULL3, None, [(None, False)] * 3, [(None, True)] * 3, [(None, False)] * 3),
    (FULL3, False, [(None, False)] * 3, [(None, True)] * 3, [(None, False)] * 3),
    (FULL3, True, [(W, False)] * 3, [(W, True)] * 3, [(W, False)] * 3),
    *[(SLIDING3, swa, [(W, True)] * 3, [(W, True)] * 3, [(W, False)] * 3) for swa in (None, False, True)],
    *[
        (
            MIXED,
            swa,
            [(W, True), (None, False), (W, True)],
            [(W, True), (None, True), (W, True)],
            [(W, False), (None, False), (W, False)],
        )
        for swa in (None, False, True)
    ],
]


@pytest.mark.parametrize("column, causal", [(2, None), (3, True), (4, False)], ids=["unset", "causal", "non-causal"])
@pytest.mark.parametrize(
    "row", TABLE, ids=[f"{'-'.join(x[0] for x in r[0]) if r[0] else 'none'}-swa={r[1]}" for r in TABLE]
)
def test_truth_table(row, column, causal):
    layer_types, use_swa, want = row[0], row[1], row[column]
    assert pairs(resolve_layers(config(layer_types, use_swa=use_swa, causal=causal))) == want
    # dflash_config.causal says the same where is_causal is absent, and nothing where it is not.
    assert pairs(resolve_layers(config(layer_types, use_swa=use_swa, nested_causal=causal))) == want
    if causal is not None:
        both = config(layer_types, use_swa=use_swa, causal=causal, nested_causal=not causal)
        assert pairs(resolve_layers(both)) == want


PUBLISHED = [  # the causality of the modelling code at z-lab/dflash 44947fb: none anywhere
    (SLIDING3, [(W, False)] * 3),
    (MIXED, [(W, False), (None, False), (W, False)]),
    (FULL3, [(None, False)] * 3),
]


@pytest.mark.parametrize("how", ["argument", "field", "config"])
@pytest.mark.parametrize("layer_types, published", PUBLISHED)
def test_both_conventions_of_sliding_layers(layer_types, published, how):
    """Causal unset: vLLM's and SGLang's by default (the table), the published code's by a setting."""
    engines = next(row[2] for row in TABLE if row[0] == layer_types and row[1] is None)
    given = config(layer_types)
    assert pairs(resolve_layers(given)) == engines
    assert (engines == published) is (layer_types is FULL3)
    if how == "argument":
        assert pairs(resolve_layers(given, sliding_causal=False)) == published
    elif how == "field":
        assert pairs(resolve_layers({**given, "sliding_causal": False})) == published
    else:
        read = DrafterConfig.read({**MIMO_V25, "num_hidden_layers": 3, **given, **NESTED}, sliding_causal=False)
        assert pairs(read.layers) == published
        assert pairs(DrafterConfig.read(read.raw).layers) == published  # kept by save_pretrained
        assert pairs(resolve_layers(read.raw, sliding_causal=True)) == engines


NESTED = {"dflash_config": {"mask_token_id": 5, "target_layer_ids": [1, 2], "swa_window_size": W}}


def test_the_setting_overrides_layers_with_a_window_only():
    given = config(MIXED, causal=True)
    assert pairs(resolve_layers(given, sliding_causal=False)) == [(W, False), (None, True), (W, False)]
    assert pairs(resolve_layers(config(None, use_swa=True), sliding_causal=True)) == [(W, True)] * 3


@pytest.mark.parametrize("where", ["top", "nested"])
def test_sliding_window_non_causal(where):
    """The checkpoint's own field: of layers with a window only, behind is_causal and dflash_config.causal."""

    def given(layer_types, away, **kw):
        made = config(layer_types, **kw)
        (made if where == "top" else made["dflash_config"])["sliding_window_non_causal"] = away
        return pairs(resolve_layers(made))

    assert given(MIXED, True) == [(W, False), (None, False), (W, False)]
    assert given(MIXED, False) == [(W, True), (None, False), (W, True)]
    assert given(None, False, use_swa=True) == [(W, True)] * 3
    assert given(SLIDING3, True, causal=True) == [(W, True)] * 3
    assert given(SLIDING3, True, nested_causal=True) == [(W, True)] * 3
    with pytest.raises(ValueError, match="sliding_window_non_causal must be true, false or absent, got 1"):
        given(MIXED, 1)


@pytest.mark.parametrize(
    "fields, windows",
    [
        ({"sliding_windows": [64, None, 32]}, [64, None, 32]),
        ({"sliding_windows": [64, None, 32], "layer_types": [S, F, S], "sliding_window": 8}, [64, None, 32]),
        ({"sliding_window_pattern": 3, "sliding_window": 16}, [16, 16, None]),
        ({"_sliding_window_pattern": 2, "sliding_window": 16}, [16, None, 16]),
        ({"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 16}, [None, 16, 16]),
        ({"use_sliding_window": True, "max_window_layers": 3, "sliding_window": 16}, [None] * 3),
        ({"use_sliding_window": False, "max_window_layers": 1, "sliding_window": 16}, [None] * 3),
        ({"use_sliding_window": True, "sliding_window": 16}, [None] * 3),
        ({"sliding_window": 16}, [None] * 3),
    ],
)
def test_windows_that_are_derived(fields, windows):
    got = pairs(resolve_layers({"num_hidden_layers": 3, **fields}))
    assert got == [(w, w is not None) for w in windows]


@pytest.mark.parametrize(
    "derived",
    [
        {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 16},
        {"use_sliding_window": True, "sliding_window": 16},
    ],
)
def test_derived_layers_are_those_of_transformers(derived):
    transformers = pytest.importorskip("transformers")
    given = {"num_hidden_layers": 3, **derived}
    assert resolve_layers(given) == resolve_layers(transformers.Qwen3Config(**given))


def test_the_window_of_the_dflash_config_comes_first():
    assert pairs(resolve_layers(config(SLIDING3, window=64, sliding_window=32)))[0] == (64, True)
    assert pairs(resolve_layers(config(SLIDING3, window=None, sliding_window=32)))[0] == (32, True)


@pytest.mark.parametrize(
    "given, layer",
    [
        (config([F, S], window=None), "layer 1"),
        (config(None, use_swa=True, window=None), "layer 0"),
        (
            config([F, F, S], window=None, sliding_window=32, use_sliding_window=False),
            "layer 2.*use_sliding_window is false",
        ),
    ],
)
def test_a_sliding_layer_without_a_window_is_named(given, layer):
    with pytest.raises(ValueError, match=layer):
        resolve_layers(given)


@pytest.mark.parametrize(
    "given, text",
    [
        (config([S], num_hidden_layers=2), "1 entries, but num_hidden_layers is 2"),
        ({"num_hidden_layers": 2, "sliding_windows": [4]}, "sliding_windows has 1 entries, but num_hidden_layers is 2"),
        (
            {"num_hidden_layers": 1, "sliding_windows": 4},
            "sliding_windows must be a list with one entry per layer, got 4",
        ),
        ({"layer_types": [S], "sliding_windows": [None]}, r"sliding_windows\[0\] must be an integer >= 1, got None"),
        (
            {"layer_types": [F], "sliding_windows": [4]},
            r"layer_types\[0\] is 'full_attention', but sliding_windows\[0\] is 4",
        ),
        (config([], num_hidden_layers=2), "0 entries, but num_hidden_layers is 2"),
        (config(["chunked_attention"]), r"layer_types\[0\].*'chunked_attention'"),
        (config(None, causal="false"), "is_causal must be true, false or absent, got 'false'"),
        (config([S], window=0), "sliding window must be an integer >= 1, got 0"),
        ({"dflash_config": {}}, "neither num_hidden_layers nor layer_types"),
        ({"num_hidden_layers": 1, "dflash_config": 3}, "dflash_config must be an object, got 3"),
        (17, "mapping, a path or a transformers config, got int"),
    ],
)
def test_bad_layer_fields(given, text):
    with pytest.raises(ValueError, match=text):
        resolve_layers(given)


MIMO_V25 = {  # the layer-related part of the published MiMo-V2.5 drafter
    "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 16384, "num_hidden_layers": 5,
    "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "partial_rotary_factor": 0.5, "block_size": 8,
    "num_target_layers": 48, "vocab_size": 152576, "max_position_embeddings": 262144, "rope_theta": 10000,
    "sliding_window": 1024, "rms_norm_eps": 1e-6, "hidden_act": "silu", "attention_bias": False,
    "dflash_config": {
        "target_layer_ids": [0, 11, 23, 35, 47], "mask_token_id": 151675, "block_size": 8, "use_swa": True,
        "swa_window_size": 1024, "attention_value_scale": 0.612, "attention_sink_bias": True,
    },
}  # fmt: skip


@pytest.mark.parametrize("form", ["dict", "file", "directory", "transformers"])
def test_every_form_of_a_config(form, tmp_path):
    given = MIMO_V25
    if form == "transformers":
        given = pytest.importorskip("transformers").Qwen3Config(**MIMO_V25)
        assert (
            given.layer_types == [F] * 5 and given.sliding_window is None
        )  # filled in, dropped: the table's fourth row
    elif form != "dict":
        (tmp_path / "config.json").write_text(json.dumps(MIMO_V25))
        given = tmp_path / "config.json" if form == "file" else tmp_path
    assert resolve_layers(given) == [Mask.sliding_window(1024, causal=False)] * 5
    assert mask_token_id(given) == 151675
    assert target_hidden_ids(given) == (1, 12, 24, 36, 48)
    read = DrafterConfig.read(given)
    assert (read.draft_tokens, read.sinks, read.value_scale) == (7, True, 0.612)
    assert read.rope.inv_freq.numel() == 32  # half of 64 rotated dims


def test_invalid_json_is_named(tmp_path):
    (tmp_path / "config.json").write_text('{"hidden_size": 4096,}')
    with pytest.raises(ValueError, match=r"config.json is not valid JSON.*line 1"):
        resolve_layers(tmp_path)


def test_mask_token_id_order():
    places = ["mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id"]
    given = {name: i for i, name in enumerate(places)}
    given["dflash_config"] = {"mask_token_id": 9}
    assert mask_token_id(given) == 9
    given["dflash_config"] = {}
    for i, name in enumerate(places):
        assert mask_token_id(given) == i
        del given[name]
    with pytest.raises(ValueError, match="names no mask token"):
        mask_token_id(given)


def test_target_layers_order_and_agreement():
    assert target_hidden_ids({"eagle_aux_hidden_state_layer_ids": [2, 6], "target_layer_ids": [1, 5]}) == (2, 6)
    assert target_hidden_ids({"target_layer_ids": [1, 5]}) == (2, 6)
    assert target_hidden_ids({"layer_ids": [0, 5]}) == (0, 5)
    assert target_hidden_ids({"dspark_target_layer_ids": [1, 5]}) == (2, 6)
    assert target_hidden_ids({"dflash_config": {"layer_ids": [0, 5]}}) == (0, 5)
    assert target_hidden_ids({"eagle_config": {"layer_ids": [0, 5]}}) == (0, 5)
    with pytest.raises(ValueError, match=r"dspark_target_layer_ids \+ 1 = \(2,\), but eagle_config.layer_ids = \(1,\)"):
        target_hidden_ids({"dspark_target_layer_ids": [1], "eagle_config": {"layer_ids": [1]}})
    with pytest.raises(
        ValueError, match=r"dflash_config.target_layer_ids \+ 1 = \(2,\), but target_layer_ids \+ 1 = \(3,\)"
    ):
        target_hidden_ids({"dflash_config": {"target_layer_ids": [1]}, "target_layer_ids": [2]})
    with pytest.raises(ValueError, match="hidden state 5 of the target, but num_target_layers is 4"):
        target_hidden_ids({"target_layer_ids": [4], "num_target_layers": 4})


@pytest.mark.parametrize(
    "target, draft, want", [(36, 5, (2, 10, 18, 26, 34)), (28, 3, (2, 14, 26)), (9, 1, (5,)), (4, 2, (2, 2))]
)
def test_layers_that_the_config_leaves_to_the_rule(target, draft, want):
    """Evenly from the second to the third last, the middle one for one draft layer; 1 + the published ids."""
    assert target_hidden_ids({"num_target_layers": target, "num_hidden_layers": draft}) == want
    with pytest.raises(ValueError, match="3 are too few to spread over"):
        target_hidden_ids({"num_target_layers": 3, "num_hidden_layers": 2})


def changed(**fields):
    nested = {**MIMO_V25["dflash_config"], **fields.pop("dflash_config", {})}
    return {**MIMO_V25, "dflash_config": nested, **fields}


@pytest.mark.parametrize(
    "given, values",
    [
        (changed(block_size=16), ("8", "16")),
        (changed(block_size=2048, dflash_config={"block_size": 2048}), ("2048", "1024", "layer 0")),
        (changed(num_attention_heads=60), ("60", "8")),
        (changed(rope_parameters={"rope_theta": 1e6, "rope_type": "default"}), ("1000000.0", "10000")),
        (changed(partial_rotary_factor=0.51), ("128", "0.51", "65")),
        (changed(rope_scaling={"rope_type": "dynamic", "factor": 2.0}), ("dynamic",)),
        (changed(rope_parameters={"full_attention": {"rope_theta": 1e4}}), ("per layer type",)),
        (changed(sample_from_anchor=True), ("sample_from_anchor",)),
        (changed(hidden_act="gelu"), ("gelu",)),
        (changed(num_target_layers=40), ("48", "40")),
        (changed(attention_value_scale=0.5), ("0.612", "0.5")),
        (changed(hidden_size=None), ("lacks hidden_size",)),
        (changed(rope_theta=None), ("lacks rope_theta", "1000000", "10000")),
        (changed(is_neox_style=True, rope_is_neox_style=False), ("is_neox_style = True", "rope_is_neox_style = False")),
        (changed(is_neox_style="no"), ("is_neox_style", "'no'")),
        (changed(rope_scaling={"rope_type": "yarn"}), ("yarn", "factor")),
        (changed(rope_scaling={"rope_type": "default", "turns": 2}), ("turns",)),
        (changed(logit_scale=2.0, output_multiplier=3.0), ("2.0", "3.0")),
        (changed(hidden_activation="gelu_pytorch_tanh"), ("gelu_pytorch_tanh",)),
        (changed(query_pre_attn_scalar=256), ("128", "256")),
        (changed(attn_logit_softcapping=50.0), ("attn_logit_softcapping", "50.0")),
        (changed(quantization_config={"quant_method": "fp8"}), ("quantization_config",)),
        (changed(markov_rank=8), ("markov_rank = 8", "DSpark")),
        (changed(dflash_config={"conv_kernel_size": 2}), ("dflash_config.conv_kernel_size = 2", "DFlash 2")),
        (changed(dflash_config={"projector_type": "domino"}), ("projector_type", "domino")),
        (changed(dflash_config={"shift_label": True}), ("shift_label",)),
        (changed(norm_before_fc=True), ("norm_before_fc",)),
        (changed(use_aux_hidden_state=False), ("use_aux_hidden_state = False",)),
        (changed(mlp_bias=True), ("mlp_bias",)),
        (changed(qk_norm=False), ("qk_norm = False",)),
        (changed(add_full_attention_sink_bias=True), ("add_full_attention_sink_bias",)),
        (changed(dflash_config={"attention_sink_bias": 1}), ("attention_sink_bias", "1")),
        (changed(draft_vocab_size=200000), ("200000", "152576")),
        (changed(speculators_model_type="eagle3"), ("'eagle3'",)),
        (changed(block_size=None, dflash_config={"block_size": None}), ("lacks block_size",)),
    ],
)
def test_contradictions_name_both_values(given, values):
    with pytest.raises(ValueError) as error:
        DrafterConfig.read(given)
    assert all(value in str(error.value) for value in values), str(error.value)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "yarn", "rope_theta": 1e4, "factor": 16.0, "original_max_position_embeddings": 4096},
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
        {"rope_type": "default", "rope_theta": 5e5},
    ],
)
def test_rope_is_that_of_transformers(rope):
    transformers = pytest.importorskip("transformers")
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

    given = {name: x for name, x in MIMO_V25.items() if name not in ("rope_theta", "partial_rotary_factor")}
    read = DrafterConfig.read({**given, "rope_parameters": rope})
    want = Qwen3RotaryEmbedding(transformers.Qwen3Config(**given, rope_parameters=rope))
    torch.testing.assert_close(read.rope.inv_freq.float(), want.inv_freq, rtol=1e-6, atol=0)
    assert read.rope.factor == pytest.approx(want.attention_scaling)


@pytest.mark.parametrize(
    "fields, most",
    [
        ({}, 4096),
        ({"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, 16384),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}}, 16384),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 1024}}, 4096),
        (
            {
                "rope_scaling": {
                    "rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 1024,
                    "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                }
            },
            4096,
        ),
        ({"rope_parameters": {"rope_theta": 10000, "rope_type": "default", "mrope_section": [8, 12, 12]}}, 4096),
    ],
)  # fmt: skip
def test_how_far_positions_go(fields, most):
    pytest.importorskip("transformers")
    assert DrafterConfig.read(changed(max_position_embeddings=4096, **fields)).rope.max_positions == most


@pytest.mark.parametrize("name", ["is_neox_style", "rope_is_neox_style"])
def test_interleaved_rotary(name):
    """Pairs (2j, 2j + 1): the same turn as of the halves after a permutation of dims, and of complex numbers."""
    halves, pairs_ = DrafterConfig.read(MIMO_V25).rope, DrafterConfig.read(changed(**{name: False})).rope
    assert (
        pairs_.interleaved
        and not halves.interleaved
        and not DrafterConfig.read(changed(**{name: True})).rope.interleaved
    )
    g = torch.Generator().manual_seed(0)
    x = torch.randn(2, 5, 3, 128, generator=g, dtype=torch.float64)
    positions = torch.randint(0, 1000, (2, 5), generator=g)
    cos, sin = pairs_.cos_sin(positions, pairs_.inv_freq, torch.float64)
    got = pairs_.rotate(x, cos, sin)
    turn = torch.polar(torch.ones_like(cos), positions[..., None, None] * pairs_.inv_freq)
    want = torch.view_as_real(torch.view_as_complex(x[..., :64].unflatten(-1, (32, 2)).contiguous()) * turn).flatten(-2)
    torch.testing.assert_close(got[..., :64], want)
    assert torch.equal(got[..., 64:], x[..., 64:])
    order = torch.cat([torch.arange(0, 64, 2), torch.arange(1, 64, 2), torch.arange(64, 128)])
    torch.testing.assert_close(halves.rotate(x[..., order], cos, sin), got[..., order])


@pytest.mark.parametrize(
    "nested, fields, sinks",
    [
        (None, {}, False),
        (None, {"add_swa_attention_sink_bias": True}, True),
        (None, {"attention_sink_bias": True}, True),
        (False, {"add_swa_attention_sink_bias": True}, False),
        (True, {"add_swa_attention_sink_bias": False}, True),
    ],
)
def test_places_of_the_sink_flag(nested, fields, sinks):
    assert DrafterConfig.read(changed(dflash_config={"attention_sink_bias": nested}, **fields)).sinks is sinks


SPECULATORS = {
    "speculators_model_type": "dflash", "architectures": ["DFlashDraftModel"], "block_size": 8, "mask_token_id": 5,
    "aux_hidden_state_layer_ids": [2, 14, 25], "draft_vocab_size": 32000, "speculators_version": "0.4",
    "transformer_layer_config": {
        **{name: x for name, x in MIMO_V25.items() if name not in ("dflash_config", "block_size")},
        "num_hidden_layers": 2, "layer_types": [S, F],
    },
    "speculators_config": {"algorithm": "dflash", "verifier": {"architectures": ["Qwen3ForCausalLM"]}},
}  # fmt: skip


def test_the_layout_of_speculators():
    read = DrafterConfig.read(SPECULATORS)
    assert read.target_hidden_ids == (2, 14, 25) and read.mask_token_id == 5 and read.raw == SPECULATORS
    assert (read.vocab_size, read.draft_vocab_size) == (152576, 32000)
    assert read.target_architectures == ("Qwen3ForCausalLM",)
    assert pairs(read.layers) == [(W, False), (None, False)]  # a missing sliding_window_non_causal is true there
    given = {**SPECULATORS, "sliding_window_non_causal": False}
    assert pairs(resolve_layers(given)) == [(W, True), (None, False)]
    with pytest.raises(ValueError, match="transformer_layer_config must be an object, got None"):
        resolve_layers({"speculators_model_type": "dflash"})


def test_unknown_fields_are_reported_once(recwarn):
    given = changed(residual_twist=2.0, dflash_config={"noise_curve": "cosine", "use_swa": True})
    with pytest.warns(UserWarning, match="ignored: residual_twist, dflash_config.noise_curve"):
        DrafterConfig.read(given)
    recwarn.clear()
    DrafterConfig.read(given)
    DrafterConfig.read(MIMO_V25)
    DrafterConfig.read(SPECULATORS)
    assert not recwarn.list
    with pytest.warns(UserWarning, match="ignored: another_field\\."):
        DrafterConfig.read({**given, "another_field": False})


def test_transformers_own_fields_are_no_news(recwarn):
    transformers = pytest.importorskip("transformers")
    DrafterConfig.read(transformers.Qwen3Config(**MIMO_V25))
    assert not [w for w in recwarn.list if "not known" in str(w.message)]


# The mask embedding

VECTOR = torch.arange(8, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    "held", [VECTOR, VECTOR[None], {"embedding": VECTOR}, {"embedding": VECTOR, "mask_token_id": 5}]
)
def test_mask_embedding_from_torch(held, tmp_path):
    torch.save(held, tmp_path / "mask_embedding.pt")
    for path in (tmp_path, tmp_path / "mask_embedding.pt"):
        got = load_mask_embedding(path, mask_token_id=5, hidden_size=8)
        assert got.dtype == torch.bfloat16 and torch.equal(got, VECTOR)
    assert torch.equal(load_mask_embedding(tmp_path), VECTOR)


@pytest.mark.parametrize("where", ["tensor", "metadata", "nowhere"])
def test_mask_embedding_from_safetensors(where, tmp_path):
    held = {"embedding": VECTOR, **({"mask_token_id": torch.tensor(5)} if where == "tensor" else {})}
    save_file(held, tmp_path / "mask_embedding.safetensors", {"mask_token_id": "5"} if where == "metadata" else None)
    assert torch.equal(load_mask_embedding(tmp_path, mask_token_id=5, hidden_size=8), VECTOR)
    if where != "nowhere":
        with pytest.raises(ValueError, match="mask_token_id 5, but the config says 6"):
            load_mask_embedding(tmp_path, mask_token_id=6)


def test_absent_mask_embedding_is_the_vocabulary_row(tmp_path):
    vocabulary = torch.randn(10, 8)
    assert torch.equal(load_mask_embedding(tmp_path, mask_token_id=7, vocabulary=vocabulary), vocabulary[7])
    assert load_mask_embedding(tmp_path, mask_token_id=7) is None
    with pytest.raises(ValueError, match="mask_token_id 10 is outside the vocabulary of 10"):
        load_mask_embedding(tmp_path, mask_token_id=10, vocabulary=vocabulary)
    with pytest.raises(FileNotFoundError):
        load_mask_embedding(tmp_path / "nowhere", mask_token_id=7, vocabulary=vocabulary)


@pytest.mark.parametrize(
    "held, text",
    [
        (torch.zeros(9), r"\[8\].*\[9\]"),
        (torch.zeros(2, 8), r"\[8\].*\[2, 8\]"),
        (torch.zeros(8, dtype=torch.int64), "int64"),
        ({"embedding": VECTOR, "mask_token_id": 7}, "mask_token_id 7, but the config says 5"),
        ({"embedding": VECTOR, "mask_token_id": "five"}, "'five'"),
        ({"weight": VECTOR}, "it holds.*weight"),
        ("text", "it holds str"),
    ],
)
def test_wrong_mask_embeddings(held, text, tmp_path):
    torch.save(held, tmp_path / "mask_embedding.pt")
    with pytest.raises(ValueError, match=text):
        load_mask_embedding(tmp_path, mask_token_id=5, hidden_size=8)


class Evil:
    def __reduce__(self):
        return (print, ("code ran",))


def test_mask_embedding_runs_no_code(tmp_path, capsys):
    torch.save(Evil(), tmp_path / "mask_embedding.pt")
    with pytest.raises(Exception, match="[Ww]eights.only"):
        load_mask_embedding(tmp_path)
    assert capsys.readouterr().out == ""


def test_two_mask_embeddings_are_refused(tmp_path):
    torch.save(VECTOR, tmp_path / "mask_embedding.pt")
    save_file({"embedding": VECTOR}, tmp_path / "mask_embedding.safetensors")
    with pytest.raises(ValueError, match="both .* exist"):
        load_mask_embedding(tmp_path)


# Sinks


def test_shards_of_sinks_are_the_sinks():
    sinks = torch.randn(12)
    sinks[3] = -torch.inf
    for world in (1, 2, 3, 4, 6, 12):
        shards = [shard_sinks(sinks, rank, world) for rank in range(world)]
        assert all(shard.shape == (12 // world,) for shard in shards)
        assert torch.equal(torch.cat(shards), sinks)


@pytest.mark.parametrize(
    "sinks, rank, world, text",
    [
        (torch.zeros(12), 0, 5, "12 sinks.*5 ranks"),
        (torch.zeros(12), 4, 4, "rank 4 of world 4"),
        (torch.zeros(12), -1, 4, "rank -1"),
        (torch.zeros(3, 4), 0, 1, r"\[heads\], got \[3, 4\]"),
        (torch.tensor([0.0, torch.nan]), 0, 1, "NaN"),
        (torch.tensor([0.0, torch.inf]), 0, 1, r"\+inf"),
    ],
)
def test_wrong_sinks(sinks, rank, world, text):
    with pytest.raises(ValueError, match=text):
        shard_sinks(sinks, rank, world)
