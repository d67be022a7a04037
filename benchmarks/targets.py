"""What the operations are meant to reach, as data, and whether a record says that they do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from .case import COMPILE, EAGER, FUSED, SGLANG
from .ops import accept, accept_commit, commit_indices, kv_write, qk_norm_rope, state_scatter, write_target_hidden_kv
from .ops.accept_commit import SEPARATE
from .ops.state_scatter import PER_PAIR
from .ops.write_target_hidden_kv import PROJECTION

Row = dict[str, Any]
MET, MISSED, UNMEASURED = "met", "missed", "unmeasured"
QK, KV, STATE = qk_norm_rope.NAME, kv_write.NAME, state_scatter.NAME
ACCEPT, COMMIT, STEP, WHOLE = accept.NAME, commit_indices.NAME, accept_commit.NAME, write_target_hidden_kv.NAME


@dataclass(frozen=True)
class Verdict:
    """One target at one size. value: what was reached, None where it was not measured; ``note`` says why, or what else
    a reader must know."""

    op: str
    shape: str
    size: int
    what: str
    need: float
    value: float | None
    status: str
    note: str = ""


def everywhere(size: int) -> bool:
    return True


def at(*sizes: int) -> Callable[[int], bool]:
    return lambda size: size in sizes


def from_on(first: int) -> Callable[[int], bool]:
    return lambda size: size >= first


@dataclass(frozen=True)
class Ratio:
    """The time of the fastest of ``rivals`` over that of the fused path is at least ``need``, as ``timing`` has it."""

    op: str
    rivals: tuple[str, ...]
    need: float
    sizes: Callable[[int], bool] = everywhere
    shape: str = ""
    timing: str = "graph"

    @property
    def what(self) -> str:
        how = {"graph": "", "host": " on the host"}[self.timing]
        return f"{' or '.join(self.rivals)} / fused{how}"

    def value(self, rows: dict[str, Row]) -> tuple[float | None, str]:
        mine = median(rows.get(FUSED), self.timing)
        rivals = {name: median(rows.get(name), self.timing) for name in self.rivals}
        times = {name: time for name, time in rivals.items() if time is not None}
        if mine is None or not times:
            missing = FUSED if mine is None else self.rivals[0]
            return None, why_not(rows.get(missing), missing)
        best = min(times, key=lambda name: times[name])
        wrong = rows[best]["status"] == "wrong"
        return times[best] / mine, f"the result of {best} is wrong" if wrong else ""

    def holds(self, value: float) -> bool:
        return value >= self.need


@dataclass(frozen=True)
class Share:
    """The floor over the time of the fused path is at least ``need``."""

    op: str
    need: float
    sizes: Callable[[int], bool]
    shape: str = ""
    what: str = "share of the copy rate"

    def value(self, rows: dict[str, Row]) -> tuple[float | None, str]:
        mine = median(rows.get(FUSED), "graph")
        return (None, why_not(rows.get(FUSED), FUSED)) if mine is None else (rows[FUSED]["floor_us"] / mine, "")

    def holds(self, value: float) -> bool:
        return value >= self.need


@dataclass(frozen=True)
class Host:
    """The host spends at most ``need`` microseconds on a call before its kernel's launcher is called."""

    op: str
    need: float
    sizes: Callable[[int], bool] = everywhere
    shape: str = ""
    what: str = "host microseconds before the launch"

    def value(self, rows: dict[str, Row]) -> tuple[float | None, str]:
        return median(rows.get(FUSED), "before_launch"), why_not(rows.get(FUSED), FUSED)

    def holds(self, value: float) -> bool:
        return value <= self.need


Target = Ratio | Share | Host
TARGETS: tuple[Target, ...] = (
    Ratio(KV, (SGLANG,), 2.2),
    Share(KV, 0.88, at(16384)),
    Ratio(KV, (COMPILE,), 1.5, from_on(512)),
    Ratio(KV, (COMPILE,), 1.0, lambda size: size < 512),
    Ratio(QK, (SGLANG,), 8.0, from_on(4096), "Inkling"),
    Ratio(QK, (SGLANG,), 1.0),
    Share(QK, 0.88, at(16384), "Inkling"),
    Ratio(QK, (COMPILE,), 2.5, from_on(512)),
    Ratio(QK, (COMPILE,), 1.0, lambda size: size < 512),
    Ratio(STATE, (SGLANG, PER_PAIR), 1.0),
    Share(STATE, 0.85, at(64)),
    Ratio(STATE, (SGLANG,), 2.0, at(1)),
    Ratio(ACCEPT, (SGLANG,), 1.0),
    Ratio(ACCEPT, (COMPILE,), 1.0),
    Ratio(COMMIT, (SGLANG,), 1.0),
    Ratio(COMMIT, (COMPILE,), 1.0),
    Ratio(STEP, (SEPARATE,), 1.0),
    Ratio(STEP, (SGLANG,), 1.0),
    Ratio(STEP, (COMPILE,), 1.0),
    Ratio(WHOLE, (PROJECTION,), 1 / 1.06, at(8)),
    Host(QK, 4.0),
    Host(ACCEPT, 4.0),
    Host(WHOLE, 15.0),
    *(Ratio(op, (SGLANG,), 1.0, timing="host") for op in (QK, KV, STATE, ACCEPT, COMMIT, STEP)),
    *(Ratio(op, (EAGER,), 1.0) for op in (QK, KV, STATE, ACCEPT, COMMIT, STEP)),
)


def median(row: Row | None, timing: str) -> float | None:
    """The median of one timing of a row, if it was measured."""
    found = row.get(timing) if row else None
    return None if found is None else float(found["median"])


def why_not(row: Row | None, name: str) -> str:
    """Why a row has no time."""
    if row is None:
        return f"{name} was not asked for"
    return row.get("reason") or ""


def by_case(rows: Iterable[Row]) -> dict[tuple[str, str, int], dict[str, Row]]:
    """Rows of a record by (op, shape, size), then by contender."""
    found: dict[tuple[str, str, int], dict[str, Row]] = {}
    for row in rows:
        found.setdefault((row["op"], row["shape"], row["size"]), {})[row["contender"]] = row
    return found


def verdicts(rows: Sequence[Row], targets: Sequence[Target] = TARGETS) -> Iterator[Verdict]:
    """Every target at every size of the record that it is about; a wrong fused result misses all of them."""
    cases = by_case(rows)
    for target in targets:
        for (op, shape, size), found in cases.items():
            if op != target.op or not shape.startswith(target.shape) or not target.sizes(size):
                continue
            value, note = target.value(found)
            if found.get(FUSED, {}).get("status") in ("wrong", "failed"):
                status, note = MISSED, f"fused is {found[FUSED]['status']}: {found[FUSED]['reason']}"
            elif value is None:
                status = UNMEASURED
            else:
                status = MET if target.holds(value) else MISSED
            yield Verdict(op, shape, size, target.what, target.need, value, status, note)
