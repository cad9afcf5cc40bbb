"""The Triton backward: parity with autograd through the oracle, hostile memory, determinism, and faults that must show."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mmattn import Mask, attention, supported, torch_backend
from mmattn.checks import options_of
from mmattn.columns import Columns
from mmattn.plan import Grads, Plan, TileTable
from mmattn.triton import support

from .calls import hopper
from .cases import BY_NAME, CASES, Case, build
from .gradients import assert_gradients, call, plan_of, run, triton_backward, upstream

SHORT = ((13, 13), (3, 21), (1, 9), (0, 6), (7, 3), (2, 0))
CHECKED: list[Case] = [
    replace(BY_NAME[name], lens=SHORT) for name in
    ["packed-full", "packed-window", "packed-spans-clamped", "packed-mixed-causality", "padded-symmetric",
     "batched-chunked-lookback", "batched_padded-spans-clamped", "strided-window", "packed-spans-by-row",
     "softcap-packed", "sinks-none-packed", "softcap-sinks-packed", "rows-past-end-sinks", "kv_lo-packed", "q_start-packed",
     "group-3", "dims-40-24-packed", "bfloat16-packed-spans-clamped", "float32-packed-spans-clamped", "scale-zero"]
] + [BY_NAME[name] for name in ("no-rows", "no-keys", "more-rows-than-keys")]  # fmt: skip
LARGE = [c for c in CASES if "paged" not in c.layout and max(c.dims) <= 256 and c.lens and not c.name.startswith("no-")]


@pytest.mark.parametrize("case", CHECKED, ids=lambda case: case.name)
def test_gradients(case: Case, device: torch.device) -> None:
    run(build(case, device))


@pytest.mark.parametrize("name", ["packed-spans-clamped", "batched_padded-spans-clamped", "strided-window"])
def test_gradients_through_descriptors(name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Hopper, with what no row sees, and rows that see nothing, in the blocks that are loaded as a whole."""
    from mmattn.triton import backward, config

    if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] < 9:
        pytest.skip("tensor descriptors need compute capability 9.0")
    launched = []
    launch = backward.Launch
    monkeypatch.setattr(backward, "architecture", lambda device: "sm90")
    monkeypatch.setattr(backward, "Launch", lambda *a, **kw: launched.append(launch(*a, **kw)) or launched[-1])
    tile = config.Tile(16, 16, 4, 2, tma=True)
    monkeypatch.setitem(config._BACKWARD["sm90"], (64, 2), config.BackwardTiles(tile, tile))
    run(build(replace(BY_NAME[name], lens=SHORT), device))
    assert [each.constants.get("TMA") for each in launched] == [None, True, True]


@pytest.mark.gpu
@pytest.mark.parametrize("case", [case.grown() for case in LARGE], ids=lambda case: case.name)
def test_gradients_large(case: Case, device: torch.device) -> None:
    run(build(case, device))


@pytest.mark.parametrize("lens", [(60, 5), (2, 90)], ids=str)
def test_many_rows_or_many_keys(lens: tuple[int, int], device: torch.device) -> None:
    run(build(replace(BY_NAME["packed-symmetric"], lens=(lens,)), device))


def test_bit_equal_again(device: torch.device) -> None:
    inputs = build(replace(BY_NAME["packed-spans-clamped"], lens=SHORT), device)
    dout, dlse = upstream(inputs)
    the_plan = plan_of(inputs)
    first, second = (call(inputs, the_plan, dout, dlse, triton_backward()) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first[:3], second[:3]))
    assert len(the_plan.backwards) == 1, "the second call is of the same kind and settles nothing"
    call(inputs, the_plan, dout, None, triton_backward())
    assert len(the_plan.backwards) == 2
    assert not the_plan.with_rows(the_plan.rows).backwards


