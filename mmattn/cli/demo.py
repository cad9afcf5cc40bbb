"""`python -m mmattn demo`: two photographs in a prompt, in attention layers of Gemma and in a whole model.

This file has the first part: four kinds of layers, every backend against the oracle. The model is in `model.py`.
"""

from __future__ import annotations

import re
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import mmattn

from ..draw import count_tiles, draw
from ..mask import Mask
from .common import Ran, common_options, open_console, pick_device, progress, synchronize

TILE = (128, 64)
"""Packed rows and keys: the tile of the kernels on Hopper for most head dims."""


@dataclass(frozen=True)
class Layer:
    """One kind of layer of a model: its mask, its shape, and whether its images see themselves both ways."""

    model: str
    kind: str
    mask: Mask
    spans: bool
    heads: int
    heads_kv: int
    head_dim: int

    @property
    def name(self) -> str:
        return f"{self.model} {self.kind}"

    def with_fewer_heads(self) -> Layer:
        """An eighth of the KV heads, with as many query heads to each."""
        kv = max(1, self.heads_kv // 8)
        return Layer(
            self.model, self.kind, self.mask, self.spans, kv * (self.heads // self.heads_kv), kv, self.head_dim
        )


def layers(window: int) -> list[Layer]:
    """The attention layers of Gemma 4 31B and Gemma 3 27B."""
    return [
        Layer("Gemma 4", "sliding", Mask.sliding_window(window, mm_prefix_clamp=True), True, 32, 16, 256),
        Layer("Gemma 4", "global", Mask.causal_(), False, 32, 4, 512),
        Layer("Gemma 3", "sliding", Mask.sliding_window(window), True, 32, 16, 128),
        Layer("Gemma 3", "global", Mask.causal_(), True, 32, 16, 128),
    ]


@dataclass
class Oracle:
    """What must come out, and how far from it a result may be.

    A backend may be off by twice the error of the dense computation in its own dtype, plus one rounding step of that
    dtype (as FlashAttention, FlexAttention and attention-gym judge their kernels).
    """

    out: Tensor
    lse: Tensor
    budget: float
    lse_budget: float

    @classmethod
    def compute(cls, q: Tensor, k: Tensor, v: Tensor, mask: Mask, **batch_args: Any) -> Oracle:
        exact = _dense(q, k, v, mask, torch.float64, batch_args)
        eager = _dense(q, k, v, mask, q.dtype, batch_args)
        step, lse_step = torch.finfo(q.dtype).eps, torch.finfo(torch.float32).eps
        budgets = [
            2 * _distance(a, b) + eps * b.abs().max().item() for a, b, eps in zip(eager, exact, (step, lse_step))
        ]
        return cls(*exact, *budgets)

    def errors(self, out: Tensor, lse: Tensor) -> tuple[float, float]:
        """Largest error of out and of lse; infinite where a result is not finite."""
        return _distance(out, self.out), _distance(lse, self.lse)


def _dense(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, dtype: torch.dtype, batch_args: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """The oracle one KV head at a time, so that memory holds the scores of one group only."""
    group = q.shape[2] // k.shape[2]
    outs, lses = [], []
    for h in range(k.shape[2]):
        out, lse = mmattn.reference(
            q[:, :, h * group : (h + 1) * group],
            k[:, :, h : h + 1],
            v[:, :, h : h + 1],
            mask,
            dtype=dtype,
            **batch_args,
        )
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs, 2), torch.cat(lses, 1)


def _distance(a: Tensor, b: Tensor) -> float:
    difference = (a.double() - b.double()).abs()
    return difference.max().item() if bool(difference.isfinite().all()) else float("inf")


def _time(run: Callable[[], Any], device: torch.device, repeats: int = 5) -> float:
    """Median milliseconds of a call that has run before."""
    times: list[float] = []
    for _ in range(repeats):
        synchronize(device)
        start = time.perf_counter()
        run()
        synchronize(device)
        times.append(1000 * (time.perf_counter() - start))
        if sum(times) > 500:  # a slow one, such as Triton's interpreter, is timed once
            break
    return statistics.median(times)


def _shape_text(layer: Layer) -> str:
    return f"{layer.heads}/{layer.heads_kv} x {layer.head_dim}"


def _describe(layer: Layer) -> str:
    """One line on the mask of a layer."""
    mask = layer.mask
    parts = ["causal" if mask.window_left is None else f"window of {mask.window_left + 1} keys"]
    parts.append(
        "image spans" + (" clamped to the window" if mask.mm_prefix_clamp else "") if layer.spans else "no spans"
    )
    return ", ".join(parts)


@click.command()
@common_options
@click.option(
    "--out",
    "folder",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("demo-output"),
    help="Where the pictures go.",
)
@click.option(
    "--image-tokens",
    type=click.Choice(["70", "140", "280", "560", "1120"]),
    default="280",
    help="Most tokens of an image in Gemma 4.",
)
@click.option(
    "--window", type=click.IntRange(min=1), default=1024, help="Keys that a sliding layer keeps, self included."
)
@click.option(
    "--full-heads/--fewer-heads",
    default=None,
    help="All heads of the models; default: on a GPU. Else an eighth.",
    show_default=False,
)
@click.option(
    "--layers/--no-layers", "with_layers", default=True, help="The first part: attention layers against the oracle."
)
@click.option(
    "--model/--no-model", "with_model", default=True, help="The second part: a Gemma 4 model in transformers."
)
def demo(
    folder: Path, image_tokens: str, window: int, full_heads: bool | None, with_layers: bool, with_model: bool,
    device: str | None, dtype: str | None, backends: tuple[str, ...],
) -> None:  # fmt: skip
    """Two photographs in a prompt: attention layers against the oracle, then a model against its eager attention.

    The prompt is text, china.jpg, text, flower.jpg, text.

    First part: every backend in a sliding and a global layer of Gemma 4 31B (window with clamped image spans; plain causal)
    and of Gemma 3 27B (window and causal, both with image spans), and a picture of each mask.

    Second part: a small Gemma 4 vision-language model of transformers with random weights sees the photographs and
    says what comes next, with eager attention and with mmattn, in float32. Shows that logits and tokens agree, the time,
    and the memory that the masks take.

    Exits with 1 if a backend disagrees.
    """
    missing = [
        package for module, package in (("PIL", "Pillow"), ("sklearn", "scikit-learn")) if find_spec(module) is None
    ]
    if missing:
        raise click.ClickException(f"the demo needs {' and '.join(missing)}: pip install 'mmattn[demo]'")
    if not (with_layers or with_model):
        raise click.UsageError("--no-layers and --no-model leave nothing to run")
    console = open_console()
    place, number = pick_device(device, dtype)
    ran, right = Ran(backends), True
    if with_layers:
        right = show_layers(console, place, number, window, int(image_tokens), full_heads, folder, ran)
    if with_model:
        if with_layers:
            click.echo()
        try:
            from .model import show_model
        except ImportError as error:
            if error.name != "transformers":
                raise
            text = f"the model needs transformers 5.10 or newer: pip install 'mmattn[demo,hf]' ({error})"
            if not with_layers:
                raise click.ClickException(text) from error
            click.echo(f"The second part did not run: {text}")
        else:
            right = show_model(console, place, window, int(image_tokens), ran) and right
    ran.report()
    if not right:
        sys.exit(1)


def show_layers(
    console: Console,
    place: torch.device,
    number: torch.dtype,
    window: int,
    image_tokens: int,
    full_heads: bool | None,
    folder: Path,
    ran: Ran,
) -> bool:
    """Prints how every usable backend compares with the oracle, and saves the pictures; returns whether all agree."""
    from .prompt import gemma3_grid, gemma4_grid, make_prompt

    prompts = {"Gemma 4": make_prompt(gemma4_grid(image_tokens), 48), "Gemma 3": make_prompt(gemma3_grid, 56)}
    full_heads = place.type == "cuda" if full_heads is None else full_heads
    work = [layer if full_heads else layer.with_fewer_heads() for layer in layers(window)]
    for model, prompt in prompts.items():
        click.echo(f"{model}: {len(prompt.tokens)} tokens = {' + '.join(prompt.layout)}")
    heads = "all heads" if full_heads else "an eighth of the heads (--full-heads for all)"
    click.echo(f"on {place} in {str(number).removeprefix('torch.')}, window {window}, {heads}\n")

    masks = Table(
        "layer",
        "heads x dim",
        "images",
        "visible pairs",
        "of all",
        "touched",
        "full",
        "partial",
        "skipped",
        title="Masks and tiles",
    )
    results = Table(
        "layer",
        "backend",
        "error of out / budget",
        "of lse / budget",
        "agrees",
        "ms",
        title="Largest absolute error, against the oracle",
    )
    for column in range(3, 9):
        masks.columns[column].justify = "right"
    for column in (2, 3, 5):
        results.columns[column].justify = "right"
    wrong = 0
    with progress(console, 3 * len(work), "starting") as advance:
        for seed, layer in enumerate(work):
            advance(f"{layer.name}: oracle")
            prompt = prompts[layer.model]
            q, k, v = (x.to(place, number) for x in prompt.project(layer.heads, layer.heads_kv, layer.head_dim, seed))
            spans = [prompt.spans] if layer.spans else [[]]
            oracle = Oracle.compute(q, k, v, layer.mask, mm_prefix_range=spans)
            plan = mmattn.plan(layer.mask, q=q, k=k, mm_prefix_range=spans)
            group = layer.heads // layer.heads_kv
            pairs = int((plan.rows[:, 1] - plan.rows[:, 0]).sum())
            tiles = count_tiles(plan, TILE[0], group, TILE[1])
            masks.add_row(
                layer.name, _shape_text(layer), "both ways" if layer.spans else "causal", f"{pairs:,}",
                f"{pairs / q.shape[1] ** 2:.0%}", *map(str, (tiles.touched, *tiles)),
            )  # fmt: skip

            advance(f"{layer.name}: backends")
            for name in ran.usable(mmattn.supported(q, k, v, plan), layer.name):
                run = partial(mmattn.attention, q, k, v, plan, backend=name, return_lse=True)
                out, lse = run()
                error, lse_error = oracle.errors(out, lse)
                agrees = error <= oracle.budget and lse_error <= oracle.lse_budget
                wrong += not agrees
                ms = _time(run, place)
                results.add_row(
                    layer.name, name, f"{error:.1e} / {oracle.budget:.1e}", f"{lse_error:.1e} / {oracle.lse_budget:.1e}",
                    "yes" if agrees else "[red]NO[/red]", f"{ms:.1f}",
                )  # fmt: skip

            advance(f"{layer.name}: picture")
            folder.mkdir(parents=True, exist_ok=True)
            picture = draw(plan, tile=TILE, group=group, title=f"{layer.name}: {_describe(layer)}", as_text=False)
            assert not isinstance(picture, str)
            picture.save(folder / (re.sub(r"\W+", "-", layer.name.lower()) + ".png"))

    console.print(masks)
    click.echo(f"A tile is {TILE[0]} packed rows x {TILE[1]} keys.\n")
    console.print(results)
    click.echo(f"\nPictures of the masks: {folder}/*.png")
    if wrong:
        console.print(f"[red]{wrong} results are farther from the oracle than their budget.[/red]")
    return not wrong
