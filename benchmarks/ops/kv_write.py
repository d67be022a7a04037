"""``kv_write``: K norm, K RoPE and the write of K and V of all layers into their pools."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dspark.ops import KVPoolTable, fused_kv_norm_rope_write
from dspark.ops.kv_write.eager import RowRules, kv_write_eager

from ..case import EAGER, FUSED, Absent, Asked, Case, Contender, Inputs, Tensors, compiled, unequal
from ..judging import judge_different, outside
from .layout import distinct_slots, draft, norm_weights, rope_table, window_positions

NAME = "kv_write"
AXIS = "rows"
SIZES = (1, 8, 64, 512, 4096, 16384)
FUNCTION = "fused_kv_norm_rope_write"


@dataclass(frozen=True)
class Shape:
    """Layers and K heads of a draft."""

    name: str
    layers: int
    heads: int
    head_dim: int
    eps: float

    @property
    def kv_size(self) -> int:
        return self.heads * self.head_dim

    @property
    def row_bytes(self) -> int:
        """K and V of a row in all layers."""
        return self.layers * 2 * self.kv_size * 2

    def floor_bytes(self, rows: int) -> int:
        """K and V read and written once; a table row, a position and a loc for each row; the weights."""
        return rows * (2 * self.row_bytes + self.head_dim * 4 + 16) + self.layers * self.head_dim * 2


def of_draft(label: str, name: str) -> Shape:
    """The shape of a real draft."""
    shape: Any = draft(name)
    return Shape(label, shape.layers, shape.kv_heads, shape.head_dim, shape.eps)


SHAPES = (of_draft("L5 NK8 D128", "qwen3-8b-block7"),)
SMALL = (Shape("L2 NK2 D64", 2, 2, 64, 1e-6),)


def cases(sizes: Sequence[int] = SIZES, shapes: Sequence[Shape] = SHAPES) -> list[Case]:
    """Every shape at every size."""
    return [
        Case(NAME, shape.name, AXIS, rows, shape.floor_bytes(rows), functools.partial(KvInputs, shape, rows))
        for shape in shapes
        for rows in sizes
    ]


def small() -> list[Case]:
    """What the oracle judges."""
    return cases((8,))


class Pools:
    """Pools ``[S, NK, D]`` of all layers, poisoned; every copy of the inputs writes slots of its own."""

    def __init__(self, shape: Shape, rows: int, device: torch.device, copies: int) -> None:
        size = copies * rows + 2
        self.both = torch.empty(2, shape.layers, size, shape.heads, shape.head_dim, dtype=torch.bfloat16, device=device)
        self.keys, self.values = (list(part.unbind(0)) for part in self.both.unbind(0))
        self.locs = distinct_slots(copies, rows, size, device)
        self.table = KVPoolTable(self.keys, self.values)
        self.reset()

    def reset(self) -> None:
        """Poison every row with a NaN that no operation writes."""
        self.both.view(torch.int16).fill_(0x7FA5)

    def rows_of(self, copy: int) -> torch.Tensor:
        """``[2, L, T, NK, D]``: K and V at the slots of a copy."""
        return self.both[:, :, self.locs[copy]]

    def untouched(self, copy: int) -> torch.Tensor:
        """Elements outside the slots of ``copy`` that are no longer poison: an int64 of no dimensions."""
        changed = (self.both.view(torch.int16) != 0x7FA5).any(dim=-1).any(dim=-1).any(dim=0).any(dim=0)
        changed[self.locs[copy]] = False
        return changed.sum()


def compare_pools(
    shape: Shape, got: Tensors, need: Tensors, k: torch.Tensor, weights: torch.Tensor, angles: torch.Tensor
) -> str:
    """What speaks against pool rows ``[2, L, T, NK, D]``: V bit for bit, K by the envelope where its bits differ.

    k: K before its norm, ``[L, T, NK, D]``.
    """
    problems = [unequal("V", got["rows"][1], need["rows"][1]), unequal("other slots", got["others"], need["others"])]
    for layer in range(shape.layers):
        keys = (got["rows"][0, layer], need["rows"][0, layer], k[layer])
        problems.append(judge_different(f"K of layer {layer}", *keys, weights[layer], shape.eps, angles))
    return "; ".join(filter(None, problems))


class KvInputs(Inputs):
    """Projected rows ``[T, L * 2 * KV]`` and their slots."""

    def __init__(self, shape: Shape, rows: int, device: torch.device, copies: int) -> None:
        self.shape, self.rows = shape, rows
        self.kv = torch.randn(copies, rows, shape.layers * 2 * shape.kv_size, device=device, dtype=torch.bfloat16)
        self.positions = window_positions(copies, rows, device)
        self.weights = norm_weights(shape.layers, shape.head_dim, device=device)
        self.table = rope_table(shape.head_dim, device)
        self.pools = Pools(shape, rows, device, copies)

    def bound(self, function: Callable[..., Any], meta: Any, **named: Any) -> list[Callable[[], Any]]:
        """``function`` on each copy."""
        shape = self.shape
        sizes = (shape.layers, shape.kv_size, shape.head_dim, shape.eps)
        return [
            functools.partial(function, kv, meta, self.weights, self.table, positions, locs, *sizes, **named)
            for kv, positions, locs in zip(self.kv, self.positions, self.pools.locs, strict=True)
        ]

    def contenders(self, asked: Asked) -> list[Contender | Absent]:
        meta = self.pools.table
        found: list[Contender | Absent] = [Contender(FUSED, self.bound(fused_kv_norm_rope_write, meta))]
        if EAGER in asked.against:
            found.append(Contender(EAGER, self.bound(fused_kv_norm_rope_write, meta, path="eager")))
        found += asked.compiled(self._compiled, self.rows)
        addresses = meta.pointer_table(self.kv.device)
        return found + asked.sglang(FUNCTION, lambda function: self.bound(function, addresses))

    def _compiled(self) -> list[Callable[[], Any]]:
        """The eager path after validation; rules are those of a call without a committed window."""
        shape, function = self.shape, compiled(kv_write_eager)
        sizes = (shape.kv_size, shape.head_dim, shape.eps, True)
        calls: list[Callable[[], Any]] = []
        for kv, positions, locs in zip(self.kv, self.positions, self.pools.locs, strict=True):
            rules = RowRules(locs, positions, None, None, self.pools.table.rows, 0, self.table.shape[0])
            calls.append(functools.partial(function, kv, self.pools.table, self.weights, self.table, rules, *sizes))
        return calls

    def reset(self) -> None:
        self.pools.reset()

    def outputs(self, returned: Any) -> Tensors:
        return {"rows": self.pools.rows_of(0), "others": self.pools.untouched(0)}

    def reference(self) -> Tensors:
        self.bound(fused_kv_norm_rope_write, self.pools.table, path="eager")[0]()
        return self.outputs(None)

    def before(self) -> torch.Tensor:
        """``[2, L, T, NK, D]``: K and V of copy 0."""
        shape = self.shape
        parts = self.kv[0].view(self.rows, shape.layers, 2, shape.heads, shape.head_dim)
        return parts.permute(2, 1, 0, 3, 4)

    def judge(self, got: Tensors) -> str:
        shape, (k, v) = self.shape, self.before()
        angles = self.table[self.positions[0]].repeat_interleave(shape.heads, dim=0)
        problems = [unequal("V", got["rows"][1], v.contiguous())]
        if int(got["others"]):
            problems.append(f"{int(got['others'])} other slots were written")
        for layer in range(shape.layers):
            out, x = (part[layer].reshape(-1, shape.head_dim) for part in (got["rows"][0], k))
            bad = outside(out, x, self.weights[layer], shape.eps, angles)
            problems.append(f"K of layer {layer}: {bad} elements are inadmissible" if bad else "")
        return "; ".join(filter(None, problems))

    def compare(self, got: Tensors, need: Tensors) -> str:
        angles = self.table[self.positions[0]]
        return compare_pools(self.shape, got, need, self.before()[0], self.weights, angles)
