"""`python -m mmattn dflash-demo`: a drafter trained for a minute on a tiny target's own outputs, before and after.

The targets are transformers models of a few thousand parameters with random weights, so that everything runs on a CPU
without a download; their text means nothing, but it is theirs, and speculative decoding must return exactly it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import click
import torch
from torch import Tensor

from .drafter import Drafter
from .generate import Generation, generate
from .target import HiddenTaps

VOCABULARY, HIDDEN, MASK_TOKEN, LAYERS = 64, 64, 63, 4
PROMPT, BLOCK, WINDOW = 8, 5, 16
DECAY = 7.0
"""Decay of a draft token's weight in the loss with its distance: a token counts only if those before it are right."""


def tiny_target(name: str, *, layers: int = LAYERS, hidden: int = HIDDEN) -> Any:
    """A random transformers causal LM, "qwen3" or "mimo" (sliding and full layers, sinks, experts), in eval mode."""
    from transformers import MiMoV2FlashConfig, MiMoV2FlashForCausalLM, Qwen3Config, Qwen3ForCausalLM

    sizes: dict[str, Any] = dict(
        vocab_size=VOCABULARY, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers,
        num_attention_heads=4, max_position_embeddings=4096, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    if name == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**sizes, num_key_value_heads=2, head_dim=16)).eval()
    if name == "mimo":
        kinds = ["full_attention", *["sliding_attention"] * (layers - 2), "full_attention"]
        rope = {"full_attention": 5e6, "sliding_attention": 1e4}
        config = MiMoV2FlashConfig(
            **sizes, num_key_value_heads=1, head_dim=24, v_head_dim=16, sliding_window=WINDOW, layer_types=kinds,
            moe_intermediate_size=32, n_routed_experts=4, num_experts_per_tok=2,
            rope_parameters={
                kind: {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": 0.334}
                for kind, theta in rope.items()
            },
        )  # fmt: skip
        return MiMoV2FlashForCausalLM(config).eval()
    raise ValueError(f"target must be 'qwen3' or 'mimo', got {name!r}")


def tiny_drafter_config(target: Any) -> dict[str, Any]:
    """A hybrid drafter for it, in the published form: a sliding and a full layer, not causal, with sinks."""
    text = target.config.get_text_config()
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "vocab_size": text.vocab_size,
        "hidden_size": text.hidden_size,
        "intermediate_size": 2 * text.hidden_size,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": WINDOW,
        "is_causal": False,
        "block_size": BLOCK,
        "num_target_layers": text.num_hidden_layers,
        "max_position_embeddings": text.max_position_embeddings,
        "rope_theta": 10000.0,
        "dflash_config": {
            "mask_token_id": MASK_TOKEN,
            "target_layer_ids": [0, text.num_hidden_layers // 2, text.num_hidden_layers - 1],
            "attention_sink_bias": True,
            # A random head has small weights: without this the drafter would first learn to make large hidden states.
            "output_multiplier": 16.0,
        },
    }


@torch.no_grad()
def target_outputs(target: Any, drafter: Drafter, prompts: Tensor, new_tokens: int) -> tuple[Tensor, Tensor]:
    """What the target says after `prompts` `[B, S]`, and its hidden states on the way, for `Drafter.context`."""
    tokens = target.generate(
        prompts, attention_mask=torch.ones_like(prompts), do_sample=False, max_new_tokens=new_tokens, pad_token_id=0
    )
    c = drafter.config
    with HiddenTaps(target, c.target_hidden_ids, final_norm=c.target_final_norm) as taps:
        target(tokens, use_cache=False)
        return tokens, taps.read()


def train(
    drafter: Drafter,
    tokens: Tensor,
    hidden: Tensor,
    *,
    seconds: float,
    max_steps: int | None = None,
    blocks: int = 12,
    lr: float = 5e-3,
    first: int = PROMPT,
    report: Callable[[float, int, float], None] | None = None,
) -> int:
    """Trains on the target's outputs until time or steps are up; returns the steps taken.

    Args:
        drafter: attached to the target, whose parameters it leaves alone.
        tokens, hidden: from `target_outputs`.
        seconds, max_steps: when to stop; the learning rate falls linearly with the time.
        blocks: per step, each at a random place behind token `first` of a random sequence.
        report: called with (elapsed seconds, steps, loss).
    """
    count, length = tokens.shape
    n = drafter.config.draft_tokens
    if length - n <= first:
        raise ValueError(f"sequences of {length} tokens are too short for blocks of {n} drafts behind token {first}")
    parameters = [p for p in drafter.parameters() if p.requires_grad]
    optimiser = torch.optim.AdamW(parameters, lr=lr, weight_decay=0.01)
    weight = torch.exp(-torch.arange(n, device=tokens.device) / DECAY)
    start, steps, mean = time.monotonic(), 0, 0.0
    while (elapsed := time.monotonic() - start) < seconds and steps != max_steps:
        for group in optimiser.param_groups:
            group["lr"] = lr * max(0.05, 1 - elapsed / seconds)
        picked = torch.randint(count, (blocks,), device=tokens.device)
        anchor = torch.randint(first, length - n, (blocks,), device=tokens.device)
        at = anchor[:, None] + torch.arange(n + 1, device=tokens.device)
        block = tokens[picked].gather(1, at)
        keys = drafter.training_keys(hidden[picked], range(blocks), anchor.tolist())
        scores = drafter.logits(drafter(drafter.embed(block[:, 0]), keys)[:, 1:])
        losses = torch.nn.functional.cross_entropy(
            scores.flatten(0, 1).float(), block[:, 1:].flatten(), reduction="none"
        )
        loss = (losses.unflatten(0, (blocks, n)) * weight).mean()
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimiser.step()
        steps += 1
        mean = loss.item() if steps == 1 else 0.95 * mean + 0.05 * loss.item()
        if report is not None:
            report(elapsed, steps, mean)
    return steps


def demo_drafter(target: Any) -> Drafter:
    """An untrained drafter with a mask embedding of its own, attached to `target`, whose parameters are frozen."""
    target.requires_grad_(False)
    drafter = Drafter(tiny_drafter_config(target)).attach(target)
    # As wide as the vocabulary's rows, so that it is no outlier among them.
    width = target.get_input_embeddings().weight.std().item()
    drafter.mask_embedding = torch.nn.Parameter(torch.randn(drafter.config.hidden_size) * width)
    return drafter.to(target.device)


@click.command("dflash-demo")
@click.option(
    "--target", type=click.Choice(["qwen3", "mimo"]), default="qwen3", show_default=True, help="Tiny random target."
)
@click.option("--seconds", type=click.FloatRange(min=0), default=60.0, show_default=True, help="Training time.")
@click.option("--sequences", type=click.IntRange(1), default=384, show_default=True, help="Training sequences.")
@click.option(
    "--batch", type=click.IntRange(1), default=4, show_default=True, help="Held-out prompts, decoded together."
)
@click.option("--new-tokens", type=click.IntRange(BLOCK), default=64, show_default=True, help="Per sequence.")
@click.option("--seed", type=int, default=0, show_default=True)
def dflash_demo(target: str, seconds: float, sequences: int, batch: int, new_tokens: int, seed: int) -> None:
    """Trains a tiny DFlash drafter on a tiny target's outputs and decodes with it."""
    if find_spec("transformers") is None:
        raise click.ClickException("the demo needs transformers: pip install 'mmattn[hf,demo]'")
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table

    console = Console()
    torch.manual_seed(seed)
    model = tiny_target(target)
    drafter = demo_drafter(model)
    # Distinct prompts; the held-out ones are the last.
    prompts = torch.unique(torch.randint(0, MASK_TOKEN, (sequences + batch, PROMPT)), dim=0)
    prompts = prompts[torch.randperm(len(prompts))]
    held_out = prompts[-batch:]
    console.print(
        f"target [bold]{type(model).__name__}[/], {sum(p.numel() for p in model.parameters()):,} parameters; "
        f"drafter of {sum(p.numel() for p in drafter.parameters()):,}, layers "
        + ", ".join(
            f"sliding {m.window_left + 1}" if m.window_left is not None else "full" for m in drafter.config.layers
        )
    )
    mask = torch.ones_like(held_out)
    alone = model.generate(held_out, attention_mask=mask, do_sample=False, max_new_tokens=new_tokens, pad_token_id=0)
    before = generate(model, drafter, held_out, max_new_tokens=new_tokens, pad_token_id=0)
    tokens, hidden = target_outputs(model, drafter, prompts[:-batch], new_tokens)
    with Progress(console=console) as progress:
        task = progress.add_task("training", total=seconds)
        steps = train(
            drafter, tokens, hidden, seconds=seconds,
            report=lambda at, step, loss: progress.update(
                task, completed=at, description=f"step {step}, loss {loss:.2f}"
            ),
        )  # fmt: skip
        progress.update(task, completed=seconds)
    after = generate(model, drafter, held_out, max_new_tokens=new_tokens, pad_token_id=0)

    table = Table(
        title=f"{batch} held-out prompts, {new_tokens} new tokens each, blocks of 1 + {drafter.config.draft_tokens}"
    )
    for column in ("decoding", "target passes", "acceptance length", "output"):
        table.add_column(column, justify="left" if column == "decoding" else "right")
    table.add_row("target alone", str(new_tokens - 1), "1.00", "reference")

    def row(name: str, result: Generation) -> bool:
        same = torch.equal(result.sequences, alone)
        table.add_row(name, str(result.passes), f"{result.acceptance_length:.2f}", "equal" if same else "DIFFERENT")
        return same

    equal = [row("untrained drafter", before), row(f"after {steps} steps", after)]
    console.print(table)
    if not all(equal):
        raise click.ClickException("speculative decoding did not return the target's own output")
