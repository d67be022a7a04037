"""Attention of the block over context rows and itself: which keys count, and exact values where no order can matter.

The keys that count are told apart by selector keys: one key's score is so large that the softmax is 1 at it and 0
elsewhere, exactly, where it is seen; where it is not seen, the next one wins. Means are of small integers over a
power-of-two count, so every sum and quotient is exact in fp32 in any order.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from dspark import faults
from dspark.model.block_attention import BlockContext, attend, block_context, pool_rows_of
from dspark.runtime.pools import KVPool, StaleRowsError

from ..fixtures.calls.layout import expect_faults
from ..fixtures.guard import Arena, to_bits
from ..fixtures.ledger import Label, expect_equal, expect_raises
from ..fixtures.streams import Stream

LABEL = Label("draft", "-")
BF16 = torch.bfloat16
NAN, INF = math.nan, math.inf


@dataclass(frozen=True)
class View:
    """Which keys the queries of one block see: n committed positions of N columns, width Wq."""

    n: int
    columns: int
    width: int
    causal: bool = False
    window: int | None = None

    def seen(self) -> npt.NDArray[np.bool_]:
        """``[Wq, N + Wq]``, from the definition: by position, one key at a time."""
        found = np.zeros((self.width, self.columns + self.width), np.bool_)
        for query in range(self.width):
            at = self.n + query
            for column in range(self.columns + self.width):
                in_block = column >= self.columns
                position = self.n + column - self.columns if in_block else column
                exists = in_block or column < self.n
                near = self.window is None or at - position < self.window
                found[query, column] = exists and near and not (self.causal and position > at)
        return found

    @property
    def id(self) -> str:
        kind = "causal" if self.causal else "bidirectional"
        return f"n{self.n}-of-{self.columns}/W{self.width}/{kind}/window-{self.window}"


VIEWS = tuple(
    View(n, columns, width, causal, window)
    for n, columns, width in ((0, 0, 1), (0, 3, 4), (5, 5, 4), (5, 9, 1), (5, 9, 3))
    for causal in (False, True)
    for window in (None, 1, 2, 3, 5, 6, 64)
)


def context_of(view: View, arena: Arena, locs: npt.NDArray[np.int64] | None = None, rows: int = 64) -> BlockContext:
    given = Stream(view.id).permutation(rows)[: view.columns] if locs is None else locs
    return block_context(
        arena.place("seq_lens", np.array([view.n]), torch.int32),
        arena.place("context_locs", given[None, :], torch.int64),
        view.width,
        rows,
        causal=view.causal,
        sliding_window=view.window,
    )


def selectors(count: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys ``[1, M, 1, 2]`` whose scores rise by 128 each for the query (1, 0), and values that name them."""
    key = torch.zeros(1, count, 1, 2, dtype=BF16, device=device)
    key[0, :, 0, 0] = torch.arange(count, device=device) * 128
    value = torch.zeros_like(key)
    value[0, :, 0, 0] = torch.arange(1, count + 1, device=device)
    return key, value


@pytest.mark.parametrize("view", VIEWS, ids=lambda view: view.id)
def test_the_keys_that_count(view: View, arena: Arena) -> None:
    """By the mask, and by the result: of the keys that a query sees, the last and (scores negated) the first win."""
    seen = view.seen()
    context = context_of(view, arena)
    expect_equal(LABEL, "visible", to_bits(context.visible[0]), seen)
    key, value = selectors(view.columns + view.width, arena.device)
    query = torch.zeros(1, view.width, 1, 2, dtype=BF16, device=arena.device)
    for sign in (1, -1):
        query[..., 0] = sign
        got = attend(query, key, value, context.visible)[0, :, 0, 0]
        order = [np.flatnonzero(row)[::sign] for row in seen]
        expect_equal(LABEL, f"the winner, sign {sign}", got.tolist(), [float(keys[-1] + 1) for keys in order])
    arena.verify(LABEL)


def test_only_rows_that_are_seen_are_looked_up(arena: Arena) -> None:
    """Columns from n on, columns behind the window and negative locs may hold anything; they are looked up at row 0."""
    junk = 2**62
    locs = np.array([junk, -9, 7, -1, 5, junk, -junk, 3])
    view = View(5, 8, 2, window=4)
    context = context_of(view, arena, locs)
    expect_equal(LABEL, "rows", to_bits(context.rows[0]), np.array([0, 0, 7, 0, 5, 0, 0, 0]))
    seen = view.seen()
    seen[:, 3] = False
    expect_equal(LABEL, "visible", to_bits(context.visible[0]), seen)


