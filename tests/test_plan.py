"""The lowering: row intervals and tile tables of every case against brute force, and the device kernels bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mmattn import Mask, Plan, attention, plan
from mmattn.batch import Batch
from mmattn.plan import TileTable, TorchLowering, tile_slots
from mmattn.reference import visible_pairs

from .cases import CASES, Case, build, guarded

LOWERING_CASES = [
    c for c in CASES if c.dims in ((32, 32), (64, 64)) and c.heads == (4, 2) and c.dtype == torch.float16 and c.sinks is c.softcap is None
]  # fmt: skip
TILES = ((16, 1, 16), (64, 2, 32), (32, 3, 16), (16, 5, 64), (128, 12, 48))
"""(packed rows, group, keys): groups that divide the rows of a tile and groups that do not."""


def batch_of(case: Case, device: torch.device) -> tuple[Mask, Batch]:
    inputs = build(case, device)
    return inputs.mask, Batch.build(q_shape=inputs.q.shape, k_shape=inputs.k.shape, device=device, **inputs.batch)


def dense_rows(mask: Mask, batch: Batch) -> Tensor:
    """The row table from the dense mask; asserts that what a row sees is one interval."""
    rows = torch.zeros(batch.total_q, 2, dtype=torch.int64)
    offsets = batch.row_offsets().tolist()
    for b in range(batch.batch_size):
        for i, seen in enumerate(visible_pairs(mask, batch, b).cpu()):
            keys = seen.nonzero().flatten()
            if len(keys):
                assert len(keys) == keys[-1] - keys[0] + 1
                rows[offsets[b] + i] = torch.tensor([keys[0], keys[-1] + 1])
    return rows


@pytest.mark.parametrize("case", LOWERING_CASES, ids=lambda case: case.name)
def test_what_a_sequence_sees_has_no_holes(case: Case, device: torch.device) -> None:
    """The rows' intervals are connected; the cute kernel trusts every key between the first row's and the last row's."""
    mask, batch = batch_of(case, device)
    rows = TorchLowering().row_intervals(mask, batch).cpu()
    offsets = batch.row_offsets().tolist()
    for first, end in zip(offsets, offsets[1:]):
        intervals = [(lo, hi) for lo, hi in rows[first:end].tolist() if lo < hi]
        seen = {key for lo, hi in intervals for key in range(lo, hi)}
        assert not seen or seen == set(range(min(seen), max(seen) + 1))
        if intervals and rows[first, 0] < rows[first, 1]:
            assert set(range(rows[first, 0], rows[end - 1, 1])) <= seen


def lowering_of(device: torch.device):
    from mmattn.triton.bounds import DeviceLowering

    return DeviceLowering()


@pytest.mark.parametrize("case", LOWERING_CASES, ids=lambda case: case.name)
def test_rows_are_the_dense_mask(case: Case, device: torch.device) -> None:
    mask, batch = batch_of(case, device)
    want = dense_rows(mask, batch)
    assert torch.equal(TorchLowering().row_intervals(mask, batch).cpu().long(), want)


@pytest.mark.parametrize("case", LOWERING_CASES, ids=lambda case: case.name)
def test_device_lowering_is_bit_equal(case: Case, device: torch.device) -> None:
    mask, batch = batch_of(case, device)
    on_device = lowering_of(device)
    rows = TorchLowering().row_intervals(mask, batch)
    assert torch.equal(on_device.row_intervals(mask, batch), rows)
    for shape in TILES[:3]:
        assert_equal_tables(TorchLowering().tile_table(rows, batch, *shape), on_device.tile_table(rows, batch, *shape))


def assert_equal_tables(a: TileTable, b: TileTable) -> None:
    assert torch.equal(a.index, b.index)
    assert torch.equal(a.starts[:-1], b.starts[:-1])
    assert torch.equal(a.ranges, b.ranges)


