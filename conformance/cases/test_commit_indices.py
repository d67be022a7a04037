"""commit_indices: last correct step and track step, worked values, garbage after accept_lens, lengths that cannot be
divided, strides, dtypes and bad input (CONTRACTS.md sections 7 and 9; F3-1, F3-2, F3-3, F4-4, section 0.8)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from dspark.ops.commit_indices import kernel

from ..fixtures.calls.commit_indices import OP, Call, chain, run
from ..fixtures.guard import Arena
from ..fixtures.implementations.ops import fused_commit_track_indices
from ..fixtures.ledger import Label, expect_equal, expect_raises
from ..fixtures.shapes import GRIDS
from ..fixtures.streams import Stream

PATHS = ("fused", "eager")
GARBAGE = 1_000_000
WORKED = {
    256: [(255, 1, 0), (254, 1, -1), (254, 2, 1), (256, 1, -1), (250, 6, 5), (511, 1, 0), (0, 6, -1)],
    4: [(3, 6, 4), (3, 1, 0), (2, 1, -1), (4, 3, -1), (4, 4, 3), (0, 6, 3), (1, 6, 2)],
    1: [(0, 1, 0), (7, 6, 5), (255, 3, 2)],
}
"""Interval -> (pre, accepted, entry of the track step), by hand; those of 256 and the first of 4 are section 7's."""


@dataclass(frozen=True)
class Case:
    """A named input."""

    id: str
    build: Callable[[Stream], Call]


def rows(lens: list[int], pre: list[int] | None, *, depth: int = 6, interval: int = 256, **changes: Any) -> Call:
    """A chain of 8 nodes per request; garbage after each accept length."""
    index = chain(len(lens), depth, 8)
    index[np.arange(depth)[None, :] >= np.array(lens)[:, None]] = GARBAGE
    seq_lens = None if pre is None else np.array(pre, np.int64)
    return replace(Call(index, np.array(lens), seq_lens, 8, interval), **changes)


def given(id: str, lens: list[int], pre: list[int] | None, **changes: Any) -> Case:
    return Case(id, lambda stream: rows(lens, pre, **changes))


def random_tree(stream: Stream, batch: int, depth: int, nodes: int, **changes: Any) -> Call:
    """Every accept length occurs; accepted nodes are ascending nodes of a tree; lengths lie around boundaries."""
    lens = np.arange(batch) % (depth + 1)
    index = np.full((batch, depth), GARBAGE)
    for request, length in enumerate(lens):
        index[request, :length] = request * nodes + np.sort(stream.integers(0, nodes, (int(length),)))
    interval = changes.pop("interval", 16)
    pre = np.maximum(interval * stream.integers(0, 100, (batch,)) + stream.integers(-depth - 1, 2, (batch,)), 0)
    return replace(Call(index, lens, pre, nodes, interval), **changes)


def tree(batch: int, depth: int, nodes: int, id: str = "", **changes: Any) -> Case:
    name = id or f"tree/B{batch}-depth{depth}-nodes{nodes}"
    return Case(name, lambda stream: random_tree(stream, batch, depth, nodes, **changes))


def other_nodes(stream: Stream) -> Call:
    """Ids that are not nodes of their request: subtracted all the same."""
    index = np.array([[5, -3, 1 << 40], [-7, 4, 3], [-(1 << 40), 0, 1], [100, 200, 300]])
    return Call(index, np.array([3, 1, 1, 2]), np.array([255, 255, 255, 254]), 8)


