"""transformers integration: `attn_implementation="mmattn"` for any model of transformers 5.

    import mmattn.hf

    mmattn.hf.register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="mmattn")

`docs/models.md` lists the models that are tested.
"""

from __future__ import annotations

from typing import Any

from .versions import refuse_older, warn_of_newer

# isort: split
# An older transformers lacks what the imports below need; the one above says so.
from transformers import AttentionInterface, AttentionMaskInterface

from .. import dispatch
from . import paged
from .attention import attention_function
from .intervals import IntervalMask
from .masks import mask_function
from .model_classes import explain_missing_names

__all__ = ["IntervalMask", "register"]


def register(name: str = "mmattn", *, backend: str = "auto", fallback: str | None = None) -> None:
    """Makes `attn_implementation=name` work, in this process. May be called again to change the options.

    Args:
        name: what models are loaded with. transformers gives a meaning of its own to names that contain "flash",
            "flex", "sdpa", "eager", "/" or "|": they are refused.
        backend: of `mmattn.attention`: "auto", "cute", "triton" or "torch".
        fallback: what to do with a mask that has several key ranges in a row: None raises `UnsupportedError`, which
            names the model, the layer and the row; "sdpa" runs that layer with sdpa and a dense mask, and says so in the log.

    Raises:
        ValueError: a name or an option that cannot be.
        ImportError: a transformers before `versions.TESTED`. With one after it the log has a warning.
    """
    refuse_older()
    warn_of_newer()
    if not name or any(part in name.lower() for part in ("flash", "flex", "sdpa", "eager", "/", "|")):
        raise ValueError(f"name={name!r} means something else to transformers; choose another, such as 'mmattn'")
    dispatch.check_name(backend)
    if fallback not in (None, "sdpa"):
        raise ValueError(f"fallback must be None or 'sdpa', got {fallback!r}")

    def forward(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("cache") is not None:  # continuous batching
            return paged.attention_function(*args, backend=backend, **kwargs)
        return attention_function(*args, backend=backend, fallback=fallback, **kwargs)

    def make_mask(**kwargs: Any) -> Any:
        return None if paged.running() else mask_function(**kwargs, fallback=fallback)

    AttentionInterface.register(name, forward)
    AttentionMaskInterface.register(name, make_mask)
    explain_missing_names(name)
    paged.allow(name)
