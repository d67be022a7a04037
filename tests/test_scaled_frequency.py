"""Tests of the oracle's scaled inverse frequencies, by hand: where each scaling begins, ends, and blends."""

from __future__ import annotations

import math

import pytest

from conformance.fixtures.oracles.rotary import scaled_frequency

LINEAR = {"factor": 4.0}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": 4096}


def of_wavelength(kind: str, wavelength: float, given: dict[str, float]) -> float:
    """What becomes of the frequency with this wavelength, as a share of it."""
    plain = 2 * math.pi / wavelength
    return scaled_frequency(kind, plain, 0, 128, 1e4, given) / plain


def test_linear_divides_every_frequency() -> None:
    assert [scaled_frequency("linear", plain, pair, 128, 1e4, LINEAR) for pair, plain in ((0, 1.0), (63, 0.5))] == [
        0.25,
        0.125,
    ]


@pytest.mark.parametrize(
    ("wavelength", "share"),
    [(2.0, 1.0), (2047.0, 1.0), (8193.0, 0.125), (1e6, 0.125)],
)
def test_llama3_keeps_short_waves_and_divides_long_ones(wavelength: float, share: float) -> None:
    assert of_wavelength("llama3", wavelength, LLAMA3) == share


@pytest.mark.parametrize(
    ("wavelength", "blend"), [(2048.5, 0.9996746), (4096.0, 1 / 3), (6144.0, 1 / 9), (8191.0, 4.07e-5)]
)
def test_llama3_blends_in_between(wavelength: float, blend: float) -> None:
    """The blend is (8192 / wavelength - 1) / 3, from 1 at 2048 to 0 at 8192."""
    share = of_wavelength("llama3", wavelength, LLAMA3)
    assert abs(share - (0.125 + 0.875 * blend)) < 1e-6


@pytest.mark.parametrize(("wavelength", "share"), [(2048.0, 1.0), (8192.0, 0.125)])
def test_llama3_meets_both_ends(wavelength: float, share: float) -> None:
    assert abs(of_wavelength("llama3", wavelength, LLAMA3) - share) < 1e-12


@pytest.mark.parametrize(
    ("pair", "share"),
    [(0, 1.0), (20, 1.0), (33, 0.625), (46, 0.25), (63, 0.25), (21, 1 - 0.75 / 26), (45, 1 - 0.75 * 25 / 26)],
)
def test_yarn_ramps_from_pair_20_to_pair_46(pair: int, share: float) -> None:
    """128 dimensions, base 1e4, 4096 positions: 32 turns fall at 20.9 and one turn at 45.03, taken outward."""
    assert abs(scaled_frequency("yarn", 1.0, pair, 128, 1e4, YARN) - share) < 1e-12


def test_yarn_ramp_begins_at_pair_0_where_its_start_lies_below() -> None:
    """128 positions are less than 32 turns, and one turn is at pair 20.9: the ramp is 0 to 21."""
    given = {**YARN, "original_max_position_embeddings": 128}
    for pair, share in ((0, 1.0), (7, 0.75), (14, 0.5), (21, 0.25), (40, 0.25)):
        assert abs(scaled_frequency("yarn", 1.0, pair, 128, 1e4, given) - share) < 1e-12


def test_yarn_ramp_ends_at_the_last_dimension_where_its_end_lies_beyond() -> None:
    """4 dimensions, base 10: 640 turns fall at 0.016 and one turn at 5.6, so the ramp is 0 to 3."""
    given = {**YARN, "beta_fast": 640.0}
    for pair, share in ((0, 1.0), (1, 0.75), (2, 0.5), (3, 0.25)):
        assert abs(scaled_frequency("yarn", 1.0, pair, 4, 10.0, given) - share) < 1e-12
