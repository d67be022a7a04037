"""After every prefill and step, every byte of every pool equals token-by-token replay (CONTRACTS.md section 11;
F1-5, F1-9, F3-3, F3-6, F3-10)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from dspark import dispatch
from dspark.runtime.generate import plain_tokens, single_thread
from dspark.runtime.prefill import RestoredPrefix
from dspark.runtime.requests import Finish
from dspark.runtime.worker import DSparkWorker

from ..fixtures import tiny_models
from ..fixtures.guard import Arena
from ..fixtures.lane import Lane
from ..fixtures.ledger import Label, expect_equal
from ..fixtures.replay import RecordedWorker, Rig, ToyReplay
from ..fixtures.runs import run_record
from ..fixtures.scripts import Scripts
from ..fixtures.streams import Stream
from ..fixtures.tiny_models import DecodeReplay, ScriptedDraft, build_draft, build_target
from ..fixtures.toys import ToyDraft, ToyTarget, plain

OP = "worker"
PATHS = ("fused", "eager", "mixed")
Plan = Sequence[tuple[int, list[int], int]]
STAGGERED: Plan = (
    (0, [1, 2, 3], 9),
    (0, [4] * 8, 12),
    (2, [9, 8], 3),
    (3, [7, 7, 1, 2, 3, 4], 8),
    (4, [5], 1),
    (5, [6, 5, 4, 3, 2, 1, 0, 1, 2, 3, 4, 5, 6], 6),
)
"""(step, prompt, tokens): prompts shorter than a window of convolution, ends at different steps, rows used again."""


def toy_rig(script: str, device: torch.device, label: Label, *, gamma: int = 4, key: str, **options: Any) -> Rig:
    scripts, most = Scripts(Stream(f"{key}/{script}")), options.get("max_position", 64)
    hybrid = options.pop("hybrid", True)
    target = ToyTarget(device, hybrid=hybrid, max_position=most)
    draft = ToyDraft(getattr(scripts, script), gamma=gamma, max_position=most)
    scripts.worker = worker = RecordedWorker(target, draft, **options)
    return Rig(worker, functools.partial(ToyReplay, hybrid=hybrid), label, key)


@pytest.fixture
def forced(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Ask for a path in every call; with ``mixed`` each call of each operation goes where a draw of its own says."""

    def force(path: str, key: str) -> None:
        stream, take = Stream(key), dispatch.take

        def taken(decision: dispatch.Decision, asked: str | None = None) -> dispatch.Path:
            drawn = ("fused", "eager")[int(stream.integers(0, 2, (1,))[0])] if path == "mixed" else path
            return take(decision, asked if asked is not None else drawn)

        monkeypatch.setattr(dispatch, "take", taken)

    return force


# --- The toys: exact on every device ---------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("script", ["mixed", "right"])
def test_f3_10_staggered_requests(script: str, path: str, arena: Arena, forced: Callable[[str, str], None]) -> None:
    forced(path, f"replay/{script}/paths")
    rig = toy_rig(script, arena.device, Label(OP, path), key="replay/staggered", max_requests=3, track_interval=4)
    emitted = rig.run(STAGGERED)
    need = {id: plain(prompt, tokens) for id, (_, prompt, tokens) in enumerate(STAGGERED)}
    expect_equal(rig.label, "tokens", emitted, need)


@pytest.mark.parametrize("dedup", [True, False], ids=["view", "dense"])
@pytest.mark.parametrize("interval", [1, 3, 5, 16, None])
def test_f3_6_track_slots_hold_the_state_of_the_last_boundary(interval: int | None, dedup: bool, arena: Arena) -> None:
    """Boundaries in prompts, several in one window, and in no window at all."""
    key = f"replay/interval/{interval}"
    options = {"max_requests": 2, "track_interval": interval, "dedup": dedup}
    rig = toy_rig("mixed", arena.device, Label(OP, "eager"), gamma=6, key=key, **options)
    with dispatch.forced("eager"):
        rig.run([(0, [3] * 7, 14), (1, [1, 2], 20)])


@pytest.mark.parametrize("gamma", range(1, 8))
def test_every_width(gamma: int, arena: Arena) -> None:
    rig = toy_rig("mixed", arena.device, Label(OP, "eager"), gamma=gamma, key=f"replay/{gamma}", track_interval=4)
    with dispatch.forced("eager"):
        rig.run([(0, [1, 2, 3, 4, 5], 12)])


