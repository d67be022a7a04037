"""write_target_hidden_kv: real draft shapes through both paths, windows, skips and faults, bad input (section 5)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from dspark import dispatch
from dspark.model.kv_inject import write_target_hidden_kv

from ..fixtures.calls import attention
from ..fixtures.calls.drafts import LayerShape
from ..fixtures.calls.kv_inject import OP, Call, base, build_layers, build_pool, run
from ..fixtures.guard import Arena
from ..fixtures.ledger import Label, expect_decision, expect_equal, expect_raises
from ..fixtures.shapes import DRAFTS, GRIDS, HeadShape
from ..fixtures.streams import Stream

PATHS = ("fused", "eager")


@dataclass(frozen=True)
class Case:
    """A named input."""

    id: str
    call: Call


def shaped(shape: HeadShape, hidden_size: int, id: str) -> Case:
    """Two requests of a real draft, the first with one token rejected."""
    stream, rows = Stream(id), 2 * shape.width
    return Case(
        id,
        Call(
            shape=LayerShape(2, shape.kv_heads, shape.head_dim),
            num_layers=shape.layers,
            hidden_size=hidden_size,
            positions=stream.integers(0, 4096, (rows,)),
            locs=stream.permutation(rows + 9)[:rows],
            pool_rows=rows + 9,
            commit_lens=np.array([shape.width - 1, shape.width]),
            width=shape.width,
            rotary_dim=shape.rotary_dim,
            neox=shape.neox,
            theta=shape.rope_theta,
            table_rows=4096,
            key=id,
        ),
    )


def changed(id: str, **changes: Any) -> Case:
    return Case(id, replace(base(), key=id, **changes))


def flat(id: str, locs: list[int], positions: list[int] | None = None, **changes: Any) -> Case:
    """Rows without a window, in a pool of 12 rows and a table of 256."""
    at = positions if positions is not None else list(range(len(locs)))
    return changed(id, locs=np.array(locs), positions=np.array(at), commit_lens=None, width=None, **changes)


def grid(width: int) -> Case:
    """Every commit length of the grid, one request each."""
    named = {"W-1": width - 1, "W": width, "W+1": width + 1}
    lens = np.array([named.get(value, value) for value in GRIDS["commit_lens"]])
    rows = lens.size * width
    stream = Stream(f"kv_inject/grid/{width}")
    return changed(
        f"commit-lens-grid/W{width}",
        commit_lens=lens,
        width=width,
        locs=stream.permutation(rows),
        positions=stream.integers(0, 256, (rows,)),
        pool_rows=rows,
    )


SMALLEST = min(DRAFTS, key=lambda shape: shape.hidden * shape.kv_heads)
CASES = (
    *(shaped(shape, 64, f"shape/{shape.id}/H64") for shape in DRAFTS),
    shaped(SMALLEST, SMALLEST.hidden, f"shape/{SMALLEST.id}/H{SMALLEST.hidden}"),
    *(grid(width) for width in (1, 2, 5, 8, 9)),
    changed("one-layer", num_layers=1),
    changed("interleaved-pairs", neox=False),
    changed("full-rotary", rotary_dim=None),
    changed("F2-14-K-and-V-interleaved-in-one-buffer", interleaved=True),
    flat("no-window", [1, 9, 4]),
    flat("F1-7-negative-locs-are-skipped", [3, -1, 7, -1]),
    flat("F1-8-reserved-row-zero-is-skipped", [5, 6, 7, 8, 0, 0], reserved_rows=1),
    flat("F1-20-padded-tail-is-not-written", [4, 5, -1, -1], [7, 8, 0, 0]),
    flat("F1-25-locs-and-positions-are-independent", [2, 9, 4, 7], [5, 5, 5, 6]),
    flat("F1-9-position-past-the-table-is-a-fault", [2, 9, 4, 7], [254, 255, 256, 257]),
    flat("loc-past-the-pool-is-a-fault", [11, 12, 3]),
    flat("every-row-skipped", [-1, -1]),
    changed(
        "F1-9-window-past-the-last-position",
        positions=np.array([254, 255, 256, 257, 3, 4, 5, 6]),
        commit_lens=np.array([2, 4]),
    ),
    changed("nothing-committed", commit_lens=np.array([0, -1])),
)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_rows(case: Case, path: str, arena: Arena) -> None:
    with dispatch.observed() as outcomes:
        run(case.call, Label(OP, path), arena, path)
    own = [outcome for outcome in outcomes if outcome.decision.op == OP]
    expect_decision(Label(OP, path), own, path, [])


def test_f5_1_no_layers_nothing_happens_and_nothing_is_decided(arena: Arena) -> None:
    hidden = torch.ones(2, 8, dtype=torch.bfloat16, device=arena.device)
    index = torch.zeros(2, dtype=torch.int64, device=arena.device)
    with dispatch.observed() as outcomes:
        write_target_hidden_kv([], object(), hidden, index, index)
    expect_equal(Label(OP, "-"), "decisions", outcomes, [])


@pytest.mark.parametrize("path", PATHS)
def test_window_of_two_dimensions_is_the_flat_one(path: str, arena: Arena) -> None:
    call, label = base(), Label(OP, path)
    pools = []
    for dims in (1, 2):
        here = Arena(arena.device)
        layers, pool = build_layers(call, arena.device), build_pool(call, here)
        hidden, positions, locs, lens = tensors(call, here)
        window = locs.reshape(2, 4) if dims == 2 else locs
        with dispatch.forced(path):
            write_target_hidden_kv(layers, pool, hidden, positions, window, lens, call.width if dims == 1 else None)
        written = [*pool.keys, *pool.values, *(part for entry in pool.handed for part in entry[1:4])]
        pools.append([part.float().cpu().numpy().tobytes() for part in written])
    expect_equal(label, "everything written or handed over", pools[1], pools[0])


def tensors(call: Call, arena: Arena) -> tuple[torch.Tensor, ...]:
    device = arena.device
    lens = torch.zeros(2, dtype=torch.int64) if call.commit_lens is None else torch.from_numpy(call.commit_lens)
    hidden = torch.from_numpy(call.hidden).to(torch.bfloat16)
    parts = (hidden, torch.from_numpy(call.positions), torch.from_numpy(call.locs), lens)
    return tuple(part.to(device) for part in parts)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "positions", [[0, 1, 255], [3, 256, 5], [3, -1, 5]], ids=["inside", "past-the-table", "negative"]
)
def test_attention_projects_norms_and_rotates(positions: list[int], path: str, arena: Arena) -> None:
    call = replace(attention.base(), positions=np.array(positions))
    attention.run(call, Label(attention.OP, path), arena, path)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("neox", [True, False], ids=["neox", "interleaved"])
def test_f2_7_attention_and_kv_write_pair_alike(neox: bool, path: str, arena: Arena) -> None:
    """Both are judged with the pairing of the draft's own rotary."""
    attention.run(replace(attention.base(), neox=neox), Label(attention.OP, path), arena, path)
    run(replace(base(), neox=neox, key=f"pairing/{neox}"), Label(OP, path), Arena(arena.device), path)


