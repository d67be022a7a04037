"""The benchmarked operations, one module each: ``NAME``, ``cases(sizes)`` and ``small()``.

A further operation is a module here and its name in ``OPS``.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType

from . import accept, accept_commit, commit_indices, kv_write, qk_norm_rope, state_scatter, write_target_hidden_kv

OPS: Mapping[str, ModuleType] = {
    module.NAME: module
    for module in (
        qk_norm_rope,
        kv_write,
        state_scatter,
        accept,
        commit_indices,
        accept_commit,
        write_target_hidden_kv,
    )
}
