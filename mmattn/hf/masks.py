"""The mask side: from the closures that transformers composes to a `Mask` and batch arguments.

transformers describes a mask as a tree of small closures (`masking_utils`): `and_masks`/`or_masks` over causal, sliding,
chunked, block and packing rules. `describe` reads that tree. Whatever it does not know is evaluated in row chunks by
transformers' own code and kept if every row turns out to be one key interval.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import masking_utils as hf

from ..attention import plan as make_plan
from ..batch import debugging
from ..mask import Mask
from ..spans import query_spans_from_block_ids, repeated, runs
from .intervals import About, IntervalMask, plan_from_rows, rows_in_chunks, rows_of
from .model_classes import knows_sdpa, model_name
from .traced import traced_mask

log = logging.getLogger(__name__)

DEBUG_ROWS = 64
"""About so many rows of each mask are compared with transformers' own closure under `MMATTN_DEBUG=1`."""


class Unknown(Exception):
    """A closure, or a combination of closures, without a description here."""


@dataclass(frozen=True)
class Rule:
    """A mask as far as `Mask` and the batch arguments can say it. The default shows every key."""

    causal: bool = False
    left: int | None = None
    right: int | None = None
    chunk: int | None = None
    shift: Tensor | None = None
    """`[B]`: chunks count from this position (the left padding)."""
    blocks: Tensor | None = None
    """`[B, L]` ids by absolute position: equal non-negative ids see each other, on top of the rest."""
    clamp: bool = False
    """The left window also cuts the blocks."""
    documents: Tensor | None = None
    """`[B, L]`: only equal ids see each other at all."""
    positions: Tensor | None = None
    """`[B, L]`: with `documents`, the positions that the rest of the rule looks at, which restart in every document."""
    paddings: tuple[Tensor, ...] = ()
    """Bool `[B, L]` by absolute position: keys that exist."""


@dataclass(frozen=True)
class Blocks:
    """Only keys with the row's own block id; not one interval per row by itself (most rows have no block)."""

    ids: Tensor


Term = Rule | Blocks


def _sliding(W: int) -> Rule:
    if W < 1:
        raise Unknown(f"a sliding window of {W}")
    return Rule(left=W - 1)


def _both_sides(W: int) -> Rule:
    # Inclusive on both sides here, 2W + 1 keys; flash-attention and vLLM take W - 1.
    if W < 0:
        raise Unknown(f"a bidirectional window of {W}")
    return Rule(left=W, right=W)


@lru_cache(maxsize=1)
def _leaves() -> dict[Any, tuple[tuple[str, ...], Callable[..., Term]]]:
    """Code object of a closure -> the names of its variables and what it describes.

    Comparing code objects is exact: a function that merely looks alike is not taken for one of these. A leaf that this
    version of transformers lacks, or whose variables have other names, is left to evaluation.
    """
    ids = torch.zeros(1, 1, dtype=torch.long)
    known: list[tuple[str, tuple[Any, ...], tuple[str, ...], Callable[..., Term]]] = [
        ("sliding_window_overlay", (1,), ("sliding_window",), _sliding),
        ("sliding_window_bidirectional_overlay", (1,), ("sliding_window",), _both_sides),
        ("chunked_overlay", (1, ids[0]), ("chunk_size", "left_padding"), lambda c, pad: Rule(chunk=c, shift=pad)),
        ("blockwise_overlay", (ids,), ("block_sequence_ids",), Blocks),
        ("padding_mask_function", (ids,), ("padding_mask",), lambda pad: Rule(paddings=(pad,))),
        ("packed_sequence_mask_function", (ids,), ("packed_sequence_mask",), lambda doc: Rule(documents=doc)),
    ]
    leaves: dict[Any, tuple[tuple[str, ...], Callable[..., Term]]] = {}
    for name, sample, variables, rule in known:
        factory = getattr(hf, name, None)
        if factory is None:
            continue
        code = factory(*sample).__code__
        if sorted(code.co_freevars) == sorted(variables):
            leaves[code] = (variables, rule)
        else:
            log.warning("transformers' %s has variables %s: masks with it are evaluated", name, code.co_freevars)
    return leaves