@pytest.mark.parametrize("name", ["packed-causal", "batched-full", "batched_paged-window", "rows-past-end-packed"])
def test_every_start_of_a_tile_table_is_written(name: str, device: torch.device) -> None:
    """Also the last, that of the rows of no sequence: no value may come from uninitialised memory."""
    mask, batch = batch_of(next(c for c in CASES if c.name == name), device)
    rows = TorchLowering().row_intervals(mask, batch)
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills new memory with the largest integer
    try:
        tables = [lowering.tile_table(rows, batch, 64, 2, 32) for lowering in (TorchLowering(), lowering_of(device))]
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(tables[0].starts, tables[1].starts)


@pytest.mark.parametrize("shape", TILES, ids=str)
@pytest.mark.parametrize("name", ["packed-spans-clamped", "batched_padded-mixed-causality", "rows-past-end-packed",
                                  "paged-window-both", "no-rows", "packed-full", "more-rows-than-keys"])  # fmt: skip
def test_tiles_are_tight_and_sound(name: str, shape: tuple[int, int, int], device: torch.device) -> None:
    case = next(c for c in CASES if c.name == name)
    mask, batch = batch_of(case, device)
    rows = TorchLowering().row_intervals(mask, batch)
    table = TorchLowering().tile_table(rows, batch, *shape)
    check_tiles(rows.cpu(), batch, table, *shape)


