"""Tile shapes as a plain table keyed by (architecture, head dim, element size). No run-time autotuning.

Rows of the table: (largest head dim, element bytes) -> tile. Entries were chosen by shared memory (K and V of `stages`
blocks plus Q) and registers, and on Hopper by measurement (`bench/`).
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import torch

from ..batch import capability


class Tile(NamedTuple):
    """Packed query rows, keys, warps, pipeline stages, whether host TMA descriptors load K and V, and whether q then stays in
    registers and scores are computed one block ahead."""

    tile_m: int
    tile_n: int
    warps: int
    stages: int
    tma: bool = False
    ahead: bool = False
    programs: int = 1
    """How many find room on a multiprocessor: the number of splits follows from it."""
    registers: int | None = None
    """The most that a thread may have for that. None: the compiler takes no more by itself. (With a limit it takes more than
    without, up to the limit: where there is room for another program, it would go.)"""


_T = TypeVar("_T")
_Table = dict[tuple[int, int], Tile]

# 227 KiB of shared memory, wgmma.
_HOPPER: _Table = {
    (64, 2): Tile(64, 64, 4, 3, tma=True),
    (128, 2): Tile(64, 64, 4, 3, tma=True, ahead=True),
    (256, 2): Tile(128, 64, 8, 2, tma=True),
    (512, 2): Tile(64, 32, 8, 2, tma=True),
    (64, 4): Tile(64, 32, 4, 2),
    (128, 4): Tile(64, 32, 4, 2),
    (256, 4): Tile(32, 32, 4, 2),
    (512, 4): Tile(16, 16, 4, 1),
}
# 163 KiB: A100. Also the choice for SM100, where pointers and mma work the same way.
_AMPERE: _Table = {
    (64, 2): Tile(128, 64, 4, 3),
    (128, 2): Tile(128, 64, 8, 2),
    (256, 2): Tile(64, 32, 4, 2),
    (512, 2): Tile(32, 32, 4, 1),
    (64, 4): Tile(64, 32, 4, 2),
    (128, 4): Tile(32, 32, 4, 2),
    (256, 4): Tile(32, 16, 4, 2),
    (512, 4): Tile(16, 16, 4, 1),
}
# 64 KiB (Turing, CDNA) to 99 KiB (consumer Ampere, Ada, Blackwell).
_SMALL: _Table = {
    (64, 2): Tile(64, 64, 4, 2),
    (128, 2): Tile(64, 32, 4, 2),
    (256, 2): Tile(32, 32, 4, 1),
    (512, 2): Tile(16, 16, 4, 1),
    (64, 4): Tile(32, 32, 4, 2),
    (128, 4): Tile(32, 16, 4, 1),
    (256, 4): Tile(16, 16, 4, 1),
    (512, 4): Tile(16, 16, 4, 1),
}


class BackwardTiles(NamedTuple):
    """Of the two kernels of the backward: that of dK and dV, whose programs own `tile_n` keys and walk blocks of `tile_m` rows, and
    that of dQ, whose programs own `tile_m` packed rows and walk blocks of `tile_n` keys."""

    keys: Tile
    queries: Tile


# Shared memory holds K and V (Q and dout) of the tile and `stages - 1` blocks of the other two; accumulators take the registers.
_BACKWARD: dict[str, dict[tuple[int, int], BackwardTiles]] = {
    "sm90": {
        (64, 2): BackwardTiles(Tile(64, 128, 8, 3, tma=True), Tile(128, 64, 8, 3, tma=True)),
        (128, 2): BackwardTiles(Tile(32, 128, 8, 2), Tile(128, 64, 8, 2, tma=True)),
        (256, 2): BackwardTiles(Tile(32, 64, 8, 2), Tile(64, 32, 8, 2, tma=True)),
        (64, 4): BackwardTiles(Tile(32, 32, 4, 2), Tile(32, 32, 4, 2)),
        (128, 4): BackwardTiles(Tile(16, 32, 4, 2), Tile(32, 16, 4, 2)),
        (256, 4): BackwardTiles(Tile(16, 16, 4, 2), Tile(16, 16, 4, 2)),
    },
    "sm80": {
        (64, 2): BackwardTiles(Tile(32, 128, 8, 2), Tile(128, 32, 8, 2)),
        (128, 2): BackwardTiles(Tile(32, 64, 8, 2), Tile(64, 32, 4, 2)),
        (256, 2): BackwardTiles(Tile(16, 32, 4, 2), Tile(32, 32, 4, 2)),
        (64, 4): BackwardTiles(Tile(32, 32, 4, 2), Tile(32, 32, 4, 2)),
        (128, 4): BackwardTiles(Tile(16, 32, 4, 2), Tile(32, 16, 4, 2)),
        (256, 4): BackwardTiles(Tile(16, 16, 4, 1), Tile(16, 16, 4, 1)),
    },
    "small": {
        (64, 2): BackwardTiles(Tile(32, 64, 4, 1), Tile(64, 32, 4, 1)),
        (128, 2): BackwardTiles(Tile(32, 32, 4, 1), Tile(32, 32, 4, 1)),
        (256, 2): BackwardTiles(Tile(16, 16, 4, 1), Tile(16, 16, 4, 1)),
        (64, 4): BackwardTiles(Tile(16, 32, 4, 1), Tile(32, 16, 4, 1)),
        (128, 4): BackwardTiles(Tile(16, 16, 4, 1), Tile(16, 16, 4, 1)),
        (256, 4): BackwardTiles(Tile(16, 16, 4, 1), Tile(16, 16, 4, 1)),
    },
}  # fmt: skip


def choose_backward_tiles(arch: str, head_dim: int, element_bytes: int) -> BackwardTiles:
    """The tiles for the larger of the two head dims, at most 256."""
    return _entry(_BACKWARD[arch], head_dim, element_bytes)


def architecture(device: torch.device) -> str:
    """The table's key for a device: "sm90", "sm80", "small"."""
    found = capability(device)
    if found is None:
        return "small"
    if found[0] == 9:
        return "sm90"
    return "sm80" if found == (8, 0) or found[0] in (10, 11) else "small"


