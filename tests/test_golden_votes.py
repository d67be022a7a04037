"""Tests of the votes on golden cases: every pair of voters is compared, by every array, and by nothing less."""

from __future__ import annotations

import numpy as np
import pytest

from conformance.fixtures.golden import contents, sets, votes
from conformance.fixtures.golden.digests import Case

INTEGERS: Case = {
    "correct": np.array([1, 2], np.int32),
    "bonus": np.array([7, 8]),
    "inputs.sha256": np.zeros(32, np.uint8),
}
GOT = {name: INTEGERS[name] for name in ("correct", "bonus")}


def changed(case: Case, name: str) -> Case:
    """``case`` with the last element of an array one larger."""
    array = case[name].copy()
    array.reshape(-1)[-1] += 1
    return {**case, name: array}


def pairs(found: votes.Disagreements) -> set[str]:
    return {" ".join(sorted(pair)) for pair in found}


def found(file: Case, oracle: Case, **paths: Case) -> set[str]:
    return pairs(votes.disagreements(file, oracle, paths, votes.by_equality))


def test_voters_that_agree_disagree_nowhere() -> None:
    assert found(INTEGERS, INTEGERS, eager=GOT, fused=GOT) == set()


@pytest.mark.parametrize("name", ["correct", "bonus"])
def test_each_odd_voter_disagrees_with_the_three_others(name: str) -> None:
    odd = changed(INTEGERS, name)
    assert found(odd, INTEGERS, eager=GOT, fused=GOT) == {"golden oracle", "eager golden", "fused golden"}
    assert found(INTEGERS, odd, eager=GOT, fused=GOT) == {"golden oracle", "eager oracle", "fused oracle"}
    assert found(INTEGERS, INTEGERS, eager=changed(GOT, name), fused=GOT) == {
        "eager golden", "eager oracle", "eager fused",
    }  # fmt: skip
    assert found(INTEGERS, INTEGERS, eager=GOT, fused=changed(GOT, name)) == {
        "fused golden", "fused oracle", "eager fused",
    }  # fmt: skip


def test_other_inputs_are_a_disagreement_of_file_and_oracle() -> None:
    odd = changed(INTEGERS, "inputs.sha256")
    (how,) = votes.disagreements(odd, INTEGERS, {"eager": GOT}, votes.by_equality).values()
    assert how == "inputs.sha256 differs at 1 of 32, first at (31,)"


def test_the_judge_is_asked_with_the_oracle_s_word_first() -> None:
    seen: list[tuple[Case, Case]] = []

    def judge(oracle: Case, got: Case) -> str:
        seen.append((oracle, got))
        return "so"

    told = votes.disagreements(INTEGERS, INTEGERS, {"eager": GOT}, judge)
    assert seen == [(INTEGERS, GOT)]
    assert told == {frozenset(("oracle", "eager")): "so"}


def test_what_tells_most_is_told_first() -> None:
    one: Case = {"a": np.array([1]), "out": np.array([1]), "y": np.array([1]), "x": np.array([1])}
    other = {name: array + 1 for name, array in one.items()}
    order = ["out", "x", "y", "a"]
    for name in order:
        assert votes.same(one, other).startswith(f"{name} differs at 1 of 1, first at (0,): 1 and 2")
        del one[name], other[name]
    assert votes.same({"a": np.zeros(1), "out": np.zeros(1)}, {"a": np.ones(1)}) == "only one has out"
    assert votes.same({"a": np.ones(1)}, {"a": np.ones(1), "b": np.zeros(1)}) == "only one has b"


def test_the_first_place_that_differs_and_their_number_are_named() -> None:
    one = np.arange(6, dtype=np.int32).reshape(2, 3)
    other = one + np.array([[0, 0, 0], [0, 5, 5]], np.int32)
    assert votes.differing("a", one, other) == "a differs at 2 of 6, first at (1, 1): 4 and 9"
    assert votes.differing("a.sha256", one, other) == "a.sha256 differs at 2 of 6, first at (1, 1)"
    assert votes.differing("a", one, one.astype(np.uint32)) == "a is int32(2, 3) and uint32(2, 3)"
    assert votes.differing("a", one, one.ravel()) == "a is int32(2, 3) and int32(6,)"
    nan = np.array([np.nan])
    assert votes.differing("a", nan, nan) == ""
    assert votes.differing("a", np.asfortranarray(one), one) == ""


