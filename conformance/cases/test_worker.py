"""The worker emits what plain decoding emits, whatever the draft proposes (CONTRACTS.md section 11; F1-9, F1-18,
F1-27)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dspark import dispatch
from dspark.runtime.acceptance import emit, leading_survivors
from dspark.runtime.index_cache import IndexCache
from dspark.runtime.prefill import RestoredPrefix
from dspark.runtime.requests import CapacityError, Finish, Request, StepBuffers

from ..fixtures.guard import Arena, to_bits
from ..fixtures.ledger import Label, expect_equal, expect_raises
from ..fixtures.scripts import build, expected, prompts_of
from ..fixtures.streams import Stream
from ..fixtures.toys import VOCAB, plain

OP = "worker"
SCRIPTS = ("right", "wrong", "late", "mixed", "random", "foreign")


# --- The tokens ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 3, 8])
@pytest.mark.parametrize("script", SCRIPTS)
def test_emitted_tokens_equal_plain_decoding(script: str, batch: int, arena: Arena) -> None:
    prompts = prompts_of(batch + 2)  # two wait until a row is free
    worker = build(script, arena.device, max_requests=batch)
    with dispatch.forced("eager"):
        emitted = worker.generate(prompts, 11)
    expect_equal(Label(OP, "eager"), "tokens", emitted, expected(prompts, 11))


@pytest.mark.parametrize(
    ("gamma", "path"), [*((gamma, "eager") for gamma in range(1, 8)), (1, "fused"), (4, "fused"), (7, "fused")]
)
def test_every_gamma(gamma: int, path: str, arena: Arena) -> None:
    worker = build("mixed", arena.device, gamma=gamma, key=f"worker/gamma/{gamma}", max_requests=2, track_interval=3)
    prompts = prompts_of(2, f"worker/gamma/{gamma}")
    with dispatch.forced(path):
        emitted = worker.generate(prompts, 13)
    expect_equal(Label(OP, path), "tokens", emitted, expected(prompts, 13))


@pytest.mark.parametrize("script", ["right", "wrong"])
def test_how_many_steps_it_takes(script: str, arena: Arena) -> None:
    """A right draft is worth W tokens a step, a wrong one costs nothing but time; the counts say so."""
    worker = build(script, arena.device, gamma=3)
    with dispatch.forced("eager"):
        worker.generate([[1, 2, 3]], 9)
    stats, label = worker.stats, Label(OP, "eager")
    right = script == "right"
    expect_equal(label, "request steps", stats.request_steps, 2 if right else 8)
    expect_equal(label, "tokens per step", stats.tokens_per_step, 4.0 if right else 1.0)
    expect_equal(label, "proposed", stats.proposed, [2, 2, 2] if right else [7, 6, 5])
    expect_equal(label, "acceptance", stats.acceptance, [1.0] * 3 if right else [0.0] * 3)


@pytest.mark.parametrize("tokens", [1, 2, 4, 5])
def test_not_a_token_more_than_asked_for(tokens: int, arena: Arena) -> None:
    worker = build("right", arena.device, gamma=3)
    with dispatch.forced("eager"):
        emitted = worker.generate([[5]], tokens)
    expect_equal(Label(OP, "eager"), "tokens", emitted, expected([[5]], tokens))


@pytest.mark.parametrize("at", range(7))
def test_a_request_ends_at_its_end_of_sequence_token(at: int, arena: Arena) -> None:
    """As the first token, inside a window of accepted drafts, as its bonus: nothing after it is emitted."""
    answer = plain([3, 1, 4], 9)
    end = next(index for index in range(at, 9) if answer[index] not in answer[:index])
    worker = build(
        "right", arena.device, gamma=3, eos=(VOCAB - 1, answer[end]) if answer[end] != VOCAB - 1 else (VOCAB - 1,)
    )
    id = worker.add_request([3, 1, 4], 9)
    with dispatch.forced("eager"):
        while worker.request(id).finish is None:
            worker.step()
    first = min(index for index, token in enumerate(answer) if token in worker.eos)
    label, request = Label(OP, "eager"), worker.request(id)
    expect_equal(label, "tokens", request.emitted, answer[: first + 1])
    expect_equal(label, "why", request.finish, Finish.EOS)
    expect_equal(label, "committed", request.seq_len, 3 + first)


@pytest.mark.parametrize("threshold", [0.0, 0.5, 0.9, 1.0])
def test_a_survival_threshold_shortens_the_window_and_changes_no_token(threshold: float, arena: Arena) -> None:
    def survival(row: int, length: int, gamma: int) -> list[float]:
        return [0.95, 0.7, 0.5, 0.1, 0.6][:gamma] if length % 2 else [0.3] * gamma

    worker = build("right", arena.device, gamma=5, survival=survival, min_survival=threshold)
    with dispatch.forced("eager"):
        emitted = worker.generate([[2, 7]], 20)
    label = Label(OP, "eager")
    expect_equal(label, "tokens", emitted, expected([[2, 7]], 20))
    leading = {0.0: (5, 5), 0.5: (3, 0), 0.9: (1, 0), 1.0: (0, 0)}[threshold]
    for before, lens in worker.target.verified:
        room = 2 + 20 - 1 - int(before[0])
        expect_equal(label, "columns", int(lens[0]), min(leading[0 if before[0] % 2 else 1] + 1, room))


def test_the_tokens_of_a_stream(arena: Arena) -> None:
    worker = build("mixed", arena.device)
    with dispatch.forced("eager"):
        pieces = list(worker.stream([8, 8], 10))
    label = Label(OP, "eager")
    expect_equal(label, "tokens", [token for piece in pieces for token in piece], plain([8, 8], 10))
    expect_equal(label, "the first comes before any step", len(pieces[0]), 1)
    expect_equal(label, "and the rows are free again", (worker.live(), worker._allocator.free), ([], 64))


@pytest.mark.parametrize("tokens", [3, 70])
def test_the_progress_of_a_prefill(tokens: int, arena: Arena) -> None:
    """The prompt at once, or a first chunk and windows; a restored prefix is done from the start."""
    worker, label, told = build("right", arena.device, max_requests=2, max_position=80), Label(OP, "eager"), []
    prompt = [1, 2, 3, 4, 5, 6, 7] * 10
    with dispatch.forced("eager"):
        id = worker.add_request(prompt[:tokens], 2, progress=lambda done, total: told.append((done, total)))
        expect_equal(label, "told", told, [(3, 3)] if tokens == 3 else [(64, 70), (69, 70), (70, 70)])
        told.clear()
        request = worker.request(id)
        prefix = RestoredPrefix(request.rows[:2], int(worker.cache.state_pool.state_indices[request.row]))
        worker.add_request([1, 2, 3], 2, restored=prefix, progress=lambda done, total: told.append((done, total)))
    expect_equal(label, "told of the prefix", told, [(2, 3), (3, 3)])


def test_prompts_wait_for_pool_rows_and_their_order_is_kept(arena: Arena) -> None:
    """Rows of the batch for three, rows of the pools for little more than one; then a prompt that never fits."""
    prompts, label = [[1] * 9, [2], [3, 4], [5] * 7], Label(OP, "eager")
    worker = build("mixed", arena.device, max_requests=3, pool_rows=1 + 17)
    with dispatch.forced("eager"):
        expect_equal(label, "tokens", worker.generate(prompts, 9), expected(prompts, 9))
        expect_raises(label, CapacityError, ["17 are free", "needs 18"], lambda: worker.generate([[1] * 10], 9))
        expect_raises(label, ValueError, ["prompt"], lambda: worker.generate([[1], [VOCAB]], 9))
        expect_equal(label, "and nothing is left behind", (worker.live(), worker._allocator.free), ([], 17))


def test_a_stream_leaves_the_tokens_of_others_to_them(arena: Arena) -> None:
    worker, label = build("mixed", arena.device, max_requests=2), Label(OP, "eager")
    with dispatch.forced("eager"):
        other = worker.add_request([4, 2], 5)
        pieces = list(worker.stream([8, 8], 14))
        expect_equal(label, "its own", [token for piece in pieces for token in piece], plain([8, 8], 14))
        expect_equal(label, "the other's", worker.step(), {other: plain([4, 2], 5)})


# --- Rows of the batch -----------------------------------------------------------------------------------------------


def test_f1_18_live_rows_do_not_depend_on_what_padded_rows_held(arena: Arena) -> None:
    """Capacity 8, every persistent buffer full of 0x7F bytes; three requests, then five, then three again."""
    prompts, label = prompts_of(5, "worker/padded"), Label(OP, "eager")
    worker = build("mixed", arena.device, max_requests=8)
    buffers = worker._buffers
    for tensor in (buffers.seq_lens, buffers.anchors, buffers.room, buffers.locs):
        tensor.view(torch.uint8).fill_(0x7F)
    with dispatch.forced("eager"):
        for live in (3, 5, 3):
            emitted = worker.generate(prompts[:live], 9)
            expect_equal(label, f"tokens of {live} requests", emitted, expected(prompts[:live], 9))
    for before, lens in worker.target.verified:
        padded = before < 0
        expect_equal(label, "padded lengths", before[padded], np.full(padded.sum(), -1))
        expect_equal(label, "padded windows", lens[padded], np.zeros(padded.sum(), np.int64))


def test_f1_18_a_padded_row_has_no_length_no_room_and_no_pool_row(arena: Arena) -> None:
    """Nor has a position that does not exist, whatever the buffers held before."""
    label, buffers = Label(OP, "-"), StepBuffers(3, 70, arena.device)
    for tensor in (buffers.seq_lens, buffers.anchors, buffers.room, buffers.locs):
        tensor.view(torch.uint8).fill_(0x7F)
    request = Request(5, 1, (7, 8), 80, tuple(range(40, 100)), 60)
    request.emitted = [*range(60, 70)] * 7
    request.seq_len = 58
    buffers.admit(request)
    buffers.fill([None, request, None])
    rows = [buffers.seq_lens.tolist(), buffers.anchors.tolist(), buffers.room.tolist()]
    expect_equal(label, "lengths, anchors, room", rows, [[-1, 58, -1], [0, 66, 0], [0, 2, 0]])
    context, need = to_bits(buffers.context(12)), np.full((3, 70), -1)
    need[1, :60] = np.arange(40, 100)
    expect_equal(label, "pool rows of the context", context, need)
    positions, locs = buffers.window(torch.arange(4, device=arena.device))
    expect_equal(label, "positions", to_bits(positions[1]), np.arange(58, 62))
    expect_equal(label, "pool rows of the window", locs.tolist(), [[-1] * 4, [98, 99, -1, -1], [-1] * 4])


def test_a_row_of_length_0_is_no_padded_row_and_a_full_one_ends_at_its_last_position(arena: Arena) -> None:
    label, worker = Label(OP, "-"), build("right", arena.device, max_requests=3)
    buffers, columns = worker._buffers, torch.arange(3, device=arena.device)
    empty, full = Request(0, 0, (7,), 9, (5, 6), 64), Request(1, 2, (7,) * 64, 9, tuple(range(1, 65)), 64, 62)
    for request in (empty, full):
        buffers.admit(request)
    buffers.fill([empty, None, full])
    expect_equal(
        label, "pool rows of the window", buffers.window(columns)[1].tolist(), [[5, 6, -1], [-1] * 3, [63, 64, -1]]
    )
    expect_equal(label, "pool rows of the context", buffers.context()[:, :2].tolist(), [[5, 6], [-1, -1], [1, 2]])
    candidates = torch.zeros(3, 2, dtype=torch.int64, device=arena.device)
    logits, lens = torch.zeros(3, 2, VOCAB, device=arena.device), torch.tensor([1, 0, 1], device=arena.device)
    with dispatch.forced("eager"):
        expect_equal(label, "emitted", worker._accept(candidates, logits, lens).lens.tolist(), [1, 0, 1])


def test_the_context_of_a_step_is_a_whole_number_of_tiles(arena: Arena) -> None:
    """As far as the longest length, and no further unless positions ahead are asked for."""
    label, buffers = Label(OP, "-"), StepBuffers(1, 200, arena.device)
    for length, ahead, width in ((0, None, 64), (64, None, 64), (64, 1, 128), (65, None, 128), (120, 8, 128)):
        buffers.fill([Request(0, 0, (7,) * 200, 9, (), 200, length)])
        got = buffers.context() if ahead is None else buffers.context(ahead)
        expect_equal(label, f"{length} and {ahead}", list(got.shape), [1, width])


def test_f1_27_rows_of_the_batch_map_to_their_requests_around_holes(arena: Arena) -> None:
    """Logits of padded rows are +inf. Padded rows lie before, between and after the live ones."""
    prompts, label = prompts_of(6, "worker/holes"), Label(OP, "eager")
    worker = build("mixed", arena.device, max_requests=6, gamma=3)
    with dispatch.forced("eager"):
        ids = [worker.add_request(prompt, 12) for prompt in prompts]
        for index in (0, 2, 5):
            worker.release(ids[index])
        for _ in range(12):
            worker.step()
    for index in (1, 3, 4):
        request = worker.request(ids[index])
        expect_equal(label, f"row of request {index}", request.row, index)
        expect_equal(label, f"tokens of request {index}", request.emitted, plain(prompts[index], 12))


@pytest.mark.parametrize("length", [1, 9, 13, 15, 16])
def test_f1_9_windows_at_the_last_position_hold_the_rows_that_exist(length: int, arena: Arena) -> None:
    prompt, label = [int(token) for token in Stream("worker/edge").integers(0, VOCAB, (length,))], Label(OP, "eager")
    worker = build("right", arena.device, gamma=6, max_position=16)
    id = worker.add_request(prompt, 100)
    with dispatch.forced("eager"):
        while worker.request(id).finish is None:
            worker.step()
    request = worker.request(id)
    expect_equal(label, "tokens", request.emitted, plain(prompt, 16 - length + 1))
    expect_equal(label, "why", request.finish, Finish.MAX_POSITION)
    expect_equal(label, "committed", request.seq_len, 16)
    ends = [int(before[0] + lens[0]) for before, lens in worker.target.verified]
    expect_equal(label, "the end of every window", [end for end in ends if end > 16], [])


# --- Index tensors that are kept -------------------------------------------------------------------------------------

SHAPES = ((3, 5), (5, 5), (3, 5), (3, 2), (8, 8), (8, 2), (2, 8), (0, 3), (4, 3), (3, 5))


def test_f1_18_kept_index_tensors_survive_growth_shrinkage_and_a_change_of_width(arena: Arena) -> None:
    cache, label, held = IndexCache(arena.device), Label(OP, "-"), []
    for rows, width in SHAPES:
        index = cache.linear_accept_index(rows, width)
        need = np.arange(rows * width).reshape(rows, width)
        held.append((index, need))
        expect_equal(label, f"[{rows}, {width}]", to_bits(index), need)
        expect_equal(label, f"columns {width}", to_bits(cache.columns(width)), np.arange(width))
    for index, need in held:
        expect_equal(label, "what was handed out before", to_bits(index), need)
    again = cache.linear_accept_index(3, 5).data_ptr()
    expect_equal(label, "the address does not move without growth", cache.linear_accept_index(5, 5).data_ptr(), again)


def test_emitted_tokens_are_cut_at_the_first_end(arena: Arena) -> None:
    device, label = arena.device, Label(OP, "-")
    candidates = torch.tensor([[9, 1, 2, 3], [9, 1, 2, 3], [9, 2, 1, 1], [9, 5, 5, 5], [9, 2, 2, 2]], device=device)
    correct = torch.tensor([3, 1, 3, 0, 3], dtype=torch.int32, device=device)
    bonus = torch.tensor([7, 2, 7, 2, 7], device=device)
    live = torch.tensor([True, True, True, True, False], device=device)
    got = emit(candidates, correct, bonus, live, torch.tensor([2, 3], device=device), IndexCache(device))
    kept = [row[:length] for row, length in zip(got.tokens.tolist(), got.lens.tolist(), strict=True)]
    expect_equal(label, "tokens", kept, [[1, 2], [1, 2], [2], [2], []])
    none = emit(candidates, correct, bonus, live, torch.zeros(0, dtype=torch.int64, device=device), IndexCache(device))
    expect_equal(label, "lengths without an end", none.lens.tolist(), [4, 2, 4, 1, 0])


def test_leading_survivors_stop_at_the_first_unlikely_draft(arena: Arena) -> None:
    survival = torch.tensor(
        [[0.9, 0.5, 0.4], [0.5, 0.4, 0.9], [0.4, 0.9, 0.9], [float("nan"), 1, 1]], device=arena.device
    )
    expect_equal(Label(OP, "-"), "leading", leading_survivors(survival, 0.5).tolist(), [2, 1, 0, 0])
