"""Offsets beyond int32, in every stride of every kernel (faults 0.4, F2-10, F4-8)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from dspark.ops import KVPoolTable, fused_accept_commit

from ..fixtures import vast
from ..fixtures.calls import accept, accept_commit, kv_write, qk_norm_rope
from ..fixtures.calls.layout import bits_of
from ..fixtures.guard import Arena, to_bits
from ..fixtures.implementations.ops import (
    compute_dflash_correct_drafts_and_bonus,
    fused_kv_norm_rope_write,
    table_qk_norm_rope_,
)
from ..fixtures.ledger import Label, expect_equal
from ..fixtures.oracles.rotary import table_rows
from ..fixtures.streams import Stream
from ..fixtures.vast import FAR, STRIDES, released  # noqa: F401  an autouse fixture

PATHS = ("fused", "eager")
POOLS = ("pool", "pool-of-values")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("argument", ["rows", "columns"])
def test_accept(argument: str, path: str, arena: Arena) -> None:
    label = Label(accept.OP, path)
    target = np.array([[1, 2, 3], [4, 5, 6], [7, 8, 9]])
    candidates = np.array([[0, 1, 2], [0, 4, 9], [0, 7, 8]])
    strides = (FAR, 1) if argument == "rows" else (1, FAR)
    far = vast.place(candidates, torch.int8, strides, arena.device)
    call = accept.Call(candidates, target)
    accept.expect_results(
        call,
        label,
        lambda: compute_dflash_correct_drafts_and_bonus(
            candidates=far.view, target_predict=torch.from_numpy(target).to(arena.device), path=path
        ),
    )
    far = vast.place(target, torch.int8, strides, arena.device)
    accept.expect_results(
        call,
        label,
        lambda: compute_dflash_correct_drafts_and_bonus(
            candidates=torch.from_numpy(candidates).to(arena.device), target_predict=far.view, path=path
        ),
    )


@pytest.mark.parametrize("path", PATHS)
def test_accept_verify_lens(path: str, arena: Arena) -> None:
    lens = np.array([3, 2, 1])
    target = np.tile(np.array([5, 6, 7]), (3, 1))
    candidates = np.tile(np.array([0, 5, 6]), (3, 1))
    far = vast.place(lens, torch.int8, (FAR,), arena.device)
    accept.expect_results(
        accept.Call(candidates, target, lens),
        Label(accept.OP, path),
        lambda: compute_dflash_correct_drafts_and_bonus(
            candidates=torch.from_numpy(candidates).to(arena.device),
            target_predict=torch.from_numpy(target).to(arena.device),
            verify_lens=far.view,
            path=path,
        ),
    )


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "argument",
    ["candidates-rows", "candidates-columns", "target_predict-rows", "target_predict-columns", "seq_lens",
     "verify_lens", "eos_ids"],
)  # fmt: skip
def test_accept_commit(argument: str, path: str, arena: Arena) -> None:
    target = np.array([[1, 2, 3], [4, 5, 6], [7, 8, 9]])
    candidates = np.array([[0, 1, 2], [0, 4, 9], [0, 7, 8]])
    before, lens, ends = np.array([254, 255, 253]), np.array([3, 2, 3]), np.array([90, 91, 8])
    call = accept_commit.Call(candidates, target, before, lens, ends)
    values = {
        "candidates": candidates,
        "target_predict": target,
        "seq_lens": before,
        "verify_lens": lens,
        "eos_ids": ends,
    }
    name, _, dimension = argument.partition("-")
    tensors = {key: torch.from_numpy(value).to(arena.device, torch.int32) for key, value in values.items()}
    strides = {"rows": (FAR, 1), "columns": (1, FAR)}.get(dimension, (FAR,))
    far = vast.place(values[name], torch.int32, strides, arena.device)
    tensors[name] = far.view
    label = Label(accept_commit.OP, path)
    accept_commit.expect_results(
        call, label, lambda: fused_accept_commit(**tensors, mamba_track_interval=call.interval, path=path)
    )
    far.verify(label, argument)


def small_call(rotary_dim: int) -> qk_norm_rope.Call:
    """Three rows of two heads of four elements: index 2 or 3 times 2^30 is beyond int32 in every argument."""
    call = qk_norm_rope.random_call(Stream("offsets"), 3, 1, 1, 4, rotary_dim=rotary_dim, table_rows=3)
    return replace(call, positions=np.array([2, 1, 2]), rows=call.rows[:, :12])


def far_call(
    argument: str, stride: int, path: str, device: torch.device, rotary_dim: int = 4
) -> tuple[qk_norm_rope.Call, torch.Tensor]:
    """Make the call with one argument far apart; returns the call and the rows after it."""
    call = small_call(rotary_dim)
    bf16, fp32 = torch.bfloat16, torch.float32
    table = table_rows(np.arange(3), rotary_dim, call.theta)
    bits = {
        "qkv": (bits_of(call.rows, bf16), bf16, (stride, 1)),
        "positions": (call.positions, torch.int32, (stride,)),
        "q_weight": (bits_of(call.q_weight, bf16), bf16, (stride,)),
        "k_weight": (bits_of(call.k_weight, bf16), bf16, (stride,)),
        "cos_sin_cache": (bits_of(table.astype(np.float64), fp32), fp32, (stride, 1)),
    }
    arena = Arena(device)
    tensors = {name: arena.place(name, *bits[name][:2]) for name in bits if name != argument}
    far = vast.place(*bits[argument], device)
    tensors[argument] = far.view
    table_qk_norm_rope_(
        **tensors,
        num_q_heads=1,
        num_k_heads=1,
        head_dim=4,
        eps=call.eps,
        rotary_dim=rotary_dim,
        path=path,
    )
    far.verify(Label(qk_norm_rope.OP, path), argument)
    return call, tensors["qkv"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("argument", ["qkv", "positions", "q_weight", "k_weight", "cos_sin_cache"])
def test_qk_norm_rope(argument: str, path: str, arena: Arena) -> None:
    call, rows = far_call(argument, FAR, path, arena.device)
    qk_norm_rope.judge_rows(call, Label(qk_norm_rope.OP, path), to_bits(rows))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("argument", ["q_weight", "k_weight"])
def test_qk_norm_rope_weights_of_what_is_not_rotated(argument: str, path: str, arena: Arena) -> None:
    call, rows = far_call(argument, FAR, path, arena.device, rotary_dim=2)
    qk_norm_rope.judge_rows(call, Label(qk_norm_rope.OP, path), to_bits(rows))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stride", STRIDES)
def test_qk_norm_rope_row_stride(stride: str, path: str, arena: Arena) -> None:
    """Strides of 1, of multiples of 16 and beyond int32 are compiled as different specialisations."""
    call, rows = far_call("qkv", STRIDES[stride], path, arena.device)
    qk_norm_rope.judge_rows(call, Label(qk_norm_rope.OP, path), to_bits(rows))
    before = bits_of(call.rows, torch.bfloat16)
    expect_equal(Label(qk_norm_rope.OP, path), "V columns", to_bits(rows)[:, 8:], before[:, 8:])


def far_kv_call(argument: str, strides: tuple[int, ...], path: str, device: torch.device) -> None:
    """kv_write with one argument far apart: three rows, three layers, one head of four elements."""
    call = kv_write.random_call(Stream("offsets/kv"), 3, 3, 1, 4, table_rows=3, pool_rows=3)
    call = replace(
        call, positions=np.array([2, 1, 2]), locs=np.array([2, 0, 1]), commit_lens=np.array([1, 1, 1]), width=1
    )
    layered = len(strides) == 3 and argument == "kv"
    rows = call.kv.reshape(3, 3, 8).transpose(1, 0, 2) if layered else call.kv.reshape(3, 24)
    bf16, fp32, fixed = torch.bfloat16, torch.float32, np.ascontiguousarray
    table = table_rows(np.arange(3), 4, call.theta).astype(np.float64)
    plain: dict[str, tuple[np.ndarray, torch.dtype]] = {
        "kv": (bits_of(fixed(rows), bf16), bf16),
        "k_norm_weights": (bits_of(call.weights, bf16), bf16),
        "cos_sin_cache": (bits_of(table, fp32), fp32),
        "positions": (call.positions, torch.int32),
        "locs": (call.locs, torch.int32),
        "commit_lens": (np.array([1, 1, 1]), torch.int32),
    }
    empty = np.zeros((3, 1, 4), np.uint16)
    arena, label = Arena(device), Label(kv_write.OP, path)
    tensors = {name: arena.place(name, *value) for name, value in plain.items() if name != argument}
    pools = [[arena.place("pool", empty, bf16, writes=empty == 0) for _ in range(2)] for _ in range(3)]
    if argument in POOLS:
        far = vast.place(empty, bf16, strides, device)
        pools[1][POOLS.index(argument)] = far.view
    else:
        far = vast.place(*plain[argument], strides, device)
        tensors[argument] = far.view
    fused_kv_norm_rope_write(
        **tensors,
        meta=KVPoolTable([k for k, _ in pools], [v for _, v in pools]),
        num_layers=3,
        kv_size=4,
        head_dim=4,
        eps=call.eps,
        locs_row_width=1,
        path=path,
    )
    kv_write.judge_pools(call, label, [[to_bits(part) for part in layer] for layer in pools])
    far.verify(label, argument)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("argument", "strides"),
    [
        ("kv", (FAR, 1)),
        ("kv", (FAR, 8, 1)),
        ("kv", (24, FAR, 1)),
        ("k_norm_weights", (FAR, 1)),
        ("k_norm_weights", (1, FAR)),
        ("cos_sin_cache", (FAR, 1)),
        ("positions", (FAR,)),
        ("locs", (FAR,)),
        ("commit_lens", (FAR,)),
        ("pool", (FAR, 4, 1)),
        ("pool", (FAR + 1, 4, 1)),
        ("pool", (STRIDES["beyond-int32"], 4, 1)),
        ("pool-of-values", (FAR, 4, 1)),
        ("pool-of-values", (STRIDES["beyond-int32"], 4, 1)),
    ],
    ids=lambda value: value if isinstance(value, str) else "x".join(map(str, value)),
)
def test_kv_write(argument: str, strides: tuple[int, ...], path: str, arena: Arena) -> None:
    far_kv_call(argument, strides, path, arena.device)
