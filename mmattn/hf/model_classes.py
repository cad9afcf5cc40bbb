"""What can be known of a model from its config, and clear errors for models that never ask for an attention function."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from transformers import PreTrainedModel


def model_name(config: Any) -> str:
    """Class of the model with this config; the name of the config's class, without "Config", where it does not tell."""
    if config is None:
        return ""
    return (getattr(config, "architectures", None) or [None])[0] or type(config).__name__.removesuffix("Config")


def knows_sdpa(config: Any) -> bool:
    """Whether the classes that take this config are written for the bool masks of sdpa; else they add float masks."""
    kind: Any = type(config)
    return config is None or _knows_sdpa(kind)


@cache
def _knows_sdpa(config_class: Any) -> bool:
    known = [model._supports_sdpa for model in _subclasses(PreTrainedModel) if model.config_class is config_class]
    return any(known) or not known


def _subclasses(of: Any) -> Iterator[Any]:
    for one in of.__subclasses__():
        yield one
        yield from _subclasses(one)
