"""kv_write: K in its admissible set, V as raw bits, and which rows are written (CONTRACTS.md sections 2, 4, 9)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from dspark import faults
from dspark.ops import KVPoolTable
from dspark.ops.kv_write import kernel
from dspark.ops.launch import Tile

from ..fixtures.calls.kv_write import OP, Call, random_call, run
from ..fixtures.guard import Arena
from ..fixtures.implementations.ops import fused_kv_norm_rope_write
from ..fixtures.ledger import Label, expect_equal, expect_fault, expect_raises
from ..fixtures.shapes import DRAFTS, EDGES, GRIDS, HeadShape
from ..fixtures.streams import Stream

PATHS = ("fused", "eager")
MAX_POSITIONS = 1_048_576


@dataclass(frozen=True)
class Case:
    """A named input."""

    id: str
    build: Callable[[Stream], Call]


def shaped(shape: HeadShape, rows: int, **changes: Any) -> Case:
    """Random rows of a real shape, all its layers, at random positions of the whole table."""

    def build(stream: Stream) -> Call:
        positions = stream.integers(0, MAX_POSITIONS, (rows,))
        positions[: min(rows, 2)] = [MAX_POSITIONS - 1, 0][:rows]
        call = random_call(
            stream,
            rows,
            shape.layers,
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

    return Case(f"shape/{shape.id}/T{rows}{'/layered' if changes.get('layered') else ''}", build)


def small(id: str, *, rows: int = 8, layers: int = 2, heads: int = 2, dim: int = 64, **changes: Any) -> Case:
    """Random rows of a small shape, with changes."""
    return Case(id, lambda stream: random_call(stream, rows, layers, heads, dim, **changes))


def edited(id: str, edit: Callable[[Call, Stream], Call], **options: Any) -> Case:
    make = small(id, **options)
    return Case(id, lambda stream: edit(make.build(stream), stream))


def window(id: str, lens: list[int], width: int, **changes: Any) -> Case:
    """A window of ``len(lens)`` requests of ``width``."""
    return small(id, rows=len(lens) * width, commit_lens=np.array(lens), width=width, **changes)


def rows_at(id: str, locs: list[int], positions: list[int] | None = None, **changes: Any) -> Case:
    """Given locs (and positions) in a pool of 10 rows and a table of 64."""
    at = positions if positions is not None else list(range(len(locs)))
    options = {"pool_rows": 10, "table_rows": 64, **changes}
    return small(id, rows=len(locs), locs=np.array(locs), positions=np.array(at), **options)


def nan_in_skipped_rows(call: Call, stream: Stream) -> Call:
    """Rows that are skipped hold NaN, and positions far outside: nothing of them is read."""
    kv, positions = call.kv.copy(), call.positions.copy()
    skipped = sorted(set(range(len(call.locs))) - set(call.window.written()))
    kv[skipped] = np.nan
    positions[skipped] = stream.choice([1 << 62, -(1 << 62), 1 << 40], (len(skipped),))
    return replace(call, kv=kv, positions=positions)


def special_values(call: Call, stream: Stream) -> Call:
    """NaN and infinities in K heads and in V, zeros of both signs, subnormals."""
    kv = call.kv.copy()
    kv[0, 0, 0, 0, 3] = np.nan
    kv[1, 0, 0, 1, 5], kv[1, 1, 0, 0, 9] = np.inf, -np.inf
    kv[2, 0, 0] = -0.0
    kv[3, :, 0] *= 2.0**-128
    kv[4, :, 1, :, ::2], kv[4, :, 1, :, 1::2] = np.nan, -np.inf
    kv[5, :, 1] *= 2.0**-130
    return replace(call, kv=kv)


def layers_apart(call: Call, stream: Stream) -> Call:
    """Layer l is scaled by 2^(4 l) and its weights by 2^-l: another layer's row or weight is far outside."""
    layer = np.arange(call.kv.shape[1])
    return replace(
        call,
        kv=call.kv * np.exp2(4 * layer)[None, :, None, None, None],
        weights=call.weights * np.exp2(-layer)[:, None],
    )


def commit_grid(width: int) -> Case:
    """Every commit length of the grid, one request each."""
    named = {"W-1": width - 1, "W": width, "W+1": width + 1}
    lens = [named.get(value, value) for value in GRIDS["commit_lens"]]
    return window(f"commit-lens-grid/W{width}", lens, width)