TOP = (1 << 63) - 1
CASES = (
    *(tree(batch, 5, 8, f"F3-2-depth-5-of-8-nodes/B{batch}") for batch in GRIDS["rows"] if batch),
    *(tree(2 * width + 2, width, width) for width in GRIDS["width"]),
    tree(9, 8, 5, "more-entries-than-nodes", accept_lens=np.arange(9) % 6),
    tree(33, 6, 8, "interval-1-is-crossed-by-every-token", interval=1),
    tree(33, 6, 8, "interval-of-one-window", interval=6),
    tree(33, 6, 8, "interval-smaller-than-the-window", interval=3),
    tree(33, 6, 8, "interval-not-a-power-of-two", interval=7),
    tree(33, 6, 8, "interval-beyond-int32", interval=(1 << 33) + 5),
    tree(9, 6, 1 << 33, "nodes-beyond-int32"),
    given("F3-3-nothing-accepted-gives-minus-one", [0, 1, -1, 2, -(2**31)], [255, 255, 255, 255, 255]),
    given("no-seq-lens-no-track", [1, 0, 6, 3], None, interval=0),
    given("F4-4-negative-lengths-are-faults", [1, 6, 2, 1, 3], [-1, -256, 255, -4, 254]),
    given("F4-4-negative-lengths-are-faults/interval-4", [1, 6, 2, 1], [-1, -4, 3, -5], interval=4),
    given("F4-4-negative-lengths-are-faults/interval-1", [1, 6, 2, 1], [-1, -4, 3, -5], interval=1),
    given("F4-4-minus-one-is-negative", [2, 1], [255, -1]),
    given("a-negative-length-of-a-row-that-accepts-nothing-is-not-looked-at", [0, 2, -3], [-1, 255, -(1 << 40)]),
    given("accept-length-beyond-depth-is-a-fault", [7, 1, 2**31 - 1, 6], [255, 255, 255, 250]),
    given("accept-length-beyond-depth-and-negative-length", [7, 1, 6, 1], [-1, 255, 250, -9]),
    given("lengths-at-the-limit-of-int64", [1, 6, 6, 1], [TOP, TOP, TOP - 3, TOP - 255]),
    given("lengths-at-the-limit-of-int32", [1, 6, 6], [2**31 - 1, 2**31 - 1, 2**31 - 4], seq_lens_dtype=torch.int32),
    given("largest-interval", [1, 2, 6], [(1 << 62) - 1, (1 << 62) - 3, 0], interval=1 << 62),
    given(
        "accept-lens-int64-beyond-int32", [(1 << 32) + 1, 1, -(1 << 32) + 1], [255] * 3, accept_lens_dtype=torch.int64
    ),
    given("one-column", [1, 0, 1, 1], [255, 255, 254, 0], depth=1),
    given("no-columns", [0, 0], [255, 254], depth=0),
    given("no-columns-in-a-batch-that-does-not-fill-its-tile", [0, -1, 0], [255, 254, 0], depth=0),
    tree(3, 1024, 1024, "deepest-that-is-fused"),
    given("no-columns-but-a-length", [0, 1], [255, 254], depth=0),
    given("no-rows", [], []),
    given("no-rows-no-seq-lens", [], None),
    Case("ids-of-other-nodes-are-subtracted-all-the-same", other_nodes),
    tree(13, 6, 8, "int32-ids", index_dtype=torch.int32, seq_lens_dtype=torch.int32),
    tree(13, 6, 8, "int64-accept-lens", accept_lens_dtype=torch.int64),
    tree(13, 6, 8, "0.8-strided-accept-lens-and-seq-lens", gap=3),
    tree(13, 6, 8, "transposed", transposed=True, gap=2),
)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_rows(case: Case, path: str, arena: Arena) -> None:
    run(case.build(Stream(case.id)), Label(OP, path), arena, path)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("interval", WORKED)
def test_f3_1_worked_values(interval: int, path: str, arena: Arena) -> None:
    """Against the numbers themselves, and not the oracle."""
    pre, accepted, entries = (list(column) for column in zip(*WORKED[interval], strict=True))
    result = run(rows(accepted, pre, interval=interval), Label(OP, path), arena, path)
    expect_equal(Label(OP, path), "track", result.track, np.array(entries))
    expect_equal(Label(OP, path), "last", result.last, np.array(accepted) - 1)


@pytest.mark.parametrize("path", PATHS)
def test_f3_2_a_track_step_completes_a_multiple_within_what_was_accepted(path: str, arena: Arena) -> None:
    """Every length around a boundary with every accept length; no oracle."""
    label = Label(OP, path)
    pre, accepted = (grid.ravel() for grid in np.meshgrid(np.arange(40), np.arange(1, 6), indexing="ij"))
    call = rows(accepted.tolist(), pre.tolist(), depth=5, interval=8)
    track = run(call, label, arena, path).track
    assert track is not None
    crossed = pre // 8 != (pre + accepted) // 8
    expect_equal(label, "rows with a track step", track >= 0, crossed)
    expect_equal(label, "tokens held", (pre + track + 1)[crossed] % 8, np.zeros(np.count_nonzero(crossed), np.int64))
    expect_equal(label, "steps that were accepted", track < accepted, np.ones(len(pre), np.bool_))
    next_multiple = (pre + track + 1 + 8)[crossed]
    expect_equal(
        label, "and it is the last one", next_multiple > (pre + accepted)[crossed], np.ones(crossed.sum(), bool)
    )


