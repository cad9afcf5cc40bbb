"""Speculative decoding with a transformers causal LM as target: draft, verify, accept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .cache import DraftCache
from .drafter import Drafter
from .sampling import Sampling
from .target import HiddenTaps, TargetCache

Proposal = tuple[Tensor, Tensor | None]
"""Drafts `[B, N]` and the probabilities they were drawn by, `[B, N, vocabulary]`; None = they were not drawn."""


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


class Requests:
    """The new tokens of every sequence of a batch, and which sequences have ended."""

    def __init__(self, batch: int, max_new_tokens: int, stop: Sequence[int]) -> None:
        self.max_new_tokens, self.stop = max_new_tokens, frozenset(stop)
        self.new: list[list[int]] = [[] for _ in range(batch)]
        self.kept: list[list[int]] = [[] for _ in range(batch)]
        self.done = [False] * batch

    def take(self, b: int, tokens: list[int]) -> int:
        """Adds tokens of the target up to the sequence's end; returns how many."""
        tokens = tokens[: self.max_new_tokens - len(self.new[b])]
        ends = [i for i, token in enumerate(tokens) if token in self.stop]
        if ends:
            tokens = tokens[: ends[0] + 1]
        self.new[b] += tokens
        self.done[b] = bool(ends) or len(self.new[b]) == self.max_new_tokens
        return len(tokens)

    def take_pass(self, drafts: Tensor, taken: Tensor, following: Tensor) -> list[int]:
        """Adds what one verification accepted; returns how many rows of each block stay in the caches.

        Args:
            drafts, taken, following: `[B, N]` drafts, `[B]` how many of them the target takes, `[B]` its token after.
        """
        counts = []
        rows = torch.cat([taken[:, None], following[:, None], drafts], dim=1).tolist()  # one copy to the host
        for b, (n, after, *drafted) in enumerate(rows):
            if not self.done[b]:
                self.kept[b].append(self.take(b, [*drafted[:n], after]))
            # An ended sequence stays where it is until the others end.
            counts.append(0 if self.done[b] else n + 1)
        return counts

    def padded(self, pad: int) -> Tensor:
        longest = max(map(len, self.new))
        return torch.tensor([tokens + [pad] * (longest - len(tokens)) for tokens in self.new])


@dataclass
class Decoder:
    """A target and its drafter in the middle of decoding: both caches, and the last token of every sequence."""

    target: Any
    drafter: Drafter
    sampling: Sampling
    taps: HiddenTaps
    target_cache: TargetCache
    draft_cache: DraftCache
    bonus: Tensor = field(init=False)
    """`[B]`, chosen by the target, in neither cache yet."""

    def prefill(self, input_ids: Tensor, pads: list[int]) -> None:
        """Runs the left-padded prompts `[B, S]` through the target and their hidden states into the drafter's context."""
        batch, width = input_ids.shape
        inputs = self.target_cache.inputs(width)
        inputs["position_ids"] = inputs["position_ids"].clamp(min=0)  # padding has no position
        logits = self.target(input_ids, logits_to_keep=1, **inputs).logits
        self.target_cache.keep(width, [width] * batch)
        hidden = self.taps.read()
        if any(pads):
            first = torch.tensor(pads, device=hidden.device)[:, None]
            at = (first + torch.arange(width, device=hidden.device)).clamp(max=width - 1)
            hidden = hidden.gather(1, at[:, :, None].expand_as(hidden))
        self.drafter.extend(hidden, [width - p for p in pads], self.draft_cache)
        self.bonus = self.sampling.next(logits[:, -1])

    def propose(self, draft: Callable[..., Any]) -> Proposal:
        """Drafts of `draft`, a function of (bonus, cache)."""
        made = draft(self.bonus, self.draft_cache)
        return made if isinstance(made, tuple) else (made, None)

    def verify(self, drafts: Tensor) -> Tensor:
        """Scores of the target on the block of bonus token and drafts, `[B, 1 + N, vocabulary]`."""
        block = torch.cat([self.bonus[:, None], drafts], dim=1)
        return self.target(block, **self.target_cache.inputs(block.shape[1])).logits

    def advance(self, rows: int, counts: list[int], following: Tensor) -> None:
        """Keeps the first `counts[b]` of the block's rows in both caches; `following` is the next bonus token."""
        self.target_cache.keep(rows, counts)
        self.drafter.extend(self.taps.read(), counts, self.draft_cache)
        self.bonus = following


