"""The tile of a call: by its rows on a GPU, everything at once in the interpreter; and a launch that calls share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from dspark import machine
from dspark.ops.kv_write import kernel as kv_write
from dspark.ops.launch import Launch, Tile, dependent_launch, tile_elements, tile_for, warps_for
from dspark.ops.qk_norm_rope import kernel as qk_norm_rope

MEASURED = (Tile(8, 1, 2, 3), Tile(64, 4, 5, 6), Tile(float("inf"), 7, 8, 9))


@pytest.mark.parametrize(("rows", "elements"), [(1, 1), (8, 1), (9, 4), (64, 4), (65, 7), (1 << 40, 7)])
def test_the_first_tile_that_reaches_the_rows(rows: int, elements: int) -> None:
    with mock.patch.object(machine, "facts", return_value=replace(machine.facts(), interpreter=False)):
        assert tile_for(rows, MEASURED, 99).elements == elements
        assert tile_elements(5, 99) == 5


def test_the_interpreter_takes_everything_in_one_program() -> None:
    with mock.patch.object(machine, "facts", return_value=replace(machine.facts(), interpreter=True)):
        assert tile_for(1, MEASURED, 99)[1:3] == (99, 99)
        assert tile_elements(5, 99) == 99


def test_a_program_that_one_warp_holds_has_one() -> None:
    assert [warps_for(elements) for elements in (1, 256, 257, 1024)] == [1, 1, 4, 4]


@pytest.mark.parametrize("kernel", [kv_write, qk_norm_rope])
def test_measured_tiles_are_in_order_and_without_end(kernel: object) -> None:
    rows = [tile.rows for tile in kernel.GPU_TILES]  # type: ignore[attr-defined]
    assert rows == sorted(set(rows))
    assert rows[-1] == float("inf")


class CompiledKernel:
    """Stands for what Triton compiled: notes its launches."""

    def __init__(self) -> None:
        self.launches: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *arguments: self.launches.append((grid, arguments))


class Kernel:
    """Stands for a jit function with the parameters ``a_ptr, b_ptr, count, WIDE, DEPENDENT_LAUNCH, FAST``."""

    arg_names = ("a_ptr", "b_ptr", "count", "WIDE", "DEPENDENT_LAUNCH", "FAST")

    def __init__(self, made: object) -> None:
        self.made = made
        self.looks: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]:
        def look(*arguments: Any, **keywords: Any) -> object:
            self.looks.append((grid, arguments, keywords))
            return self.made

        return look


CPU = torch.device("cpu")


def at(address: int, dtype: torch.dtype = torch.int32) -> Any:
    """A tensor of which only dtype and address are asked."""
    return SimpleNamespace(dtype=dtype, data_ptr=lambda: address)


@pytest.fixture
def compiling() -> Iterator[None]:
    with machine.injected(interpreter=False):
        yield


def launch_of(kernel: Kernel) -> Launch:
    return Launch(kernel, (3, 2), (7,), {"FAST": True, "WIDE": 5}, {"num_warps": 4})


@pytest.mark.usefixtures("compiling")
def test_what_was_compiled_is_launched_with_addresses_in_the_order_of_the_parameters() -> None:
    kernel = Kernel(CompiledKernel())
    launch = launch_of(kernel)
    first = (at(32), None)
    for tensors in (first, (at(64), None), (at(16), at(48))):
        launch(CPU, *tensors)
    keywords = {"FAST": True, "WIDE": 5, "DEPENDENT_LAUNCH": False, "num_warps": 4}
    assert kernel.looks == [((3, 2), (*first, 7), keywords)]
    grid, rest = (3, 2, 1), (7, 5, False, True)
    assert kernel.made.launches == [(grid, (64, 0, *rest)), (grid, (16, 48, *rest))]  # type: ignore[attr-defined]


@pytest.mark.usefixtures("compiling")
def test_a_dependent_launch_says_so_to_triton_and_to_the_kernel() -> None:
    kernel = Kernel(CompiledKernel())
    launch = launch_of(kernel)
    with mock.patch("dspark.ops.launch.dependent_launch", return_value=True):
        launch(CPU, at(32), None)
        launch(CPU, at(64), None)
    (_, _, keywords), *others = kernel.looks
    assert others == []
    assert keywords == {"FAST": True, "WIDE": 5, "DEPENDENT_LAUNCH": True, "num_warps": 4, "launch_pdl": True}
    assert kernel.made.launches == [((3, 2, 1), (64, 0, 7, 5, True, True))]  # type: ignore[attr-defined]


CUDA = torch.device("cuda", 1)


@pytest.mark.usefixtures("compiling")
@pytest.mark.parametrize(
    ("device", "capability", "hip", "dependent"),
    [
        (CUDA, (8, 0), None, False),
        (CUDA, (8, 9), None, False),
        (CUDA, (9, 0), None, True),
        (CUDA, (10, 0), None, True),
        (CUDA, (12, 1), None, True),
        (CUDA, (9, 4), "6.2", False),
        (CPU, (9, 0), None, False),
        (torch.device("meta"), (9, 0), None, False),
    ],
)
def test_launches_are_dependent_where_cuda_can_do_it(
    device: torch.device, capability: tuple[int, int], hip: str | None, dependent: bool
) -> None:
    with (
        mock.patch.object(torch.cuda, "get_device_capability", side_effect={CUDA: capability}.get),
        mock.patch.object(torch.version, "hip", hip),
    ):
        assert dependent_launch(device) is dependent


def test_the_interpreter_launches_nothing_dependent() -> None:
    with (
        machine.injected(interpreter=True),
        mock.patch.object(torch.cuda, "get_device_capability", return_value=(9, 0)),
    ):
        assert dependent_launch(CUDA) is False


@pytest.mark.usefixtures("compiling")
@pytest.mark.parametrize("address", [1, 2, 4, 8, 24])
@pytest.mark.parametrize("place", [0, 1])
def test_an_address_that_16_does_not_divide_is_left_to_triton(address: int, place: int) -> None:
    kernel = Kernel(CompiledKernel())
    launch = launch_of(kernel)
    displaced = [at(32), at(32)]
    displaced[place] = at(address)
    for tensors in (displaced, displaced, [at(32), at(32)], displaced):
        launch(CPU, *tensors)
    assert [arguments[:2] for _, arguments, _ in kernel.looks] == [tuple(displaced)] * 2 + [
        (mock.ANY,) * 2,
        tuple(displaced),
    ]
    assert kernel.made.launches == []  # type: ignore[attr-defined]
    launch(CPU, at(32), at(32))
    assert len(kernel.made.launches) == 1  # type: ignore[attr-defined]


@pytest.mark.usefixtures("compiling")
def test_what_is_no_compiled_kernel_is_not_kept() -> None:
    kernel = Kernel(None)
    launch = launch_of(kernel)
    for _ in range(3):
        launch(CPU, at(32), at(32))
    assert len(kernel.looks) == 3


def test_the_interpreter_keeps_nothing() -> None:
    kernel = Kernel(CompiledKernel())
    launch = launch_of(kernel)
    with machine.injected(interpreter=True):
        for _ in range(3):
            launch(CPU, at(32), at(32))
    assert len(kernel.looks) == 3


def test_bools_are_bytes() -> None:
    kernel = Kernel(None)
    flags = torch.tensor([True, False])
    launch_of(kernel)(CPU, flags, None)
    ((_, arguments, _),) = kernel.looks
    assert arguments[0].dtype is torch.int8
    assert arguments[0].data_ptr() == flags.data_ptr()
