"""Tests of :mod:`dspark.pointers`: equal words are one table, and nothing else is."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

from dspark import pointers
from dspark.faults import CaptureError
from dspark.pointers import builds, signed, table

CPU = torch.device("cpu")
META = torch.device("meta")


@pytest.fixture(autouse=True)
def _own_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pointers, "_tables", {})


def test_a_table_holds_its_rows() -> None:
    built = table([[1, -2, 3], [4, 5, 6]], CPU)
    assert (built.dtype, built.device, built.is_contiguous()) == (torch.int64, CPU, True)
    assert built.tolist() == [[1, -2, 3], [4, 5, 6]]


def test_equal_words_are_the_same_table() -> None:
    first = table([[1, 2], [3, 4]], CPU)
    assert table(((1, 2), (3, 4)), CPU) is first
    assert table([range(1, 3), range(3, 5)], CPU) is first
    assert builds() == 1


@pytest.mark.parametrize(
    ("rows", "device"),
    [
        ([[1, 2], [3, 5]], CPU),
        ([[1, 2], [4, 3]], CPU),
        ([[1, 2]], CPU),
        ([[1, 2, 3, 4]], CPU),
        ([[1], [2], [3], [4]], CPU),
        ([[1, 2], [3, 4]], META),
    ],
    ids=["one-word", "order", "a-row-less", "one-row", "one-column", "device"],
)
def test_whatever_differs_makes_another_table(rows: list[list[int]], device: torch.device) -> None:
    first = table([[1, 2], [3, 4]], CPU)
    second = table(rows, device)
    assert second is not first
    assert (tuple(second.shape), second.device) == ((len(rows), len(rows[0])), device)
    assert first.tolist() == [[1, 2], [3, 4]]
    assert device == META or second.tolist() == rows
    assert builds() == 2


def test_an_address_with_its_high_bit_set_keeps_its_bits() -> None:
    """Fault F3-12."""
    rows = [[0xFFFF85ABD4E00000, 0x10, 3, 4]]
    built = table(rows, CPU)
    assert [word & (1 << 64) - 1 for word in built[0].tolist()] == rows[0]
    assert table([[0xFFFF85ABD4E00000 - (1 << 64), 0x10, 3, 4]], CPU) is built


@pytest.mark.parametrize("word", [0, 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, -1, -(1 << 63)])
def test_a_64_bit_word_is_kept_modulo_2_to_the_64(word: int) -> None:
    assert -(1 << 63) <= signed(word) < 1 << 63
    assert (signed(word) - word) % (1 << 64) == 0
    assert table([[word]], CPU).item() == signed(word)


@pytest.mark.parametrize("word", [1 << 64, -(1 << 63) - 1])
def test_what_has_more_than_64_bits_is_refused(word: int) -> None:
    with pytest.raises(ValueError, match=rf"table word: got {word:#x}, need 64 bits"):
        table([[1, word]], CPU)
    assert builds() == 0


@pytest.mark.parametrize("rows", [[[1, 2], [3]], [[1], [2, 3]], [[], [1]], [[1, 2], [3], [4, 5, 6]]])
def test_ragged_rows_are_refused(rows: list[list[int]]) -> None:
    with pytest.raises(ValueError, match=r"table rows: got lengths \[.*\], need equal lengths") as refused:
        table(rows, CPU)
    assert str([len(row) for row in rows]) in str(refused.value)
    assert builds() == 0


@pytest.mark.parametrize("rows", [[], [[]], [[], []]], ids=["no-row", "one-row", "two-rows"])
def test_empty_tables_have_their_shape_too(rows: list[list[int]]) -> None:
    for other in ([], [[]], [[], []]):
        table(other, CPU)
    assert tuple(table(rows, CPU).shape) == (len(rows), 0)
    assert table(rows, CPU).dtype == torch.int64


def test_alternating_between_two_tables_builds_nothing() -> None:
    pools = ([[1, 2]], [[3, 4]])
    tables = [table(rows, CPU) for rows in pools]
    assert builds() == 2
    for _ in range(1000):
        assert all(table(rows, CPU) is known for rows, known in zip(pools, tables, strict=True))
    assert builds() == 2


def test_a_table_is_on_its_device_whatever_the_default_device() -> None:
    with torch.device("meta"):
        assert table([[1, 2]], CPU).tolist() == [[1, 2]]


def test_nothing_is_built_during_a_capture_and_what_is_built_can_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    known = table([[1, 2]], CPU)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert table([[1, 2]], CPU) is known
    with pytest.raises(CaptureError, match="a pointer table on cpu would be built during CUDA graph capture"):
        table([[1, 3]], CPU)
    assert builds() == 1


def test_threads_that_ask_together_get_one_table(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    build = torch.tensor

    def slow(*args: Any, **kwargs: Any) -> torch.Tensor:
        time.sleep(0.01)
        made.append(args)
        return build(*args, **kwargs)

    monkeypatch.setattr(torch, "tensor", slow)
    found: list[torch.Tensor] = []
    start = threading.Barrier(8)

    def ask() -> None:
        start.wait()
        found.append(table([[7, 8]], CPU))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(map(id, found))) == len(made) == builds() == 1
