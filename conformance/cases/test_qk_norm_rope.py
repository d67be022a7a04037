"""qk_norm_rope: norm and rotation of every Q and K head, in its admissible set; everything else keeps its bits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from dspark.ops.launch import Tile
from dspark.ops.qk_norm_rope import kernel

from ..fixtures.calls.qk_norm_rope import OP, Call, random_call, run
from ..fixtures.guard import Arena
from ..fixtures.ledger import Label
from ..fixtures.shapes import DRAFTS, EDGES, GRIDS, HeadShape
from ..fixtures.streams import Stream

PATHS = ("fused", "eager")
MAX_POSITIONS = 1_048_576


@dataclass(frozen=True)
class Case:
    """A named input."""

    id: str
    build: Callable[[Stream], Call]


def shaped(shape: HeadShape, rows: int, id: str = "", **changes: Any) -> Case:
    """Random rows of a real shape at random positions of the whole table; the first and the last position occur."""

    def build(stream: Stream) -> Call:
        positions = stream.integers(0, MAX_POSITIONS, (rows,))
        positions[: min(rows, 2)] = [MAX_POSITIONS - 1, 0][:rows]
        call = random_call(
            stream,
            rows,
            shape.q_heads,
            shape.kv_heads,
            shape.head_dim,
            rotary_dim=shape.rotary_dim,
            neox=shape.neox,
            eps=shape.eps,
            theta=shape.rope_theta,
            table_rows=MAX_POSITIONS,
            positions=positions,
        )
        return replace(call, **changes)

    return Case(id or f"shape/{shape.id}/T{rows}", build)


def small(id: str, *, rows: int = 9, heads: tuple[int, int] = (4, 2), dim: int = 64, **changes: Any) -> Case:
    """Random rows of a small shape, with changes."""
    return Case(id, lambda stream: random_call(stream, rows, *heads, dim, **changes))


def edited(id: str, edit: Callable[[Call, Stream], Call], **options: Any) -> Case:
    """A small random call, edited."""
    make = small(id, **options)
    return Case(id, lambda stream: edit(make.build(stream), stream))


def named(name: str) -> HeadShape:
    return next(shape for shape in (*DRAFTS, *EDGES) if shape.id.split("~")[0] == name)


def at_position(position: int, theta: float, neox: bool) -> Case:
    pairing = "neox" if neox else "interleaved"
    return small(
        f"F2-9-position-{position}/theta-{theta:g}/{pairing}",
        rows=6,
        positions=np.full(6, position),
        table_rows=MAX_POSITIONS,
        theta=theta,
        neox=neox,
    )


def heads_scaled(call: Call, stream: Stream) -> Call:
    """Head h is scaled by 2^h, so that a value from another head is far outside."""
    columns = np.arange(call.rows.shape[1]) // call.head_dim
    return replace(call, rows=call.rows * np.exp2(np.minimum(columns, 24)))


def outliers(call: Call, stream: Stream) -> Call:
    rows = call.rows.copy()
    rows[:, ::37] = 3e4 * stream.choice([-1.0, 1.0], rows[:, ::37].shape)
    return replace(call, rows=rows)


def zero_rows(call: Call, stream: Stream) -> Call:
    """Zeros of both signs: y keeps sign(x) xor sign(w)."""
    rows = call.rows.copy()
    rows[1], rows[2] = 0.0, -0.0
    rows[3, ::2] = -0.0
    rows[3, 1::2] = 0.0
    return replace(call, rows=rows, q_weight=call.q_weight * stream.choice([-1.0, 1.0], call.q_weight.shape))


def one_nan_and_infinities(call: Call, stream: Stream) -> Call:
    """Row 0: a NaN in one head. Row 1: infinities of both signs. Row 2: both in one head. Row 3: Inf among zeros."""
    rows, dim = call.rows.copy(), call.head_dim
    rows[0, 3] = np.nan
    rows[1, dim + 5], rows[1, dim + 40], rows[1, 4 * dim + 1] = np.inf, -np.inf, -np.inf
    rows[2, 2 * dim], rows[2, 2 * dim + 1] = np.nan, np.inf
    rows[3, :dim] = -0.0
    rows[3, 7] = np.inf
    return replace(call, rows=rows)


def subnormal(call: Call, stream: Stream) -> Call:
    """bf16 subnormals: their norm is decided by eps alone, and stays subnormal or tiny."""
    rows = call.rows * 2.0**-128
    rows[0] = 2.0**-133 * stream.choice([-1.0, 1.0], rows[0].shape)
    return replace(call, rows=rows)


def tie_weights(call: Call, stream: Stream) -> Call:
    """x = +-1 and inv = 1: y is the fp32 weight, which lies on a tie between two bf16 values."""
    sign = stream.choice([-1.0, 1.0], call.rows.shape)
    tie = 1 + (2 * np.arange(call.head_dim) + 1) / 256.0
    return replace(call, rows=sign, q_weight=tie, k_weight=-tie)


def cancelling(call: Call, stream: Stream) -> Call:
    """Both elements of a pair are near each other and cos is near sin: y1 c - y2 s cancels to rounding errors."""
    half = call.rotated // 2
    rows = call.rows.copy()
    heads = rows[:, : (call.q_heads + call.k_heads) * call.head_dim].reshape(rows.shape[0], -1, call.head_dim)
    heads[..., half : 2 * half] = heads[..., :half] * (1 + stream.integers(-1, 2, heads[..., :half].shape) / 128)
    angle = np.float32(0.70710678) * (1 + stream.integers(-4, 5, (call.table_rows, 2 * half)) * np.float32(2.0**-23))
    ones = np.ones(call.head_dim)
    return replace(call, rows=rows, table=angle.astype(np.float32), q_weight=ones, k_weight=ones)


def zero_weights(call: Call, stream: Stream) -> Call:
    weight = call.q_weight.copy()
    weight[::3], weight[1::5] = 0.0, -0.0
    return replace(call, q_weight=weight, k_weight=-np.abs(call.k_weight))


def nan_in_v_and_beyond(call: Call, stream: Stream) -> Call:
    rows = call.rows.copy()
    rows[:, (call.q_heads + call.k_heads) * call.head_dim :] = np.nan
    return replace(call, rows=rows)


def positions_are(values: list[int], table: int = 64, dtype: torch.dtype = torch.int64) -> dict[str, Any]:
    return {"rows": len(values), "positions": np.array(values), "table_rows": table, "position_dtype": dtype}


INKLING = named("inkling-draft")
CASES = (
    *(shaped(shape, 2 * shape.width) for shape in (*DRAFTS, *EDGES)),
    *(shaped(named("inkling-draft-tp8"), rows) for rows in GRIDS["rows"]),
    *(shaped(named("smallest"), rows) for rows in GRIDS["rows"]),
    shaped(INKLING, 33),
    shaped(INKLING, 33, "shape/inkling-draft/interleaved", neox=False),
    shaped(
        named("qwen3-8b-block7"),
        33,
        "shape/qwen3-8b-block7/fp32-weights",
        q_weight_dtype=torch.float32,
        k_weight_dtype=torch.float32,
    ),
    *(at_position(p, theta, True) for p in GRIDS["positions"] for theta in (1e4, 1e6)),
    *(at_position(p, 8e6, False) for p in (40, 131_071, 1_048_575)),
    *(small(f"amplitude-{a:g}/eps-{eps:g}", amplitude=a, eps=eps) for a in GRIDS["amplitude"] for eps in (1e-6, 1e-5)),
    small("eps-of-q-and-of-k-differ-where-eps-is-visible", amplitude=1e-2, eps=1e-6, k_eps=1e-5),
    small("eps-of-q-and-of-k-differ-the-other-way", amplitude=1e-2, eps=1e-5, k_eps=1e-6),
    *(
        edited(
            f"F2-1-partial-rotary-every-head-its-own-scale/T{rows}",
            heads_scaled,
            rows=rows,
            heads=(16, 4),
            dim=128,
            rotary_dim=64,
        )
        for rows in (1, 7, 257)
    ),
    *(
        small(f"F2-5-head-dim-{dim}/rotary-{rot}", dim=dim, rotary_dim=rot)
        for dim in (64, 128, 192)
        for rot in sorted({32, 64, dim})
    ),
    *(
        small(
            f"head-dim-{dim}/rotary-{rot}/{'neox' if neox else 'interleaved'}",
            dim=dim,
            rotary_dim=rot,
            neox=neox,
        )
        for dim, rot in ((2, 2), (6, 2), (6, 4), (80, 80), (96, 48), (250, 130), (256, 256))
        for neox in (True, False)
    ),
    edited("F2-16-nan-in-neighbouring-columns/D96-R48", nan_in_v_and_beyond, dim=96, rotary_dim=48),
    edited("outliers-of-3e4-among-ones", outliers),
    edited("F4-15-zero-rows-give-signed-zeros", zero_rows),
    edited("F4-15-zero-rows-give-signed-zeros/interleaved", zero_rows, neox=False),
    edited("F4-15-eps-zero-with-a-zero-row-is-nan", zero_rows, eps=0.0),
    edited("nan-and-infinity-stay-in-their-head", one_nan_and_infinities),
    edited("nan-and-infinity/interleaved-partial", one_nan_and_infinities, neox=False, rotary_dim=32),
    edited("bf16-subnormal-inputs", subnormal),
    edited(
        "every-y-on-a-tie",
        tie_weights,
        eps=1e-24,
        q_weight_dtype=torch.float32,
        k_weight_dtype=torch.float32,
        single_share=0.0,
    ),
    edited("cancellation-of-the-two-products", cancelling, rows=33, table_rows=64, single_share=0.9),
    edited(
        "cancellation-of-the-two-products/interleaved", cancelling, rows=33, table_rows=64, neox=False, single_share=0.9
    ),
    edited("zero-and-negative-weights", zero_weights),
    small("F4-10-fp32-weights", q_weight_dtype=torch.float32, k_weight_dtype=torch.float32),
    small("q-weight-bf16-k-weight-fp32", k_weight_dtype=torch.float32),
    small("q-weight-fp32-k-weight-bf16", q_weight_dtype=torch.float32),
    small("positions-int32-strided", position_dtype=torch.int32, position_gap=2),
    small("positions-int64-strided", position_gap=3),
    small("weights-strided", weight_gap=2),
    small("row-stride-is-the-width", row_padding=0),
    small("row-stride-odd", row_padding=7),
    small("no-q-heads", heads=(0, 3)),
    small("no-k-heads", heads=(3, 0)),
    small("no-heads-at-all-not-even-a-fault", heads=(0, 0), **positions_are([3, 99])),
    small("five-q-heads-one-k-head", heads=(5, 1)),
    small("F1-25-positions-repeat", **positions_are([5, 5, 5, 6])),
    small("F1-9-positions-past-the-table-leave-their-rows", **positions_are([61, 62, 63, 64, 65, 66])),
    small("negative-position-leaves-its-row", **positions_are([3, -1, 5, -64])),
    small("position-beyond-int32-leaves-its-row", **positions_are([3, 1 << 40, 5, -(1 << 40), (1 << 32) + 3])),
    small("int32-position-at-its-limits", **positions_are([3, 2**31 - 1, -(2**31)], dtype=torch.int32)),
    small("every-position-outside", **positions_are([64, 65, -1])),
    small("a-table-of-one-row", **positions_are([0, 1, 0], table=1)),
)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_rows(case: Case, path: str, arena: Arena) -> None:
    run(case.build(Stream(case.id)), Label(OP, path), arena, path)


@pytest.mark.parametrize(
    "tile", [*kernel.GPU_TILES, Tile(float("inf"), 128, 1, 1)], ids=lambda tile: str(tile.elements)
)
def test_rows_do_not_depend_on_the_tile(tile: Tile, arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tile that a GPU uses at some size, and one with a program for each head of two rows."""
    monkeypatch.setattr(kernel, "tile_for", lambda *_: tile)
    positions = np.arange(21) * 3
    positions[[4, 20]] = [64, -1]
    case = small("tile", rows=21, heads=(9, 5), table_rows=64, positions=positions, weight_gap=2)
    run(case.build(Stream(f"tile/{tile.elements}")), Label(OP, "fused"), arena, "fused")
