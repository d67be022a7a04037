"""A record as text: the short table that a run ends with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from .case import FUSED
from .targets import MISSED, UNMEASURED, Verdict, by_case, median, verdicts

Row = dict[str, Any]


def time_text(row: Row) -> str:
    """The time that says most: graph replay, else plain calls; a wrong result says so."""
    graph, plain = median(row, "graph"), median(row, "plain")
    if graph is None and plain is None:
        return str(row["status"])
    text = number(graph) if graph is not None else f"{number(plain or 0)}*"
    return f"{text} WRONG" if row["status"] == "wrong" else text


def number(value: float) -> str:
    """Three figures."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def contenders_of(rows: Sequence[Row]) -> list[str]:
    """Names in the order of their first appearance."""
    return list(dict.fromkeys(row["contender"] for row in rows))


def lines(record: Row) -> Iterator[str]:
    """The short table: for each operation and shape its sizes, times and the share of the floor; then the targets."""
    rows = record["measurements"]
    for op, shape in dict.fromkeys((row["op"], row["shape"]) for row in rows):
        mine = [row for row in rows if (row["op"], row["shape"]) == (op, shape)]
        names = contenders_of(mine)
        yield f"{op}, {shape} (us per call; share of floor; host us)"
        yield f"  {mine[0].get('axis', ''):>6} " + " ".join(f"{name:>15}" for name in names) + "   share    host"
        for (_, _, size), found in by_case(mine).items():
            cells = " ".join(f"{time_text(found[name]) if name in found else '-':>15}" for name in names)
            yield f"  {size:>6} {cells} {share_text(found.get(FUSED)):>7} {host_text(found.get(FUSED)):>7}"
    wrong = [row for row in [*record["checks"], *rows, *record["growth"]] if row["status"] in ("wrong", "failed")]
    for row in wrong:
        yield f"{row['status'].upper()} {row['op']} {row['shape']} {row['size']} {row['contender']}: {row['reason']}"
    absent = [(row["op"], row["contender"], row["reason"]) for row in rows if row["status"] == "absent"]
    for op, name, reason in dict.fromkeys(absent):
        yield f"absent: {op} {name}: {reason}"
    judged = list(verdicts(rows))
    counts = Counter(verdict.status for verdict in judged)
    yield "targets: " + (", ".join(f"{count} {status}" for status, count in counts.items()) or "none")
    for verdict in judged:
        if verdict.status == MISSED:
            yield "  missed: " + verdict_text(verdict)
    for (op, note), _ in {(v.op, v.note): v for v in judged if v.status == UNMEASURED}.items():
        yield f"  unmeasured: {op}: {note}"


def verdict_text(verdict: Verdict) -> str:
    """One target in one line."""
    value = "-" if verdict.value is None else f"{verdict.value:.2f}"
    note = f" ({verdict.note})" if verdict.note else ""
    return f"{verdict.op} {verdict.shape} {verdict.size}: {verdict.what} {value}, need {verdict.need:.2f}{note}"


def share_text(row: Row | None) -> str:
    graph = median(row, "graph")
    return "-" if row is None or graph is None else f"{row['floor_us'] / graph:.0%}"


def host_text(row: Row | None) -> str:
    host = median(row, "host")
    return "-" if host is None else f"{host:.1f}"
