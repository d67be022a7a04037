"""Prefill of one request: its prompt through the target, draft K and V of every position, and tracked states."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from dspark.runtime.kv_pool import KVPool
    from dspark.runtime.requests import Request
    from dspark.runtime.state_pool import StatePool
    from dspark.runtime.worker import DSparkWorker

REPORTED_CHUNK = 64
"""Tokens of the first chunk of a prefill that reports its progress; the others are windows."""

Progress = Callable[[int, int], None]
"""Called with the tokens that are done and the tokens of the prompt."""


@dataclass(frozen=True)
class RestoredPrefix:
    """The first positions of a prompt, taken from a cache instead of being computed.

    rows: their pool rows, in order, which a request of the worker holds; they are kept as long as anyone does.
    slot: the state slot with the target's states after them, such as a track slot; None for a target without states.
    """

    rows: tuple[int, ...]
    slot: int | None = None

    def require(self, draft_pool: KVPool, cache: Any, prompt: int, *, stateful: bool) -> None:
        """``ValueError`` where it does not fit a prompt of that many tokens, or these pools.

        ``StaleRowsError`` where a row holds no draft K and V: those of a restored prefix are not made by the target's
        cache, and a draft that reads them anyway is quietly bad (fault F1-5).
        """
        if not 1 <= len(self.rows) < prompt:
            raise ValueError(f"restored: got {len(self.rows)} rows, need 1 to {prompt - 1}, so that a token is left")
        low, high = draft_pool.reserved_rows, draft_pool.rows
        if outside := [row for row in self.rows if not low <= row < high]:
            raise ValueError(f"restored: got the rows {outside[:8]}, need rows from {low} to {high - 1}")
        slots = cache.state_pool.conv[0].shape[1] if stateful else 0
        if stateful and (self.slot is None or not 0 <= self.slot < slots):
            raise ValueError(
                f"restored: got the slot {self.slot}, need one from 0 to {slots - 1}: this target has states"
            )
        if not stateful and self.slot is not None:
            raise ValueError(f"restored: got the slot {self.slot}, need None: this target has no states")
        draft_pool.require_valid(torch.tensor(self.rows, dtype=torch.int64, device=draft_pool.valid_rows.device))


def prefill(worker: DSparkWorker, request: Request, restored: RestoredPrefix | None, progress: Progress | None) -> int:
    """Commit the whole prompt of ``request``, and return the first token after it."""
    report = progress or (lambda done, total: None)
    total = len(request.prompt)
    logits = None
    if restored is not None:
        _restore(worker, request, restored)
    else:
        logits = _first_chunk(worker, request, REPORTED_CHUNK if progress is not None else len(request.prompt))
    report(request.seq_len, total)
    while request.seq_len < total:
        logits = _window(worker, request)
        report(request.seq_len, total)
    assert logits is not None  # a restored prefix leaves a token to run
    return int(worker.rule.choose(logits[None])[0])


def _restore(worker: DSparkWorker, request: Request, restored: RestoredPrefix) -> None:
    pool = worker.cache.state_pool
    if restored.slot is not None:
        _copy_states(pool, restored.slot, int(pool.state_indices[request.row]))
    request.seq_len = len(restored.rows)


def _copy_states(pool: StatePool, source: int, target: int) -> None:
    for states in (*pool.conv, pool.temporal):
        states[:, target] = states[:, source]


def _first_chunk(worker: DSparkWorker, request: Request, most: int) -> torch.Tensor:
    """The prompt up to the last interval boundary in it, where the states are copied, or all of it; or ``most``."""
    total, interval = len(request.prompt), worker.track_interval
    boundary = 0 if interval is None else total // interval * interval
    count = min(boundary or total, most)
    device = worker.device
    tokens = torch.tensor(request.prompt[:count], dtype=torch.int64, device=device)
    locs = torch.tensor(request.rows[:count], dtype=torch.int64, device=device)
    output = worker.target.prefill(worker.cache, request.row, tokens, locs)
    positions = torch.arange(count, device=device)
    worker.draft.write_context(worker.draft_pool, output.taps.flatten(0, -2), positions, locs)
    if count == boundary and worker.target_is_mambaish:
        pool = worker.cache.state_pool
        _copy_states(pool, int(pool.state_indices[request.row]), int(pool.track_indices[request.row]))
    request.seq_len = count
    last: torch.Tensor = output.logits.flatten(0, -2)[-1]
    return last


def _window(worker: DSparkWorker, request: Request) -> torch.Tensor:
    """The next tokens of the prompt, through the verify path with every token accepted: states and tracking as ever."""
    width = worker.width
    tokens = request.prompt[request.seq_len : request.seq_len + width]
    candidates = torch.zeros(worker.max_requests, width, dtype=torch.int64)
    candidates[request.row, : len(tokens)] = torch.tensor(tokens)
    lens = torch.zeros(worker.max_requests, dtype=torch.int64)
    lens[request.row] = len(tokens)
    lens = lens.to(worker.device)
    worker.select([request])
    output = worker.verify(candidates.to(worker.device), lens)
    worker.commit(output.taps, lens)
    request.seq_len += len(tokens)
    last: torch.Tensor = output.logits[request.row, len(tokens) - 1]
    return last