@pytest.mark.parametrize("hybrid", [True, False], ids=["hybrid", "attention-only"])
def test_f1_18_a_width_that_changes_from_step_to_step(hybrid: bool, arena: Arena) -> None:
    """Requests come, go on and leave while the window grows and shrinks."""
    options = {"max_requests": 3, "hybrid": hybrid, "track_interval": 3}
    rig = toy_rig("mixed", arena.device, Label(OP, "eager"), gamma=7, key="replay/widths", **options)
    with dispatch.forced("eager"):
        ids = [rig.add([1, 2, 3], 30)]
        for gamma in (4, 1, 7, 2, 4, 7):
            rig.worker.set_gamma(gamma)
            rig.step()
            expect_equal(rig.label, "columns", len(rig.worker._index.columns(rig.worker.width)), gamma + 1)
            ids += [rig.add([gamma] * gamma, 12)] if len(ids) < 3 else []
    expect_equal(rig.label, "windows of the draft", rig.worker.stats.steps, 6)


@pytest.mark.parametrize("script", ["right", "mixed"])
def test_f1_9_a_window_past_the_last_position(script: str, arena: Arena) -> None:
    """One request ends there while another, a step behind, goes on in a full window."""
    options = {"max_requests": 2, "max_position": 18, "track_interval": 6}
    rig = toy_rig(script, arena.device, Label(OP, "eager"), gamma=6, key="replay/edge", **options)
    with dispatch.forced("eager"):
        ids = [rig.add([1, 2, 3, 4, 5, 6, 7, 8, 9, 10], 60), rig.add([4, 4], 60)]
        while rig.worker.live():
            rig.step()
    for id in ids:
        expect_equal(rig.label, "why", rig.worker.request(id).finish, Finish.MAX_POSITION)


def test_f3_3_a_request_that_ended_stays_in_the_batch_and_nothing_of_it_changes(arena: Arena) -> None:
    options = {"max_requests": 3, "track_interval": 2}
    rig = toy_rig("mixed", arena.device, Label(OP, "eager"), key="replay/ended", **options)
    with dispatch.forced("eager"):
        first, second = rig.add([1, 2], 2), rig.add([3], 14)
        while rig.worker.request(second).finish is None:
            rig.step()
        expect_equal(rig.label, "steps after the end", rig.worker.stats.steps > 2, True)
        rig.release(first)
        rig.add([8, 8, 8], 9)
        rig.step()


def test_f1_5_a_restored_prefix_goes_on_from_its_track_slot(arena: Arena) -> None:
    """Only rows after the prefix are written; the owner's rows and slot keep every bit."""
    options = {"max_requests": 2, "track_interval": 4}
    rig = toy_rig("mixed", arena.device, Label(OP, "eager"), key="replay/restored", **options)
    with dispatch.forced("eager"):
        owner = rig.add([1, 2, 3, 4, 5, 6], 9)
        rig.step()
        request = rig.worker.request(owner)
        count = request.seq_len // 4 * 4
        tokens = [*request.prompt, *request.emitted][:count]
        slot = int(rig.worker.cache.state_pool.track_indices[request.row])
        prompt = [*tokens, 11, 12, 13, 14, 15, 16, 17]
        id = rig.add(prompt, 10, RestoredPrefix(request.rows[:count], slot))
        while rig.worker.live():
            rig.step()
        expect_equal(rig.label, "tokens", rig.worker.request(id).emitted, plain(prompt, 10))
        rig.release(id)
        rows = list(request.rows[:count])
        expect_equal(rig.label, "the owner's rows", bool(rig.worker.draft_pool.valid_rows[rows].all()), True)


def test_f1_5_a_restored_prefix_outlives_its_owner(arena: Arena) -> None:
    """Its rows are neither freed nor given to the requests that come after."""
    options = {"max_requests": 3, "track_interval": 4, "pool_rows": 1 + 14 + 10 + 26}
    rig = toy_rig("mixed", arena.device, Label(OP, "eager"), key="replay/outlives", **options)
    with dispatch.forced("eager"):
        owner = rig.add([1, 2, 3, 4, 5, 6], 9)
        request = rig.worker.request(owner)
        slot = int(rig.worker.cache.state_pool.track_indices[request.row])
        prompt = [1, 2, 3, 4, 7, 7]
        tenant = rig.add(prompt, 9, RestoredPrefix(request.rows[:4], slot))
        rig.release(owner)
        others = [rig.add([9] * 10, 10), rig.add([8], 7)]
        while rig.worker.live():
            rig.step()
        expect_equal(rig.label, "tokens", rig.worker.request(tenant).emitted, plain(prompt, 9))
        free = rig.worker._allocator.free
        for id in (tenant, *others):
            rig.release(id)
        expect_equal(rig.label, "rows given back", rig.worker._allocator.free - free, 14 + 19 + 7)


