"""Norm and rotation of heads inside a kernel: called by other kernels, launched by none."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def inverse_rms(sum_of_squares, HEAD_DIM: tl.constexpr, eps):
    """1 / sqrt(sum / D + eps), any shape, fp32.

    Correctly rounded root and quotients: three operations per head cost nothing beside its loads.
    """
    mean_square = tl.div_rn(sum_of_squares, tl.full(sum_of_squares.shape, HEAD_DIM, tl.float32))
    root = tl.sqrt_rn(mean_square + eps)
    return tl.div_rn(tl.full(root.shape, 1.0, tl.float32), root)


@triton.jit
def normed(x, inverse, weight):
    """x * inv * w in fp32, rounded once to bf16, and back in fp32 for the rotation."""
    return (x * inverse * weight).to(tl.bfloat16).to(tl.float32)
