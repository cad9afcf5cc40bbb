"""`python -m bench.hf`: a prefill step of a Gemma 4 model in transformers, with mmattn and with transformers' own attentions.

The attention shapes of Gemma-4 31B (google/gemma-4-31B-it config.json: window 1024 and 32/16 heads of 256 on sliding
layers, 32/4 heads of 512 on full ones), one layer of each, random weights, images of 280 tokens. The vision tower is left
out: embeddings and token types go in. Every implementation first has to agree with eager float32 at `--check` tokens; one
that cannot run prints its reason. A row holds

    implementation, tokens   what ran; or `reason`, why it could not
    error, eager_error       RMS of the hidden states against eager in float32, relative, at `check` tokens; of eager in bf16
    ms, spread, samples      median time of a step, masks included
    mask_ms                  median time to build the masks of the step alone
    peak_mib, mask_mib       most memory above the weights and inputs, during a step and while its masks are built
    device, gpu, driver, versions, commit, date
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from .run import environment, reason
from .timing import summary, sync

IMPLEMENTATIONS = ("mmattn", "mmattn-triton", "sdpa", "flex_attention", "eager")
IMAGE, GAP = 280, 232
"""Tokens of an image and of the text before it: one image in every 512 tokens."""

Row = dict[str, Any]


def gemma4(dtype: torch.dtype, device: torch.device, small: bool) -> Any:
    """A two-layer model with random weights."""
    import transformers

    shrink = 8 if small else 1
    options: dict[str, Any] = dict(
        vocab_size=1024, hidden_size=5376 // shrink, intermediate_size=21504 // shrink, num_hidden_layers=2,
        num_attention_heads=32 // shrink, num_key_value_heads=16 // shrink, num_global_key_value_heads=max(4 // shrink, 1),
        head_dim=256 // shrink, global_head_dim=512 // shrink, attention_k_eq_v=True, sliding_window=1024 // shrink,
        layer_types=["sliding_attention", "full_attention"], use_bidirectional_attention="vision",
        hidden_size_per_layer_input=0, vocab_size_per_layer_input=1024, max_position_embeddings=262144,
    )  # fmt: skip
    text = transformers.Gemma4TextConfig(**options)
    vision = transformers.Gemma4VisionConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1
    )
    config = transformers.Gemma4Config(
        text_config=text, vision_config=vision, audio_config=None, image_token_id=1000, video_token_id=1001,
        audio_token_id=1002, boi_token_id=1003, eoi_token_id=1004, boa_token_id=1005,
    )  # fmt: skip
    with torch.device(device):
        model: Any = transformers.Gemma4ForConditionalGeneration(config)
    model = model.to(dtype).eval()
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() >= 2:  # large enough that the mask shows
                weight.normal_(0, 1.5 * weight.shape[-1] ** -0.5, generator=generator)
    return model.model


def inputs(model: Any, tokens: int) -> dict[str, Tensor]:
    weight = model.language_model.embed_tokens.weight
    generator = torch.Generator(weight.device).manual_seed(1)
    embeds = torch.randn(1, tokens, weight.shape[1], device=weight.device, generator=generator).to(weight.dtype)
    types = (torch.arange(tokens, device=weight.device) % (IMAGE + GAP) >= GAP).long()[None]
    return {"inputs_embeds": embeds, "mm_token_type_ids": types}


def step(model: Any, given: dict[str, Tensor]) -> Tensor:
    return model(**given, use_cache=False).last_hidden_state


def masks(model: Any, given: dict[str, Tensor]) -> Any:
    """What a step builds before its first layer."""
    from transformers.models.gemma4 import modeling_gemma4 as source

    embeds = given["inputs_embeds"]
    ids = source.get_block_sequence_ids_for_mask(given["mm_token_type_ids"], device=embeds.device)
    positions = torch.arange(embeds.shape[1], device=embeds.device)[None]
    return source.create_masks_for_vision_model(model.config.get_text_config(), embeds, None, None, positions, ids)


def use(model: Any, implementation: str) -> None:
    import mmattn.hf

    mmattn.hf.register()
    mmattn.hf.register("mmattn-triton", backend="triton")
    model.set_attn_implementation(implementation)


def peak_mib(device: torch.device, call: Callable[[], Any]) -> float | None:
    """Most memory that `call` held above what was held before; None on a CPU, which does not tell."""
    if device.type != "cuda":
        call()
        return None
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    result = call()
    sync(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    del result
    return peak / 2**20


def times(device: torch.device, call: Callable[[], Any], samples: int) -> list[float]:
    """Milliseconds of each call by the host's clock, from an idle device to an idle device."""
    found = []
    for _ in range(samples):
        sync(device)
        begin = time.perf_counter()
        call()
        sync(device)
        found.append((time.perf_counter() - begin) * 1e3)
    return found


