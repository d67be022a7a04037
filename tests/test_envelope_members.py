"""The judge of normed and rotated heads rejects whatever the contract does not permit.

The references are Fractions (rounding, the three evaluations) and mpmath (the bounds). Where a test needs to know y, a
head of ones with a negligible eps makes inv 1, so that the weight is y. A green run means:

1. the interval before rounding is the contract's, pinned to 2**-16 of its width, and refusals happen at its domain;
2. beside a single-valued result, exactly the members of the permitted set are accepted, among all one-bit changes and
   one-ulp steps;
3. the two outputs of a pair need one (y1, y2), and all choices of a head need one inv, pinned to 2 u;
4. signs of zeros, NaN and Inf follow clause 2; a float64 rotation is rejected where it differs.

That every permitted result is accepted is proven in ``test_envelope.py``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import NamedTuple

import mpmath
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conformance.fixtures.emulation import BF16, FP16, FloatFormat, decode, encode, fma32, round_to
from conformance.fixtures.envelope import (
    HeadVerdict,
    Interval,
    Rotation,
    additions,
    judge,
    judge_fp32,
    norm,
    one_inv_explains,
)
from conformance.fixtures.streams import Stream

F64 = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

mpmath.mp.dps = 70
U = Fraction(1, 2**24)
TINY_EPS = 1e-24
FP32_ULP = 2.0**-23
MIN_EXPONENT = {8: -126, 11: -14, 24: -126}
both_styles = pytest.mark.parametrize("neox", [True, False], ids=["neox", "interleaved"])


# The references.


def nearest(precision: int, value: Fraction) -> Fraction:
    """The nearest number of ``precision`` bits, even of two; inside the range of its format."""
    if value == 0:
        return value
    exponent = math.frexp(float(abs(value)))[1] - 1
    quantum = Fraction(2) ** (max(exponent, MIN_EXPONENT[precision]) - precision + 1)
    return round(value / quantum) * quantum


def permitted_values(precision: int, y1: float, y2: float, c: float, s: float) -> tuple[set[Fraction], set[Fraction]]:
    """Clause 3 in rational arithmetic, for values that are not 0."""

    def evaluations(a: Fraction, b: Fraction) -> set[Fraction]:
        ra, rb = nearest(24, a), nearest(24, b)
        return {nearest(precision, nearest(24, v)) for v in (ra + rb, a + rb, ra + b)}

    f1, f2, fc, fs = (Fraction(v) for v in (y1, y2, c, s))
    return evaluations(f1 * fc, -f2 * fs), evaluations(f2 * fc, f1 * fs)


def to_fraction(value: mpmath.mpf) -> Fraction:
    sign, mantissa, exponent, _ = value._mpf_
    magnitude = int(mantissa) * Fraction(2) ** int(exponent)
    return -magnitude if sign else magnitude


def exact_inv(x: F64, eps: float) -> Fraction:
    """``1 / sqrt(mean(x^2) + fp32(eps))`` to 70 digits."""
    squares = sum((Fraction(v) * Fraction(v) for v in x.tolist()), Fraction(0))
    mean = squares / len(x) + Fraction(float(np.float32(eps)))
    return to_fraction(1 / mpmath.sqrt(mpmath.mpf(mean.numerator) / mean.denominator))


Ends = tuple[Fraction, Fraction]


def magnitudes(x: F64, weight: F64, eps: float, share: Fraction) -> Iterator[Ends]:
    """Ends of |x*inv*w| before its rounding, section 1, for each element, with ``share`` of the bound."""
    inv = exact_inv(x, eps)
    relative = (max(Fraction(40), Fraction(len(x), 32) + 8) / 2 + 12) * U * share
    for v, w in zip(x.tolist(), weight.tolist(), strict=True):
        exact = abs(Fraction(v) * Fraction(w)) * inv
        absolute = Fraction(1, 2**147) * max(Fraction(1), abs(Fraction(w)), inv) * share if exact else Fraction(0)
        yield max(exact * (1 - relative) - absolute, Fraction(0)), exact * (1 + relative) + absolute


def fp32(v: F64) -> F64:
    return np.asarray(v).astype(np.float32).astype(np.float64)


# The interval before rounding.


def head_on_edges(stream: Stream, dim: int) -> tuple[F64, F64, float]:
    """x, weight and eps of a head whose y lie about as far from a tie as the bound reaches; a quarter are subnormal."""
    tiny = (stream.uniform(dim) < 0.25) & (np.arange(dim) > 0)
    scale = 2.0 ** float(stream.integers(-10, 13, 1)[0])
    x = np.where(tiny, stream.integers(1, 128, dim) * 2.0**-133, round_to(BF16, scale * (1 + stream.uniform(dim))))
    eps = float(stream.choice([1e-6, 1e-5, TINY_EPS], 1)[0])
    inv = 1 / np.sqrt((x * x).mean() + float(np.float32(eps)))
    ties = (stream.integers(0, 128, dim) + 0.5) * np.where(tiny, 2.0**-133, 2.0**-7) + np.where(tiny, 0, 1)
    absolute = 2.0**-147 * np.maximum(1, np.maximum(inv, ties / (x * inv))) * tiny
    reach = (additions(dim) / 2 + 12) * float(U) * ties + absolute
    weight = fp32((ties + (stream.uniform(dim) * 4 - 2) * reach) / (x * inv))
    return x, np.where(weight > 2.0**12, 1.0, weight), eps


@pytest.mark.parametrize("dim", [2, 64, 96, 256, 1024, 2048])
def test_the_interval_before_rounding_holds_the_bound_and_hardly_more(dim: int) -> None:
    stream = Stream(f"envelope/bounds/{dim}")
    split = 0
    for _ in range(max(1, 1024 // dim)):
        x, weight, eps = head_on_edges(stream, dim)
        normed = norm(x[None], weight, eps)
        split += int(np.count_nonzero(~normed.single))
        contract = magnitudes(x, weight, eps, Fraction(1))
        wider = magnitudes(x, weight, eps, 1 + Fraction(1, 2**16))
        for low, high, ends, wide in zip(normed.low[0], normed.high[0], contract, wider, strict=True):
            assert nearest(8, wide[0]) <= low <= nearest(8, ends[0])
            assert nearest(8, ends[1]) <= high <= nearest(8, wide[1])
        inv, of_inv = exact_inv(x, eps), (max(Fraction(40), Fraction(dim, 32) + 8) / 2 + 10) * U
        wide_of_inv = of_inv * (1 + Fraction(1, 2**16))
        assert inv * (1 - wide_of_inv) <= Fraction(normed.inv_low[0]) <= inv * (1 - of_inv)
        assert inv * (1 + of_inv) <= Fraction(normed.inv_high[0]) <= inv * (1 + wide_of_inv)
    assert split > 300


@pytest.mark.parametrize("dim", [2, 96, 1024])
def test_a_choice_asks_for_the_inv_that_two_products_leave(dim: int) -> None:
    """``|x*w| * inv``, two roundings and the underflow away, lies on the chosen side of the tie."""
    stream = Stream(f"envelope/thresholds/{dim}")
    for _ in range(max(1, 1024 // dim)):
        x, weight, eps = head_on_edges(stream, dim)
        normed, inv = norm(x[None], weight, eps), exact_inv(x, eps)
        for i in np.nonzero(~normed.single[0])[0].tolist():
            tie = (Fraction(abs(normed.low[0, i])) + Fraction(abs(normed.high[0, i]))) / 2
            absolute = Fraction(1, 2**147) * max(Fraction(1), Fraction(weight[i]), inv)
            product, wider = Fraction(x[i]) * Fraction(weight[i]), 1 + U / 2**16
            most, least = (tie + absolute) / product / (1 - 2 * U), (tie - absolute) / product / (1 + 2 * U)
            assert most <= Fraction(normed.inv_if_low[0, i]) <= most * wider
            assert least / wider <= Fraction(normed.inv_if_high[0, i]) <= least


def test_underflow_may_take_all_of_a_small_y_and_no_more() -> None:
    """x*w*inv is 2**-135.5, and the first product may lose 2**-147 * 2**14: y is 0 or the smallest subnormal."""
    normed = norm(np.array([[2.0**-133, 2.0**17]]), np.array([2.0**14, 1.0]), TINY_EPS)
    assert (normed.low[0, 0], normed.high[0, 0]) == (0.0, 2.0**-133)
    assert not np.signbit(normed.low[0, 0])


@pytest.mark.parametrize("dim", [8, 2048])
def test_the_bound_of_fp32_storage_is_the_contract_s(dim: int) -> None:
    """Pinned to 2**-16 of its width: with y of every size, and where all y are 0 and only underflow is left."""
    stream = Stream(f"envelope/fp32-bound/{dim}")
    h = max(40, dim / 32 + 8)
    for scale, zero in itertools.product((2.0**-20, 1.0), (False, True)):
        x = fp32(stream.normal((2, dim)) * scale)
        weight = fp32(np.zeros(dim) if zero else 1 + stream.normal(dim))
        weight[-1] = 3.0
        cos, sin = fp32(0.5 + stream.uniform((2, 2))), fp32(0.5 + stream.uniform((2, 2)))
        verdict = judge_fp32(np.zeros((2, dim)), x, weight, TINY_EPS, Rotation(cos, sin, True))
        inv = 1 / np.sqrt((x * x).mean(axis=1, keepdims=True) + float(np.float32(TINY_EPS)))
        y, u = np.abs(x * weight * inv), float(U)
        underflow = 2.0**-147 * np.maximum(1, np.maximum(np.abs(weight), inv))
        want = y * (h / 2 + 13) * u + underflow
        c, s, wide = np.abs(cos), np.abs(sin), (h / 2 + 16) * u
        for at, (a, b) in ((slice(0, 2), (c, s)), (slice(2, 4), (s, c))):
            want[:, at] = (
                (y[:, :2] * a + y[:, 2:4] * b) * wide + a * underflow[:, :2] + b * underflow[:, 2:4] + 2.0**-147
            )
        assert (want <= verdict.bound).all()
        assert (verdict.bound <= want * (1 + 2.0**-16)).all()
        centred = verdict.expected == 0
        assert centred.any() == zero
        for out, inside in ((verdict.bound, True), (np.nextafter(verdict.bound, 1.0), False)):
            ok = judge_fp32(np.where(centred, out, 0.0), x, weight, TINY_EPS, Rotation(cos, sin, True)).ok
            assert (ok[centred] == inside).all()


@pytest.mark.parametrize(("terms", "most"), [(1, 40), (2, 40), (1024, 40), (1056, 41), (1040, 40.5), (4096, 136)])
def test_a_term_passes_40_additions_or_a_32nd_of_the_terms_and_8(terms: int, most: float) -> None:
    assert additions(terms) == most


NEXT = 1 + 2.0**-7
OUTSIDE = {
    "sum above 2^127": ([2.0**63, 2.0**63 * NEXT], [1.0, 1.0], 1e-6),
    "mean below 2^-80": ([0.0, 0.0], [1.0, 1.0], 2.0**-80 * (1 - FP32_ULP)),
    "weight above 2^60": ([1.0, 1.0], [1.0, 2.0**60 * NEXT], 1e-6),
    "weight below 2^-60": ([1.0, 1.0], [-(2.0**-60) / NEXT, 1.0], 1e-6),
    "weight Inf": ([1.0, 1.0], [np.inf, 1.0], 1e-6),
    "weight NaN": ([1.0, 1.0], [np.nan, 1.0], 1e-6),
}
INSIDE = [
    ([2.0**63, -(2.0**63)], [1.0, 1.0], 1e-6),
    ([0.0, 0.0], [1.0, 1.0], 2.0**-80),
    ([1.0, 1.0], [-(2.0**60), 2.0**-60], 1e-6),
    ([1.0, 1.0], [0.0, -0.0], 1e-6),
]


@pytest.mark.parametrize("case", OUTSIDE.values(), ids=OUTSIDE)
def test_a_head_outside_the_domain_is_refused(case: tuple[list[float], list[float], float]) -> None:
    x, weight, eps = case
    with pytest.raises(ValueError, match="outside the domain"):
        norm(np.array([[1.0, 1.0], x]), np.array(weight), eps)


@pytest.mark.parametrize("case", OUTSIDE.values(), ids=OUTSIDE)
def test_fp32_storage_outside_the_domain_is_refused(case: tuple[list[float], list[float], float]) -> None:
    x, weight, eps = case
    rows = np.array([[1.0, 1.0], x])
    with pytest.raises(ValueError, match="outside the domain"):
        judge_fp32(rows, rows, np.array(weight), eps, Rotation(np.ones((2, 1)), np.zeros((2, 1)), True))


@pytest.mark.parametrize("eps", [0.0, 1e-6])
def test_inf_makes_zeros_where_eps_is_zero_too(eps: float) -> None:
    normed = norm(np.array([[np.inf, -1.0, 0.0]]), np.array([1.0, 1.0, -1.0]), eps)
    for y in (normed.low[0], normed.high[0]):
        assert np.isnan(y).tolist() == [True, False, False]
        assert (y[1:].tolist(), np.signbit(y[1:]).tolist()) == ([0.0, 0.0], [True, True])


@pytest.mark.parametrize("case", INSIDE)
def test_a_head_at_the_end_of_the_domain_is_judged(case: tuple[list[float], list[float], float]) -> None:
    x, weight, eps = case
    assert norm(np.array([x]), np.array(weight), eps).single.all()


def test_an_admissible_set_of_more_than_two_values_is_refused() -> None:
    with pytest.raises(ValueError, match="more than two values"):
        norm(np.array([[2.0**-133, 0.0]]), np.array([2.0**-40, 1.0]), TINY_EPS)


# Beside a single-valued result.


class Head(NamedTuple):
    """One head whose y are single-valued, and the set of each output."""

    x: F64
    weight: F64
    rotation: Rotation
    sets: list[set[Fraction]]


def single_valued_head(stream: Stream, fmt: FloatFormat, neox: bool, cancel: bool) -> Head | None:
    """A head of D = 8, R = 4, or None where a set is not of one value or an output may be zero."""
    x = round_to(fmt, stream.normal(8))
    weight = fp32(1 + 0.3 * stream.normal(8))
    y: list[float] = []
    for v, w, ends in zip(x, weight, magnitudes(x, weight, 1e-6, Fraction(1)), strict=True):
        low, high = (nearest(fmt.precision, end) for end in ends)
        if low != high:
            return None
        y.append(math.copysign(float(low), v * w))
    pairs = [(0, 2), (1, 3)] if neox else [(0, 1), (2, 3)]
    sin = fp32(0.1 + stream.uniform((1, 2)))
    ratio = np.array([y[k] / y[i] for i, k in pairs])
    cos = fp32(sin * ratio * (1 + stream.normal((1, 2)) * 2.0**-16)) if cancel else fp32(stream.normal((1, 2)))
    sets = [{Fraction(v)} for v in y]
    for pair, (i, k) in enumerate(pairs):
        sets[i], sets[k] = permitted_values(fmt.precision, y[i], y[k], cos[0, pair], sin[0, pair])
    return None if any(0 in members for members in sets) else Head(x, weight, Rotation(cos, sin, neox), sets)


def neighbours(fmt: FloatFormat, out: F64) -> tuple[F64, npt.NDArray[np.int64]]:
    """``out [D]`` with each bit flipped and one step up and down, ``[n, D]``; and which element changed, ``[n]``."""
    bits = encode(fmt, out).astype(np.int64)
    changed = [
        (element, pattern)
        for element, old in enumerate(bits.tolist())
        for pattern in [*(old ^ (1 << bit) for bit in range(16)), old + 1, old - 1]
    ]
    rows = np.repeat(bits[None], len(changed), axis=0)
    for row, (element, pattern) in enumerate(changed):
        rows[row, element] = pattern
    return decode(fmt, rows), np.array([element for element, _ in changed])


@both_styles
@pytest.mark.parametrize("fmt", [BF16, FP16], ids=lambda fmt: fmt.name)
def test_beside_a_single_valued_result_only_permitted_evaluations_pass(fmt: FloatFormat, neox: bool) -> None:
    stream = Stream(f"envelope/neighbours/{fmt.name}/{neox}")
    drawn = [single_valued_head(stream, fmt, neox, cancel) for cancel in (False, True) for _ in range(20)]
    heads = [head for head in drawn if head is not None]
    others = 0
    for head in heads:
        out = np.array([float(min(members)) for members in head.sets])
        rows, changed = neighbours(fmt, out)
        every = np.repeat([0], len(rows))
        rotation = Rotation(head.rotation.cos[every], head.rotation.sin[every], neox)
        verdict = judge(rows, np.repeat(head.x[None], len(rows), 0), head.weight, 1e-6, rotation, fmt)
        first, second = rotation.pairs
        for row, element in enumerate(changed.tolist()):
            value = rows[row, element]
            member = bool(np.isfinite(value)) and Fraction(value) in head.sets[element]
            pair = [[i, k] for i, k in zip(first.tolist(), second.tolist(), strict=True) if element in (i, k)]
            expected = np.ones(8, np.bool_)
            expected[pair[0] if pair else element] = member
            assert verdict.ok[row].tolist() == expected.tolist()
            others += member
    assert len(heads) > 30
    assert others >= 4


# Heads of ones: the weight is y.


def judge_y(y: npt.ArrayLike, out: F64, cos: F64, sin: F64, neox: bool = True) -> HeadVerdict:
    cos, sin = (np.broadcast_to(table, (len(out), table.shape[-1])) for table in (cos, sin))
    return judge(out, np.ones_like(out), np.asarray(y), TINY_EPS, Rotation(cos, sin, neox))


LOW, HIGH, TIE = 1.0, NEXT, 1 + 2.0**-8
"""A tie and its neighbours; a step of an fp32 weight there is 1.992 u, and each choice leaves 2 u for the products."""


def exactly_rotated(y: F64, pairs: Sequence[tuple[int, int]], c: float, s: float) -> F64:
    """For values so short that nothing but the result is rounded: all evaluations agree."""
    out = y.copy()
    for i, k in pairs:
        out[..., i], out[..., k] = y[..., i] * c - y[..., k] * s, y[..., k] * c + y[..., i] * s
    return round_to(BF16, out)


@both_styles
@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize(("steps", "one_inv_exists"), [(1, True), (2, False), (9, False)])
def test_two_choices_of_a_head_need_one_inv(steps: int, one_inv_exists: bool, sign: float, neox: bool) -> None:
    """A tie is exceeded by one y and missed by another: low for the first, high for the second needs two invs."""
    pairs = [(0, 2), (1, 3)] if neox else [(0, 1), (2, 3)]
    cos, sin = np.full(2, 1.0), np.full(2, 0.5)
    for above, below in itertools.permutations(range(6), 2):
        weight = np.full(6, 1.25)
        weight[above], weight[below] = sign * (TIE + steps * FP32_ULP), TIE - steps * FP32_ULP
        y = np.repeat(weight[None], 4, 0)
        choices = list(itertools.product((LOW, HIGH), repeat=2))
        y[:, above], y[:, below] = sign * np.array([a for a, _ in choices]), [b for _, b in choices]
        verdict = judge_y(weight, exactly_rotated(y, pairs, 1.0, 0.5), cos, sin, neox)
        assert np.nonzero(~verdict.single[0])[0].tolist() == sorted((above, below))
        accepted = [one_inv_exists or choice != (LOW, HIGH) for choice in choices]
        assert verdict.ok.all(axis=1).tolist() == accepted, (above, below)
        for row, one_inv_explains_it in enumerate(accepted):
            # A head that no inv explains is cleared at each of its choices, and nowhere else.
            cleared = [] if one_inv_explains_it else sorted((above, below))
            assert set(cleared) <= set(np.nonzero(~verdict.ok[row])[0].tolist())


def test_a_turn_the_other_way_is_rejected_in_each_output() -> None:
    """y = (1.25, 0.5) turned by (1, 1/2) is (1, 1.125); turned back it is (1.5, -0.125)."""
    out = np.array([[1.0, 1.125], [1.5, 1.125], [1.0, -0.125], [1.5, -0.125]])
    verdict = judge_y((1.25, 0.5), out, np.ones(1), np.full(1, 0.5))
    assert verdict.ok.all(axis=1).tolist() == [True, False, False, False]
    assert verdict.ok.any(axis=1).tolist() == [True, False, False, False]


def test_a_tie_with_infinity_lies_half_an_ulp_beyond_the_largest_value() -> None:
    normed = norm(np.ones((1, 2)), np.array([65520.0, 1.0]), TINY_EPS, FP16)
    assert (normed.low[0, 0], normed.high[0, 0]) == (65504.0, math.inf)
    u = float(U)
    assert 1 + u < normed.inv_if_low[0, 0] < 1 + 3 * u
    assert 1 - 3 * u < normed.inv_if_high[0, 0] < 1 - u


def test_the_eps_of_fp32_storage_is_rounded_first() -> None:
    x, still = np.array([[1.0, -0.5]]), Rotation(np.ones((1, 1)), np.zeros((1, 1)), True)
    rounded, given = (judge_fp32(x, x, np.ones(2), eps, still) for eps in (1.0, 1 + 2.0**-25))
    assert (rounded.expected == given.expected).all()
    assert (rounded.bound == given.bound).all()


def test_where_an_element_is_wrong_by_itself_no_inv_is_looked_for() -> None:
    y = np.array([1.25, 0.5, TIE + 9 * FP32_ULP, TIE - 9 * FP32_ULP])
    mixture = np.array([1.0, 1.125, LOW, HIGH])
    rows = np.array([mixture, mixture + np.array([0.0, 0.5, 0.0, 0.0])])
    verdict = judge_y(y, rows, np.ones(1), np.full(1, 0.5))
    assert verdict.ok.tolist() == [[True, True, False, False], [False, False, True, True]]


@pytest.mark.parametrize(("steps", "single"), [(16, False), (17, True), (-16, False), (-17, True)])
def test_a_y_within_32_u_of_a_tie_has_two_values_and_beyond_it_one(steps: int, single: bool) -> None:
    """A step of the fp32 weight is 1.992 u: 16 of them are 31.9 u, and 17 are 33.9 u."""
    normed = norm(np.ones((1, 2)), np.array([TIE + steps * FP32_ULP, 1.25]), TINY_EPS)
    assert normed.single.tolist() == [[single, True]]
    inv = 30 * float(U)
    assert 1 - inv * (1 + 2.0**-10) < normed.inv_low[0] < 1 - inv
    assert 1 + inv < normed.inv_high[0] < 1 + inv * (1 + 2.0**-10)


@pytest.mark.parametrize(("above", "below"), [(4, 5), (0, 5), (5, 0), (4, 3), (3, 4), (0, 1), (0, 2), (2, 0)])
def test_two_choices_of_elements_and_pairs_need_one_inv(above: int, below: int) -> None:
    """As above, 9 steps apart: no inv gives low for the first and high for the second."""
    weight = np.full(6, 1.25)
    weight[above], weight[below] = TIE + 9 * FP32_ULP, TIE - 9 * FP32_ULP
    y = np.repeat(weight[None], 4, 0)
    choices = list(itertools.product((LOW, HIGH), repeat=2))
    y[:, [above, below]] = choices
    out = exactly_rotated(y, [(0, 2), (1, 3)], 1.0, 0.5)
    verdict = judge_y(weight, out, np.full(2, 1.0), np.full(2, 0.5))
    for row, choice in enumerate(choices):
        cleared = sorted((above, below)) if choice == (LOW, HIGH) else []
        assert np.nonzero(~verdict.ok[row])[0].tolist() == cleared


def test_a_head_of_nothing_but_choices_needs_one_inv() -> None:
    choices = np.array(list(itertools.product((LOW, HIGH), repeat=2)))
    out = exactly_rotated(choices, [(0, 1)], 1.0, 0.5)
    verdict = judge_y((TIE + 9 * FP32_ULP, TIE - 9 * FP32_ULP), out, np.ones(1), np.full(1, 0.5))
    assert not verdict.single.any()
    assert verdict.ok.tolist() == [[True, True], [False, False], [True, True], [True, True]]


WITHIN = Interval(1.0, 3.0)
EXPLAINED: list[tuple[list[list[Interval]], bool]] = [
    ([], True),
    ([[]], False),
    ([[Interval(0.0, 0.5)]], False),
    ([[Interval(4.0, 5.0)]], False),
    ([[Interval(0.0, 1.0)]], True),
    ([[Interval(3.0, 9.0)]], True),
    ([[Interval(2.0, 2.0)], [Interval(2.0, 2.0)]], True),
    ([[Interval(0.0, 1.0)], [Interval(2.0, 3.0)]], False),
    ([[Interval(0.0, 1.0), Interval(2.0, 3.0)], [Interval(2.0, 2.5)]], True),
    ([[Interval(0.0, 2.0)], [Interval(2.0, math.inf)]], True),
]


@pytest.mark.parametrize(("choices", "explained"), EXPLAINED)
def test_one_inv_explains_by_hand(choices: list[list[Interval]], explained: bool) -> None:
    assert one_inv_explains(WITHIN, choices) is explained


@pytest.mark.parametrize("y", [(TIE, -0.25), (-0.25, TIE)], ids=["y1", "y2"])
def test_o1_and_o2_come_from_one_choice_of_y(y: tuple[float, float]) -> None:
    rows = np.array([[value if v == TIE else v for v in y] for value in (LOW, HIGH)])
    out = exactly_rotated(rows, [(0, 1)], 1.0, 1.0)
    assert (out[0] != out[1]).all()
    mixed = np.array([out[0], out[1], [out[0, 0], out[1, 1]], [out[1, 0], out[0, 1]]])
    verdict = judge_y(y, mixed, np.ones(1), np.ones(1))
    assert verdict.ok.tolist() == [[True, True], [True, True], [False, False], [False, False]]


natural = st.integers(0, 9).map(float)
ranges = st.builds(Interval, natural, natural | st.just(math.inf))


@settings(derandomize=True, deadline=None, database=None, max_examples=300)
@given(st.builds(Interval, natural, natural), st.lists(st.lists(ranges, max_size=3), max_size=4))
def test_one_inv_explains_where_a_search_finds_one(bounds: Interval, choices: list[list[Interval]]) -> None:
    found = any(
        all(any(low <= inv <= high for low, high in ranges_of_one) for ranges_of_one in choices)
        for inv in range(int(bounds.low), int(bounds.high) + 1)
    )
    assert one_inv_explains(bounds, choices) == found


# What the rotation may not be.


def cancelling_heads(stream: Stream, output: int) -> tuple[F64, F64, F64]:
    """y [64] and, for 256 heads, cos and sin [256, 32] with which o1 (output 0) or o2 (1) cancels.

    The other output lies on a bf16 tie, so that its evaluations differ too.
    """
    y = round_to(BF16, stream.choice([-1.0, 1.0], 64) * (0.5 + stream.uniform(64)))
    y1, y2 = y[:32], y[32:]
    ratio = (y2 / y1 if output == 0 else -y1 / y2) * (1 + stream.normal((256, 32)) * 2.0**-20)
    other = y2 * ratio + y1 if output == 0 else y1 * ratio - y2
    sin = (stream.integers(128, 256, (256, 32)) + 0.5) * 2.0**-8 / other
    return y, fp32(fp32(sin) * ratio), fp32(sin)


def evaluations(y: F64, cos: F64, sin: F64) -> tuple[list[F64], list[F64]]:
    """The three of o1 and of o2, by numpy's fp32 operations and the emulated FMA."""
    y1, y2, c, s = (v.astype(np.float32) for v in (y[:32], y[32:], cos, sin))
    p1, p2, q1, q2 = y1 * c, y2 * s, y2 * c, y1 * s
    firsts, seconds = [p1 - p2, fma32(y1, c, -p2), fma32(-y2, s, p1)], [q1 + q2, fma32(y2, c, q2), fma32(y1, s, q1)]
    return [round_to(BF16, v) for v in firsts], [round_to(BF16, v) for v in seconds]


