"""``python -m benchmarks.report [RECORD...]``: README.md and the pictures beside it, from records and nothing else."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .case import FUSED
from .picture import COLOURS, Series, chart
from .table import contenders_of, number
from .targets import MET, UNMEASURED, Verdict, by_case, median, verdicts

Row = dict[str, Any]
HERE = Path(__file__).resolve().parent
COMMITTED = [HERE / "records" / name for name in ("h200-bench.json", "h200-accept-bench.json")]
"""What the committed page is made of: the second compiles what the first had no time left for."""
PARTS = ("checks", "measurements", "growth")
"""What a record has rows in."""
GROWTH, BANDWIDTH = "growth.svg", "bandwidth.svg"
INTRODUCTION = """\
# Benchmarks

<!-- Written by `python -m benchmarks.report`; change the text there. -->

How fast each operation is, on one GPU, beside what it competes with: SGLang's own kernels (loaded by file from a
release; none of its code is in this repository), the eager path, and the eager path compiled by torch.compile.

- Every contender of a case computes from the same inputs. Its result is judged first: small cases by the oracles of
  the conformance suite, large ones against the eager path, bit for bit, or, where norm and RoPE leave two admissible
  values, by the envelope. A wrong result is called wrong, and its time is no win. What cannot run is listed with its
  reason.
- **us** is the median of at least 20 replays of a CUDA graph, divided by its calls. The calls go through copies of
  the inputs that together exceed the L2 cache three times (256 copies at most).
- **plain** is wall time of calls from Python, one after the other, until the device is done; **host** is the time
  until a call returns while the launch queue is nearly empty.
- **floor** is the time that the bytes which must move take at the rate of a large device-to-device copy in the same
  run; **share** is floor / us. For windows that overlap in memory, whole 32-byte sectors are counted.
- `compile` is torch.compile with `max-autotune-no-cudagraphs`, replayed as a graph as the others are, and told to
  keep the rounding to bf16 that the contract asks for (`emulate_precision_casts`).

Run it: `dspark bench --sglang PATH --json FILE`, `dspark bench --help` for less. Without a GPU, `dspark bench` times
the suite instead, and says so. Then `python -m benchmarks.report FILE` writes this page; of several files, the last
that has an operation gives all its figures. Times vary between runs and machines; ratios within one run count.
"""


def cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A Markdown table, its first column left-aligned."""
    rule = ["---", *(["---:"] * (len(head) - 1))]
    return ["| " + " | ".join(map(cell, row)) + " |" for row in (head, rule, *rows)]


def microseconds(timing: dict[str, Any] | None) -> str:
    """Median and spread."""
    if timing is None:
        return "-"
    return f"{number(timing['median'])} ({number(timing['p10'])}-{number(timing['p90'])})"


def joined(records: Sequence[Row]) -> Row:
    """The records as one. runs: each without the operations that a later one measured too, so that an operation has its
    contenders of one run; their rows are the whole's, the rates are the first's."""
    runs = []
    for place, record in enumerate(records):
        later = {row["op"] for other in records[place + 1 :] for row in other["measurements"]}
        runs.append(record | {part: [row for row in record[part] if row["op"] not in later] for part in PARTS})
    return records[0] | {part: [row for run in runs for row in run[part]] for part in PARTS} | {"runs": runs}


def run_lines(record: Row) -> Iterator[str]:
    """What was run, where and when."""
    versions = ", ".join(f"{name} {value}" for name, value in record["versions"].items())
    yield f"## The run of {', '.join(dict.fromkeys(row['op'] for row in record['measurements']))}"
    yield ""
    yield f"- {record['date']}, `{record['command']}`, {record['seconds']:.0f} s"
    yield f"- {versions}; peer: {record['peer'] or 'none'}"
    yield f"- copy rate {record['copy_rate'] / 1e12:.2f} TB/s (read plus written), L2 {record['l2_bytes'] >> 20} MiB"
    apart = repeated(record["measurements"])
    if apart:
        how_far = f"{apart[len(apart) // 2]:.1%} away from the first time in the median, {apart[-1]:.1%} at most"
        yield f"- fused, timed again after its contenders: {how_far}"
    yield ""


def repeated(rows: Sequence[Row]) -> list[float]:
    """How far the two times of fused lie apart, as shares, in order."""
    twice = [(median(row, "graph"), median(row, "again")) for row in rows]
    return sorted(abs(again / time - 1) for time, again in twice if time is not None and again is not None)


