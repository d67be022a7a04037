"""Nothing can go stale: weights updated in every way, pools rebuilt and alternated, tables grown (F1-5, F1-23)."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

from dspark import dispatch, pointers
from dspark.model.stacked import StackedLayers, stacked_view
from dspark.runtime.pools import KVPool, StaleRowsError

from ..fixtures.calls.kv_inject import OP, Call, base, build_layers, build_pool, run_with
from ..fixtures.guard import Arena, to_bits
from ..fixtures.ledger import Label, expect_decision, expect_equal, expect_raises

LABEL = Label(OP, "fused")
BEFORE, AFTER = replace(base(), key="before"), replace(base(), key="after")
State = dict[str, torch.Tensor]


def checked(call: Call, layers: Any, pool: Any, arena: Arena, reasons: list[str]) -> None:
    """The call is judged with the values of ``call``, and its decision has exactly ``reasons``."""
    with dispatch.observed() as outcomes:
        run_with(call, LABEL, arena, None, layers, pool)
    own = [outcome for outcome in outcomes if outcome.decision.op == OP]
    expect_decision(LABEL, own, "eager" if reasons else "fused", reasons)


def state_of(call: Call, device: torch.device) -> State:
    return {name: tensor.clone() for name, tensor in build_layers(call, device).state_dict().items()}


def by_copy(layers: Any, state: State, folder: Path) -> Any:
    for name, parameter in layers.named_parameters():
        parameter.data.copy_(state[name])
    return layers


def by_load_state_dict(layers: Any, state: State, folder: Path) -> Any:
    layers.load_state_dict(state)
    return layers


def by_assignment(layers: Any, state: State, folder: Path) -> Any:
    layers.load_state_dict(state, assign=True)
    return layers


def by_parent_assignment(layers: Any, state: State, folder: Path) -> Any:
    parent = nn.Module()
    parent.layers = layers
    parent.load_state_dict({f"layers.{name}": tensor for name, tensor in state.items()}, assign=True)
    return layers


def by_optimizer(layers: Any, state: State, folder: Path) -> Any:
    """One step of plain descent whose gradient is old - new."""
    layers.requires_grad_(True)
    optimizer = torch.optim.SGD(layers.parameters(), lr=1.0)
    for name, parameter in layers.named_parameters():
        parameter.grad = parameter.detach() - state[name]
    optimizer.step()
    return layers.requires_grad_(False)


def by_dtype_round_trip(layers: Any, state: State, folder: Path) -> Any:
    return by_copy(layers.to(torch.float32).to(torch.bfloat16), state, folder)


def by_device_round_trip(layers: Any, state: State, folder: Path) -> Any:
    device = next(iter(layers.parameters())).device
    other = torch.device("meta") if device.type == "cpu" else torch.device("cpu")
    moved = layers.to_empty(device=other) if other.type == "meta" else layers.to(other)
    back = moved.to_empty(device=device) if other.type == "meta" else moved.to(device)
    return by_load_state_dict(back, state, folder)


def by_deepcopy(layers: Any, state: State, folder: Path) -> Any:
    """The copy is updated and used; the original keeps its values."""
    return by_copy(copy.deepcopy(layers), state, folder)


def by_parent_deepcopy(layers: Any, state: State, folder: Path) -> Any:
    parent = nn.Module()
    parent.layers = layers
    return by_copy(copy.deepcopy(parent).layers, state, folder)


def by_torch_save(layers: Any, state: State, folder: Path) -> Any:
    by_copy(layers, state, folder)
    buffer = io.BytesIO()
    torch.save(layers.state_dict(), buffer)
    by_copy(layers, {name: torch.zeros_like(tensor) for name, tensor in state.items()}, folder)
    buffer.seek(0)
    layers.load_state_dict(torch.load(buffer, weights_only=True))
    return layers


def by_safetensors(layers: Any, state: State, folder: Path) -> Any:
    by_copy(layers, state, folder)
    safetensors.torch.save_file(layers.state_dict(), folder / "draft.safetensors")
    by_copy(layers, {name: torch.zeros_like(tensor) for name, tensor in state.items()}, folder)
    layers.load_state_dict(safetensors.torch.load_file(folder / "draft.safetensors"))
    return layers


def by_rebinding(layers: Any, state: State, folder: Path) -> Any:
    by_copy(layers, state, folder)
    layers[1].qkv_proj.weight = nn.Parameter(layers[1].qkv_proj.weight.detach().clone(), requires_grad=False)
    return layers


def by_rebinding_data(layers: Any, state: State, folder: Path) -> Any:
    by_copy(layers, state, folder)
    layers[0].k_norm.weight.data = layers[0].k_norm.weight.detach().clone()
    return layers


def by_rebinding_and_restacking(layers: Any, state: State, folder: Path) -> Any:
    by_rebinding_data(by_rebinding(layers, state, folder), state, folder).restack()
    return layers


Update = Callable[[Any, State, Path], Any]
UPDATES: dict[Update, list[str]] = {
    by_copy: [],
    by_load_state_dict: [],
    by_assignment: [],
    by_parent_assignment: [],
    by_optimizer: [],
    by_dtype_round_trip: [],
    by_device_round_trip: [],
    by_deepcopy: [],
    by_parent_deepcopy: [],
    by_torch_save: [],
    by_safetensors: [],
    by_rebinding: ["qkv-weights-not-stacked"],
    by_rebinding_data: ["k-norm-weights-not-stacked"],
    by_rebinding_and_restacking: [],
}


@pytest.mark.parametrize("update", UPDATES, ids=lambda update: update.__name__.replace("_", "-"))
def test_f1_23_updated_weights_are_the_ones_used(update: Update, arena: Arena, tmp_path: Path) -> None:
    layers = build_layers(BEFORE, arena.device)
    checked(BEFORE, layers, build_pool(BEFORE, arena), arena, [])
    identities = {name: id(parameter) for name, parameter in layers.named_parameters()}
    updated = update(layers, state_of(AFTER, arena.device), tmp_path)
    here = Arena(arena.device)
    pool = build_pool(AFTER, here)
    checked(AFTER, updated, pool, here, UPDATES[update])
    if not UPDATES[update]:
        here.verify(LABEL)
    if update in (by_copy, by_load_state_dict, by_optimizer, by_dtype_round_trip):
        kept = {name: id(parameter) for name, parameter in updated.named_parameters()}
        expect_equal(LABEL, "parameters are the same objects (an optimizer holds them)", kept, identities)


def test_deepcopy_leaves_the_original_its_values(arena: Arena, tmp_path: Path) -> None:
    layers = build_layers(BEFORE, arena.device)
    by_deepcopy(layers, state_of(AFTER, arena.device), tmp_path)
    checked(BEFORE, layers, build_pool(BEFORE, arena), arena, [])


def test_a_conversion_reaches_every_parameter_and_is_stacked_again(arena: Arena) -> None:
    layers = build_layers(BEFORE, arena.device).to(torch.float32)
    dtypes = {str(parameter.dtype) for parameter in layers.parameters()}
    expect_equal(LABEL, "dtypes after the conversion", dtypes, {"torch.float32"})
    expect_equal(LABEL, "stacked after it", stacked_view([layer.qkv_proj.weight for layer in layers]) is not None, True)


def test_layers_that_do_not_come_first_are_one_view_too(arena: Arena) -> None:
    """Of three layers the last two: the view begins at the first of them, and steps by one layer."""
    weights = [layer.qkv_proj.weight for layer in build_layers(BEFORE, arena.device)]
    view = stacked_view(weights[1:])
    same = view is not None and all(torch.equal(view[i], weight) for i, weight in enumerate(weights[1:]))
    expect_equal(LABEL, "the view's slices are the parameters", same, True)


def test_no_weight_is_copied_by_a_call(arena: Arena) -> None:
    layers = build_layers(BEFORE, arena.device)
    weights = [layer.qkv_proj.weight for layer in layers]
    view = stacked_view(weights)
    same = [view is not None and view[index].data_ptr() == weight.data_ptr() for index, weight in enumerate(weights)]
    expect_equal(LABEL, "the view's slices are the parameters", same, [True] * len(weights))


def separate(device: torch.device) -> list[torch.Tensor]:
    return [torch.ones(4, 4, device=device) for _ in range(3)]


NOT_STACKED: dict[str, Callable[[torch.device], list[torch.Tensor]]] = {
    "separate-storages": separate,
    "one-tensor-three-times": lambda device: [torch.ones(4, 4, device=device)] * 3,
    "descending": lambda device: list(torch.ones(3, 4, 4, device=device).unbind())[::-1],
    "uneven-spacing": lambda device: [torch.ones(5, 4, 4, device=device)[index] for index in (0, 1, 3)],
    "strides-that-differ": lambda device: [
        part.t() if i == 1 else part for i, part in enumerate(torch.ones(3, 4, 4, device=device))
    ],
    "shapes-that-differ": lambda device: [part[: 4 - i] for i, part in enumerate(torch.ones(3, 4, 4, device=device))],
    "meta": lambda device: list(torch.ones(3, 4, 4, device="meta").unbind()),
}


@pytest.mark.parametrize("kind", NOT_STACKED)
def test_what_is_not_stacked_has_no_view(kind: str, arena: Arena) -> None:
    """Equal gaps between addresses prove nothing: the tensors must share one storage."""
    expect_equal(LABEL, "view", stacked_view(NOT_STACKED[kind](arena.device)), None)


def test_layers_that_differ_are_left_alone(arena: Arena) -> None:
    parts = [nn.Linear(4, rows, bias=False, device=arena.device) for rows in (2, 3)]
    holders = []
    for part in parts:
        holder = nn.Module()
        holder.qkv_proj = part
        holders.append(holder)
    before = [part.weight.data_ptr() for part in parts]
    StackedLayers(holders)
    expect_equal(LABEL, "addresses", [part.weight.data_ptr() for part in parts], before)


def pool_like(call: Call, device: torch.device, **options: Any) -> KVPool:
    return KVPool(call.pool_rows, call.num_layers, call.shape.kv_heads, call.shape.head_dim, device=device, **options)


@pytest.mark.parametrize("options", [{}, {"interleaved": True}, {"reserved_rows": 2}], ids=str)
@pytest.mark.parametrize("path", ["fused", "eager"])
def test_the_pool_serves_both_paths_and_knows_its_rows(options: dict[str, Any], path: str, arena: Arena) -> None:
    call = replace(BEFORE, reserved_rows=options.get("reserved_rows", 0))
    layers, pool = build_layers(call, arena.device), pool_like(call, arena.device, **options)
    run_with(call, Label(OP, path), arena, path, layers, pool)
    valid = np.zeros(call.pool_rows, np.bool_)
    valid[[call.locs[row] for row in call.window.written()]] = True
    expect_equal(Label(OP, path), "valid rows", to_bits(pool.valid_rows), valid)
    for layer in range(call.num_layers):
        for buffer in pool.get_kv_buffer(layer):
            touched = buffer.float().abs().sum((1, 2)).cpu().numpy() > 0
            expect_equal(Label(OP, path), "rows written", touched, valid)


def test_pools_alternate_and_are_rebuilt(arena: Arena) -> None:
    """A table of pointers is cached under its own content: what changes an address or a stride changes the table."""
    layers = build_layers(BEFORE, arena.device)
    pools = [pool_like(BEFORE, arena.device), pool_like(BEFORE, arena.device, interleaved=True)]
    for pool in pools:
        checked(BEFORE, layers, pool, arena, [])
    built = pointers.builds()
    for turn in range(6):
        checked(BEFORE, layers, pools[turn % 2], arena, [])
    expect_equal(LABEL, "tables built by six alternating calls", pointers.builds() - built, 0)


def test_a_pool_rebuilt_at_the_same_address_with_another_stride(arena: Arena) -> None:
    call, layers = BEFORE, build_layers(BEFORE, arena.device)
    heads, dim = call.shape.kv_heads, call.shape.head_dim
    size = (2 * call.num_layers, 4 * call.pool_rows * heads * dim)
    storage = torch.zeros(size, dtype=torch.bfloat16, device=arena.device)
    shape = (call.pool_rows, heads, dim)
    for row in (heads * dim, 3 * heads * dim, heads * dim):
        storage.zero_()
        pool = pool_like(call, arena.device)
        views = [part.as_strided(shape, (row, dim, 1), part.storage_offset()) for part in storage]
        pool._keys, pool._values = views[: call.num_layers], views[call.num_layers :]
        checked(call, layers, pool, arena, [])


def test_memory_freed_and_used_again(arena: Arena) -> None:
    layers = build_layers(BEFORE, arena.device)
    for turn in range(4):
        call = replace(BEFORE, locs=np.roll(BEFORE.locs, turn))
        checked(call, layers, pool_like(call, arena.device), arena, [])


def test_a_table_that_grew_is_the_one_read(arena: Arena) -> None:
    layers, pool = build_layers(BEFORE, arena.device), pool_like(BEFORE, arena.device)
    checked(BEFORE, layers, pool, arena, [])
    layers[0].rotary_emb.ensure_rows(9000)
    grown = replace(BEFORE, table_rows=9000, positions=BEFORE.positions + 8700)
    checked(grown, layers, pool_like(grown, arena.device), arena, [])


def test_f1_5_rows_without_draft_kv_are_refused(arena: Arena) -> None:
    """Of a prefix of eight rows five came from a cache: the three new ones are written, reading all is refused."""
    rows = np.array([5, 6, 7])
    call = replace(BEFORE, locs=rows, positions=rows, commit_lens=None, width=None)
    layers, pool = build_layers(call, arena.device), pool_like(call, arena.device)
    for layer in range(call.num_layers):
        for buffer in pool.get_kv_buffer(layer):
            buffer.fill_(float("nan"))
    checked(call, layers, pool, arena, [])
    pool.require_valid(torch.from_numpy(rows).to(arena.device))
    prefix = torch.arange(8, device=arena.device)
    error = expect_raises(LABEL, StaleRowsError, ["[0, 1, 2, 3, 4]"], lambda: pool.require_valid(prefix))
    expect_equal(LABEL, "stale rows", error.rows, [0, 1, 2, 3, 4])
    pool.free(torch.tensor([6, -1], device=arena.device))
    expect_raises(LABEL, StaleRowsError, ["[6]"], lambda: pool.require_valid(prefix[5:]))
