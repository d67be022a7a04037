"""What was found out about one call never serves another: after a good call, every call that differs from it in a
single thing that the validation reads ends as it does where no call came before it (CONTRACTS.md section 9)."""

from __future__ import annotations

import copy
import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils import dlpack

import dspark.ops as ops
from dspark import dispatch, machine
from dspark.model import kv_inject
from dspark.model.attention import DFlashAttention
from dspark.model.kv_inject_plan import Drafts
from dspark.model.norm import RMSNorm
from dspark.ops import accept, accept_commit, commit_indices, kv_write, qk_norm_rope, state_scatter
from dspark.ops.plans import Plans
from dspark.runtime.pools import KVPool

from ..fixtures.calls import drafts
from ..fixtures.calls import kv_inject as inject
from ..fixtures.guard import Arena, to_bits
from ..fixtures.ledger import Label, expect_equal, expect_raises
from ..fixtures.violations import MACHINE

Arguments = dict[str, Any]
Change = Callable[[Any], Any]
BF16 = torch.bfloat16


class Lookalike:
    """No tensor, and yet it has a shape, a dtype and a device."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tensor, name)


def values(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    count = int(torch.tensor(shape).prod())
    return (torch.arange(count) % 13 + 1).reshape(shape).to(dtype)


def ints(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.int64)


# Changes of a tensor argument, by what the key holds of it.
SHAPE: dict[str, Change] = {"shape": lambda t: torch.cat([t, t])}
COLUMNS: dict[str, Change] = {"columns": lambda t: torch.cat([t, t], dim=1)}
STRIDE: dict[str, Change] = {"stride": lambda t: torch.stack([t, t], dim=-1).flatten(-2)[..., ::2]}
DEVICE: dict[str, Change] = {"device": lambda t: t.to("meta")}
TYPE: dict[str, Change] = {"type": Lookalike}
GRAD: dict[str, Change] = {"grad": lambda t: t.detach().clone().requires_grad_()}
INDEX: dict[str, Change] = {**SHAPE, **DEVICE, **TYPE, "dtype": lambda t: t.to(torch.uint8)}
FLOATING: dict[str, Change] = {**SHAPE, **DEVICE, **TYPE, **GRAD, "dtype": lambda t: t.to(torch.float16)}
ROWS: dict[str, Change] = {**FLOATING, **COLUMNS, **STRIDE}
TABLE: dict[str, Change] = {**COLUMNS, **STRIDE, **DEVICE, **TYPE, **GRAD, "dtype": lambda t: t.double()}
ONE: dict[str, Change] = {"bool": lambda value: True, "another": lambda value: value + 1}
"""Of a number that is 1: ``True == 1``."""
FLOAT: dict[str, Change] = {"float": float, "another": lambda value: value + 1}
SET: dict[str, Change] = {"set": lambda value: 1}


@dataclass(frozen=True)
class Subject:
    """An operation, the arguments of a good call, which of them it writes, and changes of each by its name."""

    op: str
    call: Callable[..., Any]
    good: Callable[[], Arguments]
    changes: dict[str, dict[str, Change]]
    written: tuple[str, ...] = ()


KEPT: dict[tuple[str, str], torch.Tensor] = {}


def pool(name: str) -> torch.Tensor:
    """``[4, 1, 4]`` at one address per name and device, for good: a change keeps it, and a pointer may point there."""
    fresh = values(64)
    kept = KEPT.setdefault((name, str(fresh.device)), fresh)
    return kept.copy_(fresh)[:16].view(4, 1, 4)


def by_pointer() -> torch.Tensor:
    return ops.KVPoolTable([pool("k")], [pool("v")]).pointer_table(pool("k").device)


def of_pool(make: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    """A table of pools that are each made of what they were."""
    return lambda meta: ops.KVPoolTable([make(t) for t in meta.keys], [make(t) for t in meta.values], meta.valid)


SUBJECTS = (
    Subject(
        "accept",
        ops.compute_dflash_correct_drafts_and_bonus,
        lambda: {"candidates": ints(2, 3), "target_predict": ints(2, 3), "verify_lens": ints(2)},
        {
            "candidates": INDEX,
            "target_predict": INDEX,
            "verify_lens": {**INDEX, "none": lambda lens: None if lens is None else lens * 0 + 3},
        },
    ),
    Subject(
        "accept_commit",
        ops.fused_accept_commit,
        lambda: {
            "candidates": ints(2, 3),
            "target_predict": ints(2, 3),
            "seq_lens": 2 * ints(2),
            "verify_lens": 2 * ints(2),
            "eos_ids": ints(1),
            "mamba_track_interval": 1,
        },
        {
            "candidates": INDEX,
            "target_predict": INDEX,
            "seq_lens": INDEX,
            "verify_lens": {**INDEX, "none": lambda lens: None},
            "eos_ids": {
                **{kind: INDEX[kind] for kind in ("device", "type", "dtype")},
                "none": lambda ids: None,
                "rank": lambda ids: ids[None],
            },
            "mamba_track_interval": {
                **ONE,
                "none": lambda value: None,
                "too-large": lambda value: 1 << 63,
                "no-hash": lambda value: [value],
            },
        },
    ),
    Subject(
        "commit_indices",
        ops.fused_commit_track_indices,
        lambda: {
            "accept_index": ints(2, 3),
            "accept_lens": ints(2),
            "seq_lens": 2 * ints(2),
            "draft_token_num": 1,
            "mamba_track_interval": 1,
        },
        {
            "accept_index": INDEX,
            "accept_lens": INDEX,
            "seq_lens": {**INDEX, "none": lambda lens: None},
            "draft_token_num": ONE,
            "mamba_track_interval": {**ONE, "too-large": lambda value: 1 << 63, "no-hash": lambda value: [value]},
        },
    ),
    Subject(
        "qk_norm_rope",
        ops.table_qk_norm_rope_,
        lambda: {
            "qkv": values(2, 12),
            "positions": ints(2),
            "q_weight": values(4),
            "k_weight": values(4),
            "cos_sin_cache": values(3, 4, dtype=torch.float32),
            "num_q_heads": 1,
            "num_k_heads": 1,
            "head_dim": 4,
            "eps": 1,
            "k_eps": 1,
            "rotary_dim": 4,
        },
        {
            "qkv": {**ROWS, "expanded": lambda t: t[:1].expand(2, 12)},
            "positions": INDEX,
            "q_weight": FLOATING,
            "k_weight": FLOATING,
            "cos_sin_cache": TABLE,
            "num_q_heads": ONE,
            "num_k_heads": ONE,
            "head_dim": FLOAT,
            "eps": {**ONE, "nan": lambda value: float("nan"), "no-hash": lambda value: [value]},
            "k_eps": {**ONE, "none": lambda value: 7.5},
            "rotary_dim": {**FLOAT, "none": lambda value: 2},
        },
        ("qkv",),
    ),
    Subject(
        "kv_write",
        ops.fused_kv_norm_rope_write,
        lambda: {
            "kv": values(2, 8),
            "meta": ops.KVPoolTable([pool("k")], [pool("v")]),
            "k_norm_weights": values(1, 4),
            "cos_sin_cache": values(3, 4, dtype=torch.float32),
            "positions": ints(2),
            "locs": torch.tensor([1, 3]),
            "num_layers": 1,
            "kv_size": 4,
            "head_dim": 4,
            "eps": 1,
            "commit_lens": ints(2),
            "locs_row_width": 1,
            "rotary_dim": 4,
            "pool_rows": 4,
            "reserved_rows": 1,
        },
        {
            "kv": ROWS,
            "meta": {
                "rows": of_pool(lambda t: t[:3]),
                "row-stride": of_pool(lambda t: t.as_strided((4, 1, 4), (8, 4, 1))),
                "inner-stride": of_pool(lambda t: t.as_strided((4, 1, 4), (8, 4, 2))),
                "dtype": of_pool(lambda t: t.view(torch.float16)),
                "device": of_pool(lambda t: t.to("meta")),
                "address": of_pool(lambda t: t.as_strided((4, 1, 4), (4, 4, 1), 32)),
                "grad": of_pool(lambda t: t.clone().requires_grad_()),
                "no-layers": lambda meta: ops.KVPoolTable([], []),
                "list": lambda meta: [meta],
            },
            "k_norm_weights": {**FLOATING, **COLUMNS},
            "cos_sin_cache": TABLE,
            "positions": INDEX,
            "locs": INDEX,
            "commit_lens": {**INDEX, "none": lambda lens: None},
            "num_layers": ONE,
            "kv_size": FLOAT,
            "head_dim": FLOAT,
            "eps": ONE,
            "locs_row_width": {**ONE, "none": lambda value: None},
            "rotary_dim": FLOAT,
            "pool_rows": {**FLOAT, "another": lambda value: value + 1},
            "reserved_rows": {**ONE, "negative": lambda value: -1},
        },
        ("meta",),
    ),
    Subject(
        "kv_write",
        ops.fused_kv_norm_rope_write,
        lambda: {
            "kv": values(2, 8),
            "meta": by_pointer(),
            "k_norm_weights": values(1, 4),
            "cos_sin_cache": values(3, 4, dtype=torch.float32),
            "positions": ints(2),
            "locs": torch.tensor([1, 3]),
            "num_layers": 1,
            "kv_size": 4,
            "head_dim": 4,
            "eps": 1e-6,
            "pool_rows": 4,
        },
        {
            "meta": {
                **SHAPE,
                **DEVICE,
                **TYPE,
                "dtype": lambda t: t.to(torch.int32),
                "stride": lambda t: torch.stack([t, t], -1).flatten(-2)[..., ::2],
            }
        },
    ),
    Subject(
        "kv_write",
        ops.fused_kv_norm_rope_write,
        lambda: {
            "kv": values(1, 8),
            "meta": ops.KVPoolTable([values(4, 1, 4)[:0].clone()], [values(4, 1, 4)[:0].clone()]),
            "k_norm_weights": values(1, 4),
            "cos_sin_cache": values(3, 4, dtype=torch.float32),
            "positions": ints(1),
            "locs": -ints(1),
            "num_layers": 1,
            "kv_size": 4,
            "head_dim": 4,
            "eps": 1e-6,
        },
        {"meta": {"device-without-addresses": of_pool(lambda t: t.to("meta"))}},
    ),
    Subject(
        "state_scatter",
        ops.fused_conv_window_scatter_multi,
        lambda: {
            "pairs": [(values(1, 3, 2, 4), values(1, 2, 2, 2, 4)), (values(1, 3, 1, 2), values(1, 2, 2, 1, 2))],
            "dst_indices_raw": torch.tensor([0, 2]),
            "step_indices_raw": ints(2),
            "dst_indices2_raw": torch.tensor([1, -1]),
            "step_indices2_raw": ints(2),
        },
        {
            "pairs": {
                "fewer": lambda pairs: pairs[:1],
                "without-elements": lambda pairs: [pairs[0], (pairs[1][0][:, :, :0], pairs[1][1][:, :, :, :0])],
                "a-tensor-of-two": lambda pairs: [torch.stack([pairs[0][0], pairs[0][0]]), pairs[1]],
                "requests-that-differ": lambda pairs: [pairs[0], (pairs[1][0], pairs[1][1][:, :1])],
            },
            "dst_indices2_raw": {**INDEX, "none": lambda index: None},
            "step_indices2_raw": INDEX,
        },
        ("pairs",),
    ),
    Subject(
        "state_scatter",
        ops.scatter_mamba_states_after_mtp_verify,
        lambda: {
            "mamba_caches": SimpleNamespace(
                temporal=values(1, 3, 2, 4),
                intermediate_ssm=values(1, 2, 2, 2, 4),
                conv=[values(1, 3, 1, 2)],
                intermediate_conv_window=[values(1, 2, 2, 1, 2)],
            ),
            "state_indices_tensor": torch.tensor([0, 2]),
            "last_correct_step_indices": ints(2),
            "mamba_track_indices": torch.tensor([1, -1]),
            "mamba_steps_to_track": ints(2),
        },
        {
            "mamba_caches": {
                "no-states": lambda caches: SimpleNamespace(**{**vars(caches), "temporal": caches.temporal[:0]}),
                "windows-missing": lambda caches: SimpleNamespace(**{**vars(caches), "conv": caches.conv * 2}),
            },
            "mamba_track_indices": {"none": lambda index: None},
        },
        ("mamba_caches",),
    ),
    Subject(
        "state_scatter",
        ops.fused_mamba_state_scatter_with_mask,
        lambda: {
            "dst": values(1, 3, 2, 4),
            "src": values(1, 2, 2, 2, 4),
            "dst_indices_raw": torch.tensor([0, 2]),
            "step_indices_raw": ints(2),
            "src_indices_raw": torch.tensor([1, 0]),
        },
        {
            "dst": {
                **ROWS,
                "expanded": lambda t: t[:, :1].expand(1, 3, 2, 4),
                "no-elements": lambda t: t[:, :, :0],
            },
            "src": {**FLOATING, "stride": lambda t: torch.stack([t] * 6, -1).reshape(1, 2, 2, 4, 12)[..., ::2, ::3]},
            "dst_indices_raw": INDEX,
            "step_indices_raw": INDEX,
            "src_indices_raw": INDEX,
        },
        ("dst",),
    ),
)

FIRST_OF_EACH = tuple({subject.op: subject for subject in reversed(SUBJECTS)}.values())


def key_of(part: Any) -> Any:
    """What a case compares of an argument or a result: its bits, if it is a tensor that has any."""
    if isinstance(part, ops.KVPoolTable):
        return [key_of(tensor) for tensor in part.keys + part.values]
    if isinstance(part, SimpleNamespace):
        return key_of(tuple(vars(part).values()))
    if isinstance(part, tuple | list):
        return [key_of(one) for one in part]
    if not isinstance(part, torch.Tensor):
        return type(part).__name__
    return "meta" if part.is_meta else hashlib.sha256(to_bits(part).tobytes()).hexdigest()[:16]


def outcome(call: Callable[[], Any], written: Callable[[], Any]) -> tuple[Any, ...]:
    """Decisions and paths, the error or the result, and what is written."""
    with dispatch.observed() as outcomes:
        try:
            result = key_of(call())
        except Exception as error:
            result = f"{type(error).__name__}: {error}"
    taken = [(one.decision.op, one.decision.failed, str(one.path)) for one in outcomes]
    return taken, result, written()


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has called nothing."""
    for module in (accept, accept_commit, commit_indices, kv_write, qk_norm_rope, state_scatter):
        monkeypatch.setattr(module, "_plans", Plans())
    monkeypatch.setattr(kv_inject, "_drafts", Drafts())


