"""``write_target_hidden_kv``: target rows to K and V of every draft layer, against its projection alone.

``projection`` is the one product that the call makes, without norm, RoPE and write; ``sglang`` is one product over a
copy of the layers' weights, then SGLang's own kernel. The fallback waits for the device, so no graph can hold it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from dspark import dispatch
from dspark.model.attention import DFlashAttention
from dspark.model.kv_inject import write_target_hidden_kv
from dspark.model.rotary import RotaryTable
from dspark.model.stacked import StackedLayers, stacked_view
from dspark.ops import fused_kv_norm_rope_write

from ..case import COMPILE, EAGER, FUSED, Absent, Asked, Case, Contender, Inputs, Tensors
from ..judging import outside
from ..timing import allocated_by
from . import kv_write
from .layout import draft, norm_weights, rope_table, window_positions

NAME = "write_target_hidden_kv"
AXIS = "rows"
SIZES = (1, 8, 64, 512, 4096, 16384)
PROJECTION = "projection"


@dataclass(frozen=True)
class Shape:
    """A draft's attention layers over the target's hidden size."""

    name: str
    hidden: int
    q_heads: int
    pool: kv_write.Shape

    @property
    def columns(self) -> int:
        """N: K and V of all layers."""
        return self.pool.layers * 2 * self.pool.kv_size

    @property
    def weight_bytes(self) -> int:
        """The K and V rows of every layer's projection."""
        return self.columns * self.hidden * 2

    def floor_bytes(self, rows: int) -> int:
        """Weights and hidden rows read; K and V written; a table row, a position and a loc for each row."""
        return self.weight_bytes + rows * (self.hidden * 2 + self.pool.row_bytes + self.pool.head_dim * 4 + 16)


def of_draft(label: str, name: str) -> Shape:
    """The shape of a real draft."""
    shape: Any = draft(name)
    return Shape(label, shape.hidden, shape.q_heads, kv_write.of_draft(label, name))


SHAPES = (of_draft("Inkling H6144 L5 N10240", "inkling-draft"),)
SMALL = (Shape("H128 L3 N384", 128, 2, kv_write.Shape("", 3, 1, 64, 1e-5)),)


def cases(sizes: Sequence[int] = SIZES, shapes: Sequence[Shape] = SHAPES) -> list[Case]:
    """Every shape at every size."""
    return [
        Case(NAME, shape.name, AXIS, rows, shape.floor_bytes(rows), functools.partial(HiddenInputs, shape, rows))
        for shape in shapes
        for rows in sizes
    ]


def small() -> list[Case]:
    """What the oracle judges: a narrow draft."""
    return cases((8,), SMALL)


class LayerPool:
    """The pools of ``kv_write`` with the accessors of an engine's pool, and flags of rows that hold K and V."""

    def __init__(self, pools: kv_write.Pools) -> None:
        self.valid_rows = torch.zeros(pools.table.rows, dtype=torch.bool, device=pools.both.device)
        self.get_key_buffer, self.get_value_buffer = pools.keys.__getitem__, pools.values.__getitem__

    def set_kv_buffer(
        self, layer: Any, loc: torch.Tensor, cache_k: torch.Tensor, cache_v: torch.Tensor, *scales: object
    ) -> None:
        self.get_key_buffer(layer.layer_id)[loc] = cache_k
        self.get_value_buffer(layer.layer_id)[loc] = cache_v
        self.valid_rows[loc] = True


