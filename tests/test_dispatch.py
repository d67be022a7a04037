"""Tests of :mod:`dspark.dispatch`, on operations that exist only here.

The facts of a call are the set of check ids that it violates, so that every combination can be written down.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dspark import dispatch
from dspark.dispatch import CensusKey, Check, FallbackError, Mode, choose, decide, forced, observed

Facts = frozenset[str]
Declare = Callable[..., str]

NOTHING: Facts = frozenset()


def check(id: str, *after: str, path: dispatch.Path = dispatch.Path.FUSED) -> Check:
    """A check that the facts violate by naming it; the value that it looked at names it too."""
    return Check(id, f"put {id} right", lambda facts: (id not in facts, f"{id}-value"), after, path)


@pytest.fixture
def declare(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Declare]:
    """Registers checks under a name of this test's own; afterwards nothing of it is left."""
    monkeypatch.setattr(dispatch, "_registry", dict(dispatch._registry))
    monkeypatch.setattr(dispatch, "_mode", Mode.AUTO)
    monkeypatch.setattr(dispatch, "_census", Counter())
    monkeypatch.setattr(dispatch, "_warned", set())
    yield lambda *checks: dispatch.register(request.node.name, checks)
    decide.cache_clear()


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "dspark"]


def in_threads(count: int, work: Callable[[], None]) -> None:
    """Run ``work`` in ``count`` threads that start together; what one of them raises is raised here."""
    start = threading.Barrier(count)
    errors: list[BaseException] = []

    def run() -> None:
        try:
            start.wait()
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


# --- register ---------------------------------------------------------------------------------------------------------


def test_a_registered_operation_is_in_the_registry_with_its_checks_in_order(declare: Declare) -> None:
    checks = (check("second-letter"), check("a1"), check("late", "a1"))
    op = declare(*checks)
    assert dispatch.registry()[op] == checks
    with pytest.raises(TypeError):
        dispatch.registry()[op] = ()  # type: ignore[index]


@pytest.mark.parametrize(
    ("checks", "message"),
    [
        pytest.param((check("Width"),), "'Width'", id="capital"),
        pytest.param((check("verify_width"),), "'verify_width'", id="underscore"),
        pytest.param((check("width-"),), "'width-'", id="hyphen-at-the-end"),
        pytest.param((check("a--b"),), "'a--b'", id="two-hyphens"),
        pytest.param((check("width\n"),), r"'width\\n'", id="newline"),
        pytest.param((check(""),), "''", id="nothing"),
        pytest.param((check("same"), check("same")), "'same'", id="id-twice"),
        pytest.param((check(dispatch.ELIGIBLE),), "'eligible'", id="census-reason-of-a-fused-call"),
        pytest.param((check(dispatch.REQUESTED),), "'requested'", id="census-reason-of-a-requested-call"),
        pytest.param((Check("mute", " \n", check("x").holds),), "'mute' must say", id="blank-sentence"),
        pytest.param((check("first", "ghost"),), r"'first' comes after \['ghost'\]", id="after-an-unknown-check"),
        pytest.param((check("one", "two"), check("two")), r"'one' comes after \['two'\]", id="after-a-later-check"),
        pytest.param((check("own", "own"),), r"'own' comes after \['own'\]", id="after-itself"),
    ],
)
def test_bad_checks_are_refused_and_leave_nothing(declare: Declare, checks: tuple[Check, ...], message: str) -> None:
    before = dict(dispatch.registry())
    with pytest.raises(ValueError, match=message):
        declare(*checks)
    assert dict(dispatch.registry()) == before


def test_an_operation_is_registered_once(declare: Declare) -> None:
    op = declare(check("first"))
    with pytest.raises(ValueError, match="registered twice"):
        declare(check("other"))
    assert [known.id for known in dispatch.registry()[op]] == ["first"]


# --- decide -----------------------------------------------------------------------------------------------------------


def test_a_decision_carries_every_failing_check_with_its_value(declare: Declare) -> None:
    op = declare(check("a"), check("b"), check("c"))
    decision = decide(op, frozenset({"c", "a"}))
    assert (decision.op, decision.path, decision.reasons) == (op, dispatch.Path.EAGER, ("a", "c"))
    assert [failure.value for failure in decision.failed] == ["a-value", "c-value"]
    assert str(decision.failed[0]) == "a (got 'a-value'): put a right"


def test_a_decision_without_failures_is_fused(declare: Declare) -> None:
    decision = decide(declare(check("a")), NOTHING)
    assert (decision.path, decision.failed) == (dispatch.Path.FUSED, ())


