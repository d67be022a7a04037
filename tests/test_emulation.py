"""What `conformance.fixtures.emulation` promises, against exact rational arithmetic.

The reference below knows a format only as its list of bit patterns in order, and picks the nearest by comparing
fractions. It shares neither code nor method with what it judges.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import platform
import struct
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from importlib.util import module_from_spec
from typing import Any

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import ArrayLike, NDArray

from conformance.fixtures import emulation
from conformance.fixtures.emulation import (
    BF16,
    FP16,
    FP32,
    NAN_DISTANCE,
    FloatFormat,
    add32,
    assert_subnormals_survive,
    decode,
    encode,
    fma32,
    mul32,
    next_down,
    next_up,
    round_to,
    sub32,
    ulp,
    ulp_distance,
)

FORMATS = (BF16, FP16, FP32)
FRACTIONS = {BF16: 2**7, FP16: 2**10, FP32: 2**23}
INF_PATTERN = {BF16: 0x7F80, FP16: 0x7C00, FP32: 0x7F800000}
UNIT = {BF16: Fraction(1, 2**133), FP16: Fraction(1, 2**24), FP32: Fraction(1, 2**149)}

exact = settings(derandomize=True, deadline=None, database=None, max_examples=150)
every_format = pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)


# The reference.


def units_of(fmt: FloatFormat, pattern: int) -> int:
    """Value of a non-negative pattern in smallest subnormals; the pattern of inf counts as one step past the last."""
    field, fraction = divmod(pattern, FRACTIONS[fmt])
    return fraction if field == 0 else (FRACTIONS[fmt] + fraction) << (field - 1)


def value_of(fmt: FloatFormat, pattern: int) -> float:
    return math.inf if pattern == INF_PATTERN[fmt] else float(units_of(fmt, pattern) * UNIT[fmt])


def nearest(fmt: FloatFormat, true: Fraction) -> float:
    """Nearest member, the even pattern of two; a zero result takes the sign of `true`."""
    target = abs(true) / UNIT[fmt]
    pattern = bisect_right(range(INF_PATTERN[fmt] + 1), target, key=lambda p: Fraction(units_of(fmt, p))) - 1
    if pattern < INF_PATTERN[fmt]:
        below, above = target - units_of(fmt, pattern), units_of(fmt, pattern + 1) - target
        pattern += above < below or (above == below and pattern % 2 == 1)
    return math.copysign(value_of(fmt, pattern), true)


def nearest_of_float(fmt: FloatFormat, x: float) -> float:
    if math.isnan(x) or math.isinf(x):
        return x
    return math.copysign(nearest(fmt, Fraction(x)), x)


def reference_fma(a: float, b: float, c: float) -> float:
    """IEEE 754 fusedMultiplyAdd to fp32: 7.2 for the invalid cases, 6.3 for the signs of zero."""
    product_sign = math.copysign(1.0, a) * math.copysign(1.0, b)
    if math.isnan(a) or math.isnan(b) or math.isnan(c):
        return math.nan
    if math.isinf(a) or math.isinf(b):
        invalid = a == 0 or b == 0 or (math.isinf(c) and math.copysign(1.0, c) != product_sign)
        return math.nan if invalid else product_sign * math.inf
    if math.isinf(c):
        return c
    true = Fraction(a) * Fraction(b) + Fraction(c)
    if true == 0:
        both_negative = (a == 0 or b == 0) and product_sign < 0 and math.copysign(1.0, c) < 0
        return -0.0 if both_negative else 0.0
    return nearest(FP32, true)


def assert_same_values(got: ArrayLike, want: ArrayLike) -> None:
    """Compare bit for bit, signs of zero too; NaNs are one class."""
    with np.errstate(invalid="ignore"):  # numpy warns when it widens a signalling NaN
        got64, want64 = np.asarray(got, dtype=np.float64), np.asarray(want, dtype=np.float64)
    assert got64.shape == want64.shape
    same = (got64.view(np.int64) == want64.view(np.int64)) | (np.isnan(got64) & np.isnan(want64))
    assert same.all(), [(g.hex(), w.hex()) for g, w in zip(got64[~same][:3], want64[~same][:3], strict=True)]


# The draws.


def float64_of(pattern: int) -> float:
    return float(struct.unpack("<d", struct.pack("<Q", pattern))[0])


def float32_of(pattern: int) -> float:
    return float(struct.unpack("<f", struct.pack("<I", pattern))[0])


float64_patterns = st.lists(st.integers(0, 2**64 - 1).map(float64_of), min_size=1, max_size=20)
fp32_members = st.integers(0, 2**32 - 1).map(float32_of)
fp32_finite = fp32_members.filter(math.isfinite)
signs = st.sampled_from((-1.0, 1.0))


@st.composite
def near_ties(draw: st.DrawFn, fmt: FloatFormat) -> float:
    """A float64 on, or a few float64 steps beside, the middle of two neighbours, inf included as the last."""
    lower = draw(st.integers(0, INF_PATTERN[fmt] - 1))
    middle = float((units_of(fmt, lower) + units_of(fmt, lower + 1)) * UNIT[fmt] / 2)
    for _ in range(abs(steps := draw(st.integers(-2, 2)))):
        middle = math.nextafter(middle, math.copysign(math.inf, steps))
    return draw(signs) * middle


@st.composite
def binade_edges(draw: st.DrawFn, fmt: FloatFormat) -> float:
    """A float64 beside a power of two, from below the smallest subnormal to beyond the largest value."""
    x = 2.0 ** draw(st.integers(fmt.min_quantum_exponent - 3, fmt.emax + 3))
    return draw(signs) * x * (1.0 + draw(st.sampled_from((0.0, 2.0**-52, -(2.0**-53), 2.0**-24, -(2.0**-25)))))


@st.composite
def cancelling(draw: st.DrawFn) -> tuple[float, float, float]:
    """c is -a*b to a few ulps, so that only the low bits of the product are left."""
    a, b = draw(fp32_finite), draw(fp32_finite)
    c = -nearest(FP32, Fraction(a) * Fraction(b))
    for _ in range(abs(steps := draw(st.integers(-3, 3)))):
        c = float(np.nextafter(np.float32(c), np.float32(math.copysign(math.inf, steps))))
    return a, b, c


# Pairs of 24-bit integers, and the power of two that their product misses by 1 or by 7: a sum with it lies beside a tie
# by less than float64 can tell, or by most of one float64 step.
NEAR_POWERS = [
    (2**23 - 1, 2**23 + 1, 46),
    (2**18 - 1, 2**18 + 1, 36),
    (19825, 54161, 30),
    (187713, 45761, 33),
    (398739, 86171, 35),
    (8384513, 8392705, 46),
    (2699, 795659, 31),
    (5895, 364289, 31),
]


@st.composite
def beside_half_an_ulp(draw: st.DrawFn) -> tuple[float, float, float]:
    """a*b is half an ulp of c (or a quarter), give or take a part that float64 loses or rounds."""
    first, second, power = draw(st.sampled_from(NEAR_POWERS))
    exponent = draw(st.integers(-60, 60))
    c = draw(st.integers(2**23, 2**24 - 1)) * 2.0 ** (exponent - 23)
    scale = exponent - 24 - power - draw(st.integers(0, 1))
    return draw(signs) * first * 2.0 ** (scale // 2), second * 2.0 ** (scale - scale // 2), draw(signs) * c


@st.composite
def tiny_results(draw: st.DrawFn) -> tuple[float, float, float]:
    """Products around and below fp32's smallest subnormal, and addends of the same size."""
    significands = st.integers(2**23, 2**24 - 1)
    a = draw(signs) * draw(significands) * 2.0**-100
    b = draw(significands) * 2.0 ** draw(st.integers(-105, -75))
    c = draw(signs) * draw(st.one_of(st.integers(0, 4), st.integers(0, 2**24))) * 2.0**-149
    return a, b, c


