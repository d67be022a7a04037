"""The tiny Inkling on the CPU: the same bits whatever the batch and the window, and per-step windows that equal
token-by-token replay (CONTRACTS.md section 11; F1-9, F3-8, F3-10)."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from dspark.runtime.generate import single_thread
from dspark.runtime.pools import VerifyStates
from dspark.runtime.target import TinyInkling

from ..fixtures.guard import to_bits
from ..fixtures.lane import Lane
from ..fixtures.ledger import Label, expect_equal
from ..fixtures.sequences import POSITIONS, Bench, Recorded, recorded, sequence, tensors_of
from ..fixtures.tiny_models import build_target

LABEL = Label("target", "row-exact")
pytestmark = [pytest.mark.lanes(Lane.INTERPRET), pytest.mark.usefixtures("one_thread")]


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Products of single rows are slower on several threads, by far where other processes compute too."""
    with single_thread():
        yield


@functools.cache
def target() -> TinyInkling:
    return build_target(torch.device("cpu"))


@functools.cache
def record(index: int) -> Recorded:
    """Twenty tokens; the second up to the last position there is."""
    return recorded(target(), sequence(f"target/{index}", POSITIONS if index == 1 else 20))


def bench(requests: int, width: int, *, dedup: bool = True, key: str = "target") -> Bench:
    return Bench(target(), LABEL, [record(index) for index in range(requests)], width, dedup, key)


# --- The same bits ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 20])
def test_a_prefill_is_token_by_token_decode(count: int) -> None:
    """Shorter than a window of convolution, as long, and longer; in a pool that was full of NaNs."""
    bench(1, 1).prefill(0, count)


def test_a_prefill_of_every_position_there_is() -> None:
    bench(2, 1).prefill(1, POSITIONS)


@pytest.mark.parametrize("batch", [1, 3, 8])
def test_decode_in_a_batch(batch: int) -> None:
    """Requests of unequal length, in another order than their rows, each at its own position; every row is in use."""
    state = bench(batch, 1)
    for index in range(batch):
        state.prefill(index, 1 + (5 * index) % 9)
    for _ in range(2):
        rows = torch.arange(batch).flip(0)
        lens = torch.tensor(state.lengths)
        tokens = torch.tensor([record(index).tokens[state.lengths[index]] for index in rows.tolist()])
        output = target().decode(state.cache, rows, tokens, lens[rows], state.locs[rows])
        for at, index in enumerate(rows.tolist()):
            state.judge_output(index, state.lengths[index], type(output)(*(part[at : at + 1] for part in output)))
            state.lengths[index] += 1
            state.judge_pools(index, state.lengths[index])


