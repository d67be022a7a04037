"""The closing rules and the committed world in this process: on ledgers by hand, each lacking or having one thing.

``test_plugin.py`` and ``test_world.py`` prove the same from outside, by runs of small suites.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import dspark
from conformance.fixtures import summary, world
from conformance.fixtures.lane import Lane
from conformance.fixtures.ledger import Label, Ledger, Row
from conformance.fixtures.summary import Report
from dspark import dispatch, faults, machine


def complete() -> Ledger:
    """A ledger of a run that saw everything."""
    world.declared()  # registers every operation
    book = Ledger()
    for op, checks in dispatch.registry().items():
        book.census[op, "fused", "eligible"] = book.census[op, "eager", "requested"] = 1
        for check in checks:
            book.violated.add((op, check.id))
            if check.path is dispatch.Path.FUSED:
                book.census[op, "eager", check.id] = 1
    book.faults_seen = set(faults.declared())
    return book


# --- The closing rules ------------------------------------------------------------------------------------------------


def test_a_ledger_that_saw_everything_is_complete() -> None:
    assert summary.closed_world(complete()) == []


LACKS: dict[str, tuple[Callable[[Ledger], object], list[str]]] = {
    "violation": (
        lambda book: book.violated.remove(("accept", "verify-width")),
        ["accept: no case violates the check verify-width"],
    ),
    "violation-of-the-last-path": (
        lambda book: book.violated.remove(("kv_write", "pools-by-pointer")),
        ["kv_write: no case violates the check pools-by-pointer"],
    ),
    "reason": (
        lambda book: book.census.pop(("accept", "eager", "no-triton")),
        ["accept: the reason no-triton never occurred in the census"],
    ),
    "reason-that-occurred-no-time": (
        lambda book: book.census.update({("accept", "eager", "no-triton"): 0}),
        ["accept: the reason no-triton never occurred in the census"],
    ),
    "fault": (
        lambda book: book.faults_seen.remove(("accept", "verify-len-out-of-range")),
        ["accept: no case provokes the index fault verify-len-out-of-range"],
    ),
    "usual-reasons": (
        lambda book: [book.census.pop(("accept", *usual)) for usual in (("fused", "eligible"), ("eager", "requested"))],
        [],
    ),
}


@pytest.mark.parametrize("name", LACKS)
def test_what_was_not_seen_is_said(name: str) -> None:
    change, said = LACKS[name]
    book = complete()
    change(book)
    assert summary.closed_world(book) == said


@pytest.mark.parametrize(
    "key",
    [
        ("accept", "eager", "unheard-of"),
        ("accept", "fused", "verify-width"),
        ("accept", "eager", "eligible"),
        ("accept", "fused", "requested"),
        ("ghost", "eager", "verify-width"),
    ],
)
def test_what_must_not_be_seen_is_said(key: tuple[str, str, str]) -> None:
    book = complete()
    book.census[key] = 1
    assert summary.closed_world(book) == [f"{key[0]}: the census counted ({key[1]}, {key[2]}), which no check declares"]
    book = complete()
    book.census["ghost", "fused", "eligible"] = 1
    assert summary.closed_world(book) == []


def test_an_empty_ledger_lacks_every_check_reason_and_fault() -> None:
    problems = summary.closed_world(Ledger())
    checks = [(op, check) for op, checks in dispatch.registry().items() for check in checks]
    fused = [check for _, check in checks if check.path is dispatch.Path.FUSED]
    assert len(problems) == len(checks) + len(fused) + len(faults.declared())
    assert len(fused) < len(checks)


# --- The committed world ----------------------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A committed world that holds the declared triples and these counts."""
    path = tmp_path / "world.json"
    counts = {"interpret": {"accept/fused": {"cases": 3, "comparisons": 7}}, "cuda": {}}
    path.write_text(json.dumps({"triples": [list(triple) for triple in world.declared()], "counts": counts}))
    monkeypatch.setattr(world, "FILE", path)
    return path


