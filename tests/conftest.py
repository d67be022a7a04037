"""Tests of the machinery; not part of the gate's counts. Kernels run in the interpreter where there is no GPU."""

from __future__ import annotations

import os
import sys

import torch

if "triton" not in sys.modules and not torch.cuda.is_available():
    # Read by Triton when it is imported, so it must be set before any test module is.
    os.environ.setdefault("TRITON_INTERPRET", "1")