@pytest.mark.parametrize("output", [0, 1], ids=["o1", "o2"])
def test_a_float64_rotation_is_rejected_where_it_differs(output: int) -> None:
    y, cos, sin = cancelling_heads(Stream("envelope/float64"), output)
    permitted = evaluations(y, cos, sin)
    wide = (y[:32] * cos - y[32:] * sin, y[32:] * cos + y[:32] * sin)[output]
    out = [values[0] for values in permitted]
    out[output] = round_to(BF16, wide)
    differs = np.all([out[output] != values for values in permitted[output]], axis=0)
    assert np.count_nonzero(differs) > 100
    ok = judge_y(y, np.concatenate(out, axis=1), cos, sin).ok
    assert (ok[:, :32] == ~differs).all()
    assert (ok[:, 32:] == ~differs).all()


@pytest.mark.parametrize("output", [0, 1], ids=["o1", "o2"])
def test_each_contraction_is_admissible_where_the_three_differ(output: int) -> None:
    y, cos, sin = cancelling_heads(Stream("envelope/contractions"), output)
    permitted = evaluations(y, cos, sin)
    (a, b, c), (d, e, f) = permitted[output], permitted[1 - output]
    three_differ = (a != b) & (b != c) & (a != c)
    assert np.count_nonzero(three_differ & ((d != e) | (e != f))) > 100
    for first, second in itertools.product(*permitted):
        assert judge_y(y, np.concatenate([first, second], axis=1), cos, sin).ok.all()


