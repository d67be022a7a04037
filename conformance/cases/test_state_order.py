"""state_scatter: commit then track whatever order programs run in, tables that are built once, CUDA graph capture,
nothing that waits for the device, and duplicates in debug mode (CONTRACTS.md section 8; F3-6, F3-12, F3-15)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch

from dspark import faults, pointers
from dspark.ops import fused_commit_track_indices, fused_conv_window_scatter_multi
from dspark.ops.state_scatter import kernel

from ..fixtures.calls.state_scatter import OP, Call, Sizes, base, debugging, dense, place, run, windows
from ..fixtures.guard import Arena, to_bits
from ..fixtures.lane import Lane, captured, no_synchronisation
from ..fixtures.ledger import Label, expect_equal, expect_raises
from ..fixtures.oracles.state_scatter import scattered
from ..fixtures.streams import Stream

PATHS = ("fused", "eager")


@contextmanager
def programs_reversed() -> Iterator[None]:
    """The interpreter runs the last program first."""
    from triton.runtime.interpreter import interpreter_builder as builder

    forward = builder.set_grid_idx

    def backward(*index: int) -> None:
        forward(*(count - 1 - at for count, at in zip(builder.grid_dim, index, strict=True)))

    with mock.patch.object(builder, "set_grid_idx", backward):
        yield


def contended(stream: Stream, rows: int, sizes: Sizes) -> Call:
    """Committed slots are tracked too, by the next row, the last one included; some track rows are skipped."""
    states = (dense(stream.child("dense"), sizes, (3, 40)), windows(stream.child("view"), sizes, 24, 3))
    slots = stream.permutation(sizes.slots)[:rows]
    steps = stream.integers(0, sizes.width, (rows,))
    track_slots, track_steps = np.roll(slots, 1), stream.integers(0, sizes.width, (rows,))
    track_slots[::3] = -1
    track_steps[1::4] = -1
    return Call("multi", states, slots, steps, track_slots=track_slots, track_steps=track_steps)


@pytest.mark.lanes(Lane.INTERPRET)
@pytest.mark.parametrize("call", [contended(Stream("order"), 8, Sizes(2, 9, 8, 4)), base()], ids=["contended", "base"])
def test_f3_15_programs_in_reversed_order_give_the_same_bytes(call: Call, arena: Arena) -> None:
    label = Label(OP, "fused")
    forward = run(call, label, arena, "fused")
    with programs_reversed():
        backward = run(call, label, Arena(arena.device), "fused")
    for index, (one, other) in enumerate(zip(forward, backward, strict=True)):
        expect_equal(label, f"state {index}, last program first", other, one)


@pytest.mark.lanes(Lane.INTERPRET)
@pytest.mark.parametrize("backward", [False, True], ids=["first-program-first", "last-program-first"])
def test_f3_15_the_whole_track_set_is_searched(backward: bool, arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four rows at a time; the rows that take a slot are in the first, the second and the last, broken block."""
    monkeypatch.setattr(kernel, "INTERPRETER_ROWS", 4)
    state = dense(Stream("order/long"), Sizes(1, 12, 9, 2), (2, 4))
    commit = np.array([0, 1, -1, -1, -1, -1, -1, 2, 3])
    track = np.array([9, 10, 3, -1, 4, 2, 5, 1, 0])
    call = Call("multi", (state,), commit, np.ones(9, np.int64), None, track, np.zeros(9, np.int64))
    with programs_reversed() if backward else nullcontext():
        run(call, Label(OP, "fused"), arena, "fused")


@pytest.mark.lanes(Lane.CUDA)
def test_f3_15_track_wins_in_every_one_of_1000_repetitions(arena: Arena) -> None:
    """Programs run side by side: small entries, so that those of both rows of a slot are in flight together."""
    label = Label(OP, "fused")
    call = contended(Stream("order/cuda"), 64, Sizes(4, 80, 64, 5))
    placed = place(call, arena, "fused")
    before = [dst.clone() for dst in placed.destinations]
    expected = [scattered(state.dst, state.src, call.sets) for state in call.states]
    placed.compute()
    first = [dst.clone() for dst in placed.destinations]
    for index, (dst, need) in enumerate(zip(first, expected, strict=True)):
        expect_equal(label, f"state {index}", to_bits(dst), need)
    differing = torch.zeros(1, dtype=torch.int64, device=arena.device)
    for _ in range(1000):
        for dst, old in zip(placed.destinations, before, strict=True):
            dst.copy_(old)
        placed.compute()
        for dst, good in zip(placed.destinations, first, strict=True):
            differing += (dst.view(torch.int16) != good.view(torch.int16)).sum()
    expect_equal(label, "elements that differ in 1,000 repetitions", int(differing.item()), 0)
    arena.verify(label)