def random_fp32(seed: int, size: int) -> NDArray[np.float32]:
    return np.random.default_rng(seed).integers(0, 2**32, size, dtype=np.uint32).view(np.float32)


UP, DOWN = 1 + 2.0**-23, 1 - 2.0**-23
SPECIALS = [s * x for s in (1.0, -1.0) for x in (0.0, 2.0**-149, 2.0**-126, 1.0, 1.5, 2.0, FP32.max_finite, math.inf)]
SPECIALS.append(math.nan)


# Formats.


def test_formats_are_the_published_ones() -> None:
    for fmt, dtype in ((FP16, np.float16), (FP32, np.float32)):
        limits = np.finfo(dtype)
        assert fmt.max_finite == float(limits.max)
        assert fmt.smallest_normal == float(limits.smallest_normal)
        assert fmt.smallest_subnormal == float(limits.smallest_subnormal)
        assert fmt.width == limits.bits
        assert np.dtype(fmt.bits_dtype).itemsize * 8 == fmt.width
    assert BF16.max_finite == float.fromhex("0x1.fep127")
    assert BF16.smallest_normal == 2.0**-126
    assert BF16.smallest_subnormal == 2.0**-133
    assert (BF16.width, BF16.bits_dtype) == (16, np.uint16)
    assert [fmt.inf_bits for fmt in FORMATS] == [0x7F80, 0x7C00, 0x7F800000]
    assert [fmt.nan_bits for fmt in FORMATS] == [0x7FC0, 0x7E00, 0x7FC00000]


