"""mmattn and its peers, each as a function from inputs to a ready call.

A provider that cannot run a case raises: `CannotRun` with a reason, or whatever its library raises, which becomes the
reason. Imports of peers happen inside, so that a missing one costs only its own rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import mmattn

from . import fa4, flex, work
from .cases import Inputs
from .peers import CannotRun, Prepared, heads_first, needs_batched, needs_gpu


@dataclass(frozen=True)
class Provider:
    name: str
    about: str
    prepare: Callable[[Inputs], Prepared]


def _mmattn(inputs: Inputs, *, backend: str) -> Prepared:
    case, q, k, v = inputs.case, inputs.q, inputs.k, inputs.v
    args = inputs.batch_args()
    ready = mmattn.plan(case.mask, q=q, k=k, **args)
    against = mmattn.supported(q, k, v, ready, sinks=inputs.sinks).get(backend, [])
    if against:
        raise CannotRun("; ".join(against))
    rest: dict[str, Any] = dict(sinks=inputs.sinks, backend=backend)

    def call(q: Tensor, i: int) -> Tensor:
        if inputs.page_tables:
            return mmattn.attention(q, k, v, ready, page_table=inputs.page_table(i), **rest)
        return mmattn.attention(q, k, v, ready, **rest)

    def build() -> mmattn.Plan:
        fresh = mmattn.plan(case.mask, q=q, k=k, **args)
        for shape in ready.tile_shapes:  # the tables that the kernel asked for; a plan makes them at the first request
            fresh.tiles(*shape)
        return fresh

    return Prepared(case, call, build)


def _sdpa_dense(inputs: Inputs) -> Prepared:
    case = inputs.case
    needs_batched(case)
    if inputs.sinks is not None:
        raise CannotRun("scaled_dot_product_attention has no sinks")
    group = case.heads_q // case.heads_kv
    # Fused kernels take no grouped heads beside a mask: K and V are repeated, outside the timed call.
    k, v = (heads_first(x.repeat_interleave(group, dim=2)) for x in (inputs.k, inputs.v))
    rows = work.row_intervals(case).to(inputs.device).reshape(len(case.sequences), 1, -1, 2)
    key = torch.arange(case.sequences[0].kv_len, device=inputs.device)

    def build() -> Tensor:
        return (key >= rows[..., :1]) & (key < rows[..., 1:])

    mask = build()

    def call(q: Tensor, i: int) -> Tensor:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        # Not the math backend on a GPU: it would hold all scores.
        fused = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]
        with sdpa_kernel(fused if q.is_cuda else [SDPBackend.MATH]):
            return heads_first(F.scaled_dot_product_attention(heads_first(q), k, v, attn_mask=mask))

    return Prepared(case, call, build)


def _cudnn_causal(inputs: Inputs) -> Prepared:
    needs_gpu(inputs)
    case = inputs.case.causal_only()
    needs_batched(case)
    if inputs.sinks is not None or inputs.case.mask.window_left is not None or not inputs.case.mask.causal:
        raise CannotRun("scaled_dot_product_attention reaches cuDNN's plain causal kernel only: no window, no sinks")
    if any(s.context for s in case.sequences):
        raise CannotRun("scaled_dot_product_attention aligns is_causal to the first key: no context before the rows")
    k, v = heads_first(inputs.k), heads_first(inputs.v)

    def call(q: Tensor, i: int) -> Tensor:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
            out = F.scaled_dot_product_attention(heads_first(q), k, v, is_causal=True, enable_gqa=True)
        return heads_first(out)

    return Prepared(case, call)


def _vllm_triton(inputs: Inputs) -> Prepared:
    needs_gpu(inputs)
    try:
        from vllm.v1.attention.ops.triton_unified_attention import unified_attention
    except ImportError as e:
        raise CannotRun(f"vllm is not installed ({e})") from e
    case, mask = inputs.case, inputs.case.mask
    if mask.chunk_size is not None or mask.window_right is not None:
        raise CannotRun("vLLM's kernel has no chunked mask and no window to the right")
    k, v, tables = inputs.k, inputs.v, inputs.page_tables
    if case.page_size is None:
        if any(s.kv_len % 16 for s in case.sequences):
            raise CannotRun("lengths are not multiples of vLLM's page size 16")
        k, v = (x.reshape(-1, 16, *x.shape[-2:]) for x in (k, v))
        width = max(s.kv_len for s in case.sequences) // 16
        first = inputs.cu_seqlens_k[:-1, None] // 16
        tables = [(first + torch.arange(width, device=inputs.device, dtype=torch.int32)).clamp(max=k.shape[0] - 1)]
    window = (-1, -1) if mask.window_left is None else (mask.window_left, 0)
    spans = inputs.batch_args().get("mm_prefix_range")
    split: dict[str, Any] = {}
    if inputs.max_seqlen_q == 1:  # its split kernel; 16 segments, as its backend asks for
        rows, parts = inputs.q.reshape(-1, *inputs.q.shape[-2:]).shape[0], 16
        width = 1 << (case.head_dim_v - 1).bit_length()
        scratch = partial(torch.empty, dtype=torch.float32, device=inputs.device)
        split = dict(
            seq_threshold_3D=rows, num_par_softmax_segments=parts,
            softmax_segm_output=scratch(rows, case.heads_q, parts, width),
            softmax_segm_max=scratch(rows, case.heads_q, parts), softmax_segm_expsum=scratch(rows, case.heads_q, parts),
        )  # fmt: skip

    def call(q: Tensor, i: int) -> Tensor:
        flat = q.reshape(-1, *q.shape[-2:])
        out = flat.new_empty(*flat.shape[:-1], v.shape[-1])
        unified_attention(
            q=flat, k=k, v=v, out=out, cu_seqlens_q=inputs.cu_seqlens_q, max_seqlen_q=inputs.max_seqlen_q,
            seqused_k=inputs.seqused_k, max_seqlen_k=inputs.max_seqlen_k, softmax_scale=case.head_dim**-0.5,
            causal=mask.causal, window_size=window, block_table=tables[i % len(tables)], softcap=0.0, q_descale=None,
            k_descale=None, v_descale=None, sinks=inputs.sinks, mm_prefix_range=spans, **split,
        )  # fmt: skip
        return out.reshape(*q.shape[:-1], out.shape[-1])

    return Prepared(case, call)


def _half_only(prepare: Callable[[Inputs], Prepared], inputs: Inputs) -> Prepared:
    if inputs.case.float8:
        raise CannotRun("not run here over float8 keys and values")
    return prepare(inputs)


PROVIDERS: dict[str, Provider] = {
    p.name: p if p.name.startswith("mmattn") else replace(p, prepare=partial(_half_only, p.prepare))
    for p in (
        Provider("mmattn", "mmattn, backend='auto'", partial(_mmattn, backend="auto")),
        Provider("mmattn-cute", "mmattn on FlashAttention-4", partial(_mmattn, backend="cute")),
        Provider("mmattn-triton", "mmattn on Triton", partial(_mmattn, backend="triton")),
        Provider("mmattn-torch", "mmattn on torch operators", partial(_mmattn, backend="torch")),
        Provider("fa4-native", "FlashAttention-4 without images: the floor", fa4.native),
        Provider("fa4-mask-mod", "FlashAttention-4 with a dense mask_mod", fa4.dense_mask_mod),
        Provider("fa4-split", "virtual-sequence split on FlashAttention-4", fa4.split),
        Provider("fa4-split-kernels", "the same without gathering rows", partial(fa4.split, gather=False)),
        Provider("flex", "FlexAttention compiled, mask given", partial(flex.prepare, backend="TRITON", fresh=False)),
        Provider(
            "flex-fresh",
            "FlexAttention compiled, a fresh mask each call",
            partial(flex.prepare, backend="TRITON", fresh=True),
        ),
        Provider(
            "flex-flash",
            "FlexAttention on its FLASH backend, mask given",
            partial(flex.prepare, backend="FLASH", fresh=False),
        ),
        Provider(
            "flex-flash-fresh", "the same, a fresh mask each call", partial(flex.prepare, backend="FLASH", fresh=True)
        ),
        Provider("sdpa-dense", "SDPA with a dense mask", _sdpa_dense),
        Provider("cudnn-causal", "SDPA on cuDNN, plain causal", _cudnn_causal),
        Provider("vllm-triton", "vLLM's Triton kernel", _vllm_triton),
    )
}

GPU_DEFAULT = tuple(name for name in PROVIDERS if name != "mmattn-torch")
"""`mmattn-torch` reads the device and is no choice on a GPU; ask for it by name."""
CPU_DEFAULT = ("mmattn-torch", "mmattn-triton", "sdpa-dense", "flex")
