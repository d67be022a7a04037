"""The tiny Inkling after an update of its weights: no copy of the old ones is left (F1-23's kind)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import nn

from dspark.runtime.generate import single_thread
from dspark.runtime.target import TinyInkling

from ..fixtures.guard import to_bits
from ..fixtures.lane import Lane
from ..fixtures.ledger import Label, expect_equal
from ..fixtures.sequences import Recorded, recorded, sequence
from ..fixtures.tiny_models import CONFIG, build_target

LABEL = Label("target", "row-exact")
TOKENS = sequence("target/stale", 2)
pytestmark = [pytest.mark.lanes(Lane.INTERPRET), pytest.mark.usefixtures("one_thread")]
Update = Callable[[TinyInkling, str, torch.Tensor], None]


@pytest.fixture
def one_thread() -> Iterator[None]:
    with single_thread():
        yield


def _owner(target: TinyInkling, name: str) -> tuple[nn.Module, str]:
    path, _, last = name.rpartition(".")
    return target.get_submodule(path), last


def _by_state_dict(target: TinyInkling, name: str, value: torch.Tensor) -> None:
    target.load_state_dict({name: value}, strict=False)


def _by_copy(target: TinyInkling, name: str, value: torch.Tensor) -> None:
    with torch.no_grad():
        target.get_parameter(name).copy_(value)


def _by_data(target: TinyInkling, name: str, value: torch.Tensor) -> None:
    """Moves neither the tensor's address nor its version."""
    target.get_parameter(name).data.copy_(value)


def _by_rebinding_data(target: TinyInkling, name: str, value: torch.Tensor) -> None:
    target.get_parameter(name).data = value


def _by_rebinding(target: TinyInkling, name: str, value: torch.Tensor) -> None:
    module, last = _owner(target, name)
    setattr(module, last, nn.Parameter(value, requires_grad=False))


def _by_the_old_address(target: TinyInkling, name: str, value: torch.Tensor) -> None:
    """Another parameter in the memory of the old one, as an allocator may have it."""
    module, last = _owner(target, name)
    memory = target.get_parameter(name).data
    memory.copy_(value)
    setattr(module, last, nn.Parameter(memory, requires_grad=False))


WAYS: dict[str, Update] = {
    "load_state_dict": _by_state_dict,
    "copy": _by_copy,
    "data": _by_data,
    "rebinding-data": _by_rebinding_data,
    "rebinding": _by_rebinding,
    "the-old-address": _by_the_old_address,
}
# The last layer's, so that all of them reach the logits, and the rest.
NAMES = [name for name, _ in TinyInkling(CONFIG, device="meta").named_parameters() if not name.startswith("layers.0.")]


def doubled(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().flip(0) * 2


@functools.cache
def needs() -> list[Recorded]:
    """After each of the updates, by targets that never had other weights."""
    target, found = build_target(torch.device("cpu")), list[Recorded]()
    for name in NAMES:
        state = target.state_dict()
        target = TinyInkling(CONFIG)
        target.load_state_dict(state | {name: doubled(state[name])})
        target.target_layer_ids = (0, 1)
        found.append(recorded(target, TOKENS))
    return found


@pytest.mark.parametrize("way", WAYS)
def test_f1_23_new_weights_are_used_whatever_way_they_came(way: str) -> None:
    """One parameter after the other; each time the result is that of a target that never had others."""
    target = build_target(torch.device("cpu"))
    before = recorded(target, TOKENS)
    for name, need in zip(NAMES, needs(), strict=True):
        WAYS[way](target, name, doubled(target.get_parameter(name)))
        got = recorded(target, TOKENS)
        expect_equal(LABEL, f"logits with another {name}", got.logits, need.logits)
        expect_equal(LABEL, f"taps with another {name}", got.taps, need.taps)
        for layer, pairs in enumerate(zip(got.kv, need.kv, strict=True)):
            for held, right in zip(*pairs, strict=True):
                expect_equal(LABEL, f"K and V of layer {layer} with another {name}", held, right)
        changed = any(
            not np.array_equal(one, other)
            for one, other in zip(
                (got.logits, got.taps, *got.states[-1]), (before.logits, before.taps, *before.states[-1]), strict=True
            )
        )
        expect_equal(LABEL, f"that {name} counts", changed, True)
        before = got


def test_copies_are_kept_while_nothing_changes() -> None:
    """Weights with NaNs, zeros of both signs: equal bits are equal."""
    target = build_target(torch.device("cpu"))
    weight = target.get_parameter("layers.1.mlp.down_proj.weight").data
    weight[0], weight[1, :8], weight[1, 8:] = float("nan"), 0.0, -0.0
    recorded(target, TOKENS)
    made = target._exact
    recorded(target, TOKENS)
    expect_equal(LABEL, "the same copies", target._exact is made, True)
    weight[1, 0] = -0.0
    recorded(target, TOKENS)
    expect_equal(LABEL, "a zero of the other sign", target._exact is made, False)


def test_inference_tensors_have_no_version_to_ask_for() -> None:
    plain = build_target(torch.device("cpu"))
    with torch.inference_mode():
        target = build_target(torch.device("cpu"))
        got = recorded(target, TOKENS)
    expect_equal(LABEL, "logits", got.logits, recorded(plain, TOKENS).logits)
    expect_equal(LABEL, "dtype", to_bits(target.norm.weight).dtype, np.dtype(np.uint16))
