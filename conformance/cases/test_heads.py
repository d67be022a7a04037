"""Markov and confidence heads: order of the parts, every rounding, the state, survival, bad input (section 10)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from dspark.model.heads import ConfidenceHead, build_markov_head

from ..fixtures.calls.heads import DTYPES, build, build_confidence, integers, random_markov, tensor
from ..fixtures.emulation import BF16, FP16, FP32, FloatFormat, decode, round_to
from ..fixtures.guard import Arena, to_bits
from ..fixtures.ledger import Label, expect_equal, expect_raises, expect_within
from ..fixtures.oracles import heads as oracle
from ..fixtures.oracles.heads import Markov, Verdict
from ..fixtures.streams import Stream

HIDDEN = 16
KINDS = ("vanilla", "gated", "rnn")
F64 = npt.NDArray[np.float64]


def inputs(key: str, batch: int, prev_vocab: int, rank: int) -> tuple[npt.NDArray[np.int64], F64, F64]:
    """prev, hidden and a state, all such that products are exact."""
    stream = Stream(key)
    prev = stream.child("prev").integers(0, prev_vocab, (batch,))
    return (
        prev,
        integers(stream.child("hidden"), 8, batch, HIDDEN, scale=0.25),
        integers(stream.child("state"), 64, batch, rank, scale=2.0**-6),
    )


def judge(
    label: Label, head: Markov, prev: npt.NDArray[np.int64], hidden: F64, state: F64, arena: Arena, share: float
) -> None:
    """The product's bias and next state are in the oracle's sets, given the state before."""
    dtype = DTYPES[head.fmt]
    module = build(head, hidden.shape[1], arena.device)
    given = tensor(state, dtype, arena.device) if head.kind == "rnn" else module.start(len(prev), arena.device)
    bias, following = module.bias(torch.from_numpy(prev).to(arena.device), tensor(hidden, dtype, arena.device), given)
    expected, expected_state = oracle.bias(head, prev, hidden, state)
    expect_equal(label, "dtype of the bias", bias.dtype, dtype)
    expect_within(label, "bias", Verdict(decode(head.fmt, to_bits(bias)), expected), single_share=share)
    expect_equal(label, "whether there is a state", following is None, expected_state is None)
    if following is not None and expected_state is not None:
        found = decode(head.fmt, to_bits(following))
        expect_within(label, "state", Verdict(found, expected_state), single_share=share)


@pytest.mark.parametrize("dense", [False, True], ids=["one-per-row", "dense"])
@pytest.mark.parametrize("fmt", [BF16, FP16], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("kind", KINDS)
def test_bias(kind: str, fmt: FloatFormat, dense: bool, arena: Arena) -> None:
    key = f"bias/{kind}/{fmt.name}/{dense}"
    head = random_markov(key, kind, fmt, dense=dense, hidden=HIDDEN)
    judge(Label("heads", kind), head, *inputs(key, 64, 32, head.rank), arena, 0.98)


def test_bias_in_fp32(arena: Arena) -> None:
    """Nothing is rounded to a narrower format, so sigmoid and tanh leave ranges; the vanilla head has none."""
    for kind, share in (("vanilla", 1.0), ("gated", 0.0), ("rnn", 0.0)):
        head = random_markov(f"fp32/{kind}", kind, FP32, hidden=HIDDEN)
        judge(Label("heads", kind), head, *inputs(f"fp32/{kind}", 16, 32, head.rank), arena, share)


def test_f1_21_w1_is_indexed_by_target_ids_and_w2_by_draft_ids(arena: Arena) -> None:
    """Ten target ids, four draft ids: target id 9 may come before."""
    head = random_markov("F1-21", "vanilla", BF16, vocab=4, prev_vocab=10, hidden=HIDDEN)
    prev = np.array([9, 0, 3, 8])
    _, hidden, state = inputs("F1-21", 4, 10, head.rank)
    judge(Label("heads", "vanilla"), head, prev, hidden, state, arena, 1.0)


def test_sums_are_not_accumulated_in_bf16(arena: Arena) -> None:
    """A rank of 512 with sums far above 256."""
    head = random_markov("wide", "vanilla", BF16, rank=512, hidden=HIDDEN)
    head = replace(head, w1=head.w1 * 4)
    judge(Label("heads", "vanilla"), head, *inputs("wide", 16, 32, 512), arena, 1.0)


def finite_bf16() -> F64:
    values = decode(BF16, np.arange(1 << 16).astype(np.uint16))
    return values[np.isfinite(values)]


def test_sigmoid_of_every_bf16_value(arena: Arena) -> None:
    """A gated head of rank 1 whose gate is hidden itself and whose embedding is 1: the bias is the gate."""
    values = finite_bf16()
    one = np.ones((1, 1))
    head = Markov("gated", one, one, BF16, np.array([[1.0, 0.0]]), np.zeros(1))
    judge(Label("heads", "gated"), head, np.zeros(values.size, np.int64), values[:, None], one, arena, share=0.995)


def test_tanh_of_every_bf16_value(arena: Arena) -> None:
    """An rnn head of rank 1 whose candidate and output are hidden and whose gate is closed: both are tanh."""
    values = finite_bf16()
    one = np.ones((1, 1))
    head = Markov("rnn", one, one, BF16, np.array([[0.0, 0, 0], [0, 0, 1], [0, 0, 1]]), np.array([-300.0, 0, 0]))
    state = np.zeros((values.size, 1))
    judge(Label("heads", "rnn"), head, np.zeros(values.size, np.int64), values[:, None], state, arena, share=0.995)


def swapped_inputs(head: Markov) -> Markov:
    """[e; h] instead of [h; e], or [e; s; h] instead of [s; e; h]."""
    assert head.proj is not None
    r = head.rank
    cut = HIDDEN if head.kind == "gated" else r
    width = cut + r
    order = [*range(cut, width), *range(cut), *range(width, head.proj.shape[1])]
    return replace(head, proj=head.proj[:, np.argsort(order)])


def swapped_chunks(head: Markov) -> Markov:
    """Candidate before gate."""
    assert head.proj is not None
    assert head.proj_bias is not None
    r = head.rank
    order = [*range(r, 2 * r), *range(r), *range(2 * r, 3 * r)]
    return replace(head, proj=head.proj[order], proj_bias=head.proj_bias[order])


WRONG: dict[str, tuple[str, Callable[[Markov], Markov]]] = {
    "gated-inputs-swapped": ("gated", swapped_inputs),
    "rnn-inputs-swapped": ("rnn", swapped_inputs),
    "rnn-chunks-swapped": ("rnn", swapped_chunks),
    "gated-without-its-bias": ("gated", lambda head: replace(head, proj_bias=np.zeros(head.rank))),
    "vanilla-instead-of-gated": ("gated", lambda head: replace(head, kind="vanilla")),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_the_oracle_refuses_another_head(wrong: str, arena: Arena) -> None:
    """Half of the wrong evaluation, of the state where there is one, is outside the sets of the right one."""
    kind, change = WRONG[wrong]
    head = random_markov(wrong, kind, BF16, hidden=HIDDEN)
    prev, hidden, state = inputs(wrong, 64, 32, head.rank)
    right, right_state = oracle.bias(head, prev, hidden, state)
    other, other_state = oracle.bias(change(head), prev, hidden, state)
    if right_state is not None and other_state is not None:
        right, other = right_state, other_state
    outside = ~Verdict(other.low, right).ok
    expect_equal(Label("heads", "wrong"), "half is refused", bool(outside.mean() > 0.5), True)


def test_the_rounding_of_each_step_is_seen(arena: Arena) -> None:
    """fp32 throughout, rounded once at the end, is another head: a tenth of all states show it."""
    head = random_markov("unrounded", "rnn", BF16, hidden=HIDDEN)
    prev, hidden, state = inputs("unrounded", 64, 32, head.rank)
    right = oracle.bias(head, prev, hidden, state)[1]
    wide = oracle.bias(replace(head, fmt=FP32), prev, hidden, state)[1]
    assert right is not None
    assert wide is not None
    outside = ~Verdict(round_to(BF16, wide.low), right).ok
    expect_equal(Label("heads", "wrong"), "a tenth is refused", bool(outside.mean() > 0.1), True)


@pytest.mark.parametrize("kind", KINDS)
def test_more_dimensions_are_rows(kind: str, arena: Arena) -> None:
    """Training calls a head with whole blocks ``[B, G]``; each row is the same as alone."""
    head = random_markov(f"dimensions/{kind}", kind, BF16, hidden=HIDDEN)
    prev, hidden, state = inputs(f"dimensions/{kind}", 12, 32, head.rank)
    module = build(head, HIDDEN, arena.device)
    ids, rows = torch.from_numpy(prev).to(arena.device), tensor(hidden, torch.bfloat16, arena.device)
    own = tensor(state, torch.bfloat16, arena.device)
    flat, flat_state = module.bias(ids, rows, own)
    block, block_state = module.bias(ids.view(3, 4), rows.view(3, 4, -1), own.view(3, 4, -1))
    label = Label("heads", kind)
    expect_equal(label, "bias", to_bits(block).reshape(12, -1), to_bits(flat))
    if flat_state is not None and block_state is not None:
        expect_equal(label, "state", to_bits(block_state).reshape(12, -1), to_bits(flat_state))


def test_the_state_before_the_first_token_is_zero(arena: Arena) -> None:
    head = random_markov("start", "rnn", BF16, hidden=HIDDEN)
    start = build(head, HIDDEN, arena.device).start(3, arena.device)
    assert start is not None
    expect_equal(Label("heads", "rnn"), "state", to_bits(start), np.zeros((3, head.rank), np.uint16))


TEMPERATURES = (1.0, 0.5, 3.0, 1.7)


def confidence_case(
    key: str, batch: int, gamma: int, rank: int, temperatures: tuple[float, ...], arena: Arena
) -> tuple[F64, ConfidenceHead, torch.Tensor, torch.Tensor | None]:
    """The exact raw logits, the module, and its inputs."""
    stream = Stream(key)
    hidden = integers(stream.child("hidden"), 8, batch, gamma, HIDDEN, scale=0.25)
    embedded = integers(stream.child("embedded"), 8, batch, gamma, rank, scale=0.25) if rank else None
    weight = integers(stream.child("weight"), 5, HIDDEN + rank, scale=2.0**-4)
    flat = None if embedded is None else embedded.reshape(-1, rank)
    raw = oracle.raw_confidence(hidden.reshape(-1, HIDDEN), flat, weight, 0.75).reshape(batch, gamma)
    module = build_confidence(weight, 0.75, rank, temperatures, arena.device)
    given = None if embedded is None else tensor(embedded, torch.bfloat16, arena.device)
    return raw, module, tensor(hidden, torch.bfloat16, arena.device), given


@pytest.mark.parametrize("temperatures", [(), TEMPERATURES, (*TEMPERATURES, 9.0)], ids=["none", "four", "more"])
@pytest.mark.parametrize("rank", [0, 8])
def test_confidence(rank: int, temperatures: tuple[float, ...], arena: Arena) -> None:
    label = Label("heads", "confidence")
    raw, module, hidden, embedded = confidence_case(f"confidence/{rank}", 32, 4, rank, temperatures, arena)
    found = module.raw(hidden, embedded)
    expect_equal(label, "raw", decode(FP32, to_bits(found)).tolist(), raw.tolist())
    survival = module(hidden, embedded)
    own = decode(FP32, to_bits(survival))
    expect_equal(label, "dtype", survival.dtype, torch.float32)
    expect_within(label, "survival", Verdict(own, oracle.survival(raw, temperatures, own)), single_share=0)
    falls = np.concatenate([np.ones((len(own), 1)), own], axis=1)
    expect_equal(label, "in [0, 1] and non-increasing", bool(((own >= 0) & (own <= falls[:, :-1])).all()), True)


def test_f1_10_divided_features_are_another_confidence(arena: Arena) -> None:
    """What the head would say of hidden divided by 24 is outside the sets of what it must say."""
    raw, module, hidden, embedded = confidence_case("confidence/divided", 32, 4, 8, (), arena)
    divided = decode(FP32, to_bits(module(hidden / 24, embedded)))
    outside = ~Verdict(divided, oracle.survival(raw, (), divided)).ok
    expect_equal(Label("heads", "confidence"), "most are refused", bool(outside.mean() > 0.9), True)


def test_confidence_of_extremes(arena: Arena) -> None:
    """Certain, hopeless, and no number at all: 0 from there on."""
    module = build_confidence(np.ones(1), 0.0, 0, (), arena.device)
    column = torch.tensor([[200.0, -200.0, 3.0], [float("nan"), 200.0, 200.0], [float("inf"), float("-inf"), 0.0]])
    survival = module(column[..., None].to(arena.device))
    expect_equal(Label("heads", "confidence"), "survival", survival.tolist(), [[1, 0, 0], [0, 0, 0], [1, 0, 0]])


def test_confidence_of_no_position(arena: Arena) -> None:
    module = build_confidence(np.ones(HIDDEN), 0.0, 0, TEMPERATURES, arena.device)
    survival = module(torch.ones(3, 0, HIDDEN, device=arena.device))
    expect_equal(Label("heads", "confidence"), "shape", tuple(survival.shape), (3, 0))


def confidence_of(**changes: Any) -> ConfidenceHead:
    return ConfidenceHead(**{"hidden_size": 4, "rank": 2, **changes})


def small(name: str) -> Callable[[], object]:
    sizes: dict[str, Any] = {"vocab_size": 4, "rank": 2, "hidden_size": 4, "prev_vocab_size": 4, name: 0}
    return lambda: build_markov_head("vanilla", **sizes)


def with_temperature(value: Any) -> Callable[[], object]:
    return lambda: confidence_of(temperatures=(1.0, value))


def stateless() -> object:
    head = build_markov_head("rnn", vocab_size=4, rank=2, hidden_size=4)
    return head.bias(torch.zeros(1, dtype=torch.int64), torch.zeros(1, 4), None)


def test_the_smallest_and_the_largest_temperature() -> None:
    head = ConfidenceHead(4, temperatures=(1e-37, 3e38))
    expect_equal(Label("heads", "confidence"), "accepted", head.temperatures, (1e-37, 3e38))


HIDDEN_ROWS, EMBEDDED_ROWS = torch.zeros(1, 3, 4), torch.zeros(1, 3, 2)
ERRORS: dict[str, tuple[tuple[str, ...], Callable[[], object]]] = {
    "unknown-kind": (
        ("kind", "'gru'", "vanilla, gated, rnn"),
        lambda: build_markov_head("gru", vocab_size=4, rank=2, hidden_size=4),
    ),
    **{f"{name}-zero": ((name, "0"), small(name)) for name in ("vocab_size", "rank", "hidden_size", "prev_vocab_size")},
    "rnn-without-a-state": (("state", "None"), stateless),
    **{
        f"temperature-{bad!r}": (("temperatures", repr(bad)), with_temperature(bad))
        for bad in (0.0, -1.0, float("nan"), float("inf"), True, "1")
    },
    "confidence-of-no-hidden": (("hidden_size", "0"), lambda: confidence_of(hidden_size=0)),
    "confidence-of-a-negative-rank": (("rank", "-1"), lambda: confidence_of(rank=-1)),
    "fewer-temperatures-than-positions": (
        ("temperatures", "got 2", "3 positions"),
        lambda: confidence_of(temperatures=(1.0, 1.0))(HIDDEN_ROWS, EMBEDDED_ROWS),
    ),
    "embedding-missing": (("embedded", "NoneType", "2"), lambda: confidence_of()(HIDDEN_ROWS)),
    "embedding-not-wanted": (("embedded", "Tensor", "0"), lambda: confidence_of(rank=0)(HIDDEN_ROWS, EMBEDDED_ROWS)),
}


@pytest.mark.parametrize("bad", ERRORS)
def test_error(bad: str) -> None:
    names, call = ERRORS[bad]
    expect_raises(Label("heads", "error"), ValueError, names, call)
