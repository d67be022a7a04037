"""``qk_norm_rope`` as one Triton kernel, in place.

Grid: (token blocks, head blocks). A program's heads are all Q or all K; its tile is that of ``norm_rope/kernel.py``,
with source and target the same. Contraction is declared off, so the compiled kernel rounds each product as the eager
path does.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dspark import faults
from dspark.ops.dependent_launch.kernel import wait_for_prerequisite_grids
from dspark.ops.launch import Launch, Tile, blocks, power_of_two, tile_for
from dspark.ops.norm_rope.kernel import norm_rotate_heads, report
from dspark.ops.plans import KernelPlan
from dspark.ops.qk_norm_rope.checks import POSITION_FAULT

# Of 45 tried on an H200 (64+16 heads of 64, 32+8 of 128): within 8 % of the best from 1 to 16,384 rows. A short call is
# a chain of loads, which many programs of one head hide better than few of eight.
GPU_TILES = (Tile(128, 1024, 1, 4), Tile(float("inf"), 2048, 16, 4, streamed=True))
INTERPRETER_TILE = 1 << 19
FP_CONTRACTION = False


@triton.jit
def qk_norm_rope_kernel(
    qkv_ptr,
    positions_ptr,
    q_weight_ptr,
    k_weight_ptr,
    table_ptr,
    fault_ptr,
    tokens,
    table_rows,
    qkv_stride,
    positions_stride,
    q_weight_stride,
    k_weight_stride,
    table_stride,
    q_eps,
    k_eps,
    NUM_Q: tl.constexpr,
    NUM_K: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    PASSED: tl.constexpr,
    NEOX: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_PASSED: tl.constexpr,
    STREAMED: tl.constexpr,
    FAULT_MASK: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):
    wait_for_prerequisite_grids(DEPENDENT_LAUNCH)
    rows = tl.program_id(0).to(tl.int64) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS).to(tl.int64)
    row_in_batch = rows < tokens
    positions = tl.load(positions_ptr + rows * positions_stride, mask=row_in_batch, other=0).to(tl.int64)
    in_table = (positions >= 0) & (positions < table_rows)
    row_live = row_in_batch & in_table
    fault_bits = tl.where(row_in_batch & (in_table == 0), FAULT_MASK, 0).to(tl.int64)
    if STREAMED:
        report(fault_ptr, fault_bits, tl.program_id(1) == 0)

    # Head blocks do not straddle the boundary between Q and K, so weight and eps are one per program.
    q_blocks = (NUM_Q + BLOCK_HEADS - 1) // BLOCK_HEADS
    is_k = tl.program_id(1) >= q_blocks
    if is_k:
        head_in_part = (tl.program_id(1) - q_blocks) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
        head_live = head_in_part < NUM_K
        heads = head_in_part + NUM_Q
    else:
        head_in_part = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
        head_live = head_in_part < NUM_Q
        heads = head_in_part

    head_ptr = qkv_ptr + rows[:, None, None] * qkv_stride + heads.to(tl.int64)[None, :, None] * HEAD_DIM
    table_row = table_ptr + positions * table_stride
    # The two weights may differ in dtype, so each branch reads its own.
    if is_k:
        norm_rotate_heads(
            head_ptr,
            head_ptr,
            table_row,
            row_in_batch,
            row_live,
            head_live,
            k_weight_ptr,
            k_weight_stride,
            k_eps,
            HEAD_DIM,
            HALF,
            PASSED,
            NEOX,
            BLOCK_HALF,
            BLOCK_PASSED,
            STREAMED,
        )
    else:
        norm_rotate_heads(
            head_ptr,
            head_ptr,
            table_row,
            row_in_batch,
            row_live,
            head_live,
            q_weight_ptr,
            q_weight_stride,
            q_eps,
            HEAD_DIM,
            HALF,
            PASSED,
            NEOX,
            BLOCK_HALF,
            BLOCK_PASSED,
            STREAMED,
        )
    if not STREAMED:
        report(fault_ptr, fault_bits, tl.program_id(1) == 0)


def qk_norm_rope_fused(
    plan: KernelPlan,
    qkv: torch.Tensor,
    positions: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    num_q_heads: int,
    num_k_heads: int,
    head_dim: int,
    q_eps: float,
    k_eps: float,
    rotary_dim: int,
    is_neox_style: bool,
) -> None:
    """See :func:`dspark.ops.table_qk_norm_rope_`; ``plan`` is that of the arguments, eligible and not empty."""
    tensors = (qkv, positions, q_weight, k_weight, cos_sin_cache)
    if plan.launch is None:
        tokens = qkv.shape[0]
        half, passed = rotary_dim // 2, head_dim - rotary_dim
        widest = power_of_two(max(num_q_heads, num_k_heads))
        tile = tile_for(tokens, GPU_TILES, INTERPRETER_TILE)
        block_heads = min(widest, tile.heads)
        block_tokens = tile.elements // (block_heads * power_of_two(head_dim))
        block_tokens = max(1, min(block_tokens, power_of_two(tokens)))
        grid = (
            blocks(tokens, block_tokens),
            blocks(num_q_heads, block_heads) + blocks(num_k_heads, block_heads),
        )
        plan.launch = Launch(
            qk_norm_rope_kernel,
            grid,
            (
                tokens,
                cos_sin_cache.shape[0],
                qkv.stride(0),
                positions.stride(0),
                q_weight.stride(0),
                k_weight.stride(0),
                cos_sin_cache.stride(0),
                q_eps,
                k_eps,
            ),
            {
                "NUM_Q": num_q_heads,
                "NUM_K": num_k_heads,
                "HEAD_DIM": head_dim,
                "HALF": half,
                "PASSED": passed,
                "NEOX": is_neox_style,
                "BLOCK_TOKENS": block_tokens,
                "BLOCK_HEADS": block_heads,
                "BLOCK_HALF": power_of_two(half),
                "BLOCK_PASSED": power_of_two(max(passed, 1)),
                "STREAMED": tile.streamed,
                "FAULT_MASK": POSITION_FAULT,
            },
            {"num_warps": tile.warps, "enable_fp_fusion": FP_CONTRACTION},
        )
    device = qkv.device
    plan.launch(device, *tensors, faults.word(device))
