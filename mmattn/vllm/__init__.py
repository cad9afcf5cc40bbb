"""vLLM integration: the attention backend MMATTN.

`pip install mmattn[vllm]` is all: vLLM finds `register` through its entry point `vllm.general_plugins`, and a run asks for
the backend with vLLM's own switch, `--attention-backend MMATTN`. On a CPU vLLM takes no such choice; there `use()`, or
`MMATTN_VLLM_CPU=1` in the environment, puts the backend in the place of vLLM's. `docs/vllm.md` says what is supported.
"""

from __future__ import annotations

import logging
import os

from . import scheduler
from .version import check_version

__all__ = ["register", "use"]

log = logging.getLogger("mmattn")

NAME = "MMATTN"
BACKEND = "mmattn.vllm.backend.MMAttentionBackend"
CPU_VARIABLE = "MMATTN_VLLM_CPU"


def register() -> None:
    """Tells vLLM the name MMATTN. May be called again. vLLM calls it in every process, also for runs that do not ask for
    the backend, so an unknown vLLM only gets a word in the log here; it is refused where the backend is loaded."""
    try:
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    except ImportError as error:
        log.warning("mmattn: this vLLM has no registry of attention backends, MMATTN is not available (%s)", error)
        return
    if NAME not in AttentionBackendEnum.__members__:
        if hasattr(AttentionBackendEnum, "register"):
            AttentionBackendEnum.register(NAME, BACKEND)
        else:
            register_backend(AttentionBackendEnum.CUSTOM, BACKEND)
    try:
        scheduler.install()
    except (ImportError, AttributeError) as error:
        log.warning(
            "mmattn: this vLLM's scheduler is another one; MMATTN will refuse models with image spans (%s)", error
        )
    if os.environ.get(CPU_VARIABLE, "0") not in ("", "0"):
        register_backend(AttentionBackendEnum.CPU_ATTN, BACKEND)


def use(on: bool = True) -> None:
    """On vLLM's CPU platform: lets mmattn take the place of `CPU_ATTN`, for engines that are made after this call.

    Sets `MMATTN_VLLM_CPU`, so that the processes which vLLM starts follow. On other platforms it does nothing that a run
    would notice; ask for `MMATTN` there. `on=False` takes it back.

    Raises:
        ImportError: a vLLM outside the tested range.
    """
    check_version()
    from vllm.v1.attention import selector
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    os.environ[CPU_VARIABLE] = "1" if on else "0"
    register()
    if not on:
        AttentionBackendEnum.CPU_ATTN.clear_override()
    selector._cached_get_attn_backend.cache_clear()
