"""On a GPU: nothing waits for the device, and captured graphs follow their inputs (F1-18)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from dspark import faults
from dspark.ops import compute_dflash_correct_drafts_and_bonus

from ..fixtures.calls import accept, kv_write, qk_norm_rope
from ..fixtures.guard import Arena, to_bits
from ..fixtures.lane import Lane, captured, no_synchronisation
from ..fixtures.ledger import Label, expect_equal, expect_raises
from ..fixtures.streams import Stream

PATHS = ("fused", "eager")
pytestmark = pytest.mark.lanes(Lane.CUDA)


@pytest.mark.parametrize("path", PATHS)
def test_qk_norm_rope(path: str, arena: Arena) -> None:
    """Called, captured and replayed; then replayed with a position outside the table, which sets the fault word."""
    label, call = Label(qk_norm_rope.OP, path), qk_norm_rope.base()
    placed = qk_norm_rope.place(call, arena, path)
    fresh = placed.qkv.clone()
    placed.compute()
    placed.qkv.copy_(fresh)
    with no_synchronisation():
        placed.compute()
    qk_norm_rope.judge_rows(call, label, to_bits(placed.qkv))
    graph = captured(placed.compute)
    placed.qkv.copy_(fresh)
    graph.replay()
    qk_norm_rope.judge_rows(call, label, to_bits(placed.qkv))
    expect_equal(label, "faults", faults.peek(), ())
    placed.qkv.copy_(fresh)
    placed.positions[1] = call.table_rows
    graph.replay()
    graph.replay()
    expect_equal(label, "the row keeps its bits", to_bits(placed.qkv[1]), to_bits(fresh[1]))
    kind = "position-out-of-range"
    expect_raises(label, faults.IndexFaultError, [kind], faults.check)
    expect_equal(label, "faults after they were read", faults.peek(), ())


@pytest.mark.parametrize("path", PATHS)
def test_f1_18_kv_write_batch_of_three_then_eight_then_three(path: str, arena: Arena) -> None:
    """Eight requests are captured; a batch of three commits nothing in the other five, which hold stale values."""
    width, label = 4, Label(kv_write.OP, path)
    call = kv_write.random_call(Stream("graph"), 8 * width, 2, 2, 64, table_rows=64)
    call = replace(call, commit_lens=np.full(8, width), width=width)
    placed = kv_write.place(call, arena, path)
    assert placed.commit_lens is not None
    fresh = [[part.clone() for part in layer] for layer in placed.pools]
    placed.compute()
    graph = captured(placed.compute)
    for live in (3, 8, 3):
        lens = np.where(np.arange(8) < live, [1, 4, 3, 2, 4, 4, 1, 4], 0)
        placed.commit_lens.copy_(torch.from_numpy(lens))
        for layer, untouched in zip(placed.pools, fresh, strict=True):
            for part, before in zip(layer, untouched, strict=True):
                part.copy_(before)
        graph.replay()
        replayed = replace(call, commit_lens=lens)
        kv_write.judge_pools(replayed, label, [[to_bits(part) for part in layer] for layer in placed.pools])
        kept = np.ones(call.pool_rows, np.bool_)
        kept[[call.locs[row] for row in replayed.window.written()]] = False
        for layer, untouched in zip(placed.pools, fresh, strict=True):
            for part, before in zip(layer, untouched, strict=True):
                expect_equal(label, "rows that are not written", to_bits(part)[kept], to_bits(before)[kept])
    placed.commit_lens.fill_(width)
    with no_synchronisation():
        placed.compute()
    kv_write.judge_pools(call, label, [[to_bits(part) for part in layer] for layer in placed.pools])
    arena.verify(label)


@pytest.mark.parametrize("path", PATHS)
def test_accept(path: str, arena: Arena) -> None:
    label, call = Label(accept.OP, path), replace(accept.base(), verify_lens=np.array([4, 2, 1]))
    target = torch.from_numpy(call.target).to(arena.device)
    candidates = torch.from_numpy(call.candidates).to(arena.device)
    lens = torch.from_numpy(np.array([4, 2, 1])).to(arena.device)

    def compute() -> tuple[torch.Tensor, torch.Tensor]:
        return compute_dflash_correct_drafts_and_bonus(
            candidates=candidates, target_predict=target, verify_lens=lens, path=path
        )

    compute()
    with no_synchronisation():
        result = compute()
    accept.expect_results(call, label, lambda: result)
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    graph = captured(lambda: kept.append(compute()))
    candidates.copy_(torch.flip(candidates, (0,)))
    target.copy_(torch.flip(target, (0,)))
    graph.replay()
    flipped = replace(call, candidates=call.candidates[::-1].copy(), target=call.target[::-1].copy())
    accept.expect_results(flipped, label, lambda: kept[-1])


def test_a_fault_word_is_not_built_during_a_capture(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    label, call = Label(accept.OP, "fused"), accept.base()
    target = torch.from_numpy(call.target).to(arena.device)
    compute_dflash_correct_drafts_and_bonus(candidates=target, target_predict=target, path="fused")
    monkeypatch.setattr(faults, "_cuda_words", {})
    torch.cuda.synchronize()

    def capture() -> None:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            _ = target + 1  # so that the graph of the failed capture is not empty, which torch warns about
            compute_dflash_correct_drafts_and_bonus(candidates=target, target_predict=target, path="fused")

    expect_raises(label, faults.CaptureError, ["fault word", "dspark.warmup"], capture)
