"""Tests of `conformance.fixtures.plugin`, from outside: small suites under the real conftest, run by pytest.

A run needs a process in which nothing is imported yet but torch, which costs seconds to import. So the fixture `server`
starts this file once as a script, which imports torch and forks a child per run. The suite of a run is the repository's
`conformance` folder with other cases in it. The operations and their checks are the real ones; the cases of ``WORLD``
report every one of them as violated, so that a run can be complete without computing anything.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
CONFORMANCE = REPOSITORY / "conformance"
CASES = "conformance/cases"

# --- Running a suite --------------------------------------------------------------------------------------------------


def serve() -> None:
    """Read one request a line, run it in a forked child, answer with its exit status."""
    import torch  # noqa: F401  imported once, for every child

    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            run_here(**json.loads(line))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def run_here(folder: str, arguments: list[str], environment: dict[str, str]) -> None:
    """Run pytest in ``folder`` and end this process with its status."""
    signal.alarm(120)
    os.chdir(folder)
    sys.path.insert(0, folder)
    os.environ.update(environment)
    tempfile.tempdir = None  # found anew from the environment
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    output = os.open("output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    status = 99
    try:
        status = int(pytest.main(arguments))
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


@dataclass(frozen=True)
class Run:
    """What a run left: ``record`` is empty when it wrote none, ``caches`` are the Triton caches not removed."""

    status: int
    output: str
    record: dict[str, Any]
    caches: list[Path]

    @property
    def outcomes(self) -> dict[str, str]:
        """Case -> outcome, in the order of the run; for runs in one process."""
        return dict(re.findall(rf"^{CASES}/(\S+) (PASSED|FAILED|ERROR)", self.output, re.MULTILINE))


@dataclass(frozen=True)
class Suite:
    """A folder with a copy of the conformance machinery, in which cases can be run."""

    folder: Path
    requests: IO[str]
    answers: IO[str]

    def run(self, cases: dict[str, str], *arguments: str, **environment: str) -> Run:
        """Write ``cases`` (module name -> source) and run them, or what of them ``arguments`` name."""
        shutil.rmtree(self.folder / CASES, ignore_errors=True)
        (self.folder / CASES).mkdir()
        for name, source in {"__init__": "", **cases}.items():
            (self.folder / CASES / f"{name}.py").write_text(source)
        record, temporary = self.folder / "record.json", self.folder / "tmp"
        record.unlink(missing_ok=True)
        temporary.mkdir(exist_ok=True)
        everything = [] if any(argument.startswith("conformance") for argument in arguments) else ["conformance"]
        request = {
            "folder": str(self.folder),
            "arguments": ["-v", "-p", "no:cacheprovider", "--record", "record.json", *arguments, *everything],
            "environment": {"TMPDIR": str(temporary), **environment},
        }
        self.requests.write(json.dumps(request) + "\n")
        self.requests.flush()
        status = int(self.answers.readline())
        return Run(
            status,
            (self.folder / "output.txt").read_text(),
            json.loads(record.read_text()) if record.exists() else {},
            list(temporary.glob("dspark-triton-cache-*")),
        )


@pytest.fixture(scope="module")
def server() -> Iterator[subprocess.Popen[str]]:
    """The process that runs suites; it sees no GPU and none of the variables of the run that it belongs to."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "DSPARK", "TRITON"))}
    own = {
        "PYTHONPATH": str(REPOSITORY / "src"),
        "PYTHONSAFEPATH": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [sys.executable, __file__]
    with subprocess.Popen(
        command, env={**kept, **own}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


@pytest.fixture
def suite(server: subprocess.Popen[str], tmp_path: Path) -> Suite:
    assert server.stdin is not None
    assert server.stdout is not None
    shutil.copytree(CONFORMANCE, tmp_path / "conformance", ignore=shutil.ignore_patterns("cases", "__pycache__"))
    from conformance.fixtures.world import declared

    # The planted world is complete where every declared triple occurs; how much it compares is its own affair.
    world = json.dumps({"triples": [list(triple) for triple in declared()], "counts": {}})
    (tmp_path / "conformance" / "fixtures" / "world.json").write_text(world)
    (tmp_path / "triton.py").write_text("raise ImportError('importing it costs a second of every run')")
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --strict-markers\nfilterwarnings = error\n")
    return Suite(tmp_path, server.stdin, server.stdout)


# --- Cases ------------------------------------------------------------------------------------------------------------

WORLD = """
import os
import pytest
import dspark.model.draft
from dspark import dispatch, faults
from ..fixtures.ledger import Label, expect_decision, expect_equal, expect_fault

OMITTED = os.environ.get("OMIT", "").split()
CHECKS = [(op, check) for op, checks in dispatch.registry().items() for check in checks]
PLANTED = os.environ.get("PLANT", f"{CHECKS[0][0]}/fused/eligible").split("/")

@pytest.mark.parametrize(("op", "check"), CHECKS, ids=[f"{op}-{check.id}" for op, check in CHECKS])
def test_check(op, check):
    label = Label(op, "eager")
    expect_equal(label, "something", 1, 1)
    decision = dispatch.Decision(op, dispatch.Path.EAGER, (dispatch.Failure(check, None),))
    if f"decision/{op}/{check.id}" not in OMITTED:
        expect_decision(label, [dispatch.Outcome(decision, dispatch.Path.EAGER)], "eager", [check.id])
    if check.path is dispatch.Path.FUSED and f"census/{op}/{check.id}" not in OMITTED:
        dispatch._count((dispatch.CensusKey(op, dispatch.Path.EAGER, check.id),))

@pytest.mark.parametrize(("op", "kind"), faults.declared())
def test_fault(op, kind):
    label = Label(op, "eager")
    expect_equal(label, "something", 1, 1)
    if f"fault/{op}/{kind}" not in OMITTED:
        expect_fault(label, faults.IndexFaultError(((op, kind),)), [(op, kind)])

@pytest.mark.parametrize("op", dispatch.registry())
def test_usual_reasons(op):
    dispatch._count((dispatch.CensusKey(op, dispatch.Path.FUSED, dispatch.ELIGIBLE),))
    dispatch._count((dispatch.CensusKey(op, dispatch.Path.EAGER, dispatch.REQUESTED),))
    expect_equal(Label(op, "fused"), "something", 1, 1)

def test_planted():
    op, path, reason = PLANTED
    dispatch._count((dispatch.CensusKey(op, dispatch.Path(path), reason),))
    expect_equal(Label(op, path), "something", 1, 1)
"""

PRELUDE = """
import os, sys
import pytest, torch
import dspark.model.draft
from dspark import dispatch, faults
from ..fixtures.ledger import Label, expect_equal
LABEL = Label("topic", "-")
"""

PASSES = PRELUDE + "def test_passes(): expect_equal(LABEL, 'value', 1, 1)\n"

# --- Hooks ------------------------------------------------------------------------------------------------------------


def test_conftest_takes_over_every_hook_and_fixture() -> None:
    plugin = ast.parse((CONFORMANCE / "fixtures" / "plugin.py").read_text())
    conftest = ast.parse((CONFORMANCE / "conftest.py").read_text())
    defined = {
        node.name
        for node in plugin.body
        if isinstance(node, ast.FunctionDef)
        and (node.name.startswith("pytest_") or any("fixture" in ast.unparse(mark) for mark in node.decorator_list))
    }
    imported = {
        alias.name
        for node in conftest.body
        if isinstance(node, ast.ImportFrom) and node.module == "fixtures.plugin"
        for alias in node.names
        if alias.asname is None
    }
    assert {"pytest_configure", "pytest_runtest_call", "arena", "lane"} <= defined
    assert imported == defined


# --- Complete runs ----------------------------------------------------------------------------------------------------


def test_a_complete_run_is_green_and_recorded(suite: Suite) -> None:
    run = suite.run({"test_world": WORLD, "test_more": PASSES}, "--record=record.json", "--lane=interpret")
    assert run.status == 0, run.output
    assert set(run.outcomes.values()) == {"PASSED"}
    assert "partial run" not in run.output
    assert "FAILED" not in run.output
    assert re.search(r"^topic +- +- +1 +1 +1 ", run.output, re.MULTILINE)
    assert re.search(r"^accept +eager +(\d+)/\1 ", run.output, re.MULTILINE)
    record = run.record
    assert (record["lane"], record["exit_status"], record["partial"], record["problems"]) == ("interpret", 0, "", [])
    assert {"dspark", "python", "torch", "triton", "numpy", "machine"} <= set(record["versions"])
    assert record["command"] == "pytest -v -p no:cacheprovider --lane=interpret conformance"
    row = record["rows"]["topic/-"]
    assert (row["cases"], row["comparisons"], row["elements"]) == (1, 1, 1)
    assert record["census"]["accept/eager/verify-width"] == record["census"]["accept/eager/requested"] == 1


@pytest.mark.parametrize(
    ("omitted", "problem"),
    [
        ("decision/accept/verify-width", "accept: no case violates the check verify-width"),
        ("census/accept/no-triton", "accept: the reason no-triton never occurred in the census"),
        (
            "fault/accept/verify-len-out-of-range",
            "accept: no case provokes the index fault verify-len-out-of-range",
        ),
    ],
    ids=["decision", "census", "fault"],
)
def test_what_a_complete_run_did_not_see_fails_it(suite: Suite, omitted: str, problem: str) -> None:
    run = suite.run({"test_world": WORLD}, OMIT=omitted)
    assert set(run.outcomes.values()) == {"PASSED"}
    assert (run.status, run.record["exit_status"], run.record["problems"]) == (1, 1, [problem])
    assert f"\nFAILED {problem}\n" in run.output


@pytest.mark.parametrize(
    "planted",
    ["accept/eager/unheard-of", "accept/fused/verify-width", "accept/eager/eligible", "ghost/eager/verify-width"],
    ids=["unknown-reason", "a-check-on-the-fused-path", "eligible-on-the-eager-path", "check-of-another-operation"],
)
def test_a_reason_that_no_check_declares_fails_a_complete_run(suite: Suite, planted: str) -> None:
    run = suite.run({"test_world": WORLD}, PLANT=planted)
    op, path, reason = planted.split("/")
    assert set(run.outcomes.values()) == {"PASSED"}
    assert run.record["problems"] == [f"{op}: the census counted ({path}, {reason}), which no check declares"]
    assert run.status == 1


def test_a_suite_without_cases_is_not_green(suite: Suite) -> None:
    run = suite.run({})
    assert run.status == 1
    assert "accept: no case violates the check verify-width" in run.record["problems"]


# --- Partial runs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([f"{CASES}/test_world.py::test_usual_reasons[accept]"], "single cases were named"),
        (["-k", "not passes"], "1 cases were deselected"),
        ([f"--deselect={CASES}/test_more.py::test_passes"], "1 cases were deselected"),
        ([f"{CASES}/test_world.py"], "not collected: test_more.py"),
        ([f"--ignore={CASES}/test_more.py"], "not collected: test_more.py"),
    ],
    ids=["case", "k", "deselect", "file", "ignore"],
)
def test_a_part_of_the_suite_says_so_and_is_judged_by_its_cases(
    suite: Suite, arguments: list[str], reason: str
) -> None:
    run = suite.run({"test_world": WORLD, "test_more": PASSES}, *arguments, OMIT="decision/accept/verify-width")
    assert (run.status, run.record["partial"], run.record["problems"]) == (0, reason, []), run.output
    assert f"\npartial run: {reason}; the closed-world rules were not applied\n" in run.output


