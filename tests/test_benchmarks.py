"""The benchmarks but for the timing itself, which needs a GPU: inputs, judgement, bytes, targets, report, arguments."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from benchmarks import __main__ as bench
from benchmarks import judging, picture, report, runner, table, targets, timing, tune, without_gpu
from benchmarks.case import Absent, Asked, Case, Contender, Inputs, Peer
from benchmarks.ops import (
    OPS,
    accept,
    accept_commit,
    commit_indices,
    kv_write,
    qk_norm_rope,
    state_scatter,
    write_target_hidden_kv,
)
from benchmarks.timing import Timing, copies_for, summarise
from dspark import faults
from dspark.ops.launch import Launch
from dspark.ops.qk_norm_rope import kernel as qk_kernel

ROOT = Path(__file__).resolve().parent.parent
CPU = torch.device("cpu")
TINY: dict[str, list[Case]] = {
    "qk_norm_rope": qk_norm_rope.cases((3,), qk_norm_rope.SMALL),
    "kv_write": kv_write.cases((3,), kv_write.SMALL),
    "state_scatter": state_scatter.cases((2,), state_scatter.SMALL),
    "accept": accept.cases((4,)),
    "commit_indices": commit_indices.cases((4,)),
    "accept_commit": accept_commit.cases((4,)),
    "write_target_hidden_kv": write_target_hidden_kv.cases((3,), write_target_hidden_kv.SMALL),
}
BOTH = Asked(frozenset({"eager"}))
EVERY = [pytest.param(case, id=case.name) for cases in TINY.values() for case in cases]


def inputs_of(case: Case) -> Inputs:
    torch.manual_seed(1)
    return case.build(CPU, 2)


# Bytes, by hand.


@pytest.mark.parametrize(
    ("case", "need"),
    [
        # 40 heads of 128 bf16 read and written; 128 fp32 of the table and a position; two weights of 128 bf16.
        (qk_norm_rope.cases((8,))[0], 8 * (40 * 128 * 2 * 2 + 128 * 4 + 8) + 2 * 128 * 2),
        (qk_norm_rope.cases((8,))[1], 8 * (80 * 64 * 2 * 2 + 64 * 4 + 8) + 2 * 64 * 2),
        # Five layers of K and V, eight heads of 128 bf16 each, read and written; table, position, loc; weights.
        (kv_write.cases((8,))[0], 8 * (5 * 2 * 8 * 128 * 2 * 2 + 128 * 4 + 8 + 8) + 5 * 128 * 2),
        # 18,432 channels of three bf16 in 66 layers, read and written; slot and step int32.
        (state_scatter.cases((8,))[0], 8 * (66 * 18_432 * 3 * 2 * 2 + 8)),
        # 10,240 rows of ten bf16 read whole, windows of three written, 60 layers.
        (state_scatter.cases((8,))[1], 8 * (60 * 10_240 * (10 * 2 + 3 * 2) + 8)),
        # Seven drafts and eight targets int64; count int32, bonus int64.
        (accept.cases((8,))[0], 8 * (7 * 8 + 8 * 8 + 4 + 8)),
        # Accept length int32, length, one node, two steps.
        (commit_indices.cases((8,))[0], 8 * (4 + 8 + 8 + 16)),
        # Seven drafts, eight targets, a length; a count int32, five results int64.
        (accept_commit.cases((8,))[0], 8 * (7 * 8 + 8 * 8 + 8 + 4 + 5 * 8)),
        # 10,240 weight rows of 6,144; hidden rows; five layers of 2 x 16 heads of 64 written; table, position, loc.
        (
            write_target_hidden_kv.cases((8,))[0],
            10_240 * 6144 * 2 + 8 * (6144 * 2 + 5 * 2 * 1024 * 2 + 64 * 4 + 16),
        ),
    ],
    ids=lambda value: value.name if isinstance(value, Case) else "",
)
def test_bytes_that_must_move(case: Case, need: int) -> None:
    assert case.floor_bytes == need


def test_sectors_of_shared_rows_are_counted_whole() -> None:
    one = state_scatter.Shape("", 1, (5,), 3, True)
    assert one.source_bytes() == 128  # 5 rows of 20 bytes are 100 bytes: four sectors
    assert state_scatter.Shape("", 1, (5,), 3, False).source_bytes() == 30


# Inputs and judgement.


@pytest.mark.parametrize("case", EVERY)
def test_every_path_of_dspark_is_right_on_the_inputs_of_the_benchmark(case: Case) -> None:
    inputs = inputs_of(case)
    inputs.reset()
    need = inputs.reference()
    judged = [one for one in inputs.contenders(BOTH) if isinstance(one, Contender) and one.judged]
    between = ["separate"] if case.op == "accept_commit" else []
    assert [one.name for one in judged] == ["fused", *between, "eager"]
    for contender in judged:
        assert len(contender.calls) == 2
        got = runner.result_of(inputs, contender)
        assert inputs.judge(got) == ""
        assert inputs.compare(got, need) == ""


@pytest.mark.parametrize("at", [0, -1], ids=["first", "last"])
@pytest.mark.parametrize("case", EVERY)
def test_a_wrong_element_is_called_wrong_by_the_oracle_and_by_the_comparison(case: Case, at: int) -> None:
    inputs = inputs_of(case)
    inputs.reset()
    need = inputs.reference()
    for name, right in need.items():
        if not right.dim():
            continue
        got = {**need, name: right.clone()}
        flat = got[name].reshape(-1)
        assert flat.data_ptr() == got[name].data_ptr()
        flat[at] = 77 if flat.dtype != torch.bfloat16 else flat[at] * 2 + 3
        assert inputs.judge(got), name
        assert inputs.compare(got, need), name


@pytest.mark.parametrize("case", EVERY)
def test_a_contender_that_does_nothing_is_wrong(case: Case) -> None:
    inputs = inputs_of(case)
    inputs.reset()
    need = inputs.reference()
    returned: dict[str, Any] = {"accept": (torch.zeros(4, dtype=torch.int32), torch.zeros(4, dtype=torch.int64))}
    returned["commit_indices"] = (torch.full((4,), -1), torch.full((4,), -1))
    if case.op == "accept_commit":
        blank = [torch.full((4,), -1, dtype=value.dtype) for value in need.values()]
        returned["accept_commit"] = accept_commit.AcceptCommit(*blank)
    got = runner.result_of(inputs, Contender("idle", [lambda: returned.get(case.op)]))
    assert inputs.judge(got)
    assert inputs.compare(got, need)


@pytest.mark.parametrize("op", ["kv_write", "state_scatter", "write_target_hidden_kv"])
def test_a_write_beside_the_slots_is_seen(op: str) -> None:
    inputs: Any = inputs_of(TINY[op][0])
    inputs.reset()
    need = inputs.reference()
    destination = inputs.pairs[0][0] if op == "state_scatter" else inputs.pools.keys[0]
    destination[:, 0] = 1 if op == "state_scatter" else destination[:, 0]
    if op != "state_scatter":
        destination[0] = 1  # no copy has slot 0
    got = inputs.outputs(None)
    assert "other" in inputs.judge(got)
    assert "other" in inputs.compare(got, need)


def test_values_that_differ_but_are_admissible_are_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    heads = torch.randn(2, 3, 8).bfloat16()
    other = heads.clone()
    other[1, 2, 0] += 1
    arguments = (heads, torch.ones(8).bfloat16(), 1e-6, torch.zeros(2, 8))
    seen: list[int] = []

    def outside(out: torch.Tensor, *_: Any) -> int:
        seen.append(len(out))
        return 0

    monkeypatch.setattr(judging, "outside", outside)
    assert judging.judge_different("K", other, heads, *arguments) == ""
    assert seen == [1]
    monkeypatch.setattr(judging, "outside", lambda *_: 5)
    assert "5 elements of 1 judged heads are inadmissible; 1 of 6" in judging.judge_different(
        "K", other, heads, *arguments
    )


def test_copies_differ_and_their_slots_are_distinct() -> None:
    inputs: Any = kv_write.cases((5,), kv_write.SMALL)[0].build(CPU, 3)
    slots = inputs.pools.locs.reshape(-1).tolist()
    assert len(set(slots)) == 15
    assert min(slots) == 1
    assert not torch.equal(inputs.kv[0], inputs.kv[1])
    states: Any = state_scatter.cases((4,), state_scatter.SMALL)[0].build(CPU, 8)
    assert sorted(states.steps[:, 0].tolist()) == list(range(8))
    assert len(set(states.slots.reshape(-1).tolist())) == 32


def test_shared_rows_are_views_and_dense_windows_are_not() -> None:
    dense, shared = (case.build(CPU, 2) for case in TINY["state_scatter"])
    for _, src in dense.pairs:  # type: ignore[attr-defined]
        assert src.is_contiguous()
    for _, src in shared.pairs:  # type: ignore[attr-defined]
        assert src.stride()[2:] == (1, 10, 1)


def test_positions_are_windows_inside_the_table() -> None:
    inputs: Any = qk_norm_rope.cases((20,), qk_norm_rope.SMALL)[0].build(CPU, 2)
    rows = inputs.positions
    assert torch.equal(rows[:, 1:8] - rows[:, :7], torch.ones(2, 7, dtype=torch.int64))
    assert int(rows.max()) < inputs.table.shape[0]


# Who competes.


def peer(**functions: Callable[..., Any]) -> Peer:
    return Peer("sglang 9", functions, "")


def test_a_contender_that_cannot_run_is_there_with_its_reason() -> None:
    inputs = inputs_of(TINY["state_scatter"][0])
    found = inputs.contenders(Asked(frozenset({"sglang", "compile"}), peer(other=print)))
    absent = {one.name: one.reason for one in found if isinstance(one, Absent)}
    assert absent["sglang"] == "sglang 9 has no fused_conv_window_scatter_multi"
    assert absent["sglang-per-pair"] == "sglang 9 has no fused_conv_window_scatter_with_mask"
    assert "arithmetic" in absent["compile"]
    step = inputs_of(TINY["accept_commit"][0])
    half = step.contenders(Asked(frozenset({"sglang"}), peer(fused_commit_track_indices=print)))[-1]
    assert isinstance(half, Absent)
    assert half.reason == "sglang 9 has no compute_dflash_correct_drafts_and_bonus"
    alone = inputs.contenders(Asked(frozenset({"sglang"}), Peer(reason="not installed")))
    assert {one.reason for one in alone if isinstance(one, Absent)} == {"not installed"}


def test_the_compiler_is_tried_at_some_sizes_only() -> None:
    asked = Asked(frozenset({"compile"}))
    made: list[int] = []
    absent = asked.compiled(lambda: made.append(1) or [], 64)
    assert isinstance(absent[0], Absent)
    assert made == []
    present = asked.compiled(lambda: [print], 512)
    assert isinstance(present[0], Contender)
    assert Asked().compiled(lambda: [print], 512) == []


def test_per_pair_calls_once_for_each_type() -> None:
    calls: list[Any] = []
    pairs = [(torch.zeros(1), torch.ones(1)), (torch.zeros(2), torch.ones(2))]
    state_scatter.each(lambda *given: calls.append(given), pairs, "slots", "steps")
    assert [(dst.numel(), rest) for dst, _, *rest in calls] == [(1, ["slots", "steps"]), (2, ["slots", "steps"])]


# Timing, as far as it goes without a GPU.


def test_median_and_percentiles() -> None:
    found = summarise([float(value) for value in range(101)], 4)
    assert (found.median, found.p10, found.p90, found.calls, found.samples) == (50, 10, 90, 4, 101)
    with pytest.raises(ValueError, match="samples"):
        summarise([], 1)


@pytest.mark.parametrize(("size", "need"), [(1, 256), (1000, 6), (999, 7), (10**9, 2), (0, 256)])
def test_copies_pass_the_cache_three_times(size: int, need: int) -> None:
    assert copies_for(size, 2000) == need


class FakeCuda:
    """Enough of torch.cuda for a clock: a call takes 10 us on the device and 4 us on the host."""

    def __init__(self) -> None:
        self.device_us = self.host_us = 0.0
        self.captured = self.capturing = 0
        self.slept = False

    def call(self) -> None:
        self.host_us += 4
        if self.capturing:
            self.captured += 1
        else:
            self.device_us += 10

    @contextlib.contextmanager
    def graph(self, _: Any) -> Iterator[None]:
        self.capturing, self.captured = 1, 0
        yield
        self.capturing = 0

    def CUDAGraph(self) -> Any:  # noqa: N802
        def replay() -> None:
            assert self.slept, "the first replay would wait for the host"
            self.device_us += 10 * self.captured

        return SimpleNamespace(replay=replay, reset=lambda: None)

    def Event(self, enable_timing: bool) -> Any:  # noqa: N802
        event = SimpleNamespace(at=0.0)
        event.record = lambda: setattr(event, "at", self.device_us)
        event.elapsed_time = lambda other: (other.at - event.at) / 1e3
        return event

    def _sleep(self, cycles: int) -> None:
        self.slept = True
        self.device_us += cycles

    def synchronize(self) -> None:
        self.host_us = self.device_us = max(self.host_us, self.device_us)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    monkeypatch.setattr(timing, "torch", SimpleNamespace(cuda=fake))
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: fake.host_us * 1e-6))
    return fake


def test_replays_are_divided_by_the_calls_of_the_graph(cuda: FakeCuda) -> None:
    found = timing.time_graph([cuda.call] * 3)
    assert (found.median, found.p10, found.p90) == pytest.approx((10, 10, 10))
    assert found.calls == cuda.captured == 18  # whole passes, at least 16 calls
    assert found.samples == 100
    assert timing.time_graph([cuda.call] * 2000).samples == 20


def test_plain_calls_wait_for_the_device_and_the_host_does_not(cuda: FakeCuda) -> None:
    plain = timing.time_plain([cuda.call] * 2)
    assert (plain.calls, plain.samples) == (200, 5)
    assert plain.median == pytest.approx(10)
    assert timing.time_plain([lambda: cuda._sleep(10**6)]).calls == 10
    host = timing.time_host([cuda.call] * 2)
    assert (host.calls, host.samples) == (8, 40)
    assert host.median == pytest.approx(4)


# A run, with a clock that is not one.


def fake_clock(calls: Sequence[Callable[[], object]], *_: Any, **__: Any) -> Timing:
    start = time.perf_counter()
    calls[0]()
    elapsed = (time.perf_counter() - start) * 1e6
    return Timing(elapsed, elapsed * 0.9, elapsed * 1.1, 1, 20)


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A run of two tiny operations, one contender of which is wrong and one of which raises."""
    for name in ("time_graph", "time_plain", "time_host"):
        monkeypatch.setattr(runner, name, fake_clock)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(runner.Plan, "cases", lambda _, op: TINY[op.NAME])
    for name in ("accept", "commit_indices"):
        monkeypatch.setattr(OPS[name], "small", functools.partial(TINY.__getitem__, name))

    def wrong(**given: torch.Tensor) -> Any:
        return given["candidates"][:, 0].to(torch.int32), given["candidates"][:, 0]

    def raising(*_: Any) -> Any:
        raise RuntimeError("no such kernel\nand more")

    functions = peer(compute_dflash_correct_drafts_and_bonus=wrong, fused_commit_track_indices=raising)
    plan = runner.Plan(("accept", "commit_indices"), asked=Asked(frozenset({"eager", "sglang"}), functions))
    kept: list[int] = []
    on = runner.Device(CPU, 1 << 20, 1e12)
    found = runner.run(plan, on, lambda _: None, lambda part: kept.append(len(part["measurements"])))
    assert kept == [3, 6, 6]
    versions = {"gpu": "none", "torch": "2"}
    return {"kind": "bench", "date": "d", "command": "c", "peer": "p", "versions": versions, **found}


