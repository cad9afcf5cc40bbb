"""Where the suite runs: on a GPU if there is one, else on the CPU with Triton kernels in Triton's interpreter."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton

BACKENDS = ("cute", "triton", "torch")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs an NVIDIA or AMD GPU; skipped without one")
    config.addinivalue_line("markers", "slow: takes more than about ten seconds")
    # The interpreter computes in numpy, which warns where a kernel relies on 1 / 0 = inf or log2(0) = -inf.
    config.addinivalue_line("filterwarnings", "ignore::RuntimeWarning:triton.runtime.interpreter")
    torch.set_num_threads(min(2, torch.get_num_threads()))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest, device: torch.device) -> str:
    """Every backend; one that cannot run even a plain call here is skipped with its own reasons."""
    from mmattn import Mask

    from .calls import skip_unsupported

    x = torch.zeros(128, 2, 64, dtype=torch.float16, device=device)
    skip_unsupported(request.param, x, x, x, Mask())
    return request.param


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No debug mode; and backends are tested that users do not get before they passed."""
    from mmattn import dispatch

    monkeypatch.delenv("MMATTN_DEBUG", raising=False)
    monkeypatch.setattr(dispatch, "UNCHECKED", frozenset())
