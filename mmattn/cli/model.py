"""The second part of the demo: a random Gemma 4 vision-language model, with eager attention and with mmattn's.

Needs transformers. No trained weights and no download: the photographs go through Gemma 4's own image processor, the
words get ids from their spelling, and the model must say the same nonsense with either attention.
"""

from __future__ import annotations

import time
import zlib
from dataclasses import dataclass
from typing import Any

import click
import torch
import transformers
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import Gemma4Config, Gemma4ForConditionalGeneration, Gemma4ImageProcessorPil

import mmattn
import mmattn.hf

from ..mask import Mask
from .common import BACKEND_NAMES, Ran, progress, synchronize
from .mask_memory import mask_allocations
from .prompt import PHOTOGRAPHS, photographs, texts

VOCABULARY, WORDS = 1024, 1000
"""All ids; ids 0 to 2 are padding, end and beginning, then come words, then from `WORDS` on images and their borders."""
IMAGE, IMAGE_BEGIN, IMAGE_END = WORDS, WORDS + 1, WORDS + 2
HEADS, HEADS_KV, HEAD_DIM, GLOBAL_HEAD_DIM = 4, 2, 64, 128
TOWER_HEADS = 2
NEW_TOKENS = 16
TOLERANCE = 1e-4
"""Largest difference of logits, as a part of the largest logit: another order of summation, and nothing more.

The model is chaotic, as random ones are. One key too few in every row changes logits by half of the largest one, and
bfloat16 by a fifth of it, which is why the model runs in float32 on every device.
"""


def tiny_gemma4(window: int) -> Any:
    """A Gemma 4 of four layers: sliding and global ones with head dims of their own, shared keys and values, an image tower."""
    text = dict(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=HEADS,
        num_key_value_heads=HEADS_KV, head_dim=HEAD_DIM, global_head_dim=GLOBAL_HEAD_DIM, sliding_window=window, num_kv_shared_layers=2,
        layer_types=["sliding_attention", "full_attention"] * 2,
        use_bidirectional_attention="vision", hidden_size_per_layer_input=32, vocab_size_per_layer_input=VOCABULARY,
        pad_token_id=0, eos_token_id=1, bos_token_id=2,
    )  # fmt: skip
    vision = dict(
        hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=TOWER_HEADS,
        num_key_value_heads=TOWER_HEADS, head_dim=HEAD_DIM, position_embedding_size=256,
    )  # fmt: skip
    config = Gemma4Config(
        text_config=text, vision_config=vision, audio_config=None, image_token_id=IMAGE, boi_token_id=IMAGE_BEGIN,
        eoi_token_id=IMAGE_END, video_token_id=WORDS + 3, audio_token_id=WORDS + 4, boa_token_id=WORDS + 5,
    )  # fmt: skip
    model: Any = Gemma4ForConditionalGeneration(config)
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("k_norm.weight"):
                # Gemma 4 does not scale its scores: at 1, each row of a random model would see little but one key.
                weight.fill_(0.35)
            elif weight.dim() >= 2:
                # Larger than at the start of training: else attention is flat, and no mask matters.
                weight.normal_(0, 1.5 * weight.shape[-1] ** -0.5, generator=random)
    model.generation_config.eos_token_id = None  # every run says as many tokens
    model.generation_config.pad_token_id = 0
    return model.eval()


def make_inputs(image_tokens: int) -> tuple[dict[str, Tensor], list[str]]:
    """The model's inputs, one prompt on the CPU, and what stands in it, in words."""
    processed = Gemma4ImageProcessorPil(max_soft_tokens=image_tokens)(photographs(), return_tensors="pt")
    counts = [int(n) for n in processed["num_soft_tokens_per_image"]]
    ids: list[int] = []
    layout = []
    for i, text in enumerate(texts()):
        words = [_word_id(word) for word in text.split()]
        ids += words
        layout.append(f"{len(words)} words")
        if i < len(counts):
            ids += [IMAGE] * counts[i]
            layout.append(f"{PHOTOGRAPHS[i]} {counts[i]} tokens")
    input_ids = torch.tensor([ids])
    inputs = {
        "input_ids": input_ids,
        "attention_mask": torch.ones_like(input_ids),
        "mm_token_type_ids": (input_ids == IMAGE).long(),
        "pixel_values": processed["pixel_values"],
        "image_position_ids": processed["image_position_ids"],
    }
    return inputs, layout


def _word_id(word: str) -> int:
    special = {"<bos>": 2, "<start_of_image>": IMAGE_BEGIN, "<end_of_image>": IMAGE_END}
    return special.get(word) or 3 + zlib.crc32(word.encode()) % (WORDS - 3)


@dataclass
class Answer:
    """What a model gives with one kind of attention, and what that took."""

    prompt: Tensor
    """Logits of every token of the prompt, `[tokens, VOCABULARY]`."""
    steps: Tensor
    """Logits that each new token was chosen by, `[NEW_TOKENS, VOCABULARY]`."""
    tokens: list[int]
    mask_bytes: int
    """The peak during the prefill and the generation."""
    prefill: float
    """Milliseconds, as for `generation`, which begins with a prefill too."""
    generation: float

    def agreement(self, other: Answer) -> tuple[float, int]:
        """Largest difference of logits, and how many new tokens are the same from the first one on.

        Once the tokens differ, so do the prompts of all further steps: their logits are not compared.
        """
        same = 0
        while same < NEW_TOKENS and self.tokens[same] == other.tokens[same]:
            same += 1
        pairs = [(self.prompt, other.prompt), (self.steps[: same + 1], other.steps[: same + 1])]
        difference = torch.cat([(a - b).abs().flatten() for a, b in pairs])
        return difference.max().item() if bool(difference.isfinite().all()) else float("inf"), same


