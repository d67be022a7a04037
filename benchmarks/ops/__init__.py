"""The benchmarked operations, one module each: ``NAME``, ``cases(sizes)`` and ``small()``.

A further operation is a module here and a line in ``OPS``; ``accept_commit`` (one launch against the sum of separate
ones) belongs between ``commit_indices`` and ``write_target_hidden_kv``.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType

from . import accept, commit_indices, kv_write, qk_norm_rope, state_scatter, write_target_hidden_kv

OPS: Mapping[str, ModuleType] = {
    module.NAME: module
    for module in (qk_norm_rope, kv_write, state_scatter, accept, commit_indices, write_target_hidden_kv)
}