def test_requests_of_unequal_length_and_padded_ones(arena: Arena) -> None:
    lens, columns, width = [3, -1, 0, 5, 2], 5, 2
    locs = np.arange(25).reshape(5, 5)
    locs[4] = -1
    context = block_context(
        arena.place("seq_lens", np.array(lens), torch.int64),
        arena.place("context_locs", locs, torch.int32, strides=(11, 2)),
        width,
        25,
    )
    counts = np.array([3, 0, 0, 5, 0])
    need = np.stack([np.arange(columns) < count for count in counts])
    expect_equal(LABEL, "visible", to_bits(context.visible[:, 0, :columns]), need)
    expect_equal(LABEL, "block rows", bool(context.visible[:, :, columns:].all()), True)
    expect_equal(LABEL, "rows", to_bits(context.rows), np.where(need, locs, 0))


@pytest.mark.parametrize(
    ("lens", "locs", "kinds"),
    [
        ([6], [1, 2, 3, 4, 5], ["seq-len-out-of-range"]),
        ([2**40], [1, 2, 3, 4, 5], ["seq-len-out-of-range"]),
        ([5], [1, 2, 3, 4, 32], ["loc-out-of-range"]),
        ([5], [1, 2, 2**40, 4, 5], ["loc-out-of-range"]),
        ([7], [1, 99, 3, 4, 5], ["seq-len-out-of-range", "loc-out-of-range"]),
        ([4], [1, 2, 3, 4, 99], []),
        ([5], [1, 2, 3, 4, 31], []),
    ],
    ids=lambda value: "-".join(map(str, value)),
)
def test_index_faults(lens: list[int], locs: list[int], kinds: list[str], arena: Arena) -> None:
    """A fault is reported, the row that has it is not seen, the others are."""
    seq_lens = arena.place("seq_lens", np.array(lens), torch.int64)
    context_locs = arena.place("context_locs", np.array([locs]), torch.int64)
    found: list[BlockContext] = []

    def call() -> None:
        found.append(block_context(seq_lens, context_locs, 1, 32))
        faults.finish(arena.device)

    expect_faults(LABEL, call, [("draft", kind) for kind in kinds])
    count = min(lens[0], 5)
    good = [column < count and loc < 32 for column, loc in enumerate(locs)]
    expect_equal(LABEL, "seen", found[0].visible[0, 0, :5].tolist(), good)
    expect_equal(
        LABEL, "rows", found[0].rows[0].tolist(), [loc if ok else 0 for loc, ok in zip(locs, good, strict=True)]
    )


def test_f1_5_rows_without_draft_kv_are_refused(arena: Arena) -> None:
    """Only rows that a query would see: those behind the window and those of nobody may be stale."""
    pool = KVPool(16, 1, 1, 2, device=arena.device)
    pool.valid_rows[torch.tensor([4, 5], device=arena.device)] = True
    locs = np.array([2, 3, 4, 5, 9, 9])
    context_of(View(4, 6, 2, window=3), arena, locs, 16).require_valid(pool)
    wide = context_of(View(4, 6, 2, window=4), arena, locs, 16)
    error = expect_raises(LABEL, StaleRowsError, ["[3]"], lambda: checked(wide, pool, arena))
    expect_equal(LABEL, "stale rows", error.rows, [3])
    wide.require_valid(object())


def checked(context: BlockContext, pool: Any, arena: Arena) -> None:
    """The check as on the CPU, where it is always made (a GPU makes it with DSPARK_DEBUG=1)."""
    if arena.device.type == "cpu":
        context.require_valid(pool)
    else:
        BlockContext(context.rows.cpu(), context.visible.cpu()).require_valid(
            type("HostPool", (), {"require_valid": lambda self, rows: pool.require_valid(rows.to(arena.device))})()
        )


def ints(key: str, shape: tuple[int, ...], arena: Arena, low: int = -8, high: int = 9) -> torch.Tensor:
    return torch.from_numpy(Stream(f"block_attention/{key}").integers(low, high, shape)).to(BF16).to(arena.device)


@pytest.mark.parametrize("dim", [2, 64, 96])
def test_one_visible_key_gives_its_value_bit_for_bit(dim: int, arena: Arena) -> None:
    """Whatever the score: any finite softmax over one key is 1."""
    values = Stream(f"one/{dim}").normal((2, 5, 3, dim)) * 2.0 ** Stream(f"power/{dim}").integers(-90, 90, (2, 5, 3, 1))
    value = torch.from_numpy(values).to(BF16).to(arena.device)
    key, query = ints("key", (2, 5, 3, dim), arena), ints("query", (2, 4, 6, dim), arena)
    chosen = np.array([[0, 4, 2, 1], [3, 3, 0, 4]])
    visible = torch.from_numpy(np.arange(5)[None, None, :] == chosen[:, :, None]).to(arena.device)
    got = attend(query, key, value, visible)
    at = torch.from_numpy(chosen).to(arena.device)
    need = torch.stack([value[b, at[b]] for b in range(2)]).repeat_interleave(2, dim=2)
    expect_equal(LABEL, "output", to_bits(got), to_bits(need))


