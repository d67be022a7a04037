"""The greedy chain: base logits of a block and the Markov bias of each token before, to draft tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dspark import faults
from dspark.model.heads import ConfidenceHead, MarkovHead
from dspark.model.vocabulary import ReducedVocabulary, crop_to_vocabulary
from dspark.ops import arguments

ANCHOR_FAULT = faults.declare("drafting", "anchor-out-of-range")


@dataclass(frozen=True)
class Drafted:
    """What a block proposes.

    tokens: ``[B, G]`` int64, target ids inside the vocabulary. survival: ``[B, G]`` fp32 in [0, 1], non-increasing;
    None without a confidence head. logits: ``[B, G, V]`` over target ids, what each token is the first maximum of
    (-Inf for an id that a reduced vocabulary does not have); None unless they were asked for.
    """

    tokens: torch.Tensor
    survival: torch.Tensor | None
    logits: torch.Tensor | None


def draft_greedy(
    base_logits: torch.Tensor,
    hidden: torch.Tensor,
    anchors: torch.Tensor,
    markov: MarkovHead | None,
    confidence: ConfidenceHead | None,
    *,
    vocabulary: ReducedVocabulary | None = None,
    keep_logits: bool = False,
) -> Drafted:
    """Draft G tokens of each of B requests, one after the other (CONTRACTS.md section 10).

    base_logits: ``[B, G, V]``, V the true vocabulary of the target; row k is the one that predicts draft k.
    hidden: ``[B, G, H]``, the undivided rows that the base logits were computed from.
    anchors: ``[B]`` int32 or int64, the token before the first draft; negative: a padded row, whose result means
    nothing. markov: None: no bias. vocabulary: of a draft that predicts a part of the target's ids; the columns of
    the bias are then draft ids, otherwise target ids. Columns of the bias past those ids are padding and cannot win.

    ``step = RN_P(fp32(base) + fp32(bias))``, P the promoted dtype; the token is the lowest id among the maxima of step
    (-0 = +0), 0 or the lowest candidate where all are -Inf. A NaN in step is a ``FloatingPointError`` with
    ``DSPARK_DEBUG=1``; otherwise the token is unspecified, but inside the vocabulary.

    An anchor that the Markov head has no row for is an index fault; its row is drafted as if the last id came before.
    ``ValueError`` for shapes that disagree and heads smaller than the vocabulary.
    """
    _require(base_logits, hidden, anchors, markov, confidence, vocabulary)
    batch, gamma, _ = base_logits.shape
    live = anchors >= 0
    prev = _first_previous(anchors, markov)
    candidates = base_logits if vocabulary is None else vocabulary.of_target(base_logits)
    state = None if markov is None else markov.start(batch, base_logits.device)
    tokens, steps, before = [], [], []
    for k in range(gamma):
        step = candidates[:, k]
        if markov is not None:
            before.append(prev)
            bias, state = markov.bias(prev, hidden[:, k], state)
            step = _added(step, _columns(bias, vocabulary, step.shape[-1]))
        _refuse_nan(step, live, k)
        chosen = step.argmax(dim=-1)
        prev = chosen if vocabulary is None else vocabulary.target_ids[chosen]
        tokens.append(prev)
        steps.append(step)
    survival = None
    if confidence is not None:
        embedded = markov.embed(_columns_of(before, anchors)) if markov is not None and confidence.rank else None
        survival = confidence(hidden, embedded)
    faults.finish(base_logits.device)
    return Drafted(_columns_of(tokens, anchors), survival, _logits(steps, candidates, vocabulary, keep_logits))


def _require(
    base_logits: torch.Tensor,
    hidden: torch.Tensor,
    anchors: torch.Tensor,
    markov: MarkovHead | None,
    confidence: ConfidenceHead | None,
    vocabulary: ReducedVocabulary | None,
) -> None:
    arguments.require_rank("base_logits", base_logits, 3)
    arguments.require_floating("base_logits", base_logits)
    batch, gamma, width = base_logits.shape
    if not width:
        raise ValueError("base_logits: got no column, need at least one id")
    arguments.require_rank("hidden", hidden, 3)
    arguments.require_shape("hidden", hidden, (batch, gamma, hidden.shape[2]), "[B, G, H] of base_logits")
    arguments.require_shape("anchors", anchors, (batch,), "[B] of base_logits")
    arguments.require_dtype("anchors", anchors, arguments.INDEX_DTYPES)
    arguments.require_one_device(base_logits=base_logits, hidden=hidden, anchors=anchors)
    if vocabulary is not None and width != vocabulary.target_vocab_size:
        raise ValueError(f"base_logits: got {width} columns, need {vocabulary.target_vocab_size}, the target's ids")
    if markov is not None:
        if markov.vocab_size < (ids := width if vocabulary is None else len(vocabulary)):
            raise ValueError(f"markov: predicts {markov.vocab_size} ids, need at least {ids}")
        if markov.prev_vocab_size < width:
            raise ValueError(f"markov: knows {markov.prev_vocab_size} previous ids, need at least {width}")
    if confidence is not None and confidence.rank and markov is None:
        raise ValueError("confidence: looks at a Markov embedding, need a Markov head")


def _first_previous(anchors: torch.Tensor, markov: MarkovHead | None) -> torch.Tensor:
    """``anchors`` as ids that the Markov head has rows for."""
    prev = anchors.to(torch.int64)
    if markov is None:
        return prev
    last = markov.prev_vocab_size - 1
    faults.set_where(prev > last, ANCHOR_FAULT)
    return prev.clamp(0, last)


def _columns(bias: torch.Tensor, vocabulary: ReducedVocabulary | None, width: int) -> torch.Tensor:
    return crop_to_vocabulary("markov", bias, width) if vocabulary is None else vocabulary.of_draft(bias)


def _added(base: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return (base.float() + bias.float()).to(torch.promote_types(base.dtype, bias.dtype))


def _refuse_nan(step: torch.Tensor, live: torch.Tensor, k: int) -> None:
    if not faults.debugging():
        return
    rows = torch.nonzero(step.isnan().any(dim=-1) & live).flatten().tolist()
    if rows:
        raise FloatingPointError(f"draft logits: NaN at draft position {k} of requests {rows}, need numbers")


def _columns_of(parts: list[torch.Tensor], anchors: torch.Tensor) -> torch.Tensor:
    """``[B, G]`` of G columns; no column is possible."""
    return torch.stack(parts, dim=1) if parts else anchors.new_empty((anchors.shape[0], 0), dtype=torch.int64)


def _logits(
    steps: list[torch.Tensor], candidates: torch.Tensor, vocabulary: ReducedVocabulary | None, keep: bool
) -> torch.Tensor | None:
    if not keep:
        return None
    stacked = torch.stack(steps, dim=1) if steps else candidates
    return stacked if vocabulary is None else vocabulary.expand(stacked)