@pytest.mark.parametrize("fill", [float("nan"), 1e30])
def test_poison_changes_no_bit(fill: float, device: torch.device) -> None:
    """In keys that nobody sees, behind the keys, in rows past the end and in rows that see nothing."""
    case = replace(BY_NAME["kv_lo-packed"], lens=SHORT, rows_past_end=3, dtype=torch.float32)
    inputs = build(case, device)
    dout, _ = upstream(inputs)
    dout = dout.contiguous()
    inputs.q[sum(q for q, _ in SHORT) :] = 0
    the_plan = plan_of(inputs)
    with torch.no_grad():
        out, lse = attention(inputs.q, inputs.k, inputs.v, the_plan, return_lse=True, backend="torch")
    options = options_of(inputs.q, inputs.k, the_plan.batch, None, None, None, None, None, None)
    rest = (the_plan, None, out, lse)
    clean = triton_backward()(inputs.q, inputs.k, inputs.v, *rest, dout, None, options=options)
    blind = the_plan.rows[:, 0] >= the_plan.rows[:, 1]
    columns = the_plan.columns(inputs.k.shape[0]).rows
    unseen = columns[:, 0] >= columns[:, 1]
    assert blind.any() and unseen.any()
    for x, where in ((inputs.q, blind), (dout, blind), (inputs.k, unseen), (inputs.v, unseen)):
        x[where] = fill
    poisoned = triton_backward()(inputs.q, inputs.k, inputs.v, *rest, dout, None, options=options)
    for a, b in zip(clean[:3], poisoned[:3]):
        assert torch.equal(a, b) and a.isfinite().all()
    assert (clean.q[blind] == 0).all() and (clean.k[unseen] == 0).all() and (clean.v[unseen] == 0).all()


def test_rows_in_no_order(device: torch.device) -> None:
    """A row table from elsewhere, whose keys are seen by rows with others between them."""
    inputs = build(Case("no-order", mask=Mask.full(), lens=((40, 40),), layout="batched", dtype=torch.float32), device)
    the_plan = plan_of(inputs)
    rows = the_plan.rows.clone()
    rows[3], rows[20], rows[30] = (torch.tensor(x).to(rows) for x in ((0, 0), (7, 9), (25, 40)))
    the_plan = the_plan.with_rows(rows)
    dout, dlse = upstream(inputs)
    ours = call(inputs, the_plan, dout, dlse, triton_backward())
    for a, b in zip(ours[:3], call(inputs, the_plan, dout, dlse, torch_backend.backward)[:3]):
        assert (a - b).abs().max() < 1e-4


@pytest.mark.parametrize("form", ["expanded", "transposed", "none"])
def test_gradients_of_any_strides(form: str, device: torch.device) -> None:
    case = replace(BY_NAME["batched-window"], lens=((13, 13),) * 2)
    inputs = build(case, device)
    shape = (*inputs.q.shape[:-1], inputs.v.shape[-1])
    dout = torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(inputs.q)
    if form == "expanded":
        dout = torch.tensor(0.5).to(inputs.q).expand(shape)
    if form == "transposed":
        dout = dout.transpose(1, 3).contiguous().transpose(1, 3)
    grads = call(inputs, plan_of(inputs), dout, None, triton_backward())
    assert_gradients(inputs, grads, dout, None)


def test_through_autograd(device: torch.device) -> None:
    """The whole way: `attention(backend="triton")` and `.backward()`."""
    inputs = build(replace(BY_NAME["sinks-packed"], lens=SHORT[:3]), device)
    leaves = [x.requires_grad_() for x in (inputs.q, inputs.k, inputs.v, inputs.extras["sinks"])]
    dout, dlse = upstream(inputs)
    out, lse = attention(*leaves[:3], inputs.mask, return_lse=True, backend="triton", **inputs.args)
    grads = torch.autograd.grad([out, lse], leaves, [dout, dlse])
    with torch.no_grad():
        assert_gradients_detached(inputs, Grads(*grads), dout, dlse)


