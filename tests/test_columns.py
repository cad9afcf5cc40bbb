"""The transposed table: against brute force for every case, the claim that it rests on, and the device kernels bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mmattn import Mask, plan
from mmattn.batch import Batch
from mmattn.columns import Columns, column_table, key_batch
from mmattn.plan import TorchLowering

from .cases import Case
from .test_mask import SIZE, SPAN_CHOICES, chunks, disjoint_spans, masks, windows
from .test_plan import LOWERING_CASES, assert_equal_tables, batch_of, check_tiles, lowering_of

CPU = torch.device("cpu")
UNPAGED = [
    c
    for c in LOWERING_CASES
    if "paged" not in c.layout
    and c.name.startswith(("packed", "q_start", "kv_lo", "batched_padded-full", "rows-past", "no-"))
]


def slots_of(case: Case, batch: Batch) -> int:
    """As many key slots as the case's k has, with some that belong to no sequence."""
    return int(batch.cu_seqlens_k[-1]) + 5 if batch.cu_seqlens_k is not None else batch.seqlen_k or 0


def brute(rows: Tensor, batch: Batch, slots: int) -> tuple[Tensor, list[list[int]]]:
    """The table and, of every sequence, how often rows that see a key have rows between them that do not."""
    offsets, keys = batch.row_offsets().tolist(), key_batch(batch, slots).row_offsets().tolist()
    table = torch.zeros(key_batch(batch, slots).total_q, 2, dtype=torch.int32)
    holes: list[list[int]] = []
    for b in range(batch.batch_size):
        mine = rows[offsets[b] : offsets[b + 1]].cpu()
        holes.append([])
        for j in range(keys[b + 1] - keys[b]):
            seen = ((mine[:, 0] <= j) & (j < mine[:, 1])).nonzero().flatten().tolist()
            if seen:
                table[keys[b] + j] = torch.tensor([seen[0], seen[-1] + 1])
                if len(seen) != seen[-1] + 1 - seen[0]:
                    holes[-1].append(j)
    return table, holes


def assert_equal(a: Columns, b: Columns) -> None:
    assert torch.equal(a.rows, b.rows) and torch.equal(a.of_sequences, b.of_sequences)


@pytest.mark.parametrize("case", UNPAGED, ids=lambda case: case.name)
def test_columns_of_cases(case: Case, device: torch.device) -> None:
    """Right, without holes, equal on the device, and their tiles are tight."""
    mask, batch = batch_of(case, device)
    rows, slots = TorchLowering().row_intervals(mask, batch), slots_of(case, batch)
    want, holes = brute(rows, batch, slots)
    got = column_table(rows, batch, slots)
    assert torch.equal(got.rows.cpu(), want)
    assert not any(holes) and (got.of_sequences[:, 2] == 1).all()
    assert_equal(lowering_of(device).column_table(rows, batch, slots), got)
    keys = key_batch(batch, slots)
    table = TorchLowering().tile_table(got.rows, keys, 16, 1, 8)
    assert_equal_tables(lowering_of(device).tile_table(got.rows, keys, 16, 1, 8), table)
    check_tiles(got.rows.cpu(), keys, table, 16, 1, 8)


def assert_in_order(mask: Mask, q_len: int, kv_len: int, **args: Any) -> None:
    """The claim: of the rows that see anything neither bound falls, and no row without keys lies between them."""
    batch = Batch.build(batch_size=1, max_seqlen_q=q_len, max_seqlen_k=kv_len, **args)
    if batch.spans is not None and mask.chunk_size is not None and mask.mm_prefix_clamp:
        return
    rows = TorchLowering().row_intervals(mask, batch)
    seeing = rows[rows[:, 0] < rows[:, 1]]
    assert (seeing[1:] >= seeing[:-1]).all(), f"{mask}, {args}: {rows.tolist()}"
    at = (rows[:, 0] < rows[:, 1]).nonzero().flatten()
    assert len(at) == 0 or len(at) == at[-1] - at[0] + 1, f"{mask}, {args}: {rows.tolist()}"
    columns = column_table(rows, batch, kv_len)
    assert columns.of_sequences[0, 2] == 1
    key, row = torch.arange(kv_len)[:, None], torch.arange(q_len)[None, :]
    by_column = (columns.rows[:, :1] <= row) & (row < columns.rows[:, 1:])
    by_row = (rows[:, 0] <= key) & (key < rows[:, 1])
    assert torch.equal(by_column, by_row), f"{mask}, {args}"


