"""Requests of a worker: what the host knows of each, and the pool rows that it holds."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

CONTEXT_TILE = 64
"""Positions that a step looks at come in multiples of this."""


class CapacityError(RuntimeError):
    """Batch rows or pool rows are taken; nothing was changed, and a release makes room."""


class Finish(enum.StrEnum):
    """Why a request ended."""

    LENGTH = "length"
    EOS = "eos"
    MAX_POSITION = "max-position"


@dataclass
class Request:
    """One sequence: its tokens, and what the pools hold of it.

    row: its row of every batch. rows: pool rows of its positions, in order. limit: positions that exist.
    seq_len: committed tokens n; positions 0..n-1 have target K and V, states and draft K and V.
    emitted: tokens after the prompt. returned: how many of them a step has handed out.
    """

    id: int
    row: int
    prompt: tuple[int, ...]
    max_new_tokens: int
    rows: tuple[int, ...]
    limit: int
    seq_len: int = 0
    emitted: list[int] = field(default_factory=list)
    returned: int = 0
    finish: Finish | None = None

    @property
    def anchor(self) -> int:
        """The known token at position n, which no model has seen yet."""
        known = len(self.prompt)
        return self.prompt[self.seq_len] if self.seq_len < known else self.emitted[self.seq_len - known]

    @property
    def room(self) -> int:
        """Tokens that a step may still emit: each needs a token of the budget, and a position that exists."""
        return min(self.max_new_tokens - len(self.emitted), self.limit - self.seq_len)

    def advance(self, committed: int, tokens: Sequence[int], eos: frozenset[int]) -> None:
        """``committed`` more positions exist, and ``tokens`` were emitted; decides whether the request has ended."""
        self.seq_len += committed
        self.emitted.extend(tokens)
        if self.emitted[-1] in eos:
            self.finish = Finish.EOS
        elif len(self.emitted) == self.max_new_tokens:
            self.finish = Finish.LENGTH
        elif self.seq_len >= self.limit:
            self.finish = Finish.MAX_POSITION

    def take(self) -> list[int]:
        """The tokens that were emitted since the last call."""
        fresh = self.emitted[self.returned :]
        self.returned = len(self.emitted)
        return fresh


class RowAllocator:
    """The rows of the pools and who holds them. Target and draft K and V of a position lie at the same row of both.

    A restored prefix is held by every request that has it; its rows are free when the last of them has given it back.
    """

    def __init__(self, rows: int, reserved: int) -> None:
        self._free = list(range(rows - 1, reserved - 1, -1))
        self._holders = [0] * rows

    @property
    def free(self) -> int:
        """Rows that nobody holds."""
        return len(self._free)

    def take(self, count: int) -> tuple[int, ...]:
        """``count`` rows; :class:`CapacityError`, with nothing taken, when fewer are free."""
        if count > len(self._free):
            raise CapacityError(f"pool rows: {len(self._free)} are free, the request needs {count}")
        taken = tuple(self._free.pop() for _ in range(count))
        self.hold(taken)
        return taken

    def hold(self, rows: Sequence[int]) -> None:
        """One more holder of rows that were taken."""
        for row in rows:
            self._holders[row] += 1

    def give(self, rows: Sequence[int]) -> list[int]:
        """One holder less; the rows that nobody holds any more, which are free now."""
        for row in rows:
            self._holders[row] -= 1
        freed = [row for row in rows if not self._holders[row]]
        self._free.extend(reversed(freed))
        return freed


class StepBuffers:
    """The tensors that a step reads about its requests, at fixed addresses and of fixed size (a graph's inputs).

    seq_lens, anchors, room: int64 ``[R]``. locs: int64 ``[R, N]``, the pool row of each position, -1 beyond.
    A padded row has length -1 and room 0; :meth:`fill` writes every element of the three, so that nothing of an earlier
    step is left, and nothing of ``locs`` counts for a padded row (fault F1-18). reach: the longest length.
    """

    def __init__(self, rows: int, positions: int, device: torch.device | str) -> None:
        self.seq_lens, self.anchors, self.room = (torch.zeros(rows, dtype=torch.int64, device=device) for _ in range(3))
        self.locs = torch.full((rows, positions), -1, dtype=torch.int64, device=device)
        self.reach = 0

    def admit(self, request: Request) -> None:
        """Write the pool rows of ``request`` into its row, and -1 after them."""
        held = torch.tensor(request.rows, dtype=torch.int64)
        self.locs[request.row] = -1
        self.locs[request.row, : held.numel()] = held.to(self.locs.device)

    def fill(self, requests: Sequence[Request | None]) -> None:
        """One entry per row: a request that takes part, or None for a padded row."""
        for buffer, values in (
            (self.seq_lens, [-1 if request is None else request.seq_len for request in requests]),
            (self.anchors, [0 if request is None else request.anchor for request in requests]),
            (self.room, [0 if request is None else request.room for request in requests]),
        ):
            buffer.copy_(torch.tensor(values, dtype=torch.int64))
        self.reach = max((request.seq_len for request in requests if request is not None), default=0)

    def context(self, ahead: int = 0) -> torch.Tensor:
        """``[R, N']`` int64: the pool row of each position up to the longest length and ``ahead`` more.

        -1 in padded rows. N' is rounded up to a multiple of ``CONTEXT_TILE``, so that shapes repeat.
        """
        tiles = -(-(self.reach + ahead) // CONTEXT_TILE)
        return torch.where(self.seq_lens[:, None] >= 0, self.locs[:, : max(tiles, 1) * CONTEXT_TILE], -1)

    def window(self, columns: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions ``[R, W]`` from the end of each request on, and their pool rows.

        Padded rows and positions that do not exist have pool row -1.
        """
        positions = self.seq_lens[:, None].clamp(min=0) + columns
        exists = (self.seq_lens[:, None] >= 0) & (positions < self.locs.shape[1])
        locs = self.locs.gather(1, positions.clamp(max=self.locs.shape[1] - 1))
        return positions, torch.where(exists, locs, -1)