# Rounding.


@every_format
@exact
@given(draws=st.data())
def test_round_to_gives_the_nearest_even_member(fmt: FloatFormat, draws: st.DataObject) -> None:
    beside = st.lists(st.one_of(near_ties(fmt), binade_edges(fmt)), min_size=1, max_size=20)
    values = draws.draw(float64_patterns) + draws.draw(beside)
    assert_same_values(round_to(fmt, np.array(values)), [nearest_of_float(fmt, x) for x in values])


@pytest.mark.parametrize(
    ("x", "right", "twice_rounded"),
    [
        pytest.param(1 + 2.0**-8 + 2.0**-40, 1 + 2.0**-7, 1.0, id="just-above-a-tie-falls-to-even"),
        pytest.param(1 + 3 * 2.0**-8 - 2.0**-40, 1 + 2.0**-7, 1 + 2.0**-6, id="just-below-a-tie-rises-to-even"),
        pytest.param(-(1 + 2.0**-8 + 2.0**-52), -(1 + 2.0**-7), -1.0, id="negative-by-one-float64-ulp"),
        pytest.param(2.0**-134 * (1 + 2.0**-40), 2.0**-133, 0.0, id="above-half-the-smallest-subnormal"),
        pytest.param(BF16.max_finite + 2.0**119 - 2.0**80, BF16.max_finite, math.inf, id="below-the-overflow-tie"),
    ],
)
def test_bf16_is_not_rounded_through_fp32(x: float, right: float, twice_rounded: float) -> None:
    naive = round_to(BF16, np.float32(x))
    assert_same_values(naive, twice_rounded)
    assert_same_values(round_to(BF16, np.float64(x)), right)


@every_format
def test_overflow_begins_at_half_an_ulp_beyond_the_largest_value(fmt: FloatFormat) -> None:
    edge = fmt.max_finite + 2.0 ** (fmt.emax - fmt.precision)
    values = [math.nextafter(edge, 0.0), edge, 2.0 ** (fmt.emax + 1), float.fromhex("0x1.fffffffffffffp1023"), math.inf]
    want = [fmt.max_finite, math.inf, math.inf, math.inf, math.inf]
    assert_same_values(round_to(fmt, np.array(values)), want)
    assert_same_values(round_to(fmt, -np.array(values)), [-x for x in want])


@every_format
def test_underflow_is_gradual_and_keeps_the_sign_of_zero(fmt: FloatFormat) -> None:
    least = fmt.smallest_subnormal
    values = np.array([0.0, 5e-324, least / 2, math.nextafter(least / 2, 1.0), least * 1.5, least * 2.5, math.nan])
    want = np.array([0.0, 0.0, 0.0, least, least * 2, least * 2, math.nan])
    assert_same_values(round_to(fmt, values), want)
    assert_same_values(round_to(fmt, -values), -want)


