"""compute_base_logits: one division, one product, one rounding, the true vocabulary, bad input (section 10)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dspark import dispatch
from dspark.model import base_logits as product
from dspark.model.base_logits import compute_base_logits, divide_hidden, require_multiplier

from ..fixtures.calls.base_logits import (
    OP,
    Call,
    PackedHead,
    base,
    packed,
    place_hidden,
    random_call,
    run,
    unsigned_zero,
)
from ..fixtures.calls.heads import tensor
from ..fixtures.calls.layout import FORMATS
from ..fixtures.emulation import BF16, FP32, FloatFormat, decode, encode, mul32, round_to
from ..fixtures.guard import Arena, to_bits
from ..fixtures.ledger import Label, expect_decision, expect_equal, expect_raises
from ..fixtures.oracles import base_logits as oracle
from ..fixtures.streams import Stream

PATHS = ("fused", "eager")
MULTIPLIERS = (None, 1, 3, 16, 24.0, 16 / 3)
SIXTEEN_BITS = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Case:
    """A named input."""

    id: str
    call: Call


def case(id: str, lead: tuple[int, ...] = (5,), **changes: Any) -> Case:
    return Case(id, random_call(id, lead, **changes))


def wide(hidden_size: int, multiplier: float) -> Case:
    """A real width: sums far above 256, where a bf16 accumulator would stop counting. The division is exact."""
    id = f"H{hidden_size}-m{multiplier:g}"
    call = random_call(id, (3,), hidden_size=hidden_size, multiplier=multiplier)
    return Case(id, replace(call, hidden=np.clip(call.hidden, -4, 4) * multiplier))


CASES = (
    *(case(f"m-{multiplier}", (7,), multiplier=multiplier) for multiplier in MULTIPLIERS),
    wide(6144, 24),
    wide(4096, 16),
    case("vocabulary-not-padded", rows=41),
    case("one-id", rows=1, vocab_size=1),
    case("rows-of-a-block", (3, 7)),
    case("a-single-row", ()),
    case("no-rows", (0, 7)),
    case("strided-hidden", (2, 3), gap=3),
    case("fp16-head-and-hidden", hidden_size=64, hidden_dtype=torch.float16, head_dtype=torch.float16),
    case("fp32-head-and-hidden", hidden_dtype=torch.float32, head_dtype=torch.float32, multiplier=16),
)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_logits(case: Case, path: str, arena: Arena) -> None:
    with dispatch.observed() as outcomes:
        run(case.call, Label(OP, path), arena, path)
    expect_decision(Label(OP, path), outcomes, path, [])


@pytest.mark.parametrize("path", PATHS)
def test_f1_1_padded_rows_that_would_win_are_cropped(path: str, arena: Arena) -> None:
    """A vocabulary of 11 in 16 rows, of which the last 5 hold the maximum of every row."""
    call = random_call("F1-1", (6,), hidden_size=64, rows=16, vocab_size=11, multiplier=None)
    call = replace(call, hidden=np.abs(call.hidden))
    call.weight[11:] = 7
    run(call, Label(OP, path), arena, path)


@pytest.mark.parametrize("path", PATHS)
def test_f1_10_twice_gives_the_same_and_hidden_is_not_divided(path: str, arena: Arena) -> None:
    call = random_call("F1-10", (4,))
    hidden = place_hidden(call, arena)
    head = SimpleNamespace(weight=tensor(call.weight, torch.bfloat16, arena.device))
    for _ in range(2):
        logits = compute_base_logits(hidden, head, vocab_size=41, mup_width_multiplier=24, path=path)
        found = unsigned_zero(BF16, decode(BF16, to_bits(logits)))
        expect_equal(Label(OP, path), "logits", found, call.expected())
    arena.verify(Label(OP, path))


@pytest.mark.parametrize("path", PATHS)
def test_f1_23_updated_head_weights_are_the_ones_used(path: str, arena: Arena) -> None:
    call = random_call("F1-23", (4,))
    hidden = place_hidden(call, arena)
    head = torch.nn.Linear(1, 1, bias=False)
    head.weight = torch.nn.Parameter(tensor(call.weight, torch.bfloat16, arena.device), requires_grad=False)
    for factor in (1, 2):
        logits = compute_base_logits(hidden, head, vocab_size=41, mup_width_multiplier=24, path=path)
        expected = replace(call, weight=call.weight * factor).expected()
        expect_equal(Label(OP, path), "logits", unsigned_zero(BF16, decode(BF16, to_bits(logits))), expected)
        head.weight.data.mul_(2)


@pytest.mark.parametrize("path", PATHS)
def test_f1_27_padded_rows_of_hidden_do_not_move_the_others(path: str, arena: Arena) -> None:
    """B = 3, K = 4, padded to 16 rows whose hidden is +Inf: row (b, k) is row 4 b + k, and no Inf is in it."""
    label, call = Label(OP, path), random_call("F1-27", (12,))
    padded = np.concatenate([call.hidden, np.full((4, call.hidden.shape[1]), np.inf)])
    head = SimpleNamespace(weight=tensor(call.weight, torch.bfloat16, arena.device))
    hidden = tensor(padded, torch.bfloat16, arena.device)
    logits = compute_base_logits(hidden, head, vocab_size=41, mup_width_multiplier=24, path=path)
    found = unsigned_zero(BF16, decode(BF16, to_bits(logits[:12].reshape(3, 4, 41))))
    expect_equal(label, "logits (b, k)", found, call.expected().reshape(3, 4, 41))


@pytest.mark.parametrize("multiplier", MULTIPLIERS)
@pytest.mark.parametrize("dtype", SIXTEEN_BITS, ids=str)
def test_the_division_of_every_value(dtype: torch.dtype, multiplier: float | None, arena: Arena) -> None:
    """All 65,536 patterns: both roundings; NaNs as a class."""
    fmt: FloatFormat = FORMATS[dtype]
    patterns = np.arange(1 << 16).astype(np.uint16)
    hidden = arena.place("hidden", patterns, dtype)
    found = encode(fmt, decode(fmt, to_bits(divide_hidden(hidden, multiplier))))
    expected = encode(fmt, oracle.divided(fmt, decode(fmt, patterns), multiplier))
    expect_equal(Label(OP, "division"), f"quotients by {multiplier}", found, expected)
    arena.verify(Label(OP, "division"))


def test_the_division_rounds_to_fp32_before_it_rounds_to_bf16(arena: Arena) -> None:
    """No multiplier in use shows the first rounding; a divisor of many bits does."""
    patterns = np.arange(1 << 16).astype(np.uint16)
    values = decode(BF16, patterns)
    label, multiplier = Label(OP, "division"), 11.297830581665039
    once = encode(BF16, round_to(BF16, values / multiplier))
    found = to_bits(divide_hidden(tensor(values, torch.bfloat16, arena.device), multiplier))
    both = encode(BF16, oracle.divided(BF16, values, multiplier))
    expect_equal(label, "quotients", encode(BF16, decode(BF16, found)), both)
    expect_equal(label, "values that one rounding moves", int((both != once).sum()) >= 500, True)


@pytest.mark.parametrize("multiplier", [3, 24])
def test_the_division_is_no_product_with_the_reciprocal(multiplier: float, arena: Arena) -> None:
    """bf16 does not show it, for any multiplier in use; fp32 rows do."""
    label = Label(OP, "division")
    values = round_to(FP32, Stream("reciprocal").normal((4096,)))
    found = to_bits(divide_hidden(tensor(values, torch.float32, arena.device), multiplier))
    expect_equal(label, "quotients", found, encode(FP32, oracle.divided(FP32, values, multiplier)))
    by_reciprocal = encode(FP32, mul32(values, round_to(FP32, 1 / np.array(multiplier, np.float64))).astype(np.float64))
    expect_equal(label, "the reciprocal differs in a tenth", bool((found != by_reciprocal).mean() > 0.1), True)


WRONG: dict[str, tuple[Callable[[oracle.Head, np.ndarray, float], np.ndarray], float]] = {
    "never-divided": (lambda head, hidden, m: oracle.base_logits(head, hidden, None, BF16), 0.95),
    "divided-twice": (
        lambda head, hidden, m: oracle.base_logits(head, oracle.divided(BF16, hidden, m), m, BF16),
        0.95,
    ),
    "logits-divided": (oracle.divided_logits, 0.10),
    "head-folded": (oracle.folded_head, 0.10),
}
"""Wrong places of the division, and the share of logits that each changes at least with m = 24."""


def differing(wrong: str, multiplier: float, arena: Arena) -> float:
    """The share of the product's logits that the wrong evaluation does not give."""
    call = random_call(f"F1-10/{wrong}", (32,), hidden_size=64, multiplier=multiplier)
    head = SimpleNamespace(weight=tensor(call.weight, torch.bfloat16, arena.device))
    logits = compute_base_logits(place_hidden(call, arena), head, vocab_size=41, mup_width_multiplier=multiplier)
    other = WRONG[wrong][0](call.head, call.hidden, multiplier)
    return float((decode(BF16, to_bits(logits)) != other).mean())


