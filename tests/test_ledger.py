"""Tests of `conformance.fixtures.ledger`: what each helper refuses, what it counts, and how ledgers are merged."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import pytest

from conformance.fixtures import ledger
from conformance.fixtures.ledger import (
    Label,
    Ledger,
    Row,
    expect_decision,
    expect_equal,
    expect_fault,
    expect_raises,
    expect_refused,
    expect_within,
)
from dspark.dispatch import Check, Decision, Failure, FallbackError, Outcome, Path
from dspark.faults import IndexFaultError

LABEL = Label("op", "fused")
OTHER = Label("op", "eager")


@pytest.fixture(autouse=True)
def book(monkeypatch: pytest.MonkeyPatch) -> Ledger:
    """An empty ledger that the helpers write to; the process gets its own back afterwards."""
    monkeypatch.setattr(ledger, "_active", ledger._Active())
    ledger.begin_case()
    return ledger.active()


def fails(call: Callable[[], object], *parts: str) -> None:
    """``call`` fails as a comparison, with the label and every part in the message."""
    with pytest.raises(AssertionError) as failed:
        call()
    for part in ("op/fused: ", *parts):
        assert part in str(failed.value)


# --- expect_equal -----------------------------------------------------------------------------------------------------

EXPECTED = np.array([[1, 2, 3], [4, 5, 6]], np.int32)


def test_equal_arrays_pass_and_are_counted(book: Ledger) -> None:
    expect_equal(LABEL, "ids", EXPECTED.copy(), EXPECTED)
    expect_equal(LABEL, "ids", np.asfortranarray(EXPECTED), EXPECTED)
    expect_equal(LABEL, "nothing", np.zeros((0, 3), np.int32), np.zeros((0, 3), np.int32))
    expect_equal(LABEL, "flags", np.array([True]), np.array([True]))
    assert book.rows == {LABEL: Row(comparisons=4, elements=13)}


def test_the_first_difference_and_their_number_are_named(book: Ledger) -> None:
    actual = EXPECTED.copy()
    actual[1, 1:] = [9, 8]
    fails(
        lambda: expect_equal(LABEL, "the ids", actual, EXPECTED),
        "the ids: 2 of 6 elements differ, the first at (1, 1): got 9, need 5",
    )
    assert book.rows == {LABEL: Row(comparisons=1, elements=6)}


@pytest.mark.parametrize(
    ("actual", "parts"),
    [
        (EXPECTED.astype(np.int64), ("int64(2, 3)", "int32(2, 3)")),
        (EXPECTED.view(np.uint32), ("uint32(2, 3)", "int32(2, 3)")),
        (EXPECTED.reshape(3, 2), ("int32(3, 2)", "int32(2, 3)")),
        (EXPECTED[:1], ("int32(1, 3)", "int32(2, 3)")),
        (EXPECTED.ravel(), ("int32(6,)", "int32(2, 3)")),
        (EXPECTED.tolist(), ("got list, need an array",)),
        (np.int32(1), ("got int32, need an array",)),
    ],
    ids=["dtype", "sign", "shape", "broadcastable", "rank", "list", "scalar"],
)
def test_arrays_of_another_kind_differ(actual: Any, parts: tuple[str, ...]) -> None:
    fails(lambda: expect_equal(LABEL, "ids", actual, EXPECTED), *parts)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_floating_arrays_are_refused(book: Ledger, dtype: type) -> None:
    values = np.ones(3, dtype)
    for actual, expected in ((values, values), (values, np.ones(3, np.int32)), (np.ones(3, np.int32), values)):
        with pytest.raises(TypeError, match="y: compare the bits of floating arrays"):
            expect_equal(LABEL, "y", actual, expected)
    assert not ledger.end_case()
    assert book.rows == {}


def test_guarded_bytes_are_counted_apart(book: Ledger) -> None:
    expect_equal(LABEL, "bytes", EXPECTED, EXPECTED, guarded=True)
    fails(lambda: expect_equal(LABEL, "bytes", EXPECTED + 1, EXPECTED, guarded=True), "6 of 6 elements differ")
    assert book.rows == {LABEL: Row(comparisons=2, guarded_bytes=12)}


def test_other_values_are_equal_in_type_and_value(book: Ledger) -> None:
    expect_equal(LABEL, "names", ("a", 1), ("a", 1))
    expect_equal(LABEL, "nothing", None, None)
    fails(lambda: expect_equal(LABEL, "names", ["a"], ("a",)), "names: got ['a'], need ('a',)")
    fails(lambda: expect_equal(LABEL, "flag", 1, True), "flag: got 1, need True")
    fails(lambda: expect_equal(LABEL, "count", EXPECTED, 6), "count: got array")
    assert book.rows == {LABEL: Row(comparisons=5, elements=5)}


# --- expect_within ----------------------------------------------------------------------------------------------------


@dataclass
class FakeVerdict:
    """Judges by two given arrays."""

    ok: Any
    single: Any

    def explain(self, index: tuple[int, ...]) -> str:
        return f"explained {index}"


def verdict(outside: int = 0, single: int = 8) -> FakeVerdict:
    """Of 8 elements the last ``outside`` are wrong, and the first ``single`` sets hold one value."""
    position = np.arange(8).reshape(2, 4)
    return FakeVerdict(position < 8 - outside, position < single)


def test_elements_inside_pass_and_are_counted(book: Ledger) -> None:
    expect_within(LABEL, "y", verdict(single=6), single_share=0.75)
    expect_within(LABEL, "y", verdict(), single_share=1.0)
    expect_within(LABEL, "nothing", FakeVerdict(np.zeros(0, bool), np.zeros(0, bool)), single_share=1.0)
    assert book.rows == {LABEL: Row(comparisons=3, elements=16, judged=16, single_valued=14)}


def test_an_element_outside_is_explained() -> None:
    fails(
        lambda: expect_within(LABEL, "y", verdict(outside=3), single_share=0.5),
        "y: 3 of 8 elements are outside their admissible set, the first at (1, 1): explained (1, 1)",
    )


def test_an_oracle_that_admits_too_much_fails() -> None:
    fails(
        lambda: expect_within(LABEL, "y", verdict(single=5), single_share=0.75),
        "y: 62.5000% of the sets hold a single value, the case declares 75.0000%",
    )


# --- expect_raises ----------------------------------------------------------------------------------------------------


class SpecialError(ValueError):
    """A kind of its own."""


def raises(error: BaseException) -> Callable[[], object]:
    def call() -> object:
        raise error

    return call


def test_the_expected_error_is_returned_and_counted(book: Ledger) -> None:
    error = ValueError("locs: got 3, need 4")
    assert expect_raises(LABEL, ValueError, ["locs", "got 3", "need 4"], raises(error)) is error
    assert book.rows == {LABEL: Row(comparisons=1, elements=1)}


@pytest.mark.parametrize(
    ("call", "parts"),
    [
        (raises(TypeError("locs: got 3")), ("got TypeError: locs: got 3; need ValueError",)),
        (raises(SpecialError("locs: got 3")), ("got SpecialError, need ValueError",)),
        (raises(ValueError("loc: got 3")), ("'loc: got 3'", "does not name ['locs']")),
        (lambda: 42, ("got the result 42, need ValueError",)),
    ],
    ids=["another-kind", "a-subclass", "a-name-is-missing", "no-error"],
)
def test_other_outcomes_fail(book: Ledger, call: Callable[[], object], parts: tuple[str, ...]) -> None:
    fails(lambda: expect_raises(LABEL, ValueError, ["locs", "got 3"], call), *parts)
    assert book.rows == {LABEL: Row(comparisons=1, elements=1)}


def test_an_interrupt_is_nobody_s_expected_error() -> None:
    with pytest.raises(KeyboardInterrupt):
        expect_raises(LABEL, ValueError, [], raises(KeyboardInterrupt()))


# --- expect_decision, expect_fault ------------------------------------------------------------------------------------


def outcome(path: Path, *reasons: str) -> Outcome:
    failed = tuple(Failure(Check(reason, "sentence", lambda facts: (False, None)), None) for reason in reasons)
    return Outcome(Decision("op", path, failed), path)


def test_the_expected_decision_counts_its_reasons_as_violated(book: Ledger) -> None:
    expect_decision(LABEL, [outcome(Path.EAGER, "a", "b")], "eager", ["a", "b"])
    expect_decision(LABEL, iter([outcome(Path.FUSED)]), "fused", [])
    assert book.violated == {("op", "a"), ("op", "b")}
    assert book.rows == {LABEL: Row(comparisons=2, elements=2)}


@pytest.mark.parametrize(
    "outcomes",
    [
        [outcome(Path.FUSED, "a", "b")],
        [outcome(Path.EAGER, "a")],
        [outcome(Path.EAGER, "a", "b", "c")],
        [outcome(Path.EAGER, "b", "a")],
        [],
        [outcome(Path.EAGER, "a", "b"), outcome(Path.EAGER, "a", "b")],
    ],
    ids=["path", "a-reason-less", "a-reason-more", "order", "none", "two"],
)
def test_other_decisions_fail_and_violate_nothing(book: Ledger, outcomes: list[Outcome]) -> None:
    got = str([(str(one.path), one.decision.reasons) for one in outcomes])
    fails(
        lambda: expect_decision(LABEL, outcomes, "eager", ["a", "b"]),
        f"decision: got {got}, need [('eager', ('a', 'b'))]",
    )
    assert book.violated == set()
    assert book.rows == {LABEL: Row(comparisons=1, elements=1)}


def test_the_expected_refusal_counts_its_reasons_as_violated(book: Ledger) -> None:
    decision = outcome(Path.EAGER, "a", "b").decision
    expect_refused(LABEL, FallbackError(decision, "a path", decision.failed), ["a", "b"])
    assert book.violated == {("op", "a"), ("op", "b")}
    assert book.rows == {LABEL: Row(comparisons=1, elements=1)}


@pytest.mark.parametrize("reasons", [["a"], ["a", "b", "c"], ["b", "a"], []])
def test_other_refusals_fail_and_violate_nothing(book: Ledger, reasons: list[str]) -> None:
    decision = outcome(Path.EAGER, "a", "b").decision
    error = FallbackError(decision, "a path", decision.failed)
    fails(lambda: expect_refused(LABEL, error, reasons), "reasons of the refusal: got ('a', 'b')")
    assert book.violated == set()


def test_an_index_fault_is_counted_as_seen(book: Ledger) -> None:
    kinds = [("op", "low"), ("op", "high")]
    expect_fault(LABEL, IndexFaultError(tuple(kinds)), kinds)
    assert book.faults_seen == set(kinds)


@pytest.mark.parametrize(
    "error",
    [IndexFaultError((("op", "high"),)), IndexFaultError((("op", "low"), ("op", "high"))), IndexError("op/low")],
    ids=["another-kind", "a-kind-more", "another-error"],
)
def test_other_faults_fail_and_are_not_seen(book: Ledger, error: IndexError) -> None:
    fails(lambda: expect_fault(LABEL, error, [("op", "low")]), "index faults: got ")
    assert book.faults_seen == set()


# --- cases and merging ------------------------------------------------------------------------------------------------


def test_a_case_counts_once_under_each_label_it_touched(book: Ledger) -> None:
    for labels in ((LABEL, LABEL, OTHER), (LABEL,)):
        ledger.begin_case()
        for label in labels:
            expect_equal(label, "value", 1, 1)
        assert ledger.end_case()
    assert {label: row.cases for label, row in book.rows.items()} == {LABEL: 2, OTHER: 1}


def test_a_case_that_compared_nothing_is_told(book: Ledger) -> None:
    expect_equal(LABEL, "value of the case before", 1, 1)
    ledger.end_case()
    ledger.begin_case()
    assert not ledger.end_case()
    assert book.rows[LABEL].cases == 1


def test_labels_of_a_child_are_those_of_the_case(book: Ledger) -> None:
    """Its comparisons are absorbed apart, and the case counts once under each label."""
    ledger.begin_case()
    expect_equal(LABEL, "value", 1, 1)
    ledger.touched([OTHER, LABEL])
    assert ledger.labels() == sorted([LABEL, OTHER])
    assert ledger.end_case()
    assert {label: row.cases for label, row in book.rows.items()} == {LABEL: 1, OTHER: 1}


def row_from(first: int, step: int = 1) -> Row:
    """Counts that start at ``first`` and grow by ``step`` from field to field."""
    return Row(*(first + step * position for position in range(len(fields(Row)))))


def filled() -> Ledger:
    """A ledger in which no field is at its default."""
    return Ledger(
        rows={LABEL: row_from(1), OTHER: row_from(10)},
        violated={("op", "a")},
        faults_seen={("op", "low")},
        census={("op", "eager", "a"): 3, ("op", "fused", "eligible"): 4},
        not_offered={"cases/test_a.py::test_gpu"},
        waived={"test_a.py::test_excused"},
        ties=["request 0, token 3"],
        farthest={"logits": 1.5, "state": 2.0},
        collected_files={"test_a.py", "test_b.py"},
        collected=7,
        deselected=2,
    )


def test_every_field_survives_the_journey() -> None:
    data = json.loads(json.dumps(filled().to_data()))
    arrived = Ledger()
    arrived.absorb(data)
    assert arrived == filled()
    assert all(vars(filled()).values())


def test_counts_add_up_and_collection_facts_are_united() -> None:
    merged, other = filled(), filled()
    other.rows = {LABEL: row_from(5), Label("new", "-"): Row(cases=1)}
    other.violated, other.faults_seen = {("op", "b")}, {("op", "high")}
    other.census = {("op", "eager", "a"): 1, ("new", "eager", "z"): 1}
    other.not_offered, other.collected_files = {"cases/test_b.py::test_gpu"}, {"test_b.py", "test_c.py"}
    other.waived = {"test_b.py::test_excused"}
    other.ties, other.farthest = ["request 1, token 0"], {"logits": 3.0, "state": 1.0, "target K": 0.5}
    merged.absorb(other.to_data())
    assert merged == Ledger(
        rows={LABEL: row_from(6, step=2), OTHER: row_from(10), Label("new", "-"): Row(cases=1)},
        violated={("op", "a"), ("op", "b")},
        faults_seen={("op", "low"), ("op", "high")},
        census={("op", "eager", "a"): 4, ("op", "fused", "eligible"): 4, ("new", "eager", "z"): 1},
        not_offered={"cases/test_a.py::test_gpu", "cases/test_b.py::test_gpu"},
        waived={"test_a.py::test_excused", "test_b.py::test_excused"},
        ties=["request 0, token 3", "request 1, token 0"],
        farthest={"logits": 3.0, "state": 2.0, "target K": 0.5},
        collected_files={"test_a.py", "test_b.py", "test_c.py"},
        collected=7,
        deselected=2,
    )
