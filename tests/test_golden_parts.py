"""Tests of the parts of `conformance.fixtures.golden`: the judge, the votes, the diff, the source hash, the log."""

from __future__ import annotations

import ast
import hashlib
import itertools
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from conformance.fixtures import envelope
from conformance.fixtures.emulation import BF16, FP32, decode, encode, round_to
from conformance.fixtures.golden import adversarial, chain, contents, diff, heads, rotary, sets, source, store, votes
from conformance.fixtures.golden.digests import Case
from conformance.fixtures.streams import Stream

# --- The judge of arrays against the judge of the envelope ------------------------------------------------------------

QK = tuple(contents.CASES["qk_norm_rope"])
SMALL = tuple(id for id in QK if "shape" not in id or "tp8" in id or "~neox" in id)


def envelope_ok(case: Case, out: np.ndarray) -> bool:
    return votes.by_envelope(case, {"out": out}) == ""


def file_ok(case: Case, out: np.ndarray) -> np.ndarray:
    return sets.judge(case, out).ok


def outcomes(case: Case, draw: np.random.Generator) -> np.ndarray:
    """One listed outcome of each unit at random, whatever inv it asks for."""
    choices = sets._Choices(case)
    out = case["out"].copy()
    flat = out.reshape(-1, out.shape[2])
    for start, count in zip(choices.starts, np.diff(choices.starts, append=choices.head.size), strict=True):
        row = int(start + draw.integers(count))
        flat[choices.head[row], choices.second[row]] = choices.bits[row, 1]
        flat[choices.head[row], choices.first[row]] = choices.bits[row, 0]
    return out


def of_one_inv(case: Case, inv: np.ndarray) -> np.ndarray:
    """The first listed outcome of each unit that ``inv [heads]`` permits."""
    choices = sets._Choices(case)
    out = case["out"].copy()
    flat = out.reshape(-1, out.shape[2])
    fits = (choices.inv[:, 0] <= inv[choices.head]) & (inv[choices.head] <= choices.inv[:, 1])
    for row in np.nonzero(fits)[0][::-1]:
        flat[choices.head[row], choices.first[row]] = choices.bits[row, 0]
        flat[choices.head[row], choices.second[row]] = choices.bits[row, 1]
    return out


@pytest.mark.parametrize("id", SMALL)
def test_the_two_judges_agree(id: str) -> None:
    """On outcomes of one inv both accept; on mixtures, neighbours and other signs both say the same of every call."""
    case, draw = contents.build("qk_norm_rope", id), np.random.default_rng(5)
    assert file_ok(case, case["out"]).all() == envelope_ok(case, case["out"])
    for share in (0.0, 0.3, 1.0):
        inv = case["inv"][:, 0] * (1 - share) + case["inv"][:, 1] * share
        one = of_one_inv(case, inv)
        assert file_ok(case, one).all()
        assert envelope_ok(case, one)
    for _ in range(6):
        mixed = outcomes(case, draw)
        assert file_ok(case, mixed).all() == envelope_ok(case, mixed)
    for flip in (1, 2, 0x8000, 0x7FFF):
        wrong = case["out"].copy()
        at = tuple(int(draw.integers(size)) for size in wrong.shape)
        wrong[at] ^= flip
        assert file_ok(case, wrong).all() == envelope_ok(case, wrong)


def test_a_mixture_that_no_inv_explains_is_rejected() -> None:
    case = contents.build("qk_norm_rope", "one-inv-for-the-whole-head")
    rejected = [not file_ok(case, outcomes(case, np.random.default_rng(seed))).all() for seed in range(8)]
    assert all(rejected)
    verdict = sets.judge(case, outcomes(case, np.random.default_rng(0)))
    at = tuple(int(i) for i in np.argwhere(~verdict.ok)[0])
    assert "with one inv" in verdict.explain(at)


TIE, LOW, HIGH = 1 + 2.0**-8, 1.0, 1 + 2.0**-7


