"""Mask: the definition against its closed form, constructors, drawings and errors."""

from __future__ import annotations

import doctest
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mmattn.mask
from mmattn import Mask, MaskError

SIZE = 9
SPAN_CHOICES: list[list[tuple[int, int]]] = [
    [], [(0, 0)], [(-1, -1)], [(2, 5)], [(0, 8)], [(1, 3), (4, 6)], [(3, 3), (5, 7)], [(6, 20)], [(0, 1), (3, 7)],
]  # fmt: skip


def assert_closed_form_is_the_definition(
    mask: Mask, spans: list[tuple[int, int]], causal: bool | None, first: int, size: int
) -> None:
    """Compares `visible` and `bounds` on all rows and keys `first..first+size-1`."""
    q = torch.arange(first, first + size)
    seen = mask.visible(q[:, None], q[None, :], spans=spans, causal=causal)
    own = [next((s for s in spans if s[0] < s[1] and s[0] <= row <= s[1]), (-1, -1)) for row in q.tolist()]
    start, end = torch.tensor(own).unbind(1)
    lo, hi = mask.bounds(q, span=(start, end), causal=causal)
    inside = (lo[:, None] <= q[None, :]) & (q[None, :] <= hi[:, None])
    assert torch.equal(seen, inside), f"{mask} with {spans}, causal={causal}:\n{seen.int()}\n{inside.int()}"


def windows() -> list[Mask]:
    sides = (None, 0, 1, 3, SIZE)
    return [
        Mask(causal=c, window_left=left, window_right=right, symmetrize=sym, mm_prefix_clamp=clamp)
        for c, left, right, sym, clamp in itertools.product((True, False), sides, sides, (True, False), (True, False))
    ]


def chunks() -> list[Mask]:
    return [
        Mask(causal=c, chunk_size=size, chunk_lookback=back)
        for c, size, back in itertools.product((True, False), (1, 2, 3, 7, SIZE + 3), (0, 1, 2))
    ]


@pytest.mark.parametrize("causal", [None, True, False])
@pytest.mark.parametrize("spans", SPAN_CHOICES, ids=str)
def test_bounds_equal_visible(spans: list[tuple[int, int]], causal: bool | None) -> None:
    for mask in windows() + chunks():
        assert_closed_form_is_the_definition(mask, spans, causal, 0, SIZE)


@pytest.mark.parametrize("mask", [*chunks(), Mask.sliding_window(3), Mask(causal=False, window_right=1)], ids=str)
def test_rows_before_position_0(mask: Mask) -> None:
    assert_closed_form_is_the_definition(mask, [(2, 5)], None, -11, 19)


@st.composite
def masks(draw: st.DrawFn) -> Mask:
    causal, sym = draw(st.booleans()), draw(st.booleans())
    if draw(st.booleans()):
        return Mask(causal=causal, chunk_size=draw(st.integers(1, 40)), chunk_lookback=draw(st.integers(0, 4)))
    side = st.none() | st.integers(0, 50)
    return Mask(
        causal=causal,
        window_left=draw(side),
        window_right=draw(side),
        symmetrize=sym,
        mm_prefix_clamp=draw(st.booleans()),
    )


@st.composite
def disjoint_spans(draw: st.DrawFn) -> list[tuple[int, int]]:
    cuts = sorted(draw(st.sets(st.integers(0, 60), max_size=10)))
    pairs = list(zip(cuts[::2], cuts[1::2]))  # sorted distinct numbers, two by two: disjoint, sometimes touching
    return pairs + draw(st.lists(st.sampled_from([(0, 0), (-1, -1), (7, 7)]), max_size=2))


@settings(max_examples=300, deadline=None)
@given(masks(), disjoint_spans(), st.none() | st.booleans(), st.integers(-20, 20))
def test_bounds_equal_visible_anywhere(
    mask: Mask, spans: list[tuple[int, int]], causal: bool | None, first: int
) -> None:
    assert_closed_form_is_the_definition(mask, spans, causal, first, 64)


@settings(max_examples=100, deadline=None)
@given(masks(), st.integers(0, 2**31 - 200))
def test_large_positions_do_not_overflow(mask: Mask, first: int) -> None:
    assert_closed_form_is_the_definition(mask, [(first + 3, first + 9)], None, first, 24)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 30), st.integers(1, 8), disjoint_spans())
