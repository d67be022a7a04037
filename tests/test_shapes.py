"""Tests of `conformance.fixtures.shapes`: no published shape is lost, and every assumed value shows in the id."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from conformance.fixtures import shapes
from conformance.fixtures.shapes import DRAFTS, EDGES, GRIDS, TARGETS, HeadShape, StateShape

DATA: dict[str, Any] = json.loads(Path(shapes.__file__).with_name("shapes.json").read_text())
ASSUMED = {"eps": 1e-6, "rope_theta": 1e6, "neox": True}
PAIRS = [
    *zip(DATA["drafts"], DRAFTS, strict=True),
    *zip(DATA["edges"], EDGES, strict=True),
]


@pytest.mark.parametrize(("entry", "shape"), PAIRS, ids=[entry["name"] for entry, _ in PAIRS])
def test_published_values_are_kept_and_assumed_ones_are_named(entry: dict[str, Any], shape: HeadShape) -> None:
    name, *marks = shape.id.split("~")
    assert name == entry["name"]
    assert sorted(marks) == sorted(set(ASSUMED) - set(entry))
    for field, assumed in ASSUMED.items():
        assert getattr(shape, field) == entry.get(field, assumed)
    for field in ("layers", "q_heads", "kv_heads", "head_dim"):
        assert getattr(shape, field) == entry[field]
    assert shape.rotary_dim == entry.get("rotary_dim", entry["head_dim"])
    assert shape.width == (entry["gamma"] + 1 if "gamma" in entry else entry["width"])


def test_drafts_state_their_proposals_and_edges_their_width() -> None:
    assert all("gamma" in entry and "width" not in entry for entry in DATA["drafts"])
    assert all("width" in entry and "gamma" not in entry for entry in DATA["edges"])


def test_ids_are_unique() -> None:
    ids = [shape.id for shape in (*DRAFTS, *EDGES)]
    assert len(set(ids)) == len(ids)


def test_known_shapes() -> None:
    """A few by hand, so that the loader and this file cannot be wrong in the same way."""
    by_id = {shape.id: shape for shape in (*DRAFTS, *EDGES)}
    columns = ("layers", "q_heads", "kv_heads", "head_dim", "rotary_dim", "neox", "eps", "rope_theta", "width")
    for id, row in {
        "inkling-draft": (5, 64, 16, 64, 64, True, 1e-5, 8e6, 8),
        "lfm2.5-2.6b": (5, 32, 8, 64, 64, False, 1e-5, 1e7, 10),
    }.items():
        assert tuple(getattr(by_id[id], column) for column in columns) == row
    assert by_id["minicpm5-2b~rope_theta"].width == 8
    assert by_id["inkling-small-draft~eps~rope_theta~neox"].eps == 1e-6
    partial = by_id["partial-rope~eps~rope_theta~neox"]
    assert (partial.head_dim, partial.rotary_dim, partial.width) == (128, 64, 8)
    assert {"smallest", "odd-head-dim", "wide-head", "partial-rope"} == {shape.id.split("~")[0] for shape in EDGES}


def test_targets_keep_their_states() -> None:
    assert [shape.id for shape in TARGETS] == [entry["name"] for entry in DATA["targets"]]
    by_id = {shape.id: shape for shape in TARGETS}
    inkling = StateShape("inkling", 66, (1024, 1024, 2048, 2048, 6144, 6144), 4, False, False, None)
    assert by_id["inkling"] == inkling
    assert by_id["inkling-tp8"] == replace(inkling, id="inkling-tp8", conv_dims=(128, 128, 256, 256, 6144, 6144))
    assert by_id["hybrid-ssm"] == StateShape("hybrid-ssm", 60, (4096, 1024, 1024), 4, True, True, (32, 128, 128))


def test_every_shape_can_be_built() -> None:
    for shape in (*DRAFTS, *EDGES):
        assert shape.q_heads % shape.kv_heads == 0
        assert 0 < shape.rotary_dim <= shape.head_dim
        assert shape.rotary_dim % 2 == 0
        assert shape.width >= 2


def test_grids_are_those_of_the_file() -> None:
    assert GRIDS == DATA["grids"]
    assert {shape.width for shape in (*DRAFTS, *EDGES)} <= set(GRIDS["width"])
