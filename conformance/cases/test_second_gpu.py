"""Every operation on the second GPU while the first is the current one, and vocabulary shards over NCCL.

The lane ``second-gpu`` puts every other case on that GPU too. A machine with one GPU does not offer it, which each run
of another lane says by listing these cases.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dspark import faults

from ..fixtures import ranks
from ..fixtures.guard import Arena
from ..fixtures.lane import Lane
from ..fixtures.ledger import Label, expect_equal, expect_fault, expect_raises
from ..fixtures.replays import allocations
from ..fixtures.served import BATCH, PAIRS, SERVED

FIRST = torch.device("cuda", 0)
pytestmark = pytest.mark.lanes(Lane.SECOND)
FAULTY = [pair for pair in PAIRS if pair[0] != "compute_base_logits"]


@pytest.mark.parametrize(("name", "path"), PAIRS, ids=[f"{name}/{path}" for name, path in PAIRS])
def test_a_call_touches_its_own_gpu_alone(name: str, path: str, arena: Arena) -> None:
    """It is right, the current GPU stays the first one, and nothing is allocated there."""
    served = SERVED[name](path, arena.device)
    expect_equal(served.label, "GPUs, of the tensors and the current one", (arena.device.index, current()), (1, 0))
    served.fill(BATCH)
    before = allocations(FIRST)
    result = served.compute()
    expect_equal(served.label, "allocations on the other GPU", allocations(FIRST) - before, 0)
    expect_equal(served.label, "the current GPU after the call", current(), 0)
    served.judge(result)


@pytest.mark.parametrize(("name", "path"), FAULTY, ids=[f"{name}/{path}" for name, path in FAULTY])
def test_a_fault_belongs_to_the_gpu_where_it_happened(name: str, path: str, arena: Arena) -> None:
    served = SERVED[name](path, arena.device)
    assert served.fault is not None
    served.fill(BATCH, faulty=True)
    served.judge(served.compute())
    expect_equal(served.label, "faults of the first GPU", faults.peek(FIRST), ())
    faults.check(FIRST)
    kinds = faults.IndexFaultError
    error = expect_raises(served.label, kinds, served.fault, lambda: faults.check(arena.device))
    expect_fault(served.label, error, [served.fault])


def test_two_ranks_over_nccl_give_the_bits_of_one(tmp_path: Path) -> None:
    """A GPU for each rank: base logits and embedding rows of vocabulary shards."""
    ended = ranks.run("nccl", tmp_path)
    for rank, one in enumerate(ended):
        expect_equal(Label("base_logits", "fused"), f"rank {rank} of two: {one.err}", one.status, 0)
        expect_equal(Label("base_logits", "eager"), f"rank {rank} of two", one.out.endswith(ranks.EQUAL), True)


def current() -> int:
    return torch.cuda.current_device()
