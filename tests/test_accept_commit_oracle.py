"""Tests of the oracle of ``accept_commit``: by hand, and against the two oracles that it is the composition of."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from conformance.fixtures.oracles import accept, commit_indices
from conformance.fixtures.oracles.accept_commit import Ints, Outcome, first_column, outcome, track_step
from conformance.fixtures.streams import Stream

TOP = (1 << 63) - 1


def composed(
    candidates: Ints,
    target: Ints,
    seq_lens: Ints,
    verify_lens: Ints | None,
    eos_ids: Ints | None,
    interval: int | None,
) -> Outcome:
    """Row by row: accept, the tokens that come out of it cut after the first end, and the steps of a chain."""
    width = target.shape[1]
    rows: list[tuple[int, ...]] = []
    faulty = False
    ends = set() if eos_ids is None else set(eos_ids.tolist())
    for request, pre in enumerate(seq_lens.tolist()):
        length = None if verify_lens is None else int(verify_lens[request])
        correct, bonus = accept.accept_row(candidates[request].tolist(), target[request].tolist(), length)
        faulty |= pre >= 0 and length is not None and accept.faulty(width, [length])
        tokens = [*candidates[request, 1 : correct + 1].tolist(), bonus]
        cut = next((count for count, token in enumerate(tokens, 1) if token in ends), len(tokens))
        committed = 0 if pre < 0 else cut
        chain = range(request * width, (request + 1) * width)
        steps = commit_indices.request_steps(
            chain, committed, None if interval is None else pre, request * width, interval or 1
        )
        assert steps.kinds == ()
        after = (pre + committed + (1 << 63)) % (1 << 64) - (1 << 63)
        rows.append((correct, bonus, committed, after, steps.last, steps.track))
    columns = [np.array(column, np.int64) for column in zip(*rows, strict=True)]
    return Outcome(*columns[:5], None if interval is None else columns[5], faulty)  # type: ignore[arg-type]


def expect_same(got: Outcome, need: Outcome) -> None:
    assert got.faulty == need.faulty
    for name, mine, theirs in zip(Outcome._fields[:6], got[:6], need[:6], strict=True):
        assert (mine is None) == (theirs is None), name
        if mine is not None:
            assert mine.dtype == np.int64, name
            assert mine.tolist() == theirs.tolist(), name  # type: ignore[union-attr]


@pytest.mark.parametrize("interval", [None, 1, 2, 3])
@pytest.mark.parametrize("width", [1, 2, 3])
def test_every_window_of_two_letters_is_the_composition(width: int, interval: int | None) -> None:
    windows = np.array(list(itertools.product((0, 7), repeat=2 * width)), np.int64)
    candidates, target = windows[:, :width], windows[:, width:]
    for pre in (-1, 0, 1, 5):
        before = np.full(len(windows), pre)
        for length in (None, *range(-1, width + 2)):
            lens = None if length is None else np.full(len(windows), length)
            for ends in (None, np.zeros(0, np.int64), np.array([7]), np.array([9, 0])):
                arguments = (candidates, target, before, lens, ends, interval)
                expect_same(outcome(*arguments), composed(*arguments))


@pytest.mark.parametrize("interval", [None, 4, 256, 1 << 62])
def test_drawn_windows_are_the_composition(interval: int | None) -> None:
    stream = Stream(f"oracles/accept_commit/{interval}")
    target = stream.integers(0, 3, (200, 6)) - 1
    candidates = np.where(stream.integers(0, 4, (200, 6)) > 0, np.roll(target, 1, axis=1), -2)
    before = np.where(stream.integers(0, 5, (200,)) == 0, TOP - stream.integers(0, 9, (200,)), 0)
    before += stream.integers(-300, 0, (200,))
    lens = stream.integers(-1, 9, (200,))
    arguments = (candidates, target, before, lens, np.array([1, 5]), interval)
    expect_same(outcome(*arguments), composed(*arguments))


def test_worked_rows() -> None:
    target = np.tile(np.arange(10, 16), (5, 1))
    candidates = np.roll(target, 1, axis=1)
    candidates[1, 3] = 99
    got = outcome(
        candidates,
        target,
        np.array([250, 254, 253, -1, TOP]),
        np.array([6, 6, 2, 0, 1]),
        np.array([14, 13]),
        256,
    )
    assert got.correct.tolist() == [5, 2, 1, 0, 0]
    assert got.bonus.tolist() == [15, 12, 11, 10, 10]
    assert got.commit_lens.tolist() == [4, 3, 2, 0, 1]
    assert got.new_seq_lens.tolist() == [254, 257, 255, -1, -TOP - 1]
    assert got.last.tolist() == [3, 2, 1, -1, 0]
    assert got.track is not None
    assert got.track.tolist() == [-1, 1, -1, -1, 0]
    assert not got.faulty


@pytest.mark.parametrize(
    ("pre", "accepted", "interval", "step"),
    [
        (255, 1, 256, 0),
        (254, 1, 256, -1),
        (254, 2, 256, 1),
        (256, 1, 256, -1),
        (250, 6, 256, 5),
        (511, 1, 256, 0),
        (0, 6, 256, -1),
        (3, 6, 4, 4),
        (0, 3, 1, 2),
        (TOP, 6, 256, 0),
    ],
)
def test_worked_boundaries(pre: int, accepted: int, interval: int, step: int) -> None:
    assert track_step(pre, accepted, interval) == step


def test_the_first_marked_column_or_their_number() -> None:
    assert first_column(np.array([[0, 1, 1], [0, 0, 0], [1, 0, 0]], np.bool_)).tolist() == [1, 3, 0]
    assert first_column(np.zeros((2, 0), np.bool_)).tolist() == [0, 0]


def test_a_fault_is_that_of_a_live_row_only() -> None:
    window = np.zeros((2, 4), np.int64)
    for before, length, faulty in (([3, -1], [4, 0], False), ([3, -1], [0, 4], True), ([-1, 3], [9, 1], False)):
        got = outcome(window, window, np.array(before), np.array(length), None, None)
        assert got.faulty is faulty
        assert got.track is None
    for length in range(-1, 7):
        got = outcome(window[:1], window[:1], np.array([0]), np.array([length]), None, None)
        assert got.faulty is (not 1 <= length <= 4)
    assert not outcome(window, window, np.array([3, -1]), None, None, None).faulty
