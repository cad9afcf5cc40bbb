"""Launching a kernel again on other tensors of the same kind, without Triton looking at every argument anew."""

from __future__ import annotations

from typing import Any

import triton
from torch import Tensor
from triton import knobs
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

KNOWN = triton.__version__.startswith(("3.6.", "3.7."))
"""Whether this is a release whose `CompiledKernel.run` takes its arguments as `Launch` gives them."""


class Descriptor(TensorDescriptor):
    """base, shape, strides and block shape for TMA, as `layout.matrix` gives them. Triton's checks would take as long as a
    launch, at every call anew."""

    def __post_init__(self) -> None: ...


class Launch:
    """`kernel[grid](*tensors, *fixed, *scalars, **constants, **options)`, as a function of the tensors.

    Every call must agree with the first in the device, in the dtypes, in what is None, and in which addresses are multiples
    of 16. Then Triton would find the same compiled kernel for all of them, so from the second call on that one is launched
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
        self.kernel, self.grid, self.fixed, self.scalars = kernel, (*grid, 1, 1)[:3], fixed, scalars
        self.constants, self.options = constants, options
        self._compiled: Any = None
        self._device = 0
        self._rest: tuple[Any, ...] = ()

    def __call__(self, *tensors: Tensor | Descriptor | None) -> None:
        compiled = self._compiled
        if compiled is None:
            self._first(tensors)
            return
        args = [x.data_ptr() if isinstance(x, Tensor) else x for x in tensors]
        if KNOWN and not _hooked():
            stream = driver.active.get_current_stream(self._device)
            compiled.run(
                *self.grid, stream, compiled.function, compiled.packed_metadata, None, None, None, *args, *self._rest
            )
        else:
            compiled[self.grid](*args, *self._rest)

    def _first(self, tensors: tuple[Tensor | Descriptor | None, ...]) -> None:
        compiled = self.kernel[self.grid](*tensors, *self.fixed, *self.scalars, **self.constants, **self.options)
        if compiled is None:  # the interpreter compiles nothing
            return
        constants = (self.constants[p.name] for p in self.kernel.params if p.name in self.constants)
        self._rest = (*(None if x is None else x.data_ptr() for x in self.fixed), *self.scalars, *constants)
        self._device = driver.active.get_current_device()
        self._compiled = compiled


def _hooked() -> bool:
    """Whether a profiler wants to know of launches."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))