@pytest.mark.parametrize("dedup", [True, False], ids=["view", "dense"])
@pytest.mark.parametrize("width", [1, 2, 3, 5, 8])
def test_f3_8_a_window_is_token_by_token_decode(width: int, dedup: bool) -> None:
    """Windows shorter and longer than a convolution's, in a batch whose windows are of every length."""
    state = bench(4, width, dedup=dedup)
    for index, count in enumerate((1, 2, 11, 4)):
        state.prefill(index, count)
    state.verify([width, max(1, width // 2), width, 1])


@pytest.mark.parametrize("dedup", [True, False], ids=["view", "dense"])
@pytest.mark.parametrize("accepted", [1, 2, 3, 4, 5])
def test_f3_8_any_step_of_a_window_can_be_committed(accepted: int, dedup: bool) -> None:
    state = bench(2, 5, dedup=dedup)
    state.prefill(0, 2)
    state.prefill(1, 6)
    state.verify([5, 5])
    state.commit([accepted, 6 - accepted])
    state.verify([5, 5])


@pytest.mark.parametrize("dedup", [True, False], ids=["view", "dense"])
def test_f3_10_steps_of_several_widths(dedup: bool) -> None:
    """Accepted 3, 1, 1, 4, and steps without drafts among them; what was rejected is verified again."""
    state = bench(2, 5, dedup=dedup)
    state.prefill(0, 1)
    state.prefill(1, 3)
    for width, accepted in ((5, 3), (1, 1), (5, 1), (1, 1), (5, 4)):
        states = VerifyStates(state.cache.state_pool, width, dedup=dedup)
        state.cache, state.width = dataclasses.replace(state.cache, states=states), width
        state.verify([width, max(1, width - 1)])
        state.commit([accepted, 1])


def test_a_window_from_the_first_position() -> None:
    """An admitted request that has no token yet: its windows are zeros."""
    state = bench(2, 4)
    state.prefill(1, 2)
    state.lengths[0] = 0
    state.verify([4, 4])
    state.commit([4, 1])


def test_f1_9_windows_up_to_the_last_position() -> None:
    state = bench(2, 6)
    state.prefill(0, 3)
    state.prefill(1, POSITIONS - 6)
    state.verify([6, 6])
    state.commit([1, 5])
    state.verify([6, 1])
    state.commit([1, 1])


def test_rejected_tokens_leave_nothing_that_a_later_window_reads() -> None:
    """Other tokens in the first window than those that follow: K, V and windows of them are written over."""
    state = bench(1, 4)
    state.prefill(0, 5)
    right = record(0)
    wrong = dataclasses.replace(right, tokens=[*right.tokens[:6], *((token + 1) % 50 for token in right.tokens[6:])])
    other = recorded(target(), wrong.tokens)
    state.records = [other]
    state.verify([4])
    state.records = [right]
    state.commit([1])
    state.verify([4])
    state.commit([4])


# --- Rows that do not exist ------------------------------------------------------------------------------------------

GARBAGE = (-1, 10**6, -(10**9))


@pytest.mark.parametrize("padded", ["length", "window", "slot"])
@pytest.mark.parametrize("live", [0, 2])
def test_padded_rows_touch_nothing(padded: str, live: int) -> None:
    """Garbage for tokens and pool rows; what is not owned by a live row keeps every bit, and results are zeros."""
    state = bench(4, 3)
    for index in range(4):
        state.prefill(index, 3 + index)
    if padded == "slot":
        for index in range(live, 4):
            state.cache.state_pool.release(index)
    before = {name: to_bits(tensor).copy() for name, tensor in tensors_of(state.cache).items()}
    tokens = torch.tensor(GARBAGE).repeat(4, 1)
    locs = torch.tensor(GARBAGE * 22)[:POSITIONS].repeat(4, 1)
    lens = torch.tensor([-1 if padded != "window" else 5] * 4)
    counts = torch.tensor([0 if padded != "length" else 3] * 4)
    for index in range(live):
        tokens[index] = torch.tensor(record(index).tokens[3 + index : 6 + index])
        locs[index], lens[index], counts[index] = state.locs[index], 3 + index, 3
        for name in before:
            if name[0] in "KV":
                written = locs[index, 3 + index : 6 + index]
                layer = record(index).kv[int(name[2:])]["KV".index(name[0])]
                before[name][written] = layer[3 + index : 6 + index]
        before["valid rows"][locs[index, 3 + index : 6 + index]] = True
    output = target().verify(state.cache, tokens, lens, counts, locs)
    for name, tensor in tensors_of(state.cache).items():
        expect_equal(LABEL, name, to_bits(tensor), before[name], guarded=True)
    for part in output:
        expect_equal(LABEL, "results", to_bits(part[live:]), np.zeros_like(to_bits(part[live:])))
    rows = torch.tensor([3, 2])
    nothing = target().decode(state.cache, rows, torch.tensor(GARBAGE[:2]), torch.tensor([-1, -5]), locs[2:])
    for name, tensor in tensors_of(state.cache).items():
        expect_equal(LABEL, f"{name} after a decode", to_bits(tensor), before[name], guarded=True)
    expect_equal(LABEL, "results of a decode", to_bits(nothing.logits), np.zeros((2, 50), np.uint16))


@pytest.mark.parametrize("dedup", [True, False], ids=["view", "dense"])
def test_a_decode_commits_the_rows_that_exist(dedup: bool) -> None:
    state = bench(3, 2, dedup=dedup)
    for index in range(3):
        state.prefill(index, 4)
    lens = torch.tensor([4, -1, 4])
    tokens = torch.tensor([record(0).tokens[4], GARBAGE[1], record(2).tokens[4]])
    target().decode(state.cache, torch.arange(3), tokens, lens, state.locs)
    for index, length in enumerate((5, 4, 5)):
        state.judge_pools(index, length)
