"""The RoPE table: the one definition of every angle (conformance/CONTRACTS.md section 2).

The table is built on the CPU and copied, so every device holds the same bits. It is a plain tensor of a plain object,
not a module's buffer: ``module.to(torch.bfloat16)`` would narrow a buffer, and a narrow table changes 14 to 31 % of
results.
"""

from __future__ import annotations

import math

import torch

BUILD_ROWS = 1 << 16
"""Rows per step of a build: bounds the float64 scratch to tens of MB."""


def inverse_frequencies(rotary_dim: int, base: float) -> torch.Tensor:
    """``1 / base^(2i/R)`` for i < R/2: fp32 ``[R/2]`` on the CPU, each within 1 ulp of the real value.

    rotary_dim: R, even and positive. base: the model's rope_theta, finite and positive. ``ValueError`` otherwise.
    """
    if isinstance(rotary_dim, bool) or rotary_dim <= 0 or rotary_dim % 2:
        raise ValueError(f"rotary_dim: got {rotary_dim!r}, need a positive even int")
    if not (math.isfinite(base) and base > 0):
        raise ValueError(f"base: got {base!r}, need a finite number > 0")
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim
    return (1.0 / torch.pow(torch.tensor(base, dtype=torch.float64), exponents)).to(torch.float32)


def build_rows(inv_freq: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Rows ``start..stop-1`` of the table: fp32 ``[stop - start, R]`` on the CPU, cos(R/2) then sin(R/2).

    The angle is ``fp32(position) * inv_freq`` rounded once to fp32; its cosine and sine are taken in float64 and
    rounded to fp32, so they are within 1 ulp and do not depend on a vector library.
    """
    half = inv_freq.numel()
    rows = torch.empty((stop - start, 2 * half), dtype=torch.float32)
    for low in range(start, stop, BUILD_ROWS):
        high = min(low + BUILD_ROWS, stop)
        positions = torch.arange(low, high, dtype=torch.int64).to(torch.float32)
        angles = (positions[:, None] * inv_freq[None, :]).to(torch.float64)
        rows[low - start : high - start, :half] = torch.cos(angles)
        rows[low - start : high - start, half:] = torch.sin(angles)
    return rows


class RotaryTable:
    """A growing RoPE table with default scaling.

    ``cos_sin_cache`` is the current table, fp32 ``[P, R]`` on ``device``. Growth binds a new tensor to it and leaves
    the old one as it was, so a holder of the old table (a captured graph, a call in flight) keeps valid rows.
    """

    def __init__(
        self,
        rotary_dim: int,
        base: float,
        rows: int,
        *,
        is_neox_style: bool = True,
        device: torch.device | str = "cpu",
    ) -> None:
        self.inv_freq = inverse_frequencies(rotary_dim, base)
        self.rotary_dim = rotary_dim
        self.base = base
        self.is_neox_style = is_neox_style
        self.cos_sin_cache = build_rows(self.inv_freq, 0, _row_count(rows)).to(device)

    @property
    def rows(self) -> int:
        """P: positions 0..P-1 are in the table."""
        return self.cos_sin_cache.shape[0]

    def ensure_rows(self, rows: int) -> None:
        """Make positions 0..rows-1 available; existing rows keep their bits. Does nothing when they are there."""
        present = self.rows
        if _row_count(rows) > present:
            added = build_rows(self.inv_freq, present, rows).to(self.cos_sin_cache.device)
            self.cos_sin_cache = torch.cat([self.cos_sin_cache, added])


def _row_count(rows: int) -> int:
    if isinstance(rows, bool) or not isinstance(rows, int) or rows < 0:
        raise ValueError(f"rows: got {rows!r}, need an int >= 0")
    return rows
