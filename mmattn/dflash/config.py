"""What a drafter's `config.json` says: the mask of every layer, the target's layers it reads, its ids and sizes.

Where several fields may hold one fact, `resolve_layers` and `mask_token_id` follow the order that serving engines
follow; any other two fields that disagree are an error.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..mask import Mask

SLIDING, FULL = "sliding_attention", "full_attention"

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


def _dflash(raw: dict[str, Any]) -> dict[str, Any]:
    nested = raw.get("dflash_config")
    if nested is None:
        return {}
    if not isinstance(nested, Mapping):
        raise ValueError(f"dflash_config must be an object, got {nested!r}")
    return dict(nested)


def _flag(name: str, value: Any) -> bool | None:
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"{name} must be true, false or absent, got {value!r}")
    return value


def _count(name: str, value: Any, least: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be an integer >= {least}, got {value!r}")
    return value


def _agreed(what: str, sources: dict[str, Any]) -> Any:
    """The one value that all fields which are present hold, None if there is none."""
    given = {name: value for name, value in sources.items() if value is not None}
    (first, value), *others = given.items() if given else [("", None)]
    for name, other in others:
        if other != value:
            raise ValueError(f"the config contradicts itself on {what}: {first} = {value}, but {name} = {other}")
    return value


def resolve_layers(config: ConfigLike) -> list[Mask]:
    """The mask of every draft layer, as `(window, causal)`; a window of W keeps W keys, self included.

    * causal: `is_causal`, else `dflash_config.causal`, else False without `layer_types`, else whether the layer is
      a `sliding_attention` layer.
    * sliding: without `layer_types`, or when `use_swa` is set and no layer is sliding, `use_swa` for every layer;
      else whether the layer is a `sliding_attention` layer.
    * W: `dflash_config.swa_window_size`, else `sliding_window` (which `use_sliding_window: false` switches off).

    | `layer_types` | `dflash_config.use_swa` | causal unset                   | causal = True     | causal = False    |
    |---------------|-------------------------|--------------------------------|-------------------|-------------------|
    | absent        | false / absent          | (None, F)                      | (None, T)         | (None, F)         |
    | absent        | true                    | (W, F)                         | (W, T)            | (W, F)            |
    | all full      | false / absent          | (None, F)                      | (None, T)         | (None, F)         |
    | all full      | true                    | (W, F)                         | (W, T)            | (W, F)            |
    | all sliding   | any (ignored)           | (W, T)                         | (W, T)            | (W, F)            |
    | mixed         | any (ignored)           | sliding (W, T), full (None, F) | (W, T), (None, T) | (W, F), (None, F) |
    | a sliding layer, no W configured        | `ValueError` that names the layer                                      |

    On rows that are not causal a window W is symmetric, `|q - k| < W`: by this static flag, or by the `causal` tensor
    of `attention()` and `Drafter.draft()`, which overrides it per sequence and is read on the device only.

    The rules and the table are vLLM 0.33's, executed over a grid of configs; the reference implementation of the DFlash
    authors agrees where it is defined. "causal unset" on sliding layers is what checkpoints mostly get wrong: set
    `is_causal` when you train.

    Args:
        config: a mapping, a path of a JSON file or checkpoint directory, or a transformers config.

    Raises:
        ValueError: a sliding layer without a window, an unknown layer type, or a wrong number of them.
    """
    raw = read_config(config)
    dflash = _dflash(raw)
    layer_types, count = raw.get("layer_types"), raw.get("num_hidden_layers")
    if layer_types is None and count is None:
        raise ValueError("the config has neither num_hidden_layers nor layer_types: how many layers are there?")
    if layer_types is not None:
        for i, kind in enumerate(layer_types):
            if kind not in (SLIDING, FULL):
                raise ValueError(f"layer_types[{i}] must be {SLIDING!r} or {FULL!r}, got {kind!r}")
        if count is not None and len(layer_types) != count:
            raise ValueError(f"layer_types has {len(layer_types)} entries, but num_hidden_layers is {count}")
    count = _count("num_hidden_layers", len(layer_types or ()) if count is None else count)
    listed = [kind == SLIDING for kind in layer_types] if layer_types is not None else [False] * count

    use_swa = bool(_flag("dflash_config.use_swa", dflash.get("use_swa")))
    sliding = [use_swa] * count if use_swa and not any(listed) else listed
    causal = _flag("is_causal", raw.get("is_causal"))
    if causal is None:
        causal = _flag("dflash_config.causal", dflash.get("causal"))

    switched_off = raw.get("use_sliding_window") is False
    window = dflash.get("swa_window_size")
    if window is None and not switched_off:
        window = raw.get("sliding_window")
    masks = []
    for i in range(count):
        layer_causal = listed[i] if causal is None else causal
        if not sliding[i]:
            masks.append(Mask(causal=layer_causal))
        elif window is None:
            raise ValueError(
                f"layer {i} is a {SLIDING} layer (by {'layer_types' if listed[i] else 'dflash_config.use_swa'}), "
                "but neither dflash_config.swa_window_size nor sliding_window is set"
                + (", and use_sliding_window is false" if switched_off else "")
            )
        else:
            masks.append(Mask.sliding_window(_count("the sliding window", window), causal=layer_causal))
    return masks


def mask_token_id(config: ConfigLike) -> int:
    """The id whose embedding stands for a token to be drafted.

    Looked up as `dflash_config.mask_token_id`, `mask_token_id`, `dspark_noise_token_id`, `pard_token`, `ptd_token_id`.
    """
    raw = read_config(config)
    places = {"dflash_config.mask_token_id": _dflash(raw).get("mask_token_id")}
    places.update(
        {name: raw.get(name) for name in ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")}
    )
    for name, value in places.items():
        if value is not None:
            return _count(name, value, 0)
    raise ValueError(f"the config names no mask token; set one of {', '.join(places)}")


def target_hidden_ids(config: ConfigLike) -> tuple[int, ...]:
    """Which hidden states of the target the drafter reads, in the order in which `fc` takes them.

    Hidden state 0 is the embedding, hidden state `i` the residual stream after `i` layers (before the final norm).
    Read from `eagle_aux_hidden_state_layer_ids`, `dflash_config.target_layer_ids` + 1, `target_layer_ids` + 1 (these
    two count layers from 0) or `layer_ids`; several must agree.
    """
    raw = read_config(config)
    dflash = _dflash(raw)
    places = {
        "eagle_aux_hidden_state_layer_ids": (raw.get("eagle_aux_hidden_state_layer_ids"), 0),
        "dflash_config.target_layer_ids": (dflash.get("target_layer_ids"), 1),
        "target_layer_ids": (raw.get("target_layer_ids"), 1),
        "layer_ids": (raw.get("layer_ids"), 0),
    }
    found = {}
    for name, (ids, shift) in places.items():
        if ids is not None:
            if not isinstance(ids, (list, tuple)) or not ids:
                raise ValueError(f"{name} must be a list of layers, got {ids!r}")
            found[f"{name}{' + 1' if shift else ''}"] = tuple(_count(name, i, 0) + shift for i in ids)
    ids = _agreed("the target's layers", found)
    if ids is None:
        raise ValueError(f"the config names no layers of the target; set one of {', '.join(places)}")
    known = raw.get("num_target_layers")
    if known is not None and max(ids) > known:
        raise ValueError(f"the drafter reads hidden state {max(ids)} of the target, but num_target_layers is {known}")
    return ids


def _rotary(raw: dict[str, Any], head_dim: int) -> tuple[Tensor, float]:
    """Inverse frequencies, float64 `[rotary_dim / 2]`, and the factor on cos and sin."""
    rope = dict(raw.get("rope_parameters") or {})
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise ValueError(
            f"rope_parameters per layer type ({', '.join(rope)}) are not supported; give one set for all layers"
        )
    scaling = dict(raw.get("rope_scaling") or {})
    theta = _agreed(
        "rope_theta", {"rope_parameters.rope_theta": rope.get("rope_theta"), "rope_theta": raw.get("rope_theta")}
    )
    partial = _agreed(
        "partial_rotary_factor",
        {
            "rope_parameters.partial_rotary_factor": rope.get("partial_rotary_factor"),
            "partial_rotary_factor": raw.get("partial_rotary_factor"),
        },
    )
    theta, partial = 10000.0 if theta is None else float(theta), 1.0 if partial is None else float(partial)
    rotary_dim = int(head_dim * partial)
    if rotary_dim < 2 or rotary_dim % 2 or rotary_dim > head_dim:
        raise ValueError(
            f"head_dim {head_dim} x partial_rotary_factor {partial} = {rotary_dim} is no even number in 2..head_dim"
        )
    kind = rope.get("rope_type") or scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "default":
        exponent = torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim
        return theta**-exponent, 1.0
    if kind not in ("linear", "yarn", "llama3"):
        raise ValueError(f"rope_type {kind!r} is not supported; it must be default, linear, yarn or llama3")
    from transformers import Qwen3Config
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = {**scaling, **rope, "rope_type": kind, "rope_theta": theta, "partial_rotary_factor": partial}
    parameters.pop("type", None)
    model = Qwen3Config(
        head_dim=head_dim, num_hidden_layers=1, max_position_embeddings=raw.get("max_position_embeddings", 32768),
        hidden_size=raw["hidden_size"], num_attention_heads=raw["num_attention_heads"], rope_parameters=parameters,
    )  # fmt: skip
    frequencies, factor = ROPE_INIT_FUNCTIONS[kind](model, torch.device("cpu"))
    return frequencies.to(torch.float64), float(factor)


@dataclass(frozen=True, eq=False)
class DrafterConfig:
    """A drafter's `config.json`, checked. `DrafterConfig.read` takes what `resolve_layers` takes."""

    hidden_size: int
    intermediate_size: int
    heads: int
    heads_kv: int
    head_dim: int
    head_dim_v: int
    layers: tuple[Mask, ...]
    block_size: int
    """1 + N: the bonus token and N mask tokens."""
    mask_token_id: int
    target_hidden_ids: tuple[int, ...]
    target_hidden_size: int
    rms_norm_eps: float
    attention_bias: bool
    sinks: bool
    """Every layer has `self_attn.attention_sink_bias` (`dflash_config.attention_sink_bias`)."""
    value_scale: float
    input_embedding_scale: float
    output_multiplier: float
    final_logit_softcapping: float | None
    max_position_embeddings: int
    inv_freq: Tensor
    rotary_factor: float
    raw: dict[str, Any]
    """The configuration as it was read; `Drafter.save_pretrained` writes it back."""

    @classmethod
    def read(cls, config: ConfigLike) -> DrafterConfig:
        """Raises `ValueError` for a missing field and for fields that contradict each other; it names both values."""
        raw = read_config(config)
        dflash = _dflash(raw)
        layers = tuple(resolve_layers(raw))

        def need(name: str) -> int:
            if raw.get(name) is None:
                raise ValueError(f"the config lacks {name}")
            return _count(name, raw[name])

        def either(name: str, default: Any) -> Any:
            value = _agreed(name, {f"dflash_config.{name}": dflash.get(name), name: raw.get(name)})
            return default if value is None else value

        hidden, heads = need("hidden_size"), need("num_attention_heads")
        heads_kv = _count("num_key_value_heads", raw.get("num_key_value_heads") or heads)
        if heads % heads_kv:
            raise ValueError(f"num_key_value_heads {heads_kv} does not divide num_attention_heads {heads}")
        if raw.get("head_dim") is None and hidden % heads:
            raise ValueError(f"hidden_size {hidden} is no multiple of num_attention_heads {heads}; set head_dim")
        head_dim = _count("head_dim", raw.get("head_dim") or hidden // heads)
        block = either("block_size", None)
        if block is None:
            raise ValueError("the config lacks block_size (1 + the number of draft tokens)")
        block = _count("block_size", block, 2)
        for i, mask in enumerate(layers):
            if mask.window_left is not None and mask.window_left + 1 < block:
                raise ValueError(
                    f"block_size {block} is over the window {mask.window_left + 1} of layer {i}: "
                    "the rows of a block would not all see each other"
                )
        if either("sample_from_anchor", False):
            raise ValueError("sample_from_anchor is not supported: drafts are read at the N mask rows only")
        act = raw.get("hidden_act", "silu")
        if act != "silu":
            raise ValueError(f"hidden_act must be 'silu', got {act!r}")
        inv_freq, factor = _rotary(raw, head_dim)
        softcap = either("final_logit_softcapping", None)
        return cls(
            hidden_size=hidden, intermediate_size=need("intermediate_size"), heads=heads, heads_kv=heads_kv,
            head_dim=head_dim, head_dim_v=_count("v_head_dim", raw.get("v_head_dim") or head_dim), layers=layers,
            block_size=block, mask_token_id=mask_token_id(raw), target_hidden_ids=target_hidden_ids(raw),
            target_hidden_size=_count("target_hidden_size", raw.get("target_hidden_size") or hidden),
            rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)), attention_bias=bool(raw.get("attention_bias", False)),
            sinks=bool(either("attention_sink_bias", False)), value_scale=float(either("attention_value_scale", 1.0)),
            input_embedding_scale=float(either("input_embedding_scale", 1.0)),
            output_multiplier=float(either("output_multiplier", 1.0)),
            final_logit_softcapping=float(softcap) if softcap else None,
            max_position_embeddings=_count("max_position_embeddings", raw.get("max_position_embeddings", 32768)),
            inv_freq=inv_freq, rotary_factor=factor, raw=raw,
        )  # fmt: skip

    @property
    def draft_tokens(self) -> int:
        """N, the number of tokens that one block drafts."""
        return self.block_size - 1
