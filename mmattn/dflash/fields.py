"""The fields of a drafter's `config.json`: reading them in any form, refusing those that name parts which are not here.

Nothing is dropped in silence: a field is read, or known to change nothing, or refused by name, or reported once.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ConfigLike = Any
"""A mapping, a path of a JSON file or of a checkpoint directory, or an object with `to_dict()` (transformers)."""


def read_config(config: ConfigLike) -> dict[str, Any]:
    """`config` as a plain dictionary. Raises `ValueError` where it is not one, or not valid JSON."""
    if isinstance(config, Mapping):
        return dict(config)
    if isinstance(config, (str, Path)):
        path = Path(config)
        if path.is_dir():
            path = path / "config.json"
        try:
            raw = json.loads(path.read_text())
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} is not valid JSON: {error}") from error
        if not isinstance(raw, dict):
            raise ValueError(f"{path} must hold a JSON object, got {type(raw).__name__}")
        return raw
    if callable(getattr(config, "to_dict", None)):
        return dict(config.to_dict())
    raise ValueError(f"config must be a mapping, a path or a transformers config, got {type(config).__name__}")


def read_fields(config: ConfigLike) -> dict[str, Any]:
    """`read_config`, with the layout of the `speculators` library brought into the published one.

    There the layers' configuration is nested in `transformer_layer_config`, hidden states are counted as
    `eagle_aux_hidden_state_layer_ids` does, and a missing `sliding_window_non_causal` means true (vLLM 0.32,
    `transformers_utils/configs/speculators/algos.py`).
    """
    raw = read_config(config)
    kind = raw.get("speculators_model_type")
    if kind is None:
        return raw
    if kind != "dflash":
        raise ValueError(f"speculators_model_type must be 'dflash', got {kind!r}")
    inner = raw.get("transformer_layer_config")
    if not isinstance(inner, Mapping):
        raise ValueError(f"transformer_layer_config must be an object, got {inner!r}")
    outer = {n: x for n, x in raw.items() if n not in ("transformer_layer_config", "speculators_model_type")}
    fields = {**inner, **outer}
    fields["eagle_aux_hidden_state_layer_ids"] = fields.pop("aux_hidden_state_layer_ids", None)
    fields.setdefault("sliding_window_non_causal", True)
    return fields


def nested(fields: Mapping[str, Any], name: str = "dflash_config") -> dict[str, Any]:
    """The object `name` of a configuration, empty where there is none."""
    value = fields.get(name)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} must be an object, got {value!r}")
    return dict(value)


def flag(name: str, value: Any) -> bool | None:
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"{name} must be true, false or absent, got {value!r}")
    return value


def count(name: str, value: Any, least: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be an integer >= {least}, got {value!r}")
    return value


def number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{name} must be a number, got {value!r}")
    return float(value)


def agreed(what: str, sources: dict[str, Any]) -> Any:
    """The one value that all fields which are present hold, None if there is none."""
    given = {name: value for name, value in sources.items() if value is not None}
    (first, value), *others = given.items() if given else [("", None)]
    for name, other in others:
        if other != value:
            raise ValueError(f"the config contradicts itself on {what}: {first} = {value}, but {name} = {other}")
    return value


_UNSUPPORTED: dict[str, tuple[tuple[Any, ...], str]] = {
    **{
        name: ((None, 0), "a part of DFlash 2 (grouped convolution, candidate selector)")
        for name in ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
    },
    **{
        name: ((None, 0, False), "a part of DSpark (Markov head, confidence head)")
        for name in ("markov_rank", "enable_confidence_head", "confidence_head_with_markov")
    },
    "markov_head_type": ((None,), "a part of DSpark (Markov head)"),
    "projector_type": ((None,), "another projection of the target's hidden states"),
    "gru_hidden_dim": ((None, 0), "a recurrent projector"),
    "shift_label": ((None, False), "drafts that are read one row later"),
    "pure_draft_prefix_len": ((None, 1), "another layout of the block"),
    "sample_from_anchor": (
        (None, False),
        "drafts at the row of the bonus token; they are read at the N mask rows only",
    ),
    "norm_before_residual": ((None, False), "another order of the norms"),
    "norm_before_fc": ((None, False), "a norm before the projection"),
    "fc_norm": ((None, False), "a norm before the projection"),
    "use_aux_hidden_state": ((None, True), "a drafter without fc"),
    "use_qk_norm": ((None, True), "attention without norms of q and k"),
    "qk_norm": ((None, True), "attention without norms of q and k"),
    "mlp_bias": ((None, False), "biases in the MLP"),
    "attn_logit_softcapping": ((None, 0), "a soft cap on attention scores"),
    "attention_chunk_size": ((None, 0), "chunked attention"),
    "quantization_config": ((None, {}), "quantised weights"),
    "num_experts": ((None, 0, 1), "a mixture of experts"),
    "n_routed_experts": ((None, 0, 1), "a mixture of experts"),
    "hc_mult": ((None, 1), "hyper-connections"),
    "add_full_attention_sink_bias": ((None, False), "sinks on full layers alone; say attention_sink_bias"),
}
"""Field -> the values at which it changes nothing, and what it asks for otherwise."""

_READ = set(
    "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim v_head_dim "
    "layer_types sliding_window sliding_windows sliding_window_pattern _sliding_window_pattern use_sliding_window "
    "max_window_layers sliding_window_non_causal sliding_causal is_causal block_size mask_token_id "
    "dspark_noise_token_id pard_token ptd_token_id eagle_aux_hidden_state_layer_ids target_layer_ids "
    "dspark_target_layer_ids layer_ids eagle_config num_target_layers target_hidden_size target_final_norm "
    "rms_norm_eps attention_bias attention_sink_bias add_swa_attention_sink_bias attention_value_scale "
    "input_embedding_scale output_multiplier logit_scale final_logit_softcapping max_position_embeddings rope_theta "
    "rope_scaling rope_parameters partial_rotary_factor is_neox_style rope_is_neox_style hidden_act hidden_activation "
    "query_pre_attn_scalar vocab_size draft_vocab_size tie_word_embeddings dflash_config use_swa swa_window_size "
    "causal speculators_model_type speculators_config".split()
)
_NO_CHANGE = set(
    "architectures auto_map model_type transformers_version dtype torch_dtype _name_or_path name_or_path "
    "bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id initializer_range use_cache "
    "attention_dropout hidden_dropout dropout return_dict output_attentions output_hidden_states torchscript "
    "use_bfloat16 pruned_heads is_encoder_decoder is_decoder cross_attention_hidden_size add_cross_attention "
    "tie_encoder_decoder chunk_size_feed_forward id2label label2id problem_type task_specific_params "
    "_attn_implementation attn_implementation _commit_hash tokenizer_class prefix finetuning_task forced_bos_token_id "
    "forced_eos_token_id suppress_tokens begin_suppress_tokens tf_legacy_loss pretraining_tp mask_token max_anchors "
    "has_own_lm_head has_own_embed_tokens has_embed_tokens has_lm_head speculators_version "
    "base_model_tp_plan base_model_pp_plan num_anchors loss_decay_gamma backbone_rotary_base emb_dim".split()
)

_reported: set[str] = set()


def refuse_unsupported(fields: Mapping[str, Any]) -> None:
    """Raises `ValueError` for a field, there or in `dflash_config`, that asks for a part which is not here."""
    for where, held in (("", fields), ("dflash_config.", nested(fields))):
        for name, (neutral, what) in _UNSUPPORTED.items():
            value = held.get(name)
            if not any(value is x or (type(value) is type(x) and value == x) for x in neutral):
                raise ValueError(f"{where}{name} = {value!r} is not supported: {what}")


def report_unknown(fields: Mapping[str, Any]) -> None:
    """Warns, once per field and process, of fields that nothing here knows: they might change the computation."""
    known = _READ | _NO_CHANGE | _UNSUPPORTED.keys()
    unknown = [name for name, value in fields.items() if value is not None and name not in known]
    unknown += [
        f"dflash_config.{name}" for name, value in nested(fields).items() if value is not None and name not in known
    ]
    new = [name for name in unknown if name not in _reported]
    if new:
        _reported.update(new)
        warnings.warn(
            f"the drafter's config has fields that are not known here and are ignored: {', '.join(new)}. If one of "
            "them changes the computation, drafts will be worse than they should be",
            stacklevel=3,
        )