def test_a_run_keeps_wrong_and_failing_contenders(record: dict[str, Any]) -> None:
    status = {(row["op"], row["contender"]): row["status"] for row in record["measurements"]}
    assert status == {
        ("accept", "fused"): "ok",
        ("accept", "eager"): "ok",
        ("accept", "sglang"): "wrong",
        ("commit_indices", "fused"): "ok",
        ("commit_indices", "eager"): "ok",
        ("commit_indices", "sglang"): "failed",
    }
    assert {(row["op"], row["contender"]): row["status"] for row in record["checks"]} == status
    last = record["measurements"][-1]
    assert last["reason"] == "RuntimeError: no such kernel"
    assert "graph" not in last
    assert [("again" in row) for row in record["measurements"]] == [True, False, False] * 2
    assert record["measurements"][0]["floor_us"] == pytest.approx(4 * 132 / 1e12 * 1e6)
    said = "\n".join(table.lines(record))
    assert "WRONG accept W8 4 sglang" in said
    assert "FAILED commit_indices W8 commit+track 4 sglang: RuntimeError: no such kernel" in said


def test_a_rivals_wrong_result_is_no_win(record: dict[str, Any]) -> None:
    found = {(v.op, v.what): v for v in targets.verdicts(record["measurements"])}
    assert found["accept", "sglang / fused"].note == "the result of sglang is wrong"
    assert found["commit_indices", "sglang / fused"].status == "unmeasured"
    assert found["commit_indices", "sglang / fused"].note == "RuntimeError: no such kernel"


