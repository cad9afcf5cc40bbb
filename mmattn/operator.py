"""mmattn as PyTorch operators, for all that builds on PyTorch's dispatcher: autograd, torch.compile, export, fake tensors.

`attention()` and `plan()` call these where somebody beside the kernels has to see the call (`seen`). Their schemas are a
stable contract, in the namespace `mmattn`:

* `row_intervals(...) -> rows`: a mask and a batch become the row table, int32 `[total_q, 2]`, the half-open key
  interval of every row. The mask crosses as integers (`Mask.numbers`), the batch as the fields of `Batch`.
* `span_table(bounds, counts, ...) -> spans`: lists of spans, flat, become int32 `[B, R, 2]`, sorted and padded with -1.
* `attend(q, k, v, rows, key, ...) -> (out, lse)`: out has q's shape with v's last dim and q's dtype, contiguous; lse is
  float32 `[Hq, T]` or `[B, Hq, S]`, or empty (`[0]`) unless `return_lse` or `requires_grad` asks for it.
* `attend_out(...)`: the same, written to `out` and `lse`; not differentiable.
* `attend_backward(...) -> (dq, dk, dv, dsinks, dk_scale, dv_scale)`: empty tensors where there was no such input.

`key` is an empty tensor that stands for the plan. What a kernel derives from the row table (its tile tables, its launches) is
kept for as long as that tensor lives, so layers that share a plan share it too. A call with another key computes it anew.

autograd saves q, k, v, out, lse, rows, key, the batch's tensors, sinks and scales: the forward and the backward of a call may
come from different backends. Gradients of gradients are refused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.library import Library
from torch.utils.weak import WeakIdKeyDictionary

from . import dispatch
from .batch import Batch, Call, spans_from_lists
from .checks import check, facts_of, options_of
from .mask import Mask, MaskError
from .plan import Lowering, Options, Plan

_POSITIONS = "Tensor? q_start, Tensor? kv_start, Tensor? kv_lo, Tensor? causal, Tensor? spans, Tensor? query_spans"
_BATCH = (
    "SymInt batch_size, SymInt? seqlen_q, SymInt? seqlen_k, SymInt max_seqlen_q, SymInt? max_seqlen_k, "
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seqused_k"
)
_CALL = (
    "Tensor q, Tensor k, Tensor v, Tensor rows, Tensor key, int[] mask, bool with_spans, "
    + _BATCH
    + ", Tensor? page_table, "
    "Tensor? sinks, Tensor? k_scale, Tensor? v_scale, float scale, float? softcap, int? num_splits, str backend"
)
_library = Library("mmattn", "DEF")
_library.define(f"row_intervals(int[] mask, SymInt total_q, {_BATCH}, {_POSITIONS}, *, Device device) -> Tensor")
_library.define("span_table(SymInt[] bounds, int[] counts, SymInt batch_size, *, Device device) -> Tensor")
_library.define("plan_key(Tensor rows) -> Tensor")
_library.define(f"attend({_CALL}, bool return_lse, bool requires_grad) -> (Tensor out, Tensor lse)")
_library.define(f"attend_out({_CALL}, Tensor(a!) out, Tensor(b!)? lse) -> ()")
_library.define(
    f"attend_backward({_CALL}, Tensor out, Tensor lse, Tensor? dout, Tensor? dlse) -> "
    "(Tensor dq, Tensor dk, Tensor dv, Tensor dsinks, Tensor dk_scale, Tensor dv_scale)"
)

_PLAIN = (Tensor, torch.nn.Parameter)


def wants_grad(*inputs: Any) -> bool:
    """Whether autograd would record an operation on these inputs."""
    return torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in inputs)


def seen(*tensors: Tensor | None) -> bool:
    """Whether somebody beside the kernels has to see an operation on these tensors: a tracer, a mode, a tensor subclass."""
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or any(x is not None and (type(x) not in _PLAIN or x.is_meta) for x in tensors)
        or torch._C._functorch.peek_interpreter_stack() is not None
    )


class OperatorLowering(dispatch.TablesByDevice):
    """`plan.Lowering` through the operators."""

    def row_intervals(self, mask: Mask, batch: Batch) -> Tensor:
        rows: Tensor = torch.ops.mmattn.row_intervals(
            mask.numbers, batch.total_q, *_sizes(batch), batch.q_start, batch.kv_start, batch.kv_lo, batch.causal,
            batch.spans, batch.query_spans, device=batch.device,
        )  # fmt: skip
        return rows


def lowered(mask: Mask, batch: Batch) -> Plan:
    """The plan, through the operators where somebody has to see that."""
    through: Lowering
    tensors = (batch.cu_seqlens_q, batch.cu_seqlens_k, batch.seqused_k, batch.q_start, batch.spans, batch.query_spans)
    if seen(*tensors) or batch.device.type == "meta":
        through = OperatorLowering()
    else:
        through = dispatch.lowering(batch.device.type)
    return Plan(mask, batch, through)


def attend(
    q: Tensor, k: Tensor, v: Tensor, plan: Plan, page_table: Tensor | None, *, scale: float | None, softcap: float | None,
    sinks: Tensor | None, k_scale: Tensor | float | None, v_scale: Tensor | float | None, num_splits: int | None,
    out: Tensor | None, return_lse: bool, requires_grad: bool, backend: str,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """`dispatch.attend` through the operators. What does not fit raises here; what no backend can run, in the operator."""
    batch = plan.batch.with_page_table(page_table)
    check(q, k, v, batch, scale, softcap, sinks, num_splits, out)
    options = options_of(q, k, batch, scale, softcap, sinks, k_scale, v_scale, num_splits)
    # Per-sequence causality and positions are in the rows already; what is left of them is how far a row may see.
    causal, *limits = plan.mask.numbers
    mask = [int(causal and batch.causal is None), *limits]
    with_spans = batch.spans is not None or batch.query_spans is not None
    call = (
        q, k, v, plan.rows, plan.key, mask, with_spans, *_sizes(batch), batch.page_table,
        options.sinks, options.k_scale, options.v_scale, options.scale, options.softcap, options.num_splits, backend,
    )  # fmt: skip
    if out is None:
        result, lse = torch.ops.mmattn.attend(*call, return_lse, requires_grad)
        return result, lse if return_lse else None
    if requires_grad:
        facts = facts_of(
            q, k, v, plan.mask, batch, softcap, sinks, k_scale, v_scale, num_splits, out, True, traced=True
        )
        raise dispatch.unsupported(facts, backend)
    lse = q.new_empty(dispatch.lse_shape(q), dtype=torch.float32) if return_lse else None
    torch.ops.mmattn.attend_out(*call, out, lse)
    return out, lse


def _sizes(batch: Batch) -> tuple[Any, ...]:
    """The arguments `_BATCH` of the schemas."""
    return (
        batch.batch_size, batch.seqlen_q, batch.seqlen_k, batch.max_seqlen_q, batch.max_seqlen_k,
        batch.cu_seqlens_q, batch.cu_seqlens_k, batch.seqused_k,
    )  # fmt: skip


# The operators themselves.


def _batch(device: torch.device, total_q: int, sizes: tuple[Any, ...], **tensors: Any) -> Batch:
    names = "batch_size seqlen_q seqlen_k max_seqlen_q max_seqlen_k cu_seqlens_q cu_seqlens_k seqused_k".split()
    return Batch(device=device, total_q=total_q, **dict(zip(names, sizes)), **tensors)


class _Arguments:
    """The arguments `_CALL` of the schemas, by name and as the library's own objects."""

    def __init__(self, args: tuple[Any, ...]) -> None:
        self.q, self.k, self.v, self.rows, self.key, mask, with_spans = args[:7]
        self.mask = Mask.of_numbers(*mask)
        self.page_table, self.sinks, self.k_scale, self.v_scale, self.scale, self.softcap, self.num_splits = args[15:22]
        self.backend = args[22]
        # (That there are spans matters to a kernel's choice of splits; where they lie does not.)
        self.batch = _batch(
            self.rows.device, self.rows.shape[0], args[7:15], page_table=self.page_table,
            query_spans=self.rows if with_spans else None,
        )  # fmt: skip

    @property
    def options(self) -> Options:
        return Options(self.scale, self.softcap, self.sinks, self.k_scale, self.v_scale, self.num_splits)

    def facts(self, out: Tensor | None, requires_grad: bool, traced: bool = False) -> Call:
        return facts_of(
            self.q, self.k, self.v, self.mask, self.batch, self.softcap, self.sinks, self.k_scale, self.v_scale,
            self.num_splits, out, requires_grad, traced,
        )  # fmt: skip

    def plan(self) -> Plan:
        """The plan that the key stands for, made at the first call with that key."""
        plan = _plans.get(self.key)
        if plan is None:
            # It must not keep the key alive, nor be found again when another tensor takes the place of these rows.
            plan = _plans[self.key] = Plan(self.mask, self.batch, dispatch.GivenRows(self.rows.detach()))
        return plan

    def attend(self, out: Tensor | None, with_lse: bool, requires_grad: bool) -> tuple[Tensor, Tensor | None]:
        return dispatch.attend(
            self.q, self.k, self.v, self.plan(), self.page_table, scale=self.scale, softcap=self.softcap, sinks=self.sinks,
            k_scale=self.k_scale, v_scale=self.v_scale, num_splits=self.num_splits, out=out, with_lse=with_lse,
            requires_grad=requires_grad, backend=self.backend, keep=True,
        )  # fmt: skip


