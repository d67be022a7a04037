"""What the worker refuses, and that it takes nothing then (CONTRACTS.md sections 9 and 11; F1-5, F5-4)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from dspark import dispatch
from dspark.runtime.index_cache import IndexCache
from dspark.runtime.kv_pool import StaleRowsError
from dspark.runtime.pools import StatePool
from dspark.runtime.prefill import RestoredPrefix
from dspark.runtime.requests import CapacityError
from dspark.runtime.worker import DSparkWorker

from ..fixtures.guard import Arena, to_bits
from ..fixtures.ledger import Label, expect_equal, expect_raises
from ..fixtures.scripts import build, expected
from ..fixtures.toys import VOCAB, ToyCache, ToyDraft, ToyTarget

OP = "worker"


def test_f5_4_a_request_beyond_the_capacity_is_refused_and_takes_nothing(arena: Arena) -> None:
    """bs = max, max + 1: of batch rows, and of pool rows."""
    label = Label(OP, "error")
    worker = build("mixed", arena.device, max_requests=3, pool_rows=1 + 3 * 10)
    ids = [worker.add_request([1, 2, 3], 8) for _ in range(3)]  # 3 + 8 - 1 positions each: exactly all rows
    free = worker._allocator.free
    expect_equal(label, "rows left", free, 0)
    expect_raises(label, CapacityError, ["3", "rows of the batch"], lambda: worker.add_request([1], 1))
    worker.release(ids[1])
    pools = [to_bits(worker.draft_pool.get_key_buffer(0)), to_bits(worker.cache.state_pool.temporal)]
    expect_raises(label, CapacityError, ["10 are free", "needs 11"], lambda: worker.add_request([1, 2, 3], 9))
    expect_equal(label, "rows left", worker._allocator.free, 10)
    expect_equal(label, "slots", worker.cache.state_pool.state_indices.tolist(), [2, -1, 4])
    for before, tensor in zip(
        pools, (worker.draft_pool.get_key_buffer(0), worker.cache.state_pool.temporal), strict=True
    ):
        expect_equal(label, "pools", to_bits(tensor), before)
    worker.add_request([1, 2, 3], 8)
    expect_equal(label, "and what fits is taken", worker._allocator.free, 0)


def test_a_request_that_ended_keeps_its_row_until_it_is_released(arena: Arena) -> None:
    worker, label = build("right", arena.device), Label(OP, "error")
    with dispatch.forced("eager"):
        id = worker.add_request([1, 2], 1)
        expect_equal(label, "it has ended", worker.live(), [])
        expect_raises(label, CapacityError, ["1 rows of the batch"], lambda: worker.add_request([3], 1))
        worker.release(id)
        expect_equal(label, "its row", worker.request(worker.add_request([3], 1)).row, 0)


def test_the_model_with_fewer_positions_decides(arena: Arena) -> None:
    most = []
    for ours, theirs in ((64, 32), (32, 64)):
        draft = ToyDraft(lambda *_: [], max_position=theirs)
        most.append(DSparkWorker(ToyTarget(arena.device, max_position=ours), draft).max_position)
    expect_equal(Label(OP, "defaults"), "max_position", most, [32, 32])


def test_a_failed_prefill_gives_everything_back(arena: Arena) -> None:
    worker, label = build("right", arena.device), Label(OP, "error")

    def failing(*_: Any) -> Any:
        raise KeyError("prefill")

    worker.target.prefill, prefill = failing, worker.target.prefill
    free = worker._allocator.free
    expect_raises(label, KeyError, ["prefill"], lambda: worker.add_request([1, 2], 5))
    expect_equal(label, "rows", worker._allocator.free, free)
    expect_equal(label, "slots", worker.cache.state_pool.state_indices.tolist(), [-1])
    worker.target.prefill = prefill
    with dispatch.forced("eager"):
        expect_equal(label, "tokens", worker.generate([[1, 2]], 5), expected([[1, 2]], 5))


class Stateless(ToyTarget):
    """Hybrid, with a cache that knows nothing of states."""

    lost: Callable[[ToyCache], ToyCache]

    def new_cache(self, *sizes: int, **options: Any) -> ToyCache:
        return self.lost(super().new_cache(*sizes, **options))


@pytest.mark.parametrize("lost", ["states", "state_pool", "states.commit", "states.commit_steps"])
def test_target_is_mambaish_refuses_a_hybrid_target_that_cannot_commit_states(lost: str, arena: Arena) -> None:
    target, label = Stateless(arena.device), Label(OP, "error")

    def lose(cache: ToyCache) -> ToyCache:
        name, _, method = lost.partition(".")
        others = {"commit", "commit_steps"} - {method}
        setattr(cache, name, SimpleNamespace(**dict.fromkeys(others)) if method else None)
        return cache

    target.lost = lose
    draft = ToyDraft(lambda *_: [])
    names = ["Stateless", "ToyCache", "cannot commit", "states"]
    expect_raises(label, ValueError, names, lambda: DSparkWorker(target, draft))
    kinds = [build("right", arena.device, hybrid=hybrid).target_is_mambaish for hybrid in (True, False)]
    expect_equal(label, "who is", kinds, [True, False])


BAD_WORKERS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "gamma-above-the-drafts": ({"gamma": 8}, ("gamma", "8", "7")),
    "gamma-0": ({"gamma": 0}, ("gamma", "0")),
    "no-requests": ({"max_requests": 0}, ("max_requests", "0")),
    "max-position-above-the-models": ({"max_position": 65}, ("max_position", "65", "64")),
    "no-pool": ({"pool_rows": 1}, ("pool_rows", "1")),
    "interval-0": ({"track_interval": 0}, ("track_interval", "0")),
    "survival-without-a-head": ({"min_survival": 0.5}, ("min_survival", "confidence head")),
    "survival-above-1": ({"min_survival": 1.5}, ("min_survival", "1.5", "probability")),
    "survival-nan": ({"min_survival": float("nan")}, ("min_survival", "nan", "probability")),
}


@pytest.mark.parametrize("bad", BAD_WORKERS)
def test_worker_errors(bad: str, arena: Arena) -> None:
    options, names = BAD_WORKERS[bad]
    target, draft = ToyTarget(arena.device), ToyDraft(lambda *_: [])
    expect_raises(Label(OP, "error"), ValueError, names, lambda: DSparkWorker(target, draft, **options))


BAD_REQUESTS: dict[str, tuple[list[Any], int, tuple[str, ...]]] = {
    "empty-prompt": ([], 4, ("prompt", "0 tokens")),
    "prompt-longer-than-max-position": ([1] * 65, 4, ("prompt", "65 tokens", "64")),
    "id-past-the-vocabulary": ([1, VOCAB], 4, ("prompt", str(VOCAB), "49")),
    "negative-id": ([-1], 4, ("prompt", "-1")),
    "id-of-another-type": ([True], 4, ("prompt", "True")),
    "nothing-to-emit": ([1], 0, ("max_new_tokens", "0")),
}


@pytest.mark.parametrize("bad", BAD_REQUESTS)
def test_request_errors(bad: str, arena: Arena) -> None:
    prompt, tokens, names = BAD_REQUESTS[bad]
    worker, label = build("right", arena.device), Label(OP, "error")
    expect_raises(label, ValueError, names, lambda: worker.add_request(prompt, tokens))
    expect_equal(label, "rows taken", worker._allocator.free, 64)


def test_f1_5_a_restored_prefix_without_draft_k_and_v_is_refused(arena: Arena) -> None:
    """Rows that no draft wrote, rows whose owner has left, rows of rejected drafts; then what a prefix needs to be."""
    worker, label = build("wrong", arena.device, max_requests=2, track_interval=4), Label(OP, "error")
    with dispatch.forced("eager"):
        id = worker.add_request([1, 2, 3, 4, 5], 9)
        worker.step()
        request = worker.request(id)
        slot = int(worker.cache.state_pool.track_indices[request.row])
        prompt = [1, 2, 3, 4, 9]

        def add(rows: tuple[int, ...], slot: int | None = slot) -> Callable[[], object]:
            return lambda: worker.add_request(prompt, 3, restored=RestoredPrefix(rows, slot))

        unwritten = request.rows[request.seq_len]
        free = worker._allocator.free
        stale = expect_raises(label, StaleRowsError, [str(unwritten)], add((*request.rows[:3], unwritten)))
        expect_equal(label, "rows", stale.rows, [unwritten])
        for rows, name in (((), "0 rows"), (request.rows[:5], "5 rows"), ((0, 1), "[0]"), ((1, 129), "[129]")):
            expect_raises(label, ValueError, ["restored", name], add(rows))
        for bad in (None, -1, 6):
            expect_raises(label, ValueError, ["restored", "slot", str(bad)], add(request.rows[:4], bad))
        for good in (0, 5):  # the first and the last slot of a pool may hold a prefix's states
            RestoredPrefix(request.rows[:4], good).require(worker.draft_pool, worker.cache, 5, stateful=True)
        expect_equal(label, "rows taken", worker._allocator.free, free)
        held = request.rows[:4]
        worker.release(id)
        freed = expect_raises(label, StaleRowsError, [str(held[0])], add(held))
        expect_equal(label, "rows", freed.rows, list(held))
    attention = build("right", arena.device, hybrid=False)
    free_of_states = RestoredPrefix((1,), 2)
    expect_raises(
        label, ValueError, ["slot", "no states"], lambda: attention.add_request([1, 2], 3, restored=free_of_states)
    )


class Unreserved(ToyTarget):
    """Its first state slot is a request's like any other."""

    def new_cache(self, *sizes: int, **options: Any) -> ToyCache:
        cache = super().new_cache(*sizes, **options)
        assert cache.states is not None
        cache.state_pool = StatePool(cache.states.pool.layout, 1, 1, self.device, reserved=0)
        return cache