def test_a_run_that_stops_early_is_partial(suite: Suite) -> None:
    cases = {"test_a_stop": PRELUDE + "def test_fails(): assert 0", "test_world": WORLD}
    run = suite.run(cases, "-x")
    assert run.status == 1
    assert re.fullmatch(r"1 of \d+ cases were run", run.record["partial"])
    assert run.record["problems"] == []


# --- Cases that must fail ---------------------------------------------------------------------------------------------

BAD = """
def test_compares_nothing():
    pass

def test_leaves_a_fault_unread():
    expect_equal(LABEL, "value", 1, 1)
    faults.set_where(torch.tensor([True]), 1)

def test_fails_with_a_fault_and_a_census():
    expect_equal(LABEL, "value", 1, 1)
    faults.set_where(torch.tensor([True]), 1)
    dispatch._count((dispatch.CensusKey("topic", dispatch.Path.EAGER, "something"),))
    assert 0

def test_starts_clean():
    expect_equal(LABEL, "faults of the case before", faults.peek(), ())
    expect_equal(LABEL, "census of the case before", dispatch.census(), {})

def test_compares_nothing_after_one_that_did():
    pass

def test_reads_its_fault():
    faults.set_where(torch.tensor([True]), 1)
    expect_equal(LABEL, "number of faults", len(faults.peek()), 1)
    with pytest.raises(IndexError):
        faults.check()
"""


