"""The RoPE table in three steps: inverse frequencies, angles, cosines and sines (CONTRACTS.md section 2, F2-9)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from dspark.model.rotary import RotaryTable, build_rows, inverse_frequencies

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
    within_one_ulp("inverse frequencies", inverse_frequencies(rotary_dim, theta).numpy(), exact)


@pytest.mark.parametrize(("rotary_dim", "theta"), SHAPES, ids=lambda value: f"{value:g}")
def test_rows_at_large_positions(rotary_dim: int, theta: float) -> None:
    """The angle is rounded once, in fp32: another rounding moves cosines at 1,048,575 by thousands of ulps."""
    inv_freq = inverse_frequencies(rotary_dim, theta)
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
    "negative-base": (("base", "-1.0"), lambda: RotaryTable(64, -1.0, 4)),
    "zero-base": (("base", "0.0"), lambda: RotaryTable(64, 0.0, 4)),
    "nan-base": (("base", "nan"), lambda: RotaryTable(64, float("nan"), 4)),
    "infinite-base": (("base", "inf"), lambda: RotaryTable(64, float("inf"), 4)),
    "negative-rows": (("rows", "-1"), lambda: RotaryTable(64, 1e6, -1)),
    "fractional-rows": (("rows", "1.5"), lambda: RotaryTable(64, 1e6, 1.5)),  # type: ignore[arg-type]
    "bool-rows": (("rows", "True"), lambda: RotaryTable(64, 1e6, True)),
    "negative-growth": (("rows", "-2"), lambda: RotaryTable(64, 1e6, 1).ensure_rows(-2)),
}


@pytest.mark.parametrize("bad", BAD)
def test_error(bad: str) -> None:
    names, call = BAD[bad]
    expect_raises(LABEL, ValueError, names, call)
