"""The public operations, flat: ``from dspark.ops import table_qk_norm_rope_``."""

from __future__ import annotations

from dspark.ops.accept import compute_dflash_correct_drafts_and_bonus
from dspark.ops.kv_write import fused_kv_norm_rope_write
from dspark.ops.pool_table import KVPoolTable
from dspark.ops.qk_norm_rope import table_qk_norm_rope_

__all__ = [
    "KVPoolTable",
    "compute_dflash_correct_drafts_and_bonus",
    "fused_kv_norm_rope_write",
    "table_qk_norm_rope_",
]