def test_compiling_stops_when_the_run_has_taken_long(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("time_graph", "time_plain", "time_host"):
        monkeypatch.setattr(runner, name, fake_clock)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(runner.Plan, "cases", lambda _, op: TINY[op.NAME])
    monkeypatch.setattr(accept, "small", list)
    plan = runner.Plan(("accept",), asked=Asked(frozenset({"compile"})), compile_seconds=0.0, growth=False)
    rows = runner.run(plan, runner.Device(CPU, 1, 1e12), lambda _: None, lambda _: None)["measurements"]
    assert [(row["contender"], row["status"]) for row in rows] == [("fused", "ok"), ("compile", "absent")]
    assert "0 seconds" in rows[1]["reason"]


def test_a_fault_that_timed_calls_report_fails_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def faulting(calls: Sequence[Callable[[], object]]) -> Timing:
        found = fake_clock(calls)
        faults.set_where(torch.tensor([True]), 1)  # as a kernel on a GPU does, which raises nothing
        return found

    monkeypatch.setattr(runner, "time_graph", fake_clock)
    monkeypatch.setattr(runner, "time_plain", fake_clock)
    monkeypatch.setattr(runner, "time_host", faulting)
    (found,) = runner.measured(TINY["accept"][0], Asked(frozenset()), runner.Device(CPU, 1, 1e12))
    assert found["status"] == "failed"
    assert found["reason"].startswith("IndexFaultError: ")


# Targets and report, from a record that is written by hand.


def row(op: str, shape: str, size: int, contender: str, us: float, host: float | None = None, **more: Any) -> Any:
    def timed(value: float | None) -> Any:
        return value and {"median": value, "p10": value, "p90": value, "calls": 16, "samples": 20}

    return {
        "op": op,
        "shape": shape,
        "axis": "rows",
        "size": size,
        "floor_bytes": size * 1000,
        "counted": "bytes",
        "floor_us": size / 10,
        "copies": 2,
        "contender": contender,
        "status": "ok",
        "reason": "",
        "graph": timed(us),
        "plain": timed(us + 1),
        "host": timed(host),
        "before_launch": timed(host),
        **more,
    }


WRITTEN = [
    row("kv_write", "A", 8, "fused", 2.0, again={"median": 2.1}),
    row("kv_write", "A", 8, "sglang", 4.4, 5.0),
    row("kv_write", "A", 16384, "fused", 1800.0),
    row("kv_write", "A", 16384, "sglang", 3900.0),
    row("kv_write", "A", 512, "fused", 10.0),
    row("kv_write", "A", 512, "compile", 14.9),
    row("kv_write", "A", 64, "fused", 9.0, status="wrong", reason="V: 1 of 2 elements differ"),
    row("kv_write", "A", 64, "sglang", 90.0),
    row("state_scatter", "B", 1, "fused", 5.0),
    row("state_scatter", "B", 1, "sglang", 11.0),
    row("state_scatter", "B", 1, "sglang-per-pair", 4.0),
    row("accept", "C", 8, "fused", 1.0, 4.1),
    row("write_target_hidden_kv", "D", 8, "fused", 106.0, 15.0, extra={"allocated_bytes": 7, "weight_bytes": 12345}),
    row("write_target_hidden_kv", "D", 8, "projection", 100.0),
    row("qk_norm_rope", "Inkling", 4096, "fused", 0.5),
    row("qk_norm_rope", "Inkling", 4096, "sglang", 4.0),
    row("qk_norm_rope", "other", 4096, "fused", 1.0),
    row("qk_norm_rope", "other", 4096, "sglang", 0.9),
]
HAND: dict[str, Any] = {
    "kind": "bench",
    "date": "2026-11-30",
    "command": "dspark bench",
    "versions": {"gpu": "Some GPU", "torch": "2.11"},
    "peer": "sglang 9",
    "copy_rate": 1e10,
    "l2_bytes": 60 << 20,
    "seconds": 100.0,
    "checks": [{"op": "accept", "shape": "C", "size": 64, "contender": "fused", "status": "ok", "reason": ""}],
    "measurements": WRITTEN,
    "growth": [row("qk_norm_rope", "x D64", size, "fused", size / 4) for size in (1, 4, 16)],
}


@pytest.mark.parametrize(
    ("op", "shape", "size", "what", "value", "status"),
    [
        ("kv_write", "A", 8, "sglang / fused", 2.2, "met"),
        ("kv_write", "A", 16384, "sglang / fused", 2.167, "missed"),
        ("kv_write", "A", 16384, "share of the copy rate", 0.910, "met"),
        ("kv_write", "A", 512, "compile / fused", 1.49, "missed"),
        ("kv_write", "A", 512, "sglang / fused", None, "unmeasured"),
        ("kv_write", "A", 64, "sglang / fused", 10.0, "missed"),
        ("state_scatter", "B", 1, "sglang or sglang-per-pair / fused", 0.8, "missed"),
        ("state_scatter", "B", 1, "sglang / fused", 2.2, "met"),
        ("accept", "C", 8, "host microseconds before the launch", 4.1, "missed"),
        ("write_target_hidden_kv", "D", 8, "host microseconds before the launch", 15.0, "met"),
        ("write_target_hidden_kv", "D", 8, "projection / fused", 100 / 106, "met"),
        ("qk_norm_rope", "Inkling", 4096, "sglang / fused", 8.0, "met"),
        ("qk_norm_rope", "other", 4096, "sglang / fused", 0.9, "missed"),
    ],
)
def test_targets(op: str, shape: str, size: int, what: str, value: float | None, status: str) -> None:
    found = [v for v in targets.verdicts(WRITTEN) if (v.op, v.shape, v.size, v.what) == (op, shape, size, what)]
    assert status in {verdict.status for verdict in found}
    assert len({verdict.status for verdict in found}) == 1
    assert found[0].value == (None if value is None else pytest.approx(value, rel=1e-3))


def test_the_ratio_of_eight_is_asked_of_the_inkling_shape_only() -> None:
    needs = {(v.shape, v.need) for v in targets.verdicts(WRITTEN) if v.op == "qk_norm_rope" and "sglang /" in v.what}
    assert needs == {("Inkling", 8.0), ("Inkling", 1.0), ("other", 1.0)}


def test_the_report_has_every_figure_and_every_reason(tmp_path: Path) -> None:
    place = tmp_path / "record.json"
    place.write_text(json.dumps(HAND))
    assert report.main([str(place), "--folder", str(tmp_path)]) == 0
    text = (tmp_path / "README.md").read_text()
    for expected in (
        "| 8 | 0.80 | 2.00 (2.00-2.00) | 4.40 (4.40-4.40) | - | 40% |",
        "| 8: 2.20, 16384: 2.17, 64: 10.00 | **missed at 16384, 64** (",
        "fused is wrong: V: 1 of 2 elements differ)",
        "- fused at 64: wrong: V: 1 of 2 elements differ",
        "The weights that a copy would take:\n12,345.",
        "| accept, C, 64 | ok |",
        "copy rate 0.01 TB/s (read plus written), L2 60 MiB",
        "fused, timed again after its contenders: 5.0% away from the first time in the median, 5.0% at most",
        "![growth](pictures/growth.svg)",
        "| 8 | 3.00 | 5.40 / 5.00 | - |",
    ):
        assert expected in text, expected
    for name in (report.GROWTH, report.BANDWIDTH):
        assert f"pictures/{name}" in text
        drawn = ElementTree.parse(tmp_path / "pictures" / name).getroot()
        assert drawn.tag.endswith("svg")


def test_the_report_refuses_what_is_no_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = tmp_path / "record.json"
    assert report.main([str(place)]) == 2
    place.write_text("{")
    assert report.main([str(place)]) == 2
    place.write_text('{"kind": "bench", "suite": []}')
    assert report.main([str(place)]) == 2
    assert "not the record of a run on a GPU" in capsys.readouterr().err


def test_the_committed_page_is_the_one_that_its_records_give(tmp_path: Path) -> None:
    assert report.main(["--folder", str(tmp_path)]) == 0
    for made in tmp_path.rglob("*.*"):
        assert (ROOT / "benchmarks" / made.relative_to(tmp_path)).read_text() == made.read_text()
    assert len(list(tmp_path.rglob("*.*"))) == 3


def test_an_operation_has_its_figures_from_the_last_run_that_has_any() -> None:
    later = {
        **HAND,
        "date": "2026-12-31",
        "copy_rate": 2e10,
        "checks": [],
        "measurements": [row("kv_write", "A", 8, "fused", 1.0), row("kv_write", "A", 8, "compile", 3.25)],
        "growth": [],
    }
    text = report.page(report.joined([HAND, later]))
    assert "## The run of state_scatter, accept, write_target_hidden_kv, qk_norm_rope\n" in text
    assert "## The run of kv_write\n\n- 2026-12-31" in text
    assert "3.25 (3.25-3.25)" in text
    assert "| accept, C, 64 | ok |" in text
    assert "- copy rate 0.02 TB/s" in text
    assert "4.40" not in text
    assert "V: 1 of 2" not in text
    assert text.count("## kv_write") == 1


def test_a_chart_places_points_on_logarithmic_axes() -> None:
    across = picture.axis("", [1.0, 1000.0], 100.0, 400.0)
    assert [across.at(value) for value in (1, 10, 100, 1000)] == pytest.approx([100, 200, 300, 400])
    assert list(across.ticks()) == [1, 10, 100, 1000]
    text = picture.chart("a < b", "x", "y", [picture.Series("s", [(1, 10), (1000, 10)], 0)])
    root = ElementTree.fromstring(text)
    centres = [float(one.get("cx", 0)) for one in root.iter("{http://www.w3.org/2000/svg}circle")]
    assert centres == pytest.approx([picture.LEFT, picture.WIDTH - picture.RIGHT])
    assert "prefers-color-scheme: dark" in text
    with pytest.raises(ValueError, match="no points"):
        picture.chart("", "", "", [])


# Tuning.


def test_one_knob_is_turned_at_a_time_until_nothing_helps() -> None:
    times = {(1, 1): 100.0, (2, 1): 90.0, (4, 1): None, (2, 2): 50.0, (1, 2): 95.0, (4, 2): 49.9}
    seen: list[tuple[int, int]] = []

    def measure(values: dict[str, Any]) -> float | None:
        seen.append((values["a"], values["b"]))
        return times[seen[-1]]

    best, us, tried = tune.descend({"a": 1, "b": 1}, {"a": (1, 2, 4), "b": (1, 2), "c": (1,)}, measure)
    assert best == {"a": 2, "b": 2}
    assert us == 50.0  # 49.9 is no gain
    assert len(seen) == len(set(seen)) == len(tried)


@pytest.mark.parametrize("op", list(tune.SPACES))
def test_knobs_are_those_of_the_kernels(op: str) -> None:
    space = tune.SPACES[op]
    present = space.current(4096)
    assert {"elements", "heads", "warps"} <= set(present) or "GPU_TILE" in present
    knob = next(iter(present))
    with space.applied(present | {knob: 64}):
        assert space.current(1)[knob] == space.current(10**6)[knob] == 64
    assert space.current(4096) == present


def test_a_tile_is_not_timed_with_the_launch_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    case = TINY["qk_norm_rope"][0]
    (contender, *_) = case.build(CPU, 1).contenders(Asked(frozenset()))
    warps = []
    monkeypatch.setattr(Launch, "_specialised", lambda launch, *_: warps.append(launch.options["num_warps"]))
    monkeypatch.setattr(qk_kernel, "tile_for", lambda rows, tiles, interpreter: tiles[-1])
    space = tune.Space("dspark.ops.qk_norm_rope.kernel", {"warps": (1, 4)}, "GPU_TILES")
    for count in (1, 8, 2):
        with space.applied({"warps": count}):
            contender.calls[0]()  # type: ignore[union-attr]
    assert warps == [1, 8, 2]


def test_tiles_are_judged_before_they_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    case = TINY["qk_norm_rope"][0]
    monkeypatch.setattr(tune, "time_graph", lambda calls: Timing(5.0, 5.0, 5.0, 1, 20))
    space = tune.Space("dspark.ops.qk_norm_rope.kernel", {"warps": (1, 4)}, "GPU_TILES")
    found = tune.tuned(case, space, runner.Device(CPU, 1, 1e12))
    assert (found["best_us"], len(found["tried"]), found["problems"]) == (5.0, 2, [])
    monkeypatch.setattr(qk_norm_rope.QkInputs, "compare", lambda *_: "wrong")
    found = tune.tuned(case, space, runner.Device(CPU, 1, 1e12))
    assert (found["best_us"], found["present_us"]) == (None, None)
    assert found["problems"][0].endswith(": wrong")
    assert "- us" in tune.line(found)


def test_tuning_needs_a_gpu_and_a_known_shape(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        tune.main(["kv_write", "--shape", "nothing"])
    assert "need the beginning of one of ['L5 NK8 D128']" in capsys.readouterr().err
    if not torch.cuda.is_available():
        assert tune.main(["kv_write"]) == 2
        assert "no CUDA device" in capsys.readouterr().err


# The command.


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--op", "nothing"], "need names out of qk_norm_rope"),
        (["--against", "vllm"], "need names out of sglang"),
        (["--rows", "8,x"], "need sizes of at least 1"),
        (["--batches", "0"], "need sizes of at least 1"),
        (["--op", ","], "need names out of"),
    ],
)
def test_bad_arguments_are_refused(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        bench.main(arguments)
    assert error.value.code == 2
    assert said in capsys.readouterr().err


def test_quick_leaves_out_what_takes_long() -> None:
    quick = bench.plan_of(bench.parser().parse_args(["--quick", "--sglang", "/nowhere"]))
    assert (quick.rows, quick.batches, quick.growth) == ((8, 4096), (8,), False)
    assert quick.asked.against == {"sglang", "eager"}
    assert quick.asked.peer.reason == "sglang=/nowhere: no sglang package there"
    whole = bench.plan_of(bench.parser().parse_args(["--op", "accept,kv_write", "--against", "eager,compile"]))
    assert (whole.ops, whole.rows, whole.growth) == (["accept", "kv_write"], None, True)
    assert whole.asked.against == {"eager", "compile"}


def test_without_a_gpu_the_suite_is_timed_and_it_says_so(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "dspark.cli", "bench", "--op", "accept", "--quick", "--json", str(tmp_path / "r")]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "CUDA_VISIBLE_DEVICES": ""}
    environment.pop("PYTEST_ADDOPTS", None)
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "only the suite itself is timed" in done.stdout
    data = json.loads((tmp_path / "r").read_text())
    (found,) = data["suite"]
    assert (found["op"], found["status"], found["failures"]) == ("accept", "ok", 0)
    assert found["cases"] > 5
    assert found["seconds"] > 0
    assert data["command"].startswith("dspark bench --op accept --quick")


