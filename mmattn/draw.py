"""Pictures of a mask: what one sequence's rows see, where its spans lie, and which tiles a kernel visits.

Everything comes from `Plan.rows` and `Plan.tiles`, so the picture shows what the kernels are given, and a mask of any
length is drawn in memory that grows with the picture and not with rows x keys.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .batch import Batch
from .mask import Mask
from .plan import Plan, TorchLowering

if TYPE_CHECKING:
    from PIL import Image

VISIBLE = (52, 101, 164)
"""A key that the row sees outside its span."""
SPANS = ((204, 61, 61), (136, 84, 176), (0, 140, 140), (196, 80, 150), (120, 94, 60), (70, 70, 70))
"""A key that the row sees inside its span; spans take these colours in turn."""
HIDDEN = (255, 255, 255)
"""A key that the row does not see. Without tiles: everywhere."""
HIDDEN_PARTIAL = (252, 232, 190)
"""The same inside a tile that is visited: the kernel loads it and masks it."""
HIDDEN_SKIPPED = (233, 236, 239)
"""The same inside a tile that is never visited."""
_INK, _PAPER = (40, 40, 40), (255, 255, 255)
_BORDERS = ((206, 210, 214), (214, 137, 16), (24, 120, 60))  # skipped, partial, full
_SMALLEST_BORDERED_TILE = 8  # pixels
_BLOCK_ELEMENTS = 2**21
"""Rows x pixel columns that are worked on at a time."""


class TileCounts(NamedTuple):
    """Tiles of `tile_m` packed rows by `tile_n` keys of one sequence; `partial` are masked, `full` are not."""

    full: int
    partial: int
    skipped: int

    @property
    def touched(self) -> int:
        return self.full + self.partial


def count_tiles(plan: Plan, tile_m: int, group: int, tile_n: int, sequence: int = 0) -> TileCounts:
    """How many tiles of one sequence a kernel visits, with and without masking. Reads the device."""
    ranges = _ranges(plan, tile_m, group, tile_n, sequence)
    blocks = -(-int(plan.batch.kv_lens()[sequence]) // tile_n)
    first, full, full_end, end = ranges.unbind(1)
    touched, unmasked = int((end - first).sum()), int((full_end - full).sum())
    return TileCounts(unmasked, touched - unmasked, len(ranges) * blocks - touched)


def draw(
    mask: Mask | Plan,
    q_len: int | None = None,
    kv_len: int | None = None,
    *,
    spans: Iterable[tuple[int, int]] = (),
    q_start: int | None = None,
    kv_start: int = 0,
    kv_lo: int | None = None,
    causal: bool | None = None,
    sequence: int = 0,
    tile: tuple[int, int] | None = (128, 64),
    group: int = 1,
    size: int = 1024,
    title: str = "",
    as_text: bool | None = None,
) -> Image.Image | str:
    """A picture of what the rows of one sequence see: rows are queries, columns keys.

    Seen keys are blue, those inside the row's span have the span's colour; keys that the row does not see are white, or
    with tiles grey (tile skipped) or sand (tile visited and masked). Tiles are framed green (full, unmasked), orange
    (partial) or grey (skipped), and seen keys of partial tiles are paler. A legend says so and counts them.

    Args:
        mask: a `Mask` with the arguments below, or a `Plan`, which knows its batch; then `sequence` says which.
        q_len, kv_len: rows and keys; `q_len` is needed with a `Mask`, `kv_len` defaults to it.
        spans: inclusive absolute `(start, end)`, as one sequence of `mm_prefix_range`.
        q_start, kv_start, kv_lo, causal: as in `attention()`, for one sequence.
        tile: `(tile_m, tile_n)`, packed rows and keys; None draws no tiles.
        group: query heads per KV head; a tile of `tile_m` packed rows holds `tile_m / group` positions.
        size: the larger side of the mask itself in pixels (characters, at most 128, in text). Larger masks are scaled
            down: a pixel then mixes the colours of its rows and keys.
        title: a line above the picture.
        as_text: True returns a `str`, False an image (`ImportError` without Pillow). None, the default, an image where
            Pillow is installed and else, with a warning, text.

    Returns:
        `PIL.Image.Image` (RGB), with `info["origin"]` the pixel of the first row and key, `info["cell"]` pixels per
        cell and `info["step"]` cells per pixel. Or text, a character per cell: `#` seen, `a`, `b`, ... seen inside a
        span, `.` not seen, blank in a skipped tile; scaled down, `+` stands for partly seen.

    Raises:
        ValueError, MaskError: an argument does not fit.
    """
    view = _view(mask, q_len, kv_len, spans, q_start, kv_start, kv_lo, causal, sequence, tile, group)
    if as_text is None:
        as_text = find_spec("PIL") is None
        if as_text:
            warnings.warn(
                "Pillow is not installed, so the mask is drawn as text (pip install 'mmattn[draw]')", stacklevel=2
            )
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ValueError(f"size must be an integer >= 1, got {size!r}")
    return _text(view, min(size, 128), title) if as_text else _image(view, size, title)


@dataclass(frozen=True)
class _View:
    """One sequence of a plan on the host. Key indices count from the sequence's first key slot."""

    rows: Tensor
    """int64 `[q_len, 2]`, half-open key indices."""
    kv_len: int
    q_start: int
    kv_start: int
    spans: list[tuple[int, int]]
    """Absolute, ascending."""
    tile: tuple[int, int] | None
    group: int
    ranges: Tensor | None
    """int64 `[tiles, 4]`, see `TileTable.ranges`."""
    counts: TileCounts | None

    @property
    def q_len(self) -> int:
        return len(self.rows)

    def row_spans(self) -> tuple[Tensor, Tensor]:
        """The part of each row's interval inside its span, half-open, and the span's number (-1: none)."""
        q = self.q_start + torch.arange(self.q_len)
        number = torch.full((self.q_len,), -1)
        inside = torch.zeros_like(self.rows)
        for i, (start, end) in enumerate(self.spans):
            mine = (start <= q) & (q <= end)
            number[mine] = i
            inside[mine, 0] = self.rows[mine, 0].clamp(min=start - self.kv_start)
            inside[mine, 1] = self.rows[mine, 1].clamp(max=end + 1 - self.kv_start)
        inside[inside[:, 0] >= inside[:, 1]] = 0
        return inside, number

    def tile_kinds(self, row: Tensor, key: Tensor) -> Tensor:
        """0 skipped, 1 partial, 2 full: for each of `row` (down) and `key` (across)."""
        assert self.tile is not None and self.ranges is not None
        ranges = self.ranges[row * self.group // self.tile[0]]
        first, full, full_end, end = ranges[:, :, None].unbind(1)
        block = (key // self.tile[1])[None, :]
        kinds = ((first <= block) & (block < end)).long()
        return kinds + ((full <= block) & (block < full_end)).long()


def _view(
    mask: Mask | Plan, q_len: int | None, kv_len: int | None, spans: Iterable[tuple[int, int]], q_start: int | None,
    kv_start: int, kv_lo: int | None, causal: bool | None, sequence: int, tile: tuple[int, int] | None, group: int,
) -> _View:  # fmt: skip
    spans = list(spans)
    if isinstance(mask, Plan):
        given = dict(q_len=q_len, kv_len=kv_len, spans=spans or None, q_start=q_start, kv_lo=kv_lo, causal=causal)
        extra = [name for name, x in given.items() if x is not None] + (["kv_start"] if kv_start else [])
        if extra:
            raise ValueError(f"{', '.join(extra)} came with a Plan, which already holds the batch")
        plan = mask
        if not 0 <= sequence < plan.batch.batch_size:
            raise ValueError(f"sequence must be in 0..{plan.batch.batch_size - 1}, got {sequence}")
    elif isinstance(mask, Mask):
        if q_len is None:
            raise ValueError("draw(mask) needs q_len, the number of rows (and kv_len where there are more keys)")
        if sequence != 0:
            raise ValueError(f"sequence={sequence} goes with a Plan; a Mask is drawn for one sequence")
        one = {
            "q_start": q_start,
            "kv_start": kv_start,
            "kv_lo": kv_lo,
            "causal": None if causal is None else int(causal),
        }
        vectors: dict[str, Any] = {
            name: torch.tensor([x], dtype=torch.int32) for name, x in one.items() if x is not None
        }
        kv_len = q_len if kv_len is None else kv_len
        batch = Batch.build(
            device="cpu", batch_size=1, max_seqlen_q=q_len, max_seqlen_k=kv_len, mm_prefix_range=[spans], **vectors
        )
        plan = Plan(mask, batch, TorchLowering())
    else:
        raise ValueError(f"mask must be a mmattn.Mask or a mmattn.Plan, got {type(mask).__name__}")
    if tile is not None and not (len(tile) == 2 and all(isinstance(n, int) and n > 0 for n in tile)):
        raise ValueError(f"tile must be (rows, keys), two positive integers, or None, got {tile!r}")
    if isinstance(group, bool) or not isinstance(group, int) or group < 1:
        raise ValueError(f"group must be an integer >= 1, got {group!r}")

    batch = plan.batch
    first, end = batch.row_offsets()[sequence : sequence + 2].tolist()
    tiles = None if tile is None else (tile[0], group, tile[1])
    return _View(
        rows=plan.rows[first:end].to("cpu", torch.int64),
        kv_len=int(batch.kv_lens()[sequence]), q_start=int(batch.q_starts()[sequence]),
        kv_start=int(batch.kv_starts()[sequence]), spans=_spans(batch, sequence, first, end),
        tile=tile, group=group,
        ranges=None if tiles is None else _ranges(plan, *tiles, sequence),
        counts=None if tiles is None else count_tiles(plan, *tiles, sequence),
    )  # fmt: skip


def _spans(batch: Batch, sequence: int, first: int, end: int) -> list[tuple[int, int]]:
    found: Sequence[Sequence[int]] = []
    if batch.spans is not None:
        found = batch.spans[sequence].tolist()
    elif batch.query_spans is not None:
        found = batch.query_spans[first:end].unique(dim=0).tolist()
    return sorted((s, e) for s, e in found if s < e)


def _ranges(plan: Plan, tile_m: int, group: int, tile_n: int, sequence: int) -> Tensor:
    table = plan.tiles(tile_m, group, tile_n)
    index = table.index.cpu()
    mine = (index[:, 0] == sequence).nonzero().flatten()
    return table.ranges.cpu().to(torch.int64)[mine[index[mine, 1].argsort()]]


def _overlap(intervals: Tensor, edges: Tensor) -> Tensor:
    """How many keys of each half-open interval lie between neighbouring `edges`: float32 `[rows, len(edges) - 1]`."""
    lo, hi = intervals[:, :1], intervals[:, 1:]
    below = torch.minimum(torch.maximum(edges[None, :], lo), hi) - lo
    return (below[:, 1:] - below[:, :-1]).float()


def _step(view: _View, size: int) -> int:
    """How many cells share a pixel, in both directions."""
    return max(1, -(-max(view.q_len, view.kv_len) // size))


def _edges(view: _View, step: int) -> Tensor:
    return torch.arange(0, view.kv_len + step, step).clamp(max=view.kv_len)


def _pixels(view: _View, step: int) -> Tensor:
    """The mask as uint8 RGB `[ceil(q_len / step), ceil(kv_len / step), 3]`."""
    edges = _edges(view, step)
    height, width = -(-view.q_len // step), len(edges) - 1
    picture = torch.zeros(height, width, 3, dtype=torch.uint8)
    if not picture.numel():
        return picture
    inside, number = view.row_spans()
    palette = torch.tensor([SPANS[i % len(SPANS)] for i in range(max(len(view.spans), 1))], dtype=torch.float32)
    colours = palette[number.clamp(min=0)]
    visible, hidden = torch.tensor(VISIBLE, dtype=torch.float32), torch.tensor(HIDDEN, dtype=torch.float32)
    tints = torch.tensor([HIDDEN_SKIPPED, HIDDEN_PARTIAL, HIDDEN_PARTIAL], dtype=torch.float32)
    keys, centre = edges[1:] - edges[:-1], (edges[:-1] + edges[1:]) // 2
    lines = max(1, _BLOCK_ELEMENTS // (step * width))
    for top in range(0, height, lines):
        mine = slice(top * step, (top + lines) * step)
        in_span, seen = _overlap(inside[mine], edges), _overlap(view.rows[mine], edges)
        line = torch.arange(len(seen)) // step
        number_of = int(line[-1]) + 1
        rows = torch.bincount(line, minlength=number_of)

        def per_line(x: Tensor, line: Tensor = line, number_of: int = number_of) -> Tensor:
            return x if step == 1 else x.new_zeros(number_of, *x.shape[1:]).index_add_(0, line, x)

        cells = (rows[:, None] * keys)[:, :, None]
        share = per_line(seen)[:, :, None] / cells
        colour = torch.stack([per_line(in_span * colours[mine, c, None]) for c in range(3)], -1)
        colour = (colour + per_line(seen - in_span)[:, :, None] * visible) / cells
        background = hidden
        if view.tile is not None:
            middle = (torch.arange(top, top + number_of) * step + step // 2).clamp(max=view.q_len - 1)
            kinds = view.tile_kinds(middle, centre)
            background = tints[kinds]
            colour = torch.where(kinds[:, :, None] < 2, _paler(colour, share), colour)
        picture[top : top + lines] = (colour + (1 - share) * background).round().clamp(0, 255).to(torch.uint8)
    return picture


def _paler(colour: Tensor, weight: Tensor | float) -> Tensor:
    """A colour of the given weight, a third of the way to white."""
    return colour * (2 / 3) + weight * (255 / 3)


def _image(view: _View, size: int, title: str) -> Image.Image:
    try:
        from PIL import Image, ImageDraw, ImageFont
    except ImportError as error:
        raise ImportError("draw(as_text=False) needs Pillow: pip install 'mmattn[draw]'") from error
    step = _step(view, size)
    cell = max(1, min(16, size // max(view.q_len, view.kv_len, 1)))
    font = ImageFont.load_default()
    pixels = _pixels(view, step)
    height, width = pixels.shape[0] * cell, pixels.shape[1] * cell
    left, top = 56, 40 if title else 24
    legend = _legend(view, step)
    columns = max(1, (left + width) // 300)
    canvas = Image.new(
        "RGB", (max(left + width, left + 240) + 8, top + height + 12 + 16 * -(-len(legend) // columns) + 8), _PAPER
    )
    pen = ImageDraw.Draw(canvas)
    if title:
        pen.text((left, 4), title, fill=_INK, font=font)
    if pixels.numel():
        mask = Image.fromarray(pixels.numpy())
        canvas.paste(mask.resize((width, height), Image.Resampling.NEAREST), (left, top))
        _frame_tiles(pen, view, step, cell, left, top)
    pen.rectangle((left - 1, top - 1, left + width, top + height), outline=_INK)
    for at in _ticks(view.kv_len):
        pen.text((left + at * cell // step, top - 14), str(view.kv_start + at), fill=_INK, font=font)
    for at in _ticks(view.q_len):
        pen.text((left - 6, top + at * cell // step), str(view.q_start + at), fill=_INK, font=font, anchor="ra")
    for i, (colour, text) in enumerate(legend):
        x, y = 8 + i % columns * 300, top + height + 12 + i // columns * 16
        if colour is not None:
            pen.rectangle((x, y + 1, x + 11, y + 12), fill=colour, outline=_INK)
        pen.text((x + 18, y + 1), text, fill=_INK, font=font)
    canvas.info.update(origin=(left, top), cell=cell, step=step)
    return canvas


def _frame_tiles(pen, view: _View, step: int, cell: int, left: int, top: int) -> None:  # type: ignore[no-untyped-def]
    """Frames every tile, where tiles are large enough; full ones last, so that their frame is whole."""
    if view.tile is None or view.ranges is None or view.counts is None:
        return
    rows, keys = view.tile[0] / view.group, view.tile[1]
    if min(rows, keys) * cell / step < _SMALLEST_BORDERED_TILE:
        return
    blocks = torch.arange(-(-view.kv_len // keys))
    boxes = []
    for m in range(len(view.ranges)):
        first, last = math.floor(m * rows), min(math.ceil((m + 1) * rows), view.q_len)
        kinds = view.tile_kinds(
            torch.tensor([-(-m * view.tile[0] // view.group)]).clamp(max=view.q_len - 1), blocks * keys
        )
        for block, kind in enumerate(kinds[0].tolist()):
            box = (block * keys, first, min((block + 1) * keys, view.kv_len), last)
            x0, y0, x1, y1 = (n * cell // step for n in box)
            boxes.append((kind, (left + x0, top + y0, left + x1 - 1, top + y1 - 1)))
    for kind, corners in sorted(boxes):
        pen.rectangle(corners, outline=_BORDERS[kind])


def _ticks(length: int) -> list[int]:
    """About eight round positions."""
    if length <= 0:
        return []
    rough = max(1, length / 8)
    unit = 10 ** math.floor(math.log10(rough))
    spacing = next(unit * n for n in (1, 2, 5, 10) if unit * n >= rough)
    return list(range(0, length, int(spacing)))


def _tile_line(view: _View) -> str:
    assert view.tile is not None and view.counts is not None
    packed = f" ({view.group} heads share a tile)" if view.group > 1 else ""
    full, partial, skipped = view.counts
    return f"tiles {view.tile[0]} x {view.tile[1]}{packed}: {full} full, {partial} partial, {skipped} skipped"


def _pairs_line(view: _View) -> str:
    pairs, cells = int((view.rows[:, 1] - view.rows[:, 0]).sum()), view.q_len * view.kv_len
    return f"{view.q_len} rows x {view.kv_len} keys, {pairs} visible pairs ({pairs / max(cells, 1):.1%})"


def _legend(view: _View, step: int) -> list[tuple[tuple[int, int, int] | None, str]]:
    lines: list[tuple[tuple[int, int, int] | None, str]] = [(None, _pairs_line(view)), (VISIBLE, "seen")]
    for i, (start, end) in enumerate(view.spans[:8]):
        lines.append((SPANS[i % len(SPANS)], f"seen in span {start}..{end}"))
    if len(view.spans) > 8:
        lines.append((None, f"and {len(view.spans) - 8} more spans"))
    if view.tile is None:
        lines.append((HIDDEN, "not seen"))
    else:
        r, g, b = _paler(torch.tensor(VISIBLE, dtype=torch.float32), 1.0).round().int().tolist()
        lines += [
            ((r, g, b), "seen, in a partial tile (paler)"),
            (HIDDEN_PARTIAL, "not seen, in a partial tile"),
            (HIDDEN_SKIPPED, "not seen, in a skipped tile"),
            (None, _tile_line(view)),
        ]
    if step > 1:
        lines.append((None, f"a pixel stands for {step} x {step}"))
    return lines


def _text(view: _View, size: int, title: str) -> str:
    step = _step(view, size)
    edges = _edges(view, step)
    inside, number = view.row_spans()
    widths = (edges[1:] - edges[:-1]).float()
    centre = (edges[:-1] + edges[1:]) // 2
    lines = [title] if title else []
    for first in range(0, view.q_len, step):
        mine = slice(first, first + step)
        seen, in_span = _overlap(view.rows[mine], edges).sum(0), _overlap(inside[mine], edges).sum(0)
        rows = min(step, view.q_len - first)
        blank = torch.zeros(len(centre), dtype=torch.bool)
        if view.tile is not None and view.kv_len:
            blank = view.tile_kinds(torch.tensor([min(first + step // 2, view.q_len - 1)]), centre)[0] == 0
        letter = chr(ord("a") + int(number[mine].max()) % 26)
        lines.append(
            "".join(
                (letter if s > n / 2 else "#") if n == w * rows else "+" if n > 0 else " " if skip else "."
                for n, s, w, skip in zip(seen.tolist(), in_span.tolist(), widths.tolist(), blank.tolist())
            ).rstrip()
        )
    lines.append(_pairs_line(view))
    if view.spans:
        names = [f"{chr(ord('a') + i % 26)} {start}..{end}" for i, (start, end) in enumerate(view.spans)]
        lines.append("spans: " + ", ".join(names[:26]) + (f" and {len(names) - 26} more" if len(names) > 26 else ""))
    if view.tile is not None:
        lines.append(_tile_line(view))
    if step > 1:
        lines.append(f"a character stands for {step} x {step}: # all seen, + partly")
    return "\n".join(lines)