@lru_cache(maxsize=1)
def _nodes() -> dict[Any, str]:
    """Code object of a combining closure -> which one it is."""
    causal = hf.causal_mask_function
    made = {"and": hf.and_masks(causal), "or": hf.or_masks(causal)}
    if hasattr(hf, "remap_positions_for_packed_sequence"):
        made["remap"] = hf.remap_positions_for_packed_sequence(causal, torch.zeros(1, 1, dtype=torch.long))
    return {fn.__code__: name for name, fn in made.items()}


def describe(fn: Callable[..., Any]) -> Term:
    """What a mask function of transformers means; raises `Unknown`."""
    if fn is hf.causal_mask_function:
        return Rule(causal=True)
    if fn is hf.bidirectional_mask_function:
        return Rule()
    code = getattr(fn, "__code__", None)
    cells = {name: cell.cell_contents for name, cell in zip(code.co_freevars, fn.__closure__ or ())} if code else {}
    if code in _leaves():
        variables, rule = _leaves()[code]
        return rule(*(cells[name] for name in variables))
    node = _nodes().get(code)
    if node == "and":
        return _all_of([describe(part) for part in cells["mask_functions"]])
    if node == "or":
        return _any_of([describe(part) for part in cells["mask_functions"]])
    if node == "remap":
        inner = describe(cells["mask_function"])
        if isinstance(inner, Blocks) or inner.blocks is not None or inner.paddings or inner.documents is not None:
            raise Unknown("blocks or padding inside packed documents")
        return replace(inner, positions=cells["position_ids"])
    raise Unknown(f"the mask function {getattr(fn, '__qualname__', fn)!r}")


def _all_of(terms: list[Term]) -> Term:
    rules = [term for term in terms if isinstance(term, Rule)]
    with_blocks = [rule for rule in rules if rule.blocks is not None]
    if len(rules) < len(terms) or len(with_blocks) > 1:
        raise Unknown("an intersection with blocks alone")
    plain = Rule(paddings=sum((rule.paddings for rule in rules), ()))
    for rule in rules:
        if rule.blocks is not None:
            continue
        for name in ("chunk", "shift", "documents", "positions"):
            mine, others = getattr(rule, name), getattr(plain, name)
            if mine is not None and others is not None:
                raise Unknown(f"two rules about {name}")
            plain = replace(plain, **{name: others if mine is None else mine})
        plain = replace(
            plain, causal=plain.causal or rule.causal, left=_least(plain.left, rule.left),
            right=_least(plain.right, rule.right),
        )  # fmt: skip
    if plain.chunk is not None and (plain.left is not None or plain.right is not None):
        raise Unknown("chunks together with a window")
    if not with_blocks:
        return plain
    # (base or block) and window = (base and window) or (block and window): the clamp, if base has no smaller window.
    base = with_blocks[0]
    only_left = replace(plain, left=None, paddings=()) == Rule()
    if not only_left or (
        plain.left is not None
        and (base.chunk is not None or (base.left is not None and not base.clamp and base.left < plain.left))
    ):
        raise Unknown("blocks cut by more than a left window")
    left = _least(base.left, plain.left)
    return replace(base, left=left, clamp=base.clamp or plain.left is not None, paddings=plain.paddings)


def _any_of(terms: list[Term]) -> Term:
    blocks = [term for term in terms if isinstance(term, Blocks)]
    rules = [term for term in terms if isinstance(term, Rule)]
    if len(rules) == 1 and not blocks:
        return rules[0]
    base = rules[0] if rules else Rule()
    # A row is in its own base rule and in its own block, so the union has no hole.
    if len(rules) != 1 or len(blocks) != 1 or base.blocks is not None or base.documents is not None or base.paddings:
        raise Unknown("a union of more than one rule and one set of blocks")
    return replace(base, blocks=blocks[0].ids)


def _least(a: int | None, b: int | None) -> int | None:
    return b if a is None else a if b is None else min(a, b)


def _vector(x: int | Tensor, batch_size: int, device: torch.device) -> Tensor:
    """int32 `[B]`, a copy: a static cache hands out its live length and moves it on later."""
    return torch.as_tensor(x, device=device).to(torch.int32).reshape(-1).expand(batch_size).clone()


