"""Greedy speculative decoding with a transformers causal LM as target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .drafter import Drafter


class HiddenTaps:
    """Records hidden states of a transformers decoder: 0 is the embedding, i the residual stream after i layers.

    `output_hidden_states` would do for all but the last: transformers puts the final norm on that one.
    """

    def __init__(self, target: Any, ids: Sequence[int]) -> None:
        layers = getattr(target.get_decoder(), "layers", None)
        if layers is None:
            raise ValueError(f"the decoder of {type(target).__name__} has no .layers to read hidden states from")
        if max(ids) > len(layers):
            raise ValueError(f"hidden state {max(ids)} was asked for, but the target has {len(layers)} layers")
        self.ids = tuple(ids)
        self._seen: dict[int, Tensor] = {}
        self._handles = [self._tap(layers, i) for i in dict.fromkeys(ids)]

    def _tap(self, layers: Any, i: int) -> Any:
        if i == 0:

            def before(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                self._seen[0] = args[0] if args else kwargs["hidden_states"]

            return layers[0].register_forward_pre_hook(before, with_kwargs=True)

        def after(module: Any, args: tuple[Any, ...], output: Any) -> None:
            self._seen[i] = output if isinstance(output, Tensor) else output[0]

        return layers[i - 1].register_forward_hook(after)

    def read(self) -> Tensor:
        """What the last forward went through, `[B, S, len(ids) x hidden]`; forgets it."""
        hidden = torch.cat([self._seen[i] for i in self.ids], dim=-1)
        self._seen.clear()
        return hidden

    def __enter__(self) -> HiddenTaps:
        return self

    def __exit__(self, *_: Any) -> None:
        for handle in self._handles:
            handle.remove()


class _TargetCache:
    """The target's KV cache, in which sequences advance by different numbers of tokens.

    Kept right-aligned, as if left-padded: after a verification each sequence drops its own number of rejected rows and
    is shifted to end in the last slot. Slots of one sequence stay contiguous, so that windows over slots are windows
    over positions; keys carry their RoPE with them, so nothing else changes.
    """

    def __init__(self, target: Any, lengths: list[int], slots: int) -> None:
        from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

        self.cache: Any = DynamicCache(config=target.config)
        for i, layer in enumerate(self.cache.layers):
            if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
                raise ValueError(
                    f"layer {i} of {type(target).__name__} keeps its state in a {type(layer).__name__}, "
                    "which cannot drop rejected tokens"
                )
        self.cache.activate_past_recording()  # sliding layers keep what lies behind the window until the crop below
        self.lengths, self._slots, self._device = lengths, slots, target.device

    def inputs(self, rows: int) -> dict[str, Any]:
        """The arguments of a forward over `rows` new tokens per sequence."""
        lengths = torch.tensor(self.lengths, device=self._device)[:, None]
        slot = torch.arange(self._slots + rows, device=self._device)
        return {
            "attention_mask": (slot >= self._slots - lengths).long(),
            "position_ids": lengths + torch.arange(rows, device=self._device),
            "past_key_values": self.cache,
            "use_cache": True,
        }

    def keep(self, rows: int, counts: list[int]) -> None:
        """After a forward over `rows` tokens: keeps the first `counts[b]` of each sequence."""
        rejected = [rows - n for n in counts]
        common = min(rejected)
        shift = torch.tensor(rejected, device=self._device) - common
        if max(rejected) > common:
            for layer in self.cache.layers:
                if layer.is_initialized:
                    layer.keys, layer.values = (_shift_right(x, shift) for x in (layer.keys, layer.values))
        self.cache.crop(-common)
        self._slots += rows - common
        self.lengths = [length + n for length, n in zip(self.lengths, counts)]


def _shift_right(x: Tensor, shift: Tensor) -> Tensor:
    """Moves the slots of `[B, heads, slots, D]` right by `shift[b]`; what enters on the left is never seen."""
    index = (torch.arange(x.shape[2], device=x.device) - shift[:, None]).clamp(min=0)
    return x.gather(2, index[:, None, :, None].expand_as(x))


@dataclass
class Generation:
    """What `generate` returns."""

    sequences: Tensor
    """`[B, prompt + new]`, the prompt and the new tokens, as transformers' `generate` returns them."""
    kept: list[list[int]] = field(default_factory=list)
    """Per sequence: how many tokens each verification pass added to the output."""

    @property
    def acceptance_length(self) -> float:
        """Mean tokens per verification pass and sequence: 1 without any accepted draft, at most 1 + N."""
        passes = [n for kept in self.kept for n in kept]
        return sum(passes) / len(passes) if passes else 0.0

    @property
    def passes(self) -> int:
        """Forwards of the target after the prompt's."""
        return max((len(kept) for kept in self.kept), default=0)


def _stop_ids(target: Any, eos_token_id: int | Sequence[int] | None) -> list[int]:
    if eos_token_id is None:
        eos_token_id = target.generation_config.eos_token_id
    if eos_token_id is None:
        return []
    return [eos_token_id] if isinstance(eos_token_id, int) else list(eos_token_id)