# Zeros, NaN and Inf.


def rotated_zeros(y1: float, y2: float, c: float, s: float) -> tuple[float, float]:
    """Clause 2's rule where both products are zero, IEEE arithmetic on short values elsewhere."""
    p1, p2, q1, q2 = y1 * c, y2 * s, y2 * c, y1 * s

    def minus(v: float) -> bool:
        return math.copysign(1, v) < 0

    o1, o2 = p1 - p2, q1 + q2
    if p1 == 0 == p2:
        o1 = -0.0 if minus(p1) and not minus(p2) else 0.0
    if q1 == 0 == q2:
        o2 = -0.0 if minus(q1) and minus(q2) else 0.0
    return o1, o2


def test_a_rotated_zero_has_the_sign_of_the_rule_for_every_combination_of_signs() -> None:
    ys, angles = (0.0, -0.0, 1.5, -1.5), (0.0, -0.0, 0.5, -0.5)
    for y1, y2, c, s in itertools.product(ys, ys, angles, angles):
        o1, o2 = rotated_zeros(y1, y2, c, s)
        out = np.array([[o1, o2], [-o1, o2], [o1, -o2], [-o1, -o2]])
        verdict = judge_y((y1, y2), out, np.array([c]), np.array([s]))
        assert verdict.ok.all(axis=1).tolist() == [True, False, False, False], (y1, y2, c, s)


