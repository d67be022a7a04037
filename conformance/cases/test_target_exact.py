"""The tiny Inkling against an oracle, by each of its three ways: whole sequences, rows alone, rows in a batch
(CONTRACTS.md sections 10 and 11; F1-4, F1-9, F1-10, F1-16). Integers: no sum depends on its order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

import dspark.runtime.target as target_module
from dspark.runtime.batched_rows import batched_rows
from dspark.runtime.generate import single_thread
from dspark.runtime.inkling_config import InklingConfig
from dspark.runtime.target import TargetCache, TargetOutput, TinyInkling

from ..fixtures.emulation import BF16, decode, encode
from ..fixtures.guard import Arena, to_bits
from ..fixtures.lane import Lane
from ..fixtures.ledger import Label, expect_equal
from ..fixtures.oracles.inkling import Expected
from ..fixtures.sequences import poison, sequence, tensors_of
from ..fixtures.streams import Stream
from ..fixtures.tiny_models import CONFIG
from ..fixtures.whole_target import LARGE, POSITIONS, SMALL, build, expected

OP = "target"
ALONE = pytest.param("row-exact", marks=pytest.mark.lanes(Lane.INTERPRET))
WAYS = pytest.mark.parametrize("way", ["forward", ALONE, "batched"])
CACHED = pytest.mark.parametrize("way", [ALONE, "batched"])


class _Batched:
    """In the place of ``RowExact``: the rows of other devices, on the CPU."""

    def __init__(self, target: TinyInkling) -> None:
        self._target = target

    def stale(self) -> bool:
        return False

    def rows(self, *arguments: Any) -> Any:
        return batched_rows(self._target, *arguments)


@pytest.fixture(autouse=True)
def quick(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """One thread; rows in a batch where the case wants them."""
    if getattr(request.node, "callspec", None) and request.node.callspec.params.get("way") == "batched":
        monkeypatch.setattr(target_module, "RowExact", _Batched)
    with single_thread():
        yield


def tokens_of(index: int) -> npt.NDArray[np.int64]:
    return np.array(sequence(f"whole/{index}", POSITIONS))


def new_cache(target: TinyInkling, requests: int, width: int = 1, *, dedup: bool = True) -> TargetCache:
    """Full of poison; request r has the pool rows from ``1 + r * POSITIONS`` on."""
    cache = target.new_cache(requests, 1 + requests * POSITIONS, width=width, dedup=dedup)
    poison(cache, "whole")
    for request in range(requests):
        cache.state_pool.admit(request)
    return cache


def locs_of(target: TinyInkling, requests: int) -> torch.Tensor:
    return 1 + torch.arange(requests * POSITIONS, device=target.device).view(requests, POSITIONS)


def outputs(way: str, target: TinyInkling, tokens: npt.NDArray[np.int64]) -> TargetOutput:
    """``[T, ...]`` of a sequence from position 0 on."""
    ids = torch.from_numpy(tokens).to(target.device)
    if way == "forward":
        output = target(ids[None])
        return TargetOutput(output.logits[0], output.taps[0])
    return target.prefill(new_cache(target, 1), 0, ids, locs_of(target, 1)[0, : len(tokens)])


def judge(label: Label, output: TargetOutput, need: Expected, at: slice) -> None:
    expect_equal(label, f"logits {at}", to_bits(output.logits), encode(BF16, need.logits[at]))
    taps = np.concatenate([hidden[at] for hidden in need.outputs], axis=1)
    expect_equal(label, f"taps {at}", to_bits(output.taps), encode(BF16, taps))


# --- Every number ----------------------------------------------------------------------------------------------------


@WAYS
@pytest.mark.parametrize("index", range(4))
def test_logits_and_taps(index: int, way: str, arena: Arena) -> None:
    target = build(arena.device)
    judge(Label(OP, way), outputs(way, target, tokens_of(index)), expected(target, tokens_of(index)), slice(None))


@CACHED
@pytest.mark.parametrize("dedup", [True, False], ids=["view", "dense"])
def test_k_v_and_windows(dedup: bool, way: str, arena: Arena) -> None:
    """Prefill, one decode of all, a window of each: every length of window, one padded row."""
    target, label, width, lens = build(arena.device), Label(OP, way), 5, (5, 0, 2, 4)
    needs = [expected(target, tokens_of(index)) for index in range(4)]
    cache, locs, device = new_cache(target, 4, width, dedup=dedup), locs_of(target, 4), arena.device
    prompts = (1, 2, 3, 7)
    for request, count in enumerate(prompts):
        ids = torch.from_numpy(tokens_of(request)[:count]).to(device)
        judge(label, target.prefill(cache, request, ids, locs[request, :count]), needs[request], slice(count))
    tokens = torch.tensor([int(tokens_of(request)[count]) for request, count in enumerate(prompts)], device=device)
    output = target.decode(cache, torch.arange(4, device=device), tokens, torch.tensor(prompts, device=device), locs)
    for request, count in enumerate(prompts):
        part = TargetOutput(output.logits[request, None], output.taps[request, None])
        judge(label, part, needs[request], slice(count, count + 1))
    starts = torch.tensor([count + 1 for count in prompts], device=device)
    starts[1] = -1
    windows = torch.full((4, width), 10**9)
    for request, count in enumerate(prompts):
        windows[request, : lens[request]] = torch.from_numpy(tokens_of(request)[count + 1 :][: lens[request]])
    output = target.verify(cache, windows.to(device), starts, torch.tensor(lens, device=device), locs)
    for request, count in enumerate(prompts):
        first, more = count + 1, lens[request]
        part = TargetOutput(output.logits[request, :more], output.taps[request, :more])
        judge(label, part, needs[request], slice(first, first + more))
        for layer in range(target.config.num_layers):
            rows = locs[request, : first + more].cpu()
            for buffer, held in zip(
                cache.kv_pool.get_kv_buffer(layer), (needs[request].keys, needs[request].values), strict=True
            ):
                expect_equal(label, "K and V", to_bits(buffer)[rows], encode(BF16, held[layer][: first + more]))
            for kind, states in enumerate(cache.states.intermediate_conv_window):
                slot = int(cache.state_pool.state_indices[request])
                committed = needs[request].window(layer, kind, first, 3)
                held_bits = to_bits(cache.state_pool.conv[kind][layer, slot])
                expect_equal(label, "a committed window", held_bits, encode(BF16, committed))
                for step in range(more):
                    need = needs[request].window(layer, kind, first + step + 1, 3)
                    what = f"window {kind} of layer {layer} after token {step} of request {request}"
                    expect_equal(label, what, to_bits(states[layer, request, step]), encode(BF16, need))


@CACHED
def test_padded_rows_touch_nothing(way: str, arena: Arena) -> None:
    """Garbage in all that belongs to them; every byte, beside the K and V that one live row writes."""
    target, label, device = build(arena.device), Label(OP, way), arena.device
    cache, locs = new_cache(target, 4, 3), locs_of(target, 4)
    for request in range(4):
        target.prefill(cache, request, torch.from_numpy(tokens_of(request)[:4]).to(device), locs[request, :4])
    cache.state_pool.release(3)
    before = {name: to_bits(tensor).copy() for name, tensor in tensors_of(cache).items()}
    need, rows = expected(target, tokens_of(2)), locs[2, 4:7].cpu()
    for layer in range(target.config.num_layers):
        before[f"K {layer}"][rows] = encode(BF16, need.keys[layer][4:7])
        before[f"V {layer}"][rows] = encode(BF16, need.values[layer][4:7])
    before["valid rows"][rows] = True
    tokens = torch.tensor([[-1, 10**6, -(10**9)]] * 4, device=device)
    tokens[2] = torch.from_numpy(tokens_of(2)[4:7]).to(device)
    table = torch.tensor([-1, 10**6] * (POSITIONS // 2), device=device).repeat(4, 1)
    table[2] = locs[2]
    lens = torch.tensor([-1, 6, 4, -9], device=device)
    output = target.verify(cache, tokens, lens, torch.tensor([3, 0, 3, 0], device=device), table)
    judge(label, TargetOutput(output.logits[2], output.taps[2]), need, slice(4, 7))
    for name, tensor in tensors_of(cache).items():
        expect_equal(label, name, to_bits(tensor), before[name], guarded=True)
    for part in output:
        zeros = to_bits(part[[0, 1, 3]])
        expect_equal(label, "results of rows that do not exist", zeros, np.zeros_like(zeros))


@pytest.mark.parametrize("way", ["batched"])
@pytest.mark.parametrize("start", [POSITIONS - 5, POSITIONS - 2, POSITIONS - 1, POSITIONS])
def test_f1_9_a_window_past_the_last_position(start: int, way: str, arena: Arena) -> None:
    """What exists is computed and written; nothing waits for the device to say how much that is."""
    target, label, device = build(arena.device), Label(OP, way), arena.device
    cache, locs, more = new_cache(target, 1, 5), locs_of(target, 1), min(5, POSITIONS - start)
    tokens, need = tokens_of(0), expected(target, tokens_of(0))
    target.prefill(cache, 0, torch.from_numpy(tokens[:start]).to(device), locs[0, :start])
    window = torch.full((1, 5), 7, device=device)
    window[0, :more] = torch.from_numpy(tokens[start:]).to(device)[:more]
    before = {name: to_bits(tensor).copy() for name, tensor in tensors_of(cache).items()}
    output = target.verify(cache, window, torch.tensor([start], device=device), torch.tensor([5], device=device), locs)
    judge(label, TargetOutput(output.logits[0, :more], output.taps[0, :more]), need, slice(start, start + more))
    zeros = to_bits(output.logits[0, more:])
    expect_equal(label, "results past the last position", zeros, np.zeros_like(zeros))
    for layer in range(target.config.num_layers):
        before[f"K {layer}"][1 + start :] = encode(BF16, need.keys[layer][start:])
        before[f"V {layer}"][1 + start :] = encode(BF16, need.values[layer][start:])
    before["valid rows"][1 + start :] = True
    for name, tensor in tensors_of(cache).items():
        expect_equal(label, name, to_bits(tensor), before[name], guarded=True)


# --- Taps ------------------------------------------------------------------------------------------------------------


def digits(device: torch.device) -> TinyInkling:
    """Six layers; layer i adds ``2 ** i`` to channel 0, so that a sum says after which layer it was taken."""
    config = InklingConfig(**vars(CONFIG) | {"num_layers": 6, "max_position": POSITIONS})
    target = TinyInkling(config, device=device)
    state = {name: torch.zeros_like(tensor) for name, tensor in target.state_dict().items()}
    for name, tensor in state.items():
        if "norm" in name:
            tensor.fill_(LARGE / 2 if "k_norm" not in name and "q_norm" not in name else 1.0)
    state["norm.weight"].fill_(LARGE)  # doubles what it norms
    state["embed_tokens.weight"][:, SMALL:] = LARGE
    for layer in range(6):
        state[f"layers.{layer}.mlp.gate_up_proj.weight"][0, SMALL] = 128 / LARGE
        state[f"layers.{layer}.mlp.gate_up_proj.weight"][config.intermediate_size, SMALL] = 1 / LARGE
        state[f"layers.{layer}.mlp.down_proj.weight"][0, 0] = 2.0**layer / 128
    target.load_state_dict(state)
    return target.requires_grad_(False)


@WAYS
@pytest.mark.parametrize("ids", [(1, 3, 5), (0,), (5,), (0, 1, 2, 3, 4, 5), ()])
def test_f1_4_taps_are_taken_after_the_layer_and_before_the_final_norm(
    ids: Sequence[int], way: str, arena: Arena
) -> None:
    target, label = digits(arena.device), Label(OP, way)
    target.target_layer_ids = ids
    taps = outputs(way, target, np.array([3, 4])).taps
    expect_equal(label, "shape", tuple(taps.shape), (2, len(ids) * 64))
    need = np.zeros((2, len(ids), 64))
    need[:, :, 0] = [sum(2.0**layer for layer in range(id + 1)) for id in ids]
    need[:, :, SMALL:] = LARGE
    expect_equal(label, "taps", to_bits(taps), encode(BF16, need.reshape(2, -1)))


# --- Vocabulary and muP ----------------------------------------------------------------------------------------------


@WAYS
def test_f1_16_ids_that_do_not_exist_never_win(way: str, arena: Arena) -> None:
    """The head's padded rows give ``2 ** 35`` and more, the others hundreds at most."""
    target, label = build(arena.device), Label(OP, way)
    logits = outputs(way, target, tokens_of(1)).logits
    expect_equal(label, "ids", logits.shape[-1], target.config.vocab_size)
    padded = target.lm_head.weight[target.config.vocab_size :, SMALL].float() * LARGE / 24
    expect_equal(label, "that padded rows would win", bool(padded.min() > logits.float().max()), True)
    need = expected(target, tokens_of(1)).logits.argmax(axis=1)
    expect_equal(label, "the tokens", to_bits(logits.argmax(-1)), need)


@WAYS
@pytest.mark.parametrize("multiplier", [None, 1.0, 3.0, 16.0, 24.0])
def test_f1_10_one_division(multiplier: float | None, way: str, arena: Arena) -> None:
    """Under a bias of a Markov head's kind, a division that is dropped or done twice gives other tokens."""
    target, label = build(arena.device, multiplier=multiplier), Label(OP, way)
    tokens, bias = tokens_of(2), 4 * Stream("whole/bias").normal((target.config.vocab_size,))
    output = outputs(way, target, tokens)
    need = expected(target, tokens)
    judge(label, output, need, slice(None))
    if multiplier != 24.0:
        return
    undivided = expected(build(arena.device, multiplier=None), tokens)
    twice = expected(build(arena.device, multiplier=24.0**2), tokens)
    chosen = [tuple((part.logits + bias).argmax(axis=1)) for part in (need, undivided, twice)]
    got = decode(BF16, to_bits(output.logits)) + bias
    expect_equal(label, "tokens under a bias", tuple(got.argmax(axis=1)), chosen[0])
    expect_equal(label, "dropped, done once and twice are three", len(set(chosen)), 3)
    expect_equal(label, "taps are not divided", np.array_equal(need.outputs[-1], undivided.outputs[-1]), True)