@pytest.mark.parametrize("count", [1, 2, 4, 16, 64])
def test_equal_scores_give_the_exact_mean(count: int, arena: Arena) -> None:
    """Rounded once: the mean of integers over a power of two is exact in fp32, and its bf16 is known."""
    value = ints(f"mean/{count}", (1, 64, 2, 8), arena, -1000, 1001)
    key = ints("mean/key", (1, 1, 2, 8), arena).expand(1, 64, 2, 8)
    query = ints("mean/query", (1, 1, 4, 8), arena)
    chosen = np.sort(Stream(f"mean/{count}").permutation(64)[:count])
    visible = torch.zeros(1, 1, 64, dtype=torch.bool, device=arena.device)
    visible[0, 0, torch.from_numpy(chosen).to(arena.device)] = True
    got = attend(query, key, value, visible)
    mean = value.double().cpu().numpy()[0, chosen].sum(0) / count
    need = torch.from_numpy(mean).to(BF16).repeat_interleave(2, dim=0)
    expect_equal(LABEL, "mean", to_bits(got[0, 0]), to_bits(need))


@pytest.mark.parametrize(("scale", "power"), [(None, 1), (1.0, 2), (0.25, 0.5)], ids=str)
def test_the_weights_are_those_of_the_scaled_scores(scale: float | None, power: float, arena: Arena) -> None:
    """Scores 0 and 2 ln 3 before scaling, D = 4: the second weight is w / (1 + w), w = 3^power; seen to 20 bits."""
    query, key = torch.ones(1, 1, 1, 4, device=arena.device), torch.zeros(1, 2, 1, 4, device=arena.device)
    value = torch.tensor([0.0, 1.0], device=arena.device).reshape(1, 2, 1, 1).expand(1, 2, 1, 4)
    key[0, 1] = math.log(3) / 2
    got = attend(query, key, value, torch.ones(1, 1, 2, dtype=torch.bool, device=arena.device), scale)
    weight = 3.0**power / (1 + 3.0**power)
    expect_equal(LABEL, "weight in 2^-20", round(got[0, 0, 0, 0].item() * 2**20), round(weight * 2**20))


