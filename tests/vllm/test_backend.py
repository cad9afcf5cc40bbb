"""Builder and layer with vLLM's own types, and everything that is refused. No engine."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import AttentionType, CommonAttentionMetadata
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.kv_cache_interface import CrossAttentionSpec, EncoderOnlyAttentionSpec, FullAttentionSpec

import mmattn
import mmattn.vllm
from mmattn import Mask
from mmattn.vllm import scheduler
from mmattn.vllm.version import check_version

HEADS, KV_HEADS, DIM, PAGE = 4, 2, 32, 16


def config(**changes: Any) -> Any:
    """What the builder reads of vLLM's config; `changes` by `part__field`."""
    made = SimpleNamespace(
        model_config=SimpleNamespace(is_mm_prefix_lm=False, rswa_window=None),
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=1, prefill_context_parallel_size=1, use_ubatching=False, enable_dbo=False
        ),
        scheduler_config=SimpleNamespace(
            max_num_batched_tokens=64, is_multimodal_model=True, disable_chunked_mm_input=True, long_prefill_token_threshold=0
        ),
        cache_config=SimpleNamespace(kv_sharing_fast_prefill=False), speculative_config=None,
    )  # fmt: skip
    for name, value in changes.items():
        part, field = name.split("__")
        setattr(getattr(made, part), field, value)
    return made


def common(q_lens: list[int], kv_lens: list[int], table: torch.Tensor, **more: Any) -> CommonAttentionMetadata:
    starts = torch.tensor([0, *q_lens]).cumsum(0).to(torch.int32)
    lens = torch.tensor(kv_lens, dtype=torch.int32)
    values: dict[str, Any] = dict(
        query_start_loc=starts, query_start_loc_cpu=starts, seq_lens=lens, num_reqs=len(q_lens),
        num_actual_tokens=int(starts[-1]), max_query_len=max(q_lens), max_seq_len=max(kv_lens), block_table_tensor=table,
        slot_mapping=torch.zeros(int(starts[-1]), dtype=torch.int64), seq_lens_cpu_upper_bound=lens,
    )  # fmt: skip
    return CommonAttentionMetadata(**{**values, **more})


def backend() -> Any:
    mmattn.vllm.register()
    return AttentionBackendEnum["MMATTN"].get_class()


def build(spec: Any, metadata: CommonAttentionMetadata, **changes: Any) -> Any:
    builder = backend().get_builder_cls()(spec, ["layer"], config(**changes), torch.device("cpu"))
    return builder, builder.build(0, metadata)


def impl(**options: Any) -> Any:
    return backend().get_impl_cls()(HEADS, DIM, DIM**-0.5, KV_HEADS, **options)


LAYER = SimpleNamespace(_k_scale=torch.ones(()), _v_scale=torch.ones(()), _k_scale_float=1.0, _v_scale_float=1.0)
SPEC = dict(block_size=PAGE, num_kv_heads=KV_HEADS, head_size=DIM, dtype=torch.float32)


def run(
    layer_impl: Any, metadata: Any, q: torch.Tensor, k: Any, v: Any, cache: Any, layer: Any = LAYER
) -> torch.Tensor:
    out = torch.full_like(q, torch.nan)
    assert layer_impl.forward(layer, q, k, v, cache, metadata, output=out) is out
    return out


def oracle(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask, **more: Any) -> torch.Tensor:
    return mmattn.reference(q, k, v, mask, **more)[0].to(q.dtype)


