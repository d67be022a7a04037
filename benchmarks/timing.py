"""How a call is timed on a GPU: replays of a CUDA graph, plain calls, and the rate of a device-to-device copy.

A graph holds a pass over rotated inputs (:func:`copies_for`), so that what one call reads is not left in the L2 cache
by the call before; its time is divided by its calls. Times are microseconds per call.
"""

from __future__ import annotations

import functools
import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

Call = Callable[[], object]

L2_PASSES = 3
"""One pass over the inputs moves at least this many times the L2 cache, unless ``MOST_COPIES`` comes first."""
FEWEST_COPIES, MOST_COPIES = 2, 256
GRAPH_CALLS = 16
"""A graph holds at least this many calls: between two replays lie microseconds that belong to no call."""
REPLAYS = (20, 100)
REPLAY_SECONDS = 0.15
PLAIN_CALLS = (10, 200)
PLAIN_SECONDS = 0.04
PLAIN_REPEATS = 5
HOST_BURST = 8
"""Calls between two synchronisations while the host is timed: far below the depth of the launch queue."""
HOST_REPEATS = 40
HEAD_START_CYCLES = 2_000_000
COPY_BYTES = (1 << 28, 1 << 30)


@dataclass(frozen=True)
class Timing:
    """Microseconds per call: median and the 10th and 90th percentile of ``samples`` measurements of ``calls`` calls."""

    median: float
    p10: float
    p90: float
    calls: int
    samples: int


def summarise(microseconds: Sequence[float], calls: int) -> Timing:
    """The timing of samples that are microseconds per call already; ``ValueError`` without samples."""
    if not microseconds:
        raise ValueError("samples: got none, need at least one")
    ordered = sorted(microseconds)
    last = len(ordered) - 1
    p10, p90 = (ordered[round(last * share)] for share in (0.1, 0.9))
    return Timing(statistics.median(ordered), p10, p90, calls, len(ordered))


def copies_for(bytes_of_a_call: int, l2_bytes: int) -> int:
    """How many sets of inputs to rotate, so that one pass over them moves ``L2_PASSES`` times the L2 cache."""
    wanted = math.ceil(L2_PASSES * l2_bytes / max(bytes_of_a_call, 1))
    return min(max(wanted, FEWEST_COPIES), MOST_COPIES)


def l2_bytes(device: torch.device) -> int:
    """The size of the L2 cache."""
    return int(torch.cuda.get_device_properties(device).L2_cache_size)


def time_graph(calls: Sequence[Call], *, replays: tuple[int, int] = REPLAYS) -> Timing:
    """Time ``calls`` (one for each set of inputs) as replays of one CUDA graph that holds all of them.

    Each is called once before the capture, so that kernels are compiled and tables are built. ``replays``: at least
    and at most so many. What a call raises is passed on; a call that waits for the device cannot be captured.
    """
    passes = math.ceil(GRAPH_CALLS / len(calls))
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(passes):
            for call in calls:
                call()
    count = passes * len(calls)
    try:
        first = _replay(graph, 3)
        fitting = int(REPLAY_SECONDS * 1e6 / max(first[-1], 1e-3))
        samples = _replay(graph, min(max(fitting, replays[0]), replays[1]))
    finally:
        graph.reset()
    return summarise([sample / count for sample in samples], count)


def _replay(graph: torch.cuda.CUDAGraph, replays: int) -> list[float]:
    """Microseconds of each of ``replays`` replays, which follow each other without a gap."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
    # The host queues all of them while the device is busy with this, so no replay waits for the host.
    torch.cuda._sleep(HEAD_START_CYCLES)
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    return [before.elapsed_time(after) * 1e3 for before, after in itertools.pairwise(events)]


def time_plain(calls: Sequence[Call]) -> Timing:
    """Wall time of calls one after the other, each from Python, until the device has done them all."""
    fewest, most = PLAIN_CALLS
    order = [calls[index % len(calls)] for index in range(most)]
    # As many calls as fit, the host's share included, by the time that a few take when everything is warm.
    _wall(order[:fewest])
    fitting = int(PLAIN_SECONDS * 1e6 / max(_wall(order[:fewest]), 1e-3))
    count = min(max(fitting, fewest), most)
    return summarise([_wall(order[:count]) for _ in range(PLAIN_REPEATS)], count)


def _wall(calls: Sequence[Call]) -> float:
    """Microseconds per call, with an idle device before and after."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for call in calls:
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e6 / len(calls)


def time_host(calls: Sequence[Call]) -> Timing:
    """Time until a call returns, while the launch queue is nearly empty: what the host spends on it."""
    order = [calls[index % len(calls)] for index in range(HOST_BURST)]
    samples = []
    for repeat in range(HOST_REPEATS + 3):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for call in order:
            call()
        elapsed = (time.perf_counter() - start) * 1e6 / HOST_BURST
        if repeat >= 3:
            samples.append(elapsed)
    torch.cuda.synchronize()
    return summarise(samples, HOST_BURST)


def allocated_by(call: Call) -> int:
    """Bytes that ``call`` asks the caching allocator for, freed again or not."""
    call()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocated_bytes.all.allocated"]
    call()
    torch.cuda.synchronize()
    return int(torch.cuda.memory_stats()["allocated_bytes.all.allocated"] - before)


def copy_rate(device: torch.device) -> float:
    """Bytes per second, read and written, of the fastest device-to-device copy far larger than the L2 cache.

    The largest copy is not the fastest: on an H200 one of 1 GiB moves 2.8 TB/s, one of 256 MiB 4.2 TB/s.
    """
    rates = []
    for size in COPY_BYTES:
        source = torch.empty(size // 8, dtype=torch.int64, device=device).random_()
        target = torch.empty_like(source)
        found = time_graph([functools.partial(target.copy_, source)])
        rates.append(2 * size / (found.median * 1e-6))
    return max(rates)
