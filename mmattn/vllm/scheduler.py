"""Keeps images whole in vLLM's scheduler, for models whose image rows see all of their image.

With `disable_chunked_mm_input` vLLM ends a chunk before an image that does not fit, but only if the chunk begins before it:
in 0.32, an image at which a chunk begins, or of which the prefix cache holds a part, is still split when the step has too few
tokens left. Its rows would then need keys that nobody has computed. Here such a request waits for a step with more room.
"""

from __future__ import annotations

import functools
import os
from typing import Any


def whole_images(features: list[Any], computed: int, new: int) -> int:
    """How many of `new` tokens, after `computed` ones, can run so that no multimodal item ends in the middle; 0: wait.

    `features` have vLLM's `mm_position`, with `offset` and `length`.
    """
    for feature in features:
        start = feature.mm_position.offset
        if start < computed + new < start + feature.mm_position.length:
            new = max(0, start - computed)
    return new


def wanted(vllm_config: Any) -> bool:
    """Whether this engine runs mmattn, on a model with such images."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from . import CPU_VARIABLE, NAME

    model, choice = vllm_config.model_config, vllm_config.attention_config
    if model is None or not model.is_mm_prefix_lm:
        return False
    chosen = [choice.backend, *(choice.backend_per_kind or {}).values()]
    ours = NAME if NAME in AttentionBackendEnum.__members__ else "CUSTOM"
    if any(backend is not None and backend.name == ours for backend in chosen):
        return True
    return vllm_config.device_config.device_type == "cpu" and os.environ.get(CPU_VARIABLE, "0") not in ("", "0")


def install() -> None:
    """Puts the rule into vLLM's scheduler, in this process. It does nothing for engines that do not run mmattn."""
    from vllm.v1.core.sched.scheduler import Scheduler

    theirs = Scheduler._try_schedule_encoder_inputs
    if getattr(theirs, "keeps_images_whole", False):
        return

    @functools.wraps(theirs)
    def schedule(
        self: Any, request: Any, num_computed_tokens: int, num_new_tokens: int, encoder_compute_budget: int, *args: Any, **kwargs: Any
    ) -> Any:  # fmt: skip
        if wanted(self.vllm_config):
            num_new_tokens = whole_images(request.mm_features, num_computed_tokens, num_new_tokens)
            if num_new_tokens == 0:
                return [], 0, encoder_compute_budget, [], []
        return theirs(self, request, num_computed_tokens, num_new_tokens, encoder_compute_budget, *args, **kwargs)

    schedule.keeps_images_whole = True  # type: ignore[attr-defined]
    Scheduler._try_schedule_encoder_inputs = schedule


def installed() -> bool:
    from vllm.v1.core.sched.scheduler import Scheduler

    return getattr(Scheduler._try_schedule_encoder_inputs, "keeps_images_whole", False)
