"""The draft's own RoPE table: built for the config, grown with the positions in use, moved with the model."""

from __future__ import annotations

import torch

from dspark import faults
from dspark.model.config import DSparkConfig
from dspark.model.rotary import RotaryTable, build_rows

INITIAL_ROWS = 4096
"""Rows of a new table: a config may allow a million positions, which are 256 MB that most servers never use."""


def build_rotary(config: DSparkConfig, device: torch.device | str | None) -> RotaryTable:
    """A table of the config's rope parameters, with the first rows; one for all layers (section 4 needs one table)."""
    rows = min(config.max_position, INITIAL_ROWS)
    return RotaryTable(config.rotary_dim, config.rope, rows, is_neox_style=config.is_neox_style, device=device or "cpu")


def grow_rotary(rotary: RotaryTable, count: int, limit: int) -> None:
    """Make positions ``0 .. min(count, limit) - 1`` available; refused during CUDA graph capture.

    The table at least doubles, so that a context that grows by a token at a time does not copy it at each.
    """
    count = min(count, limit)
    if count > rotary.rows:
        faults.refuse_in_capture(f"the RoPE table's rows up to {count}")
        rotary.ensure_rows(min(max(count, 2 * rotary.rows), limit))


def move_rotary(rotary: RotaryTable, device: torch.device) -> None:
    """Bind a table on ``device``, with the same bits and as many rows.

    Built again rather than copied: a table that was on the meta device has no rows to copy, and no conversion of the
    model to a narrower dtype reaches it.
    """
    if rotary.cos_sin_cache.device != device:
        built = build_rows(rotary.inv_freq, 0, rotary.rows, rotary.parameters.amplitude)
        rotary.cos_sin_cache = built.to(device)
