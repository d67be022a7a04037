"""Tests of the oracle of ``kv_write``: the fate of a row by hand, and K heads judged with their own angles."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from conformance.fixtures.emulation import BF16, add32, mul32, round_to, sub32
from conformance.fixtures.oracles.kv_write import Fate, Window, judge_keys
from conformance.fixtures.streams import Stream

# Rows of two requests of width 3, in a pool of 8 rows of which 2 are reserved, with a table of 16 positions.
WINDOW = Window(
    locs=[2, 7, 8, -1, 1, 0],
    positions=[0, 15, 0, 99, 99, -1],
    table_rows=16,
    pool_rows=8,
    reserved_rows=2,
)


def fates(window: Window) -> str:
    """One letter a row: written, skipped, bad loc, bad position, both."""
    letters = {
        Fate.WRITTEN: "w", Fate.SKIPPED: "s", Fate.BAD_LOC: "l", Fate.BAD_POSITION: "p", Fate.BAD_BOTH: "b",
    }  # fmt: skip
    return "".join(letters[window.fate(row)] for row in range(len(window.locs)))


def test_the_five_fates_have_names_of_their_own() -> None:
    assert len({fate.value for fate in Fate}) == len(Fate) == 5


@pytest.mark.parametrize(
    ("loc", "position", "letter"),
    [
        (2, 0, "w"),
        (7, 15, "w"),
        (1, 0, "s"),
        (0, 0, "s"),
        (-1, 0, "s"),
        (-1, 16, "s"),
        (1, -1, "s"),
        (8, 0, "l"),
        (99, 15, "l"),
        (2, -1, "p"),
        (7, 16, "p"),
        (8, -1, "b"),
        (8, 16, "b"),
    ],
)
def test_a_row_is_skipped_first_and_faulty_second(loc: int, position: int, letter: str) -> None:
    window = replace(WINDOW, locs=[loc], positions=[position])
    assert fates(window) == letter
    assert window.written() == ([0] if letter == "w" else [])
    named = {"l": ["loc-out-of-range"], "p": ["position-out-of-range"]}
    named["b"] = named["l"] + named["p"]
    assert window.fault_kinds() == named.get(letter, [])


def test_without_reserved_rows_the_first_row_of_the_pool_is_written() -> None:
    assert fates(replace(WINDOW, locs=[0, 1, -1], positions=[0] * 3, reserved_rows=0)) == "wws"
    assert fates(Window([0], [0], 1, 1)) == "w"


def test_a_pool_of_unknown_rows_has_no_upper_bound() -> None:
    assert fates(replace(WINDOW, locs=[8, 1 << 40, 1], positions=[0] * 3, pool_rows=None)) == "wws"


def test_columns_from_the_commit_length_on_are_skipped_whatever_they_hold() -> None:
    window = replace(WINDOW, locs=[2, 9, 9, 3, 4, 9], positions=[0, 0, 99, 1, 2, 99])
    assert fates(window) == "wlbwwb"
    assert fates(replace(window, commit_lens=[1, 2], width=3)) == "wsswws"
    assert fates(replace(window, commit_lens=[2, 0], width=3)) == "wlssss"
    assert fates(replace(window, commit_lens=[0, 0, 1], width=2)) == "ssssws"
    assert fates(replace(window, commit_lens=[-1, 5], width=3)) == "ssswwb"


def test_written_rows_and_kinds_of_fault_are_in_order() -> None:
    window = replace(WINDOW, locs=[2, 9, 3, 2], positions=[99, 0, 0, 1])
    assert window.written() == [2, 3]
    assert window.fault_kinds() == ["loc-out-of-range", "position-out-of-range"]
    assert replace(window, positions=[99, 0, 0, 99]).written() == [2]
    assert replace(window, locs=[2, 3, -1, 0]).fault_kinds() == ["position-out-of-range"]


# K heads.


@pytest.mark.parametrize("neox", [True, False])
def test_keys_are_judged_with_the_angles_of_their_row(neox: bool) -> None:
    stream = Stream(f"oracles/keys/{neox}")
    k = round_to(BF16, stream.normal((2, 3, 8)))
    weight = round_to(BF16, 1 + 0.3 * stream.normal(8))
    angles = stream.uniform((2, 2)) * 3 + 0.5
    cos, sin = (f(angles).astype(np.float32).astype(np.float64) for f in (np.cos, np.sin))
    first, second = (slice(0, 2), slice(2, 4)) if neox else (slice(0, 4, 2), slice(1, 4, 2))
    y = round_to(BF16, k * weight / np.sqrt((k * k).mean(axis=2, keepdims=True) + 1e-6))
    out, c, s = y.copy(), cos[:, None], sin[:, None]
    out[..., first] = sub32(mul32(y[..., first], c), mul32(y[..., second], s))
    out[..., second] = add32(mul32(y[..., second], c), mul32(y[..., first], s))
    out = round_to(BF16, out)
    assert judge_keys(out, k, weight, 1e-6, cos, sin, neox).ok.all()
    assert judge_keys(out, k, weight, 1e-6, cos, sin, neox).ok.shape == (6, 8)
    # Every other way to give the same arrays is seen in every head.
    for wrong in (
        judge_keys(out, k, weight, 1e-6, cos[::-1], sin[::-1], neox),
        judge_keys(out, k, weight, 1e-6, sin, cos, neox),
        judge_keys(out, k, weight, 1e-6, cos, sin, not neox),
        judge_keys(k, k, weight, 1e-6, cos, sin, neox),
        judge_keys(out, k, weight, 1.0, cos, sin, neox),
    ):
        assert not wrong.ok.all(axis=1).any()
