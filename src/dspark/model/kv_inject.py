"""K and V of target hidden rows for every draft layer: one cross-layer projection, then ``kv_write``.

Every condition of the one-projection path is a check; the fallback projects, norms and rotates layer by layer with the
layers' own methods and hands bf16 K and V to the pool's own setter (conformance/CONTRACTS.md section 5).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch

from dspark import dispatch, faults, machine
from dspark.model.attention import DFlashAttention, plain_table
from dspark.model.kv_inject_checks import OP, KVAccessors, KVSetter, gather, pool_buffers
from dspark.model.kv_inject_plan import Draft, Drafts, InjectPlan, Strided, rows_key
from dspark.model.stacked import stacked_view
from dspark.ops import KVPoolTable, arguments, kv_write
from dspark.ops.kv_write.eager import RowRules

_drafts = Drafts()


def write_target_hidden_kv(
    layers: Sequence[DFlashAttention],
    pool: Any,
    hidden: torch.Tensor,
    positions: torch.Tensor,
    locs: torch.Tensor,
    commit_lens: torch.Tensor | None = None,
    locs_row_width: int | None = None,
) -> None:
    """Write K and V of target rows into every draft layer's pool (CONTRACTS.md sections 4 and 5).

    layers: the draft's attention layers; none: nothing happens. pool: offers ``get_key_buffer``, ``get_value_buffer``
    and ``set_kv_buffer``; its ``reserved_rows`` (default 0) are never written, and written rows are marked in its
    ``valid_rows``, when it has them.
    hidden: ``[T, H]``. positions: ``[T]`` int32 or int64. locs: ``[T]``, or the window ``[B, W]``, int32 or int64.
    commit_lens: ``[B]``, with ``locs [B, W]`` or with flat locs and ``locs_row_width`` W; column j of row b is written
    iff ``j < commit_lens[b]``.

    Rows are skipped or reported as in :func:`dspark.ops.fused_kv_norm_rope_write`. The path is chosen by
    ``DSPARK_DISPATCH`` and :func:`dspark.dispatch.forced`; the fallback waits for the device to select rows.
    Raises ``ValueError`` for row counts that disagree, a half-given window, and a pool without ``set_kv_buffer``.
    """
    draft, plans = _drafts.find(layers, pool)
    key = rows_key(hidden, positions, locs, commit_lens, locs_row_width)
    plan = plans.find(key)
    if plan is None:
        width = _require_rows(hidden, positions, locs, commit_lens, locs_row_width)
        if not layers:
            return
        if not isinstance(pool, KVSetter):
            raise ValueError(f"pool: got {type(pool).__name__}, need a pool with set_kv_buffer")
        reserved = int(getattr(pool, "reserved_rows", 0))
        decision = dispatch.decide(OP, gather(layers, pool, hidden))
        plan = plans.keep(key, InjectPlan(machine.facts(), decision, width, locs.dim() == 2, reserved))
    if plan.window:
        locs = locs.reshape(-1)
    if dispatch.take(plan.decision) is dispatch.Path.FUSED:
        with torch.no_grad() if torch.is_grad_enabled() else nullcontext():
            _write_fused(plan, draft or _draft_of(layers, pool), layers, hidden, positions, locs, commit_lens)
    else:
        _write_by_layer(layers, pool, hidden, positions, locs, commit_lens, plan.width, plan.reserved)
    faults.finish(hidden.device)


def _require_rows(
    hidden: torch.Tensor,
    positions: torch.Tensor,
    locs: torch.Tensor,
    commit_lens: torch.Tensor | None,
    width: int | None,
) -> int | None:
    """W."""
    arguments.require_rank("hidden", hidden, 2)
    arguments.require_tensor("locs", locs)
    if locs.dim() == 2:
        if commit_lens is None:
            raise ValueError(f"locs: got the window {tuple(locs.shape)} without commit_lens, need both or flat locs")
        if width is not None and width != locs.shape[1]:
            raise ValueError(f"locs_row_width: got {width}, need {locs.shape[1]}, the width of locs")
        width, locs = locs.shape[1], locs.reshape(-1)
    if (commit_lens is None) != (width is None):
        raise ValueError("commit_lens, locs_row_width: got one without the other, need both or neither")
    for name, index in (("positions", positions), ("locs", locs)):
        arguments.require_shape(name, index, (hidden.shape[0],), "[T] of hidden")
        arguments.require_dtype(name, index, arguments.INDEX_DTYPES)
    if commit_lens is not None and width is not None:
        arguments.require_window("commit_lens", commit_lens, width, hidden.shape[0])
    arguments.require_one_device(hidden=hidden, positions=positions, locs=locs, commit_lens=commit_lens)
    return width


def _draft_of(layers: Sequence[DFlashAttention], pool: Any) -> Draft:
    """What the fused path needs of any layers and any pool."""
    first, buffers = layers[0], [pool_buffers(pool, layer) for layer in layers]
    keys, values = tuple(key for key, _ in buffers), tuple(value for _, value in buffers)
    valid = getattr(pool, "valid_rows", None)
    return Draft([], first, first.qkv_proj.weight, first.k_norm.weight, keys, values, valid)


def _views(layers: Sequence[DFlashAttention]) -> tuple[Strided, Strided]:
    """The K and V rows of all QKV weights, ``[L, H, 2 KV]``, and all k_norm weights, ``[L, D]``."""
    first = layers[0]
    weights = stacked_view([layer.qkv_proj.weight for layer in layers])
    norms = stacked_view([layer.k_norm.weight for layer in layers])
    assert weights is not None  # the checks *-not-stacked hold
    assert norms is not None
    rows = weights[:, first.q_size : first.q_size + 2 * first.kv_size]
    return Strided.of(rows.transpose(1, 2)), Strided.of(norms)


def _write_fused(
    plan: InjectPlan,
    draft: Draft,
    layers: Sequence[DFlashAttention],
    hidden: torch.Tensor,
    positions: torch.Tensor,
    locs: torch.Tensor,
    commit_lens: torch.Tensor | None,
) -> None:
    first, rotary = draft.first, draft.first.rotary_emb
    if plan.views is None:
        plan.views = _views(layers)
    rows, norms = plan.views
    # One strided batched product over the views: [L, T, 2 KV], no copy of a weight.
    kv = torch.bmm(hidden.expand(len(draft.keys), -1, -1), draft.weight.as_strided(*rows))
    # The plan of the write is that of these buffers, which have been looked at then.
    pools = (KVPoolTable if plan.write is None else KVPoolTable.unchecked)(draft.keys, draft.values, draft.valid)
    tensors = (kv, pools, draft.norm.as_strided(*norms), rotary.cos_sin_cache, positions, locs, commit_lens)
    sizes = (first.kv_size, first.head_dim)
    if plan.write is None:
        eps, dim = first.k_norm.variance_epsilon, rotary.rotary_dim
        plan.write = kv_write.validated(*tensors, len(layers), *sizes, eps, plan.width, dim, None, plan.reserved)
    kv_write.write(plan.write, *tensors, plan.width, *sizes, rotary.is_neox_style, plan.reserved, None)


@torch.no_grad()
def _write_by_layer(
    layers: Sequence[DFlashAttention],
    pool: Any,
    hidden: torch.Tensor,
    positions: torch.Tensor,
    locs: torch.Tensor,
    commit_lens: torch.Tensor | None,
    width: int | None,
    reserved: int,
) -> None:
    tables = [table for layer in layers if (table := plain_table(layer.rotary_emb)) is not None]
    # A rotary without a table has no limit that could be known here.
    table_rows = min((table.shape[0] for table in tables), default=torch.iinfo(positions.dtype).max)
    pool_rows = None
    if isinstance(pool, KVAccessors):
        pool_rows = min(buffer.shape[0] for layer in layers for buffer in pool_buffers(pool, layer))
    rules = RowRules(locs, positions, commit_lens, width, pool_rows, reserved, table_rows)
    live = rules.live()
    hidden, positions, locs = hidden[live], positions[live], locs[live]
    if not locs.numel():
        return
    for layer in layers:
        k, v = layer.kv_proj_only(hidden)
        k = layer.apply_k_rope(positions, layer.apply_k_norm(k))
        pool.set_kv_buffer(layer, locs, k, v, layer.k_scale, layer.v_scale)
