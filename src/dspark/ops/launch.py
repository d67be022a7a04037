"""What every kernel launcher does around its launch."""

from __future__ import annotations

from contextlib import AbstractContextManager

import numpy as np
import torch

from dspark import machine


def launching(device: torch.device) -> AbstractContextManager[object]:
    """Surround a launch on tensors of ``device``.

    Triton launches on the current device, not on the tensor's, so that is made current. The interpreter computes with
    numpy, whose warnings about NaN, infinity and 0/0 are silenced: those values are defined by the contracts.
    """
    return torch.cuda.device(device) if device.type == "cuda" else np.errstate(all="ignore")


def tile_elements(gpu: int, interpreter: int) -> int:
    """Elements per program: ``gpu``, or ``interpreter`` where a program costs and an element does not."""
    return interpreter if machine.facts().interpreter else gpu
