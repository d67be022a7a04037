"""RMS norm of one head, as a module."""

from __future__ import annotations

import torch
from torch import nn

from dspark.ops.norm_rope.eager import norm_heads


class RMSNorm(nn.Module):
    """RMS norm over the last dimension: fp32, rounded once to the input's dtype (CONTRACTS.md section 2, clauses 1, 2).

    ``weight [size]`` and ``variance_epsilon`` are its whole effect, which is what ``is_plain`` says to the table paths.
    """

    is_plain = True

    def __init__(
        self,
        size: int,
        eps: float = 1e-6,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, dtype=dtype, device=device))
        self.variance_epsilon = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: ``[..., size]`` floating; returns the same shape and dtype."""
        return norm_heads(x, self.weight, self.variance_epsilon, x.dtype)