_plans: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Key -> its plan, for as long as the key lives."""


def _row_intervals(mask, total_q, *rest, device):  # type: ignore[no-untyped-def]
    names = "q_start kv_start kv_lo causal spans query_spans".split()
    batch = _batch(device, total_q, rest[:8], **dict(zip(names, rest[8:])))
    return dispatch.lowering(device.type).row_intervals(Mask.of_numbers(*mask), batch)


def _span_table(bounds, counts, batch_size, *, device):  # type: ignore[no-untyped-def]
    pairs = zip(bounds[::2], bounds[1::2])
    return spans_from_lists([[next(pairs) for _ in range(count)] for count in counts], batch_size, device)


def _span_table_fake(bounds, counts, batch_size, *, device):  # type: ignore[no-untyped-def]
    if len(bounds) != 2 * sum(counts):
        raise MaskError("mm_prefix_range must hold one list of spans per sequence, each span two integers (start, end)")
    return torch.empty(batch_size, max(counts, default=0), 2, dtype=torch.int32, device=device)


def _attend(*args):  # type: ignore[no-untyped-def]
    *call, return_lse, requires_grad = args
    out, lse = _Arguments(call).attend(None, return_lse or requires_grad, requires_grad)
    return out, call[0].new_empty(0, dtype=torch.float32) if lse is None else lse


def _attend_out(*args):  # type: ignore[no-untyped-def]
    *call, out, lse = args
    _, computed = _Arguments(call).attend(out, lse is not None, False)
    if lse is not None:
        lse.copy_(computed)


def _attend_backward(*args):  # type: ignore[no-untyped-def]
    *call, out, lse, dout, dlse = args
    given = _Arguments(call)
    dout = torch.zeros_like(out) if dout is None else dout
    backward = dispatch.choose_backward(given.facts(None, True), given.backend)
    grads = backward(
        given.q, given.k, given.v, given.plan(), given.page_table, out, lse, dout, dlse, options=given.options
    )
    return tuple(given.q.new_empty(0) if grad is None else grad for grad in grads)


def _attend_fake(*args):  # type: ignore[no-untyped-def]
    *call, return_lse, requires_grad = args
    given = _Arguments(call)
    dispatch.choose(given.facts(None, requires_grad, traced=True), given.backend)
    q = given.q
    shape = dispatch.lse_shape(q) if return_lse or requires_grad else (0,)
    return q.new_empty((*q.shape[:-1], given.v.shape[-1])), q.new_empty(shape, dtype=torch.float32)


def _attend_out_fake(*args):  # type: ignore[no-untyped-def]
    *call, out, _ = args
    given = _Arguments(call)
    dispatch.choose(given.facts(out, False, traced=True), given.backend)


def _attend_backward_fake(*args):  # type: ignore[no-untyped-def]
    given = _Arguments(args[:-4])
    inputs = (given.q, given.k, given.v, given.sinks, given.k_scale, given.v_scale)
    return tuple(given.q.new_empty(0) if x is None else x.new_empty(x.shape) for x in inputs)


def _save(ctx, inputs, output):  # type: ignore[no-untyped-def]
    *call, _, ctx.asked_for = inputs
    ctx.call = [None if isinstance(x, Tensor) else x for x in call]
    ctx.save_for_backward(*[x if isinstance(x, Tensor) else None for x in call], *output)


def _differentiate(ctx, dout, dlse):  # type: ignore[no-untyped-def]
    if not ctx.asked_for:
        raise ValueError(
            "mmattn.attend was called, or traced, with requires_grad=False; trace with inputs that require grad and no torch.no_grad()"
        )
    *tensors, out, lse = ctx.saved_tensors
    call = [x if t is None else t for x, t in zip(ctx.call, tensors)]
    grads = torch.ops.mmattn.attend_backward(*call, out, lse, dout, dlse)
    result = [None] * (len(call) + 2)
    for at, grad in zip((0, 1, 2, 16, 17, 18), grads):
        if call[at] is not None:
            result[at] = grad
    return tuple(result)


def _refuse_double(ctx, *grads):  # type: ignore[no-untyped-def]
    raise dispatch.UnsupportedError(
        "mmattn gives no gradients of gradients; use attention that torch can differentiate twice, such as eager sdpa"
    )


for _name, _real, _fake in (
    ("row_intervals", _row_intervals, lambda mask, total_q, *_, device: torch.empty(total_q, 2, dtype=torch.int32, device=device)),
    ("span_table", _span_table, _span_table_fake),
    ("plan_key", lambda rows: rows.new_empty(0), lambda rows: rows.new_empty(0)),
    ("attend", _attend, _attend_fake),
    ("attend_out", _attend_out, _attend_out_fake),
    ("attend_backward", _attend_backward, _attend_backward_fake),
):  # fmt: skip
    _library.impl(_name, _real, "CompositeExplicitAutograd")  # on every device; autograd is registered below
    torch.library.register_fake(f"mmattn::{_name}", _fake, lib=_library)
torch.library.register_autograd("mmattn::attend", _differentiate, setup_context=_save, lib=_library)
torch.library.register_autograd("mmattn::attend_backward", _refuse_double, lib=_library)