@pytest.mark.parametrize("spans", SPAN_CHOICES, ids=str)
def test_rows_are_in_order(spans: list[tuple[int, int]]) -> None:
    """Every small mask; rows before, at and behind the keys."""
    for mask in windows()[::3] + chunks():
        for q_len, kv_len, q_start in ((SIZE, SIZE, 0), (SIZE + 6, 5, -4)):
            start = torch.tensor([q_start], dtype=torch.int32)
            assert_in_order(mask, q_len, kv_len, mm_prefix_range=[spans], q_start=start)


@settings(max_examples=300, deadline=None)
@given(masks(), disjoint_spans(), st.booleans(), st.integers(0, 70), st.integers(0, 70), st.integers(-90, 90),
       st.integers(0, 40), st.integers(0, 90))  # fmt: skip
def test_rows_are_in_order_anywhere(
    mask: Mask, spans: list[tuple[int, int]], causal: bool, q_len: int, kv_len: int, gap: int, start: int, valid: int
) -> None:
    """Gaps before and behind the keys, sequences with a causality of their own, padding on the left."""
    one = dict(q_start=start + gap, kv_start=start, kv_lo=start + valid, causal=int(causal))
    args = {name: torch.tensor([x], dtype=torch.int32) for name, x in one.items()}
    if kv_len and q_len:
        assert_in_order(mask, q_len, kv_len, mm_prefix_range=[spans], **args)


def hostile_rows(seed: int, lens: list[int], keys: list[int]) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    rows = []
    for q_len, kv_len in zip(lens, keys):
        for _ in range(q_len):
            lo, hi = sorted(torch.randint(0, kv_len + 1, (2,), generator=random).tolist())
            rows.append((lo, hi) if lo < hi else (0, 0))
    return torch.tensor(rows, dtype=torch.int32)


@pytest.mark.parametrize("seed", range(6))
def test_rows_in_no_order(seed: int, device: torch.device) -> None:
    """Rows from elsewhere: from the first row that sees a key to the last, and holes are told."""
    lens, keys = [40, 0, 3, 150], [60, 9, 30, 200]
    cu = [torch.tensor(x, dtype=torch.int32).to(device) for x in ([0, 40, 40, 43, 193], [0, 60, 69, 99, 299])]
    rows = hostile_rows(seed, lens, keys).to(device)
    the_plan = plan(Mask.full(), total_q=193, cu_seqlens_q=cu[0], cu_seqlens_k=cu[1], max_seqlen_k=200, device=device)
    the_plan = the_plan.with_rows(rows)
    got = column_table(rows, the_plan.batch, 299)
    want, holes = brute(rows, the_plan.batch, 299)
    assert torch.equal(got.rows.cpu(), want)
    assert any(holes)
    for mine, ordered in zip(holes, got.of_sequences[:, 2].tolist()):
        assert not mine or not ordered
    assert_equal(lowering_of(device).column_table(rows, the_plan.batch, 299), got)


def test_a_hole_of_empty_rows_is_told(device: torch.device) -> None:
    the_plan = plan(Mask.full(), max_seqlen_q=9, max_seqlen_k=9, device=device)
    rows = the_plan.rows.clone()
    rows[4] = 0
    for lowering in (TorchLowering(), lowering_of(device)):
        assert lowering.column_table(rows, the_plan.batch, 9).of_sequences.tolist() == [[0, 9, 0]]
        assert lowering.column_table(the_plan.rows, the_plan.batch, 9).of_sequences.tolist() == [[0, 9, 1]]


def test_columns_are_made_once(device: torch.device) -> None:
    the_plan = plan(Mask.sliding_window(3), max_seqlen_q=40, max_seqlen_k=40, device=device)
    assert the_plan.columns(40) is the_plan.columns(40)
    assert the_plan.column_tiles(40, 16, 8) is the_plan.column_tiles(40, 16, 8)
    other = the_plan.with_rows(the_plan.rows)
    assert other.columns(40) is not the_plan.columns(40)
    assert other.column_tiles(40, 16, 8) is not the_plan.column_tiles(40, 16, 8)
    # 40 keys with a window of 3: row i sees keys i-2..i, so key j is seen by rows j..j+2
    assert the_plan.columns(40).rows.tolist() == [[j, min(j + 3, 40)] for j in range(40)]