def booked(**counts: int) -> Ledger:
    book = complete()
    book.rows[Label("accept", "fused")] = Row(**{"cases": 3, "comparisons": 7, **counts})
    return book


def test_declared_triples_are_two_usual_ones_and_one_per_check() -> None:
    triples = world.declared()
    assert triples == sorted(set(triples))
    by_op = {op: [triple for triple in triples if triple[0] == op] for op in dispatch.registry()}
    for op, checks in dispatch.registry().items():
        ways = {check.id: "eager" if check.path is dispatch.Path.FUSED else "refused" for check in checks}
        expected = {(op, "fused", "eligible"), (op, "eager", "requested"), *((op, way, id) for id, way in ways.items())}
        assert set(by_op[op]) == expected
    assert sum(map(len, by_op.values())) == len(triples)


def test_a_refusal_is_seen_where_its_check_was_violated(file: Path) -> None:
    refused = ("kv_write", "refused", "pools-by-pointer")
    book = complete()
    assert world.seen(book) == set(world.declared())
    book.violated.remove(("kv_write", "pools-by-pointer"))
    assert world.seen(book) == set(world.declared()) - {refused}
    assert world.problems(replace(book, rows=booked().rows), "interpret") == [
        "kv_write/refused/pools-by-pointer is in world.json and did not occur"
    ]


@pytest.mark.parametrize("lost", [("accept", "fused", "eligible"), ("accept", "eager", "requested")])
def test_the_usual_triples_must_occur(file: Path, lost: tuple[str, str, str]) -> None:
    book = booked()
    assert world.problems(book, "interpret") == []
    del book.census[lost]
    assert world.problems(book, "interpret") == [f"{'/'.join(lost)} is in world.json and did not occur"]
    book = booked()
    del book.census["accept", "eager", "no-triton"]  # the closing rules say this one
    assert world.problems(book, "interpret") == []


def test_triples_are_compared_in_both_directions(file: Path) -> None:
    data = json.loads(file.read_text())
    gone = data["triples"].pop(0)
    data["triples"].append(["accept", "eager", "vanished"])
    file.write_text(json.dumps(data))
    assert world.problems(booked(), "interpret") == [
        f"{'/'.join(gone)} exists and is not in world.json",
        "accept/eager/vanished is in world.json and does not exist",
    ]


@pytest.mark.parametrize(
    ("book", "said", "rises"),
    [
        (booked(), [], []),
        (booked(cases=2), ["accept/fused: cases dropped from 3 to 2"], []),
        (booked(comparisons=6), ["accept/fused: comparisons dropped from 7 to 6"], []),
        (booked(cases=4), [], ["accept/fused"]),
        (booked(comparisons=8), [], ["accept/fused"]),
        (booked(elements=99), [], []),
        (booked(cases=2, comparisons=9), ["accept/fused: cases dropped from 3 to 2"], ["accept/fused"]),
    ],
    ids=["same", "fewer-cases", "fewer-comparisons", "more-cases", "more-comparisons", "elements", "both"],
)
def test_counts_may_rise_and_not_drop(file: Path, book: Ledger, said: list[str], rises: list[str]) -> None:
    assert world.problems(book, "interpret") == said
    assert world.rises(book, "interpret") == rises
    assert world.problems(book, "cuda") == []
    assert world.rises(book, "cuda") == ["accept/fused"]


def test_a_row_that_vanished_dropped_to_nothing(file: Path) -> None:
    assert world.problems(complete(), "interpret") == [
        "accept/fused: cases dropped from 3 to 0",
        "accept/fused: comparisons dropped from 7 to 0",
    ]


