"""``accept``: leading-match count and bonus token of verify windows."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dspark.ops import compute_dflash_correct_drafts_and_bonus
from dspark.ops.accept.eager import accept_eager

from ..case import EAGER, FUSED, Absent, Asked, Case, Contender, Inputs, Tensors, compiled
from ..suite import fixture
from .layout import WINDOW

NAME = "accept"
AXIS = "batch"
SIZES = (1, 8, 64, 256)
FUNCTION = "compute_dflash_correct_drafts_and_bonus"
VOCABULARY = 200_058


def floor_bytes(batch: int) -> int:
    """Drafts (all but the current token) and targets read, count and bonus written."""
    return batch * ((WINDOW - 1) * 8 + WINDOW * 8 + 4 + 8)


def cases(sizes: Sequence[int] = SIZES) -> list[Case]:
    """Windows of eight at every size."""
    return [
        Case(NAME, f"W{WINDOW}", AXIS, batch, floor_bytes(batch), functools.partial(AcceptInputs, batch))
        for batch in sizes
    ]


def small() -> list[Case]:
    """What the oracle judges."""
    return cases((64,))


class AcceptInputs(Inputs):
    """Windows that match up to a random column."""

    def __init__(self, batch: int, device: torch.device, copies: int) -> None:
        self.batch = batch
        self.target = torch.randint(0, VOCABULARY, (copies, batch, WINDOW), device=device)
        self.candidates = self.target.roll(1, dims=2)
        first_wrong = torch.randint(1, WINDOW + 1, (copies, batch, 1), device=device)
        self.candidates += (torch.arange(WINDOW, device=device) >= first_wrong).to(torch.int64)

    def contenders(self, asked: Asked) -> list[Contender | Absent]:
        both = list(zip(self.candidates, self.target, strict=True))

        def bound(function: Callable[..., Any], **named: Any) -> list[Callable[[], Any]]:
            return [functools.partial(function, candidates=c, target_predict=t, **named) for c, t in both]

        def traced() -> list[Callable[[], Any]]:
            function = compiled(accept_eager)
            return [functools.partial(function, c, t, None) for c, t in both]

        found: list[Contender | Absent] = [Contender(FUSED, bound(compute_dflash_correct_drafts_and_bonus))]
        if EAGER in asked.against:
            found.append(Contender(EAGER, bound(compute_dflash_correct_drafts_and_bonus, path="eager")))
        found += asked.compiled(traced, self.batch)
        return found + asked.sglang(FUNCTION, bound)

    def outputs(self, returned: Any) -> Tensors:
        correct, bonus = returned
        return {"correct": correct.clone(), "bonus": bonus.clone()}

    def reference(self) -> Tensors:
        return self.outputs(accept_eager(self.candidates[0], self.target[0], None))

    def judge(self, got: Tensors) -> str:
        oracle = fixture("oracles.accept")
        rows = zip(self.candidates[0].tolist(), self.target[0].tolist(), strict=True)
        need = [oracle.accept_row(candidates, target, None) for candidates, target in rows]
        came = list(zip(got["correct"].tolist(), got["bonus"].tolist(), strict=True))
        wrong = sum(a != b for a, b in zip(came, need, strict=True))
        return f"{wrong} of {len(need)} rows are wrong" if wrong else ""