def test_what_comes_after_a_failed_check_is_not_evaluated_however_far(declare: Declare) -> None:
    evaluated: list[str] = []

    def logged(id: str, *after: str) -> Check:
        plain = check(id, *after)
        return Check(id, plain.requires, lambda facts: (evaluated.append(id), plain.holds(facts))[1], after)

    op = declare(logged("a"), logged("b", "a"), logged("c", "b"), logged("d", "a", "b"), logged("f"))
    assert decide(op, frozenset("abcdf")).reasons == ("a", "f")
    assert evaluated == ["a", "f"]
    evaluated.clear()
    assert decide(op, frozenset("bcd")).reasons == ("b",)
    assert evaluated == ["a", "b", "f"]
    evaluated.clear()
    assert decide(op, frozenset("cd")).reasons == ("c", "d")
    assert evaluated == ["a", "b", "c", "d", "f"]


def test_a_decision_is_made_once_per_operation_and_facts(declare: Declare) -> None:
    calls: Counter[Facts] = Counter()

    def holds(facts: Facts) -> tuple[bool, str]:
        calls[facts] += 1
        return not facts, "looked"

    op = declare(Check("counted", "put it right", holds))
    first = decide(op, frozenset({"x"}))
    assert all(decide(op, frozenset({"x"})) is first for _ in range(10))
    assert decide(op, NOTHING).path is dispatch.Path.FUSED
    assert calls == {frozenset({"x"}): 1, NOTHING: 1}


def test_deciding_counts_and_warns_nothing(declare: Declare, caplog: pytest.LogCaptureFixture) -> None:
    op = declare(check("a"))
    with observed() as outcomes, forced("fused"):
        decide(op, frozenset("a"))
    assert (dispatch.census(), outcomes, warnings_of(caplog)) == ({}, [], [])


# --- choose: who is asked ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("environment", Mode)
@pytest.mark.parametrize("block", [None, *Mode])
@pytest.mark.parametrize("argument", [None, *Mode])
def test_the_argument_beats_the_block_beats_the_environment(
    declare: Declare, monkeypatch: pytest.MonkeyPatch, argument: str | None, block: str | None, environment: Mode
) -> None:
    op = declare(check("a"))
    monkeypatch.setattr(dispatch, "_mode", environment)
    asked = argument or block or environment

    def choices() -> tuple[str, str]:
        eligible = str(choose(op, NOTHING, argument))
        try:
            return eligible, str(choose(op, frozenset("a"), argument))
        except FallbackError:
            return eligible, "refused"

    if block is None:
        found = choices()
    else:
        with forced(block):
            found = choices()
    assert found == {"auto": ("fused", "eager"), "fused": ("fused", "refused"), "eager": ("eager", "eager")}[asked]


@pytest.mark.parametrize("value", ["quick", "", "FUSED", " auto"])
def test_unknown_values_are_refused_at_once(declare: Declare, value: str) -> None:
    op = declare(check("a"))
    with pytest.raises(ValueError, match=rf"path: got {value!r}, need one of auto, fused, eager"):
        choose(op, NOTHING, value)
    with pytest.raises(ValueError, match=rf"forced: got {value!r}, need one of auto, fused, eager"), forced(value):
        pytest.fail("the block was entered")
    assert dispatch.census() == {}


IMPORT_WITH = """
import json, os, sys
answers = {}
for value in json.loads(sys.argv[1]):
    os.environ["DSPARK_DISPATCH"] = value
    for name in [name for name in sys.modules if name.split(".")[0] == "dspark"]:
        del sys.modules[name]
    try:
        import dspark
        import dspark.dispatch
        op = dspark.dispatch.register("op", (dspark.dispatch.Check("a", "sentence", lambda facts: (True, None)),))
        answers[value] = dspark.dispatch.choose(op, 0)
    except ValueError as error:
        answers[value] = f"{'import dspark' if 'dspark' not in sys.modules else 'later'}: {error}"
print(json.dumps(answers))
"""


def test_the_environment_is_read_when_the_package_is_imported() -> None:
    values = ["auto", "fused", "eager", "quick", "Eager", ""]
    source = Path(dispatch.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_WITH, json.dumps(values)],
        env={**os.environ, "PYTHONPATH": str(source)},
        capture_output=True,
        text=True,
        check=True,
    )
    answers: dict[str, Any] = json.loads(done.stdout)
    assert [answers.pop(mode) for mode in ("auto", "fused", "eager")] == ["fused", "fused", "eager"]
    for value, answer in answers.items():
        assert answer == f"import dspark: DSPARK_DISPATCH: got {value!r}, need one of auto, fused, eager"


def test_strict_mode_lists_every_reason_and_counts_nothing(declare: Declare, caplog: pytest.LogCaptureFixture) -> None:
    op = declare(check("a"), check("b"), check("c"))
    with observed() as outcomes, pytest.raises(FallbackError) as refused:
        choose(op, frozenset("ac"), "fused")
    for part in (op, "a (got 'a-value'): put a right", "c (got 'c-value'): put c right"):
        assert part in str(refused.value)
    assert "put b right" not in str(refused.value)
    assert refused.value.decision == decide(op, frozenset("ac"))
    assert (dispatch.census(), outcomes, warnings_of(caplog)) == ({}, [], [])


