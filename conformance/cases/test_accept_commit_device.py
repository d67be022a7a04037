"""accept_commit on a GPU: nothing waits for the device, and a captured graph follows its inputs from step to step
(CONTRACTS.md section 7b; F1-18)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dspark import faults
from dspark.ops import AcceptCommit, fused_accept_commit

from ..fixtures.calls.accept_commit import FAULT, OP, Call, base, expect_results, place
from ..fixtures.guard import Arena
from ..fixtures.lane import Lane, captured, no_synchronisation
from ..fixtures.ledger import Label, expect_equal, expect_raises

PATHS = ("fused", "eager")
pytestmark = pytest.mark.lanes(Lane.CUDA)


def steps(first: Call) -> list[Call]:
    """The captured call, its rows turned round, rows padded and full, and lengths that go on from step to step."""
    turned = replace(
        first,
        candidates=first.candidates[::-1].copy(),
        target=first.target[::-1].copy(),
        seq_lens=np.array([-1, 0, 1000]),
        verify_lens=np.array([0, 4, 3]),
        eos_ids=np.array([90, 91]),
    )
    padded = replace(turned, seq_lens=np.array([-1, -1, -9]), verify_lens=np.array([0, 9, -1]))
    return [turned, padded, replace(first, seq_lens=first.outcome().new_seq_lens), first]


@pytest.mark.parametrize("path", PATHS)
def test_a_captured_graph_follows_its_inputs(path: str, arena: Arena) -> None:
    """Called, captured, and replayed on other values at the same addresses, with rows padded and live again."""
    label, call = Label(OP, path), base()
    arguments = place(call, arena)

    def compute() -> AcceptCommit:
        return fused_accept_commit(**arguments, path=path)

    compute()
    with no_synchronisation():
        result = compute()
    expect_results(call, label, lambda: result)
    kept: list[AcceptCommit] = []
    graph = captured(lambda: kept.append(compute()))
    for step in steps(call):
        fresh = place(step, Arena(arena.device))
        for name in ("candidates", "target_predict", "seq_lens", "verify_lens", "eos_ids"):
            arguments[name].copy_(fresh[name])
        graph.replay()
        expect_results(step, label, lambda: kept[-1])


@pytest.mark.parametrize("path", PATHS)
def test_a_captured_graph_reports_a_window_length_of_a_live_row(path: str, arena: Arena) -> None:
    label, call = Label(OP, path), base()
    arguments = place(call, arena)
    fused_accept_commit(**arguments, path=path)
    graph = captured(lambda: fused_accept_commit(**arguments, path=path))
    arguments["verify_lens"][2] = 99
    graph.replay()
    expect_equal(label, "faults of a padded row", faults.peek(), ())
    arguments["verify_lens"][0] = 99
    graph.replay()
    graph.replay()
    expect_raises(label, faults.IndexFaultError, [FAULT[1]], faults.check)
    expect_equal(label, "faults after they were read", faults.peek(), ())
