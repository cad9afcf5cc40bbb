"""`python -m bench.plot ROWS... [--out FOLDER]`: pictures of benchmark rows, PNG of less than 300 kB each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from .cases import names
from .compare import Key, Row, load

OURS = "mmattn"
COLOURS = {
    "mmattn": "#0b6e4f",
    "mmattn-cute": "#0b6e4f",
    "mmattn-triton": "#6bbf59",
    "fa4-native": "#888888",
    "fa4-mask-mod": "#c8553d",
    "fa4-split": "#f28f3b",
    "fa4-split-kernels": "#f5b27a",
    "flex": "#2d5d8b",
    "flex-fresh": "#7fb2dd",
    "flex-flash": "#1b3a5c",
    "flex-flash-fresh": "#a9c9e8",
    "sdpa-dense": "#7a4fa3",
    "cudnn-causal": "#b9a0d4",
    "vllm-triton": "#d9a404",
}


def ours_ms(rows: dict[Key, Row], case: str) -> float | None:
    """Time of the backend that mmattn chose by itself."""
    return rows.get((case, OURS), {}).get("ms")


def speedups(rows: dict[Key, Row]) -> dict[str, dict[str, float]]:
    """Case -> peer -> its time over that of mmattn, for peers that compute the same mask; cases with a floor too."""
    table: dict[str, dict[str, float]] = {}
    for case in names():
        ours = ours_ms(rows, case)
        if ours is None:
            continue
        peers = {
            provider: row["ms"] / ours
            for (name, provider), row in rows.items()
            if name == case and not provider.startswith(OURS) and "ms" in row and row.get("mask", "case") == "case"
        }
        if peers or _floor(rows, case) is not None:
            table[case] = peers
    return table


def _floor(rows: dict[Key, Row], case: str) -> float | None:
    """Time of FA4 native over that of mmattn, where it left the images out."""
    ours, floor = ours_ms(rows, case), rows.get((case, "fa4-native"), {})
    return floor["ms"] / ours if ours and "ms" in floor and floor.get("mask", "case") != "case" else None


def sweep_lines(rows: dict[Key, Row], value: Callable[[int, Row], float | None]) -> dict[str, list[tuple[int, float]]]:
    """Provider -> (length, value) over the rows of a sweep, ascending."""
    lines: dict[str, list[tuple[int, float]]] = {}
    for (case, provider), row in rows.items():
        if case.startswith("S") and case[1:].isdigit():
            length = int(case[1:])
            point = value(length, row)
            if point is not None:
                lines.setdefault(provider, []).append((length, point))
    return {provider: sorted(points) for provider, points in lines.items()}


def draw_speedups(rows: dict[Key, Row], axes: Axes) -> None:
    """Bars per case: how many times longer each peer takes."""
    table = speedups(rows)
    peers = [p for p in COLOURS if any(p in ratios for ratios in table.values())]
    width = 0.8 / max(len(peers), 1)
    for n, peer in enumerate(peers):
        at = [(c, ratios[peer]) for c, ratios in enumerate(table.values()) if peer in ratios]
        spots = [c + (n - (len(peers) - 1) / 2) * width for c, _ in at]
        # From 1 on: upwards where the peer takes longer, downwards where it is faster.
        axes.bar(spots, [ratio - 1 for _, ratio in at], width, bottom=1, label=peer, color=COLOURS[peer])
    floor = [(c, ratio) for c, case in enumerate(table) for ratio in [_floor(rows, case)] if ratio is not None]
    if floor:
        where, height = [c for c, _ in floor], [ratio for _, ratio in floor]
        axes.scatter(where, height, marker="_", s=220, color="black", zorder=3, label="FA4 native without the images")
    axes.axhline(1, color=COLOURS[OURS], linewidth=1.5)
    axes.set_yscale("log")
    axes.set_xticks(range(len(table)), list(table))
    axes.set_ylabel("time / time of mmattn (log)")
    axes.set_title("How many times longer peers take for the same mask (1 = mmattn)")
    axes.legend(ncols=3, fontsize=8)


def _draw_lines(axes: Axes, lines: dict[str, list[tuple[int, float]]], ylabel: str, title: str) -> None:
    for provider, points in lines.items():
        ours = provider.startswith(OURS)
        axes.plot(
            [x for x, _ in points], [y for _, y in points], marker="o", markersize=4, label=provider,
            color=COLOURS.get(provider), linewidth=2.5 if ours else 1.3,
        )  # fmt: skip
    lengths = sorted({x for points in lines.values() for x, _ in points})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(lengths, [f"{x // 1024}k" for x in lengths])
    axes.set_xlabel("context length")
    axes.set_ylabel(ylabel)
    axes.set_title(title)
    axes.legend(fontsize=8)


def draw_context(rows: dict[Key, Row], axes: Axes) -> None:
    """Time per token of a windowed layer with images against its length: flat is right."""
    lines = sweep_lines(rows, lambda length, row: row["ms"] * 1e6 / length if "ms" in row else None)
    _draw_lines(axes, lines, "ns per token", "Windowed layer with images: time per token")


def draw_mask_build(rows: dict[Key, Row], axes: Axes) -> None:
    """What a new mask costs against length."""
    lines = sweep_lines(rows, lambda length, row: row.get("mask_ms"))
    on_gpu = sweep_lines(rows, lambda length, row: row.get("mask_gpu_ms")).get(OURS)
    if on_gpu:
        lines[f"{OURS} (GPU time)"] = on_gpu
    _draw_lines(axes, lines, "ms", "Building the mask of a new batch")


def context(row: Row) -> str:
    """Where rows were measured, in one line."""
    versions: dict[str, Any] = row.get("versions", {})
    known = ", ".join(f"{name} {versions[name]}" for name in ("torch", "triton", "flash-attn-4") if name in versions)
    commit, date = str(row.get("commit", "unknown"))[:10], str(row.get("date", ""))[:10]
    return f"{row.get('gpu') or 'CPU'}, {known}, commit {commit}, {date}"


@click.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="Default: where the first file is.")
def main(files: tuple[Path, ...], out: Path | None) -> None:
    """Draws speed-ups, and from a sweep time against length and the cost of a mask; later files win."""
    rows: dict[Key, Row] = {}
    for path in files:
        rows.update(load(path))
    folder = out or files[0].parent
    folder.mkdir(parents=True, exist_ok=True)
    swept = any(case.startswith("S") and case[1:].isdigit() for case, _ in rows)
    pictures = {"speedups.png": (draw_speedups, bool(speedups(rows)))}
    pictures.update({"context.png": (draw_context, swept), "mask_build.png": (draw_mask_build, swept)})
    for name, (draw, possible) in pictures.items():
        if not possible:
            click.echo(f"{name}: no rows for it in {', '.join(map(str, files))}")
            continue
        figure, axes = plt.subplots(figsize=(14, 5.5), layout="constrained")
        draw(rows, axes)
        axes.grid(axis="y", alpha=0.3)
        figure.supxlabel(context(next(iter(rows.values()))), fontsize=7, color="#666666")
        figure.savefig(folder / name, dpi=90)
        plt.close(figure)
        click.echo(f"{folder / name}")


if __name__ == "__main__":
    main()
