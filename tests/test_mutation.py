"""The suite must see every historical fault: each is put into the plan, and the probes that the tests use must fail."""

from __future__ import annotations

import doctest
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

import mmattn.faults
from mmattn import Mask, attention, plan
from mmattn.faults import FAULTS, inject

from .budget import assert_close, expect
from .cases import BY_NAME, build
from .probes import MANY_ROWS, PROBES, Interval, Setup

CLAMPED = Mask.sliding_window(8, mm_prefix_clamp=True)
CPU = torch.device("cpu")

# fault -> (a sequence on which it shows, what its rows must see, the probes that must fail). The poison probe cannot
# notice a key that is missing, except where the row is left with nothing.
SCENES: dict[str, tuple[Setup, dict[int, Interval], set[str]]] = {
    "window-dropped": (
        Setup(Mask.sliding_window(32), 160, 160, "", CPU, spans=[(8, 23)]),
        {159: (128, 159)}, {"count", "poison", "needle"},
    ),
    "chunk-local-q": (
        Setup(Mask.sliding_window(16), 8, 72, "", CPU, spans=[(66, 69)]),
        {64: (49, 64), 66: (51, 69), 71: (56, 71)}, {"count", "poison", "needle"},
    ),
    "missing-clamp": (
        Setup(CLAMPED, 48, 48, "", CPU, spans=[(4, 27)]),
        {4: (0, 27), 20: (13, 27), 27: (20, 27), 30: (23, 30)}, {"count", "poison", "needle"},
    ),
    "two-sided-clamp": (
        Setup(CLAMPED, 48, 48, "", CPU, spans=[(4, 27)]),
        {4: (0, 27), 20: (13, 27), 27: (20, 27)}, {"count", "needle"},
    ),
    "left-only-window": (
        Setup(Mask.sliding_window(16, causal=False), 64, 64, "", CPU),
        {0: (0, 15), 32: (17, 47), 63: (48, 63)}, {"count", "needle"},
    ),
    "causal-end": (
        Setup(Mask(), 64, 64, "", CPU, spans=[(8, 47)]),
        {7: (0, 7), 8: (0, 47), 48: (0, 48)}, {"count", "needle"},
    ),
    "window-off-by-one": (
        Setup(Mask.sliding_window(4), 16, 16, "", CPU),
        {10: (7, 10)}, {"count", "poison", "needle"},
    ),
    "spans-merged": (
        Setup(Mask(), 40, 40, "", CPU, spans=[(2, 11), (12, 21)]),
        {5: (0, 11), 15: (0, 21)}, {"count", "poison", "needle"},
    ),
}  # fmt: skip

# fault -> a parity case that must fail with it
CASES = {
    "window-dropped": "packed-spans-window",
    "chunk-local-q": "packed-window",
    "missing-clamp": "packed-spans-clamped",
    "two-sided-clamp": "packed-spans-clamped",
    "left-only-window": "packed-symmetric",
    "causal-end": "packed-spans-window-long",
    "window-off-by-one": "packed-window",
    "spans-merged": "spans-touching-lists",
}


def failing_probes(setup: Setup, expected: dict[int, Interval]) -> set[str]:
    failed = set()
    for name, probe in PROBES.items():
        try:
            probe(setup, expected)
        except AssertionError:
            failed.add(name)
    return failed


def with_fault(name: str) -> Callable:
    return lambda plan: inject(plan, name)


def test_every_fault_has_a_scene() -> None:
    assert list(FAULTS) == list(SCENES) == list(CASES)
    for name, fault in FAULTS.items():
        assert fault.name == name and "#" in fault.source and "\n" not in fault.description


@pytest.mark.parametrize("name", FAULTS)
def test_probes_catch(name: str, backend: str, device: torch.device) -> None:
    scene, expected, catches = SCENES[name]
    scene = replace(scene, backend=backend, device=device)
    assert failing_probes(scene, expected) == set(), "the probes must pass on the right plan"
    assert failing_probes(replace(scene, alter=with_fault(name)), expected) == catches


@pytest.mark.parametrize("name", FAULTS)
def test_parity_catches(name: str, backend: str, device: torch.device) -> None:
    inputs = build(BY_NAME[CASES[name]], device)
    right = plan(inputs.mask, q=inputs.q, k=inputs.k, max_seqlen_q=MANY_ROWS, **inputs.batch)
    expected = expect(inputs, interpreted=backend == "triton" and device.type == "cpu")
    assert_close(*attention(inputs.q, inputs.k, inputs.v, right, return_lse=True, backend=backend), expected)
    out, lse = attention(inputs.q, inputs.k, inputs.v, inject(right, name), return_lse=True, backend=backend)
    with pytest.raises(AssertionError, match=r"budget|-inf"):
        assert_close(out, None, expected)
    with pytest.raises(AssertionError, match=r"budget|-inf"):
        assert_close(expected.out, lse, expected)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_that_cannot_show_changes_nothing(name: str, device: torch.device) -> None:
    """A causal mask on a one-shot call without spans: every fault leaves the plan as it is."""
    right = plan(Mask(), max_seqlen_q=40, max_seqlen_k=40, batch_size=2, device=device)
    assert torch.equal(inject(right, name).rows, right.rows)


@pytest.mark.parametrize("case", ["packed-spans-clamped", "q_start-by-row", "kv_lo-packed", "rows-past-end-by-row"])
def test_a_fault_of_another_feature_changes_nothing(case: str, device: torch.device) -> None:
    """All layouts and positions: the intervals that `inject` computes without a fault are the plan's own."""
    inputs = build(BY_NAME[case], device)
    right = plan(inputs.mask, q=inputs.q, k=inputs.k, **inputs.batch)
    left_only = inject(right, "left-only-window")  # no such row in these cases
    assert torch.equal(left_only.rows, right.rows)


def test_inject_leaves_the_plan_alone(device: torch.device) -> None:
    right = plan(Mask.sliding_window(3), max_seqlen_q=9, max_seqlen_k=9, device=device)
    x = torch.zeros(1, 9, 2, 64, dtype=torch.float16, device=device)
    attention(x, x, x, right)
    rows, tiles = right.rows.clone(), right.tiles(16, 1, 16)
    faulty = inject(right, "window-off-by-one")
    assert not torch.equal(faulty.rows, rows) and torch.equal(right.rows, rows)
    assert right.tiles(16, 1, 16) is tiles and faulty.tiles(16, 1, 16) is not tiles
    assert right.forwards and not faulty.forwards, "nothing settled for the right rows may run the wrong ones"


def test_unknown_fault() -> None:
    with pytest.raises(ValueError, match=r"fault must be one of window-dropped.*got 'typo'"):
        inject(plan(Mask(), max_seqlen_q=4, max_seqlen_k=4), "typo")


def test_doctest() -> None:
    failed, tried = doctest.testmod(mmattn.faults)
    assert tried and not failed
