"""Kernels that start while the one before them in the stream ends (CONTRACTS.md, streams).

What the kernel before writes, at its very end, is what a launch must see: called, and replayed from a CUDA graph. That
the wait is the first thing of every kernel, the rules of kernel source and the instruction contracts say.
"""

from __future__ import annotations

import importlib
import math
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import triton.language as tl

from dspark import faults
from dspark.ops import launch
from dspark.ops.launch import dependent_launch

from ..fixtures.guard import Arena, to_bits
from ..fixtures.kernel_source import edited
from ..fixtures.lane import Lane
from ..fixtures.late import Late
from ..fixtures.ledger import expect_equal
from ..fixtures.plans import forget, looked_at
from ..fixtures.replays import Replay
from ..fixtures.served import BATCH, SERVED, Served

# By public name, those that are a launch and little else: one for each kernel.
LAUNCHED = (
    "table_qk_norm_rope_",
    "fused_kv_norm_rope_write",
    "scatter_mamba_states_after_mtp_verify",
    "compute_dflash_correct_drafts_and_bonus",
    "fused_commit_track_indices",
    "fused_accept_commit",
)


def warm(name: str, arena: Arena) -> Served:
    """Served on the fused path, and called twice, so that what was compiled is kept."""
    served = SERVED[name]("fused", arena.device)
    served.fill(BATCH)
    served.compute()
    served.compute()
    return served


@pytest.mark.parametrize("how", ["called", "replayed"])
@pytest.mark.parametrize("name", LAUNCHED)
def test_a_launch_sees_what_the_kernel_before_it_writes(name: str, how: str, arena: Arena) -> None:
    served = warm(name, arena)
    late = Late(served.arena.storages())
    with late.before_launches(served.compute) as compute:
        again = Replay(compute, arena.device) if how == "replayed" else compute
        for live in (3, BATCH, 3):
            served.fill(live)
            late.hold()
            served.judge(again())


def left_behind(served: Served, result: Any) -> list[np.ndarray]:
    """The bits of every result and of every tensor that the call was given."""
    results = [tensor for tensor in result or () if tensor is not None]
    return [to_bits(tensor) for tensor in (*results, *served.arena.storages())]


def with_late_inputs(name: str, arena: Arena) -> list[np.ndarray]:
    served = warm(name, arena)
    late = Late(served.arena.storages())
    served.fill(BATCH)
    late.hold()
    with late.before_launches(served.compute) as compute:
        left = left_behind(served, compute())
    with suppress(faults.IndexFaultError):  # of what lay there before
        faults.check()
    return left


@pytest.mark.lanes(Lane.CUDA)
@pytest.mark.parametrize("name", LAUNCHED)
def test_a_kernel_that_does_not_wait_is_seen(
    name: str, arena: Arena, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    label = SERVED[name]("fused", arena.device).label
    need = with_late_inputs(name, arena)
    module = importlib.import_module(f"dspark.ops.{label.op}.kernel")
    hasty = edited(module, "    wait_for_prerequisite_grids(DEPENDENT_LAUNCH)\n", "", tmp_path)
    monkeypatch.setattr(module, f"{label.op}_kernel", getattr(hasty, f"{label.op}_kernel"))
    forget(monkeypatch)  # each plan's launch holds the kernel that waits
    got = with_late_inputs(name, arena)
    differs = not all(np.array_equal(one, other) for one, other in zip(got, need, strict=True))
    expect_equal(label, "whether it read what lay there before", differs, dependent_launch(arena.device))


@pytest.mark.lanes(Lane.INTERPRET)
@pytest.mark.parametrize("name", LAUNCHED)
def test_every_program_waits_once(name: str, arena: Arena) -> None:
    """Where launches are dependent; the interpreter has nothing to wait for, and counts."""
    with (
        mock.patch.object(launch, "dependent_launch", return_value=True),
        mock.patch.object(tl.extra.cuda, "gdc_wait") as wait,
        looked_at() as launches,
    ):
        served = warm(name, arena)
        served.fill(3)
        served.judge(served.compute())
    expect_equal(served.label, "programs that wait", wait.call_count, sum(math.prod(made.grid) for made in launches))
    expect_equal(served.label, "whether there are any", len(launches) >= 3, True)


@pytest.mark.lanes(Lane.INTERPRET)
@pytest.mark.parametrize("name", LAUNCHED)
def test_no_program_waits_where_launches_are_not_dependent(name: str, arena: Arena) -> None:
    with mock.patch.object(tl.extra.cuda, "gdc_wait") as wait:
        served = warm(name, arena)
        served.fill(3)
        served.judge(served.compute())
    expect_equal(served.label, "waits", wait.call_count, 0)
