"""``commit_indices`` in plain torch: the definition, and the production fallback. Nothing here waits for the device."""

from __future__ import annotations

import torch

from dspark import faults
from dspark.ops.commit_indices.checks import ACCEPT_LEN_FAULT, SEQ_LEN_FAULT


def commit_indices_eager(
    accept_index: torch.Tensor,
    accept_lens: torch.Tensor,
    seq_lens: torch.Tensor | None,
    draft_token_num: int,
    interval: int,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """See :func:`dspark.ops.fused_commit_track_indices`; arguments are validated."""
    batch, depth = accept_index.shape
    accepted = accept_lens.to(torch.int64)
    too_long = accepted > depth
    faults.set_where(too_long, ACCEPT_LEN_FAULT)
    live = (accepted > 0) & ~too_long
    if seq_lens is not None:
        negative = (accepted > 0) & (seq_lens < 0)
        faults.set_where(negative, SEQ_LEN_FAULT)
        live &= ~negative
    accepted = accepted.masked_fill(~live, 0)
    first_node = torch.arange(batch, device=accept_index.device) * draft_token_num

    def step_at(entry: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        if depth == 0:
            return torch.full_like(entry, -1)
        node = accept_index.gather(1, entry.masked_fill(~wanted, 0)[:, None]).squeeze(1).to(torch.int64)
        return (node - first_node).masked_fill(~wanted, -1)

    last = step_at(accepted - 1, live)
    if seq_lens is None:
        return last, None
    entry = completing_entry(seq_lens.to(torch.int64).masked_fill(~live, 0), accepted, interval)
    return last, step_at(entry, live & (entry >= 0))


def completing_entry(pre: torch.Tensor, accepted: torch.Tensor, interval: int) -> torch.Tensor:
    """Which of ``accepted`` tokens after ``pre`` completes the last multiple of ``interval``, -1 where none does.

    pre, accepted: ``[B]`` int64, not negative.
    """
    # Remainders of numbers that are not negative; a sum of two lengths could pass 2^63.
    past_boundary = pre % interval
    crossed = past_boundary + accepted >= interval
    left_over = (past_boundary + accepted) % interval
    return (accepted - left_over - 1).masked_fill(~crossed, -1)
