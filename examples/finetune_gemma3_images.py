"""Fine-tunes Gemma 3 on pictures with mmattn: in which corner is the square?

    python examples/finetune_gemma3_images.py                                       # a tiny random model, on any machine
    python examples/finetune_gemma3_images.py --model google/gemma-3-4b-it --steps 30    # on a GPU, bfloat16

The image tokens see each other in both directions, in training too. Ends with exit code 1 if the loss did not go down.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

if missing := [name for name in ("click", "rich", "transformers", "PIL") if find_spec(name) is None]:
    sys.exit(f"this example needs {', '.join(missing)}: pip install 'mmattn[hf,demo]'")

import click
import torch
from PIL import Image, ImageDraw
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor
from transformers import AutoProcessor, Gemma3Config, Gemma3ForConditionalGeneration

import mmattn.hf

CORNERS = ["top left", "top right", "bottom left", "bottom right"]
QUESTION = "In which corner is the square?"
Batches = Callable[[list[int]], dict[str, Tensor]]
"""Corners -> the model's inputs with labels."""


def tiny_model() -> tuple[Any, Batches]:
    """A random Gemma 3 that learns from scratch. Images have 32 x 32 pixels and 16 tokens, twice its sliding window."""
    tokens, begin, image, end, question, answer = 16, 3, 4, 5, 6, 7  # one id a word; the answers are 7 to 10
    text = dict(
        vocab_size=16, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, query_pre_attn_scalar=16, sliding_window=8,
        layer_types=["sliding_attention", "full_attention"], attention_dropout=0.0,
    )  # fmt: skip
    vision = dict(
        model_type="siglip_vision_model", hidden_size=32, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=2, image_size=32, patch_size=4, vision_use_head=False,
    )  # fmt: skip
    config = Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=tokens, image_token_index=image,
        boi_token_index=begin, eoi_token_index=end,
    )  # fmt: skip
    config._attn_implementation = "mmattn"
    model: Any = Gemma3ForConditionalGeneration(config)
    torch.nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight, std=32**-0.5)  # zeros at first

    def batches(corners: list[int]) -> dict[str, Tensor]:
        pixels = -torch.ones(len(corners), 3, 32, 32)
        for picture, corner in zip(pixels, corners):
            x, y = (16 * side + int(torch.randint(0, 9, ())) for side in (corner % 2, corner // 2))
            picture[:, y : y + 8, x : x + 8] = 1
        prompt = torch.tensor([2, begin, *[image] * tokens, end, question])
        ids = torch.cat([prompt.expand(len(corners), -1), torch.tensor(corners)[:, None] + answer], 1)
        labels = torch.full_like(ids, -100)
        labels[:, -1] = ids[:, -1]
        return {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "token_type_ids": (ids == image).long(),
            "pixel_values": pixels,
            "labels": labels,
        }

    return model, batches


def pretrained(name: str) -> tuple[Any, Batches]:
    """A trained Gemma 3 in bfloat16, and batches made by its own processor."""
    processor = AutoProcessor.from_pretrained(name)
    model = Gemma3ForConditionalGeneration.from_pretrained(name, dtype=torch.bfloat16, attn_implementation="mmattn")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.model.vision_tower.requires_grad_(False)

    def batches(corners: list[int]) -> dict[str, Tensor]:
        images = []
        for corner in corners:
            x, y = (448 * side + int(torch.randint(0, 225, ())) for side in (corner % 2, corner // 2))
            images.append([Image.new("RGB", (896, 896), "navy")])
            ImageDraw.Draw(images[-1][0]).rectangle((x, y, x + 223, y + 223), fill="white")
        question = [{"type": "image"}, {"type": "text", "text": QUESTION}]
        prompt = processor.apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True)
        prompt = prompt.removeprefix(processor.tokenizer.bos_token)  # the processor puts one in front
        texts = [f"{prompt}{CORNERS[corner]}<end_of_turn>" for corner in corners]
        inputs = processor(text=texts, images=images, return_tensors="pt", padding=True, padding_side="right")
        length = processor(text=[prompt], images=images[:1], return_tensors="pt")["input_ids"].shape[1]
        labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
        labels[:, :length] = -100  # only the answer is learned
        return {**inputs, "labels": labels}

    return model, batches


@click.command()
@click.option("--model", "name", help="A Gemma 3 with images, by name or path; default: a tiny random one.")
@click.option("--steps", type=click.IntRange(2), default=60, show_default=True)
@click.option("--batch", type=click.IntRange(1), default=8, show_default=True, help="Pictures a step.")
@click.option(
    "--lr", type=click.FloatRange(0, min_open=True), help="Learning rate; default: 2e-3 for the tiny model, else 1e-5."
)
@click.option("--device", help="Default: cuda where there is a GPU, else cpu.")
@click.option("--seed", type=int, default=0, show_default=True)
def main(name: str | None, steps: int, batch: int, lr: float | None, device: str | None, seed: int) -> None:
    """Fine-tunes Gemma 3 to name the corner of a square."""
    try:
        on = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.zeros(1, device=on)
    except (RuntimeError, AssertionError) as error:
        raise click.BadParameter(
            f"torch cannot use it: {error}; --device cpu runs everywhere", param_hint="--device"
        ) from None
    if name and on.type == "cpu":
        raise click.UsageError("--model needs a GPU; leave it out to train the tiny model on a CPU")
    torch.manual_seed(seed)
    mmattn.hf.register()
    try:
        model, batches = pretrained(name) if name else tiny_model()
    except (OSError, ImportError) as error:
        raise click.ClickException(f"cannot load {name}: {error}") from None
    model.to(on).train()
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=lr or (1e-5 if name else 2e-3), weight_decay=0.0)

    losses: list[float] = []
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns) as progress:
        task = progress.add_task("training", total=steps)
        for _ in range(steps):
            corners = [i % 4 for i in torch.randperm(max(batch, 4))[:batch].tolist()]
            inputs = {k: x.to(on, model.dtype if x.is_floating_point() else None) for k, x in batches(corners).items()}
            loss = model(**inputs, use_cache=False).loss
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            losses.append(loss.item())
            progress.update(task, advance=1, description=f"loss {losses[-1]:.3f}")

    part = max(1, steps // 4)
    first, last = (sum(x) / part for x in (losses[:part], losses[-part:]))
    verdict = f"the loss went from {first:.3f} to {last:.3f} (means of the first and the last {part} of {steps} steps)"
    if not last < first:
        raise click.ClickException(f"{verdict}: it did not go down; try more --steps or another --lr")
    click.echo(f"{verdict}: it went down")


if __name__ == "__main__":
    main()
