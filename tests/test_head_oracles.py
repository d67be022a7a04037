"""Tests of the oracles of base logits and heads: by hand, and against exact functions of high precision."""

from __future__ import annotations

import mpmath
import numpy as np
import pytest

from conformance.fixtures.emulation import BF16, FP16, FP32, FloatFormat, encode, next_up, round_to
from conformance.fixtures.oracles import base_logits, heads
from conformance.fixtures.oracles.heads import Markov, Set, Verdict
from conformance.fixtures.streams import Stream


def test_quanta_are_per_row() -> None:
    values = np.array([[3.0, 8.0], [0.75, 4.0], [-0.0, 12.0], [0.0, 0.0]])
    assert base_logits.quanta(values)[:3].tolist() == [1.0, 0.25, 4.0]
    assert base_logits.quanta(values)[3] > 1e200


def test_exact_product_refuses_what_depends_on_the_order() -> None:
    assert base_logits.exact_product(np.array([[2.0**23, 1.0]]), np.ones((1, 2)))[0, 0] == 2.0**23 + 1
    with pytest.raises(ValueError, match="depends on the order"):
        base_logits.exact_product(np.array([[2.0**24, 1.0]]), np.ones((1, 2)))
    with pytest.raises(ValueError, match="depends on the order"):
        base_logits.exact_product(np.array([[2.0**24, 0.0]]), np.ones((1, 2)), np.array([1.0]))
    # One term has no order, whatever stands beside it times 0.
    assert base_logits.exact_product(np.array([[2.0**100, 1.0]]), np.array([[3.0, 0.0]]))[0, 0] == 3 * 2.0**100


def test_division_by_hand() -> None:
    """1/3 in fp32 is 0x3EAAAAAB, in bf16 0x3EAB; None leaves the values alone."""
    assert encode(BF16, base_logits.divided(BF16, np.array([1.0]), 3)).tolist() == [0x3EAB]
    assert encode(FP32, base_logits.divided(FP32, np.array([1.0]), 3)).tolist() == [0x3EAAAAAB]
    assert base_logits.divided(BF16, np.array([7.0]), None).tolist() == [7.0]
    # The multiplier is rounded to fp32 first: 1 + 2^-30 is 1.
    assert base_logits.divided(FP32, np.array([3.0]), 1 + 2.0**-30).tolist() == [3.0]


def sample(fmt: FloatFormat, key: str) -> np.ndarray:
    """Values of every size at which sigmoid and tanh are neither constant nor the identity, and beyond."""
    stream = Stream(key)
    scales = np.ldexp(1.0, stream.integers(-12, 7, (1500,)))
    edges = np.array([0.0, -0.0, 1e-30, -1e-30, 88.0, -88.0, -87.0, -90.0, -93.0, -104.0, 3e4, -3e4])
    return round_to(fmt, np.concatenate([stream.normal((1500,)) * scales, edges]))