@pytest.mark.parametrize("zero_in", ["x", "weight", "both"])
def test_a_normed_zero_has_the_signs_of_x_and_weight_multiplied(zero_in: str) -> None:
    signs = np.array(list(itertools.product((1.0, -1.0), repeat=2)))
    x = np.concatenate([[1.0, 1.0], np.copysign(0.0 if zero_in != "weight" else 1.0, signs[:, 0])])
    weight = np.concatenate([[0.0, 0.0], np.copysign(0.0 if zero_in != "x" else 1.0, signs[:, 1])])
    right = np.concatenate([[0.0, 0.0], np.copysign(0.0, signs.prod(axis=1))])
    wrong = np.concatenate([[0.0, 0.0], -right[2:]])
    still = Rotation(np.ones((2, 1)), np.zeros((2, 1)), True)
    verdict = judge(np.array([right, wrong]), np.array([x, x]), weight, 1e-6, still)
    assert verdict.ok.tolist() == [[True] * 6, [True] * 2 + [False] * 4]


SIX_WEIGHTS = np.array([1.0, -1.0, 1.0, 0.0, 1.0, -0.5])
BAD = {"NaN": [np.nan], "NaN and Inf": [np.nan, -np.inf], "Inf": [np.inf], "two Inf": [-np.inf, np.inf]}


