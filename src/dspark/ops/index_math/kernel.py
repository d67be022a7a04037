"""Index arithmetic inside kernels."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def nonnegative_quotient(numerator, denominator):
    """numerator // denominator as int64, for numerator >= 0 and denominator > 0.

    The only place that divides run-time values: for negative ones the interpreter, the compiler and torch differ, so a
    caller proves that there are none (fault F4-4).
    """
    return (numerator // denominator).to(tl.int64)