def test_fp32_and_fp16_agree_with_the_hardware_conversions() -> None:
    values = np.random.default_rng(1).integers(0, 2**63, 100_000, dtype=np.int64).view(np.float64)
    with np.errstate(all="ignore"):
        values = np.concatenate((values, random_fp32(2, 100_000).astype(np.float64) * (1 + 2.0**-24)))
        assert_same_values(round_to(FP32, values), values.astype(np.float32))
        assert_same_values(round_to(FP16, values), values.astype(np.float16))


@every_format
def test_shapes_are_kept_and_a_strided_input_is_read_in_place(fmt: FloatFormat) -> None:
    values = np.arange(24, dtype=np.float64).reshape(4, 6)[::2, ::3]
    assert_same_values(round_to(fmt, values), values)
    assert_same_values(decode(fmt, encode(fmt, values)), values)
    for empty in (np.zeros(0), np.zeros((3, 0))):
        assert round_to(fmt, empty).shape == encode(fmt, empty).shape == ulp(fmt, empty).shape == empty.shape
        assert decode(fmt, encode(fmt, empty)).shape == empty.shape
    assert decode(fmt, encode(fmt, 1.5)) == 1.5


# Bits.


@pytest.mark.parametrize("fmt", [BF16, FP16], ids=lambda fmt: fmt.name)
def test_every_16_bit_pattern_decodes_exactly_and_encodes_back(fmt: FloatFormat) -> None:
    patterns = np.arange(2**16, dtype=np.uint16)
    magnitudes = [value_of(fmt, p) if p <= INF_PATTERN[fmt] else math.nan for p in range(2**15)]
    values = decode(fmt, patterns)
    assert_same_values(values, magnitudes + [-x for x in magnitudes])
    is_nan = np.isnan(values)
    assert is_nan.sum() == 2 * (FRACTIONS[fmt] - 1)
    back = encode(fmt, values)
    assert back.dtype == np.uint16
    assert (back[~is_nan] == patterns[~is_nan]).all()
    assert (back[is_nan] == fmt.nan_bits).all()


def test_fp32_patterns_are_numpys() -> None:
    patterns = np.random.default_rng(3).integers(0, 2**32, 200_000, dtype=np.uint32)
    patterns[:8] = [0, 1, 0x007FFFFF, 0x00800000, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x80000001]
    values = decode(FP32, patterns)
    assert_same_values(values, patterns.view(np.float32))
    is_number = ~np.isnan(values)
    back = encode(FP32, values)
    assert back.dtype == np.uint32
    assert (back[is_number] == patterns[is_number]).all()
    assert (back[~is_number] == 0x7FC00000).all()
    assert encode(FP32, [-math.nan, math.nan]).tolist() == [0x7FC00000, 0x7FC00000]


@every_format
def test_encode_refuses_what_the_format_does_not_hold(fmt: FloatFormat) -> None:
    for stranger in (
        1 + 2.0**-fmt.precision,
        fmt.smallest_subnormal / 2,
        fmt.smallest_subnormal * 1.5,
        2 * fmt.max_finite,
    ):
        with pytest.raises(ValueError, match=f"x: .* is not a value of {fmt.name}"):
            encode(fmt, np.array([0.0, stranger]))


def test_arguments_of_a_wrong_kind_are_named() -> None:
    with pytest.raises(ValueError, match="x: got dtype int64"):
        round_to(BF16, np.arange(3))
    with pytest.raises(ValueError, match=r"x: got dtype .*, need a float of at most 64 bits"):
        round_to(BF16, np.ones(3, np.longdouble))
    with pytest.raises(ValueError, match="bits: got dtype float64"):
        decode(BF16, np.zeros(3))
    with pytest.raises(ValueError, match=r"bits: got values 0 \.\. 65536"):
        decode(BF16, np.array([0, 65536]))
    with pytest.raises(ValueError, match="b_bits: got values -1"):
        ulp_distance(FP16, np.array([0]), np.array([-1]))


# Neighbours and distances.


