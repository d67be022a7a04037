"""Calls that share a plan share a launch, in which all but the tensors stands (``dspark.ops.launch``).

What was compiled for addresses that 16 divides must never be given others, nor the strides of one call be another's.
What else a key names is in test_plans.py.
"""

from __future__ import annotations

import importlib
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import pytest
import torch

import dspark.ops as ops
from dspark import machine

from ..fixtures import guard
from ..fixtures.calls import accept, accept_commit, commit_indices, kv_write, qk_norm_rope, state_scatter
from ..fixtures.guard import Arena
from ..fixtures.lane import Lane
from ..fixtures.ledger import Label, expect_equal
from ..fixtures.plan_subjects import FIRST_OF_EACH, SUBJECTS, Subject, outcome_of
from ..fixtures.plans import forget, looked_at, spread


@dataclass
class Displaced(Arena):
    """An arena of which the tensor named ``displaced`` begins one element later; of the others 16 divides the address.

    The tensors that a plan knows by their address lie where those of the arena before lay, whose storages are ``kept``.
    """

    displaced: str = ""
    kept: dict[str, torch.Tensor] = field(default_factory=dict)

    def place(self, name: str, *args: Any, **kwargs: Any) -> torch.Tensor:
        with mock.patch.object(guard, "MARGIN", guard.MARGIN + (name == self.displaced)):
            view = super().place(name, *args, **kwargs)
        if not name.startswith(BY_ADDRESS):
            return view
        placed = self._placed[-1]
        placed.storage = self.kept.setdefault(name, placed.storage).copy_(placed.storage)
        return placed.storage.as_strided(view.shape, view.stride(), view.storage_offset())

    def free(self) -> list[str]:
        """The tensors that may lie anywhere."""
        return [placed.name for placed in self._placed if not placed.name.startswith(BY_ADDRESS)]


CALLS: dict[str, tuple[Any, Any]] = {
    # Rows on multiples of 16 bytes, so that what is compiled for aligned addresses moves 16 bytes at once.
    "accept": (accept, accept.base()),
    "accept_commit": (accept_commit, accept_commit.base()),
    "commit_indices": (commit_indices, commit_indices.base()),
    "kv_write": (kv_write, replace(kv_write.base(), row_padding=0, pool_row_gap=0, flag_gap=1)),
    "qk_norm_rope": (qk_norm_rope, replace(qk_norm_rope.base(), row_padding=6)),
    "state_scatter": (state_scatter, state_scatter.base()),
}
BY_ADDRESS = ("keys", "values", "pool", "state")


@pytest.mark.parametrize("op", CALLS)
def test_a_launch_serves_the_addresses_that_it_was_compiled_for(
    op: str, lane: Lane, arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, call = CALLS[op]
    kept: dict[str, torch.Tensor] = {}
    looks: dict[str, int] = {}

    def run(what: str, displaced: str = "") -> list[str]:
        place = Displaced(arena.device, displaced=displaced, kept=kept)
        with looked_at() as seen:
            calls.run(call, Label(op, "fused"), place, "fused")
        looks[what] = len(seen)
        return place.free()

    forget(monkeypatch)
    monkeypatch.setattr(machine, "injected", nullcontext)  # each injection is another machine, with plans of its own
    names = run("first")
    run("again")
    for name in names:
        run(name, name)
    run("last")
    each = looks["first"]
    expect_equal(Label(op, "plans"), "launches", each > 0, True)
    # The interpreter compiles nothing, so that each of its launches is looked at.
    unseen = each if lane is Lane.INTERPRET else 0
    need = {"first": each, "again": unseen, **dict.fromkeys(names, each), "last": unseen}
    expect_equal(Label(op, "plans"), "looks at arguments", looks, need)


@pytest.mark.parametrize("turn", ["first", "second"])
@pytest.mark.parametrize("subject", FIRST_OF_EACH, ids=lambda subject: subject.op)
def test_a_case_finds_no_plan_of_the_case_before(subject: Subject, turn: str, arena: Arena) -> None:
    """Its launch would be that of the kernel, or the tile, which a case replaces."""
    plans = importlib.import_module(f"dspark.ops.{subject.op}")._plans
    expect_equal(Label(subject.op, "plans"), f"plans before the {turn} case", len(plans._plans), 0)
    outcome_of(subject, arena.device)
    expect_equal(Label(subject.op, "plans"), f"plans after the {turn} case", len(plans._plans), 1)


STRIDED = [
    pytest.param(subject, name, id=f"{subject.op}/{subject.call.__name__}/{name}")
    for subject in SUBJECTS
    for name, value in subject.good().items()
    if isinstance(value, torch.Tensor)
]


@pytest.mark.parametrize(("subject", "name"), STRIDED)
def test_a_launch_serves_the_strides_that_it_was_made_for(
    subject: Subject, name: str, arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No validation looks at most of them, and a launch holds them all."""
    label = Label(subject.op, "plans")

    forget(monkeypatch)
    alone = outcome_of(subject, arena.device, name, spread)
    forget(monkeypatch)
    good = outcome_of(subject, arena.device)
    expect_equal(label, "outcome after the dense call", outcome_of(subject, arena.device, name, spread), alone)
    expect_equal(label, "outcome of the dense call after it", outcome_of(subject, arena.device), good)


@pytest.mark.parametrize("op", ["kv_write"])
def test_flags_are_set_where_they_lie(op: str, arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    label = Label(op, "plans")
    subject = next(one for one in SUBJECTS if one.op == op)

    def written(gap: int) -> list[bool]:
        with arena.device:
            arguments = subject.good()
            pools = arguments["meta"]
            flags = torch.zeros(gap * pools.rows, dtype=torch.bool)
            arguments["meta"] = ops.KVPoolTable(pools.keys, pools.values, flags[::gap])
            subject.call(**arguments)
        return [bool(flag) for flag in flags.tolist()]

    forget(monkeypatch)
    with arena.device:
        good = subject.good()
    subject.call(**good)
    expect_equal(label, "dense flags after a table without any", written(1), [False, True, False, True])
    expect_equal(label, "flags apart after dense ones", written(2), [False] * 2 + [True] + [False] * 3 + [True, False])
    expect_equal(label, "dense flags again", written(1), [False, True, False, True])