@torch.no_grad()
def answer(model: Any, implementation: str, inputs: dict[str, Tensor]) -> Answer:
    """Runs the model twice: first to count the memory of its masks, then for the rest."""
    model.set_attn_implementation(implementation)

    def prefill() -> Any:
        return model(**inputs, use_cache=False).logits

    def generate() -> Any:
        return model.generate(
            **inputs, max_new_tokens=NEW_TOKENS, do_sample=False, output_logits=True, return_dict_in_generate=True
        )

    def timed(run: Any) -> tuple[Any, float]:
        synchronize(model.device)
        start = time.perf_counter()
        result = run()
        synchronize(model.device)
        return result, 1000 * (time.perf_counter() - start)

    with mask_allocations(implementation) as masks:  # counting takes time, and so do first calls: not in what is timed
        prefill()
        generate()
    prompt, prefill_time = timed(prefill)
    generated, generation_time = timed(generate)
    return Answer(
        prompt[0], torch.cat(generated.logits), generated.sequences[0, -NEW_TOKENS:].tolist(),
        masks.peak, prefill_time, generation_time,
    )  # fmt: skip


def reasons_against(window: int, device: torch.device) -> dict[str, list[str]]:
    """Backend -> why it cannot run the attention of `tiny_gemma4`: its image tower, its prefill, its steps."""
    against: dict[str, list[str]] = {name: [] for name in BACKEND_NAMES}
    sliding, full, tower = Mask.sliding_window(window, mm_prefix_clamp=True), Mask.causal_(), Mask()
    calls = [
        (tower, TOWER_HEADS, TOWER_HEADS, HEAD_DIM, 128),
        *((sliding, HEADS, HEADS_KV, HEAD_DIM, rows) for rows in (128, 1)),
        *((full, HEADS, HEADS_KV, GLOBAL_HEAD_DIM, rows) for rows in (128, 1)),
    ]
    for mask, heads, kv, dim, rows in calls:
        q = torch.empty(1, rows, heads, dim, device=device)
        k = torch.empty(1, 128, kv, dim, device=device)
        for name, reasons in mmattn.supported(q, k, k, mask).items():
            against[name] += [reason for reason in reasons if reason not in against[name]]
    return against


def show_model(console: Console, device: torch.device, window: int, image_tokens: int, ran: Ran) -> bool:
    """Prints how eager attention and mmattn compare, the latter on `auto` or on the backends that were asked for.

    Returns whether all agree.
    """
    # "auto" may give each layer another backend; one that is named must run them all.
    usable = ran.usable(reasons_against(window, device) if ran.wanted else {"auto": []}, "Gemma 4 model")
    if not usable:
        click.echo(f"The Gemma 4 model, in float32, does not run on {' or '.join(ran.wanted)}.")
        return True
    inputs, layout = make_inputs(image_tokens)
    length = inputs["input_ids"].shape[1]
    inputs = {name: x.to(device) for name, x in inputs.items()}
    model = tiny_gemma4(window).to(device)
    millions = sum(weight.numel() for weight in model.parameters()) / 1e6
    click.echo(
        f"Gemma 4, {model.config.text_config.num_hidden_layers} layers, {millions:.1f} million random weights, in transformers "
        f"{transformers.__version__}: {length} tokens = {' + '.join(layout)}"
    )
    click.echo(f"on {device} in float32, window {window}; then {NEW_TOKENS} new tokens, greedily\n")
    if length <= window:
        click.echo("The prompt fits into the window: sliding layers see all of it. A smaller --window shows more.\n")

    results = Table(
        "attention", "difference of logits / tolerance", "same tokens", "agrees", "prefill, ms", "generation, ms",
        "peak mask memory", title="The model with eager attention and with mmattn",
    )  # fmt: skip
    for column in (1, 2, 4, 5, 6):
        results.columns[column].justify = "right"

    def add(name: str, got: Answer, *compared: str) -> None:
        results.add_row(name, *compared, f"{got.prefill:.0f}", f"{got.generation:.0f}", _size(got.mask_bytes))

    right = True
    with progress(console, 1 + len(usable), "eager attention") as advance:
        eager = answer(model, "eager", inputs)
        add("eager", eager, "", "", "")
        largest = max(eager.prompt.abs().max().item(), eager.steps.abs().max().item())
        tolerance = TOLERANCE * largest
        for backend in usable:
            name = "mmattn" if backend == "auto" else f"mmattn on {backend}"
            advance(name)
            implementation = name.replace(" ", "_")
            mmattn.hf.register(implementation, backend=backend)
            got = answer(model, implementation, inputs)
            difference, same = got.agreement(eager)
            agrees = difference <= tolerance and same == NEW_TOKENS
            right = right and agrees
            add(
                name, got, f"{difference:.1e} / {tolerance:.1e}", f"{same} of {NEW_TOKENS}",
                "yes" if agrees else "[red]NO[/red]",
            )  # fmt: skip

    console.print(results)
    click.echo(f"Tolerance: {TOLERANCE:.0e} of the largest logit, {largest:.1f}; all tokens must be the same.")
    click.echo(
        "Mask memory: what transformers' mask functions and mmattn's tile tables allocate, scratch included, counted storage by "
        "storage until each one is freed."
    )
    if not right:
        console.print("[red]The model does not give the same with mmattn as with eager attention.[/red]")
    return right


def _size(size: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
