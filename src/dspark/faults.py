"""Out-of-range index values: one sticky fault word per device, set by kernels and polled by people.

A kernel that meets a bad index skips the row and sets the bit of its (operation, kind); nothing waits for it in the
hot path. On CPU tensors every public operation ends with :func:`check`, so the caller gets the exception at once. On
CUDA the word is read by whoever calls :func:`check` (it synchronises), or after every operation with
``DSPARK_DEBUG=1``.

The CPU word belongs to the calling thread, since the work is done in that thread; a CUDA word belongs to its device.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from functools import lru_cache

import torch

MAX_KINDS = 63
"""Bits of the word that can be declared; the sign bit stays free."""


def parse_flag(value: str, source: str) -> bool:
    """An on/off environment value; ``ValueError`` naming ``source`` for anything but ``0``, ``1`` or nothing."""
    if value not in ("", "0", "1"):
        raise ValueError(f"{source}: got {value!r}, need 0 or 1")
    return value == "1"


_debug = parse_flag(os.environ.get("DSPARK_DEBUG", ""), "DSPARK_DEBUG")
_lock = threading.Lock()
_kinds: list[tuple[str, str]] = []
_cuda_words: dict[int, torch.Tensor] = {}
_cpu = threading.local()


class IndexFaultError(IndexError):
    """An operation met out-of-range index values; ``kinds`` lists the (operation, kind) pairs.

    The rows that named them were not written; all other rows were.
    """

    def __init__(self, kinds: tuple[tuple[str, str], ...]) -> None:
        self.kinds = kinds
        super().__init__("index values out of range: " + ", ".join(f"{op}/{kind}" for op, kind in kinds))

    def __reduce__(self) -> tuple[type[IndexFaultError], tuple[tuple[tuple[str, str], ...]]]:
        return type(self), (self.kinds,)


class CaptureError(RuntimeError):
    """Something would have to be built during CUDA graph capture."""


def declare(op: str, kind: str) -> int:
    """Reserve a bit for (``op``, ``kind``) and return its mask, e.g. ``1 << 3``; one bit per pair, process-wide."""
    with _lock:
        if (op, kind) in _kinds:
            raise ValueError(f"fault {op}/{kind} is declared twice")
        if len(_kinds) == MAX_KINDS:
            raise ValueError(f"fault {op}/{kind}: all {MAX_KINDS} bits are taken")
        _kinds.append((op, kind))
        return 1 << (len(_kinds) - 1)


def declared() -> tuple[tuple[str, str], ...]:
    """Every declared (operation, kind), in bit order."""
    return tuple(_kinds)


@lru_cache
def _on_host(device: torch.device) -> bool:
    # Every operation asks, and torch makes a new string of a device's type at each look.
    return device.type == "cpu"


def word(device: torch.device) -> torch.Tensor:
    """The fault word of ``device``: int64 ``[1]``. Built at first use; never during CUDA graph capture."""
    if _on_host(device):
        if not hasattr(_cpu, "word"):
            _cpu.word = _new_word("cpu")
        cpu_word: torch.Tensor = _cpu.word
        return cpu_word
    index = device.index if device.index is not None else torch.cuda.current_device()
    found = _cuda_words.get(index)
    if found is None:
        refuse_in_capture(f"the fault word of cuda:{index}")
        with _lock, torch.cuda.device(index):
            found = _cuda_words.setdefault(index, _new_word(f"cuda:{index}"))
    return found


def _new_word(device: str) -> torch.Tensor:
    # The word outlives the block that first needs it: it must be no inference tensor, and on no default device.
    with torch.inference_mode(False):
        return torch.zeros(1, dtype=torch.int64, device=device)


def refuse_in_capture(what: str) -> None:
    """Raise :class:`CaptureError` naming ``what`` if the current CUDA stream is being captured into a graph."""
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise CaptureError(f"{what} would be built during CUDA graph capture: call dspark.warmup(device) before it")


def warmup(device: torch.device | str) -> None:
    """Build what operations on ``device`` need before a CUDA graph capture: its fault word."""
    word(torch.device(device))


def debugging() -> bool:
    """Whether ``DSPARK_DEBUG=1``: operations then also look for what costs time to find, e.g. duplicate rows."""
    return _debug


def set_where(bad: torch.Tensor, mask: int) -> None:
    """Set ``mask`` in the word of ``bad``'s device if any element of the bool tensor is true; no synchronisation."""
    bits = bad.any().to(torch.int64) * mask
    word(bad.device).bitwise_or_(bits)


def _names(bits: int) -> tuple[tuple[str, str], ...]:
    return tuple(pair for position, pair in enumerate(_kinds) if bits >> position & 1)


def _words(device: torch.device | str | None) -> Iterable[torch.Tensor]:
    if device is not None:
        return [word(torch.device(device))]
    return [word(torch.device("cpu")), *_cuda_words.values()]


def peek(device: torch.device | str | None = None) -> tuple[tuple[str, str], ...]:
    """The (operation, kind) pairs set on ``device`` (default: every device); synchronises, clears nothing."""
    bits = 0
    for fault_word in _words(device):
        bits |= int(fault_word.item())
    return _names(bits)


def check(device: torch.device | str | None = None) -> None:
    """Raise :class:`IndexFaultError` if a fault is set on ``device`` (default: every device), and clear it.

    Synchronises. Only the bits that were read are cleared, so a fault that another stream sets meanwhile is not lost.
    """
    bits = 0
    for fault_word in _words(device):
        seen = int(fault_word.item())
        if seen:
            fault_word.bitwise_and_(~seen)
        bits |= seen
    if bits:
        raise IndexFaultError(_names(bits))


def finish(device: torch.device) -> None:
    """End of a public operation on ``device``: :func:`check` on the CPU and in debug mode, nothing otherwise."""
    if _on_host(device) or _debug:
        check(device)
