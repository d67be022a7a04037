"""The oracles of the RoPE table, of ``accept`` and of ``qk_norm_rope``, against slower and plainer definitions.

1. The table's rows, the oracle's and the product's, agree bit for bit, and the oracle's lie within 1 ulp of mpmath.
2. Growth of the product's table leaves what was handed out as it was.
3. ``accept`` agrees with a search over every window of three letters up to W = 4.
4. Packed rows are cut into the right heads, each judged with its own weight, eps, angle and columns.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from fractions import Fraction
from typing import Any

import mpmath
import numpy as np
import numpy.typing as npt
import pytest
import torch

from conformance.fixtures.emulation import BF16, FP16, FP32, FloatFormat, add32, mul32, round_to, sub32, ulp
from conformance.fixtures.envelope import HeadVerdict, WideVerdict
from conformance.fixtures.oracles.accept import accept_row, faulty
from conformance.fixtures.oracles.qk_norm_rope import Packed, verdicts
from conformance.fixtures.oracles.rotary import angles, inverse_frequencies, table_rows
from conformance.fixtures.streams import Stream
from dspark.model import rotary

F64 = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

BASES = (1e4, 1e6, 8e6, 1e7)
DIMS = (32, 64, 96, 128, 192, 256)
POSITIONS = np.concatenate(
    [[0, 1, 40, 2047, 4095, 32767, 131071, 1048575], Stream("rotary/positions").integers(0, 1 << 20, 200)]
)
every_base = pytest.mark.parametrize("base", BASES)

mpmath.mp.dps = 60


def nearest_fp32(value: Fraction) -> float:
    """Nearest even, for values above fp32's subnormal range, or 0."""
    if value == 0:
        return 0.0
    exponent = value.numerator.bit_length() - value.denominator.bit_length()
    exponent -= Fraction(2) ** exponent > value
    quantum = Fraction(2) ** (exponent - 23)
    return float(round(value / quantum) * quantum)


def in_ulps(value: float, exact: mpmath.mpf) -> float:
    """Distance in fp32 ulps of the exact value."""
    return float(abs(mpmath.mpf(value) - exact) / float(ulp(FP32, float(exact))))


# The RoPE table.