def test_a_case_fails_when_it_compares_nothing_or_leaves_a_fault(suite: Suite) -> None:
    run = suite.run({"test_bad": PRELUDE + BAD})
    assert {name.removeprefix("test_bad.py::"): outcome for name, outcome in run.outcomes.items()} == {
        "test_compares_nothing": "FAILED",
        "test_leaves_a_fault_unread": "FAILED",
        "test_fails_with_a_fault_and_a_census": "FAILED",
        "test_starts_clean": "PASSED",
        "test_compares_nothing_after_one_that_did": "FAILED",
        "test_reads_its_fault": "PASSED",
    }
    assert run.output.count("compared nothing: it called none of the expect_* helpers") >= 2
    assert re.search(r"test_leaves_a_fault_unread left index faults unread: \(\('accept', ", run.output)
    assert run.status == 1


# --- Lanes ------------------------------------------------------------------------------------------------------------

LANES = """
@pytest.mark.lanes("cuda")
def test_compiled(): expect_equal(LABEL, "lane", os.environ.get("TRITON_INTERPRET"), None)

@pytest.mark.lanes("interpret")
def test_interpreted(): expect_equal(LABEL, "lane", os.environ["TRITON_INTERPRET"], "1")

@pytest.mark.lanes("interpret", "cuda")
def test_both(): expect_equal(LABEL, "value", 1, 1)

def test_triton_is_imported_in_this_lane(lane):
    assert "triton" not in sys.modules
    import triton
    def kernel(): pass
    kind = "InterpretedFunction" if lane == "interpret" else "JITFunction"
    expect_equal(LABEL, "kernels", type(triton.jit(kernel)).__name__, kind)
"""