def of(subject: Subject, device: torch.device, name: str = "", change: Change | None = None) -> tuple[Any, ...]:
    """The outcome of the good call, or of one with a changed argument."""
    with device:
        arguments = subject.good()
    if change is not None:
        arguments[name] = change(arguments[name])
    return outcome(
        lambda: subject.call(**arguments), lambda: [key_of(arguments[written]) for written in subject.written]
    )


CHANGES = [
    pytest.param(subject, name, change, id=f"{subject.op}/{subject.call.__name__}/{name}/{kind}")
    for subject in SUBJECTS
    for name, changes in subject.changes.items()
    for kind, change in changes.items()
]


@pytest.mark.parametrize(("subject", "name", "change"), CHANGES)
def test_a_changed_argument_ends_as_alone(
    subject: Subject, name: str, change: Change, arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    label = Label(subject.op, "plans")
    forget(monkeypatch)
    alone = of(subject, arena.device, name, change)
    forget(monkeypatch)
    good = of(subject, arena.device)
    expect_equal(label, "outcome after the good call", of(subject, arena.device, name, change), alone)
    expect_equal(label, "whether the change can be told", alone != good, True)
    expect_equal(label, "outcome of the good call after it", of(subject, arena.device), good)


def call_of(subject: Subject, device: torch.device, **options: Any) -> tuple[Any, ...]:
    """The outcome of the good call with other options than those that a key holds."""
    with device:
        arguments = subject.good()
    return outcome(
        lambda: subject.call(**arguments, **options), lambda: [key_of(arguments[name]) for name in subject.written]
    )


@pytest.mark.parametrize("broken", MACHINE)
@pytest.mark.parametrize("subject", FIRST_OF_EACH, ids=lambda subject: subject.op)
def test_another_machine_has_plans_of_its_own(
    subject: Subject, broken: str, arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    label = Label(subject.op, "plans")
    forget(monkeypatch)
    with machine.injected(**MACHINE[broken]):
        alone = call_of(subject, arena.device)
    forget(monkeypatch)
    good = call_of(subject, arena.device)
    with machine.injected(**MACHINE[broken]):
        expect_equal(label, "outcome on a machine that was injected", call_of(subject, arena.device), alone)
    expect_equal(label, "outcome on this machine again", call_of(subject, arena.device), good)
    expect_equal(label, "whether the machines can be told apart", alone != good, True)


@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda subject: f"{subject.op}/{subject.call.__name__}")
def test_a_path_is_no_part_of_a_plan(subject: Subject, arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every way to ask, in turn, on one plan: each call is decided, counted and computed as if it were the first."""
    label = Label(subject.op, "plans")
    asked = [None, "eager", "fused", "auto", "quick"]
    alone = []
    for path in asked:
        forget(monkeypatch)
        alone.append(call_of(subject, arena.device, path=path))
    forget(monkeypatch)
    dispatch.reset()
    together = [call_of(subject, arena.device, path=path) for path in asked]
    expect_equal(label, "outcomes of one plan", together, alone)
    rows = {(str(row.path), row.reason): count for row, count in dispatch.census().items()}
    if subject in FIRST_OF_EACH:  # pools by pointer have no eager path
        expect_equal(label, "census", rows, {("fused", "eligible"): 3, ("eager", "requested"): 1})


@pytest.mark.parametrize("subject", FIRST_OF_EACH, ids=lambda subject: subject.op)
def test_the_second_call_is_counted_and_warned_about_as_the_first(
    subject: Subject, arena: Arena, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    label = Label(subject.op, "plans")
    forget(monkeypatch)
    dispatch.reset()
    with machine.injected(**MACHINE["no-triton"]), caplog.at_level(logging.WARNING, "dspark"):
        first, second = (call_of(subject, arena.device) for _ in range(2))
    expect_equal(label, "outcome of the second call", second, first)
    row = dispatch.CensusKey(subject.op, dispatch.Path.EAGER, "no-triton")
    expect_equal(label, "census", dispatch.census(), {row: 2})
    expect_equal(label, "warnings", len(caplog.records), 1)
    with machine.injected(**MACHINE["no-triton"]), dispatch.forced("fused"):
        refused = call_of(subject, arena.device)
    expect_equal(label, "error in strict mode", str(refused[1]).partition(":")[0], "FallbackError")
    expect_equal(label, "census after a refused call", dispatch.census(), {row: 2})


def test_windows_have_four_dimensions_whatever_was_scattered_before(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The two entries differ in nothing else."""
    label = Label("state_scatter", "plans")
    forget(monkeypatch)
    with arena.device:
        arguments = (values(1, 3, 4), values(1, 2, 2, 4), ints(2), -ints(2))
    ops.fused_mamba_state_scatter_with_mask(*arguments)
    need = ["dst", "4 dimensions"]
    expect_raises(label, ValueError, need, lambda: ops.fused_conv_window_scatter_with_mask(*arguments))


# --- kv_inject: what it reads of the draft and the pool at each call -------------------------------------------------

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
    """The same memory, which another storage begins at."""
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
    "valid-none": setting(lambda rig: rig.pool, "valid_rows", None),
    "q-size-float": setting(FIRST, "q_size", float(ROWS_OF.shape.q_heads * ROWS_OF.shape.head_dim)),
    "kv-size-float": setting(FIRST, "kv_size", float(ROWS_OF.shape.kv_heads * ROWS_OF.shape.head_dim)),
    "head-dim-float": setting(FIRST, "head_dim", float(ROWS_OF.shape.head_dim)),
    "eps-bool": eps_of_all(True),
    "eps": eps_of_all(3.0),
    "rotary-dim-float": setting(ROTARY, "rotary_dim", 16.0),
    "rotary-dim": setting(ROTARY, "rotary_dim", 8),
    "rotary-not-whole": setting(ROTARY, "table_is_whole_effect", False),
    **{f"table-{kind}": table(TABLE[kind]) for kind in ("columns", "stride", "dtype", "device", "type")},
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
    if change != "buffer-address":  # the new buffer ends as the old one would
        expect_equal(label, "whether the change can be told", alone != good[0], True)


class SubclassedNorm(RMSNorm):
    """A norm that could answer for its attributes in a way of its own."""

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name)


UNREAD: dict[str, Callable[[Rig], None]] = {
    "two-rotaries-with-one-table": lambda rig: setattr(rig.last, "rotary_emb", copy.copy(rig.rotary)),
    "a-class-that-answers-itself": setting(NORM, "__class__", SubclassedNorm),
}


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
