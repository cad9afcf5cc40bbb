"""mmattn: attention for causal, sliding-window and bidirectional-span masks, from one description.

`import mmattn` loads neither triton nor cutlass; kernels load at the first call that uses them.
"""

from typing import Any

from .attention import attention, merge_states, plan, supported
from .dispatch import UnsupportedError
from .mask import Mask, MaskError
from .plan import Plan
from .reference import reference

__version__ = "0.1.0"
__all__ = [
    "Mask",
    "MaskError",
    "Plan",
    "UnsupportedError",
    "attention",
    "draw",
    "merge_states",
    "plan",
    "reference",
    "supported",
]


def __getattr__(name: str) -> Any:
    if name == "draw":  # loaded on demand, with Pillow; the submodule of this name gives way to its function
        from .draw import draw

        globals()["draw"] = draw
        return draw
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