def heads_of(*weights: np.ndarray) -> Case:
    """Heads of ones, of which four elements are rotated by (1, 1/2); a weight is y before its rounding."""
    count = len(weights)
    inputs: Case = {
        "x": np.full((1, count, 6), 0x3F80, np.uint16),
        "columns": np.ones(count, np.int64),
        "weights": np.asarray(encode(FP32, np.stack(weights)), np.uint32),
        "eps": np.full(count, 1e-24),
        "positions": np.array([0]),
        "table": np.array([[1.0, 1.0, 0.5, 0.5]], np.float32).view(np.uint32),
        "settings": np.array([1, 1, 1]),
    }
    return {**inputs, **sets.admissible(inputs)}


@pytest.mark.parametrize(("steps", "one_inv_exists"), [(1, True), (2, False), (9, False)])
@pytest.mark.parametrize(("above", "below"), [(4, 5), (5, 4), (0, 5), (4, 3), (0, 1), (2, 0)])
def test_two_choices_of_a_head_need_one_inv(above: int, below: int, steps: int, one_inv_exists: bool) -> None:
    """As in test_envelope_members.py: a tie is exceeded by one y and missed by another."""
    weight = np.full(6, 1.25)
    weight[above], weight[below] = TIE + steps * 2.0**-23, TIE - steps * 2.0**-23
    case = heads_of(weight)
    for first, second in itertools.product((LOW, HIGH), repeat=2):
        y = weight.copy()
        y[above], y[below] = first, second
        o1, o2 = y[:2] - y[2:4] / 2, y[2:4] + y[:2] / 2
        out = np.asarray(encode(BF16, round_to(BF16, np.concatenate([o1, o2, y[4:]]))), np.uint16)
        verdict = sets.judge(case, out.reshape(1, 1, 6))
        accepted = one_inv_exists or (first, second) != (LOW, HIGH)
        assert np.nonzero(~verdict.ok[0, 0])[0].tolist() == ([] if accepted else sorted((above, below)))
        assert np.nonzero(~verdict.single[0, 0])[0].tolist() == sorted((above, below))


def accepted_with(inv: tuple[float, float], y: tuple[float, float]) -> bool:
    """Whether a head with two ties in its last elements may have ``y`` there, where inv lies in this range."""
    weight = np.array([1.25, 1.25, 1.25, 1.25, TIE, TIE])
    case = heads_of(weight)
    out = case["out"].copy()
    out[0, 0, 4:] = encode(BF16, np.array(y))
    return bool(sets.judge({**case, "inv": np.array([inv])}, out).ok.all())


def test_the_permitted_range_of_inv_is_the_file_s() -> None:
    assert all(accepted_with((0.9, 1.1), y) for y in itertools.product((LOW, HIGH), repeat=2))
    assert [accepted_with((0.5, 0.6), y) for y in ((LOW, LOW), (HIGH, HIGH), (LOW, HIGH))] == [True, False, False]
    assert [accepted_with((2.0, 3.0), y) for y in ((LOW, LOW), (HIGH, HIGH), (LOW, HIGH))] == [False, True, False]


def test_the_ends_of_a_range_of_inv_belong_to_it() -> None:
    case = heads_of(np.array([1.25, 1.25, 1.25, 1.25, TIE, TIE]))
    asked = {int(bits[2]): inv for bits, inv in zip(case["choice.bits"], case["choice.inv"], strict=True)}
    most, least = float(asked[0x3F80][1]), float(asked[0x3F81][0])
    assert least < 1 < most
    for inv, y in ((1.0, LOW), (1.0, HIGH), (most, LOW), (least, HIGH)):
        assert accepted_with((inv, inv), (y, y))
    beyond = {LOW: float(np.nextafter(most, 2)), HIGH: float(np.nextafter(least, 0))}
    assert not any(accepted_with((inv, inv), (y, y)) for y, inv in beyond.items())


