"""``accept_commit``: one launch from the verified window to what is committed, against the launches that it replaces.

``separate`` is dspark's own ``accept`` and ``commit_indices`` with the sums between them, ``sglang`` the same of
SGLang's functions. Neither has a cut at an end-of-text token, so none is asked for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dspark.ops import compute_dflash_correct_drafts_and_bonus, fused_accept_commit, fused_commit_track_indices
from dspark.ops.accept_commit.eager import accept_commit_eager
from dspark.ops.accept_commit.result import AcceptCommit

from ..case import EAGER, FUSED, SGLANG, Absent, Asked, Case, Contender, Inputs, Tensors, compiled
from ..suite import fixture
from . import accept, commit_indices
from .layout import WINDOW

NAME = "accept_commit"
AXIS = "batch"
SIZES = (1, 8, 64, 256)
SEPARATE = "separate"
INTERVAL = commit_indices.INTERVAL


def floor_bytes(batch: int) -> int:
    """Drafts, targets and a length read; six results written, one of them int32."""
    return batch * ((WINDOW - 1) * 8 + WINDOW * 8 + 8 + 4 + 5 * 8)


def cases(sizes: Sequence[int] = SIZES) -> list[Case]:
    """Windows of eight, tracked, at every size."""
    return [
        Case(NAME, f"W{WINDOW} tracked", AXIS, batch, floor_bytes(batch), functools.partial(StepInputs, batch))
        for batch in sizes
    ]


def small() -> list[Case]:
    """What the oracle judges."""
    return cases((64,))


def separately(
    accepting: Callable[..., Any],
    committing: Callable[..., Any],
    chain: torch.Tensor,
    candidates: torch.Tensor,
    target: torch.Tensor,
    lengths: torch.Tensor,
) -> AcceptCommit:
    """The step in the launches of its parts."""
    correct, bonus = accepting(candidates=candidates, target_predict=target)
    commit_lens = correct.to(torch.int64) + 1
    last, track = committing(chain, commit_lens, lengths, WINDOW, INTERVAL)
    return AcceptCommit(correct, bonus, commit_lens, lengths + commit_lens, last, track)


class StepInputs(Inputs):
    """The windows of ``accept`` with the lengths of ``commit_indices``."""

    def __init__(self, batch: int, device: torch.device, copies: int) -> None:
        self.batch = batch
        windows = accept.AcceptInputs(batch, device, copies)
        nodes = commit_indices.CommitInputs(batch, device, copies)
        self.rows = list(zip(windows.candidates, windows.target, nodes.seq_lens, strict=True))
        self.chain = nodes.accept_index[0]

    def contenders(self, asked: Asked) -> list[Contender | Absent]:
        def bound(**named: Any) -> list[Callable[[], Any]]:
            function = functools.partial(fused_accept_commit, mamba_track_interval=INTERVAL, **named)
            return [functools.partial(function, candidates=c, target_predict=t, seq_lens=s) for c, t, s in self.rows]

        def parts(accepting: Callable[..., Any], committing: Callable[..., Any]) -> list[Callable[[], Any]]:
            return [functools.partial(separately, accepting, committing, self.chain, *row) for row in self.rows]

        def traced() -> list[Callable[[], Any]]:
            function = compiled(accept_commit_eager)
            return [functools.partial(function, *row, None, None, INTERVAL) for row in self.rows]

        ours = (compute_dflash_correct_drafts_and_bonus, fused_commit_track_indices)
        found: list[Contender | Absent] = [Contender(FUSED, bound()), Contender(SEPARATE, parts(*ours))]
        if EAGER in asked.against:
            found.append(Contender(EAGER, bound(path="eager")))
        found += asked.compiled(traced, self.batch)
        theirs = asked.peer.functions
        if accept.FUNCTION not in theirs and asked.peer and SGLANG in asked.against:
            return [*found, Absent(SGLANG, f"{asked.peer.version} has no {accept.FUNCTION}")]
        return found + asked.sglang(commit_indices.FUNCTION, lambda function: parts(theirs[accept.FUNCTION], function))

    def outputs(self, returned: Any) -> Tensors:
        return {name: value.clone() for name, value in returned._asdict().items()}

    def reference(self) -> Tensors:
        return self.outputs(accept_commit_eager(*self.rows[0], None, None, INTERVAL))

    def judge(self, got: Tensors) -> str:
        oracle = fixture("oracles.accept_commit")
        need = oracle.outcome(*(tensor.cpu().numpy() for tensor in self.rows[0]), None, None, INTERVAL)
        wrong = [name for name, value in got.items() if value.tolist() != getattr(need, name).tolist()]
        return f"{', '.join(wrong)}: not the oracle's" if wrong else ""
