"""Programmatic dependent launch, from inside a kernel (CUDA Programming Guide; PTX ``griddepcontrol``).

Launched so, a program may be started before the kernel that precedes it in the stream has ended, and before what that
kernel wrote is visible. Between the kernels of a decode step, which take one or two microseconds each, that hides a
third of one: on an H200, 0.35 to 0.6 us of each call.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def wait_for_prerequisite_grids(DEPENDENT_LAUNCH: tl.constexpr):
    """Wait until the kernel before has ended and its writes can be seen. What every launched kernel does first.

    In all programs and before any access, stores too: whoever comes next in the stream trusts that a kernel that has
    ended means that those before it have. That is also why a kernel here never calls ``gdc_launch_dependents``: it
    would let a kernel of others, which may read before it waits, overlap what precedes this one.
    """
    if DEPENDENT_LAUNCH:
        tl.extra.cuda.gdc_wait()
