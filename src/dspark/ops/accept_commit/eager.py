"""``accept_commit`` in plain torch: the definition, and the production fallback. Nothing here waits for the device."""

from __future__ import annotations

import torch

from dspark.ops.accept.eager import accept_window
from dspark.ops.accept_commit.checks import VERIFY_LEN_FAULT
from dspark.ops.accept_commit.result import AcceptCommit
from dspark.ops.commit_indices.eager import completing_entry


def accept_commit_eager(
    candidates: torch.Tensor,
    target_predict: torch.Tensor,
    seq_lens: torch.Tensor,
    verify_lens: torch.Tensor | None,
    eos_ids: torch.Tensor | None,
    interval: int | None,
) -> AcceptCommit:
    """See :func:`dspark.ops.fused_accept_commit`; arguments are validated."""
    pre = seq_lens.to(torch.int64)
    live = pre >= 0
    correct, bonus = accept_window(candidates, target_predict, verify_lens, live, VERIFY_LEN_FAULT)
    kept = correct.to(torch.int64)
    if eos_ids is not None:
        target, ids = target_predict.to(torch.int64), eos_ids.to(torch.int64)
        ends = (target[..., None] == ids).any(dim=-1)
        # Columns before the first end: it is committed itself, as the bonus is.
        kept = torch.minimum(kept, (~ends).to(torch.int64).cumprod(dim=1).sum(dim=1))
    commit_lens = (kept + 1).masked_fill(~live, 0)
    track = None if interval is None else completing_entry(pre.clamp(min=0), commit_lens, interval)
    # Node ids of a chain: the step of a token is its column.
    return AcceptCommit(correct, bonus, commit_lens, pre + commit_lens, commit_lens - 1, track)
