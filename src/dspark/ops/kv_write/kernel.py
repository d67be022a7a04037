"""``kv_write`` as one Triton kernel for all layers.

Grid: (token blocks, head blocks, layers). Tile, one program: BLOCK_TOKENS rows x BLOCK_HEADS heads of one layer.

            kv[token, layer]                                         pools of the layer
          +----------------------+---------------------+
    K     |  x1 [R/2]   x2 [R/2] |  xp [D - R]         |  -> norm, rotate ->  K[loc]   (norm_rope/kernel.py)
          +----------------------+---------------------+
    V     |  raw bits [D]                              |  -> copied       ->  V[loc]
          +--------------------------------------------+

A row is skipped before its K and V are read: not committed, loc negative or reserved. What is in bounds is loaded
before it is known to be needed, since a small call is a chain of loads and little else. Addresses and row strides of
the pools come from an int64 [L, 4] table. Arithmetic is fp32; contraction is declared off.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dspark import faults
from dspark.ops.dependent_launch.kernel import wait_for_prerequisite_grids
from dspark.ops.index_math.kernel import nonnegative_quotient
from dspark.ops.kv_write.checks import LOC_FAULT, POSITION_FAULT
from dspark.ops.kv_write.eager import RowRules
from dspark.ops.launch import Launch, Tile, blocks, power_of_two, tile_for
from dspark.ops.norm_rope.kernel import norm_rotate_heads
from dspark.ops.plans import KernelPlan

# Of 35 tried on an H200 (5 layers, 8 heads of 128): within 4 % of the best from 1 to 16,384 rows. Stores that make room
# first, which gain 10 % where rows are written in place, gain nothing where they are scattered.
GPU_TILES = (Tile(64, 1024, 8, 4), Tile(float("inf"), 2048, 8, 2))
INTERPRETER_TILE = 1 << 19
FP_CONTRACTION = False


@triton.jit
def kv_write_kernel(
    kv_ptr,
    pools_ptr,
    weights_ptr,
    table_ptr,
    positions_ptr,
    locs_ptr,
    commit_lens_ptr,
    valid_ptr,
    fault_ptr,
    tokens,
    row_width,
    pool_rows,
    reserved_rows,
    table_rows,
    kv_layer_stride,
    kv_token_stride,
    weights_layer_stride,
    weights_stride,
    table_stride,
    positions_stride,
    locs_stride,
    commit_lens_stride,
    valid_stride,
    eps,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    PASSED: tl.constexpr,
    NEOX: tl.constexpr,
    HAS_COMMIT_LENS: tl.constexpr,
    HAS_POOL_ROWS: tl.constexpr,
    HAS_VALID: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_PASSED: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    ALIGNED_BYTES: tl.constexpr,
    LOC_FAULT_MASK: tl.constexpr,
    POSITION_FAULT_MASK: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):
    wait_for_prerequisite_grids(DEPENDENT_LAUNCH)
    rows = tl.program_id(0).to(tl.int64) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS).to(tl.int64)
    layer = tl.program_id(2).to(tl.int64)
    k_pool = tl.load(pools_ptr + layer * 4).to(tl.int64).to(tl.pointer_type(tl.bfloat16))
    v_pool = tl.load(pools_ptr + layer * 4 + 1).to(tl.int64).to(tl.pointer_type(tl.int16))
    k_stride = tl.load(pools_ptr + layer * 4 + 2).to(tl.int64)
    v_stride = tl.load(pools_ptr + layer * 4 + 3).to(tl.int64)
    row_in_batch = rows < tokens
    positions = tl.load(positions_ptr + rows * positions_stride, mask=row_in_batch, other=0).to(tl.int64)
    named = row_in_batch
    if HAS_COMMIT_LENS:
        request = nonnegative_quotient(rows, row_width)
        lens = tl.load(commit_lens_ptr + request * commit_lens_stride, mask=row_in_batch, other=0).to(tl.int64)
        named = named & (rows - request * row_width < lens)
    locs = tl.load(locs_ptr + rows * locs_stride, mask=row_in_batch, other=-1).to(tl.int64)
    named = named & (locs >= reserved_rows)  # reserved_rows is not negative, so this skips negative locs too
    outside_table = named & ((positions < 0) | (positions >= table_rows))
    fault_bits = tl.where(outside_table, POSITION_FAULT_MASK, 0).to(tl.int64)
    row_live = named & (outside_table == 0)
    if HAS_POOL_ROWS:
        outside_pool = named & (locs >= pool_rows)
        fault_bits = fault_bits | tl.where(outside_pool, LOC_FAULT_MASK, 0).to(tl.int64)
        row_live = row_live & (outside_pool == 0)

    # Read from memory, so the compiler knows nothing of them; bytes for an address, elements of two for a stride.
    k_pool, v_pool = tl.multiple_of(k_pool, ALIGNED_BYTES), tl.multiple_of(v_pool, ALIGNED_BYTES)
    k_stride, v_stride = tl.multiple_of(k_stride, ALIGNED_BYTES // 2), tl.multiple_of(v_stride, ALIGNED_BYTES // 2)

    heads = tl.program_id(1).to(tl.int64) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS).to(tl.int64)
    head_live = heads < NUM_HEADS
    in_row = heads[None, :, None] * HEAD_DIM
    source = kv_ptr + layer * kv_layer_stride + rows[:, None, None] * kv_token_stride + in_row
    k_target = k_pool + locs[:, None, None] * k_stride + in_row
    v_target = v_pool + locs[:, None, None] * v_stride + in_row

    d = tl.arange(0, BLOCK_DIM)[None, None, :]
    v_source = (source + NUM_HEADS * HEAD_DIM).to(tl.pointer_type(tl.int16), bitcast=True)
    in_head = head_live[None, :, None] & (d < HEAD_DIM)
    v_live = row_live[:, None, None] & in_head
    v = tl.load(v_source + d, mask=named[:, None, None] & in_head, other=0).to(tl.int16)

    table_row = table_ptr + positions * table_stride
    weights = weights_ptr + layer * weights_layer_stride
    norm_rotate_heads(
        source,
        k_target,
        table_row,
        named,
        row_live,
        head_live,
        weights,
        weights_stride,
        eps,
        HEAD_DIM,
        HALF,
        PASSED,
        NEOX,
        BLOCK_HALF,
        BLOCK_PASSED,
        False,
    )
    tl.store(v_target + d, v, mask=v_live)
    if (tl.program_id(1) == 0) & (tl.program_id(2) == 0):
        tl.atomic_or(fault_ptr + tl.zeros([BLOCK_TOKENS], tl.int64), fault_bits, mask=fault_bits != 0, sem="relaxed")
        if HAS_VALID:
            tl.store(valid_ptr + locs * valid_stride, tl.full([BLOCK_TOKENS], 1, tl.int8), mask=row_live)


def kv_write_fused(
    plan: KernelPlan,
    kv: torch.Tensor,
    pools: torch.Tensor,
    k_norm_weights: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    rules: RowRules,
    kv_size: int,
    head_dim: int,
    eps: float,
    is_neox_style: bool,
    valid: torch.Tensor | None,
    aligned_bytes: int,
) -> None:
    """See :func:`dspark.ops.fused_kv_norm_rope_write`; ``plan`` is that of the arguments, eligible and not empty.

    pools: the int64 ``[L, 4]`` pointer table on the device of ``kv``. valid: of the pool table, if it has one.
    aligned_bytes: a power of two that divides every address of ``pools``, and every row stride in bytes.
    """
    if plan.launch is None:
        tokens, num_heads = rules.locs.numel(), kv_size // head_dim
        half = cos_sin_cache.shape[1] // 2
        passed = head_dim - 2 * half
        widest = power_of_two(num_heads)
        tile = tile_for(tokens, GPU_TILES, INTERPRETER_TILE)
        block_heads = min(widest, tile.heads)
        block_tokens = tile.elements // (block_heads * power_of_two(head_dim))
        block_tokens = max(1, min(block_tokens, power_of_two(tokens)))
        layer_stride, token_stride = (kv.stride(0), kv.stride(1)) if kv.dim() == 3 else (2 * kv_size, kv.stride(0))
        commit_lens = rules.commit_lens
        plan.launch = Launch(
            kv_write_kernel,
            (blocks(tokens, block_tokens), blocks(num_heads, block_heads), pools.shape[0]),
            (
                tokens,
                rules.row_width or 1,
                rules.pool_rows or 0,
                rules.reserved_rows,
                rules.table_rows,
                layer_stride,
                token_stride,
                *k_norm_weights.stride(),
                cos_sin_cache.stride(0),
                rules.positions.stride(0),
                rules.locs.stride(0),
                commit_lens.stride(0) if commit_lens is not None else 0,
                valid.stride(0) if valid is not None else 0,
                eps,
            ),
            {
                "NUM_HEADS": num_heads,
                "HEAD_DIM": head_dim,
                "HALF": half,
                "PASSED": passed,
                "NEOX": is_neox_style,
                "HAS_COMMIT_LENS": commit_lens is not None,
                "HAS_POOL_ROWS": rules.pool_rows is not None,
                "HAS_VALID": valid is not None,
                "BLOCK_TOKENS": block_tokens,
                "BLOCK_HEADS": block_heads,
                "BLOCK_HALF": power_of_two(half),
                "BLOCK_PASSED": power_of_two(max(passed, 1)),
                "BLOCK_DIM": power_of_two(head_dim),
                "ALIGNED_BYTES": aligned_bytes,
                "LOC_FAULT_MASK": LOC_FAULT,
                "POSITION_FAULT_MASK": POSITION_FAULT,
            },
            {"num_warps": tile.warps, "enable_fp_fusion": FP_CONTRACTION},
        )
    inputs = (kv, pools, k_norm_weights, cos_sin_cache, rules.positions, rules.locs, rules.commit_lens)
    device = kv.device
    plan.launch(device, *inputs, valid, faults.word(device))