def never(facts: Facts) -> tuple[bool, int]:
    return False, len(facts)


def test_the_strict_error_survives_a_process_boundary(declare: Declare) -> None:
    op = declare(Check("a", "put it right", never), Check("b", "put it right too", never))
    with pytest.raises(FallbackError) as refused:
        choose(op, NOTHING, "fused")
    copy = pickle.loads(pickle.dumps(refused.value))
    assert (copy.decision, copy.reasons, str(copy)) == (refused.value.decision, ("a", "b"), str(refused.value))


# --- checks that the eager path needs ---------------------------------------------------------------------------------


@pytest.fixture
def one_way(declare: Declare) -> str:
    """An operation whose fused path needs ``a`` and ``b`` and whose eager path needs ``e``."""
    return declare(check("a"), check("e", path=dispatch.Path.EAGER), check("b"))


@pytest.mark.parametrize(
    ("violated", "path", "failed", "eager_failed"),
    [
        ("", "fused", "", ""),
        ("e", "fused", "", "e"),
        ("b", "eager", "b", ""),
        ("abe", None, "ab", "e"),
    ],
)
def test_a_decision_tells_the_two_paths_apart(
    one_way: str, violated: str, path: str | None, failed: str, eager_failed: str
) -> None:
    decision = decide(one_way, frozenset(violated))
    assert (decision.path, decision.reasons) == (path, tuple(failed))
    assert [failure.check.id for failure in decision.eager_failed] == list(eager_failed)


@pytest.mark.parametrize(
    ("violated", "asked", "reasons", "subject"),
    [
        ("e", "eager", "e", "the eager path, which was requested,"),
        ("ae", "eager", "e", "the eager path, which was requested,"),
        ("abe", "fused", "ab", "the fused path, which was requested,"),
        ("abe", "auto", "abe", "any path"),
    ],
    ids=["eager", "eager-whatever-fused-needs", "fused", "auto"],
)
def test_what_no_path_can_serve_is_refused_with_its_reasons(
    one_way: str, caplog: pytest.LogCaptureFixture, violated: str, asked: str, reasons: str, subject: str
) -> None:
    with observed() as outcomes, pytest.raises(FallbackError) as refused:
        choose(one_way, frozenset(violated), asked)
    assert sorted(refused.value.reasons) == list(reasons)
    assert f"{one_way}: {subject} is not eligible: " in str(refused.value)
    named = {part for part in "abe" if f"{part} (got '{part}-value'): put {part} right" in str(refused.value)}
    assert named == set(reasons)
    assert (dispatch.census(), outcomes, warnings_of(caplog)) == ({}, [], [])


