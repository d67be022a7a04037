"""The hooks of `conformance.fixtures.plugin` called by hand; ``test_plugin.py`` runs suites under them."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Generator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import dspark.model.draft  # noqa: F401  declares the kinds of fault
from conformance.fixtures import isolation, ledger, plugin, summary, waivers, world
from conformance.fixtures.golden import options
from conformance.fixtures.lane import Lane
from conformance.fixtures.ledger import Label, Ledger, Row, expect_equal
from dspark import dispatch, faults
from dspark.ops import accept

LABEL = Label("topic", "-")
CASE = "conformance/cases/test_a.py::test_x[1]"
WAIVER = waivers.Waiver("test_a.py::test_x[1]", "7", "maintainer", "2999-01-01", "got 1")


@pytest.fixture(autouse=True)
def book(monkeypatch: pytest.MonkeyPatch) -> Ledger:
    monkeypatch.setattr(ledger, "_active", ledger._Active())
    return ledger.active()


def a_config(**options_: Any) -> Any:
    """What a hook reads of pytest's configuration."""
    given = {"shuffle": None, "record": None, "golden_verify": False, "collectonly": False, **options_}
    stash = pytest.Stash()
    stash[plugin.LANE] = Lane.INTERPRET
    stash[plugin.STARTED], stash[plugin.PROBLEMS], stash[plugin.FINISHED], stash[plugin.WAIVERS] = 0.0, [], set(), ()
    return SimpleNamespace(
        stash=stash,
        rootpath=plugin.ROOT.parent,
        args=["conformance"],
        invocation_params=SimpleNamespace(args=("conformance",)),
        getoption=lambda name: given[name.lstrip("-").replace("-", "_")],
    )


def an_item(name: str = CASE, config: Any = None, marks: tuple[str, ...] | None = None) -> Any:
    marker = None if marks is None else SimpleNamespace(args=marks)
    path = plugin.ROOT.parent / name.partition("::")[0]
    return SimpleNamespace(
        nodeid=name,
        name=name.rpartition("::")[2],
        path=path,
        config=config or a_config(),
        stash=pytest.Stash(),
        get_closest_marker=lambda _: marker,
    )


def drive(
    hook: Generator[None, Any, Any], answer: object = "answer", inside: Callable[[], object] | None = None
) -> Any:
    """Run a hook wrapper around ``inside``, as pluggy does; returns what it returns."""
    next(hook)
    if inside is not None:
        inside()
    with pytest.raises(StopIteration) as ended:
        hook.send(answer)
    return ended.value.value


def refused(hook: Generator[None, Any, Any], message: str, inside: Callable[[], object] | None = None) -> None:
    next(hook)
    if inside is not None:
        inside()
    with pytest.raises(pytest.fail.Exception, match=message):
        hook.send("answer")


# --- A case -----------------------------------------------------------------------------------------------------------


def compare() -> None:
    expect_equal(LABEL, "value", 1, 1)


def test_a_case_that_compares_is_counted_with_its_census(book: Ledger) -> None:
    item = an_item()
    for _ in range(2):
        plugin.pytest_runtest_setup(item)
        hook = plugin.pytest_runtest_call(item)
        assert (
            drive(
                hook,
                inside=lambda: (compare(), dispatch._count((dispatch.CensusKey("topic", dispatch.Path.EAGER, "r"),))),
            )
            == "answer"
        )
    assert book.rows == {LABEL: Row(cases=2, comparisons=2, elements=2)}
    assert book.census == {("topic", "eager", "r"): 2}
    dispatch.reset()


def test_a_case_that_compares_nothing_fails(book: Ledger) -> None:
    compare()
    item = an_item()
    plugin.pytest_runtest_setup(item)
    refused(
        plugin.pytest_runtest_call(item), r"^test_x\[1\] compared nothing: it called none of the expect_\* helpers$"
    )


def test_a_case_that_leaves_a_fault_fails_and_the_next_starts_clean() -> None:
    def leave() -> None:
        compare()
        faults.set_where(torch.tensor([True]), 1)
        dispatch._count((dispatch.CensusKey("topic", dispatch.Path.EAGER, "r"),))

    item = an_item()
    plugin.pytest_runtest_setup(item)
    refused(plugin.pytest_runtest_call(item), r"test_x\[1\] left index faults unread: \(\('", leave)
    assert faults.peek()
    assert dispatch.census()
    plugin.pytest_runtest_setup(item)
    assert not faults.peek()
    assert not dispatch.census()


