"""accept_commit: one launch for what accept, the cut at an end, and commit_indices do one after another: worked rows,
padded rows, ends, intervals, faults, strides, dtypes, bad input, and equality with the separate calls (CONTRACTS.md
sections 7b and 9; F1-18, F4-4)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from dspark import faults
from dspark.ops import AcceptCommit, compute_dflash_correct_drafts_and_bonus, fused_commit_track_indices
from dspark.ops.accept_commit import kernel

from ..fixtures.calls.accept_commit import OP, Call, place, run
from ..fixtures.guard import Arena, to_bits
from ..fixtures.implementations.ops import fused_accept_commit
from ..fixtures.ledger import Label, expect_equal, expect_raises
from ..fixtures.shapes import GRIDS
from ..fixtures.streams import Stream

PATHS = ("fused", "eager")
VOCAB = 151_936
TOP = (1 << 63) - 1
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Case:
    """A named input."""

    id: str
    build: Callable[[Stream], Call]


def window(hits: list[int], width: int) -> tuple[Ints, Ints]:
    """Candidates and targets ``[B, W]``: row b has ``hits[b]`` right drafts, then wrong ones. Targets are 10, 11 .."""
    target = np.tile(np.arange(10, 10 + width), (len(hits), 1))
    candidates = np.concatenate([np.zeros((len(hits), 1), np.int64), target[:, :-1]], axis=1)
    candidates[np.arange(width)[None, :] > np.array(hits)[:, None]] = 99
    return candidates, target


def given(id: str, hits: list[int], pre: list[int], *, width: int = 6, **changes: Any) -> Case:
    call = Call(*window(hits, width), np.array(pre, np.int64))
    return Case(id, lambda stream: replace(call, **changes))


def drawn(stream: Stream, batch: int, width: int, *, ids: int = VOCAB, interval: int = 16, **changes: Any) -> Call:
    """Every number of right drafts, lengths around boundaries, some padded rows, every window length, some ends."""
    target = stream.integers(0, ids, (batch, width))
    candidates = np.concatenate([stream.integers(0, ids, (batch, 1)), target[:, :-1]], axis=1)
    hits = np.arange(batch) % width
    candidates[np.arange(width)[None, :] > hits[:, None]] += stream.integers(1, 3, (1,))
    pre = np.maximum(interval * stream.integers(0, 100, (batch,)) + stream.integers(-width - 1, 2, (batch,)), 0)
    pre[stream.integers(0, 4, (batch,)) == 0] = -1
    lens = stream.integers(1, width + 1, (batch,))
    lens[::2] = width
    lens[pre < 0] = 0
    # An id that occurs, one that does not, and one that occurs only in the last column.
    ends = np.array([target[batch // 2, width // 2], ids + 5, target[-1, -1]])
    call = Call(candidates, target, pre, lens, ends, interval)
    return replace(call, **changes)


def any_window(batch: int, width: int, id: str = "", **changes: Any) -> Case:
    name = id or f"window/B{batch}-W{width}"
    return Case(name, lambda stream: drawn(stream, batch, width, **changes))


def layout(id: str, **changes: Any) -> Case:
    """Small ids, so that every dtype holds them, in another layout."""
    return any_window(13, 8, id, ids=50, **changes)


def constant(id: str, value: int, **changes: Any) -> Case:
    """Every candidate and every target is ``value``, in a window that does not fill its tile."""
    values = np.full((3, 5), value, np.int64)
    return Case(id, lambda stream: Call(values, values, np.array([255, 250, -1]), **changes))


def lens(id: str, values: list[int], pre: list[int] | None = None) -> Case:
    """All right, in a window of 4, with given lengths of it."""
    before = [255] * len(values) if pre is None else pre
    return given(id, [3] * len(values), before, width=4, verify_lens=np.array(values), lens_dtype=torch.int64)


def ends(id: str, ids: list[int], **changes: Any) -> Case:
    """Five drafts right, some right, none right, and a padded row."""
    return given(id, [5, 2, 0, 5], [254, 255, 256, -1], eos_ids=np.array(ids, np.int64), **changes)


HIGH = 1 << 32
CASES = (
    *(any_window(2 * width + 2, width) for width in GRIDS["width"]),
    *(any_window(batch, 5) for batch in GRIDS["rows"] if batch),
    any_window(5, 1024, "widest-that-is-fused"),
    any_window(33, 6, "interval-1-is-crossed-by-every-token", interval=1),
    any_window(33, 6, "interval-of-one-window", interval=6),
    any_window(33, 6, "interval-smaller-than-the-window", interval=3),
    any_window(33, 6, "interval-not-a-power-of-two", interval=7),
    any_window(33, 6, "interval-beyond-int32", interval=(1 << 33) + 5),
    Case("no-interval-no-track", lambda stream: replace(drawn(stream, 9, 5), interval=None)),
    any_window(9, 5, "no-verify-lens", verify_lens=None),
    any_window(9, 5, "no-ends", eos_ids=None),
    any_window(9, 5, "an-empty-list-of-ends", eos_ids=np.zeros(0, np.int64)),
    Case("nothing-but-a-window", lambda stream: Call(*window([0, 3, 5], 6), np.array([7, 8, 9]), interval=None)),
    given("F1-18-a-negative-length-is-a-padded-row", [5, 0, 5, 3], [-1, -256, -(1 << 63), 255]),
    given("a-batch-of-padded-rows", [5, 0, 3], [-1, -1, -7], eos_ids=np.array([10])),
    given("a-length-of-0-is-no-padded-row", [5, 0], [0, 0], interval=4),
    given("F4-4-negative-lengths-are-not-divided", [5, 5, 5], [-1, -2, -5], interval=2),
    given("lengths-at-the-limit-of-int64", [0, 5, 5, 5], [TOP, TOP, TOP - 3, TOP - 6]),
    given("lengths-at-the-limit-of-int32", [0, 5, 5], [2**31 - 1] * 2 + [2**31 - 4], seq_lens_dtype=torch.int32),
    given("lengths-beyond-int32", [1, 5], [(1 << 40) - 1, (1 << 40) - 5]),
    given("largest-interval", [0, 1, 5], [(1 << 62) - 1, (1 << 62) - 3, 0], interval=1 << 62),
    lens("verify-lens-of-every-value", [1, 2, 3, 4]),
    *(
        lens(f"verify-len-{value}-is-a-fault-and-clamped", [4, value, 2, 1])
        for value in (0, -1, 5, 1 << 40, -(1 << 40), HIGH + 2)
    ),
    lens("a-verify-len-of-a-padded-row-is-no-fault", [4, 0, -9, 5, 3], [254, -1, -1, -1, -1]),
    lens("a-fault-beside-a-padded-row", [0, 0], [255, -1]),
    ends("an-end-in-the-first-column", [10]),
    ends("an-end-among-the-accepted", [12]),
    ends("an-end-that-is-the-last-bonus", [15]),
    ends("an-end-after-the-bonus-of-one-row-and-before-that-of-another", [13]),
    ends("the-first-of-several-ends-counts-in-whatever-order", [14, 11, 12]),
    ends("an-end-named-twice", [12, 12]),
    ends("an-end-that-is-only-a-wrong-draft", [99]),
    ends("an-end-that-is-the-anchor", [0]),
    ends("an-end-that-agrees-in-the-low-32-bits-is-none", [12 + HIGH]),
    ends("ends-of-int8", [12, -128], eos_dtype=torch.int8),
    constant("padding-ids-minus-one-are-ordinary-values", -1, eos_ids=np.array([-2])),
    constant("a-negative-end-ends", -1, eos_ids=np.array([-1])),
    constant("zero-padding-is-no-end", 7, eos_ids=np.array([0])),
    constant("last-column-does-not-match-zero-padding", 0),
    Case(
        "ids-that-agree-in-the-low-32-bits-differ",
        lambda stream: Call(np.full((3, 4), 5, np.int64), np.full((3, 4), 5 + HIGH, np.int64), np.array([3, 254, -1])),
    ),
    layout("int32-candidates-against-int64-target", candidates_dtype=torch.int32),
    layout("int64-candidates-against-int32-target", target_dtype=torch.int32),
    layout("int16-against-int8", candidates_dtype=torch.int16, target_dtype=torch.int8),
    layout("int32-lengths", seq_lens_dtype=torch.int32, eos_dtype=torch.int32),
    layout("int8-verify-lens", lens_dtype=torch.int8, eos_dtype=torch.int16),
    layout("strided", gap=3),
    layout("transposed", transposed=True, gap=2),
)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_rows(case: Case, path: str, arena: Arena) -> None:
    run(case.build(Stream(case.id)), Label(OP, path), arena, path)


@pytest.mark.parametrize("path", PATHS)
def test_worked_rows(path: str, arena: Arena) -> None:
    """Against the numbers themselves, and not the oracle. I = 256, end id 13, W = 6, target 10 .. 15."""
    label = Label(OP, path)
    candidates, target = window([0, 1, 2, 5, 5, 5], 6)
    call = Call(
        candidates, target, np.array([255, 254, 256, 250, 253, -1]), np.array([6, 6, 6, 3, 6, 0]), np.array([13])
    )
    got = fused_accept_commit(**place(call, arena), path=path)
    need = AcceptCommit(
        correct=[0, 1, 2, 2, 5, 0],  # type: ignore[arg-type]
        bonus=[10, 11, 12, 12, 15, 10],  # type: ignore[arg-type]
        commit_lens=[1, 2, 3, 3, 4, 0],  # type: ignore[arg-type]
        new_seq_lens=[256, 256, 259, 253, 257, -1],  # type: ignore[arg-type]
        last=[0, 1, 2, 2, 3, -1],  # type: ignore[arg-type]
        track=[0, 1, -1, -1, 2, -1],  # type: ignore[arg-type]
    )
    for name, values in need._asdict().items():
        expect_equal(label, name, getattr(got, name).tolist(), values)
    dtypes = [getattr(got, name).dtype for name in AcceptCommit._fields]
    expect_equal(label, "dtypes", dtypes, [torch.int32] + [torch.int64] * 5)


def separately(call: Call, tensors: dict[str, Any], path: str) -> dict[str, torch.Tensor | None]:
    """The calls that this one stands for, with what a worker does between them. The window lengths are legal."""
    target, seq_lens = tensors["target_predict"], tensors["seq_lens"].to(torch.int64)
    batch, width = target.shape
    lens = tensors.get("verify_lens")
    correct, bonus = compute_dflash_correct_drafts_and_bonus(
        candidates=tensors["candidates"],
        target_predict=target,
        verify_lens=None if lens is None else lens.clamp(min=1),
        path=path,
    )
    eos = tensors.get("eos_ids", torch.zeros(0, dtype=torch.int64, device=target.device))
    columns = torch.arange(width, device=target.device)
    # The drafts that were accepted, then the bonus.
    tokens = torch.where(columns == correct[:, None], bonus[:, None], tensors["candidates"].roll(-1, dims=1))
    first_end = torch.where((tokens[..., None] == eos).any(dim=-1), columns, width).amin(dim=1)
    commit_lens = torch.where(seq_lens >= 0, torch.minimum(correct.to(torch.int64), first_end) + 1, 0)
    chain = torch.arange(batch * width, device=target.device).view(batch, width)
    tracked = None if call.interval is None else seq_lens
    last, track = fused_commit_track_indices(chain, commit_lens, tracked, width, call.interval or 0, path=path)
    found = (correct, bonus, commit_lens, seq_lens + commit_lens, last, track)
    return dict(zip(AcceptCommit._fields, found, strict=True))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("width", GRIDS["width"])
def test_it_is_the_separate_calls_in_one(width: int, path: str, arena: Arena) -> None:
    """With and without each of what may be left out; no oracle."""
    label, stream = Label(OP, path), Stream(f"accept_commit/separately/W{width}")
    whole = drawn(stream, 4 * width + 3, width, ids=6)
    without: tuple[dict[str, Any], ...] = ({}, {"verify_lens": None}, {"eos_ids": None}, {"interval": None})
    for left_out in without:
        call = replace(whole, **left_out)
        tensors = place(call, arena)
        got, need = fused_accept_commit(**tensors, path=path), separately(call, tensors, path)
        for name, values in need.items():
            mine = getattr(got, name)
            expect_equal(label, f"{name} without {list(left_out)}", mine is None, values is None)
            if values is not None:
                expect_equal(label, f"{name} without {list(left_out)}", to_bits(mine), to_bits(values))
    arena.verify(label)


@pytest.mark.parametrize("path", PATHS)
def test_what_a_row_emits_is_the_targets_own_tokens(path: str, arena: Arena) -> None:
    """An accepted draft equals the target's token at its column, and the bonus is the one after them; no oracle."""
    label = Label(OP, path)
    call = drawn(Stream("accept_commit/emits"), 40, 5, ids=4, eos_ids=None)
    got = fused_accept_commit(**place(call, arena), path=path)
    emitted = [
        [*row[1 : count + 1].tolist(), bonus][:length]
        for row, count, bonus, length in zip(
            call.candidates, got.correct.tolist(), got.bonus.tolist(), got.commit_lens.tolist(), strict=True
        )
    ]
    own = [row[:length].tolist() for row, length in zip(call.target, got.commit_lens.tolist(), strict=True)]
    expect_equal(label, "tokens", emitted, own)
    expect_equal(label, "rows that emit more than one", sum(len(row) > 1 for row in own) > 5, True)


