"""Every eligibility check of every operation, violated alone and in pairs: the decision, the result, the census, the
warning, and the error in strict mode (CONTRACTS.md section 9; faults F5-1, F5-5)."""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark import dispatch

from ..fixtures.calls import OPS
from ..fixtures.guard import Arena
from ..fixtures.ledger import Label, expect_decision, expect_equal, expect_raises, expect_refused
from ..fixtures.violations import MACHINE
from ..fixtures.world import DRAWN

Violation = Callable[[Any], Any]


def violations(module: ModuleType) -> dict[str, Violation]:
    """Check id -> change of a call that violates it, for the operation's own checks and those on the machine."""
    on_machine = {
        check: lambda call, changes=changes: replace(call, machine={**call.machine, **changes})
        for check, changes in MACHINE.items()
        if getattr(module, "ON_MACHINE", True)
    }
    return {**on_machine, **module.VIOLATIONS}


def of_op(op: str, outcomes: list[dispatch.Outcome]) -> list[dispatch.Outcome]:
    """The outcomes of ``op`` itself: an operation of the model calls others."""
    return [outcome for outcome in outcomes if outcome.decision.op == op]


def census_of(op: str) -> dict[dispatch.CensusKey, int]:
    return {key: count for key, count in dispatch.census().items() if key.op == op}


def declared(op: str, path: dispatch.Path = dispatch.Path.FUSED) -> dict[str, dispatch.Check]:
    """The checks of ``op`` that ``path`` needs."""
    return {check.id: check for check in dispatch.registry()[op] if check.path is path}


def refusals(module: ModuleType) -> dict[str, Violation]:
    """Check id -> change of a call that the eager path cannot serve."""
    found: dict[str, Violation] = getattr(module, "REFUSALS", {})
    return found


SINGLES = [(op, check) for op, module in OPS.items() for check in violations(module)]


@pytest.mark.parametrize("op", OPS)
def test_every_check_has_a_violation_and_every_violation_a_check(op: str) -> None:
    expect_equal(Label(op, "checks"), "check ids", sorted(violations(OPS[op])), sorted(declared(op)))
    of_eager = sorted(declared(op, dispatch.Path.EAGER))
    expect_equal(Label(op, "checks"), "check ids of the eager path", sorted(refusals(OPS[op])), of_eager)


@pytest.mark.parametrize(("op", "check"), SINGLES, ids=[f"{op}/{check}" for op, check in SINGLES])
def test_violated_alone(op: str, check: str, arena: Arena, caplog: pytest.LogCaptureFixture) -> None:
    module = OPS[op]
    call = violations(module)[check](module.base())
    label = Label(op, "eager")
    with caplog.at_level(logging.WARNING, "dspark"), dispatch.observed() as outcomes:
        module.run(call, label, arena, None)
    expect_decision(label, of_op(op, outcomes), "eager", [check])
    expect_equal(label, "census", census_of(op), {dispatch.CensusKey(op, dispatch.Path.EAGER, check): 1})
    with caplog.at_level(logging.WARNING, "dspark"):
        module.run(call, label, Arena(arena.device), None)
    messages = [record.getMessage() for record in caplog.records if record.name == "dspark"]
    expect_equal(label, "number of warnings for two calls", len(messages), 1)
    value = of_op(op, outcomes)[0].decision.failed[0].value
    for part in (op, check, repr(value), declared(op)[check].requires):
        expect_equal(label, f"the warning {messages[0]!r} names {part!r}", part in messages[0], True)


@pytest.mark.parametrize(("op", "check"), SINGLES, ids=[f"{op}/{check}" for op, check in SINGLES])
@pytest.mark.parametrize("how", ["argument", "forced"])
def test_strict_mode_refuses(op: str, check: str, how: str, arena: Arena) -> None:
    module = OPS[op]
    call = violations(module)[check](module.base())

    def strict() -> None:
        if how == "argument":
            module.run(call, Label(op, "strict"), arena, "fused")
        else:
            with dispatch.forced("fused"):
                module.run(call, Label(op, "strict"), arena, None)

    error = expect_raises(
        Label(op, "strict"), dispatch.FallbackError, [op, check, declared(op)[check].requires], strict
    )
    expect_refused(Label(op, "strict"), error, [check])
    arena.verify(Label(op, "strict"))
    expect_equal(Label(op, "strict"), "census of a refused call", census_of(op), {})


