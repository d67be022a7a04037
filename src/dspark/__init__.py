"""DSPARK / DFlash draft path for Inkling-class targets: fused Triton kernels, their definitions in plain torch,
and a dispatch that never falls back without saying why.

The public operations are in :mod:`dspark.ops`. Importing this package imports neither Triton nor CUDA.
"""

from __future__ import annotations

from dspark import dispatch
from dspark.dispatch import FallbackError
from dspark.faults import IndexFaultError, warmup

__version__ = "0.1.0.dev0"
__all__ = ["FallbackError", "IndexFaultError", "__version__", "dispatch", "warmup"]
