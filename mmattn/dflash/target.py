"""What speculative decoding asks of a transformers causal LM: its modules, its hidden states, a cache that drops rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class SharedModules:
    """The embedding and the head of a target, for drafters that have none of their own."""

    embedding: Any
    head: Any
    """A module, or the embedding's weight where the model ties the two and keeps no head."""
    softcap: float | None
    """The target's `final_logit_softcapping`."""

    @classmethod
    def of(cls, target: Any) -> SharedModules:
        text, embedding, head = target.config.get_text_config(), *_ends(target)
        if head is None and getattr(text, "tie_word_embeddings", False):
            head = embedding.weight
        return cls(embedding, head, getattr(text, "final_logit_softcapping", None))

    @property
    def hidden_size(self) -> int:
        return self.embedding.weight.shape[1]

    @property
    def embedding_scale(self) -> float:
        """What the embedding module itself multiplies its rows by: sqrt(hidden) in Gemma's, 1 in most."""
        held = getattr(self.embedding, "scalar_embed_scale", getattr(self.embedding, "embed_scale", 1.0))
        return float(held)

    def check_scale(self, configured: float | None) -> None:
        """Raises `ValueError` where a drafter's `input_embedding_scale` would apply the target's scale once more."""
        scale = self.embedding_scale
        if configured is not None and scale != 1 and abs(configured / scale - 1) < 0.01:
            raise ValueError(
                f"the drafter's input_embedding_scale is {configured:g}, but the target's embedding already scales its "
                f"rows by {scale:g}; remove the field, which is for engines that share the bare table"
            )

    def check_head(self, hidden: int) -> None:
        if self.head is None:
            raise ValueError("the target has no output embedding and ties none, and the drafter has no head of its own")
        weight = self.head if isinstance(self.head, Tensor) else self.head.weight
        if weight.shape[1] != hidden:
            raise ValueError(
                f"the drafter has hidden size {hidden} and no head of its own, but the target's takes {weight.shape[1]}"
            )

    def embed(self, ids: Tensor) -> Tensor:
        """Rows of the embedding as the target's layers get them.

        Without a norm that the embedding module may put on them (`embed_norm`, Inkling): drafters are trained without it,
        by transformers 5.23, `generation/candidate_generator.py`.
        """
        if hasattr(self.embedding, "embed_norm"):
            return F.embedding(ids, self.embedding.weight)
        return self.embedding(ids)

    def scores(self, hidden: Tensor) -> Tensor:
        """The head on `[..., hidden]`, without the soft cap."""
        if isinstance(self.head, Tensor):
            return F.linear(hidden.to(self.head.dtype), self.head)
        return self.head(hidden.to(self.head.weight.dtype))


def _ends(target: Any) -> tuple[Any, Any]:
    return target.get_input_embeddings(), target.get_output_embeddings()


class HiddenTaps:
    """Records hidden states of a transformers decoder: 0 is the embedding, i the residual stream after i layers.

    `output_hidden_states` would do for all but the last: transformers puts the final norm on that one.

    Args:
        target: a causal LM with `get_decoder().layers`.
        ids: which, in the order in which `read` concatenates them.
        final_norm: put the target's final norm on the state after the last layer, as transformers does.
    """

    def __init__(self, target: Any, ids: Sequence[int], *, final_norm: bool = False) -> None:
        decoder = target.get_decoder()
        layers = getattr(decoder, "layers", None)
        if layers is None:
            raise ValueError(f"the decoder of {type(target).__name__} has no .layers to read hidden states from")
        if max(ids) > len(layers):
            raise ValueError(f"hidden state {max(ids)} was asked for, but the target has {len(layers)} layers")
        self.ids = tuple(ids)
        self._seen: dict[int, Tensor] = {}
        normed = len(layers) if final_norm and len(layers) in self.ids else None
        norm = getattr(decoder, "norm", None)
        if normed is not None and norm is None:
            raise ValueError(f"the decoder of {type(target).__name__} has no .norm to put on its last hidden state")
        self._handles = [self._tap(norm if i == normed else layers[max(i - 1, 0)], i) for i in dict.fromkeys(ids)]

    def _tap(self, module: Any, i: int) -> Any:
        if i == 0:

            def before(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                self._seen[0] = args[0] if args else kwargs["hidden_states"]

            return module.register_forward_pre_hook(before, with_kwargs=True)

        def after(module: Any, args: tuple[Any, ...], output: Any) -> None:
            self._seen[i] = output if isinstance(output, Tensor) else output[0]

        return module.register_forward_hook(after)

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


class TargetCache:
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