def test_a_failed_check_of_the_eager_path_leaves_the_fused_one_alone(
    one_way: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert choose(one_way, frozenset("e")) == choose(one_way, frozenset("e"), "fused") == "fused"
    assert dispatch.census() == {CensusKey(one_way, dispatch.Path.FUSED, "eligible"): 2}
    assert warnings_of(caplog) == []


@pytest.mark.parametrize(("first", "second"), [("eager", "fused"), ("fused", "eager")])
def test_a_check_that_was_not_evaluated_opens_no_path(declare: Declare, first: str, second: str) -> None:
    """``b`` comes after ``a``, which the other path needs: refused when registered, or when called."""
    checks = (check("a", path=dispatch.Path(first)), check("b", "a", path=dispatch.Path(second)))
    with pytest.raises((ValueError, FallbackError)):
        choose(declare(*checks), frozenset("ab"))


# --- choose: what is counted and said ---------------------------------------------------------------------------------


def test_the_census_counts_operation_path_and_every_reason(declare: Declare) -> None:
    op = declare(check("a"), check("b"))
    for facts, path in ((NOTHING, None), (NOTHING, "fused"), (frozenset("ab"), None), (frozenset("b"), None)):
        choose(op, facts, path)
    choose(op, frozenset("ab"), "eager")
    choose(op, NOTHING, "eager")
    assert dispatch.census() == {
        CensusKey(op, dispatch.Path.FUSED, "eligible"): 2,
        CensusKey(op, dispatch.Path.EAGER, "a"): 1,
        CensusKey(op, dispatch.Path.EAGER, "b"): 2,
        CensusKey(op, dispatch.Path.EAGER, "requested"): 2,
    }


def test_the_census_is_a_copy(declare: Declare) -> None:
    op = declare(check("a"))
    choose(op, NOTHING)
    dispatch.census().clear()
    assert sum(dispatch.census().values()) == 1


def test_one_warning_per_operation_and_reason(declare: Declare, caplog: pytest.LogCaptureFixture) -> None:
    op = declare(check("a"), check("b"))
    for facts in (frozenset("a"), frozenset("a"), frozenset("ab"), frozenset("b")):
        choose(op, facts)
    other = dispatch.register(f"{op}-other", (check("a"),))
    choose(other, frozenset("a"))
    assert warnings_of(caplog) == [
        f"{op}: falls back to eager: a (got 'a-value'): put a right",
        f"{op}: falls back to eager: b (got 'b-value'): put b right",
        f"{other}: falls back to eager: a (got 'a-value'): put a right",
    ]
    assert {record.levelno for record in caplog.records} == {logging.WARNING}


def test_eager_that_was_asked_for_is_not_warned_about(declare: Declare, caplog: pytest.LogCaptureFixture) -> None:
    op = declare(check("a"))
    choose(op, frozenset("a"), "eager")
    with forced("eager"):
        choose(op, frozenset("a"))
    choose(op, NOTHING)
    assert warnings_of(caplog) == []


def test_reset_forgets_counts_and_warnings_and_keeps_operations(
    declare: Declare, caplog: pytest.LogCaptureFixture
) -> None:
    op = declare(check("a"))
    choose(op, frozenset("a"))
    dispatch.reset()
    assert dispatch.census() == {}
    choose(op, frozenset("a"))
    assert len(warnings_of(caplog)) == 2
    assert dispatch.census() == {CensusKey(op, dispatch.Path.EAGER, "a"): 1}


# --- blocks and threads -----------------------------------------------------------------------------------------------


def test_observed_blocks_nest_and_the_inner_one_takes_what_happens_in_it(declare: Declare) -> None:
    op = declare(check("a"))
    with observed() as outer:
        choose(op, NOTHING)
        with observed() as inner:
            choose(op, frozenset("a"))
        with pytest.raises(ZeroDivisionError), observed():
            _ = 1 // 0
        choose(op, NOTHING, "eager")
    choose(op, NOTHING)
    assert [(str(path), decision.reasons) for decision, path in outer] == [("fused", ()), ("eager", ())]
    assert [(str(path), decision.reasons) for decision, path in inner] == [("eager", ("a",))]


def test_forced_blocks_nest_and_end_with_an_exception_too(declare: Declare) -> None:
    op = declare(check("a"))
    with forced("eager"):
        with pytest.raises(FallbackError), forced("fused"):
            choose(op, frozenset("a"))
        assert choose(op, NOTHING) == "eager"
        with forced("auto"):
            assert choose(op, NOTHING) == "fused"
        assert choose(op, NOTHING) == "eager"
    assert choose(op, NOTHING) == "fused"


def test_blocks_belong_to_their_thread(declare: Declare) -> None:
    op = declare(check("a"))
    taken: list[str] = []
    with forced("eager"), observed() as outcomes:
        in_threads(2, lambda: taken.append(choose(op, NOTHING)))
    assert (taken, outcomes) == (["fused", "fused"], [])


class SlowCounter(Counter[CensusKey]):
    """Gives other threads their turn between reading a count and writing it."""

    def __getitem__(self, key: CensusKey) -> int:
        count = super().__getitem__(key)
        time.sleep(0)
        return count


class SlowSet(set[Any]):
    """Gives other threads their turn between looking a member up and adding it."""

    def __contains__(self, key: object) -> bool:
        found = super().__contains__(key)
        time.sleep(0.002)
        return found


class SlowDict(dict[Any, Any]):
    """Gives other threads their turn between looking a key up and setting it."""

    def __contains__(self, key: object) -> bool:
        found = super().__contains__(key)
        time.sleep(0.002)
        return found


def test_no_count_is_lost_between_threads(declare: Declare, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_census", SlowCounter())
    op = declare(check("a"), check("b"))
    threads, calls = 8, 100

    def work() -> None:
        for _ in range(calls):
            choose(op, frozenset("ab"))
            choose(op, NOTHING)

    in_threads(threads, work)
    assert set(dispatch.census().values()) == {threads * calls}
    assert len(dispatch.census()) == 3


def test_threads_that_fall_back_together_warn_once(
    declare: Declare, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(dispatch, "_warned", SlowSet())
    op = declare(check("a"))
    in_threads(8, lambda: choose(op, frozenset("a")))
    assert len(warnings_of(caplog)) == 1


def test_threads_that_register_together_succeed_once(declare: Declare, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_registry", SlowDict())
    outcomes: list[str] = []

    def register() -> None:
        try:
            outcomes.append(declare(check("a")))
        except ValueError:
            outcomes.append("refused")

    in_threads(8, register)
    assert outcomes.count("refused") == 7
