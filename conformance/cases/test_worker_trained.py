"""The tiny Inkling and the draft that ship: speculation emits what the target alone would, and is worth its steps
(CONTRACTS.md section 11)."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import pytest

from dspark import dispatch
from dspark.model.draft import DSparkDraftModel
from dspark.runtime.generate import plain_tokens, single_thread
from dspark.runtime.target import TinyInkling
from dspark.runtime.tiny import END, load_tiny_inkling, to_tokens
from dspark.runtime.worker import DSparkWorker

from ..fixtures.lane import Lane
from ..fixtures.ledger import Label, expect_equal
from ..fixtures.tiny_models import PROMPTS, ScriptedDraft, randomise

OP = "worker"
LABEL = Label(OP, "eager")
TOKENS = 24
pytestmark = [pytest.mark.lanes(Lane.INTERPRET), pytest.mark.usefixtures("quick")]


@pytest.fixture
def quick() -> Iterator[None]:
    """One thread, no kernels in the interpreter."""
    with single_thread(), dispatch.forced("eager"):
        yield


@functools.cache
def models() -> tuple[TinyInkling, DSparkDraftModel]:
    return load_tiny_inkling()


@functools.cache
def answer(index: int) -> tuple[int, ...]:
    """Plain decoding, past the end of what is asked for, so that a draft may propose it."""
    with dispatch.forced("eager"):
        return tuple(plain_tokens(models()[0], to_tokens(PROMPTS[index]), TOKENS + 8))


def expect_plain(draft: Any, batch: int, prompts: int, *, tokens: int = TOKENS, **options: Any) -> DSparkWorker:
    """The tokens of the first ``prompts`` prompts, ``batch`` at a time."""
    worker = DSparkWorker(models()[0], draft, max_requests=batch, max_position=128, eos=(END,), **options)
    emitted = worker.generate([to_tokens(prompt) for prompt in PROMPTS[:prompts]], tokens)
    for index, got in enumerate(emitted):
        need = list(answer(index)[:tokens])
        need = need[: need.index(END) + 1] if END in need else need
        expect_equal(LABEL, f"tokens after prompt {index}", got, need)
    return worker


@pytest.mark.parametrize("batch", [1, 3, 8])
def test_the_trained_draft(batch: int) -> None:
    worker = expect_plain(models()[1], batch, len(PROMPTS))
    expect_equal(LABEL, "more than two and a half tokens a step", worker.stats.tokens_per_step > 2.5, True)


def test_f1_10_a_wrong_multiplier_loses_acceptance_and_no_token() -> None:
    """The only sign of that fault from outside: 2.9 tokens a step, 2.3 with no division, 1.2 with two.

    That the logits are wrong is seen by ``test_base_logits``; here, that verification hides it, and what it costs.
    """
    trained = models()[1]
    steps = {}
    for times, multiplier in (("once", 24.0), ("never", None), ("twice", 24.0 * 24)):
        draft = copy.copy(trained)
        draft.target = dataclasses.replace(trained.target, logits_mup_width_multiplier=multiplier)
        steps[times] = expect_plain(draft, 8, len(PROMPTS)).stats.tokens_per_step
    expect_equal(LABEL, "a tenth is lost without it", 10 * steps["never"] < 9 * steps["once"], True)
    expect_equal(LABEL, "a half is lost by doing it twice", 2 * steps["twice"] < steps["once"], True)


def test_a_shorter_window() -> None:
    expect_plain(models()[1], 2, 2, gamma=3)


def test_confidence_shortens_windows_and_changes_no_token() -> None:
    every = expect_plain(models()[1], 2, 2).stats
    likely = expect_plain(models()[1], 2, 2, min_survival=0.9).stats
    fewer = sum(likely.proposed) * every.request_steps < sum(every.proposed) * likely.request_steps
    expect_equal(LABEL, "fewer drafts a step are verified", fewer, True)


def test_a_random_draft() -> None:
    target, trained = models()
    draft = DSparkDraftModel(trained.config, target.config.target_config())
    randomise(draft, "worker/random")
    draft.bind(target.embed_tokens, target.lm_head)
    expect_plain(draft.requires_grad_(False), 2, 2, gamma=3)


def test_an_adversarial_draft_that_is_always_wrong() -> None:
    """The worst draft costs time: one token a step, and the right one."""

    def wrong(row: int, length: int, gamma: int) -> list[int]:
        request = next(request for request in worker[0].live() if request.row == row)
        index = PROMPTS.index(bytes(request.prompt))
        done = len(request.emitted)
        right = (answer(index) + (0,) * gamma)[done : done + gamma]
        return [(token + 1) % END for token in right]

    target, trained = models()
    draft, worker = ScriptedDraft(trained, wrong), list[DSparkWorker]()
    worker.append(DSparkWorker(target, draft, max_requests=2, max_position=128))
    emitted = worker[0].generate([to_tokens(prompt) for prompt in PROMPTS[:2]], 7)
    expect_equal(LABEL, "tokens", emitted, [list(answer(index)[:7]) for index in range(2)])
    expect_equal(LABEL, "tokens per step", worker[0].stats.tokens_per_step, 1.0)
