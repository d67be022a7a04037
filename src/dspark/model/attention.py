"""Draft attention: the projection of Q, K and V, and its gate to the table path."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from dspark import dispatch, faults
from dspark.dispatch import Check
from dspark.model.norm import RMSNorm
from dspark.ops import table_qk_norm_rope_


def plain_table(rotary: Any) -> torch.Tensor | None:
    """The rotary's table when that is its whole effect, else None.

    A table is a table, whatever scaling it was built with. A rotary says so itself with ``table_is_whole_effect``: a
    class name proves nothing, and neither does a table that a method then changes or ignores.
    """
    table = getattr(rotary, "cos_sin_cache", None)
    if not getattr(rotary, "table_is_whole_effect", False) or not isinstance(table, torch.Tensor):
        return None
    return table if table.dim() == 2 and table.shape[1] == getattr(rotary, "rotary_dim", None) else None


def is_plain_norm(norm: Any) -> bool:
    """Whether ``weight`` and ``variance_epsilon`` are the norm's whole effect (``is_plain``; 1 + w norms are not)."""
    return bool(getattr(norm, "is_plain", False)) and isinstance(getattr(norm, "weight", None), torch.Tensor)


@dataclass(frozen=True)
class Facts:
    """What one call looks like to the checks of ``attention``."""

    rotary: str | None
    norms: tuple[str, ...]


def _has_table(facts: Facts) -> tuple[bool, Hashable]:
    return facts.rotary is None, facts.rotary


def _norms(facts: Facts) -> tuple[bool, Hashable]:
    return not facts.norms, facts.norms


CHECKS = (
    Check("rotary-without-table", "the rotary's whole effect must be its cos_sin_cache table", _has_table),
    Check("norm-not-plain", "q_norm and k_norm must be plain RMS norms: a weight and an eps", _norms),
)
OP = dispatch.register("attention", CHECKS)


class DFlashAttention(nn.Module):
    """Packed QKV projection, per-head norm and RoPE of a draft layer.

    hidden_size: H. num_heads, num_kv_heads: NQ, NK. head_dim: D. eps, k_eps: of q_norm and k_norm.
    rotary_emb: a :class:`dspark.model.rotary.RotaryTable`, or another rotary (``rotary_emb(positions, q, k) -> (q, k)``
    on ``[T, heads, D]``).
    k_scale, v_scale: for a pool that stores less than bf16; None otherwise.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        rotary_emb: Any,
        *,
        layer_id: int = 0,
        eps: float = 1e-6,
        k_eps: float | None = None,
        qkv_bias: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.q_size, self.kv_size = num_heads * head_dim, num_kv_heads * head_dim
        self.layer_id = layer_id
        rows = self.q_size + 2 * self.kv_size
        self.qkv_proj: Any = nn.Linear(hidden_size, rows, bias=qkv_bias, dtype=dtype, device=device)
        self.q_norm: Any = RMSNorm(head_dim, eps, dtype=dtype, device=device)
        self.k_norm: Any = RMSNorm(head_dim, eps if k_eps is None else k_eps, dtype=dtype, device=device)
        self.rotary_emb = rotary_emb
        self.k_scale: float | None = None
        self.v_scale: float | None = None

    def project_qkv(
        self, positions: torch.Tensor, hidden: torch.Tensor, *, path: str | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Normed and rotated Q ``[T, NQ, D]`` and K ``[T, NK, D]``, and V ``[T, NK, D]``, of ``hidden [T, H]``.

        On the table path Q and K are views of the packed projection (CONTRACTS.md section 3); otherwise the layer's own
        norms and rotary are called. path: ``auto``, ``fused`` (the table path), ``eager`` or None.
        """
        qkv = self.qkv_proj(hidden)
        table = plain_table(self.rotary_emb)
        norms = {"q_norm": self.q_norm, "k_norm": self.k_norm}
        call = Facts(
            rotary=type(self.rotary_emb).__name__ if table is None else None,
            norms=tuple(f"{name}: {type(norm).__name__}" for name, norm in norms.items() if not is_plain_norm(norm)),
        )
        taken = dispatch.choose(OP, call, path)
        if taken is dispatch.Path.FUSED and table is not None:
            table_qk_norm_rope_(
                qkv,
                positions,
                self.q_norm.weight,
                self.k_norm.weight,
                table,
                self.num_heads,
                self.num_kv_heads,
                self.head_dim,
                self.q_norm.variance_epsilon,
                k_eps=self.k_norm.variance_epsilon,
                rotary_dim=self.rotary_emb.rotary_dim,
                is_neox_style=self.rotary_emb.is_neox_style,
            )
        q, k, v = self._heads(qkv)
        if taken is dispatch.Path.EAGER:
            q, k = self.rotary_emb(positions, self.q_norm(q), self.k_norm(k))
        faults.finish(hidden.device)
        return q, k, v

    def _heads(self, qkv: torch.Tensor) -> tuple[torch.Tensor, ...]:
        parts = qkv[:, : self.q_size + 2 * self.kv_size].split([self.q_size, self.kv_size, self.kv_size], dim=1)
        return tuple(part.unflatten(1, (part.shape[1] // self.head_dim, self.head_dim)) for part in parts)

    def kv_proj_only(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V ``[T, NK, D]`` of ``hidden [T, H]``, neither normed nor rotated.

        The Q rows are left out where the weight can be sliced; a packed or quantized weight is used by its own method.
        """
        if not has_sliceable_weight(self):
            return self._heads(self.qkv_proj(hidden))[1:]  # type: ignore[return-value]
        rows = slice(self.q_size, self.q_size + 2 * self.kv_size)
        bias = self.qkv_proj.bias
        kv = functional.linear(hidden, self.qkv_proj.weight[rows], None if bias is None else bias[rows])
        k, v = kv.unflatten(1, (2, self.num_kv_heads, self.head_dim)).unbind(1)
        return k, v

    def apply_k_norm(self, k: torch.Tensor) -> torch.Tensor:
        """``k [T, NK, D]`` normed by the layer's own k_norm."""
        normed: torch.Tensor = self.k_norm(k)
        return normed

    def apply_k_rope(self, positions: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        """``k [T, NK, D]`` rotated by the layer's own rotary."""
        rotated: torch.Tensor = self.rotary_emb(positions, k[:, :0], k)[1]
        return rotated


def has_sliceable_weight(layer: Any) -> bool:
    """Whether the packed QKV weight is a plain floating ``[(NQ + 2 NK) * D, H]`` matrix, applied as such."""
    weight = getattr(layer.qkv_proj, "weight", None)
    return (
        isinstance(weight, torch.Tensor)
        and getattr(layer.qkv_proj, "quant_method", None) is None
        and weight.dtype in (torch.bfloat16, torch.float16, torch.float32)
        and weight.dim() == 2
        and weight.shape[0] == layer.q_size + 2 * layer.kv_size
    )
