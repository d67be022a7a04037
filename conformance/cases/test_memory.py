"""Never out of bounds, whatever the index values (CONTRACTS.md sections 3, 4, 6, 7, 7b, 8; faults F2-10, F3-16).

Drawn calls: index values of the whole integer range, strides, gaps and offsets, in guard bands. Only the write set
changes, results are the oracle's, and a fault is reported exactly when there is one. What is only read beyond a tensor
is the business of ``test_memory_edges``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from ..fixtures import guard, world
from ..fixtures.calls import (
    accept,
    accept_commit,
    attention,
    commit_indices,
    kv_inject,
    kv_write,
    qk_norm_rope,
    state_scatter,
)
from ..fixtures.cliff import Say, expect_done, in_child
from ..fixtures.guard import Arena
from ..fixtures.lane import Lane
from ..fixtures.ledger import Label
from ..fixtures.streams import Stream

Ints = npt.NDArray[np.int64]
Draw = st.DrawFn
PATHS = ("fused", "eager")
EXAMPLES = {Lane.INTERPRET: 60, Lane.CUDA: 25, Lane.SECOND: 25}
"""Each shape is another compilation on a GPU."""
LAYERED = {kv_inject.OP, attention.OP}
"""A call of these builds layers; a third of the examples, since what they launch is fuzzed by itself."""
INDEX = st.sampled_from([torch.int32, torch.int64])
SIGNED = st.sampled_from([torch.int64, torch.int32, torch.int8, torch.int16, torch.int64])
GAP = st.integers(1, 3)


# --- Drawn values -----------------------------------------------------------------------------------------------------


def index_values(dtype: torch.dtype, limit: int) -> st.SearchStrategy[int]:
    """Values of ``dtype`` around a ``limit`` that they may not reach: ordinary, boundary, and anything at all."""
    info = torch.iinfo(dtype)

    def fitting(values: Iterable[int]) -> st.SearchStrategy[int]:
        return st.sampled_from(sorted({value for value in values if info.min <= value <= info.max}))

    # Cut to that many bits, these are ordinary values.
    cut = [sign * (1 << bits) + k for bits in (16, 31, 32, 62) for sign in (1, -1) for k in (0, 1, limit - 1)]
    return st.one_of(
        ordinary(limit),
        fitting([-1, 0, limit - 1, limit, limit + 1]),
        fitting([*cut, info.min, info.max]),
        st.integers(info.min, info.max),
    )


def ordinary(limit: int) -> st.SearchStrategy[int]:
    return st.integers(0, max(limit - 1, 0))


def indices(dtype: torch.dtype, limit: int, size: int) -> st.SearchStrategy[Ints]:
    """``size`` of them; half of the lists have at most one that is not ordinary."""
    row = st.lists(ordinary(limit), min_size=size, max_size=size)
    wild = st.lists(index_values(dtype, limit), min_size=size, max_size=size)
    one = st.builds(
        lambda v, at, odd: [*v[:at], odd, *v[at + 1 :]][:size], row, ordinary(size), index_values(dtype, limit)
    )
    return st.one_of(row, one, wild, wild).map(lambda v: np.array(v, np.int64))


def distinct(values: Ints, limit: int) -> Ints:
    """``values`` with each one below ``limit`` named once at most: two rows of one name are undefined."""
    repeated = np.ones(len(values), np.bool_)
    repeated[np.unique(values, return_index=True)[1]] = False
    return np.where(repeated & (values >= 0) & (values < limit), -1, values)


@dataclass
class Shifted(Arena):
    """An arena of which every tensor starts at another offset, so that no address is aligned by chance."""

    shifts: tuple[int, ...] = (0,)

    def place(self, name: str, *args: Any, **kwargs: Any) -> torch.Tensor:
        shift = self.shifts[len(self._placed) % len(self.shifts)]
        with mock.patch.object(guard, "MARGIN", guard.MARGIN + shift):
            return super().place(name, *args, **kwargs)


# --- Drawn calls ------------------------------------------------------------------------------------------------------


@st.composite
def accept_calls(draw: Draw) -> accept.Call:
    batch, width = draw(st.sampled_from([(1, 1), (3, 1), (5, 3), (3, 8)]))
    ours, theirs, short = draw(SIGNED), draw(SIGNED), draw(SIGNED)
    target = draw(indices(theirs, 50, batch * width)).reshape(batch, width)
    drafts = np.roll(target, 1, axis=1)
    info = torch.iinfo(ours)
    other = draw(indices(ours, 50, batch * width)).reshape(batch, width)
    fits = (drafts >= info.min) & (drafts <= info.max)
    # Mostly matches, so that the count has somewhere to stop.
    kept = np.array(draw(st.lists(st.integers(0, 3), min_size=batch * width, max_size=batch * width))) > 0
    lens = draw(st.none() | indices(short, width + 1, batch))
    return accept.Call(
        np.where(fits & kept.reshape(batch, width), drafts, other),
        target,
        lens,
        candidates_dtype=ours,
        target_dtype=theirs,
        lens_dtype=short,
        gap=draw(GAP),
        transposed=draw(st.booleans()),
    )


@st.composite
def accept_commit_calls(draw: Draw) -> accept_commit.Call:
    window = draw(accept_calls())
    batch = len(window.target)
    interval = draw(st.none() | st.sampled_from([1, 4, 256, 1 << 31, (1 << 62) - 1, 1 << 62]))
    before, ends = draw(INDEX), draw(SIGNED)
    return accept_commit.Call(
        window.candidates,
        window.target,
        draw(indices(before, 3 * min(interval or 256, 256), batch)),
        window.verify_lens,
        draw(st.none() | st.integers(0, 4).flatmap(lambda count: indices(ends, 50, count))),
        interval,
        candidates_dtype=window.candidates_dtype,
        target_dtype=window.target_dtype,
        seq_lens_dtype=before,
        lens_dtype=window.lens_dtype,
        eos_dtype=ends,
        gap=window.gap,
        transposed=window.transposed,
    )


@st.composite
def commit_indices_calls(draw: Draw) -> commit_indices.Call:
    batch, depth = draw(st.sampled_from([(1, 1), (4, 1), (5, 6), (3, 0)]))
    nodes = draw(st.sampled_from([1, 8, (1 << 31) + 1]))
    interval = draw(st.sampled_from([1, 4, 256, 1 << 31, (1 << 62) - 1, 1 << 62]))
    nodes_dtype, accepted, before = draw(INDEX), draw(INDEX), draw(INDEX)
    ids = draw(indices(nodes_dtype, batch * nodes if nodes < 9 else 8, batch * depth)).reshape(batch, depth)
    # The subtraction of a request's first node is plain int64, which the oracle's integers are not.
    ids = np.maximum(ids, -(1 << 63) + batch * nodes)
    return commit_indices.Call(
        np.maximum(ids, torch.iinfo(nodes_dtype).min),
        draw(indices(accepted, depth + 1, batch)),
        draw(st.none() | indices(before, 3 * min(interval, 256), batch)),
        nodes,
        interval,
        index_dtype=nodes_dtype,
        accept_lens_dtype=accepted,
        seq_lens_dtype=before,
        gap=draw(GAP),
        transposed=draw(st.booleans()),
    )


@st.composite
def qk_norm_rope_calls(draw: Draw) -> qk_norm_rope.Call:
    rows, q_heads, k_heads, dim, rotary = draw(st.sampled_from([(1, 1, 1, 2, 2), (5, 3, 1, 16, 6), (3, 2, 0, 8, 8)]))
    table_rows = draw(st.sampled_from([7, 1, 0]))
    dtype = draw(INDEX)
    return replace(
        qk_norm_rope.random_call(Stream("memory"), rows, q_heads, k_heads, dim),
        table_rows=table_rows,
        positions=draw(indices(dtype, table_rows, rows)),
        rotary_dim=rotary,
        neox=draw(st.booleans()),
        position_dtype=dtype,
        row_padding=draw(st.integers(0, 6)),
        position_gap=draw(GAP),
        weight_gap=draw(GAP),
        single_share=0.0,
    )


@st.composite
def kv_write_calls(draw: Draw) -> kv_write.Call:
    layers, heads, dim, rotary = draw(st.sampled_from([(1, 1, 2, 2), (2, 3, 16, 6), (3, 2, 8, 8)]))
    batch, width = draw(st.sampled_from([(1, 1), (5, 1), (2, 3)]))
    rows, pool_rows, table_rows = batch * width, draw(st.sampled_from([9, 1, 0])), draw(st.sampled_from([7, 1, 0]))
    dtype = draw(INDEX)
    lens = draw(st.none() | indices(dtype, width + 1, batch))
    call = kv_write.random_call(Stream("memory"), rows, layers, heads, dim)
    return replace(
        call,
        pool_rows=pool_rows,
        table_rows=table_rows,
        positions=draw(indices(dtype, table_rows, rows)),
        locs=distinct(draw(indices(dtype, pool_rows, rows)), pool_rows),
        rotary_dim=rotary,
        neox=draw(st.booleans()),
        commit_lens=lens,
        width=None if lens is None else width,
        reserved_rows=draw(st.integers(0, 2)),
        layered=draw(st.booleans()),
        interleaved=draw(st.booleans()),
        index_dtype=dtype,
        row_padding=draw(st.integers(0, 6)),
        index_gap=draw(GAP),
        weight_gap=draw(GAP),
        flag_gap=draw(st.integers(0, 3)),
        single_share=0.0,
    )


@st.composite
def state_scatter_calls(draw: Draw) -> state_scatter.Call:
    sizes = state_scatter.Sizes(*draw(st.sampled_from([(2, 7, 4, 3), (1, 3, 2, 1), (2, 0, 2, 2), (2, 3, 2, 0)])))
    function = draw(st.sampled_from(["mamba", "window", "multi", "verify"]))
    states = [state_scatter.windows(Stream("memory/window"), sizes, 5, 3, dims_first=draw(st.booleans()))]
    if function != "window":
        dtype = draw(st.sampled_from([torch.bfloat16, torch.float32]))
        dense = state_scatter.dense(Stream("memory/dense"), sizes, draw(st.sampled_from([(3, 3), (2, 16)])), dtype)
        states.insert(0, state_scatter.unified(dense) if draw(st.booleans()) else dense)
    rows = draw(st.integers(1, sizes.requests + 2))
    dtypes = [draw(INDEX) for _ in range(2)]

    def named(dtype: torch.dtype) -> tuple[Ints, Ints]:
        return distinct(draw(indices(dtype, sizes.slots, rows)), sizes.slots), draw(indices(dtype, sizes.width, rows))

    both = function in ("multi", "verify")
    sources = draw(st.none() | indices(dtypes[0], sizes.requests, rows)) if not both else None
    # The functions of both sets take them together or not at all; the track set comes without sources.
    tracks = function == "verify" or (both and draw(st.booleans()))
    slots, steps = named(dtypes[0])
    track_slots, track_steps = named(dtypes[1]) if tracks else (None, None)
    return state_scatter.Call(
        function,
        tuple(states if both else states[:1]),
        slots,
        steps,
        sources,
        track_slots,
        track_steps,
        ssm=function == "verify",
        index_dtype=dtypes[0],
        track_dtype=dtypes[1],
        gap=draw(GAP),
    )


@st.composite
def kv_inject_calls(draw: Draw) -> kv_inject.Call:
    batch, width = draw(st.sampled_from([(1, 1), (5, 1), (2, 3)]))
    rows, pool_rows = batch * width, draw(st.sampled_from([9, 1]))
    lens = draw(st.none() | indices(torch.int32, width + 1, batch))
    return replace(
        kv_inject.base(),
        pool_rows=pool_rows,
        positions=draw(indices(torch.int64, kv_inject.base().table_rows, rows)),
        locs=distinct(draw(indices(torch.int64, pool_rows, rows)), pool_rows),
        commit_lens=lens,
        width=None if lens is None else width,
        reserved_rows=draw(st.integers(0, 2)),
        interleaved=draw(st.booleans()),
        neox=draw(st.booleans()),
    )


@st.composite
def attention_calls(draw: Draw) -> attention.Call:
    rows, table_rows = draw(st.sampled_from([1, 5])), draw(st.sampled_from([7, 1, 0]))
    positions = draw(indices(torch.int64, table_rows, rows))
    return replace(attention.base(), positions=positions, table_rows=table_rows, neox=draw(st.booleans()))


DRAWN: dict[ModuleType, st.SearchStrategy[Any]] = {
    accept: accept_calls(),
    accept_commit: accept_commit_calls(),
    commit_indices: commit_indices_calls(),
    qk_norm_rope: qk_norm_rope_calls(),
    kv_write: kv_write_calls(),
    state_scatter: state_scatter_calls(),
    kv_inject: kv_inject_calls(),
    attention: attention_calls(),
}
BY_OP = {module.OP: (module, calls) for module, calls in DRAWN.items()}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("op", BY_OP)
def test_any_index_value_stride_and_offset(op: str, path: str, lane: Lane, arena: Arena) -> None:
    module, calls = BY_OP[op]
    label = Label(op, world.DRAWN)

    def fuzz(say: Say) -> None:
        @settings(
            derandomize=True,
            deadline=None,
            database=None,
            max_examples=EXAMPLES[lane] // (3 if op in LAYERED else 1),
            phases=[Phase.generate, Phase.shrink],
        )
        @given(call=calls, shifts=st.lists(st.integers(0, 15), min_size=1, max_size=6).map(tuple))
        def check(call: Any, shifts: tuple[int, ...]) -> None:
            say(repr(call))
            module.run(call, label, Shifted(arena.device, shifts=shifts), path)

        check()

    if lane is not Lane.INTERPRET:
        fuzz(lambda doing: None)
    else:
        # A write far beyond an array ends the interpreter's process, which is not to be the one of the other cases.
        ending = in_child(fuzz)
        expect_done(label, ending, f"the last call was {ending.doing}")
