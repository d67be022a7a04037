"""``qk_norm_rope`` in plain torch: the definition, and the production fallback."""

from __future__ import annotations

import torch

from dspark import faults
from dspark.ops.norm_rope.eager import norm_heads, rotate_heads
from dspark.ops.qk_norm_rope.checks import POSITION_FAULT


def qk_norm_rope_eager(
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
    """See :func:`dspark.ops.table_qk_norm_rope_`; arguments are validated."""
    rows = cos_sin_cache.shape[0]
    bad = (positions < 0) | (positions >= rows)
    faults.set_where(bad, POSITION_FAULT)
    if rows == 0:
        return
    # A bad row is computed with row 0 of the table and then dropped, so that nothing waits for the device.
    row = cos_sin_cache[positions.to(torch.int64).masked_fill(bad, 0)]
    cos, sin = row[:, : rotary_dim // 2], row[:, rotary_dim // 2 :]
    count = num_q_heads + num_k_heads
    heads = qkv[:, : count * head_dim].view(qkv.shape[0], count, head_dim)
    for part, weight, eps in (
        (heads[:, :num_q_heads], q_weight, q_eps),
        (heads[:, num_q_heads:], k_weight, k_eps),
    ):
        rotated = rotate_heads(norm_heads(part, weight, eps, part.dtype), cos, sin, rotary_dim, is_neox_style)
        part.copy_(torch.where(bad[:, None, None], part, rotated))
