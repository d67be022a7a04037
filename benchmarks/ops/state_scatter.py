"""``state_scatter``: the conv windows of the accepted steps go to their slots, all types and layers in one call.

There is one pool and one set of per-step windows, as in an engine; copies differ in their slots and steps.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dspark.ops import fused_conv_window_scatter_multi

from ..case import COMPILE, EAGER, FUSED, Absent, Asked, Case, Contender, Inputs, Tensors, unequal
from ..suite import fixture
from .layout import WINDOW

NAME = "state_scatter"
AXIS = "batch"
SIZES = (1, 8, 64, 256)
MULTI, SINGLE = "fused_conv_window_scatter_multi", "fused_conv_window_scatter_with_mask"
PER_PAIR = "sglang-per-pair"
SECTOR = 32
POISON = 0x7FA5


@dataclass(frozen=True)
class Shape:
    """Conv windows of K-1 tokens: one type for each of ``dims``.

    shared_rows: the windows of a request are overlapping views ``(dim, K-1)`` of rows of W+K-2 tokens; else each is
    dense, ``(K-1, dim)``.
    """

    name: str
    layers: int
    dims: tuple[int, ...]
    taps: int
    shared_rows: bool

    @property
    def entry_bytes(self) -> int:
        """A window of every type in one layer."""
        return sum(self.dims) * self.taps * 2

    def source_bytes(self) -> int:
        """What must be read of one request in one layer, by the sectors that hold it.

        A row of W+K-2 tokens is shorter than a sector and has the window's K-1 tokens in it, so no sector of the rows
        can be left out.
        """
        if not self.shared_rows:
            return self.entry_bytes
        row = (WINDOW + self.taps - 1) * 2
        assert row - self.taps * 2 < SECTOR
        return sum(math.ceil(dim * row / SECTOR) * SECTOR for dim in self.dims)

    def floor_bytes(self, batch: int) -> int:
        """Sectors read and windows written; a slot and a step for each request."""
        return batch * (self.layers * (self.source_bytes() + self.entry_bytes) + 8)


def of_target(label: str, name: str) -> Shape:
    """The conv windows of a real target."""
    target = next(shape for shape in fixture("shapes").TARGETS if shape.id == name)
    return Shape(label, target.layers, target.conv_dims, target.conv_kernel - 1, target.dedup)


SHAPES = (
    of_target("Inkling L66 6 types dense", "inkling"),
    Shape("shared rows L60 4 types", 60, (4096, 1024, 1024, 4096), 3, True),
)
SMALL = (Shape("L2 3 types dense", 2, (64, 64, 384), 3, False), Shape("shared rows L2 2 types", 2, (64, 32), 3, True))


def cases(sizes: Sequence[int] = SIZES, shapes: Sequence[Shape] = SHAPES) -> list[Case]:
    """Every shape at every size."""
    return [
        Case(
            NAME,
            shape.name,
            AXIS,
            batch,
            shape.floor_bytes(batch),
            functools.partial(StateInputs, shape, batch),
            "32-byte sectors" if shape.shared_rows else "bytes",
        )
        for shape in shapes
        for batch in sizes
    ]


def small() -> list[Case]:
    """What the oracle judges: the real ones are too large for it, so these have fewer layers and channels."""
    return cases((4,), SMALL)


def random_bits(shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """bf16 ``shape`` of random bits, NaNs among them: states are copied as they are."""
    words = -(-math.prod(shape) // 4)
    bits = torch.empty(words, dtype=torch.int64, device=device).random_(-(1 << 62), 1 << 62)
    return bits.view(torch.bfloat16)[: math.prod(shape)].view(shape)


class StateInputs(Inputs):
    """Pools of all types, their per-step windows, and slots and steps (int32, which everyone takes) of each copy."""

    def __init__(self, shape: Shape, batch: int, device: torch.device, copies: int) -> None:
        self.shape, self.batch = shape, batch
        slots = copies * batch + 1
        self.pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        for dim in shape.dims:
            entry = (dim, shape.taps) if shape.shared_rows else (shape.taps, dim)
            dst = torch.empty(shape.layers, slots, *entry, dtype=torch.bfloat16, device=device)
            self.pairs.append((dst, self._windows(dim, entry, device)))
        order = torch.randperm(slots - 1, device=device)[: copies * batch] + 1
        self.slots = order.to(torch.int32).reshape(copies, batch)
        # Request b takes another step in each copy, and every step before any again.
        turn = torch.arange(copies, device=device)[:, None] + torch.randint(0, WINDOW, (1, batch), device=device)
        self.steps = (turn % WINDOW).to(torch.int32).contiguous()
        self.reset()

    def _windows(self, dim: int, entry: tuple[int, ...], device: torch.device) -> torch.Tensor:
        """``[L, Rq, W, *entry]``."""
        shape, taps = self.shape, self.shape.taps
        if not shape.shared_rows:
            return random_bits((shape.layers, self.batch, WINDOW, *entry), device)
        tokens = WINDOW + taps - 1
        rows = random_bits((shape.layers, self.batch, dim, tokens), device)
        return rows.unfold(3, taps, 1).permute(0, 1, 3, 2, 4)

    def contenders(self, asked: Asked) -> list[Contender | Absent]:
        sets = list(zip(self.slots, self.steps, strict=True))

        def bound(function: Callable[..., Any], **named: Any) -> list[Callable[[], Any]]:
            return [functools.partial(function, self.pairs, slots, steps, **named) for slots, steps in sets]

        found: list[Contender | Absent] = [Contender(FUSED, bound(fused_conv_window_scatter_multi))]
        if EAGER in asked.against:
            found.append(Contender(EAGER, bound(fused_conv_window_scatter_multi, path="eager")))
        if COMPILE in asked.against:
            found.append(Absent(COMPILE, "not tried: a copy has no arithmetic to fuse"))
        found += asked.sglang(MULTI, bound)
        per_pair = asked.sglang(SINGLE, lambda function: bound(functools.partial(each, function)), PER_PAIR)
        return found + per_pair

    def reset(self) -> None:
        for dst, _ in self.pairs:
            dst.view(torch.int16).fill_(POISON)

    def outputs(self, returned: Any) -> Tensors:
        """The slots of copy 0 of every type, and how many other entries are no longer poison."""
        mine = self.slots[0].to(torch.int64)
        found = {f"type {index}": dst[:, mine] for index, (dst, _) in enumerate(self.pairs)}
        others = torch.zeros((), dtype=torch.int64, device=mine.device)
        for dst, _ in self.pairs:
            for layer in dst:
                changed = (layer.view(torch.int16) != POISON).any(dim=-1).any(dim=-1)
                changed[mine] = False
                others += changed.sum()
        return found | {"others": others}

    def reference(self) -> Tensors:
        fused_conv_window_scatter_multi(self.pairs, self.slots[0], self.steps[0], path="eager")
        return self.outputs(None)

    def judge(self, got: Tensors) -> str:
        oracle = fixture("oracles.state_scatter")
        rows = [oracle.RowSet(self.slots[0].tolist(), self.steps[0].tolist())]
        problems = [f"{int(got['others'])} other entries were written" if int(got["others"]) else ""]
        for index, (dst, src) in enumerate(self.pairs):
            bits = src.contiguous().cpu().view(torch.int16).numpy()
            poisoned = torch.full(dst.shape, POISON, dtype=torch.int16).numpy()
            need = torch.from_numpy(oracle.scattered(poisoned, bits, rows))[:, self.slots[0].cpu().to(torch.int64)]
            problems.append(unequal(f"type {index}", got[f"type {index}"].cpu().view(torch.int16), need))
        return "; ".join(filter(None, problems))


def each(function: Callable[..., Any], pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], *rest: Any) -> None:
    """One launch for each type, as SGLang does where its single launch is not eligible."""
    for dst, src in pairs:
        function(dst, src, *rest)
