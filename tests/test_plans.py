"""Tests of :mod:`dspark.ops.plans`: what is kept, what is found, and when nothing is."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import pytest
import torch

from dspark import machine
from dspark.dispatch import Decision, Path
from dspark.ops import plans
from dspark.ops.plans import Plan, Plans

DECISION = Decision("op", Path.FUSED, ())


def plan() -> Plan:
    return Plan(machine.facts(), DECISION)


def test_a_kept_plan_is_found_under_an_equal_key() -> None:
    table: Plans[Plan] = Plans()
    kept = plan()
    assert table.keep(("a", torch.Size([2])), kept) is kept
    assert table.find(("a", torch.Size([2]))) is kept
    assert table.find(("a", torch.Size([3]))) is None


@pytest.mark.parametrize("key", [None, ([1],), ({},)])
def test_what_is_no_key_keeps_nothing_and_finds_nothing(key: Hashable) -> None:
    table: Plans[Plan] = Plans()
    kept = plan()
    assert table.keep(key, kept) is kept
    assert table.find(key) is None


def test_a_plan_is_of_the_machine_that_it_was_made_on() -> None:
    table: Plans[Plan] = Plans()
    here = table.keep("key", plan())
    with machine.injected(cuda=not machine.facts().cuda):
        assert table.find("key") is None
        there = table.keep("key", plan())
        assert table.find("key") is there
    assert table.find("key") is None
    assert table.keep("key", here) is table.find("key")


def test_equal_facts_that_are_another_object_are_another_machine() -> None:
    """They cost one validation, and no comparison at every call."""
    table: Plans[Plan] = Plans()
    table.keep("key", plan())
    with machine.injected():
        assert table.find("key") is None


def test_with_one_plan_too_many_all_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "LIMIT", 3)
    table: Plans[Plan] = Plans()
    for key in range(3):
        table.keep(key, plan())
    assert all(table.find(key) for key in range(3))
    last = table.keep(3, plan())
    assert [table.find(key) for key in range(4)] == [None, None, None, last]


@pytest.mark.parametrize(
    ("tensors", "expected"),
    [
        ((), False),
        ((None, torch.zeros(1)), False),
        ((None, torch.zeros(1), torch.zeros(1, requires_grad=True)), True),
    ],
)
def test_what_requires_grad(tensors: tuple[Any, ...], expected: bool) -> None:
    assert plans.requires_grad(*tensors) is expected
