"""`python -m bench.vllm_layers`: one attention layer in vLLM, with its Triton backend and with mmattn's.

Both get the same `CommonAttentionMetadata`, cache and queries, through their own metadata builder and layer, as vLLM's runner
would call them. First both must agree with the oracle on sampled rows, then they are timed. Rows as of `bench.run`, with
provider `vllm-triton` and `mmattn-vllm`; `step_ms` is the builder and one layer, so for mmattn a plan, which the other layers
of a group share. Where vLLM is not installed, `bench/pack_vllm.sh` packs the files of it that this needs.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import torch
from torch import Tensor

from . import cases as cases_module
from . import vllm_parts
from .cases import Case, Inputs, make_inputs
from .gate import Gate, sample_rows
from .run import environment
from .timing import Timing, host_us, interleaved
from .work import work

CASES = ("W1", "W2", "W5", "W7", "W7b", "W7c", "W13", "W13b")
PAGE = 16
"""Of cases that are not paged: vLLM's default."""


def vllm_config(case: Case, rows: int) -> Any:
    """What both builders read of vLLM's config."""
    model = SimpleNamespace(
        is_mm_prefix_lm=case.has_spans, rswa_window=None, get_num_attention_heads=lambda parallel: case.heads_q,
        get_num_kv_heads=lambda parallel: case.heads_kv, get_head_size=lambda: case.head_dim,
    )  # fmt: skip
    return SimpleNamespace(
        model_config=model, speculative_config=None, compilation_config=SimpleNamespace(cudagraph_mode=None),
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=1, prefill_context_parallel_size=1, use_ubatching=False, enable_dbo=False
        ),
        scheduler_config=SimpleNamespace(
            max_num_batched_tokens=rows, max_num_seqs=len(case.sequences), is_multimodal_model=case.has_spans,
            disable_chunked_mm_input=True, long_prefill_token_threshold=0,
        ),
        cache_config=SimpleNamespace(kv_sharing_fast_prefill=False),
    )  # fmt: skip


class Layer:
    """One layer of a backend: `build()` as the runner calls it in every step, `forward()` as it does in every layer."""

    def __init__(self, backend: Any, case: Case, inputs: Inputs) -> None:
        from vllm.v1.attention.backend import CommonAttentionMetadata
        from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

        self.case, self.inputs, device = case, inputs, inputs.device
        window = None if case.mask.window_left is None else case.mask.window_left + 1
        shape: dict[str, Any] = dict(
            block_size=case.page_size, num_kv_heads=case.heads_kv, head_size=case.head_dim, dtype=inputs.k.dtype
        )
        spec = FullAttentionSpec(**shape) if window is None else SlidingWindowSpec(**shape, sliding_window=window)
        config = vllm_config(case, case.total_q)
        self.builder = backend.get_builder_cls()(spec, ["layer"], config, device)
        self.impl = backend.get_impl_cls()(
            case.heads_q, case.head_dim, case.head_dim**-0.5, case.heads_kv, None, window, "auto", sinks=inputs.sinks
        )
        one = torch.ones((), device=device)
        self.layer = SimpleNamespace(
            _q_scale=one, _k_scale=one, _v_scale=one, _k_scale_float=1.0, _v_scale_float=1.0,
            mm_prefix_clamp_sliding_window=case.mask.mm_prefix_clamp,
        )  # fmt: skip
        lens = torch.tensor([s.kv_len for s in case.sequences], dtype=torch.int32)
        spans = {b: list(s.spans) for b, s in enumerate(case.sequences)} if case.has_spans else None
        self.common = [
            CommonAttentionMetadata(
                query_start_loc=inputs.cu_seqlens_q, query_start_loc_cpu=inputs.cu_seqlens_q.cpu(),
                seq_lens=inputs.seqused_k, num_reqs=len(case.sequences), num_actual_tokens=case.total_q,
                max_query_len=inputs.max_seqlen_q, max_seq_len=inputs.max_seqlen_k, block_table_tensor=table,
                slot_mapping=torch.zeros(case.total_q, dtype=torch.int64, device=device), causal=True,
                seq_lens_cpu_upper_bound=lens, mm_req_doc_ranges=spans,
            )
            for table in inputs.page_tables
        ]  # fmt: skip
        # As vLLM hands it over: [pages, heads, page, K and V], here with heads innermost but one in memory (NHD).
        self.cache = torch.cat([inputs.k, inputs.v], dim=-1).transpose(1, 2)
        self.out = torch.empty(case.total_q, case.heads_q, case.head_dim_v, dtype=inputs.q.dtype, device=device)
        self.ready = [self.build(i) for i in range(len(self.common))]

    def build(self, i: int = 0) -> Any:
        return self.builder.build(0, self.common[i % len(self.common)])

    def forward(self, q: Tensor, i: int = 0, metadata: Any = None) -> Tensor:
        metadata = self.ready[i % len(self.ready)] if metadata is None else metadata
        out: Tensor = self.impl.forward(self.layer, q, None, None, self.cache, metadata, output=self.out)
        return out

    def step(self, q: Tensor, i: int = 0) -> Tensor:
        """Builder and one layer: what a step with one layer costs."""
        return self.forward(q, i, self.build(i))