def sizes_text(found: Sequence[Verdict]) -> str:
    return ", ".join(str(verdict.size) for verdict in found)


def target_lines(rows: Sequence[Row]) -> Iterator[str]:
    """Every target: over its sizes the worst value, and where it was missed."""
    groups: dict[tuple[str, str, str, float], list[Verdict]] = {}
    for verdict in verdicts(rows):
        groups.setdefault((verdict.op, verdict.shape, verdict.what, verdict.need), []).append(verdict)
    yield "## Targets"
    yield ""
    lines = []
    for (op, shape, what, need), found in groups.items():
        measured = [verdict for verdict in found if verdict.value is not None]
        values = ", ".join(f"{v.size}: {v.value:.2f}" for v in measured) or "-"
        notes = "; ".join(dict.fromkeys(verdict.note for verdict in found if verdict.note))
        statuses = {verdict.status for verdict in found}
        if statuses == {MET}:
            said = "met"
        elif statuses <= {MET, UNMEASURED}:
            said = f"met, not measured at {sizes_text([v for v in found if v.status == UNMEASURED])}"
            said = said if MET in statuses else "not measured"
        else:
            said = f"**missed at {sizes_text([v for v in found if v.status not in (MET, UNMEASURED)])}**"
        lines.append([f"{op}, {shape}", what, f"{need:.2f}", values, said + (f" ({notes})" if notes else "")])
    yield from table(["operation", "what", "need", "reached, by size", ""], lines)
    yield ""


def op_lines(rows: Sequence[Row], op: str, shape: str) -> Iterator[str]:
    """The tables of one operation at one shape."""
    mine = [row for row in rows if (row["op"], row["shape"]) == (op, shape)]
    present = [row for row in mine if row["status"] != "absent"]
    names, cases = contenders_of(present), by_case(mine)
    counted = next((row["counted"] for row in mine if row.get("counted", "bytes") != "bytes"), "")
    yield f"## {op}, {shape}"
    yield ""
    yield "Graph replay, us per call (10th to 90th percentile)" + (f"; the floor counts {counted}." if counted else ".")
    yield ""
    axis = next((row["axis"] for row in mine if "axis" in row), "size")
    body = []
    for (_, _, size), found in cases.items():
        first = next(iter(found.values()))
        share = [f"{first['floor_us'] / time:.0%}" if (time := median(found.get(FUSED), "graph")) else "-"]
        body.append([str(size), number(first["floor_us"]), *(graph_text(found.get(name)) for name in names), *share])
    yield from table([axis, "floor", *names, "share of fused"], body)
    yield ""
    yield "Calls from Python, us: plain / host."
    yield ""
    body = [[str(size), *(plain_text(found.get(name)) for name in names)] for (_, _, size), found in cases.items()]
    yield from table([axis, *names], body)
    yield ""
    yield from allocation_lines(mine)
    yield from reason_lines(mine)


def graph_text(row: Row | None) -> str:
    if row is None or row["status"] in ("absent", "failed"):
        return "-"
    text = microseconds(row.get("graph")) if row.get("graph") else "not captured"
    return f"{text} **wrong**" if row["status"] == "wrong" else text


def plain_text(row: Row | None) -> str:
    if row is None or not row.get("plain"):
        return "-"
    host = median(row, "host")
    return number(row["plain"]["median"]) + (f" / {number(host)}" if host is not None else "")


def allocation_lines(rows: Sequence[Row]) -> Iterator[str]:
    """Bytes that a call allocates, where they were measured."""
    found = [row for row in rows if row.get("extra") and row["contender"] == FUSED]
    if not found:
        return
    parts = [f"{row['size']}: {row['extra']['allocated_bytes']:,}" for row in found]
    yield f"Bytes that a call of fused allocates, by size: {'; '.join(parts)}. The weights that a copy would take:"
    yield f"{found[0]['extra']['weight_bytes']:,}."
    yield ""


