"""Index tensors that every step of a worker needs, kept between steps.

Their values depend on nothing but their shape, so one tensor per width serves every batch: fewer rows are a view of it.
Growth binds a new tensor and leaves the old one as it was, so that a captured graph keeps what it was captured with.
"""

from __future__ import annotations

import torch

from dspark.ops import arguments


class IndexCache:
    """Cached index tensors of one device, by width (conformance/CONTRACTS.md section 11)."""

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self._linear: dict[int, torch.Tensor] = {}
        self._columns: dict[int, torch.Tensor] = {}

    def linear_accept_index(self, rows: int, width: int) -> torch.Tensor:
        """``[rows, width]`` int64, element (r, i) being ``r * width + i``: the node ids of a chain of drafts.

        ``ValueError`` for negative ``rows`` and for a ``width`` below 1.
        """
        arguments.require_int("rows", rows, 0)
        arguments.require_int("width", width, 1)
        kept = self._linear.get(width)
        if kept is None or kept.shape[0] < rows:
            kept = torch.arange(rows * width, device=self.device).view(rows, width)
            self._linear[width] = kept
        return kept[:rows]

    def columns(self, width: int) -> torch.Tensor:
        """``[width]`` int64: 0 .. width-1. ``ValueError`` for a negative ``width``."""
        arguments.require_int("width", width, 0)
        kept = self._columns.get(width)
        if kept is None:
            kept = self._columns[width] = torch.arange(width, device=self.device)
        return kept
