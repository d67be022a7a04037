"""``commit_indices`` as one Triton kernel.

Tile, one program: rows, each with two entries of its row of accept_index.

    rows [n]  accept_lens   -> entry accepted - 1               -> accept_index there -> last  [n]
              seq_lens      -> entry that completes an interval -> accept_index there -> track [n]

With r = pre mod I, a boundary is crossed iff r + accepted >= I, and (r + accepted) mod I tokens follow the last one.
Both remainders are of numbers that are not negative: a row whose length is negative is not live and counts as 0.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dspark import faults
from dspark.ops.commit_indices.checks import ACCEPT_LEN_FAULT, SEQ_LEN_FAULT
from dspark.ops.dependent_launch.kernel import wait_for_prerequisite_grids
from dspark.ops.index_math.kernel import nonnegative_quotient
from dspark.ops.launch import Launch, blocks, power_of_two, tile_elements, warps_for
from dspark.ops.plans import KernelPlan

# Rows per program. The interpreter pays per program, a GPU wants many programs of one warp.
GPU_TILE = 32
INTERPRETER_TILE = 1 << 16


@triton.jit
def completing_entry(pre, accepted, interval, longest: tl.constexpr):
    """Which of ``accepted`` tokens after ``pre`` completes the last multiple of ``interval``, -1 where none does.

    pre, accepted: int64, not negative; accepted is at most ``longest``.
    """
    reached = pre - nonnegative_quotient(pre, interval) * interval + accepted
    # Less than two intervals, except where one is shorter than a window: a quotient costs more than all the rest.
    left_over = reached - interval
    if interval < longest:
        left_over = reached - nonnegative_quotient(reached, interval) * interval
    return tl.where(reached >= interval, accepted - left_over - 1, -1)


@triton.jit
def commit_indices_kernel(
    accept_index_ptr,
    accept_lens_ptr,
    seq_lens_ptr,
    last_ptr,
    track_ptr,
    fault_ptr,
    batch,
    draft_token_num,
    interval,
    accept_index_stride_row,
    accept_index_stride_column,
    accept_lens_stride,
    seq_lens_stride,
    DEPTH: tl.constexpr,
    HAS_SEQ_LENS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    ACCEPT_LEN_MASK: tl.constexpr,
    SEQ_LEN_MASK: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):
    wait_for_prerequisite_grids(DEPENDENT_LAUNCH)
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS).to(tl.int64)
    in_batch = rows < batch
    accepted = tl.load(accept_lens_ptr + rows * accept_lens_stride, mask=in_batch, other=0).to(tl.int64)
    live = (accepted > 0) & (accepted <= DEPTH)
    fault_bits = tl.where(accepted > DEPTH, ACCEPT_LEN_MASK, 0).to(tl.int64)
    if HAS_SEQ_LENS:
        pre = tl.load(seq_lens_ptr + rows * seq_lens_stride, mask=in_batch, other=0).to(tl.int64)
        fault_bits = fault_bits | tl.where((accepted > 0) & (pre < 0), SEQ_LEN_MASK, 0).to(tl.int64)
        live = live & (pre >= 0)
    accepted = tl.where(live, accepted, 0)
    row_ptr = accept_index_ptr + rows * accept_index_stride_row
    first_node = rows * draft_token_num
    last = tl.load(row_ptr + (accepted - 1) * accept_index_stride_column, mask=live, other=0).to(tl.int64)
    tl.store(last_ptr + rows, tl.where(live, last - first_node, -1), mask=in_batch)
    if HAS_SEQ_LENS:
        entry = completing_entry(tl.where(live, pre, 0), accepted, interval, DEPTH)
        tracked = live & (entry >= 0)
        track = tl.load(row_ptr + entry * accept_index_stride_column, mask=tracked, other=0).to(tl.int64)
        tl.store(track_ptr + rows, tl.where(tracked, track - first_node, -1), mask=in_batch)
    # Last: nothing that follows in a program starts before what waits for its inputs has started.
    tl.atomic_or(fault_ptr + tl.zeros([BLOCK_ROWS], tl.int64), fault_bits, mask=fault_bits != 0, sem="relaxed")


def commit_indices_fused(
    plan: KernelPlan,
    accept_index: torch.Tensor,
    accept_lens: torch.Tensor,
    seq_lens: torch.Tensor | None,
    draft_token_num: int,
    interval: int,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """See :func:`dspark.ops.fused_commit_track_indices`; ``plan`` is that of the arguments, eligible."""
    (batch, depth), device = accept_index.shape, accept_index.device
    last = torch.empty(batch, dtype=torch.int64, device=device)
    track = None if seq_lens is None else torch.empty(batch, dtype=torch.int64, device=device)
    if batch == 0:
        return last, track
    if plan.launch is None:
        block_rows = min(tile_elements(GPU_TILE, INTERPRETER_TILE), power_of_two(batch))
        plan.launch = Launch(
            commit_indices_kernel,
            (blocks(batch, block_rows),),
            (
                batch,
                draft_token_num,
                interval,
                *accept_index.stride(),
                accept_lens.stride(0),
                seq_lens.stride(0) if seq_lens is not None else 0,
            ),
            {
                "DEPTH": depth,
                "HAS_SEQ_LENS": seq_lens is not None,
                "BLOCK_ROWS": block_rows,
                "ACCEPT_LEN_MASK": ACCEPT_LEN_FAULT,
                "SEQ_LEN_MASK": SEQ_LEN_FAULT,
            },
            {"num_warps": warps_for(block_rows), "enable_fp_fusion": False},
        )
    plan.launch(device, accept_index, accept_lens, seq_lens, last, track, faults.word(device))
    return last, track
