"""Checks on what norm and rotation of heads read: shared by ``qk_norm_rope`` and ``kv_write``."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Protocol

import torch

from dspark.dispatch import Check

MAX_HEAD_DIM = 256
"""Elements of one head that the kernels hold in one tile row."""
WEIGHT_DTYPES = (torch.bfloat16, torch.float32)


class _Facts(Protocol):
    @property
    def table_dtype(self) -> torch.dtype: ...
    @property
    def table_column_stride(self) -> int: ...
    @property
    def head_dim(self) -> int: ...


def _table_dtype(facts: _Facts) -> tuple[bool, Hashable]:
    return facts.table_dtype == torch.float32, facts.table_dtype


def _table_column_stride(facts: _Facts) -> tuple[bool, Hashable]:
    return facts.table_column_stride == 1, facts.table_column_stride


def _head_dim(facts: _Facts) -> tuple[bool, Hashable]:
    return facts.head_dim <= MAX_HEAD_DIM, facts.head_dim


HEAD_CHECKS = (
    Check("table-dtype", "cos_sin_cache must be float32: a narrower table changes the angles", _table_dtype),
    Check("table-column-stride", "the columns of cos_sin_cache must be adjacent (stride 1)", _table_column_stride),
    Check("head-dim", f"head_dim must be at most {MAX_HEAD_DIM}", _head_dim),
)