@pytest.mark.parametrize("fmt", [BF16, FP16], ids=lambda fmt: fmt.name)
def test_next_up_and_next_down_walk_every_member(fmt: FloatFormat) -> None:
    magnitudes = np.array([value_of(fmt, p) for p in range(INF_PATTERN[fmt] + 1)])
    line = np.concatenate((-magnitudes[:0:-1], magnitudes))
    up, down = next_up(fmt, line), next_down(fmt, line)
    assert_same_values(up[:-1], np.where(line[1:] == 0.0, -0.0, line[1:]))
    assert_same_values(down[1:], line[:-1])
    assert (up[-1], down[0]) == (math.inf, -math.inf)
    least = fmt.smallest_subnormal
    assert_same_values(next_up(fmt, np.array([-0.0, 0.0, math.nan])), [least, least, math.nan])
    assert_same_values(next_down(fmt, np.array([-0.0, 0.0, least, math.nan])), [-least, -least, 0.0, math.nan])


def test_fp32_neighbours_are_numpys() -> None:
    values = random_fp32(4, 20_000)
    values = values[np.isfinite(values)]
    assert_same_values(next_up(FP32, values), np.nextafter(values, np.float32(np.inf)))
    assert_same_values(next_down(FP32, values), np.nextafter(values, np.float32(-np.inf)))


@pytest.mark.parametrize("fmt", [BF16, FP16], ids=lambda fmt: fmt.name)
def test_ulp_is_the_step_to_the_next_member(fmt: FloatFormat) -> None:
    members = decode(fmt, np.arange(fmt.inf_bits))
    steps = np.array([(units_of(fmt, p + 1) - units_of(fmt, p)) for p in range(fmt.inf_bits)]) * fmt.smallest_subnormal
    assert_same_values(ulp(fmt, members), steps)
    assert_same_values(ulp(fmt, -members), steps)
    assert_same_values(ulp(fmt, members * (1 + 2.0**-52)), steps)
    beyond = np.array([2.0**200, math.inf, -math.inf, math.nan])
    assert_same_values(ulp(fmt, beyond), [steps[-1], math.inf, math.inf, math.nan])


def test_fp32_ulp_is_numpys_spacing() -> None:
    values = np.abs(random_fp32(5, 20_000))
    values = values[np.isfinite(values)]
    assert_same_values(ulp(FP32, values), np.spacing(values))


@every_format
def test_ulp_distance_counts_the_members_between(fmt: FloatFormat) -> None:
    inf, sign = fmt.inf_bits, 1 << (fmt.width - 1)
    rows = [
        (0, 0, 0),
        (0, sign, 1),
        (1, sign | 1, 3),
        (5, 9, 4),
        (sign | 5, sign | 9, 4),
        (inf - 1, inf, 1),
        (inf, sign | inf, 2 * inf + 1),
        (fmt.nan_bits, 0, NAN_DISTANCE),
        (fmt.nan_bits, inf, NAN_DISTANCE),
        (sign | inf | 1, sign | inf, NAN_DISTANCE),
        (fmt.nan_bits, sign | inf | 1, 0),
    ]
    a, b, want = (np.array(column) for column in zip(*rows, strict=True))
    assert ulp_distance(fmt, a, b).tolist() == ulp_distance(fmt, b, a).tolist() == want.tolist()
    assert ulp_distance(fmt, a.astype(fmt.bits_dtype), b.astype(fmt.bits_dtype)).tolist() == want.tolist()


# Arithmetic.

OPERATIONS: list[tuple[Callable[..., NDArray[np.float32]], Callable[..., Any]]] = [
    (mul32, lambda a, b: a * b),
    (add32, lambda a, b: a + b),
    (sub32, lambda a, b: a - b),
]
every_operation = pytest.mark.parametrize(("emulated", "plain"), OPERATIONS, ids=("mul", "add", "sub"))


