"""state_scatter: every bit of every written slot, skips and faults, the order of the two sets, layouts, and bad input
(CONTRACTS.md sections 8 and 9; F1-7, F3-3, F3-5, F3-6, F3-8, F3-12, F3-14, F3-15, section 0.8)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from dspark.ops.state_scatter import eager, kernel
from dspark.ops.state_scatter.checks import Pair

from ..fixtures.calls.state_scatter import OP, Call, Sizes, State, dense, run, unified, windows
from ..fixtures.guard import Arena
from ..fixtures.ledger import Label, expect_equal
from ..fixtures.shapes import GRIDS, TARGETS, StateShape
from ..fixtures.streams import Stream

PATHS = ("fused", "eager")
HALF, SINGLE = torch.float16, torch.float32


@dataclass(frozen=True)
class Case:
    """A named input."""

    id: str
    build: Callable[[Stream], Call]


def of_target(shape: StateShape, sizes: Sizes) -> Case:
    """Every type of a target, in a unified pool; one slot in both sets, one row that commits nothing."""

    def build(stream: Stream) -> Call:
        taps = shape.conv_kernel - 1
        states = [dense(stream.child("ssm"), sizes, shape.ssm_shape, torch.float32)] if shape.ssm_shape else []
        for index, dim in enumerate(shape.conv_dims):
            entry = (dim, taps) if shape.dims_first else (taps, dim)
            name = stream.child(f"conv/{index}")
            state = (
                windows(name, sizes, dim, taps, dims_first=shape.dims_first)
                if shape.dedup
                else dense(name, sizes, entry)
            )
            states.append(unified(state))
        slots = stream.permutation(sizes.slots)[: sizes.requests]
        steps = np.arange(sizes.requests) % (sizes.width + 1) - 1
        track = np.roll(slots, 1)
        track[0] = -1
        return Call("verify", tuple(states), slots, steps, None, track, steps[::-1], ssm=bool(shape.ssm_shape))

    return Case(f"shape/{shape.id}", build)


def many_types(count: int) -> Case:
    """``count`` conv types of different dims, one of them far larger than the others."""

    def build(stream: Stream) -> Call:
        dims = [8 * (1 + index % 5) for index in range(count)]
        if count > 1:
            dims[count // 2] = 640
        states = tuple(dense(stream.child(str(i)), Sizes(2, 5, 2, 3), (3, dim)) for i, dim in enumerate(dims))
        track = np.array([1, 0])
        return Call(
            "multi", states, np.array([4, 1]), np.array([2, 0]), track_slots=track, track_steps=np.array([1, 2])
        )

    return Case(f"types/{count}", build)


def three_dtypes(stream: Stream) -> Call:
    """One conv type of each dtype that the kernel moves."""
    dtypes = {"bf16": torch.bfloat16, "fp16": HALF, "fp32": SINGLE}
    states = tuple(dense(stream.child(name), Sizes(2, 5, 2, 3), (3, 8), dtype) for name, dtype in dtypes.items())
    return Call("multi", states, np.array([4, 1]), np.array([2, 0]))


def entry_of(elements: int, dtype: torch.dtype) -> Case:
    """A flat entry: whole and broken vectors of 16 bytes, and words of 2 bytes where the length is odd."""

    def build(stream: Stream) -> Call:
        state = dense(stream, Sizes(3, 4, 2, 2), (elements,), dtype)
        return Call("mamba", (state,), np.array([3, 0]), np.array([1, 0]))

    return Case(f"elements/{elements}/{str(dtype).removeprefix('torch.')}", build)


def one(id: str, state: Callable[[Stream, Sizes], State], *, function: str = "window", **changes: Any) -> Case:
    """One state; rows 0 to 3 go to slots 6, 0, 3 and 4 unless ``changes`` say otherwise."""

    def build(stream: Stream) -> Call:
        call = Call(function, (state(stream, Sizes(2, 7, 4, 5)),), np.array([6, 0, 3, 4]), np.array([4, 0, 2, 1]))
        return replace(call, **changes)

    return Case(id, build)


def plain(stream: Stream, sizes: Sizes) -> State:
    return dense(stream, sizes, (6, 3))


def view(dim: int, taps: int, **changes: Any) -> Callable[[Stream, Sizes], State]:
    return lambda stream, sizes: windows(stream, sizes, dim, taps, **changes)


def strided(entry: tuple[int, ...], src_strides: tuple[int, ...], **changes: Any) -> Callable[[Stream, Sizes], State]:
    return lambda stream, sizes: dense(stream, sizes, entry, src_strides=src_strides, **changes)


def rows(**values: list[int]) -> dict[str, Any]:
    return {name: np.array(value, np.int64) for name, value in values.items()}


def both_sets(
    id: str, slots: list[int], steps: list[int], track: list[int], track_steps: list[int], **changes: Any
) -> Case:
    """A dense type and an overlapping one, with a commit and a track set."""

    def build(stream: Stream) -> Call:
        sizes = Sizes(2, 7, 4, 5)
        states = (dense(stream.child("dense"), sizes, (3, 8)), windows(stream.child("view"), sizes, 5, 3))
        index = rows(slots=slots, steps=steps, track_slots=track, track_steps=track_steps)
        return replace(Call("multi", states, **index), **changes)

    return Case(id, build)


def signalling_over_quiet(stream: Stream, sizes: Sizes) -> State:
    """Signalling NaNs and payloads in the source, and a quiet NaN in every destination element (F3-6)."""
    state = dense(stream, sizes, (4, 3))
    payloads = stream.choice([0x7F81, 0xFF81, 0x7FA5, 0xFFC0, 0x8000, 0x0001], state.src.shape).astype(np.uint16)
    return replace(state, src=payloads, dst=np.full_like(state.dst, 0x7FC0))


def fp32_signalling(stream: Stream, sizes: Sizes) -> State:
    state = dense(stream, sizes, (4, 3), torch.float32)
    payloads = stream.choice([0x7F800001, 0xFFA00000, 0x80000000, 1], state.src.shape).astype(np.uint32)
    return replace(state, src=payloads)


TOP = (1 << 63) - 1
CASES = (
    *(of_target(shape, Sizes(2, 3, 2, 2) if shape.ssm_shape else Sizes(2, 5, 3, 4)) for shape in TARGETS),
    *(many_types(count) for count in (*GRIDS["scatter_types"], 17)),
    *(entry_of(elements, dtype) for elements in GRIDS["scatter_elements"] for dtype in (torch.bfloat16, SINGLE)),
    *(one(f"F3-8-K4-W5-dims-first/step-{step}", view(37, 3), **rows(steps=[step] * 4)) for step in range(5)),
    *(
        one(f"F3-8-K4-W5-dims-last/step-{step}", view(37, 3, dims_first=False), **rows(steps=[step] * 4))
        for step in range(5)
    ),
    one("F3-8-one-tap", view(37, 1)),
    one("F3-8-one-tap-dims-last", view(37, 1, dims_first=False)),
    one("window-of-two-taps", view(16, 2)),
    one("window-of-four-taps-float16", view(16, 4, dtype=HALF)),
    one("window-float32", view(21, 3, dtype=SINGLE)),
    one("window-of-one-channel", view(1, 3)),
    one("dense-windows-float16", lambda stream, sizes: dense(stream, sizes, (9, 3), HALF)),
    one("unified-pool-dense", lambda stream, sizes: unified(plain(stream, sizes))),
    one("unified-pool-view", lambda stream, sizes: unified(windows(stream, sizes, 16, 3))),
    one("odd-strides-are-not-vectors", strided((4, 4), (4000, 807, 17, 4, 1))),
    one("strides-of-8-bytes-are-not-16", strided((4, 4), (4000, 808, 20, 4, 1))),
    one("source-transposed", strided((6, 3), (2000, 400, 60, 1, 7))),
    one("source-elements-apart", strided((6, 3), (2000, 400, 60, 6, 2))),
    one("source-rows-apart-elements-dense", strided((6, 8), (4000, 800, 120, 16, 1))),
    one("source-step-is-the-outer-dimension", strided((6, 3), (18, 36, 144, 3, 1))),
    one(
        "source-dimension-of-one-element-at-any-stride",
        lambda s, sizes: dense(s, sizes, (2, 1, 3), src_strides=(240, 60, 12, 6, 999, 2)),
        function="mamba",
    ),
    one(
        "one-layer-of-stride-zero",
        lambda s, sizes: dense(s, sizes._replace(layers=1), (6, 3), dst_strides=(0, 18, 3, 1)),
    ),
    Case("types-of-three-dtypes", three_dtypes),
    one("ssm-of-three-dimensions", lambda s, sizes: dense(s, sizes, (2, 3, 4), SINGLE), function="mamba"),
    one("ssm-of-four-dimensions", lambda s, sizes: dense(s, sizes, (2, 1, 3, 4), SINGLE), function="mamba"),
    one("one-element-per-slot", lambda s, sizes: dense(s, sizes, (), SINGLE), function="mamba"),
    one("one-element-per-slot-of-2-bytes", lambda s, sizes: dense(s, sizes, (1, 1)), function="mamba"),
    one("signalling-nan-over-quiet-nan-bfloat16", signalling_over_quiet),
    one("signalling-nan-float32", fp32_signalling),
    one("indices-int32", plain, index_dtype=torch.int32),
    one("indices-strided", plain, gap=3),
    one("indices-int32-strided-with-sources", plain, index_dtype=torch.int32, gap=2, **rows(sources=[1, 3, 0, 2])),
    one("F3-3-freed-slot-is-skipped", plain, **rows(slots=[4, -1, 2], steps=[1, 2, 0])),
    one("F1-7-minus-one-is-not-the-last-slot", plain, **rows(slots=[3, -1, 1, -7], steps=[1, 2, 0, 4])),
    one("F3-3-step-minus-one-is-skipped", plain, **rows(slots=[4, 3, 2], steps=[1, -1, -512])),
    one("every-row-is-skipped", plain, **rows(slots=[-1, 3, -1, 0], steps=[1, -1, 4, -2])),
    one("skips-hide-what-lies-beyond", plain, **rows(slots=[-1, 99, 2], steps=[99, -1, 1])),
    one("no-rows", plain, **rows(slots=[], steps=[])),
    one("F3-5-step-of-a-prefill-is-a-fault", plain, **rows(slots=[4, 5, 2, 6], steps=[1, 512, 0, 4])),
    one("step-of-the-width-is-a-fault", plain, **rows(slots=[4, 5], steps=[4, 5])),
    one("slot-beyond-the-pool-is-a-fault", plain, **rows(slots=[6, 7, 0], steps=[1, 1, 1])),
    one("slot-and-step-beyond-int32", plain, **rows(slots=[(1 << 32) + 3, 2, 1], steps=[1, (1 << 32) + 1, 0])),
    one("slot-and-step-beyond-int32-negative", plain, **rows(slots=[3 - (1 << 32), 2, 1], steps=[1, 1 - (1 << 32), 0])),
    one("slot-and-step-at-the-limits-of-int64", plain, **rows(slots=[TOP, 2, -TOP, 1], steps=[1, TOP, 0, 0])),
    one("every-row-is-a-fault", plain, **rows(slots=[7, 99, 1, 2], steps=[0, 1, 5, 5])),
    one("all-three-beyond", plain, **rows(slots=[7, 1], steps=[5, 1], sources=[4, 3])),
    one(
        "F3-14-sources-permuted-and-padded",
        plain,
        **rows(slots=[5, 2, 0, 6, 1], steps=[4, 1, 3, 0, 2], sources=[2, 0, 1, -1, -1]),
    ),
    one("source-beyond-is-a-fault", plain, **rows(slots=[5, 2, 0], steps=[4, 1, 3], sources=[3, 4, 0])),
    one("source-beyond-int32", plain, **rows(slots=[5, 2, 0], steps=[4, 1, 3], sources=[3, (1 << 32) + 1, 0])),
    one(
        "0.8-negative-source-is-skipped-ssm",
        plain,
        function="mamba",
        **rows(slots=[5, 2, 0], steps=[4, 1, 3], sources=[3, -1, -4]),
    ),
    one("one-source-for-every-row", plain, **rows(sources=[1, 1, 1, 1])),
    one("padding-rows-beyond-the-sources", plain, **rows(slots=[6, 5, 4, 3, -1, 2, -1], steps=[0, 1, 2, 3, 4, -1, -1])),
    one("a-live-row-beyond-the-sources-is-a-fault", plain, **rows(slots=[6, 5, 4, 3, 2], steps=[0, 1, 2, 3, 4])),
    both_sets("no-slot-in-both-sets", [6, 1, 2, 3], [0, 1, 2, 3], [4, 0, -1, 5], [4, 3, 1, -1]),
    both_sets("F3-15-track-wins-where-a-slot-is-in-both", [6, 1, 2, 3], [0, 1, 2, 3], [3, 6, 1, 2], [4, 3, 2, 1]),
    both_sets("F3-15-a-row-tracks-its-own-slot", [6, 1, 2, 3], [0, 1, 2, 3], [6, 1, 2, 3], [4, 4, 4, 4]),
    both_sets("a-skipped-track-row-takes-nothing", [6, 1, 2, 3], [0, 1, 2, 3], [3, 6, 1, 2], [-1, 3, -1, 1]),
    both_sets("a-faulty-track-row-takes-nothing", [6, 1, 2, 3], [0, 1, 2, 3], [3, 6, 1, 2], [5, 3, 6, 1]),
    both_sets(
        "a-track-slot-or-step-beyond-int32-takes-nothing",
        [6, 1, 2, 3],
        [0, 1, 2, 3],
        [(1 << 32) + 6, 1, -1, 0],
        [0, (1 << 32) + 1, 0, 4],
        track_dtype=torch.int64,
    ),
    both_sets(
        "a-track-row-beyond-the-sources-takes-nothing",
        [6, 1, 2, 3, -1],
        [0, 1, 2, 3, 0],
        [-1, -1, -1, -1, 6],
        [0, 0, 0, 0, 2],
    ),
    both_sets("a-dropped-commit-row-still-reports-nothing", [6, 9, 2, 3], [0, 1, 9, 3], [3, 6, 1, 2], [4, 3, 2, 1]),
    both_sets(
        "track-set-int64-commit-set-int32",
        [6, 1, 2, 3],
        [0, 1, 2, 3],
        [0, 1, 3, 5],
        [4, -1, 2, 1],
        index_dtype=torch.int32,
        track_dtype=torch.int64,
        gap=2,
    ),
    both_sets("F3-3-nothing-committed-but-tracked", [-1, 6, -1, 1], [0, -1, -1, -1], [3, 0, -1, 5], [4, 3, 2, -1]),
    Case("no-types", lambda stream: Call("multi", (), np.array([1, 2]), np.array([0, 1]))),
    Case("no-types-at-all-after-a-verify-step", lambda stream: Call("verify", (), np.array([9, 2]), np.array([99, 1]))),
    Case(
        "no-layers",
        lambda stream: Call("mamba", (dense(stream, Sizes(0, 4, 2, 3), (3, 4)),), np.array([9, 2]), np.array([99, 1])),
    ),
    Case(
        "no-elements",
        lambda stream: Call("mamba", (dense(stream, Sizes(2, 4, 2, 3), (0, 3)),), np.array([9, 2]), np.array([99, 1])),
    ),
    Case(
        "no-slots",
        lambda stream: Call("mamba", (dense(stream, Sizes(2, 0, 2, 3), (3, 4)),), np.array([0, -1]), np.array([1, 1])),
    ),
    Case(
        "no-requests",
        lambda stream: Call("mamba", (dense(stream, Sizes(2, 4, 0, 3), (3, 4)),), np.array([0, -1]), np.array([1, 1])),
    ),
    Case(
        "no-steps",
        lambda stream: Call("mamba", (dense(stream, Sizes(2, 4, 2, 0), (3, 4)),), np.array([0, -1]), np.array([0, 1])),
    ),
)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_states(case: Case, path: str, arena: Arena) -> None:
    run(case.build(Stream(case.id)), Label(OP, path), arena, path)


TILED = ("types/6", "elements/1025/bfloat16", "elements/768/float32", "F3-8-K4-W5-dims-first/step-2")


@pytest.mark.parametrize("path", ["fused"])
@pytest.mark.parametrize("id", TILED)
def test_states_do_not_depend_on_the_tile(id: str, path: str, arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry in several chunks, a layer per program, a track set that is searched two rows at a time, and words that
    are counted as those of an entry beyond 4 GiB."""
    monkeypatch.setattr(kernel, "NARROW_WORDS", 0)
    for name in ("GPU_TILE", "GPU_WINDOW_TILE", "INTERPRETER_TILE"):
        monkeypatch.setattr(kernel, name, 512)
    for name in ("GPU_ROWS", "INTERPRETER_ROWS"):
        monkeypatch.setattr(kernel, name, 2)
    case = next(case for case in CASES if case.id == id)
    run(case.build(Stream(case.id)), Label(OP, path), arena, path)


