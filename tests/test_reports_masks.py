"""Public bug reports about masks (M: multimodal spans, W: windows, D: drafters), with the numbers of the reports.

Rows and keys are absolute positions. Sizes beyond what an interpreter can do run on a GPU; each such report has a smaller
twin that runs everywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from mmattn import Mask, attention, plan

from .cases import guarded
from .probes import Interval, Setup, assert_sees, count_probe, visible_counts

Run = Callable[..., Setup]


@pytest.fixture
def setup(backend: str, device: torch.device) -> Run:
    def make(mask: Mask, q_len: int, kv_len: int, **kw: Any) -> Setup:
        return Setup(mask, q_len, kv_len, backend, device, **kw)

    return make


# M: multimodal spans


def test_m01_window_survives_a_span_twin(setup: Run) -> None:
    call = setup(Mask.sliding_window(32), 160, 160, spans=[(8, 23)])
    assert_sees(call, {159: (128, 159), 8: (0, 23), 23: (0, 23), 24: (0, 24), 100: (69, 100)})


@pytest.mark.gpu
def test_m01_window_survives_a_span(setup: Run) -> None:
    """vLLM #47300: one image anywhere and a context past the window gave nonsense."""
    call = setup(Mask.sliding_window(1024), 2304, 2304, spans=[(16, 271)], head_dim=256)
    assert_sees(call, {2303: (1280, 2303), 1040: (17, 1040), 16: (0, 271), 271: (0, 271)})


@pytest.mark.parametrize("page", [None, 16])
@pytest.mark.parametrize("context", [64, 61])
def test_m02_a_later_chunk_twin(setup: Run, context: int, page: int | None) -> None:
    span = (context + 4, context + 7)
    call = setup(Mask.sliding_window(16), 12, context + 12, spans=[span], page=page)
    first, inside, last = context, context + 4, context + 11
    assert_sees(call, {first: (first - 15, first), inside: (inside - 15, span[1]), last: (last - 15, last)})


@pytest.mark.gpu
@pytest.mark.parametrize("page", [16, 64, None])
@pytest.mark.parametrize("context", [1024, 1021])
def test_m02_a_later_chunk(setup: Run, context: int, page: int | None) -> None:
    """vLLM #47332: row positions started at 0 in every chunk."""
    shift = context - 1024
    call = setup(Mask.sliding_window(256), 64, 1088 + shift, spans=[(1040 + shift, 1071 + shift)], page=page)
    expected = {1024: (769, 1024), 1040: (785, 1071), 1087: (832, 1087)}
    assert_sees(call, {row + shift: (lo + shift, hi + shift) for row, (lo, hi) in expected.items()})


# M03: spans longer than the window. The four behaviours that public code has shown differ at these rows.
M03: dict[str, tuple[Mask, dict[int, Interval]]] = {
    "left clamp": (
        Mask.sliding_window(8, mm_prefix_clamp=True),
        {4: (0, 27), 20: (13, 27), 27: (20, 27), 30: (23, 30)},
    ),
    "unclamped": (Mask.sliding_window(8), {4: (0, 27), 20: (4, 27), 27: (4, 27), 30: (23, 30)}),
}


@pytest.mark.parametrize("name", M03)
def test_m03_clamp(setup: Run, name: str) -> None:
    mask, expected = M03[name]
    assert_sees(setup(mask, 48, 48, spans=[(4, 27)]), expected)


def test_m03_counts_separate_the_behaviours(setup: Run) -> None:
    for name, counts in (("left clamp", [28, 15, 8, 8]), ("unclamped", [28, 24, 24, 8])):
        seen = visible_counts(setup(M03[name][0], 48, 48, spans=[(4, 27)]))
        assert [seen[row] for row in (4, 20, 27, 30)] == counts
    dropped = visible_counts(setup(Mask.sliding_window(8), 48, 48))
    assert [dropped[row] for row in (4, 20, 27, 30)] == [5, 8, 8, 8]