def paged(case: Case) -> Case:
    return case if case.page_size is not None else replace(case, page_size=PAGE)


def backends() -> dict[str, Any]:
    from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend

    from mmattn.vllm.backend import MMAttentionBackend

    return {"vllm-triton": TritonAttentionBackend, "mmattn-vllm": MMAttentionBackend}


@torch.no_grad()
def run_case(case: Case, device: torch.device, dtype: torch.dtype, rounds: int, rows: int) -> list[dict[str, Any]]:
    case = paged(case)
    on_gpu = device.type == "cuda"
    counted = work(case)
    l2 = torch.cuda.get_device_properties(device).L2_cache_size if on_gpu else 0
    inputs = make_inputs(case, device, dtype, touched=counted.kv_bytes, l2=l2)
    inputs.q = q = inputs.q.reshape(case.total_q, case.heads_q, case.head_dim)
    gate = Gate(case, inputs, sample_rows(case, rows))
    results: dict[str, dict[str, Any]] = {}
    layers: dict[str, Layer] = {}
    outs: dict[str, Tensor] = {}
    for name, backend in backends().items():
        row: dict[str, Any] = {"case": case.name, "provider": name, "title": case.title}
        results[name] = row
        try:
            layer = Layer(backend, case, inputs)
            row["max_error_uniform"] = float(f"{gate.check(layer.forward(gate.queries(zero=True)), zero=True):.3e}")
            outs[name] = layer.forward(q).clone()
            row["max_error"] = float(f"{gate.check(outs[name], zero=False):.3e}")
            layers[name] = layer
        except Exception as e:
            traceback.print_exc()
            row["reason"] = f"{type(e).__name__}: {str(e)[:400]}"
    if len(outs) == 2:
        difference = (outs["vllm-triton"].float() - outs["mmattn-vllm"].float()).abs().max()
        results["mmattn-vllm"]["max_difference"] = float(f"{float(difference):.3e}")

    def forward(layer: Layer) -> Callable[[int], object]:
        return lambda i: layer.forward(q, i)

    def step(layer: Layer) -> Callable[[int], object]:
        return lambda i: layer.step(q, i)

    rotate = len(inputs.page_tables)
    calls = {name: forward(layer) for name, layer in layers.items()}
    steps = {name: step(layer) for name, layer in layers.items()}
    times = interleaved(calls, device, rounds=rounds, rotate=rotate, graph=case.decode)
    stepped = interleaved(steps, device, rounds=max(3, rounds // 2), rotate=rotate)
    for name in layers:
        row, time, whole = results[name], times[name], stepped[name]
        if not isinstance(time, Timing):
            row["reason"] = str(time)
            continue
        row.update(
            ms=round(time.ms, 5), spread=round(time.spread, 4), samples=time.samples, graph=time.graph, mask="case",
            eff_tflops=round(counted.tflops(time.ms), 2), pairs=counted.pairs, flops=counted.flops, bytes=counted.bytes,
        )  # fmt: skip
        if isinstance(whole, Timing):
            row["step_ms"] = round(whole.ms, 5)
        if on_gpu:
            row["host_us"] = round(host_us(calls[name], device), 1)
        if case.decode:
            row["gb_s"] = round(counted.gb_s(time.ms), 1)
    theirs, ours = (results[name].get("ms") for name in ("vllm-triton", "mmattn-vllm"))
    if theirs is not None and ours is not None:
        results["mmattn-vllm"]["speedup"] = round(theirs / ours, 2)
    return list(results.values())


@click.command()
@click.option("--case", "wanted", multiple=True, help="Cases; default: " + ", ".join(CASES))
@click.option("--reduced", is_flag=True, help="Small sizes, for a CPU with TRITON_INTERPRET=1.")
@click.option("--rounds", default=15)
@click.option("--rows", default=96, help="Rows that are compared with the oracle.")
@click.option("--parts", type=Path, default=Path(".gpu-vllm"), help="Where bench/pack_vllm.sh put vLLM's files.")
@click.option("--output", type=Path, help="JSON lines are appended to this file.")
def main(wanted: tuple[str, ...], reduced: bool, rounds: int, rows: int, parts: Path, output: Path | None) -> None:
    """Times one layer of vLLM with its Triton backend and with mmattn's."""
    vllm_parts.install(parts)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    lines = []
    for name in wanted or CASES:
        for row in run_case(cases_module.make(name, reduced=reduced), device, dtype, rounds, rows):
            lines.append(row)
            if output is not None:
                with output.open("a") as file:
                    file.write(json.dumps({**row, **environment(device.type)}) + "\n")
        if device.type == "cuda":
            torch.cuda.empty_cache()
    shown = ("case", "provider", "ms", "step_ms", "host_us", "gb_s", "speedup", "max_error", "max_difference", "reason")
    for row in lines:
        click.echo("  ".join(f"{field}={row[field]}" for field in shown if field in row))


if __name__ == "__main__":
    main()
