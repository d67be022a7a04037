"""Tests of `conformance.fixtures.cliff`: one element too far ends the child, and what is legal does not."""

from __future__ import annotations

import ctypes
import faulthandler
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from conformance.fixtures import cliff as cliff_module
from conformance.fixtures import ledger
from conformance.fixtures.cliff import EVERYTHING, REACH, Cliff, Say, Side, ground, in_child
from conformance.fixtures.guard import poisoned_allocations, to_bits
from conformance.fixtures.ledger import Label, expect_equal
from dspark import faults, pointers

CPU = torch.device("cpu")
LABEL = Label("op", "fused")
DTYPES = (torch.int8, torch.bfloat16, torch.float32, torch.int64)
SIDES = tuple(Side)

Access = Callable[[int], object]


@pytest.fixture(autouse=True)
def _own_ledger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "_active", ledger._Active())


def read(address: int) -> object:
    return ctypes.c_char.from_address(address).value


def write(address: int) -> None:
    ctypes.c_char.from_address(address).value = b"x"


def ending(work: Callable[[], object]) -> str:
    def said(say: Say) -> None:
        say("working")
        work()

    return in_child(said).how


def outermost(tensor: torch.Tensor, side: Side) -> tuple[int, int]:
    """Addresses of the outermost byte of a tensor at ``side`` and of the next one beyond it."""
    if side is Side.START:
        return tensor.data_ptr(), tensor.data_ptr() - 1
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    end = tensor.data_ptr() + (last + 1) * tensor.element_size()
    return end - 1, end


def placed(side: Side, dtype: torch.dtype = torch.bfloat16, **options: object) -> torch.Tensor:
    """Five rows of three elements, with gaps."""
    cliff = Cliff(CPU, side=side, **options)  # type: ignore[arg-type]
    return cliff.place("x", np.arange(15).reshape(5, 3), dtype, strides=(8, 2))


def mappings() -> int:
    return len(Path("/proc/self/maps").read_text().splitlines())


@pytest.fixture(params=[read, write], ids=["read", "write"])
def access(request: pytest.FixtureRequest) -> Access:
    return request.param


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("side", SIDES)
def test_the_first_byte_beyond_ends_the_child_and_the_last_one_inside_does_not(
    side: Side, dtype: torch.dtype, access: Access
) -> None:
    tensor = placed(side, dtype)
    inside, beyond = outermost(tensor, side)
    assert ending(lambda: access(inside)) == "done"
    assert ending(lambda: access(beyond)) == "SIGSEGV"


@pytest.mark.parametrize("side", SIDES)
def test_a_padded_tile_beyond_ends_the_child(side: Side) -> None:
    tensor = placed(side)
    _, beyond = outermost(tensor, side)
    farthest = beyond + (REACH - 1) * (1 if side is Side.END else -1)
    assert ending(lambda: read(farthest)) == "SIGSEGV"


@pytest.mark.parametrize("side", SIDES)
def test_values_are_there_and_the_rest_is_poison(side: Side) -> None:
    tensor = placed(side)
    assert to_bits(tensor).tolist() == np.arange(15).reshape(5, 3).tolist()
    whole = torch.empty(0, dtype=torch.bfloat16).set_(tensor.untyped_storage())
    assert int((~whole.isnan()).sum()) == 15


@pytest.mark.parametrize("side", SIDES)
def test_rows_beyond_the_edge_cannot_be_read(side: Side) -> None:
    tensor = placed(side, unreadable={"x": 2})
    there, hidden = (slice(0, 3), slice(3, 5)) if side is Side.END else (slice(2, 5), slice(0, 2))
    assert to_bits(tensor[there]).tolist() == np.arange(15).reshape(5, 3)[there].tolist()
    for row in range(*hidden.indices(5)):
        for column in range(3):
            address = tensor[row, column].data_ptr()
            assert ending(lambda address=address: read(address)) == "SIGSEGV"


@pytest.mark.parametrize("side", SIDES)
def test_a_tensor_of_which_everything_is_beyond(side: Side) -> None:
    tensor = placed(side, unreadable={"x": 5})
    assert ending(lambda: read(tensor[4 if side is Side.START else 0, 0].data_ptr())) == "SIGSEGV"


def test_only_one_argument_is_at_the_edge() -> None:
    for only, how in (("x", "SIGSEGV"), (EVERYTHING, "SIGSEGV"), ("y", "done")):
        tensor = placed(Side.END, only=only)
        _, beyond = outermost(tensor, Side.END)
        assert ending(lambda beyond=beyond: read(beyond)) == how, only


@pytest.mark.parametrize("side", SIDES)
def test_what_an_operation_makes_is_at_the_edge(side: Side) -> None:
    said: list[str] = []
    cliff = Cliff(CPU, side=side, say=said.append)
    with cliff.inner_memory(), poisoned_allocations():
        made = [torch.empty(3, dtype=torch.int64), pointers.table([(1, 2), (3, 4)], CPU), faults.word(CPU)]
    assert cliff.names == ["fault word", "output", "pointer table"]
    assert said[-1].splitlines() == cliff.names
    assert [made[1].tolist(), made[2].tolist()] == [[[1, 2], [3, 4]], [0]]
    for tensor in made:
        inside, beyond = outermost(tensor, side)
        assert ending(lambda inside=inside: write(inside)) == "done"
        assert ending(lambda beyond=beyond: write(beyond)) == "SIGSEGV"


@pytest.mark.parametrize("side", SIDES)
def test_a_stray_write_on_the_readable_side_is_seen(side: Side) -> None:
    cliff = Cliff(CPU, side=side)
    writes = np.ones((5, 3), np.bool_)
    tensor = cliff.place("x", np.arange(15).reshape(5, 3), torch.bfloat16, strides=(8, 2), writes=writes)
    tensor.zero_()
    cliff.verify(LABEL)
    write(tensor.data_ptr() + 2)
    with pytest.raises(AssertionError, match="bytes of x outside the write set"):
        cliff.verify(LABEL)


def test_the_memory_is_given_back() -> None:
    placed(Side.END)
    before = mappings()
    for _ in range(50):
        placed(Side.END)
        ground(3, Side.START)
    assert mappings() <= before + 2


def test_an_ending_says_what_was_done_and_where() -> None:
    def work(say: Say) -> None:
        say("first")
        say("second")
        read(outermost(tensor, Side.END)[1])

    tensor = placed(Side.END)
    ended = in_child(work)
    assert (ended.how, ended.doing) == ("SIGSEGV", "second")
    assert "Segmentation fault" in ended.trace
    assert "test_cliff.py" in ended.trace


def test_an_error_in_the_child_is_a_failure() -> None:
    def work(say: Say) -> None:
        say("comparing")
        expect_equal(LABEL, "one", 1, 2)

    ended = in_child(work)
    assert (ended.how, ended.doing) == ("failed", "comparing")
    assert "op/fused: one: got 1, need 2" in ended.trace


def test_what_the_child_compared_is_counted() -> None:
    expect_equal(LABEL, "here", 1, 1)
    assert in_child(lambda say: expect_equal(LABEL, "there", 2, 2)).how == "done"
    assert ledger.active().row(LABEL).comparisons == 2


def test_a_child_that_hangs_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cliff_module, "DEADLINE_S", 1)
    faulthandler.dump_traceback_later(60)
    try:
        ended = in_child(lambda say: time.sleep(30))
    finally:
        faulthandler.cancel_dump_traceback_later()
    assert ended.how == "SIGALRM"
    assert "test_cliff.py" in ended.trace
