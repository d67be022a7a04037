"""Tables of int64 words (addresses, strides, counts) that kernels read, cached under their own content.

Equal words on the same device are the same table. So a table cannot be stale, nothing it points at is held alive, and
an address that is freed and used again is harmless. Tables are never evicted: a CUDA graph may have captured one, and
a table is a few hundred bytes.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from dspark.faults import refuse_in_capture

_lock = threading.Lock()
_tables: dict[tuple[torch.device, int, int, tuple[int, ...]], torch.Tensor] = {}


def signed(word: int) -> int:
    """An unsigned 64-bit word (an address with its high bit set) as the int64 with the same bits.

    ``ValueError`` for what fits neither int64 nor uint64.
    """
    if not -(1 << 63) <= word < 1 << 64:
        raise ValueError(f"table word: got {word:#x}, need 64 bits")
    return word - (1 << 64) if word >= 1 << 63 else word


def table(rows: Sequence[Sequence[int]], device: torch.device) -> torch.Tensor:
    """The int64 ``[len(rows), len(rows[0])]`` tensor on ``device`` that holds ``rows``; contiguous, not to be written.

    Built once per content; a build during CUDA graph capture raises :class:`dspark.faults.CaptureError`.
    """
    width = len(rows[0]) if rows else 0
    if any(len(row) != width for row in rows):
        raise ValueError(f"table rows: got lengths {[len(row) for row in rows]}, need equal lengths")
    words = tuple(signed(word) for row in rows for word in row)
    key = (device, len(rows), width, words)
    with _lock:
        found = _tables.get(key)
        if found is None:
            refuse_in_capture(f"a pointer table on {device}")
            # A table outlives the block that first needs it: no inference tensor, and built on no default device.
            with torch.inference_mode(False):
                found = torch.tensor(words, dtype=torch.int64, device="cpu").reshape(len(rows), width).to(device)
            _tables[key] = found
    return found


def builds() -> int:
    """How many tables have been built in this process: the number of cache misses."""
    return len(_tables)