def far(x: Tensor, expected: Tensor) -> float:
    """RMS of the difference, relative."""
    return float((x.float() - expected).square().mean().sqrt() / expected.square().mean().sqrt())


@torch.no_grad()
def measure(
    implementation: str, model: Any, check: tuple[dict[str, Tensor], Tensor, float], tokens: int, samples: int
) -> Row:
    """One row; whatever keeps the implementation from running becomes its reason."""
    row: Row = {"case": "hf-gemma4-31b-2-layers", "implementation": implementation, "tokens": tokens}
    device = check[1].device
    try:
        use(model, implementation)
        given, expected, eager_error = check
        row.update(error=far(step(model, given), expected), eager_error=eager_error)
        if not row["error"] <= 2 * eager_error + 2**-8:
            return {**row, "reason": f"off by {row['error']:.2e} at the check, eager by {eager_error:.2e}"}
        full = inputs(model, tokens)
        row["peak_mib"] = peak_mib(device, lambda: step(model, full))  # also warms up
        row["mask_mib"] = peak_mib(device, lambda: masks(model, full))
        timing = summary(times(device, lambda: step(model, full), samples))
        row.update(ms=timing.ms, samples=timing.samples, spread=timing.spread)
        row["mask_ms"] = summary(times(device, lambda: masks(model, full), samples)).ms
    except Exception as e:  # out of memory, a kernel that refuses a head dim: the reason is the result
        row["reason"] = reason(e)
    return row


def table(rows: list[Row]) -> Table:
    shown = Table(title=f"{rows[0]['case']}, {rows[0]['tokens']} tokens")
    columns = {"ms": "ms", "mask_ms": "mask ms", "peak_mib": "peak MiB", "mask_mib": "mask MiB", "error": "error"}
    shown.add_column("implementation")
    for title in columns.values():
        shown.add_column(title, justify="right")
    shown.add_column("reason")
    for row in rows:
        cells = [
            "" if row.get(name) is None else f"{row[name]:.3g}" if name == "error" else f"{row[name]:.2f}"
            for name in columns
        ]
        shown.add_row(row["implementation"], *cells, row.get("reason", ""))
    return shown


@click.command()
@click.option("--tokens", default=32768, show_default=True, help="Length of the prompt.")
@click.option(
    "--check", default=2048, show_default=True, help="Length at which every implementation must agree with eager."
)
@click.option("--samples", default=10, show_default=True)
@click.option("--only", multiple=True, type=click.Choice(IMPLEMENTATIONS), help="Implementations; default: all.")
@click.option(
    "--device", default=None, help="cuda or cpu; default: cuda where there is one. A CPU runs an eighth of every size."
)
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="JSON lines to append to.")
def main(tokens: int, check: int, samples: int, only: tuple[str, ...], device: str | None, out: Path | None) -> None:
    """Times a prefill step of a two-layer Gemma-4-31B-shaped model with images, per attention implementation."""
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    small = where.type == "cpu"
    dtype = torch.float32 if small else torch.bfloat16
    model = gemma4(torch.float32, where, small)
    with torch.no_grad():
        model.set_attn_implementation("eager")
        given = inputs(model, check)
        expected = step(model, given)
        model = model.to(dtype)
        given = {name: x.to(dtype) if x.is_floating_point() else x for name, x in given.items()}
        eager_error = far(step(model, given), expected)
    rows = []
    for implementation in only or IMPLEMENTATIONS:
        row = measure(implementation, model, (given, expected, eager_error), tokens, samples)
        rows.append({**row, "check": check, **environment(where.type)})
        if out is not None:
            out.parent.mkdir(parents=True, exist_ok=True)
            with out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(rows[-1]) + "\n")
    Console(width=None if sys.stdout.isatty() else 170).print(table(rows))


if __name__ == "__main__":
    main()
