"""Which backend runs a call: the ordered backends, and every reason against each, as data."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from importlib import import_module
from typing import Protocol

import torch
from torch import Tensor

from . import torch_backend
from .batch import Batch, Call, current, debugging
from .checks import check, facts_of, kind_of, options_of
from .columns import Columns
from .cute import support as cute_support
from .mask import Mask
from .plan import Grads, Lowering, Options, Plan, Settle, TileTable, TorchLowering, Write
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


class Backward(Protocol):
    """Gradients of a call: `out` and `lse` as its forward, of any backend, gave them, with their gradients `dout` and `dlse`
    (None: zero), of any strides."""

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, plan: Plan, page_table: Tensor | None, out: Tensor, lse: Tensor,
        dout: Tensor, dlse: Tensor | None, *, options: Options,
    ) -> Grads: ...  # fmt: skip


@dataclass(frozen=True)
class Backend:
    name: str
    why_not: Callable[[Call], list[str]]
    load: Callable[[Call], MakeForward]
    """Imports the kernels; called only for a call that `why_not` has nothing against."""
    why_no_gradients: Callable[[Call], list[str]]
    load_backward: Callable[[Call], Backward]
    """The same for a call that `why_no_gradients` has nothing against."""


def lse_shape(q: Tensor) -> tuple[int, ...]:
    """`[Hq, T]` or `[B, Hq, S]`."""
    return (q.shape[1], q.shape[0]) if q.dim() == 3 else (q.shape[0], q.shape[2], q.shape[1])


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
                lse = torch.empty(lse_shape(q), dtype=torch.float32, device=q.device)
            with current(q.device):
                if write is None:
                    write = settle(q, k, v, plan, page_table, options=options, out=out, lse=lse)
                write(q, k, v, plan, page_table, options=options, out=out, lse=lse)
            return out, lse

        return forward

    return make


BACKENDS: tuple[Backend, ...] = (
    Backend(
        "cute", cute_support.why_not, lambda call: _kernel(cute_support.module(call)),
        cute_support.why_no_gradients, lambda call: import_module(cute_support.BACKWARD, __package__).backward,
    ),
    Backend(
        "triton", triton_support.why_not, lambda call: _kernel(".triton.forward"),
        triton_support.why_no_gradients, lambda call: import_module(".triton.backward", __package__).backward,
    ),
    Backend(
        "torch", torch_backend.why_not, lambda call: lambda: torch_backend.forward,
        torch_backend.why_no_gradients, lambda call: torch_backend.backward,
    ),
)  # fmt: skip
"""In the order in which `auto` tries them on a GPU."""


UNCHECKED = frozenset(("cute", "triton"))
"""Backends whose gradients are known to be right from Triton's interpreter, or to compile, but not from a run on a GPU.
Take a name out when tests/test_backward.py and tests/test_cute_backward.py have passed there."""


def reasons(call: Call) -> dict[str, list[str]]:
    """Backend -> every reason why it cannot run `call`, gradients included if it asks for them; `[]` means that it can."""
    return {
        backend.name: list(dict.fromkeys(backend.why_not(call) + (_no_gradients(backend, call) if call.grad else [])))
        for backend in BACKENDS
    }


def _no_gradients(backend: Backend, call: Call) -> list[str]:
    if call.out:
        return ["out= does not work where an input requires grad; use the returned tensor"]
    if call.device_type == "cuda" and backend.name in UNCHECKED:
        return ["its gradients have not passed the parity tests on a GPU yet; use the torch backend for them"]
    return backend.why_no_gradients(call)


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
    between cute and triton. Gradients may then come from another backend. Raises `UnsupportedError`.
    """
    check_name(name)
    against = {b.name: b.why_not(call) for b in BACKENDS} if name == "auto" else reasons(call)
    usable = [b for b in BACKENDS if not against[b.name] and name in ("auto", b.name)]
    if call.grad:
        choose_backward(call, name)
    if not usable:
        raise unsupported(call, name, against)
    both = {"cute", "triton"} <= {b.name for b in usable}
    if call.mixed and both and cute_support.module(call) == cute_support.ROW_INTERVALS:
        log.debug("cute and triton share %s", call)
        return _kernel(".mixed")
    chosen = usable[-1] if call.device_type == "cpu" else usable[0]
    log.debug("%s runs %s; the backends before it:\n%s", chosen.name, call, explain(against))
    return chosen.load(call)


