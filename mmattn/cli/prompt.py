"""The demo's prompt: two photographs between real text, as the q, k and v of an attention layer.

No trained weights: image patches and words go through fixed random projections, the same in every run.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from PIL import Image
from sklearn.datasets import load_iris, load_sample_image, load_wine
from torch import Tensor

HIDDEN = 512
PHOTOGRAPHS = ("china.jpg", "flower.jpg")

Grid = Callable[[int, int], tuple[int, int]]
"""Height and width of an image in pixels -> rows and columns of soft tokens."""


def gemma4_grid(soft_tokens: int) -> Grid:
    """Gemma 4 keeps the aspect ratio and fills at most `soft_tokens` tokens of 48 x 48 pixels (3 x 3 patches of 16)."""

    def grid(height: int, width: int) -> tuple[int, int]:
        side = math.sqrt(soft_tokens / (height * width))
        return max(1, math.floor(height * side)), max(1, math.floor(width * side))

    return grid


def gemma3_grid(height: int, width: int) -> tuple[int, int]:
    """Gemma 3 makes 16 x 16 tokens of any image."""
    return 16, 16


@dataclass
class Prompt:
    """Embedded tokens `[tokens, HIDDEN]`, float32 on the CPU, and the spans of the images among them."""

    tokens: Tensor
    spans: list[tuple[int, int]] = field(default_factory=list)
    """Inclusive."""
    layout: list[str] = field(default_factory=list)
    """What stands one after the other, in words."""

    def project(self, heads: int, heads_kv: int, head_dim: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
        """q `[1, S, heads, head_dim]` and k, v `[1, S, heads_kv, head_dim]`; q and k normalised, as Gemma does."""
        random = torch.Generator().manual_seed(seed)

        def projected(n: int) -> Tensor:
            weight = torch.randn(HIDDEN, n * head_dim, generator=random) / HIDDEN**0.5
            return (self.tokens @ weight).reshape(1, -1, n, head_dim)

        q, k, v = projected(heads), projected(heads_kv), projected(heads_kv)
        return _rms_norm(q), _rms_norm(k), v


def texts() -> list[str]:
    """What stands before, between and after the photographs."""
    return [
        "<bos> Here is what we know about two data sets. " + load_wine().DESCR + " <start_of_image>",
        "<end_of_image> That was a photograph from China. " + load_iris().DESCR + " <start_of_image>",
        "<end_of_image> That was a flower. Which of the two photographs shows a building, and what is in front of it?",
    ]


def photographs() -> list[Image.Image]:
    """`PHOTOGRAPHS`, 427 x 640 pixels, RGB."""
    return [Image.fromarray(load_sample_image(name)) for name in PHOTOGRAPHS]


def make_prompt(grid: Grid, patch: int) -> Prompt:
    """text + china.jpg + text + flower.jpg + text; a soft token of an image covers `patch` x `patch` pixels."""
    images = photographs()
    pieces, spans, layout, at = [], [], [], 0
    for i, text in enumerate(texts()):
        pieces.append(_embed_words(text.split()))
        layout.append(f"{len(pieces[-1])} words")
        at += len(pieces[-1])
        if i < len(images):
            photograph = images[i]
            rows, columns = grid(photograph.height, photograph.width)
            pieces.append(_embed_patches(photograph.resize((columns * patch, rows * patch)), patch))
            layout.append(f"{PHOTOGRAPHS[i]} {rows} x {columns}")
            spans.append((at, at + rows * columns - 1))
            at += rows * columns
    return Prompt(torch.cat(pieces), spans, layout)


def _rms_norm(x: Tensor) -> Tensor:
    return torch.nn.functional.rms_norm(x, x.shape[-1:])


def _embed_words(words: list[str]) -> Tensor:
    table = {
        word: torch.randn(HIDDEN, generator=torch.Generator().manual_seed(zlib.crc32(word.encode())))
        for word in set(words)
    }
    return torch.stack([table[word] for word in words])


def _embed_patches(image: Image.Image, patch: int) -> Tensor:
    pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).float() / 127.5 - 1
    pixels = pixels.reshape(image.height // patch, patch, image.width // patch, patch * 3)
    flat = pixels.transpose(1, 2).reshape(-1, patch * patch * 3)
    weight = torch.randn(flat.shape[1], HIDDEN, generator=torch.Generator().manual_seed(flat.shape[1]))
    return _rms_norm(flat @ weight)
