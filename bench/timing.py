"""Medians of interleaved blocks of calls, on CUDA events or a CPU clock; optionally from captured CUDA graphs."""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

BLOCK_MS = 12.0
"""A block of calls lasts about this long: far above the resolution of events and the cost of a launch."""
BUDGET_MS = 500.0
"""What one call may take of the GPU over all rounds (but at least three samples)."""


@contextlib.contextmanager
def patience(seconds: float | None) -> Iterator[None]:
    """Raises `TimeoutError` in a body that takes longer: some compilers take minutes over a kernel.

    By a signal, so only in the main thread of a POSIX system; elsewhere, and with None, without a limit.
    """
    if seconds is None or os.name != "posix" or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(signum: int, frame: object) -> None:
        raise TimeoutError(f"not ready after {seconds:g} s (--patience)")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@dataclass
class Timing:
    ms: float
    """Median over blocks of the time per call."""
    spread: float
    """(80th - 20th percentile) / median of the blocks."""
    samples: int
    graph: bool = False


@dataclass
class _Lane:
    block: Callable[[], object]
    calls: int
    graph: bool
    samples: list[float]
    spent: float = 0.0
    failure: Exception | None = None


def sync(device: torch.device) -> None:
    """Waits for the device's work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _elapsed(device: torch.device, block: Callable[[], object]) -> float:
    """Milliseconds of one block, which has to have finished."""
    sync(device)
    if device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        block()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)
    begin = time.perf_counter()
    block()
    return (time.perf_counter() - begin) * 1e3


def _repeat(call: Callable[[int], object], count: int) -> Callable[[], object]:
    def block() -> None:
        for i in range(count):
            call(i)

    return block


def _captured(block: Callable[[], object]) -> Callable[[], object]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        block()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        block()
    return graph.replay


def _lane(call: Callable[[int], object], device: torch.device, rotate: int, graph: bool) -> _Lane:
    if device.type != "cuda":
        return _Lane(_repeat(call, 1), 1, False, [])
    once = _elapsed(device, lambda: call(0))
    count = max(rotate, min(200, max(1, round(BLOCK_MS / max(once, 1e-3)))))
    if graph:
        try:
            count = max(rotate, min(count, 64))
            return _Lane(_captured(_repeat(call, count)), count, True, [])
        except Exception:  # a call that synchronises cannot be captured; its row says graph: false
            sync(device)
    return _Lane(_repeat(call, count), count, False, [])


def interleaved(
    calls: dict[str, Callable[[int], object]],
    device: torch.device,
    *,
    rounds: int,
    rotate: int = 1,
    graph: bool = False,
    first: float | None = None,
) -> dict[str, Timing | Exception]:
    """Times the calls in turns, a block of each per round. A call that raises gives its exception and no more turns,
    one whose first time takes longer than `first` seconds a `TimeoutError`.

    Each call gets a running number, to choose among `rotate` buffers. With `graph` the blocks are captured as CUDA
    graphs where that works, as serving code runs short calls; `Timing.graph` says whether it did.
    """
    lanes: dict[str, _Lane] = {}
    failures: dict[str, Exception] = {}
    for name, call in calls.items():
        try:
            with patience(first):
                call(0)
                sync(device)
            lanes[name] = _lane(call, device, rotate, graph)
            if device.type == "cuda":
                _elapsed(device, lanes[name].block)  # warm, also the graph
        except Exception as e:
            failures[name] = e
    for _ in range(rounds):
        for lane in lanes.values():
            if lane.failure is not None or (lane.spent > BUDGET_MS and len(lane.samples) >= 3):
                continue
            try:
                ms = _elapsed(device, lane.block)
            except Exception as e:
                lane.failure = e
                continue
            lane.spent += ms
            lane.samples.append(ms / lane.calls)
    results: dict[str, Timing | Exception] = {}
    for name in calls:
        failure = failures.get(name) or lanes[name].failure
        results[name] = failure if failure is not None else summary(lanes[name].samples, lanes[name].graph)
    return results


def host_us(call: Callable[[int], object], device: torch.device, calls: int = 40, bursts: int = 5) -> float:
    """Median host time of a call in microseconds, while the device still works on those before it; of several bursts the
    one that other work on the host disturbed least."""
    medians = []
    for _ in range(bursts):
        samples = []
        sync(device)
        for i in range(calls):
            begin = time.perf_counter()
            call(i)
            samples.append(time.perf_counter() - begin)
        medians.append(statistics.median(samples))
    sync(device)
    return min(medians) * 1e6


def summary(samples: list[float], graph: bool = False) -> Timing:
    """Median, spread and number of times per call in milliseconds."""
    samples = sorted(samples)
    middle = statistics.median(samples)
    low, high = samples[round(0.2 * (len(samples) - 1))], samples[round(0.8 * (len(samples) - 1))]
    return Timing(middle, (high - low) / middle if middle else 0.0, len(samples), graph)


def peaks(device: torch.device) -> tuple[Timing, float, Timing, float]:
    """What this GPU does in the same run: (bf16 matmul of 8192, its TFLOP/s, copy of 1 GiB, its GB/s, both ways)."""
    n = 8192
    a, b = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    source = torch.randint(2**31 - 1, (2**28,), device=device, dtype=torch.int32)
    target = torch.empty_like(source)
    timings = interleaved(
        {"matmul": lambda i: torch.mm(a, b, out=out), "copy": lambda i: target.copy_(source)}, device, rounds=9
    )
    matmul, copy = timings["matmul"], timings["copy"]
    for timing in (matmul, copy):
        if isinstance(timing, Exception):
            raise timing
    assert isinstance(matmul, Timing) and isinstance(copy, Timing)
    return matmul, 2 * n**3 / matmul.ms / 1e9, copy, 2 * source.numel() * 4 / copy.ms / 1e6
