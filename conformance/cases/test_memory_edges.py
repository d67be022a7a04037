"""Nothing beyond a tensor is touched, read or written: each one ends, or begins, at a page that may not be accessed.

Every operation, both paths, both sides, in a child process whose survival is judged (``fixtures/cliff.py``): sizes that
leave a padded tile, W = 1, the last row of everything, and rows that are skipped or faulty with garbage in them. What
the operations allocate, pointer tables and the fault word lie at the edge too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from ..fixtures.calls import accept, accept_commit, commit_indices, kv_write, qk_norm_rope, state_scatter
from ..fixtures.cliff import EVERYTHING, Cliff, Ending, Say, Side, expect_done, in_child
from ..fixtures.lane import Lane
from ..fixtures.ledger import Label
from ..fixtures.streams import Stream

PATHS = ("fused", "eager")
FAR = 1 << 62
LOW = -(1 << 63)


def accept_edges() -> Iterator[accept.Call]:
    """One column, sizes that are no power of two, any strides, lengths in and out of range."""
    for batch, width in ((1, 1), (3, 1), (5, 3), (3, 7), (2, 8)):
        target = np.arange(batch * width).reshape(batch, width)
        call = accept.Call(np.roll(target, 1, axis=1), target)
        yield call
        yield replace(call, verify_lens=np.full(batch, width), gap=2, candidates_dtype=torch.int8)
        for odd in (0, width + 1, (1 << 32) + 1, 1 - (1 << 32)):
            yield replace(call, verify_lens=np.resize([odd, 1, width], batch), lens_dtype=torch.int64)
        yield replace(call, verify_lens=np.resize([LOW, FAR, 1], batch), lens_dtype=torch.int64, transposed=True)


def accept_commit_edges() -> Iterator[accept_commit.Call]:
    """The windows of ``accept_edges``, with no end, one and some, and lengths of every kind."""
    for number, window in enumerate(accept_edges()):
        batch = len(window.target)
        ends = (None, np.zeros(0, np.int64), np.array([3]), np.array([FAR, LOW, 7]))[number % 4]
        call = accept_commit.Call(
            window.candidates,
            window.target,
            np.full(batch, 255),
            window.verify_lens,
            ends,
            candidates_dtype=window.candidates_dtype,
            lens_dtype=window.lens_dtype,
            gap=window.gap,
            transposed=window.transposed,
        )
        yield call
        yield replace(call, seq_lens=np.resize([LOW, FAR, -1, 0], batch), interval=1 << 62)
        yield replace(call, verify_lens=None, interval=None)


def commit_indices_edges() -> Iterator[commit_indices.Call]:
    """No column, one, and some; entries that are garbage from the accepted length on."""
    for batch, depth in ((1, 1), (3, 1), (5, 6), (3, 0), (4, 3)):
        chain = commit_indices.chain(batch, depth, 8)
        lens, wild = np.resize([depth, 1, 0], batch), np.resize([depth + 1, FAR, -1, LOW, depth], batch)
        full = commit_indices.Call(chain, np.full(batch, depth), np.full(batch, 255), 8)
        yield full
        yield replace(full, accept_lens=lens, seq_lens=None, gap=2)
        yield replace(
            full,
            accept_index=np.where(np.arange(depth) < lens[:, None], chain, FAR),
            accept_lens=wild,
            seq_lens=np.resize([255, 0, LOW, -1, FAR], batch),
            accept_lens_dtype=torch.int64,
            transposed=True,
        )


def qk_norm_rope_edges() -> Iterator[qk_norm_rope.Call]:
    """Rows, heads and dims that are no power of two, no V columns to spare, positions in and out of the table."""
    for rows, q_heads, k_heads, dim, rotary in ((1, 1, 1, 2, 2), (5, 3, 1, 10, 6), (3, 5, 0, 6, 6), (3, 0, 3, 12, 2)):
        call = qk_norm_rope.random_call(Stream("cliff"), rows, q_heads, k_heads, dim, table_rows=5, single_share=0.0)
        packed = replace(call, rows=call.rows[:, : (q_heads + 2 * k_heads) * dim], rotary_dim=rotary, row_padding=0)
        yield replace(packed, positions=np.full(rows, 4))
        yield replace(packed, positions=np.full(rows, 0), neox=False, weight_gap=2, position_gap=3)
        yield replace(packed, positions=np.resize([FAR, 4, LOW], rows), row_padding=3)
        yield replace(packed, positions=np.resize([-1, 5, 4], rows), neox=False, position_dtype=torch.int32)


def kv_write_edges() -> Iterator[kv_write.Call]:
    """Rows, heads and dims that are no power of two, the first and the last slot, garbage in what is skipped."""
    for layers, heads, dim, rotary in ((1, 1, 2, 2), (3, 3, 10, 6), (2, 3, 6, 6)):
        for batch, width in ((5, 1), (1, 1)) if layers == 1 else ((2, 3),):
            rows = batch * width
            call = kv_write.random_call(Stream("cliff"), rows, layers, heads, dim, table_rows=5, row_padding=0)
            call = replace(call, pool_rows=rows, locs=np.arange(rows), single_share=0.0, rotary_dim=rotary)
            wild = replace(
                call,
                locs=np.resize([FAR, 0, LOW, rows, rows - 1], rows),
                positions=np.resize([4, 4, FAR, -1, 5], rows),
                neox=False,
            )
            yield replace(call, positions=np.full(rows, 4), layered=True, flag_gap=1)
            yield replace(call, commit_lens=np.resize([width, FAR], batch), width=width, interleaved=True)
            yield replace(wild, index_gap=2, weight_gap=2, flag_gap=2)
            yield replace(wild, commit_lens=np.resize([LOW, 1], batch), width=width, reserved_rows=1)


def state_scatter_edges() -> Iterator[state_scatter.Call]:
    """Entries of 9 to 32 elements, one layer and three; the last slot, source and step; more rows than sources."""
    stream = Stream("cliff")
    for sizes in (state_scatter.Sizes(1, 1, 1, 1), state_scatter.Sizes(3, 5, 3, 2)):
        views = [state_scatter.windows(stream, sizes, 5, 3, dims_first=first) for first in (True, False)]
        solid = [state_scatter.dense(stream, sizes, *kind) for kind in (((3, 3),), ((2, 16), torch.float32))]
        last = np.array([sizes.slots - 1]), np.array([sizes.width - 1])
        padded = np.array([sizes.slots - 1, -1, FAR, LOW, 0]), np.array([0, FAR, sizes.width, 0, LOW])
        for state in (*views, *solid, state_scatter.unified(solid[0])):
            yield state_scatter.Call("mamba", (state,), *last)
            yield state_scatter.Call("window", (state,), *padded, np.array([sizes.requests - 1, 0, 0, FAR, 0]), gap=2)
        for states in (views[:1], (*views, solid[0])):
            yield state_scatter.Call("multi", tuple(states), *padded, None, *padded, track_dtype=torch.int64)
            yield state_scatter.Call("multi", tuple(states), *last)
        yield state_scatter.Call("verify", (solid[1], *views), *last, None, *last, ssm=True)


EDGES: dict[ModuleType, Callable[[], Iterator[Any]]] = {
    accept: accept_edges,
    accept_commit: accept_commit_edges,
    commit_indices: commit_indices_edges,
    qk_norm_rope: qk_norm_rope_edges,
    kv_write: kv_write_edges,
    state_scatter: state_scatter_edges,
}


@dataclass(frozen=True)
class Step:
    """One call on one path, with some rows of some arguments beyond the edge."""

    module: ModuleType
    call: Any
    path: str
    side: Side
    unreadable: dict[str, int] = field(default_factory=dict)

    def make(self, only: str, say: Say | None = None) -> None:
        """Make and judge the call, with the argument ``only`` at the edge."""
        hidden = self.unreadable if only else {}
        cliff = Cliff(torch.device("cpu"), side=self.side, only=only, unreadable=hidden, say=say)
        with cliff.inner_memory():
            self.module.run(self.call, Label(self.module.OP, self.path), cliff, self.path)

    def culprits(self) -> list[tuple[str, Ending]]:
        """The arguments that end the child alone, and how."""
        names = in_child(functools.partial(self.make, "")).doing.splitlines()
        tried = {name: in_child(functools.partial(self.make, name)) for name in dict.fromkeys(names)}
        return [(name, ending) for name, ending in tried.items() if ending.how != "done"]


def expect_survival(label: Label, steps: list[Step]) -> None:
    """All ``steps`` end as they should in one child; where one does not, the message names the argument."""

    def work(say: Say) -> None:
        for index, step in enumerate(steps):
            say(str(index))
            step.make(EVERYTHING)

    ending = in_child(work)
    doing = "nothing yet"
    if ending.how != "done" and ending.doing:
        step = steps[int(ending.doing)]
        names = [f"{name} ({alone.how})" for name, alone in step.culprits()]
        doing = f"{step.path}, at the {step.side} of memory; alone: {', '.join(names) or 'none'}; {step.call}"
    expect_done(label, ending, doing)


@pytest.mark.lanes(Lane.INTERPRET)
@pytest.mark.parametrize("side", Side)
@pytest.mark.parametrize("op", [module.OP for module in EDGES])
def test_nothing_beyond_a_tensor_is_touched(op: str, side: Side) -> None:
    module = next(module for module in EDGES if op == module.OP)
    steps = [Step(module, call, path, side) for path in PATHS for call in EDGES[module]()]
    expect_survival(Label(op, "cliff"), steps)


def skipped_rows(side: Side) -> Iterator[Step]:
    """Calls of ``kv_write`` whose skipped rows lie beyond the edge, the last ones or the first ones."""

    def step(call: kv_write.Call, rows: int, *names: str) -> Step:
        return Step(kv_write, call, "fused", side, dict.fromkeys(names, rows))

    call = kv_write.random_call(Stream("skipped"), 6, 2, 3, 6, table_rows=5, single_share=0.0)
    end = side is Side.END
    # Not committed.
    for lens, width, hidden in (
        (([3] if end else [0, 2]), (6 if end else 3), 3),
        (([2, 0, LOW] if end else [-1, LOW, 1]), 2, 4),
        (([0], 6, 6)),
    ):
        window = replace(call, commit_lens=np.array(lens), width=width)
        yield step(window, hidden, "kv")
    # A negative or reserved loc.
    skipping, live = [LOW, 1, -1], [4, 2, 3]
    locs = np.array(live + skipping if end else skipping + live)
    yield step(replace(call, locs=locs, reserved_rows=2), 3, "kv")
    yield step(replace(call, locs=np.full(6, -1)), 6, "kv")


@pytest.mark.lanes(Lane.INTERPRET)
@pytest.mark.parametrize("side", Side)
def test_k_and_v_of_a_skipped_row_are_not_read(side: Side) -> None:
    expect_survival(Label(kv_write.OP, "cliff"), list(skipped_rows(side)))


@pytest.mark.lanes(Lane.INTERPRET)
def test_no_index_is_read_where_there_is_nothing_to_copy() -> None:
    index = np.array([0, 1])
    for sizes, entry in ((state_scatter.Sizes(0, 3, 2, 2), (2, 8)), (state_scatter.Sizes(2, 3, 2, 2), (0, 8))):
        state = state_scatter.dense(Stream("nothing"), sizes, entry)
        call = state_scatter.Call("multi", (state,), index, index, None, index, index)
        hidden = dict.fromkeys(("slots", "steps", "track slots", "track steps"), 2)
        steps = [Step(state_scatter, call, path, Side.END, hidden) for path in PATHS]
        expect_survival(Label(state_scatter.OP, "cliff"), steps)