def assert_gradients_detached(inputs: Any, grads: Grads, dout: Tensor, dlse: Tensor) -> None:
    for x in (inputs.q, inputs.k, inputs.v, inputs.extras["sinks"]):
        x.requires_grad_(False)
    with torch.enable_grad():
        assert_gradients(inputs, grads, dout, dlse)


@pytest.mark.parametrize("changes,reason", [
    (dict(page_size=16, packed_k=False), "paged"), (dict(kv_dtype=torch.float8_e4m3fn), "float8"),
    (dict(scales=True), "k_scale"), (dict(head_dim=512), "256"),
])  # fmt: skip
def test_refusals(changes: dict[str, Any], reason: str) -> None:
    assert support.why_no_gradients(hopper()) == []
    assert any(reason in each for each in support.why_no_gradients(hopper(**changes)))


def test_supported_says_so(device: torch.device) -> None:
    x = torch.zeros(1, 16, 2, 32, device=device, dtype=torch.float16)
    assert supported(x, x, x, Mask(), requires_grad=True)["triton"] == []


FAULTS = ("column start off by one", "column end off by one", "missing edge mask", "missing dlse", "skipped group head")


@pytest.mark.parametrize("fault", FAULTS)
def test_parity_catches(fault: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each fault alone must fail the parity check that passes without it."""
    from mmattn.triton import backward

    # (Where a row sees itself alone, a bound off by one leaves nothing of an interval; longer ones end within a block.)
    mask = Mask.sliding_window(1 if fault.startswith("column") else 8)
    case = replace(BY_NAME["batched-window"], mask=mask, lens=((40, 40),), heads=(2, 1), dtype=torch.float32)
    inputs = build(case, device)
    columns, tiles, launch = Plan.columns, Plan.column_tiles, backward.Launch
    dout, dlse = upstream(inputs)
    given: Tensor | None = dlse

    def moved(self: Plan, slots: int) -> Columns:
        right = columns(self, slots)
        by = torch.tensor([1, 0] if fault == "column start off by one" else [0, -1], dtype=torch.int32, device=device)
        return replace(right, rows=right.rows + by)

    def all_full(self: Plan, slots: int, tile_n: int, tile_m: int) -> TileTable:
        right = tiles(self, slots, tile_n, tile_m)
        return replace(right, ranges=right.ranges[:, [0, 0, 3, 3]].contiguous())

    def one_head(kernel: Any, grid: Any, fixed: Any, scalars: Any, constants: dict[str, Any], **rest: Any) -> Any:
        if kernel is backward._key_kernel:
            constants = dict(constants, GROUP=1)
        return launch(kernel, grid, fixed, scalars, constants, **rest)

    if fault.startswith("column"):
        monkeypatch.setattr(Plan, "columns", moved)
    elif fault == "missing edge mask":
        monkeypatch.setattr(Plan, "column_tiles", all_full)
    elif fault == "skipped group head":
        monkeypatch.setattr(backward, "Launch", one_head)
    elif fault == "missing dlse":
        given = None
    grads = call(inputs, plan_of(inputs), dout, given, backward.backward)
    with pytest.raises(AssertionError, match=r"budget|finite|zero"):
        assert_gradients(inputs, grads, dout, dlse)
    monkeypatch.undo()
    run(inputs)


def test_training_cases() -> None:
    """The bench cases that `bench.backward` trains on, and one of them on the CPU."""
    from bench import backward as bench
    from bench.cases import TRAINING, make, names

    for name in TRAINING:
        full, small = make(name), make(name, reduced=True)
        assert full.name == small.name == name and name not in names()
        assert full.batched == small.batched and full.has_spans == small.has_spans and full.sinks == small.sinks
    (row,) = bench.run_case(make("T3", reduced=True), ["mmattn-torch"], torch.device("cpu"), 1, None)
    assert row["max_error"] < 1e-5 and row["backward_ms"] > 0 and row["mask"] == "case"
