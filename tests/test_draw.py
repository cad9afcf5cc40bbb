"""Pictures of masks, pixel by pixel against `Mask.visible`."""

import subprocess
import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import mmattn
from mmattn import Mask
from mmattn import draw as draw_module
from mmattn.draw import HIDDEN, HIDDEN_PARTIAL, HIDDEN_SKIPPED, SPANS, VISIBLE, count_tiles, draw

pytest.importorskip("PIL")

SPAN_LIST = [(2, 11), (12, 14), (20, 29)]
MASKS = {
    "causal": (Mask.causal_(), []),
    "full": (Mask.full(), []),
    "window": (Mask.sliding_window(5), []),
    "spans": (Mask.causal_(), SPAN_LIST),
    "window-spans": (Mask.sliding_window(5), SPAN_LIST),
    "window-clamped-spans": (Mask.sliding_window(5, mm_prefix_clamp=True), SPAN_LIST),
    "chunks": (Mask.chunked(8, lookback=1), []),
}
SHAPES = {"square": (32, 32, 0), "later-rows": (13, 32, 19), "rows-past-keys": (32, 20, 5)}


def cells(picture, q_len, kv_len):
    """The colour at the centre of every cell."""
    (x, y), cell = picture.info["origin"], picture.info["cell"]
    assert picture.info["step"] == 1
    return [
        [picture.getpixel((x + j * cell + cell // 2, y + i * cell + cell // 2)) for j in range(kv_len)]
        for i in range(q_len)
    ]


def expected_colour(mask, spans, q, k):
    if not mask.visible(q, k, spans=spans):
        return HIDDEN
    for i, (start, end) in enumerate(spans):
        if start <= q <= end and start <= k <= end:
            return SPANS[i % len(SPANS)]
    return VISIBLE


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", MASKS)
def test_every_cell_has_the_colour_of_the_definition(name, shape):
    mask, spans = MASKS[name]
    q_len, kv_len, q_start = SHAPES[shape]
    picture = draw(mask, q_len, kv_len, spans=spans, q_start=q_start, tile=None, as_text=False)
    want = [[expected_colour(mask, spans, q_start + i, j) for j in range(kv_len)] for i in range(q_len)]
    assert cells(picture, q_len, kv_len) == want


def test_positions_padding_and_causality_reach_the_picture():
    mask = Mask.sliding_window(6)
    picture = draw(
        mask, 8, 12, spans=[(106, 109)], q_start=103, kv_start=100, kv_lo=102, causal=False, tile=None, as_text=False
    )
    q, k = torch.arange(103, 111)[:, None], torch.arange(100, 112)[None]
    seen = mask.visible(q, k, spans=[(106, 109)], causal=0) & (k >= 102)
    assert [[c != HIDDEN for c in row] for row in cells(picture, 8, 12)] == seen.tolist()


@pytest.mark.parametrize("group", [1, 3])
def test_tiles_are_told_apart_by_colour(group):
    """Skipped, partial and full of every tile, recomputed from the definition alone."""
    mask, spans, n, tile_m, tile_n = Mask.sliding_window(9), [(4, 27), (33, 40)], 48, 6, 8
    seen = mask.visible(torch.arange(n)[:, None], torch.arange(n)[None], spans=spans)
    picture = draw(mask, n, spans=spans, tile=(tile_m, tile_n), group=group, as_text=False)
    colours = cells(picture, n, n)
    packed = (
        seen.repeat_interleave(group, 0).unfold(0, tile_m, tile_m).unfold(1, tile_n, tile_n)
    )  # [M, N, tile_m, tile_n]
    some, every = packed.flatten(2).any(-1), packed.flatten(2).all(-1)
    assert some.any() and every.any() and not some.all()
    for i in range(n):
        for j in range(n):
            tile = i * group // tile_m, j // tile_n
            exact = expected_colour(mask, spans, i, j)
            if not seen[i, j]:
                assert colours[i][j] == (HIDDEN_PARTIAL if some[tile] else HIDDEN_SKIPPED)
            elif every[tile]:
                assert colours[i][j] == exact
            else:
                assert colours[i][j] == tuple(round((2 * c + 255) / 3) for c in exact)
    plan = mmattn.plan(mask, max_seqlen_q=n, max_seqlen_k=n, mm_prefix_range=[spans])
    counts = count_tiles(plan, tile_m, group, tile_n)
    assert counts == (int(every.sum()), int((some & ~every).sum()), int((~some).sum()))
    assert counts.touched == int(some.sum())


def test_a_large_mask_is_scaled_down_and_keeps_its_shares():
    """Each pixel of a scaled picture mixes its cells: the share of seen keys in it comes back from the colour."""
    mask, n, size = Mask.sliding_window(100), 1000, 125
    picture = draw(mask, n, tile=None, size=size, as_text=False)
    step, (x, y) = picture.info["step"], picture.info["origin"]
    assert step == 8 and picture.info["cell"] == 1
    seen = mask.visible(torch.arange(n)[:, None], torch.arange(n)[None]).double()
    share = seen.reshape(size, step, size, step).mean((1, 3))
    red = torch.tensor([[picture.getpixel((x + j, y + i))[0] for j in range(size)] for i in range(size)]).double()
    assert torch.allclose((255 - red) / (255 - VISIBLE[0]), share, atol=0.004)


class Largest(TorchDispatchMode):
    """Remembers the size of the largest tensor that any operator made."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.elements = max(self.elements, out.numel())
        return out


def test_32k_tokens_need_no_dense_mask():
    spans = [(400 + 500 * i, 679 + 500 * i) for i in range(64)]
    with Largest() as largest:
        picture = draw(Mask.sliding_window(1024, mm_prefix_clamp=True), 32768, spans=spans, as_text=False)
    assert 32768 < largest.elements <= 2**23  # a dense mask has 2**30
    assert max(picture.size) < 1400 and picture.info["step"] == 32


def test_text_is_the_matrix_of_the_mask():
    mask = Mask.sliding_window(5, mm_prefix_clamp=True)
    text = draw(mask, 16, 20, spans=[(6, 13)], tile=None, as_text=True, title="title")
    lines = text.splitlines()
    matrix = mask.matrix(16, 20, spans=[(6, 13)]).replace(" ", "").splitlines()
    assert lines[0] == "title"
    assert [line.replace("a", "x").replace("#", "x") for line in lines[1:17]] == matrix
    assert "a" * 8 in lines[1 + 2] and "spans: a 6..13" in text  # row 6, the first of the span
    assert f"{matrix and sum(row.count('x') for row in matrix)} visible pairs" in text


def test_text_leaves_skipped_tiles_blank_and_counts_them():
    text = draw(Mask.causal_(), 16, tile=(8, 8), as_text=True)
    assert text.splitlines()[0] == "#......."
    assert "tiles 8 x 8: 1 full, 2 partial, 1 skipped" in text


def test_large_text_is_scaled_down():
    text = draw(Mask.causal_(), 4096, tile=None, size=8, as_text=True)
    assert text.splitlines()[:3] == ["+.......", "#+......", "##+....."]
    assert "stands for 512 x 512" in text


def test_a_plan_is_drawn_sequence_by_sequence():
    lens = [5, 0, 9]
    cu = torch.tensor([0, 5, 5, 14], dtype=torch.int32)
    plan = mmattn.plan(Mask.causal_(), total_q=14, cu_seqlens_q=cu, cu_seqlens_k=cu, mm_prefix_range=[[], [], [(2, 4)]])
    for b, n in enumerate(lens):
        text = draw(plan, sequence=b, tile=None, as_text=True)
        want = Mask.causal_().matrix(n, spans=[(2, 4)] if b == 2 else []).replace(" ", "").splitlines()
        assert [row.replace("a", "x").replace("#", "x") for row in text.splitlines()[:n]] == want
        assert draw(plan, sequence=b, as_text=False).size[0] > 0
    by_row = torch.full((14, 2), -1, dtype=torch.int32)
    by_row[7:10] = torch.tensor([2, 4], dtype=torch.int32)
    same = mmattn.plan(Mask.causal_(), total_q=14, cu_seqlens_q=cu, cu_seqlens_k=cu, mm_prefix_query_range=by_row)
    assert draw(same, sequence=2, as_text=True) == draw(plan, sequence=2, as_text=True)


@pytest.mark.parametrize(
    ("args", "kw", "error", "text"),
    [
        ((Mask.causal_(),), {}, ValueError, "needs q_len"),
        (("causal", 4), {}, ValueError, "mask must be a mmattn.Mask or a mmattn.Plan, got str"),
        ((Mask.causal_(), 4), {"sequence": 1}, ValueError, "sequence=1 goes with a Plan"),
        ((Mask.causal_(), 4), {"tile": (0, 8)}, ValueError, "tile must be"),
        ((Mask.causal_(), 4), {"group": 0}, ValueError, "group must be an integer >= 1, got 0"),
        ((Mask.causal_(), 4), {"size": 0}, ValueError, "size must be an integer >= 1, got 0"),
        ((Mask.causal_(), 9), {"spans": [(1, 4), (3, 6)]}, mmattn.MaskError, "overlap"),
    ],
)
def test_bad_arguments(args, kw, error, text):
    with pytest.raises(error, match=text):
        draw(*args, as_text=True, **kw)


def test_a_plan_takes_no_batch_arguments():
    plan = mmattn.plan(Mask.causal_(), max_seqlen_q=4, max_seqlen_k=4)
    with pytest.raises(ValueError, match="q_len, spans came with a Plan"):
        draw(plan, 4, spans=[(1, 2)])
    with pytest.raises(ValueError, match="sequence must be in 0..0, got 1"):
        draw(plan, sequence=1)


def test_without_pillow_text_with_a_warning(monkeypatch):
    monkeypatch.setattr(draw_module, "find_spec", lambda name: None)
    with pytest.warns(UserWarning, match=r"pip install 'mmattn\[draw\]'"):
        assert draw(Mask.causal_(), 3, tile=None).startswith("#..\n##.\n###\n")
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ImportError, match=r"pip install 'mmattn\[draw\]'"):
        draw(Mask.causal_(), 3, as_text=False)


def test_importing_draw_loads_no_pillow():
    code = "import sys, mmattn.draw; sys.exit('PIL' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
