"""Which backend runs a call: the ordered backends, and every reason against each, as data."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import import_module
from typing import Protocol

import torch
from torch import Tensor

from . import torch_backend
from .batch import Call, current
from .cute import support as cute_support
from .plan import Lowering, Options, Plan, Settle, TorchLowering, Write
from .triton import support as triton_support

log = logging.getLogger("mmattn")


class UnsupportedError(NotImplementedError):
    """No backend, or not the one asked for, can run a call. The text lists every backend with every reason."""


class Forward(Protocol):
    """Attention over a plan.

    q `[T, Hq, D]` or `[B, S, Hq, D]`; k and v `[Tk, Hkv, D]`, `[B, Sk, Hkv, D]` or pages `[P, page, Hkv, D]` with an
    int32 `page_table` `[B, max_pages]`; the last dim of v may differ. Returns out (q's shape with v's last dim) and the
    natural-log LSE, float32 `[Hq, T]` or `[B, Hq, S]`, or None.
    """

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, plan: Plan, page_table: Tensor | None, *,
        options: Options, out: Tensor | None, with_lse: bool,
    ) -> tuple[Tensor, Tensor | None]: ...  # fmt: skip


MakeForward = Callable[[], Forward]
"""Gives a new `Forward` for calls that agree as `plan.Settle` says: the first of them decides, the others only launch."""


@dataclass(frozen=True)
class Backend:
    name: str
    why_not: Callable[[Call], list[str]]
    load: Callable[[Call], MakeForward]
    """Imports the kernels; called only for a call that `why_not` has nothing against."""


def _kernel(module: str) -> MakeForward:
    """From the `settle` of a kernel module; out and lse are allocated where they are not given."""
    settle: Settle = import_module(module, __package__).settle

    def make() -> Forward:
        write: Write | None = None

        def forward(q, k, v, plan, page_table, *, options, out, with_lse):  # type: ignore[no-untyped-def]
            nonlocal write
            if out is None:
                out = q.new_empty(*q.shape[:-1], v.shape[-1])
            lse = None
            if with_lse:
                shape = (q.shape[1], q.shape[0]) if q.dim() == 3 else (q.shape[0], q.shape[2], q.shape[1])
                lse = torch.empty(shape, dtype=torch.float32, device=q.device)
            with current(q.device):
                if write is None:
                    write = settle(q, k, v, plan, page_table, options=options, out=out, lse=lse)
                write(q, k, v, plan, page_table, options=options, out=out, lse=lse)
            return out, lse

        return forward

    return make


BACKENDS: tuple[Backend, ...] = (
    Backend("cute", cute_support.why_not, lambda call: _kernel(cute_support.module(call))),
    Backend("triton", triton_support.why_not, lambda call: _kernel(".triton.forward")),
    Backend("torch", torch_backend.why_not, lambda call: lambda: torch_backend.forward),
)
"""In the order in which `auto` tries them on a GPU."""


def reasons(call: Call) -> dict[str, list[str]]:
    """Backend -> every reason why it cannot run `call`; an empty list means that it can."""
    return {backend.name: backend.why_not(call) for backend in BACKENDS}


def explain(against: dict[str, list[str]]) -> str:
    """The reasons as text, one line per backend and reason."""
    return "\n".join(
        f"  {name}: {reason}" for name, listed in against.items() for reason in listed or ["can run this call"]
    )


def check_name(backend: str) -> None:
    """Raises `ValueError` unless `backend` is "auto" or the name of a backend."""
    names = [b.name for b in BACKENDS]
    if backend not in ("auto", *names):
        raise ValueError(f"backend must be 'auto' or one of {', '.join(map(repr, names))}, got {backend!r}")


@lru_cache(maxsize=4096)
def choose(call: Call, name: str) -> MakeForward:
    """What runs `call`: the named backend's, or with "auto" that of the first that can.

    On a CPU `auto` starts with torch, since Triton's interpreter is for debugging. On Hopper it shares a mixed batch out
    between cute and triton. Raises `UnsupportedError`.
    """
    check_name(name)
    against = reasons(call)
    if name != "auto" and against[name]:
        raise UnsupportedError(f"backend={name!r} cannot run this call ({call}).\n{explain(against)}")
    usable = [b for b in BACKENDS if not against[b.name] and name in ("auto", b.name)]
    if not usable:
        raise UnsupportedError(f"no backend can run this call ({call}).\n{explain(against)}")
    both = {"cute", "triton"} <= {b.name for b in usable}
    if call.mixed and both and cute_support.module(call) == cute_support.ROW_INTERVALS:
        log.debug("cute and triton share %s", call)
        return _kernel(".mixed")
    chosen = usable[-1] if call.device_type == "cpu" else usable[0]
    log.debug("%s runs %s; the backends before it:\n%s", chosen.name, call, explain(against))
    return chosen.load(call)


@cache
def lowering(device_type: str) -> Lowering:
    """Who computes plans on a kind of device: Triton kernels on a GPU that runs them, torch elsewhere."""
    if device_type == "cuda" and triton_support.installed():
        device_lowering: Lowering = import_module(".triton.bounds", __package__).DeviceLowering()
        return device_lowering
    return TorchLowering()