PRETENDED_GPU = """
import torch
torch.cuda.is_available = lambda: True
torch.cuda.get_device_name = lambda index: "pretended"
"""


@pytest.mark.parametrize(
    ("arguments", "inherited", "lane", "other"),
    [
        (["--lane=interpret"], "0", "interpret", "compiled"),
        (["--lane=auto"], "", "interpret", "compiled"),
        (["--lane=auto", "-p", "pretended_gpu"], "1", "cuda", "interpreted"),
        (["--lane=interpret", "-p", "pretended_gpu"], "0", "interpret", "compiled"),
    ],
    ids=["interpret", "auto-without-gpu", "auto-with-gpu", "interpret-with-gpu"],
)
def test_a_lane_runs_its_own_cases_and_lists_the_others(
    suite: Suite, arguments: list[str], inherited: str, lane: str, other: str
) -> None:
    (suite.folder / "triton.py").unlink()
    (suite.folder / "pretended_gpu.py").write_text(PRETENDED_GPU)
    cases = {"test_lanes": PRELUDE + LANES, "test_world": WORLD}
    run = suite.run(cases, *arguments, TRITON_INTERPRET=inherited)
    assert run.status == 0, run.output
    assert (run.record["lane"], run.record["partial"]) == (lane, "")
    assert run.record["not_offered"] == [f"{CASES}/test_lanes.py::test_{other}"]
    assert f"\nnot offered by this lane: 1 cases\n  test_{other}\n" in run.output
    assert sum(name.startswith("test_lanes") for name in run.outcomes) == 3
    assert "skipped" not in run.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--lane=cuda"], "--lane=cuda: torch sees no CUDA device"),
        (["--lane=gpu"], "argument --lane: invalid choice: 'gpu'"),
        (["-p", "imports_triton"], "triton was imported before the lane was chosen"),
    ],
    ids=["no-gpu", "unknown", "triton-too-early"],
)
def test_a_lane_that_cannot_be_had_is_a_usage_error(suite: Suite, arguments: list[str], message: str) -> None:
    (suite.folder / "imports_triton.py").write_text("import sys, types; sys.modules['triton'] = types.ModuleType('')")
    run = suite.run({"test_world": WORLD}, *arguments)
    assert run.status == pytest.ExitCode.USAGE_ERROR
    assert message in run.output
    assert (run.outcomes, run.caches) == ({}, [])