CASES = (
    *(shaped(shape, 2 * shape.width) for shape in (*DRAFTS, *EDGES)),
    *(shaped(shape, shape.width, layered=True) for shape in (*DRAFTS[:2], *EDGES)),
    *(shaped(shape, rows) for shape in DRAFTS[1:2] for rows in GRIDS["rows"]),
    *(commit_grid(width) for width in GRIDS["width"]),
    *(
        edited(
            f"commit-lens/{dtype}-strided",
            nan_in_skipped_rows,
            rows=15,
            commit_lens=np.array([2, 0, 5]),
            width=5,
            index_dtype=getattr(torch, dtype),
            index_gap=2,
        )
        for dtype in ("int32", "int64")
    ),
    window("commit-lens-extreme-values", [-(1 << 62), 1 << 62, 2], 4),
    small("no-layers", layers=0),
    small("no-heads", heads=0),
    small("no-rows", rows=0),
    rows_at("F1-7-negative-locs-are-skipped", [3, -1, 7, -1]),
    rows_at("F1-7-very-negative-locs-are-skipped", [3, -(1 << 40), 7, -10]),
    edited(
        "F1-8-skipped-rows-are-not-read",
        nan_in_skipped_rows,
        rows=6,
        locs=np.array([5, 6, 7, 8, 0, 0]),
        pool_rows=10,
        reserved_rows=1,
    ),
    rows_at("F1-8-row-zero-is-ordinary-when-not-reserved", [5, 6, 7, 0]),
    rows_at("reserved-rows-are-skipped", [0, 3, 2, 9, 1, 4], reserved_rows=3),
    rows_at("every-row-reserved", [0, 1, 2], reserved_rows=10),
    edited(
        "F1-9-window-past-the-last-position",
        nan_in_skipped_rows,
        rows=6,
        locs=np.array([1, 2, 3, 4, 5, 6]),
        positions=np.array([61, 62, 63, 64, 65, 66]),
        commit_lens=np.array([3]),
        width=6,
        pool_rows=10,
        table_rows=64,
    ),
    rows_at("F1-9-committed-row-past-the-table-is-a-fault", [1, 2, 3, 4], [62, 63, 64, 65]),
    rows_at("negative-position-is-a-fault", [1, 2, 3], [5, -1, 7]),
    rows_at("position-beyond-int32-is-a-fault", [1, 2, 3], [5, (1 << 32) + 5, 7]),
    rows_at("loc-at-the-end-of-the-pool-is-a-fault", [9, 10, 3]),
    rows_at("loc-beyond-int32-is-a-fault", [9, (1 << 32) + 2, 3]),
    rows_at("loc-and-position-out-of-range", [9, 11, 3, 4], [1, 99, 2, -5]),
    rows_at("skip-comes-before-fault", [-1, 2, 3], [99, 1, 2]),
    rows_at("every-row-is-a-fault", [10, 11], [1, 2]),
    rows_at("pool-without-rows", [0, -1, 1], pool_rows=0),
    rows_at("table-without-rows", [0, -1, 1], table_rows=0),
    rows_at("F1-20-padded-tail-is-not-written", [4, 5, -1, -1], [7, 8, 0, 0]),
    rows_at("F1-25-locs-and-positions-are-independent", [2, 9, 4, 7], [5, 5, 5, 6]),
    small("F2-14-K-and-V-interleaved-in-one-buffer", interleaved=True),
    small("F2-14-interleaved-by-pointer", interleaved=True, by_pointer=True),
    edited("every-layer-its-own-rows-and-weights", layers_apart, layers=4),
    edited("every-layer-its-own-rows-and-weights/layered", layers_apart, layers=4, layered=True),
    edited("nan-infinity-zero-and-subnormal", special_values, rows=8),
    edited("nan-infinity-zero-and-subnormal/interleaved-pairs", special_values, rows=8, neox=False),
    *(small(f"amplitude-{a:g}/eps-{eps:g}", amplitude=a, eps=eps) for a in (1e-2, 1e3) for eps in (1e-6, 1e-5)),
    *(
        small(f"head-dim-{dim}/rotary-{rot}/{'neox' if neox else 'interleaved'}", dim=dim, rotary_dim=rot, neox=neox)
        for dim, rot in ((6, 4), (80, 80), (96, 48), (192, 64), (250, 130), (256, 256))
        for neox in (True, False)
    ),
    small("fp32-weights", weight_dtype=torch.float32),
    small("weights-strided", weight_gap=2),
    small("index-tensors-int32-strided", index_dtype=torch.int32, index_gap=3),
    small("five-heads", heads=5),
    small("row-stride-is-the-width", row_padding=0),
    small("pools-that-16-bytes-divide", row_padding=8, pool_row_gap=8),
    small("pools-that-16-bytes-divide/interleaved-K-and-V", pool_row_gap=8, interleaved=True),
    small("pools-that-4-bytes-divide", row_padding=8, pool_row_gap=2),
)
BY_POINTER = (
    small("by-pointer", by_pointer=True),
    rows_at("by-pointer/loc-at-the-end-of-the-pool-is-a-fault", [9, 10, 3], by_pointer=True),
    small("by-pointer/pools-that-16-bytes-divide", by_pointer=True, row_padding=8, pool_row_gap=8),
    small("by-pointer/no-upper-bound", by_pointer=True, bounded=False),
)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_rows(case: Case, path: str, arena: Arena) -> None:
    call = case.build(Stream(case.id))
    run(call, Label(OP, path), arena, "fused" if call.by_pointer else path)


