"""``commit_indices``: the step that each request commits, and the step that completes a track interval."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dspark.ops import fused_commit_track_indices
from dspark.ops.commit_indices.eager import commit_indices_eager

from ..case import EAGER, FUSED, Absent, Asked, Case, Contender, Inputs, Tensors, compiled
from ..suite import fixture
from .layout import WINDOW

NAME = "commit_indices"
AXIS = "batch"
SIZES = (1, 8, 64, 256)
FUNCTION = "fused_commit_track_indices"
INTERVAL = 256


def floor_bytes(batch: int) -> int:
    """An accept length (int32), a length and one node id read, two steps written; track nodes are too few to count."""
    return batch * (4 + 8 + 8 + 16)


def cases(sizes: Sequence[int] = SIZES) -> list[Case]:
    """Commit and track steps at every size."""
    return [
        Case(NAME, f"W{WINDOW} commit+track", AXIS, batch, floor_bytes(batch), functools.partial(CommitInputs, batch))
        for batch in sizes
    ]


def small() -> list[Case]:
    """What the oracle judges."""
    return cases((64,))


class CommitInputs(Inputs):
    """Chains of nodes; every fourth request is about to complete an interval."""

    def __init__(self, batch: int, device: torch.device, copies: int) -> None:
        self.batch = batch
        nodes = torch.arange(batch * WINDOW, device=device).reshape(batch, WINDOW)
        self.accept_index = nodes.expand(copies, batch, WINDOW).contiguous()
        self.accept_lens = torch.randint(1, WINDOW + 1, (copies, batch), device=device, dtype=torch.int32)
        lengths = torch.randint(0, 1 << 17, (copies, batch), device=device)
        near = lengths // INTERVAL * INTERVAL + INTERVAL - torch.randint(1, WINDOW, (copies, batch), device=device)
        self.seq_lens = torch.where(torch.arange(batch, device=device) % 4 == 0, near, lengths)

    def bound(self, function: Callable[..., Any], **named: Any) -> list[Callable[[], Any]]:
        """``function`` on each copy."""
        rows = zip(self.accept_index, self.accept_lens, self.seq_lens, strict=True)
        return [functools.partial(function, *row, WINDOW, INTERVAL, **named) for row in rows]

    def contenders(self, asked: Asked) -> list[Contender | Absent]:
        found: list[Contender | Absent] = [Contender(FUSED, self.bound(fused_commit_track_indices))]
        if EAGER in asked.against:
            found.append(Contender(EAGER, self.bound(fused_commit_track_indices, path="eager")))
        found += asked.compiled(lambda: self.bound(compiled(commit_indices_eager)), self.batch)
        return found + asked.sglang(FUNCTION, self.bound)

    def outputs(self, returned: Any) -> Tensors:
        last, track = returned
        return {"last": last.clone(), "track": track.clone()}

    def reference(self) -> Tensors:
        return self.outputs(self.bound(commit_indices_eager)[0]())

    def judge(self, got: Tensors) -> str:
        oracle = fixture("oracles.commit_indices")
        rows = zip(self.accept_index[0].tolist(), self.accept_lens[0].tolist(), self.seq_lens[0].tolist(), strict=True)
        need = [
            oracle.request_steps(row, accepted, length, request * WINDOW, INTERVAL)[:2]
            for request, (row, accepted, length) in enumerate(rows)
        ]
        came = list(zip(got["last"].tolist(), got["track"].tolist(), strict=True))
        wrong = sum(a != b for a, b in zip(came, need, strict=True))
        return f"{wrong} of {len(need)} rows are wrong" if wrong else ""
