"""Which ids exist: reduced draft vocabularies, shards of padded tables, and their errors (F1-16, F1-21)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from dspark.model import vocabulary
from dspark.model.vocabulary import ReducedVocabulary, crop_to_vocabulary, gather_columns, lookup_rows, shard_rows

from ..fixtures.calls.drafting import (
    HIDDEN,
    LABEL,
    Ints,
    chain,
    drafted_by,
    ids_of,
    judge,
    random_inputs,
)
from ..fixtures.calls.heads import random_markov
from ..fixtures.emulation import BF16
from ..fixtures.guard import Arena, to_bits
from ..fixtures.ledger import Label, expect_equal, expect_raises
from ..fixtures.oracles.heads import Markov, Set
from ..fixtures.streams import Stream

OFFSETS = np.array([0, 2, 4, 6])


def reduced(offsets: Ints, target: int, arena: Arena) -> ReducedVocabulary:
    return ReducedVocabulary.from_offsets(torch.from_numpy(offsets).to(arena.device), target)


@pytest.mark.parametrize("padding", [0, 3])
def test_f1_21_drafts_are_target_ids(padding: int, arena: Arena) -> None:
    """Four draft ids are the target ids 0, 3, 6, 9; the other six have -Inf, and the best of them does not win."""
    head = random_markov("F1-21", "vanilla", BF16, vocab=4 + padding, prev_vocab=10, hidden=HIDDEN)
    head.w2[4:] = 1000
    base, hidden, anchors = random_inputs("F1-21", 8, 5, 10)
    base[..., [1, 2, 4, 5, 7, 8]] += 500
    anchors[0] = 9
    vocabulary = reduced(OFFSETS, 10, arena)
    drafted = drafted_by(head, base, hidden, anchors, BF16, arena, vocabulary=vocabulary, keep_logits=True)
    tokens = ids_of(drafted)
    sets = chain(head, base[..., [0, 3, 6, 9]], hidden, anchors, tokens, BF16, keep=np.arange(4))
    wide = []
    for found in sets:
        ends = [np.full((8, 10), -np.inf) for _ in range(2)]
        for end, values in zip(ends, found, strict=True):
            end[:, [0, 3, 6, 9]] = values
        wide.append(Set(*ends))
    judge(LABEL, drafted, wide, 1.0)
    expect_equal(LABEL, "ids", sorted(set(tokens.ravel().tolist()) - {0, 3, 6, 9}), [])


def test_f1_21_ties_go_to_the_lowest_target_id_whatever_the_order_of_the_draft(arena: Arena) -> None:
    """Draft ids 0, 1, 2 are the target ids 7, 2, 5. All equal: 2. All -Inf: 2. The bias of draft id 2: 5."""
    vocabulary = reduced(np.array([7, 1, 3]), 8, arena)
    head = Markov("vanilla", np.ones((8, 1)), np.array([[0.0], [0.0], [1.0]]), BF16)
    base = np.stack([np.zeros((1, 8)), np.full((1, 8), -np.inf)])
    hidden, anchors = np.zeros((2, 1, HIDDEN)), np.array([0, 7])
    without = drafted_by(None, base, hidden, anchors, BF16, arena, vocabulary=vocabulary)
    expect_equal(LABEL, "tokens", without.tokens.tolist(), [[2], [2]])
    with_bias = drafted_by(head, base[:1], hidden[:1], anchors[:1], BF16, Arena(arena.device), vocabulary=vocabulary)
    expect_equal(LABEL, "tokens", with_bias.tokens.tolist(), [[5]])


def test_a_reduced_vocabulary_moves_between_devices(arena: Arena) -> None:
    for offsets in (OFFSETS, np.array([7, 1, 3])):
        moved = reduced(offsets, 10, arena).to("cpu").to(arena.device)
        ids = sorted((np.arange(len(offsets)) + offsets).tolist())
        expect_equal(LABEL, "target ids", moved.target_ids.tolist(), ids)
        expect_equal(LABEL, "whether it is reordered", moved.draft_ids is not None, ids[0] == 2)


def offsets(*values: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


ERRORS: dict[str, tuple[tuple[str, ...], Callable[[], object]]] = {
    "F1-21-map-with-a-duplicate": (
        ("offsets", "map to 3", "distinct"),
        lambda: ReducedVocabulary.from_offsets(offsets(0, 2, 1), 10),
    ),
    "F1-21-map-past-the-vocabulary": (
        ("offsets", "draft id 2", "10", "0 .. 9"),
        lambda: ReducedVocabulary.from_offsets(offsets(0, 2, 8), 10),
    ),
    "F1-21-map-below-zero": (
        ("offsets", "draft id 0", "-1"),
        lambda: ReducedVocabulary.from_offsets(offsets(-1, 2), 10),
    ),
    "F1-21-map-empty": (("offsets", "empty"), lambda: ReducedVocabulary.from_offsets(offsets(), 10)),
    "F1-21-map-floating": (
        ("offsets", "float32"),
        lambda: ReducedVocabulary.from_offsets(offsets(0, dtype=torch.float32), 10),
    ),
    "F1-21-map-of-two-dimensions": (
        ("offsets", "1 dimension"),
        lambda: ReducedVocabulary.from_offsets(offsets(0)[None], 10),
    ),
    "F1-21-target-vocabulary-bool": (
        ("target_vocab_size", "True"),
        lambda: ReducedVocabulary.from_offsets(offsets(0), True),
    ),
    "shard-of-an-uneven-table": (("padded_rows", "201025", "8"), lambda: shard_rows(201_025, 8, 0)),
    "shard-of-no-rank": (("rank", "8"), lambda: shard_rows(201_024, 8, 8)),
    "shard-of-a-negative-rank": (("rank", "-1"), lambda: shard_rows(201_024, 8, -1)),
    "shard-of-no-world": (("world_size: got 0",), lambda: shard_rows(201_024, 0, 0)),
    "fewer-columns-than-the-vocabulary": (("3 columns", "4"), lambda: crop_to_vocabulary("x", torch.zeros(2, 3), 4)),
    "shard-of-no-rows": (("padded_rows", "0"), lambda: shard_rows(0, 1, 0)),
    "lookup-of-floating-ids": (("ids", "float32"), lambda: lookup_rows(torch.zeros(2), torch.zeros(2, 2))),
    "lookup-in-a-vector": (("shard", "2 dimensions"), lambda: lookup_rows(offsets(0), torch.zeros(2))),
    "lookup-in-integers": (("shard", "int64"), lambda: lookup_rows(offsets(0), offsets(0)[None])),
    "lookup-of-a-list": (("ids", "list"), lambda: lookup_rows([0], torch.zeros(2, 2))),  # type: ignore[arg-type]
    "gradients-through-a-sharded-lookup": (
        ("shard", "requires grad"),
        lambda: lookup_rows(offsets(0), torch.zeros(2, 2, requires_grad=True), group=object()),
    ),
}


@pytest.mark.parametrize("bad", ERRORS)
def test_error(bad: str) -> None:
    names, call = ERRORS[bad]
    expect_raises(Label("drafting", "error"), ValueError, names, call)


def test_f1_16_the_mask_row_lies_in_the_padded_tail_of_the_last_shard() -> None:
    """Inkling: true vocabulary 200,058, padded 201,024, mask 200,064."""
    shards = [shard_rows(201_024, 8, rank) for rank in range(8)]
    expect_equal(LABEL, "shards side by side", [row for shard in shards for row in shard], [*range(201_024)])
    expect_equal(LABEL, "the shard of the mask row", [200_064 in shard for shard in shards], [False] * 7 + [True])


class SecondOfTwo:
    """In the place of ``torch.distributed`` on rank 1, with the tensor that rank 0 sends."""

    def __init__(self, other: torch.Tensor) -> None:
        self.other = other

    def get_rank(self, group: object) -> int:
        return 1

    def get_world_size(self, group: object) -> int:
        return 2

    def all_gather(self, parts: list[torch.Tensor], mine: torch.Tensor, group: object) -> None:
        parts[0].copy_(self.other.view(torch.uint8))
        parts[1].copy_(mine)

    def all_reduce(self, bits: torch.Tensor, group: object) -> None:
        bits += self.other.view(torch.uint8).view_as(bits)


def test_shards_are_exchanged_in_the_order_of_ranks(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank of two; real processes do it in tests/test_vocabulary_parallel.py."""
    patterns = Stream("two ranks").bits("uint16", (2, 3, 4))
    first, second = (arena.place(f"shard {rank}", part, torch.bfloat16) for rank, part in enumerate(patterns))
    monkeypatch.setattr(vocabulary, "_distributed", lambda: SecondOfTwo(first.contiguous()))
    gathered = to_bits(gather_columns(second, object()))
    expect_equal(LABEL, "columns of both", gathered, np.concatenate(list(patterns), axis=1))
    ids = torch.tensor([0, 4, 5], device=arena.device)
    sent = torch.where((ids < 3)[:, None], first[:1].expand(3, 4), 0).contiguous()
    monkeypatch.setattr(vocabulary, "_distributed", lambda: SecondOfTwo(sent))
    rows = to_bits(lookup_rows(ids, second, group=object()))
    expect_equal(
        LABEL, "a row of rank 0, two of rank 1", rows, np.stack([patterns[0, 0], patterns[1, 1], patterns[1, 2]])
    )


def test_f1_16_the_mask_row_of_a_whole_table(arena: Arena) -> None:
    """Bit for bit; an id without a row gives zeros, and reads nothing."""
    patterns = Stream("mask row").bits("uint16", (16, 4))
    table = arena.place("table", patterns, torch.bfloat16)
    ids = torch.tensor([[15, 0], [16, -1]], dtype=torch.int32, device=arena.device)
    rows = to_bits(lookup_rows(ids, table))
    expect_equal(LABEL, "rows", rows, np.stack([patterns[[15, 0]], np.zeros((2, 4), np.uint16)]))
