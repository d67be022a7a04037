"""Attention of the block's queries over the context rows of the pool and the block itself.

Written out in fp32 rather than left to ``scaled_dot_product_attention``, for three reasons. Its backends round the
weights to bf16 before the second product, or not, as shape and device have it; here the output is the only rounding. A
hidden row of V that holds a NaN reaches its output, since 0 * NaN is NaN (fault F1-8). And no backend takes grouped
heads, a mask and rows that lie scattered in a pool without the very copies that are made here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from dspark import faults
from dspark.ops import arguments

LENGTH_FAULT = faults.declare("draft", "seq-len-out-of-range")
LOC_FAULT = faults.declare("draft", "loc-out-of-range")


@dataclass(frozen=True)
class BlockContext:
    """Which pool rows a block attends to, the same for every layer of a step.

    rows: int64 ``[B, N]``, always inside the pool; a column that nobody may see holds row 0.
    visible: bool ``[B, Wq, N + Wq]``: whether the query of a block row sees a context column, then a block row.
    """

    rows: torch.Tensor
    visible: torch.Tensor

    def require_valid(self, pool: Any) -> None:
        """Refuse rows without draft K and V that a query would see (fault F1-5), where ``pool`` has a valid set.

        On the CPU always; elsewhere with ``DSPARK_DEBUG=1``, since it waits for the device.
        """
        require = getattr(pool, "require_valid", None)
        if require is not None and (self.rows.device.type == "cpu" or faults.debugging()):
            require(self.rows[self.visible[:, :, : self.rows.shape[1]].any(1)])


def block_context(
    seq_lens: torch.Tensor,
    context_locs: torch.Tensor,
    width: int,
    pool_rows: int,
    *,
    causal: bool = False,
    sliding_window: int | None = None,
) -> BlockContext:
    """What each query of the blocks at positions ``n .. n + width - 1`` sees, with n = ``seq_lens[b]``.

    seq_lens: ``[B]`` int32 or int64; below 0: a padded row, which sees its own block only. context_locs: ``[B, N]``
    int32 or int64, the pool row of each position; columns from n on are not looked at, and a negative loc is a row
    that is not there (a padded request, a row that a window has left behind).
    causal: whether a query sees the block rows up to its own only. sliding_window: how many positions a query sees,
    its own included; block rows behind it do not count. None: all.

    Index faults: n > N (the columns there are count) and a looked-at loc outside the pool (not seen).
    """
    arguments.require_rank("context_locs", context_locs, 2)
    requests, columns = context_locs.shape
    arguments.require_shape("seq_lens", seq_lens, (requests,), "[B] of context_locs")
    for name, index in (("seq_lens", seq_lens), ("context_locs", context_locs)):
        arguments.require_dtype(name, index, arguments.INDEX_DTYPES)
    arguments.require_one_device(context_locs=context_locs, seq_lens=seq_lens)
    device = context_locs.device
    lens = seq_lens.to(torch.int64)
    faults.set_where(lens > columns, LENGTH_FAULT)
    lens = lens.clamp(0, columns)[:, None, None]
    locs = context_locs.to(torch.int64)
    position = torch.arange(columns, device=device)
    step = torch.arange(width, device=device)[:, None]
    ahead = step.T - step
    block = ahead <= 0 if causal else torch.ones_like(ahead, dtype=torch.bool)
    context = ((position < lens) & (locs >= 0)[:, None]).expand(requests, width, columns)
    if sliding_window is not None:
        arguments.require_int("sliding_window", sliding_window, 1)
        context = context & (position > lens + step - sliding_window)
        block = block & (ahead > -sliding_window)
    outside = context.any(1) & (locs >= pool_rows)
    faults.set_where(outside, LOC_FAULT)
    context = context & ~outside[:, None]
    visible = torch.cat([context, block.expand(requests, width, width)], dim=2)
    return BlockContext(locs.masked_fill(~context.any(1), 0), visible)


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, visible: torch.Tensor, scale: float | None = None
) -> torch.Tensor:
    """Softmax attention with grouped heads, in fp32, rounded once.

    query: ``[B, Wq, NQ, D]``. key, value: ``[B, M, NK, D]``, NQ a multiple of NK: query head i reads head
    ``i // (NQ / NK)``. visible: bool ``[B, Wq, M]``, at least one key per query. scale: of the scores; None:
    ``1 / sqrt(D)``. Returns ``[B, Wq, NQ, D]`` in the dtype of ``query``. Differentiable.

    A key that a query does not see adds nothing, whatever it holds. A seen V that holds a NaN or an infinity makes NaN
    of that head of that query, and of nothing else. Where one key is seen, the result is its V.
    """
    requests, width, heads, dim = query.shape
    groups = key.shape[2]
    # [B, NK, G * Wq, D]: the queries of one group share its keys.
    grouped = query.to(torch.float32).reshape(requests, width, groups, heads // groups, dim).permute(0, 2, 3, 1, 4)
    keys = key.to(torch.float32).permute(0, 2, 3, 1)
    scores = (grouped.flatten(2, 3) @ keys).unflatten(2, (heads // groups, width))
    scores = scores * (1.0 / math.sqrt(dim) if scale is None else scale)
    seen = visible[:, None, None]
    weights = torch.softmax(scores.masked_fill(~seen, -math.inf), dim=-1)
    values = value.to(torch.float32).transpose(1, 2)
    broken = ~torch.isfinite(values).all(dim=-1)
    mixed = weights.flatten(2, 3) @ values.masked_fill(broken[..., None], 0.0)
    lost = (seen & broken[:, :, None, None]).any(dim=-1, keepdim=True)
    mixed = mixed.unflatten(2, (heads // groups, width)).masked_fill(lost, math.nan)
    result: torch.Tensor = mixed.permute(0, 3, 1, 2, 4).reshape(requests, width, heads, dim).to(query.dtype)
    return result


def pool_rows_of(buffer: torch.Tensor, rows: torch.Tensor, scale: float | None) -> torch.Tensor:
    """Rows ``[B, N, NK, D]`` of a pool's buffer ``[S, NK, D]``, in fp32 where the pool stores less than bf16.

    scale: what the stored values are multiplied with (a pool of fp8 divided by it); None: 1.
    """
    read = buffer[rows]
    if buffer.dtype.itemsize > 1:
        return read
    wide = read.to(torch.float32)
    return wide if scale is None else wide * scale
