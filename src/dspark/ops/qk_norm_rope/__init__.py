"""``qk_norm_rope``: per-head RMS norm and table RoPE on packed QKV, in place."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cache
from types import ModuleType

import torch

from dspark import dispatch, faults, machine
from dspark.ops import arguments
from dspark.ops.plans import KernelPlan, Plans, layouts, requires_grad
from dspark.ops.qk_norm_rope.checks import OP, Facts
from dspark.ops.qk_norm_rope.eager import qk_norm_rope_eager


@dataclass(slots=True)
class _Plan(KernelPlan):
    """q_eps, k_eps: in fp32. rotary_dim: R. empty: there is no Q or K head of any row."""

    q_eps: float
    k_eps: float
    rotary_dim: int
    empty: bool


_plans: Plans[_Plan] = Plans()


def table_qk_norm_rope_(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    num_q_heads: int,
    num_k_heads: int,
    head_dim: int,
    eps: float,
    *,
    k_eps: float | None = None,
    rotary_dim: int | None = None,
    is_neox_style: bool = True,
    path: str | None = None,
) -> None:
    """Norm and rotate the Q and K heads of packed rows, in place (conformance/CONTRACTS.md sections 2 and 3).

    qkv: ``[T, >= (NQ + 2 NK) * D]`` bf16, row stride free; Q heads first, then K heads, then V, which is not touched.
    fp16 and fp32 rows are computed by the eager path and rounded to their own dtype.
    positions: ``[T]`` int32 or int64, any stride. q_weight, k_weight: ``[D]`` bf16 or fp32.
    cos_sin_cache: ``[P, R]`` fp32, row = cos(R/2) then sin(R/2), for both pairings. It is read, never recomputed.
    eps, k_eps: added to the mean square of Q and of K heads (``k_eps`` None: ``eps``), each first rounded to fp32.
    rotary_dim: R, even, at most D (None: D). is_neox_style: pairs (i, i + R/2), else (2i, 2i + 1).
    path: ``auto``, ``fused``, ``eager`` or None (see :mod:`dspark.dispatch`).

    Raises ``ValueError``, before anything is written, for shapes, dtypes and devices that no path can compute. A
    position outside 0..P-1 leaves its row as it is and sets the fault ``qk_norm_rope/position-out-of-range``.
    """
    tensors = (qkv, positions, q_weight, k_weight, cos_sin_cache)
    call = (*tensors, num_q_heads, num_k_heads, head_dim, eps, k_eps, rotary_dim)
    key = _key(*call, is_neox_style)
    plan = _plans.find(key) or _plans.keep(key, _validated(*call))
    taken = dispatch.take(plan.decision, path)
    if plan.empty:
        return
    heads = (num_q_heads, num_k_heads, head_dim)
    inputs = (*tensors, *heads, plan.q_eps, plan.k_eps, plan.rotary_dim, is_neox_style)
    if taken is dispatch.Path.FUSED:
        _kernel().qk_norm_rope_fused(plan, *inputs)
    else:
        qk_norm_rope_eager(*inputs)
    faults.finish(qkv.device)


@cache
def _kernel() -> ModuleType:
    from dspark.ops.qk_norm_rope import kernel

    return kernel


def _key(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    table: torch.Tensor,
    *numbers: float | None,
) -> Hashable:
    """All that the plan is made of; None for what cannot be read, or would lose a gradient."""
    try:
        if torch.is_grad_enabled() and requires_grad(qkv, positions, q_weight, k_weight, table):
            return None
        return layouts(qkv, positions, q_weight, k_weight, table), numbers, tuple(map(type, numbers))
    except Exception:
        return None


def _validated(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    num_q_heads: int,
    num_k_heads: int,
    head_dim: int,
    eps: float,
    k_eps: float | None,
    rotary_dim: int | None,
) -> _Plan:
    for name, count, low in (
        ("num_q_heads", num_q_heads, 0),
        ("num_k_heads", num_k_heads, 0),
        ("head_dim", head_dim, 2),
    ):
        arguments.require_int(name, count, low)
    rotary_dim = arguments.require_rotary_dim(rotary_dim, head_dim)
    arguments.require_rank("qkv", qkv, 2)
    arguments.require_dtype("qkv", qkv, arguments.ROW_DTYPES)
    packed = (num_q_heads + 2 * num_k_heads) * head_dim
    if qkv.shape[1] < packed:
        raise ValueError(f"qkv: got {qkv.shape[1]} columns, need at least (NQ + 2 NK) * D = {packed}")
    arguments.require_writable("qkv", qkv)
    arguments.require_shape("positions", positions, (qkv.shape[0],), "[T] of qkv")
    arguments.require_dtype("positions", positions, arguments.INDEX_DTYPES)
    for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        arguments.require_shape(name, weight, (head_dim,), "[head_dim]")
        arguments.require_floating(name, weight)
    arguments.require_rank("cos_sin_cache", cos_sin_cache, 2)
    arguments.require_shape("cos_sin_cache", cos_sin_cache, (cos_sin_cache.shape[0], rotary_dim), "[P, rotary_dim]")
    arguments.require_floating("cos_sin_cache", cos_sin_cache)
    q_eps = arguments.require_eps("eps", eps)
    k_eps = q_eps if k_eps is None else arguments.require_eps("k_eps", k_eps)
    tensors = {
        "qkv": qkv,
        "positions": positions,
        "q_weight": q_weight,
        "k_weight": k_weight,
        "cos_sin_cache": cos_sin_cache,
    }
    arguments.require_one_device(**tensors)
    arguments.require_no_grad(**tensors)
    facts = Facts(
        machine=machine.facts(),
        device_type=qkv.device.type,
        qkv_dtype=qkv.dtype,
        qkv_column_stride=qkv.stride(1),
        q_weight_dtype=q_weight.dtype,
        k_weight_dtype=k_weight.dtype,
        table_dtype=cos_sin_cache.dtype,
        table_column_stride=cos_sin_cache.stride(1),
        head_dim=head_dim,
    )
    empty = qkv.shape[0] == 0 or num_q_heads + num_k_heads == 0
    return _Plan(facts.machine, dispatch.decide(OP, facts), q_eps, k_eps, rotary_dim, empty)
