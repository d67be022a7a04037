"""The public operations, flat: ``from dspark.ops import table_qk_norm_rope_``."""

from __future__ import annotations

from dspark.ops.accept import compute_dflash_correct_drafts_and_bonus
from dspark.ops.accept_commit import AcceptCommit, fused_accept_commit
from dspark.ops.commit_indices import fused_commit_track_indices
from dspark.ops.kv_write import fused_kv_norm_rope_write
from dspark.ops.pool_table import KVPoolTable
from dspark.ops.qk_norm_rope import table_qk_norm_rope_
from dspark.ops.state_scatter import (
    MambaCaches,
    fused_conv_window_scatter_multi,
    fused_conv_window_scatter_with_mask,
    fused_mamba_state_scatter_with_mask,
    scatter_mamba_states_after_mtp_verify,
)

__all__ = [
    "AcceptCommit",
    "KVPoolTable",
    "MambaCaches",
    "compute_dflash_correct_drafts_and_bonus",
    "fused_accept_commit",
    "fused_commit_track_indices",
    "fused_conv_window_scatter_multi",
    "fused_conv_window_scatter_with_mask",
    "fused_kv_norm_rope_write",
    "fused_mamba_state_scatter_with_mask",
    "scatter_mamba_states_after_mtp_verify",
    "table_qk_norm_rope_",
]
