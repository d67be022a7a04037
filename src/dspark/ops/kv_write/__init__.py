"""``kv_write``: K norm, K RoPE and the write of K and V into the pools of all layers."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cache
from types import ModuleType

import torch

from dspark import dispatch, faults, machine
from dspark.ops import arguments
from dspark.ops.kv_write.checks import OP, Facts
from dspark.ops.kv_write.eager import RowRules, kv_write_eager
from dspark.ops.plans import KernelPlan, Plans, layouts, requires_grad
from dspark.ops.pool_table import KVPoolTable


@dataclass(slots=True)
class WritePlan(KernelPlan):
    """eps: in fp32. pool_rows: S, or None where there is no bound. empty: there is nothing to write.

    pools: the pointer table of the pools' addresses, which are part of the key; None until a fused call needs it, since
    it is not built for the eager path, nor during a CUDA graph capture. aligned_bytes: what divides them, found then.
    """

    eps: float
    pool_rows: int | None
    empty: bool
    pools: torch.Tensor | None = None
    aligned_bytes: int = 0


_plans: Plans[WritePlan] = Plans()


def fused_kv_norm_rope_write(
    kv: torch.Tensor,
    meta: KVPoolTable | torch.Tensor,
    k_norm_weights: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    positions: torch.Tensor,
    locs: torch.Tensor,
    num_layers: int,
    kv_size: int,
    head_dim: int,
    eps: float,
    commit_lens: torch.Tensor | None = None,
    locs_row_width: int | None = None,
    is_neox_style: bool = True,
    rotary_dim: int | None = None,
    *,
    pool_rows: int | None = None,
    reserved_rows: int = 0,
    path: str | None = None,
) -> None:
    """Norm and rotate K, and write K and V of every layer to their pool rows (CONTRACTS.md sections 2 and 4).

    kv: ``[T, L * 2 * KV]``, per layer K then V, head-major, row stride free; or ``[L, T, 2 * KV]``. bf16; fp16 and fp32
    are computed by the eager path, K rounded to bf16.
    meta: a :class:`KVPoolTable`, or int64 ``[L, 4]`` with K address, V address, K and V row stride in elements (bf16,
    inner dims dense, fused path only; without ``pool_rows`` locs have no upper bound, which is not memory-safe).
    k_norm_weights: ``[L, D]`` bf16 or fp32. cos_sin_cache: ``[P, R]`` fp32, cos then sin.
    positions, locs: ``[T]`` int32 or int64, any stride. K of row t goes to row ``locs[t]`` of its layer's K pool, V as
    raw bits to that row of the V pool.
    commit_lens ``[B]`` with locs_row_width W: ``locs`` is the flattened ``[B, W]`` window, and column j of row b is
    committed iff ``j < commit_lens[b]``. Both or neither.
    pool_rows: S for pools by pointer. reserved_rows: rows below it are never written.
    path: ``auto``, ``fused``, ``eager`` or None (see :mod:`dspark.dispatch`).

    A row that is not committed, or whose loc is negative or reserved, is skipped, and its K and V are not read.
    Otherwise a loc beyond the pool or a position outside the table sets a fault (``kv_write/loc-out-of-range``,
    ``kv_write/position-out-of-range``) and the row is not written. Two written rows with one loc are undefined, and
    reported in debug mode (``kv_write/duplicate-loc``).

    Raises ``ValueError``, before anything is written, for shapes, dtypes and devices that no path can compute, and
    :class:`dspark.dispatch.FallbackError` when pools by pointer would need the eager path.
    """
    tensors = (kv, meta, k_norm_weights, cos_sin_cache, positions, locs, commit_lens)
    call = (*tensors, num_layers, kv_size, head_dim, eps, locs_row_width, rotary_dim, pool_rows, reserved_rows)
    key = _key(*call, is_neox_style)
    plan = _plans.find(key) or _plans.keep(key, validated(*call))
    write(plan, *tensors, locs_row_width, kv_size, head_dim, is_neox_style, reserved_rows, path)


def write(
    plan: WritePlan,
    kv: torch.Tensor,
    meta: KVPoolTable | torch.Tensor,
    k_norm_weights: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    positions: torch.Tensor,
    locs: torch.Tensor,
    commit_lens: torch.Tensor | None,
    locs_row_width: int | None,
    kv_size: int,
    head_dim: int,
    is_neox_style: bool,
    reserved_rows: int,
    path: str | None,
) -> None:
    """Decide and call; ``plan`` is that of the arguments."""
    taken = dispatch.take(plan.decision, path)
    if plan.empty:
        return
    table_rows = cos_sin_cache.shape[0]
    rules = RowRules(locs, positions, commit_lens, locs_row_width, plan.pool_rows, reserved_rows, table_rows)
    if faults.debugging():
        rules.report_duplicates()
    shape = (kv_size, head_dim, plan.eps, is_neox_style)
    if taken is dispatch.Path.FUSED:
        if isinstance(meta, KVPoolTable):
            if plan.pools is None:
                plan.pools, plan.aligned_bytes = meta.pointer_table(kv.device), meta.aligned_bytes()
            pools, valid, aligned = plan.pools, meta.valid, plan.aligned_bytes
        else:
            # What it points at is not known here, so nothing but an element's own alignment is promised.
            pools, valid, aligned = meta, None, kv.element_size()
        _kernel().kv_write_fused(plan, kv, pools, k_norm_weights, cos_sin_cache, rules, *shape, valid, aligned)
    else:
        assert isinstance(meta, KVPoolTable)  # the check pools-by-pointer refuses the other
        kv_write_eager(kv, meta, k_norm_weights, cos_sin_cache, rules, *shape)
    faults.finish(kv.device)


@cache
def _kernel() -> ModuleType:
    from dspark.ops.kv_write import kernel

    return kernel


def _key(
    kv: torch.Tensor,
    meta: KVPoolTable | torch.Tensor,
    weights: torch.Tensor,
    table: torch.Tensor,
    positions: torch.Tensor,
    locs: torch.Tensor,
    lens: torch.Tensor | None,
    *numbers: float | None,
) -> Hashable:
    """All that the plan is made of; None for what cannot be read, or loses a gradient."""
    try:
        if torch.is_grad_enabled() and requires_grad(kv, weights, table, positions, locs, lens, *_pool_tensors(meta)):
            return None
        tensors = layouts(kv, weights, table, positions, locs, lens)
        return tensors, _pool_key(meta), numbers, tuple(map(type, numbers))
    except Exception:
        return None


def _pool_key(meta: KVPoolTable | torch.Tensor) -> Hashable:
    if not isinstance(meta, KVPoolTable):
        return layouts(meta)
    first = meta.keys[0]  # without layers there is nothing to write, and no key
    return first.shape, first.device, meta.layout(), layouts(meta.valid)


def validated(
    kv: torch.Tensor,
    meta: KVPoolTable | torch.Tensor,
    k_norm_weights: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    positions: torch.Tensor,
    locs: torch.Tensor,
    commit_lens: torch.Tensor | None,
    num_layers: int,
    kv_size: int,
    head_dim: int,
    eps: float,
    locs_row_width: int | None,
    rotary_dim: int | None,
    pool_rows: int | None,
    reserved_rows: int,
) -> WritePlan:
    """The plan of a call; ``ValueError`` as in :func:`fused_kv_norm_rope_write`."""
    rotary_dim = _require_sizes(num_layers, kv_size, head_dim, rotary_dim)
    tokens = _require_kv(kv, num_layers, kv_size)
    for name, index in (("positions", positions), ("locs", locs)):
        arguments.require_shape(name, index, (tokens,), "[T] of kv")
        arguments.require_dtype(name, index, arguments.INDEX_DTYPES)
    _require_window(tokens, commit_lens, locs_row_width)
    arguments.require_shape("k_norm_weights", k_norm_weights, (num_layers, head_dim), "[L, D]")
    arguments.require_floating("k_norm_weights", k_norm_weights)
    arguments.require_rank("cos_sin_cache", cos_sin_cache, 2)
    arguments.require_shape("cos_sin_cache", cos_sin_cache, (cos_sin_cache.shape[0], rotary_dim), "[P, rotary_dim]")
    arguments.require_floating("cos_sin_cache", cos_sin_cache)
    eps = arguments.require_eps("eps", eps)
    arguments.require_int("reserved_rows", reserved_rows, 0)
    pool_rows = _require_pools(meta, num_layers, kv_size, head_dim, pool_rows)
    tensors = {
        "kv": kv,
        "k_norm_weights": k_norm_weights,
        "cos_sin_cache": cos_sin_cache,
        "positions": positions,
        "locs": locs,
        "commit_lens": commit_lens,
    }
    named = {"meta": meta} if isinstance(meta, torch.Tensor) else {"meta": meta.keys[0]} if meta.keys else {}
    arguments.require_one_device(**tensors, **named)
    pools = {f"meta[{index}]": tensor for index, tensor in enumerate(_pool_tensors(meta))}
    arguments.require_no_grad(**tensors, **pools)
    facts = Facts(
        machine=machine.facts(),
        device_type=kv.device.type,
        kv_dtype=kv.dtype,
        kv_column_stride=kv.stride(-1),
        weight_dtype=k_norm_weights.dtype,
        table_dtype=cos_sin_cache.dtype,
        table_column_stride=cos_sin_cache.stride(1),
        head_dim=head_dim,
        pool_dtypes=() if isinstance(meta, torch.Tensor) else meta.dtypes,
        pool_inner_strides=() if isinstance(meta, torch.Tensor) else meta.inner_strides,
        pools_by_pointer=isinstance(meta, torch.Tensor),
    )
    empty = tokens == 0 or num_layers == 0 or kv_size == 0
    return WritePlan(facts.machine, dispatch.decide(OP, facts), eps, pool_rows, empty)


def _require_sizes(num_layers: int, kv_size: int, head_dim: int, rotary_dim: int | None) -> int:
    arguments.require_int("num_layers", num_layers, 0)
    arguments.require_int("head_dim", head_dim, 2)
    arguments.require_int("kv_size", kv_size, 0)
    if kv_size % head_dim:
        raise ValueError(f"kv_size: got {kv_size}, need a multiple of head_dim = {head_dim}")
    return arguments.require_rotary_dim(rotary_dim, head_dim)


def _require_kv(kv: torch.Tensor, num_layers: int, kv_size: int) -> int:
    """T, from either layout of kv."""
    arguments.require_tensor("kv", kv)
    if kv.dim() == 3:
        arguments.require_shape("kv", kv, (num_layers, kv.shape[1], 2 * kv_size), "[L, T, 2 * KV]")
    else:
        arguments.require_rank("kv", kv, 2)
        arguments.require_shape("kv", kv, (kv.shape[0], num_layers * 2 * kv_size), "[T, L * 2 * KV]")
    arguments.require_dtype("kv", kv, arguments.ROW_DTYPES)
    return kv.shape[-2]


def _require_window(tokens: int, commit_lens: torch.Tensor | None, width: int | None) -> None:
    if (commit_lens is None) != (width is None):
        raise ValueError(
            f"commit_lens, locs_row_width: got {'None' if commit_lens is None else 'a tensor'} and {width}, "
            "need both or neither"
        )
    if commit_lens is None or width is None:
        return
    arguments.require_window("commit_lens", commit_lens, width, tokens)


def _require_pools(
    meta: KVPoolTable | torch.Tensor, num_layers: int, kv_size: int, head_dim: int, pool_rows: int | None
) -> int | None:
    """S, the rows of every pool, or None where pools by pointer have no bound."""
    if pool_rows is not None:
        arguments.require_int("pool_rows", pool_rows, 0)
    if isinstance(meta, torch.Tensor):
        arguments.require_shape("meta", meta, (num_layers, 4), "[L, 4]: K and V address, K and V row stride")
        arguments.require_dtype("meta", meta, (torch.int64,))
        if not meta.is_contiguous():
            raise ValueError(f"meta: got strides {meta.stride()}, need a contiguous table")
        return pool_rows
    if not isinstance(meta, KVPoolTable):
        raise ValueError(f"meta: got {type(meta).__name__}, need a KVPoolTable or an int64 [L, 4] tensor")
    if meta.num_layers != num_layers:
        raise ValueError(f"meta: got {meta.num_layers} layers, need num_layers = {num_layers}")
    if meta.keys:
        need = (meta.rows, kv_size // head_dim, head_dim)
        arguments.require_shape("meta", meta.keys[0], need, "[S, KV / D, D]")
    if pool_rows is not None and pool_rows != meta.rows:
        raise ValueError(f"pool_rows: got {pool_rows}, need {meta.rows}, the rows of meta, or None")
    return meta.rows


def _pool_tensors(meta: KVPoolTable | torch.Tensor) -> tuple[torch.Tensor, ...]:
    return meta.keys + meta.values if isinstance(meta, KVPoolTable) else ()