@torch.no_grad()
def generate(
    target: Any,
    drafter: Drafter,
    input_ids: Tensor,
    *,
    attention_mask: Tensor | None = None,
    max_new_tokens: int = 128,
    eos_token_id: int | Sequence[int] | None = None,
    pad_token_id: int | None = None,
    draft_tokens: int | None = None,
    cache: str = "paged",
    page_size: int = 16,
    backend: str = "auto",
    draft: Any = None,
) -> Generation:
    """Greedy decoding of `target`, several tokens per forward: the output is the target's own, token for token.

    Each pass drafts N tokens, runs the target once over the bonus token and the drafts, keeps the longest run of drafts
    that the target would have chosen itself and the target's token after it, and drops the rest from both caches.

    Args:
        target: a transformers causal LM whose layers keep K and V (`get_decoder().layers`), in eval mode.
        drafter: made for it.
        input_ids: `[B, S]`, left-padded where prompts differ in length.
        attention_mask: `[B, S]`, 0 on the padding.
        max_new_tokens: per sequence.
        eos_token_id: one or several; default the target's. A sequence ends with its first one.
        pad_token_id: fills ended sequences; default the target's, else its first eos.
        draft_tokens: N; default, and at most, `block_size - 1`.
        cache, page_size: the drafter's cache, "paged" or "contiguous".
        backend: of `mmattn.attention` in the drafter.
        draft: instead of `drafter.draft`, a function of (bonus `[B]`, cache) that returns tokens `[B, N]`, such as a
            captured CUDA graph of it. Whatever it returns, the output stays the target's.

    Raises:
        ValueError: the drafter does not fit the target, or an argument does not; both values are named.
    """
    drafter.attach(target)
    if input_ids.dim() != 2 or 0 in input_ids.shape:
        raise ValueError(f"input_ids must be [B, S] with at least one token, got {list(input_ids.shape)}")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be >= 1, got {max_new_tokens}")
    most = drafter.config.draft_tokens
    n = most if draft_tokens is None else draft_tokens
    if not 1 <= n <= most:
        raise ValueError(f"draft_tokens must lie in 1..{most} (block_size {most + 1}), got {n}")
    batch, width = input_ids.shape
    lengths, pads = _prompt_lengths(input_ids, attention_mask)
    stop = _stop_ids(target, eos_token_id)
    if pad_token_id is None:
        pad_token_id = target.generation_config.pad_token_id
    pad = pad_token_id if pad_token_id is not None else stop[0] if stop else 0

    draft_cache = drafter.new_cache(batch, max(lengths) + max_new_tokens, kind=cache, page_size=page_size)
    target_cache = _TargetCache(target, [-p for p in pads], 0)
    new: list[list[int]] = [[] for _ in range(batch)]
    kept: list[list[int]] = [[] for _ in range(batch)]
    done = [False] * batch

    def take(b: int, tokens: list[int]) -> int:
        """Adds tokens of the target up to the sequence's end; returns how many."""
        room = max_new_tokens - len(new[b])
        tokens = tokens[:room]
        ends = [i for i, token in enumerate(tokens) if token in stop]
        if ends:
            tokens = tokens[: ends[0] + 1]
        new[b] += tokens
        done[b] = bool(ends) or len(new[b]) == max_new_tokens
        return len(tokens)

    with HiddenTaps(target, drafter.config.target_hidden_ids) as taps:
        inputs = target_cache.inputs(width)
        inputs["position_ids"] = inputs["position_ids"].clamp(min=0)  # padding has no position
        logits = target(input_ids, logits_to_keep=1, **inputs).logits
        target_cache.keep(width, [width] * batch)
        hidden = taps.read()
        if any(pads):
            first = torch.tensor(pads, device=hidden.device)[:, None]
            at = (first + torch.arange(width, device=hidden.device)).clamp(max=width - 1)
            hidden = hidden.gather(1, at[:, :, None].expand_as(hidden))
        drafter.extend(hidden, lengths, draft_cache)
        bonus = logits[:, -1].argmax(-1)
        for b, token in enumerate(bonus.tolist()):
            take(b, [token])

        while not all(done):
            if draft is None:
                drafts = drafter.draft(bonus, draft_cache, draft_tokens=n, backend=backend)
            else:
                drafts = draft(bonus, draft_cache)
            block = torch.cat([bonus[:, None], drafts], dim=1)
            picks = target(block, **target_cache.inputs(block.shape[1])).logits.argmax(-1)
            agreed = (picks[:, :-1] == drafts).cumprod(1).sum(1)
            bonus = picks.gather(1, agreed[:, None])[:, 0]
            counts = []
            for b, (a, *chosen) in enumerate(torch.cat([agreed[:, None], picks], dim=1).tolist()):
                if not done[b]:
                    kept[b].append(take(b, chosen[: a + 1]))
                # An ended sequence stays where it is until the others end.
                counts.append(0 if done[b] else a + 1)
            target_cache.keep(block.shape[1], counts)
            drafter.extend(taps.read(), counts, draft_cache)

    longest = max(map(len, new))
    tail = torch.tensor([tokens + [pad] * (longest - len(tokens)) for tokens in new], dtype=input_ids.dtype)
    return Generation(torch.cat([input_ids, tail.to(input_ids.device)], dim=1), kept)


def _prompt_lengths(input_ids: Tensor, attention_mask: Tensor | None) -> tuple[list[int], list[int]]:
    """Tokens and left padding of each prompt."""
    batch, width = input_ids.shape
    if attention_mask is None:
        return [width] * batch, [0] * batch
    if attention_mask.shape != input_ids.shape:
        raise ValueError(
            f"attention_mask must have input_ids' shape {list(input_ids.shape)}, got {list(attention_mask.shape)}"
        )
    rows = attention_mask.tolist()
    lengths = [sum(1 for x in row if x) for row in rows]
    for b, (row, length) in enumerate(zip(rows, lengths)):
        if not length or not all(row[width - length :]):
            raise ValueError(
                f"prompt {b} must be padded on the left only and hold a token; its attention_mask is {row}"
            )
    return lengths, [width - length for length in lengths]
