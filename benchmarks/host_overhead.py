"""Host time of the public operations before their kernel is launched: validation, decision, census.

    python -m benchmarks.host_overhead [--repeat N]

Each operation is called with realistic shapes while its launcher (for ``kv_inject`` the product, too) is replaced by
a function that does nothing, so that what is timed is Python before the launch. Takes a GPU where there is one; without
one, Triton's interpreter stands for it, since nothing is launched. Prints the lowest of N means of 100 calls.
"""

from __future__ import annotations

import argparse
import os
import time
import timeit
from collections.abc import Callable
from typing import Any

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from dspark import machine
from dspark.model.attention import DFlashAttention
from dspark.model.kv_inject import write_target_hidden_kv
from dspark.model.rotary import RotaryTable
from dspark.model.stacked import StackedLayers
from dspark.ops import (
    KVPoolTable,
    compute_dflash_correct_drafts_and_bonus,
    fused_commit_track_indices,
    fused_conv_window_scatter_multi,
    fused_kv_norm_rope_write,
    table_qk_norm_rope_,
)
from dspark.runtime.pools import KVPool

from .unlaunched import without_launches

REQUESTS, WIDTH, LAYERS, HEADS, KV_HEADS, DIM, HIDDEN, SLOTS = 64, 8, 5, 32, 8, 128, 256, 1024
ROWS, KV = REQUESTS * WIDTH, KV_HEADS * DIM
CALLS = 100
Call = Callable[[], object]


def calls(device: torch.device) -> dict[str, Call]:
    """One call of each operation, with tensors that a verify step of ``REQUESTS`` requests would have."""

    def bf16(*shape: int) -> torch.Tensor:
        return torch.ones(shape, dtype=torch.bfloat16, device=device)

    ids = torch.ones(REQUESTS, WIDTH, dtype=torch.int64, device=device)
    lens = torch.ones(REQUESTS, dtype=torch.int32, device=device)
    index = torch.arange(ROWS, device=device)
    slots = torch.arange(REQUESTS, device=device)
    qkv, kv, hidden = bf16(ROWS, (HEADS + 2 * KV_HEADS) * DIM), bf16(LAYERS, ROWS, 2 * KV), bf16(ROWS, HIDDEN)
    weight, weights = bf16(DIM), bf16(LAYERS, DIM)
    rotary = RotaryTable(DIM, 1e6, 4096, device=device)
    table = rotary.cos_sin_cache
    pool = KVPool(SLOTS, LAYERS, KV_HEADS, DIM, device=device)
    buffers = [pool.get_kv_buffer(layer) for layer in range(LAYERS)]
    meta = KVPoolTable([key for key, _ in buffers], [value for _, value in buffers], pool.valid_rows)
    layers: Any = StackedLayers(
        DFlashAttention(HIDDEN, HEADS, KV_HEADS, DIM, rotary, layer_id=i, dtype=torch.bfloat16, device=device)
        for i in range(LAYERS)
    )
    windows = [(bf16(LAYERS, SLOTS, 16, 3), bf16(LAYERS, REQUESTS, WIDTH, 16, 3)) for _ in range(2)]
    return {
        "accept": lambda: compute_dflash_correct_drafts_and_bonus(candidates=ids, target_predict=ids, verify_lens=lens),
        "commit_indices": lambda: fused_commit_track_indices(ids, lens, lens, WIDTH, 64),
        "qk_norm_rope": lambda: table_qk_norm_rope_(
            qkv, index, weight, weight, table, HEADS, KV_HEADS, DIM, 1e-6, rotary_dim=DIM
        ),
        "kv_write": lambda: fused_kv_norm_rope_write(
            kv, meta, weights, table, index, index, LAYERS, KV, DIM, 1e-6, lens, WIDTH
        ),
        "state_scatter": lambda: fused_conv_window_scatter_multi(windows, slots, lens, slots, lens),
        "kv_inject": lambda: write_target_hidden_kv(layers, pool, hidden, index, index, lens, WIDTH),
    }


def microseconds(call: Call, repeat: int) -> float:
    """The lowest mean of a call, in time of this thread: another process does not count. The first calls make plans."""
    for _ in range(10):
        call()
    return min(timeit.repeat(call, timer=time.thread_time, number=CALLS, repeat=repeat)) / CALLS * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=100)
    repeat = parser.parse_args().repeat
    machine.facts()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print(f"torch {torch.__version__}, {device.type}: host microseconds before the launch")
    with torch.no_grad(), without_launches():
        for op, call in calls(device).items():
            print(f"{op:16s} {microseconds(call, repeat):8.2f}")


if __name__ == "__main__":
    main()
