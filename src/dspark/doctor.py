"""Which path each operation takes on this machine, and why: one small call of each."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from dspark import dispatch, machine
from dspark.model.attention import DFlashAttention
from dspark.model.base_logits import compute_base_logits
from dspark.model.kv_inject import write_target_hidden_kv
from dspark.model.rotary import RotaryTable
from dspark.model.stacked import StackedLayers
from dspark.ops import (
    KVPoolTable,
    compute_dflash_correct_drafts_and_bonus,
    fused_accept_commit,
    fused_commit_track_indices,
    fused_conv_window_scatter_with_mask,
    fused_kv_norm_rope_write,
    table_qk_norm_rope_,
)
from dspark.runtime.pools import KVPool


def _accept(device: torch.device) -> None:
    ids = torch.tensor([[1, 2], [3, 4]], device=device)
    compute_dflash_correct_drafts_and_bonus(candidates=ids, target_predict=ids)


def _accept_commit(device: torch.device) -> None:
    ids = torch.tensor([[1, 2], [3, 4]], device=device)
    fused_accept_commit(candidates=ids, target_predict=ids, seq_lens=ids[0], mamba_track_interval=4)


def _qk_norm_rope(device: torch.device) -> None:
    qkv = torch.ones(2, 3 * 8, dtype=torch.bfloat16, device=device)
    weight = torch.ones(8, dtype=torch.bfloat16, device=device)
    table = torch.ones(2, 8, dtype=torch.float32, device=device)
    positions = torch.arange(2, device=device)
    table_qk_norm_rope_(qkv, positions, weight, weight, table, 1, 1, 8, 1e-6)


def _commit_indices(device: torch.device) -> None:
    ids = torch.tensor([[0, 1]], device=device)
    lens = torch.ones(1, dtype=torch.int64, device=device)
    fused_commit_track_indices(ids, lens, lens, 2, 4)


def _state_scatter(device: torch.device) -> None:
    pool = torch.zeros(1, 2, 4, 3, dtype=torch.bfloat16, device=device)
    windows = torch.ones(1, 1, 2, 4, 3, dtype=torch.bfloat16, device=device)
    row = torch.ones(1, dtype=torch.int64, device=device)
    fused_conv_window_scatter_with_mask(pool, windows, row, row)


def _kv_write(device: torch.device) -> None:
    key, value = (torch.zeros(2, 1, 8, dtype=torch.bfloat16, device=device) for _ in range(2))
    kv = torch.ones(1, 16, dtype=torch.bfloat16, device=device)
    weights, table = torch.ones(1, 8, device=device), torch.ones(2, 8, device=device)
    row = torch.ones(1, dtype=torch.int64, device=device)
    fused_kv_norm_rope_write(kv, KVPoolTable([key], [value]), weights, table, row, row, 1, 8, 8, 1e-6)


def _draft_layers(device: torch.device) -> StackedLayers:
    rotary = RotaryTable(8, 1e6, 2, device=device)
    layers = [DFlashAttention(8, 1, 1, 8, rotary, layer_id=i, dtype=torch.bfloat16, device=device) for i in range(2)]
    return StackedLayers(layers)


def _attention(device: torch.device) -> None:
    hidden = torch.ones(1, 8, dtype=torch.bfloat16, device=device)
    with torch.no_grad():
        _draft_layers(device)[0].project_qkv(torch.zeros(1, dtype=torch.int64, device=device), hidden)  # type: ignore[operator]


def _base_logits(device: torch.device) -> None:
    hidden = torch.ones(1, 8, dtype=torch.bfloat16, device=device)
    head = torch.nn.Linear(8, 4, bias=False, dtype=torch.bfloat16, device=device)
    with torch.no_grad():
        compute_base_logits(hidden, head, vocab_size=3, mup_width_multiplier=24)


def _kv_inject(device: torch.device) -> None:
    hidden = torch.ones(1, 8, dtype=torch.bfloat16, device=device)
    row = torch.ones(1, dtype=torch.int64, device=device)
    write_target_hidden_kv(_draft_layers(device), KVPool(2, 2, 1, 8, device=device), hidden, row, row)  # type: ignore[arg-type]


SMALL_CALLS: dict[str, Callable[[torch.device], None]] = {
    "accept": _accept,
    "accept_commit": _accept_commit,
    "attention": _attention,
    "base_logits": _base_logits,
    "commit_indices": _commit_indices,
    "kv_inject": _kv_inject,
    "kv_write": _kv_write,
    "qk_norm_rope": _qk_norm_rope,
    "state_scatter": _state_scatter,
}
"""One small call of each operation."""


def doctor() -> int:
    """Print each operation's decision with its reasons; 0 when every one is fused, 1 otherwise."""
    logging.getLogger("dspark").setLevel(logging.ERROR)  # the reasons are printed below, in full
    facts = machine.facts()
    device = torch.device("cuda" if facts.cuda else "cpu")
    triton = facts.triton_version or f"not importable ({facts.triton_error})"
    kind = "interpreter" if facts.interpreter else "compiled"
    print(f"torch {torch.__version__}, triton {triton}, {kind}, device {device}")
    all_fused = True
    for op, call in SMALL_CALLS.items():
        with dispatch.observed() as outcomes:
            call(device)
        # An operation of the model calls others, which have rows of their own.
        for outcome in (outcome for outcome in outcomes if outcome.decision.op == op):
            print(f"{op}: {outcome.path}")
            for failure in outcome.decision.failed:
                print(f"  {failure}")
            all_fused &= outcome.path is dispatch.Path.FUSED
    return 0 if all_fused else 1