@every_operation
@exact
@given(pairs=st.lists(st.tuples(fp32_finite, fp32_finite), min_size=1, max_size=10), gap=st.integers(-30, 30))
def test_mul_add_sub_round_the_exact_result_once(
    emulated: Callable[..., Any], plain: Callable[..., Any], pairs: list[tuple[float, float]], gap: int
) -> None:
    # Two random patterns rarely meet: the second list brings b into a's reach, the third into the reach of underflow.
    near = [
        (a, nearest(FP32, Fraction(math.frexp(b)[0]) * Fraction(2.0 ** max(math.frexp(a)[1] + gap, -149))))
        for a, b in pairs
    ]
    tiny = [(math.ldexp(math.frexp(a)[0], -70), math.ldexp(math.frexp(b)[0], gap - 70)) for a, b in pairs]
    for a, b in pairs + [pair for pair in near if math.isfinite(pair[1])] + tiny:
        true = plain(Fraction(a), Fraction(b))
        if true:
            assert_same_values(emulated(a, b), np.float64(nearest(FP32, true)))


@every_operation
def test_mul_add_sub_agree_with_the_processor(emulated: Callable[..., Any], plain: Callable[..., Any]) -> None:
    random_a, random_b = random_fp32(6, 200_000), random_fp32(7, 200_000)
    near_b = (random_a.view(np.uint32) + np.random.default_rng(8).integers(0, 2**27, 200_000, dtype=np.uint32)).view(
        np.float32
    )
    special_a, special_b = np.array(list(itertools.product(SPECIALS, repeat=2)), dtype=np.float32).T
    for a, b in ((random_a, random_b), (random_a, near_b), (special_a, special_b)):
        with np.errstate(all="ignore"):
            native = plain(a, b)
        result = emulated(a, b)
        assert result.dtype == native.dtype == np.float32
        assert_same_values(result, native)


def test_arithmetic_refuses_operands_that_are_not_fp32() -> None:
    with pytest.raises(ValueError, match=r"a: 0\.1 .* is not a value of fp32"):
        mul32(0.1, 1.0)
    with pytest.raises(ValueError, match=r"b: 1e\+39 .* is not a value of fp32"):
        add32(1.0, np.array([1.0, 1e39]))
    with pytest.raises(ValueError, match=r"c: 1e-46 .* is not a value of fp32"):
        fma32(1.0, 1.0, 1e-46)
    with pytest.raises(ValueError, match="a: got dtype int64"):
        sub32(np.arange(3), 1.0)


def test_arithmetic_broadcasts() -> None:
    column, row = np.arange(3.0)[:, None], np.arange(4, dtype=np.float32)
    assert fma32(column, row, 1.0).tolist() == (column * row + 1.0).tolist()
    assert fma32(2.0, 3.0, row).tolist() == (row + 6.0).tolist()
    assert fma32(column, 1.0, row).shape == add32(column, row).shape == (3, 4)


@exact
@given(
    rows=st.lists(
        st.one_of(
            st.tuples(fp32_members, fp32_members, fp32_members), cancelling(), beside_half_an_ulp(), tiny_results()
        ),
        min_size=1,
        max_size=20,
    )
)
def test_fma_rounds_the_exact_sum_once(rows: list[tuple[float, float, float]]) -> None:
    a, b, c = np.array(rows).T
    assert_same_values(fma32(a, b, c), [reference_fma(*row) for row in rows])


