"""``accept`` in plain torch: the definition, and the production fallback."""

from __future__ import annotations

import torch

from dspark import faults
from dspark.ops.accept.checks import VERIFY_LEN_FAULT


def accept_eager(
    candidates: torch.Tensor, target_predict: torch.Tensor, verify_lens: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """See :func:`dspark.ops.compute_dflash_correct_drafts_and_bonus`; arguments are validated."""
    every_row = torch.ones(candidates.shape[0], dtype=torch.bool, device=candidates.device)
    return accept_window(candidates, target_predict, verify_lens, every_row, VERIFY_LEN_FAULT)


def accept_window(
    candidates: torch.Tensor,
    target_predict: torch.Tensor,
    verify_lens: torch.Tensor | None,
    reporting: torch.Tensor,
    fault: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Correct ``[B]`` int32 and bonus ``[B]`` int64.

    reporting: bool ``[B]``, rows whose ``verify_lens``, outside 1..W, is a fault with the mask ``fault``.
    """
    width = candidates.shape[1]
    target = target_predict.to(torch.int64)
    matches = candidates[:, 1:].to(torch.int64) == target[:, :-1]
    correct = matches.to(torch.int64).cumprod(dim=1).sum(dim=1)
    if verify_lens is not None:
        lens = verify_lens.to(torch.int64)
        faults.set_where(reporting & ((lens < 1) | (lens > width)), fault)
        correct = torch.minimum(correct, lens.clamp(1, width) - 1)
    bonus = target.gather(1, correct[:, None]).squeeze(1)
    return correct.to(torch.int32), bonus
