"""transformers integration: `attn_implementation="mmattn"` for any model of transformers 5.

    import mmattn.hf

    mmattn.hf.register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="mmattn")

`docs/models.md` lists the models that are tested.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import transformers
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils

from .. import dispatch
from . import paged
from .attention import attention_function
from .intervals import IntervalMask
from .masks import mask_function

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
        ImportError: a transformers whose masks know no `q_length` (before 5.4; the tests run with 5.17 and newer).
    """
    if "q_length" not in inspect.signature(masking_utils.sdpa_mask).parameters:
        raise ImportError(
            f"mmattn.hf needs transformers >= 5.17, found {transformers.__version__}; upgrade transformers"
        )
    if not name or any(part in name.lower() for part in ("flash", "flex", "sdpa", "eager", "/", "|")):
        raise ValueError(f"name={name!r} means something else to transformers; choose another, such as 'mmattn'")
    dispatch.check_name(backend)
    if fallback not in (None, "sdpa"):
        raise ValueError(f"fallback must be None or 'sdpa', got {fallback!r}")

    # Masks and plans are host objects: torch.compile steps around both functions.
    @torch.compiler.disable
    def forward(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("cache") is not None:  # continuous batching
            return paged.attention_function(*args, backend=backend, **kwargs)
        return attention_function(*args, backend=backend, fallback=fallback, **kwargs)

    @torch.compiler.disable
    def mask(*args: Any, **kwargs: Any) -> Any:
        return None if paged.running() else mask_function(*args, **kwargs)

    AttentionInterface.register(name, forward)
    AttentionMaskInterface.register(name, mask)
    paged.allow(name)
