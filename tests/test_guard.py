"""Tests of `conformance.fixtures.guard`: an arena sees every stray byte, and allows what the contract allows."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import pytest
import torch

from conformance.fixtures import guard, ledger
from conformance.fixtures.guard import MARGIN, Arena, from_bits, poisoned_allocations, to_bits
from conformance.fixtures.ledger import Label

LABEL = Label("op", "fused")
FLOATING = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
INTEGER = (torch.int8, torch.int16, torch.int32, torch.int64)
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.int32, torch.int64)

Bits = npt.NDArray[np.integer]


@pytest.fixture(autouse=True)
def _own_ledger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "_active", ledger._Active())


@pytest.fixture
def arena() -> Arena:
    return Arena(torch.device("cpu"))


def pattern(*shape: int, dtype: torch.dtype = torch.int64) -> Bits:
    """Small values or bit patterns 1, 2, 3, ..."""
    kind = guard.BITS[dtype][1] if dtype in guard.BITS else np.int64
    return (np.arange(int(np.prod(shape))) + 1).reshape(shape).astype(kind)


def storage(view: torch.Tensor) -> torch.Tensor:
    """The whole storage that ``view`` lies in, flat."""
    return torch.empty(0, dtype=view.dtype).set_(view.untyped_storage())


def is_poison(tensor: torch.Tensor) -> bool:
    """Every element is a NaN, or huge."""
    if tensor.dtype.is_floating_point:
        return bool(tensor.isnan().all())
    return bool((tensor > torch.iinfo(tensor.dtype).max // 2).all())


def notices(arena: Arena, name: str) -> None:
    with pytest.raises(AssertionError, match=rf"op/fused: bytes of {name} outside the write set"):
        arena.verify(LABEL)


def ids(values: tuple[torch.dtype, ...]) -> list[str]:
    return [str(value).removeprefix("torch.") for value in values]


# --- bits -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_every_16_bit_pattern_survives(arena: Arena, dtype: torch.dtype) -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    tensor = from_bits(bits, dtype)
    assert tensor.dtype == dtype
    assert int(tensor.isnan().sum()) == 2 * ((1 << 7) - 1 if dtype == torch.bfloat16 else (1 << 10) - 1)
    for placed in (tensor, arena.place("x", bits, dtype), arena.place("y", bits, dtype, strides=(3,))):
        assert to_bits(placed).dtype == np.uint16
        assert np.array_equal(to_bits(placed), bits)


def test_bits_are_those_of_the_value() -> None:
    assert from_bits(np.array([0x3F80, 0xC000]), torch.bfloat16).tolist() == [1.0, -2.0]
    assert from_bits(np.array([0x3C00, 0x8000]), torch.float16).tolist() == [1.0, 0.0]
    assert from_bits(np.array([0x3F800000, 0xC0000000]), torch.float32).tolist() == [1.0, -2.0]
    assert from_bits(np.array([0x3FF0 << 48]), torch.float64).tolist() == [1.0]
    assert to_bits(torch.tensor([1.0, -2.0], dtype=torch.bfloat16)).tolist() == [0x3F80, 0xC000]


@pytest.mark.parametrize("dtype", INTEGER, ids=ids(INTEGER))
def test_integers_keep_their_values(dtype: torch.dtype) -> None:
    limits = torch.iinfo(dtype)
    values = np.array([limits.min, -1, 0, limits.max])
    tensor = from_bits(values, dtype)
    assert (tensor.dtype, tensor.tolist()) == (dtype, values.tolist())
    assert to_bits(tensor).tolist() == values.tolist()


def test_bits_of_a_strided_tensor_that_requires_grad() -> None:
    source = torch.tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True).t()
    assert from_bits(to_bits(source), torch.float32).tolist() == [[1.0, 3.0], [2.0, 4.0]]


def test_a_tensor_does_not_share_the_memory_of_its_bits() -> None:
    bits = np.array([1, 2], np.uint16)
    from_bits(bits, torch.bfloat16).zero_()
    assert bits.tolist() == [1, 2]


# --- arenas -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=ids(DTYPES))
@pytest.mark.parametrize(
    ("shape", "strides"),
    [((3, 4), None), ((3, 4), (7, 1)), ((3, 4), (1, 3)), ((3, 4), (20, 5)), ((2, 3, 4), (40, 2, 9)), ((1,), (1,))],
    ids=["contiguous", "rows-apart", "transposed", "columns-apart", "three-dimensions", "one-element"],
)
def test_a_view_is_what_was_asked_for(
    arena: Arena, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...] | None
) -> None:
    bits = pattern(*shape, dtype=dtype)
    view = arena.place("x", bits, dtype, strides=strides)
    assert (view.dtype, tuple(view.shape)) == (dtype, shape)
    assert view.stride() == (strides or torch.empty(shape).stride())
    assert np.array_equal(to_bits(view), bits)
    arena.verify(LABEL)


@pytest.mark.parametrize("dtype", DTYPES, ids=ids(DTYPES))
def test_everything_around_the_elements_is_poison(arena: Arena, dtype: torch.dtype) -> None:
    view = arena.place("x", pattern(2, 3, dtype=dtype), dtype, strides=(10, 2))
    whole = storage(view)
    assert (whole.numel(), view.storage_offset()) == (15 + 2 * MARGIN, MARGIN)
    around = torch.ones(whole.numel(), dtype=torch.bool)
    around[MARGIN:-MARGIN].as_strided((2, 3), (10, 2), MARGIN).fill_(False)
    assert int(around.sum()) == 9 + 2 * MARGIN
    assert is_poison(whole[around])


@pytest.mark.parametrize("dtype", DTYPES, ids=ids(DTYPES))
@pytest.mark.parametrize(
    "position",
    [-MARGIN, -1, 1, 5, 9, 15, 14 + MARGIN],
    ids=["first", "just-before", "gap-in-a-row", "gap-between-rows", "gap-end", "just-after", "last"],
)
def test_a_write_outside_the_elements_is_noticed(arena: Arena, dtype: torch.dtype, position: int) -> None:
    arena.place("before", pattern(4), torch.int64)
    writes = np.ones((2, 3), np.bool_)
    view = arena.place("x", pattern(2, 3, dtype=dtype), dtype, strides=(10, 2), writes=writes)
    arena.verify(LABEL)
    storage(view)[MARGIN + position] = 0
    notices(arena, "x")


@pytest.mark.parametrize("dtype", DTYPES, ids=ids(DTYPES))
def test_the_mask_says_which_elements_may_be_written(arena: Arena, dtype: torch.dtype) -> None:
    writes = np.array([[True, False, True], [False, False, True]])
    view = arena.place("x", pattern(2, 3, dtype=dtype), dtype, strides=(1, 4), writes=writes)
    view[torch.from_numpy(writes)] = 0
    arena.verify(LABEL)
    view[1, 1] = 0
    notices(arena, "x")


def test_a_changed_input_is_noticed(arena: Arena) -> None:
    view = arena.place("x", pattern(2, 3), torch.int64)
    arena.place("y", pattern(2, 3), torch.int64)
    view[1, 2] += 1
    notices(arena, "x")


@pytest.mark.parametrize("byte", range(8))
def test_one_changed_byte_is_enough(arena: Arena, byte: int) -> None:
    view = arena.place("x", pattern(3), torch.int64)
    view[1:2].view(torch.uint8)[byte] ^= 1
    notices(arena, "x")


def test_a_sign_of_zero_and_a_nan_payload_are_noticed(arena: Arena) -> None:
    view = arena.place("x", np.array([0x0000], np.uint16), torch.bfloat16)
    view.neg_()
    notices(arena, "x")
    other = Arena(arena.device)
    view = other.place("y", np.array([0x7FC1], np.uint16), torch.bfloat16)
    view.view(torch.int16)[0] = 0x7FC2
    notices(other, "y")


def test_overlapping_windows_are_writable_where_any_of_them_is(arena: Arena) -> None:
    """Step t of a conv window starts at token t, so that windows share elements."""
    tokens = pattern(5)
    windows = np.lib.stride_tricks.sliding_window_view(tokens, 3)
    writes = np.zeros((3, 3), np.bool_)
    writes[0] = True
    view = arena.place("x", windows, torch.int64, strides=(1, 1), writes=writes)
    assert view.tolist() == windows.tolist()
    view[0] = 0
    arena.verify(LABEL)
    view[1, 2] = 0
    notices(arena, "x")


@pytest.mark.parametrize("shape", [(0,), (0, 4), (4, 0), (2, 0, 3)])
def test_empty_tensors_have_margins_too(arena: Arena, shape: tuple[int, ...]) -> None:
    view = arena.place("x", np.zeros(shape, np.int64), torch.int64, writes=np.ones(shape, np.bool_))
    assert (tuple(view.shape), view.stride()) == (shape, torch.empty(shape).stride())
    arena.verify(LABEL)
    storage(view)[MARGIN] = 0
    notices(arena, "x")


def test_read_only_bits_can_be_placed(arena: Arena) -> None:
    bits = pattern(3)
    bits.setflags(write=False)
    assert arena.place("x", bits, torch.int64).tolist() == [1, 2, 3]


def test_the_bytes_outside_the_mask_are_counted(arena: Arena) -> None:
    arena.place("x", pattern(3), torch.int32)
    arena.place("y", pattern(2), torch.int64, strides=(2,), writes=np.array([False, True]))
    arena.verify(LABEL)
    row = ledger.active().rows[LABEL]
    assert (row.comparisons, row.guarded_bytes) == (2, (3 + 2 * MARGIN) * 4 + (2 + 2 * MARGIN) * 8)


# --- allocations ------------------------------------------------------------------------------------------------------


@pytest.fixture
def originals() -> Iterator[dict[str, Callable[..., torch.Tensor]]]:
    saved = {name: getattr(torch, name) for name in ("empty", "empty_like")}
    yield saved
    for name, original in saved.items():
        setattr(torch, name, original)


@pytest.mark.parametrize("dtype", [*FLOATING, *INTEGER], ids=ids((*FLOATING, *INTEGER)))
def test_fresh_memory_is_poison(dtype: torch.dtype) -> None:
    with poisoned_allocations():
        fresh = [
            torch.empty(3, 5, dtype=dtype),
            torch.empty((0, 5), dtype=dtype),
            torch.empty_like(torch.zeros(3, 5, dtype=dtype)),
        ]
    assert [(tensor.dtype, tuple(tensor.shape)) for tensor in fresh] == [
        (dtype, (3, 5)),
        (dtype, (0, 5)),
        (dtype, (3, 5)),
    ]
    assert all(map(is_poison, fresh))


def test_fresh_memory_of_another_layout_is_poison() -> None:
    with poisoned_allocations():
        fresh = torch.empty_like(torch.zeros(3, 5, dtype=torch.bfloat16).t())
    assert (tuple(fresh.shape), fresh.stride()) == ((5, 3), (1, 5))
    assert is_poison(fresh)


def test_a_fresh_scalar_is_poison() -> None:
    with poisoned_allocations():
        assert is_poison(torch.empty((), dtype=torch.float32))


def test_tensors_without_memory_are_left_alone() -> None:
    with poisoned_allocations():
        assert torch.empty(3, device="meta").device.type == "meta"


def test_allocations_are_restored(originals: dict[str, Callable[..., torch.Tensor]]) -> None:
    with poisoned_allocations():
        assert torch.empty is not originals["empty"]
    with pytest.raises(ZeroDivisionError), poisoned_allocations():
        _ = 1 // 0
    assert {name: getattr(torch, name) for name in originals} == originals