def test_a_case_that_changes_the_process_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    item = an_item()
    plugin.pytest_runtest_setup(item)
    assert drive(plugin.pytest_runtest_teardown(item)) == "answer"
    monkeypatch.setattr(isolation, "differences", lambda before, after: ["a", "b"])
    refused(plugin.pytest_runtest_teardown(item), r"^test_x\[1\] left the process changed: a, b$")


@pytest.mark.parametrize(
    ("waived", "when", "error", "outcome", "said"),
    [
        ((WAIVER,), "call", "got 1", "passed", None),
        ((WAIVER,), "call", "got 2", "failed", "it failed with 'got 2'; the waiver (7) excuses 'got 1'"),
        ((WAIVER,), "call", None, "failed", "it passed; the waiver (7) excuses 'got 1'"),
        ((WAIVER,), "setup", "got 1", "as it was", "long"),
        ((), "call", "got 1", "as it was", "long"),
    ],
    ids=["the-exact-failure", "another-failure", "no-failure", "setup", "no-waiver"],
)
def test_a_waiver_excuses_one_exact_failure(
    book: Ledger,
    waived: tuple[waivers.Waiver, ...],
    when: str,
    error: str | None,
    outcome: str,
    said: str | None,
) -> None:
    item = an_item()
    item.config.stash[plugin.WAIVERS] = waived
    excinfo = None if error is None else SimpleNamespace(value=AssertionError(error))
    report = SimpleNamespace(outcome="as it was", longrepr="long")
    made = drive(plugin.pytest_runtest_makereport(item, SimpleNamespace(when=when, excinfo=excinfo)), report)
    assert (made.outcome, made.longrepr) == (outcome, said)
    assert book.waived == ({"test_a.py::test_x[1]"} if outcome == "passed" else set())


@pytest.mark.parametrize(
    ("name", "when", "skipped", "expected_to_fail", "told"),
    [
        (CASE, "call", False, False, False),
        (CASE, "call", True, False, True),
        (CASE, "call", False, True, True),
        ("tests/test_a.py::test_x[1]", "call", True, False, False),
        (CASE, "teardown", False, False, False),
    ],
)
def test_a_skip_is_a_problem_and_a_teardown_ends_a_case(
    name: str, when: str, skipped: bool, expected_to_fail: bool, told: bool
) -> None:
    ids: set[str] = set()
    problems: list[str] = []
    report = SimpleNamespace(nodeid=name, when=when, skipped=skipped)
    if expected_to_fail:
        report.wasxfail = "reason"
    plugin._Finished(plugin.ROOT.parent, ids, problems).pytest_runtest_logreport(report)  # type: ignore[arg-type]
    assert problems == (["test_x[1] was skipped or expected to fail"] if told else [])
    assert ids == ({name} if when == "teardown" else set())


def test_another_implementation_may_skip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "is_own", lambda: False)
    problems: list[str] = []
    report = SimpleNamespace(nodeid=CASE, when="call", skipped=True)
    plugin._Finished(plugin.ROOT.parent, set(), problems).pytest_runtest_logreport(report)  # type: ignore[arg-type]
    assert problems == []


# --- The collection ---------------------------------------------------------------------------------------------------


def test_cases_of_other_lanes_are_listed_and_other_tests_are_not_counted(book: Ledger) -> None:
    config = a_config()
    names = [f"conformance/cases/test_{letter}.py::test_x" for letter in "abc"]
    marks: tuple[tuple[str, ...] | None, ...] = (None, ("cuda",), ("interpret", "cuda"))
    items = [an_item(name, config, mark) for name, mark in zip(names, marks, strict=True)]
    items.append(an_item("tests/test_d.py::test_x", config))
    plugin.pytest_collection_modifyitems(config, items)
    assert [item.nodeid for item in items] == [names[0], names[2], "tests/test_d.py::test_x"]
    assert book.not_offered == {names[1]}
    assert book.collected == 2
    assert book.collected_files == {"test_a.py", "test_b.py", "test_c.py"}
    plugin.pytest_deselected(items)
    plugin.pytest_deselected(items[:1])
    assert book.deselected == 4