class TestLayers:
    def test_encoder_only(self) -> None:
        """Both directions over this step's keys, no cache; a window on both sides."""
        q, k, v = (torch.randn(9, h, DIM) for h in (HEADS, KV_HEADS, KV_HEADS))
        step = common([4, 5], [4, 5], torch.zeros(2, 1, dtype=torch.int32), causal=False)
        _, metadata = build(EncoderOnlyAttentionSpec(**SPEC), step)
        for window in (None, 3):
            got = run(impl(attn_type=AttentionType.ENCODER_ONLY, sliding_window=window), metadata, q, k, v, None)
            for rows in (slice(0, 4), slice(4, 9)):
                mask = Mask.full() if window is None else Mask.sliding_window(window, causal=False)
                torch.testing.assert_close(got[rows], oracle(q[rows], k[rows], v[rows], mask), atol=1e-5, rtol=1e-5)

    @pytest.mark.parametrize("heads_first", [True, False])
    def test_cross_attention(self, heads_first: bool) -> None:
        """Decoder rows over an encoder's keys, in either layout of the cache."""
        cache = torch.full((4, KV_HEADS, PAGE, 2 * DIM), torch.nan)
        if not heads_first:
            cache = torch.full((4, PAGE, KV_HEADS, 2 * DIM), torch.nan).transpose(1, 2)
        layer_impl = impl(attn_type=AttentionType.ENCODER_DECODER)
        k, v = torch.randn(2, 20, KV_HEADS, DIM)
        table = torch.tensor([[2, 0]], dtype=torch.int32)
        slots = torch.tensor([2 * PAGE + i for i in range(PAGE)] + [0, 1, 2, 3])
        layer_impl.do_kv_cache_update(LAYER, k, v, cache, slots)
        _, metadata = build(CrossAttentionSpec(**SPEC), common([3], [20], table, causal=False))
        q = torch.randn(3, HEADS, DIM)
        torch.testing.assert_close(run(layer_impl, metadata, q, None, None, cache), oracle(q, k, v, Mask.full()), atol=1e-5, rtol=1e-5)  # fmt: skip

    def test_cleared_spans(self) -> None:
        """What a model does at run time: no span is left on a layer without a clamp, one that clamps keeps them; and the
        next step without images finds none."""
        cache = torch.randn(2, KV_HEADS, PAGE, 2 * DIM)
        k, v = cache.transpose(1, 2)[1, :12].split(DIM, dim=-1)
        q = torch.randn(12, HEADS, DIM)
        table = torch.tensor([[1]], dtype=torch.int32)
        spans = {0: [(2, 9)]}
        builder, metadata = build(
            FullAttentionSpec(**SPEC),
            common([12], [12], table, mm_req_doc_ranges=spans),
            model_config__is_mm_prefix_lm=True,
        )
        with_spans = oracle(q, k, v, Mask(), mm_prefix_range=[spans[0]])
        clamped = SimpleNamespace(**vars(LAYER), mm_prefix_clamp_sliding_window=True)
        torch.testing.assert_close(run(impl(), metadata, q, None, None, cache), with_spans, atol=1e-5, rtol=1e-5)
        metadata.mm_prefix_range = None
        torch.testing.assert_close(
            run(impl(), metadata, q, None, None, cache), oracle(q, k, v, Mask()), atol=1e-5, rtol=1e-5
        )
        sliding = Mask.sliding_window(4, mm_prefix_clamp=True)
        got = run(impl(sliding_window=4), metadata, q, None, None, cache, clamped)
        torch.testing.assert_close(got, oracle(q, k, v, sliding, mm_prefix_range=[spans[0]]), atol=1e-5, rtol=1e-5)
        metadata = builder.build(0, common([12], [12], table, mm_req_doc_ranges={0: []}))
        got = run(impl(sliding_window=4), metadata, q, None, None, cache, clamped)
        torch.testing.assert_close(got, oracle(q, k, v, sliding), atol=1e-5, rtol=1e-5)
        assert (builder._row_spans == -1).all()

    def test_a_graph_of_several_rows_reads_spans(self) -> None:
        table = torch.tensor([[1]], dtype=torch.int32)
        builder, _ = build(FullAttentionSpec(**SPEC), common([4], [12], table), model_config__is_mm_prefix_lm=True)
        captured = builder.build_for_cudagraph_capture(common([4], [12], table))
        assert captured.mm_prefix_range is not None
        assert captured.step.row_spans.data_ptr() == builder._row_spans.data_ptr()
        single = builder.build_for_cudagraph_capture(common([1], [12], table))
        assert single.step.row_spans is None

    def test_causal_per_request(self) -> None:
        cache = torch.randn(2, KV_HEADS, PAGE, 2 * DIM)
        q = torch.randn(6, HEADS, DIM)
        table = torch.tensor([[0], [1]], dtype=torch.int32)
        _, metadata = build(
            FullAttentionSpec(**SPEC), common([3, 3], [9, 9], table, causal=torch.tensor([True, False]))
        )
        got = run(impl(), metadata, q, None, None, cache)
        for b, causal in enumerate((True, False)):
            k, v = cache.transpose(1, 2)[b, :9].split(DIM, dim=-1)
            rows = slice(3 * b, 3 * b + 3)
            torch.testing.assert_close(got[rows], oracle(q[rows], k, v, Mask(causal=causal)), atol=1e-5, rtol=1e-5)

    def test_float8(self) -> None:
        """One scale for keys and one for values, written and read."""
        layer = SimpleNamespace(
            _k_scale=torch.tensor(0.5), _v_scale=torch.tensor(2.0), _k_scale_float=0.5, _v_scale_float=2.0
        )
        cache = torch.zeros(1, KV_HEADS, PAGE, 2 * DIM, dtype=torch.uint8)
        k, v = torch.randn(2, 9, KV_HEADS, DIM, dtype=torch.bfloat16)
        q = torch.randn(9, HEADS, DIM, dtype=torch.bfloat16)
        layer_impl = impl(kv_cache_dtype="fp8")
        layer_impl.do_kv_cache_update(layer, k, v, cache, torch.arange(9))
        _, metadata = build(FullAttentionSpec(**SPEC), common([9], [9], torch.zeros(1, 1, dtype=torch.int32)))
        got = run(layer_impl, metadata, q, None, None, cache, layer)
        k8, v8 = (((x.float() / s).to(torch.float8_e4m3fn).float() * s) for x, s in ((k, 0.5), (v, 2.0)))
        torch.testing.assert_close(got.float(), oracle(q.float(), k8, v8, Mask()), atol=3e-2, rtol=3e-2)


