"""From vLLM's metadata of a step to `mmattn.engines.Step`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.kv_cache_interface import EncoderOnlyAttentionSpec

from ..engines import Step, fill_row_spans
from . import scheduler as scheduling


@dataclass(eq=False)
class MMAttentionMetadata(AttentionMetadata):
    """What the layers of one KV-cache group get in one step."""

    step: Step
    num_actual_tokens: int
    causal: bool
    """Of the layers' masks; `step.causal` overrides it per request."""
    mm_prefix_range: dict[int, list[tuple[int, int]]] | None
    """Image spans by request. Models set it to None, after this was built, for layers that must see none (Gemma 4's global
    ones), so it is looked at in every layer. Only whether it is None matters: the spans are in `step.row_spans`."""


class MMAttentionMetadataBuilder(AttentionMetadataBuilder[MMAttentionMetadata]):
    # A graph computes its plans itself, from tensors at fixed addresses. Graphs of mixed batches would be right too, but
    # their kernels would be chosen for the longest prompt.
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        refuse(vllm_config)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        self._keys_in_pages = not isinstance(kv_cache_spec, EncoderOnlyAttentionSpec)
        self._row_spans: Tensor | None = None
        self._has_spans = False
        model = vllm_config.model_config
        if model is not None and model.is_mm_prefix_lm:
            # At one address, as graphs want it; (-1, -1) in every row without a span.
            rows = vllm_config.scheduler_config.max_num_batched_tokens
            self._row_spans = torch.full((rows, 2), -1, dtype=torch.int32, device=device)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> MMAttentionMetadata:
        if common_prefix_len:
            raise NotImplementedError(f"MMATTN has no cascade attention (common_prefix_len={common_prefix_len})")
        spans = common_attn_metadata.mm_req_doc_ranges
        return self._metadata(common_attn_metadata, spans, self._write_spans(common_attn_metadata, spans))

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> MMAttentionMetadata:
        # A graph of several rows per request may be replayed for the end of an image. (One row sees no later key anyway.)
        if self._row_spans is None or common_attn_metadata.max_query_len == 1:
            return self._metadata(common_attn_metadata, None, False)
        return self._metadata(common_attn_metadata, {}, True)

    def _metadata(self, common: CommonAttentionMetadata, spans: Any, with_spans: bool) -> MMAttentionMetadata:
        requests, rows = common.num_reqs, common.num_actual_tokens
        of_requests = isinstance(common.causal, Tensor)
        starts = common.query_start_loc[: requests + 1]
        keys: dict[str, Any] = (
            dict(seqused_k=common.seq_lens[:requests], page_table=common.block_table_tensor[:requests])
            if self._keys_in_pages
            else dict(cu_seqlens_k=starts)
        )
        row_spans = None
        if with_spans:
            assert self._row_spans is not None
            row_spans = self._row_spans[:rows]
        step = Step(
            cu_seqlens_q=starts, total_q=rows, max_seqlen_q=int(common.max_query_len),
            max_seqlen_k=int(common.max_seq_len if self._keys_in_pages else common.max_query_len),
            causal=common.causal[:requests].to(torch.int32) if of_requests else None,
            row_spans=row_spans, **keys,
        )  # fmt: skip
        return MMAttentionMetadata(step, rows, True if of_requests else bool(common.causal), spans)

    def _write_spans(self, common: CommonAttentionMetadata, spans: dict[int, list[tuple[int, int]]] | None) -> bool:
        """Brings the spans of this step's rows to the device; whether there are any."""
        if self._row_spans is None:
            if spans and any(spans.values()):
                raise ValueError("image spans came for a model that vLLM's config does not call a prefix LM")
            return False
        found = False
        if spans:
            row_offsets = common.query_start_loc_cpu.tolist()
            lens = common.seq_lens_cpu_upper_bound
            if lens is None:
                if self.device.type != "cpu":
                    raise ValueError("image spans came without seq_lens_cpu_upper_bound, the lengths on the host")
                lens = common.seq_lens
            rows = max(row_offsets[-1], 1)
            # A new one in every step: the copy of the last step's may still be under way.
            host = torch.empty(rows, 2, dtype=torch.int32, pin_memory=self.device.type == "cuda")
            found = fill_row_spans(host, spans, row_offsets, lens.tolist())
            if found:
                self._row_spans[:rows].copy_(host, non_blocking=True)
                self._row_spans[rows:].fill_(-1)
        if self._has_spans and not found:
            self._row_spans.fill_(-1)
        self._has_spans = found
        return found


def refuse(vllm_config: Any) -> None:
    """Raises `ValueError`, with every reason, for what vLLM's `validate_configuration` is not told, or not asked on a CPU."""
    model, parallel, scheduler = vllm_config.model_config, vllm_config.parallel_config, vllm_config.scheduler_config
    reasons = []
    if parallel.decode_context_parallel_size > 1:
        reasons.append("decode_context_parallel_size > 1: the keys of one rank lie interleaved; set it to 1")
    if getattr(parallel, "prefill_context_parallel_size", 1) > 1:
        reasons.append("prefill_context_parallel_size > 1; set it to 1")
    if model is not None and getattr(model, "rswa_window", None) is not None:
        reasons.append("R-SWA: its rows see the prompt and a window, two key ranges, and mmattn's have one")
    if model is not None and model.is_mm_prefix_lm:
        if scheduler.is_multimodal_model and not scheduler.disable_chunked_mm_input:
            reasons.append(
                "the rows of an image see all of it, so it cannot be split between steps: pass "
                "disable_chunked_mm_input=True (--disable-chunked-mm-input); vLLM's CPU platform does not set it by itself"
            )
        if scheduler.long_prefill_token_threshold:
            reasons.append(
                "long_prefill_token_threshold could be less than an image, which then never runs; set it to 0"
            )
        if not scheduling.installed():
            reasons.append(
                "this vLLM's scheduler may split an image between steps (the log says why); install a tested version"
            )
        if getattr(parallel, "use_ubatching", False) or parallel.enable_dbo:
            reasons.append("micro-batches (--enable-dbo) lose vLLM's image spans; turn them off")
        if vllm_config.cache_config.kv_sharing_fast_prefill:
            reasons.append("--kv-sharing-fast-prefill loses vLLM's image spans; turn it off")
    if reasons:
        raise ValueError("MMATTN cannot serve this configuration:\n" + "\n".join(f"  {reason}" for reason in reasons))
