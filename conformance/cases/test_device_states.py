"""The commit set before the track set, in grids that do not fit on a GPU at once (CONTRACTS.md section 8; F3-15).

Every slot is in both sets, and its two rows lie next to each other or half the grid apart, in both orders. A kernel
that writes both and hopes for the order is seen by the same data: the last case takes that one line out of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dspark.ops import scatter_mamba_states_after_mtp_verify
from dspark.ops.state_scatter import kernel

from ..fixtures.guard import Arena
from ..fixtures.kernel_source import edited
from ..fixtures.ledger import Label, expect_equal
from ..fixtures.streams import Stream

LABEL = Label("state_scatter", "fused")
LAYERS, WIDTH = 4, 2
DRAWS, REPETITIONS = 10, 100
"""On a GPU: 1,000 calls. The interpreter runs programs in one order, so there a few say the same."""


@dataclass(frozen=True)
class Grid:
    """Index rows, and 16-bit elements of an entry."""

    rows: int
    elements: int


GRIDS = {"wide-entries": Grid(512, 16_384), "many-rows": Grid(4096, 256)}
SMALL = Grid(12, 64)


@dataclass(frozen=True)
class Contended:
    """A call in which every committed slot is tracked by another row; a few track rows are skipped."""

    before: torch.Tensor
    after: torch.Tensor
    swapped: torch.Tensor
    caches: Any
    indices: tuple[torch.Tensor, ...]

    def differing(self) -> torch.Tensor:
        """Elements that a call leaves otherwise than the commit set followed by the track set, on the device."""
        self.caches.conv[0].view(torch.int16).copy_(self.before)
        scatter_mamba_states_after_mtp_verify(self.caches, *self.indices, path="fused")
        wrong: torch.Tensor = self.caches.conv[0].view(torch.int16) != self.after
        return wrong.sum()


class Caches:
    """One type of conv window and no SSM state."""

    def __init__(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        self.temporal = self.intermediate_ssm = dst.new_empty(0)
        self.conv, self.intermediate_conv_window = [dst.view(torch.bfloat16)], [src.view(torch.bfloat16)]


def contended(grid: Grid, draw: int, device: torch.device) -> Contended:
    """The rows of a slot are one apart, in either order, or half the grid apart, the tracking one first."""
    stream, rows = Stream(f"device/states/{grid}/{draw}"), grid.rows
    slots = stream.child("slots").permutation(rows + 7)[:rows]
    track_slots = np.roll(slots, (1, -1, -rows // 2)[draw % 3])
    steps, track_steps = (stream.child(name).integers(0, WIDTH, (rows,)) for name in ("steps", "track"))
    track_steps[::7] = -1
    indices = tuple(torch.from_numpy(values).to(device) for values in (slots, steps, track_slots, track_steps))
    generator = torch.Generator(device).manual_seed(draw)

    def words(*shape: int) -> torch.Tensor:
        shape = (LAYERS, *shape, grid.elements // 4, 4)
        return torch.randint(-(1 << 15), 1 << 15, shape, generator=generator, dtype=torch.int16, device=device)

    before, src = words(rows + 7), words(rows, WIDTH)
    sets = (indices[:2], indices[2:])
    caches = Caches(before.clone(), src)
    return Contended(
        before, one_after_the_other(before, src, sets), one_after_the_other(before, src, sets[::-1]), caches, indices
    )


def one_after_the_other(before: torch.Tensor, src: torch.Tensor, sets: Any) -> torch.Tensor:
    """The definition: every live row of one set, then of the next."""
    after = before.clone()
    for slots, steps in sets:
        rows = torch.nonzero(steps >= 0).flatten()
        after[:, slots[rows]] = src[:, rows, steps[rows]]
    return after


def differences(grid: Grid, draws: int, repetitions: int, device: torch.device) -> Iterator[tuple[Contended, int]]:
    """Each draw, and how many elements differed in all its repetitions."""
    for draw in range(draws):
        call, total = contended(grid, draw, device), torch.zeros((), dtype=torch.int64, device=device)
        for _ in range(repetitions):
            total += call.differing()
        yield call, int(total)


def counts(arena: Arena) -> tuple[int, int]:
    return (DRAWS, REPETITIONS) if arena.device.type == "cuda" else (3, 1)


@pytest.mark.parametrize("grid", GRIDS)
def test_f3_15_track_wins_in_grids_of_many_waves(grid: str, arena: Arena) -> None:
    size = GRIDS[grid] if arena.device.type == "cuda" else SMALL
    draws, repetitions = counts(arena)
    for call, differing in differences(size, draws, repetitions, arena.device):
        expect_equal(LABEL, f"elements that differ in {repetitions} repetitions", differing, 0)
        shows = bool((call.swapped != call.after).any())
        expect_equal(LABEL, "whether the other order would be seen", shows, True)


@pytest.mark.parametrize("grid", GRIDS)
def test_a_kernel_that_does_not_give_way_is_seen(
    grid: str, arena: Arena, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = "commits = tl.max(overwritten, axis=0) == 0"
    hasty = edited(kernel, line, line.replace("==", ">="), tmp_path)
    monkeypatch.setattr(kernel, "state_scatter_kernel", hasty.state_scatter_kernel)
    size = GRIDS[grid] if arena.device.type == "cuda" else SMALL
    draws, repetitions = counts(arena)
    total = sum(differing for _, differing in differences(size, draws, repetitions, arena.device))
    expect_equal(LABEL, "whether a commit row came after a track row", total > 0, True)
