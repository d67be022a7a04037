"""What was found out about one call never serves another: after a good call, every call that differs from it in a
single thing that the validation reads ends as it does where no call came before it (CONTRACTS.md section 9)."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

import dspark.ops as ops
from dspark import dispatch, machine

from ..fixtures.guard import Arena
from ..fixtures.ledger import Label, expect_equal, expect_raises
from ..fixtures.plan_subjects import FIRST_OF_EACH, SUBJECTS, Subject, outcome_of
from ..fixtures.plans import Change, forget, ints, values
from ..fixtures.violations import MACHINE

CHANGES = [
    pytest.param(subject, name, change, id=f"{subject.op}/{subject.call.__name__}/{name}/{kind}")
    for subject in SUBJECTS
    for name, changes in subject.changes.items()
    for kind, change in changes.items()
]


@pytest.mark.parametrize(("subject", "name", "change"), CHANGES)
def test_a_changed_argument_ends_as_alone(
    subject: Subject, name: str, change: Change, arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    label = Label(subject.op, "plans")
    forget(monkeypatch)
    alone = outcome_of(subject, arena.device, name, change)
    forget(monkeypatch)
    good = outcome_of(subject, arena.device)
    expect_equal(label, "outcome after the good call", outcome_of(subject, arena.device, name, change), alone)
    expect_equal(label, "whether the change can be told", alone != good, True)
    expect_equal(label, "outcome of the good call after it", outcome_of(subject, arena.device), good)


@pytest.mark.parametrize("broken", MACHINE)
@pytest.mark.parametrize("subject", FIRST_OF_EACH, ids=lambda subject: subject.op)
def test_another_machine_has_plans_of_its_own(
    subject: Subject, broken: str, arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    label = Label(subject.op, "plans")
    forget(monkeypatch)
    with machine.injected(**MACHINE[broken]):
        alone = outcome_of(subject, arena.device)
    forget(monkeypatch)
    good = outcome_of(subject, arena.device)
    with machine.injected(**MACHINE[broken]):
        expect_equal(label, "outcome on a machine that was injected", outcome_of(subject, arena.device), alone)
    expect_equal(label, "outcome on this machine again", outcome_of(subject, arena.device), good)
    expect_equal(label, "whether the machines can be told apart", alone != good, True)


@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda subject: f"{subject.op}/{subject.call.__name__}")
def test_a_path_is_no_part_of_a_plan(subject: Subject, arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every way to ask, in turn, on one plan: each call is decided, counted and computed as if it were the first."""
    label = Label(subject.op, "plans")
    asked = [None, "eager", "fused", "auto", "quick"]
    alone = []
    for path in asked:
        forget(monkeypatch)
        alone.append(outcome_of(subject, arena.device, path=path))
    forget(monkeypatch)
    dispatch.reset()
    together = [outcome_of(subject, arena.device, path=path) for path in asked]
    expect_equal(label, "outcomes of one plan", together, alone)
    rows = {(str(row.path), row.reason): count for row, count in dispatch.census().items()}
    if subject in FIRST_OF_EACH:  # pools by pointer have no eager path
        expect_equal(label, "census", rows, {("fused", "eligible"): 3, ("eager", "requested"): 1})


@pytest.mark.parametrize("subject", FIRST_OF_EACH, ids=lambda subject: subject.op)
def test_the_second_call_is_counted_and_warned_about_as_the_first(
    subject: Subject, arena: Arena, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    label = Label(subject.op, "plans")
    forget(monkeypatch)
    dispatch.reset()
    with machine.injected(**MACHINE["no-triton"]), caplog.at_level(logging.WARNING, "dspark"):
        first, second = (outcome_of(subject, arena.device) for _ in range(2))
    expect_equal(label, "outcome of the second call", second, first)
    row = dispatch.CensusKey(subject.op, dispatch.Path.EAGER, "no-triton")
    expect_equal(label, "census", dispatch.census(), {row: 2})
    expect_equal(label, "warnings", len(caplog.records), 1)
    with machine.injected(**MACHINE["no-triton"]), dispatch.forced("fused"):
        refused = outcome_of(subject, arena.device)
    expect_equal(label, "error in strict mode", str(refused[1]).partition(":")[0], "FallbackError")
    expect_equal(label, "census after a refused call", dispatch.census(), {row: 2})


@pytest.mark.parametrize("op", ["state_scatter"])
def test_windows_have_four_dimensions_whatever_was_scattered_before(
    op: str, arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The two entries differ in nothing else."""
    forget(monkeypatch)
    with arena.device:
        arguments = (values(1, 3, 4), values(1, 2, 2, 4), ints(2), -ints(2))
    ops.fused_mamba_state_scatter_with_mask(*arguments)
    need = ["dst", "4 dimensions"]
    expect_raises(Label(op, "plans"), ValueError, need, lambda: ops.fused_conv_window_scatter_with_mask(*arguments))


@pytest.mark.parametrize("op", ["state_scatter"])
def test_the_first_of_two_bad_types_is_the_one_named(op: str, arena: Arena) -> None:
    """What cannot be taken apart is named after what came before it."""
    label = Label(op, "plans")
    with arena.device:
        bad, index = (values(1, 3, 2, 4), values(1, 2, 2, 2, 5)), ints(2)
        caches = SimpleNamespace(temporal=bad[0], intermediate_ssm=bad[1], conv=[], intermediate_conv_window=[bad[1]])
    pairs: Any = [bad, "pair"]
    multi = lambda: ops.fused_conv_window_scatter_multi(pairs, index, index)  # noqa: E731
    expect_raises(label, ValueError, ["pairs[0][1]: got shape"], multi)
    everything = lambda: ops.scatter_mamba_states_after_mtp_verify(caches, index, index, None, None)  # noqa: E731
    expect_raises(label, ValueError, ["intermediate_ssm: got shape"], everything)
