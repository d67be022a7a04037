"""Norm and rotation of heads inside a kernel: called by the kernels of ``qk_norm_rope`` and ``kv_write``.

Tile: BLOCK_TOKENS rows x BLOCK_HEADS heads, each element loaded and stored once.

                 rotated half 1      rotated half 2      passed through
               +-------------------+-------------------+------------------+
    (row, head)|  x1 [R/2]         |  x2 [R/2]         |  xp [D - R]      |   -> sum of squares over the head -> inv
               +-------------------+-------------------+------------------+
                 y1 = bf16(x1 inv w)  y2                   yp
                 y1 c - y2 s          y2 c + y1 s          yp

Neox style pairs (i, i + R/2), otherwise (2i, 2i + 1); either way both elements of a pair are in the same thread.
Arithmetic is fp32.
"""

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
    return (x * inverse * weight[None, None, :]).to(tl.bfloat16).to(tl.float32)


@triton.jit
def report(fault_ptr, bits, reports):
    """Set the bits ``[rows]`` of faulty rows in the fault word, from the one program of these rows that ``reports``."""
    if reports:
        tl.atomic_or(fault_ptr + tl.zeros(bits.shape, tl.int64), bits, mask=bits != 0, sem="relaxed")


@triton.jit
def pair_of_vectors(first_ptr, second_ptr, mask):
    """Two loads of one shape, widened: both weights of a pair, or its cosine and sine."""
    first = tl.load(first_ptr, mask=mask, other=0.0).to(tl.float32)
    return first, tl.load(second_ptr, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def norm_rotate_heads(
    source,
    target,
    table_row,
    row_read,
    row_live,
    head_live,
    weights_ptr,
    weights_stride,
    eps,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    PASSED: tl.constexpr,
    NEOX: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_PASSED: tl.constexpr,
    STREAMED: tl.constexpr,
):
    """Norm and rotate the heads at ``source`` and store them at ``target``.

    source, target: pointers ``[rows, heads, 1]`` to the first element of each head. table_row: pointers ``[rows]`` to
    the row's cosines, followed by its sines. row_read, row_live: masks ``[rows]`` of what may be read, as soon as that
    is known, and of what is stored. head_live: ``[heads]``. STREAMED: of many rows. Then few registers are worth more
    than an early start, and what is stored makes room first. Otherwise every load is asked for before the first sum,
    since the compiler moves none over the barrier of a reduction.
    """
    read = row_read[:, None, None] & head_live[None, :, None]
    live = row_live[:, None, None] & head_live[None, :, None]
    # Columns are 64-bit because they are multiplied by the stride of the weights.
    i = tl.arange(0, BLOCK_HALF).to(tl.int64)
    half_live = i < HALF
    if NEOX:
        first, second = i, i + HALF
    else:
        first, second = 2 * i, 2 * i + 1
    pair_read = read & half_live[None, None, :]
    pair_live = live & half_live[None, None, :]
    x1 = tl.load(source + first[None, None, :], mask=pair_read, other=0.0).to(tl.float32)
    x2 = tl.load(source + second[None, None, :], mask=pair_read, other=0.0).to(tl.float32)
    angle = table_row[:, None] + i[None, :]
    angle_live = row_live[:, None] & half_live[None, :]
    if not STREAMED:
        w1, w2 = pair_of_vectors(weights_ptr + first * weights_stride, weights_ptr + second * weights_stride, half_live)
        cos, sin = pair_of_vectors(angle, angle + HALF, angle_live)
    sum_of_squares = tl.sum(x1 * x1, axis=2) + tl.sum(x2 * x2, axis=2)
    if PASSED > 0:
        j = tl.arange(0, BLOCK_PASSED).to(tl.int64)
        passed = j + 2 * HALF
        passed_live = live & (j < PASSED)[None, None, :]
        xp = tl.load(source + passed[None, None, :], mask=read & (j < PASSED)[None, None, :], other=0.0).to(tl.float32)
        sum_of_squares += tl.sum(xp * xp, axis=2)
    inverse = inverse_rms(sum_of_squares, HEAD_DIM, eps)[:, :, None]

    if STREAMED:
        w1, w2 = pair_of_vectors(weights_ptr + first * weights_stride, weights_ptr + second * weights_stride, half_live)
    y1, y2 = normed(x1, inverse, w1), normed(x2, inverse, w2)
    if STREAMED:
        cos, sin = pair_of_vectors(angle, angle + HALF, angle_live)
    cos, sin = cos[:, None, :], sin[:, None, :]
    eviction: tl.constexpr = "evict_first" if STREAMED else ""
    one, two = target + first[None, None, :], target + second[None, None, :]
    tl.store(one, (y1 * cos - y2 * sin).to(tl.bfloat16), mask=pair_live, eviction_policy=eviction)
    tl.store(two, (y2 * cos + y1 * sin).to(tl.bfloat16), mask=pair_live, eviction_policy=eviction)
    if PASSED > 0:
        wp = tl.load(weights_ptr + passed * weights_stride, mask=j < PASSED, other=0.0).to(tl.float32)
        tl.store(
            target + passed[None, None, :],
            normed(xp, inverse, wp).to(tl.bfloat16),
            mask=passed_live,
            eviction_policy=eviction,
        )
