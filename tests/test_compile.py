"""Every Triton kernel compiles for every target, without a GPU, and fits its shared memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed (Linux only)")

TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")


def compile_all(target: str) -> subprocess.CompletedProcess:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "-m", "tests.cross_compile", target],
        capture_output=True, text=True, env=env, cwd=Path(__file__).parent.parent, timeout=2400,
    )  # fmt: skip


@pytest.fixture(scope="module")
def runs() -> dict[str, Future]:
    """Two targets at a time."""
    pool = ThreadPoolExecutor(max_workers=2)
    return {target: pool.submit(compile_all, target) for target in TARGETS}


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_kernels_cross_compile(target: str, runs: dict[str, Future]) -> None:
    done = runs[target].result()
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    compiled = [json.loads(line) for line in done.stdout.splitlines()]
    assert {
        "_row_kernel", "_tile_kernel", "_order_kernel", "_column_kernel", "_forward_kernel", "_combine_kernel",
        "_prepare_kernel", "_key_kernel", "_query_kernel",
    } <= {each["kernel"] for each in compiled}  # fmt: skip
    for each in compiled:
        assert each["shared"] <= each["limit"], (
            f"{each['shared']} bytes of shared memory exceed {each['limit']}: {each}"
        )
        if each["ahead"]:  # two programs share a multiprocessor's 228 KiB, of which each loses 1 KiB
            assert each["shared"] <= 113 * 1024, f"{each}: one program per multiprocessor; is q in shared memory?"
        if "programs" in each:  # else the splits of a single request come in two waves
            assert each["held"] >= each["programs"], (
                f"{each}: a multiprocessor holds fewer programs than the table says"
            )
    assert any("programs" in each for each in compiled) == (target == "sm_90")
    assert any(each["tma"] for each in compiled) == any(each["ahead"] for each in compiled) == (target == "sm_90")