@pytest.mark.parametrize("wrong", WRONG)
def test_f1_10_the_place_of_the_division_is_seen(wrong: str, arena: Arena) -> None:
    share = differing(wrong, 24, arena)
    expect_equal(Label(OP, "wrong"), f"{share:.1%} of the logits differ", share >= WRONG[wrong][1], True)


@pytest.mark.parametrize("wrong", ["logits-divided", "head-folded"])
def test_f1_10_with_a_power_of_two_the_place_cannot_be_seen(wrong: str, arena: Arena) -> None:
    """m = 8 divides exactly wherever it is done: such a target proves nothing."""
    expect_equal(Label(OP, "wrong"), "share of logits that differ", differing(wrong, 8, arena), 0.0)


def test_eager_widens_a_plain_head_piece_by_piece(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    """48 rows in pieces of 5, the last one of 3."""
    monkeypatch.setattr(product, "_WIDENED_ELEMENTS", 5 * 256 + 255)
    run(random_call("pieces", (4,)), Label(OP, "eager"), arena, "eager")


# The thread of the backward pass has no CUDA context before its first product, and torch says so.
@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")
@pytest.mark.parametrize("path", PATHS)
def test_gradients_flow_through_the_division_and_the_product(path: str, arena: Arena) -> None:
    """d logits / d hidden is the weight, divided: 4 / 8 of one row's single weight."""
    hidden = torch.ones(1, 2, device=arena.device, requires_grad=True)
    head = SimpleNamespace(weight=torch.tensor([[4.0, 0.0]], device=arena.device))
    compute_base_logits(hidden, head, vocab_size=1, mup_width_multiplier=8, path=path).sum().backward()
    assert hidden.grad is not None
    expect_equal(Label(OP, path), "gradient", hidden.grad.tolist(), [[0.5, 0.0]])


def plain(*shape: int, dtype: torch.dtype = torch.bfloat16, device: Any = "cpu", **more: Any) -> SimpleNamespace:
    return SimpleNamespace(weight=torch.ones(shape, dtype=dtype, device=device), **more)


BAD_MULTIPLIERS = (0, -24, float("nan"), float("inf"), True, False, "24", 1e-50, 1e39, torch.tensor(24.0))
BAD_CALLS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    **{
        f"multiplier-{bad!r}": (("mup_width_multiplier", repr(bad), "positive"), {"mup_width_multiplier": bad})
        for bad in BAD_MULTIPLIERS
    },
    "vocabulary-larger-than-the-head": (("vocab_size", "17", "16"), {"vocab_size": 17}),
    "vocabulary-empty": (("vocab_size", "0"), {"vocab_size": 0}),
    "vocabulary-bool": (("vocab_size", "True"), {"vocab_size": True}),
    "hidden-integer": (("hidden", "int64"), {"hidden": torch.ones(3, 8, dtype=torch.int64)}),
    "hidden-fp64": (("hidden", "float64"), {"hidden": torch.ones(3, 8, dtype=torch.float64)}),
    "hidden-a-number": (("hidden", "()"), {"hidden": torch.ones(())}),
    "hidden-a-list": (("hidden", "list"), {"hidden": [1.0]}),
    "F1-3-packed-head-without-its-method": (
        ("lm_head", "(16, 4)", "uint8", "quant_method"),
        {"lm_head": plain(16, 4, dtype=torch.uint8)},
    ),
    "fp64-head": (("lm_head", "float64"), {"lm_head": plain(16, 8, dtype=torch.float64)}),
    "head-of-three-dimensions": (("lm_head", "(1, 16, 8)", "matrix"), {"lm_head": plain(1, 16, 8)}),
    "head-without-a-weight": (("lm_head", "NoneType"), {"lm_head": SimpleNamespace()}),
    "head-of-another-width": (("lm_head", "(16, 9)", "8 columns"), {"lm_head": plain(16, 9)}),
    "head-with-a-bias": (("lm_head", "bias"), {"lm_head": plain(16, 8, bias=torch.ones(16))}),
    "quant-method-without-apply": (("lm_head", "apply", "'int4'"), {"lm_head": plain(16, 8, quant_method="int4")}),
    "head-on-another-device": (("lm_head", "meta"), {"lm_head": plain(16, 8, device="meta")}),
    "gradients-through-a-group": (
        ("hidden", "requires grad"),
        {"hidden": torch.ones(3, 8, dtype=torch.bfloat16, requires_grad=True), "group": object()},
    ),
}