def test_live_tokens_are_those_in_the_table_or_those_that_are_written() -> None:
    case: Case = {"positions": np.array([-1, 0, 6, 7, 8]), "settings": np.array([7, 1, 1])}
    assert sets.live(case).tolist() == [False, True, True, False, False]
    assert sets.live({**case, "fate": np.array([0, 1, 2, 0, 4])}).tolist() == [True, False, False, True, False]


def test_an_explanation_lists_the_pairs_of_its_unit_alone() -> None:
    case = heads_of(np.array([TIE, 1.25, 0.25, 1.25, TIE, 1.25]))
    verdict = sets.judge(case, case["out"])
    pairs = "(('0.875 (0x3f60)', '0.75 (0x3f40)'), ('0.882812 (0x3f62)', '0.753906 (0x3f41)'))"
    want = f"got 0.875 (0x3f60), the file has 0.875 (0x3f60), one of the pairs (o1, o2) in [{pairs[1:-1]}] with one inv"
    assert verdict.explain((0, 0, 0)) == want
    assert verdict.explain((0, 0, 2)) == want.replace("got 0.875 (0x3f60), the file has 0.875 (0x3f60)",
                                                      "got 0.75 (0x3f40), the file has 0.75 (0x3f40)")  # fmt: skip
    alone = "(('1 (0x3f80)', '1 (0x3f80)'), ('1.00781 (0x3f81)', '1.00781 (0x3f81)'))"
    assert verdict.explain((0, 0, 4)).endswith(f"one of the pairs (o1, o2) in [{alone[1:-1]}] with one inv")
    assert verdict.explain((0, 0, 5)) == "got 1.25 (0x3fa0), the file has 1.25 (0x3fa0)"


def test_heads_are_explained_and_judged_apart() -> None:
    tie, plain = np.array([1.25, 1.25, 1.25, 1.25, TIE, 1.25]), np.full(6, 1.25)
    split = np.array([1.25, 1.25, 1.25, 1.25, TIE + 9 * 2.0**-23, TIE - 9 * 2.0**-23])
    case = heads_of(plain, tie, split)
    out = case["out"].copy()
    out[0, 2, 4:] = encode(BF16, np.array([LOW, HIGH]))
    verdict = sets.judge(case, out)
    assert np.argwhere(~verdict.ok).tolist() == [[0, 2, 4], [0, 2, 5]]
    out[0, 2, 0] ^= 1  # where an element is wrong by itself, no inv is looked for
    assert np.argwhere(~sets.judge(case, out).ok).tolist() == [[0, 2, 0]]
    assert "one of the pairs" in verdict.explain((0, 1, 4))
    assert verdict.explain((0, 0, 4)) == "got 1.25 (0x3fa0), the file has 1.25 (0x3fa0)"


def test_a_case_whose_sums_depend_on_their_order_is_refused() -> None:
    case = heads_of(np.full(6, 1.25))
    case["x"][0, 0, :3] = encode(BF16, np.array([2.0**14, 1.0, 2.0**-13]))
    with pytest.raises(ValueError, match="coarser grid"):
        sets.admissible(case)


def test_where_outcomes_are_listed_no_other_one_passes() -> None:
    weight = np.array([TIE, 1.25, 0.25, 1.25, TIE, 1.25])
    case = heads_of(weight)
    rows = []
    for y in (LOW, HIGH):
        out = case["out"].copy()
        out[0, 0, [0, 2, 4]] = encode(BF16, np.array([y - 0.125, 0.25 + y / 2, y]))
        rows.append(out)
        assert sets.judge(case, out).ok.all()
    assert (rows[0] != rows[1])[0, 0].tolist() == [True, False, True, False, True, False]
    for element, partner in ((0, [0, 2]), (2, [0, 2]), (4, [4])):
        mixed = rows[0].copy()
        mixed[0, 0, element] = rows[1][0, 0, element]
        expected = [] if element == 4 else partner
        assert np.nonzero(~sets.judge(case, mixed).ok[0, 0])[0].tolist() == expected
        wrong = rows[0].copy()
        wrong[0, 0, element] -= 1
        assert np.nonzero(~sets.judge(case, wrong).ok[0, 0])[0].tolist() == partner


