"""The draft's K and V pool: storage formats, scales, skips, and what it refuses (F1-7, section 5)."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dspark.runtime.kv_pool import STORAGE_DTYPES, KVPool, StaleRowsError

from ..fixtures.guard import Arena, to_bits
from ..fixtures.ledger import Label, expect_equal, expect_raises
from ..fixtures.streams import Stream

LABEL = Label("kv_pool", "-")
LAYER = SimpleNamespace(layer_id=1)


def rows(arena: Arena, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    values = Stream("kv_pool").normal((2, count, 2, 8))
    k, v = (torch.from_numpy(part).to(torch.bfloat16).to(arena.device) for part in values)
    return k, v


@pytest.mark.parametrize("dtype", STORAGE_DTYPES, ids=str)
def test_rows_are_stored_in_the_pools_format(dtype: torch.dtype, arena: Arena) -> None:
    pool = KVPool(6, 2, 2, 8, dtype=dtype, device=arena.device)
    k, v = rows(arena, 3)
    before = to_bits(k).copy()
    pool.set_kv_buffer(LAYER, torch.tensor([4, 0, 2], device=arena.device), k, v)
    key, value = pool.get_kv_buffer(1)
    for stored, given in ((key, k), (value, v)):
        expect_equal(LABEL, "stored rows", stored[[4, 0, 2]].float().tolist(), given.to(dtype).float().tolist())
    expect_equal(LABEL, "other layers", bool(pool.get_key_buffer(0).float().any()), False)
    expect_equal(LABEL, "inputs", to_bits(k), before)


def test_fp8_divides_by_the_scale_and_saturates(arena: Arena) -> None:
    pool = KVPool(4, 2, 2, 8, dtype=torch.float8_e4m3fn, device=arena.device)
    k = torch.full((1, 2, 8), 1000.0, dtype=torch.bfloat16, device=arena.device)
    pool.set_kv_buffer(LAYER, torch.tensor([1], device=arena.device), k, -k, 4.0, 1.0)
    key, value = pool.get_kv_buffer(1)
    expect_equal(LABEL, "1000 / 4 to the nearest of e4m3", float(key[1, 0, 0].float()), 256.0)
    expect_equal(LABEL, "-1000 saturates", float(value[1, 0, 0].float()), -448.0)


def test_f1_7_negative_and_reserved_locs_are_skipped(arena: Arena) -> None:
    pool = KVPool(5, 2, 2, 8, reserved_rows=1, device=arena.device)
    k, v = rows(arena, 4)
    pool.set_kv_buffer(LAYER, torch.tensor([3, -1, 0, 4], device=arena.device), k, v)
    touched = pool.get_key_buffer(1).float().abs().sum((1, 2)).cpu().numpy() > 0
    expect_equal(LABEL, "rows", touched, np.array([False, False, False, True, True]))
    expect_equal(LABEL, "valid rows", to_bits(pool.valid_rows), touched)


def test_f1_5_a_row_that_was_not_written_since_it_was_freed_is_refused(arena: Arena) -> None:
    pool = KVPool(6, 2, 2, 8, device=arena.device)
    k, v = rows(arena, 3)
    written = torch.tensor([0, 2, 5], device=arena.device)
    pool.set_kv_buffer(LAYER, written, k, v)
    pool.require_valid(written)
    pool.free(torch.tensor([0, -1], device=arena.device))
    expect_equal(LABEL, "valid rows", pool.valid_rows.tolist(), [False, False, True, False, False, True])
    asked = torch.tensor([5, 0, 2, 1], device=arena.device)
    error = expect_raises(LABEL, StaleRowsError, ["without draft K and V", "[0, 1]"], lambda: pool.require_valid(asked))
    expect_equal(LABEL, "rows of the error", error.rows, [0, 1])


def test_k_and_v_are_interleaved_only_when_asked(arena: Arena) -> None:
    for given, row in (({}, 16), ({"interleaved": True}, 32)):
        key, value = KVPool(3, 1, 2, 8, device=arena.device, **given).get_kv_buffer(0)  # type: ignore[arg-type]
        expect_equal(LABEL, "elements from row to row", [key.stride(0), value.stride(0)], [row, row])


BAD: dict[str, tuple[tuple[str, ...], Callable[[], object]]] = {
    "no-rows": (("rows", "0"), lambda: KVPool(0, 1, 1, 8)),
    "no-layers": (("layers", "0"), lambda: KVPool(1, 0, 1, 8)),
    "negative-reserved-rows": (("reserved_rows", "-1"), lambda: KVPool(1, 1, 1, 8, reserved_rows=-1)),
    "unknown-storage": (("dtype", "int8"), lambda: KVPool(1, 1, 1, 8, dtype=torch.int8)),
    "scale-without-fp8": (
        ("k_scale", "0.5", "unscaled"),
        lambda: KVPool(1, 2, 2, 8).set_kv_buffer(
            LAYER, torch.tensor([0]), torch.ones(1, 2, 8), torch.ones(1, 2, 8), 0.5
        ),
    ),
}


@pytest.mark.parametrize("bad", BAD)
def test_error(bad: str) -> None:
    names, call = BAD[bad]
    expect_raises(LABEL, ValueError, names, call)
