"""The public operations, flat: ``from dspark.ops import table_qk_norm_rope_``."""

from __future__ import annotations

from dspark.ops.accept import compute_dflash_correct_drafts_and_bonus
from dspark.ops.qk_norm_rope import table_qk_norm_rope_

__all__ = ["compute_dflash_correct_drafts_and_bonus", "table_qk_norm_rope_"]
