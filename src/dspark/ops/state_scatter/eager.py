"""``state_scatter`` in plain torch: the definition, and the production fallback. Nothing here waits for the device."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from dspark import faults
from dspark.ops.state_scatter.checks import DUPLICATE_FAULT, SLOT_FAULT, SOURCE_FAULT, STEP_FAULT, Pair, RowSet

LAYER_BUDGET = 1 << 28
"""Bytes of source entries that are gathered at a time: all layers of SSM states would not fit beside the pools."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, eq=False)
class Rows:
    """The rows of one set as int64, and which of them are written."""

    slots: torch.Tensor
    steps: torch.Tensor
    sources: torch.Tensor
    written: torch.Tensor


def judged_rows(rows: RowSet, pair: Pair) -> Rows:
    """Skips, then faults; sets the fault word. Slots, requests and width are the same in every pair of a call."""
    slots, steps = rows.slots.to(torch.int64), rows.steps.to(torch.int64)
    sources = torch.arange(slots.numel(), device=slots.device) if rows.sources is None else rows.sources.to(torch.int64)
    live = (slots >= 0) & (steps >= 0) & (sources >= 0)
    written = live
    for values, limit, fault in (
        (steps, pair.src.shape[2], STEP_FAULT),
        (slots, pair.dst.shape[1], SLOT_FAULT),
        (sources, pair.src.shape[1], SOURCE_FAULT),
    ):
        outside = live & (values >= limit)
        faults.set_where(outside, fault)
        written = written & ~outside
    return Rows(slots, steps, sources, written)


def report_duplicates(rows: RowSet, pair: Pair) -> None:
    """Set the fault word if two rows write one slot (debug mode: it sorts)."""
    judged = judged_rows(rows, pair)
    # Rows that write nothing get negative keys of their own, so that they equal nothing.
    own = -1 - torch.arange(judged.slots.numel(), device=judged.slots.device)
    keys = torch.where(judged.written, judged.slots, own).sort().values
    faults.set_where(keys[1:] == keys[:-1], DUPLICATE_FAULT)


def state_scatter_eager(pairs: tuple[Pair, ...], sets: tuple[RowSet, ...]) -> None:
    """Copy the rows of each set in turn; arguments are validated, and every pair has elements."""
    for rows in sets:
        judged = judged_rows(rows, pairs[0])
        if pairs[0].dst.shape[1] == 0 or 0 in pairs[0].src.shape[1:3]:
            continue
        # A row that is not written repeats the first one that is, so that neither a slot nor the host is asked for; if
        # none is, slot 0 is written with itself.
        some = judged.written.any()
        first = judged.written.to(torch.int8).argmax(dim=0, keepdim=True)
        slots, steps, sources = (
            torch.where(judged.written, values, torch.where(some, values.index_select(0, first), 0))
            for values in (judged.slots, judged.steps, judged.sources)
        )
        for pair in pairs:
            _copy_rows(pair, slots, steps, sources, some)


def _copy_rows(pair: Pair, slots: torch.Tensor, steps: torch.Tensor, sources: torch.Tensor, some: torch.Tensor) -> None:
    bits = _BITS.get(pair.dst.element_size(), pair.dst.dtype)
    dst, src = pair.dst.view(bits), pair.src.view(bits)
    layer_bytes = slots.numel() * math.prod(pair.entry) * dst.element_size()
    layers = max(1, LAYER_BUDGET // layer_bytes)
    for start in range(0, dst.shape[0], layers):
        part = slice(start, start + layers)
        entries = src[part][:, sources, steps]
        kept = dst[part, :1]
        dst[part].index_copy_(1, slots, torch.where(some, entries, kept))