@pytest.mark.gpu
def test_m03_clamp_large(setup: Run) -> None:
    clamped = Mask.sliding_window(1024, mm_prefix_clamp=True)
    assert_sees(setup(clamped, 1200, 1200, spans=[(32, 1151)]), {32: (0, 1151), 1100: (77, 1151)})
    unclamped = Mask.sliding_window(1024)
    assert_sees(setup(unclamped, 1200, 1200, spans=[(32, 1151)]), {32: (0, 1151), 1100: (32, 1151)})
    vllm = Mask.sliding_window(129, mm_prefix_clamp=True)  # sizes of vLLM's own test
    assert_sees(
        setup(vllm, 384, 384, spans=[(32, 351)]), {32: (0, 351), 200: (72, 351), 351: (223, 351), 383: (255, 383)}
    )


@pytest.mark.parametrize("second", [(20, 29), (12, 21)], ids=["apart", "touching"])
def test_m05_images_do_not_see_each_other(setup: Run, second: tuple[int, int]) -> None:
    call = setup(Mask(), 40, 40, spans=[(2, 11), second])
    assert_sees(call, {5: (0, 11), second[0]: (0, second[1]), second[0] + 5: (0, second[1]), 11: (0, 11), 39: (0, 39)})


def test_m07_an_image_cut_by_a_chunk(setup: Run) -> None:
    """llama.cpp: 3 cached tokens and 4 new image tokens; sglang: a chunk border inside an image."""
    assert_sees(setup(Mask(), 4, 7, spans=[(3, 6)]), dict.fromkeys(range(3, 7), (0, 6)))
    spans = [(40, 95)]
    assert_sees(setup(Mask(), 48, 48, spans=spans), {39: (0, 39), 40: (0, 47), 47: (0, 47)})  # NaN from key 48 on
    assert_sees(setup(Mask(), 64, 112, spans=spans), {48: (0, 95), 95: (0, 95), 96: (0, 96)})


def test_m07_chunks_equal_one_shot(backend: str, device: torch.device) -> None:
    q, k, v = (torch.randn(112, h, 64, device=device).half() for h in (4, 2, 2))
    args: dict[str, Any] = dict(mm_prefix_range=[[(40, 95)]], max_seqlen_q=128, backend=backend)
    mask = Mask.sliding_window(50)
    whole = attention(
        q, k, v, mask, cu_seqlens_q=guarded([0, 112], device), **args, cu_seqlens_k=guarded([0, 112], device)
    )
    later = attention(
        q[48:], k, v, mask, cu_seqlens_q=guarded([0, 64], device), **args, cu_seqlens_k=guarded([0, 112], device)
    )
    assert (later.float() - whole[48:].float()).abs().max() <= 2 * torch.finfo(torch.float16).eps


def test_m09_w09_one_description_for_two_layer_kinds(backend: str, device: torch.device) -> None:
    """No state leaks between layers that share lengths and spans: A, B, A, B equals fresh descriptions."""
    x = torch.randn(70, 2, 32, device=device).half()
    spans = torch.tensor([[[4, 27]]], dtype=torch.int32, device=device)
    sliding, full = Mask.sliding_window(8), Mask()
    plans = [plan(sliding, q=x[None], k=x[None], mm_prefix_range=spans), plan(full, q=x[None], k=x[None])]
    fresh = [
        attention(x[None], x[None], x[None], sliding, mm_prefix_range=[[(4, 27)]], backend=backend),
        attention(x[None], x[None], x[None], full, backend=backend),
    ]
    for turn in range(4):
        assert torch.equal(attention(x[None], x[None], x[None], plans[turn % 2], backend=backend), fresh[turn % 2])
    assert not torch.equal(*fresh)


def test_m09_global_layers_are_causal(setup: Run) -> None:
    assert_sees(setup(Mask(), 48, 48), {4: (0, 4), 27: (0, 27), 47: (0, 47)})


