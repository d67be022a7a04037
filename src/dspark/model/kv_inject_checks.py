"""What the one-projection path of ``kv_inject`` needs, as data."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from dspark import dispatch
from dspark.dispatch import Check
from dspark.model.attention import has_sliceable_weight, is_plain_norm, plain_table
from dspark.model.stacked import stacked_view


@runtime_checkable
class KVSetter(Protocol):
    """What the fallback needs of a pool."""

    def set_kv_buffer(
        self,
        layer: Any,
        loc: torch.Tensor,
        cache_k: torch.Tensor,
        cache_v: torch.Tensor,
        k_scale: float | None = None,
        v_scale: float | None = None,
    ) -> None: ...


@runtime_checkable
class KVAccessors(Protocol):
    """What the fused path needs of a pool: the buffers ``[S, NK, D]`` of a layer."""

    def get_key_buffer(self, layer_id: int) -> torch.Tensor: ...
    def get_value_buffer(self, layer_id: int) -> torch.Tensor: ...


@dataclass(frozen=True)
class Facts:
    """What one call looks like to the checks: for each, the value that speaks against it, or None."""

    pool_without_accessors: Hashable = None
    pool_shape: Hashable = None
    pool_dtype: Hashable = None
    pool_inner_strides: Hashable = None
    head_dim_differs: Hashable = None
    kv_size_differs: Hashable = None
    rotary_without_table: Hashable = None
    tables_distinct: Hashable = None
    pairing_differs: Hashable = None
    qkv_weight_not_sliceable: Hashable = None
    qkv_bias: Hashable = None
    qkv_weights_not_stacked: Hashable = None
    hidden_dtype: Hashable = None
    k_norm_not_plain: Hashable = None
    k_norm_eps_differs: Hashable = None
    k_norm_weights_not_stacked: Hashable = None
    kv_scale: Hashable = None


def _none(field: str) -> Callable[[Facts], tuple[bool, Hashable]]:
    def holds(facts: Facts) -> tuple[bool, Hashable]:
        value = getattr(facts, field)
        return value is None, value

    return holds


def _check(id: str, requires: str, after: tuple[str, ...] = ()) -> Check:
    return Check(id, requires, _none(id.replace("-", "_")), after)


_ACCESSORS = ("pool-without-accessors",)
_SAME_HEADS = ("head-dim-differs", "kv-size-differs")
CHECKS = (
    _check("pool-without-accessors", "the pool must offer get_key_buffer and get_value_buffer"),
    _check("pool-shape", "every buffer of the pool must be [S, NK, D]", _ACCESSORS),
    _check("pool-dtype", "the pool must store bfloat16", _ACCESSORS),
    _check("pool-inner-strides", "heads and elements of a pool row must be dense", (*_ACCESSORS, "pool-shape")),
    _check("head-dim-differs", "all layers must have one head_dim"),
    _check("kv-size-differs", "all layers must have one K and V width"),
    _check("rotary-without-table", "the whole effect of every layer's rotary must be its cos_sin_cache table"),
    _check("tables-distinct", "all layers must share one table (the same tensor)", ("rotary-without-table",)),
    _check("pairing-differs", "all layers must pair rotated elements alike", ("rotary-without-table",)),
    _check("qkv-weight-not-sliceable", "every QKV weight must be a plain floating matrix"),
    _check("qkv-bias", "no layer may have a QKV bias"),
    _check(
        "qkv-weights-not-stacked",
        "the QKV weights must be views of one buffer: call StackedLayers.restack()",
        ("qkv-weight-not-sliceable", *_SAME_HEADS),
    ),
    _check("hidden-dtype", "hidden and the QKV weights must be bfloat16", ("qkv-weight-not-sliceable",)),
    _check("k-norm-not-plain", "every k_norm must be a plain RMS norm: a weight and an eps"),
    _check("k-norm-eps-differs", "all layers must have one k_norm eps", ("k-norm-not-plain",)),
    _check(
        "k-norm-weights-not-stacked",
        "the k_norm weights must be views of one buffer: call StackedLayers.restack()",
        ("k-norm-not-plain", "head-dim-differs"),
    ),
    _check("kv-scale", "no layer may have a k_scale or v_scale"),
)
OP = dispatch.register("kv_inject", CHECKS)


def _differing(values: Sequence[Hashable]) -> Hashable:
    """The values when they are not all equal, else None."""
    return tuple(values) if len(set(values)) > 1 else None


def _offenders(layers: Sequence[Any], bad: Callable[[Any], bool]) -> Hashable:
    """Indices of the layers that are bad, or None."""
    return tuple(index for index, layer in enumerate(layers) if bad(layer)) or None


def _table_key(layer: Any) -> Hashable:
    table = plain_table(layer.rotary_emb)
    return None if table is None else (table.data_ptr(), tuple(table.shape), table.stride(), table.dtype)


def _distinct_tables(layers: Sequence[Any]) -> Hashable:
    keys = [_table_key(layer) for layer in layers]
    groups = {key: index for index, key in enumerate(dict.fromkeys(keys))}
    return None if len(groups) <= 1 else tuple(groups[key] for key in keys)


def _pool_facts(layers: Sequence[Any], pool: object) -> dict[str, Hashable]:
    if not isinstance(pool, KVAccessors):
        return {"pool_without_accessors": type(pool).__name__}
    buffers = [(layer, buffer) for layer in layers for buffer in pool_buffers(pool, layer)]
    shapes = [tuple(b.shape[1:]) for layer, b in buffers if b.shape[1:] != (layer.num_kv_heads, layer.head_dim)]
    rows = _differing([b.shape[0] for _, b in buffers])
    dtypes = dict.fromkeys(str(b.dtype) for _, b in buffers if b.dtype != torch.bfloat16)
    strides = [b.stride()[1:] for layer, b in buffers if b.dim() == 3 and b.stride()[1:] != (layer.head_dim, 1)]
    return {
        "pool_shape": shapes[0] if shapes else rows,
        "pool_dtype": tuple(dtypes) or None,
        "pool_inner_strides": strides[0] if strides else None,
    }


def pool_buffers(pool: KVAccessors, layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V buffer of a layer."""
    return pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)


