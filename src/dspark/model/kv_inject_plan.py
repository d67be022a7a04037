"""What a call of ``kv_inject`` leads to, found once for a draft, its pool and rows that look alike.

Nothing tells that a parameter was bound anew, moved, or given other data (fault F1-23), so every call reads what the
checks and the views rest on: the address, place in its storage, shape, strides and dtype of each weight and each pool
buffer, and the layers' numbers. Only what follows from them is remembered, and only while all of them are the same.
Nothing here holds a weight or a buffer, whose memory their owner may want back.

The reading must cost less than it saves. So it looks into the dictionaries of modules, as is right where their classes
leave attributes to them (:func:`_stores_plainly`); of other layers and pools nothing is remembered, and each of their
calls is validated.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import nn

from dspark.ops.kv_write import WritePlan
from dspark.ops.plans import Plan, Plans, layouts

_LAYER = ("q_size", "kv_size", "head_dim", "num_kv_heads", "layer_id", "k_scale", "v_scale", "rotary_emb")
_of_layer = itemgetter(*_LAYER, "_modules")
DRAFTS = 64
"""Pairs of a draft and a pool whose plans are kept; with one more all are forgotten."""


class Strided(NamedTuple):
    """A view as numbers: what ``as_strided`` takes."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, view: torch.Tensor) -> Strided:
        return cls(tuple(view.shape), view.stride(), int(view.storage_offset()))


@dataclass(slots=True)
class InjectPlan(Plan):
    """width: W. window: locs come as ``[B, W]``. reserved: the pool's reserved rows.

    What only the fused path needs is None until it runs: views, of all QKV and all norm weights in the storages of the
    first ones; write, the plan of ``kv_write``.
    """

    width: int | None
    window: bool
    reserved: int
    views: tuple[Strided, Strided] | None = None
    write: WritePlan | None = None


class Draft(NamedTuple):
    """What a call reads of its layers and its pool: the facts that its plans rest on, and what they are about."""

    facts: list[Any]
    first: Any
    weight: torch.Tensor
    norm: torch.Tensor
    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]
    valid: torch.Tensor | None


def read(layers: Iterable[Any], pool: Any) -> Draft | None:
    """The draft, with its facts; None where a layer or the pool does not hold them as :func:`_read` expects."""
    try:
        return _read(layers, pool)
    except Exception:  # what is missing or odd is the validation's to name
        return None


def _read(layers: Iterable[Any], pool: Any) -> Draft | None:
    get_key, get_value, _ = pool.get_key_buffer, pool.get_value_buffer, pool.set_kv_buffer  # each must be there
    valid = getattr(pool, "valid_rows", None)
    facts: list[Any] = [(int(getattr(pool, "reserved_rows", 0)), layouts(valid))]
    first = shared = None
    tensors: list[torch.Tensor] = []
    for layer in layers:
        q_size, kv_size, head_dim, heads, id, k_scale, v_scale, rotary, modules = _of_layer(layer.__dict__)
        projection, norm = modules["qkv_proj"], modules["k_norm"]
        parameters, eps, unscaled = projection._parameters, norm.variance_epsilon, k_scale is None and v_scale is None
        weight, scale = parameters["weight"], norm._parameters["weight"]
        if first is None:
            first, shared, table, dim = layer, rotary, rotary.cos_sin_cache, rotary.rotary_dim
            facts += (
                (type(q_size), type(kv_size), type(head_dim), type(eps), type(dim), dim),
                layouts(table),
                (rotary.table_is_whole_effect, rotary.is_neox_style),
            )
        elif rotary is not shared:
            return None
        # With its address and dtype, the place of a weight in its storage tells one storage from another.
        facts += (
            (type(layer), q_size, kv_size, head_dim, heads, unscaled, type(norm), norm.is_plain, eps),
            (type(projection), "quant_method" in projection.__dict__, parameters["bias"] is None),
            (weight.storage_offset(), scale.storage_offset()),
        )
        tensors += (weight, scale, get_key(id), get_value(id))
    # No two devices share an address, so it says which one a tensor is on.
    addresses = [tensor.data_ptr() for tensor in tensors]
    if not all(addresses):
        return None
    facts += (
        addresses,
        [type(tensor) for tensor in tensors],
        [tensor.dtype for tensor in tensors],
        [tensor.shape for tensor in tensors],
        [tensor.stride() for tensor in tensors],
    )
    return Draft(facts, first, tensors[0], tensors[1], tuple(tensors[2::4]), tuple(tensors[3::4]), valid)


def _stores_plainly(kind: type, *names: str) -> bool:
    """Whether an instance answers for these attributes with what its own dictionaries hold."""
    usual: tuple[Any, ...] = (object.__getattribute__, nn.Module.__getattr__)
    reads: tuple[Any, ...] = (kind.__getattribute__, getattr(kind, "__getattr__", None))
    return reads == usual and not any(hasattr(kind, name) for name in names)


def _are_plain(layers: Iterable[Any]) -> bool:
    """Whether what :func:`_read` finds is what the checks would, as long as the types are the same."""
    return all(
        _stores_plainly(type(layer), "qkv_proj", "k_norm", *_LAYER)
        and _stores_plainly(type(layer.qkv_proj), "weight", "bias", "quant_method")
        and _stores_plainly(type(layer.k_norm), "weight")
        for layer in layers
    )


class Drafts:
    """The plans of each pair of a draft and a pool."""

    def __init__(self) -> None:
        self._drafts: dict[tuple[int, int], tuple[list[Any], Plans[InjectPlan]]] = {}

    def find(self, layers: Iterable[Any], pool: Any) -> tuple[Draft | None, Plans[InjectPlan]]:
        """The draft as it is now, and the plans that were made of the same facts.

        None, and plans that nobody will find again, for layers and pools that cannot be read.
        """
        draft = read(layers, pool)
        if draft is None:
            return None, Plans()
        # The objects only say where to look: another draft may have their ids by now, and the facts decide.
        place = (id(draft.first), id(pool))
        known = self._drafts.get(place)
        if known is not None and known[0] == draft.facts:
            return draft, known[1]
        if not _are_plain(layers):
            return None, Plans()
        if len(self._drafts) >= DRAFTS:
            self._drafts.clear()
        plans: Plans[InjectPlan] = Plans()
        self._drafts[place] = (draft.facts, plans)
        return draft, plans


def rows_key(
    hidden: torch.Tensor,
    positions: torch.Tensor,
    locs: torch.Tensor,
    lens: torch.Tensor | None,
    width: int | None,
) -> Hashable:
    """All that the plan is made of, but the draft; None for what cannot be read."""
    try:
        return layouts(hidden, positions, locs, lens), width, type(width)
    except Exception:
        return None
