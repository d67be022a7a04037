"""Tests of :mod:`dspark.ops.arguments`: each error names the argument, what came and what is needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from dspark.ops import arguments


def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def leaf() -> torch.Tensor:
    return torch.zeros(2, requires_grad=True)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "tensor/list": (lambda: arguments.require_tensor("locs", [1]), "locs: got list, need a tensor"),
    "tensor/none": (lambda: arguments.require_tensor("locs", None), "locs: got NoneType, need a tensor"),
    "rank/F1-25": (
        lambda: arguments.require_rank("positions", zeros(3, 4), 1),
        "positions: got shape (3, 4), need 1 dimension",
    ),
    "rank/too-few": (
        lambda: arguments.require_rank("locs", zeros(4), 2),
        "locs: got shape (4,), need 2 dimensions",
    ),
    "rank/scalar": (lambda: arguments.require_rank("eps", zeros(), 1), "eps: got shape (), need 1 dimension"),
    "rank/no-tensor": (lambda: arguments.require_rank("locs", 7, 0), "locs: got int, need a tensor"),  # type: ignore[arg-type]
    "shape/size": (
        lambda: arguments.require_shape("locs", zeros(3, 4), (3, 5), "[B, W]"),
        "locs: got shape (3, 4), need (3, 5), [B, W]",
    ),
    "shape/broadcastable": (
        lambda: arguments.require_shape("lens", zeros(1), (3,), "[B] of locs"),
        "lens: got shape (1,), need (3,), [B] of locs",
    ),
    "shape/rank": (
        lambda: arguments.require_shape("locs", zeros(12), (3, 4), "[B, W]"),
        "locs: got shape (12,), need 2 dimensions",
    ),
    "dtype/floating": (
        lambda: arguments.require_dtype("locs", zeros(1, dtype=torch.bfloat16), arguments.INDEX_DTYPES),
        "locs: got bfloat16, need one of int32, int64",
    ),
    "dtype/int16-index": (
        lambda: arguments.require_dtype("locs", zeros(1, dtype=torch.int16), arguments.INDEX_DTYPES),
        "locs: got int16, need one of int32, int64",
    ),
    "dtype/bool-id": (
        lambda: arguments.require_dtype("ids", zeros(1, dtype=torch.bool), arguments.SIGNED_DTYPES),
        "ids: got bool, need one of int8, int16, int32, int64",
    ),
    "dtype/uint8-id": (
        lambda: arguments.require_dtype("ids", zeros(1, dtype=torch.uint8), arguments.SIGNED_DTYPES),
        "ids: got uint8, need one of int8, int16, int32, int64",
    ),
    "floating/int": (
        lambda: arguments.require_floating("qkv", zeros(1)),
        "qkv: got int64, need a floating dtype",
    ),
    **{
        f"eps/{value!r}": (
            lambda value=value: arguments.require_eps("eps", value),
            f"eps: got {value!r}, need a finite number >= 0",
        )
        for value in (-1e-6, float("nan"), float("inf"), -float("inf"), True, "1e-6", None)
    },
    "device/second": (
        lambda: arguments.require_one_device(first=zeros(1), second=zeros(1).to("meta")),
        "second: got device meta, need cpu, the device of first",
    ),
    "device/third-after-none": (
        lambda: arguments.require_one_device(a=None, b=zeros(1).to("meta"), c=zeros(1).to("meta"), d=zeros(1)),
        "d: got device cpu, need meta, the device of b",
    ),
    "grad/second": (
        lambda: arguments.require_no_grad(kv=zeros(1), skipped=None, weight=leaf()),
        "weight: got a tensor that requires grad, need torch.no_grad() or a detached tensor",
    ),
    "writable/expanded": (
        lambda: arguments.require_writable("qkv", zeros(1, 4).expand(3, 4)),
        "qkv: got strides (0, 1) for shape (3, 4), need one memory location per element",
    ),
    "writable/expanded-column": (
        lambda: arguments.require_writable("qkv", zeros(3, 1).expand(3, 4)),
        "qkv: got strides (1, 0) for shape (3, 4), need one memory location per element",
    ),
    "rotary-dim/odd": (
        lambda: arguments.require_rotary_dim(63, 128),
        "rotary_dim: got 63, need an even number of at most head_dim = 128",
    ),
    "rotary-dim/beyond-the-head": (
        lambda: arguments.require_rotary_dim(130, 128),
        "rotary_dim: got 130, need an even number of at most head_dim = 128",
    ),
    "rotary-dim/odd-head": (
        lambda: arguments.require_rotary_dim(None, 65),
        "rotary_dim: got 65, need an even number of at most head_dim = 65",
    ),
    "rotary-dim/zero": (lambda: arguments.require_rotary_dim(0, 128), "rotary_dim: got 0, need an int >= 2"),
    "rotary-dim/float": (lambda: arguments.require_rotary_dim(64.0, 128), "rotary_dim: got 64.0, need an int >= 2"),  # type: ignore[arg-type]
    "window/F1-20": (
        lambda: arguments.require_window("commit_lens", zeros(3), 8, 23),
        "commit_lens: got 3 requests of width 8, need B * W = 23 rows",
    ),
    "window/no-request": (
        lambda: arguments.require_window("commit_lens", zeros(0), 8, 8),
        "commit_lens: got 0 requests of width 8, need B * W = 8 rows",
    ),
    "window/width": (
        lambda: arguments.require_window("commit_lens", zeros(3), 0, 0),
        "locs_row_width: got 0, need an int >= 1",
    ),
    "window/rank": (
        lambda: arguments.require_window("commit_lens", zeros(3, 1), 8, 24),
        "commit_lens: got shape (3, 1), need 1 dimension",
    ),
    "window/dtype": (
        lambda: arguments.require_window("commit_lens", zeros(3, dtype=torch.int16), 8, 24),
        "commit_lens: got int16, need one of int32, int64",
    ),
    "int/too-small": (lambda: arguments.require_int("width", 0, 1), "width: got 0, need an int >= 1"),
    "int/bool": (lambda: arguments.require_int("width", True, 1), "width: got True, need an int >= 1"),
    "int/float": (lambda: arguments.require_int("width", 8.0, 1), "width: got 8.0, need an int >= 1"),
    "int/text": (lambda: arguments.require_int("width", "8", 1), "width: got '8', need an int >= 1"),
    "int/none": (lambda: arguments.require_int("width", None, 1), "width: got None, need an int >= 1"),
}

ACCEPTED: dict[str, Callable[[], Any]] = {
    "tensor": lambda: arguments.require_tensor("locs", zeros(2)),
    "tensor/parameter": lambda: arguments.require_tensor("weight", torch.nn.Parameter(torch.zeros(2))),
    "rank/scalar": lambda: arguments.require_rank("eps", zeros(), 0),
    "rank/empty": lambda: arguments.require_rank("locs", zeros(0, 4), 2),
    "shape": lambda: arguments.require_shape("locs", zeros(3, 4), (3, 4), "[B, W]"),
    "shape/strided": lambda: arguments.require_shape("locs", zeros(4, 3).t(), (3, 4), "[B, W]"),
    "shape/empty": lambda: arguments.require_shape("locs", zeros(0), (0,), "[T]"),
    "dtype/index": lambda: [
        arguments.require_dtype("locs", zeros(1, dtype=dtype), arguments.INDEX_DTYPES)
        for dtype in (torch.int32, torch.int64)
    ].clear(),
    "dtype/signed": lambda: [
        arguments.require_dtype("ids", zeros(1, dtype=dtype), arguments.SIGNED_DTYPES)
        for dtype in (torch.int8, torch.int16, torch.int32, torch.int64)
    ].clear(),
    "floating": lambda: [
        arguments.require_floating("qkv", zeros(1, dtype=dtype))
        for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64)
    ].clear(),
    "device": lambda: arguments.require_one_device(first=zeros(1), second=None, third=zeros(1)),
    "grad/none": lambda: arguments.require_no_grad(kv=zeros(1), weight=None),
    "grad/detached": lambda: arguments.require_no_grad(weight=leaf().detach()),
    "grad/off": torch.no_grad()(lambda: arguments.require_no_grad(weight=leaf())),
    "writable/strided": lambda: arguments.require_writable("qkv", zeros(3, 8)[:, ::2].t()),
    "writable/one-element-rows": lambda: arguments.require_writable("qkv", zeros(1, 4).expand(1, 4)),
    "writable/expanded-over-nothing": lambda: arguments.require_writable("qkv", zeros(0, 1).expand(0, 4)),
    "window": lambda: arguments.require_window("commit_lens", zeros(3), 8, 24),
    "window/int32": lambda: arguments.require_window("commit_lens", zeros(3, dtype=torch.int32), 1, 3),
    "window/empty": lambda: arguments.require_window("commit_lens", zeros(0), 8, 0),
    "writable/stride-0-over-one-element": lambda: arguments.require_writable(
        "qkv", zeros(4).as_strided((1, 4), (0, 1))
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_arguments_are_named(case: str) -> None:
    call, message = REFUSED[case]
    with pytest.raises(ValueError) as refused:  # noqa: PT011  the whole message is compared
        call()
    assert str(refused.value) == message


@pytest.mark.parametrize("case", ACCEPTED)
def test_good_arguments_pass(case: str) -> None:
    assert ACCEPTED[case]() is None


@pytest.mark.parametrize(("value", "low"), [(1, 1), (0, 0), (-3, -3), (1 << 40, 1)])
def test_a_good_int_is_returned(value: int, low: int) -> None:
    assert arguments.require_int("width", value, low) == value


@pytest.mark.parametrize("value", [0, 0.0, 1, 1e-6, 1e-5, 1e-24, 3.0e38])
def test_a_good_eps_is_returned_as_fp32(value: float) -> None:
    assert arguments.require_eps("eps", value) == float(np.float32(value))


@pytest.mark.parametrize(
    ("rotary_dim", "head_dim", "rotated"), [(None, 64, 64), (64, 64, 64), (64, 128, 64), (2, 128, 2)]
)
def test_a_good_rotary_dim_is_returned(rotary_dim: int | None, head_dim: int, rotated: int) -> None:
    assert arguments.require_rotary_dim(rotary_dim, head_dim) == rotated