@pytest.mark.parametrize("count", [1, 8, 46])
def test_m10_many_spans_twin(setup: Run, count: int) -> None:
    spans = [(13 * i + 3, 13 * i + 12) for i in range(count)]
    length = 13 * count + 16
    row = 13 * (count - 1) + 5  # the third token of the last span
    call = setup(Mask.sliding_window(16), min(length, 40), length, spans=spans, group=1)
    count_probe(call, {row: (max(0, row - 15), spans[-1][1]), length - 1: (length - 16, length - 1)})


@pytest.mark.gpu
def test_m10_many_spans_compile_once(device: torch.device) -> None:
    """vLLM #50255: the number of spans was a compile-time constant."""
    from mmattn.triton import bounds, forward

    def run(count: int) -> None:
        spans = [(13 * i, 13 * i + 9) for i in range(count)]
        call = Setup(Mask.sliding_window(512), 4096, 4096, "triton", device, spans=spans, head_dim=128)
        last = spans[-1]
        count_probe(call, {last[0]: (max(0, last[0] - 511), last[1]), 4095: (3584, 4095)})

    def compiled() -> list[int]:
        kernels = (bounds._row_kernel, bounds._tile_kernel, forward._forward_kernel)
        return [sum(len(entry[0]) for entry in kernel.device_caches.values()) for kernel in kernels]

    run(1)
    before = compiled()
    assert min(before) >= 1
    for count in (8, 46, 299, 300):
        run(count)
    assert compiled() == before


def test_m13_batches_with_and_without_spans(backend: str, device: torch.device) -> None:
    """Spans of one sequence only, no-op entries, and any order of the batch: no sequence may notice its mates."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(3, 70, h, 32, device=device).half() for h in (2, 1, 1))
    lists = [[], [], [(3, 9), (1, 1), (0, 0)]]
    mask = Mask.sliding_window(6)
    plain = attention(q, k, v, mask, backend=backend)
    mixed = attention(q, k, v, mask, mm_prefix_range=lists, backend=backend)
    assert torch.equal(mixed[:2], plain[:2]) and not torch.equal(mixed[2], plain[2])
    padded = torch.tensor([[(0, 0), (-1, -1)], [(-1, -1), (1, 1)], [(0, 0), (3, 9)]], dtype=torch.int32, device=device)
    assert torch.equal(attention(q, k, v, mask, mm_prefix_range=padded, backend=backend), mixed)
    order = [2, 0, 1]
    shuffled = attention(q[order], k[order], v[order], mask, mm_prefix_range=[lists[i] for i in order], backend=backend)
    assert torch.equal(shuffled, mixed[order])


def test_m15_left_padding_with_a_prefix(setup: Run) -> None:
    """PaliGemma: pad tokens became visible when the prefix was unmasked after them."""
    call = setup(Mask(), 20, 20, spans=[(5, 12)], batch=(("kv_lo", 5),))
    assert_sees(call, {0: None, 4: None, 5: (5, 12), 12: (5, 12), 13: (5, 13), 19: (5, 19)})


def test_m15_left_padding_equals_the_call_without(backend: str, device: torch.device) -> None:
    x = torch.randn(1, 133, 2, 32, device=device).half()
    padded = attention(x, x, x, Mask(), mm_prefix_range=[[(5, 12)]], kv_lo=guarded([5], device), backend=backend)
    plain = attention(x[:, 5:], x[:, 5:], x[:, 5:], Mask(), mm_prefix_range=[[(0, 7)]], backend=backend)
    assert (padded[:, :5] == 0).all()
    assert (padded[:, 5:].float() - plain.float()).abs().max() <= 2 * torch.finfo(torch.float16).eps


def test_m16_a_causal_image(setup: Run) -> None:
    """vLLM #57152: without a span an image is causal, windowed text. [1900, 3948) as a span would be (1900, 3947)."""
    mask = Mask.sliding_window(128)
    assert_sees(setup(mask, 20, 2000, batch=(("q_start", 1890),), group=1), {1900: (1773, 1900)})
    with_span = setup(mask, 20, 4000, spans=[(1900, 3947)], batch=(("q_start", 1890),), group=1)
    count_probe(with_span, {1899: (1772, 1899), 1900: (1773, 3947)})


