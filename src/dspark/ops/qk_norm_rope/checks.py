"""What the fused path of ``qk_norm_rope`` needs, as data."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import torch

from dspark import dispatch, faults
from dspark.dispatch import Check
from dspark.machine import MachineFacts
from dspark.ops.machine_checks import MACHINE_CHECKS
from dspark.ops.norm_rope.checks import HEAD_CHECKS, WEIGHT_DTYPES


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


def _qkv_dtype(facts: Facts) -> tuple[bool, Hashable]:
    return facts.qkv_dtype == torch.bfloat16, facts.qkv_dtype


def _qkv_column_stride(facts: Facts) -> tuple[bool, Hashable]:
    return facts.qkv_column_stride == 1, facts.qkv_column_stride


def _q_weight_dtype(facts: Facts) -> tuple[bool, Hashable]:
    return facts.q_weight_dtype in WEIGHT_DTYPES, facts.q_weight_dtype


def _k_weight_dtype(facts: Facts) -> tuple[bool, Hashable]:
    return facts.k_weight_dtype in WEIGHT_DTYPES, facts.k_weight_dtype


CHECKS = (
    *MACHINE_CHECKS,
    Check("qkv-dtype", "qkv must be bfloat16", _qkv_dtype),
    Check("qkv-column-stride", "the columns of qkv must be adjacent (stride 1)", _qkv_column_stride),
    Check("q-weight-dtype", "q_weight must be bfloat16 or float32", _q_weight_dtype),
    Check("k-weight-dtype", "k_weight must be bfloat16 or float32", _k_weight_dtype),
    *HEAD_CHECKS,
)
OP = dispatch.register("qk_norm_rope", CHECKS)
POSITION_FAULT = faults.declare(OP, "position-out-of-range")
