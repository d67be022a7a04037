"""Pools after every verify step equal token-by-token replay, and other properties that need no oracle
(CONTRACTS.md sections 7, 8 and 11; F3-1, F3-3, F3-6, F3-8, F3-10)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from dspark.runtime.state_pool import StateLayout, StatePool, VerifyStates

from ..fixtures.calls.commit_indices import chain
from ..fixtures.calls.state_scatter import OP, Call, Sizes, dense, patterns, run
from ..fixtures.guard import Arena, from_bits, to_bits
from ..fixtures.lane import Lane, captured
from ..fixtures.ledger import Label, expect_equal, expect_raises
from ..fixtures.streams import Stream

PATHS = ("fused", "eager")
INTERVAL, REQUESTS, SLOTS = 4, 4, 11
Bits = npt.NDArray[np.integer[Any]]
LAYOUTS = {
    "dims-first": StateLayout(2, (5, 8), 4, dims_first=True, ssm_shape=(2, 3)),
    "dims-last": StateLayout(2, (5, 8), 4, dims_first=False, ssm_shape=(2, 3)),
    "one-tap": StateLayout(1, (6,), 2, dims_first=True, ssm_shape=(3,)),
    "no-ssm": StateLayout(2, (8,), 3, dims_first=False, conv_dtype=torch.float32),
}
STEPS = (
    (4, (3, 1, 4, 0)),
    (1, (1, 1, 1, 1)),
    (1, (1, 0, 1, 1)),
    (5, (4, 5, 2, 1)),
    (4, (1, 4, 0, 3)),
    (6, (6, 2, 1, 6)),
)
"""(width, accepted tokens of each request) of each step; F3-10: steps without drafts follow steps of several tokens."""


@dataclass
class History:
    """Every token that a request has accepted: its inputs ``[L][type] [dim]`` and ``[L] [*st]``, as bits."""

    tracked: bool
    conv: list[list[list[Bits]]] = field(default_factory=list)
    ssm: list[list[Bits]] = field(default_factory=list)

    def window(self, length: int, layer: int, kind: int, taps: int, dim: int, dtype: type) -> Bits:
        """``[dim, K-1]`` after the first ``length`` tokens: the last K-1 inputs, zeros before the first."""
        inputs: list[Bits] = [np.zeros(dim, dtype)] * taps + [token[layer][kind] for token in self.conv[:length]]
        return np.stack(inputs[-taps:], axis=1)

    def state(self, length: int, layer: int, shape: tuple[int, ...]) -> Bits:
        """The SSM state after the first ``length`` tokens."""
        state: Bits = np.zeros(shape, np.uint32)
        for token in self.ssm[:length]:
            state = next_state(state, token[layer])
        return state


def next_state(state: Bits, token: Bits) -> Bits:
    """A recurrence that no two tokens can be exchanged in, on bits."""
    advanced: Bits = state * np.uint32(0x9E3779B1) + token
    return advanced


@dataclass
class Worker:
    """A pool, what its requests have accepted, and what every slot must hold by replay."""

    layout: StateLayout
    device: torch.device
    stream: Stream
    requests: dict[int, History] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.pool = StatePool(self.layout, REQUESTS, SLOTS, self.device, reserved=2)
        self.expected = []
        for states in (*self.pool.conv, self.pool.temporal):
            # Poison, not zeros: a track slot that is never written would look restored (F3-6).
            bits = patterns(self.stream, states.dtype, tuple(states.shape))
            states.copy_(from_bits(bits, states.dtype))
            self.expected.append(bits)

    def admit(self, request: int, *, tracked: bool) -> None:
        self.pool.admit(request, tracked=tracked)
        self.requests[request] = History(tracked)
        for bits in self.expected:
            bits[:, self.slot(request)] = 0

    def release(self, request: int) -> None:
        self.pool.release(request)
        del self.requests[request]

    def slot(self, request: int) -> int:
        return int(self.pool.state_indices[request])

    def draw(self, width: int) -> tuple[list[list[Bits]], list[Bits]]:
        """Inputs of a step: ``[L][type] [R, W, dim]`` and ``[L] [R, W, *st]``."""
        layers, shape = range(self.layout.layers), self.layout.ssm_shape or (0,)
        conv = [
            [patterns(self.stream, self.layout.conv_dtype, (REQUESTS, width, dim)) for dim in self.layout.conv_dims]
            for _ in layers
        ]
        return conv, [self.stream.bits(np.uint32, (REQUESTS, width, *shape)) for _ in layers]

    def fill(self, states: VerifyStates, conv: list[list[Bits]], ssm: list[Bits]) -> None:
        """What a target's forward pass over the window leaves: windows, and SSM states from the committed ones."""
        for layer in range(self.layout.layers):
            for kind, inputs in enumerate(conv[layer]):
                states.put_conv(kind, layer, from_bits(inputs, self.layout.conv_dtype).to(self.device))
            after = np.zeros_like(ssm[layer])
            committed = to_bits(self.pool.temporal[layer])
            for request in range(REQUESTS):
                state = committed[max(self.slot(request), 0)]
                for step in range(states.width):
                    state = next_state(state, ssm[layer][request, step])
                    after[request, step] = state
            states.put_ssm(layer, from_bits(after, torch.float32).to(self.device))

    def lengths(self) -> Bits:
        """Tokens of each request before the step; a row without a request holds garbage."""
        return np.array([len(self.requests[r].ssm) if r in self.requests else 3 for r in range(REQUESTS)])

    def accept(self, lens: tuple[int, ...], conv: list[list[Bits]], ssm: list[Bits]) -> None:
        """Append the accepted tokens to the histories, and replay what the slots hold now."""
        for request, history in self.requests.items():
            before = len(history.ssm)
            for step in range(lens[request]):
                history.conv.append([[inputs[request, step] for inputs in of_layer] for of_layer in conv])
                history.ssm.append([of_layer[request, step] for of_layer in ssm])
            after = len(history.ssm)
            if after > before:
                self._replay(history, after, self.slot(request))
            if history.tracked and after // INTERVAL > before // INTERVAL:
                self._replay(history, after // INTERVAL * INTERVAL, int(self.pool.track_indices[request]))

    def _replay(self, history: History, length: int, slot: int) -> None:
        layout = self.layout
        for layer in range(layout.layers):
            for kind, dim in enumerate(layout.conv_dims):
                bits = self.expected[kind]
                window = history.window(length, layer, kind, layout.taps, dim, bits.dtype.type)
                bits[layer, slot] = window if layout.dims_first else window.T
            self.expected[-1][layer, slot] = history.state(length, layer, layout.ssm_shape or (0,))

    def judge(self, label: Label, what: str) -> None:
        """Every slot, owned or not, holds what replay leaves in it."""
        for index, states in enumerate((*self.pool.conv, self.pool.temporal)):
            expect_equal(label, f"state {index} {what}", to_bits(states), self.expected[index])


def accept_index(width: int, lens: tuple[int, ...]) -> npt.NDArray[np.int64]:
    """A chain, and garbage after each accept length."""
    index = chain(REQUESTS, width, width)
    index[np.arange(width)[None, :] >= np.array(lens)[:, None]] = 1_000_000
    return index


def step(worker: Worker, width: int, lens: tuple[int, ...], dedup: bool, path: str) -> None:
    """One verify step of every request row."""
    conv, ssm = worker.draw(width)
    states = VerifyStates(worker.pool, width, dedup=dedup)
    worker.fill(states, conv, ssm)
    arguments = (accept_index(width, lens), np.array(lens), worker.lengths())
    index, accepted, lengths = (torch.from_numpy(values).to(worker.device) for values in arguments)
    states.commit(index, accepted, lengths, INTERVAL, path=path)
    worker.accept(lens, conv, ssm)


def replay(layout: StateLayout, key: str, dedup: bool, path: str, label: Label, device: torch.device) -> list[Bits]:
    """All steps, with a request that leaves and one that comes; judged after each. Returns the pools' bits."""
    worker = Worker(layout, device, Stream(key))
    for request in (0, 1, 3):
        worker.admit(request, tracked=request != 1)
    for count, (width, lens) in enumerate(STEPS):
        if count == 2:
            worker.release(0)  # its row stays in the batch, without slots (F3-3)
            worker.admit(2, tracked=True)
        if count == 4:
            worker.admit(0, tracked=True)
        step(worker, width, lens, dedup, path)
        worker.judge(label, f"after step {count}")
    return [bits.copy() for bits in worker.expected]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dedup", [True, False], ids=["view", "dense"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_f3_10_pools_equal_token_by_token_replay(layout: str, dedup: bool, path: str, arena: Arena) -> None:
    replay(LAYOUTS[layout], f"replay/{layout}", dedup, path, Label(OP, path), arena.device)


@pytest.mark.parametrize("path", PATHS)
def test_random_accept_sequences_equal_replay(path: str, arena: Arena) -> None:
    stream = Stream("replay/random")
    worker = Worker(LAYOUTS["dims-first"], arena.device, stream.child("worker"))
    for request in range(REQUESTS):
        worker.admit(request, tracked=True)
    for count in range(8):
        width = int(stream.integers(1, 8, (1,))[0])
        lens = tuple(int(length) for length in stream.integers(0, width + 1, (REQUESTS,)))
        step(worker, width, lens, bool(count % 2), path)
        worker.judge(Label(OP, path), f"after step {count}")


@pytest.mark.parametrize("dims_first", [True, False], ids=["dims-first", "dims-last"])
def test_a_window_view_and_dense_steps_hold_the_same_bytes(dims_first: bool, arena: Arena) -> None:
    layout = StateLayout(2, (5, 8), 4, dims_first=dims_first)
    worker = Worker(layout, arena.device, Stream("replay/views"))
    worker.admit(1, tracked=False)
    conv, ssm = worker.draw(5)
    stored = [VerifyStates(worker.pool, 5, dedup=dedup) for dedup in (True, False)]
    for states in stored:
        worker.fill(states, conv, ssm)
    for kind, (view, separate) in enumerate(zip(*(s.intermediate_conv_window for s in stored), strict=True)):
        expect_equal(Label(OP, "-"), f"windows of type {kind}", to_bits(view), to_bits(separate))
        shared = view.untyped_storage().nbytes() < separate.untyped_storage().nbytes()
        expect_equal(Label(OP, "-"), "and the view is smaller", shared, True)


@pytest.mark.parametrize("path", PATHS)
def test_permuting_requests_changes_only_their_order(path: str, arena: Arena) -> None:
    label, stream = Label(OP, path), Stream("replay/permuted")
    sizes = Sizes(2, 14, 6, 4)
    state = dense(stream.child("state"), sizes, (3, 8))
    slots, track_slots = stream.permutation(14)[:6], stream.permutation(14)[:6]
    steps, track_steps = stream.integers(0, 4, (6,)), stream.integers(0, 4, (6,))
    call = Call("multi", (state,), slots, steps, None, track_slots, track_steps)
    order = stream.permutation(6)
    rows = {name: getattr(call, name)[order] for name in ("slots", "steps", "track_slots", "track_steps")}
    permuted = replace(call, states=(replace(state, src=state.src[:, order]),), **rows)
    straight = run(call, label, arena, path)
    expect_equal(label, "pool", run(permuted, label, Arena(arena.device), path)[0], straight[0])


@pytest.mark.lanes(Lane.CUDA)
@pytest.mark.parametrize("path", PATHS)
def test_f3_6_a_captured_commit_equals_replay(path: str, arena: Arena) -> None:
    """One graph of the whole commit, replayed for every step."""
    width, label = 5, Label(OP, path)
    worker = Worker(LAYOUTS["dims-first"], arena.device, Stream("replay/graph"))
    for request in range(REQUESTS):
        worker.admit(request, tracked=True)
    states = VerifyStates(worker.pool, width)
    shapes: tuple[tuple[int, ...], ...] = ((REQUESTS, width), (REQUESTS,), (REQUESTS,))
    static = [torch.zeros(shape, dtype=torch.int64, device=arena.device) for shape in shapes]

    def commit() -> None:
        index, accepted, lengths = static
        states.commit(index, accepted, lengths, INTERVAL, path=path)

    graph = captured(commit)
    for count, lens in enumerate([(1, 5, 3, 0), (4, 4, 0, 5), (5, 1, 5, 5), (1, 0, 2, 3)]):
        conv, ssm = worker.draw(width)
        worker.fill(states, conv, ssm)
        for tensor, values in zip(static, (accept_index(width, lens), np.array(lens), worker.lengths()), strict=True):
            tensor.copy_(torch.from_numpy(values))
        graph.replay()
        worker.accept(lens, conv, ssm)
        worker.judge(label, f"after step {count}")


POOL_ERRORS: dict[str, tuple[type[Exception], tuple[str, ...], Callable[[StatePool], object]]] = {
    "a-request-with-slots": (ValueError, ("request", "0"), lambda pool: pool.admit(0)),
    "no-slot-left": (RuntimeError, ("1 slots are free", "needs 2"), lambda pool: pool.admit(1, tracked=True)),
    "no-window": (ValueError, ("conv_kernel", "1"), lambda pool: StateLayout(1, (4,), 1)),
}


@pytest.mark.parametrize("bad", POOL_ERRORS)
def test_pool_errors(bad: str) -> None:
    kind, names, act = POOL_ERRORS[bad]
    pool = StatePool(StateLayout(1, (4,), 3), 3, 5, "cpu", reserved=2)
    pool.admit(0, tracked=True)
    label = Label(OP, "error")
    expect_raises(label, kind, names, lambda: act(pool))
    expect_equal(label, "slots of request 0", [pool.state_indices[0].item(), pool.track_indices[0].item()], [2, 3])
    pool.admit(1)
    pool.release(0)
    expect_equal(
        label, "a freed request's slots", [pool.state_indices[0].item(), pool.track_indices[0].item()], [-1, -1]
    )
    pool.admit(2, tracked=True)
    expect_equal(
        label, "its slots serve again", sorted([pool.state_indices[2].item(), pool.track_indices[2].item()]), [2, 3]
    )


def test_what_the_pools_do_unless_told_otherwise() -> None:
    """Slot 0 is for padding rows, windows of one request overlap, and what is tracked needs an interval."""
    label = Label(OP, "defaults")
    pool = StatePool(StateLayout(1, (4,), 3), 1, 3, "cpu")
    pool.admit(0)
    expect_equal(label, "the first slot that is given away", pool.state_indices.tolist(), [1])
    states = VerifyStates(pool, 4)
    window = states.intermediate_conv_window[0]
    expect_equal(label, "one step further on is one token further on", window.stride(2), window.stride(4))
    ones = torch.ones(1, dtype=torch.int64)
    commit = functools.partial(states.commit, torch.zeros(1, 4, dtype=torch.int64), ones, ones)
    expect_raises(label, ValueError, ["mamba_track_interval", "0"], commit)