# W: windows


@pytest.mark.parametrize("window", [1, 2, 4, 16, 17])
def test_w01_window_keeps_exactly_w_keys(setup: Run, window: int) -> None:
    expected: dict[int, Interval] = {row: (max(0, row - window + 1), row) for row in (0, 3, 10, 19)}
    assert_sees(setup(Mask.sliding_window(window), 20, 20), expected)


def test_w03_direction_of_the_window(setup: Run) -> None:
    assert_sees(setup(Mask.sliding_window(4), 16, 16), {15: (12, 15), 3: (0, 3)})
    assert_sees(setup(Mask.sliding_window(200), 1, 800), {799: (600, 799)})


def test_w04_sentinels(backend: str, device: torch.device) -> None:
    """-1 is FlashAttention's "no limit", 0 is "self only", and a huge window is no window."""
    q, k, v = (torch.randn(1, 70, 2, 64, device=device).half() for _ in range(3))
    causal = attention(q, k, v, Mask(), backend=backend)
    assert causal.abs().max() > 0
    for mask in (Mask.from_fa_window(True, (-1, 0)), Mask(window_left=70), Mask(window_left=2**31 - 1),
                 Mask(window_left=2**40), Mask.sliding_window(2**31)):  # fmt: skip
        assert torch.equal(attention(q, k, v, mask, backend=backend), causal), mask
    for mask in (Mask.sliding_window(1), Mask.from_fa_window(True, (0, 0)), Mask.sliding_window(1, causal=False)):
        assert torch.equal(attention(q, k, v, mask, backend=backend), v), mask


def test_w05_windows_of_rows_that_are_not_causal(setup: Run) -> None:
    call = setup(Mask.sliding_window(64, causal=False), 256, 256, group=1)
    count_probe(call, {0: (0, 63), 128: (65, 191), 255: (192, 255)})
    small = setup(Mask.sliding_window(16, causal=False), 64, 64, group=4)
    assert_sees(small, {0: (0, 15), 32: (17, 47), 63: (48, 63)})


def test_w05_one_sided_windows(setup: Run) -> None:
    assert_sees(
        setup(Mask(causal=False, window_left=7, window_right=3), 40, 40), {0: (0, 3), 20: (13, 23), 39: (32, 39)}
    )
    assert_sees(setup(Mask(causal=False, window_left=7, symmetrize=False), 40, 40), {20: (13, 39)})
    assert_sees(setup(Mask(causal=False, window_right=3), 40, 40), {20: (0, 23)})


def test_w08_more_rows_than_keys(setup: Run) -> None:
    """Bottom-right alignment also where q is longer: rows before position 0 see nothing under a causal mask."""
    count_probe(setup(Mask(), 70, 35, group=1), {-35: None, -1: None, 0: (0, 0), 34: (0, 34)})
    both = Mask(causal=False, window_left=32, window_right=64)
    assert_sees(setup(both, 129, 60), {-69: None, -65: None, -64: (0, 0), 0: (0, 59), 59: (27, 59)})
    explicit = setup(both, 129, 60, batch=(("q_start", 0),))
    assert_sees(explicit, {0: (0, 59), 32: (0, 59), 33: (1, 59), 91: (59, 59), 92: None, 128: None})


@pytest.mark.gpu
def test_w08_more_rows_than_keys_large(setup: Run) -> None:
    count_probe(setup(Mask(), 2048, 1024), {-1024: None, -1: None, 0: (0, 0), 1023: (0, 1023)})


@pytest.mark.parametrize("group", [1, 3, 5, 6, 7, 12, 16])
@pytest.mark.parametrize("rows", [1, 5])
def test_w10_groups_that_do_not_divide_a_tile(setup: Run, group: int, rows: int) -> None:
    call = setup(Mask.sliding_window(40), rows, 81, group=group)
    assert_sees(call, {80: (41, 80), 81 - rows: (42 - rows, 81 - rows)})


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 5, 200])
def test_w10_group_of_12_in_a_long_window(setup: Run, rows: int) -> None:
    call = setup(Mask.sliding_window(4096), rows, 8192, group=12, head_dim=128)
    assert_sees(call, {8191: (4096, 8191), 8192 - rows: (4097 - rows, 8192 - rows)})


