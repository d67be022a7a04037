"""Heads that were normed and rotated, judged by the suite's envelope: each element is in its admissible set or not."""

from __future__ import annotations

import numpy as np
import torch

from .suite import fixture

MOST_HEADS = 20_000
"""Of more heads than this that differ from the definition, about a thousand are judged."""


def outside(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float, angles: torch.Tensor) -> int:
    """How many elements of the heads ``out [N, D]`` no evaluation of the contract gives.

    x: the heads before, weight: ``[D]``, angles: ``[N, D]``, cos then sin of each head's position.
    """
    envelope = fixture("envelope")
    wide = [tensor.detach().double().cpu().numpy() for tensor in (out, x, weight, angles)]
    half = wide[3].shape[1] // 2
    rotation = envelope.Rotation(wide[3][:, :half], wide[3][:, half:], True)
    verdict = envelope.judge(wide[0], wide[1], wide[2], float(np.float32(eps)), rotation)
    return int((~verdict.ok).sum())


def judge_different(
    name: str,
    got: torch.Tensor,
    need: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    angles: torch.Tensor,
) -> str:
    """What speaks against heads ``got [T, heads, D]`` where the definition has ``need``; empty: nothing.

    Bits that differ are judged by the envelope: two right results may differ where it has two values.
    x: the heads before. angles: ``[T, D]``.
    """
    bits, need_bits = got.view(torch.int16), need.view(torch.int16)
    different = (bits != need_bits).any(dim=-1).nonzero()
    if not len(different):
        return ""
    total = got.shape[0] * got.shape[1]
    # So many that it is no matter of rounding: a part of them shows it.
    sample = different[:: len(different) // 1000 + 1] if len(different) > MOST_HEADS else different
    row, head = sample.unbind(1)
    bad = outside(got[row, head], x[row, head], weight, eps, angles[row])
    if bad:
        return (
            f"{name}: {bad} elements of {len(sample)} judged heads are inadmissible; {len(different)} of {total} differ"
        )
    return ""
