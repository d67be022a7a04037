"""What the fused path of ``accept`` needs, as data."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from dspark import dispatch, faults
from dspark.dispatch import Check
from dspark.machine import MachineFacts
from dspark.ops.machine_checks import MACHINE_CHECKS

MAX_WIDTH = 1024
"""Columns that the kernel holds in one tile."""


@dataclass(frozen=True)
class Facts:
    """What one call looks like to the checks."""

    machine: MachineFacts
    device_type: str
    width: int


def _width(facts: Facts) -> tuple[bool, Hashable]:
    return facts.width <= MAX_WIDTH, facts.width


CHECKS = (
    *MACHINE_CHECKS,
    Check("verify-width", f"the verify width W must be at most {MAX_WIDTH}", _width),
)
OP = dispatch.register("accept", CHECKS)
VERIFY_LEN_FAULT = faults.declare(OP, "verify-len-out-of-range")