def ptx(device: torch.device) -> int:
    """Compute capability of an NVIDIA GPU as one number, 90 for one; 0 elsewhere. What the kernels may say in PTX."""
    major, minor = capability(device) or (0, 0)
    return 10 * major + minor


_TABLES = {"sm90": _HOPPER, "sm80": _AMPERE, "small": _SMALL}


def _entry(table: dict[tuple[int, int], _T], head_dim: int, size: int) -> _T:
    """The entry for elements of `size` bytes with the smallest head dim that holds `head_dim`."""
    return min((key, entry) for key, entry in table.items() if key[0] >= head_dim and key[1] == size)[1]


def _tile_rows(packed_rows: int, most: int) -> int:
    """The power of two from 16 to `most` that holds `packed_rows`, or comes nearest."""
    rows = 16
    while rows < min(packed_rows, most):
        rows *= 2
    return rows


def choose_tile(arch: str, head_dim: int, element_bytes: int, packed_rows: int) -> Tile:
    """The tile for the larger of the two head dims; never much taller than `packed_rows`, the rows of one KV head."""
    size = min(4, max(2, element_bytes))
    tile = _entry(_TABLES[arch], head_dim, size)
    rows = _tile_rows(packed_rows, tile.tile_m)
    # Fewer than 64 rows do not fill the matrix instruction of more than 4 warps.
    return tile if rows == tile.tile_m else tile._replace(tile_m=rows, warps=4, tma=False, ahead=False)


# Few rows: what counts is bytes in flight, so several programs share a multiprocessor.
# (head dim, bytes of a key element) -> keys per block, stages, how many programs, whether registers must be limited for them.
_SHORT: dict[tuple[int, int], tuple[int, int, int, bool]] = {
    (64, 1): (128, 2, 4, False),
    (128, 1): (128, 2, 3, True),
    (256, 1): (32, 2, 4, True),
    (512, 1): (32, 2, 3, True),
    (64, 2): (128, 2, 3, False),
    (128, 2): (64, 2, 3, True),
    (256, 2): (32, 2, 3, True),
    (512, 2): (16, 3, 3, True),
    (64, 4): (32, 3, 2, False),
    (128, 4): (32, 2, 2, False),
    (256, 4): (16, 2, 2, False),
    (512, 4): (16, 1, 2, False),
}
SHORT_WINDOW = 2048
"""Where rows see no more keys than this smaller blocks win: less of the two edges is wasted."""
_SHARED_MEMORY = {"sm90": 228 * 1024, "sm80": 164 * 1024, "small": 64 * 1024}


def choose_short_tile(
    arch: str, head_dim: int, key_bytes: int, packed_rows: int, window: int, paged: bool = False
) -> Tile:
    """The tile of the split path, for `packed_rows` rows of one KV head each of which sees at most `window` keys."""
    size = min(4, key_bytes)
    tile_n, stages, programs, limited = _entry(_SHORT, head_dim, size)
    rows = _tile_rows(packed_rows, 64 if head_dim <= 256 else 32)
    if rows == 32 and head_dim <= 256:
        programs, limited = min(programs, 3), True
    elif rows > 16:  # (wgmma, of 64 rows, does not compile with fewer registers than it likes)
        programs, limited = 2, False
    if window <= SHORT_WINDOW and tile_n > 32:
        tile_n, stages, programs, limited = tile_n // 2, stages + 1, min(programs, 3), False
    if arch == "small" and head_dim > 128:
        stages = 1
    # q, the weights, and K and V of all stages but one (but two where page numbers have their own); a program loses 1 KiB.
    blocks = max(1, stages - 1 - paged)
    used = rows * (head_dim + tile_n) * 2 + blocks * tile_n * head_dim * 2 * key_bytes + 1024
    programs = max(1, min(programs, _SHARED_MEMORY[arch] // used))
    registers = 65536 // (32 * 4 * programs) // 8 * 8
    return Tile(
        rows, tile_n, 4, stages, programs=programs, registers=registers if limited and registers < 255 else None
    )


def split_head_dim(d: int, whole: bool = False) -> tuple[int, int]:
    """A head dim as one or two powers of two (head, tail), the sizes that tensor cores and Triton blocks take.

    192 = 128 + 64, 256 = 256 + 0. Where two do not give d exactly, or with `whole`, one block that is masked: 72 -> 128.
    """
    head = 16
    while head * 2 <= d:
        head *= 2
    if d <= head:
        return head, 0
    tail = d - head
    exact = tail >= 16 and tail & (tail - 1) == 0
    return (head, tail) if exact and not whole else (head * 2, 0)