def test_rows_of_drawn_inputs_count_their_cases_alone(file: Path) -> None:
    data = json.loads(file.read_text())
    data["counts"]["interpret"] = {"memory/drawn": {"cases": 2}}
    file.write_text(json.dumps(data))
    book = complete()
    book.rows[Label("memory", "drawn")] = Row(cases=2, comparisons=5)
    assert (world.problems(book, "interpret"), world.rises(book, "interpret")) == ([], [])
    row = {"cases": 2, "comparisons": 5, "elements": 9}
    base = {"lane": "cuda", "partial": "", "problems": [], "exit_status": 0}
    record = {**base, "rows": {"memory/drawn": row, "drawn/fused": row}}
    assert world.updated({"counts": {}}, [record])["counts"] == {
        "cuda": {"drawn/fused": {"cases": 2, "comparisons": 5}, "memory/drawn": {"cases": 2}}
    }


def test_the_command_updates_the_file_from_records(file: Path, tmp_path: Path) -> None:
    row = {"cases": 1, "comparisons": 2, "elements": 3}
    record = {"lane": "cuda", "partial": "", "problems": [], "exit_status": 0, "rows": {"accept/eager": row}}
    (tmp_path / "record.json").write_text(json.dumps(record))
    before = json.loads(file.read_text())
    for present in (True, False):
        if not present:
            file.unlink()
        assert world.main([str(tmp_path / "record.json")]) == 0
        data = json.loads(file.read_text())
        assert data["triples"] == before["triples"]
        kept = {"interpret": before["counts"]["interpret"]} if present else {}
        assert data["counts"] == {"cuda": {"accept/eager": {"cases": 1, "comparisons": 2}}, **kept}
        assert list(data["counts"]) == sorted(data["counts"])
    assert file.read_text().endswith("}\n")


GREEN: dict[str, Any] = {"lane": "cuda", "partial": "", "problems": [], "exit_status": 0, "rows": {}}
OWN = ["accept/fused: cases dropped from 9 to 3", "a/b/c exists and is not in world.json"]


@pytest.mark.parametrize(
    ("changes", "accepted"),
    [
        ({"exit_status": 1, "problems": OWN}, True),
        ({"exit_status": 1, "problems": [*OWN, "accept: no case violates x"]}, False),
        ({"exit_status": 1}, False),
        ({"partial": "one case"}, False),
        ({"problems": ["accept: no case violates x"]}, False),
    ],
)
def test_only_records_of_complete_runs_without_other_problems_are_taken(
    changes: dict[str, Any], accepted: bool
) -> None:
    if accepted:
        assert world.updated({"counts": {}}, [{**GREEN, **changes}])["counts"] == {"cuda": {}}
        return
    with pytest.raises(ValueError, match="the record of lane cuda is not of a complete green run"):
        world.updated({"counts": {}}, [GREEN, {**GREEN, **changes}])


# --- What is printed and recorded -------------------------------------------------------------------------------------


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch, file: Path) -> Report:
    monkeypatch.setattr(summary, "versions", lambda: {"dspark": "1", "python": "3"})
    book = copy.deepcopy(complete())
    book.rows = {
        Label("topic", "-"): Row(cases=1, comparisons=1, elements=1),
        Label("accept", "fused"): Row(3, 7, 1234, 56789),
        Label("accept", "eager"): Row(4, 8, 12, 0, 200, 199),
    }
    return Report(book, Lane.INTERPRET, 1.26, "", (), 0)


def test_the_summary_is_a_line_per_row_then_the_run(report: Report) -> None:
    checks = len(dispatch.registry()["accept"])
    every = f"{checks}/{checks}".rjust(8)
    assert list(summary.lines(report)) == [
        "op                path     reasons  cases  comparisons    elements  guarded bytes  single-valued",
        f"accept            eager   {every}      4            8          12              0        99.500%",
        "accept            fused          -      3            7       1,234         56,789              -",
        "topic             -              -      1            1           1              0              -",
        "more is compared than world.json says (accept/eager, topic/-): update it from the run's --record",
        "lane interpret; dspark 1, python 3; 1.3 s",
    ]


def test_the_summary_counts_the_reasons_that_were_violated(report: Report) -> None:
    checks = len(dispatch.registry()["accept"])
    report.ledger.violated.remove(("accept", "verify-width"))
    report.ledger.rows = {Label("accept", "eager"): Row(), Label("topic", "eager"): Row()}
    accept, topic = list(summary.lines(report))[1:3]
    assert accept.split()[2] == f"{checks - 1}/{checks}"
    assert topic.split()[2] == "-"


