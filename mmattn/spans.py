"""Spans and masks from what other stacks hand over: token types, block ids, vLLM ranges, configs.

A span is an inclusive `(start, end)` of absolute positions. Spans travel as lists, one per sequence
(`mm_prefix_range` of `attention()`), or as one row per query, int32, `(-1, -1)` for none (`mm_prefix_query_range`).
FlashAttention windows come in through `Mask.from_fa_window`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .mask import Mask, MaskError

Spans = list[list[tuple[int, int]]]


def _two_dims(name: str, ids: Tensor) -> Tensor:
    if not isinstance(ids, Tensor) or ids.dim() not in (1, 2) or ids.is_floating_point():
        got = f"{ids.dtype} {list(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
        raise ValueError(f"{name} must be an integer tensor [B, S] or [S], got {got}")
    return ids if ids.dim() == 2 else ids[None]


def runs(ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The run of equal neighbours that each position lies in.

    `ids` is `[B, S]`. Returns `(first, start, end)` of that shape: whether a run begins here (bool), and the inclusive
    positions (int64) where the run of this position begins and ends. Does not read the device.
    """
    position = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape)
    edge = ids.new_ones((ids.shape[0], 1), dtype=torch.bool)
    differs = ids[:, 1:] != ids[:, :-1]
    first, last = torch.cat([edge, differs], 1), torch.cat([differs, edge], 1)
    if ids.shape[1] == 0:
        return first[:, :0], position, position
    start = position.masked_fill(~first, 0).cummax(1).values
    end = position.masked_fill(~last, ids.shape[1]).flip(1).cummin(1).values.flip(1)
    return first, start, end


def repeated(ids: Tensor, *, negative: bool = False) -> Tensor:
    """Whether one id occurs in two separate runs of a row, as a bool tensor `[B]`; negative ids only count on request."""
    first, _, _ = runs(ids)
    counted = first if negative else first & (ids >= 0)
    # Everything that does not count gets a value of its own, below every id.
    ids = ids.to(torch.int64)
    unique = ids.amin() - 1 - torch.arange(ids.shape[1], device=ids.device) if ids.numel() else ids
    values = torch.where(counted, ids, unique).sort(1).values
    return (values[:, 1:] == values[:, :-1]).any(1)


def spans_from_block_ids(block_ids: Tensor) -> Spans:
    """Spans from block ids (`block_sequence_ids` of transformers): one per run of equal ids, negative = no block.

    Args:
        block_ids: integer `[B, S]` or `[S]`. Read on the host.

    Raises:
        MaskError: an id comes back after another one, so its block is not one span.
    """
    ids = _two_dims("block_ids", block_ids)
    again = repeated(ids).nonzero().flatten().tolist()
    if again:
        raise MaskError(f"a block id of sequence {again[0]} occurs in two separate runs; one block must be one span")
    first, _, end = runs(ids)
    begins, ends = (first & (ids >= 0)).tolist(), end.tolist()
    return [[(s, e) for s, e in enumerate(row_ends) if row[s]] for row, row_ends in zip(begins, ends)]


def block_ids_from_token_types(token_types: Tensor, types: Iterable[int] = (1,)) -> Tensor:
    """Numbers the runs of tokens whose type is in `types`: 0, 1, ... per sequence, -1 elsewhere; same shape.

    Types in the set are not told apart, so touching images merge: the rule of Gemma 3 (`types=(1,)`) and of Gemma 4
    (`types=(1, 2)`, images and video) in transformers. Does not read the device.
    """
    ids = _two_dims("token_types", token_types)
    member = torch.isin(ids, torch.tensor(list(types), device=ids.device, dtype=ids.dtype))
    first, _, _ = runs(member)
    numbers = (first & member).cumsum(1) - 1
    return numbers.masked_fill(~member, -1).reshape(token_types.shape)


def spans_from_token_types(token_types: Tensor, types: Iterable[int] = (1,)) -> Spans:
    """Spans from `token_type_ids`: one per run of tokens whose type is in `types`. Read on the host.

    Gemma 3: `(1,)`; Gemma 4 (`mm_token_type_ids`): `(1, 2)`. PaliGemma's bidirectional prefix is type 0: `(0,)`.
    """
    return spans_from_block_ids(block_ids_from_token_types(token_types, types))