@pytest.mark.parametrize("op", OPS)
def test_eligible_call_is_fused(op: str, arena: Arena, caplog: pytest.LogCaptureFixture) -> None:
    module = OPS[op]
    label = Label(op, "fused")
    with caplog.at_level(logging.WARNING, "dspark"), dispatch.observed() as outcomes:
        module.run(module.base(), label, arena, None)
    expect_decision(label, of_op(op, outcomes), "fused", [])
    expect_equal(label, "census", census_of(op), {dispatch.CensusKey(op, dispatch.Path.FUSED, dispatch.ELIGIBLE): 1})
    expect_equal(label, "warnings", [record.getMessage() for record in caplog.records], [])


@pytest.mark.parametrize("op", OPS)
def test_requested_eager_is_counted_and_not_warned_about(
    op: str, arena: Arena, caplog: pytest.LogCaptureFixture
) -> None:
    module = OPS[op]
    label = Label(op, "eager")
    with caplog.at_level(logging.WARNING, "dspark"), dispatch.forced("eager"):
        module.run(module.base(), label, arena, None)
    expect_equal(label, "census", census_of(op), {dispatch.CensusKey(op, dispatch.Path.EAGER, dispatch.REQUESTED): 1})
    expect_equal(label, "warnings", [record.getMessage() for record in caplog.records], [])


def expected_reasons(op: str, violated: set[str]) -> list[str]:
    """The violated checks in declared order, less those that an earlier failure leaves unevaluated."""
    found: list[str] = []
    blocked: set[str] = set()
    for id, check in declared(op).items():
        if id in violated or blocked & set(check.after):
            if not blocked & set(check.after):
                found.append(id)
            blocked.add(id)
    return found


@pytest.mark.parametrize("op", OPS)
def test_pairs_of_violations_are_all_named(op: str, lane: Any, arena: Arena) -> None:
    module = OPS[op]
    table = violations(module)
    pairs = list(itertools.combinations(table, 2))
    pairs = [pair for pair in pairs if not set(pair) <= set(MACHINE)]

    @settings(derandomize=True, deadline=None, database=None, max_examples=60)
    @given(pair=st.sampled_from(pairs), swap=st.booleans())
    def check(pair: tuple[str, str], swap: bool) -> None:
        first, second = reversed(pair) if swap else pair
        call = table[second](table[first](module.base()))
        label = Label(op, DRAWN)
        with dispatch.observed() as outcomes:
            module.run(call, label, Arena(arena.device), None)
        expect_decision(label, of_op(op, outcomes), "eager", expected_reasons(op, set(pair)))

    check()


BROKEN = {
    "no-gpu-either": {**MACHINE["no-triton"], **MACHINE["no-gpu-no-interpreter"]},
    "unfaithful-too": {**MACHINE["no-triton"], **MACHINE["interpreter-unfaithful"]},
}


@pytest.mark.parametrize("op", [op for op, module in OPS.items() if getattr(module, "ON_MACHINE", True)])
@pytest.mark.parametrize("broken", BROKEN)
def test_without_triton_nothing_else_about_the_machine_is_a_reason(broken: str, op: str, arena: Arena) -> None:
    """Triton is the remedy, and what it will run is not known before; said here, and not read from the registry."""
    call = replace(OPS[op].base(), machine=BROKEN[broken])
    with dispatch.observed() as outcomes:
        OPS[op].run(call, Label(op, "eager"), arena, None)
    expect_decision(Label(op, "eager"), of_op(op, outcomes), "eager", ["no-triton"])


REFUSED = [(op, check) for op, module in OPS.items() for check in refusals(module)]


@pytest.mark.parametrize(("op", "check"), REFUSED, ids=[f"{op}/{check}" for op, check in REFUSED])
def test_what_no_path_can_serve_is_refused(op: str, check: str, arena: Arena) -> None:
    """Fused serves it; eager, asked for or fallen back to, refuses and writes nothing."""
    module = OPS[op]
    call = refusals(module)[check](module.base())
    label = Label(op, "refused")
    with dispatch.observed() as outcomes:
        module.run(call, Label(op, "fused"), arena, None)
    expect_decision(Label(op, "fused"), of_op(op, outcomes), "fused", [])
    requires = declared(op, dispatch.Path.EAGER)[check].requires
    untouched = Arena(arena.device)
    asked = expect_raises(
        label, dispatch.FallbackError, [op, check, requires], lambda: module.run(call, label, untouched, "eager")
    )
    expect_refused(label, asked, [check])
    visible = {id: change for id, change in violations(module).items() if id not in module.UNSEEN[check]}
    for violated, change in visible.items():
        names = [op, check, violated, "any path"]
        broken = functools.partial(module.run, change(call), label, untouched, None)
        error = expect_raises(label, dispatch.FallbackError, names, broken)
        expect_refused(label, error, [violated, check])
    untouched.verify(label)
    expect_equal(label, "calls counted", sum(census_of(op).values()), 1)
