"""FlexAttention, compiled, on its Triton and FLASH backends: with a block mask that is given, or made for every call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import mmattn

from .cases import Case, Inputs
from .peers import Prepared, heads_first, needs_batched, needs_gpu, window

BLOCK = 128
"""Rows and keys of a block of FlexAttention's block mask, its default."""


def span_ids(case: Case) -> Tensor:
    """Which span holds each position of a batched case, int32 `[B, S]`, -1 = none."""
    ids = torch.full((len(case.sequences), case.sequences[0].kv_len), -1, dtype=torch.int32)
    for b, s in enumerate(case.sequences):
        for n, (start, end) in enumerate(s.spans):
            ids[b, start : end + 1] = n
    return ids


def mask_mod(case: Case, ids: Tensor | None) -> Callable:
    """The mask as a FlexAttention `mask_mod`; `ids` as of `span_ids`, None = no spans."""
    (left, right), clamp, context = window(case.mask), case.mask.mm_prefix_clamp, case.sequences[0].context

    def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        q = q + context
        keep = k >= 0
        if left is not None:
            keep = keep & (q - k <= left)
        if right is not None:
            keep = keep & (k - q <= right)
        if ids is None:
            return keep
        same = (ids[b, q] == ids[b, k]) & (ids[b, q] >= 0)
        if clamp and left is not None:
            same = same & (q - k <= left)
        return keep | same

    return visible


def block_mask(inputs: Inputs, visible: Callable) -> Any:
    """What `create_block_mask` makes of the mask, but from mmattn's tile table, without looking at every pair."""
    from torch.nn.attention.flex_attention import BlockMask

    case, shape = inputs.case, inputs.case.sequences[0]
    ready = mmattn.plan(case.mask, q=inputs.q, k=inputs.k, **inputs.batch_args())
    table = ready.tiles(BLOCK, 1, BLOCK).ranges.view(len(case.sequences), 1, -1, 4)
    first, full, full_end, end = table[..., None].unbind(-2)
    block = torch.arange(-(-shape.kv_len // BLOCK), dtype=torch.int32, device=inputs.device)
    inside = (block >= full) & (block < full_end)
    edge = (block >= first) & (block < end) & ~inside

    def listed(chosen: Tensor) -> tuple[Tensor, Tensor]:
        """How many blocks, and their numbers first."""
        order = chosen.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
        return chosen.sum(-1, dtype=torch.int32), order.to(torch.int32)

    return BlockMask.from_kv_blocks(
        *listed(edge), *listed(inside), BLOCK_SIZE=BLOCK, mask_mod=visible, seq_lengths=(shape.q_len, shape.kv_len)
    )


def _giving_up(make: Callable[[], Any]) -> Callable[[], Any]:
    """`make`, which is not tried again once it failed: several providers share it, and it may take minutes to fail."""
    failure: Exception | None = None

    def once() -> Any:
        nonlocal failure
        if failure is not None:
            raise failure
        try:
            return make()
        except Exception as e:
            failure = e
            raise

    return once


def _functions(inputs: Inputs, backend: str) -> tuple[Callable, Callable[[Tensor, Any], Tensor], Callable[[], Any]]:
    """(mask_mod, attention over a block mask, block mask), compiled on a GPU, once for all providers of a case."""
    from torch._inductor import config as inductor
    from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

    case, k, v, sinks = inputs.case, heads_first(inputs.k), heads_first(inputs.v), inputs.sinks
    batch, shape = len(case.sequences), case.sequences[0]
    on_gpu = inputs.device.type == "cuda"
    options: Any = {"BACKEND": backend} if on_gpu else None
    if "flex mask" not in inputs.shared:
        create = create_block_mask
        if on_gpu:
            torch._dynamo.reset()  # else shapes of earlier cases count against the limit of recompilations
            inductor.compile_threads = 1  # in this process, where a compiler ends when its time is up
            create = torch.compile(create_block_mask, dynamic=False)
        visible = mask_mod(case, span_ids(case).to(inputs.device) if case.has_spans else None)
        sizes = batch if batch > 1 else None, None, shape.q_len, shape.kv_len
        inputs.shared["flex mask"] = visible, _giving_up(lambda: create(visible, *sizes, device=inputs.device))

    def attend(q: Tensor, mask: Any) -> Tensor:
        rest: dict[str, Any] = dict(block_mask=mask, enable_gqa=True, kernel_options=options)
        if sinks is None:
            return heads_first(flex_attention(heads_first(q), k, v, **rest))
        out, aux = flex_attention(heads_first(q), k, v, return_aux=AuxRequest(lse=True), **rest)
        share = torch.sigmoid(aux.lse - sinks[:, None].to(aux.lse.dtype))
        return heads_first((out * share[..., None]).to(out.dtype))

    name = f"flex {backend}"
    if name not in inputs.shared:
        inputs.shared[name] = torch.compile(attend, dynamic=False, fullgraph=True) if on_gpu else attend
    visible, make_mask = inputs.shared["flex mask"]
    return visible, inputs.shared[name], make_mask


def prepare(inputs: Inputs, *, backend: str, fresh: bool) -> Prepared:
    """FlexAttention on `backend` ("TRITON" or "FLASH"); `fresh`: every call makes its mask."""
    needs_batched(inputs.case)
    if backend != "TRITON":
        needs_gpu(inputs)
    visible, attend, make_mask = _functions(inputs, backend)
    if fresh:
        return Prepared(inputs.case, lambda q, i: attend(q, make_mask()))
    given = block_mask(inputs, visible)
    return Prepared(inputs.case, lambda q, i: attend(q, given), make_mask)