@torch.no_grad()
def generate(
    target: Any, drafter: Drafter, input_ids: Tensor, *, attention_mask: Tensor | None = None,
    max_new_tokens: int = 128, temperature: float = 0.0, top_p: float = 1.0, generator: torch.Generator | None = None,
    eos_token_id: int | Sequence[int] | None = None, pad_token_id: int | None = None, draft_tokens: int | None = None,
    cache: str = "paged", page_size: int = 16, backend: str = "auto", draft: Any = None,
) -> Generation:  # fmt: skip
    """Decoding of `target`, several tokens per forward: greedy, the output is the target's own, token for token; with a
    temperature, it is distributed as the target's own.

    Each pass drafts N tokens, runs the target once over the bonus token and the drafts, keeps the drafts that
    `Sampling.accept` takes and the target's token after them, and drops the rest from both caches.

    Args:
        target: a transformers causal LM whose layers keep K and V (`get_decoder().layers`), in eval mode.
        drafter: made for it.
        input_ids: `[B, S]`, left-padded where prompts differ in length.
        attention_mask: `[B, S]`, 0 on the padding.
        max_new_tokens: per sequence.
        temperature, top_p, generator: see `Sampling`; of the target's choice and of the drafts. Nothing else of the
            target's generation config (such as `top_k`) is applied.
        eos_token_id: one or several; default the target's. A sequence ends with its first one.
        pad_token_id: fills ended sequences; default the target's, else its first eos.
        draft_tokens: N; default, and at most, `block_size - 1`.
        cache, page_size: the drafter's cache, "paged" or "contiguous".
        backend: of `mmattn.attention` in the drafter.
        draft: instead of the drafter's own drafting, a function of (bonus `[B]`, cache) that returns tokens `[B, N]`, such
            as a captured CUDA graph of it, or `(tokens, probabilities)` where they were drawn, `[B, N, vocabulary]`.
            Whatever it returns, the output stays the target's.

    Raises:
        ValueError: the drafter does not fit the target, or an argument does not; both values are named.
    """
    drafter.attach(target)
    sampling = Sampling(temperature, top_p, generator)
    if input_ids.dim() != 2 or 0 in input_ids.shape:
        raise ValueError(f"input_ids must be [B, S] with at least one token, got {list(input_ids.shape)}")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be >= 1, got {max_new_tokens}")
    lengths, pads = _prompt_lengths(input_ids, attention_mask)
    own = _drafting(drafter, sampling, draft_tokens, backend)
    stop = _stop_ids(target, eos_token_id)
    requests = Requests(len(input_ids), max_new_tokens, stop)
    draft_cache = drafter.new_cache(len(input_ids), max(lengths) + max_new_tokens, kind=cache, page_size=page_size)
    target_cache = TargetCache(target, [-p for p in pads], 0)

    ids, final_norm = drafter.config.target_hidden_ids, drafter.config.target_final_norm
    with HiddenTaps(target, ids, final_norm=final_norm) as taps:
        decoder = Decoder(target, drafter, sampling, taps, target_cache, draft_cache)
        decoder.prefill(input_ids, pads)
        for b, token in enumerate(decoder.bonus.tolist()):
            requests.take(b, [token])
        while not all(requests.done):
            drafts, proposal = decoder.propose(draft or own)
            taken, following = sampling.accept(decoder.verify(drafts), drafts, proposal)
            counts = requests.take_pass(drafts, taken, following)
            decoder.advance(1 + drafts.shape[1], counts, following)

    new = requests.padded(_pad_id(target, pad_token_id, stop))
    return Generation(torch.cat([input_ids, new.to(input_ids)], dim=1), requests.kept)


def _drafting(
    drafter: Drafter, sampling: Sampling, draft_tokens: int | None, backend: str
) -> Callable[[Tensor, DraftCache], Any]:
    most = drafter.config.draft_tokens
    n = most if draft_tokens is None else draft_tokens
    if not 1 <= n <= most:
        raise ValueError(f"draft_tokens must lie in 1..{most} (block_size {most + 1}), got {n}")
    if sampling.greedy:
        return lambda bonus, cache: drafter.draft(bonus, cache, draft_tokens=n, backend=backend)
    return lambda bonus, cache: drafter.sample(bonus, cache, sampling, draft_tokens=n, backend=backend)


def _stop_ids(target: Any, eos_token_id: int | Sequence[int] | None) -> list[int]:
    if eos_token_id is None:
        eos_token_id = target.generation_config.eos_token_id
    if eos_token_id is None:
        return []
    return [eos_token_id] if isinstance(eos_token_id, int) else list(eos_token_id)


def _pad_id(target: Any, pad_token_id: int | None, stop: list[int]) -> int:
    if pad_token_id is None:
        pad_token_id = target.generation_config.pad_token_id
    return pad_token_id if pad_token_id is not None else stop[0] if stop else 0


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
