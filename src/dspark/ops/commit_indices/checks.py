"""What the fused path of ``commit_indices`` needs, as data."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from dspark import dispatch, faults
from dspark.dispatch import Check
from dspark.machine import MachineFacts
from dspark.ops.machine_checks import MACHINE_CHECKS

MAX_DEPTH = 1024
"""Columns that the kernel holds in one tile."""


@dataclass(frozen=True)
class Facts:
    """What one call looks like to the checks."""

    machine: MachineFacts
    device_type: str
    depth: int


def _depth(facts: Facts) -> tuple[bool, Hashable]:
    return facts.depth <= MAX_DEPTH, facts.depth


CHECKS = (
    *MACHINE_CHECKS,
    Check("accept-depth", f"accept_index must have at most {MAX_DEPTH} columns", _depth),
)
OP = dispatch.register("commit_indices", CHECKS)
ACCEPT_LEN_FAULT = faults.declare(OP, "accept-len-out-of-range")
SEQ_LEN_FAULT = faults.declare(OP, "seq-len-negative")