@pytest.mark.parametrize("path", PATHS)
def test_rows_do_not_depend_on_the_tile(path: str, arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several programs, the last one not full."""
    for name in ("GPU_TILE", "INTERPRETER_TILE"):
        monkeypatch.setattr(kernel, name, 16)
    run(random_tree(Stream("commit/tiles"), 11, 5, 8), Label(OP, path), arena, path)


def arguments(device: torch.device) -> dict[str, Any]:
    """A good call of three requests."""
    return {
        "accept_index": torch.zeros(3, 4, dtype=torch.int64, device=device),
        "accept_lens": torch.ones(3, dtype=torch.int32, device=device),
        "seq_lens": torch.ones(3, dtype=torch.int64, device=device),
        "draft_token_num": 4,
        "mamba_track_interval": 256,
    }


Change = Callable[[dict[str, Any]], dict[str, Any]]
BAD_CALLS: dict[str, tuple[tuple[str, ...], Change]] = {
    "ids-of-one-dimension": (("accept_index", "2 dimensions"), lambda a: {"accept_index": a["accept_index"][0]}),
    "ids-of-three-dimensions": (("accept_index", "2 dimensions"), lambda a: {"accept_index": a["accept_index"][None]}),
    "ids-a-list": (("accept_index", "list"), lambda a: {"accept_index": [[0]]}),
    "ids-floating": (("accept_index", "float32"), lambda a: {"accept_index": a["accept_index"].float()}),
    "ids-int16": (("accept_index", "int16"), lambda a: {"accept_index": a["accept_index"].short()}),
    "fewer-accept-lens-than-rows": (("accept_lens", "(2,)", "(3,)"), lambda a: {"accept_lens": a["accept_lens"][:2]}),
    "accept-lens-of-two-dimensions": (
        ("accept_lens", "1 dimension"),
        lambda a: {"accept_lens": a["accept_lens"][:, None]},
    ),
    "accept-lens-bool": (("accept_lens", "bool"), lambda a: {"accept_lens": a["accept_lens"].bool()}),
    "accept-lens-uint8": (("accept_lens", "uint8"), lambda a: {"accept_lens": a["accept_lens"].to(torch.uint8)}),
    "accept-lens-missing": (("accept_lens", "NoneType"), lambda a: {"accept_lens": None}),
    "more-seq-lens-than-rows": (
        ("seq_lens", "(4,)", "(3,)"),
        lambda a: {"seq_lens": torch.ones(4, dtype=torch.int64, device=a["seq_lens"].device)},
    ),
    "seq-lens-floating": (("seq_lens", "float64"), lambda a: {"seq_lens": a["seq_lens"].double()}),
    "interval-zero": (("mamba_track_interval", "0"), lambda a: {"mamba_track_interval": 0}),
    "interval-negative": (("mamba_track_interval", "-256"), lambda a: {"mamba_track_interval": -256}),
    "interval-bool": (("mamba_track_interval", "True"), lambda a: {"mamba_track_interval": True}),
    "interval-fractional": (("mamba_track_interval", "256.0"), lambda a: {"mamba_track_interval": 256.0}),
    "interval-too-large": (
        ("mamba_track_interval", str((1 << 62) + 1)),
        lambda a: {"mamba_track_interval": (1 << 62) + 1},
    ),
    "no-nodes": (("draft_token_num", "0"), lambda a: {"draft_token_num": 0}),
    "nodes-fractional": (("draft_token_num", "4.0"), lambda a: {"draft_token_num": 4.0}),
    "accept-lens-on-another-device": (
        ("accept_lens", "device meta"),
        lambda a: {"accept_lens": a["accept_lens"].to("meta")},
    ),
    "seq-lens-on-another-device": (("seq_lens", "device meta"), lambda a: {"seq_lens": a["seq_lens"].to("meta")}),
    "unknown-path": (("path", "'triton'", "fused"), lambda a: {"path": "triton"}),
}


@pytest.mark.parametrize("bad", BAD_CALLS)
def test_error(bad: str, arena: Arena) -> None:
    names, change = BAD_CALLS[bad]
    good = arguments(arena.device)
    expect_raises(Label(OP, "error"), ValueError, names, lambda: fused_commit_track_indices(**{**good, **change(good)}))


@pytest.mark.parametrize("path", PATHS)
def test_without_seq_lens_the_interval_is_not_looked_at(path: str, arena: Arena) -> None:
    call = {**arguments(arena.device), "seq_lens": None, "mamba_track_interval": -1}
    last, track = fused_commit_track_indices(**call, path=path)
    expect_equal(Label(OP, path), "last of three first nodes", last.tolist(), [0, -4, -8])
    expect_equal(Label(OP, path), "track", track, None)
