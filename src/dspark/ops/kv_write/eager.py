"""``kv_write`` in plain torch: the definition, and the production fallback. Nothing here waits for the device."""

from __future__ import annotations

from typing import NamedTuple

import torch

from dspark import faults
from dspark.ops.kv_write.checks import DUPLICATE_FAULT, LOC_FAULT, POSITION_FAULT
from dspark.ops.norm_rope.eager import norm_heads, rotate_heads
from dspark.ops.pool_table import KVPoolTable


class RowRules(NamedTuple):
    """Which rows of a window are written: ``locs [T]``, ``positions [T]``, and the limits of pool and table.

    commit_lens: ``[B]`` with ``row_width`` W, T = B * W, or None. pool_rows: S, or None for no upper bound.
    """

    locs: torch.Tensor
    positions: torch.Tensor
    commit_lens: torch.Tensor | None
    row_width: int | None
    pool_rows: int | None
    reserved_rows: int
    table_rows: int

    def named(self) -> torch.Tensor:
        """bool ``[T]``: rows that are committed and name a row of their own; the others are skipped."""
        named = self.locs >= self.reserved_rows  # reserved_rows is not negative, so this skips negative locs too
        if self.commit_lens is not None and self.row_width is not None:
            columns = torch.arange(self.row_width, device=self.locs.device)
            named &= (columns[None, :] < self.commit_lens[:, None]).reshape(-1)
        return named

    def live(self) -> torch.Tensor:
        """bool ``[T]``: rows that are written. Sets the fault word for named rows outside the pool or the table."""
        named = self.named()
        outside_table = named & ((self.positions < 0) | (self.positions >= self.table_rows))
        faults.set_where(outside_table, POSITION_FAULT)
        if self.pool_rows is None:
            return named & ~outside_table
        outside_pool = named & (self.locs >= self.pool_rows)
        faults.set_where(outside_pool, LOC_FAULT)
        return named & ~outside_table & ~outside_pool

    def report_duplicates(self) -> None:
        """Set the fault word if two named rows have the same loc (debug mode: it sorts)."""
        # Skipped rows get negative keys of their own, so that they equal nothing.
        own = -1 - torch.arange(self.locs.numel(), device=self.locs.device)
        keys = torch.where(self.named(), self.locs.to(torch.int64), own).sort().values
        faults.set_where(keys[1:] == keys[:-1], DUPLICATE_FAULT)


def layer_rows(kv: torch.Tensor, layer: int, kv_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V ``[T, KV]`` of a layer, as views of either layout of ``kv``."""
    rows = kv[layer] if kv.dim() == 3 else kv[:, layer * 2 * kv_size : (layer + 1) * 2 * kv_size]
    return rows[:, :kv_size], rows[:, kv_size:]


def kv_write_eager(
    kv: torch.Tensor,
    pool: KVPoolTable,
    k_norm_weights: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    rules: RowRules,
    kv_size: int,
    head_dim: int,
    eps: float,
    is_neox_style: bool,
) -> None:
    """See :func:`dspark.ops.fused_kv_norm_rope_write`; arguments are validated."""
    live = rules.live()
    if pool.rows == 0 or rules.table_rows == 0:
        return
    heads = (live.numel(), kv_size // head_dim, head_dim)
    angle = cos_sin_cache[rules.positions.to(torch.int64).masked_fill(~live, 0)]
    rotary_dim = cos_sin_cache.shape[1]
    cos, sin = angle[:, : rotary_dim // 2], angle[:, rotary_dim // 2 :]
    for layer in range(pool.num_layers):
        k, v = layer_rows(kv, layer, kv_size)
        # K is rounded to bf16 whatever kv is stored as: that is the format that attention reads.
        normed = norm_heads(k.reshape(heads), k_norm_weights[layer], eps, torch.bfloat16)
        rotated = rotate_heads(normed, cos, sin, rotary_dim, is_neox_style)
        write_rows(pool.keys[layer], rules.locs, live, rotated)
        write_rows(pool.values[layer], rules.locs, live, v.reshape(heads))
    if pool.valid is not None:
        write_rows(pool.valid, rules.locs, live, live)


def write_rows(pool: torch.Tensor, locs: torch.Tensor, live: torch.Tensor, rows: torch.Tensor) -> None:
    """``pool[locs[t]] = rows[t]`` where ``live[t]``; other rows of the pool keep every bit.

    A row that is not live repeats the first live one (or, without any, rewrites row 0 with itself), so that neither a
    data-dependent shape nor torch's negative indexing can occur. Equal dtypes are copied as raw bits.
    """
    rows = rows.to(pool.dtype)
    raw = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[pool.element_size()]
    pool_bits, bits = pool.view(raw), rows.view(raw)
    some = live.any()
    source = torch.where(live, torch.arange(live.numel(), device=live.device), live.to(torch.int32).argmax())
    target = torch.where(some, locs.to(torch.int64)[source], 0)
    pool_bits[target] = torch.where(some, bits[source], pool_bits[target])