def query_spans_from_block_ids(block_ids: Tensor, q_start: int | Tensor = 0, q_len: int | None = None) -> Tensor:
    """The span of each query row, from block ids, without reading the device.

    Args:
        block_ids: integer `[B, S]`, indexed by absolute position; negative = no block. One id must be one run
            (`repeated` tells); rows past the end have no span.
        q_start: absolute position of the first row: an integer, or an integer tensor that broadcasts to `[B]`.
        q_len: rows per sequence; default: up to the end of `block_ids`.

    Returns:
        int32 `[B, q_len, 2]` for `mm_prefix_query_range`.
    """
    ids = _two_dims("block_ids", block_ids)
    batch, length = ids.shape
    if q_len is None:
        if isinstance(q_start, Tensor):
            raise ValueError("q_len must be given when q_start is a tensor: lengths are not read from the device")
        q_len = max(length - q_start, 0)
    first_row = torch.as_tensor(q_start, device=ids.device).reshape(-1, 1)
    at = (first_row + torch.arange(q_len, device=ids.device)).expand(batch, q_len)
    _, start, end = runs(ids)
    if length == 0:
        return torch.full((batch, q_len, 2), -1, dtype=torch.int32, device=ids.device)
    inside = at.clamp(0, length - 1)
    spans = torch.stack([start.gather(1, inside), end.gather(1, inside)], dim=-1)
    none = (at < 0) | (at >= length) | (ids.gather(1, inside) < 0)
    return spans.masked_fill(none[..., None], -1).to(torch.int32)


def spans_from_vllm(
    ranges: Mapping[int, Sequence[tuple[int, int]]],
    batch_size: int,
    *,
    sliding_window: int | None = None,
    clamp: bool = False,
) -> Spans:
    """Spans from vLLM's `mm_req_doc_ranges`: request index -> inclusive absolute `(start, end)` ranges.

    Follows vLLM 0.33 (`v1/attention/backends/utils.py`): a model with a sliding window that does not clamp loses every
    range longer than the window, on all of its layers, the full-attention ones too.

    Args:
        ranges: requests without images may be missing.
        batch_size: number of requests.
        sliding_window: keys a row keeps, self included, of the model's sliding layers; None = the model has none.
        clamp: the model clamps ranges to its window (Gemma 4). Must be `mm_prefix_clamp` of its masks.

    Raises:
        ValueError: a request index outside the batch.
    """
    strangers = [request for request in ranges if not 0 <= request < batch_size]
    if strangers:
        raise ValueError(f"ranges names request {strangers[0]}, but batch_size is {batch_size}")
    longest = sliding_window if sliding_window is not None and not clamp else None
    return [
        [(s, e) for s, e in ranges.get(request, ()) if longest is None or e - s + 1 <= longest]
        for request in range(batch_size)
    ]


def query_spans_from_spans(
    spans: Sequence[Sequence[tuple[int, int]]],
    q_lens: Sequence[int],
    q_starts: Sequence[int],
    device: torch.device | str = "cpu",
) -> Tensor:
    """The span of each packed query row, as vLLM's FlashAttention-4 metadata holds it.

    Args:
        spans: per sequence inclusive absolute `(start, end)`; spans with `start >= end` are left out.
        q_lens, q_starts: rows of each sequence and the absolute position of its first row, on the host.

    Returns:
        int32 `[sum(q_lens), 2]` on `device`, `(-1, -1)` = none, for `mm_prefix_query_range`.
    """
    if not len(spans) == len(q_lens) == len(q_starts):
        raise ValueError(
            f"spans, q_lens and q_starts must have one entry per sequence, got {len(spans)}, {len(q_lens)} and {len(q_starts)}"
        )
    rows = torch.full((sum(q_lens), 2), -1, dtype=torch.int32)
    offset = 0
    for mine, length, first in zip(spans, q_lens, q_starts):
        for start, end in mine:
            lo, hi = max(start - first, 0), min(end - first + 1, length)
            if start < end and lo < hi:
                rows[offset + lo : offset + hi] = torch.tensor([start, end], dtype=torch.int32)
        offset += length
    return rows.to(device)