@pytest.mark.parametrize("least", [1e-37, 3e38])
def test_the_smallest_and_the_largest_multiplier(least: float) -> None:
    expect_equal(Label(OP, "division"), "accepted", require_multiplier("m", least), least)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("bad", BAD_CALLS)
def test_error(bad: str, path: str) -> None:
    names, changes = BAD_CALLS[bad]
    good = {"hidden": torch.ones(3, 8, dtype=torch.bfloat16), "lm_head": plain(16, 8)}
    arguments: dict[str, Any] = {**good, "vocab_size": 11, "mup_width_multiplier": None, **changes}
    expect_raises(Label(OP, "error"), ValueError, names, lambda: compute_base_logits(**arguments, path=path))


def test_f1_3_a_packed_head_is_applied_once_by_its_own_method(arena: Arena) -> None:
    with dispatch.observed() as outcomes:
        run(packed(random_call("F1-3", (3, 7))), Label(OP, "eager"), arena, None)
    expect_decision(Label(OP, "eager"), outcomes, "eager", ["lm-head-not-plain"])


def test_a_quantized_head_with_fewer_rows_than_the_vocabulary(arena: Arena) -> None:
    """How many rows a packed head has is known when it has been applied."""
    call = base()
    head = PackedHead(torch.from_numpy(call.weight).to(arena.device), 1.0, torch.bfloat16)
    expect_raises(
        Label(OP, "error"),
        ValueError,
        ("vocab_size", "17", "16"),
        lambda: compute_base_logits(place_hidden(call, arena), head, vocab_size=17, mup_width_multiplier=24),
    )


def test_f1_3_the_method_of_an_unpacked_head_is_used_too(arena: Arena) -> None:
    """A quant_method may do more than the product of its weight, so it decides, whatever the weight looks like."""
    call, label = base(), Label(OP, "eager")
    method = SimpleNamespace(apply=lambda head, rows: rows @ head.weight.t() + 1000)
    head = SimpleNamespace(weight=tensor(call.weight, torch.bfloat16, arena.device), quant_method=method)
    with dispatch.observed() as outcomes:
        logits = compute_base_logits(place_hidden(call, arena), head, vocab_size=11, mup_width_multiplier=24)
    expect_decision(label, outcomes, "eager", ["lm-head-not-plain"])
    expect_equal(label, "the method's own 1000 is in every logit", bool((logits > 500).all()), True)
