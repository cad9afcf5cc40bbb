"""What the commands share: options, the console, and a progress bar that comes only where there is something to wait for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from .. import dispatch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
PATIENCE = 2.0
"""Seconds before a progress bar appears."""

BACKEND_NAMES = [backend.name for backend in dispatch.BACKENDS]


def common_options(command: Callable) -> Callable:
    """--device, --dtype and --backend."""
    for option in (
        click.option("--backend", "backends", multiple=True, type=click.Choice(BACKEND_NAMES), help="Run only this one; may be repeated."),
        click.option("--dtype", type=click.Choice(list(DTYPES)), help="Default: bfloat16 on a GPU, float32 on a CPU."),
        click.option("--device", help="Default: cuda where there is a GPU, else cpu."),
    ):  # fmt: skip
        command = option(command)
    return command


def pick_device(device: str | None, dtype: str | None) -> tuple[torch.device, torch.dtype]:
    """The device and dtype that the options mean. Raises `click.BadParameter`."""
    try:
        chosen = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.zeros(1, device=chosen).item()
    except (RuntimeError, AssertionError) as error:
        raise click.BadParameter(
            f"torch cannot use the device {device!r}: {error}; --device cpu runs everywhere", param_hint="--device"
        ) from error
    on_gpu = chosen.type != "cpu"
    return chosen, DTYPES[dtype or ("bfloat16" if on_gpu else "float32")]


class Ran:
    """Which backends ran something, and why which did not, for the lines below the tables."""

    def __init__(self, wanted: tuple[str, ...]) -> None:
        self.wanted = wanted
        self.names: set[str] = set()
        self._against: dict[tuple[str, str], list[str]] = {}

    def usable(self, against: dict[str, list[str]], where: str) -> list[str]:
        """The backends that are to run a call; remembers the reasons of the others."""
        for name, reasons in against.items():
            for reason in reasons:
                places = self._against.setdefault((name, reason), [])
                if where not in places:
                    places.append(where)
        chosen = [name for name, reasons in against.items() if not reasons and (not self.wanted or name in self.wanted)]
        self.names.update(chosen)
        return chosen

    def report(self) -> None:
        """Prints every reason, and where it holds if the backend ran elsewhere.

        Raises `click.ClickException` if nothing ran, or nothing on a backend that was asked for.
        """
        for (name, reason), where in self._against.items():
            if not self.wanted or name in self.wanted:
                more = f", and {len(where) - 3} more" if len(where) > 3 else ""
                places = f" ({'; '.join(where[:3])}{more})" if name in self.names else ""
                click.echo(f"not run: {name}: {reason}{places}")
        idle = [name for name in self.wanted if name not in self.names]
        if idle or not self.names:
            raise click.ClickException(f"{' and '.join(idle) or 'no backend'} could run none of this")


def open_console() -> Console:
    """As wide as the terminal; into a file or a pipe, wide enough that no table breaks its lines."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=160)


@contextmanager
def progress(console: Console, total: int, what: str) -> Iterator[Callable[[str], None]]:
    """Yields `advance(what comes next)`, to be called `total` times.

    The bar shows up after `PATIENCE` seconds, on a terminal only, and goes when all is done.
    """
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        console=console, transient=True, disable=not console.is_terminal,
    )  # fmt: skip
    task = bar.add_task(what, total=total)
    timer = threading.Timer(PATIENCE, bar.start)
    timer.daemon = True
    timer.start()
    done = iter(range(total + 1))
    try:
        yield lambda text: bar.update(task, completed=next(done), description=text)
    finally:
        timer.cancel()
        timer.join()
        bar.stop()


def synchronize(device: torch.device) -> None:
    """Waits for the device's work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
