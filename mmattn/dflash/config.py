"""What a drafter's `config.json` says besides its masks: ids, sizes, the target's layers it reads; and for which target.

Where several fields may hold one fact, `resolve_layers` and `mask_token_id` follow the order that serving engines
follow; any other two fields that disagree are an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..mask import Mask
from .fields import (
    ConfigLike,
    agreed,
    count,
    flag,
    nested,
    number,
    read_config,
    read_fields,
    refuse_unsupported,
    report_unknown,
)
from .layers import resolve_layers
from .rope import Rope

PADDING = 0.005
"""Part of a vocabulary by which a drafter that shares the target's tables may be off: tables are padded. (The published
drafter of MiMo-V2.5-Pro says 152064 and its target 152576.)"""


def mask_token_id(config: ConfigLike) -> int:
    """The id whose embedding stands for a token to be drafted.

    Looked up as `dflash_config.mask_token_id`, `mask_token_id`, `dspark_noise_token_id`, `pard_token`, `ptd_token_id`.
    """
    fields = read_fields(config)
    places = {"dflash_config.mask_token_id": nested(fields).get("mask_token_id")}
    places.update(
        {name: fields.get(name) for name in ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")}
    )
    for name, value in places.items():
        if value is not None:
            return count(name, value, 0)
    raise ValueError(f"the config names no mask token; set one of {', '.join(places)}")


def target_hidden_ids(config: ConfigLike) -> tuple[int, ...]:
    """Which hidden states of the target the drafter reads, in the order in which `fc` takes them.

    Hidden state 0 is the embedding, hidden state `i` the residual stream after `i` layers (before the final norm).
    Read from `eagle_aux_hidden_state_layer_ids`, `dflash_config.target_layer_ids` + 1, `dspark_target_layer_ids` + 1,
    `target_layer_ids` + 1 (these three count layers from 0), `dflash_config.layer_ids`, `eagle_config.layer_ids` or
    `layer_ids`; several must agree. Where none is set and `num_target_layers` is, as many as there are draft layers,
    evenly from the second to the third last layer, as the published code has it (z-lab/dflash at 44947fb).
    """
    fields = read_fields(config)
    dflash = nested(fields)
    places = {
        "eagle_aux_hidden_state_layer_ids": (fields.get("eagle_aux_hidden_state_layer_ids"), 0),
        "dflash_config.target_layer_ids": (dflash.get("target_layer_ids"), 1),
        "dspark_target_layer_ids": (fields.get("dspark_target_layer_ids"), 1),
        "target_layer_ids": (fields.get("target_layer_ids"), 1),
        "dflash_config.layer_ids": (dflash.get("layer_ids"), 0),
        "eagle_config.layer_ids": (nested(fields, "eagle_config").get("layer_ids"), 0),
        "layer_ids": (fields.get("layer_ids"), 0),
    }
    found = {}
    for name, (ids, shift) in places.items():
        if ids is not None:
            if not isinstance(ids, (list, tuple)) or not ids:
                raise ValueError(f"{name} must be a list of layers, got {ids!r}")
            found[f"{name}{' + 1' if shift else ''}"] = tuple(count(name, i, 0) + shift for i in ids)
    known = _num_target_layers(fields)
    ids = agreed("the target's layers", found)
    if ids is None and known is not None:
        ids = _spread(known, len(resolve_layers(fields)))
    if ids is None:
        raise ValueError(f"the config names no layers of the target; set one of {', '.join(places)}")
    if known is not None and max(ids) > known:
        raise ValueError(f"the drafter reads hidden state {max(ids)} of the target, but num_target_layers is {known}")
    return ids


def _num_target_layers(fields: Mapping[str, Any]) -> int | None:
    name = "num_target_layers"
    value = agreed(name, {f"dflash_config.{name}": nested(fields).get(name), name: fields.get(name)})
    return None if value is None else count(name, value)


def _spread(target_layers: int, draft_layers: int) -> tuple[int, ...]:
    if draft_layers == 1:
        return (target_layers // 2 + 1,)
    span = target_layers - 4
    if span < 0:
        raise ValueError(f"the config names no layers of the target, and {target_layers} are too few to spread over")
    return tuple(round(1 + i * span / (draft_layers - 1)) + 1 for i in range(draft_layers))


def _sinks(fields: Mapping[str, Any]) -> bool:
    """`dflash_config.attention_sink_bias` first, as vLLM 0.32 has it; the third name is that of MiMo's targets."""
    name = "attention_sink_bias"
    for where, value in (
        (f"dflash_config.{name}", nested(fields).get(name)),
        (name, fields.get(name)),
        (f"add_swa_{name}", fields.get(f"add_swa_{name}")),
    ):
        if (given := flag(where, value)) is not None:
            return given
    return False


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
    vocab_size: int | None
    """Of the target; None = the config does not say."""
    draft_vocab_size: int | None
    """Rows of the drafter's own head where it drafts from part of the vocabulary only; else None."""
    tied_head: bool
    """A drafter with an embedding of its own and no head uses that embedding (`tie_word_embeddings`)."""
    target_hidden_ids: tuple[int, ...]
    target_hidden_size: int
    target_final_norm: bool
    """Whether the target's final norm is on the hidden state after its last layer."""
    num_target_layers: int | None
    target_architectures: tuple[str, ...]
    """Of the target, where the config says for which it was made (`speculators_config.verifier.architectures`)."""
    rms_norm_eps: float
    attention_bias: bool
    sinks: bool
    """Every layer has `self_attn.attention_sink_bias` (`dflash_config.attention_sink_bias`)."""
    value_scale: float
    input_embedding_scale: float | None
    """On the rows of the embedding; None = the config does not say."""
    output_multiplier: float
    final_logit_softcapping: float | None
    """0 = none, whatever the target has; None = the config does not say."""
    rope: Rope
    raw: dict[str, Any]
    """The configuration as it was read, with the settings given to `read`; `Drafter.save_pretrained` writes it back."""

    @classmethod
    def read(
        cls, config: ConfigLike, *, sliding_causal: bool | None = None, target_final_norm: bool | None = None
    ) -> DrafterConfig:
        """Reads and checks a configuration.

        Args:
            config: see `resolve_layers`.
            sliding_causal: see `resolve_layers`; None = the field `sliding_causal` of the config.
            target_final_norm: whether a drafter that reads the hidden state after the target's last layer gets it with
                the final norm on it, as from transformers' `output_hidden_states`. None = the field of that name in
                the config, else False, as in vLLM 0.32 (`qwen2.py`, `mimo_v2.py`, `gemma4.py`).

        Raises:
            ValueError: a missing field, a field that asks for a part which is not here, or fields that contradict
                each other; both values are named.
        """
        raw = read_config(config)
        settings = {"sliding_causal": sliding_causal, "target_final_norm": target_final_norm}
        raw.update({name: value for name, value in settings.items() if value is not None})
        fields = read_fields(raw)
        refuse_unsupported(fields)
        report_unknown(fields)
        dflash = nested(fields)
        layers = tuple(resolve_layers(fields))

        def need(name: str) -> int:
            if fields.get(name) is None:
                raise ValueError(f"the config lacks {name}")
            return count(name, fields[name])

        def either(name: str) -> Any:
            return agreed(name, {f"dflash_config.{name}": dflash.get(name), name: fields.get(name)})

        def scale(name: str) -> float:
            value = either(name)
            return 1.0 if value is None else number(name, value)

        hidden, heads = need("hidden_size"), need("num_attention_heads")
        heads_kv = count("num_key_value_heads", fields.get("num_key_value_heads") or heads)
        if heads % heads_kv:
            raise ValueError(f"num_key_value_heads {heads_kv} does not divide num_attention_heads {heads}")
        if fields.get("head_dim") is None and hidden % heads:
            raise ValueError(f"hidden_size {hidden} is no multiple of num_attention_heads {heads}; set head_dim")
        head_dim = count("head_dim", fields.get("head_dim") or hidden // heads)
        for name, want in (("hidden_act", "silu"), ("hidden_activation", "silu"), ("query_pre_attn_scalar", head_dim)):
            if fields.get(name) not in (None, want):
                raise ValueError(f"{name} must be {want!r}, got {fields[name]!r}")
        vocabulary, drafts = _vocabularies(fields)
        embedding_scale, softcap = either("input_embedding_scale"), either("final_logit_softcapping")
        multiplier = agreed(
            "the scale of the logits",
            {
                "dflash_config.output_multiplier": dflash.get("output_multiplier"),
                **{name: fields.get(name) for name in ("output_multiplier", "logit_scale")},
            },
        )
        verifier = nested(nested(fields, "speculators_config"), "verifier")
        return cls(
            hidden_size=hidden, intermediate_size=need("intermediate_size"), heads=heads, heads_kv=heads_kv,
            head_dim=head_dim, head_dim_v=count("v_head_dim", fields.get("v_head_dim") or head_dim), layers=layers,
            block_size=_block_size(either("block_size"), layers), mask_token_id=mask_token_id(fields),
            vocab_size=vocabulary, draft_vocab_size=drafts, tied_head=bool(fields.get("tie_word_embeddings")),
            target_hidden_ids=target_hidden_ids(fields),
            target_hidden_size=count("target_hidden_size", fields.get("target_hidden_size") or hidden),
            target_final_norm=bool(flag("target_final_norm", fields.get("target_final_norm"))),
            num_target_layers=_num_target_layers(fields),
            target_architectures=tuple(verifier.get("architectures") or ()),
            rms_norm_eps=number("rms_norm_eps", fields.get("rms_norm_eps", 1e-6)),
            attention_bias=bool(fields.get("attention_bias", False)), sinks=_sinks(fields),
            value_scale=scale("attention_value_scale"),
            input_embedding_scale=None if embedding_scale is None else number("input_embedding_scale", embedding_scale),
            output_multiplier=1.0 if multiplier is None else number("the scale of the logits", multiplier),
            final_logit_softcapping=None if softcap is None else number("final_logit_softcapping", softcap),
            rope=Rope.read(fields, head_dim), raw=raw,
        )  # fmt: skip

    @property
    def draft_tokens(self) -> int:
        """N, the number of tokens that one block drafts."""
        return self.block_size - 1

    def check_target(
        self, target: Any, *, name: str | None = None, own_mask: bool = False, own_tables: bool = False
    ) -> None:
        """Raises `ValueError`, naming both values, where the drafter was made for another target than this one.

        Args:
            target: the transformers config of the target.
            name: its architecture, for configs that do not hold it.
            own_mask: the drafter has an embedding of the mask token, so the target's vocabulary need not hold it.
            own_tables: the drafter has an embedding or a head, whose rows must be the target's vocabulary.
        """
        text = target.get_text_config()
        layers, reads = text.num_hidden_layers, max(self.target_hidden_ids)
        known = set(filter(None, [name, *(target.architectures or ())]))
        made_for, is_one_of = ({x.split("For")[0] for x in names} for names in (self.target_architectures, known))
        if made_for and is_one_of and not made_for & is_one_of:  # text models of multimodal ones are the same targets
            raise ValueError(
                f"the drafter was made for {', '.join(self.target_architectures)}, "
                f"but the target is {', '.join(sorted(known))}"
            )
        if reads > layers:
            raise ValueError(
                f"the drafter reads the target's hidden state {reads} (after that many layers), "
                f"but the target has {layers} layers"
            )
        if self.num_target_layers is not None and self.num_target_layers != layers:
            raise ValueError(f"num_target_layers is {self.num_target_layers}, but the target has {layers} layers")
        if text.hidden_size != self.target_hidden_size:
            raise ValueError(
                f"the drafter was made for targets of hidden size {self.target_hidden_size}, "
                f"but the target's is {text.hidden_size}"
            )
        off = 0 if self.vocab_size is None else abs(self.vocab_size - text.vocab_size)
        if off > (0 if own_tables else PADDING * text.vocab_size):
            raise ValueError(
                f"the drafter was made for a vocabulary of {self.vocab_size}, but the target's holds {text.vocab_size}"
            )
        if not own_mask and self.mask_token_id >= text.vocab_size:
            raise ValueError(
                f"mask_token_id {self.mask_token_id} is outside the target's vocabulary of {text.vocab_size}, "
                "and there is no mask embedding"
            )


def _block_size(value: Any, layers: tuple[Mask, ...]) -> int:
    if value is None:
        raise ValueError("the config lacks block_size (1 + the number of draft tokens)")
    block = count("block_size", value, 2)
    for i, mask in enumerate(layers):
        if mask.window_left is not None and mask.window_left + 1 < block:
            raise ValueError(
                f"block_size {block} is over the window {mask.window_left + 1} of layer {i}: "
                "the rows of a block would not all see each other"
            )
    return block


def _vocabularies(fields: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """The target's vocabulary, and the drafter's where it is a part of it."""
    whole, part = (
        None if fields.get(name) is None else count(name, fields[name]) for name in ("vocab_size", "draft_vocab_size")
    )
    if part is not None and whole is None:
        raise ValueError(f"draft_vocab_size is {part}, but the config lacks vocab_size, the target's")
    if part is not None and whole is not None and part > whole:
        raise ValueError(f"draft_vocab_size {part} is over vocab_size {whole}")
    return whole, None if part == whole else part
