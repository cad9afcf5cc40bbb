"""What a provider gives to the benchmark, and why one cannot run a case."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from mmattn import Mask

from .cases import Case, Inputs


class CannotRun(Exception):
    """A provider cannot run a case; the text is the reason."""


Call = Callable[[Tensor, int], Tensor]
"""(q, i) -> output: the attention call, with the i-th of the rotating buffers."""


@dataclass
class Prepared:
    """A provider ready for one case: everything that does not belong to the call itself is done."""

    case: Case
    """The mask that it computes, which its work is counted from: a floor has no images."""
    call: Call
    build: Callable[[], Any] | None = None
    """What has to be built from the mask for every new batch; timed alone."""
    timed: Call | None = None
    """The call that is timed, where that is not `call` (which the gate checks)."""


def window(mask: Mask) -> tuple[int | None, int | None]:
    """How many positions back and ahead a row sees beside its span, None = all. Raises `CannotRun` for chunks."""
    if mask.chunk_size is not None:
        raise CannotRun("takes no chunked mask")
    if mask.causal:
        return mask.window_left, 0
    mirrored = mask.window_right is None and mask.symmetrize
    return mask.window_left, mask.window_left if mirrored else mask.window_right


def heads_first(x: Tensor) -> Tensor:
    """`[B, S, H, D]` as `[B, H, S, D]`, and back."""
    return x.transpose(1, 2)


def needs_gpu(inputs: Inputs) -> None:
    """Raises `CannotRun` on a CPU."""
    if inputs.device.type != "cuda":
        raise CannotRun("needs an NVIDIA GPU")


def needs_batched(case: Case) -> None:
    """Raises `CannotRun` where K and V are paged or lengths differ."""
    if case.page_size is not None:
        raise CannotRun("takes no paged K and V")
    if not case.batched:
        raise CannotRun("takes sequences of one length only")