def test_an_unknown_lane_is_a_usage_error() -> None:
    with pytest.raises(pytest.UsageError, match=r"test_x.*: unknown lane 'gpu'"):
        plugin.pytest_collection_modifyitems(a_config(), [an_item(marks=("cuda", "gpu"))])


def test_a_seed_is_an_order() -> None:
    def order(seed: int | None) -> list[str]:
        config = a_config(shuffle=seed)
        items = [an_item(f"conformance/cases/test_a.py::test_{number}", config) for number in range(9)]
        plugin.pytest_collection_modifyitems(config, items)
        return [item.nodeid for item in items]

    plain = order(None)
    assert plain == sorted(plain)
    assert order(0) == order(0) != plain
    assert order(0) != order(1)
    assert sorted(order(0)) == plain


# --- Workers ----------------------------------------------------------------------------------------------------------


def test_a_workers_ledger_is_merged(book: Ledger) -> None:
    config = a_config()
    counted = Ledger(rows={LABEL: Row(1, 2, 3)}, census={("a", "b", "c"): 4}, collected=5)
    node = SimpleNamespace(
        config=config, gateway=SimpleNamespace(id="gw1"), workeroutput={plugin.WORKER_KEY: counted.to_data()}
    )
    plugin.pytest_testnodedown(node, None)
    plugin.pytest_testnodedown(node, None)
    assert book == Ledger(rows={LABEL: Row(2, 4, 6)}, census={("a", "b", "c"): 8}, collected=5)
    assert config.stash[plugin.PROBLEMS] == []


@pytest.mark.parametrize(("lane", "told"), [(Lane.CUDA, 5), (Lane.INTERPRET, 0), (Lane.SECOND, 0)])
def test_only_a_lane_of_one_gpu_divides_the_gpus(lane: Lane, told: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 5)
    config = a_config()
    config.stash[plugin.LANE] = lane
    node = SimpleNamespace(config=config, workerinput={})
    plugin.pytest_configure_node(node)
    assert node.workerinput == {plugin.GPUS_KEY: told}


@pytest.mark.parametrize("output", [None, {}, {"other": 1}])
def test_a_worker_without_a_ledger_is_a_problem(output: dict[str, Any] | None, book: Ledger) -> None:
    config = a_config()
    node = SimpleNamespace(config=config, gateway=SimpleNamespace(id="gw1"))
    if output is not None:
        node.workeroutput = output
    plugin.pytest_testnodedown(node, "killed")
    assert config.stash[plugin.PROBLEMS] == ["worker gw1 ended without its ledger: killed"]
    assert book == Ledger()


def a_session(config: Any, status: int = 0) -> Any:
    return SimpleNamespace(config=config, exitstatus=status)


def test_a_worker_leaves_its_ledger_and_judges_nothing(book: Ledger) -> None:
    config = a_config()
    config.workeroutput = {}
    compare()
    plugin.pytest_sessionfinish(a_session(config), 0)
    assert config.workeroutput == {plugin.WORKER_KEY: book.to_data()}
    assert summary.REPORT not in config.stash


# --- The end of a run -------------------------------------------------------------------------------------------------

FILES = {path.name for path in (plugin.ROOT / "cases").glob("test_*.py")}


