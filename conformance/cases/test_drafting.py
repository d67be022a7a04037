"""The greedy chain: rows, predecessors, rounding, confidence, the scale of the logits (CONTRACTS.md section 10).

Each step is judged from the implementation's own previous token, so that one difference does not hide the next.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from dspark.model.base_logits import compute_base_logits
from dspark.model.drafting import draft_greedy

from ..fixtures.calls.drafting import (
    F64,
    HIDDEN,
    LABEL,
    Ints,
    chain,
    drafted_by,
    ids_of,
    judge,
    promoted,
    random_inputs,
    successor,
)
from ..fixtures.calls.heads import DTYPES, build, build_confidence, integers, random_markov, random_rnn_chain, tensor
from ..fixtures.emulation import BF16, FP16, FP32, FloatFormat, decode, round_to
from ..fixtures.guard import Arena, to_bits
from ..fixtures.ledger import expect_equal, expect_within
from ..fixtures.oracles import base_logits as logits_oracle
from ..fixtures.oracles import heads as oracle
from ..fixtures.oracles.heads import Markov, Verdict
from ..fixtures.streams import Stream

KINDS = ("vanilla", "gated", "rnn")


@pytest.mark.parametrize("keep", [True, False], ids=["logits", "tokens"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gamma", [1, 2, 7])
def test_chain(gamma: int, kind: str, keep: bool, arena: Arena) -> None:
    key = f"chain/{kind}/{gamma}"
    rnn = kind == "rnn"
    head = random_rnn_chain(key, HIDDEN) if rnn else random_markov(key, kind, BF16, hidden=HIDDEN)
    base, hidden, anchors = random_inputs(key, 8, gamma, 32)
    drafted = drafted_by(head, base, hidden, anchors, BF16, arena, keep_logits=keep)
    expect_equal(LABEL, "whether logits are returned", drafted.logits is not None, keep)
    expect_equal(LABEL, "survival", drafted.survival, None)
    judge(LABEL, drafted, chain(head, base, hidden, anchors, ids_of(drafted), BF16))


@pytest.mark.parametrize("own", [BF16, FP16, FP32], ids=lambda fmt: f"head-{fmt.name}")
@pytest.mark.parametrize("of_base", [BF16, FP16, FP32], ids=lambda fmt: f"base-{fmt.name}")
def test_step_is_rounded_to_the_promoted_dtype(of_base: FloatFormat, own: FloatFormat, arena: Arena) -> None:
    key = f"promotion/{of_base.name}/{own.name}"
    head = random_markov(key, "vanilla", own, hidden=HIDDEN)
    base, hidden, anchors = random_inputs(key, 8, 3, 32)
    base = round_to(of_base, Stream(key).normal(base.shape) * 20)
    drafted = drafted_by(head, base, hidden, anchors, of_base, arena, keep_logits=True)
    assert drafted.logits is not None
    expect_equal(LABEL, "dtype", drafted.logits.dtype, DTYPES[promoted(of_base, own)])
    judge(LABEL, drafted, chain(head, base, hidden, anchors, ids_of(drafted), of_base), share=1.0)


def test_ids_that_only_the_rounding_makes_equal_are_a_tie(arena: Arena) -> None:
    """256 + 0.5 and 256 + 0.75 are both 256 in bf16: the lower id wins, the sum in fp32 would say the higher."""
    head = Markov("vanilla", np.ones((4, 1)), np.array([[0.0], [0.5], [0.75], [0.0]]), BF16)
    base = np.array([[[0.0, 256, 256, 0]]])
    drafted = drafted_by(head, base, np.zeros((1, 1, HIDDEN)), np.array([0]), BF16, arena)
    expect_equal(LABEL, "tokens", drafted.tokens.tolist(), [[1]])


def test_no_markov_head(arena: Arena) -> None:
    base, hidden, anchors = random_inputs("plain", 8, 5, 32)
    drafted = drafted_by(None, base, hidden, anchors, BF16, arena, keep_logits=True)
    judge(LABEL, drafted, chain(None, base, hidden, anchors, ids_of(drafted), BF16), share=1.0)


def peaks(batch: int, gamma: int, vocab: int, height: float) -> F64:
    """``base[b, k]`` peaks at id k + b."""
    base = np.zeros((batch, gamma, vocab))
    for b in range(batch):
        for k in range(gamma):
            base[b, k, k + b] = height
    return base


@pytest.mark.parametrize("gamma", [0, 1, 4])
def test_f1_13_row_k_predicts_draft_k(gamma: int, arena: Arena) -> None:
    base = peaks(2, gamma, 8, 10.0)
    drafted = drafted_by(None, base, np.zeros((2, gamma, HIDDEN)), np.array([5, 6]), BF16, arena)
    expect_equal(LABEL, "tokens", drafted.tokens.tolist(), [[b + k for k in range(gamma)] for b in range(2)])


@pytest.mark.parametrize("gamma", [0, 1, 4])
def test_f1_13_the_token_before_is_the_one_drafted_before(gamma: int, arena: Arena) -> None:
    """Base zero: each token follows its predecessor, the anchor first; reusing the anchor would repeat one token."""
    hidden, anchors = np.zeros((2, gamma, HIDDEN)), np.array([5, 2])
    drafted = drafted_by(successor(8, 10.0), np.zeros((2, gamma, 8)), hidden, anchors, BF16, arena)
    expect_equal(LABEL, "tokens", drafted.tokens.tolist(), [[(a + 1 + k) % 8 for k in range(gamma)] for a in (5, 2)])


def test_f1_13_both_together(arena: Arena) -> None:
    """The bias, 0.6 of the base peak, wins nowhere, and raises the right ids."""
    base, hidden, anchors = peaks(2, 4, 8, 10.0), np.zeros((2, 4, HIDDEN)), np.array([5, 2])
    drafted = drafted_by(successor(8, 6.0), base, hidden, anchors, BF16, arena, keep_logits=True)
    expect_equal(LABEL, "tokens", drafted.tokens.tolist(), [[0, 1, 2, 3], [1, 2, 3, 4]])
    judge(LABEL, drafted, chain(successor(8, 6.0), base, hidden, anchors, ids_of(drafted), BF16), 1.0)


def confident(rank: int, arena: Arena) -> tuple[F64, Any]:
    weight = integers(Stream(f"confident/{rank}"), 5, HIDDEN + rank, scale=2.0**-4)
    return weight, build_confidence(weight, 0.5, rank, (1.0, 2.0, 0.5), arena.device)


@pytest.mark.parametrize("with_markov", [True, False])
def test_confidence_sees_the_undivided_hidden_and_the_token_before(with_markov: bool, arena: Arena) -> None:
    head = random_markov("confidence", "vanilla", BF16, hidden=HIDDEN)
    base, hidden, anchors = random_inputs("confidence", 8, 3, 32)
    weight, module = confident(8 if with_markov else 0, arena)
    own_head = head if with_markov else None
    drafted = drafted_by(own_head, base, hidden, anchors, BF16, arena, confidence=module)
    before = np.concatenate([anchors[:, None], ids_of(drafted)[:, :-1]], axis=1)
    embedded = head.w1[before].reshape(24, -1) if with_markov else None
    raw = oracle.raw_confidence(hidden.reshape(24, -1), embedded, weight, 0.5).reshape(8, 3)
    assert drafted.survival is not None
    own = decode(FP32, to_bits(drafted.survival))
    expect_within(LABEL, "survival", Verdict(own, oracle.survival(raw, (1.0, 2.0, 0.5), own)), single_share=0)


def test_f1_13_nothing_is_drafted_for_gamma_0(arena: Arena) -> None:
    head = random_markov("gamma-0", "rnn", BF16, hidden=HIDDEN)
    base, hidden, anchors = random_inputs("gamma-0", 3, 0, 32)
    _, module = confident(8, arena)
    drafted = drafted_by(head, base, hidden, anchors, BF16, arena, confidence=module, keep_logits=True)
    shapes = [tuple(part.shape) for part in (drafted.tokens, drafted.survival, drafted.logits) if part is not None]
    expect_equal(LABEL, "shapes", shapes, [(3, 0), (3, 0), (3, 0, 32)])
    expect_equal(LABEL, "dtype", drafted.tokens.dtype, torch.int64)


def test_no_request(arena: Arena) -> None:
    head = random_markov("B0", "rnn", BF16, hidden=HIDDEN)
    base, hidden, anchors = random_inputs("B0", 0, 4, 32)
    drafted = drafted_by(head, base, hidden, anchors, BF16, arena)
    expect_equal(LABEL, "shape", tuple(drafted.tokens.shape), (0, 4))


def tokens_of(base: F64, head: Markov, hidden: F64, anchors: Ints) -> Ints:
    """What the oracle drafts: its own chain."""
    tokens = np.zeros(base.shape[:2], np.int64)
    for k in range(base.shape[1]):
        tokens[:, k] = oracle.first_maximum(chain(head, base, hidden, anchors, tokens, BF16)[k].low)
    return tokens


def tiny_target(multiplier: float) -> tuple[logits_oracle.Head, F64, Ints, Markov]:
    """A head whose logits are of the size that trained ones have, and a Markov bias of deviation about 0.5."""
    stream = Stream("muP")
    weight = integers(stream.child("weight"), 3, 48, 64, scale=2.0**-8)
    hidden = integers(stream.child("hidden"), 100, 16 * 4, 64)
    w1, w2 = integers(stream.child("w1"), 2, 48, 8, scale=0.25), integers(stream.child("w2"), 2, 48, 8, scale=0.25)
    return (
        logits_oracle.Head(weight, BF16, 41),
        hidden,
        stream.child("anchors").integers(0, 41, (16,)),
        Markov("vanilla", w1, w2, BF16),
    )


SCALES: dict[str, Callable[[logits_oracle.Head, F64, float], F64]] = {
    "never-divided": lambda head, hidden, m: logits_oracle.base_logits(head, hidden, None, BF16),
    "divided-twice": lambda head, hidden, m: logits_oracle.base_logits(
        head, logits_oracle.divided(BF16, hidden, m), m, BF16
    ),
}


@pytest.mark.parametrize("multiplier", [8.0, 24.0])
@pytest.mark.parametrize("wrong", SCALES)
def test_f1_10_a_wrong_scale_is_seen_in_tokens_only_beside_a_bias(wrong: str, multiplier: float, arena: Arena) -> None:
    """Greedy tokens of the base logits alone do not depend on a power of two; with a bias a tenth of them change."""
    head, hidden, anchors, markov = tiny_target(multiplier)
    weight = torch.nn.Linear(64, 48, bias=False, dtype=torch.bfloat16, device=arena.device).requires_grad_(False)
    weight.weight.copy_(tensor(head.weight, torch.bfloat16, arena.device))
    rows = tensor(hidden, torch.bfloat16, arena.device).view(16, 4, 64)
    base = compute_base_logits(rows, weight, vocab_size=41, mup_width_multiplier=multiplier)
    module = build(markov, 64, arena.device)
    right = draft_greedy(base, rows, torch.from_numpy(anchors).to(arena.device), module, None)
    other = SCALES[wrong](head, hidden, multiplier).reshape(16, 4, 41)
    own = decode(BF16, to_bits(base))
    expect_equal(
        LABEL, "tokens", right.tokens.tolist(), tokens_of(own, markov, hidden.reshape(16, 4, 64), anchors).tolist()
    )
    changed = ids_of(right) != tokens_of(other, markov, hidden.reshape(16, 4, 64), anchors)
    expect_equal(LABEL, f"{changed.mean():.0%} of the tokens change", bool(changed.mean() > 0.1), True)
    if multiplier == 8:
        blind = oracle.first_maximum(own) != oracle.first_maximum(other)
        expect_equal(LABEL, "tokens that change without a bias", int(blind.sum()), 0)
