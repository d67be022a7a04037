"""``accept`` as one Triton kernel.

Tile, one program:

            k = 0 .. W-1 (padded to a power of two)
          +-------------------------------+
    rows  |  candidates[:, k+1] ==        |   -> first k that differs   -> correct [rows]
          |  target_predict[:, k]         |   -> target at that column  -> bonus   [rows]
          +-------------------------------+

The bonus is read again, from the cache that the tile has filled: its column is known in less time than a sum over the
tile takes. Integers only: contraction and bf16 rounding do not occur.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dspark import faults
from dspark.ops.accept.checks import VERIFY_LEN_FAULT
from dspark.ops.dependent_launch.kernel import wait_for_prerequisite_grids
from dspark.ops.launch import Launch, blocks, power_of_two, tile_elements, warps_for
from dspark.ops.plans import KernelPlan

# Elements per program. The interpreter pays per program, a GPU wants many programs of one warp.
GPU_TILE = 32
INTERPRETER_TILE = 1 << 16


@triton.jit
def accept_window(
    candidates_ptr,
    target_ptr,
    verify_lens_ptr,
    rows,
    row_live,
    columns,
    candidates_stride_row,
    candidates_stride_column,
    target_stride_row,
    target_stride_column,
    verify_lens_stride,
    WIDTH: tl.constexpr,
    HAS_VERIFY_LENS: tl.constexpr,
):
    """Of ``rows [BLOCK_ROWS]``, of which ``row_live`` exist: the target's tile, correct, bonus, and whether the
    verify_len is outside 1..WIDTH. The tile lacks the last column, which confirms no candidate."""
    confirms = row_live[:, None] & (columns < WIDTH - 1)[None, :]
    target_row = target_ptr + rows * target_stride_row
    candidates_row = candidates_ptr + rows * candidates_stride_row
    target = tl.load(target_row[:, None] + (columns * target_stride_column)[None, :], mask=confirms, other=0).to(
        tl.int64
    )
    candidates = tl.load(
        candidates_row[:, None] + ((columns + 1) * candidates_stride_column)[None, :], mask=confirms, other=0
    ).to(tl.int64)
    if HAS_VERIFY_LENS:
        lens = tl.load(verify_lens_ptr + rows * verify_lens_stride, mask=row_live, other=1).to(tl.int64)
    # What is not confirmed here is padding, and equal: WIDTH - 1 is the most.
    correct = tl.min(tl.where(candidates != target, columns[None, :].to(tl.int32), WIDTH - 1), axis=1).to(tl.int64)
    out_of_range = row_live  # asked for only where there are lens
    if HAS_VERIFY_LENS:
        out_of_range = (lens < 1) | (lens > WIDTH)
        correct = tl.minimum(correct, tl.minimum(tl.maximum(lens, 1), WIDTH) - 1)
    bonus = tl.load(target_row + correct * target_stride_column, mask=row_live, other=0).to(tl.int64)
    return target, correct, bonus, out_of_range


@triton.jit
def report_verify_lens(fault_ptr, out_of_range, BLOCK_ROWS: tl.constexpr, FAULT_MASK: tl.constexpr):
    """Set the fault if a row is ``out_of_range``. Comes last: what follows it in a program waits for its inputs."""
    fault_bits = tl.full([BLOCK_ROWS], FAULT_MASK, tl.int64)
    tl.atomic_or(fault_ptr + tl.zeros([BLOCK_ROWS], tl.int64), fault_bits, mask=out_of_range, sem="relaxed")


@triton.jit
def accept_kernel(
    candidates_ptr,
    target_ptr,
    verify_lens_ptr,
    correct_ptr,
    bonus_ptr,
    fault_ptr,
    batch,
    candidates_stride_row,
    candidates_stride_column,
    target_stride_row,
    target_stride_column,
    verify_lens_stride,
    WIDTH: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    HAS_VERIFY_LENS: tl.constexpr,
    FAULT_MASK: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):
    wait_for_prerequisite_grids(DEPENDENT_LAUNCH)
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS).to(tl.int64)
    row_live = rows < batch
    columns = tl.arange(0, BLOCK_WIDTH).to(tl.int64)
    _target, correct, bonus, out_of_range = accept_window(
        candidates_ptr,
        target_ptr,
        verify_lens_ptr,
        rows,
        row_live,
        columns,
        candidates_stride_row,
        candidates_stride_column,
        target_stride_row,
        target_stride_column,
        verify_lens_stride,
        WIDTH,
        HAS_VERIFY_LENS,
    )
    tl.store(correct_ptr + rows, correct.to(tl.int32), mask=row_live)
    tl.store(bonus_ptr + rows, bonus, mask=row_live)
    if HAS_VERIFY_LENS:
        report_verify_lens(fault_ptr, row_live & out_of_range, BLOCK_ROWS, FAULT_MASK)


def accept_fused(
    plan: KernelPlan, candidates: torch.Tensor, target_predict: torch.Tensor, verify_lens: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """See :func:`dspark.ops.compute_dflash_correct_drafts_and_bonus`; ``plan`` is that of the arguments, eligible."""
    (batch, width), device = candidates.shape, candidates.device
    correct = torch.empty(batch, dtype=torch.int32, device=device)
    bonus = torch.empty(batch, dtype=torch.int64, device=device)
    if plan.launch is None:
        block_width = power_of_two(width)
        tile = tile_elements(GPU_TILE, INTERPRETER_TILE)
        block_rows = max(1, min(tile // block_width, power_of_two(batch)))
        plan.launch = Launch(
            accept_kernel,
            (blocks(batch, block_rows),),
            (
                batch,
                *candidates.stride(),
                *target_predict.stride(),
                verify_lens.stride(0) if verify_lens is not None else 0,
            ),
            {
                "WIDTH": width,
                "BLOCK_ROWS": block_rows,
                "BLOCK_WIDTH": block_width,
                "HAS_VERIFY_LENS": verify_lens is not None,
                "FAULT_MASK": VERIFY_LEN_FAULT,
            },
            {"num_warps": warps_for(block_rows * block_width), "enable_fp_fusion": False},
        )
    plan.launch(device, candidates, target_predict, verify_lens, correct, bonus, faults.word(device))
    return correct, bonus