def test_collecting_prints_no_summary(suite: Suite) -> None:
    run = suite.run({"test_more": PASSES}, "--collect-only")
    assert (run.status, run.record) == (0, {})
    assert "dspark conformance" not in run.output


# --- Order ------------------------------------------------------------------------------------------------------------


MANY = """
@pytest.mark.parametrize("number", range(8))
def test_many(number): expect_equal(LABEL, "value", 1, 1)
"""


def test_a_seed_is_an_order(suite: Suite) -> None:
    def order(seed: int) -> list[str]:
        return list(suite.run({"test_a": PRELUDE + MANY, "test_b": PRELUDE + MANY}, f"--shuffle={seed}").outcomes)

    first, other = order(1), order(2)
    assert order(1) == first != other
    written = [f"test_{file}.py::test_many[{number}]" for file in "ab" for number in range(8)]
    assert sorted(first) == sorted(other) == written
    assert written not in (first, other)


# --- Workers ----------------------------------------------------------------------------------------------------------

# As many that each worker gets some of them in its first share.
CACHES = """
@pytest.mark.parametrize("number", range(80))
def test_cache(number):
    cache = os.environ["TRITON_CACHE_DIR"]
    with open(os.environ["CACHES"], "a") as log: log.write(f"{os.environ.get('PYTEST_XDIST_WORKER')} {cache}\\n")
    expect_equal(LABEL, "whether the cache exists", os.path.isdir(cache), True)
"""


def test_workers_count_together_what_one_process_counts(suite: Suite) -> None:
    cases = {"test_world": WORLD, "test_caches": PRELUDE + CACHES}
    runs, used = [], []
    for number in ("0", "2"):
        log = suite.folder / f"caches-{number}"
        runs.append(suite.run(cases, "-n", number, CACHES=str(log)))
        used.append({tuple(line.split()) for line in log.read_text().splitlines()})
    one, two = runs
    assert (one.status, two.status) == (0, 0), two.output
    for key in ("rows", "census", "not_offered", "partial", "problems"):
        assert one.record[key] == two.record[key]
    assert [worker for worker, _ in used[0]] == ["None"]
    assert sorted(worker for worker, _ in used[1]) == ["gw0", "gw1"]
    assert len({cache for _, cache in used[0] | used[1]}) == 3
    assert all(Path(cache).parent == suite.folder / "tmp" for _, cache in used[0] | used[1])
    assert (one.caches, two.caches) == ([], [])


def test_a_worker_that_dies_in_a_case_fails_the_run(suite: Suite) -> None:
    cases = {"test_world": WORLD, "test_dies": PRELUDE + "def test_dies(): os._exit(0)"}
    run = suite.run(cases, "-n", "2", "--max-worker-restart=0")
    assert run.status != 0
    assert re.search(r"^FAILED worker gw[01] ended without its ledger", run.output, re.MULTILINE)


DIES_LAST = """
import os, pytest
@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session):
    if getattr(session.config, "workerinput", {}).get("workerid") == "gw1":
        os._exit(0)
"""


def test_a_worker_that_dies_after_its_last_case_fails_the_run(suite: Suite) -> None:
    (suite.folder / "dies_last.py").write_text(DIES_LAST)
    run = suite.run({"test_world": WORLD}, "-n", "2", "-p", "dies_last", "--max-worker-restart=0")
    assert " failed" not in run.output
    assert any(problem.startswith("worker gw1 ended without its ledger") for problem in run.record["problems"])
    assert run.status == run.record["exit_status"] == 1


if __name__ == "__main__":
    serve()