def test_every_operation_has_case_files_that_exist() -> None:
    assert set(without_gpu.CASES) == set(OPS)
    for names in without_gpu.CASES.values():
        for name in names:
            assert (ROOT / "conformance" / "cases" / name).is_file()


def test_timing_names_its_limits() -> None:
    assert timing.REPLAYS[0] >= 20
    assert timing.HOST_BURST <= 16


def test_nothing_is_launched_and_everything_before_it_is_done() -> None:
    """Without launches a window keeps its bits, bad arguments are refused all the same, and products are made once."""
    from benchmarks.unlaunched import without_launches
    from dspark.ops import compute_dflash_correct_drafts_and_bonus, table_qk_norm_rope_

    qkv = torch.ones(2, 12, dtype=torch.bfloat16)
    weight, table, index = torch.ones(4), torch.ones(3, 4), torch.zeros(2, dtype=torch.int64)
    with without_launches():
        table_qk_norm_rope_(qkv, index, weight, weight, table, 1, 1, 4, 1e-6, path="fused")
        assert compute_dflash_correct_drafts_and_bonus(candidates=index[None], target_predict=index[None]) is None
        with pytest.raises(ValueError, match="head_dim"):
            table_qk_norm_rope_(qkv, index, weight, weight, table, 1, 1, 0, 1e-6)
        first = torch.bmm(torch.ones(1, 2, 2), torch.ones(1, 2, 2))
        assert torch.bmm(torch.zeros(1, 2, 2), torch.ones(1, 2, 2)) is first
    assert (qkv == 1).all()
    assert (torch.bmm(torch.zeros(1, 2, 2), torch.ones(1, 2, 2)) == 0).all()
    table_qk_norm_rope_(qkv, index, weight, weight, 3 * table, 1, 1, 4, 1e-6, path="fused")
    assert (qkv[:, :8] != 1).any()
