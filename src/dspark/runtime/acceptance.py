"""Which drafted tokens are kept: the rule of a worker, behind one interface.

A rule sees the target's logits and nothing of the draft's, which is why greedy speculation loses nothing: whatever the
draft proposes, the tokens that come out are those of plain decoding.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from dspark.ops import compute_dflash_correct_drafts_and_bonus, fused_accept_commit
from dspark.runtime.index_cache import IndexCache


class Verified(NamedTuple):
    """A verified window of a batch, which a rule decides on.

    candidates: ``[R, W]``, the anchor and the drafts. logits: ``[R, W, V]`` after each. verify_lens: ``[R]``, how many
    columns of each row exist. seq_lens: ``[R]`` lengths before the step, negative in padded rows. eos: ``[E]`` ids that
    end a request. track_interval: tokens between tracked states, None where nothing is tracked.
    """

    candidates: torch.Tensor
    logits: torch.Tensor
    verify_lens: torch.Tensor
    seq_lens: torch.Tensor
    eos: torch.Tensor
    track_interval: int | None = None


class Steps(NamedTuple):
    """The steps whose states a window commits, ``[R]``, -1 for none; track is None where nothing is tracked."""

    last: torch.Tensor
    track: torch.Tensor | None


class Accepted(NamedTuple):
    """What one step emits. ``tokens [R, W]``: row r's are the first ``lens[r]``; ``lens [R]`` is 0 for padded rows.

    correct: ``[R]``, accepted drafts. steps: where the rule has found them too; else they follow from ``lens``.
    """

    tokens: torch.Tensor
    lens: torch.Tensor
    correct: torch.Tensor
    steps: Steps | None = None


class AcceptanceRule(Protocol):
    """How tokens are chosen from the target's logits, with and without drafts. A rule inherits from this class."""

    def choose(self, logits: torch.Tensor) -> torch.Tensor:
        """The next token ``[R]`` int64 after ``logits [R, V]``: what plain decoding would emit."""
        ...

    def __call__(
        self, candidates: torch.Tensor, logits: torch.Tensor, verify_lens: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Accepted drafts ``[R]`` and the target's own next token ``[R]``.

        candidates: ``[R, W]``, the anchor and the drafts. logits: ``[R, W, V]`` after each. verify_lens: ``[R]``, 1..W,
        how many columns of each row exist.
        """
        ...

    def accept(self, window: Verified, index: IndexCache) -> Accepted:
        """What the rows of ``window`` emit and commit: what a call of the rule gives, cut after the first end."""
        correct, bonus = self(window.candidates, window.logits, window.verify_lens.clamp(min=1))  # padded rows have 0
        return emit(window.candidates, correct, bonus, window.seq_lens >= 0, window.eos, index)


def greedy_tokens(logits: torch.Tensor) -> torch.Tensor:
    """The most likely id over the last dimension, int64; the lowest id among equals (section 10)."""
    return logits.argmax(dim=-1)


class Greedy(AcceptanceRule):
    """Keep the drafts that greedy decoding of the target would have emitted."""

    def choose(self, logits: torch.Tensor) -> torch.Tensor:
        """See :meth:`AcceptanceRule.choose`."""
        return greedy_tokens(logits)

    def __call__(
        self, candidates: torch.Tensor, logits: torch.Tensor, verify_lens: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See :meth:`AcceptanceRule.__call__`."""
        return compute_dflash_correct_drafts_and_bonus(
            candidates=candidates, target_predict=greedy_tokens(logits), verify_lens=verify_lens
        )

    def accept(self, window: Verified, index: IndexCache) -> Accepted:
        """See :meth:`AcceptanceRule.accept`: the same in one launch, and the steps with it."""
        target = greedy_tokens(window.logits)
        found = fused_accept_commit(
            candidates=window.candidates,
            target_predict=target,
            seq_lens=window.seq_lens,
            verify_lens=window.verify_lens,
            eos_ids=window.eos,
            mamba_track_interval=window.track_interval,
        )
        # An accepted draft is the target's own token, so what a row emits is the target's row.
        return Accepted(target, found.commit_lens, found.correct, Steps(found.last, found.track))


def emit(
    candidates: torch.Tensor,
    correct: torch.Tensor,
    bonus: torch.Tensor,
    live: torch.Tensor,
    eos: torch.Tensor,
    index: IndexCache,
) -> Accepted:
    """The accepted drafts and the bonus of each live row, cut after the first end-of-sequence id.

    candidates: ``[R, W]``. correct, bonus: ``[R]``. live: bool ``[R]``. eos: ``[E]`` ids. What a row emits is also what
    it commits: a sequence that ends inside a window holds what plain decoding would hold, not what was accepted beyond.
    """
    columns = index.columns(candidates.shape[1])
    correct = correct.to(torch.int64)
    drafts = candidates.roll(-1, dims=1)
    tokens = torch.where(columns == correct[:, None], bonus[:, None], drafts)
    ends = (tokens[..., None] == eos).any(dim=-1)  # one after the bonus changes nothing: the bonus comes first
    first_end = torch.where(ends, columns, candidates.shape[1]).amin(dim=1)
    lens = torch.minimum(correct, first_end) + 1
    return Accepted(tokens, torch.where(live, lens, 0), correct)


def leading_survivors(survival: torch.Tensor, threshold: float) -> torch.Tensor:
    """How many leading drafts ``[R]`` of ``survival [R, G]`` are likely enough to be worth verifying; NaN is not."""
    return (survival >= threshold).to(torch.int64).cumprod(dim=1).sum(dim=1)