# D: drafters and causality per sequence


def test_d02_a_drafter_sees_both_ways_twin(setup: Run) -> None:
    call = setup(Mask.sliding_window(64, causal=False), 8, 308, group=8)
    assert_sees(call, {300: (237, 307), 307: (244, 307)})


@pytest.mark.gpu
@pytest.mark.parametrize("page", [None, 16])
def test_d02_a_drafter_sees_both_ways(setup: Run, page: int | None) -> None:
    call = setup(Mask.sliding_window(1024, causal=False), 8, 5008, group=8, head_dim=128, page=page)
    assert_sees(call, {5000: (3977, 5007), 5007: (3984, 5007)})


def test_d03_a_drafter_keeps_its_window_twin(setup: Run) -> None:
    assert_sees(setup(Mask.sliding_window(128, causal=False), 16, 316), {300: (173, 315), 315: (188, 315)})


@pytest.mark.gpu
def test_d03_a_drafter_keeps_its_window(setup: Run) -> None:
    """vLLM #40898: windowed draft layers ran as full attention."""
    call = setup(Mask.sliding_window(2048, causal=False), 16, 5016, head_dim=128)
    assert_sees(call, {5000: (2953, 5015), 5015: (2968, 5015)})


def test_d05_a_canvas_with_one_shared_past_window(setup: Run) -> None:
    """DiffusionGemma: every canvas row sees the same past and the whole canvas. That is `kv_lo`, not a window: keys before
    `prefix - (W - 1)` are cut off for the sequence. A symmetric window differs, row by row."""
    prefix, canvas, window = 150, 26, 102
    lo = prefix - (window - 1)
    shared = setup(Mask.full(), canvas, prefix + canvas, batch=(("kv_lo", lo),))
    assert_sees(shared, {prefix: (lo, prefix + canvas - 1), prefix + canvas - 1: (lo, prefix + canvas - 1)})
    symmetric = visible_counts(setup(Mask.sliding_window(window, causal=False), canvas, prefix + canvas))
    assert symmetric[0] == 127 and symmetric[-1] == window


@pytest.mark.gpu
def test_d05_a_canvas_with_one_shared_past_window_large(setup: Run) -> None:
    shared = setup(Mask.full(), 256, 1756, batch=(("kv_lo", 477),))
    count_probe(shared, {1500: (477, 1755), 1755: (477, 1755)})
    symmetric = setup(Mask.sliding_window(1024, causal=False), 256, 1756)
    count_probe(symmetric, {1755: (732, 1755)})


def test_d06_a_block_wider_than_the_window(setup: Run) -> None:
    """Training that leaves a draft block unwindowed equals a symmetric window if the window holds the block; a narrower
    window needs the block as a span."""
    block = (40, 55)
    symmetric = setup(Mask.sliding_window(8, causal=False), 16, 56)
    assert_sees(symmetric, {40: (33, 47), 55: (48, 55)})
    unwindowed = setup(Mask.sliding_window(8, causal=False, mm_prefix_clamp=True), 16, 56, spans=[block])
    assert visible_counts(unwindowed)[0] == 23
    wide = Mask.sliding_window(16, causal=False)
    assert visible_counts(setup(wide, 16, 56)) == visible_counts(setup(wide, 16, 56, spans=[block]))


@pytest.mark.parametrize("flag", [0, 1, -1, 7])
def test_causality_of_a_sequence_overrides_the_mask(setup: Run, flag: int) -> None:
    for own in (True, False):
        call = setup(Mask.sliding_window(8, causal=own), 24, 24, batch=(("causal", flag),))
        assert_sees(call, {10: (3, 10) if flag else (3, 17)})