def expect_only(expected: F64, x: F64, eps: float, neox: bool) -> None:
    """``expected [6]``, R = 4, is accepted, and in no place a value of another class or sign."""
    values = [0.0, -0.0, 1.0, 2.0**-133, np.inf, -np.inf, np.nan]
    changes = list(itertools.product(range(6), values))
    rows = np.repeat(expected[None], len(changes), axis=0)
    for row, (element, value) in enumerate(changes):
        rows[row, element] = value
    every = np.ones((len(rows), 2))
    verdict = judge(rows, np.repeat(x[None], len(rows), axis=0), SIX_WEIGHTS, eps, Rotation(every, -0.5 * every, neox))
    for row, (element, value) in enumerate(changes):
        assert verdict.ok[row, element] == (repr(value) == repr(float(expected[element])))
    assert verdict.single.all()


@both_styles
@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_nan_takes_the_head_and_inf_itself_and_its_partner(bad: list[float], neox: bool) -> None:
    pairs = [(0, 2), (1, 3)] if neox else [(0, 1), (2, 3)]
    for places in itertools.permutations(range(6), len(bad)):
        x = np.array([1.0, -2.0, 0.0, -0.0, 3.0, 4.0])
        x[list(places)] = bad
        expected = np.copysign(0.0, x) * SIX_WEIGHTS
        for i, k in pairs:
            expected[i], expected[k] = rotated_zeros(expected[i], expected[k], 1.0, -0.5)
            if i in places or k in places:
                expected[[i, k]] = np.nan
        expected[[place for place in places if place > 3]] = np.nan
        expect_only(np.full(6, np.nan) if np.isnan(bad).any() else expected, x, 1e-6, neox)


