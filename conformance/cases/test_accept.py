"""accept: leading matches, bonus token, verify_lens, padding values, strides, dtypes (CONTRACTS.md section 6)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from dspark import faults

from ..fixtures.calls.accept import OP, Call, run
from ..fixtures.guard import Arena
from ..fixtures.implementations.ops import compute_dflash_correct_drafts_and_bonus
from ..fixtures.ledger import Label, expect_raises
from ..fixtures.shapes import GRIDS
from ..fixtures.streams import Stream

PATHS = ("fused", "eager")
VOCAB = 151_936


def random_window(stream: Stream, batch: int, width: int) -> Call:
    """Every number of leading matches occurs: row b is right up to column b mod W, and random after."""
    target = stream.integers(0, VOCAB, (batch, width))
    candidates = np.concatenate([stream.integers(0, VOCAB, (batch, 1)), target[:, :-1]], axis=1)
    wrong = np.arange(width)[None, :] > (np.arange(batch) % width)[:, None]
    noise = stream.integers(0, 2, (batch, width)).astype(bool)
    first_wrong = np.arange(width)[None, :] == (np.arange(batch) % width)[:, None] + 1
    candidates[wrong & (noise | first_wrong)] += 1
    return Call(candidates, target)


@dataclass(frozen=True)
class Case:
    """A named input."""

    id: str
    build: Callable[[Stream], Call]


def window(batch: int, width: int) -> Case:
    return Case(f"window/B{batch}-W{width}", lambda stream: random_window(stream, batch, width))


def layout(id: str, **changes: Any) -> Case:
    """Small ids, so that every dtype holds them, in another layout."""

    def build(stream: Stream) -> Call:
        call = random_window(stream, 9, 8)
        return replace(call, candidates=call.candidates % 100, target=call.target % 100, **changes)

    return Case(id, build)


def every_length(width: int) -> Case:
    """verify_lens takes every value from 1 to W."""

    def build(stream: Stream) -> Call:
        lens = stream.integers(1, width + 1, (2 * width,))
        lens[:width] = np.arange(1, width + 1)
        return replace(random_window(stream, 2 * width, width), verify_lens=lens)

    return Case(f"verify-lens-every-length/W{width}", build)


def lens(id: str, values: list[int], **changes: Any) -> Case:
    """A window of 4 with given verify_lens."""

    def build(stream: Stream) -> Call:
        call = random_window(stream, len(values), 4)
        return replace(call, verify_lens=np.array(values), lens_dtype=torch.int64, **changes)

    return Case(id, build)


def constant(id: str, width: int, value: int) -> Case:
    """Every candidate and every target is ``value``."""
    values = np.full((3, width), value, np.int64)
    return Case(id, lambda stream: Call(values, values))


def beyond_int32(stream: Stream) -> Call:
    call = random_window(stream, 9, 5)
    return replace(call, candidates=call.candidates + (1 << 40), target=call.target + (1 << 40))


def same_low_words(stream: Stream) -> Call:
    return Call(np.full((4, 4), 5, np.int64), np.full((4, 4), 5 + (1 << 32), np.int64))


def graph_padding(stream: Stream) -> Call:
    """Rows 1 and 3 are padding: scratch ids and nothing to verify but the anchor."""
    call = random_window(stream, 4, 4)
    target = np.where(np.arange(4)[:, None] % 2 == 1, 0x7FFFFFFF, call.target)
    return replace(call, target=target, verify_lens=np.array([4, 1, 2, 1]))


CASES = (
    *(window(batch, width) for width in GRIDS["width"] for batch in (1, 7, 33)),
    window(1024, 8),
    window(5, 1024),
    constant("padding-ids-minus-one-are-ordinary-values", 5, -1),
    constant("padding-ids-minus-two-are-ordinary-values", 5, -2),
    constant("last-column-does-not-match-zero-padding", 5, 0),
    constant("every-draft-right-at-a-power-of-two", 8, 7),
    Case("ids-beyond-int32-are-compared-whole", beyond_int32),
    Case("ids-that-agree-in-the-low-32-bits-differ", same_low_words),
    layout("int32-candidates-against-int64-target", candidates_dtype=torch.int32),
    layout("int64-candidates-against-int32-target", target_dtype=torch.int32),
    layout("int16-against-int8", candidates_dtype=torch.int16, target_dtype=torch.int8),
    layout("strided-columns", gap=3),
    layout("transposed", transposed=True),
    *(every_length(width) for width in GRIDS["width"]),
    lens("verify-lens-int64-strided", [1, 2, 3, 4, 4, 1, 3], gap=2),
    *(
        lens(f"verify-len-{value}-is-a-fault-and-clamped", [4, value, 2, 1])
        for value in (0, -1, 5, 1 << 40, -(1 << 40), (1 << 32) + 2)
    ),
    Case("F1-1-graph-padding-rows", graph_padding),
)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_window(case: Case, path: str, arena: Arena) -> None:
    run(case.build(Stream(case.id)), Label(OP, path), arena, path)


@pytest.mark.parametrize("path", PATHS)
def test_a_verify_len_out_of_range_is_clamped(path: str, arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    """On CPU tensors the call raises; what it returns beside a fault, as on a GPU, is seen where nobody looks."""
    monkeypatch.setattr(faults, "finish", lambda device: None)
    target = np.arange(20).reshape(5, 4)
    candidates = np.concatenate([np.zeros((5, 1), np.int64), target[:, :-1]], axis=1)
    run(Call(candidates, target, np.array([0, -1, 5, 1 << 20, 2])), Label(OP, path), arena, path)


def tensor(*shape: int, dtype: torch.dtype = torch.int64, device: str | torch.device = "cpu") -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


BAD_CALLS: dict[str, tuple[tuple[str, ...], Callable[[torch.device], dict[str, object]]]] = {
    "candidates-of-one-dimension": (
        ("candidates", "(4,)", "2 dimensions"),
        lambda d: {"candidates": tensor(4, device=d), "target_predict": tensor(4, device=d)},
    ),
    "candidates-not-a-tensor": (
        ("candidates", "list"),
        lambda d: {"candidates": [[1]], "target_predict": tensor(1, 1, device=d)},
    ),
    "empty-batch": (
        ("candidates", "B > 0"),
        lambda d: {"candidates": tensor(0, 4, device=d), "target_predict": tensor(0, 4, device=d)},
    ),
    "empty-width": (
        ("candidates", "W > 0"),
        lambda d: {"candidates": tensor(4, 0, device=d), "target_predict": tensor(4, 0, device=d)},
    ),
    "shapes-that-differ": (
        ("target_predict", "(2, 5)", "(2, 4)"),
        lambda d: {"candidates": tensor(2, 4, device=d), "target_predict": tensor(2, 5, device=d)},
    ),
    "target-of-three-dimensions": (
        ("target_predict", "2 dimensions"),
        lambda d: {"candidates": tensor(2, 4, device=d), "target_predict": tensor(2, 4, 1, device=d)},
    ),
    "floating-candidates": (
        ("candidates", "float32"),
        lambda d: {"candidates": tensor(2, 4, dtype=torch.float32, device=d), "target_predict": tensor(2, 4, device=d)},
    ),
    "bool-target": (
        ("target_predict", "bool"),
        lambda d: {"candidates": tensor(2, 4, device=d), "target_predict": tensor(2, 4, dtype=torch.bool, device=d)},
    ),
    "uint8-candidates": (
        ("candidates", "uint8"),
        lambda d: {"candidates": tensor(2, 4, dtype=torch.uint8, device=d), "target_predict": tensor(2, 4, device=d)},
    ),
    "verify-lens-of-another-batch": (
        ("verify_lens", "(3,)", "(2,)"),
        lambda d: {
            "candidates": tensor(2, 4, device=d),
            "target_predict": tensor(2, 4, device=d),
            "verify_lens": tensor(3, device=d),
        },
    ),
    "verify-lens-of-two-dimensions": (
        ("verify_lens", "1 dimension"),
        lambda d: {
            "candidates": tensor(2, 4, device=d),
            "target_predict": tensor(2, 4, device=d),
            "verify_lens": tensor(2, 1, device=d),
        },
    ),
    "floating-verify-lens": (
        ("verify_lens", "float64"),
        lambda d: {
            "candidates": tensor(2, 4, device=d),
            "target_predict": tensor(2, 4, device=d),
            "verify_lens": tensor(2, dtype=torch.float64, device=d),
        },
    ),
    "mixed-devices": (
        ("target_predict", "device meta"),
        lambda d: {"candidates": tensor(2, 4, device=d), "target_predict": tensor(2, 4, device="meta")},
    ),
    "verify-lens-on-another-device": (
        ("verify_lens", "device meta"),
        lambda d: {
            "candidates": tensor(2, 4, device=d),
            "target_predict": tensor(2, 4, device=d),
            "verify_lens": tensor(2, device="meta"),
        },
    ),
    "unknown-path": (
        ("path", "'quick'", "fused"),
        lambda d: {"candidates": tensor(2, 4, device=d), "target_predict": tensor(2, 4, device=d), "path": "quick"},
    ),
}


@pytest.mark.parametrize("bad", BAD_CALLS)
def test_error(bad: str, arena: Arena) -> None:
    names, build = BAD_CALLS[bad]
    arguments = build(arena.device)
    expect_raises(
        Label(OP, "error"),
        ValueError,
        names,
        lambda: compute_dflash_correct_drafts_and_bonus(**arguments),
    )
