"""What one call of ``state_scatter`` works on, and what its fused path needs, as data."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from dspark import dispatch, faults
from dspark.dispatch import Check
from dspark.machine import MachineFacts
from dspark.ops.machine_checks import MACHINE_CHECKS

STATE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Pair(NamedTuple):
    """A destination ``[L, S, *st]`` and the source ``[L, Rq, W, *st]`` of its entries, with their argument names.

    window: entries are conv windows, of two dimensions.
    """

    dst: torch.Tensor
    src: torch.Tensor
    dst_name: str
    src_name: str
    window: bool = False

    @property
    def entry(self) -> tuple[int, ...]:
        """st: the shape of one layer's state of one slot."""
        return tuple(self.dst.shape[2:])

    @property
    def elements(self) -> int:
        """Elements that one live row writes: L entries."""
        return self.dst.shape[0] * math.prod(self.entry)

    @property
    def destination_is_dense(self) -> bool:
        """Whether the elements of an entry lie one after the other; layer and slot strides are free."""
        return joined_dimensions(self.entry, self.dst.stride()[2:]) in ((), ((math.prod(self.entry), 1),))

    def source_dimensions(self) -> tuple[tuple[int, int], ...]:
        """(size, stride) of the source's entry, neighbours joined where one stride serves both."""
        return joined_dimensions(self.entry, self.src.stride()[3:])


def joined_dimensions(sizes: tuple[int, ...], strides: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """The fewest (size, stride) that walk the same elements in the same order; () for a single element."""
    joined: list[tuple[int, int]] = []
    for size, stride in zip(sizes, strides, strict=True):
        if size == 1:
            continue
        if joined and joined[-1][1] == size * stride:
            joined[-1] = (joined[-1][0] * size, stride)
        else:
            joined.append((size, stride))
    return tuple(joined)


class RowSet(NamedTuple):
    """Which rows are written where: slots, steps and (None: row i) source rows, each ``[N]`` int32 or int64."""

    slots: torch.Tensor
    steps: torch.Tensor
    sources: torch.Tensor | None = None


@dataclass(frozen=True)
class Facts:
    """What one call looks like to the checks.

    scattered_destination: the strides of the first destination that is not dense inside an entry, or None.
    source_dimensions: of the source entry with the most dimensions after joining.
    """

    machine: MachineFacts
    device_type: str
    dtypes: tuple[torch.dtype, ...]
    scattered_destination: tuple[int, ...] | None
    source_dimensions: tuple[tuple[int, int], ...]


def facts_of(machine: MachineFacts, device: torch.device, pairs: tuple[Pair, ...]) -> Facts:
    """The facts of a call that scatters ``pairs``."""
    scattered = (pair.dst.stride() for pair in pairs if not pair.destination_is_dense)
    return Facts(
        machine=machine,
        device_type=device.type,
        dtypes=tuple(dict.fromkeys(pair.dst.dtype for pair in pairs)),
        scattered_destination=next(scattered, None),
        source_dimensions=max((pair.source_dimensions() for pair in pairs), key=len, default=()),
    )


def _dtype(facts: Facts) -> tuple[bool, Hashable]:
    return set(facts.dtypes) <= set(STATE_DTYPES), facts.dtypes


def _destination(facts: Facts) -> tuple[bool, Hashable]:
    return facts.scattered_destination is None, facts.scattered_destination


def _source(facts: Facts) -> tuple[bool, Hashable]:
    return len(facts.source_dimensions) <= 2, facts.source_dimensions


CHECKS = (
    *MACHINE_CHECKS,
    Check("state-dtype", "states must be bfloat16, float16 or float32", _dtype),
    Check(
        "destination-dense",
        "the elements of a destination's entry must be dense; layer and slot strides are free",
        _destination,
    ),
    Check(
        "source-dimensions",
        "the elements of a source's entry must lie at one or two strides, e.g. dense, or a window of longer rows",
        _source,
    ),
)
OP = dispatch.register("state_scatter", CHECKS)
STEP_FAULT = faults.declare(OP, "step-out-of-range")
SLOT_FAULT = faults.declare(OP, "slot-out-of-range")
SOURCE_FAULT = faults.declare(OP, "source-out-of-range")
DUPLICATE_FAULT = faults.declare(OP, "duplicate-slot")