@both_styles
@pytest.mark.parametrize("eps", [0.0, 1e-50])
def test_a_zero_row_is_nan_only_where_eps_is_zero_in_fp32(eps: float, neox: bool) -> None:
    x = np.array([0.0, -0.0, 0.0, 0.0, -0.0, 0.0])
    expect_only(np.full(6, np.nan), x, eps, neox)
    zeros = x * SIX_WEIGHTS
    for i, k in [(0, 2), (1, 3)] if neox else [(0, 1), (2, 3)]:
        zeros[i], zeros[k] = rotated_zeros(zeros[i], zeros[k], 1.0, -0.5)
    expect_only(zeros, x, TINY_EPS, neox)


# What is said of a rejected element.


@both_styles
def test_an_explanation_names_the_pair_and_every_set(neox: bool) -> None:
    y = [1.25, TIE, 1.25, TIE, TIE] if neox else [1.25, 1.25, TIE, TIE, TIE]
    out = np.array([[0.5, 0.25, 2.0, -4.0, 7.0]])
    verdict = judge_y(y, out, np.ones(2), np.full(2, 0.5), neox)
    second = (1, 3) if neox else (2, 3)
    sets = [f"y=({a}, {b}) -> [{a - b / 2}] x [" for a, b in itertools.product((LOW, HIGH), repeat=2)]
    for element in second:
        said = verdict.explain((0, element))
        assert said.startswith(f"got the pair ({out[0, second[0]]}, -4.0), admissible: {sets[0]}")
        assert all(part in said for part in sets)
    assert verdict.explain((0, 0)).count("->") == 1
    assert verdict.explain((0, 4)) == f"got 7.0, admissible (not rotated) [{LOW}, {HIGH}]"
