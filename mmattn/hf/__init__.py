"""transformers integration: `attn_implementation="mmattn"` for any model of transformers 5.

    import mmattn.hf

    mmattn.hf.register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="mmattn")

`docs/models.md` lists the models that are tested.
"""

from __future__ import annotations

import inspect
import logging
import re
from typing import Any

try:
    import transformers
except ImportError:
    raise ImportError("mmattn.hf needs transformers: pip install 'mmattn[hf]'", name="transformers") from None
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils

from .. import dispatch
from . import paged
from .attention import attention_function
from .intervals import IntervalMask
from .masks import mask_function
from .model_classes import explain_missing_names

__all__ = ["IntervalMask", "register"]

log = logging.getLogger(__name__)


TESTED = (5, 10), (5, 23)
"""The oldest and the newest release of transformers that the tests were run with."""


def _check_version() -> None:
    found = tuple(int(n) for n in re.findall(r"\d+", transformers.__version__)[:2])
    oldest, newest = (".".join(map(str, version)) for version in TESTED)
    if found < TESTED[0] or "q_length" not in inspect.signature(masking_utils.sdpa_mask).parameters:
        raise ImportError(
            f"mmattn.hf needs transformers >= {oldest}, found {transformers.__version__} (tested: {oldest} to {newest}): "
            f"pip install 'transformers>={oldest},<6'"
        )
    if found > TESTED[1]:
        log.warning(
            "transformers %s is newer than what mmattn.hf was tested with (%s to %s). MMATTN_DEBUG=1 compares its masks",
            transformers.__version__, oldest, newest,
        )  # fmt: skip


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
        ImportError: a transformers before `TESTED`. With one after it the log has a warning.
    """
    _check_version()
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