@pytest.mark.parametrize(
    ("a", "b", "c", "fused", "naive"),
    [
        pytest.param(19825 * 2.0**-40, 54161 * 2.0**-14, 1.0, 1 + 2.0**-23, 1.0, id="above-the-tie"),
        pytest.param(UP, DOWN * 2.0**-24, UP, UP, 1 + 2.0**-22, id="below-the-tie"),
        pytest.param(-UP, DOWN * 2.0**-24, -UP, -UP, -(1 + 2.0**-22), id="below-the-tie-negative"),
        pytest.param(-19825 * 2.0**-40, 54161 * 2.0**-14, 1 + 2.0**-22, UP, 1 + 2.0**-22, id="opposite-signs"),
        pytest.param(-19825 * 2.0**-40, 54161 * 2.0**-15, 1.0, 1 - 2.0**-24, 1.0, id="under-a-power-of-two"),
        pytest.param(1 + 2.0**-12, 1 + 2.0**-12, 2.0**-149, 1 + 2.0**-11 + 2.0**-23, 1 + 2.0**-11, id="tiny-addend"),
        pytest.param(
            UP * 2.0**-75, DOWN * 2.0**-75, 2.0**-127 + 2.0**-149, 2.0**-127 + 2.0**-149, 2.0**-127 + 2.0**-148,
            id="subnormal-result",
        ),
        pytest.param(UP * 2.0**51, DOWN * 2.0**52, FP32.max_finite, FP32.max_finite, math.inf, id="overflow-tie"),
    ],
)  # fmt: skip
def test_fma_where_a_sum_rounded_to_float64_makes_a_false_tie(
    a: float, b: float, c: float, fused: float, naive: float
) -> None:
    assert reference_fma(a, b, c) == fused
    assert_same_values(round_to(FP32, np.float64(a) * np.float64(b) + np.float64(c)), naive)
    assert_same_values(fma32(a, b, c), fused)


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize(
    ("a", "b", "c"),
    [
        pytest.param(2699 * 2.0**-40, 795659 * 2.0**-15, UP, id="below"),
        pytest.param(5895 * 2.0**-40, 364289 * 2.0**-15, 1.0, id="above"),
    ],
)
def test_fma_does_not_step_from_an_odd_sum_onto_the_tie_beside_it(a: float, b: float, c: float, sign: float) -> None:
    assert int(np.float64(a * b + c).view(np.int64)) % 2 == 1
    assert Fraction(a * b + c) != Fraction(a) * Fraction(b) + Fraction(c)
    assert_same_values(fma32(sign * a, b, sign * c), sign * UP)


@pytest.mark.parametrize(
    ("a", "b", "c", "want"),
    [
        pytest.param(1 + 2.0**-12, 1 + 2.0**-12, -(1 + 2.0**-11), 2.0**-24, id="the-product-is-not-rounded"),
        pytest.param(2.0**100, 2.0**28, -FP32.max_finite, 2.0**104, id="the-product-alone-overflows"),
        pytest.param(-(2.0**100), 2.0**28, FP32.max_finite, -(2.0**104), id="the-product-alone-overflows-negative"),
        pytest.param(FP32.max_finite, FP32.max_finite, -FP32.max_finite, math.inf, id="the-sum-overflows-too"),
        pytest.param(2.0**-149, 2.0**-149, 2.0**-149, 2.0**-149, id="far-below-the-addend"),
        pytest.param(2.0**-149, 2.0**-149, -0.0, 0.0, id="underflow-keeps-the-sign-of-the-sum"),
        pytest.param(-(2.0**-149), 2.0**-149, 0.0, -0.0, id="underflow-keeps-the-sign-of-the-negative-sum"),
        pytest.param(2.0**-75, 2.0**-75, 0.0, 0.0, id="half-the-smallest-subnormal-is-a-tie"),
        pytest.param(UP * 2.0**-75, 2.0**-75, 0.0, 2.0**-149, id="more-than-half-the-smallest-subnormal"),
        pytest.param(3.0, 2.0**-149, -(2.0**-148), 2.0**-149, id="subnormals-cancel-exactly"),
    ],
)
def test_fma_at_the_ends_of_the_range(a: float, b: float, c: float, want: float) -> None:
    assert_same_values(fma32(a, b, c), want)


@pytest.mark.parametrize(
    ("a", "b", "c", "want"),
    [
        (0.0, 1.0, 0.0, 0.0),
        (0.0, 1.0, -0.0, 0.0),
        (-0.0, 1.0, 0.0, 0.0),
        (-0.0, 1.0, -0.0, -0.0),
        (0.0, -1.0, 0.0, 0.0),
        (0.0, -1.0, -0.0, -0.0),
        (-0.0, -0.0, -0.0, 0.0),
        (-0.0, 0.0, -0.0, -0.0),
        (2.0, 3.0, -6.0, 0.0),
        (-2.0, 3.0, 6.0, 0.0),
        (0.0, 5.0, -(2.0**-149), -(2.0**-149)),
    ],
)
def test_fma_signs_of_zero(a: float, b: float, c: float, want: float) -> None:
    assert_same_values(reference_fma(a, b, c), want)
    assert_same_values(fma32(a, b, c), want)