@lru_cache(maxsize=4096)
def choose_backward(call: Call, name: str) -> Backward:
    """What gives the gradients of `call`: the named backend's, or with "auto" those of the first that can.

    On a CPU `auto` starts with torch. Raises `UnsupportedError`.
    """
    check_name(name)
    candidates = BACKENDS[::-1] if call.device_type == "cpu" else BACKENDS
    for backend in candidates:
        if name in ("auto", backend.name) and not _no_gradients(backend, call):
            return backend.load_backward(call)
    raise unsupported(replace(call, grad=True), name)


def unsupported(call: Call, name: str, against: dict[str, list[str]] | None = None) -> UnsupportedError:
    """With all reasons, those of the backend that was asked for first."""
    against = reasons(call) if against is None else against
    first = {name: against[name]} if name in against else {}
    who = "no backend" if name == "auto" else f"backend={name!r}"
    verb = "can" if name == "auto" else "cannot"
    return UnsupportedError(f"{who} {verb} run this call ({call}).\n{explain({**first, **against})}")


def attend(
    q: Tensor, k: Tensor, v: Tensor, plan: Plan, page_table: Tensor | None, *, scale: float | None, softcap: float | None,
    sinks: Tensor | None, k_scale: Tensor | float | None, v_scale: Tensor | float | None, num_splits: int | None,
    out: Tensor | None, with_lse: bool, requires_grad: bool, backend: str, keep: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Checks a call, chooses what runs it and runs it. With `keep` the plan remembers the choice: a call like one before
    (see `checks.kind_of`) is not looked at again."""
    kind = known = None
    if keep and not plan.debug:
        facts = (q, k, v, page_table, sinks, k_scale, v_scale, out, scale, softcap, num_splits)
        kind = (backend, with_lse, requires_grad, *[None if x is None else kind_of(x) for x in facts])
        known = plan.forwards.get(kind)
    if known is not None:
        forward, options = known
    else:
        batch = plan.batch.with_page_table(page_table)
        check(q, k, v, batch, scale, softcap, sinks, num_splits, out)
        call = facts_of(q, k, v, plan.mask, batch, softcap, sinks, k_scale, v_scale, num_splits, out, requires_grad)
        forward, options = choose(call, backend)(), None
        if batch.page_table is not None and debugging():
            batch.check_pages(k.shape[1], k.shape[0], plan.rows)
    if options is None:
        options = options_of(q, k, plan.batch, scale, softcap, sinks, k_scale, v_scale, num_splits)
    if kind is not None and known is None:
        plan.remember(kind, forward, options)
    if page_table is None:
        page_table = plan.batch.page_table
    return forward(q, k, v, plan, page_table, options=options, out=out, with_lse=with_lse)


@cache
def lowering(device_type: str) -> Lowering:
    """Who computes plans on a kind of device: Triton kernels on a GPU that runs them, torch elsewhere."""
    if device_type == "cuda" and triton_support.installed():
        device_lowering: Lowering = import_module(".triton.bounds", __package__).DeviceLowering()
        return device_lowering
    return TorchLowering()


class TablesByDevice:
    """The part of `plan.Lowering` that starts from row intervals, as the device of those has it."""

    def tile_table(self, rows: Tensor, batch: Batch, tile_m: int, group: int, tile_n: int) -> TileTable:
        return lowering(rows.device.type).tile_table(rows, batch, tile_m, group, tile_n)

    def column_table(self, rows: Tensor, batch: Batch, slots: int) -> Columns:
        return lowering(rows.device.type).column_table(rows, batch, slots)


class GivenRows(TablesByDevice):
    """`plan.Lowering` of a plan whose row intervals are known already, int32 `[total_q, 2]`."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows

    def row_intervals(self, mask: Mask, batch: Batch) -> Tensor:
        return self.rows
