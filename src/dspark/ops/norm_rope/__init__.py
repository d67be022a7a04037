"""Norm and rotation of one head (CONTRACTS.md section 2): the part that ``qk_norm_rope`` and ``kv_write`` share."""
