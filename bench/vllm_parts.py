"""Imports vLLM's attention from a few of its files, packed by `bench/pack_vllm.sh`, without the rest of vLLM.

What those files import from the rest is mostly for annotations, or for platforms other than this one. It is answered by
stand-ins: a module of the rest gives a class for every name that it is asked for. The few things that are really called
are given below; whatever is forgotten here fails loudly, for a stand-in is no tensor and no number.
"""

from __future__ import annotations

import logging
import sys
import types
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import torch


class _Anything(type):
    """A class that has every attribute."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name, (), {})

    def __getitem__(cls, item: Any) -> Any:
        return cls


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = _Anything(name, (), {})
        setattr(self, name, value)
        return value


class Platform:
    """What the packed files ask of the platform; an NVIDIA GPU, or the CPU with Triton's interpreter."""

    def __init__(self) -> None:
        self.device_type = "cuda" if torch.cuda.is_available() else "cpu"
        self.device_name = self.device_type
        self._capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else (9, 0)

    def is_cuda(self) -> bool:
        return self.device_type == "cuda"

    is_cuda_alike = is_cuda

    def is_rocm(self) -> bool:
        return False

    is_xpu = is_cpu = is_rocm

    def fp8_dtype(self) -> torch.dtype:
        return torch.float8_e4m3fn

    def get_device_name(self) -> str:
        return self.device_name

    def get_device_capability(self) -> Any:
        major, minor = self._capability
        return types.SimpleNamespace(
            major=major, minor=minor, as_version_str=lambda: f"{major}.{minor}", to_int=lambda: 10 * major + minor
        )

    def has_device_capability(self, least: int) -> bool:
        return 10 * self._capability[0] + self._capability[1] >= least

    def is_device_capability(self, wanted: tuple[int, int]) -> bool:
        return self._capability == wanted

    def is_device_capability_family(self, family: int) -> bool:
        return self._capability[0] == family // 10


class _Log(logging.LoggerAdapter):  # type: ignore[type-arg]
    def info_once(self, *args: Any, **kwargs: Any) -> None:
        self.info(*args)

    warning_once = debug_once = info_once


def _no_group() -> Any:
    raise AssertionError("no process group")


def _given() -> dict[str, dict[str, Any]]:
    import triton
    import triton.language as tl

    def size(dtype: torch.dtype) -> int:
        return torch.empty((), dtype=dtype).element_size()

    def to_device(data: Any, dtype: torch.dtype, device: Any) -> torch.Tensor:
        host = torch.tensor(data, dtype=dtype)
        return host.pin_memory().to(device, non_blocking=True) if torch.device(device).type == "cuda" else host

    return {
        "vllm.logger": {"init_logger": lambda name: _Log(logging.getLogger(name), {})},
        "vllm.envs": {"VLLM_TRITON_USE_TD": None, "VLLM_BATCH_INVARIANT": False},
        "vllm.platforms": {"current_platform": Platform()},
        "vllm.triton_utils": {"triton": triton, "tl": tl, "HAS_TRITON": True},
        "vllm.config": {"get_current_vllm_config_or_none": lambda: None, "get_layers_from_vllm_config": lambda *a: {}},
        "vllm.distributed.parallel_state": {
            "get_dcp_world_size_and_rank": lambda wanted: (1, 0), "get_pcp_group": _no_group,
        },
        "vllm.utils.torch_utils": {
            "get_dtype_size": size, "async_tensor_h2d": to_device, "PIN_MEMORY": torch.cuda.is_available(),
            "is_quantized_kv_cache": lambda name: name.startswith("fp8"),
        },
        "vllm.model_executor.layers.quantization.utils.quant_utils": {"get_fp8_min_max": lambda: (-448.0, 448.0)},
        # Off, so that a scheduler is not asked for.
        "vllm.v1.core.sched.scheduler": {
            "Scheduler": types.SimpleNamespace(_try_schedule_encoder_inputs=types.SimpleNamespace(keeps_images_whole=True)),
        },
    }  # fmt: skip


class _Finder(MetaPathFinder, Loader):
    def __init__(self, root: Path) -> None:
        self.root, self.given = root, _given()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != "vllm" and not name.startswith("vllm."):
            return None
        if self.root.joinpath(*name.split(".")).with_suffix(".py").exists():
            return None  # a packed file: the usual finder, by the package's path
        return ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        module = _Module(spec.name)
        module.__path__ = [str(self.root.joinpath(*spec.name.split(".")))]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        for name, value in self.given.get(module.__name__, {}).items():
            setattr(module, name, value)


def install(root: Path) -> None:
    """Lets `import vllm...` find the files under `root`."""
    if not (root / "vllm").is_dir():
        raise FileNotFoundError(f"{root} holds no vllm; make it with bench/pack_vllm.sh")
    sys.path.insert(0, str(root))
    sys.meta_path.insert(0, _Finder(root))
