"""How many bytes the masks of a model take at one time, counted as they are allocated and freed."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from ..plan import Plan


class Allocations(TorchDispatchMode):
    """While active, counts the storages that operators make; each one counts until it is freed, active or not."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        self._alive: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        for x in tree_leaves(result):
            if isinstance(x, Tensor) and (storage := x.untyped_storage())._cdata not in self._alive | given:
                self._alive.add(storage._cdata)
                self.now += storage.nbytes()
                weakref.finalize(storage, self._freed, storage._cdata, storage.nbytes())
        self.peak = max(self.peak, self.now)
        return result

    def _freed(self, storage: int, size: int) -> None:
        self._alive.discard(storage)
        self.now -= size

    def inside(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, with this active while it runs."""

        @wraps(function)
        def counted(*args: Any, **kwargs: Any) -> Any:
            with self:
                return function(*args, **kwargs)

        return counted


@contextmanager
def mask_allocations(implementation: str) -> Iterator[Allocations]:
    """Counts what transformers' mask function of an attention implementation and mmattn's tile tables allocate in here."""
    counts, tiles = Allocations(), Plan.tiles
    # An entry of the instance hides the one of the class until it is deleted.
    ALL_MASK_ATTENTION_FUNCTIONS[implementation] = counts.inside(ALL_MASK_ATTENTION_FUNCTIONS[implementation])
    setattr(Plan, "tiles", counts.inside(tiles))  # noqa: B010 (mypy)
    try:
        yield counts
    finally:
        setattr(Plan, "tiles", tiles)  # noqa: B010
        del ALL_MASK_ATTENTION_FUNCTIONS[implementation]
