"""Rows of the tiny Inkling in one batch, for devices other than the CPU: one product for all rows of an operation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from dspark.model.block_attention import attend

if TYPE_CHECKING:
    from dspark.runtime.inkling_layers import InklingLayer
    from dspark.runtime.kv_pool import KVPool
    from dspark.runtime.target import TinyInkling


def batched_rows(
    target: TinyInkling,
    pool: KVPool,
    windows: list[torch.Tensor],
    tokens: torch.Tensor,
    seq_lens: torch.Tensor,
    lens: torch.Tensor,
    locs_table: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Logits ``[R, W, V]``, taps and stream inputs ``[L, R, W, dim]`` of windows ``tokens [R, W]``.

    windows: ``[L, R, dim, K - 1]`` of each stream, the committed ones. Arguments as for ``TinyInkling.verify``; nothing
    waits for the device. Tokens that do not exist are computed at position 0 and give zeros.
    """
    columns = torch.arange(tokens.shape[1], device=tokens.device)
    positions = seq_lens.to(torch.int64)[:, None] + columns
    last = min(locs_table.shape[1], target.config.max_position)
    live = (columns < lens[:, None]) & (seq_lens >= 0)[:, None] & (positions < last)
    positions = positions.masked_fill(~live, 0)
    table = locs_table.to(torch.int64)
    reserved = pool.reserved_rows
    locs = table.gather(1, positions).masked_fill(~live, -1)
    held = (table >= reserved) & (table < pool.rows)
    past = torch.arange(table.shape[1], device=tokens.device) <= positions[:, :, None]
    # A query without a key would give NaN: a token that does not exist looks at column 0, whatever row that is.
    visible = (past & held[:, None] & live[:, :, None]) | (~live[:, :, None] & (past & (positions[:, :, None] == 0)))
    rows = table.masked_fill(~held, 0)
    hidden = target.embed_tokens(tokens.masked_fill(~live, 0))
    angles = target.angles(target.config.max_position)[positions.flatten()]
    outputs, inputs = [], list[list[torch.Tensor]]()
    for index, layer in enumerate(target.layers):
        before = [window[index] for window in windows]
        hidden, fresh = _layer(layer, index, hidden, angles, pool, locs, rows, visible, before)  # type: ignore[arg-type]
        outputs.append(hidden)
        inputs.append(fresh)
    logits = target.logits_of(target.norm(hidden)).masked_fill(~live[..., None], 0)
    taps = target.taps_of(outputs).masked_fill(~live[..., None], 0)
    return logits, taps, [torch.stack(stream) for stream in zip(*inputs, strict=True)]


def _layer(
    layer: InklingLayer,
    index: int,
    hidden: torch.Tensor,
    angles: torch.Tensor,
    pool: KVPool,
    locs: torch.Tensor,
    rows: torch.Tensor,
    visible: torch.Tensor,
    windows: list[torch.Tensor],
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    def convolved(kind: str, x: torch.Tensor) -> torch.Tensor:
        inputs.append(x)
        before = windows[len(inputs) - 1].transpose(1, 2)
        result: torch.Tensor = layer.convs[kind].windowed(torch.cat([before, x], dim=1))  # type: ignore[operator]
        return result

    inputs = list[torch.Tensor]()
    leading, dim = hidden.shape[:2], layer.config.head_dim
    query, key, value = layer.project(hidden)
    key, value = convolved("k", key), convolved("v", value)
    query, key = layer.rotate(query.flatten(0, 1), key.flatten(0, 1), angles)
    fresh = value.unflatten(-1, (-1, dim)).flatten(0, 1)
    written = locs.flatten()
    # Rows that are not written go to the reserved row 0, with its own bits: no mask, whose size would be waited for.
    kept = (written >= pool.reserved_rows)[:, None, None]
    for buffer, x in zip(pool.get_kv_buffer(index), (key, fresh), strict=True):
        buffer[written.clamp(min=0)] = torch.where(kept, x.to(buffer.dtype), buffer[:1])
    pool.valid_rows[written.clamp(min=0)] = kept.flatten()
    keys, values = (buffer[rows] for buffer in pool.get_kv_buffer(index))
    mixed = attend(query.unflatten(0, leading), keys, values, visible)
    hidden = hidden + convolved("attention", layer.o_proj(mixed.flatten(2)))
    return hidden + convolved("mlp", layer.mlp(layer.post_attention_layernorm(hidden))), inputs