def test_each_head_may_have_an_inv_of_its_own() -> None:
    more, less = (np.array([1.25] * 4 + [TIE + steps * 2.0**-23] * 2) for steps in (9, -9))
    case = heads_of(more, less)
    out = case["out"].copy()
    out[0, 0, 4:], out[0, 1, 4:] = encode(BF16, np.array([LOW])), encode(BF16, np.array([HIGH]))
    assert sets.judge(case, out).ok.all()


@pytest.mark.parametrize("id", ["shape/inkling-draft-tp8", "contraction-decides", "eps-decides"])
def test_a_neighbour_is_rejected_wherever_one_value_is_admissible(id: str) -> None:
    case = contents.build("qk_norm_rope", id)
    for step in (1, -1):
        out = (case["out"].astype(np.int32) + step).astype(np.uint16)
        verdict = sets.judge(case, out)
        listed = np.zeros(out.shape, np.bool_).reshape(-1, out.shape[2])
        choices = sets._Choices(case)
        listed[choices.head, choices.first] = listed[choices.head, choices.second] = True
        assert not verdict.ok[~listed.reshape(out.shape)].any()


def test_nans_are_one_class_and_zeros_are_not() -> None:
    case = contents.build("qk_norm_rope", "eps-zero-with-a-zero-row-is-nan")
    other = case["out"].copy()
    nan = (other & 0x7FFF) > 0x7F80
    assert nan.any()
    other[nan] = 0xFFFF
    assert sets.judge(case, other).ok.all()
    for infinity in (0x7F80, 0xFF80):
        other[nan] = infinity
        assert not sets.judge(case, other).ok[nan].any()
    zeros = contents.build("qk_norm_rope", "zeros-keep-their-signs")
    flipped = np.where(zeros["out"] & 0x7FFF == 0, zeros["out"] ^ 0x8000, zeros["out"]).astype(np.uint16)
    assert not sets.judge(zeros, flipped).ok[zeros["out"] & 0x7FFF == 0].any()


def test_contraction_decides_where_the_title_says_so() -> None:
    case = contents.build("qk_norm_rope", "contraction-decides")
    assert case["choice.unit"].size > 200


def test_every_contraction_of_both_outputs_is_listed() -> None:
    case = contents.build("qk_norm_rope", "contraction-decides")
    first, second = sets.pairs(case)
    y, angle = decode(BF16, case["y"]), decode(FP32, case["table"])[:, None]
    cos, sin = (np.broadcast_to(part, y[..., first].shape) for part in np.split(angle, 2, axis=2))
    outputs = envelope.permitted(y[..., first], y[..., second], cos, sin, BF16)
    differs = [np.count_nonzero(one != other) for o in outputs for one, other in itertools.combinations(o, 2)]
    assert min(differs) > 0
    for o1, o2 in itertools.product(*outputs):
        out = case["out"].copy()
        out[..., first], out[..., second] = encode(BF16, o1), encode(BF16, o2)
        assert sets.judge(case, out).ok.all()


def test_a_sum_that_depends_on_its_order_is_refused() -> None:
    row = np.array([[2.0**14, 1.0, 2.0**-13]])
    with pytest.raises(ValueError, match="coarser grid"):
        sets.require_order_free(row)
    with pytest.raises(ValueError, match="coarser grid"):
        sets.require_order_free(np.array([[2.0**24, 1 + 2.0**-7]]))
    powers = [2.0**26, *(2.0**k for k in range(25, 0, -1) for _ in range(3)), 1.0, 1.0, 1.0]
    sets.require_order_free(np.array([powers]))  # 2^53 - 1
    with pytest.raises(ValueError, match="coarser grid"):
        sets.require_order_free(np.array([[*powers, 1.0]]))
    sets.require_order_free(np.array([[2.0**14, 1.0, 2.0**-12], [np.nan, np.inf, 0.0], [0.0, 0.0, 0.0]]))


