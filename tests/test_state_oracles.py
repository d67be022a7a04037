"""Tests of the oracles of ``commit_indices`` and ``state_scatter`` and of the shapes of states, by hand."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from conformance.fixtures import shapes
from conformance.fixtures.oracles.commit_indices import boundary_entry, request_steps
from conformance.fixtures.oracles.state_scatter import Limits, RowSet, fault_kinds, scattered, written_rows


@pytest.mark.parametrize(
    ("pre", "accepted", "interval", "entry"),
    [
        (255, 1, 256, 0),
        (254, 1, 256, None),
        (254, 2, 256, 1),
        (256, 1, 256, None),
        (250, 6, 256, 5),
        (511, 1, 256, 0),
        (0, 6, 256, None),
        (3, 6, 4, 4),
        (0, 3, 1, 2),
    ],
)
def test_worked_boundaries(pre: int, accepted: int, interval: int, entry: int | None) -> None:
    assert boundary_entry(pre, accepted, interval) == entry


def test_steps_of_a_tree_are_nodes_of_the_request() -> None:
    assert request_steps([40, 43, 45, 999], 3, 254, 40, 256) == (5, 3, ())
    assert request_steps([40, 43, 45, 999], 3, None, 40, 256) == (5, -1, ())


def test_a_request_may_accept_its_whole_row_and_start_from_nothing() -> None:
    assert request_steps([8, 9], 2, 0, 8, 2) == (1, 1, ())
    assert request_steps([8], 1, 0, 8, 4) == (0, -1, ())


def test_skipped_and_faulty_requests() -> None:
    assert request_steps([8, 9], 0, -5, 8, 4) == (-1, -1, ())
    assert request_steps([8, 9], 3, 3, 8, 4) == (-1, -1, ("accept-len-out-of-range",))
    assert request_steps([8, 9], 3, -1, 8, 4) == (-1, -1, ("accept-len-out-of-range", "seq-len-negative"))


def test_skips_come_before_faults() -> None:
    limits = Limits(slots=4, requests=2, width=3)
    rows = RowSet([3, -1, 4, 1, 9], [2, 9, 0, 3, -1], [1, 9, 0, 2, 9])
    assert written_rows(rows, limits) == [(3, 1, 2)]
    assert fault_kinds([rows], limits) == ["step-out-of-range", "slot-out-of-range", "source-out-of-range"]
    assert fault_kinds([RowSet([0, -1], [0, 9])], limits) == []


@pytest.mark.parametrize("others", [0, 9], ids=["inside", "beyond"])
@pytest.mark.parametrize("missing", ["slot", "step", "source"])
def test_a_row_without_a_slot_a_step_or_a_source_is_skipped_whatever_the_others_are(missing: str, others: int) -> None:
    limits = Limits(slots=4, requests=2, width=3)
    row = {name: [-1 if name == missing else others] for name in ("slot", "step", "source")}
    rows = RowSet(row["slot"], row["step"], row["source"])
    assert written_rows(rows, limits) == []
    assert fault_kinds([rows], limits) == []


@pytest.mark.parametrize(
    ("copy", "kind"),
    [((3, 1, 2), None), ((4, 1, 2), "slot-out-of-range"), ((3, 2, 2), "source-out-of-range"),
     ((3, 1, 3), "step-out-of-range")],
)  # fmt: skip
def test_each_limit_is_the_first_index_beyond(copy: tuple[int, int, int], kind: str | None) -> None:
    slot, source, step = copy
    rows, limits = RowSet([slot], [step], [source]), Limits(slots=4, requests=2, width=3)
    assert written_rows(rows, limits) == ([] if kind else [(slot, source, step)])
    assert fault_kinds([RowSet([], []), rows], limits) == ([kind] if kind else [])


def test_the_second_set_comes_after_the_first() -> None:
    src = np.arange(6, dtype=np.uint16).reshape(1, 2, 3)
    dst = np.full((1, 3), 99, np.uint16)
    out = scattered(dst, src, [RowSet([2, 0], [0, 1]), RowSet([0, -1], [2, 0])])
    assert out.tolist() == [[2, 99, 0]]
    assert dst.tolist() == [[99, 99, 99]]


def test_every_layer_is_copied() -> None:
    src = np.arange(12, dtype=np.uint16).reshape(3, 2, 2)
    out = scattered(np.full((3, 2), 99, np.uint16), src, [RowSet([1], [1], [0])])
    assert out.tolist() == [[99, 1], [99, 5], [99, 9]]


def test_state_shapes_are_those_of_the_file() -> None:
    data = json.loads(Path(shapes.__file__).with_name("shapes.json").read_text())["targets"]
    assert [shape.id for shape in shapes.TARGETS] == [entry["name"] for entry in data]
    by_id = {shape.id: shape for shape in shapes.TARGETS}
    inkling, hybrid = by_id["inkling"], by_id["hybrid-ssm"]
    assert (inkling.layers, inkling.conv_dims) == (66, (1024, 1024, 2048, 2048, 6144, 6144))
    assert (inkling.conv_kernel, inkling.dims_first, inkling.dedup, inkling.ssm_shape) == (4, False, False, None)
    assert (hybrid.dims_first, hybrid.dedup, hybrid.ssm_shape) == (True, True, (32, 128, 128))
