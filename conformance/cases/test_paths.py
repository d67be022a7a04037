"""F5-5, F5-8: which path each configuration takes is a committed table, so that a change of it is seen in review."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import numpy as np
import pytest
import torch

from dspark import dispatch
from dspark.ops import table_qk_norm_rope_

from ..fixtures.calls import OPS, kv_write, qk_norm_rope
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


IMPLEMENTATIONS = {
    "accept_eager", "accept_fused",
    "accept_commit_eager", "accept_commit_fused",
    "base_logits_eager", "base_logits_fused",
    "commit_indices_eager", "commit_indices_fused",
    "kv_write_eager", "kv_write_fused",
    "qk_norm_rope_eager", "qk_norm_rope_fused",
    "state_scatter_eager", "state_scatter_fused",
    "_write_by_layer", "_write_fused",
}  # fmt: skip
RAN = {
    ("kv_inject", "fused"): ["_write_fused", "kv_write_fused", "finish", "finish"],
    ("kv_inject", "eager"): ["_write_by_layer", "finish"],
    ("attention", "fused"): ["qk_norm_rope_fused", "finish", "finish"],
    ("attention", "eager"): ["finish"],
    ("base_logits", "fused"): ["base_logits_fused"],
    ("base_logits", "eager"): ["base_logits_eager"],
}
"""What an operation of the model calls (base_logits has no index that could be out of range); any other operation calls
its own implementation and looks for faults."""


@contextmanager
def called() -> Iterator[list[str]]:
    """The implementations that run within the block, and the ends of public operations, in order."""
    names: list[str] = []

    def note(frame: FrameType, event: str, argument: object) -> None:
        del argument
        code = frame.f_code
        wanted = code.co_name in IMPLEMENTATIONS or (
            code.co_name == "finish" and code.co_filename.endswith("faults.py")
        )
        if event == "call" and wanted:
            names.append(code.co_name)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield names
    finally:
        sys.setprofile(before)


@pytest.mark.parametrize("path", ["fused", "eager"])
@pytest.mark.parametrize("op", OPS)
def test_the_path_that_was_decided_is_the_one_that_runs(op: str, path: str, arena: Arena) -> None:
    """Both paths give equal results, so only this tells them apart; and each call ends by looking for faults."""
    module = OPS[op]
    with called() as names, dispatch.forced(path):
        module.run(module.base(), Label(op, path), arena, path)
    expect_equal(Label(op, path), "what ran", names, RAN.get((op, path), [f"{op}_{path}", "finish"]))
