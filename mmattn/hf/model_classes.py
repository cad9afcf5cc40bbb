"""What can be known of a model from its config, and clear errors for models that never ask for an attention function."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cache, wraps
from typing import Any

import torch
from transformers import PreTrainedModel

from ..dispatch import UnsupportedError


def model_name(config: Any) -> str:
    """Class of the model with this config; the name of the config's class, without "Config", where it does not tell."""
    if config is None:
        return ""
    return (getattr(config, "architectures", None) or [None])[0] or type(config).__name__.removesuffix("Config")


def knows_sdpa(config: Any) -> bool:
    """Whether the classes that take this config are written for the bool masks of sdpa; else they add float masks."""
    kind: Any = type(config)
    return config is None or _knows_sdpa(kind)


def is_encoder(config: Any) -> bool:
    """Whether a config that can be of an encoder or a decoder says that it is of an encoder."""
    return getattr(config, "is_decoder", None) is False


@torch.compiler.assume_constant_result
def eager_shows_all_keys(module: str) -> bool:
    """Whether the eager attention of a module of transformers, when called without a mask, shows every row every key.

    Asks `eager_attention_forward` of that module itself, on two rows and two keys of equal scores. False also where there
    is none or it wants more than the usual arguments.
    """
    return _eager_shows_all_keys(module)


@cache
def _eager_shows_all_keys(module: str) -> bool:
    eager = getattr(sys.modules.get(module), "eager_attention_forward", None)
    if eager is None:
        return False
    asking = torch.nn.Module().eval()
    asking.num_key_value_groups = 1  # type: ignore[assignment]
    asking.is_causal = True  # type: ignore[assignment]
    scores, values = torch.zeros(1, 1, 2, 4), torch.eye(2, 4)[None, None]
    try:
        out = eager(asking, scores, scores, values, None, scaling=1.0, dropout=0.0)[0]
    except (AttributeError, TypeError):
        return False
    return torch.equal(out.reshape(2, 4), values.mean(2, keepdim=True).expand_as(values).reshape(2, 4))


@cache
def _knows_sdpa(config_class: Any) -> bool:
    known = [model._supports_sdpa for model in _subclasses(PreTrainedModel) if model.config_class is config_class]
    return any(known) or not known


def explain_missing_names(name: str) -> None:
    """Lets models that look `name` up in a table of their own say so.

    Some models choose a class from a dict by the name of the attention and never ask `AttentionInterface`; loading one
    would end in a bare `KeyError: 'mmattn'`. Wraps the two ways of loading a model, once for each name.
    """
    for loader in ("_from_config", "from_pretrained"):
        known = vars(PreTrainedModel)[loader].__func__
        names = getattr(known, "mmattn_names", None)
        if names is not None:
            names.add(name)
        else:
            setattr(PreTrainedModel, loader, classmethod(_explaining(known, {name})))


def _explaining(load: Any, names: set[str]) -> Any:
    @wraps(load)
    def loaded(cls: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return load(cls, *args, **kwargs)
        except KeyError as error:
            if error.args and isinstance(error.args[0], str) and error.args[0] in names:
                raise UnsupportedError(
                    f"{cls.__name__} (or a part of it) picks its attention from a table of its own, which has no "
                    f"{error.args[0]!r}: it never asks transformers' AttentionInterface, so mmattn cannot run it. Load it "
                    'with attn_implementation="eager" or "sdpa"; where only a part does that, give that sub-config '
                    'another one, as in attn_implementation={"text_config": "mmattn", "vision_config": "eager"}'
                ) from error
            raise

    loaded.mmattn_names = names  # type: ignore[attr-defined]
    return loaded


def _subclasses(of: Any) -> Iterator[Any]:
    for one in of.__subclasses__():
        yield one
        yield from _subclasses(one)
