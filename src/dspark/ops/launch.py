"""What every kernel launcher does around its launch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from dspark import machine

_AS_IT_IS = nullcontext()
# The class of what Triton compiled, by name: Triton is imported by kernels alone.
_COMPILED = "CompiledKernel"

WIDEST_ACCESS = 16
"""Bytes that one thread of a GPU moves at most in one instruction, where address and strides are multiples of them."""


def launching(device: torch.device) -> AbstractContextManager[object]:
    """Surround a launch on tensors of ``device``.

    Triton launches on the current device, not on the tensor's, so that is made current. The interpreter computes with
    numpy, whose warnings about NaN, infinity and 0/0 are silenced: those values are defined by the contracts.
    """
    if device.type != "cuda":
        return np.errstate(all="ignore")
    return _AS_IT_IS if device.index == torch.cuda.current_device() else torch.cuda.device(device)


@dataclass(slots=True)
class Launch:
    """A launch of a kernel that calls share: all of it but the tensors.

    kernel: a jit function whose parameters are tensors (or None), then ``numbers`` in their order, then ``constants``.
    After those comes the constant ``DEPENDENT_LAUNCH``, which is not given: the device decides.
    grid: at most three counts. options: Triton's own, e.g. ``num_warps``.

    Triton specialises a kernel by the types of its arguments, the values of its numbers, and the addresses that 16
    divides, and finds that out again at each launch: for 30 arguments, most of a call's time. Between calls that share
    a launch only the addresses differ. So what was compiled for addresses that 16 divides is kept, and is launched at
    once where 16 divides them all; any other call is Triton's to look at. The sharing calls must have tensors of the
    same types and devices, of which the first that is compiled decides.
    """

    kernel: Any
    grid: tuple[int, ...]
    numbers: tuple[float, ...]
    constants: dict[str, Any]
    options: dict[str, Any]
    _compiled: Callable[..., None] | None = field(default=None, init=False)
    _rest: tuple[Any, ...] = field(default=(), init=False)

    def __call__(self, device: torch.device, *tensors: torch.Tensor | None) -> None:
        """Launch on ``tensors``, which are on ``device``."""
        compiled = self._compiled
        if compiled is not None:
            together, addresses = 0, []
            for tensor in tensors:
                address = 0 if tensor is None else tensor.data_ptr()
                together |= address
                addresses.append(address)
            if together % WIDEST_ACCESS == 0:
                with launching(device):
                    compiled(*addresses, *self._rest)
                return
        with launching(device):
            self._specialised(dependent_launch(device), tensors)

    def _specialised(self, dependent: bool, tensors: Sequence[torch.Tensor | None]) -> None:
        memory = [_in_bytes(tensor) for tensor in tensors]
        constants = {**self.constants, "DEPENDENT_LAUNCH": dependent}
        # The option is one of NVIDIA's backend alone.
        options = {**self.options, "launch_pdl": True} if dependent else self.options
        made = self.kernel[self.grid](*memory, *self.numbers, **constants, **options)
        if machine.facts().interpreter or any(t.data_ptr() % WIDEST_ACCESS for t in memory if t is not None):
            return
        if type(made).__name__ == _COMPILED:  # a hook of Triton's cache may have kept it from compiling
            names = self.kernel.arg_names[len(memory) + len(self.numbers) :]
            self._rest = (*self.numbers, *[constants[name] for name in names])
            self._compiled = made[(*self.grid, 1, 1)[:3]]


def _in_bytes(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """``tensor``; bools as the bytes that they are in memory, since Triton's own are bits."""
    return tensor.view(torch.int8) if tensor is not None and tensor.dtype is torch.bool else tensor


def dependent_launch(device: torch.device) -> bool:
    """Whether a kernel on ``device`` is launched while the one before it in the stream ends, and waits for it itself.

    Where CUDA can do that: from compute capability 9.0 on (see ``dependent_launch/kernel.py``).
    """
    if device.type != "cuda" or torch.version.hip is not None or machine.facts().interpreter:
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


def power_of_two(count: int) -> int:
    """The smallest power of two that is not less than ``count``; Triton's own costs a microsecond a call."""
    return 1 << (count - 1).bit_length() if count > 1 else 1


def blocks(count: int, size: int) -> int:
    """Programs of ``size`` that cover ``count``."""
    return -(-count // size)


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


def warps_for(elements: int) -> int:
    """Warps of a program of integers: one where it holds what a warp holds, so that no warp waits for another."""
    return 1 if elements <= 256 else 4


def tile_elements(gpu: int, interpreter: int) -> int:
    """Elements per program: ``gpu``, or ``interpreter`` where a program costs and an element does not."""
    return interpreter if machine.facts().interpreter else gpu
