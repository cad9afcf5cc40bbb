"""Decoding: few query rows against many keys, which are cut into splits; mixed batches; float8 keys; CUDA graphs.

`num_splits=n` forces n splits and tiles that do not depend on the batch. `force_splits` forces n where the choice is left
to host sizes, which is 1 on a CPU: it takes the launches that a GPU would.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mmattn import Mask, attention, plan
from mmattn import batch as batch_module
from mmattn.batch import FEW_ROWS, SHORT_ROWS
from mmattn.triton import decode, forward
from mmattn.triton.config import Tile

from .budget import Expected, assert_close, expect
from .calls import skip_unsupported
from .cases import WILD, Case, Inputs, build, guarded
from .probes import Setup, assert_sees

COUNTS = (1, 2, 7, 32)

FEW = ((1, 700), (5, 300), (0, 40), (3, 0), (4, 2))
"""(rows, keys): one row, drafts to verify, no rows, no keys, more rows than keys."""
MIXED = ((70, 150), (1, 300), (0, 30), (5, 200), (3, 0), (66, 20))
"""Sequences of more than `FEW_ROWS` rows next to decode rows."""
ROWS = tuple((n, 150 - n % 3) for n in (1, 2, 7, 8, 16, 17, 33, 63, 64))

CLAMPED = Mask.sliding_window(100, mm_prefix_clamp=True)
KINDS: dict[str, dict[str, Any]] = {
    "causal": dict(),
    "full": dict(mask=Mask.full()),
    "window": dict(mask=Mask.sliding_window(200)),
    "window-self": dict(mask=Mask.sliding_window(1)),
    "symmetric": dict(mask=Mask.sliding_window(150, causal=False)),
    "window-both": dict(mask=Mask(causal=False, window_left=150, window_right=2)),
    "chunked": dict(mask=Mask.chunked(64, 2)),
    # "past_end" spans begin before the last rows and end behind the last key: the rows meet them mid-span.
    "spans": dict(mask=Mask(), spans="past_end", positions="q_start"),
    "spans-window": dict(mask=Mask.sliding_window(100), spans="past_end", span_form="tensor"),
    "spans-clamped": dict(mask=CLAMPED, spans="long", positions="kv_start"),
    "spans-symmetric": dict(mask=Mask.sliding_window(100, causal=False), spans="past_end"),
    "spans-by-row": dict(mask=CLAMPED, spans="past_end", span_form="rows"),
    "mixed-causality": dict(mask=CLAMPED, spans="past_end", causal_flags=True),
    "left-padding": dict(mask=Mask.sliding_window(300), positions="kv_lo"),
    "sinks": dict(mask=Mask.sliding_window(200), sinks="finite"),
    "sinks-none": dict(mask=Mask.full(), sinks="some -inf"),
    "softcap": dict(mask=Mask(), softcap=2.0),
    "softcap-sinks": dict(mask=CLAMPED, spans="past_end", softcap=3.0, sinks="finite", scale=0.5),
}  # fmt: skip


def force_splits(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(decode, "choose_splits", lambda *sizes: count)


@lru_cache(maxsize=4)
def prepared(case: Case, device: torch.device) -> tuple[Inputs, dict[bool, Expected]]:
    return build(case, device), {}


def check(case: Case, device: torch.device, num_splits: int | None, backend: str = "triton", **host: int) -> None:
    """The parity rule; `host` are further arguments that must not matter."""
    inputs, known = prepared(case, device)
    interpreted = backend == "triton" and device.type == "cpu"
    if interpreted not in known:
        known[interpreted] = expect(inputs, interpreted)
    q, v = inputs.q, inputs.v
    out = torch.full((*q.shape[:-1], v.shape[-1]), float("nan"), dtype=q.dtype, device=device)
    _, lse = attention(q, inputs.k, v, inputs.mask, out=out, return_lse=True, backend=backend,
                       num_splits=num_splits, **host, **inputs.args)  # fmt: skip
    assert_close(out, lse, known[interpreted])


# Parity


# Every kind with 7 splits, and some with the other counts; `test_large` has the whole product, on a GPU.
@pytest.mark.parametrize(
    ("kind", "count"),
    [*((kind, 7) for kind in KINDS), *((kind, n) for kind in ("mixed-causality", "softcap-sinks") for n in (1, 2, 32))],
)
def test_every_mask_kind(kind: str, count: int, device: torch.device) -> None:
    case = Case(f"decode-{kind}", lens=FEW, layout="paged", heads=(2, 1), **KINDS[kind])
    check(case, device, count, max_seqlen_q=5)
    if count == 7:
        check(case, device, count, "torch")  # takes the argument, and never splits


@pytest.mark.parametrize("layout", ["packed", "padded", "batched_padded", "strided"])
@pytest.mark.parametrize("count", [None, 7])
def test_every_layout(count: int | None, layout: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    force_splits(monkeypatch, 3)
    case = Case(f"decode-{layout}", lens=FEW[1:], layout=layout, heads=(2, 1), **KINDS["softcap-sinks"])
    check(case, device, count, max_seqlen_q=5)


@pytest.mark.parametrize(("count", "chosen"), [(None, 1), (None, 3), (3, 1)])
def test_every_number_of_rows(
    count: int | None, chosen: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1 to 64 rows per sequence, in one batch."""
    force_splits(monkeypatch, chosen)
    case = Case("decode-rows", lens=ROWS, layout="padded", heads=(1, 1), **KINDS["spans-window"])
    check(case, device, count, max_seqlen_q=64)