def test_arrays_that_the_file_does_not_know_are_refused() -> None:
    assert votes.by_file(INTEGERS, {**GOT, "track": np.array([1])}) == "only one has track"
    assert votes.by_equality(INTEGERS, {**GOT, "track": np.array([1])}) == "only one has track"


# --- Heads ------------------------------------------------------------------------------------------------------------

HEADS = "positions-outside-the-table-keep-their-rows"


@pytest.fixture(scope="module")
def heads() -> Case:
    return contents.build("qk_norm_rope", HEADS)


def test_heads_are_judged_by_file_and_by_oracle(heads: Case) -> None:
    got: Case = {"out": heads["out"], "faults": heads["faults"]}
    assert votes.by_file(heads, got) == votes.by_envelope(heads, got) == ""
    assert votes.by_file(heads, {"faults": heads["faults"]}) == ""
    other = {**got, "faults": 1 - heads["faults"]}
    assert votes.by_file(heads, other).startswith("faults differs at 1 of 1, first at (0,): ")
    assert votes.by_envelope(heads, other).startswith("faults differs at 1 of 1, first at (0,): ")
    token = int(np.nonzero(sets.live(heads))[0][0])
    wrong = heads["out"].copy()
    wrong[token, 0, 1] ^= 0x4000
    said = votes.by_file(heads, {**got, "out": wrong})
    assert " elements are outside their set, first at " in said
    assert "the file has" in said
    said = votes.by_envelope(heads, {**got, "out": wrong})
    assert said.startswith("group 0: ")
    assert " elements are outside their set, first at (0, " in said
    wrong = heads["out"].copy()
    wrong[token, -1, 1] ^= 0x4000
    assert votes.by_envelope(heads, {**got, "out": wrong}).startswith("group 1: ")


def test_a_row_that_is_not_written_keeps_its_bits(heads: Case) -> None:
    live = sets.live(heads)
    assert 0 < np.count_nonzero(live) < live.size
    token = int(np.nonzero(~live)[0][-1])
    out = heads["out"].copy()
    out[token, 0, 0] ^= 1
    got: Case = {"out": out, "faults": heads["faults"]}
    assert votes.by_envelope(heads, got) == "a row that must keep its bits does not"
    assert "outside their set" in votes.by_file(heads, got)


def test_a_case_without_live_rows_is_judged_by_what_it_keeps(heads: Case) -> None:
    none = {**heads, "positions": np.full_like(heads["positions"], -1), "out": heads["x"]}
    assert votes.by_envelope(none, {"out": heads["x"], "faults": heads["faults"]}) == ""


# --- Tables -----------------------------------------------------------------------------------------------------------


def test_a_table_lies_between_the_bounds_of_file_and_oracle() -> None:
    id = next(iter(contents.CASES["rotary"]))
    file = contents.build("rotary", id)
    low: Case = {"inv_freq": file["inv_freq.low"], "rows": file["low"]}
    high: Case = {"inv_freq": file["inv_freq.high"], "rows": file["high"]}
    for got in (low, high):
        assert votes.table_disagreements(file, file, "table", got) == {}
    for name, bound, step in (("inv_freq", low, -1), ("rows", high, 1)):
        beyond = {**bound, name: bound[name].copy()}
        at = np.unravel_index(int(np.argmax((bound[name] > 0x100) & (bound[name] < 0x7F000000))), bound[name].shape)
        beyond[name][at] = int(beyond[name][at]) + step
        told = votes.table_disagreements(file, file, "table", beyond)
        assert pairs(told) == {"golden table", "oracle table"}
        assert all(f"{name}: got 0x" in how for how in told.values())
    assert pairs(votes.table_disagreements(changed(file, "low"), file, "table", high)) >= {"golden oracle"}
    narrow = {**file, "low": file["high"], "high": file["high"]}
    assert pairs(votes.table_disagreements(narrow, file, "table", low)) == {"golden oracle", "golden table"}
    assert pairs(votes.table_disagreements(file, narrow, "table", low)) == {"golden oracle", "oracle table"}


def test_bounds_of_another_shape_are_a_disagreement() -> None:
    one = np.zeros((2, 3), np.uint32)
    assert votes.between("rows", one.ravel(), one, one) == "rows has the shape (6,), need (2, 3)"
    said = votes.between("rows", one + np.uint32(3), one, one + np.uint32(2))
    assert said == (
        "6 of 6 elements are outside their set, first at (0, 0): rows: got 0x00000003, need 0x00000000 to 0x00000002"
    )
