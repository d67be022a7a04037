"""What ``kv_inject`` found out about a draft, a pool and rows serves none that differ in one thing (F1-23): after good
calls, every call ends as it does where no call came before it."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils import dlpack

from dspark import machine
from dspark.model import kv_inject, kv_inject_plan
from dspark.model.attention import DFlashAttention
from dspark.model.norm import RMSNorm
from dspark.runtime.pools import KVPool

from ..fixtures.calls import drafts
from ..fixtures.calls import kv_inject as inject
from ..fixtures.guard import Arena
from ..fixtures.ledger import Label, expect_equal
from ..fixtures.plans import (
    BF16,
    FLOATING,
    INDEX,
    ONE,
    TABLE,
    Arguments,
    Change,
    Lookalike,
    forget,
    key_of,
    outcome,
    spread,
)
from ..fixtures.violations import MACHINE

ROWS_OF = replace(inject.base(), commit_lens=np.ones(8, np.int64), width=1, eps=1.0)


@dataclass
class Rig:
    """A draft, a pool and rows; every change below alters one thing of them."""

    layers: Any
    pool: KVPool
    rows: Arguments

    @property
    def last(self) -> Any:
        return self.layers[len(self.layers) - 1]

    @property
    def rotary(self) -> Any:
        return self.layers[0].rotary_emb

    def call(self) -> tuple[Any, ...]:
        """The outcome, with everything in the pool, which is empty before."""
        for part in self.parts():
            if isinstance(part, torch.Tensor) and not part.is_meta:
                part.zero_()
        rows = self.rows
        return outcome(
            lambda: kv_inject.write_target_hidden_kv(self.layers, self.pool, **rows),
            lambda: [key_of(part) for part in self.parts()],
        )

    def parts(self) -> tuple[Any, ...]:
        return (*self.pool._keys, *self.pool._values, self.pool.valid_rows)


def rig(device: torch.device) -> Rig:
    call = ROWS_OF
    pool = KVPool(call.pool_rows, call.num_layers, call.shape.kv_heads, call.shape.head_dim, device=device)
    assert call.commit_lens is not None
    rows = {
        "hidden": torch.from_numpy(call.hidden).to(BF16).to(device),
        "positions": torch.from_numpy(call.positions).to(device),
        "locs": torch.from_numpy(call.locs).to(device),
        "commit_lens": torch.from_numpy(call.commit_lens).to(device),
        "locs_row_width": 1,
    }
    return Rig(inject.build_layers(call, device), pool, rows)


class OtherSizes(DFlashAttention):
    """A layer whose class answers for what the instance holds, too."""

    @property
    def kv_size(self) -> int:
        return 2 * int(self.__dict__["kv_size"])

    @kv_size.setter
    def kv_size(self, value: int) -> None:
        self.__dict__["kv_size"] = value


class Quantized(torch.nn.Linear):
    """A projection whose class says that its weight is packed."""

    quant_method = "packed"


class ClonedNorm(RMSNorm):
    """A norm whose weight is another tensor at each look."""

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        weight = self._parameters["weight"]
        assert weight is not None
        return weight.detach().clone()


def setting(find: Callable[[Rig], Any], name: str, value: Any) -> Callable[[Rig], None]:
    return lambda rig: setattr(find(rig), name, value)


def data(find: Callable[[Rig], Any], make: Change) -> Callable[[Rig], None]:
    """The weight of what ``find`` gives is the same object with other data."""

    def change(rig: Rig) -> None:
        weight = find(rig).weight
        weight.data = make(weight.data)

    return change


def buffer(make: Change) -> Callable[[Rig], None]:
    def change(rig: Rig) -> None:
        rig.pool._values[1] = make(rig.pool._values[1])

    return change


def table(make: Change) -> Callable[[Rig], None]:
    def change(rig: Rig) -> None:
        rig.rotary.cos_sin_cache = make(rig.rotary.cos_sin_cache)

    return change


def flags(make: Change) -> Callable[[Rig], None]:
    def change(rig: Rig) -> None:
        rig.pool.valid_rows = make(rig.pool.valid_rows)

    return change


def eps_of_all(value: float) -> Callable[[Rig], None]:
    def change(rig: Rig) -> None:
        for layer in rig.layers:
            layer.k_norm.variance_epsilon = value

    return change


def row(name: str, make: Change) -> Callable[[Rig], None]:
    def change(rig: Rig) -> None:
        rig.rows[name] = make(rig.rows[name])

    return change


def in_a_storage_of_its_own(t: torch.Tensor) -> torch.Tensor:
    """The same memory, which another storage begins at. The exchange is refused where another device is current."""
    with torch.cuda.device_of(t):
        return dlpack.from_dlpack(t)


def scattered(t: torch.Tensor) -> torch.Tensor:
    """The same address, shape and dtype; rows and columns in the other order of memory."""
    return t.as_strided(t.shape, t.stride()[::-1] if t.dim() == 2 and t.shape[0] == t.shape[1] else (1, t.shape[0]))


PROJECTION: Callable[[Rig], Any] = lambda rig: rig.last.qkv_proj  # noqa: E731
NORM: Callable[[Rig], Any] = lambda rig: rig.last.k_norm  # noqa: E731
FIRST: Callable[[Rig], Any] = lambda rig: rig.layers[0]  # noqa: E731
LAST: Callable[[Rig], Any] = lambda rig: rig.last  # noqa: E731
ROTARY: Callable[[Rig], Any] = lambda rig: rig.rotary  # noqa: E731
OF_DRAFT: dict[str, Callable[[Rig], None]] = {
    "reserved-rows": setting(lambda rig: rig.pool, "reserved_rows", 4),
    **{f"valid-{kind}": flags(INDEX[kind]) for kind in ("shape", "dtype", "device", "type")},
    "valid-apart": flags(lambda flags: flags.new_ones(2 * flags.numel())[::2]),
    "valid-none": setting(lambda rig: rig.pool, "valid_rows", None),
    "q-size-float": setting(FIRST, "q_size", float(ROWS_OF.shape.q_heads * ROWS_OF.shape.head_dim)),
    "kv-size-float": setting(FIRST, "kv_size", float(ROWS_OF.shape.kv_heads * ROWS_OF.shape.head_dim)),
    "head-dim-float": setting(FIRST, "head_dim", float(ROWS_OF.shape.head_dim)),
    "eps-bool": eps_of_all(True),
    "eps": eps_of_all(3.0),
    "rotary-dim-float": setting(ROTARY, "rotary_dim", 16.0),
    "pairing": setting(ROTARY, "is_neox_style", False),
    "rotary-dim": setting(ROTARY, "rotary_dim", 8),
    "rotary-not-whole": setting(ROTARY, "table_is_whole_effect", False),
    **{f"table-{kind}": table(TABLE[kind]) for kind in TABLE if kind != "grad"},
    "rotary-of-its-own": lambda rig: setattr(rig.last, "rotary_emb", drafts.other_pairing(rig.rotary)),
    "layer-type": setting(LAST, "__class__", OtherSizes),
    "q-size": setting(LAST, "q_size", 64),
    "kv-size": setting(LAST, "kv_size", 32),
    "head-dim": setting(LAST, "head_dim", 16),
    "kv-heads": setting(LAST, "num_kv_heads", 4),
    "k-scale": setting(LAST, "k_scale", 0.5),
    "v-scale": setting(LAST, "v_scale", 0.5),
    "norm-type": setting(NORM, "__class__", ClonedNorm),
    "norm-not-plain": setting(NORM, "is_plain", False),
    "eps-of-one-layer": setting(NORM, "variance_epsilon", 2.0),
    "projection-type": setting(PROJECTION, "__class__", Quantized),
    "quant-method": setting(PROJECTION, "quant_method", "packed"),
    "bias": lambda rig: setattr(rig.last.qkv_proj, "bias", torch.nn.Parameter(rig.last.qkv_proj.weight[:, 0].detach())),
    "weight-in-a-storage-of-its-own": data(PROJECTION, in_a_storage_of_its_own),
    "norm-in-a-storage-of-its-own": data(NORM, in_a_storage_of_its_own),
    "weight-address": data(PROJECTION, torch.clone),
    "norm-address": data(NORM, torch.clone),
    "weight-dtype": data(PROJECTION, lambda t: t.view(torch.float16)),
    "weight-shape": data(PROJECTION, lambda t: t[:-1]),
    "weight-stride": data(PROJECTION, scattered),
    "buffer-type": buffer(Lookalike),
    "buffer-address": buffer(torch.ones_like),
    "buffer-dtype": buffer(lambda t: t.view(torch.float16)),
    "buffer-shape": buffer(lambda t: t[:-1]),
    "buffer-stride": buffer(lambda t: t.as_strided(t.shape, (t.stride(0), 1, t.shape[1]))),
    **{f"hidden-{kind}": row("hidden", FLOATING[kind]) for kind in ("shape", "dtype", "device", "type")},
    **{f"positions-{kind}": row("positions", change) for kind, change in INDEX.items()},
    **{f"locs-{kind}": row("locs", change) for kind, change in INDEX.items()},
    "locs-window": row("locs", lambda t: t[:, None].expand(8, 2)),
    **{f"commit-lens-{kind}": row("commit_lens", change) for kind, change in INDEX.items()},
    "commit-lens-none": row("commit_lens", lambda lens: None),
    **{f"{name}-apart": row(name, spread) for name in ("hidden", "positions", "locs", "commit_lens")},
    **{f"width-{kind}": row("locs_row_width", change) for kind, change in ONE.items()},
}


@pytest.mark.parametrize("change", OF_DRAFT)
def test_a_changed_draft_ends_as_alone(change: str, arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    label = Label("kv_inject", "plans")
    forget(monkeypatch)
    one = rig(arena.device)
    OF_DRAFT[change](one)
    alone = one.call()
    forget(monkeypatch)
    other = rig(arena.device)
    good = [other.call(), other.call()]
    OF_DRAFT[change](other)
    expect_equal(label, "outcome after two good calls", other.call(), alone)
    expect_equal(label, "outcome of the second good call", good[1], good[0])
    if change != "buffer-address" and not change.endswith("-apart"):  # which end as the good call did
        expect_equal(label, "whether the change can be told", alone != good[0], True)


class SubclassedNorm(RMSNorm):
    """A norm that could answer for its attributes in a way of its own."""

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name)


class SwitchedNorm(RMSNorm):
    """A norm that answers with what it stores until ``SWITCH`` says otherwise."""

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        weight = self._parameters["weight"]
        assert weight is not None
        return 2 * weight.detach() if SWITCH else weight


SWITCH: list[None] = []


def test_a_class_may_change_its_mind(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that the draft stores tells, so nothing that was found out about it may be used again."""
    label = Label("kv_inject", "plans")

    def outcomes(*switches: bool) -> list[tuple[Any, ...]]:
        forget(monkeypatch)
        draft, found = rig(arena.device), []
        setting(NORM, "__class__", SwitchedNorm)(draft)
        for switch in switches:
            monkeypatch.setattr(sys.modules[__name__], "SWITCH", [None] * switch)
            found.append(draft.call())
        return found

    alone = [*outcomes(False), *outcomes(True)]
    expect_equal(label, "outcomes, one after the other", outcomes(False, True), alone)
    expect_equal(label, "paths", [outcome[0][0][2] for outcome in alone], ["fused", "eager"])


