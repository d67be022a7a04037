"""The committed world, waivers and isolation, from outside: small suites under the real plugin."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from test_plugin import PASSES, PRELUDE, WORLD, Suite, server, suite

from conformance.fixtures import world
from conformance.fixtures.ledger import Ledger

__all__ = ["server", "suite"]


def rewrite(suite: Suite, name: str, value: object) -> None:
    (suite.folder / "conformance" / name).write_text(json.dumps(value))


def triples() -> list[list[str]]:
    return [list(triple) for triple in world.declared()]


def test_every_declared_triple_is_fused_eager_or_refused() -> None:
    assert {path for _, path, _ in world.declared()} == {"fused", "eager", "refused"}
    assert ("kv_write", "refused", "pools-by-pointer") in world.declared()


def test_the_committed_triples_are_the_declared_ones() -> None:
    assert json.loads(world.FILE.read_text())["triples"] == triples()


COUNTS = {"accept/fused": {"cases": 1, "comparisons": 1}}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"triples": triples()[1:], "counts": {}}, "exists and is not in world.json"),
        ({"triples": [*triples(), ["accept", "eager", "gone"]], "counts": {}}, "does not exist"),
        (
            {"triples": triples(), "counts": {"interpret": {"accept/fused": {"cases": 99, "comparisons": 1}}}},
            "accept/fused: cases dropped from 99 to 2",
        ),
        (
            {"triples": triples(), "counts": {"interpret": {"gone/fused": {"cases": 1, "comparisons": 1}}}},
            "gone/fused: comparisons dropped from 1 to 0",
        ),
    ],
    ids=["unknown-triple", "vanished-triple", "fewer-cases", "vanished-row"],
)
def test_a_complete_run_is_compared_with_the_file(content: dict[str, Any], said: str, suite: Suite) -> None:
    rewrite(suite, "fixtures/world.json", content)
    run = suite.run({"test_world": WORLD})
    assert run.status == 1
    assert said in run.output


def test_more_than_the_file_says_is_green_and_said(suite: Suite) -> None:
    run = suite.run({"test_world": WORLD})
    assert run.status == 0, run.output
    assert "more is compared than world.json says" in run.output


def test_a_partial_run_is_not_compared(suite: Suite) -> None:
    rewrite(suite, "fixtures/world.json", {"triples": [], "counts": {}})
    run = suite.run({"test_world": WORLD, "test_more": PASSES}, "-k", "test_passes")
    assert run.status == 0, run.output


def record(**changes: Any) -> dict[str, Any]:
    row = {"cases": 3, "comparisons": 7, "elements": 9}
    base = {"lane": "cuda", "partial": "", "problems": [], "exit_status": 0, "rows": {"accept/fused": row}}
    return {**base, **changes}


def test_the_file_is_updated_from_complete_green_records() -> None:
    old = {"triples": [], "counts": {"interpret": COUNTS}}
    new = world.updated(old, [record()])
    assert new["triples"] == triples()
    assert new["counts"] == {"cuda": {"accept/fused": {"cases": 3, "comparisons": 7}}, "interpret": COUNTS}
    own = record(exit_status=1, problems=["accept/fused: cases dropped from 9 to 3"])
    assert world.updated(old, [own]) == new


@pytest.mark.parametrize(
    "changes",
    [{"partial": "one case"}, {"exit_status": 1}, {"exit_status": 1, "problems": ["no case violates x"]}],
    ids=["partial", "failed", "other-problem"],
)
def test_other_records_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="not of a complete green run"):
        world.updated({"counts": {}}, [record(**changes)])


def test_an_empty_book_has_seen_nothing() -> None:
    assert world.seen(Ledger()) == set()


def test_a_process_may_run_the_suite_twice(suite: Suite) -> None:
    """The second run starts from an empty ledger and counts what the first one counted."""
    (suite.folder / "conformance" / "cases").mkdir(exist_ok=True)
    (suite.folder / "conformance" / "cases" / "__init__.py").touch()
    (suite.folder / "conformance" / "cases" / "test_world.py").write_text(WORLD)
    arguments = ["conformance", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--lane=interpret"]
    program = f"""
import pytest
print([int(pytest.main([*{arguments}, f"--record=run{{number}}.json"])) for number in range(2)])
"""
    source = str(Path(world.__file__).resolve().parents[2] / "src")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "TRITON"))}
    result = subprocess.run(
        [sys.executable, "-c", program],
        cwd=suite.folder,
        env={**kept, "PYTHONPATH": source},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.stdout.splitlines()[-1] == "[0, 0]", result.stdout + result.stderr
    first, second = (json.loads((suite.folder / f"run{number}.json").read_text()) for number in range(2))
    assert first["rows"] == second["rows"] != {}


WAIVED = {
    "case": "test_a.py::test_fails",
    "issue": "7",
    "owner": "maintainer",
    "expires": "2999-01-01",
    "failure": "topic/-: value: got 1, need 2",
}
FAILS = PRELUDE + "def test_fails(): expect_equal(LABEL, 'value', 1, 2)\n"
FAILS_OTHERWISE = PRELUDE + "def test_fails(): expect_equal(LABEL, 'value', 1, 3)\n"
PASSES_NOW = PRELUDE + "def test_fails(): expect_equal(LABEL, 'value', 2, 2)\n"


@pytest.mark.parametrize(
    ("source", "changes", "status", "said"),
    [
        (FAILS, {}, 0, "waived: test_a.py::test_fails"),
        (FAILS_OTHERWISE, {}, 1, "need 3"),
        (PASSES_NOW, {}, 1, "it passed"),
        (FAILS, {"expires": "2020-01-01"}, 1, "expired on 2020-01-01"),
        (FAILS, {"case": "test_a.py::test_other"}, 1, "matches no case"),
    ],
    ids=["the-exact-failure", "another-failure", "no-failure", "expired", "unmatched"],
)
def test_a_waiver_excuses_one_exact_failure(
    source: str, changes: dict[str, str], status: int, said: str, suite: Suite
) -> None:
    rewrite(suite, "waivers.json", [{**WAIVED, **changes}])
    run = suite.run({"test_a": source, "test_world": WORLD})
    assert run.status == status, run.output
    assert said in run.output


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("os.environ['DSPARK_TEST_LEAK'] = '1'", "environment DSPARK_TEST_LEAK"),
        ("torch.set_default_dtype(torch.float64)", "torch default dtype"),
        ("torch.use_deterministic_algorithms(True)", "torch deterministic algorithms"),
        ("import numpy; numpy.seterr(all='ignore')", "numpy errors"),
        ("torch.empty = torch.zeros", "torch.empty"),
    ],
    ids=lambda value: value if value[0].islower() and "=" not in value and "(" not in value else "change",
)
def test_a_case_that_changes_the_process_fails(change: str, named: str, suite: Suite) -> None:
    source = PRELUDE + f"def test_leaks():\n    {change}\n    expect_equal(LABEL, 'value', 1, 1)\n"
    run = suite.run({"test_a": source})
    assert run.status == 1
    assert f"left the process changed: {named}" in run.output
