"""Tests with vLLM's real engine on the CPU: `make test-vllm`. They need a venv of their own (`tests/vllm/install.sh`)."""

from __future__ import annotations

import os
from importlib.util import find_spec

INSTALLED = find_spec("vllm") is not None
collect_ignore_glob = [] if INSTALLED else ["test_*.py"]

if INSTALLED:  # before vLLM is imported; in other venvs this file must leave the environment alone
    # Triton's interpreter is for the other tests: an engine would take hours in it.
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ.update(
        VLLM_CPU_KVCACHE_SPACE="1", VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="WARNING",
        VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1",
    )  # fmt: skip
