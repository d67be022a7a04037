"""Speculative decoding, one step at a time: draft, verify, accept, commit (conformance/CONTRACTS.md section 11).

What a step reads and writes, for a request with n committed tokens and verify width W = gamma + 1:

    draft    block queries at positions n ..; their context is the draft K and V of positions 0 .. n-1
    verify   the target over [anchor, drafts] at positions n .. n+W-1; it writes K and V of the positions that exist
    accept   c drafts are right: c+1 tokens are committed, c+1 are emitted, and the last of these is the new anchor
    commit   draft K and V of positions n .. n+c, the states after token n+c, the states at an interval boundary

The batch has a fixed number of rows, as a captured graph has. A row without a request that decodes is padded: length
-1, no pool row, no state slot; nothing of it reaches a pool.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from dspark.ops import arguments
from dspark.runtime.acceptance import AcceptanceRule, Accepted, Greedy, Steps, Verified, leading_survivors
from dspark.runtime.index_cache import IndexCache
from dspark.runtime.kv_pool import KVPool
from dspark.runtime.prefill import Progress, RestoredPrefix, prefill
from dspark.runtime.requests import CapacityError, Request, RowAllocator, StepBuffers
from dspark.runtime.state_pool import VerifyStates
from dspark.runtime.statistics import WorkerStats
from dspark.runtime.worker_checks import at_most, is_mambaish, require_states, require_survival, require_tokens

RESERVED_ROWS = 1
"""Pool row 0 belongs to nobody."""


class DSparkWorker:
    """Decodes a batch of requests with a target and a draft model that is bound to it.

    target: what :class:`dspark.runtime.target.TinyInkling` offers, its taps being the ones that the draft was trained
    on. draft: what :class:`dspark.model.draft.DSparkDraftModel` offers.
    max_requests: rows R of every batch. max_position: positions of a request; default and most: those of both models.
    pool_rows: rows of the K and V pools, a reserved one included; default: enough for R requests of max_position.
    gamma: drafts per step; default and most: the draft's. min_survival: only leading drafts whose estimated survival
    reaches it are verified, which changes the cost of a step and not the tokens. eos: ids that end a request.
    track_interval: keep a copy of each request's states at the last multiple of it; None: no copy.
    rule: which drafts are kept. dedup: how the states after each token of a window are stored.

    Raises ``ValueError`` for a value out of range, and for a hybrid target whose cache cannot commit states.
    """

    def __init__(
        self,
        target: Any,
        draft: Any,
        *,
        max_requests: int = 1,
        max_position: int | None = None,
        pool_rows: int | None = None,
        gamma: int | None = None,
        min_survival: float | None = None,
        eos: Sequence[int] = (),
        track_interval: int | None = None,
        rule: AcceptanceRule | None = None,
        dedup: bool = True,
    ) -> None:
        arguments.require_int("max_requests", max_requests, 1)
        self.target, self.draft = target, draft
        self.max_requests = max_requests
        most = min(target.config.max_position, draft.config.max_position)
        self.max_position = at_most("max_position", max_position, most)
        self.gamma = at_most("gamma", gamma, draft.config.gamma)
        self.min_survival = require_survival(min_survival, draft)
        if track_interval is not None:
            arguments.require_int("track_interval", track_interval, 1)
        self.track_interval = track_interval
        self.rule: AcceptanceRule = Greedy() if rule is None else rule
        self.eos = frozenset(eos)
        self.stats = WorkerStats()

        rows = max_requests * self.max_position + RESERVED_ROWS if pool_rows is None else pool_rows
        arguments.require_int("pool_rows", rows, RESERVED_ROWS + 1)
        self.cache = target.new_cache(max_requests, rows, width=self.width, dedup=dedup)
        self._target_is_mambaish = is_mambaish(target)
        if self._target_is_mambaish:
            require_states(target, self.cache)
        self._dedup = dedup
        self.device = target.device
        first = draft.attentions[0]
        self.draft_pool = KVPool(
            rows,
            len(draft.attentions),
            first.num_kv_heads,
            first.head_dim,
            reserved_rows=RESERVED_ROWS,
            device=self.device,
        )
        self._vocab_size = target.config.target_config().vocab_size
        self._eos_ids = torch.tensor(sorted(self.eos), dtype=torch.int64, device=self.device)
        self._index = IndexCache(self.device)
        self._buffers = StepBuffers(max_requests, self.max_position, self.device)
        self._allocator = RowAllocator(rows, RESERVED_ROWS)
        self._requests: dict[int, Request] = {}
        self._next_id = 0

    @property
    def target_is_mambaish(self) -> bool:
        """Whether the target keeps recurrent state, which is committed by step."""
        return self._target_is_mambaish

    @property
    def width(self) -> int:
        """W: the anchor and the drafts."""
        return self.gamma + 1

    def set_gamma(self, gamma: int) -> None:
        """Draft ``gamma`` tokens per step from now on; requests go on. ``ValueError`` for more than the draft can."""
        self.gamma = at_most("gamma", gamma, self.draft.config.gamma)
        if self.target_is_mambaish:
            states = VerifyStates(self.cache.state_pool, self.width, dedup=self._dedup)
            self.cache = dataclasses.replace(self.cache, states=states)

    def request(self, id: int) -> Request:
        """What the worker knows of a request; ``KeyError`` for one that was released or never added."""
        return self._requests[id]

    def live(self) -> list[Request]:
        """The requests that have not ended."""
        return [request for request in self._requests.values() if request.finish is None]

    # --- Requests ----------------------------------------------------------------------------------------------------

    def add_request(
        self,
        prompt: Sequence[int],
        max_new_tokens: int,
        *,
        restored: RestoredPrefix | None = None,
        progress: Progress | None = None,
    ) -> int:
        """Admit ``prompt`` and prefill it; the first token after it comes with the next :meth:`step`. Returns an id.

        restored: a prefix whose K and V, and states, are in the pools already. progress: called as the prefill goes.

        Raises ``ValueError`` for a prompt that is empty, outside the vocabulary or longer than max_position, and for a
        prefix that does not fit; :class:`CapacityError` where no row of the batch, or too few of the pools, are free;
        and :class:`dspark.runtime.kv_pool.StaleRowsError` for a prefix without draft K and V (fault F1-5). Nothing was
        taken then.
        """
        tokens = require_tokens(prompt, self.max_position, self._vocab_size)
        arguments.require_int("max_new_tokens", max_new_tokens, 1)
        shared: tuple[int, ...] = ()
        if restored is not None:
            restored.require(self.draft_pool, self.cache, len(tokens), stateful=self.target_is_mambaish)
            shared = restored.rows
        free = sorted(set(range(self.max_requests)) - {request.row for request in self._requests.values()})
        if not free:
            raise CapacityError(f"requests: all {self.max_requests} rows of the batch are taken, release one first")
        # The last token that may be emitted is never run through the target.
        positions = min(len(tokens) + max_new_tokens - 1, self.max_position)
        own = self._allocator.take(positions - len(shared))
        self._allocator.hold(shared)
        request = Request(self._next_id, free[0], tokens, max_new_tokens, shared + own, self.max_position)
        try:
            if self.target_is_mambaish:
                self.cache.state_pool.admit(request.row, tracked=self.track_interval is not None)
            self._requests[request.id] = request
            self._buffers.admit(request)
            first = prefill(self, request, restored, progress)
        except BaseException:
            self._take_back(request)
            raise
        request.advance(0, [first], self.eos)
        self._next_id += 1
        return request.id

    def release(self, id: int) -> None:
        """Forget a request, ended or not, and take back its rows and slots. ``KeyError`` for an unknown id."""
        self._take_back(self._requests[id])

    def _take_back(self, request: Request) -> None:
        self._requests.pop(request.id, None)
        if self.target_is_mambaish and int(self.cache.state_pool.state_indices[request.row]) >= 0:
            self.cache.state_pool.release(request.row)
        freed = torch.tensor(self._allocator.give(request.rows), dtype=torch.int64, device=self.device)
        for pool in (self.draft_pool, self.cache.kv_pool):
            pool.free(freed)

    # --- Decoding ----------------------------------------------------------------------------------------------------

    def step(self) -> dict[int, list[int]]:
        """Advance every request that has not ended; what each emitted, the first token after a prefill included.

        A request that ended stays, as a padded row, until :meth:`release`; :meth:`request` says why it ended.
        """
        self._step()
        return {id: fresh for id, request in self._requests.items() if (fresh := request.take())}

    def stream(
        self, prompt: Sequence[int], max_new_tokens: int, *, progress: Progress | None = None
    ) -> Iterator[list[int]]:
        """Decode one prompt: the tokens of each step, as they are accepted. The request is released at the end.

        Other requests advance with it; their tokens come with the next :meth:`step`.
        """
        request = self.request(self.add_request(prompt, max_new_tokens, progress=progress))
        try:
            yield request.take()
            while request.finish is None:
                self._step()
                yield request.take()
        finally:
            self.release(request.id)

    def generate(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[list[int]]:
        """Decode all prompts, as many at a time as there is room for; the tokens after each, in their order.

        :class:`CapacityError` for a prompt that there is no room for even alone.
        """
        emitted: list[list[int]] = [[] for _ in prompts]
        waiting, running = list(enumerate(prompts)), list[tuple[int, Request]]()
        try:
            while waiting or running:
                while waiting:
                    try:
                        id = self.add_request(waiting[0][1], max_new_tokens)
                    except CapacityError:
                        if not running:
                            raise
                        break
                    running.append((waiting.pop(0)[0], self.request(id)))
                self._step()
                for index, request in [entry for entry in running if entry[1].finish is not None]:
                    emitted[index] = request.take()
                    running.remove((index, request))
                    self.release(request.id)
        finally:
            for _, request in running:
                self.release(request.id)
        return emitted

    # --- One step ----------------------------------------------------------------------------------------------------

    def _step(self) -> None:
        live = self.live()
        if live:
            self.select(live)
            candidates, verify_lens = self._propose()
            output = self.verify(candidates, verify_lens)
            accepted = self._accept(candidates, output.logits, verify_lens)
            self.commit(output.taps, accepted.lens, accepted.steps)
            self._advance(live, accepted, verify_lens)

    def select(self, requests: Sequence[Request]) -> None:
        """Make a batch of ``requests``; every other row is padded."""
        rows: list[Request | None] = [None] * self.max_requests
        for request in requests:
            rows[request.row] = request
        self._buffers.fill(rows)

    def _propose(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Candidates ``[R, W]``, the anchor first, and how many of each row exist ``[R]``: 0 in padded rows."""
        buffers = self._buffers
        drafted = self.draft.draft(
            buffers.anchors, buffers.seq_lens, self.draft_pool, buffers.context(), gamma=self.gamma
        )
        lens = buffers.room.clamp(max=self.width)
        if self.min_survival is not None:
            lens = torch.minimum(lens, leading_survivors(drafted.survival, self.min_survival) + 1)
        return torch.cat([buffers.anchors[:, None], drafted.tokens], dim=1), lens

    def verify(self, candidates: torch.Tensor, verify_lens: torch.Tensor) -> Any:
        """The target over the first ``verify_lens [R]`` of ``candidates [R, W]``, from the end of each request on.

        A candidate that is no token of the target's reads as token 0: it can never be right, and must not be looked up.
        """
        known = (candidates >= 0) & (candidates < self._vocab_size)
        buffers = self._buffers
        return self.target.verify(
            self.cache, torch.where(known, candidates, 0), buffers.seq_lens, verify_lens, buffers.context(self.width)
        )

    def _accept(self, candidates: torch.Tensor, logits: torch.Tensor, verify_lens: torch.Tensor) -> Accepted:
        interval = self.track_interval if self.target_is_mambaish else None
        window = Verified(candidates, logits, verify_lens, self._buffers.seq_lens, self._eos_ids, interval)
        return self.rule.accept(window, self._index)

    def commit(self, taps: torch.Tensor, lens: torch.Tensor, steps: Steps | None = None) -> None:
        """Commit the first ``lens [R]`` positions of the window whose ``taps [R, W, C]`` are given.

        steps: those whose states are committed, where they are known already.
        """
        width = taps.shape[1]
        positions, locs = self._buffers.window(self._index.columns(width))
        self.draft.write_context(self.draft_pool, taps.flatten(0, 1), positions.flatten(), locs, lens)
        if self.target_is_mambaish and steps is not None:
            self.cache.states.commit_steps(*steps)
        elif self.target_is_mambaish:
            index = self._index.linear_accept_index(self.max_requests, width)
            lengths = None if self.track_interval is None else self._buffers.seq_lens
            self.cache.states.commit(index, lens, lengths, self.track_interval or 0)

    def _advance(self, live: Sequence[Request], accepted: Accepted, verify_lens: torch.Tensor) -> None:
        """Tell the host's requests what happened: the one point of a step that waits for the device."""
        facts = torch.stack([accepted.lens, accepted.correct, verify_lens])
        lens, correct, verified = facts.tolist()
        tokens = accepted.tokens.tolist()
        self.stats.count_step(
            [verified[request.row] for request in live],
            [correct[request.row] for request in live],
            [lens[request.row] for request in live],
        )
        for request in live:
            count = lens[request.row]
            request.advance(count, tokens[request.row][:count], self.eos)