def small_pool(fill: float, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """A destination of zeros and windows that hold ``fill``."""
    dst = torch.zeros(1, 2, 4, 3, dtype=torch.bfloat16, device=device)
    return dst, torch.full((1, 1, 2, 4, 3), fill, dtype=torch.bfloat16, device=device)


def test_1000_alternating_calls_build_two_tables(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pointers, "_tables", {})  # an earlier case may have had its pool at the same address
    label = Label(OP, "fused")
    skipped, live = (torch.full((1,), value, dtype=torch.int64, device=arena.device) for value in (-1, 1))
    pools = [small_pool(1.0, arena.device), small_pool(2.0, arena.device)]
    before = pointers.builds()
    for count in range(1000):
        fused_conv_window_scatter_multi([pools[count % 2]], skipped, live, path="fused")
    expect_equal(label, "tables built in 1,000 alternating calls", pointers.builds() - before, 2)
    for dst, src in pools:
        fused_conv_window_scatter_multi([(dst, src)], live, live, path="fused")
        expect_equal(label, "each pool has its own windows", bool((dst[:, 1] == src[0, 0, 0, 0, 0]).all()), True)
    expect_equal(label, "and no table more", pointers.builds() - before, 2)


def test_f3_12_a_table_holds_addresses_with_their_high_bit_set(arena: Arena) -> None:
    words = [0, 0xFFFF85ABD4E00000, 0x10, 3, 4]
    table = pointers.table([words], arena.device)
    expect_equal(Label(OP, "fused"), "bits", [word & (1 << 64) - 1 for word in table[0].tolist()], words)


def test_no_table_is_built_during_a_capture(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pointers, "_tables", {})
    known, other = small_pool(1.0, arena.device), small_pool(2.0, arena.device)
    row = torch.ones(1, dtype=torch.int64, device=arena.device)
    fused_conv_window_scatter_multi([known], row, row, path="fused")
    known[0].zero_()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    label = Label(OP, "fused")
    fused_conv_window_scatter_multi([known], row, row, path="fused")
    expect_equal(label, "a known pool is written", bool((known[0][:, 1] == 1).all()), True)
    expect_raises(
        label,
        faults.CaptureError,
        ["a pointer table", "capture"],
        lambda: fused_conv_window_scatter_multi([other], row, row, path="fused"),
    )
    expect_equal(label, "another is not", bool((other[0] == 0).all()), True)


def test_the_eager_path_reads_nothing_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading a meta tensor raises, as reading a CUDA tensor during a capture does."""
    monkeypatch.setattr(faults, "word", lambda device: torch.zeros(1, dtype=torch.int64, device=device))
    pairs = [tuple(tensor.to("meta") for tensor in small_pool(1.0, torch.device("cpu")))]
    rows = torch.zeros(1, dtype=torch.int64, device="meta")
    fused_conv_window_scatter_multi(pairs, rows, rows, rows, rows, path="eager")  # type: ignore[arg-type]
    last, track = fused_commit_track_indices(rows[:, None], rows, rows, 4, 256, path="eager")
    expect_equal(Label(OP, "eager"), "shapes without data", (last.shape, track is not None), (torch.Size([1]), True))


@pytest.mark.lanes(Lane.CUDA)
@pytest.mark.parametrize("path", PATHS)
def test_nothing_waits_for_the_device(path: str, arena: Arena) -> None:
    call = contended(Stream("order/sync"), 7, Sizes(2, 9, 7, 4))
    placed = place(call, arena, path)
    placed.compute()
    with no_synchronisation():
        placed.compute()
    for index, (dst, state) in enumerate(zip(placed.destinations, call.states, strict=True)):
        expect_equal(Label(OP, path), f"state {index}", to_bits(dst), scattered(state.dst, state.src, call.sets))


@pytest.mark.lanes(Lane.CUDA)
@pytest.mark.parametrize("path", PATHS)
def test_f3_6_a_captured_call_follows_its_indices(path: str, arena: Arena) -> None:
    """Captured with every row skipped, replayed with rows that write."""
    label = Label(OP, path)
    call = contended(Stream("order/graph"), 7, Sizes(2, 9, 7, 4))
    states = [state.place(arena, f"state[{i}]", list(range(9))) for i, state in enumerate(call.states)]
    live = [torch.from_numpy(value).to(arena.device) for value in (call.slots, call.steps)]
    live += [torch.from_numpy(value).to(arena.device) for value in (call.track_slots, call.track_steps)]
    rows = [torch.full_like(value, -1) for value in live]

    def compute() -> None:
        fused_conv_window_scatter_multi(states, *rows, path=path)

    graph = captured(compute)
    for row, value in zip(rows, live, strict=True):
        row.copy_(value)
    graph.replay()
    for index, ((dst, _), state) in enumerate(zip(states, call.states, strict=True)):
        expect_equal(label, f"state {index}", to_bits(dst), scattered(state.dst, state.src, call.sets))
    arena.verify(label)


DUPLICATES = {
    "in-the-commit-set": ([5, 2, 5, 1], [0, 1, 2, 0], [3, 4, -1, 0]),
    "in-the-track-set": ([5, 2, 6, 1], [0, 1, 2, 0], [3, 4, 3, 0]),
    "not-of-skipped-rows": ([-1, 2, -1, 5], [0, 1, 2, -1], [3, -1, -1, 0]),
    "not-of-faulty-rows": ([5, 9, 9, 1], [0, 1, 2, 0], [3, 4, 0, 6]),
    "not-across-the-sets": ([5, 2, 6, 1], [0, 1, 2, 0], [5, 2, 6, 1]),
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("duplicate", DUPLICATES)
def test_f3_15_duplicate_slots_are_reported_in_debug_mode(duplicate: str, path: str, arena: Arena) -> None:
    slots, steps, track = (np.array(values) for values in DUPLICATES[duplicate])
    call = replace(base(), slots=slots, steps=steps, track_slots=track, track_steps=np.array([0, 1, 2, 1]), debug=True)
    run(call, Label(OP, path), arena, path)


@pytest.mark.parametrize("path", PATHS)
def test_duplicates_cost_nothing_outside_debug_mode(path: str, arena: Arena) -> None:
    call = replace(base(), slots=np.array([5, 2, 5, 1]), steps=np.array([0, 1, 2, 0]))
    with debugging(False), mock.patch.object(torch.Tensor, "sort", side_effect=AssertionError("sorted")):
        run(call, Label(OP, path), arena, path)