def reason_lines(rows: Sequence[Row]) -> Iterator[str]:
    """Who is missing or wrong, and why."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for row in rows:
        if row["status"] != "ok":
            key = (row["contender"], row["status"], row["reason"])
            groups.setdefault(key, []).append(str(row["size"]))
    for (name, status, reason), sizes in groups.items():
        yield f"- {name} at {', '.join(sizes)}: {status}: {reason}"
    if groups:
        yield ""


def check_lines(checks: Sequence[Row]) -> Iterator[str]:
    """Small cases, judged by the oracles."""
    yield "## Judged by the oracles"
    yield ""
    names = contenders_of(checks)
    cases = by_case(checks)
    body = []
    for (op, shape, size), found in cases.items():
        body.append([f"{op}, {shape}, {size}", *(found[name]["status"] if name in found else "-" for name in names)])
    yield from table(["case", *names], body)
    yield ""
    for row in checks:
        if row["status"] in ("wrong", "failed"):
            yield f"- {row['op']}, {row['shape']}, {row['contender']}: {row['reason']}"
    yield ""


def growth_picture(record: Row) -> str:
    """Time of qk_norm_rope against the bytes that must move, from one row to very many."""
    rows = [row for row in record["growth"] if row.get("graph")]
    series = []
    for colour, (shape, name) in enumerate(dict.fromkeys((row["shape"], row["contender"]) for row in rows)):
        mine = [row for row in rows if (row["shape"], row["contender"]) == (shape, name)]
        points = [(row["floor_bytes"], row["graph"]["median"]) for row in mine]
        series.append(Series(f"{name} {shape.split()[-1]}", points, colour % COLOURS))
    ends = [pick(row["floor_bytes"] for row in rows) for pick in (min, max)]
    floor = [(size, size / record["copy_rate"] * 1e6) for size in ends]
    series.append(Series("copy rate", floor, COLOURS, dashed=True))
    return chart("qk_norm_rope: time against bytes", "bytes that must move", "us per call", series)


def bandwidth_picture(record: Row) -> str:
    """Bytes per second of fused (a point for each size, one series for each operation), under the copy's rate."""
    rows = [row for row in record["measurements"] if row["contender"] == FUSED and row.get("graph")]
    series = []
    for colour, op in enumerate(dict.fromkeys(row["op"] for row in rows)):
        points = [
            (row["floor_bytes"], row["floor_bytes"] / row["graph"]["median"] * 1e6) for row in rows if row["op"] == op
        ]
        series.append(Series(op, points, colour % COLOURS, joined=False))
    ends = [pick(row["floor_bytes"] for row in rows) for pick in (min, max)]
    series.append(Series("copy rate", [(size, record["copy_rate"]) for size in ends], COLOURS, dashed=True))
    return chart("fused: bytes per second", "bytes that must move", "bytes per second", series)


def pictures(record: Row) -> dict[str, str]:
    """The pictures that the record has figures for, by file name."""
    found = {}
    if any(row.get("graph") for row in record["growth"]):
        found[GROWTH] = growth_picture(record)
    if any(row["contender"] == FUSED and row.get("graph") for row in record["measurements"]):
        found[BANDWIDTH] = bandwidth_picture(record)
    return found


def page(record: Row) -> str:
    """README.md, of what :func:`joined` made."""
    rows = record["measurements"]
    lines = [INTRODUCTION, *(line for run in record["runs"] for line in run_lines(run))]
    lines += [f"![{name.removesuffix('.svg')}](pictures/{name})\n" for name in pictures(record)]
    lines += target_lines(rows)
    for op, shape in dict.fromkeys((row["op"], row["shape"]) for row in rows):
        lines += op_lines(rows, op, shape)
    lines += check_lines(record["checks"])
    return "\n".join(lines).rstrip() + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; ``argv`` without the program's name."""
    parser = argparse.ArgumentParser(prog="benchmarks.report", description=__doc__)
    parser.add_argument("records", type=Path, nargs="*", metavar="RECORD", help="what `dspark bench --json` wrote")
    parser.add_argument("--folder", type=Path, default=HERE, help="where README.md goes (default: beside this file)")
    arguments = parser.parse_args(argv)
    records = []
    for path in arguments.records or COMMITTED:
        try:
            record = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            print(f"benchmarks.report: {path}: {error}", file=sys.stderr)
            return 2
        if record.get("kind") != "bench" or "measurements" not in record:
            print(f"benchmarks.report: {path}: not the record of a run on a GPU", file=sys.stderr)
            return 2
        records.append(record)
    folder = arguments.folder / "pictures"
    folder.mkdir(parents=True, exist_ok=True)
    whole = joined(records)
    (arguments.folder / "README.md").write_text(page(whole))
    for name, text in pictures(whole).items():
        (folder / name).write_text(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
