"""Every public operation at fixed addresses, with inputs that change between calls (F1-18).

On a GPU: captured into a CUDA graph and replayed for batches of 3, 8 and 3 of 8 rows, the others padded; a replay
allocates nothing; a fused call after warm-up allocates its results and nothing else, and does not make the host wait;
the fault word outlives replays. In the interpreter the same calls are made one after the other.
"""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from dspark import faults

from ..fixtures.guard import Arena
from ..fixtures.ledger import expect_equal, expect_fault, expect_raises
from ..fixtures.replays import Replay, at_most, without_waiting
from ..fixtures.served import BATCH, PAIRS, SERVED

IDS = [f"{name}/{path}" for name, path in PAIRS]


@pytest.mark.parametrize(("name", "path"), PAIRS, ids=IDS)
def test_f1_18_three_requests_then_eight_then_three(name: str, path: str, arena: Arena) -> None:
    served, device = SERVED[name](path, arena.device), arena.device
    served.fill(BATCH)
    served.judge(served.compute())
    replay = Replay(served.compute, device)
    for live in (3, 8, 3):
        served.fill(live)
        with at_most(served.label, "a replay", 0, device):
            result = replay()
        served.judge(result)
    expect_equal(served.label, "faults", faults.peek(), ())


@pytest.mark.parametrize(("name", "path"), PAIRS, ids=IDS)
def test_a_call_after_warm_up_neither_waits_nor_allocates_more_than_its_results(
    name: str, path: str, arena: Arena
) -> None:
    """The eager path waits for nothing either; what it allocates is its own affair."""
    served, device = SERVED[name](path, arena.device), arena.device
    served.fill(BATCH)
    served.judge(served.compute())
    for live in (3, BATCH):
        served.fill(live)
        counted = at_most(served.label, "a call", served.allocations, device) if path == "fused" else nullcontext()
        with counted, without_waiting(device):
            result = served.compute()
        served.judge(result)


FAULTY = [pair for pair in PAIRS if pair[0] != "compute_base_logits"]


@pytest.mark.parametrize(("name", "path"), FAULTY, ids=[f"{name}/{path}" for name, path in FAULTY])
def test_a_fault_outlives_replays_until_it_is_read(name: str, path: str, arena: Arena) -> None:
    """A bad row of one replay is reported after the next ones, once; on the CPU, by the call that met it."""
    served = SERVED[name](path, arena.device)
    assert served.fault is not None
    served.fill(BATCH)
    served.judge(served.compute())
    replay, on_gpu = Replay(served.compute, arena.device), arena.device.type == "cuda"
    served.fill(5, faulty=True)
    if on_gpu:
        served.judge(replay())  # the row is left alone or clamped, as the contract says; all others are right
        served.fill(BATCH)
        served.judge(replay())
        expect_equal(served.label, "faults", faults.peek(), (served.fault,))
    error = expect_raises(served.label, faults.IndexFaultError, served.fault, faults.check if on_gpu else replay)
    expect_fault(served.label, error, [served.fault])
    served.fill(3)
    served.judge(replay())
    expect_equal(served.label, "faults after they were read", faults.peek(), ())