class TestRefusals:
    def validate(self, **changes: Any) -> list[str]:
        asked: dict[str, Any] = dict(
            head_size=128, dtype=torch.bfloat16, kv_cache_dtype="auto", block_size=None, use_mla=False, has_sink=True,
            use_sparse=False, use_mm_prefix=True, use_per_head_quant_scales=False, device_capability=DeviceCapability(9, 0),
            attn_type="decoder", has_sliding_window=True,
        )  # fmt: skip
        return backend().validate_configuration(**{**asked, **changes})

    def test_the_usual_is_taken(self) -> None:
        assert self.validate() == []
        assert self.validate(dtype=torch.float32, use_non_causal=True, block_size=48) == []
        for kind in AttentionType:
            assert self.validate(attn_type=kind) == []

    @pytest.mark.parametrize(
        ("changes", "reason"),
        [
            (dict(use_rswa=True), "R-SWA not supported: its rows see the prompt and a window"),
            (dict(use_dcp=True), "DCP not supported: the keys of one rank lie interleaved"),
            (dict(use_mla=True), "MLA not supported"),
            (dict(use_sparse=True), "sparse not supported"),
            (dict(use_pcp=True), "PCP not supported"),
            (dict(use_batch_invariant=True), "batch invariance not supported"),
            (dict(use_per_head_quant_scales=True), "per-head quant scales not supported"),
            (dict(block_size=20), "block_size not supported"),
            (dict(dtype=torch.float64), "dtype not supported"),
            (dict(kv_cache_dtype="int8_per_token_head"), "kv_cache_dtype not supported"),
            (dict(kv_cache_dtype="float16"), "keys and queries must have one dtype"),
            (
                dict(kv_cache_dtype="fp8", dtype=torch.float32),
                "float8 keys with a model in float32 not supported",
            ),
        ],
    )
    def test_configurations(self, changes: dict[str, Any], reason: str) -> None:
        reasons = self.validate(**changes)
        assert any(reason in r for r in reasons), reasons

    def test_reasons_of_the_kernels(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """On a GPU that no kernel of mmattn runs on, vLLM gets mmattn's reasons."""
        from mmattn.vllm import backend as module

        gpu = SimpleNamespace(is_cuda_alike=lambda: True, is_rocm=lambda: False, device_type="cuda")
        monkeypatch.setattr(module, "current_platform", gpu)
        assert self.validate() == []
        (reason,) = self.validate(head_size=768, device_capability=DeviceCapability(9, 0))
        assert "head dims 768/768 exceed 512" in reason and "torch:" not in reason
        (reason,) = self.validate(device_capability=DeviceCapability(7, 0))
        assert "compute capability 7.0" in reason

    @pytest.mark.parametrize(
        ("changes", "reason"),
        [
            (dict(parallel_config__decode_context_parallel_size=2), "decode_context_parallel_size"),
            (dict(parallel_config__prefill_context_parallel_size=2), "prefill_context_parallel_size"),
            (dict(model_config__rswa_window=8), "R-SWA"),
            (dict(scheduler_config__disable_chunked_mm_input=False), "--disable-chunked-mm-input"),
            (dict(scheduler_config__long_prefill_token_threshold=8), "long_prefill_token_threshold"),
            (dict(parallel_config__enable_dbo=True), "--enable-dbo"),
            (dict(cache_config__kv_sharing_fast_prefill=True), "--kv-sharing-fast-prefill"),
        ],
    )
    def test_engines(self, changes: dict[str, Any], reason: str) -> None:
        table = torch.zeros(1, 1, dtype=torch.int32)
        with pytest.raises(ValueError, match="MMATTN cannot serve this configuration") as caught:
            build(FullAttentionSpec(**SPEC), common([1], [1], table), model_config__is_mm_prefix_lm=True, **changes)
        assert reason in str(caught.value)

    @pytest.mark.parametrize(
        ("options", "reason"),
        [
            (dict(alibi_slopes=[1.0] * HEADS), "ALiBi"),
            (dict(kv_cache_dtype="int4_per_token_head"), "kv_cache_dtype"),
            (dict(kv_cache_dtype="fp8", attn_type=AttentionType.ENCODER_ONLY), "float8 keys in encoder attention"),
            (dict(chunk_lookback=1), "chunk_lookback=1"),
        ],
    )
    def test_layers(self, options: dict[str, Any], reason: str) -> None:
        with pytest.raises(ValueError, match="MMATTN cannot run this layer") as caught:
            impl(**options)
        assert reason in str(caught.value)
        impl(chunk_lookback=-1, use_alibi_sqrt=False)  # vLLM's words for "no"

    def test_at_run_time(self) -> None:
        table = torch.zeros(1, 1, dtype=torch.int32)
        builder, metadata = build(FullAttentionSpec(**SPEC), common([1], [1], table))
        with pytest.raises(NotImplementedError, match="cascade"):
            builder.build(5, common([1], [1], table))
        with pytest.raises(ValueError, match="does not call a prefix LM"):
            builder.build(0, common([1], [1], table, mm_req_doc_ranges={0: [(0, 1)]}))
        with pytest.raises(NotImplementedError, match="quantise"):
            q = torch.zeros(1, HEADS, DIM)
            impl().forward(LAYER, q, None, None, None, metadata, output=q, output_scale=torch.ones(()))

    @pytest.mark.parametrize("version", ["0.31.2", "0.35.0", "1.0", "nightly"])
    def test_versions(self, version: str) -> None:
        with pytest.raises(ImportError, match=rf"vLLM 0\.32 up to but not including 0\.35 .* found {version}"):
            check_version(version)
        check_version("0.34.1+cu130")


class TestPlugin:
    def test_nothing_changes_unless_asked(self) -> None:
        """vLLM loads the plugin in a fresh process; its own attention stays, and MMATTN is known by its name."""
        code = (
            "from vllm.plugins import load_general_plugins; load_general_plugins()\n"
            "from vllm.v1.attention.backends.registry import AttentionBackendEnum as E\n"
            "import sys; assert 'mmattn.vllm.backend' not in sys.modules\n"
            "assert E.CPU_ATTN.get_class().__name__ == 'CPUAttentionBackend' and not E.CPU_ATTN.is_overridden()\n"
            "backend = E['MMATTN'].get_class(); assert backend.get_name() == 'MMATTN', backend\n"
        )
        subprocess.run([sys.executable, "-c", code], check=True, timeout=240)

    def test_on_request(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(mmattn.vllm.CPU_VARIABLE, "0")
        mmattn.vllm.use()
        mmattn.vllm.use()
        try:
            assert AttentionBackendEnum.CPU_ATTN.get_class() is backend()
        finally:
            mmattn.vllm.use(False)
        assert AttentionBackendEnum.CPU_ATTN.get_class() is not backend()


class TestScheduler:
    def image(self, offset: int, length: int) -> Any:
        return SimpleNamespace(mm_position=SimpleNamespace(offset=offset, length=length))

    @pytest.mark.parametrize(
        ("computed", "new", "want"),
        [
            (0, 10, 10),  # ends before the image
            (0, 15, 10),  # would end within it
            (0, 30, 30),  # ends with it
            (10, 19, 0),  # begins with it, and has too few tokens
            (15, 10, 0),  # a cached part, and too few tokens for the rest
            (15, 15, 15),
            (10, 35, 30),  # reaches into the next one
        ],
    )
    def test_chunks_end_outside_of_images(self, computed: int, new: int, want: int) -> None:
        images = [self.image(10, 20), self.image(40, 8)]
        assert scheduler.whole_images(images, computed, new) == want

    def test_only_for_engines_that_run_mmattn(self, monkeypatch: pytest.MonkeyPatch) -> None:
        mmattn.vllm.register()
        monkeypatch.delenv(mmattn.vllm.CPU_VARIABLE, raising=False)

        def wanted(device: str, spans: bool, backend: Any, **kinds: Any) -> bool:
            return scheduler.wanted(
                SimpleNamespace(
                    model_config=SimpleNamespace(is_mm_prefix_lm=spans), device_config=SimpleNamespace(device_type=device),
                    attention_config=SimpleNamespace(backend=backend, backend_per_kind=kinds),
                )
            )  # fmt: skip

        ours = AttentionBackendEnum["MMATTN"]
        assert wanted("cuda", True, ours) and wanted("cuda", True, None, sliding_window=ours)
        assert not wanted("cuda", False, ours)
        for other in (None, AttentionBackendEnum.TRITON_ATTN, AttentionBackendEnum.CUSTOM):
            assert not wanted("cuda", True, other)
        monkeypatch.setenv(mmattn.vllm.CPU_VARIABLE, "1")
        assert wanted("cpu", True, None) and not wanted("cuda", True, None)
