"""The RoPE table in three steps: inverse frequencies, angles, cosines and sines (CONTRACTS.md section 2, F2-9)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from dspark.model.rope_scaling import RopeParameters
from dspark.model.rotary import RotaryTable, build_rows

from ..fixtures.guard import to_bits
from ..fixtures.ledger import Label, expect_equal, expect_raises
from ..fixtures.oracles import rotary as oracle
from ..fixtures.shapes import DRAFTS, EDGES, GRIDS

LABEL = Label("rotary", "-")
SHAPES = sorted({(shape.rotary_dim, shape.rope_theta) for shape in (*DRAFTS, *EDGES)} | {(128, 1e4), (64, 1e4)})
POSITIONS = [*GRIDS["positions"], 2**20 + 3, 2**24 + 1]


def within_one_ulp(what: str, actual: np.ndarray, exact: np.ndarray) -> None:
    """Every fp32 value is within one fp32 ulp of the exact one (float64, whose own error is 2^-29 of that)."""
    ulp = np.maximum(np.spacing(np.abs(exact).astype(np.float32)).astype(np.float64), 2.0**-149)
    beyond = np.abs(actual.astype(np.float64) - exact) > ulp
    expect_equal(LABEL, what, beyond, np.zeros(exact.shape, np.bool_))


@pytest.mark.parametrize(("rotary_dim", "theta"), SHAPES, ids=lambda value: f"{value:g}")
def test_inverse_frequencies(rotary_dim: int, theta: float) -> None:
    exact = np.float64(theta) ** (-np.arange(0, rotary_dim, 2) / rotary_dim)
    within_one_ulp("inverse frequencies", RopeParameters(theta).inverse_frequencies(rotary_dim).numpy(), exact)


@pytest.mark.parametrize(("rotary_dim", "theta"), SHAPES, ids=lambda value: f"{value:g}")
def test_rows_at_large_positions(rotary_dim: int, theta: float) -> None:
    """The angle is rounded once, in fp32: another rounding moves cosines at 1,048,575 by thousands of ulps."""
    inv_freq = RopeParameters(theta).inverse_frequencies(rotary_dim)
    half = rotary_dim // 2
    for position in POSITIONS:
        row = build_rows(inv_freq, position, position + 1).numpy()[0]
        angle = oracle.angles(np.array([position]), inv_freq.numpy().astype(np.float64))[0]
        within_one_ulp(f"cosines at {position}", row[:half], np.cos(angle))
        within_one_ulp(f"sines at {position}", row[half:], np.sin(angle))


def test_growth_keeps_rows_and_rebinds(lane: object) -> None:
    table = RotaryTable(64, 1e6, 100)
    old = table.cos_sin_cache
    before = to_bits(old).copy()
    table.ensure_rows(70_000)
    expect_equal(LABEL, "rows after growth", table.rows, 70_000)
    expect_equal(LABEL, "a new tensor is bound", table.cos_sin_cache is old, False)
    expect_equal(LABEL, "the old tensor", to_bits(old), before)
    expect_equal(LABEL, "the first rows of the new one", to_bits(table.cos_sin_cache)[:100], before)
    whole = RotaryTable(64, 1e6, 70_000)
    expect_equal(LABEL, "grown = built at once", to_bits(table.cos_sin_cache), to_bits(whole.cos_sin_cache))
    grown = table.cos_sin_cache
    table.ensure_rows(50)
    expect_equal(LABEL, "nothing is built when the rows are there", table.cos_sin_cache is grown, True)
    expect_equal(LABEL, "dtype", table.cos_sin_cache.dtype, torch.float32)


BAD: dict[str, tuple[tuple[str, ...], Callable[[], object]]] = {
    "odd-rotary-dim": (("rotary_dim", "63"), lambda: RotaryTable(63, 1e6, 4)),
    "zero-rotary-dim": (("rotary_dim", "0"), lambda: RotaryTable(0, 1e6, 4)),
    "bool-rotary-dim": (("rotary_dim", "True"), lambda: RotaryTable(True, 1e6, 4)),
    "fractional-rotary-dim": (("rotary_dim", "64.0"), lambda: RotaryTable(64.0, 1e6, 4)),  # type: ignore[arg-type]
    "negative-base": (("theta", "-1.0"), lambda: RotaryTable(64, -1.0, 4)),
    "zero-base": (("theta", "0.0"), lambda: RotaryTable(64, 0.0, 4)),
    "nan-base": (("theta", "nan"), lambda: RotaryTable(64, float("nan"), 4)),
    "infinite-base": (("theta", "inf"), lambda: RotaryTable(64, float("inf"), 4)),
    "negative-rows": (("rows", "-1"), lambda: RotaryTable(64, 1e6, -1)),
    "fractional-rows": (("rows", "1.5"), lambda: RotaryTable(64, 1e6, 1.5)),  # type: ignore[arg-type]
    "bool-rows": (("rows", "True"), lambda: RotaryTable(64, 1e6, True)),
    "negative-growth": (("rows", "-2"), lambda: RotaryTable(64, 1e6, 1).ensure_rows(-2)),
}


@pytest.mark.parametrize("bad", BAD)
def test_error(bad: str) -> None:
    names, call = BAD[bad]
    expect_raises(LABEL, ValueError, names, call)


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
YARN = {"factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": 32768}
SCALINGS = {
    "linear": ({"rope_type": "linear", "factor": 4.0}, 1.0),
    "llama3": ({"rope_type": "llama3", **LLAMA3}, 1.0),
    "yarn": ({"rope_type": "yarn", **YARN}, 0.1 * np.log(4.0) + 1.0),
    "yarn-short-context": (
        {"rope_type": "yarn", **YARN, "original_max_position_embeddings": 512},
        0.1 * np.log(4.0) + 1,
    ),
    "yarn-with-its-own-attention-factor": ({"rope_type": "yarn", **YARN, "attention_factor": 0.75}, 0.75),
}


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize(("rotary_dim", "theta"), [(64, 5e5), (128, 1e6)], ids=lambda value: f"{value:g}")
def test_scaling_changes_frequencies_and_amplitude(name: str, rotary_dim: int, theta: float) -> None:
    settings, amplitude = SCALINGS[name]
    parameters = RopeParameters.from_config({"rope_theta": theta, "rope_scaling": settings})
    plain = np.float64(theta) ** (-np.arange(0, rotary_dim, 2) / rotary_dim)
    numbers = {key: value for key, value in settings.items() if isinstance(value, int | float)}
    exact = np.array(
        [
            oracle.scaled_frequency(str(settings["rope_type"]), float(frequency), pair, rotary_dim, theta, numbers)
            for pair, frequency in enumerate(plain)
        ]
    )
    inv_freq = parameters.inverse_frequencies(rotary_dim)
    within_one_ulp("inverse frequencies", inv_freq.numpy(), exact)
    kept = int(np.count_nonzero(inv_freq.numpy() == plain.astype(np.float32)))
    expect_equal(LABEL, "some pairs are stretched", kept < rotary_dim // 2, True)
    table = RotaryTable(rotary_dim, parameters, 50)
    for position in (0, 1, 49, 131_071):
        row = build_rows(inv_freq, position, position + 1, parameters.amplitude).numpy()[0]
        angle = oracle.angles(np.array([position]), inv_freq.numpy().astype(np.float64))[0]
        within_one_ulp("cosines", row[: rotary_dim // 2], np.cos(angle) * amplitude)
        within_one_ulp("sines", row[rotary_dim // 2 :], np.sin(angle) * amplitude)
        if position < table.rows:
            expect_equal(LABEL, "the table's row", to_bits(table.cos_sin_cache)[position], row.view(np.uint32))
    table.ensure_rows(80)
    tail = build_rows(inv_freq, 79, 80, parameters.amplitude).numpy()[0].view(np.uint32)
    expect_equal(LABEL, "grown rows are scaled too", to_bits(table.cos_sin_cache)[79], tail)


SAME_TABLE: dict[str, dict[str, object]] = {
    "flat": {"rope_theta": 1e6},
    "rope-scaling-none": {"rope_theta": 1e6, "rope_scaling": None},
    "rope-type-default": {"rope_theta": 1e6, "rope_scaling": {"rope_type": "default"}},
    "type-default": {"rope_theta": 1e6, "rope_scaling": {"type": "default"}},
    "nested": {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}},
    "nested-wins-over-a-stale-flat-theta": {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}},
    "two-equal-nested": {"rope_parameters": {"rope_theta": 1e6}, "rope_scaling": {"rope_theta": 1e6}},
}


@pytest.mark.parametrize("spelling", SAME_TABLE)
def test_f2_17_spellings_of_the_plain_table(spelling: str) -> None:
    table = RotaryTable(64, RopeParameters.from_config(SAME_TABLE[spelling]), 8)
    expect_equal(LABEL, "table", to_bits(table.cos_sin_cache), to_bits(RotaryTable(64, 1e6, 8).cos_sin_cache))


BAD_CONFIGS: dict[str, tuple[tuple[str, ...], dict[str, object]]] = {
    "F2-17-unknown-type": (("rope_type", "'dynamic'"), {"rope_theta": 1e6, "rope_scaling": {"rope_type": "dynamic"}}),
    "no-theta": (("rope_theta", "missing"), {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    "two-nested-that-differ": (
        ("rope_parameters", "rope_scaling"),
        {"rope_parameters": {"rope_theta": 1e6}, "rope_scaling": {"rope_theta": 1e4}},
    ),
    "llama3-without-the-trained-context": (
        ("original_max_position",),
        {"rope_theta": 1e6, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
    ),
    "yarn-without-the-trained-context": (
        ("original_max_position",),
        {"rope_theta": 1e6, "rope_scaling": {"rope_type": "yarn", "factor": 8.0}},
    ),
    "factor-zero": (("factor", "0"), {"rope_theta": 1e6, "rope_scaling": {"rope_type": "linear", "factor": 0}}),
    "theta-a-string": (("theta", "'1e6'"), {"rope_theta": "1e6"}),
}


@pytest.mark.parametrize("bad", BAD_CONFIGS)
def test_config_error(bad: str) -> None:
    names, config = BAD_CONFIGS[bad]
    expect_raises(LABEL, ValueError, names, lambda: RopeParameters.from_config(config))
