"""A layer of the tiny Inkling, over whole sequences: what training runs, and the parameters that all paths share.

A layer has four short-convolution streams, ``y = x + conv(x)``, depthwise and causal: on the projections of K and of V
(before K's norm and rotation), on the output of attention and on that of the MLP (before each joins the residual
stream). With zero weights a stream changes nothing.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from dspark.model.mlp import GatedMLP
from dspark.model.norm import RMSNorm
from dspark.ops.norm_rope.eager import rotate_heads
from dspark.runtime.inkling_config import CONV_KINDS, InklingConfig


class ShortConv(nn.Module):
    """``y[t] = x[t] + sum_j w[:, j] * x[t - (K - 1) + j]``: ``weight [dim, K]``, inputs before the first are zeros."""

    def __init__(
        self, dim: int, kernel: int, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(dim, kernel, dtype=dtype, device=device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: ``[B, T, dim]`` floating, whole sequences. Same shape and dtype; fp32 inside, rounded once."""
        taps = self.weight.shape[1] - 1
        return self.windowed(functional.pad(x, (0, 0, taps, 0)))

    def windowed(self, inputs: torch.Tensor) -> torch.Tensor:
        """Outputs ``[..., T, dim]`` of the last T of ``inputs [..., K - 1 + T, dim]``, in the order of the terms."""
        weight = self.weight.to(torch.float32)
        kernel = weight.shape[1]
        count = inputs.shape[-2] - kernel + 1
        wide = inputs.to(torch.float32)
        mixed = wide[..., :count, :] * weight[:, 0]
        for j in range(1, kernel):
            mixed = mixed + wide[..., j : j + count, :] * weight[:, j]
        return (wide[..., kernel - 1 :, :] + mixed).to(inputs.dtype)


class InklingLayer(nn.Module):
    """Pre-norm grouped-query attention and pre-norm gated MLP, with the four streams of ``CONV_KINDS``."""

    def __init__(
        self, config: InklingConfig, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> None:
        super().__init__()
        self.config = config
        size, query = config.hidden_size, config.num_heads * config.head_dim
        self.input_layernorm = RMSNorm(size, config.eps, dtype=dtype, device=device)
        rows = query + 2 * config.kv_size
        self.qkv_proj = nn.Linear(size, rows, bias=False, dtype=dtype, device=device)
        self.q_norm = RMSNorm(config.head_dim, config.eps, dtype=dtype, device=device)
        self.k_norm = RMSNorm(config.head_dim, config.eps, dtype=dtype, device=device)
        self.o_proj = nn.Linear(query, size, bias=False, dtype=dtype, device=device)
        self.post_attention_layernorm = RMSNorm(size, config.eps, dtype=dtype, device=device)
        self.mlp = GatedMLP(size, config.intermediate_size, dtype=dtype, device=device)
        self.convs = nn.ModuleDict(
            {
                kind: ShortConv(dim, config.conv_kernel, dtype=dtype, device=device)
                for kind, dim in zip(CONV_KINDS, config.conv_dims, strict=True)
            }
        )

    def project(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Q ``[..., NQ * D]``, K and V ``[..., NK * D]`` of ``hidden [..., H]``, before convolutions and norms."""
        config = self.config
        sizes = [config.num_heads * config.head_dim, config.kv_size, config.kv_size]
        query, key, value = self.qkv_proj(self.input_layernorm(hidden)).split(sizes, dim=-1)
        return query, key, value

    def rotate(self, query: torch.Tensor, key: torch.Tensor, angles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Normed and rotated Q ``[N, NQ, D]`` and K ``[N, NK, D]`` of ``[N, NQ * D]``, ``[N, NK * D]``.

        angles: ``[N, D]`` fp32 rows of the RoPE table.
        """
        dim = self.config.head_dim
        cos, sin = angles[:, : dim // 2], angles[:, dim // 2 :]
        normed = (norm(x.unflatten(-1, (-1, dim))) for norm, x in ((self.q_norm, query), (self.k_norm, key)))
        rotated_query, rotated_key = (rotate_heads(x, cos, sin, dim, True) for x in normed)
        return rotated_query, rotated_key

    def forward(
        self, hidden: torch.Tensor, angles: torch.Tensor
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, ...]]:
        """Whole sequences ``hidden [B, T, H]`` from position 0 on, causal; differentiable.

        Returns the output; K and V ``[B, T, NK, D]``, as pools hold them; the inputs ``[B, T, dim]`` of each stream.
        """
        batch, tokens, _ = hidden.shape
        query, key, value = self.project(hidden)
        inputs = [key, value]
        key, value = self.convs["k"](key), self.convs["v"](value)
        rows = angles.repeat(batch, 1)
        query, key = self.rotate(query.flatten(0, 1), key.flatten(0, 1), rows)
        query, key = query.unflatten(0, (batch, tokens)), key.unflatten(0, (batch, tokens))
        value = value.unflatten(-1, (-1, self.config.head_dim))
        groups = self.config.num_heads // self.config.num_kv_heads
        mixed = functional.scaled_dot_product_attention(
            query.transpose(1, 2),
            key.repeat_interleave(groups, 2).transpose(1, 2),
            value.repeat_interleave(groups, 2).transpose(1, 2).to(query.dtype),
            is_causal=True,
        )
        attended = self.o_proj(mixed.transpose(1, 2).flatten(2))
        inputs.append(attended)
        hidden = hidden + self.convs["attention"](attended).to(hidden.dtype)
        fed = self.mlp(self.post_attention_layernorm(hidden))
        inputs.append(fed)
        hidden = hidden + self.convs["mlp"](fed).to(hidden.dtype)
        return hidden, (key, value), tuple(inputs)
