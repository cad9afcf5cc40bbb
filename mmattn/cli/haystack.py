"""The haystack of `niah`: images and text, and questions whose answers stand at the edges of what a mask allows.

A question is one row whose query points at a few keys. Each of them carries a code in its value, so that the output of
the row tells with which weight each key was read: a key that the mask allows must be read (a needle), one that it
forbids must not (a decoy). Which is which comes from `Mask.visible` alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..mask import Mask

STRENGTH = 30.0
"""Logit of a needle. All other keys together stay below `ln(keys) + 1`, which is 13 for 147,456 keys."""


@dataclass
class Haystack:
    """Positions only; `Planted` has the tensors."""

    length: int
    window: int
    spans: list[tuple[int, int]] = field(default_factory=list)
    """Inclusive."""
    questions: dict[int, dict[int, str]] = field(default_factory=dict)
    """Row -> key -> what stands there, in words."""

    @classmethod
    def build(cls, length: int, window: int, chunks: list[int]) -> Haystack:
        """Lays out images and questions for a window of `window` keys. Raises `ValueError` if `length` is too small."""
        hay = cls(length, window)
        small, gap, big = window // 4 + 6, window // 8 + 5, window + window // 8 + 3
        early = hay._image(16, small)
        twin_a = hay._image(early[1] + 1 + gap, small)
        twin_b = hay._image(twin_a[1] + 1, small)
        large = hay._image(twin_b[1] + 1 + 2 * gap, big)
        plain = large[1] + 1 + 2 * window + gap  # a row of text that no image is near
        least = plain + 3 * window
        if length < least:
            raise ValueError(f"a window of {window} needs a context of at least {least} tokens, got {length}")
        at = plain + window + gap
        while at + small + gap < length - window - 20:
            hay._image(at, small)
            at += small + gap

        last, old = length - 1, window - 1
        hay._ask(
            early[0],
            {
                early[1]: "last token of the image, from its first",
                early[1] + 1: "first token behind the image",
                0: "the first token of all",
            },
        )
        hay._ask(early[1] + 1, {early[0]: "first token of the image just before"})
        hay._ask(
            twin_a[0],
            {
                twin_a[1]: "last token of the image, from its first",
                twin_b[0]: "first token of the touching image",
                twin_b[1]: "last token of the touching image",
            },
        )
        hay._ask(
            twin_b[1], {twin_b[0]: "first token of the image", twin_a[1]: "last token of the touching image before"}
        )
        hay._ask(large[0], {
            large[1]: "last token of an image longer than the window, from its first",
            large[0] - old: "oldest key of the window before an image",
            large[0] - window: "one key past the window before an image",
            large[1] + 1: "first token behind the long image",
        })  # fmt: skip
        middle = large[0] + big // 2
        hay._ask(
            middle,
            {
                large[0]: "first token of the long image, from its middle",
                large[1]: "last token of the long image, from its middle",
                early[0] + 1: "an earlier image",
            },
        )
        hay._ask(large[1], {
            large[0]: "first token of an image longer than the window, from its last",
            large[1] - old: "oldest key of the window inside an image",
            large[1] - window: "one key past the window inside an image",
            twin_b[1]: "an earlier image",
        })  # fmt: skip
        hay._ask(
            large[1] + 2,
            {
                large[0]: "first token of the long image, from the text behind it",
                large[1]: "last token of the image just before",
            },
        )
        hay._ask(plain, {
            plain - old: "oldest key of the window in plain text",
            plain - window: "one key past the window in plain text",
            plain + old: "newest key of a two-sided window",
            plain + window: "one key past a two-sided window",
            early[0] + 2: "an image long ago",
        })  # fmt: skip
        hay._ask(
            last - 15,
            {
                last: "last token, from 15 before it",
                last - 15 - old: "oldest key of the window, from 15 before the end",
            },
        )
        hay._ask(
            last,
            {
                last - old: "oldest key of the window, from the last row",
                last - window: "one key past the window, from the last row",
                2: "a token at the very start",
                last: "the last row itself",
            },
        )
        for chunk in chunks:
            split = next(
                (
                    s
                    for s in hay.spans
                    if 0 < chunk < length and s[0] // chunk != s[1] // chunk and s[0] not in hay.questions
                ),
                None,
            )
            if split is not None:
                hay._ask(split[0], {split[1]: "last token of an image that a chunk border splits, from its first"})
                hay._ask(split[1], {split[0]: "first token of an image that a chunk border splits, from its last"})
        return hay

    def _image(self, start: int, tokens: int) -> tuple[int, int]:
        self.spans.append((start, start + tokens - 1))
        return self.spans[-1]

    def _ask(self, row: int, keys: dict[int, str]) -> None:
        self.questions.setdefault(row, {}).update({k: text for k, text in keys.items() if 0 <= k < self.length})

    def expected(self, mask: Mask, spans: list[tuple[int, int]], row: int, kv_len: int) -> dict[int, bool]:
        """Which keys of a question the row must read, when `kv_len` keys have been written."""
        keys = list(self.questions[row])
        seen = mask.visible(row, torch.tensor(keys), spans=spans).tolist()
        return {key: yes and key < kv_len for key, yes in zip(keys, seen)}


class Planted:
    """A haystack as tensors: k, v `[length, heads_kv, head_dim]`, and the rows of q as they are asked for.

    Every KV head has its own directions and codes, so that reading another head's needle counts as losing it.
    """

    def __init__(
        self,
        hay: Haystack,
        heads: int,
        heads_kv: int,
        head_dim: int,
        device: torch.device,
        dtype: torch.dtype,
        seed: int,
    ) -> None:
        if len(hay.questions) > head_dim:
            raise ValueError(
                f"{len(hay.questions)} questions need a head dim of at least {len(hay.questions)}, got {head_dim}"
            )
        random = torch.Generator().manual_seed(seed)
        self.hay, self.heads, self.heads_kv, self.device, self.dtype, self.seed = (
            hay,
            heads,
            heads_kv,
            device,
            dtype,
            seed,
        )
        self.rows = sorted(hay.questions)
        # Orthonormal, so that a question does not disturb another's: [heads_kv, questions, head_dim].
        self.directions = torch.stack(
            [torch.linalg.qr(torch.randn(head_dim, len(self.rows), generator=random)).Q.T for _ in range(heads_kv)]
        )
        keys = sorted({key for asked in hay.questions.values() for key in asked})
        codes = {key: torch.randint(0, 2, (heads_kv, head_dim), generator=random).float() * 2 - 1 for key in keys}
        # Outputs times this are the weights of a question's keys: [heads_kv, head_dim, keys].
        self.readers = {
            row: torch.linalg.pinv(torch.stack([codes[key] for key in asked], 1))
            for row, asked in hay.questions.items()
        }
        shape = (hay.length, heads_kv, head_dim)
        on_device = torch.Generator(device).manual_seed(seed)
        self.k = torch.randn(shape, generator=on_device, device=device, dtype=dtype)
        self.v = torch.randn(shape, generator=on_device, device=device, dtype=dtype).mul_(0.1)
        for key in keys:
            asking = [i for i, row in enumerate(self.rows) if key in hay.questions[row]]
            self.k[key] = (STRENGTH * self.directions[:, asking].sum(1)).to(device, dtype)
            self.v[key] = codes[key].to(device, dtype)

    def queries(self, first: int, end: int) -> Tensor:
        """Rows `first..end` of q, `[end - first, heads, head_dim]`; the scale of `attention()` must be the default."""
        head_dim = self.directions.shape[-1]
        random = torch.Generator(self.device).manual_seed(self.seed + first)
        q = torch.randn((end - first, self.heads, head_dim), generator=random, device=self.device, dtype=self.dtype)
        for i, row in enumerate(self.rows):
            if first <= row < end:
                pointing = self.directions[:, i].repeat_interleave(self.heads // self.heads_kv, 0) * head_dim**0.5
                q[row - first] = pointing.to(self.device, self.dtype)
        return q

    def read(self, row: int, out: Tensor) -> dict[int, tuple[float, float]]:
        """The least and the greatest weight, over the heads, with which `out` `[heads, head_dim]` holds each key."""
        keys = list(self.hay.questions[row])
        weights = out.float().cpu().reshape(self.heads_kv, -1, out.shape[-1]) @ self.readers[row]
        return {key: (float(weights[..., i].min()), float(weights[..., i].max())) for i, key in enumerate(keys)}
