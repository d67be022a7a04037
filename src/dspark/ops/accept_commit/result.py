"""What ``accept_commit`` returns."""

from __future__ import annotations

from typing import NamedTuple

import torch


class AcceptCommit(NamedTuple):
    """The decisions of one step, each ``[B]`` (conformance/CONTRACTS.md section 7b).

    correct: int32, leading right drafts. bonus: int64, the target's token after them.
    commit_lens: int64, tokens that the row commits and emits, ``target_predict[b, :commit_lens[b]]``; 0 in padded rows.
    new_seq_lens: int64, lengths after the step. last: int64, the step whose state is committed, -1 in padded rows.
    track: int64, the step that completes a track interval, -1 for none; None where nothing is tracked.
    """

    correct: torch.Tensor
    bonus: torch.Tensor
    commit_lens: torch.Tensor
    new_seq_lens: torch.Tensor
    last: torch.Tensor
    track: torch.Tensor | None