def test_fma_of_every_triple_of_special_values() -> None:
    triples = list(itertools.product(SPECIALS, repeat=3))
    a, b, c = np.array(triples).T
    result = fma32(a, b, c)
    assert result.dtype == np.float32
    assert_same_values(result, [reference_fma(*triple) for triple in triples])
    assert np.isnan(fma32([math.inf, 0.0, math.inf], [0.0, -math.inf, 1.0], [1.0, math.nan, -math.inf])).all()


# Irrational values, to 200 bits.


@every_format
@pytest.mark.parametrize("name", ["sqrt", "exp", "log"])
def test_float64_error_cannot_move_a_rounding_except_beside_a_tie(fmt: FloatFormat, name: str) -> None:
    arguments = np.random.default_rng(9).uniform(1.5, 10.0, 300)
    with mpmath.workprec(200):
        trues = [fraction_of(getattr(mpmath, name)(mpmath.mpf(float(x)))) for x in arguments]
    middle = np.array([float(true) for true in trues])
    want = np.array([nearest(fmt, true) for true in trues])
    distance = np.array([float(abs(Fraction(w) - true)) for w, true in zip(want, trues, strict=True)])
    half = ulp(fmt, middle) / 2
    assert (distance <= half).all()
    assert np.max(distance) > 0.9 * np.max(half)
    clear = half - distance > 4 * np.spacing(middle)
    assert clear.mean() > 0.99
    for values in (middle, np.nextafter(middle, 0.0), np.nextafter(middle, np.inf)):
        assert_same_values(round_to(fmt, values)[clear], want[clear])


def fraction_of(x: Any) -> Fraction:
    mantissa, exponent = x.man_exp
    return int(mantissa) * Fraction(2) ** int(exponent)


# The process.


def test_no_warning_and_no_floating_point_error_leaves_the_module() -> None:
    singles = np.concatenate((random_fp32(10, 1000), np.array(SPECIALS, dtype=np.float32)))
    doubles = np.random.default_rng(11).integers(0, 2**64, 1000, dtype=np.uint64).view(np.float64)
    doubles[0] = np.uint64(0x7FF0000000000001).view(np.float64)
    singles[0] = np.uint32(0x7F800001).view(np.float32)
    with np.errstate(all="raise"):
        for fmt in FORMATS:
            members = round_to(fmt, doubles)
            for values in (doubles, singles):
                encode(fmt, round_to(fmt, values))
                encode(fmt, values[:1])
                next_up(fmt, values[:1])
                ulp(fmt, values)
            next_down(fmt, next_up(fmt, members))
            ulp_distance(fmt, encode(fmt, members), encode(fmt, members[::-1]))
        for operation in (mul32, add32, sub32):
            operation(singles, singles[::-1])
        fma32(singles, singles[::-1], np.roll(singles, 7))


# Words of the thread's floating-point environment, as glibc lays it out, and the bits in them that flush.
FLUSHING = {
    "x86_64": [pytest.param(7, 0x8000, id="results"), pytest.param(7, 0x0040, id="operands")],
    "aarch64": [pytest.param(0, 1 << 24, id="both")],
}


def imported_anew() -> None:
    """Import the module a second time, beside the first."""
    spec = emulation.__spec__
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(module_from_spec(spec))


@contextmanager
def environment_bits(word: int, bits: int) -> Iterator[None]:
    libm = ctypes.CDLL("libm.so.6")
    before, during = (ctypes.c_uint32 * 16)(), (ctypes.c_uint32 * 16)()
    libm.fegetenv(before)
    libm.fegetenv(during)
    during[word] |= bits
    libm.fesetenv(during)
    try:
        yield
    finally:
        libm.fesetenv(before)


@pytest.mark.parametrize(("word", "bits"), FLUSHING.get(platform.machine(), []))
def test_a_thread_that_flushes_subnormals_is_refused_with_the_remedy(word: int, bits: int) -> None:
    with environment_bits(word, bits), pytest.raises(RuntimeError, match="set_flush_denormal"):
        assert_subnormals_survive()
    with environment_bits(word, bits), pytest.raises(RuntimeError, match="set_flush_denormal"):
        imported_anew()
    assert_subnormals_survive()