def _is_stacked(layers: Sequence[Any], weight: Callable[[Any], torch.Tensor]) -> bool:
    return stacked_view([weight(layer) for layer in layers]) is not None


def gather(layers: Sequence[Any], pool: object, hidden: torch.Tensor) -> Facts:
    """The facts of one call; reads shapes, strides and addresses only."""
    sliceable = _offenders(layers, lambda layer: not has_sliceable_weight(layer))
    plain = _offenders(layers, lambda layer: not is_plain_norm(layer.k_norm))
    dtypes = {hidden.dtype} | ({layer.qkv_proj.weight.dtype for layer in layers} if sliceable is None else set())
    qkv_stacked = sliceable is None and _is_stacked(layers, lambda layer: layer.qkv_proj.weight)
    norms_stacked = plain is None and _is_stacked(layers, lambda layer: layer.k_norm.weight)
    return Facts(
        **_pool_facts(layers, pool),
        head_dim_differs=_differing([layer.head_dim for layer in layers]),
        kv_size_differs=_differing([layer.kv_size for layer in layers]),
        rotary_without_table=_offenders(layers, lambda layer: plain_table(layer.rotary_emb) is None),
        tables_distinct=_distinct_tables(layers),
        pairing_differs=_differing([getattr(layer.rotary_emb, "is_neox_style", None) for layer in layers]),
        qkv_weight_not_sliceable=sliceable,
        qkv_bias=_offenders(layers, lambda layer: getattr(layer.qkv_proj, "bias", None) is not None),
        qkv_weights_not_stacked=None if qkv_stacked else len(layers),
        hidden_dtype=tuple(sorted(map(str, dtypes))) if dtypes != {torch.bfloat16} else None,
        k_norm_not_plain=plain,
        k_norm_eps_differs=_differing([getattr(layer.k_norm, "variance_epsilon", None) for layer in layers]),
        k_norm_weights_not_stacked=None if norms_stacked else len(layers),
        kv_scale=_offenders(layers, lambda layer: layer.k_scale is not None or layer.v_scale is not None),
    )
