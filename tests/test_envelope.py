"""The judge of normed and rotated heads accepts whatever the contract permits.

An fp32 simulator computes heads with every freedom that clauses 1 to 3 leave drawn at random or pushed to its end:
the tree of the sum, contraction, the division by n, the last bits of root and reciprocal, the association of the two
products, and which of the three evaluations gives o1 and o2. A green run means:

1. none of about 2.8 million elements of such results is rejected, ties, cancellation, signed zeros, subnormals, NaN and
   Inf included, with errors that come within a few u of the proven bound;
2. fp32 storage is judged within a few times its bound;
3. a head is judged alone: neither its neighbours nor their order matter.

That anything else is rejected is proven in ``test_envelope_members.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pytest

from conformance.fixtures.emulation import BF16, FP16, FP32, FloatFormat, fma32
from conformance.fixtures.envelope import HeadVerdict, Rotation, WideVerdict, judge, judge_fp32, norm
from conformance.fixtures.streams import Stream

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

U = 2.0**-24
DIMS = (2, 64, 96, 128, 256)
BATCHES = 8
ELEMENTS = 4096
"""Elements of one batch, which shares a weight, a tree and a rotary dimension."""


@dataclass(frozen=True)
class Heads:
    """Heads ``x [N, D]`` and what they are normed and rotated with."""

    x: F64
    weight: F64
    eps: float
    rotation: Rotation
    fmt: FloatFormat = BF16

    def judge(self, out: F32) -> HeadVerdict | WideVerdict:
        wide = out.astype(np.float64)
        if self.fmt is FP32:
            return judge_fp32(wide, self.x, self.weight, self.eps, self.rotation)
        return judge(wide, self.x, self.weight, self.eps, self.rotation, self.fmt)


# The simulator: numpy's fp32 operations, and the emulated FMA.


def stored(fmt: FloatFormat, v: F32) -> F32:
    """Round fp32 to the storage format by means that the judge does not use."""
    if fmt is FP16:
        return v.astype(np.float16).astype(np.float32)
    if fmt is FP32:
        return v
    bits = np.ascontiguousarray(v).view(np.uint32).astype(np.uint64)
    bits += np.uint64(0x7FFF) + ((bits >> np.uint64(16)) & np.uint64(1))
    return (bits & np.uint64(0xFFFF0000)).astype(np.uint32).view(np.float32)


def sum_of_squares(columns: list[F32], depth: int, shape: str, draws: Iterator[float]) -> F32:
    """Sum squares in a tree in which no term passes more than ``depth`` additions."""
    count = len(columns)
    if count == 1:
        return columns[0] * columns[0]
    least, most = max(1, count - 2 ** (depth - 1)), min(count - 1, 2 ** (depth - 1))
    split = {"pairwise": count // 2, "sequential": most, "random": least + int(next(draws) * (most - least + 1))}[shape]
    left = sum_of_squares(columns[:split], depth - 1, shape, draws)
    if split == count - 1 and next(draws) < 0.5:
        return fma32(columns[-1], columns[-1], left)
    return left + sum_of_squares(columns[split:], depth - 1, shape, draws)


def within(exact: F64, bound: float, error: F64) -> F32:
    """An fp32 value about ``error`` (-1 to 1) times the permitted relative ``bound`` away from ``exact``."""
    wanted = exact * (1 + error * bound)
    near = wanted.astype(np.float32)
    too_far = np.abs(near - exact) > np.abs(wanted - exact)
    near = np.where(too_far, np.nextafter(near, exact.astype(np.float32)), near)
    finite = np.isfinite(exact) & (exact > 0)
    assert (np.abs(near - exact)[finite] <= bound * exact[finite]).all()
    return near


def mean_square(stream: Stream, total: F32, terms: int, eps: float) -> F32:
    """``total / n + eps``, the quotient exact or by a reciprocal within 2 ulp, contracted or not."""
    rounded_eps, true = np.float32(eps), 1.0 / terms
    steps = stream.integers(-2, 3, total.shape) * np.spacing(np.float32(true)).astype(np.float64)
    reciprocal = np.float32(true).astype(np.float64) + steps
    within_2_ulp = np.abs(reciprocal - true) <= 2 * np.spacing(np.float32(true))
    reciprocals = np.where(within_2_ulp, reciprocal, true).astype(np.float32)
    ways = [total / np.float32(terms) + rounded_eps, total * reciprocals + rounded_eps]
    ways.append(fma32(total, reciprocals, rounded_eps))
    return np.choose(stream.integers(0, 3, total.shape), ways)


def inverse_root(stream: Stream, mean: F32) -> F32:
    """``1 / sqrt(mean)`` by a root and a reciprocal, or in one step; errors drawn, or all at one end."""

    def error() -> F64:
        return stream.uniform(mean.shape) * 2 - 1

    end = stream.choice([-1.0, 1.0], mean.shape)
    extreme = stream.uniform(mean.shape) < 0.5
    root = within(np.sqrt(mean.astype(np.float64)), 2.0**-23, np.where(extreme, -end, error())).astype(np.float64)
    two_steps = within(1 / root, 2.0**-22, np.where(extreme, end, error()))
    one_step = within(1 / np.sqrt(mean.astype(np.float64)), 2.0**-22, np.where(extreme, end, error()))
    correctly_rounded = np.float32(1) / np.sqrt(mean)
    return np.choose(stream.integers(0, 4, mean.shape), [two_steps, two_steps, one_step, correctly_rounded])


def simulate(stream: Stream, heads: Heads) -> F32:
    """One permitted result of ``heads``: every choice is drawn anew for each head or element."""
    x, weight = heads.x.astype(np.float32), heads.weight.astype(np.float32)
    terms = x.shape[1]
    shape = stream.choice(["sequential", "pairwise", "random"], 1)[0]
    order = stream.permutation(terms) if shape == "random" else np.arange(terms)
    depth = int(max(40, terms / 32 + 8))
    with np.errstate(all="ignore"):
        total = sum_of_squares([x[:, i] for i in order], depth, shape, iter(stream.uniform(2 * terms).tolist()))
        inv = inverse_root(stream, mean_square(stream, total, terms, heads.eps))[:, None]
        associations = [(x * inv) * weight, x * (inv * weight), (x * weight) * inv]
        y = stored(heads.fmt, np.choose(stream.integers(0, 3, x.shape), associations))
        return rotate(stream, y, heads)


def pairing(half: int, neox: bool) -> tuple[slice, slice]:
    """Columns of the first and of the second elements of the pairs."""
    if neox:
        return slice(0, half), slice(half, 2 * half)
    return slice(0, 2 * half, 2), slice(1, 2 * half, 2)


def rotate(stream: Stream, y: F32, heads: Heads) -> F32:
    """Rotate with one of the three evaluations for each output, o1 and o2 apart."""
    out = y.copy()
    half = heads.rotation.cos.shape[1]
    c, s = heads.rotation.cos.astype(np.float32), heads.rotation.sin.astype(np.float32)
    first, second = pairing(half, heads.rotation.neox)
    y1, y2 = y[:, first], y[:, second]
    p1, p2, q1, q2 = y1 * c, y2 * s, y2 * c, y1 * s
    firsts, seconds = [p1 - p2, fma32(y1, c, -p2), fma32(-y2, s, p1)], [q1 + q2, fma32(y2, c, q2), fma32(y1, s, q1)]
    out[:, first] = stored(heads.fmt, np.choose(stream.integers(0, 3, p1.shape), firsts))
    out[:, second] = stored(heads.fmt, np.choose(stream.integers(0, 3, p1.shape), seconds))
    return out


# The families of inputs.


def to_format(fmt: FloatFormat, v: F64) -> F64:
    return stored(fmt, v.astype(np.float32)).astype(np.float64)


def a_rotation(stream: Stream, count: int, dim: int) -> Rotation:
    """Angles of all sizes, some of them 0; a drawn rotary dimension and pairing."""
    half = int(stream.choice([dim // 2, int(stream.integers(1, dim // 2 + 1, 1)[0])], 1)[0])
    angles = stream.uniform((count, half)) * stream.choice([0.0, 1e-4, 1.0, 7.0], (count, 1))
    cos, sin = (f(angles).astype(np.float32).astype(np.float64) for f in (np.cos, np.sin))
    return Rotation(cos, sin, bool(stream.integers(0, 2, 1)[0]))


def near_ties(stream: Stream, x_times_inv: F64) -> F64:
    """fp32 weights that bring y onto a bf16 tie or within 40 u of it, on both sides."""
    shape = x_times_inv.shape
    ties = (stream.integers(128, 256, shape) + 0.5) * 2.0**-7
    offsets = (stream.uniform(shape) * 2 - 1) * stream.choice([0.0, 4 * U, 40 * U], shape)
    return to_format(FP32, ties / x_times_inv * (1 + offsets))


def plain(stream: Stream, count: int, dim: int, fmt: FloatFormat = BF16) -> Heads:
    amplitude = 10.0 ** (stream.uniform((count, 1)) * 6 - 3)
    weight = to_format((FP32, fmt)[int(stream.integers(0, 2, 1)[0])], 1 + 0.3 * stream.normal(dim))
    x = to_format(fmt, stream.normal((count, dim)) * amplitude)
    return Heads(x, weight, float(stream.choice([1e-6, 1e-5, 1e-24], 1)[0]), a_rotation(stream, count, dim), fmt)


def half_precision(stream: Stream, count: int, dim: int) -> Heads:
    """fp16, in half of the batches with weights that bring y to its overflow."""
    heads = plain(stream, count, dim, FP16)
    return replace(heads, weight=heads.weight * float(stream.choice([1, 2**15], 1)[0]))


def outliers(stream: Stream, count: int, dim: int) -> Heads:
    x = stream.normal((count, dim)) * np.where(stream.uniform((count, dim)) < 1 / dim, 3e4, 1.0)
    return Heads(to_format(BF16, x), to_format(BF16, stream.normal(dim)), 1e-6, a_rotation(stream, count, dim))


def ties(stream: Stream, count: int, dim: int) -> Heads:
    """The true inv is 1 and all elements sit on or near a tie, so one inv must explain D choices."""
    weight = near_ties(stream, np.ones(dim))
    return Heads(stream.choice([-1.0, 1.0], (count, dim)), weight, 1e-24, a_rotation(stream, count, dim))


def drifting_sums(stream: Stream, count: int, dim: int) -> Heads:
    """One large square, and squares beside half its ulp: a sequential sum errs by almost u at each addition."""
    small = 2.0**-12 * float(stream.choice([1 + 2.0**-7, 1 - 2.0**-8], 1)[0])
    magnitude = np.where(np.arange(dim) == 0, 1.0, small)
    inv = 1 / np.sqrt((magnitude * magnitude).mean())
    x = magnitude * stream.choice([-1.0, 1.0], (count, dim))
    return Heads(x, near_ties(stream, magnitude * inv), 1e-24, a_rotation(stream, count, dim))


def cancelling(stream: Stream, count: int, dim: int) -> Heads:
    """``y1 * c`` and ``y2 * s`` agree in most bits."""
    x = to_format(BF16, stream.normal((count, dim)))
    half = dim // 2
    sin = to_format(FP32, 0.1 + stream.uniform((count, half)))
    neox = bool(stream.integers(0, 2, 1)[0])
    x1, x2 = (x[:, columns] for columns in pairing(half, neox))
    close = x2 * sin / np.where(x1 == 0, 1, x1) * (1 + stream.normal((count, half)) * 2.0**-14)
    return Heads(x, np.ones(dim), 1e-6, Rotation(to_format(FP32, close), sin, neox))


def zeros(stream: Stream, count: int, dim: int) -> Heads:
    signs = stream.choice([-1.0, 1.0], (count, dim))
    x = np.copysign(to_format(BF16, stream.normal((count, dim))) * stream.integers(0, 2, (count, dim)), signs)
    weight = stream.choice([0.0, -0.0, 1.0, -1.0, -0.7071, 2.0**-60, -(2.0**60)], dim)
    return Heads(x, to_format(FP32, weight), 1e-6, a_rotation(stream, count, dim))


def subnormal(stream: Stream, count: int, dim: int) -> Heads:
    """bf16 subnormals, and weights and inv that carry the underflow of the first product into the result."""
    tiny = stream.integers(-128, 129, (count, dim)) * 2.0**-133
    scale = 2.0 ** stream.integers(-11, 13, (count, 1)).astype(np.float64)
    x = np.where(stream.uniform((count, dim)) < 0.7, tiny, scale)
    x[:, 0] = -scale[:, 0]
    weight = (1 + stream.uniform(dim)) * 2.0 ** stream.integers(-12, 12, dim).astype(np.float64)
    return Heads(x, to_format(FP32, weight), 1e-24, a_rotation(stream, count, dim))


def special(stream: Stream, count: int, dim: int) -> Heads:
    """NaN, Inf, both, and rows of zeros where eps rounds to zero."""
    x = to_format(BF16, stream.normal((count, dim)))
    here = stream.uniform((count, dim)) < 1.5 / dim
    infinity = stream.choice([-np.inf, np.inf], (count, dim))
    either = np.where(stream.uniform((count, dim)) < 0.5, infinity, np.nan)
    rows = [np.where(here, np.nan, x), np.where(here, infinity, x), np.where(here, either, x), np.copysign(0.0, x)]
    x = np.choose(stream.integers(0, 4, (count, 1)), rows)
    return Heads(x, to_format(BF16, stream.normal(dim)), 1e-50, a_rotation(stream, count, dim))


Family = Callable[[Stream, int, int], Heads]
FINITE: tuple[Family, ...] = (plain, outliers, ties, drifting_sums, cancelling, zeros, subnormal)


def families(*members: Family) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("family", members, ids=lambda family: family.__name__)


every_dim = pytest.mark.parametrize("dim", DIMS)


def simulations(family: Family, dim: int, fmt: FloatFormat | None = None) -> Iterator[tuple[Heads, F32]]:
    for batch in range(BATCHES):
        stream = Stream(f"envelope/{family.__name__}/{dim}/{batch}")
        heads = family(stream, ELEMENTS // dim, dim)
        heads = heads if fmt is None else replace(heads, fmt=fmt)
        yield heads, simulate(stream, heads)


def full_precision(stream: Stream, count: int, dim: int) -> Heads:
    return plain(stream, count, dim, FP32)


def unrotated(heads: Heads) -> Heads:
    cos = np.ones_like(heads.rotation.cos)
    return replace(heads, rotation=replace(heads.rotation, cos=cos, sin=np.zeros_like(cos)))


def expect_all_accepted(verdict: HeadVerdict | WideVerdict) -> None:
    rejected = [tuple(index) for index in np.argwhere(~verdict.ok).tolist()]
    assert not rejected, f"{len(rejected)} rejected, the first at {rejected[0]}: {verdict.explain(rejected[0])}"


# Completeness.


@every_dim
@families(*FINITE, half_precision, special)
def test_no_legal_result_is_rejected(family: Family, dim: int) -> None:
    for heads, out in simulations(family, dim):
        expect_all_accepted(heads.judge(out))


def test_a_long_head_may_sum_in_a_deeper_tree() -> None:
    for heads, out in simulations(drifting_sums, 2048):
        expect_all_accepted(heads.judge(out))


@every_dim
@families(*FINITE, full_precision)
def test_no_legal_fp32_result_is_rejected(family: Family, dim: int) -> None:
    for heads, out in simulations(family, dim, FP32):
        expect_all_accepted(heads.judge(out))


def test_simulated_errors_come_within_a_few_u_of_the_bound_of_32_u() -> None:
    errors = []
    for heads, _ in simulations(drifting_sums, 64):
        wide = replace(unrotated(heads), fmt=FP32)
        exact = wide.x * wide.weight / np.sqrt((wide.x * wide.x).mean(axis=1, keepdims=True) + wide.eps)
        errors.append(simulate(Stream("envelope/errors"), wide) / exact - 1)
    assert np.min(errors) < -24 * U
    assert np.max(errors) > 24 * U


def test_simulated_ties_fall_to_both_sides() -> None:
    low = high = 0
    for heads, _ in simulations(ties, 64):
        still = unrotated(heads)
        out = simulate(Stream("envelope/sides"), still)
        normed = norm(still.x, still.weight, still.eps)
        low += int(np.count_nonzero((out == normed.low) & ~normed.single))
        high += int(np.count_nonzero((out == normed.high) & ~normed.single))
    assert min(low, high) > 1000


# fp32 storage.


@every_dim
def test_fp32_storage_rejects_errors_a_few_times_the_bound(dim: int) -> None:
    for heads, out in simulations(full_precision, dim):
        rotation, first, second = heads.rotation, *pairing(heads.rotation.cos.shape[1], heads.rotation.neox)
        mean = (heads.x * heads.x).mean(axis=1, keepdims=True) + float(np.float32(heads.eps))
        exact = heads.x * heads.weight / np.sqrt(mean)
        y1, y2, size = exact[:, first].copy(), exact[:, second].copy(), np.abs(exact)
        exact[:, first], exact[:, second] = y1 * rotation.cos - y2 * rotation.sin, y2 * rotation.cos + y1 * rotation.sin
        size[:, first] = np.abs(y1 * rotation.cos) + np.abs(y2 * rotation.sin)
        size[:, second] = np.abs(y2 * rotation.cos) + np.abs(y1 * rotation.sin)
        error = np.where(out < exact, -1, 1) * 128 * U * size
        verdict = judge_fp32(exact + error, heads.x, heads.weight, heads.eps, rotation)
        assert not verdict.ok.any()
        assert judge_fp32(exact, heads.x, heads.weight, heads.eps, rotation).ok.all()
        assert not judge_fp32(exact * np.nan, heads.x, heads.weight, heads.eps, rotation).ok.any()


def test_fp32_storage_explains_what_came_and_what_is_needed() -> None:
    one = np.ones((1, 2))
    verdict = judge_fp32(np.array([[1.0, 1.5]]), one, np.ones(2), 1e-24, Rotation(one[:, :1], 0 * one[:, :1], True))
    assert verdict.ok.tolist() == [[True, False]]
    assert verdict.explain((0, 1)).startswith("got 1.5, need 1.0 within 2.")


# Each head alone.


def assorted_heads(neox: bool) -> tuple[Heads, F32]:
    """Heads of every kind under one weight, about half of them with one wrong element."""
    stream = Stream(f"envelope/assorted/{neox}")
    count, dim = 40, 24
    rotation = a_rotation(stream, 4 * count, 16)
    rotation = replace(rotation, neox=neox)
    near = ties(stream, 2 * count, dim)
    x = np.concatenate([near.x, special(stream, count, dim).x, zeros(stream, count, dim).x])
    heads = Heads(x[stream.permutation(4 * count)], near.weight, near.eps, rotation)
    out = simulate(stream, heads)
    wrong = (np.arange(dim) == stream.integers(0, 2 * dim, (4 * count, 1))) & np.isfinite(out)
    steps = stream.choice([0x00010000, 0x80000000], out.shape).astype(np.uint32)
    return heads, np.where(wrong, (out.view(np.uint32) ^ steps).view(np.float32), out)


@pytest.mark.parametrize("neox", [True, False])
def test_a_head_is_judged_alone_whatever_its_neighbours_and_their_order(neox: bool) -> None:
    heads, out = assorted_heads(neox)
    whole = heads.judge(out)
    assert 0.2 < whole.ok.all(axis=1).mean() < 0.8

    def of(rows: Ints) -> HeadVerdict | WideVerdict:
        rotation = replace(heads.rotation, cos=heads.rotation.cos[rows], sin=heads.rotation.sin[rows])
        return replace(heads, x=heads.x[rows], rotation=rotation).judge(out[rows])

    every = np.arange(len(out))
    for rows in (every[::-1], Stream("envelope/order").permutation(len(out)), *np.split(every, len(out)), every[:0]):
        part = of(rows)
        assert (part.ok == whole.ok[rows]).all()
        assert (part.single == whole.single[rows]).all()
