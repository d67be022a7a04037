"""What every kernel launcher does around its launch."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import numpy as np
import torch

from dspark import machine

_AS_IT_IS = nullcontext()


def launching(device: torch.device) -> AbstractContextManager[object]:
    """Surround a launch on tensors of ``device``.

    Triton launches on the current device, not on the tensor's, so that is made current. The interpreter computes with
    numpy, whose warnings about NaN, infinity and 0/0 are silenced: those values are defined by the contracts.
    """
    if device.type != "cuda":
        return np.errstate(all="ignore")
    return _AS_IT_IS if device.index == torch.cuda.current_device() else torch.cuda.device(device)


def power_of_two(count: int) -> int:
    """The smallest power of two that is not less than ``count``; Triton's own costs a microsecond a call."""
    return 1 << (count - 1).bit_length() if count > 1 else 1


def blocks(count: int, size: int) -> int:
    """Programs of ``size`` that cover ``count``."""
    return -(-count // size)


WIDEST_ACCESS = 16
"""Bytes that one thread of a GPU moves at most in one instruction, where address and strides are multiples of them."""


class Tile(NamedTuple):
    """The work of one program on a GPU: up to how many rows of a call it is the best, its elements, heads and warps.

    streamed: whether such calls move more than a cache should keep (see ``norm_rope/kernel.py``).
    """

    rows: float
    elements: int
    heads: int
    warps: int
    streamed: bool = False


def tile_for(rows: int, measured: Sequence[Tile], interpreter: int) -> Tile:
    """The first of ``measured`` (in order of rows, the last without end) for a call of ``rows`` rows.

    Where a program costs and an element does not: ``interpreter`` elements, all heads.
    """
    if machine.facts().interpreter:
        return Tile(float("inf"), interpreter, interpreter, 4)
    return next(tile for tile in measured if rows <= tile.rows)


def tile_elements(gpu: int, interpreter: int) -> int:
    """Elements per program: ``gpu``, or ``interpreter`` where a program costs and an element does not."""
    return interpreter if machine.facts().interpreter else gpu