@pytest.mark.parametrize("layers", [1, 2])
def test_states_do_not_depend_on_how_many_layers_are_gathered(
    layers: int, arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = unified(dense(Stream("state/layers"), Sizes(3, 4, 2, 2), (5, 3)))
    monkeypatch.setattr(eager, "LAYER_BUDGET", layers * 2 * 5 * 3 * 2)
    run(Call("window", (state,), np.array([3, 0]), np.array([1, 0])), Label(OP, "eager"), arena, "eager")


@pytest.mark.parametrize(("address", "declared"), [("as-placed", 16), ("one-element-on", 2), ("two-elements-on", 4)])
def test_what_is_declared_to_the_compiler_is_true(address: str, declared: int, arena: Arena) -> None:
    """An interpreter does not look at alignment; a GPU faults on it, and is slow without it."""
    on = {"as-placed": 0, "one-element-on": 1, "two-elements-on": 2}[address]
    storage = torch.zeros(4096, dtype=torch.bfloat16, device=arena.device)
    src = torch.zeros(2, 3, 4, 16, 3, dtype=torch.bfloat16, device=arena.device)
    for start, layer, slot in ((on, 1024, 64), (0, 1024 + on, 64), (0, 1024, 64 + on)):
        dst = storage[start:].as_strided((2, 5, 16, 3), (layer, slot, 3, 1))
        walk, words = kernel.walk_of(Pair(dst, src, "dst", "src"))
        label = Label(OP, "fused")
        expect_equal(label, "declared alignment", walk.aligned_bytes, declared)
        addresses = [words[0] * walk.word_bytes, *words[1:8]]
        expect_equal(label, "what is not aligned", [word for word in addresses if word % walk.aligned_bytes], [])


@pytest.mark.parametrize(("address", "declared"), [("as-placed", 16), ("one-element-on", 2), ("two-elements-on", 2)])
def test_what_is_declared_of_windows_is_true_of_the_destination(address: str, declared: int, arena: Arena) -> None:
    """Their source begins anywhere, and is read word by word."""
    on = {"as-placed": 0, "one-element-on": 1, "two-elements-on": 2}[address]
    storage = torch.zeros(4096, dtype=torch.bfloat16, device=arena.device)
    rows = torch.zeros(1 + 2 * 3 * 16 * 6, dtype=torch.bfloat16, device=arena.device)
    src = rows[1:].view(2, 3, 16, 6).unfold(3, 3, 1).permute(0, 1, 3, 2, 4)
    for start, layer, slot in ((on, 1024, 64), (0, 1024 + on, 64), (0, 1024, 64 + on)):
        dst = storage[start:].as_strided((2, 5, 16, 3), (layer, slot, 3, 1))
        walk, words = kernel.walk_of(Pair(dst, src, "dst", "src", window=True))
        label = Label(OP, "fused")
        expect_equal(label, "declared of windows", (walk.inner, walk.word_bytes, walk.aligned_bytes), (3, 2, declared))
        addresses = [words[0] * walk.word_bytes, *words[1:4]]
        expect_equal(label, "what is not aligned", [word for word in addresses if word % walk.aligned_bytes], [])
    src, dst = src[..., :15, :], storage.as_strided((2, 5, 15, 3), (1024, 64, 3, 1))
    walk, _ = kernel.walk_of(Pair(dst, src, "dst", "src", window=True))
    expect_equal(Label(OP, "fused"), "declared of an entry that 16 bytes do not divide", walk.aligned_bytes, 2)
