"""F5-5, F5-8: which path each configuration takes is a committed table, so that a change of it is seen in review."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import torch

from dspark import dispatch
from dspark.ops import table_qk_norm_rope_

from ..fixtures.calls import kv_write, qk_norm_rope
from ..fixtures.calls.kv_write import random_call
from ..fixtures.guard import Arena
from ..fixtures.ledger import Label, expect_decision, expect_equal
from ..fixtures.streams import Stream

COMMITTED = Path(__file__).parent.parent / "fixtures" / "paths.txt"
MATRIX = tuple(
    itertools.product(
        (64, 80, 128, 192, 256, 320),
        ("full", "partial"),
        ("neox", "interleaved"),
        (torch.bfloat16, torch.float16, torch.float32),
        (torch.bfloat16, torch.float32, torch.float16),
    )
)
Configuration = tuple[int, str, str, torch.dtype, torch.dtype]


def line(configuration: Configuration, device: torch.device) -> str:
    """One configuration and what it led to."""
    dim, rotary, pairing, dtype, weight_dtype = configuration
    rotary_dim = dim if rotary == "full" else 32
    weight = torch.ones(dim, dtype=weight_dtype, device=device)
    with dispatch.observed() as outcomes:
        table_qk_norm_rope_(
            torch.ones(1, 3 * dim, dtype=dtype, device=device),
            torch.zeros(1, dtype=torch.int64, device=device),
            weight,
            weight,
            torch.ones(1, rotary_dim, device=device),
            1,
            1,
            dim,
            1e-6,
            rotary_dim=rotary_dim,
            is_neox_style=pairing == "neox",
        )
    names = (str(kind).removeprefix("torch.") for kind in (dtype, weight_dtype))
    reasons = ",".join(outcomes[0].decision.reasons)
    return " ".join([f"D{dim}", f"R{rotary_dim}", pairing, *names, "->", outcomes[0].path, reasons]).rstrip()


def test_f5_5_paths_are_the_committed_ones(arena: Arena) -> None:
    found = [line(configuration, arena.device) for configuration in MATRIX]
    expect_equal(Label(qk_norm_rope.OP, "paths"), "path table", found, COMMITTED.read_text().splitlines())


def test_f5_8_the_callers_slice_of_packed_rows_is_fused(arena: Arena) -> None:
    """K and V come as a slice of packed QKV rows: row stride q + 2 kv, not a fresh contiguous tensor."""
    call = random_call(Stream("F5-8"), 6, 1, 2, 64, row_padding=4 * 64)
    with dispatch.observed() as outcomes:
        kv_write.run(call, Label(kv_write.OP, "fused"), arena, None)
    expect_decision(Label(kv_write.OP, "fused"), outcomes, "fused", [])
    expect_equal(Label(kv_write.OP, "fused"), "rows written", len(call.window.written()), int(np.size(call.locs)))