@every_base
@pytest.mark.parametrize("dim", DIMS)
def test_inverse_frequencies_are_within_1_ulp(base: float, dim: int) -> None:
    got = inverse_frequencies(dim, base)
    assert got.shape == (dim // 2,)
    for i, value in enumerate(got.tolist()):
        assert in_ulps(value, mpmath.mpf(base) ** (-mpmath.mpf(2 * i) / dim)) <= 1
    assert (got == rotary.RotaryTable(dim, base, 0).inv_freq.numpy()).all()


@every_base
def test_an_angle_is_one_rounding_of_the_rounded_position_times_the_frequency(base: float) -> None:
    frequencies = inverse_frequencies(64, base)
    beyond_fp32 = np.array([2**24 + 1, 2**24 + 3, 2**31 - 1], np.int64)
    positions = np.concatenate([POSITIONS, beyond_fp32])
    got = angles(positions, frequencies)
    for row, position in zip(got.tolist(), positions.tolist(), strict=True):
        rounded = Fraction(nearest_fp32(Fraction(position)))
        assert row == [nearest_fp32(rounded * Fraction(f)) for f in frequencies.tolist()]


@every_base
def test_cosine_and_sine_are_within_1_ulp_of_the_exact_function_of_the_angle(base: float) -> None:
    rows = table_rows(POSITIONS, 64, base)
    assert rows.dtype == np.float32
    angle = angles(POSITIONS, inverse_frequencies(64, base))
    for row, exact in zip(rows.tolist(), angle.tolist(), strict=True):
        assert max(in_ulps(got, mpmath.cos(mpmath.mpf(a))) for got, a in zip(row[:32], exact, strict=True)) <= 1
        assert max(in_ulps(got, mpmath.sin(mpmath.mpf(a))) for got, a in zip(row[32:], exact, strict=True)) <= 1


def expect_rows(rows: torch.Tensor, positions: Ints, dim: int, base: float) -> None:
    """Equal as bits to the oracle's."""
    assert rows.dtype == torch.float32
    assert rows.device.type == "cpu"
    assert (rows.numpy().view(np.uint32) == table_rows(positions, dim, base).view(np.uint32)).all()


@every_base
@pytest.mark.parametrize("dim", [32, 96, 128])
def test_built_rows_equal_the_oracle_bit_for_bit(base: float, dim: int) -> None:
    frequencies = rotary.RotaryTable(dim, base, 0).inv_freq
    for start in (0, 2040, 32760, 131064, 1048560):
        expect_rows(rotary.build_rows(frequencies, start, start + 16), np.arange(start, start + 16), dim, base)
    assert rotary.build_rows(frequencies, 7, 7).shape == (0, dim)


def test_a_build_in_several_steps_has_no_seam() -> None:
    start, stop = 5, 5 + rotary.BUILD_ROWS + 3
    rows = rotary.build_rows(rotary.RotaryTable(4, 1e6, 0).inv_freq, start, stop)
    expect_rows(rows, np.arange(start, stop), 4, 1e6)


def test_growth_binds_a_new_table_and_leaves_the_old_one_as_it_was() -> None:
    table = rotary.RotaryTable(64, 8e6, 100)
    old, bits = table.cos_sin_cache, table.cos_sin_cache.numpy().tobytes()
    table.ensure_rows(1000)
    assert table.cos_sin_cache is not old
    assert table.cos_sin_cache.data_ptr() != old.data_ptr()
    assert old.numpy().tobytes() == bits
    assert (tuple(old.shape), table.rows, tuple(table.cos_sin_cache.shape)) == ((100, 64), 1000, (1000, 64))
    expect_rows(table.cos_sin_cache, np.arange(1000), 64, 8e6)


@pytest.mark.parametrize("rows", [0, 99, 100])
def test_a_table_with_enough_rows_stays_the_same_object(rows: int) -> None:
    table = rotary.RotaryTable(64, 1e4, 100, is_neox_style=False)
    old, version = table.cos_sin_cache, table.cos_sin_cache._version
    table.ensure_rows(rows)
    assert table.cos_sin_cache is old
    assert (old._version, table.rows, table.is_neox_style) == (version, 100, False)


def test_a_table_may_start_empty() -> None:
    table = rotary.RotaryTable(32, 1e7, 0)
    assert table.rows == 0
    table.ensure_rows(3)
    expect_rows(table.cos_sin_cache, np.arange(3), 32, 1e7)


@pytest.mark.parametrize("dim", [0, -2, 63, True])
def test_a_rotary_dim_that_is_not_positive_and_even_is_refused(dim: int) -> None:
    with pytest.raises(ValueError, match=f"rotary_dim: got {dim}, need a positive even int"):
        rotary.RotaryTable(dim, 1e4, 1)


@pytest.mark.parametrize("base", [0.0, -1e4, float("inf"), float("nan")])
def test_a_base_that_is_not_finite_and_positive_is_refused(base: float) -> None:
    with pytest.raises(ValueError, match=rf"got {base}, need a finite number > 0"):
        rotary.RotaryTable(64, base, 1)


@pytest.mark.parametrize("rows", [-1, 2.0, True])
def test_a_row_count_that_is_not_a_count_is_refused(rows: Any) -> None:
    table = rotary.RotaryTable(64, 1e4, 1)
    for call in (lambda: rotary.RotaryTable(64, 1e4, rows), lambda: table.ensure_rows(rows)):
        with pytest.raises(ValueError, match=rf"rows: got {rows}, need an int >= 0"):
            call()
    assert table.rows == 1


# accept.


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_accept_agrees_with_a_search_over_all_windows_of_three_letters(width: int) -> None:
    for window in itertools.product((-1, 0, 7), repeat=2 * width):
        candidates, target = window[:width], window[width:]
        correct = max(k for k in range(width) if candidates[1 : k + 1] == target[:k])
        assert accept_row(candidates, target, None) == (correct, target[correct])
        for verify_len in range(-1, width + 2):
            capped = [k for k in range(width) if k <= correct and (k < verify_len or k == 0)][-1]
            assert accept_row(candidates, target, verify_len) == (capped, target[capped])


def test_a_verify_len_outside_the_window_is_faulty_and_no_other() -> None:
    assert [faulty(4, [2, length]) for length in range(-1, 7)] == [True, True, False, False, False, False, True, True]
    assert not faulty(4, None)
    assert not faulty(4, [])


# qk_norm_rope.


def packed_rows(fmt: FloatFormat, neox: bool, amplitude: float = 1.0) -> Packed:
    """Three rows of 4 Q heads, 2 K heads and 2 V heads of D = 24, R = 16, and 3 columns past them; all heads differ."""
    stream = Stream(f"oracles/packed/{fmt.name}/{neox}/{amplitude}")
    table = table_rows(stream.integers(0, 4096, 3), 16, 1e4).astype(np.float64)
    weights = round_to(FP32, 1 + 0.3 * stream.normal((2, 24)))
    rows = round_to(fmt, stream.normal((3, 8 * 24 + 3)) * amplitude)
    return Packed(rows, 4, 2, 24, weights[0], weights[1], 1e-6, 1e-5, table[:, :8], table[:, 8:], neox, fmt)


def head_result(call: Packed, row: int, head: int) -> F64:
    """One head's permitted result: y from the exact inv, products and sum rounded apart."""
    start = head * call.head_dim
    x = call.rows[row, start : start + call.head_dim]
    weight, eps = (call.q_weight, call.q_eps) if head < call.q_heads else (call.k_weight, call.k_eps)
    y = round_to(call.fmt, round_to(FP32, x * weight / np.sqrt((x * x).mean() + eps)))
    half = call.cos.shape[1]
    first, second = (
        (slice(half), slice(half, 2 * half)) if call.neox else (slice(0, 2 * half, 2), slice(1, 2 * half, 2))
    )
    y1, y2, c, s = y[first], y[second], call.cos[row], call.sin[row]
    out = y.copy()
    out[first], out[second] = sub32(mul32(y1, c), mul32(y2, s)), add32(mul32(y2, c), mul32(y1, s))
    return round_to(call.fmt, out)


def result(call: Packed) -> F64:
    out = call.rows.copy()
    for row, head in itertools.product(range(len(out)), range(call.q_heads + call.k_heads)):
        out[row, head * call.head_dim : (head + 1) * call.head_dim] = head_result(call, row, head)
    return out


every_packing = pytest.mark.parametrize(
    "call",
    [packed_rows(fmt, neox) for fmt in (BF16, FP16, FP32) for neox in (True, False)],
    ids=lambda call: f"{call.fmt.name}-{'neox' if call.neox else 'interleaved'}",
)


@every_packing
def test_heads_are_cut_at_their_columns_and_judged_with_their_own_angle(call: Packed) -> None:
    judged = verdicts(call, result(call))
    assert list(judged) == ["Q", "K"]
    assert {part: verdict.ok.shape for part, verdict in judged.items()} == {"Q": (12, 24), "K": (6, 24)}
    assert all(verdict.ok.all() for verdict in judged.values())
    assert all(isinstance(verdict, WideVerdict if call.fmt is FP32 else HeadVerdict) for verdict in judged.values())


@every_packing
def test_a_wrong_element_shows_at_its_row_and_head_only(call: Packed) -> None:
    right = result(call)
    for row, head in itertools.product(range(3), range(6)):
        wrong = right.copy()
        # The last element of the head is not rotated, so it is judged alone.
        wrong[row, head * 24 + 23] *= 1.25
        judged = verdicts(call, wrong)
        part, index = ("Q", row * 4 + head) if head < 4 else ("K", row * 2 + head - 4)
        assert {name: np.argwhere(~verdict.ok).tolist() for name, verdict in judged.items()} == {
            "Q": [], "K": [], part: [[index, 23]],
        }  # fmt: skip


@every_packing
def test_columns_past_the_k_heads_are_not_judged(call: Packed) -> None:
    out = result(call)
    out[:, 6 * 24 :] = np.nan
    assert all(verdict.ok.all() for verdict in verdicts(call, out).values())


@every_packing
def test_exchanged_heads_rows_or_halves_of_the_table_are_rejected(call: Packed) -> None:
    right = result(call)
    for one, other in ((0, 1), (2, 4), (4, 5)):
        columns = np.arange(right.shape[1])
        columns[one * 24 : one * 24 + 24], columns[other * 24 : other * 24 + 24] = (
            np.arange(start * 24, start * 24 + 24) for start in (other, one)
        )
        judged = verdicts(call, right[:, columns])
        accepted = np.concatenate([judged[name].ok.all(axis=1).reshape(3, -1) for name in ("Q", "K")], axis=1)
        assert accepted.tolist() == [[head not in (one, other) for head in range(6)]] * 3
    for changed in (replace(call, cos=call.sin, sin=call.cos), replace(call, cos=call.cos[::-1], sin=call.sin[::-1])):
        assert not any(verdict.ok.all() for verdict in verdicts(call, result(changed)).values())


@pytest.mark.parametrize("fmt", [BF16, FP16, FP32], ids=lambda fmt: fmt.name)
def test_each_part_has_its_own_weight_and_eps(fmt: FloatFormat) -> None:
    """Rows of amplitude 1e-3, where an eps of 1e-6 or 1e-5 decides."""
    call = packed_rows(fmt, True, 1e-3)
    right = verdicts(call, result(call))
    assert all(verdict.ok.all() for verdict in right.values())
    foreign: list[tuple[str, dict[str, Any]]] = [
        ("Q", {"q_weight": call.k_weight}),
        ("Q", {"q_eps": call.k_eps}),
        ("K", {"k_weight": call.q_weight}),
        ("K", {"k_eps": call.q_eps}),
    ]
    for part, change in foreign:
        judged = verdicts(call, result(replace(call, **change)))
        assert {name: bool(verdict.ok.all()) for name, verdict in judged.items()} == {
            "Q": part != "Q",
            "K": part != "K",
        }