class NoSetter:
    """A pool without set_kv_buffer."""


Change = Callable[[dict[str, Any]], dict[str, Any]]


def without_lens(a: dict[str, Any]) -> dict[str, Any]:
    return {"locs": a["locs"].reshape(2, 4), "commit_lens": None, "locs_row_width": None}


BAD_CALLS: dict[str, tuple[tuple[str, ...], Change]] = {
    "more-hidden-rows-than-positions": (("positions", "(7,)", "(8,)"), lambda a: {"positions": a["positions"][:7]}),
    "fewer-hidden-rows-than-positions": (("positions", "(8,)", "(7,)"), lambda a: {"hidden": a["hidden"][:7]}),
    "fewer-locs-than-rows": (("locs", "(7,)", "(8,)"), lambda a: {"locs": a["locs"][:7]}),
    "hidden-of-three-dimensions": (("hidden", "2 dimensions"), lambda a: {"hidden": a["hidden"][None]}),
    "positions-of-two-dimensions": (("positions", "1 dimension"), lambda a: {"positions": a["positions"][None]}),
    "locs-floating": (("locs", "float32"), lambda a: {"locs": a["locs"].float()}),
    "positions-bool": (("positions", "bool"), lambda a: {"positions": a["positions"].bool()}),
    "window-without-commit-lens": (
        ("locs: got the window (2, 4)", "commit_lens"),
        without_lens,
    ),
    "width-that-contradicts-the-window": (
        ("locs_row_width", "3", "4"),
        lambda a: {"locs": a["locs"].reshape(2, 4), "locs_row_width": 3},
    ),
    "commit-lens-without-width": (("locs_row_width", "both"), lambda a: {"locs_row_width": None}),
    "width-without-commit-lens": (("commit_lens", "both"), lambda a: {"commit_lens": None}),
    "window-of-another-size": (("commit_lens", "B * W = 8"), lambda a: {"locs_row_width": 3}),
    "locs-a-list": (("locs", "list"), lambda a: {"locs": [1, 2]}),
    "pool-without-a-setter": (("pool", "NoSetter", "set_kv_buffer"), lambda a: {"pool": NoSetter()}),
    "positions-on-another-device": (("positions", "device meta"), lambda a: {"positions": a["positions"].to("meta")}),
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("bad", BAD_CALLS)
def test_error(bad: str, path: str, arena: Arena) -> None:
    names, change = BAD_CALLS[bad]
    call = base()
    hidden, positions, locs, lens = tensors(call, arena)
    layers, pool = build_layers(call, arena.device), build_pool(replace(call, commit_lens=np.array([0, 0])), arena)
    good = {
        "layers": layers,
        "pool": pool,
        "hidden": hidden,
        "positions": positions,
        "locs": locs,
        "commit_lens": lens,
        "locs_row_width": 4,
    }
    with dispatch.forced(path):
        expect_raises(Label(OP, "error"), ValueError, names, lambda: write_target_hidden_kv(**{**good, **change(good)}))
    arena.verify(Label(OP, "error"))
