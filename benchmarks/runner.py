"""A run: every case with every contender, judged, then timed; what cannot run is kept with its reason."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch

from dspark import faults

from .case import AGAINST, COMPILE, FUSED, SGLANG, Absent, Asked, Case, Contender, Inputs, Tensors
from .ops import OPS, qk_norm_rope
from .timing import Timing, copies_for, copy_rate, l2_bytes, time_graph, time_host, time_plain
from .unlaunched import without_launches

OK, WRONG, ABSENT, FAILED = "ok", "wrong", "absent", "failed"
Row = dict[str, Any]
SEED = 20_261_130


@dataclass
class Plan:
    """What a run covers. rows, batches: sizes instead of the operations' own. compile_seconds: after so many seconds
    of the run nothing more is compiled by torch.compile."""

    ops: Sequence[str] = tuple(OPS)
    rows: Sequence[int] | None = None
    batches: Sequence[int] | None = None
    asked: Asked = field(default_factory=lambda: Asked(frozenset(AGAINST)))
    compile_seconds: float = 200.0
    growth: bool = True

    def cases(self, op: ModuleType) -> list[Case]:
        sizes = self.rows if op.AXIS == "rows" else self.batches
        found: list[Case] = op.cases() if sizes is None else op.cases(sizes)
        return found

    def without_compile(self) -> Asked:
        return dataclasses.replace(self.asked, against=self.asked.against - {COMPILE})


def first_line(error: BaseException) -> str:
    """Why a contender failed, in one line."""
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text}"[:240]


def result_of(inputs: Inputs, contender: Contender) -> Tensors:
    """What copy 0 leaves behind when ``contender`` computes it, from fresh inputs; a fault that it reports raises."""
    inputs.reset()
    returned = contender.calls[0]()
    found = inputs.outputs(returned)
    faults.check()
    return found


def judged_by_oracle(case: Case, asked: Asked, device: torch.device) -> Iterator[Row]:
    """A small case, each contender's result judged by the suite's oracle."""
    torch.manual_seed(SEED)
    inputs = case.build(device, 2)
    for contender in inputs.contenders(asked):
        row = {"op": case.op, "shape": case.shape, "size": case.size, "contender": contender.name}
        if isinstance(contender, Absent):
            yield row | {"status": ABSENT, "reason": contender.reason}
        elif contender.judged:
            try:
                problem = inputs.judge(result_of(inputs, contender))
                yield row | {"status": WRONG if problem else OK, "reason": problem}
            except Exception as error:
                yield row | {"status": FAILED, "reason": first_line(error)}


@dataclass(frozen=True)
class Device:
    """What cases are timed on. rate: bytes per second of its copy."""

    device: torch.device
    l2: int
    rate: float

    def floor_us(self, case: Case) -> float:
        return case.floor_bytes / self.rate * 1e6


def timed(inputs: Inputs, contender: Contender, replays_only: bool = False) -> Row:
    """The timings of one contender, microseconds per call."""
    found: dict[str, Timing | None] = {"graph": None, "plain": None, "host": None, "before_launch": None}
    inputs.reset()
    if contender.captured:
        found["graph"] = time_graph(contender.calls)
    if not replays_only:
        found["plain"] = time_plain(contender.calls)
        if contender.public:
            found["host"] = time_host(contender.calls)
        if contender.public and contender.name == FUSED:
            with without_launches():
                found["before_launch"] = time_host(contender.calls)
    row: Row = {name: dataclasses.asdict(value) if value else None for name, value in found.items()}
    extra = {} if replays_only else inputs.extra(contender)
    return row | ({"extra": extra} if extra else {})


def measured(case: Case, asked: Asked, on: Device, *, replays_only: bool = False) -> list[Row]:
    """A row for each contender of ``case``: its result compared with the definition's, then its timings.

    The first contender is timed again at the end (``again``): how far the two times lie apart is how far times of this
    run can be trusted.
    """
    torch.manual_seed(SEED)
    copies = copies_for(case.floor_bytes, on.l2)
    common = {
        "op": case.op,
        "shape": case.shape,
        "axis": case.axis,
        "size": case.size,
        "floor_bytes": case.floor_bytes,
        "counted": case.counted,
        "floor_us": on.floor_us(case),
        "copies": copies,
    }
    try:
        inputs = case.build(on.device, copies)
        inputs.reset()
        need = inputs.reference()
        contenders = inputs.contenders(asked)
    except Exception as error:
        return [common | {"contender": FUSED, "status": FAILED, "reason": first_line(error)}]
    rows = [common | one_row(inputs, contender, need, replays_only) for contender in contenders]
    first = contenders[0]
    if isinstance(first, Contender) and rows[0].get("graph") and not replays_only:
        inputs.reset()
        rows[0]["again"] = dataclasses.asdict(time_graph(first.calls))
    return rows


def one_row(inputs: Inputs, contender: Contender | Absent, need: Tensors, replays_only: bool) -> Row:
    """Judgement and timings of one contender, or why there are none."""
    row: Row = {"contender": contender.name}
    if isinstance(contender, Absent):
        return row | {"status": ABSENT, "reason": contender.reason}
    try:
        problem = inputs.compare(result_of(inputs, contender), need) if contender.judged else ""
        timings = timed(inputs, contender, replays_only)
        faults.check()  # of the other copies
    except Exception as error:
        return row | {"status": FAILED, "reason": first_line(error)}
    return row | {"status": WRONG if problem else OK, "reason": problem} | timings


def current_device() -> Device:
    """The current CUDA device and its rates."""
    device = torch.device("cuda", torch.cuda.current_device())
    faults.warmup(device)
    return Device(device, l2_bytes(device), copy_rate(device))


def run(plan: Plan, on: Device, say: Callable[[str], None], keep: Callable[[Row], None]) -> Row:
    """Everything of ``plan``. say: progress. keep: called with the record after each operation."""
    started = time.monotonic()
    record: Row = {"l2_bytes": on.l2, "copy_rate": on.rate, "checks": [], "measurements": [], "growth": []}
    say(f"copy rate {on.rate / 1e12:.2f} TB/s, L2 {on.l2 >> 20} MiB")

    def asked_now() -> Asked:
        if time.monotonic() - started < plan.compile_seconds:
            return plan.asked
        return plan.without_compile()

    for name in plan.ops:
        op = OPS[name]
        for case in op.small():
            record["checks"] += judged_by_oracle(case, plan.without_compile(), on.device)
        for case in plan.cases(op):
            asked = asked_now()
            rows = measured(case, asked, on)
            if COMPILE in plan.asked.against - asked.against:
                late = {key: rows[0][key] for key in ("op", "shape", "axis", "size", "floor_bytes", "floor_us")}
                reason = f"left out: the run had used {plan.compile_seconds:.0f} seconds"
                rows.append(late | {"contender": COMPILE, "status": ABSENT, "reason": reason})
            record["measurements"] += rows
            torch.cuda.empty_cache()
            say(f"{time.monotonic() - started:5.0f} s  {case.name}: {summary(rows)}")
        record["seconds"] = time.monotonic() - started
        keep(record)
    if plan.growth and qk_norm_rope.NAME in plan.ops:
        for case in qk_norm_rope.cases(qk_norm_rope.GROWTH):
            only = dataclasses.replace(plan.asked, against=plan.asked.against & {SGLANG})
            record["growth"] += measured(case, only, on, replays_only=True)
            torch.cuda.empty_cache()
    record["seconds"] = time.monotonic() - started
    keep(record)
    return record


def summary(rows: Sequence[Row]) -> str:
    """The contenders of one case and their times in one line."""
    parts = []
    for row in rows:
        timing = row.get("graph") or row.get("plain")
        time_text = f"{timing['median']:.1f}" if timing else row["status"]
        parts.append(f"{row['contender']} {time_text}" + (" WRONG" if row["status"] == WRONG else ""))
    return ", ".join(parts)