def test_query_heads_read_the_keys_of_their_group(arena: Arena) -> None:
    """Head i reads head i // (NQ / NK): every KV head holds another constant."""
    value = torch.arange(1, 4, dtype=BF16, device=arena.device).reshape(1, 1, 3, 1).expand(1, 5, 3, 4)
    query, key = ints("group/query", (1, 2, 12, 4), arena), ints("group/key", (1, 5, 3, 4), arena)
    visible = torch.zeros(1, 2, 5, dtype=torch.bool, device=arena.device)
    visible[..., :4] = True
    key[:] = key[:, :1]
    got = attend(query, key, value, visible)
    expect_equal(LABEL, "heads", got[0, 1, :, 2].tolist(), [float(1 + head // 4) for head in range(12)])


def test_each_query_has_its_own_scores(arena: Arena) -> None:
    """Query q of head h of request b picks key (b + q + h) mod 8: no axis may be mixed up with another."""
    key = torch.zeros(3, 8, 2, 8, dtype=BF16, device=arena.device)
    key[:] = torch.eye(8, device=arena.device)[None, :, None] * 1024
    value = torch.arange(3 * 8 * 2, dtype=BF16, device=arena.device).reshape(3, 8, 2, 1).expand(3, 8, 2, 8)
    picks = np.arange(3)[:, None, None] + np.arange(5)[None, :, None] + np.arange(4)[None, None, :]
    query = torch.from_numpy(np.eye(8)[picks % 8]).to(BF16).to(arena.device)
    got = attend(query, key, value, torch.ones(3, 5, 8, dtype=torch.bool, device=arena.device))
    need = np.arange(3)[:, None, None] * 16 + picks % 8 * 2 + (np.arange(4) // 2)[None, None, :]
    expect_equal(LABEL, "picked", got[..., 0].tolist(), need.astype(float).tolist())


POISONS = {"nan": NAN, "infinity": INF, "-infinity": -INF, "huge": 3.3e38}


@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("where", ["K", "V", "K-and-V"])
def test_f1_8_what_is_not_seen_does_not_leak(where: str, poison: str, arena: Arena) -> None:
    """0 * NaN is NaN: the output is that of the same call with zeros in the masked rows, bit for bit."""
    query, key = ints("leak/query", (1, 3, 4, 8), arena), ints("leak/key", (1, 9, 2, 8), arena)
    value = torch.from_numpy(Stream("leak").normal((1, 9, 2, 8))).to(BF16).to(arena.device)
    visible = torch.ones(1, 3, 9, dtype=torch.bool, device=arena.device)
    visible[:, :, [2, 5]] = False
    visible[:, 1, 7] = False
    clean: list[torch.Tensor] = []
    dirty: list[torch.Tensor] = []
    for part, hit in ((key, "K" in where), (value, "V" in where)):
        for kept, fill in ((clean, 0.0), (dirty, POISONS[poison] if hit else 0.0)):
            changed = part.clone()
            changed[:, [2, 5]] = fill
            kept.append(changed)
    need = attend(query, clean[0], clean[1], visible)
    expect_equal(LABEL, "output", to_bits(attend(query, dirty[0], dirty[1], visible)), to_bits(need))
    expect_equal(LABEL, "finite", bool(torch.isfinite(need).all()), True)
    # Row 7 is seen by queries 0 and 2 only: query 1 keeps its bits.
    for part in dirty:
        part[:, 7, 1, 3] = POISONS[poison]
    got = attend(query, dirty[0], dirty[1], visible)
    expect_equal(LABEL, "query 1", to_bits(got[0, 1]), to_bits(need[0, 1]))
    expect_equal(LABEL, "other heads", to_bits(got[0, :, :2]), to_bits(need[0, :, :2]))
    if poison != "huge":
        lost = torch.isnan(got[0, [0, 2], 2:]).all()
        expect_equal(LABEL, "heads that see it are NaN", bool(lost), True)


def test_the_order_of_the_rows_in_the_pool_does_not_matter(arena: Arena) -> None:
    """The same positions in other pool rows: the same bits."""
    outputs = []
    query = ints("order/query", (1, 2, 2, 8), arena)
    block = [ints(f"order/block/{part}", (1, 2, 1, 8), arena) for part in "kv"]
    rows = [torch.from_numpy(Stream(f"order/{part}").normal((6, 1, 8))).to(BF16).to(arena.device) for part in "kv"]
    for turn in range(3):
        locs = Stream(f"order/{turn}").permutation(32)[:6]
        at = torch.from_numpy(locs).to(arena.device)
        buffers = [torch.full((32, 1, 8), NAN, dtype=BF16, device=arena.device) for _ in range(2)]
        for buffer, part in zip(buffers, rows, strict=True):
            buffer[at] = part
        context = context_of(View(6, 6, 2), arena, locs, 32)
        read = [pool_rows_of(buffer, context.rows, None) for buffer in buffers]
        key, value = (torch.cat([part, own], dim=1) for part, own in zip(read, block, strict=True))
        outputs.append(to_bits(attend(query, key, value, context.visible)))
    for output in outputs[1:]:
        expect_equal(LABEL, "output", output, outputs[0])


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("scale", [None, 4.0])
def test_rows_are_read_in_the_pools_format(dtype: torch.dtype, scale: float | None, arena: Arena) -> None:
    """A pool of fp8 divided by the layer's scale when it stored; a reader multiplies. Other pools know no scale."""
    buffer = torch.tensor([[[0.5, 1.0]], [[-2.0, 448.0]], [[NAN, 0.0]]], device=arena.device).to(dtype)
    rows = torch.tensor([[1, 0]], device=arena.device)
    read = pool_rows_of(buffer, rows, scale)
    factor = scale if scale is not None and dtype == torch.float8_e4m3fn else 1.0
    need = [[[[-2.0 * factor, 448.0 * factor]], [[0.5 * factor, factor]]]]
    expect_equal(LABEL, "values", read.float().tolist(), need)


def good(arena: Arena) -> dict[str, Any]:
    return {
        "seq_lens": torch.tensor([3, 1], device=arena.device),
        "context_locs": torch.zeros(2, 4, dtype=torch.int64, device=arena.device),
        "width": 2,
        "pool_rows": 8,
    }


BAD: dict[str, tuple[tuple[str, ...], Callable[[dict[str, Any]], dict[str, Any]]]] = {
    "locs-flat": (("context_locs", "2 dimensions"), lambda a: {"context_locs": a["context_locs"][0]}),
    "lens-of-another-batch": (("seq_lens", "(3,)", "(2,)"), lambda a: {"seq_lens": a["seq_lens"].new_zeros(3)}),
    "lens-floating": (("seq_lens", "float32"), lambda a: {"seq_lens": a["seq_lens"].float()}),
    "locs-bool": (("context_locs", "bool"), lambda a: {"context_locs": a["context_locs"].bool()}),
    "another-device": (("seq_lens", "meta"), lambda a: {"seq_lens": a["seq_lens"].to("meta")}),
    "window-0": (("sliding_window", "0", ">= 1"), lambda a: {"sliding_window": 0}),
}


@pytest.mark.parametrize("bad", BAD)
def test_error(bad: str, arena: Arena) -> None:
    names, change = BAD[bad]
    arguments = good(arena)
    expect_raises(LABEL, ValueError, names, lambda: block_context(**{**arguments, **change(arguments)}))
