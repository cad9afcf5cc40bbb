"""`python -m bench.backward`: gates and times gradients of mmattn and its peers on the training cases; appends JSON lines.

A row holds, beside what those of `bench.run` hold, `backward_ms` (the gradients alone), `ms` (forward and backward),
`forward_ms`, `eff_tflops` (2.5 times the forward's work over `backward_ms`) and `peak_mib` above the inputs.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor

import mmattn

from .cases import TRAINING, Case, Inputs, make, make_inputs
from .peers import CannotRun
from .providers import PROVIDERS
from .run import Row, environment, reason
from .timing import Timing, interleaved, patience, sync
from .work import work

DEFAULT = ("mmattn-cute", "mmattn-triton", "fa4-native", "flex", "sdpa-dense", "cudnn-causal")
LIMIT = 2e-2
"""Largest relative error (of norms) against gradients in float32."""


def leaves(inputs: Inputs) -> list[Tensor]:
    return [x for x in (inputs.q, inputs.k, inputs.v, inputs.sinks) if x is not None]


def exact(case: Case, inputs: Inputs, upstream: Tensor) -> list[Tensor]:
    """Gradients of the torch backend, which computes in float32."""
    ready = mmattn.plan(case.mask, q=inputs.q, k=inputs.k, **inputs.batch_args(case))
    out = mmattn.attention(inputs.q, inputs.k, inputs.v, ready, sinks=inputs.sinks, backend="torch")
    return list(torch.autograd.grad(out, leaves(inputs), upstream))


def error(got: list[Tensor], want: list[Tensor]) -> float:
    return max(float((a.double() - b.double()).norm() / b.double().norm()) for a, b in zip(got, want))


def run_case(case: Case, names: list[str], device: torch.device, rounds: int, seconds: float | None) -> list[Row]:
    """A row for each provider; one that cannot run the case gives its reason."""
    on_gpu = device.type == "cuda"
    inputs = make_inputs(case, device, torch.bfloat16 if on_gpu else torch.float32)
    if inputs.sinks is not None:
        inputs.sinks = inputs.sinks.detach().float()
    for x in leaves(inputs):
        x.requires_grad_()
    upstream = torch.randn(*inputs.q.shape[:-1], case.head_dim_v, device=device).to(inputs.q.dtype)
    wants: dict[Case, list[Tensor]] = {}
    rows: list[Row] = []
    calls: dict[str, Callable[[int], object]] = {}
    facts: dict[str, Row] = {}
    for name in names:
        row: Row = dict(case=case.name, provider=name, title=case.title)
        try:
            with patience(seconds):
                prepared = PROVIDERS[name].prepare(inputs)
                out = prepared.call(inputs.q, 0)
                if out.grad_fn is None:
                    raise CannotRun("gives no gradients")
                grads = torch.autograd.grad(out, leaves(inputs), upstream, retain_graph=True)
                sync(device)
            if prepared.case not in wants:
                wants[prepared.case] = exact(prepared.case, inputs, upstream)
            row["max_error"] = error(list(grads), wants[prepared.case])
            if row["max_error"] > LIMIT:
                raise CannotRun(f"gradients are off by {row['max_error']:.3f} of their norm")
            del grads
            if on_gpu:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                torch.autograd.grad(prepared.call(inputs.q, 0), leaves(inputs), upstream)
                row["peak_mib"] = round((torch.cuda.max_memory_allocated() - before) / 2**20, 1)
        except Exception as e:
            rows.append({**row, "reason": reason(e)})
            continue

        def backward(i: int, out: Tensor = out) -> object:
            return torch.autograd.grad(out, leaves(inputs), upstream, retain_graph=True)

        def both(i: int, call: Any = prepared.call) -> object:
            return torch.autograd.grad(call(inputs.q, 0), leaves(inputs), upstream)

        calls[f"{name} backward"], calls[f"{name} both"] = backward, both
        facts[name] = dict(row, mask="case" if prepared.case == case else "without images", work=prepared.case)
    times = interleaved(calls, device, rounds=rounds)
    for name, row in facts.items():
        alone, together = times[f"{name} backward"], times[f"{name} both"]
        mine = work(row.pop("work"))
        if isinstance(alone, Timing) and isinstance(together, Timing):
            row.update(
                backward_ms=round(alone.ms, 5), ms=round(together.ms, 5), spread=round(alone.spread, 4),
                eff_tflops=round(2.5 * mine.flops / alone.ms / 1e9, 2), flops=mine.flops,
            )  # fmt: skip
        else:
            row["reason"] = reason(next(t for t in (alone, together) if isinstance(t, Exception)))
        rows.append(row)
    return rows


@click.command()
@click.option("--case", "cases", multiple=True, type=click.Choice(TRAINING), help="Default: all.")
@click.option(
    "--provider", "providers", multiple=True, type=click.Choice(list(PROVIDERS)), help="Default: all with gradients."
)
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), required=True, help="JSON lines to append to.")
@click.option("--rounds", default=9, show_default=True)
@click.option("--patience", "seconds", default=120.0, show_default=True, help="Seconds to the first gradients.")
def main(cases: tuple[str, ...], providers: tuple[str, ...], out: Path, rounds: int, seconds: float) -> None:
    """Times gradients; a CPU runs reduced cases once."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    on_gpu = device.type == "cuda"
    mmattn.dispatch.UNCHECKED = frozenset()  # (they are gated here)
    about = environment(device.type)
    with out.open("a") as file:
        for name in cases or TRAINING:
            case = make(name, reduced=not on_gpu)
            for row in run_case(case, list(providers or DEFAULT), device, rounds if on_gpu else 1, seconds):
                file.write(json.dumps({**row, **about}) + "\n")
                file.flush()
                shown = {k: v for k, v in row.items() if k not in ("title", "flops", "mask")}
                click.echo("  ".join(f"{k}={v}" for k, v in shown.items()))
            gc.collect()
            if on_gpu:
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