@pytest.mark.parametrize(
    "tile", [*kernel.GPU_TILES, Tile(float("inf"), 128, 1, 1)], ids=lambda tile: str(tile.elements)
)
def test_rows_do_not_depend_on_the_tile(tile: Tile, arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tile that a GPU uses at some size, and one with a program for each head of two rows."""
    monkeypatch.setattr(kernel, "tile_for", lambda *_: tile)
    case = small("tile", rows=21, heads=5)
    run(case.build(Stream(f"tile/{tile.elements}")), Label(OP, "fused"), arena, "fused")


@pytest.mark.parametrize("case", BY_POINTER, ids=lambda case: case.id)
def test_pools_by_pointer(case: Case, arena: Arena) -> None:
    run(case.build(Stream(case.id)), Label(OP, "fused"), arena, "fused")


@pytest.mark.parametrize(("offset", "aligned"), [(0, 16), (8, 16), (4, 8), (2, 4), (1, 2)])
@pytest.mark.parametrize("what", ["K address", "V address", "K row stride", "V row stride"])
def test_what_is_declared_of_pools_is_true(what: str, offset: int, aligned: int, arena: Arena) -> None:
    """An interpreter does not look at alignment; a GPU faults on it, and is slow without it."""
    storage = torch.zeros(2, 2, 4096, dtype=torch.bfloat16, device=arena.device)
    parts = []
    for index, part in enumerate("KV"):
        start, stride = (offset * (what == f"{part} {name}") for name in ("address", "row stride"))
        parts.append([storage[index, 0].as_strided((5, 2, 8), (16, 8, 1), storage[index, 0].storage_offset())])
        parts[-1].append(storage[index, 1, start:].as_strided((5, 2, 8), (16 + stride, 8, 1)))
    table = KVPoolTable(parts[0], parts[1])
    label = Label(OP, "-")
    expect_equal(label, "declared alignment", table.aligned_bytes(), aligned)
    words = [
        word * (1 if column < 2 else 2)
        for row in table.pointer_table(arena.device).tolist()
        for column, word in enumerate(row)
    ]
    expect_equal(label, "what is not aligned", [word for word in words if word % aligned], [])


def test_the_row_stride_of_one_row_declares_nothing(arena: Arena) -> None:
    one = torch.zeros(64, dtype=torch.bfloat16, device=arena.device).as_strided((1, 2, 8), (17, 8, 1))
    expect_equal(Label(OP, "-"), "declared alignment", KVPoolTable([one], [one.clone()]).aligned_bytes(), 16)


@pytest.mark.parametrize("path", PATHS)
def test_f1_5_rows_that_are_written_are_marked_valid_and_no_others(path: str, arena: Arena) -> None:
    """A skipped row marks nothing, not even the byte before the first row."""
    keys, values = ([torch.zeros(6, 1, 4, dtype=torch.bfloat16, device=arena.device)] for _ in range(2))
    flags = torch.zeros(8, dtype=torch.bool, device=arena.device)
    fused_kv_norm_rope_write(
        torch.ones(4, 8, dtype=torch.bfloat16, device=arena.device),
        KVPoolTable(keys, values, flags[1:7]),
        torch.ones(1, 4, device=arena.device),
        torch.ones(2, 4, device=arena.device),
        torch.zeros(4, dtype=torch.int64, device=arena.device),
        torch.tensor([-1, 3, 0, 5], device=arena.device),
        1,
        4,
        4,
        1e-6,
        torch.tensor([4], device=arena.device),
        4,
        reserved_rows=1,
        path=path,
    )
    marked = [False, False, False, False, True, False, True, False]
    expect_equal(Label(OP, path), "flags, from the byte before the first row", flags.tolist(), marked)


@pytest.mark.parametrize("path", PATHS)
def test_both_layouts_give_the_same_bytes(path: str, arena: Arena) -> None:
    call = random_call(Stream("layouts"), 12, 3, 2, 64)
    packed = run(call, Label(OP, path), arena, path)
    layered = run(replace(call, layered=True), Label(OP, path), Arena(arena.device), path)
    for layer in range(3):
        for part in range(2):
            expect_equal(Label(OP, path), "pool", layered[layer][part], packed[layer][part])


@pytest.mark.parametrize("path", PATHS)
def test_permuting_rows_changes_nothing(path: str, arena: Arena) -> None:
    call, order = random_call(Stream("permuted"), 12, 2, 2, 64), Stream("permuted/order").permutation(12)
    straight = run(call, Label(OP, path), arena, path)
    mixed = replace(call, kv=call.kv[order], positions=call.positions[order], locs=call.locs[order])
    permuted = run(mixed, Label(OP, path), Arena(arena.device), path)
    for layer in range(2):
        expect_equal(Label(OP, path), "K pool", permuted[layer][0], straight[layer][0])
        expect_equal(Label(OP, path), "V pool", permuted[layer][1], straight[layer][1])


@pytest.mark.parametrize("path", PATHS)
def test_debug_mode_reports_duplicate_locs(path: str, arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "_debug", True)
    arguments = good(arena.device)
    arguments["locs"] = torch.tensor([1, 2, 1], device=arena.device)
    label = Label(OP, path)
    error = expect_raises(
        label, faults.IndexFaultError, ["duplicate-loc"], lambda: fused_kv_norm_rope_write(**arguments, path=path)
    )
    expect_fault(label, error, [(OP, "duplicate-loc")])
    arguments["locs"] = torch.tensor([-1, 2, -1], device=arena.device)
    fused_kv_norm_rope_write(**arguments, path=path)
    expect_equal(label, "skipped rows are no duplicates", faults.peek(), ())


def good(device: torch.device) -> dict[str, Any]:
    """Arguments of a good call: 3 rows, 2 layers, 1 head of 8 elements, a pool of 5 rows."""
    pools = [torch.zeros(5, 1, 8, dtype=torch.bfloat16, device=device) for _ in range(4)]
    return {
        "kv": torch.ones(3, 32, dtype=torch.bfloat16, device=device),
        "meta": KVPoolTable(pools[:2], pools[2:]),
        "k_norm_weights": torch.ones(2, 8, device=device),
        "cos_sin_cache": torch.ones(4, 8, device=device),
        "positions": torch.zeros(3, dtype=torch.int64, device=device),
        "locs": torch.arange(3, device=device),
        "num_layers": 2,
        "kv_size": 8,
        "head_dim": 8,
        "eps": 1e-6,
    }


def pools(shape: tuple[int, ...], count: int = 2) -> list[torch.Tensor]:
    return [torch.zeros(shape, dtype=torch.bfloat16) for _ in range(count)]


LENS = torch.tensor([1])
Change = Callable[[dict[str, Any]], dict[str, Any]]
BAD_CALLS: dict[str, tuple[tuple[str, ...], Change]] = {
    "kv-of-one-dimension": (("kv", "2 dimensions"), lambda a: {"kv": a["kv"][0]}),
    "kv-of-no-dimension": (("kv", "2 dimensions"), lambda a: {"kv": a["kv"][0, 0]}),
    "kv-of-another-width": (("kv", "(3, 31)", "(3, 32)"), lambda a: {"kv": a["kv"][:, :31]}),
    "kv-layered-of-another-layer-count": (("kv", "(3, 3, 16)"), lambda a: {"kv": torch.ones(3, 3, 16).bfloat16()}),
    "kv-of-int32": (("kv", "int32"), lambda a: {"kv": a["kv"].int()}),
    "kv-not-a-tensor": (("kv", "list"), lambda a: {"kv": [1]}),
    "kv-requires-grad": (("kv", "requires grad"), lambda a: {"kv": a["kv"].requires_grad_()}),
    "F1-20-fewer-positions-than-rows": (("positions", "(2,)", "(3,)"), lambda a: {"positions": a["positions"][:2]}),
    "F1-20-fewer-locs-than-rows": (("locs", "(2,)", "(3,)"), lambda a: {"locs": a["locs"][:2]}),
    "F1-25-positions-of-two-dimensions": (("positions", "1 dimension"), lambda a: {"positions": a["positions"][None]}),
    "locs-of-two-dimensions": (("locs", "1 dimension"), lambda a: {"locs": a["locs"][None]}),
    "positions-bool": (("positions", "bool"), lambda a: {"positions": a["positions"].bool()}),
    "locs-uint8": (("locs", "uint8"), lambda a: {"locs": a["locs"].to(torch.uint8)}),
    "commit-lens-without-width": (("locs_row_width", "both or neither"), lambda a: {"commit_lens": LENS}),
    "width-without-commit-lens": (("commit_lens", "both or neither"), lambda a: {"locs_row_width": 3}),
    "F1-20-window-of-another-size": (
        ("commit_lens", "B * W = 3"),
        lambda a: {"commit_lens": LENS, "locs_row_width": 2},
    ),
    "width-zero": (("locs_row_width", "0"), lambda a: {"commit_lens": LENS, "locs_row_width": 0}),
    "commit-lens-floating": (("commit_lens", "float32"), lambda a: {"commit_lens": LENS.float(), "locs_row_width": 3}),
    "commit-lens-of-two-dimensions": (
        ("commit_lens", "1 dimension"),
        lambda a: {"commit_lens": LENS[None], "locs_row_width": 3},
    ),
    "weights-of-another-layer-count": (
        ("k_norm_weights", "(1, 8)", "(2, 8)"),
        lambda a: {"k_norm_weights": a["k_norm_weights"][:1]},
    ),
    "weights-of-another-head-dim": (
        ("k_norm_weights", "(2, 7)"),
        lambda a: {"k_norm_weights": a["k_norm_weights"][:, :7]},
    ),
    "weights-integer": (("k_norm_weights", "int32"), lambda a: {"k_norm_weights": a["k_norm_weights"].int()}),
    "weights-require-grad": (
        ("k_norm_weights", "requires grad"),
        lambda a: {"k_norm_weights": a["k_norm_weights"].requires_grad_()},
    ),
    "table-of-another-rotary-dim": (
        ("cos_sin_cache", "(4, 6)"),
        lambda a: {"cos_sin_cache": a["cos_sin_cache"][:, :6]},
    ),
    "table-of-no-dimension": (("cos_sin_cache", "2 dimensions"), lambda a: {"cos_sin_cache": a["cos_sin_cache"][0, 0]}),
    "table-of-one-dimension": (("cos_sin_cache", "2 dimensions"), lambda a: {"cos_sin_cache": a["cos_sin_cache"][0]}),
    "table-integer": (("cos_sin_cache", "int64"), lambda a: {"cos_sin_cache": a["cos_sin_cache"].long()}),
    "rotary-dim-odd": (("rotary_dim", "7"), lambda a: {"rotary_dim": 7}),
    "rotary-dim-above-head-dim": (("rotary_dim", "10"), lambda a: {"rotary_dim": 10}),
    "kv-size-not-a-multiple": (("kv_size", "12", "8"), lambda a: {"kv_size": 12}),
    "negative-kv-size": (("kv_size", "-8"), lambda a: {"kv_size": -8}),
    "negative-layers": (("num_layers", "-1"), lambda a: {"num_layers": -1}),
    "fractional-layers": (("num_layers", "2.0"), lambda a: {"num_layers": 2.0}),
    "head-dim-one": (("head_dim", "1"), lambda a: {"head_dim": 1}),
    "eps-negative": (("eps", "-1"), lambda a: {"eps": -1}),
    "reserved-rows-negative": (("reserved_rows", "-1"), lambda a: {"reserved_rows": -1}),
    "pool-rows-negative": (("pool_rows", "-1"), lambda a: {"pool_rows": -1}),
    "pool-rows-of-a-bare-table-negative": (
        ("pool_rows", "-1"),
        lambda a: {"meta": torch.zeros(2, 4, dtype=torch.int64), "pool_rows": -1},
    ),
    "pool-rows-that-contradict-the-table": (("pool_rows", "4", "5"), lambda a: {"pool_rows": 4}),
    "meta-of-another-layer-count": (
        ("meta", "1 layers", "2"),
        lambda a: {"meta": KVPoolTable(a["meta"].keys[:1], a["meta"].values[:1])},
    ),
    "meta-of-another-head-shape": (
        ("meta", "(5, 2, 4)"),
        lambda a: {"meta": KVPoolTable(pools((5, 2, 4)), pools((5, 2, 4)))},
    ),
    "meta-a-list": (("meta", "list"), lambda a: {"meta": [1, 2]}),
    "meta-of-another-width": (("meta", "(2, 3)"), lambda a: {"meta": torch.zeros(2, 3, dtype=torch.int64)}),
    "meta-int32": (("meta", "int32"), lambda a: {"meta": torch.zeros(2, 4, dtype=torch.int32)}),
    "meta-strided": (("meta", "contiguous"), lambda a: {"meta": torch.zeros(2, 8, dtype=torch.int64)[:, ::2]}),
    "pools-require-grad": (
        ("meta[0]", "requires grad"),
        lambda a: {"meta": KVPoolTable([p.clone().requires_grad_() for p in a["meta"].keys], a["meta"].values)},
    ),
    "locs-on-another-device": (("locs", "device meta"), lambda a: {"locs": a["locs"].to("meta")}),
    "positions-on-another-device": (("positions", "device meta"), lambda a: {"positions": a["positions"].to("meta")}),
    "weights-on-another-device": (
        ("k_norm_weights", "device meta"),
        lambda a: {"k_norm_weights": a["k_norm_weights"].to("meta")},
    ),
    "table-on-another-device": (
        ("cos_sin_cache", "device meta"),
        lambda a: {"cos_sin_cache": a["cos_sin_cache"].to("meta")},
    ),
    "commit-lens-on-another-device": (
        ("commit_lens", "device meta"),
        lambda a: {"commit_lens": LENS.to("meta"), "locs_row_width": 3},
    ),
    "pools-on-another-device": (
        ("meta", "device meta"),
        lambda a: {
            "meta": KVPoolTable([p.to("meta") for p in a["meta"].keys], [p.to("meta") for p in a["meta"].values])
        },
    ),
    "unknown-path": (("path", "'slow'"), lambda a: {"path": "slow"}),
}


@pytest.mark.parametrize("bad", BAD_CALLS)
def test_error(bad: str, arena: Arena) -> None:
    names, change = BAD_CALLS[bad]
    arguments = good(arena.device)
    written = [*arguments["meta"].keys, *arguments["meta"].values]
    expect_raises(
        Label(OP, "error"), ValueError, names, lambda: fused_kv_norm_rope_write(**{**arguments, **change(arguments)})
    )
    unchanged = all(not bool(pool.any()) for pool in written)
    expect_equal(Label(OP, "error"), "nothing is written before the error", unchanged, True)


BAD_POOLS: dict[str, tuple[tuple[str, ...], Callable[[], object]]] = {
    "layer-counts-differ": (("values", "1 layers", "2"), lambda: KVPoolTable(pools((5, 1, 8)), pools((5, 1, 8), 1))),
    "pool-of-two-dimensions": (("keys[0]", "3 dimensions"), lambda: KVPoolTable(pools((5, 8)), pools((5, 8)))),
    "values-of-another-shape": (("values[0]", "(4, 1, 8)"), lambda: KVPoolTable(pools((5, 1, 8)), pools((4, 1, 8)))),
    "rows-share-memory": (
        ("keys[0]", "strides"),
        lambda: KVPoolTable([pools((1, 1, 8))[0].expand(5, 1, 8)], pools((5, 1, 8), 1)),
    ),
    "mixed-devices": (
        ("values[0]", "device meta"),
        lambda: KVPoolTable(pools((5, 1, 8), 1), [pools((5, 1, 8))[0].to("meta")]),
    ),
    "not-a-tensor": (("keys[0]", "int"), lambda: KVPoolTable([1], [2])),  # type: ignore[list-item]
    "valid-of-another-length": (
        ("valid", "(4,)", "(5,)"),
        lambda: KVPoolTable(pools((5, 1, 8), 1), pools((5, 1, 8), 1), torch.zeros(4, dtype=torch.bool)),
    ),
    "valid-of-bytes": (
        ("valid", "uint8"),
        lambda: KVPoolTable(pools((5, 1, 8), 1), pools((5, 1, 8), 1), torch.zeros(5, dtype=torch.uint8)),
    ),
}


@pytest.mark.parametrize("bad", BAD_POOLS)
def test_pool_table_error(bad: str) -> None:
    names, build = BAD_POOLS[bad]
    expect_raises(Label(OP, "error"), ValueError, names, build)