@pytest.mark.parametrize("path", PATHS)
def test_a_verify_len_out_of_range_is_clamped(path: str, arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is returned beside a fault, as on a GPU where nobody waits; a padded row sets no bit."""
    monkeypatch.setattr(faults, "finish", lambda device: None)
    label = Label(OP, path)
    call = Call(*window([3] * 4, 4), np.array([255, 255, 255, -1]), np.array([0, 9, 2, -7]))
    got = fused_accept_commit(**place(call, arena), path=path)
    expect_equal(label, "committed", got.commit_lens.tolist(), [1, 4, 2, 0])
    expect_equal(label, "fault word", faults.peek(), ((OP, "verify-len-out-of-range"),))
    expect_raises(label, faults.IndexFaultError, ["verify-len-out-of-range"], faults.check)


@pytest.mark.parametrize("path", PATHS)
def test_rows_do_not_depend_on_the_tile(path: str, arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several programs, the last one not full."""
    for name in ("GPU_TILE", "INTERPRETER_TILE"):
        monkeypatch.setattr(kernel, name, 16)
    run(drawn(Stream("accept_commit/tiles"), 11, 5), Label(OP, path), arena, path)


def arguments(device: torch.device) -> dict[str, Any]:
    """A good call of three requests."""
    return {
        "candidates": torch.zeros(3, 4, dtype=torch.int64, device=device),
        "target_predict": torch.zeros(3, 4, dtype=torch.int64, device=device),
        "seq_lens": torch.ones(3, dtype=torch.int64, device=device),
        "verify_lens": torch.ones(3, dtype=torch.int32, device=device),
        "eos_ids": torch.ones(2, dtype=torch.int64, device=device),
        "mamba_track_interval": 256,
    }


Change = Callable[[dict[str, Any]], dict[str, Any]]
BAD_CALLS: dict[str, tuple[tuple[str, ...], Change]] = {
    "candidates-of-one-dimension": (("candidates", "2 dimensions"), lambda a: {"candidates": a["candidates"][0]}),
    "candidates-a-list": (("candidates", "list"), lambda a: {"candidates": [[0]]}),
    "candidates-floating": (("candidates", "float32"), lambda a: {"candidates": a["candidates"].float()}),
    "candidates-uint8": (("candidates", "uint8"), lambda a: {"candidates": a["candidates"].to(torch.uint8)}),
    "empty-batch": (("candidates", "B > 0"), lambda a: {"candidates": a["candidates"][:0]}),
    "empty-width": (("candidates", "W > 0"), lambda a: {"candidates": a["candidates"][:, :0]}),
    "a-target-of-another-width": (
        ("target_predict", "(3, 3)", "(3, 4)"),
        lambda a: {"target_predict": a["target_predict"][:, :3]},
    ),
    "target-bool": (("target_predict", "bool"), lambda a: {"target_predict": a["target_predict"].bool()}),
    "fewer-seq-lens-than-rows": (("seq_lens", "(2,)", "(3,)"), lambda a: {"seq_lens": a["seq_lens"][:2]}),
    "seq-lens-of-two-dimensions": (("seq_lens", "1 dimension"), lambda a: {"seq_lens": a["seq_lens"][:, None]}),
    "seq-lens-missing": (("seq_lens", "NoneType"), lambda a: {"seq_lens": None}),
    "seq-lens-int16": (("seq_lens", "int16"), lambda a: {"seq_lens": a["seq_lens"].short()}),
    "seq-lens-floating": (("seq_lens", "float64"), lambda a: {"seq_lens": a["seq_lens"].double()}),
    "fewer-verify-lens-than-rows": (("verify_lens", "(2,)", "(3,)"), lambda a: {"verify_lens": a["verify_lens"][:2]}),
    "verify-lens-bool": (("verify_lens", "bool"), lambda a: {"verify_lens": a["verify_lens"].bool()}),
    "ends-a-number": (("eos_ids", "int"), lambda a: {"eos_ids": 7}),
    "ends-a-scalar": (("eos_ids", "1 dimension"), lambda a: {"eos_ids": a["eos_ids"][0]}),
    "ends-floating": (("eos_ids", "float32"), lambda a: {"eos_ids": a["eos_ids"].float()}),
    "ends-uint8": (("eos_ids", "uint8"), lambda a: {"eos_ids": a["eos_ids"].to(torch.uint8)}),
    "interval-zero": (("mamba_track_interval", "0"), lambda a: {"mamba_track_interval": 0}),
    "interval-negative": (("mamba_track_interval", "-256"), lambda a: {"mamba_track_interval": -256}),
    "interval-bool": (("mamba_track_interval", "True"), lambda a: {"mamba_track_interval": True}),
    "interval-fractional": (("mamba_track_interval", "256.0"), lambda a: {"mamba_track_interval": 256.0}),
    "interval-too-large": (
        ("mamba_track_interval", str((1 << 62) + 1)),
        lambda a: {"mamba_track_interval": (1 << 62) + 1},
    ),
    **{
        f"{name.replace('_', '-')}-on-another-device": (
            (name, "device meta"),
            lambda a, name=name: {name: a[name].to("meta")},  # type: ignore[misc]
        )
        for name in ("target_predict", "seq_lens", "verify_lens", "eos_ids")
    },
    "unknown-path": (("path", "'triton'", "fused"), lambda a: {"path": "triton"}),
}


@pytest.mark.parametrize("bad", BAD_CALLS)
def test_error(bad: str, arena: Arena) -> None:
    names, change = BAD_CALLS[bad]
    good = arguments(arena.device)
    expect_raises(Label(OP, "error"), ValueError, names, lambda: fused_accept_commit(**{**good, **change(good)}))


def test_an_error_comes_before_anything_is_written(arena: Arena) -> None:
    """A window length that would be a fault is not looked at where another argument is refused."""
    good = arguments(arena.device)
    bad = {**good, "verify_lens": good["verify_lens"] * 9, "mamba_track_interval": 0}
    expect_raises(Label(OP, "error"), ValueError, ["mamba_track_interval"], lambda: fused_accept_commit(**bad))
    expect_equal(Label(OP, "error"), "fault word", faults.peek(), ())
