"""The tile of a call: by its rows on a GPU, everything at once in the interpreter."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest

from dspark import machine
from dspark.ops.kv_write import kernel as kv_write
from dspark.ops.launch import Tile, tile_elements, tile_for, warps_for
from dspark.ops.qk_norm_rope import kernel as qk_norm_rope

MEASURED = (Tile(8, 1, 2, 3), Tile(64, 4, 5, 6), Tile(float("inf"), 7, 8, 9))


@pytest.mark.parametrize(("rows", "elements"), [(1, 1), (8, 1), (9, 4), (64, 4), (65, 7), (1 << 40, 7)])
def test_the_first_tile_that_reaches_the_rows(rows: int, elements: int) -> None:
    with mock.patch.object(machine, "facts", return_value=replace(machine.facts(), interpreter=False)):
        assert tile_for(rows, MEASURED, 99).elements == elements
        assert tile_elements(5, 99) == 5


def test_the_interpreter_takes_everything_in_one_program() -> None:
    with mock.patch.object(machine, "facts", return_value=replace(machine.facts(), interpreter=True)):
        assert tile_for(1, MEASURED, 99)[1:3] == (99, 99)
        assert tile_elements(5, 99) == 99


def test_a_program_that_one_warp_holds_has_one() -> None:
    assert [warps_for(elements) for elements in (1, 256, 257, 1024)] == [1, 1, 4, 4]


@pytest.mark.parametrize("kernel", [kv_write, qk_norm_rope])
def test_measured_tiles_are_in_order_and_without_end(kernel: object) -> None:
    rows = [tile.rows for tile in kernel.GPU_TILES]  # type: ignore[attr-defined]
    assert rows == sorted(set(rows))
    assert rows[-1] == float("inf")