def test_a_case_that_leaves_too_much_open_is_refused() -> None:
    rows = adversarial.every_y_on_a_tie(Stream("rows"))
    heads.require_share("rows", rows, np.zeros(4, np.bool_))
    with pytest.raises(ValueError, match=r"rows: 75\.0000% of y has one admissible value, the case declares 96"):
        heads.require_share("rows", replace(rows, single_share=0.96), np.array([1, 1, 1, 0], np.bool_))


# --- Tables -----------------------------------------------------------------------------------------------------------


def test_a_value_that_the_library_could_decide_is_refused() -> None:
    tie = np.array([1 + 2.0**-24])
    with pytest.raises(ValueError, match="rounding boundary"):
        rotary.settled(rotary.nearest, tie)
    assert rotary.settled(rotary.nearest, np.array([1 + 2.0**-25])) == 1


def test_bounds_are_the_neighbours_of_the_exact_value() -> None:
    exact = np.array([1.0, 0.0, -1.5, 1 / 3])
    third = np.float32(1 / 3)
    assert rotary.below(exact).tolist() == [1 - 2.0**-24, 0, -1.5 - 2.0**-23, float(np.nextafter(third, np.float32(0)))]
    assert rotary.above(exact).tolist() == [1 + 2.0**-23, 0, -1.5 + 2.0**-23, float(third)]
    assert not np.signbit(rotary.above(exact)[1])


# --- Votes ------------------------------------------------------------------------------------------------------------

FOUR = ("golden", "oracle", "eager", "fused")


def pairs(*groups: str) -> dict[frozenset[str], str]:
    """Every two voters of different ``groups`` disagree."""
    members = [group.split() for group in groups]
    return {frozenset((a, b)): "so" for one, other in combinations(members, 2) for a in one for b in other}


@pytest.mark.parametrize(
    ("found", "says"),
    [
        ({}, "all agree"),
        (pairs("fused", "golden oracle eager"), "fused is odd: golden, oracle and eager agree"),
        (pairs("golden", "fused oracle eager"), "golden is odd: oracle, eager and fused agree"),
        (pairs("oracle", "golden fused eager"), "oracle is odd: golden, eager and fused agree"),
        (pairs("golden", "oracle"), "golden or oracle is odd: they differ, and eager and fused agree with both"),
        (pairs("golden oracle", "eager fused"), "golden and oracle agree, and eager and fused against them"),
        (pairs("golden eager", "oracle fused"), "golden and eager agree, and oracle and fused against them"),
        (pairs("golden oracle", "eager", "fused"), "no majority"),
        (pairs(*FOUR), "no majority"),
    ],
)
def test_the_odd_one_is_named(found: dict[frozenset[str], str], says: str) -> None:
    assert votes.sentence(FOUR, found).split(" (")[0] == says


def test_one_that_agrees_with_both_is_named_alone() -> None:
    said = votes.sentence(("golden", "oracle", "table"), {frozenset(("golden", "oracle")): "so"})
    assert said == "golden or oracle is odd: they differ, and table agree with both (golden and oracle: so)"


def test_arrays_differ_in_any_bit_shape_or_dtype() -> None:
    one = {"a": np.array([0.0, 1.0]), "b": np.array([1, 2], np.int32)}
    assert votes.same(one, {name: values.copy() for name, values in one.items()}) == ""
    assert "first at (0,): 0.0 and -0.0" in votes.same(one, {**one, "a": np.array([-0.0, 1.0])})
    assert "int32(2,) and int64(2,)" in votes.same(one, {**one, "b": np.array([1, 2])})
    assert votes.same(one, {"a": one["a"]}) == "only one has b"


