"""`python -m bench.dflash`: the speculative loop on a random target of middle size, with a long context.

Random models agree on nothing, so the acceptance is set: drafts are computed, and then replaced by tokens of which the
target will take `--acceptance - 1`. The times are those of the real work. `break even` is the acceptance at which the loop
is as fast as the target alone; a real drafter gains its own acceptance divided by that.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from mmattn.dflash import Drafter, GraphedDraft, generate

from .run import environment
from .timing import sync

VOCABULARY, LAYERS_READ = 32000, 5


def make_models(
    hidden: int, layers: int, window: int, block: int, dtype: torch.dtype, device: torch.device
) -> tuple[Any, Drafter]:
    """A random Qwen 3 target and a drafter of five layers for it: four sliding, one full, not causal, with sinks."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    heads = max(2, hidden // 128)
    shape: dict[str, Any] = dict(
        hidden_size=hidden, intermediate_size=3 * hidden, num_attention_heads=heads, num_key_value_heads=heads // 2,
        head_dim=128, max_position_embeddings=131072, vocab_size=VOCABULARY,
    )  # fmt: skip
    with device:
        target: Any = Qwen3ForCausalLM(Qwen3Config(**shape, num_hidden_layers=layers, eos_token_id=None))
        drafter = Drafter(
            {
                **shape,
                "num_hidden_layers": 5,
                "layer_types": ["sliding_attention"] * 4 + ["full_attention"],
                "sliding_window": window,
                "is_causal": False,
                "block_size": block,
                "rope_theta": 10000.0,
                "num_target_layers": layers,
                "dflash_config": {
                    "mask_token_id": VOCABULARY - 1,
                    "target_layer_ids": [i * (layers - 1) // (LAYERS_READ - 1) for i in range(LAYERS_READ)],
                    "attention_sink_bias": True,
                },
            }
        ).to(dtype)
    target = target.to(dtype).eval()
    return target, drafter.attach(target).requires_grad_(False)


class Loop:
    """The `draft` of one run: drafts, times it, and hands over tokens with a set acceptance."""

    def __init__(self, draft: Callable[..., Tensor], prompt: int, n: int, known: Tensor | None, right: int) -> None:
        self.draft, self.prompt, self.n, self.known, self.right = draft, prompt, n, known, right
        self.start = 0.0
        self.draft_ms: list[float] = []
        self.verify_ms: list[float] = []

    def __call__(self, bonus: Tensor, cache: Any) -> Tensor:
        sync(bonus.device)
        begin = time.perf_counter()
        if not self.draft_ms:
            self.start = begin
        self.draft(bonus, cache)
        sync(bonus.device)
        self.draft_ms.append(1e3 * (time.perf_counter() - begin))
        if self.known is None:
            # Any tokens: of a vocabulary of 32000 the target takes none.
            return (bonus[:, None] + 1 + torch.arange(self.n, device=bonus.device)) % VOCABULARY
        rows = []
        for b, held in enumerate(cache.counts):
            row = self.known[b, held + 1 : held + 1 + self.n]
            row = torch.nn.functional.pad(row, (0, self.n - len(row)))
            rows.append(torch.where(torch.arange(self.n, device=row.device) < self.right, row, (row + 1) % VOCABULARY))
        return torch.stack(rows)


@contextmanager
def timed_forwards(target: Any, times: list[float]) -> Iterator[None]:
    """Adds the time of every forward of the target to `times`."""
    begin = 0.0

    def before(*_: Any) -> None:
        nonlocal begin
        sync(target.device)
        begin = time.perf_counter()

    def after(*_: Any) -> None:
        sync(target.device)
        times.append(1e3 * (time.perf_counter() - begin))

    handles = [target.register_forward_pre_hook(before), target.register_forward_hook(after)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def target_step_ms(target: Any, prompt: Tensor, steps: int) -> float:
    """Median time of one token of the target alone, behind the prompt."""
    from transformers.cache_utils import DynamicCache

    cache = DynamicCache(config=target.config)
    token = target(prompt, past_key_values=cache, logits_to_keep=1).logits[:, -1:].argmax(-1)
    times = []
    for _ in range(steps):
        sync(prompt.device)
        begin = time.perf_counter()
        token = target(token, past_key_values=cache).logits[:, -1:].argmax(-1)
        sync(prompt.device)
        times.append(1e3 * (time.perf_counter() - begin))
    return sorted(times)[len(times) // 2]


@click.command()
@click.option("--context", default=32768, show_default=True, help="Tokens of each prompt.")
@click.option("--batch", default=1, show_default=True)
@click.option("--hidden", default=2048, show_default=True)
@click.option("--layers", default=24, show_default=True)
@click.option("--block", default=16, show_default=True, help="1 + N.")
@click.option("--window", default=2048, show_default=True, help="Of the drafter's sliding layers.")
@click.option("--new-tokens", default=128, show_default=True)
@click.option("--acceptance", default=4, show_default=True, help="Tokens per pass to set.")
@click.option("--backend", "backends", multiple=True, default=("auto",), show_default=True)
@click.option("--page-size", default=64, show_default=True)
@click.option("--attention", default="sdpa", show_default=True, help="The target's attn_implementation; or mmattn.")
@click.option("--device", default="cuda", show_default=True)
@click.option("--out", type=click.Path(path_type=Path), help="Append JSON lines to this file.")
def main(
    context: int, batch: int, hidden: int, layers: int, block: int, window: int, new_tokens: int, acceptance: int,
    backends: tuple[str, ...], page_size: int, attention: str, device: str, out: Path | None,
) -> None:  # fmt: skip
    """Times drafting, verification and the whole loop: drafter eager and as a CUDA graph, per backend."""
    if not 1 <= acceptance <= block:
        raise click.BadParameter(f"must lie in 1..{block} (the block), got {acceptance}", param_hint="--acceptance")
    torch.manual_seed(0)
    place = torch.device(device)
    target, drafter = make_models(
        hidden, layers, window, block, torch.bfloat16 if place.type == "cuda" else torch.float32, place
    )
    if attention == "mmattn":
        import mmattn.hf

        mmattn.hf.register()
    target.set_attn_implementation(attention)
    prompt = torch.randint(0, VOCABULARY - 1, (batch, context), device=place)
    alone = target_step_ms(target, prompt, min(32, new_tokens))

    def run(draft: Callable[..., Tensor], known: Tensor | None) -> tuple[Loop, Any, float]:
        loop = Loop(draft, context, block - 1, known, acceptance - 1)
        with timed_forwards(target, loop.verify_ms):
            result = generate(target, drafter, prompt, max_new_tokens=new_tokens, page_size=page_size, draft=loop)
        sync(prompt.device)
        return loop, result, 1e3 * (time.perf_counter() - loop.start)

    case = dict(
        context=context, batch=batch, hidden=hidden, layers=layers, block=block, window=window, page_size=page_size,
        attention=attention,
    )  # fmt: skip
    rows, refused = [], []
    known = None
    for backend in backends:
        variants: dict[str, Callable[..., Tensor]] = {"eager": partial(drafter.draft, backend=backend)}
        if place.type == "cuda":
            variants["graph"] = GraphedDraft(drafter, backend=backend)
        for name, draft in variants.items():
            try:
                if known is None:
                    # The tokens as the target says them when it verifies blocks: in bfloat16 these may differ from those
                    # that it says one by one.
                    known = run(draft, None)[1].sequences
                run(draft, known)  # compiles and captures
                loop, result, total = run(draft, known)
            except NotImplementedError as error:
                refused.append(f"{backend} {name}: {error}")
                break
            drafting, verifying = (
                sorted(x)[len(x) // 2] for x in (loop.draft_ms, loop.verify_ms[1:])
            )  # [0]: the prompt
            rows.append(
                {
                    **case, "backend": backend, "drafter": name, "target_step_ms": alone, "draft_ms": drafting,
                    "verify_ms": verifying, "pass_ms": total / result.passes, "passes": result.passes,
                    "acceptance": result.acceptance_length, "same_tokens": torch.equal(result.sequences, known),
                    "speedup": alone * (new_tokens - 1) / total,
                    "break_even": total / result.passes / alone, **environment(place.type),
                }
            )  # fmt: skip
    console = Console()
    table = Table(
        title=f"context {context}, batch {batch}, hidden {hidden}, {layers} layers, block {block}, window {window}, "
        f"{attention}; target alone {alone:.2f} ms a token"
    )
    columns = ["backend", "drafter", "draft_ms", "verify_ms", "pass_ms", "acceptance", "speedup", "break_even"]
    for column in columns:
        table.add_column(column.replace("_", " "), justify="left" if column in ("backend", "drafter") else "right")
    for row in rows:
        table.add_row(*(f"{row[c]:.2f}" if isinstance(row[c], float) else str(row[c]) for c in columns))
    console.print(table)
    for text in refused:
        console.print(text)
    if out is not None:
        with out.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)


if __name__ == "__main__":
    main()