@pytest.mark.parametrize("fmt", [BF16, FP16, FP32], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("name", ["sigmoid", "tanh"])
def test_sets_of_functions_are_around_the_exact_value(name: str, fmt: FloatFormat) -> None:
    """The exact value, and results off by the whole bound, round into the set; one off by thrice the bound need not."""
    exact = {"sigmoid": lambda v: 1 / (1 + mpmath.exp(-v)), "tanh": mpmath.tanh}[name]
    x = sample(fmt, f"{name}/{fmt.name}")
    with mpmath.workdps(60):
        true = np.array([float(exact(mpmath.mpf(float(value)))) for value in x])
    found = getattr(heads, name)(fmt, heads.exactly(x))
    for error in (-1.0, 0.0, 1.0):
        value = np.clip(true * (1 + error * heads.RELATIVE), -1, 1)
        assert Verdict(round_to(fmt, value), found).ok.all()
    if fmt is FP32:
        off = (true != 0) & (np.abs(true) < 0.999) & (np.abs(true) > 1e-30)
        assert not Verdict(round_to(fmt, true * (1 + 3 * heads.RELATIVE)), found).ok[off].any()
    else:
        normal = np.abs(true) >= max(fmt.smallest_normal, FP32.smallest_normal)
        two = (found.low != found.high) & normal
        assert (next_up(fmt, found.low[two]) == found.high[two]).all()


def test_sigmoid_of_hopeless_values_may_be_zero() -> None:
    found = heads.sigmoid(BF16, heads.exactly(np.array([-87.0, -88.0, -200.0])))
    assert found.low.tolist()[1:] == [0.0, 0.0]
    assert found.low[0] > 0
    assert found.high[1] > 0
    assert found.high[2] == 0


def test_bf16_subnormals_may_count_as_zero() -> None:
    """Read (2^-130, as input and as bias) or written (2^-100 * 2^-30); 2^-126 is normal, and fp16 has its own range."""
    tiny, smallest = 2.0**-130, 2.0**-126
    found = heads.linear(BF16, np.array([[tiny], [-tiny], [smallest], [2.0**-100]]), np.array([[1.0], [2.0**-30]]))
    assert found.low[:, 0].tolist() == [0.0, -tiny, smallest, 2.0**-100]
    assert found.high[:, 0].tolist() == [tiny, 0.0, smallest, 2.0**-100]
    assert (found.low[3, 1], found.high[3, 1]) == (0.0, tiny)
    added = heads.linear(BF16, np.array([[0.0]]), np.array([[1.0]]), np.array([tiny]))
    assert (added.low.item(), added.high.item()) == (0.0, tiny)
    added = heads.linear(BF16, np.array([[smallest]]), np.array([[1.0]]), np.array([tiny]))
    assert (added.low.item(), added.high.item()) == (smallest, smallest + tiny)
    chosen = heads.selected(BF16, Set(np.array([[-tiny]]), np.array([[tiny]])), np.array([[0.5]]))
    assert (chosen.low.item(), chosen.high.item()) == (-tiny / 2, tiny / 2)
    chosen = heads.selected(BF16, heads.exactly(np.array([[tiny]])), np.array([[1.0]]))
    assert (chosen.low.item(), chosen.high.item()) == (0.0, tiny)
    half = heads.linear(FP16, np.array([[2.0**-20]]), np.array([[1.0]]))
    assert half.low.item() == half.high.item() == 2.0**-20


def test_vanilla_by_hand() -> None:
    head = Markov("vanilla", np.array([[1.0, 2.0], [3.0, -1.0]]), np.array([[1.0, 1.0], [100.0, 1.0]]), BF16)
    found, state = heads.bias(head, np.array([1, 0]), np.zeros((2, 1)), None)
    # 299 lies between 298 and 300 in bf16; the even significand is 300.
    assert found.low.tolist() == [[2.0, 300.0], [3.0, 102.0]]
    assert state is None


def test_gated_by_hand() -> None:
    """Gate input [h; e]: h = 0 gives 1/2, h = 100 gives 1; the bias of the gate is added."""
    head = Markov("gated", np.array([[3.0]]), np.array([[2.0]]), BF16, np.array([[1.0, 0.0]]), np.array([0.0]))
    found, _ = heads.bias(head, np.array([0, 0]), np.array([[0.0], [100.0]]), None)
    assert found.low.tolist() == found.high.tolist() == [[3.0], [6.0]]


def test_rnn_by_hand() -> None:
    """[s; e; h]; gate s, candidate e, output h, all saturated or 0: s' = 1/2 s + 1/2 sign(e)."""
    head = Markov("rnn", np.array([[64.0]]), np.array([[5.0]]), BF16, np.diag([0.0, 1.0, 1.0]), np.zeros(3))
    found, state = heads.bias(head, np.array([0]), np.array([[-64.0]]), np.array([[0.25]]))
    assert found.low.tolist() == [[-5.0]]
    assert state is not None
    assert state.low.tolist() == [[0.625]]


def test_a_set_needs_one_element_per_row() -> None:
    with pytest.raises(ValueError, match="one nonzero element"):
        heads.selected(BF16, Set(np.ones((1, 2)), np.full((1, 2), 1.0078125)), np.ones((1, 2)))


def test_first_maximum() -> None:
    rows = np.array([[1.0, 3, 3], [-np.inf] * 3, [-0.0, 0.0, -1], [0.0, -0.0, -1], [0, np.inf, np.inf]])
    assert heads.first_maximum(rows).tolist() == [1, 0, 0, 0, 1]


def test_admissible_ids() -> None:
    """hi_i > lo_j before, hi_i >= lo_j after: an equal id before wins, one after does not."""
    exact = heads.exactly(np.array([[1.0, 3, 3]]))
    assert heads.admissible_ids(exact).tolist() == [[False, True, False]]
    spread = Set(np.array([[1.0, 2, 1]]), np.array([[2.0, 3, 2.5]]))
    assert heads.admissible_ids(spread).tolist() == [[True, True, True]]
    touching = Set(np.array([[2.0, 1]]), np.array([[3.0, 2]]))
    assert heads.admissible_ids(touching).tolist() == [[True, False]]
    assert heads.admissible_ids(heads.exactly(np.full((1, 3), -np.inf))).tolist() == [[True, False, False]]


def test_survival_is_forced_on_its_own_past() -> None:
    raw = np.array([[0.0, 0.0, 200.0]])
    own = np.array([[0.5, 0.25, 0.25]])
    found = heads.survival(raw, (1.0, 1.0, 2.0, 9.0), own)
    assert Verdict(own, found).ok.all()
    assert not Verdict(np.array([[0.5, 0.26, 0.25]]), found).ok[0, 1]
    # Temperatures: 3 / 1.5 is 2.
    warm = heads.survival(np.array([[3.0]]), (1.5,), np.zeros((1, 1)))
    assert Verdict(np.array([[1 / (1 + np.exp(-2.0))]]), warm).ok.all()
    assert not Verdict(np.array([[1 / (1 + np.exp(-3.0))]]), warm).ok.any()


def test_verdict_explains() -> None:
    verdict = Verdict(np.array([[1.0, -0.0]]), Set(np.array([[2.0, 0.0]]), np.array([[3.0, 0.0]])))
    assert verdict.ok.tolist() == [[False, True]]
    assert verdict.single.tolist() == [[False, True]]
    for part in ("1.0", "2.0", "3.0"):
        assert part in verdict.explain((0, 0))
