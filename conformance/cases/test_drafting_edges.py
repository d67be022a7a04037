"""The greedy chain at its edges: ties, NaN, padded ids and rows, anchors without a row, bad input (section 10)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from dspark import faults
from dspark.model.drafting import draft_greedy
from dspark.model.heads import MarkovHead
from dspark.model.vocabulary import ReducedVocabulary

from ..fixtures.calls.drafting import (
    F64,
    HIDDEN,
    LABEL,
    chain,
    drafted_by,
    ids_of,
    judge,
    random_inputs,
    row,
    successor,
)
from ..fixtures.calls.heads import build, build_confidence, random_markov
from ..fixtures.emulation import BF16, FP32, FloatFormat
from ..fixtures.guard import Arena
from ..fixtures.ledger import Label, expect_equal, expect_fault, expect_raises

FAULT = ("drafting", "anchor-out-of-range")


KINDS = ("vanilla", "gated", "rnn")


INF, NAN = float("inf"), float("nan")


def ties(vocab: int) -> dict[str, tuple[F64, int]]:
    """Rows of base logits and the id that must come out."""
    last = vocab - 1
    return {
        "5-and-the-last": (row(vocab, 0, {5: 2, last: 2}), 5),
        "two-neighbours-of-a-block": (row(vocab, 0, {2046: 2, last: 2}), min(2046, last)),
        "the-last-alone": (row(vocab, 0, {last: 2}), last),
        "all-equal": (row(vocab, 1, {}), 0),
        "minus-zero-before-zero": (row(vocab, -1, {7: -0.0, 9: 0.0}), 7),
        "zero-before-minus-zero": (row(vocab, -1, {7: 0.0, 9: -0.0}), 7),
        "all-minus-inf": (row(vocab, -INF, {}), 0),
        "inf-twice": (row(vocab, 0, {5: INF, last: INF}), 5),
        "all-negative": (row(vocab, -3, {last: -2}), last),
    }


@pytest.mark.parametrize("fmt", [BF16, FP32], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("vocab", [2047, 2048, 2049])
def test_f4_5_the_lowest_id_wins_a_tie(vocab: int, fmt: FloatFormat, arena: Arena) -> None:
    rows = ties(vocab)
    base = np.stack([values for values, _ in rows.values()])[:, None, :]
    anchors = np.zeros(len(rows), np.int64)
    drafted = drafted_by(None, base, np.zeros((len(rows), 1, HIDDEN)), anchors, fmt, arena)
    expect_equal(LABEL, "tokens", dict(zip(rows, drafted.tokens[:, 0].tolist(), strict=True)), {
        name: id for name, (_, id) in rows.items()
    })  # fmt: skip


WITH_NAN = {
    "one": {5: NAN}, "the-last": {10: NAN}, "beside-inf": {3: INF, 7: NAN}, "all": dict.fromkeys(range(11), NAN)
}  # fmt: skip


@pytest.mark.parametrize("where", WITH_NAN)
def test_f4_5_nan_never_gives_an_id_outside_the_vocabulary(where: str, arena: Arena) -> None:
    """And the tokens after it are drafted from it as from any other."""
    base = np.stack([row(11, 0, WITH_NAN[where]), row(11, 0, {4: 1})])[None]
    drafted = drafted_by(successor(11, 10.0), base, np.zeros((1, 2, HIDDEN)), np.array([3]), BF16, arena)
    tokens = drafted.tokens[0].tolist()
    expect_equal(LABEL, "inside the vocabulary", 0 <= tokens[0] < 11, True)
    expect_equal(LABEL, "the next token", tokens[1], (tokens[0] + 1) % 11)


@pytest.mark.parametrize("where", WITH_NAN)
def test_f4_5_nan_is_an_error_in_debug_mode(where: str, arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "_debug", True)
    good = row(11, 0, {4: 1})
    base = np.stack([[good, good], [good, row(11, 0, WITH_NAN[where])]])
    hidden = np.zeros((2, 2, HIDDEN))
    names = ["NaN", "position 1", "[1]"]
    for anchor in (3, 0):
        expect_raises(
            LABEL,
            FloatingPointError,
            names,
            lambda: drafted_by(None, base, hidden, np.array([3, anchor]), BF16, Arena(arena.device)),  # noqa: B023
        )
    drafted = drafted_by(None, base, hidden, np.array([3, -1]), BF16, Arena(arena.device))
    expect_equal(LABEL, "tokens of the live row beside a padded one", drafted.tokens[0].tolist(), [4, 4])


def test_f1_1_padded_ids_never_win(arena: Arena) -> None:
    """Eleven true ids, a Markov head of sixteen rows, of which the last five would win every step."""
    head = successor(16, 10.0)
    head.w2[11:] += 1000
    base, hidden, anchors = np.zeros((3, 4, 11)), np.zeros((3, 4, HIDDEN)), np.array([2, 9, 10])
    drafted = drafted_by(head, base, hidden, anchors, BF16, arena, keep_logits=True)
    assert drafted.logits is not None
    expect_equal(LABEL, "columns", drafted.logits.shape[2], 11)
    judge(LABEL, drafted, chain(head, base, hidden, anchors, ids_of(drafted), BF16), 1.0)
    expect_equal(LABEL, "largest id", int(drafted.tokens.max()) < 11, True)


@pytest.mark.parametrize("anchor", [32, 0x7F7F7F7F7F7F7F7F])
def test_an_anchor_without_a_row_is_a_fault(anchor: int, arena: Arena) -> None:
    """Never read out of bounds: on CPU tensors the call raises, on a GPU the word is set."""
    head = random_markov("anchor", "vanilla", BF16, hidden=HIDDEN)
    base, hidden, _ = random_inputs("anchor", 3, 2, 32)

    def call() -> None:
        drafted_by(head, base, hidden, np.array([4, anchor, 31]), BF16, arena)
        if arena.device.type != "cpu":
            faults.check()

    error = expect_raises(LABEL, faults.IndexFaultError, ["anchor-out-of-range"], call)
    expect_fault(LABEL, error, [FAULT])


def test_a_fault_does_not_touch_the_other_rows(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    head = random_markov("anchor", "vanilla", BF16, hidden=HIDDEN)
    base, hidden, _ = random_inputs("anchor", 3, 2, 32)
    monkeypatch.setattr(faults, "finish", lambda device: None)
    drafted = drafted_by(head, base, hidden, np.array([4, 99, 31]), BF16, arena)
    good = drafted_by(head, base, hidden, np.array([4, 31, 31]), BF16, Arena(arena.device))
    expect_equal(LABEL, "tokens", drafted.tokens.tolist(), good.tokens.tolist())
    expect_fault(LABEL, expect_raises(LABEL, faults.IndexFaultError, [], faults.check), [FAULT])


@pytest.mark.parametrize("kind", KINDS)
def test_padded_rows_have_a_negative_anchor_and_ids_inside_the_vocabulary(kind: str, arena: Arena) -> None:
    """F1-18: whatever they hold, NaN too, the other rows draft what they draft alone."""
    head = random_markov("padded", kind, BF16, hidden=HIDDEN)
    base, hidden, anchors = random_inputs("padded", 4, 3, 32)
    alone = drafted_by(head, base[:2], hidden[:2], anchors[:2], BF16, arena)
    base[2:], hidden[2:], anchors[2:] = NAN, NAN, [-1, -(1 << 62)]
    drafted = drafted_by(head, base, hidden, anchors, BF16, Arena(arena.device))
    expect_equal(LABEL, "live rows", drafted.tokens[:2].tolist(), alone.tokens.tolist())
    ids = drafted.tokens[2:]
    expect_equal(LABEL, "padded rows inside", bool(((ids >= 0) & (ids < 32)).all()), True)


def good_call(**changes: Any) -> Callable[[], object]:
    head = random_markov("errors", "vanilla", BF16, hidden=HIDDEN)
    arguments: dict[str, Any] = {
        "base_logits": torch.zeros(3, 2, 32, dtype=torch.bfloat16),
        "hidden": torch.zeros(3, 2, HIDDEN, dtype=torch.bfloat16),
        "anchors": torch.zeros(3, dtype=torch.int64),
        "markov": build(head, HIDDEN, torch.device("cpu")),
        "confidence": None,
        **changes,
    }
    return lambda: draft_greedy(**arguments)


def of_ids(vocab: int, prev: int) -> MarkovHead:
    head = random_markov("sizes", "vanilla", BF16, vocab=vocab, prev_vocab=prev, hidden=HIDDEN)
    return build(head, HIDDEN, torch.device("cpu"))


def offsets(*values: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


ERRORS: dict[str, tuple[tuple[str, ...], Callable[[], object]]] = {
    "base-of-two-dimensions": (("base_logits", "3 dimensions"), good_call(base_logits=torch.zeros(3, 32))),
    "base-integer": (("base_logits", "int64"), good_call(base_logits=torch.zeros(3, 2, 32, dtype=torch.int64))),
    "base-without-a-column": (("base_logits", "column"), good_call(base_logits=torch.zeros(3, 2, 0))),
    "hidden-of-another-gamma": (("hidden", "(3, 3, 16)", "(3, 2, 16)"), good_call(hidden=torch.zeros(3, 3, HIDDEN))),
    "hidden-of-two-dimensions": (("hidden", "3 dimensions"), good_call(hidden=torch.zeros(3, HIDDEN))),
    "anchors-of-another-batch": (("anchors", "(2,)", "(3,)"), good_call(anchors=torch.zeros(2, dtype=torch.int64))),
    "anchors-floating": (("anchors", "float32"), good_call(anchors=torch.zeros(3))),
    "anchors-bool": (("anchors", "bool"), good_call(anchors=torch.zeros(3, dtype=torch.bool))),
    "anchors-elsewhere": (("anchors", "meta"), good_call(anchors=torch.zeros(3, dtype=torch.int64, device="meta"))),
    "F1-1-markov-head-smaller-than-the-vocabulary": (("markov", "31", "32"), good_call(markov=of_ids(31, 32))),
    "F1-21-previous-ids-fewer-than-the-vocabulary": (("markov", "31", "32"), good_call(markov=of_ids(32, 31))),
    "F1-21-base-of-another-vocabulary": (
        ("base_logits", "32", "10"),
        good_call(vocabulary=ReducedVocabulary.from_offsets(offsets(0, 2), 10)),
    ),
    "F1-21-markov-head-smaller-than-the-reduced-vocabulary": (
        ("markov", "3 ids", "4"),
        good_call(markov=of_ids(3, 32), vocabulary=ReducedVocabulary.from_offsets(offsets(0, 2, 4, 6), 32)),
    ),
    "confidence-without-the-markov-head-it-looks-at": (
        ("confidence", "Markov"),
        good_call(markov=None, confidence=build_confidence(np.ones(HIDDEN + 8), 0.0, 8, (), torch.device("cpu"))),
    ),
}


@pytest.mark.parametrize("bad", ERRORS)
def test_error(bad: str) -> None:
    names, call = ERRORS[bad]
    expect_raises(Label("drafting", "error"), ValueError, names, call)
