"""`python -m bench.hf_batching`: throughput of transformers' continuous batching with mmattn and with its own attentions.

A random Gemma 3 text model (sliding and full layers) generates for 64 requests of mixed lengths at once. The answers of all
implementations must have the same lengths; greedy tokens in bfloat16 may differ. A row holds

    implementation           what ran; or `reason`, why it could not
    tokens_s                 generated tokens per second, and `total_s`, the time of the whole batch, best of `repeats`
    requests, prompt_tokens, new_tokens
    same                     share of generated tokens that equal the first implementation's
"""

from __future__ import annotations

import json
import time
import traceback
from importlib import metadata
from pathlib import Path
from typing import Any

import click
import torch

from .run import environment, reason
from .timing import sync

IMPLEMENTATIONS = ("sdpa", "mmattn", "flash_attention_4")


def make_model(layers: int, hidden: int, head_dim: int, window: int, device: torch.device, dtype: torch.dtype) -> Any:
    """Every sixth layer is full, as in Gemma 3."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    kinds = ["full_attention" if i % 6 == 5 else "sliding_attention" for i in range(layers)]
    config = Gemma3TextConfig(
        num_hidden_layers=layers, hidden_size=hidden, intermediate_size=4 * hidden, num_attention_heads=8,
        num_key_value_heads=4, head_dim=head_dim, query_pre_attn_scalar=head_dim, sliding_window=window, layer_types=kinds,
        vocab_size=32000, max_position_embeddings=32768,
    )  # fmt: skip
    torch.manual_seed(0)
    with device:
        return Gemma3ForCausalLM(config).eval().to(dtype)  # type: ignore[arg-type]


def make_prompts(count: int, longest: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(longest // 16, longest + 1, (count,), generator=generator).tolist()
    return [torch.randint(3, 32000, (n,), generator=generator).tolist() for n in lengths]


def generate(model: Any, prompts: list[list[int]], new_tokens: int, config: dict[str, Any]) -> list[list[int]]:
    from transformers import GenerationConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    answers = model.generate_batch(
        prompts,
        generation_config=GenerationConfig(
            max_new_tokens=new_tokens, do_sample=False, eos_token_id=None, pad_token_id=0
        ),
        continuous_batching_config=ContinuousBatchingConfig(**config),
    )
    failed = [a.error for a in answers.values() if a.error is not None]
    if failed:
        raise RuntimeError(failed[0])
    by_prompt = {tuple(a.prompt_ids): list(a.generated_tokens) for a in answers.values()}
    return [by_prompt[tuple(ids)] for ids in prompts]


@click.command()
@click.option("--requests", default=64)
@click.option("--longest", default=4096, help="Prompts have a 16th of this to all of it.")
@click.option("--new-tokens", default=64)
@click.option("--layers", default=12)
@click.option("--hidden", default=1024)
@click.option("--head-dim", default=128)
@click.option("--window", default=1024)
@click.option("--repeats", default=2)
@click.option("--graphs/--no-graphs", default=False, help="CUDA graphs of transformers' steps.")
@click.option("--implementation", "wanted", multiple=True, help="Default: " + ", ".join(IMPLEMENTATIONS))
@click.option("--output", type=Path, help="JSON lines are appended to this file.")
def main(
    requests: int, longest: int, new_tokens: int, layers: int, hidden: int, head_dim: int, window: int, repeats: int,
    graphs: bool, wanted: tuple[str, ...], output: Path | None,
) -> None:  # fmt: skip
    """Times transformers' continuous batching."""
    import mmattn.hf

    mmattn.hf.register()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = make_model(layers, hidden, head_dim, window, device, dtype)
    prompts = make_prompts(requests, longest)
    first: list[list[int]] | None = None
    for name in wanted or IMPLEMENTATIONS:
        row: dict[str, Any] = {
            "case": "hf-batching", "implementation": name, "requests": requests, "graphs": graphs,
            "prompt_tokens": sum(map(len, prompts)), "new_tokens": requests * new_tokens, "layers": layers,
        }  # fmt: skip
        try:
            model.set_attn_implementation(name)
            pages = sum(-(-(len(p) + new_tokens) // 256) + 1 for p in prompts)
            config: dict[str, Any] = dict(
                max_batch_tokens=min(2048, 16 * longest),
                num_blocks=pages,
                auto_switch_to_flash=False,
                use_cuda_graph=graphs,
            )
            took, tokens = [], []
            for _ in range(repeats + 1):  # the first one compiles
                sync(device)
                begin = time.perf_counter()
                tokens = generate(model, prompts, new_tokens, config)
                sync(device)
                took.append(time.perf_counter() - begin)
            if any(len(t) != new_tokens for t in tokens):
                raise RuntimeError("an answer has another length")
            first = tokens if first is None else first
            same = sum(a == b for x, y in zip(tokens, first) for a, b in zip(x, y)) / (requests * new_tokens)
            best = min(took[1:])
            row.update(tokens_s=round(requests * new_tokens / best, 1), total_s=round(best, 3), first_s=round(took[0], 2), same=round(same, 4))  # fmt: skip
        except Exception as e:
            traceback.print_exc()
            row["reason"] = reason(e)
        click.echo(json.dumps(row))
        if output is not None:
            where = environment(device.type)
            where["versions"] = {**where["versions"], "transformers": metadata.version("transformers")}
            with output.open("a") as file:
                file.write(json.dumps({**row, **where}) + "\n")


if __name__ == "__main__":
    main()
