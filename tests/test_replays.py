"""What a captured call is on the CPU, and that a block that allocates too much is told."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from conformance.fixtures import replays
from conformance.fixtures.failures.broken import BrokenClauseError
from conformance.fixtures.ledger import Label

CPU, LABEL = torch.device("cpu"), Label("accept", "fused")


def test_on_the_cpu_a_replay_is_another_call() -> None:
    calls = iter(range(9))
    replay = replays.Replay(lambda: next(calls), CPU)
    assert [replay(), replay()] == [0, 1]


@pytest.mark.parametrize(("made", "allowed"), [(0, 0), (2, 2), (1, 2)])
def test_as_many_allocations_as_are_allowed(made: int, allowed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = iter([7, 7 + made])
    monkeypatch.setattr(replays, "allocations", lambda device: next(counts))
    with replays.at_most(LABEL, "a call", allowed, CPU):
        pass


def test_one_more_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: Iterator[int] = iter([7, 10])
    monkeypatch.setattr(replays, "allocations", lambda device: next(counts))
    with (
        pytest.raises(BrokenClauseError, match="a call: allocations, of which 2 are allowed: got 3, need 2"),
        replays.at_most(LABEL, "a call", 2, CPU),
    ):
        pass


def test_nothing_is_counted_on_the_cpu() -> None:
    assert replays.allocations(CPU) == 0
    with replays.at_most(LABEL, "a call", 0, CPU), replays.without_waiting(CPU):
        torch.zeros(3)