SHAPES = [
    *(dict(page=page, dims=(64, 64)) for page in (1, 16, 64)),
    *(dict(dims=dims) for dims in ((72, 72), (128, 128), (192, 128), (256, 256), (512, 512), (40, 24))),
    *(dict(heads=heads) for heads in ((1, 1), (3, 1), (5, 1), (12, 2), (16, 1))),
    *(dict(dtype=dtype, dims=(80, 80)) for dtype in (torch.bfloat16, torch.float32)),
    dict(dtype=torch.bfloat16, dims=(512, 512)), dict(dtype=torch.float32, dims=(256, 256)),
    dict(neighbour=0, dims=(128, 128)),
]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "-".join(f"{k}={v}" for k, v in shape.items()))
def test_shapes(shape: dict[str, Any], device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = KINDS["softcap-sinks" if "heads" in shape else "spans-window"]
    given = dict(heads=(2, 1), lens=((1, 200), (3, 70)), layout="paged", **kind)
    case = Case(f"decode-{shape}", **{**given, **shape})
    force_splits(monkeypatch, 2)
    check(case, device, 3 if "dims" in shape else None, max_seqlen_q=3)  # the tiles of both modes


@pytest.mark.parametrize("kind", ["mixed-causality", "softcap-sinks"])
@pytest.mark.parametrize(
    ("layout", "count", "chosen"), [("paged", None, 3), ("packed", None, 3), ("packed", None, 1), ("paged", 7, 1)]
)
def test_mixed_batches(
    kind: str, layout: str, count: int | None, chosen: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long and short sequences, empty ones, and rows that belong to none, in one call."""
    force_splits(monkeypatch, chosen)
    case = Case(f"mixed-{kind}-{layout}", lens=MIXED, layout=layout, heads=(2, 1), rows_past_end=5, **KINDS[kind])
    check(case, device, count, max_seqlen_q=70)


def share(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lets auto share mixed batches out however few keys they have, and skips where it cannot; notes when it did."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")
    sm90 = pytest.importorskip("mmattn.cute.sm90", exc_type=ImportError)
    settle, shared = sm90.settle, []

    def noting(*args: Any, rows_above: int = 0, **kw: Any) -> Any:
        if rows_above:
            shared.append(rows_above)
        return settle(*args, rows_above=rows_above, **kw)

    monkeypatch.setattr(sm90, "settle", noting)
    monkeypatch.setattr(batch_module, "BRIEF_REACH", 0)
    return shared


BORDERS = ((70, 4000), (SHORT_ROWS, 300), (SHORT_ROWS + 1, 3000), (130, 130), (2, 5000))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("layout", "page", "lens"),
    [
        ("paged", 16, MIXED),
        ("paged", 16, BORDERS),
        ("paged", 128, BORDERS),
        ("packed", 16, MIXED),
        ("padded", 16, BORDERS),
    ],
    ids=["16-mixed", "16-borders", "128-borders", "packed-mixed", "padded-borders"],
)
def test_mixed_batches_by_two_kernels(
    lens: tuple, layout: str, page: int, kind: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long sequences by FlashAttention-4's kernel, short ones by splits: every row is written, each by one of them."""
    shared = share(monkeypatch)
    case = Case(f"both-{kind}-{layout}", lens=lens, layout=layout, heads=(8, 2), dims=(128, 128), page=page,
                rows_past_end=5, **KINDS[kind])  # fmt: skip
    check(case, device, None, "auto", max_seqlen_q=130)
    assert shared == [SHORT_ROWS]


@pytest.mark.parametrize("past_end", [1, 9, 70])
@pytest.mark.parametrize(("count", "chosen"), [(1, 1), (2, 1), (None, 1), (None, 3)])
def test_rows_of_no_sequence(
    count: int | None, chosen: int, past_end: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A padded step: more spare rows than `max_seqlen_q`, the bound on the rows of a sequence. All come back empty."""
    force_splits(monkeypatch, chosen)
    for sinks in (None, "finite"):
        case = Case(f"decode-past-end-{past_end}", lens=((1, 90), (2, 33)), layout="paged", heads=(2, 1), sinks=sinks,
                    rows_past_end=past_end)  # fmt: skip
        check(case, device, count, max_seqlen_q=2)


@pytest.mark.parametrize("past_end", [1, 70])
@pytest.mark.parametrize(
    ("backend", "count", "chosen"), [("torch", None, 1), ("triton", 2, 1), ("triton", None, 1), ("triton", None, 3)]
)
def test_rows_of_no_sequence_have_no_scale(
    backend: str, count: int | None, chosen: int, past_end: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NaN stands behind the scales in memory."""
    force_splits(monkeypatch, chosen)
    scales = torch.full((4, 2), float("nan"), device=device)
    scales[:3] = 0.5
    lens = [1, 2, 70]
    q = torch.randn(sum(lens) + past_end, 4, 32, device=device)
    k = torch.randn(3, 90, 2, 32, device=device)
    out = attention(
        q, k, k, Mask(), cu_seqlens_q=guarded([0, 1, 3, 73], device), seqused_k=guarded([90, 9, 80], device), num_splits=count,
        k_scale=scales[:3], v_scale=scales[:3], max_seqlen_q=70, backend=backend,
    )  # fmt: skip
    assert out.isfinite().all() and not out[sum(lens) :].any()


@pytest.mark.gpu
@pytest.mark.parametrize("count", [None, *COUNTS])  # varies fastest: one oracle serves all
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ["paged", "packed"])
def test_large(kind: str, count: int | None, layout: str, device: torch.device) -> None:
    lens = ((1, 20000), (16, 9000), (64, 4097), (0, 100), (3, 0), (2, 1), (700, 5000), (65, 65))
    case = Case(f"large-{kind}-{layout}", lens=lens, layout=layout, heads=(8, 2), dims=(128, 128), page=64,
                dtype=torch.bfloat16, neighbour=0, rows_past_end=90, **KINDS[kind])  # fmt: skip
    check(case, device, count)


# What splitting must not do


@pytest.mark.parametrize("count", [7])
def test_probes(count: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a key more or less at the borders of splits, spans and windows."""
    force_splits(monkeypatch, count)
    setup = Setup(Mask.sliding_window(300), 4, 500, "triton", device, spans=[(400, 497)], page=16)
    assert_sees(setup, {496: (197, 497), 497: (198, 497), 498: (199, 498), 499: (200, 499)})


@pytest.mark.parametrize(("count", "forced"), [*((n, True) for n in COUNTS), (7, False)])
def test_a_sink_counts_once(count: int, forced: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Zero queries over n keys: LSE = ln(n + e^sink), and ones in V come back as n / (n + e^sink)."""
    force_splits(monkeypatch, count)
    n, sinks = 1000, torch.tensor([6.0, -math.inf, 0.0, 9.0], device=device)
    q, v = torch.zeros(1, 2, 4, 32, device=device), torch.ones(1, n, 2, 32, device=device)
    out, lse = attention(q, torch.randn_like(v), v, Mask.full(), sinks=sinks, return_lse=True, backend="triton",
                         num_splits=count if forced else None)  # fmt: skip
    total = n + sinks.double().exp()
    torch.testing.assert_close(lse.double(), total.log()[None, :, None].expand(1, 4, 2), rtol=1e-6, atol=0)
    torch.testing.assert_close(out.double(), (n / total)[None, None, :, None].expand_as(q), rtol=2e-6, atol=0)


@pytest.mark.parametrize("kind", ["window-self", "sinks"])
def test_empty_splits_do_no_harm(kind: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """32 splits of at most 6 blocks, into buffers full of NaN."""
    empty = torch.empty

    def hostile(*args: Any, **kw: Any) -> Tensor:
        x = empty(*args, **kw)
        return x.fill_(float("nan")) if x.is_floating_point() else x

    case = Case(f"decode-{kind}", lens=FEW, layout="paged", heads=(2, 1), **KINDS[kind])
    prepared(case, device)
    monkeypatch.setattr(torch, "empty", hostile)
    check(case, device, 32, max_seqlen_q=5)


@pytest.mark.parametrize(("count", "chosen"), [(7, 1), (None, 3)])
@pytest.mark.parametrize(
    ("page", "lens"), [(1, FEW[:2]), (16, FEW[:2]), (64, FEW[:2]), (16, MIXED[:4])], ids=["1", "16", "64", "16-mixed"]
)
def test_pages_and_what_nobody_needs_change_no_bit(
    page: int, lens: tuple, count: int | None, chosen: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages in another order; other garbage in spare pages, in tails, and in table entries that no row needs."""
    force_splits(monkeypatch, chosen)
    case = Case(f"bits-{page}-{len(lens)}", lens=lens, layout="paged", page=page, heads=(2, 1), **KINDS["spans-window"])
    x = build(case, device)

    def run() -> tuple[Tensor, Tensor]:
        return attention(x.q, x.k, x.v, x.mask, num_splits=count, return_lse=True, backend="triton",
                         max_seqlen_q=max(n for n, _ in lens), **x.args)  # fmt: skip

    out, lse = run()
    assert x.k.isnan().any() and out.isfinite().all()
    pages, table = x.k.shape[0], x.args["page_table"]
    moved = torch.randperm(pages, generator=torch.Generator().manual_seed(0)).to(device)
    for name in ("k", "v"):
        old = getattr(x, name)
        new = torch.empty_like(old)
        new[moved] = old.nan_to_num(3e4)
        setattr(x, name, new)
    needed = (table >= 0) & (table < pages)
    x.batch["page_table"] = torch.where(needed, moved[table.clamp(0, pages - 1).long()], WILD - 5).to(torch.int32)
    again, lse_again = run()
    assert torch.equal(out, again) and torch.equal(lse, lse_again)


MATES = [(1, 300), (5, 211), (66, 100), (64, 65), (0, 7)]


@pytest.mark.parametrize(
    ("backend", "layout", "count"),
    [("triton", "packed", 1), ("triton", "paged", 3), ("torch", "paged", 3)],
)
def test_bits_do_not_depend_on_batch_mates(backend: str, layout: str, count: int, device: torch.device) -> None:
    """With `num_splits`: a sequence alone, first, last and in between, decode and prefill, gives the same bits."""
    random = torch.Generator().manual_seed(1)
    d, page, mask = 64, 16, Mask.sliding_window(250)
    held = []
    for rows, keys in MATES:
        q, k, v = (torch.randn(n, h, d, generator=random).half().to(device) for n, h in
                   ((rows, 2), (-(-keys // page) * page, 1), (-(-keys // page) * page, 1)))  # fmt: skip
        held.append((q, k, v, keys, [(keys // 2, keys + 3)]))

    def run(order: list[int]) -> Iterator[tuple[int, Tensor, Tensor]]:
        mine = [held[i] for i in order]
        lens = [len(x[0]) for x in mine]
        offsets = [sum(lens[:i]) for i in range(len(lens) + 1)]
        q, keys = torch.cat([x[0] for x in mine]), [x[3] for x in mine]
        args: dict[str, Any] = dict(cu_seqlens_q=guarded(offsets, device), mm_prefix_range=[x[4] for x in mine])
        if layout == "packed":
            k, v = (torch.cat([x[i][: x[3]] for x in mine]) for i in (1, 2))
            args["cu_seqlens_k"] = guarded([sum(keys[:i]) for i in range(len(keys) + 1)], device)
        else:
            k, v = (torch.cat([x[i] for x in mine]).unflatten(0, (-1, page)) for i in (1, 2))
            args["seqused_k"] = guarded(keys, device)
            counts = [-(-n // page) for n in keys]
            first = [sum(counts[:i]) for i in range(len(counts))]
            table = [[f + j if j < n else WILD for j in range(max(counts))] for f, n in zip(first, counts)]
            args["page_table"] = torch.tensor(table, dtype=torch.int32, device=device)
        out, lse = attention(q, k, v, mask, num_splits=count, return_lse=True, backend=backend, **args)
        for i, start, end in zip(order, offsets, offsets[1:]):
            yield i, out[start:end], lse[:, start:end]

    alone = {i: (out, lse) for n in range(len(MATES)) for i, out, lse in run([n])}
    for order in ([0, 1, 2, 3, 4], [3, 2, 4, 1, 0], [1, 0]):
        for i, out, lse in run(order):
            assert torch.equal(out, alone[i][0]) and torch.equal(lse, alone[i][1]), f"{MATES[i]} among {order}"


# What runs: host-side choices


class Launches:
    """Stands in for the kernel: notes launches and runs nothing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.noted: list[tuple[tuple[int, ...], dict[str, Any]]] = []
        monkeypatch.setattr(forward, "_forward_kernel", self)
        monkeypatch.setattr(decode, "combine", lambda *args: lambda *tensors: None)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **kw: self.noted.append((grid, kw))


class FloatBytes(TorchDispatchMode):
    """Counts the bytes of the floating-point tensors that are allocated."""

    allocated = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if "empty" in str(func) and result.is_floating_point():
            self.allocated += result.numel() * result.element_size()
        return result


@pytest.mark.parametrize("count", [None, 16])
def test_a_mixed_batch_is_cheap(count: int | None, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode rows take small tiles of their own, and only they have partial results: a long prompt next to them costs
    no memory."""
    launches, splits, heads, d = Launches(monkeypatch), 16, 4, 16
    force_splits(monkeypatch, splits)
    lens = [4000, 1, 2, 1]
    q = torch.zeros(sum(lens), heads, d, dtype=torch.float16, device=device)
    k = torch.zeros(1, 16, 1, d, dtype=torch.float16, device=device)
    args = dict(cu_seqlens_q=guarded([0, 4000, 4001, 4003, 4004], device), seqused_k=guarded([4000] * 4, device),
                page_table=torch.zeros(4, 250, dtype=torch.int32, device=device), max_seqlen_q=4000)  # fmt: skip
    the_plan = plan(Mask(), q=q, k=k, **args)
    with FloatBytes() as memory:
        attention(q, k, k, the_plan, num_splits=count, out=torch.zeros_like(q), backend="triton")
    (_, long_kw), (grid, short_kw) = launches.noted
    assert not long_kw["SPLIT"] and short_kw["SPLIT"] and grid[1] == splits
    if count is None:
        assert short_kw["TILE_M"] == SHORT_ROWS * heads and grid[0] == len(lens) + 1
    most_rows = SHORT_ROWS if count is None else FEW_ROWS
    assert memory.allocated <= splits * len(lens) * most_rows * heads * (d + 1) * 4


def test_choose_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, slots = torch.device("cuda", 0), 132 * 4
    monkeypatch.setattr(decode, "_multiprocessors", lambda device: 132)
    tile = Tile(16, 64, 4, 2, programs=4)
    choose = lambda programs, keys: decode.choose_splits(gpu, programs, tile, keys)  # noqa: E731
    assert decode.choose_splits(torch.device("cpu"), 1, tile, 2**20) == 1
    assert choose(8, 128 * 1024) == slots // 8, "few programs: one full wave"
    assert choose(1, 2**24) == decode.MAX_SPLITS
    assert choose(8, decode.FEWEST_KEYS * 2 - 1) == 1 and choose(8, decode.FEWEST_KEYS * 2) == 2
    assert choose(512, 32 * 1024) == 4, "many programs: long splits that level out the end"
    assert choose(512, 16 * decode.LONG * 2 - 1) == 1 and choose(512, 16 * decode.LONG * 2) == 2
    assert choose(10**6, 2**24) == 1
    tall = tile._replace(tile_m=64)
    assert decode.choose_splits(gpu, 512, tall, 64 * decode.LONG * 2 - 1) == 1, "more rows to combine"
    for programs in (1, 3, 8, 63, 64, 264, 265, 528, 5000):
        for keys in (0, 1, 100, 512, 4096, 131072, 2**24):
            n = choose(programs, keys)
            assert 1 <= n <= decode.MAX_SPLITS
            assert n == 1 or keys // n >= decode.FEWEST_KEYS
            assert n == 1 or programs * 2 > slots or programs * n <= slots


@pytest.mark.parametrize(
    ("mask", "spans", "flags", "bound"),
    [
        (Mask(), False, False, 1600),
        (Mask.full(), False, False, 1600),
        (Mask.sliding_window(128), False, False, 130),
        (Mask.sliding_window(128, causal=False), False, False, 257),
        (Mask.sliding_window(128), False, True, 257),  # a flag may make the row symmetric
        (Mask.sliding_window(128), True, False, 1600),  # a span may be as long as the cache
    ],
)
def test_splits_follow_the_row_interval(
    mask: Mask, spans: bool, flags: bool, bound: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A window bounds what there is to split, whatever the size of the cache; lengths on the device do not matter."""
    Launches(monkeypatch)
    seen = []
    monkeypatch.setattr(decode, "choose_splits", lambda device, programs, tile, keys: seen.append(keys) or 1)
    q, k = torch.zeros(2, 3, 4, 16, device=device), torch.zeros(8, 16, 2, 16, device=device)
    args: dict[str, Any] = dict(page_table=torch.zeros(2, 100, dtype=torch.int32, device=device))
    if spans:
        args["mm_prefix_range"] = [[(3, 5)], []]
    if flags:
        args["causal"] = guarded([1, 0], device)
    for lengths in ([5, 7], [1600, 90]):
        attention(q, k, k, mask, seqused_k=guarded(lengths, device), backend="triton", **args)
    assert seen == [bound, bound]


@pytest.mark.parametrize("wrong", [0, 257, -1, 2.0, True, "2"])
def test_num_splits_is_checked(wrong: Any) -> None:
    x = torch.zeros(1, 2, 1, 16)
    with pytest.raises(ValueError, match="num_splits must be None or an integer in 1..256, got"):
        attention(x, x, x, Mask(), num_splits=wrong)


# Float8 keys and values

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def scales(form: str, b: int, heads: int, device: torch.device) -> tuple[Tensor | float, Tensor]:
    """A scale in one of its forms, and as float64 `[b, heads]`."""
    full = (0.25 + torch.rand(b, heads, generator=torch.Generator().manual_seed(b))).to(device)
    given: Tensor | float
    if form == "number":
        given, full = 0.375, torch.full_like(full, 0.375)
    elif form == "one element":
        given, full = full[:1, 0], full[:1, :1].expand(b, heads)
    elif form == "per head":
        given = full = full[:1].expand(b, heads)
    elif form == "per sequence":
        given = full = full[:, :1].expand(b, heads)
    else:
        given = full.T.contiguous().T
    return given, full.double()


@pytest.mark.parametrize(
    ("backend", "count", "rows", "form", "dtype", "kv_dtype", "dims"),
    [
        *(("triton", 7, 4, form, torch.bfloat16, FLOAT8[0], (64, 64))
          for form in ("number", "one element", "per head", "per sequence")),
        *((backend, n, 4, "both", dtype, kv_dtype, (64, 64)) for backend, n in (("triton", 3), ("triton", None), ("torch", None))
          for dtype in (torch.float16, torch.bfloat16) for kv_dtype in FLOAT8),
        *(("triton", n, rows, "both", torch.bfloat16, FLOAT8[0], dims) for n, rows in ((3, 4), (None, 4), (None, 70))
          for dims in ((192, 128), (128, 96), (72, 40))),
        ("triton", None, 70, "both", torch.bfloat16, FLOAT8[1], (64, 64)),
    ],
    ids=lambda x: str(x).removeprefix("torch."),
)  # fmt: skip
def test_float8(
    backend: str, count: int | None, rows: int, form: str, dtype: torch.dtype, kv_dtype: torch.dtype,
    dims: tuple[int, int], device: torch.device,
) -> None:  # fmt: skip
    """Against the oracle on dequantised values.

    Both float8 types are exact in fp16, in which the kernel multiplies, and so are these bf16 queries: the budget is
    that of fp16 arithmetic, plus one rounding step of a bf16 output (two in the interpreter, which cuts).
    """
    b, heads_kv, page = 3, 2, 16
    lens = [260, 45, 160]
    random = torch.Generator().manual_seed(5)
    q = torch.randn(b, rows, 2 * heads_kv, dims[0], generator=random).to(dtype).to(device)
    k, v = ((torch.randn(b, 272, heads_kv, d, generator=random) * 3).to(kv_dtype).to(device) for d in dims)
    for i, n in enumerate(lens):
        for x in (k, v):
            x[i, n:] = float("nan")
    (k_given, k_scale), (v_given, v_scale) = scales(form, b, heads_kv, device), scales(form, b + 7, heads_kv, device)
    v_scale = v_scale[:b]
    if isinstance(v_given, Tensor) and v_given.numel() > 1:
        v_given = v_given[:b]
    mask, sinks = Mask.sliding_window(200), torch.randn(4, generator=random).to(device)
    args: dict[str, Any] = dict(seqused_k=guarded(lens, device), mm_prefix_range=[[(100, 258)], [], [(150, 170)]])
    true_k, true_v = (x.double() * s[:, None, :, None] for x, s in ((k, k_scale), (v, v_scale)))
    interpreted = backend == "triton" and device.type == "cpu"
    want = expect(Inputs(q.half(), true_k, true_v, mask, args, dict(sinks=sinks)), interpreted)
    if dtype is torch.bfloat16:
        want.out_budget = want.out_budget + (1 + interpreted) * torch.finfo(dtype).eps * want.out.abs()

    order = torch.randperm(b * 17, generator=random)
    pages = []
    for x in (k, v):
        pool = torch.empty(b * 17, page, *x.shape[2:], dtype=kv_dtype, device=device)
        pool[order.to(device)] = x.reshape(b * 17, page, *x.shape[2:])
        pages.append(pool)
    args["page_table"] = order.reshape(b, 17).to(torch.int32).to(device)
    call: dict[str, Any] = dict(sinks=sinks, k_scale=k_given, v_scale=v_given, num_splits=count, **args)
    skip_unsupported(backend, q, *pages, mask, **call)
    out, lse = attention(q, *pages, mask, return_lse=True, backend=backend, **call)
    assert out.dtype is dtype
    assert_close(out, lse, want)


def test_scales_of_half_precision_keys(device: torch.device) -> None:
    """Scales are not tied to float8."""
    case = Case("decode-scaled", lens=FEW[:3], layout="padded", heads=(4, 2))
    x = build(case, device)
    (k_given, k_scale), (v_given, v_scale) = scales("both", 3, 2, device), scales("per head", 3, 2, device)
    true_k, true_v = (y.double() * s[:, None, :, None] for y, s in ((x.k, k_scale), (x.v, v_scale)))
    want = expect(replace(x, k=true_k, v=true_v), interpreted=device.type == "cpu")
    for backend, count in (("triton", None), ("triton", 3), ("torch", None)):
        out, lse = attention(x.q, x.k, x.v, x.mask, k_scale=k_given, v_scale=v_given, num_splits=count,
                             return_lse=True, backend=backend, **x.args)  # fmt: skip
        assert_close(out, lse, want)


@pytest.mark.parametrize(
    "wrong",
    [torch.ones(2, 1), torch.ones(2), torch.ones(1, 2, dtype=torch.float64), torch.ones(1, 2).half(), True, "1"],
)
def test_scales_are_checked(wrong: Any) -> None:
    x = torch.zeros(1, 2, 2, 16).half()
    for name in ("k_scale", "v_scale"):
        with pytest.raises(
            ValueError, match=rf"{name} must be a number, or a float32 tensor of one element or \[1, 2\]"
        ):
            attention(x, x.to(FLOAT8[0]), x.to(FLOAT8[0]), Mask(), **{name: wrong})


# CUDA graphs

STEPS: dict[str, list[list[tuple[int, int]]]] = {
    # (rows, keys) of each sequence: at capture, and after changes in place
    "decode": [[(1, 3000), (1, 17), (1, 900), (1, 2000)], [(1, 1), (1, 4096), (1, 0), (1, 64)],
               [(1, 4000), (1, 4000), (0, 0), (0, 0)]],
    "drafts": [[(8, 3000), (8, 17), (8, 900), (8, 2000)], [(8, 8), (3, 4096), (0, 0), (8, 64)]],
    "mixed": [[(600, 3000), (1, 17), (5, 900), (1, 2000)], [(1, 3001), (400, 400), (1, 901), (130, 2000)],
              [(1, 4096), (1, 1), (0, 0), (2, 5)], [(64, 64), (65, 65), (70, 4000), (400, 1000)]],
    "prefill": [[(600, 600), (300, 1300), (500, 4000), (200, 200)], [(1000, 4096), (600, 600), (0, 0), (0, 0)]],
}  # fmt: skip
MOST_ROWS = {"decode": 1, "drafts": 8, "mixed": 600, "prefill": 1000}


@pytest.mark.gpu
@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("count", [None, 4])
@pytest.mark.parametrize("kind", ["window", "clamped", "softcap-sinks", "float8"])
@pytest.mark.parametrize("backend", ["triton", "auto", "auto, shared"])
def test_graph_replays_equal_eager(
    backend: str, kind: str, count: int | None, name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lengths, row boundaries, page table, spans and causal flags change in place. Every replay equals a fresh call bit
    for bit; neither compiles, waits for the device or, in a replay, allocates."""
    from triton import knobs

    sharing = backend == "auto, shared"
    if sharing:
        shared, backend = share(monkeypatch), "auto"
    steps, page, b = STEPS[name], 64, 4
    total = max(sum(rows for rows, _ in step) for step in steps) + 3
    random = torch.Generator().manual_seed(0)
    int32 = dict(dtype=torch.int32, device=device)
    q = torch.randn(total, 8, 128, generator=random).bfloat16().to(device)
    k, v = (torch.randn(300, page, 2, 128, generator=random).bfloat16().to(device) for _ in range(2))
    mask, extras = Mask.sliding_window(700, mm_prefix_clamp=kind == "clamped"), {}
    if kind == "softcap-sinks":
        extras = dict(softcap=20.0, sinks=torch.randn(8, generator=random).to(device))
    elif kind == "float8":
        k, v = k.to(FLOAT8[0]), v.to(FLOAT8[0])
        extras = dict(k_scale=torch.full((b, 2), 0.5, device=device), v_scale=torch.full((b, 2), 0.5, device=device))
    batch = dict(
        cu_seqlens_q=torch.zeros(b + 1, **int32), seqused_k=torch.zeros(b, **int32), causal=torch.zeros(b, **int32),
        page_table=torch.zeros(b, 4096 // page, **int32), mm_prefix_range=torch.full((b, 3, 2), -1, **int32),
    )  # fmt: skip

    def change(number: int) -> None:
        """The tensors of a step, written in place."""
        lens = steps[number]
        rows = [n for n, _ in lens]
        batch["cu_seqlens_q"].copy_(torch.tensor([sum(rows[:i]) for i in range(b + 1)]))
        batch["seqused_k"].copy_(torch.tensor([n for _, n in lens]))
        batch["causal"].copy_(torch.tensor([(i + number) % 2 for i in range(b)]))
        batch["page_table"].copy_(torch.randperm(300, generator=random)[: b * (4096 // page)].reshape(b, -1))
        last = [(n // 2, n + 100 * number) if n < 300 else (n - 3, n + 100 * number) for _, n in lens]
        more = [[(n // 3, n // 3 + 40), (n // 2 + 50, n // 2 + 90)] if n >= 300 else [(-1, -1)] * 2 for _, n in lens]
        spans = [[*some, end] for some, end in zip(more, last)]
        batch["mm_prefix_range"].copy_(torch.tensor(spans).flip(1))

    def call(**to: Any) -> tuple[Tensor, Tensor]:
        the_plan = plan(mask, q=q, k=k, max_seqlen_q=MOST_ROWS[name], **batch)
        return attention(q, k, v, the_plan, num_splits=count, return_lse=True, backend=backend, **extras, **to)

    change(0)
    if backend != "auto":
        skip_unsupported(backend, q, k, v, mask, max_seqlen_q=MOST_ROWS[name], num_splits=count, **extras, **batch)
    call()
    torch.cuda.synchronize()
    compiled: list[str] = []
    monkeypatch.setattr(knobs.runtime, "jit_cache_hook", lambda *, repr, **kw: compiled.append(repr))
    out, graph = torch.full_like(q, float("nan")), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _, lse = call(out=out)
    for number in [*range(len(steps)), 0]:
        change(number)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            want, want_lse = call()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        out.fill_(float("nan"))
        before = torch.cuda.memory_allocated()
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() == before
        assert out.isfinite().all()
        assert torch.equal(out, want) and torch.equal(lse, want_lse), f"step {number}"
    assert not compiled
    if sharing:
        both = name in ("mixed", "prefill") and kind != "float8" and count is None
        assert len(shared) == (2 + len(steps) + 1 if both else 0)  # every plan by both kernels, or none