def test_bounds_hold_both_ends_and_nothing_beyond() -> None:
    low, high = (np.array([value], np.float32).view(np.uint32) for value in (-0.0, 1.0))
    for value, inside in ((-0.0, True), (0.0, True), (1.0, True), (0.5, True), (-1e-45, False), (1.0000001, False)):
        got = np.array([value], np.float32).view(np.uint32)
        assert (votes.between("rows", got, low, high) == "") is inside
    assert votes.between("rows", np.array([0x7FC00000], np.uint32), low, high) != ""


# --- The diff ---------------------------------------------------------------------------------------------------------


def told(old: Case, new: Case) -> list[str]:
    return [str(step) for step in diff.changes(old, new)]


def test_the_diff_counts_elements_ulps_and_signs_per_step() -> None:
    old = contents.build("qk_norm_rope", "shape/partial-rope~eps~rope_theta~neox")
    new = {name: values.copy() for name, values in old.items()}
    assert told(old, new) == []
    new["y"][0, 0, :3] += np.uint16(2)
    new["out"][0, 0, 1] += np.uint16(5)
    new["out"][1, 2, 33] ^= np.uint16(0x8000)
    new["out"][0, 0, 127] += np.uint16(1)
    far = 2 * int(old["out"][1, 2, 33] & 0x7FFF) + 1
    assert told(old, new) == [
        "norm y: 3 of 2,560, at most 2 ulps, 0 sign flips",
        "rotation o1: 1 of 640, at most 5 ulps, 0 sign flips",
        f"rotation o2: 1 of 640, at most {far:,} ulps, 1 sign flip",
        "not rotated: 1 of 1,280, at most 1 ulp, 0 sign flips",
    ]
    new["out"][0, 0, 1] = 0x7FC0
    assert "at most 0 ulps, 0 sign flips, 1 to or from NaN" in told(old, new)[1]
    new["out"][0, 0, 1], new["inv"] = old["out"][0, 0, 1], new["inv"] * 1.5
    new["choice.unit"] = new["choice.unit"] + np.int32(1)
    assert told(old, new)[-2:] == ["units with a choice: 2 of 2", "ranges of inv: 20 of 20"]


def test_the_diff_names_inputs_counts_rows_and_copies() -> None:
    old = contents.build("kv_write", "rows-out-of-range-are-faults")
    new = {name: values.copy() for name, values in old.items()}
    new["locs"] += 1
    new["fate"][2] = 1
    new["values.sha256"][0, 5] ^= np.uint8(1)
    assert told(old, new) == ["inputs: 1 of 11", "rows written: 1 of 8", "V copy: 1 of 1"]
    old, new = contents.build("accept", "window/W4"), contents.build("accept", "window/W4")
    new["correct"] = new["correct"] + np.int32(1)
    assert told(old, new) == ["correct counts: 9 of 9"]
    old, new = (contents.build("state_scatter", "track-wins") for _ in range(2))
    new["state1.slots.sha256"] = new["state1.slots.sha256"] ^ np.uint8(1)
    assert told(old, new) == ["slots of state1: 7 of 7"]


def test_the_summary_lists_what_came_and_went_and_stays_short() -> None:
    case = contents.build("accept", "window/W4")
    moved = {**case, "bonus": case["bonus"] + 1}
    many = {f"case{i}": case for i in range(30)}
    assert diff.summary(many, many) == diff.Summary(["0 of 30 cases changed, 0 added, 0 removed"], [])
    found = diff.summary(many, {**dict.fromkeys(many, moved), "another": case})
    assert found.totals == [
        "30 of 31 cases changed, 1 added, 0 removed",
        "added another",
        "bonus tokens: 270 of 270 (in 30 cases)",
    ]
    assert found.cases == [*(f"case{i}: bonus tokens: 9 of 9" for i in range(8)), "and 22 cases more"]
    assert diff.summary(None, many).totals == ["30 cases, and no readable file before them"]


