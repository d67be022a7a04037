"""``accept_commit`` as one Triton kernel.

Tile, one program:

            k = 0 .. W-1 (padded to a power of two)
          +-------------------------------+   -> correct, bonus                       as accept
    rows  |  candidates[:, k+1] ==        |   -> first k whose target is an end
          |  target_predict[:, k]         |   -> commit_lens, new_seq_lens, last
          +-------------------------------+   -> column that completes an interval    as commit_indices

Drafts are a chain, so the step of a token is its column and no table of nodes is read.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dspark import faults
from dspark.ops.accept.kernel import accept_window, report_verify_lens
from dspark.ops.accept_commit.checks import VERIFY_LEN_FAULT
from dspark.ops.accept_commit.result import AcceptCommit
from dspark.ops.commit_indices.kernel import completing_entry
from dspark.ops.dependent_launch.kernel import wait_for_prerequisite_grids
from dspark.ops.launch import Launch, blocks, power_of_two, tile_elements, warps_for
from dspark.ops.plans import KernelPlan

# Elements per program. The interpreter pays per program, a GPU wants many programs of one warp.
GPU_TILE = 128
INTERPRETER_TILE = 1 << 16


@triton.jit
def accept_commit_kernel(
    candidates_ptr,
    target_ptr,
    seq_lens_ptr,
    verify_lens_ptr,
    eos_ids_ptr,
    correct_ptr,
    bonus_ptr,
    commit_lens_ptr,
    new_seq_lens_ptr,
    last_ptr,
    track_ptr,
    fault_ptr,
    batch,
    eos_count,
    interval,
    candidates_stride_row,
    candidates_stride_column,
    target_stride_row,
    target_stride_column,
    seq_lens_stride,
    verify_lens_stride,
    eos_ids_stride,
    WIDTH: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    HAS_VERIFY_LENS: tl.constexpr,
    HAS_EOS_IDS: tl.constexpr,
    HAS_TRACK: tl.constexpr,
    FAULT_MASK: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):
    wait_for_prerequisite_grids(DEPENDENT_LAUNCH)
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS).to(tl.int64)
    in_batch = rows < batch
    columns = tl.arange(0, BLOCK_WIDTH).to(tl.int64)
    pre = tl.load(seq_lens_ptr + rows * seq_lens_stride, mask=in_batch, other=-1).to(tl.int64)
    live = pre >= 0
    target, correct, bonus, out_of_range = accept_window(
        candidates_ptr,
        target_ptr,
        verify_lens_ptr,
        rows,
        in_batch,
        columns,
        candidates_stride_row,
        candidates_stride_column,
        target_stride_row,
        target_stride_column,
        verify_lens_stride,
        WIDTH,
        HAS_VERIFY_LENS,
    )
    tl.store(correct_ptr + rows, correct.to(tl.int32), mask=in_batch)
    tl.store(bonus_ptr + rows, bonus, mask=in_batch)
    kept = correct
    if HAS_EOS_IDS:
        index = tl.program_id(0).to(tl.int64) * 0
        while index < eos_count:
            eos = tl.load(eos_ids_ptr + index * eos_ids_stride).to(tl.int64)
            # Columns that are not in the tile hold 0, which may be an end; they are beyond what is correct too.
            kept = tl.minimum(kept, tl.min(tl.where(target == eos, columns[None, :], WIDTH), axis=1))
            index += 1
    committed = tl.where(live, kept + 1, 0)
    tl.store(commit_lens_ptr + rows, committed, mask=in_batch)
    tl.store(new_seq_lens_ptr + rows, pre + committed, mask=in_batch)
    tl.store(last_ptr + rows, committed - 1, mask=in_batch)
    if HAS_TRACK:
        track = completing_entry(tl.where(live, pre, 0), committed, interval, WIDTH)
        tl.store(track_ptr + rows, track, mask=in_batch)
    if HAS_VERIFY_LENS:
        report_verify_lens(fault_ptr, live & out_of_range, BLOCK_ROWS, FAULT_MASK)


def accept_commit_fused(
    plan: KernelPlan,
    candidates: torch.Tensor,
    target_predict: torch.Tensor,
    seq_lens: torch.Tensor,
    verify_lens: torch.Tensor | None,
    eos_ids: torch.Tensor | None,
    interval: int | None,
) -> AcceptCommit:
    """See :func:`dspark.ops.fused_accept_commit`; ``plan`` is that of the arguments, eligible."""
    (batch, width), device = candidates.shape, candidates.device
    correct = torch.empty(batch, dtype=torch.int32, device=device)
    bonus, commit_lens, new_seq_lens, last = (torch.empty(batch, dtype=torch.int64, device=device) for _ in range(4))
    track = None if interval is None else torch.empty(batch, dtype=torch.int64, device=device)
    if plan.launch is None:
        block_width = power_of_two(width)
        tile = tile_elements(GPU_TILE, INTERPRETER_TILE)
        block_rows = max(1, min(tile // block_width, power_of_two(batch)))
        plan.launch = Launch(
            accept_commit_kernel,
            (blocks(batch, block_rows),),
            (
                batch,
                eos_ids.numel() if eos_ids is not None else 0,
                interval if interval is not None else 1,
                *candidates.stride(),
                *target_predict.stride(),
                seq_lens.stride(0),
                verify_lens.stride(0) if verify_lens is not None else 0,
                eos_ids.stride(0) if eos_ids is not None else 0,
            ),
            {
                "WIDTH": width,
                "BLOCK_ROWS": block_rows,
                "BLOCK_WIDTH": block_width,
                "HAS_VERIFY_LENS": verify_lens is not None,
                "HAS_EOS_IDS": eos_ids is not None,
                "HAS_TRACK": interval is not None,
                "FAULT_MASK": VERIFY_LEN_FAULT,
            },
            {"num_warps": warps_for(block_rows * block_width), "enable_fp_fusion": False},
        )
    inputs = (candidates, target_predict, seq_lens, verify_lens, eos_ids)
    outputs = AcceptCommit(correct, bonus, commit_lens, new_seq_lens, last, track)
    plan.launch(device, *inputs, *outputs, faults.word(device))
    return outputs
