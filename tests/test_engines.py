"""The translation of an engine's step, without an engine: against the dense oracle."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import mmattn
from mmattn import Mask
from mmattn.engines import SplitSpanError, Step, fill_row_spans, layer_mask, write_pages

PAGE, HEADS, KV_HEADS, DIM = 4, 4, 2, 8


def fill(spans: dict[int, list[tuple[int, int]]], offsets: list[int], lens: list[int]) -> tuple[bool, list[list[int]]]:
    out = torch.full((offsets[-1], 2), 7, dtype=torch.int32)
    return fill_row_spans(out, spans, offsets, lens), out.tolist()


class TestRowSpans:
    def test_rows_of_a_chunk(self) -> None:
        """A chunk that begins within a span, one that holds a whole span, and a decode row behind one."""
        found, rows = fill({0: [(2, 5)], 1: [(1, 3), (4, 4)], 2: [(0, 3)]}, [0, 3, 9, 10], [7, 6, 9])
        assert found
        none = [-1, -1]
        assert rows == [[2, 5], [2, 5], none, none, [1, 3], [1, 3], [1, 3], none, none, none]

    def test_nothing_to_do(self) -> None:
        found, rows = fill({0: [(0, 3)], 1: []}, [0, 2, 3], [12, 5])
        assert not found and rows == [[-1, -1]] * 3

    def test_requests_without_rows(self) -> None:
        assert fill({0: [(0, 3)], 1: [(0, 1)]}, [0, 0, 2], [0, 2]) == (True, [[0, 1], [0, 1]])

    def test_a_step_that_ends_within_a_span(self) -> None:
        with pytest.raises(SplitSpanError, match=r"request 1 runs positions 2\.\.4 .* span \(3, 6\)"):
            fill({1: [(3, 6)]}, [0, 1, 4], [9, 5])


def test_masks_of_layers() -> None:
    assert layer_mask() == Mask()
    assert layer_mask(sliding_window=3) == Mask(window_left=2)
    assert layer_mask(sliding_window=3, causal=False) == Mask(causal=False, window_left=2)
    assert layer_mask(sliding_window=3, clamp=True).mm_prefix_clamp
    assert layer_mask(clamp=True) == Mask()


def pages(lens: list[int], seed: int = 0) -> tuple[Tensor, Tensor, list[Tensor], list[Tensor]]:
    """Shuffled pages that hold NaN wherever no key is, and the keys and values of each request."""
    generator = torch.Generator().manual_seed(seed)
    needed = [-(-n // PAGE) for n in lens]
    order = torch.randperm(sum(needed) + 2, generator=generator).to(torch.int32)
    cache = torch.full((len(order), PAGE, KV_HEADS, 2 * DIM), torch.nan)
    table = torch.full((len(lens), max(needed)), 10_000, dtype=torch.int32)
    ks, vs = [], []
    at = 0
    for b, n in enumerate(lens):
        table[b, : needed[b]] = order[at : at + needed[b]]
        at += needed[b]
        k, v = torch.randn(2, n, KV_HEADS, DIM, generator=generator)
        slots = table[b].repeat_interleave(PAGE)[:n].long() * PAGE + torch.arange(n) % PAGE
        write_pages(k, v, cache[..., :DIM], cache[..., DIM:], slots)
        ks.append(k)
        vs.append(v)
    return cache, table, ks, vs


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("clamp", [False, True])
def test_a_step_equals_the_oracle(window: int | None, clamp: bool) -> None:
    """A mixed batch over pages: a chunk with spans, a decode row, a whole prompt, a padded request and padded rows."""
    q_lens, kv_lens = [7, 1, 9, 0], [19, 11, 9, 0]
    spans = {0: [(3, 9), (13, 18)], 2: [(0, 4)]}
    cache, table, ks, vs = pages([19, 11, 9, 1])
    offsets = torch.tensor([0, *q_lens]).cumsum(0)
    rows = int(offsets[-1]) + 3
    row_spans = torch.full((rows, 2), -1, dtype=torch.int32)
    assert fill_row_spans(row_spans[:-3], spans, offsets.tolist(), kv_lens)
    q = torch.randn(rows, HEADS, DIM)
    step = Step(
        offsets.to(torch.int32), rows, max(q_lens), max(kv_lens), seqused_k=torch.tensor(kv_lens, dtype=torch.int32),
        page_table=table, row_spans=row_spans,
    )  # fmt: skip
    mask = layer_mask(sliding_window=window, clamp=clamp)
    for with_spans in (True, False):
        ready = step.plan(mask, spans=with_spans)
        assert step.plan(mask, spans=with_spans) is ready
        out = mmattn.attention(q, cache[..., :DIM], cache[..., DIM:], ready, page_table=table)
        for b, n in enumerate(q_lens[:3]):
            mine = slice(int(offsets[b]), int(offsets[b]) + n)
            want, _ = mmattn.reference(
                q[mine], ks[b], vs[b], mask, mm_prefix_range=[spans.get(b, []) if with_spans else []]
            )
            torch.testing.assert_close(out[mine].double(), want.double(), atol=1e-5, rtol=1e-5)
        assert (out[-3:] == 0).all()


def test_causal_per_request() -> None:
    cache, table, ks, vs = pages([9, 9])
    q = torch.randn(6, HEADS, DIM)
    step = Step(
        torch.tensor([0, 3, 6], dtype=torch.int32), 6, 3, 9, seqused_k=torch.tensor([9, 9], dtype=torch.int32),
        page_table=table, causal=torch.tensor([1, 0], dtype=torch.int32),
    )  # fmt: skip
    out = mmattn.attention(
        q, cache[..., :DIM], cache[..., DIM:], step.plan(layer_mask(sliding_window=4)), page_table=table
    )
    for b, causal in enumerate((True, False)):
        want, _ = mmattn.reference(q[3 * b : 3 * b + 3], ks[b], vs[b], layer_mask(sliding_window=4, causal=causal))
        torch.testing.assert_close(out[3 * b : 3 * b + 3].double(), want.double(), atol=1e-5, rtol=1e-5)


class TestWriting:
    @pytest.mark.parametrize("heads_first", [False, True])
    def test_slots(self, heads_first: bool) -> None:
        """Any layout; padding is skipped; rows behind the slots are not written."""
        shape = (3, KV_HEADS, PAGE, 2 * DIM) if heads_first else (3, PAGE, KV_HEADS, 2 * DIM)
        memory = torch.zeros(shape)
        cache = memory.transpose(1, 2) if heads_first else memory
        key, value = torch.randn(2, 5, KV_HEADS, DIM)
        write_pages(key, value, cache[..., :DIM], cache[..., DIM:], torch.tensor([9, -1, 2, 7]))
        for i, slot in ((0, 9), (2, 2), (3, 7)):
            assert torch.equal(cache[slot // PAGE, slot % PAGE, :, :DIM], key[i])
            assert torch.equal(cache[slot // PAGE, slot % PAGE, :, DIM:], value[i])
        assert int((memory != 0).any(-1).sum()) == 3 * KV_HEADS

    def test_float8(self) -> None:
        cache = torch.zeros(1, PAGE, 1, 2 * DIM, dtype=torch.float8_e4m3fn)
        key = torch.full((1, 1, DIM), 3.0, dtype=torch.bfloat16)
        value = torch.full((1, 1, DIM), 1e6, dtype=torch.bfloat16)
        write_pages(key, value, cache[..., :DIM], cache[..., DIM:], torch.tensor([1]), k_scale=0.5, v_scale=2.0)
        assert (cache[0, 1, 0, :DIM].float() == 6).all()
        assert (cache[0, 1, 0, DIM:].float() == 448).all()  # the largest there is, not NaN