UNREAD: dict[str, Callable[[Rig], None]] = {
    "two-rotaries-with-one-table": lambda rig: setattr(rig.last, "rotary_emb", copy.copy(rig.rotary)),
    "a-class-that-answers-itself": setting(NORM, "__class__", SubclassedNorm),
}


class DoublingNorm(RMSNorm):
    """A norm that answers with another weight than it stores."""

    def __getattr__(self, name: str) -> Any:
        found: Any = super().__getattr__(name)
        return 2 * found.detach() if name == "weight" else found


def test_a_draft_is_asked_for_the_weight_of_its_norms(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it stores is stacked, and what it answers is not: the fallback asks it, too."""
    label = Label("kv_inject", "plans")
    forget(monkeypatch)
    draft = rig(arena.device)
    good = draft.call()
    setting(NORM, "__class__", DoublingNorm)(draft)
    for turn in ("first", "second"):
        expect_equal(label, f"path of the {turn} call", draft.call()[0][0][2], "eager")
    expect_equal(label, "path before", good[0][0][2], "fused")


@pytest.mark.parametrize("odd", UNREAD)
def test_a_draft_that_is_not_read_is_served_as_well(odd: str, arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is remembered of it, and it is fused all the same."""
    label = Label("kv_inject", "plans")
    forget(monkeypatch)
    draft = rig(arena.device)
    draft.pool.reserved_rows = 2
    good = draft.call()
    UNREAD[odd](draft)
    for turn in ("first", "second"):
        expect_equal(label, f"outcome of the {turn} call", draft.call(), good)
    expect_equal(label, "path", [path for _, _, path in good[0]], ["fused", "fused"])


def test_a_draft_too_many_lets_all_be_forgotten(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    label = Label("kv_inject", "plans")
    forget(monkeypatch)
    monkeypatch.setattr(kv_inject_plan, "DRAFTS", 2)
    rigs, sizes, good = [rig(arena.device) for _ in range(3)], [], []
    for one in (*rigs, rigs[0]):
        good.append(one.call())
        sizes.append(len(kv_inject._drafts._drafts))
    expect_equal(label, "drafts that are kept", sizes, [1, 2, 1, 2])
    expect_equal(label, "outcomes", good, good[:1] * 4)


@pytest.mark.parametrize("broken", MACHINE)
def test_a_draft_on_another_machine(broken: str, arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    label = Label("kv_inject", "plans")
    forget(monkeypatch)
    draft = rig(arena.device)
    with machine.injected(**MACHINE[broken]):
        alone = draft.call()
    forget(monkeypatch)
    good = draft.call()
    with machine.injected(**MACHINE[broken]):
        expect_equal(label, "outcome on a machine that was injected", draft.call(), alone)
    expect_equal(label, "outcome on this machine again", draft.call(), good)
    expect_equal(label, "whether the machines can be told apart", alone != good, True)