def mask_function(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int | Tensor = 0,
    mask_function: Callable[..., Any] = hf.causal_mask_function,
    attention_mask: Tensor | None = None,
    config: Any = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    fallback: str | None = None,
    **_: Any,
) -> IntervalMask:
    """A mask function for `transformers.AttentionMaskInterface`: returns the mask as one key interval per row.

    Args:
        q_offset, kv_offset: absolute position of row 0 and of key 0. Tensors are copied.
        mask_function: transformers' composed closure over absolute positions.
        attention_mask: bool `[B, L]` by absolute position (True = a key that exists), or None; past its end no key exists.
        config: of the model that asks; `dtype`: of its activations.
        fallback: as in `mmattn.hf.register`; "sdpa" forms the elements of a mask that is not one interval per row.

    A mask that is not one interval per row is returned too, with the reason: it raises where a layer uses it.
    """
    device = torch.device(device)
    shape = (batch_size, q_length, kv_length)
    if isinstance(q_offset, Tensor):
        q_offset = q_offset.clone()
    about = About(model=model_name(config), fallback=fallback)
    if torch.compiler.is_compiling():
        return traced_mask(*shape, q_offset, kv_offset, mask_function, attention_mask, device, about)
    dtype = torch.bool if knows_sdpa(config) else dtype

    def dense(start: int, end: int) -> Tensor:
        arguments: dict[str, Any] = dict(
            batch_size=batch_size, q_length=end - start, kv_length=kv_length, q_offset=q_offset + start,
            kv_offset=kv_offset, mask_function=mask_function, attention_mask=attention_mask, use_vmap=use_vmap,
            allow_is_causal_skip=False, allow_is_bidirectional_skip=False, device=device,
        )  # fmt: skip
        mask: Any = hf.sdpa_mask(**arguments)
        return mask.expand(batch_size, 1, -1, -1)

    try:
        rule = describe(mask_function)
        if isinstance(rule, Blocks):
            raise Unknown("blocks alone")
        if attention_mask is not None:
            rule = replace(rule, paddings=(*rule.paddings, attention_mask))
        mask = _lower(rule, *shape, q_offset, kv_offset, device, about, dtype)
        if debugging():
            _verify(mask, dense)
        return mask
    except Unknown as unknown:
        why = str(unknown)

    rows, problem = rows_in_chunks(lambda s, e: dense(s, e)[:, 0], *shape, q_offset, int(kv_offset))
    about = replace(about, origin=f"evaluated, because of {why}", refusal=problem)
    elements = dense(0, q_length) if problem is not None and fallback == "sdpa" else None
    return IntervalMask(rows, kv_length, about, dtype=dtype, elements=elements)


def _lower(
    rule: Rule,
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor,
    kv_offset: int | Tensor,
    device: torch.device,
    about: About,
    dtype: torch.dtype,
) -> IntervalMask:
    """The rule as a `Mask` and batch arguments, lowered. Reads the device once, and only where it must check."""
    checks: dict[str, Tensor] = {}
    q_start, kv_start = (_vector(x, batch_size, device) for x in (q_offset, kv_offset))
    shift = torch.zeros_like(q_start) if rule.shift is None else rule.shift.to(device, torch.int32)
    args: dict[str, Any] = {"q_start": q_start - shift, "kv_start": kv_start - shift}
    if rule.paddings:
        valid = _valid_keys(rule.paddings, kv_length, kv_offset, device)
        intervals, holes = rows_of(valid[:, None])
        checks["an attention_mask with a hole"] = holes.any()
        first, end = intervals[:, 0].unbind(-1)
        args["kv_lo"] = args["kv_start"] + first
        args["seqused_k"] = end
    if rule.blocks is not None:
        ids = rule.blocks.to(device)
        if ids.shape[0] != batch_size:
            raise Unknown(f"block ids for {ids.shape[0]} sequences")
        checks["a block that comes in several pieces"] = repeated(ids).any()
        spans = query_spans_from_block_ids(ids, q_offset, q_length)
        args["mm_prefix_query_range"] = spans.where(spans < 0, spans - shift[:, None, None])
    if rule.positions is not None and rule.documents is None:
        raise Unknown("positions that restart without documents")
    if rule.documents is not None:
        if rule.documents.shape != (batch_size, q_length) or q_length != kv_length or rule.paddings:
            raise Unknown("packing together with a cache or padding")
        checks["a document that comes in several pieces"] = repeated(rule.documents, negative=True).any()
        if rule.positions is not None:
            jumps = rule.positions.diff(dim=1) != 1
            checks["positions that jump inside a document"] = (jumps & ~runs(rule.documents)[0][:, 1:]).any()
    if checks:
        found = torch.stack(list(checks.values())).tolist()
        if any(found):
            raise Unknown(" and ".join(name for name, bad in zip(checks, found) if bad))
    mask = Mask(
        causal=rule.causal, window_left=rule.left, window_right=None if rule.causal else rule.right, symmetrize=False,
        mm_prefix_clamp=rule.clamp, chunk_size=rule.chunk,
    )  # fmt: skip
    if rule.documents is not None:
        return _lower_documents(mask, rule, about, dtype)
    sizes = torch.empty(batch_size, kv_length, 1, 1, device="meta")
    plan = make_plan(mask, k=sizes, batch_size=batch_size, max_seqlen_q=q_length, device=device, **args)
    rows = plan.rows.view(batch_size, q_length, 2)
    return IntervalMask(rows, kv_length, replace(about, origin=str(mask)), dtype=dtype, plan=plan)


