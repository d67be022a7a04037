"""What several operations build alike: RoPE tables, positions of windows, weights around one."""

from __future__ import annotations

import torch

from ..suite import fixture

WINDOW = 8
"""Rows of one request: seven drafts and the current token."""
TABLE_ROWS = {"cuda": 1 << 18, "cpu": 1 << 12}


def draft(name: str) -> object:
    """A real draft of shapes.json."""
    return next(shape for shape in fixture("shapes").DRAFTS if shape.id.partition("~")[0] == name)


def rope_table(rotary_dim: int, device: torch.device) -> torch.Tensor:
    """fp32 ``[P, R]``, cos then sin, of random angles: rows that are alike could be mistaken for one another."""
    angle = torch.rand(TABLE_ROWS[device.type], rotary_dim // 2, device=device) * (2 * torch.pi)
    return torch.cat([angle.cos(), angle.sin()], dim=1)


def window_positions(copies: int, rows: int, device: torch.device) -> torch.Tensor:
    """int64 ``[copies, rows]``: windows of consecutive positions, each from a random one on."""
    windows = -(-rows // WINDOW)
    first = torch.randint(0, TABLE_ROWS[device.type] - WINDOW, (copies, windows, 1), device=device)
    return (first + torch.arange(WINDOW, device=device)).reshape(copies, -1)[:, :rows].contiguous()


def norm_weights(*shape: int, device: torch.device) -> torch.Tensor:
    """bf16, around one."""
    return (1 + 0.3 * torch.randn(shape, device=device)).to(torch.bfloat16)


def distinct_slots(copies: int, rows: int, pool_rows: int, device: torch.device) -> torch.Tensor:
    """int64 ``[copies, rows]``: distinct within and between copies, none of them 0."""
    return (torch.randperm(pool_rows - 1, device=device)[: copies * rows] + 1).reshape(copies, rows)