def test_the_summary_lists_other_lanes_waivers_and_problems(report: Report, file: Path) -> None:
    report.ledger.rows = {}
    report.ledger.not_offered = {"cases/test_b.py::test_z", "cases/test_a.py::test_y"}
    report.ledger.waived = {"test_b.py::test_x", "test_a.py::test_x"}
    assert list(summary.lines(replace(report, problems=("one", "two"))))[1:] == [
        "not offered by this lane: 2 cases",
        "  test_y",
        "  test_z",
        "waived: test_a.py::test_x, test_b.py::test_x",
        "lane interpret; dspark 1, python 3; 1.3 s",
        "FAILED one",
        "FAILED two",
    ]


def test_the_summary_lists_ties_with_both_margins(report: Report) -> None:
    report.ledger.ties, report.ledger.farthest = ["b: 7 by 1", "a: 9 by 2"], {"state": 2.5, "logits": 1.0}
    assert list(summary.lines(replace(report, partial="part")))[4:7] == [
        "teacher-forced decoding: 2 ties; farthest from one token at a time, in bf16 spacings: logits 1, state 2.5",
        "  a: 9 by 2",
        "  b: 7 by 1",
    ]


def test_the_summary_of_a_partial_run_compares_no_counts(report: Report) -> None:
    assert list(summary.lines(replace(report, partial="2 of 3 cases were run")))[4:] == [
        "lane interpret; dspark 1, python 3; 1.3 s",
        "partial run: 2 of 3 cases were run; the closed-world rules were not applied",
    ]


@pytest.mark.parametrize(
    "judge", [lambda report: summary.closed_world(report.ledger), lambda report: [*summary.lines(report)]]
)
def test_every_operation_is_imported_first(
    judge: Callable[[Report], object], report: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A controller that ran no case knows no check otherwise."""
    asked: list[bool] = []
    monkeypatch.setattr(summary, "_import_every_op", lambda: asked.append(True))
    judge(report)
    assert asked


def test_versions_are_those_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = SimpleNamespace(triton_version="3.6.0", triton_error=None)
    monkeypatch.setattr(machine, "facts", lambda: facts)
    found = summary.versions()
    assert (found["triton"], found["torch"], found["dspark"]) == ("3.6.0", torch.__version__, dspark.__version__)
    assert {"python", "numpy", "machine"} <= set(found)
    facts.triton_version, facts.triton_error = None, "ImportError: planted"
    assert summary.versions()["triton"] == "none (ImportError: planted)"


def test_the_record_holds_what_was_seen(report: Report, tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    arguments = ["--record", "here.json", "-k", "a b", "--record=there.json", "conformance"]
    report.ledger.not_offered, report.ledger.waived = {"b", "a"}, {"d", "c"}
    report.ledger.ties, report.ledger.farthest = ["y", "x"], {"logits": 1.5}
    summary.write_record(path, replace(report, partial="part", problems=("one",), exit_status=1), arguments)
    record = json.loads(path.read_text())
    assert len(record.pop("date")) == 10
    assert record.pop("census")["accept/fused/eligible"] == 1
    assert record.pop("rows")["accept/fused"] == {
        "cases": 3, "comparisons": 7, "elements": 1234, "guarded_bytes": 56789, "judged": 0, "single_valued": 0,
    }  # fmt: skip
    assert record == {
        "command": "pytest -k 'a b' conformance",
        "lane": "interpret",
        "versions": {"dspark": "1", "python": "3"},
        "seconds": 1.3,
        "exit_status": 1,
        "partial": "part",
        "problems": ["one"],
        "not_offered": ["a", "b"],
        "waived": ["c", "d"],
        "ties": ["x", "y"],
        "farthest": {"logits": 1.5},
    }
    assert path.read_text().endswith("}\n")