def _verify(mask: IntervalMask, dense: Callable[[int, int], Tensor]) -> None:
    """Compares sampled rows with the elements that transformers' closure gives; `MMATTN_DEBUG=1` asks for it."""
    length = mask.shape[2]
    sampled = {0, length - 1, *range(0, length, max(1, length // DEBUG_ROWS))} if length else ()
    for row in sorted(sampled):
        part: Any = mask[:, :, row : row + 1]
        got, expected = part.dense(), dense(row, row + 1)
        if not torch.equal(got, expected):
            b = int((got != expected).flatten(1).any(1).nonzero()[0])
            keys = [x[b, 0, 0].nonzero().flatten().tolist() for x in (got, expected)]
            raise RuntimeError(
                f"{mask.about.model or 'a model'}: mmattn reads the mask of transformers {transformers.__version__} as "
                f"{mask.about.origin}, but in row {row} of sequence {b} it shows {_brief(keys[0])}, not {_brief(keys[1])} "
                "(key indices). This is a fault of mmattn or a change in transformers: please report it"
            )


def _brief(keys: list[int]) -> str:
    return f"{len(keys)} keys" + (f" from {keys[0]} to {keys[-1]}" if keys else "")


def _valid_keys(paddings: tuple[Tensor, ...], kv_length: int, kv_offset: int | Tensor, device: torch.device) -> Tensor:
    """Which of the keys present exist, bool `[B, K]`, from masks over absolute positions."""
    at = torch.arange(kv_length, device=device) + kv_offset
    valid = torch.ones(1, kv_length, dtype=torch.bool, device=device)
    for padding in paddings:
        padding = padding.to(device)
        valid = valid & padding.index_select(1, at.clamp(max=padding.shape[1] - 1)) & (at < padding.shape[1])
    return valid


def _lower_documents(mask: Mask, rule: Rule, about: About, dtype: torch.dtype) -> IntervalMask:
    """Packed documents: planned as sequences of their own, in the rows and keys of the batch that holds them."""
    documents = rule.documents
    assert documents is not None
    batch_size, length = documents.shape
    first, start, _ = runs(documents)
    begins = first.flatten().nonzero().flatten()
    cu_seqlens = torch.cat([begins, begins.new_tensor([documents.numel()])]).to(torch.int32)
    positions = start if rule.positions is None else rule.positions
    if rule.shift is not None:
        positions = positions - rule.shift[:, None]
    first_position = positions.expand(batch_size, length).flatten()[begins].to(torch.int32)
    packed = make_plan(
        mask, total_q=documents.numel(), max_seqlen_q=length, max_seqlen_k=length, device=documents.device,
        cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, q_start=first_position, kv_start=first_position,
    )  # fmt: skip
    rows = packed.rows.view(batch_size, length, 2) + start.to(torch.int32)[..., None]
    count = begins.numel()
    about = replace(about, origin=f"{mask} in {count} documents", documents=count)
    return IntervalMask(rows, length, about, dtype=dtype, plan=plan_from_rows(rows, length))