def test_the_summary_adds_steps_up_in_the_order_of_the_contract() -> None:
    old = contents.build("qk_norm_rope", "eps-decides")
    one, two = ({name: values.copy() for name, values in old.items()} for _ in range(2))
    one["out"][0, 0, 40] += np.uint16(3)
    two["y"][0, 0, :2] += np.uint16(1)
    two["out"][0, 0, 41] += np.uint16(1)
    assert diff.summary({"a": old, "b": old}, {"a": one, "b": two}).totals[1:] == [
        "norm y: 2 of 512, at most 1 ulp, 0 sign flips (in 1 case)",
        "rotation o2: 2 of 512, at most 3 ulps, 0 sign flips (in 2 cases)",
    ]


# --- The source hash --------------------------------------------------------------------------------------------------

SOURCE = '''"""Module."""
import math
X = 1
def f(a, b=2):
    """Docstring."""
    # comment
    return a + b  # more
'''
SAME = (
    SOURCE.replace("# comment", "# other comment"),
    SOURCE.replace("Docstring.", "Another docstring."),
    SOURCE.replace('    """Docstring."""\n', ""),
    SOURCE.replace("a + b", "(a  +\n        b)"),
    SOURCE.replace("X = 1", "X = 0x1\n'a string that nothing reads'"),
)
OTHER = (
    SOURCE.replace("a + b", "b + a"),
    SOURCE.replace("X = 1", "X = 1.0"),
    SOURCE.replace("X = 1", "X = True"),
    SOURCE.replace("b=2", "b=None"),
    SOURCE.replace("return a + b", "return"),
    SOURCE.replace("return a + b", "return None"),
    SOURCE.replace("def f(a, b=2)", "def f(a, *, b=2)"),
)


def meaning(text: str) -> str:
    return repr(source.canonical(ast.parse(text)))


def test_only_what_runs_is_hashed() -> None:
    assert {meaning(text) for text in SAME} == {meaning(SOURCE)}
    assert len({meaning(text) for text in (SOURCE, *OTHER)}) == 1 + len(OTHER)


def test_a_statement_that_is_no_string_is_hashed() -> None:
    assert len({meaning(text) for text in ("x = 1", "x = 1\n...", "x = 1\n5", "x = 1\nNone")}) == 4


def test_modules_are_found_by_every_way_to_import_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "FIXTURES", tmp_path)
    (tmp_path / "folder").mkdir()
    texts = {
        "importing_a": "import json\nfrom . import importing_b\nfrom .folder import inner, other\n",
        "importing_b": "from .folder.deep import thing\n",
        "folder/inner": "def f():\n    from ..importing_c import thing\n",
        "folder/other": "from . import deep\n",
        "folder/deep": "",
        "importing_c": "",
    }
    for name, text in texts.items():
        (tmp_path / f"{name}.py").write_text(text)
    assert source.imports("importing_a") == ("importing_b", "folder.inner", "folder.other")
    assert source.imports("folder.inner") == ("importing_c",)
    assert source.imports("folder.other") == ("folder.deep",)
    hashes = source.closure(["importing_a"])
    assert list(hashes) == sorted(name.replace("/", ".") for name in texts)
    assert hashes["folder.deep"] == hashes["importing_c"] != hashes["importing_a"]
    renamed = {**hashes, "importing_d": hashes["importing_c"]}
    del renamed["importing_c"]
    assert len({source.combined(modules) for modules in (hashes, renamed, {})}) == 3


def test_every_module_that_an_oracle_rests_on_is_hashed() -> None:
    shared = {"emulation", "envelope", "streams", "shapes", "oracles.rotary", "golden.sets", "golden.adversarial"}
    for op in ("kv_write", "qk_norm_rope"):
        assert shared | {f"oracles.{op}", f"golden.{op}"} <= set(contents.sources(op))
    for op in contents.CASES:
        found = contents.sources(op)
        assert {f"oracles.{op}", f"golden.{op}", "streams"} <= set(found)
        assert not set(found) & {"guard", "ledger", "golden.product", "golden.votes", "golden.store"}


