"""The RoPE table: the one definition of every angle (conformance/CONTRACTS.md section 2).

The table is built on the CPU and copied, so every device holds the same bits. It is a plain tensor of a plain object,
not a module's buffer: ``module.to(torch.bfloat16)`` would narrow a buffer, and a narrow table changes 14 to 31 % of
results.
"""

from __future__ import annotations

import torch

from dspark import faults
from dspark.model.rope_scaling import RopeParameters
from dspark.ops import arguments
from dspark.ops.norm_rope.eager import rotate_heads

BUILD_ROWS = 1 << 16
"""Rows per step of a build: bounds the float64 scratch to tens of MB."""
POSITION_FAULT = faults.declare("rotary", "position-out-of-range")


def build_rows(inv_freq: torch.Tensor, start: int, stop: int, amplitude: float = 1.0) -> torch.Tensor:
    """Rows ``start..stop-1`` of the table: fp32 ``[stop - start, R]`` on the CPU, cos(R/2) then sin(R/2).

    The angle is ``fp32(position) * inv_freq`` rounded once to fp32; its cosine and sine times ``amplitude`` are taken
    in float64 and rounded to fp32, so they are within 1 ulp and do not depend on a vector library.
    """
    half = inv_freq.numel()
    rows = torch.empty((stop - start, 2 * half), dtype=torch.float32)
    for low in range(start, stop, BUILD_ROWS):
        high = min(low + BUILD_ROWS, stop)
        positions = torch.arange(low, high, dtype=torch.int64).to(torch.float32)
        angles = (positions[:, None] * inv_freq[None, :]).to(torch.float64)
        rows[low - start : high - start, :half] = torch.cos(angles) * amplitude
        rows[low - start : high - start, half:] = torch.sin(angles) * amplitude
    return rows


class RotaryTable:
    """A growing RoPE table; a table is a table, whatever scaling it was built with.

    parameters: :class:`RopeParameters`, or the base as a number for default scaling.
    ``cos_sin_cache`` is the current table, fp32 ``[P, R]`` on ``device``. Growth binds a new tensor to it and leaves
    the old one as it was, so a holder of the old table (a captured graph, a call in flight) keeps valid rows.
    """

    table_is_whole_effect = True

    def __init__(
        self,
        rotary_dim: int,
        parameters: RopeParameters | float,
        rows: int,
        *,
        is_neox_style: bool = True,
        device: torch.device | str = "cpu",
    ) -> None:
        self.parameters = parameters if isinstance(parameters, RopeParameters) else RopeParameters(parameters)
        self.inv_freq = self.parameters.inverse_frequencies(rotary_dim)
        self.rotary_dim = rotary_dim
        self.is_neox_style = is_neox_style
        arguments.require_int("rows", rows, 0)
        self.cos_sin_cache = build_rows(self.inv_freq, 0, rows, self.parameters.amplitude).to(device)

    @property
    def rows(self) -> int:
        """P: positions 0..P-1 are in the table."""
        return self.cos_sin_cache.shape[0]

    def ensure_rows(self, rows: int) -> None:
        """Make positions 0..rows-1 available; existing rows keep their bits. Does nothing when they are there."""
        arguments.require_int("rows", rows, 0)
        present = self.rows
        if rows > present:
            added = build_rows(self.inv_freq, present, rows, self.parameters.amplitude)
            self.cos_sin_cache = torch.cat([self.cos_sin_cache, added.to(self.cos_sin_cache.device)])

    def __call__(self, positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``q, k [T, heads, D]`` rotated by the table's rows at ``positions [T]``, rounded once to their dtype.

        A position outside the table leaves its row unrotated and sets the fault ``rotary/position-out-of-range``.
        """
        bad = (positions < 0) | (positions >= self.rows)
        faults.set_where(bad, POSITION_FAULT)
        if self.rows == 0:
            return q, k
        angle = self.cos_sin_cache[positions.to(torch.int64).masked_fill(bad, 0)]
        cos, sin = angle[:, : self.rotary_dim // 2], angle[:, self.rotary_dim // 2 :]
        rotated = (rotate_heads(x, cos, sin, self.rotary_dim, self.is_neox_style) for x in (q, k))
        kept = bad[:, None, None]
        new_q, new_k = (torch.where(kept, x, y) for x, y in zip((q, k), rotated, strict=True))
        return new_q, new_k
