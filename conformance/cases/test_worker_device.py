"""Decoding where rows are computed in batches: teacher-forced against the plain target (CONTRACTS.md section 11).

On a GPU with the tiny Inkling that ships, over drafts, batches and paths; what differs from one token at a time has a
limit, and ties are listed in the summary. On the CPU the same runs are exact; there a target that batches its rows
stands in for a GPU, for a part of them. Ends with faults that the judgement must see.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from dspark import dispatch
from dspark.model.draft import DSparkDraftModel
from dspark.runtime.generate import plain_tokens, single_thread
from dspark.runtime.target import TinyInkling
from dspark.runtime.tiny import END, load_tiny_inkling, to_tokens

from ..fixtures import lane as lanes
from ..fixtures import teacher_forced as forced
from ..fixtures.failures.broken import BrokenClauseError
from ..fixtures.lane import Lane
from ..fixtures.ledger import Label, expect_equal, expect_raises
from ..fixtures.teacher_forced import BATCHED, EXACT, BatchedInkling, Decoded, Limits, Plain, Watched
from ..fixtures.tiny_models import PROMPTS, ScriptedDraft, randomise

OP = "worker"
DRAFTS = ("trained", "random", "wrong")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Products of single rows are slower on several threads."""
    with single_thread():
        yield


@functools.cache
def models(device: torch.device) -> tuple[TinyInkling, DSparkDraftModel]:
    return load_tiny_inkling(device=device)


def batching(target: TinyInkling) -> TinyInkling:
    """The same weights, and the forward that a GPU has."""
    other = copy.copy(target)
    other.__class__ = BatchedInkling
    return other


@functools.cache
def draft_of(kind: str, device: torch.device) -> DSparkDraftModel:
    """The trained draft, or one that knows nothing."""
    target, trained = models(device)
    if kind == "trained":
        return trained
    draft = DSparkDraftModel(trained.config, target.config.target_config())
    randomise(draft, "worker/device/random")
    draft.to(device).requires_grad_(False).bind(target.embed_tokens, target.lm_head)
    return draft


@functools.cache
def plain(kind: str, device: torch.device, tokens: tuple[int, ...]) -> Plain:
    with dispatch.forced("eager"):
        return forced.plain(models(device)[0], draft_of(kind, device), tokens)


@functools.cache
def answer(device: torch.device, prompt: tuple[int, ...], tokens: int) -> list[int]:
    with dispatch.forced("eager"):
        return list(plain_tokens(models(device)[0], prompt, tokens))


def wrong_draft(device: torch.device, tokens: int, watched: list[Watched]) -> ScriptedDraft:
    """Proposes what the plain target would not say; its K and V are the trained draft's."""

    def wrong(row: int, length: int, gamma: int) -> list[int]:
        request = next(request for request in watched[0].worker.live() if request.row == row)
        right = answer(device, request.prompt, tokens)[len(request.emitted) :] + [0] * gamma
        return [(token + 1) % END for token in right[:gamma]]

    return ScriptedDraft(draft_of("trained", device), wrong)


def decoded(target: TinyInkling, kind: str, batch: int, count: int, tokens: int) -> Watched:
    """The first ``count`` prompts through a worker with a draft of this kind, ``batch`` at a time."""
    watched, device = list[Watched](), target.device
    draft = wrong_draft(device, tokens, watched) if kind == "wrong" else draft_of(kind, device)
    watched.append(Watched.begin(target, draft, max_requests=batch, max_position=128, eos=(END,)))
    watched[0].decode([to_tokens(prompt) for prompt in PROMPTS[:count]], tokens)
    return watched[0]


def judged(watched: Watched, label: Label, what: str, kind: str, limits: Limits) -> int:
    """How many ties there were. Draft K and V are held against the projection of the draft that wrote them."""
    by, device = "random" if kind == "random" else "trained", watched.worker.device
    return forced.judged(label, what, watched, lambda tokens: plain(by, device, tokens), limits)


@pytest.mark.lanes(Lane.CUDA)
@pytest.mark.parametrize("path", ["fused", "eager"])
@pytest.mark.parametrize("batch", [1, 3, 8])
@pytest.mark.parametrize("kind", DRAFTS)
def test_emitted_tokens_are_the_plain_targets_or_tied(kind: str, batch: int, path: str) -> None:
    device, label = lanes.device(Lane.CUDA), Label(OP, path)
    with dispatch.forced(path):
        watched = decoded(models(device)[0], kind, batch, len(PROMPTS), 24)
    judged(watched, label, f"{kind} draft, batch {batch}, {path}", kind, BATCHED)
    expect_equal(label, "requests", len(watched.decoded), len(PROMPTS))
    expect_speed(label, kind, watched.worker.stats.tokens_per_step)


def expect_speed(label: Label, kind: str, tokens_per_step: float) -> None:
    """That the drafts are what they are called: a good one is worth its steps, and a wrong one is rarely right."""
    need = {"trained": tokens_per_step > 2.5, "random": True, "wrong": tokens_per_step < 1.1}[kind]
    expect_equal(label, f"whether {tokens_per_step:.2f} tokens a step are those of a {kind} draft", need, True)


@pytest.mark.lanes(Lane.INTERPRET)
@pytest.mark.parametrize(
    ("kind", "batch", "path"), [("trained", 3, "eager"), ("random", 2, "eager"), ("wrong", 1, "fused")]
)
def test_where_rows_are_computed_alone_nothing_is_tied(kind: str, batch: int, path: str) -> None:
    """The same runs, fewer of them, with limits of zero."""
    device, label = lanes.device(Lane.INTERPRET), Label(OP, path)
    count, tokens = (3, 8) if path == "eager" else (1, 3)
    with dispatch.forced(path):
        watched = decoded(models(device)[0], kind, batch, count, tokens)
    ties = judged(watched, label, f"{kind} draft, batch {batch}, {path}", kind, EXACT)
    expect_equal(label, "ties", ties, 0)


