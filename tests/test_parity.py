"""The one parity body: every case on every backend, against the float64 oracle."""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch

from mmattn import attention, dispatch
from mmattn.cute import support as cute_support

from .budget import Expected, assert_close, expect
from .calls import skip_unsupported
from .cases import BY_NAME, CASES, Case, Inputs, build
from .conftest import BACKENDS
from .probes import MANY_ROWS

SENTINEL = 123.0


@lru_cache(maxsize=4)
def _prepared(case: Case, device: torch.device) -> tuple[Inputs, dict[bool, Expected]]:
    return build(case, device), {}


def run_case(case: Case, backend: str, device: torch.device) -> None:
    inputs, known = _prepared(case, device)
    args = dict(inputs.args)
    if backend == "cute" and "cu_seqlens_q" in args:
        args["max_seqlen_q"] = max(MANY_ROWS, inputs.q.shape[0])
    skip_unsupported(backend, inputs.q, inputs.k, inputs.v, inputs.mask, **args)
    interpreted = backend == "triton" and device.type == "cpu"
    if interpreted not in known:
        known[interpreted] = expect(inputs, interpreted)

    # `out` lies in memory that must come back untouched around it.
    q, v = inputs.q, inputs.v
    around = torch.full((*q.shape[:-1], v.shape[-1] + 8), SENTINEL, dtype=q.dtype, device=device)
    out = around[..., : v.shape[-1]]
    result, lse = attention(q, inputs.k, v, inputs.mask, out=out, return_lse=True, backend=backend, **args)
    assert result.data_ptr() == out.data_ptr()
    assert (around[..., v.shape[-1] :] == SENTINEL).all(), "wrote past the last column of out"
    assert_close(out, lse, known[interpreted])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_parity(case: Case, backend: str, device: torch.device) -> None:
    run_case(case, backend, device)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", [case.grown() for case in CASES if case.lens], ids=lambda case: case.name)
def test_parity_large(case: Case, backend: str, device: torch.device) -> None:
    run_case(case, backend, device)


PUBLIC = [
    f"{layout}-{feature}"
    for layout in ("packed", "batched")
    for feature in ("full", "window", "symmetric", "chunked-lookback", "spans-clamped", "mixed-causality")
] + ["softcap-packed", "sinks-packed", "dims-192-128-packed", "dims-256-256-packed", "group-3", "rows-past-end-packed"]


@pytest.mark.gpu
@pytest.mark.parametrize("name", PUBLIC)
def test_parity_of_the_public_interface(name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashAttention-4's own interface (`cute/fa4.py`), which runs everywhere but on SM90 with the pinned release."""
    monkeypatch.setattr(cute_support, "module", lambda call: cute_support.PUBLIC_API)
    dispatch.choose.cache_clear()
    try:
        run_case(BY_NAME[name].grown(), "cute", device)
    finally:
        dispatch.choose.cache_clear()


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(
    "name", ["packed-spans-window-long", "batched-spans-clamped", "strided-window", "packed-full", "softcap-packed"]
)
def test_parity_of_hopper_tiles(name: str, ahead: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tall tiles whose K and V come through tensor descriptors, with and without scores one block ahead."""
    from mmattn.triton import config, forward

    if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] < 9:
        pytest.skip("tensor descriptors need compute capability 9.0")
    table = {key: tile._replace(ahead=ahead) for key, tile in config._HOPPER.items() if tile.tma}
    monkeypatch.setitem(config._TABLES, "sm90", config._HOPPER | table)
    monkeypatch.setattr(forward, "architecture", lambda device: "sm90")
    monkeypatch.setattr(forward, "FEW_ROWS", 0)  # else short sequences take the split path
    launched = []
    launch = forward.Launch
    monkeypatch.setattr(forward, "Launch", lambda *a, **kw: launched.append(launch(*a, **kw)) or launched[-1])
    run_case(BY_NAME[name].grown(), "triton", device)
    assert any(each.constants["TMA"] and each.constants["AHEAD"] == ahead for each in launched)