class HiddenInputs(Inputs):
    """Layers with random weights, rows to project, and the pools that they go to."""

    def __init__(self, shape: Shape, rows: int, device: torch.device, copies: int) -> None:
        self.shape, self.rows, self.pool_shape = shape, rows, shape.pool
        # Integers, so that every sum is exact in fp32: whoever makes the product, its bits are the same.
        self.hidden = torch.randint(-4, 5, (copies, rows, shape.hidden), device=device).to(torch.bfloat16)
        self.positions = window_positions(copies, rows, device)
        self.table = rope_table(shape.pool.head_dim, device)
        self.layers = self._layers(device)
        self.pools = kv_write.Pools(shape.pool, rows, device, copies)
        self.pool = LayerPool(self.pools)

    def _layers(self, device: torch.device) -> Any:
        pool, rotary = self.pool_shape, RotaryTable(self.table.shape[1], 1e6, 0, device=device)
        rotary.cos_sin_cache = self.table
        layers = [
            DFlashAttention(
                self.shape.hidden,
                self.shape.q_heads,
                pool.heads,
                pool.head_dim,
                rotary,
                layer_id=layer,
                eps=pool.eps,
                dtype=torch.bfloat16,
                device=device,
            ).requires_grad_(False)
            for layer in range(pool.layers)
        ]
        for layer in layers:
            layer.qkv_proj.weight.random_(-3, 4)
            layer.k_norm.weight.copy_(norm_weights(pool.head_dim, device=device))
        return StackedLayers(layers)

    @functools.cached_property
    def norms(self) -> torch.Tensor:
        """``[L, D]``: the layers' K norms."""
        found = stacked_view([layer.k_norm.weight for layer in self.layers])
        assert found is not None
        return found

    def projected(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[L, T, 2 * KV]``: the product over views of the layers' weights, as the call makes it."""
        weights = stacked_view([layer.qkv_proj.weight for layer in self.layers])
        assert weights is not None
        start = self.shape.q_heads * self.pool_shape.head_dim
        return torch.bmm(hidden.expand(len(weights), *hidden.shape), weights[:, start:].transpose(1, 2))

    def contenders(self, asked: Asked) -> list[Contender | Absent]:
        rows = list(zip(self.hidden, self.positions, self.pools.locs, strict=True))
        whole = [functools.partial(write_target_hidden_kv, self.layers, self.pool, *row) for row in rows]
        found: list[Contender | Absent] = [
            Contender(FUSED, whole),
            Contender(PROJECTION, [functools.partial(self.projected, row[0]) for row in rows], judged=False),
        ]
        if EAGER in asked.against:
            forced = [functools.partial(by_layer, call) for call in whole]
            found.append(Contender(EAGER, forced, captured=False))
        if COMPILE in asked.against:
            found.append(Absent(COMPILE, "not tried: its time is the product's, which the compiler would call too"))
        return found + asked.sglang(kv_write.FUNCTION, self._sglang)

    def _sglang(self, function: Callable[..., Any]) -> list[Callable[[], Any]]:
        """One product over a copy of the layers' K and V weights, made once, then one launch."""
        pool, start = self.pool_shape, self.shape.q_heads * self.pool_shape.head_dim
        weights = torch.cat([layer.qkv_proj.weight[start:] for layer in self.layers])
        meta = self.pools.table.pointer_table(weights.device)
        sizes = (pool.layers, pool.kv_size, pool.head_dim, pool.eps)

        def call(hidden: torch.Tensor, positions: torch.Tensor, locs: torch.Tensor) -> None:
            kv = functional.linear(hidden, weights)
            function(kv, meta, self.norms, self.table, positions, locs, *sizes)

        rows = zip(self.hidden, self.positions, self.pools.locs, strict=True)
        return [functools.partial(call, *row) for row in rows]

    def reset(self) -> None:
        self.pools.reset()

    def outputs(self, returned: Any) -> Tensors:
        return {"rows": self.pools.rows_of(0), "others": self.pools.untouched(0)}

    def before(self) -> torch.Tensor:
        """``[2, L, T, NK, D]``: K before its norm, and V, of copy 0."""
        pool = self.pool_shape
        return (
            self.projected(self.hidden[0])
            .view(pool.layers, self.rows, 2, pool.heads, pool.head_dim)
            .permute(2, 0, 1, 3, 4)
        )

    def reference(self) -> Tensors:
        """The same product, then the definition of ``kv_write``."""
        pool, kv = self.pool_shape, self.projected(self.hidden[0])
        sizes = (pool.layers, pool.kv_size, pool.head_dim, pool.eps)
        where = (self.table, self.positions[0], self.pools.locs[0])
        definition: Callable[..., None] = functools.partial(fused_kv_norm_rope_write, path="eager")
        definition(kv, self.pools.table, self.norms, *where, *sizes)
        return self.outputs(None)

    def judge(self, got: Tensors) -> str:
        pool, (k, v) = self.pool_shape, self.before()
        angles = self.table[self.positions[0]].repeat_interleave(pool.heads, dim=0)
        problems = [different_product("V", got["rows"][1], v)]
        if int(got["others"]):
            problems.append(f"{int(got['others'])} other slots were written")
        for layer in range(pool.layers):
            out, x = (part[layer].reshape(-1, pool.head_dim) for part in (got["rows"][0], k))
            bad = outside(out, x, self.norms[layer], pool.eps, angles)
            problems.append(f"K of layer {layer}: {bad} elements are inadmissible" if bad else "")
        return "; ".join(filter(None, problems))

    def compare(self, got: Tensors, need: Tensors) -> str:
        """By ``kv_write``'s rule where the products agree; a product that is summed in narrower pieces is only near."""
        if torch.equal(got["rows"][1].view(torch.int16), need["rows"][1].view(torch.int16)):
            angles = self.table[self.positions[0]]
            return kv_write.compare_pools(self.pool_shape, got, need, self.before()[0], self.norms, angles)
        problems = [different_product(name, got["rows"][part], need["rows"][part]) for part, name in enumerate("KV")]
        if int(got["others"]):
            problems.append(f"{int(got['others'])} other slots were written")
        return "; ".join(filter(None, problems))

    def extra(self, contender: Contender) -> dict[str, int]:
        """Bytes that a call allocates, beside what its product and one layer's weights take."""
        return {
            "allocated_bytes": allocated_by(contender.calls[0]),
            "product_bytes": self.rows * self.shape.columns * 2,
            "weight_bytes": self.shape.weight_bytes,
        }


def by_layer(call: Callable[[], Any]) -> None:
    """``call`` on its fallback."""
    with dispatch.forced("eager"):
        call()


PRODUCT_ERROR = 1e-2
"""bf16 operands: two orders of summation differ by far less, a wrong weight by about one."""


def different_product(name: str, got: torch.Tensor, need: torch.Tensor) -> str:
    """What speaks against ``got`` where ``need`` is right but for the order of a sum; empty: nothing."""
    error = float((got.float() - need.float()).norm() / need.float().norm())
    return "" if error < PRODUCT_ERROR else f"{name}: relative error {error:.3g}"
