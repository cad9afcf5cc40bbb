"""What vLLM asks before it takes the backend: which configurations it can run, and why not the others."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from .version import check_version

check_version()  # before anything of vLLM that may have moved

from vllm.platforms import current_platform  # noqa: E402
from vllm.v1.attention.backend import AttentionBackend, AttentionType, MultipleOf  # noqa: E402
from vllm.v1.attention.backends.registry import AttentionBackendEnum  # noqa: E402

from .. import dispatch  # noqa: E402
from ..batch import Call  # noqa: E402
from .builder import MMAttentionMetadataBuilder  # noqa: E402
from .impl import FLOAT8, MMAttentionImpl  # noqa: E402


class MMAttentionBackend(AttentionBackend):
    """mmattn as a backend of vLLM V1."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "float16", "bfloat16", *FLOAT8]
    forward_includes_kv_cache_update = False

    @staticmethod
    def get_name() -> str:
        # vLLM looks the name up among its own.
        return "MMATTN" if "MMATTN" in AttentionBackendEnum.__members__ else "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[MMAttentionImpl]:
        return MMAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[MMAttentionMetadataBuilder]:
        return MMAttentionMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(16)]

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        return True

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type in tuple(AttentionType)

    @classmethod
    def validate_configuration(
        cls, *args: Any, use_rswa: bool = False, use_dcp: bool = False, **kwargs: Any
    ) -> list[str]:
        # `args`: vLLM passes all by name; the rest is its own check, feature by feature, and `supports_combination`.
        reasons = super().validate_configuration(*args, use_rswa=False, use_dcp=False, **kwargs)
        if use_rswa:
            reasons.append(
                "R-SWA not supported: its rows see the prompt and a window, two key ranges, and mmattn's have one"
            )
        if use_dcp:
            reasons.append(
                "DCP not supported: the keys of one rank lie interleaved, so that their positions are no longer those of "
                "one range; use --decode-context-parallel-size 1"
            )
        return reasons

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: Any,
        block_size: int | None,
        use_mla: bool,
        has_sink: bool,
        use_sparse: bool,
        use_mm_prefix: bool,
        device_capability: Any,
    ) -> str | None:
        if use_mla or use_sparse:
            return None  # vLLM says so
        kv_dtype = FLOAT8.get(kv_cache_dtype, dtype)
        if kv_cache_dtype in ("float16", "bfloat16") and getattr(torch, kv_cache_dtype) is not dtype:
            return f"a {kv_cache_dtype} cache with a model in {dtype} not supported: keys and queries must have one dtype, or float8 keys"
        if kv_dtype is not dtype and dtype is torch.float32:
            return "float8 keys with a model in float32 not supported; use --dtype float16 or bfloat16"
        call = Call(
            device_type="cuda" if current_platform.is_cuda_alike() else current_platform.device_type,
            capability=(device_capability.major, device_capability.minor)
            if device_capability is not None and not current_platform.is_rocm()
            else None,
            dtype=dtype, kv_dtype=kv_dtype, heads_q=1, heads_kv=1, head_dim=head_size, head_dim_v=head_size,
            packed_q=True, packed_k=False, page_size=block_size or 16, aligned=True, split_kv=False, mixed=False,
            softcap=False, sinks=has_sink, scales=kv_dtype is not dtype, num_splits=False, out=True, grad=False,
        )  # fmt: skip
        against = dispatch.reasons(call)
        if current_platform.device_type != "cpu":
            # The torch backend would synchronise in every layer: not for an engine on a GPU.
            against.pop("torch")
        return None if not all(against.values()) else f"no kernel of mmattn can run it:\n{dispatch.explain(against)}"
