"""Norm and rotation of heads in plain torch: the definition that every eager path uses (CONTRACTS.md section 2)."""

from __future__ import annotations

import torch


def norm_heads(x: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype) -> torch.Tensor:
    """RMS norm over the last dimension, in fp32, rounded once to ``dtype``; the weight is applied before it.

    x: ``[..., D]`` floating; weight: ``[D]`` floating. Returns ``[..., D]`` in ``dtype``.
    """
    wide = x.to(torch.float32)
    mean_square = (wide * wide).sum(dim=-1, keepdim=True) / x.shape[-1]
    inverse = 1.0 / torch.sqrt(mean_square + eps)
    return (wide * inverse * weight.to(torch.float32)).to(dtype)


def rotate_heads(
    y: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, rotary_dim: int, is_neox_style: bool
) -> torch.Tensor:
    """Rotate the first ``rotary_dim`` elements of each head, in fp32, rounded once; the rest passes through.

    y: ``[T, heads, D]``; cos, sin: ``[T, rotary_dim / 2]``, read as they are and widened, never recomputed. Pairs are
    (i, i + rotary_dim/2) for neox style and (2i, 2i + 1) otherwise. Returns a new tensor in the dtype of ``y``.
    """
    rotated = y.clone()
    half = rotary_dim // 2
    first, second = (
        (slice(0, half), slice(half, rotary_dim))
        if is_neox_style
        else (slice(0, rotary_dim, 2), slice(1, rotary_dim, 2))
    )
    y1, y2 = y[..., first].to(torch.float32), y[..., second].to(torch.float32)
    c, s = cos.to(torch.float32)[:, None, :], sin.to(torch.float32)[:, None, :]
    rotated[..., first] = (y1 * c - y2 * s).to(y.dtype)
    rotated[..., second] = (y2 * c + y1 * s).to(y.dtype)
    return rotated
