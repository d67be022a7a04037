"""Tests of the parts of `conformance.fixtures.golden`: the judge, the votes, the diff, the source hash, the log."""

from __future__ import annotations

import ast
import hashlib
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from conformance.fixtures.emulation import BF16, decode, encode
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
    zeros = contents.build("qk_norm_rope", "zeros-keep-their-signs")
    flipped = np.where(zeros["out"] & 0x7FFF == 0, zeros["out"] ^ 0x8000, zeros["out"]).astype(np.uint16)
    assert not sets.judge(zeros, flipped).ok[zeros["out"] & 0x7FFF == 0].any()


def test_contraction_decides_where_the_title_says_so() -> None:
    case = contents.build("qk_norm_rope", "contraction-decides")
    assert case["choice.unit"].size > 200


def test_a_sum_that_depends_on_its_order_is_refused() -> None:
    row = np.array([[2.0**14, 1.0, 2.0**-13]])
    with pytest.raises(ValueError, match="coarser grid"):
        sets.require_order_free(row)
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
