"""Edges of the oracles of base logits and heads, by hand: the second rounding, the crop, the ends of sets."""

from __future__ import annotations

import numpy as np
import pytest

from conformance.fixtures.emulation import BF16, FP32
from conformance.fixtures.oracles import base_logits, heads
from conformance.fixtures.oracles.base_logits import Head
from conformance.fixtures.oracles.heads import Markov, Set


def test_the_quotient_is_rounded_to_fp32_and_then_to_the_format() -> None:
    """129 / 128.498046875 is a little above the tie 1 + 2^-8, and fp32 makes it the tie."""
    assert base_logits.divided(BF16, np.array([129.0]), 128.498046875).tolist() == [1.0]


def test_the_multiplier_is_rounded_to_fp32_first() -> None:
    """1 + 2^-24 + 2^-30 is 1 + 2^-23 in fp32; 1 over it is 1 - 2^-23."""
    assert base_logits.divided(FP32, np.array([1.0]), 1 + 2.0**-24 + 2.0**-30).tolist() == [1 - 2.0**-23]


def test_base_logits_are_divided_multiplied_rounded_and_cropped() -> None:
    head = Head(np.array([[1.0, 1.0], [2.0, 0.0], [7.0, 7.0]]), BF16, 2)
    # (1024 + 4) / 4 is 257, between the bf16 values 256 and 258; row 2 is padding.
    found = base_logits.base_logits(head, np.array([[1024.0, 4.0], [8.0, -4.0]]), 4.0, BF16)
    assert found.tolist() == [[256.0, 512.0], [1.0, 4.0]]
    assert base_logits.base_logits(head, np.array([[8.0, -4.0]]), None, BF16).tolist() == [[4.0, 16.0]]


def test_a_product_is_exact_below_2_to_the_24_and_has_its_addend() -> None:
    ones = np.ones((1, 2))
    assert base_logits.exact_product(np.array([[2.0**24 - 2, 1.0]]), ones)[0, 0] == 2.0**24 - 1
    with pytest.raises(ValueError, match="depends on the order"):
        base_logits.exact_product(np.array([[2.0**24 - 1, 1.0]]), ones)
    assert base_logits.exact_product(ones, ones, np.array([3.0])).tolist() == [[5.0]]


def test_sets_of_functions_are_as_wide_as_the_bound() -> None:
    """2^-21 of the value to each side, rounded to fp32: half an ulp (2^-24 at most) more or less at each end."""
    for values, function in ((np.array([0.5, 1.5, -1.0]), heads.sigmoid), (np.array([0.5, -0.75]), heads.tanh)):
        low, high = function(FP32, heads.exactly(values))
        width = (high - low) / np.abs(high + low) * 2
        assert (width >= 2.0**-20 - 2.0**-23).all()
        assert (width <= 2.0**-20 + 2.0**-23).all()


def test_a_set_is_selected_by_the_nonzero_element_of_each_row() -> None:
    chosen = heads.selected(
        BF16, Set(np.array([[1.0, 8.0]]), np.array([[2.0, 16.0]])), np.array([[0.0, 2.0], [-1.0, 0.0]])
    )
    assert (chosen.low.tolist(), chosen.high.tolist()) == ([[16.0, -2.0]], [[32.0, -1.0]])


@pytest.mark.parametrize(("gate", "state"), [(64.0, 0.25), (-64.0, -1.0)], ids=["kept", "replaced"])
def test_an_open_gate_keeps_the_state_and_a_closed_one_takes_the_candidate(gate: float, state: float) -> None:
    """[s; e; h] gives the gate from h, and the candidate from e: tanh(-64) is -1."""
    joint = np.array([[0.0, 0.0, 1.0], [0.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    head = Markov("rnn", np.array([[-64.0]]), np.array([[1.0]]), FP32, joint, np.zeros(3))
    _, after = heads.bias(head, np.array([0]), np.array([[gate]]), np.array([[0.25]]))
    assert after is not None
    assert abs(after.low[0, 0] - state) < 2.0**-20
    assert abs(after.high[0, 0] - state) < 2.0**-20


def test_confidence_reads_the_hidden_row_and_then_the_embedding() -> None:
    weight = np.array([1.0, 10.0, 100.0])
    hidden, embedded = np.array([[2.0, 3.0]]), np.array([[4.0]])
    assert heads.raw_confidence(hidden, embedded, weight, 0.5).tolist() == [432.5]
    assert heads.raw_confidence(hidden, None, weight[:2], 0.5).tolist() == [32.5]


def test_no_temperature_is_a_temperature_of_1() -> None:
    raw, own = np.array([[0.5, -2.0]]), np.array([[0.5, 0.25]])
    plain, ones = heads.survival(raw, (), own), heads.survival(raw, (1.0, 1.0), own)
    assert (plain.low == ones.low).all()
    assert (plain.high == ones.high).all()
