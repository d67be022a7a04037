"""The gated feed-forward layer of a draft layer."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional


class GatedMLP(nn.Module):
    """``down(silu(gate(x)) * up(x))``, without biases; gate and up are one packed projection, gate first.

    ``silu(gate) * up`` is computed in fp32 and rounded once to the dtype of ``x``.
    hidden_size: H. intermediate_size: I. ``gate_up_proj.weight [2 I, H]``, ``down_proj.weight [H, I]``.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(hidden_size, 2 * intermediate_size, bias=False, dtype=dtype, device=device)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False, dtype=dtype, device=device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: ``[..., H]`` floating; returns the same shape and dtype."""
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        product = functional.silu(gate.to(torch.float32)) * up.to(torch.float32)
        result: torch.Tensor = self.down_proj(product.to(x.dtype))
        return result
