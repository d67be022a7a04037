"""Tests of `conformance.fixtures.failures`: what a failing case says, so that a person can act on it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from conformance.fixtures import ledger, variants
from conformance.fixtures.emulation import BF16, next_up, round_to
from conformance.fixtures.envelope import HeadVerdict, Rotation, judge, judge_fp32
from conformance.fixtures.failures import distance
from conformance.fixtures.failures.broken import BrokenClauseError
from conformance.fixtures.failures.clauses import clause_of
from conformance.fixtures.failures.pattern import pattern
from conformance.fixtures.failures.rerun import command, decisions
from conformance.fixtures.failures.text import described, facts, lines
from conformance.fixtures.guard import Arena, to_bits
from conformance.fixtures.ledger import Label, expect_equal, expect_raises, expect_within
from conformance.fixtures.oracles.rotary import table_rows
from conformance.fixtures.streams import Stream
from dspark import dispatch

LABEL = Label("kv_write", "fused")


@pytest.fixture(autouse=True)
def _own_ledger(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(ledger, "_active", ledger._Active())
    ledger.begin_case()
    return


def broken(call: Callable[[], object]) -> dict[str, object]:
    """The facts of the comparison that ``call`` fails."""
    with pytest.raises(BrokenClauseError) as failed:
        call()
    return facts(failed.value.broken)


# --- Patterns ---------------------------------------------------------------------------------------------------------


def wrong(shape: tuple[int, ...], *where: object) -> np.ndarray:
    mask = np.zeros(shape, np.bool_)
    for index in where:
        mask[index] = True
    return mask


ALL = slice(None)


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        (wrong((4, 2, 8), ALL), "all 64 elements"),
        (wrong((4, 2, 8), (2,)), "one row, 2, every head, every element"),
        (wrong((4, 2, 8), (ALL, 1)), "every row, one head, 1, every element"),
        (wrong((4, 2, 8), (ALL, ALL, slice(0, None, 2))), "every row, every head, every 2nd element from 0"),
        (wrong((4, 2, 8), (ALL, ALL, slice(4, None))), "every row, every head, elements 4 to 7 of 8"),
        (wrong((4, 2, 8), (1, 0, 5)), "one row, 1, one head, 0, one element, 5"),
        (wrong((1, 9), (0, slice(0, 7, 3))), "the only row, every 3rd column from 0"),
        (wrong((1, 99), (0, slice(0, 7, 3))), "the only row, every 3rd column from 0 to 6"),
        (wrong((9,), (slice(0, 2),), (5,), (7,)), "4 of 9 rows (0 to 1, 5, 7)"),
        (wrong((40,), *((n * n,) for n in range(6))), "6 of 40 rows (0 to 1, 4, 9, 16, ...)"),
        (wrong((2, 2), (0, 0), (1, 1)), "every row, every column (2 of the 4 elements there)"),
        (wrong((2, 2, 2, 2), (0, 1, 1, 0)), "one index of axis 0, 0, one index of axis 1, 1, "
                                            "one index of axis 2, 1, one index of axis 3, 0"),
    ],
)  # fmt: skip
def test_the_pattern_of_the_wrong_elements_is_said(mask: np.ndarray, words: str) -> None:
    assert pattern(mask) == words


# --- Values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (np.int32(-2), "-2 (0xfffffffe)"),
        (np.int64(5), "5 (0x0000000000000005)"),
        (np.uint16(0x3F81), "16257 (0x3f81, as bf16 1.0078125)"),
        (np.uint32(0x3F800000), "1065353216 (0x3f800000, as fp32 1.0)"),
        (np.uint8(255), "255 (0xff)"),
        (np.bool_(True), "True"),
        (("a", 1), "('a', 1)"),
    ],
)
def test_values_are_given_in_decimal_and_in_hex(value: object, text: str) -> None:
    assert described(value) == text


def test_a_difference_of_arrays_has_all_its_facts() -> None:
    expected = np.arange(24, dtype=np.uint16).reshape(2, 2, 6)
    actual = expected.copy()
    actual[1, :, ::2] ^= 1
    found = broken(lambda: expect_equal(LABEL, "V of layer 1", actual, expected))
    assert found["clause"] == "V is copied to its pool as raw bits. (CONTRACTS.md section 4)"
    assert (found["first"], found["wrong"], found["elements"]) == ([1, 0, 0], 6, 24)
    assert found["pattern"] == "one row, 1, every head, every 2nd element from 0"
    assert str(found["got"]).startswith("13 (0x000d, as bf16 ")
    assert str(found["need"]).startswith("12 (0x000c, as bf16 ")
    text = "\n".join(lines(found))
    for part in ("broken clause: V is copied", "operation:     kv_write, path fused", "index (1, 0, 0)", "6 of 24"):
        assert part in text


def test_other_values_and_errors_have_what_there_is() -> None:
    found = broken(lambda: expect_equal(LABEL, "rows written", [1], [1, 2]))
    assert (found["got"], found["need"]) == ("[1]", "[1, 2]")
    assert "first" not in found
    found = broken(lambda: expect_raises(LABEL, ValueError, ["locs"], lambda: None))
    assert str(found["clause"]).startswith("Bad input is refused before anything is written")
    assert "got" not in found


@pytest.mark.parametrize(
    ("offset", "words"),
    [
        (64 * 4 - 1, "1 elements before the tensor"),
        (64 * 4, "byte 0 of locs[0, 0]"),
        (64 * 4 + 5 * 4, "1 elements after byte 0 of locs[0, 2], in a gap"),
        (64 * 4 + 8 * 4 + 2, "byte 2 of locs[1, 0]"),
        (64 * 4 + 13 * 4, "1 elements after the tensor"),
    ],
    ids=["before", "first", "gap", "inside", "after"],
)
def test_a_stray_write_is_located(offset: int, words: str) -> None:
    arena = Arena(torch.device("cpu"))
    values = np.arange(6, dtype=np.int32).reshape(2, 3)
    tensor = arena.place("locs", values, torch.int32, strides=(8, 2))
    (placed,) = arena._placed
    placed.storage.view(torch.uint8)[offset] ^= 1
    found = broken(lambda: arena.verify(LABEL))
    assert to_bits(tensor).shape == (2, 3)
    assert found["clause"] == "Nothing outside the call's write set changes. (CONTRACTS.md section 9)"
    assert found["pattern"] == f"bytes: one byte, {offset}"
    assert str(found["place"]) == f"byte {offset} of the storage of locs, {words}"


def test_a_place_skips_what_may_be_written() -> None:
    arena = Arena(torch.device("cpu"))
    arena.place("x", np.zeros(4, np.int8), torch.int8, writes=np.array([True, True, False, False]))
    (placed,) = arena._placed
    placed.storage[66] += 1
    assert str(broken(lambda: arena.verify(LABEL))["place"]).endswith("byte 0 of x[2]")


# --- Admissible sets --------------------------------------------------------------------------------------------------


def judged(fault: Callable[[np.ndarray], None]) -> HeadVerdict:
    """The judgement of right heads, after ``fault`` has changed some results."""
    stream = Stream("failures/heads")
    rows = table_rows(np.full(6, 77), 8, 1e6).astype(np.float64)
    rotation = Rotation(rows[:, :4], rows[:, 4:], True)
    x = round_to(BF16, stream.normal((6, 16)))
    weight = round_to(BF16, 1 + 0.3 * stream.normal((16,)))
    data = variants.Heads(x, weight, 1e-6, np.full(6, 77), 1e6, rotation)
    out = np.array(variants.faithful(data))
    fault(out)
    return judge(out, x, weight, 1e-6, rotation)


def test_a_result_outside_its_set_is_measured() -> None:
    def two_steps(out: np.ndarray) -> None:
        out[2, 12:] = [float(np.nan), *(value + 2 * abs(value) * 2.0**-8 for value in out[2, 13:])]
        out[2, 13:] = round_to(BF16, out[2, 13:])

    verdict = judged(two_steps)
    found = broken(lambda: expect_within(LABEL, "K of layer 0", verdict, single_share=0))
    assert (found["first"], found["wrong"], found["pattern"]) == ([2, 12], 4, "one head, 2, elements 12 to 15 of 16")
    measured = found["distance"]
    assert isinstance(measured, dict)
    assert (measured["unit"], measured["measured"]) == ("ulps", 4)
    assert measured["histogram"]["NaN"] == 1
    assert 1 <= measured["largest"] <= 3
    assert str(found["got"]).startswith("nan (0x7fc0)")
    assert len(re.findall(r"\(0x[0-9a-f]{4}\)", str(found["need"]))) in (1, 2)
    assert "admissible (not rotated)" in str(found["explained"])


def test_the_values_that_are_admissible_hold_what_came_right() -> None:
    verdict = judged(lambda out: None)
    assert verdict.ok.all()
    assert distance.measured(verdict) is None
    heads, elements = (grid.ravel() for grid in np.indices(verdict.out.shape))
    values = distance.members(verdict, heads, elements)
    assert not distance.nearest(BF16, verdict.out.ravel(), values).any()


def test_both_values_of_a_set_are_admissible() -> None:
    verdict = judged(lambda out: None)
    two = replace(verdict.normed, high=next_up(BF16, verdict.normed.low))
    verdict = replace(verdict, normed=two)
    for element in (9, 2):  # not rotated, rotated
        values = set(distance.members(verdict, np.array([3]), np.array([element])).ravel().tolist())
        if element == 9:
            assert values == {two.low[3, 9], two.high[3, 9]}
        else:
            assert len(values) > 1


def test_bounds_are_the_unit_of_fp32() -> None:
    x = Stream("failures/fp32").normal((2, 8))
    rotation = Rotation(np.zeros((2, 0)), np.zeros((2, 0)), True)
    right = judge_fp32(x, x, np.ones(8), 1e-6, rotation)
    verdict = judge_fp32(right.expected + 3 * right.bound, x, np.ones(8), 1e-6, rotation)
    measured = distance.measured(verdict)
    assert measured is not None
    assert measured[0] == "bounds"
    assert np.all(np.abs(measured[1] - 3) < 1e-3)


def test_distances_are_summed_up() -> None:
    found = distance.summary("ulps", np.array([0, 1, 1, 3, 15, 300, np.nan]))
    assert found["histogram"] == {"0": 1, "1": 2, "2 to 3": 1, "4 to 15": 1, "256 and more": 1, "NaN": 1}
    assert (found["median"], found["largest"], found["measured"]) == (2.0, 300.0, 7)


# --- Clauses, decisions, commands -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "what", "section"),
    [
        ("accept", "bonus", "6"),
        ("kv_write", "K of layer 3", "2"),
        ("qk_norm_rope", "Q heads", "2"),
        ("state_scatter", "state 1", "8"),
        ("commit_indices", "track", "7"),
        ("accept_commit", "bonus", "7b"),
        ("accept_commit", "commit_lens", "7b"),
        ("accept_commit", "track", "7b"),
        ("accept", "decision", "9"),
        ("worker", "tokens", "11"),
        ("topic", "lane", ""),
    ],
)
def test_a_comparison_has_a_clause(op: str, what: str, section: str) -> None:
    assert clause_of(op, what).section == section


def test_a_comparison_without_a_clause_is_named_by_its_words() -> None:
    assert str(clause_of("topic", "lane")) == "Lane: what came is what must come. (the suite itself)"


def test_decisions_name_the_reason_and_its_remedy() -> None:
    import dspark.ops  # noqa: F401

    (check,) = [check for check in dispatch.registry()["accept"] if check.id == "verify-width"]
    census = {("accept", "eager", "verify-width"): 2, ("accept", "fused", "eligible"): 1}
    assert list(decisions(census)) == [
        f"accept took eager 2 times: verify-width ({check.requires})",
        "accept took fused once: eligible",
    ]


def test_the_command_keeps_what_decides_a_case() -> None:
    node = "conformance/cases/test_a.py::test_b[c d-fused]"
    given = ["-n", "2", "--lane=interpret", "--record=x.json", "--impl", "sglang=/a b", "-x"]
    assert command(node, given) == f"pytest '{node}' --lane=interpret --impl 'sglang=/a b'"
