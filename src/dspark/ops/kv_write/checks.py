"""What each path of ``kv_write`` needs, as data."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import torch

from dspark import dispatch, faults
from dspark.dispatch import Check, Path
from dspark.machine import MachineFacts
from dspark.ops.machine_checks import MACHINE_CHECKS
from dspark.ops.norm_rope.checks import HEAD_CHECKS, WEIGHT_DTYPES


@dataclass(frozen=True)
class Facts:
    """What one call looks like to the checks; ``pool_*`` are empty for pools by pointer."""

    machine: MachineFacts
    device_type: str
    kv_dtype: torch.dtype
    kv_column_stride: int
    weight_dtype: torch.dtype
    table_dtype: torch.dtype
    table_column_stride: int
    head_dim: int
    pool_dtypes: tuple[torch.dtype, ...]
    pool_inner_strides: tuple[tuple[int, int], ...]
    pools_by_pointer: bool


def _kv_dtype(facts: Facts) -> tuple[bool, Hashable]:
    return facts.kv_dtype == torch.bfloat16, facts.kv_dtype


def _kv_column_stride(facts: Facts) -> tuple[bool, Hashable]:
    return facts.kv_column_stride == 1, facts.kv_column_stride


def _weight_dtype(facts: Facts) -> tuple[bool, Hashable]:
    return facts.weight_dtype in WEIGHT_DTYPES, facts.weight_dtype


def _pool_dtype(facts: Facts) -> tuple[bool, Hashable]:
    return set(facts.pool_dtypes) <= {torch.bfloat16}, facts.pool_dtypes


def _pool_inner_strides(facts: Facts) -> tuple[bool, Hashable]:
    return set(facts.pool_inner_strides) <= {(facts.head_dim, 1)}, facts.pool_inner_strides


def _pools_by_pointer(facts: Facts) -> tuple[bool, Hashable]:
    return not facts.pools_by_pointer, facts.pools_by_pointer


CHECKS = (
    *MACHINE_CHECKS,
    Check("kv-dtype", "kv must be bfloat16", _kv_dtype),
    Check("kv-column-stride", "the columns of kv must be adjacent (stride 1)", _kv_column_stride),
    Check("k-norm-weight-dtype", "k_norm_weights must be bfloat16 or float32", _weight_dtype),
    *HEAD_CHECKS,
    Check("pool-dtype", "every K and V pool must be bfloat16", _pool_dtype),
    Check("pool-inner-strides", "heads and elements of a pool row must be dense", _pool_inner_strides),
    Check(
        "pools-by-pointer",
        "meta must be a KVPoolTable: plain torch cannot write through bare addresses",
        _pools_by_pointer,
        path=Path.EAGER,
    ),
)
OP = dispatch.register("kv_write", CHECKS)
LOC_FAULT = faults.declare(OP, "loc-out-of-range")
POSITION_FAULT = faults.declare(OP, "position-out-of-range")
DUPLICATE_FAULT = faults.declare(OP, "duplicate-loc")
