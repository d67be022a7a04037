"""A layer of the draft: attention of the block over its context and itself, and the gated MLP."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from dspark.model.attention import DFlashAttention
from dspark.model.block_attention import BlockContext, attend, pool_rows_of
from dspark.model.config import DSparkConfig
from dspark.model.kv_inject_checks import KVAccessors
from dspark.model.mlp import GatedMLP
from dspark.model.norm import RMSNorm


class DraftAttention(DFlashAttention):
    """:class:`DFlashAttention` with its output projection: attention of a block over context and itself."""

    def __init__(
        self, config: DSparkConfig, rotary: Any, *, layer_id: int, dtype: torch.dtype, device: torch.device | str | None
    ) -> None:
        heads = (config.num_heads, config.num_kv_heads, config.head_dim)
        super().__init__(
            config.hidden_size, *heads, rotary, layer_id=layer_id, eps=config.eps, dtype=dtype, device=device
        )
        self.q_norm = build_norm(config, config.head_dim, dtype, device)
        self.k_norm = build_norm(config, config.head_dim, dtype, device)
        self.o_proj = nn.Linear(self.q_size, config.hidden_size, bias=False, dtype=dtype, device=device)

    def forward(
        self,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        visible: torch.Tensor,
        *,
        path: str | None = None,
    ) -> torch.Tensor:
        """hidden ``[B, Wq, H]``, positions ``[B, Wq]``, context keys and values ``[B, N, NK, D]`` -> ``[B, Wq, H]``."""
        projected = self.project_qkv(positions.reshape(-1), hidden.flatten(0, 1), path=path)
        query, key, value = (part.unflatten(0, positions.shape) for part in projected)
        # Concatenation takes the wider dtype: a pool that stores less than bf16 is read in fp32.
        mixed = attend(query, torch.cat([keys, key], dim=1), torch.cat([values, value], dim=1), visible)
        result: torch.Tensor = self.o_proj(mixed.flatten(2))
        return result


class DSparkDecoderLayer(nn.Module):
    """Pre-norm attention and pre-norm gated MLP, each added to the residual stream."""

    def __init__(
        self, config: DSparkConfig, rotary: Any, *, layer_id: int, dtype: torch.dtype, device: torch.device | str | None
    ) -> None:
        super().__init__()
        self.input_layernorm = build_norm(config, config.hidden_size, dtype, device)
        self.self_attn = DraftAttention(config, rotary, layer_id=layer_id, dtype=dtype, device=device)
        self.post_attention_layernorm = build_norm(config, config.hidden_size, dtype, device)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, dtype=dtype, device=device)

    def forward(
        self,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        visible: torch.Tensor,
        *,
        path: str | None = None,
    ) -> torch.Tensor:
        """As :meth:`DraftAttention.forward`; differentiable with ``path="eager"``."""
        normed = self.input_layernorm(hidden)
        hidden = hidden + self.self_attn(normed, positions, keys, values, visible, path=path)
        result: torch.Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return result


def build_norm(config: DSparkConfig, size: int, dtype: torch.dtype, device: torch.device | str | None) -> RMSNorm:
    """A norm of the draft.

    Norms of a ``gemma_norm`` config multiply by 1 + w: the parameter is that sum, in fp32 (bf16 would lose w, fault
    F2-12), added once by the checkpoint reader. So the norm is plain to every path and no path has to know.
    """
    return RMSNorm(size, config.eps, dtype=torch.float32 if config.gemma_norm else dtype, device=device)


def context_kv(layer: DFlashAttention, pool: KVAccessors, context: BlockContext) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V ``[B, N, NK, D]`` of the context of one layer."""
    key, value = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
    return pool_rows_of(key, context.rows, layer.k_scale), pool_rows_of(value, context.rows, layer.v_scale)