def test_a_target_of_attention_only_needs_no_states(arena: Arena) -> None:
    options = {"max_requests": 3, "hybrid": False, "track_interval": 4}
    rig = toy_rig("mixed", arena.device, Label(OP, "eager"), key="replay/attention", **options)
    with dispatch.forced("eager"):
        emitted = rig.run(STAGGERED)
    need = {id: plain(prompt, tokens, hybrid=False) for id, (_, prompt, tokens) in enumerate(STAGGERED)}
    expect_equal(rig.label, "tokens", emitted, need)
    expect_equal(rig.label, "which are not those of the hybrid", emitted[1] != plain([4] * 8, 12), True)


def test_a_whole_run_is_the_same_by_every_path(arena: Arena, forced: Callable[[str, str], None]) -> None:
    """Tokens, lengths after every step, and the hash of every pool after every step."""
    records = {}
    for path in PATHS:
        scripts = Scripts(Stream("replay/record"))
        draft = ToyDraft(scripts.mixed, gamma=3)
        scripts.worker = worker = DSparkWorker(ToyTarget(arena.device), draft, max_requests=3, track_interval=4)
        forced(path, "replay/record/paths")
        records[path] = run_record(worker, [[1], [2, 2, 2], [3, 4, 5, 6, 7]], 8)
    for path in PATHS:
        for name, values in records["eager"].items():
            expect_equal(Label(OP, path), name, records[path][name], values)


# --- The tiny Inkling: real arithmetic, the same bits on the CPU whatever batch and window ---------------------------


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Products of single rows are slower on several threads, by far where other processes compute too."""
    with single_thread():
        yield


def tiny_rig(draft: Callable[[Any], Any], label: Label, key: str, **options: Any) -> Rig:
    target = build_target(torch.device("cpu"))
    worker = RecordedWorker(target, draft(target), **options)
    return Rig(worker, lambda: DecodeReplay(target), label, key)


@pytest.mark.lanes(Lane.INTERPRET)
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("path", PATHS)
def test_tiny_inkling_with_a_random_draft(path: str, forced: Callable[[str, str], None]) -> None:
    forced(path, "replay/tiny/paths")
    options = {"max_requests": 2, "gamma": 3, "track_interval": 3}
    rig = tiny_rig(build_draft, Label(OP, path), "replay/tiny", **options)
    rig.run([(0, [1, 2, 3, 4], 5), (1, [9], 3), (2, [8, 7], 3)])


HITS = {"right": (7,), "wrong": (0,), "mixed": (3, 0, 7, 1, 2)}
"""How many leading drafts are right, step after step."""


@pytest.mark.lanes(Lane.INTERPRET)
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("script", HITS)
def test_tiny_inkling_with_a_draft_that_is(script: str) -> None:
    """Every accept length, through real K, V and windows; each prompt's answer is decoded before."""
    label, prompts, tokens = Label(OP, "eager"), ((5, 6), (7,), (1, 2, 3, 4, 5)), 9
    with dispatch.forced("eager"):
        target = build_target(torch.device("cpu"))
        answers: dict[tuple[int, ...], list[int]] = {
            prompt: tiny_models.plain(target, prompt, tokens + 8) for prompt in prompts
        }

        def propose(row: int, length: int, gamma: int) -> list[int]:
            request = next(request for request in worker.live() if request.row == row)
            done = len(request.emitted)
            right = answers[request.prompt][done : done + gamma]
            hits = HITS[script][done % len(HITS[script])]
            return right[:hits] + [(token + 1) % 50 for token in right[hits:]]

        draft = ScriptedDraft(build_draft(target), propose)
        worker = RecordedWorker(target, draft, max_requests=2, track_interval=4)
        rig = Rig(worker, lambda: DecodeReplay(target), label, f"replay/tiny/{script}")
        emitted = rig.run([(0, list(prompt), tokens) for prompt in prompts])
    expect_equal(label, "tokens", emitted, {id: answers[prompt][:tokens] for id, prompt in enumerate(prompts)})


@pytest.mark.lanes(Lane.INTERPRET)
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("batch", [1, 3, 8])
def test_tiny_inkling_emits_what_plain_decoding_does(batch: int) -> None:
    label, stream = Label(OP, "eager"), Stream(f"replay/tiny/batch/{batch}")
    prompts = [[int(token) for token in stream.integers(0, 50, (1 + index % 5,))] for index in range(batch)]
    with dispatch.forced("eager"):
        target = build_target(torch.device("cpu"))
        worker = DSparkWorker(target, build_draft(target), max_requests=batch, gamma=2, min_survival=0.2)
        emitted = worker.generate(prompts, 5)
    need = [list(plain_tokens(target, prompt, 5)) for prompt in prompts]
    expect_equal(label, "tokens", emitted, need)
    expect_equal(label, "one of them by steps of one", tiny_models.plain(target, prompts[0], 5), need[0])
