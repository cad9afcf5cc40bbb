"""Rotary position embedding of a drafter: frequencies, layout, and how far positions may go."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .fields import agreed, count, flag, number

_PARAMETERS = set(
    "rope_theta rope_type type partial_rotary_factor factor original_max_position_embeddings attention_factor "
    "beta_fast beta_slow mscale mscale_all_dim truncate low_freq_factor high_freq_factor".split()
)
_SECTIONS = ("mrope_section", "mrope_interleaved")
"""Of multimodal targets: they deal dims out to time, height and width, which are one position for a drafter's rows."""


@dataclass(frozen=True, eq=False)
class Rope:
    """RoPE on the first dims of each head, the rest passes."""

    inv_freq: Tensor
    """float64 `[rotary_dim / 2]`."""
    factor: float
    """On cos and sin."""
    interleaved: bool
    """Pairs are dims (2j, 2j + 1) instead of (j, j + rotary_dim / 2): `is_neox_style: false`."""
    max_positions: int
    """Positions lie below it: `max_position_embeddings`, and what `rope_scaling` makes of it."""

    @classmethod
    def read(cls, fields: Mapping[str, Any], head_dim: int) -> Rope:
        """From `rope_parameters`, `rope_scaling`, `rope_theta`, `partial_rotary_factor` and `(rope_)is_neox_style`.

        Raises `ValueError` without a `rope_theta`: vLLM would take 1e6 and transformers 1e4, and drafts from the wrong one
        are noise.
        """
        parameters = _parameters(fields)
        theta, kind = parameters.pop("rope_theta"), parameters["rope_type"]
        partial = parameters["partial_rotary_factor"]
        rotary_dim = int(head_dim * partial)
        if rotary_dim < 2 or rotary_dim % 2 or rotary_dim > head_dim:
            raise ValueError(
                f"head_dim {head_dim} x partial_rotary_factor {partial} = {rotary_dim} is no even number in 2..head_dim"
            )
        neox = agreed(
            "the rotary layout",
            {name: flag(name, fields.get(name)) for name in ("is_neox_style", "rope_is_neox_style")},
        )
        longest = count("max_position_embeddings", fields.get("max_position_embeddings") or 32768)
        if kind == "default":
            exponent = torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim
            frequencies, factor = theta**-exponent, 1.0
        else:
            frequencies, factor = _scaled(fields, head_dim, {**parameters, "rope_theta": theta}, longest)
        # llama3's max_position_embeddings is the extended one already.
        if kind == "yarn":
            trained = parameters.get("original_max_position_embeddings") or longest
            longest = max(longest, int(trained * parameters["factor"]))
        elif kind == "linear":
            longest = int(longest * parameters["factor"])
        return cls(frequencies, factor, neox is False, longest)

    def cos_sin(self, positions: Tensor, inv_freq: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """`[B, S, 1, rotary_dim / 2]` of positions `[B, S]`; `inv_freq` is the one above, on their device."""
        compute = torch.promote_types(dtype, torch.float32)
        angle = positions.to(compute)[..., None, None] * inv_freq.to(compute)
        return (angle.cos() * self.factor).to(dtype), (angle.sin() * self.factor).to(dtype)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """`[B, S, heads, D]`, rotated by `cos_sin` of its positions."""
        half = cos.shape[-1]
        turned, rest = x[..., : 2 * half], x[..., 2 * half :]
        if self.interleaved:
            a, b = turned.unflatten(-1, (half, 2)).unbind(-1)
            return torch.cat([torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2), rest], dim=-1)
        a, b = turned.chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)


def _parameters(fields: Mapping[str, Any]) -> dict[str, Any]:
    """One dictionary of what the places of a configuration say together, with theta, type and partial factor."""
    rope = dict(fields.get("rope_parameters") or {})
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise ValueError(
            f"rope_parameters per layer type ({', '.join(rope)}) are not supported; give one set for all layers"
        )
    scaling = dict(fields.get("rope_scaling") or {})
    for held in (rope, scaling):
        for name in _SECTIONS:
            held.pop(name, None)
    unknown = sorted((rope.keys() | scaling.keys()) - _PARAMETERS)
    if unknown:
        raise ValueError(f"rope_parameters or rope_scaling hold what is not supported: {', '.join(unknown)}")
    found = {}
    for name in ("rope_theta", "partial_rotary_factor"):
        places = {"rope_parameters": rope.get(name), "rope_scaling": scaling.get(name)}
        found[name] = agreed(name, {**{f"{k}.{name}": v for k, v in places.items()}, name: fields.get(name)})
    if found["rope_theta"] is None:
        raise ValueError(
            "the config lacks rope_theta; write the one that the drafter was trained with "
            "(vLLM would take 1000000, transformers 10000)"
        )
    partial = found["partial_rotary_factor"]
    kind = rope.get("rope_type") or scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in ("default", "linear", "yarn", "llama3"):
        raise ValueError(f"rope_type {kind!r} is not supported; it must be default, linear, yarn or llama3")
    parameters = {
        **scaling, **rope, "rope_type": kind, "rope_theta": number("rope_theta", found["rope_theta"]),
        "partial_rotary_factor": 1.0 if partial is None else number("partial_rotary_factor", partial),
    }  # fmt: skip
    parameters.pop("type", None)
    if kind != "default" and parameters.get("factor") is None:
        raise ValueError(f"rope_type {kind!r} needs a factor")
    return parameters


def _scaled(fields: Mapping[str, Any], head_dim: int, parameters: dict[str, Any], longest: int) -> tuple[Tensor, float]:
    from transformers import Qwen3Config
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    model = Qwen3Config(
        head_dim=head_dim, num_hidden_layers=1, max_position_embeddings=longest, hidden_size=fields["hidden_size"],
        num_attention_heads=fields["num_attention_heads"], rope_parameters=parameters,
    )  # fmt: skip
    frequencies, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](model, torch.device("cpu"))
    return frequencies.to(torch.float64), float(factor)