def whole(book: Ledger, config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A complete run of two cases, in which the closing rules find nothing."""
    book.collected_files, book.collected = set(FILES), 2
    config.stash[plugin.FINISHED] |= {CASE, "conformance/cases/test_b.py::test_y"}
    monkeypatch.setattr(summary, "closed_world", lambda book: [])
    monkeypatch.setattr(world, "problems", lambda book, lane: [])


def test_a_complete_run_without_problems_is_green(
    book: Ledger, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = a_config(record=tmp_path / "record.json")
    whole(book, config, monkeypatch)
    session = a_session(config)
    plugin.pytest_sessionfinish(session, 0)
    report = config.stash[summary.REPORT]
    assert session.exitstatus == 0
    assert (report.ledger, report.lane, report.partial, report.problems, report.exit_status) == (
        book, Lane.INTERPRET, "", (), 0,
    )  # fmt: skip
    assert json.loads((tmp_path / "record.json").read_text())["command"] == "pytest conformance"


def test_nothing_is_judged_where_cases_are_only_collected() -> None:
    config = a_config(collectonly=True)
    plugin.pytest_sessionfinish(a_session(config), 0)
    assert summary.REPORT not in config.stash


@pytest.mark.parametrize("status", [0, 1, 2, 5])
@pytest.mark.parametrize("source", ["closed world", "committed world", "golden", "waivers", "hooks"])
def test_any_problem_fails_a_complete_run(
    source: str, status: int, book: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = a_config(golden_verify=source == "golden")
    whole(book, config, monkeypatch)
    if source == "closed world":
        monkeypatch.setattr(summary, "closed_world", lambda book: ["p"])
    if source == "committed world":
        monkeypatch.setattr(world, "problems", lambda book, lane: ["p"] if lane == "interpret" else [])
    if source == "waivers":
        monkeypatch.setattr(waivers, "problems", lambda given, cases, today: ["p"])
    if source == "hooks":
        config.stash[plugin.PROBLEMS].append("p")
    monkeypatch.setattr(options, "verified", lambda: ["p"])
    session = a_session(config, status)
    plugin.pytest_sessionfinish(session, status)
    assert config.stash[summary.REPORT].problems == ("p",)
    assert session.exitstatus == config.stash[summary.REPORT].exit_status == (2 if status == 2 else 1)


def test_waivers_are_matched_with_every_case_that_ran_or_belongs_to_another_lane(
    book: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = a_config()
    whole(book, config, monkeypatch)
    book.not_offered = {"conformance/cases/test_c.py::test_gpu"}
    config.stash[plugin.WAIVERS] = (WAIVER,)
    asked: list[Any] = []
    monkeypatch.setattr(waivers, "problems", lambda *given: asked.append(given) or [])
    plugin.pytest_sessionfinish(a_session(config), 0)
    book.deselected = 1
    plugin.pytest_sessionfinish(a_session(config), 0)
    today = datetime.date.today()
    cases = {"test_a.py::test_x[1]", "test_b.py::test_y", "test_c.py::test_gpu"}
    assert asked == [((WAIVER,), cases, today), ((WAIVER,), None, today)]


def partial(book: Ledger, config: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    """Why the run is partial; the closing rules, which would find something, are not asked then."""
    monkeypatch.setattr(summary, "closed_world", lambda book: ["p"])
    config.stash[plugin.PROBLEMS] = []
    session = a_session(config)
    plugin.pytest_sessionfinish(session, 0)
    report = config.stash[summary.REPORT]
    assert (report.problems, session.exitstatus) == (((), 0) if report.partial else (("p",), 1))
    return str(report.partial)


def test_a_run_of_a_part_says_why(book: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    config = a_config()
    whole(book, config, monkeypatch)
    assert partial(book, config, monkeypatch) == ""
    config.args = ["conformance", CASE]
    assert partial(book, config, monkeypatch) == "single cases were named"
    config.args = ["conformance"]
    book.deselected = 3
    assert partial(book, config, monkeypatch) == "3 cases were deselected"
    book.deselected = 0
    lost = sorted(FILES)[:2]
    book.collected_files -= set(lost)
    assert partial(book, config, monkeypatch) == f"not collected: {', '.join(lost)}"
    book.collected_files = {*FILES, "test_more.py"}
    assert partial(book, config, monkeypatch) == ""
    book.collected = 3
    assert partial(book, config, monkeypatch) == "2 of 3 cases were run"
    config.stash[plugin.FINISHED].add("tests/test_c.py::test_z")
    assert partial(book, config, monkeypatch) == "2 of 3 cases were run"
    config.stash[plugin.FINISHED].add("conformance/cases/test_c.py::test_z")
    assert partial(book, config, monkeypatch) == ""


def test_a_case_has_one_id_wherever_the_suite_is() -> None:
    assert plugin.case_id("a/b/test_c.py::test_d[x::y]") == "test_c.py::test_d[x::y]"


def test_a_case_begins_without_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    before = accept._plans
    plugin.no_plans.__wrapped__(monkeypatch)
    assert accept._plans is not before
    assert not accept._plans._plans