def check_tiles(rows: Tensor, batch: Batch, table: TileTable, tile_m: int, group: int, tile_n: int) -> None:
    """Every row is in exactly one tile of its sequence, and the four numbers are the best that there are."""
    offsets = [*batch.row_offsets().tolist(), batch.total_q]
    slots = tile_slots(batch, tile_m, group)
    assert table.ranges.shape == (slots, 4) and table.index.shape == (slots, 2)
    covered = torch.zeros(batch.total_q * group, dtype=torch.int64)
    for slot, (seq, m) in enumerate(table.index.tolist()):
        first, full, full_end, end = table.ranges[slot].tolist()
        if seq < 0:
            assert (first, full, full_end, end) == (0, 0, 0, 0)
            continue
        assert slot == int(table.starts[seq]) + m
        length = (offsets[seq + 1] - offsets[seq]) * group
        packed = range(m * tile_m, min((m + 1) * tile_m, length))
        covered[offsets[seq] * group + packed.start : offsets[seq] * group + packed.stop] += 1
        mine = [tuple(rows[offsets[seq] + p // group].tolist()) for p in packed]
        seeing = [(lo, hi) for lo, hi in mine if lo < hi]
        assert 0 <= first <= full <= full_end <= end
        if not seeing:
            assert first == end
            continue
        assert first == min(lo for lo, _ in seeing) // tile_n
        assert end == -(-max(hi for _, hi in seeing) // tile_n)
        whole = [
            block for block in range(first, end)
            if all(lo <= block * tile_n and (block + 1) * tile_n <= hi for lo, hi in mine)
        ]  # fmt: skip
        assert list(range(full, full_end)) == whole
    assert (covered == 1).all()


def test_rows_past_the_end_see_nothing(device: torch.device) -> None:
    args = dict(cu_seqlens_q=guarded([0, 3, 5], device), max_seqlen_k=9, total_q=300, device=device)
    the_plan = plan(Mask.full(), **args)
    rows = the_plan.rows.cpu()
    assert rows[:5].tolist() == [[0, 9]] * 5 and (rows[5:] == 0).all()
    table = the_plan.tiles(16, 2, 16)
    owners = table.index[:, 0].tolist()
    assert owners.count(0) == owners.count(1) == 1
    assert owners.count(2) == -(-295 * 2 // 16)  # "sequence" 2 holds the rest, so that a kernel writes its zeros


@pytest.mark.parametrize("count", [1, 8, 46, 299])
def test_many_spans_in_any_order(count: int, device: torch.device) -> None:
    """M10: spans of 10 tokens with 3 text tokens between them, shuffled among no-op entries."""
    length = 13 * count + 20
    spans = [(13 * i + 4, 13 * i + 13) for i in range(count)]
    random = torch.Generator().manual_seed(count)
    entries = spans + [(-1, -1), (0, 0), (7, 3)] * 30
    shuffled = [entries[i] for i in torch.randperm(len(entries), generator=random).tolist()]
    tensor = torch.tensor([shuffled], dtype=torch.int32, device=device)
    sizes = dict(batch_size=1, max_seqlen_q=length, max_seqlen_k=length, device=device)
    batch = Batch.build(mm_prefix_range=tensor, **sizes)
    q = torch.arange(length)
    start = torch.full_like(q, -1)
    end = torch.full_like(q, -1)
    for s, e in spans:
        start[s : e + 1], end[s : e + 1] = s, e
    for mask in (Mask.sliding_window(16), Mask.sliding_window(5, mm_prefix_clamp=True)):
        lo, hi = mask.bounds(q, span=(start, end))  # equal to the definition: test_mask.py
        want = torch.stack([lo.clamp(min=0), (hi + 1).clamp(max=length)], 1)
        rows = TorchLowering().row_intervals(mask, batch)
        assert torch.equal(rows.cpu().long(), want)
        assert torch.equal(lowering_of(device).row_intervals(mask, batch), rows)


def test_a_plan_from_sizes_equals_a_plan_from_tensors(device: torch.device) -> None:
    q = torch.zeros(2, 7, 4, 16, device=device)
    k = torch.zeros(2, 9, 2, 16, device=device)
    by_tensors = plan(Mask.sliding_window(3), q=q, k=k)
    by_sizes = plan(Mask.sliding_window(3), batch_size=2, max_seqlen_q=7, max_seqlen_k=9, device=device)
    assert torch.equal(by_tensors.rows, by_sizes.rows)
    args = dict(cu_seqlens_q=guarded([0, 3, 7], device), seqused_k=guarded([5, 9], device))
    packed = plan(Mask.sliding_window(3), q=q.flatten(0, 1)[:7], k=k, **args)
    assert torch.equal(packed.rows, plan(Mask.sliding_window(3), total_q=7, device=device, **args).rows)


def test_a_plan_is_made_once(device: torch.device) -> None:
    the_plan = plan(Mask(), max_seqlen_q=40, max_seqlen_k=40, device=device)
    assert the_plan.tiles(16, 1, 16) is the_plan.tiles(16, 1, 16)
    assert the_plan.tiles(16, 1, 16) is not the_plan.tiles(16, 1, 32)


def test_one_plan_for_caches_of_different_layers(backend: str, device: torch.device) -> None:
    """page_table may come with the plan or with the call."""
    q, pages = (torch.randn(*shape, device=device).half() for shape in ((5, 2, 64), (4, 16, 1, 64)))
    lens = guarded([40], device)
    first, second = (torch.tensor([table], dtype=torch.int32, device=device) for table in ([0, 1, 2], [3, 0, 1]))
    args = dict(cu_seqlens_q=guarded([0, 5], device), seqused_k=lens, max_seqlen_q=128)
    shared = plan(Mask.sliding_window(20), q=q, k=pages, page_table=first, **args)
    for table in (first, second):
        fresh = attention(q, pages, pages, Mask.sliding_window(20), page_table=table, backend=backend, **args)
        assert torch.equal(attention(q, pages, pages, shared, page_table=table, backend=backend), fresh)
    assert not torch.equal(fresh, attention(q, pages, pages, shared, backend=backend))


def test_a_slice_of_the_batch_equals_its_part_of_the_full_call(backend: str, device: torch.device) -> None:
    """C03: a description reused for one row of the batch must not lose anything of the mask."""
    x = torch.randn(3, 130, 2, 32, device=device).half()
    spans = [[(3, 30)], [], [(70, 100)]]
    mask = Mask.sliding_window(9)
    full = attention(x, x, x, mask, mm_prefix_range=spans, backend=backend)
    for b in range(3):
        one = attention(x[b : b + 1], x[b : b + 1], x[b : b + 1], mask, mm_prefix_range=[spans[b]], backend=backend)
        assert (one[0].float() - full[b].float()).abs().max() < 2e-3
    row = attention(x[2:, 99:], x[2:], x[2:], mask, mm_prefix_range=[spans[2]], q_start=guarded([99], device),
                    max_seqlen_q=128, backend="torch")  # fmt: skip
    assert (row[0].float() - full[2, 99:].float()).abs().max() < 2e-3


def test_plan_type_is_public() -> None:
    assert isinstance(plan(Mask(), max_seqlen_q=1, max_seqlen_k=1), Plan)
