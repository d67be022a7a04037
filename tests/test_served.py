"""A served operation whose replay does nothing, or leaves a fault's row as it likes, is seen by its judge."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from conformance.fixtures.failures.broken import BrokenClauseError
from conformance.fixtures.served import BATCH, PAIRS, SERVED
from dspark import faults

CPU = torch.device("cpu")
EAGER = [name for name, path in PAIRS if path == "eager"]


@pytest.mark.parametrize("name", EAGER)
def test_the_results_of_other_inputs_are_refused(name: str) -> None:
    served = SERVED[name]("eager", CPU)
    served.fill(BATCH)
    result = served.compute()
    served.judge(result)
    for live in (3, 8, 3):
        served.fill(live)
        with pytest.raises(BrokenClauseError):
            served.judge(result)


@pytest.mark.parametrize("name", [name for name in EAGER if SERVED[name]("eager", CPU).fault])
def test_a_faulty_row_is_judged_too(name: str) -> None:
    """On a GPU such a call returns; here its last act, to raise, is left out."""
    served = SERVED[name]("eager", CPU)
    served.fill(5, faulty=True)
    with mock.patch.object(faults, "finish"):
        served.judge(served.compute())
    assert faults.peek() == (served.fault,)
    with pytest.raises(faults.IndexFaultError):
        faults.check()
