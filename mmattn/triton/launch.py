"""Launching a kernel again on other tensors of the same kind, without Triton looking at every argument anew."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor


class Descriptor(TensorDescriptor):
    """base, shape, strides and block shape for TMA, as `layout.matrix` gives them. Triton's checks would take as long as a
    launch, at every call anew."""

    def __post_init__(self) -> None: ...


class Launch:
    """`kernel[grid](*tensors, *fixed, *scalars, **constants, **options)`, as a function of the tensors.

    Every call must agree with the first in the dtypes, in what is None, and in which addresses are multiples of 16.
    Then Triton would find the same compiled kernel for all of them, so from the second call on that one is launched
    directly, with addresses for tensors: to bind and specialise 70 arguments takes several times as long as the launch.
    """

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        fixed: tuple[Tensor | None, ...],
        scalars: tuple[int | float, ...],
        constants: dict[str, Any],
        **options: Any,
    ) -> None:
        self.kernel, self.grid, self.fixed, self.scalars = kernel, grid, fixed, scalars
        self.constants, self.options = constants, options
        self._again: Callable[..., None] | None = None
        self._rest: tuple[Any, ...] = ()

    def __call__(self, *tensors: Tensor | Descriptor | None) -> None:
        if self._again is not None:
            self._again(*[None if x is None else _address(x) for x in tensors], *self._rest)
            return
        compiled = self.kernel[self.grid](*tensors, *self.fixed, *self.scalars, **self.constants, **self.options)
        if compiled is not None:  # the interpreter compiles nothing
            constants = (self.constants[p.name] for p in self.kernel.params if p.name in self.constants)
            self._rest = (*(None if x is None else _address(x) for x in self.fixed), *self.scalars, *constants)
            self._again = compiled[(*self.grid, 1, 1)[:3]]


def _address(x: Tensor | Descriptor) -> Any:
    """What Triton's launcher takes for a pointer at least cost; of a descriptor it makes a tensor map itself."""
    return x.data_ptr() if isinstance(x, Tensor) else x
