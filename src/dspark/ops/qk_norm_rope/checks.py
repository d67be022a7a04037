"""What the fused path of ``qk_norm_rope`` needs, as data."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import torch

from dspark import dispatch, faults
from dspark.dispatch import Check
from dspark.machine import MachineFacts
from dspark.ops.machine_checks import MACHINE_CHECKS

MAX_HEAD_DIM = 256
"""Elements of one head that the kernel holds in one tile row."""


@dataclass(frozen=True)
class Facts:
    """What one call looks like to the checks."""

    machine: MachineFacts
    device_type: str
    qkv_dtype: torch.dtype
    qkv_column_stride: int
    q_weight_dtype: torch.dtype
    k_weight_dtype: torch.dtype
    table_dtype: torch.dtype
    table_column_stride: int
    head_dim: int


WEIGHT_DTYPES = (torch.bfloat16, torch.float32)


def _qkv_dtype(facts: Facts) -> tuple[bool, Hashable]:
    return facts.qkv_dtype == torch.bfloat16, facts.qkv_dtype


def _qkv_column_stride(facts: Facts) -> tuple[bool, Hashable]:
    return facts.qkv_column_stride == 1, facts.qkv_column_stride


def _q_weight_dtype(facts: Facts) -> tuple[bool, Hashable]:
    return facts.q_weight_dtype in WEIGHT_DTYPES, facts.q_weight_dtype


def _k_weight_dtype(facts: Facts) -> tuple[bool, Hashable]:
    return facts.k_weight_dtype in WEIGHT_DTYPES, facts.k_weight_dtype


def _table_dtype(facts: Facts) -> tuple[bool, Hashable]:
    return facts.table_dtype == torch.float32, facts.table_dtype


def _table_column_stride(facts: Facts) -> tuple[bool, Hashable]:
    return facts.table_column_stride == 1, facts.table_column_stride


def _head_dim(facts: Facts) -> tuple[bool, Hashable]:
    return facts.head_dim <= MAX_HEAD_DIM, facts.head_dim


CHECKS = (
    *MACHINE_CHECKS,
    Check("qkv-dtype", "qkv must be bfloat16", _qkv_dtype),
    Check("qkv-column-stride", "the columns of qkv must be adjacent (stride 1)", _qkv_column_stride),
    Check("q-weight-dtype", "q_weight must be bfloat16 or float32", _q_weight_dtype),
    Check("k-weight-dtype", "k_weight must be bfloat16 or float32", _k_weight_dtype),
    Check("table-dtype", "cos_sin_cache must be float32: a narrower table changes the angles", _table_dtype),
    Check("table-column-stride", "the columns of cos_sin_cache must be adjacent (stride 1)", _table_column_stride),
    Check("head-dim", f"head_dim must be at most {MAX_HEAD_DIM}", _head_dim),
)
OP = dispatch.register("qk_norm_rope", CHECKS)
POSITION_FAULT = faults.declare(OP, "position-out-of-range")