def spans_from_query_spans(rows: Tensor, q_lens: Sequence[int]) -> Spans:
    """The reverse: the distinct spans of each sequence from per-row spans `[T, 2]`. Read on the host.

    A span that none of the rows lies in leaves no trace in such a tensor; no row needs it.
    """
    if rows.dim() != 2 or rows.shape[1] != 2 or rows.shape[0] != sum(q_lens):
        raise ValueError(f"rows must be [sum(q_lens)={sum(q_lens)}, 2], got {list(rows.shape)}")
    spans: Spans = []
    for mine in rows.cpu().split(list(q_lens)):
        spans.append(sorted({(s, e) for s, e in mine.tolist() if 0 <= s < e}))
    return spans


class LayerMask(NamedTuple):
    """How one layer of a model masks."""

    mask: Mask
    spans: bool
    """Whether image spans apply on this layer."""


_SPAN_MODELS = {
    # model type -> (spans on full layers, spans on sliding layers, sliding layers clamp); transformers' rules
    "gemma3": (True, True, True),
    "gemma4": (False, True, True),
    "gemma4_unified": (False, True, True),
    "paligemma": (True, True, False),
}


def layer_mask(config: Any, layer_idx: int) -> LayerMask:
    """The mask of layer `layer_idx` of a Hugging Face model, from its config.

    Reads `layer_types`, `sliding_window`, `attention_chunk_size` and `is_causal` of the text config, as the mask builders
    of transformers do: a causal sliding layer keeps `sliding_window` keys, self included; a bidirectional one sees
    `|q - k| <= sliding_window`. Whether spans apply is known for Gemma 3, Gemma 4 and PaliGemma, which must come with
    their composite config; other models get `spans=False`.

    Args:
        config: any object with those attributes; transformers is not needed.
        layer_idx: the layer, from 0.

    Raises:
        ValueError: no such layer, a kind of layer that has no attention mask, or a missing size.
    """
    get_text_config = getattr(config, "get_text_config", None)
    text = get_text_config() if get_text_config is not None else getattr(config, "text_config", config)
    layers = getattr(text, "num_hidden_layers", None)
    kinds = getattr(text, "layer_types", None)
    count = len(kinds) if kinds else layers
    if not 0 <= layer_idx < (layer_idx + 1 if count is None else count):
        raise ValueError(f"layer_idx must lie in 0..{(count or 0) - 1}, got {layer_idx}")
    window, chunk = getattr(text, "sliding_window", None), getattr(text, "attention_chunk_size", None)
    if kinds:
        kind = kinds[layer_idx]
    else:
        kind = "sliding_attention" if window is not None else "full_attention" if chunk is None else "chunked_attention"
    on_full, on_sliding, clamp = _SPAN_MODELS.get(getattr(config, "model_type", ""), (False, False, False))
    if getattr(config, "model_type", "") in ("gemma4", "gemma4_unified"):
        on_sliding = clamp = getattr(text, "use_bidirectional_attention", None) == "vision"
    causal = getattr(text, "is_causal", True) is not False
    if kind == "full_attention":
        return LayerMask(Mask(causal=causal), on_full)
    if kind == "sliding_attention":
        if window is None:
            raise ValueError(f"layer {layer_idx} is a sliding_attention layer, but the config has no sliding_window")
        if not causal:
            return LayerMask(Mask(causal=False, window_left=window, window_right=window), on_sliding)
        return LayerMask(Mask.sliding_window(window, mm_prefix_clamp=on_sliding and clamp), on_sliding)
    if kind == "chunked_attention":
        if chunk is None:
            raise ValueError(
                f"layer {layer_idx} is a chunked_attention layer, but the config has no attention_chunk_size"
            )
        return LayerMask(Mask.chunked(chunk), False)
    raise ValueError(f"layer {layer_idx} is of kind {kind!r}, which has no attention mask here")
