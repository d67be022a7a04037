"""Offsets beyond int32 in every stride of commit_indices and state_scatter (faults 0.4, F3-16, F4-8)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch

from ..fixtures import vast
from ..fixtures.calls import commit_indices, state_scatter
from ..fixtures.calls.state_scatter import Sizes, dense
from ..fixtures.guard import Arena, to_bits
from ..fixtures.implementations.ops import (
    fused_commit_track_indices,
    fused_conv_window_scatter_multi,
    fused_mamba_state_scatter_with_mask,
)
from ..fixtures.ledger import Label, expect_equal
from ..fixtures.oracles.state_scatter import RowSet, scattered
from ..fixtures.streams import Stream
from ..fixtures.vast import FAR, STRIDES, released  # noqa: F401  an autouse fixture

PATHS = ("fused", "eager")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("argument", ["accept_index-rows", "accept_index-columns", "accept_lens", "seq_lens"])
def test_commit_indices(argument: str, path: str, arena: Arena) -> None:
    index = commit_indices.chain(3, 3, 4)
    call = commit_indices.Call(index, np.array([3, 1, 3]), np.array([254, 255, 253]), draft_token_num=4)
    name, _, dimension = argument.partition("-")
    assert call.seq_lens is not None
    values = {"accept_index": call.accept_index, "accept_lens": call.accept_lens, "seq_lens": call.seq_lens}
    tensors = {key: torch.from_numpy(value).to(arena.device, torch.int32) for key, value in values.items()}
    strides = {"rows": (FAR, 1), "columns": (1, FAR)}.get(dimension, (FAR,))
    far = vast.place(values[name], torch.int32, strides, arena.device)
    tensors[name] = far.view
    label = Label(commit_indices.OP, path)
    commit_indices.expect_results(
        call,
        label,
        lambda: fused_commit_track_indices(
            **tensors, draft_token_num=call.draft_token_num, mamba_track_interval=call.interval, path=path
        ),
    )
    far.verify(label, argument)


SIZES = Sizes(3, 4, 3, 3)
"""The last index of every dimension, times 2^30 elements, is beyond int32."""
ENTRY = (3, 3)
DIMENSIONS = {"dst": ("layer", "slot"), "src": ("layer", "request", "step", "outer", "inner")}
ROWS = RowSet([3, 0, 2], [2, 0, 1], [0, 1, 2])


def strides_around(shape: tuple[int, ...], at: int, stride: int) -> tuple[int, ...]:
    """``stride`` in dimension ``at``, the others contiguous among themselves."""
    found, step = [0] * len(shape), 1
    for dimension in reversed(range(len(shape))):
        found[dimension] = stride if dimension == at else step
        step *= 1 if dimension == at else shape[dimension]
    return tuple(found)


def scatter_far(name: str, dimension: str, stride: int, path: str, arena: Arena) -> None:
    """One scatter whose destination or source lies far apart in one dimension."""
    label = Label(state_scatter.OP, path)
    state = dense(Stream("offsets/state"), SIZES, ENTRY)
    bits: dict[str, npt.NDArray[np.integer]] = {"dst": state.dst, "src": state.src}
    strides = strides_around(bits[name].shape, DIMENSIONS[name].index(dimension), stride)
    far = vast.place(bits[name], torch.bfloat16, strides, arena.device)
    tensors = {key: far.view if key == name else arena.place(key, bits[key], torch.bfloat16) for key in bits}
    slots, steps, sources = (torch.tensor(values, dtype=torch.int32, device=arena.device) for values in ROWS)
    fused_mamba_state_scatter_with_mask(tensors["dst"], tensors["src"], slots, steps, sources, path=path)
    expect_equal(label, "destination", to_bits(tensors["dst"]), scattered(state.dst, state.src, [ROWS]))
    expect_equal(label, "source", to_bits(tensors["src"]), state.src)
    far.verify(label, f"{name} {dimension}")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("name", "dimension"), [(name, dimension) for name in DIMENSIONS for dimension in DIMENSIONS[name]]
)
def test_f3_16_state_strides(name: str, dimension: str, path: str, arena: Arena) -> None:
    scatter_far(name, dimension, FAR, path, arena)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stride", ["odd", "beyond-int32"])
@pytest.mark.parametrize(
    ("name", "dimension"), [("dst", "slot"), ("src", "request"), ("src", "outer"), ("src", "inner")]
)
def test_f4_8_other_strides(name: str, dimension: str, stride: str, path: str, arena: Arena) -> None:
    """Odd ones leave no wide access; those beyond int32 are 64-bit before any multiplication."""
    scatter_far(name, dimension, STRIDES[stride], path, arena)


INDICES = ("slots", "steps", "sources", "track slots", "track steps")


def far_index(argument: str, stride: int, rows: int, path: str, arena: Arena, last_step: int = 2) -> None:
    """One scatter with one index tensor far apart; two committed slots are tracked by other rows."""
    label = Label(state_scatter.OP, path)
    state = dense(Stream("offsets/index"), SIZES, ENTRY)
    sets = [RowSet(ROWS.slots[:rows], ROWS.steps[:rows], [0, 1, 2][:rows] if argument == "sources" else None)]
    if argument != "sources":
        sets.append(RowSet([1, 3, 0][:rows], [2, 0, last_step][:rows]))
    values = dict(zip(INDICES, (*sets[0], *(sets[1][:2] if len(sets) > 1 else ())), strict=False))
    far = vast.place(np.array(values[argument]), torch.int32, (stride,), arena.device)
    index = {
        name: torch.tensor(value, dtype=torch.int32, device=arena.device) for name, value in values.items() if value
    }
    index[argument] = far.view
    dst, src = (arena.place(name, bits, torch.bfloat16) for name, bits in (("dst", state.dst), ("src", state.src)))
    if argument == "sources":
        fused_mamba_state_scatter_with_mask(dst, src, *index.values(), path=path)
    else:
        fused_conv_window_scatter_multi([(dst, src)], *index.values(), path=path)
    expect_equal(label, "destination", to_bits(dst), scattered(state.dst, state.src, sets))
    far.verify(label, argument)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("argument", INDICES)
def test_f3_16_index_strides(argument: str, path: str, arena: Arena) -> None:
    far_index(argument, FAR, 3, path, arena)


@pytest.mark.parametrize("path", PATHS)
def test_f3_16_a_track_row_far_away_that_is_skipped_takes_nothing(path: str, arena: Arena) -> None:
    far_index("track steps", FAR, 3, path, arena, last_step=-1)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("argument", ["slots", "track slots"])
def test_f4_8_an_index_stride_beyond_int32(argument: str, path: str, arena: Arena) -> None:
    far_index(argument, STRIDES["beyond-int32"], 2, path, arena)