def test_clamp_only_takes_away_and_only_past_keys(window: int, back: int, spans: list[tuple[int, int]]) -> None:
    q = torch.arange(64)
    free = Mask.sliding_window(window).visible(q[:, None], q, spans=spans)
    clamped = Mask.sliding_window(window, mm_prefix_clamp=True).visible(q[:, None], q, spans=spans)
    assert not (clamped & ~free).any()
    gone = free & ~clamped
    assert (q[:, None] - q[None, :])[gone].ge(window).all()


def test_drawings_of_the_docstring() -> None:
    failed, tried = doctest.testmod(mmattn.mask)
    assert tried >= 7 and failed == 0


def test_matrix_of_a_later_chunk() -> None:
    assert Mask.sliding_window(2).matrix(2, 4) == ". x x .\n. . x x"
    assert Mask.sliding_window(2).matrix(2, 4, q_start=1) == "x x . .\n. x x ."


def test_constructors() -> None:
    assert Mask.causal_() == Mask() == Mask(causal=True)
    assert Mask.full() == Mask(causal=False)
    assert Mask.sliding_window(4).window_left == 3
    assert Mask.chunked(8, 2) == Mask(chunk_size=8, chunk_lookback=2)
    assert Mask.from_fa_window(True, (-1, 0)) == Mask(symmetrize=False, window_right=0)
    assert Mask.from_fa_window(False, (None, -1)) == Mask.full(symmetrize=False)
    assert Mask.from_fa_window(False, (3, 5)) == Mask(causal=False, window_left=3, window_right=5, symmetrize=False)


@pytest.mark.parametrize("window", [(3, -1), (3, None), (3, 0), (-1, 2), (0, 0), (4, 4)])
def test_from_fa_window_is_literal(window: tuple[int | None, int | None]) -> None:
    q = torch.arange(12)
    for causal in (True, False):
        left, right = (10**6 if side in (-1, None) else side for side in window)
        right = 0 if causal else right
        want = (q[:, None] - q <= left) & (q - q[:, None] <= right)
        assert torch.equal(Mask.from_fa_window(causal, window).visible(q[:, None], q), want)


def test_masks_are_hashable_and_frozen() -> None:
    assert len({Mask(), Mask.causal_(), Mask.full()}) == 2
    with pytest.raises(AttributeError):
        Mask().causal = False  # type: ignore[misc]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (dict(window_left=-1), ("window_left", ">= 0", "-1")),
        (dict(window_right=-1), ("window_right", ">= 0", "-1")),
        (dict(window_left=2.5), ("window_left", "integer", "2.5")),
        (dict(window_left=True), ("window_left", "integer", "True")),
        (dict(chunk_size=0), ("chunk_size", ">= 1", "0")),
        (dict(chunk_size=4, chunk_lookback=-1), ("chunk_lookback", ">= 0", "-1")),
        (dict(chunk_lookback=1), ("chunk_lookback=1", "chunk_size")),
        (dict(chunk_size=4, window_left=2), ("chunk_size=4", "window_left=2")),
        (dict(chunk_size=4, window_right=2), ("chunk_size=4", "window_right=2")),
        (dict(causal=1), ("causal", "bool", "1")),
        (dict(symmetrize=None), ("symmetrize", "bool", "None")),
        (dict(mm_prefix_clamp=0), ("mm_prefix_clamp", "bool", "0")),
    ],
    ids=str,
)
def test_impossible_masks(fields: dict, words: tuple[str, ...]) -> None:
    with pytest.raises(MaskError) as error:
        Mask(**fields)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_sliding_window_0_keeps_nothing_and_is_refused() -> None:
    with pytest.raises(MaskError, match=r"sliding_window must be .* >= 1, got 0"):
        Mask.sliding_window(0)


def test_chunks_with_a_clamp_refuse_spans() -> None:
    mask = Mask.chunked(4, mm_prefix_clamp=True)
    with pytest.raises(MaskError, match="chunk_size=4 with mm_prefix_clamp and spans"):
        mask.check_spans()
    Mask.chunked(4).check_spans()
    Mask.sliding_window(4, mm_prefix_clamp=True).check_spans()
