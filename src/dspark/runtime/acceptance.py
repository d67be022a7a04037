"""Which drafted tokens are kept: the rule of a worker, behind one interface.

A rule sees the target's logits and nothing of the draft's, which is why greedy speculation loses nothing: whatever the
draft proposes, the tokens that come out are those of plain decoding.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from dspark.ops import compute_dflash_correct_drafts_and_bonus
from dspark.runtime.index_cache import IndexCache


class AcceptanceRule(Protocol):
    """How tokens are chosen from the target's logits, with and without drafts."""

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


def greedy_tokens(logits: torch.Tensor) -> torch.Tensor:
    """The most likely id over the last dimension, int64; the lowest id among equals (section 10)."""
    return logits.argmax(dim=-1)


class Greedy:
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


class Accepted(NamedTuple):
    """What one step emits. ``tokens [R, W]``: row r's are the first ``lens[r]``; ``lens [R]`` is 0 for padded rows."""

    tokens: torch.Tensor
    lens: torch.Tensor
    correct: torch.Tensor


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