@pytest.mark.lanes(Lane.INTERPRET)
def test_a_target_that_batches_its_rows_stays_within_the_limits() -> None:
    """It is not the same target bit for bit, or it would say nothing of a GPU; the plain one computes rows alone."""
    device, label = lanes.device(Lane.INTERPRET), Label(OP, "eager")
    with dispatch.forced("eager"):
        watched = decoded(batching(models(device)[0]), "trained", 8, len(PROMPTS), 10)
    judged(watched, label, "trained draft, batched on the CPU", "trained", BATCHED)
    said = [plain("trained", device, one.ran).logits[len(one.prompt) - 1 :] for one in watched.decoded]
    same = all(torch.equal(one.logits, logits) for one, logits in zip(watched.decoded, said, strict=True))
    expect_equal(label, "whether its logits are the same", same, False)


# --- What must be seen, and what not ---------------------------------------------------------------------------------


def second(one: Decoded, place: int) -> int:
    """The second best token of a place, by the logits that chose the first."""
    return int(one.logits[place].topk(2).indices[1])


def widest(one: Decoded) -> int:
    """The place where the best token leads by most."""
    best = one.logits.topk(2, dim=1).values
    return int((best[:, 0] - best[:, 1]).argmax())


def with_another_token(one: Decoded) -> Decoded:
    place = widest(one)
    return dataclasses.replace(one, emitted=[*one.emitted[:place], second(one, place), *one.emitted[place + 1 :]])


def with_another_choice(one: Decoded) -> Decoded:
    """The wrong token, and logits that would have chosen it: only the plain target knows better."""
    place, changed = widest(one), with_another_token(one)
    logits = one.logits.clone()
    pair = [one.emitted[place], second(one, place)]
    logits[place, pair] = logits[place, pair[::-1]]
    return dataclasses.replace(changed, logits=logits)


def with_another_row(name: str) -> Any:
    def changed(one: Decoded) -> Decoded:
        rows = {**one.rows, name: one.rows[name].clone()}
        rows[name][-1] = one.rows[name][-2]
        return dataclasses.replace(one, rows=rows)

    return changed


PLANTED = {
    "a-wrong-token": (with_another_token, "tokens, the best of the logits that chose them"),
    "a-wrong-choice": (with_another_choice, "neither the plain target's nor tied"),
    "logits-that-are-off": (
        lambda one: dataclasses.replace(one, logits=one.logits * 1.0625),
        "logits: rows farther than",
    ),
    "K-of-another-position": (with_another_row("target K 0"), "target K 0: rows farther"),
    "V-of-another-position": (with_another_row("target V 4"), "target V 4: rows farther"),
    "draft-K-of-another-position": (with_another_row("draft K 1"), "draft K 1: rows farther"),
    "the-state-of-another-layer": (with_another_row("state 2"), "state 2: rows farther"),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_planted_fault(fault: str, lane: Lane) -> None:
    device, label = lanes.device(lane), Label(OP, "eager")
    with dispatch.forced("eager"):
        watched = decoded(models(device)[0], "trained", 1, 1, 8)
    one = watched.decoded[0]
    limits = EXACT if lane is Lane.INTERPRET else BATCHED
    said = plain("trained", device, one.ran)
    forced.judge(label, "as decoded", one, said, limits)
    change, message = PLANTED[fault]
    expect_raises(label, BrokenClauseError, [message], lambda: forced.judge(label, fault, change(one), said, BATCHED))


def a_choice(seen: list[float], alone: list[float]) -> tuple[Decoded, Plain]:
    """One token after a prompt of one, with the logits of the worker and of the plain target."""
    logits = torch.tensor([seen])
    return Decoded((0,), [int(logits[0].argmax())], logits, {}), Plain(torch.tensor([alone]), {})


def test_a_tie_is_let_pass_with_both_margins_up_to_the_limit() -> None:
    """Spacings of bf16 at 8 are 1/16: tokens 1 and 2 are 4 apart, then 5, where the limit is 4."""
    label, unit = Label(OP, "eager"), 1 / 16
    found = forced.judge(label, "tied", *a_choice([0, 8 + unit, 8], [0, 8, 8 + 4 * unit]), BATCHED)
    expect_equal(label, "ties", found.ties, [forced.Tie(0, 1, 2, 1.0, 4.0)])
    apart = a_choice([0, 8 + unit, 8], [0, 8, 8 + 5 * unit])
    names = ["neither the plain target's nor tied"]
    expect_raises(label, BrokenClauseError, names, lambda: forced.judge(label, "apart", *apart, BATCHED))
    expect_raises(label, BrokenClauseError, names, lambda: forced.judge(label, "exact", *apart, EXACT))
    nothing = a_choice([0, 8, 8 + unit], [float("nan")] * 3)
    expect_raises(label, BrokenClauseError, names, lambda: forced.judge(label, "NaN", *nothing, BATCHED))


def test_a_row_that_nobody_holds(lane: Lane) -> None:
    device, label = lanes.device(lane), Label(OP, "eager")
    with dispatch.forced("eager"):
        watched = decoded(models(device)[0], "trained", 1, 1, 4)
    watched.judge_the_rest(label)
    row = max(watched.held["rows"]) + 1
    watched.worker.draft_pool.get_value_buffer(0)[row].zero_()
    names = ["draft V 0 outside every request"]
    expect_raises(label, BrokenClauseError, names, lambda: watched.judge_the_rest(label))
