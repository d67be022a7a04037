"""``qk_norm_rope``: norm and RoPE of packed Q and K, in place."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dspark.ops import table_qk_norm_rope_
from dspark.ops.qk_norm_rope.eager import qk_norm_rope_eager

from ..case import EAGER, FUSED, Absent, Asked, Case, Contender, Inputs, Tensors, compiled, unequal
from ..judging import judge_different, outside
from .layout import draft, norm_weights, rope_table, window_positions

NAME = "qk_norm_rope"
AXIS = "rows"
SIZES = (1, 8, 64, 512, 4096, 16384)
GROWTH = tuple(4**power for power in range(10))
FUNCTION = "table_qk_norm_rope_"


@dataclass(frozen=True)
class Shape:
    """Heads of a draft."""

    name: str
    q_heads: int
    k_heads: int
    head_dim: int
    eps: float

    @property
    def columns(self) -> int:
        """Q, K and V of a row."""
        return (self.q_heads + 2 * self.k_heads) * self.head_dim

    def floor_bytes(self, rows: int) -> int:
        """Q and K read and written once; a table row, a position for each row; two weights."""
        heads = (self.q_heads + self.k_heads) * self.head_dim * 2
        return rows * (2 * heads + self.head_dim * 4 + 8) + 2 * self.head_dim * 2


def of_draft(label: str, name: str) -> Shape:
    """The shape of a real draft."""
    shape: Any = draft(name)
    return Shape(label, shape.q_heads, shape.kv_heads, shape.head_dim, shape.eps)


SHAPES = (of_draft("32+8 heads D128", "qwen3-8b-block7"), of_draft("Inkling 64+16 heads D64", "inkling-draft"))
SMALL = (Shape("8+2 heads D64", 8, 2, 64, 1e-5),)


def cases(sizes: Sequence[int] = SIZES, shapes: Sequence[Shape] = SHAPES) -> list[Case]:
    """Every shape at every size."""
    return [
        Case(NAME, shape.name, AXIS, rows, shape.floor_bytes(rows), functools.partial(QkInputs, shape, rows))
        for shape in shapes
        for rows in sizes
    ]


def small() -> list[Case]:
    """What the oracle judges."""
    return cases((8,), SHAPES)


class QkInputs(Inputs):
    """Packed rows; ``reset`` puts them back as they were drawn."""

    def __init__(self, shape: Shape, rows: int, device: torch.device, copies: int) -> None:
        self.shape, self.rows = shape, rows
        self.drawn = torch.randn(copies, rows, shape.columns, device=device, dtype=torch.bfloat16)
        self.qkv = self.drawn.clone()
        self.positions = window_positions(copies, rows, device)
        self.q_weight, self.k_weight = norm_weights(2, shape.head_dim, device=device).unbind(0)
        self.table = rope_table(shape.head_dim, device)

    def bound(self, function: Callable[..., Any], *rest: Any, **named: Any) -> list[Callable[[], Any]]:
        """``function`` on each copy."""
        shape = self.shape
        weights = (self.q_weight, self.k_weight, self.table, shape.q_heads, shape.k_heads, shape.head_dim, shape.eps)
        return [
            functools.partial(function, qkv, positions, *weights, *rest, **named)
            for qkv, positions in zip(self.qkv, self.positions, strict=True)
        ]

    def contenders(self, asked: Asked) -> list[Contender | Absent]:
        found: list[Contender | Absent] = [Contender(FUSED, self.bound(table_qk_norm_rope_))]
        if EAGER in asked.against:
            found.append(Contender(EAGER, self.bound(table_qk_norm_rope_, path="eager")))
        # What the eager path is given after validation: eps of K, rotary_dim, pairing.
        rest = (self.shape.eps, self.shape.head_dim, True)
        found += asked.compiled(lambda: self.bound(compiled(qk_norm_rope_eager), *rest), self.rows)
        return found + asked.sglang(FUNCTION, self.bound)

    def reset(self) -> None:
        self.qkv.copy_(self.drawn)

    def outputs(self, returned: Any) -> Tensors:
        return {"qkv": self.qkv[0].clone()}

    def reference(self) -> Tensors:
        self.bound(table_qk_norm_rope_, path="eager")[0]()
        return self.outputs(None)

    def parts(self, rows: torch.Tensor) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
        """Q and K ``[T, heads, D]`` of packed rows, with their weights."""
        shape = self.shape
        heads = rows.view(rows.shape[0], -1, shape.head_dim)
        k_end = shape.q_heads + shape.k_heads
        return [("Q", heads[:, : shape.q_heads], self.q_weight), ("K", heads[:, shape.q_heads : k_end], self.k_weight)]

    def judge(self, got: Tensors) -> str:
        angles = self.table[self.positions[0]]
        problems = [self._v_changed(got["qkv"])]
        for (name, out, weight), (_, x, _) in zip(self.parts(got["qkv"]), self.parts(self.drawn[0]), strict=True):
            flat = (out.reshape(-1, self.shape.head_dim), x.reshape(-1, self.shape.head_dim))
            bad = outside(*flat, weight, self.shape.eps, angles.repeat_interleave(out.shape[1], dim=0))
            problems.append(f"{name}: {bad} of {out.numel()} elements are inadmissible" if bad else "")
        return "; ".join(filter(None, problems))

    def _v_changed(self, rows: torch.Tensor) -> str:
        start = (self.shape.q_heads + self.shape.k_heads) * self.shape.head_dim
        return unequal("V", rows[:, start:], self.drawn[0, :, start:])

    def compare(self, got: Tensors, need: Tensors) -> str:
        problems = [self._v_changed(got["qkv"])]
        angles = self.table[self.positions[0]]
        sides = (self.parts(rows) for rows in (got["qkv"], need["qkv"], self.drawn[0]))
        for (name, out, weight), (_, wanted, _), (_, x, _) in zip(*sides, strict=True):
            problems.append(judge_different(name, out, wanted, x, weight, self.shape.eps, angles))
        return "; ".join(filter(None, problems))
