"""The greedy rule decides in one launch what any rule decides in several, to the same tokens, states and pools
(CONTRACTS.md sections 7b and 11; F1-18)."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch

from dspark import dispatch
from dspark.runtime.acceptance import AcceptanceRule, Accepted, Greedy, Verified
from dspark.runtime.index_cache import IndexCache

from ..fixtures.guard import Arena, to_bits
from ..fixtures.ledger import Label, expect_equal
from ..fixtures.replay import RecordedWorker, Rig, ToyReplay
from ..fixtures.scripts import Scripts, build
from ..fixtures.streams import Stream
from ..fixtures.toys import ToyDraft, ToyTarget, plain

OP = "worker"
PATHS = ("fused", "eager")


class Separate(Greedy):
    """Greedy by the calls that every rule can make."""

    def accept(self, window: Verified, index: IndexCache) -> Accepted:
        return AcceptanceRule.accept(self, window, index)


def drawn_window(stream: Stream, device: torch.device, interval: int | None, ends: list[int]) -> Verified:
    """Every number of right drafts, windows cut short, padded rows; logits with two equal best ones in places."""
    rows, width, ids = 24, 5, 7
    logits = stream.integers(0, 6, (rows, width, ids))
    best = logits.argmax(axis=2)
    candidates = np.concatenate([np.zeros((rows, 1), np.int64), best[:, :-1]], axis=1)
    wrong = np.arange(width)[None, :] > (np.arange(rows) % width)[:, None]
    candidates[wrong] -= stream.integers(1, 9, (int(wrong.sum()),))
    before = np.where(np.arange(rows) % 4 == 3, -1, stream.integers(0, 40, (rows,)))
    lens = np.where(before < 0, 0, stream.integers(1, width + 1, (rows,)))
    given = [torch.from_numpy(values).to(device) for values in (candidates, logits, lens, before)]
    eos = torch.tensor(ends, dtype=torch.int64, device=device)
    return Verified(given[0], given[1].float(), given[2], given[3], eos, interval)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("ends", [[], [2], [5, 0, 3]], ids=["no-end", "one-end", "ends"])
@pytest.mark.parametrize("interval", [None, 1, 4])
def test_one_launch_decides_what_the_separate_calls_decide(
    interval: int | None, ends: list[int], path: str, arena: Arena
) -> None:
    window = drawn_window(Stream(f"worker/rules/{ends}"), arena.device, interval, ends)
    index, label = IndexCache(arena.device), Label(OP, path)
    with dispatch.forced(path):
        got, need = Greedy().accept(window, index), Separate().accept(window, index)
    expect_equal(label, "steps of the separate calls", need.steps, None)
    expect_equal(label, "lens", to_bits(got.lens), to_bits(need.lens))
    expect_equal(label, "correct", got.correct.tolist(), need.correct.tolist())
    kept = [
        [row[:length] for row, length in zip(one.tokens.tolist(), one.lens.tolist(), strict=True)]
        for one in (got, need)
    ]
    expect_equal(label, "tokens", kept[0], kept[1])
    assert got.steps is not None
    expect_equal(label, "last", got.steps.last.tolist(), (need.lens - 1).tolist())
    expect_equal(label, "whether there is a track", got.steps.track is not None, interval is not None)


def rig_with(rule: AcceptanceRule, label: Label, device: torch.device, *, hybrid: bool) -> Rig:
    scripts = Scripts(Stream("worker/rules"))
    draft = ToyDraft(scripts.mixed, gamma=4, max_position=64)
    options: dict[str, Any] = {"max_requests": 3, "track_interval": 4, "eos": (11,), "rule": rule}
    scripts.worker = worker = RecordedWorker(ToyTarget(device, hybrid=hybrid, max_position=64), draft, **options)
    return Rig(worker, functools.partial(ToyReplay, hybrid=hybrid), label, "worker/rules")


@pytest.mark.parametrize("hybrid", [True, False], ids=["hybrid", "attention-only"])
def test_a_rule_without_steps_leaves_every_pool_as_replay_does(hybrid: bool, arena: Arena) -> None:
    """The states of such a rule are found from what it commits; every byte of every pool is compared by the rig."""
    emitted = []
    for rule in (Separate(), Greedy()):
        rig = rig_with(rule, Label(OP, "eager"), arena.device, hybrid=hybrid)
        with dispatch.forced("eager"):
            emitted.append(rig.run([(0, [1, 2, 3], 9), (0, [4] * 8, 12), (2, [9, 8], 3), (3, [7, 7, 1, 2, 3, 4], 8)]))
    expect_equal(Label(OP, "eager"), "tokens", emitted[0], emitted[1])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("rule", "hybrid", "ops"),
    [
        (Greedy(), True, ["accept_commit", "state_scatter"]),
        (Greedy(), False, ["accept_commit"]),
        (Separate(), True, ["accept", "commit_indices", "state_scatter"]),
        (Separate(), False, ["accept"]),
    ],
    ids=["greedy-hybrid", "greedy-attention-only", "separate-hybrid", "separate-attention-only"],
)
def test_which_operations_a_step_calls(
    rule: AcceptanceRule, hybrid: bool, ops: list[str], path: str, arena: Arena
) -> None:
    """Once each; the toy draft calls none. The request goes on as plain decoding does."""
    label = Label(OP, path)
    worker = build("right", arena.device, gamma=3, hybrid=hybrid, rule=rule, track_interval=4)
    id = worker.add_request([1, 2, 3], 12)
    with dispatch.forced(path), dispatch.observed() as outcomes:
        worker.step()
    expect_equal(label, "operations", [outcome.decision.op for outcome in outcomes], ops)
    expect_equal(label, "paths", {str(outcome.path) for outcome in outcomes}, {path})
    expect_equal(label, "tokens", worker.request(id).emitted, plain([1, 2, 3], 5, hybrid=hybrid))


@pytest.mark.parametrize("hybrid", [True, False], ids=["hybrid", "attention-only"])
def test_what_is_not_tracked_has_no_track_step(hybrid: bool, arena: Arena) -> None:
    """Without an interval, and for a target without states whatever the interval."""
    label = Label(OP, "eager")
    intervals: list[int | None] = []

    class Kept(Greedy):
        def accept(self, window: Verified, index: IndexCache) -> Accepted:
            intervals.append(window.track_interval)
            return super().accept(window, index)

    for interval in (None, 4):
        worker = build("right", arena.device, hybrid=hybrid, rule=Kept(), track_interval=interval)
        intervals.clear()
        with dispatch.forced("eager"):
            worker.generate([[1, 2, 3]], 6)
        expect_equal(label, f"intervals of the steps with {interval}", set(intervals), {interval if hybrid else None})