def test_the_first_state_slot_is_taken_back_as_any_other(arena: Arena) -> None:
    worker, label = DSparkWorker(Unreserved(arena.device), ToyDraft(lambda *_: [])), Label(OP, "error")
    slots = worker.cache.state_pool.state_indices
    for prompt in ([1, 2], [3]):
        id = worker.add_request(prompt, 4)
        expect_equal(label, "its slot", slots.tolist(), [0])
        worker.release(id)
        expect_equal(label, "taken back", slots.tolist(), [-1])


def test_index_cache_errors(arena: Arena) -> None:
    """Whether or not a tensor is kept that a slice could be taken from."""
    cache, label = IndexCache(arena.device), Label(OP, "error")
    for _ in range(2):
        expect_raises(label, ValueError, ["rows", "-1"], lambda: cache.linear_accept_index(-1, 3))
        expect_raises(label, ValueError, ["width", "0"], lambda: cache.linear_accept_index(2, 0))
        expect_raises(label, ValueError, ["width", "-1"], lambda: cache.columns(-1))
        cache.linear_accept_index(2, 3)
    expect_equal(label, "none", cache.columns(0).tolist(), [])


def test_defaults(arena: Arena) -> None:
    """One request of as many positions as the models have, the draft's gamma, nothing tracked, no end."""
    worker, label = build("right", arena.device, gamma=7), Label(OP, "defaults")
    expect_equal(label, "gamma", (worker.gamma, worker.width), (7, 8))
    expect_equal(label, "positions", (worker.max_requests, worker.max_position), (1, 64))
    expect_equal(label, "pool rows", (worker.draft_pool.rows, worker.cache.kv_pool.rows), (65, 65))
    expect_equal(label, "the rest", (worker.track_interval, worker.min_survival, worker.eos), (None, None, frozenset()))
    with dispatch.forced("eager") if arena.device.type == "cpu" else nullcontext():
        expect_equal(label, "no step, nothing emitted", worker.step(), {})