def test_an_import_that_cannot_be_followed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "FIXTURES", tmp_path)
    (tmp_path / "lost.py").write_text("from .nowhere import thing\n")
    (tmp_path / "outside.py").write_text("from ..conftest import thing\n")
    with pytest.raises(ValueError, match=r"lost: cannot tell which file nowhere\.thing is"):
        source.imports("lost")
    with pytest.raises(ValueError, match="outside: imports from outside the fixtures"):
        source.imports("outside")


# --- Files ------------------------------------------------------------------------------------------------------------


def test_the_payload_is_a_safetensors_file_whose_bytes_do_not_depend_on_the_order_of_cases() -> None:
    case = {"b": np.arange(3, dtype=np.uint8), "a": np.array([[1.5, -0.0]]), "none": np.zeros((0, 4), np.uint16)}
    made = {"x/y": case, "w": {"c": np.array([7], np.int32)}}
    raw = store.payload_bytes(made)
    assert raw == store.payload_bytes({"w": made["w"], "x/y": dict(reversed(case.items()))})
    tensors = safetensors.numpy.load(raw)
    assert sorted(tensors) == ["w/c", "x/y/a", "x/y/b", "x/y/none"]
    assert tensors["x/y/a"].tobytes() == case["a"].tobytes()
    assert votes.same(store.read_payload(raw)["x/y"], case) == ""
    length = int.from_bytes(raw[:8], "little")
    assert length % 8 == 0
    assert b"__metadata__" not in raw[:length]


def test_a_dtype_that_golden_files_do_not_use_is_refused() -> None:
    with pytest.raises(KeyError):
        store.payload_bytes({"a": {"b": np.zeros(2, np.float32)}})


@pytest.fixture
def log(tmp_path: Path) -> Path:
    chain.append(tmp_path, "2026-01-02", "accept", "First.", [f"payload: none -> {'a' * 64}", "more"])
    chain.append(tmp_path, "2026-01-03", "rotary", "Else.", [f"payload: none -> {'c' * 64}"])
    chain.append(tmp_path, "2026-01-04", "accept", "Hash.", [f"payload: unchanged {'a' * 64}"])
    chain.append(tmp_path, "2026-01-05", "accept", "Second.", [f"payload: {'a' * 64} -> {'b' * 64}"])
    return tmp_path


def test_the_log_is_a_chain(log: Path) -> None:
    assert chain.last(log, "accept") == chain.Link("accept", "Second.", "a" * 64, "b" * 64)
    assert chain.last(log, "rotary") == chain.Link("rotary", "Else.", None, "c" * 64)
    assert chain.last(log, "kv_write") is None
    assert chain.broken(log, "accept") == []
    text = (log / chain.NAME).read_text()
    assert text.startswith(chain.TITLE)
    (log / chain.NAME).write_text(text.replace(f"{'a' * 64} -> {'b' * 64}", f"{'d' * 64} -> {'b' * 64}"))
    assert chain.broken(log, "accept") == [
        "the log says that bbbbbbbbbbbb replaced dddddddddddd, but the payload before it was aaaaaaaaaaaa"
    ]


def test_streams_of_cases_are_named_after_them() -> None:
    assert contents.key("accept", "window/W8") == "golden/accept/window/W8"
    digest = hashlib.sha256(contents.build("accept", "window/W8")["bonus"].tobytes()).hexdigest()
    described = store.described(store.load("accept")["window/W8"]["bonus"])
    assert described == {"dtype": "I64", "shape": [17], "sha256": digest}


def test_bits_of_members_have_one_nan() -> None:
    values = decode(BF16, np.array([0x7FFF, 0xFFC1, 0x3F80], np.uint16))
    assert encode(BF16, values).tolist() == [0x7FC0, 0x7FC0, 0x3F80]
