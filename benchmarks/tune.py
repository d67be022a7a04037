"""``python -m benchmarks.tune OP``: which tile of a kernel is the fastest at which size, on this GPU.

From the tile that the kernel has now, one knob is turned at a time for as long as that helps. Each tile is judged as a
contender is before it is timed. The record names the tile to write into the kernel's table; nothing is changed here.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch

from dspark.ops.plans import Plans

from .__main__ import heading, sizes, write
from .case import Asked, Case, Contender
from .ops import OPS
from .runner import Device, current_device, first_line, result_of
from .timing import copies_for, time_graph

Row = dict[str, Any]
Values = dict[str, Any]
GAIN = 0.99
"""A tile is better when it takes at most this share of the time: less is noise."""


@dataclass(frozen=True)
class Space:
    """The knobs of a kernel module and what to try for each.

    table: the module constant that holds tiles by rows (a knob is a field of a tile), or None: a knob is a constant.
    """

    module: str
    knobs: Mapping[str, tuple[Any, ...]]
    table: str | None = None

    def kernel(self) -> ModuleType:
        return importlib.import_module(self.module)

    def current(self, size: int) -> Values:
        """What the kernel uses for a call of ``size`` rows."""
        kernel = self.kernel()
        if self.table is None:
            return {knob: getattr(kernel, knob) for knob in self.knobs}
        tile = next(tile for tile in getattr(kernel, self.table) if size <= tile.rows)
        return {knob: getattr(tile, knob) for knob in self.knobs if knob in tile._fields}

    @contextlib.contextmanager
    def applied(self, values: Values) -> Iterator[None]:
        """Within the block the kernel uses ``values`` at every size."""
        kernel = self.kernel()
        if self.table is None:
            changes = values
        else:
            last = getattr(kernel, self.table)[-1]
            changes = {self.table: (last._replace(rows=float("inf"), **values),)}
        # A plan keeps the launch of the tile that it was made with.
        operation = importlib.import_module(self.module.rpartition(".")[0])
        with mock.patch.multiple(kernel, **changes), mock.patch.object(operation, "_plans", Plans()):
            yield


TILES: Mapping[str, tuple[Any, ...]] = {
    "elements": (256, 512, 1024, 2048, 4096, 8192),
    "heads": (1, 2, 4, 8, 16, 32),
    "warps": (1, 2, 4, 8),
    "streamed": (False, True),
}
SPACES: Mapping[str, Space] = {
    "qk_norm_rope": Space("dspark.ops.qk_norm_rope.kernel", TILES, "GPU_TILES"),
    "kv_write": Space("dspark.ops.kv_write.kernel", TILES, "GPU_TILES"),
    "state_scatter": Space(
        "dspark.ops.state_scatter.kernel",
        {
            "GPU_TILE": (1024, 2048, 4096, 8192, 16384),
            "GPU_WINDOW_TILE": (1024, 2048, 4096, 8192, 16384),
            "GPU_WARPS": (1, 2, 4, 8),
            "GPU_WINDOW_WARPS": (1, 2, 4, 8),
        },
    ),
}


def descend(
    start: Values, knobs: Mapping[str, Sequence[Any]], measure: Callable[[Values], float | None]
) -> tuple[Values, float | None, list[tuple[Values, float | None]]]:
    """The best values that turning one knob of ``start`` at a time leads to, their time, and all that was tried.

    measure: microseconds, or None where the values do not work. Knobs that ``start`` lacks are left alone.
    """
    tried: list[tuple[Values, float | None]] = []

    def timed(values: Values) -> float | None:
        for before, time in tried:
            if before == values:
                return time
        tried.append((values, measure(values)))
        return tried[-1][1]

    best, best_time, turned = start, timed(start), True
    while turned:
        turned = False
        for knob in start:
            for choice in knobs[knob]:
                values = best | {knob: choice}
                time = timed(values)
                if time is not None and (best_time is None or time < GAIN * best_time):
                    best, best_time, turned = values, time, True
    return best, best_time, tried


def tuned(case: Case, space: Space, on: Device) -> Row:
    """The best tile for one case, beside the present one."""
    torch.manual_seed(0)
    inputs = case.build(on.device, copies_for(case.floor_bytes, on.l2))
    inputs.reset()
    need = inputs.reference()
    contender = inputs.contenders(Asked(frozenset()))[0]
    assert isinstance(contender, Contender)
    problems: list[str] = []

    def measure(values: Values) -> float | None:
        try:
            with space.applied(values):
                problem = inputs.compare(result_of(inputs, contender), need)
                if not problem:
                    return time_graph(contender.calls).median
        except Exception as error:
            problem = first_line(error)
        problems.append(f"{values}: {problem}")
        return None

    present = space.current(case.size)
    best, time, tried = descend(present, space.knobs, measure)
    floor = case.floor_bytes / on.rate * 1e6
    return {
        "op": case.op,
        "shape": case.shape,
        "size": case.size,
        "floor_us": floor,
        "present": present,
        "present_us": tried[0][1],
        "best": best,
        "best_us": time,
        "tried": [{"values": values, "us": us} for values, us in tried],
        "problems": problems,
    }


def line(row: Row) -> str:
    """One case in a line."""
    us = [f"{value:.2f}" if value is not None else "-" for value in (row["present_us"], row["best_us"])]
    share = f"{row['floor_us'] / row['best_us']:.0%}" if row["best_us"] else "-"
    return (
        f"{row['op']} {row['shape']} {row['size']}: {us[0]} us with {row['present']}; "
        f"best {us[1]} us ({share} of the floor) with {row['best']}; {len(row['tried'])} tried"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; ``argv`` without the program's name."""
    given = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(prog="benchmarks.tune", description=__doc__)
    parser.add_argument("op", choices=list(SPACES))
    parser.add_argument("--sizes", type=sizes, help="rows or requests (default: the operation's own)")
    parser.add_argument("--shape", default="", help="only shapes whose name starts with this")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was tried")
    arguments = parser.parse_args(given)
    op = OPS[arguments.op]
    cases = [case for case in op.cases(arguments.sizes or op.SIZES) if case.shape.startswith(arguments.shape)]
    if not cases:
        parser.error(f"--shape: got {arguments.shape!r}, need the beginning of one of {[s.name for s in op.SHAPES]}")
    if not torch.cuda.is_available():
        print("benchmarks.tune: no CUDA device: tiles can be timed on a GPU only", file=sys.stderr)
        return 2
    on = current_device()
    record = heading(given) | {"kind": "tune", "copy_rate": on.rate, "l2_bytes": on.l2, "rows": []}
    for case in cases:
        record["rows"].append(tuned(case, SPACES[case.op], on))
        torch.cuda.empty_cache()
        print(line(record["rows"][-1]), flush=True)
        write(arguments.json, record)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
