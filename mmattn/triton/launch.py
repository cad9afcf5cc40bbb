"""Launching a kernel again on other tensors of the same kind, without Triton looking at every argument anew."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor


class Launch:
    """`kernel[grid](*tensors, *scalars, **constants, **options)`, as a function of the tensors.

    Every call must agree with the first in the dtypes, in what is None, and in which addresses are multiples of 16.
    Then Triton would find the same compiled kernel for all of them, so from the second call on that one is launched
    directly: to bind and specialise 70 arguments takes several times as long as the launch.
    """

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        scalars: tuple[int | float, ...],
        constants: dict[str, Any],
        **options: Any,
    ) -> None:
        self.kernel, self.grid, self.scalars = kernel, grid, scalars
        self.constants, self.options = constants, options
        self._again: Callable[..., None] | None = None
        self._rest: tuple[Any, ...] = ()

    def __call__(self, *tensors: Tensor | TensorDescriptor | None) -> None:
        if self._again is not None:
            self._again(*tensors, *self._rest)
            return
        compiled = self.kernel[self.grid](*tensors, *self.scalars, **self.constants, **self.options)
        if compiled is not None:  # the interpreter compiles nothing
            names = [p.name for p in self.kernel.params if p.name in self.constants]
            self._rest = (*self.scalars, *(self.constants[name] for name in names))
            self._again = compiled[(*self.grid, 1, 1)[:3]]
