"""The engine of the mutants: patterns, operators, verdicts, the score, and the command.

Verdicts are tried on a toy package, in a process of its own, since the engine forks.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from conformance.fixtures.mutants import cli, operators
from conformance.fixtures.mutants.catalogue import CHECKERS, PRODUCT, CatalogueError, Entry, Group, entries, rewritten
from conformance.fixtures.mutants.engine import Baseline, Result, Verdict
from conformance.fixtures.mutants.mutant import Change, Mutant, Source, mutants_of
from conformance.fixtures.mutants.patterns import Edit, filled, match, parsed, places
from conformance.fixtures.mutants.rewrites import Rewrite
from conformance.fixtures.mutants.score import listed, score
from conformance.fixtures.mutants.topics import Judge, Topic

ROOT = Path(__file__).resolve().parent.parent


def source(text: str, name: str = "toy.py") -> Source:
    return Source(name, "toy", Path(name), textwrap.dedent(text))


# --- Patterns ---------------------------------------------------------------------------------------------------------


def test_a_hole_stands_for_the_same_expression_everywhere() -> None:
    holes: dict[str, object] = {}
    assert match(parsed("A_ + A_"), parsed("f(x) + f(x)"), holes)  # type: ignore[arg-type]
    assert not match(parsed("A_ + A_"), parsed("f(x) + f(y)"), {})
    assert filled("A_ * 2", holes) == "f(x) * 2"  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("pattern", "code"),
    [("load(P_, mask=M_)", "load(p, other=m)"), ("x < 1", "x <= 1"), ("x < 1", "x < True"), ("A_ - 1", "a - 2")],
)
def test_what_differs_does_not_match(pattern: str, code: str) -> None:
    assert not match(parsed(pattern), parsed(code), {})


def test_a_pattern_is_one_expression_or_statement() -> None:
    with pytest.raises(ValueError, match="got 2 statements"):
        parsed("a = 1; b = 2")


def test_places_leave_out_docstrings_annotations_and_f_strings() -> None:
    tree = source('def f(x: int) -> str:\n    "doc"\n    return f"{x + 1}"\n').tree
    assert [(type(place.node).__name__, place.scope) for place in places(tree)] == [
        ("FunctionDef", "-"),
        ("Return", "f"),
    ]


def test_an_edit_counts_bytes_so_that_other_letters_do_not_shift_it() -> None:
    text = source('"""né"""\nx = "ü" < y\n')
    (mutant,) = mutants_of(text, operators.comparisons(text))
    assert mutant.text == '"""né"""\nx = ("ü" <= y)\n'.replace('"ü"', "'ü'")
    assert Edit(0, 1, "b").apply("a") == "b"


def test_ids_name_function_kind_and_code_and_number_what_occurs_again() -> None:
    text = source("def f(a, b):\n    return a < b, a < b\n")
    assert [mutant.id for mutant in mutants_of(text, operators.comparisons(text))] == [
        "toy.py f lt-to-le: a < b",
        "toy.py f lt-to-le: a < b #2",
    ]


def test_a_change_that_changes_nothing_is_no_mutant() -> None:
    text = source("x = a\n")
    place = next(place for place in places(text.tree))
    assert mutants_of(text, [Change("same", place, "x = a")]) == []


# --- Operators --------------------------------------------------------------------------------------------------------

OPERATED = [
    ("comparisons", "x = 0 <= a < b", ["x = (0 < a < b)", "x = (0 <= a <= b)"]),
    ("raises", "if x:\n    raise E(x)", ["if x:\n    pass"]),
    ("effects", "f(x)\ny = f(x)", ["pass\ny = f(x)"]),
    ("effects", "def f():\n    return", ["def f():\n    pass"]),
    ("defaults", "def f(x=1, *, y=False, z=None): ...", ["def f(x=(3), *, y=False, z=None): ...",
                                                         "def f(x=1, *, y=(True), z=None): ..."]),
    ("conditions", "m = a & b", ["m = (a)", "m = (b)"]),
    ("checks", "C = (*M, Check('a', 'say', h))", ["C = (*(), Check('a', 'say', h))", "C = (*M, *())",
                                                  "C = (*M, (Check('a-renamed', 'say', h)))"]),
    ("connectives", "m = a and b and c", ["m = (b and c)", "m = (a and c)", "m = (a and b)"]),
    ("connectives", "m = f(~a) or not b", ["m = (not b)", "m = (f(~a))", "m = f((a)) or not b",
                                           "m = f(~a) or (b)"]),
    ("yields", "def f():\n    yield 1\n    x = yield", ["def f():\n    pass\n    x = yield"]),
    ("yields", "def f():\n    yield from g()", ["def f():\n    pass"]),
]  # fmt: skip


@pytest.mark.parametrize(("operator", "code", "expected"), OPERATED)
def test_operator(operator: str, code: str, expected: list[str]) -> None:
    text = source(code)
    assert [mutant.text for mutant in mutants_of(text, operators.OPERATORS[operator](text))] == expected


def test_a_check_is_inverted() -> None:
    text = source("def _a(facts) -> tuple[bool, Hashable]:\n    return facts.a == 1, facts.a\n")
    found = [mutant.text.splitlines()[1].strip() for mutant in mutants_of(text, operators.checks(text))]
    assert found == ["return not (facts.a == 1), facts.a"]


# --- The catalogue ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def catalogues() -> dict[Group, list[Entry]]:
    return {group: entries(cli.folder(group), group.topics, group.rewrites) for group in cli.GROUPS}


@pytest.fixture(scope="module")
def catalogue(catalogues: dict[Group, list[Entry]]) -> list[Entry]:
    return [entry for part in catalogues.values() for entry in part]


@pytest.mark.parametrize("group", cli.GROUPS, ids=lambda group: group.name)
def test_the_catalogue_is_large(group: Group, catalogues: dict[Group, list[Entry]]) -> None:
    assert len(catalogues[group]) >= 250
    assert {entry.topic.name for entry in catalogues[group]} == {topic.name for topic in group.topics}


def test_ids_and_topics_are_their_own_over_both_groups(catalogue: list[Entry]) -> None:
    ids = [entry.mutant.id for entry in catalogue]
    assert len(ids) == len(set(ids))
    names = [topic.name for group in (PRODUCT, CHECKERS) for topic in group.topics]
    assert len(names) == len(set(names))


def test_modules_are_those_that_are_imported(catalogue: list[Entry]) -> None:
    modules = {entry.mutant.source.module: entry.mutant.source.path for entry in catalogue}
    assert {"dspark.dispatch", "dspark.ops.accept", "conformance.fixtures.guard"} <= set(modules)
    assert all(str(path).endswith(name.replace(".", "/") + ".py") or path.name == "__init__.py"
               for name, path in modules.items())  # fmt: skip


def test_every_listed_equivalent_is_in_the_catalogue(catalogue: list[Entry]) -> None:
    assert set(listed()) <= {entry.mutant.id for entry in catalogue}


def test_every_raise_that_is_mutated_has_a_mutant(catalogue: list[Entry]) -> None:
    removed = sum(" raise-removed: " in entry.mutant.id for entry in catalogue)
    texts = {entry.mutant.source.name: entry.mutant.source.text for entry in catalogue}
    lines = [line.strip() for text in texts.values() for line in text.splitlines()]
    raises = [line for line in lines if line == "raise" or line.startswith("raise ")]
    # The end of a command, and refusals of a run, are judged from outside.
    outside = [line for line in raises if line.startswith(("raise SystemExit(main(", "raise pytest.UsageError(str("))]
    assert removed == len(raises) - len(outside)


def test_a_rewrite_that_finds_nothing_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "toy.py").write_text("x = 1\n")
    with pytest.raises(CatalogueError, match="gone"):
        entries(tmp_path, [Topic("toy", ("toy.py",), ())], [Rewrite("gone", "y + 1", "y")])


def test_a_source_that_is_gone_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CatalogueError, match=r"gone\.py is not there"):
        entries(tmp_path, [Topic("toy", ("gone.py",), ())], [])


def test_a_rewrite_keeps_to_its_scope() -> None:
    text = source("def f():\n    return a + 1\ndef g():\n    return a + 1\n")
    found = list(rewritten(Rewrite("less", "A_ + 1", "A_", scope="g"), text))
    assert [change.place.scope for change in found] == ["g"]


# --- The score --------------------------------------------------------------------------------------------------------


def result(id: str, verdict: Verdict) -> Result:
    mutant = Mutant(id, source("x = 1\n"), Edit(0, 0, ""))
    return Result(Entry(Topic("toy", (), ()), mutant), verdict, "", 0.0)


def test_score_of_killed_listed_and_survivors() -> None:
    results = [result("a", Verdict.FAILED), result("b", Verdict.TIMED_OUT), result("c", Verdict.CRASHED)]
    results += [result("d", Verdict.SURVIVED), result("e", Verdict.SURVIVED)]
    total = score(results, {"d": "why"}, "abcde")
    assert total.line() == "5 mutants, 3 killed, 1 listed, 1 survived"
    assert total.survivors == ("e",)
    assert not total.ok


def test_a_listed_mutant_that_is_killed_or_gone_fails() -> None:
    total = score([result("a", Verdict.FAILED)], {"a": "why", "gone": "why"}, "ab")
    assert total.stale == ("a", "gone")
    assert not total.ok
    assert score([result("a", Verdict.FAILED)], {"b": "why"}, "ab").ok


def test_a_listed_mutant_needs_a_reason(tmp_path: Path) -> None:
    file = tmp_path / "equivalent.json"
    file.write_text(json.dumps([{"why": " ", "mutants": ["a"]}]))
    with pytest.raises(ValueError, match="without a reason"):
        listed(file)


# --- Verdicts ---------------------------------------------------------------------------------------------------------

TOY = """
import inspect

def less(a, b):
    return a < b

def spin(n):
    while n != 0:
        n -= 1

def unused(a, b):
    return a < b
"""
CASES = """
import inspect
import toy

def test_less():
    assert not toy.less(1, 1)
    assert toy.less(1, 2)

def test_spin():
    toy.spin(3)

def test_source():
    assert inspect.getsource(toy.less).count("=") == 0
"""
DRIVER = """
import json, sys
from pathlib import Path
from conformance.fixtures.mutants.catalogue import entries
from conformance.fixtures.mutants.engine import BaselineError, Zygote
from conformance.fixtures.mutants.topics import Judge, Topic

root = Path(sys.argv[1])
topic = Topic("toy", ("toy.py",), (Judge("tests/test_toy.py"),), ("comparisons", "effects"))
zygote = Zygote(root, root, timeout=3.0)
try:
    zygote.baseline([topic])
except BaselineError as error:
    print(json.dumps(str(error)))
    sys.exit(2)
results = zygote.judge(entries(root, [topic], []))
print(json.dumps({result.entry.mutant.id: [str(result.verdict), result.by] for result in results}))
assert "toy" not in sys.modules
"""


def drive(folder: Path, toy: str, cases: str, program: str = DRIVER) -> tuple[int, object]:
    """Judge every mutant of ``toy`` by ``cases``."""
    (folder / "tests").mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "toy.py").write_text(toy)
    (folder / "tests" / "test_toy.py").write_text(cases)
    (folder / "driver.py").write_text(
        program.replace("entries(root, [topic], [])", "named(entries(root, [topic], []))").replace(
            "root = Path", NAMED + "root = Path"
        )
    )
    done = subprocess.run(
        [sys.executable, str(folder / "driver.py"), str(folder)],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])},
    )
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout.splitlines()[-1])


NAMED = """
from dataclasses import replace
def named(found):
    # The toy is a module of its own, not of a package.
    return [replace(e, mutant=replace(e.mutant, source=replace(e.mutant.source, module="toy"))) for e in found]

"""


def test_verdicts_of_a_killed_a_hanging_and_an_unseen_mutant(tmp_path: Path) -> None:
    code, verdicts = drive(tmp_path, TOY, CASES)
    assert code == 0
    assert isinstance(verdicts, dict)
    assert verdicts["toy.py less lt-to-le: a < b"] == ["a case failed", verdicts["toy.py less lt-to-le: a < b"][1]]
    assert "test_toy.py::" in verdicts["toy.py less lt-to-le: a < b"][1]
    assert verdicts["toy.py spin update-removed: n -= 1"][0] == "timed out"
    assert verdicts["toy.py unused lt-to-le: a < b"] == ["survived", ""]


def test_triton_would_read_the_mutated_source(tmp_path: Path) -> None:
    """The quickest case that fails may be the one that inspects the source: alone, it must kill."""
    only_source = CASES.replace("def test_less", "def less").replace("def test_spin", "def spin")
    _, verdicts = drive(tmp_path, TOY, only_source)
    assert isinstance(verdicts, dict)
    assert verdicts["toy.py less lt-to-le: a < b"] == ["a case failed", "test_toy.py::test_source"]


def test_a_red_baseline_is_no_verdict(tmp_path: Path) -> None:
    code, message = drive(tmp_path, TOY, CASES + "\ndef test_red():\n    assert False\n")
    assert code == 2
    assert "without a mutant: a case failed" in str(message)


def test_a_mutant_that_ends_the_process_crashed(tmp_path: Path) -> None:
    toy = "import os\n\ndef leave(a):\n    if a < 1:\n        os.abort()\n"
    _, verdicts = drive(tmp_path, toy, "import toy\n\ndef test_leave():\n    toy.leave(1)\n")
    assert verdicts == {
        "toy.py leave lt-to-le: a < 1": ["crashed", verdicts["toy.py leave lt-to-le: a < 1"][1]],  # type: ignore[index,call-overload]
        "toy.py leave call-removed: os.abort()": ["survived", ""],
    }


def test_a_source_that_was_imported_before_the_fork_is_no_verdict(tmp_path: Path) -> None:
    (tmp_path / "test_toy.py").write_text(CASES)
    program = DRIVER.replace("results = zygote", "import toy\ntry:\n    results = zygote").replace(
        "print(json.dumps({result",
        "except RuntimeError as error:\n    print(json.dumps(str(error)))\n    sys.exit(3)\nprint(json.dumps({result",
    )
    code, message = drive(tmp_path, TOY, CASES, program)
    assert (code, message) == (3, "mutants: toy was imported before its mutants were forked")


def test_what_hangs_is_waited_for_as_long_as_the_cases_that_judge_take() -> None:
    known = Baseline({"a": 1.0, "b": 3.0}, frozenset({"a"}), whole=8.0)
    assert known.expected == 2.0
    assert Baseline({}, frozenset()).expected == 0.0


# --- The command ------------------------------------------------------------------------------------------------------


def test_list_prints_ids_and_runs_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--list", "--group", "product", "--op", "pointers"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines
    assert all(line.startswith("pointers.py ") for line in lines)


def test_a_group_may_be_asked_for_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--list", "--group", "checkers"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines
    assert all(line.startswith("fixtures/") for line in lines)


def test_changed_files_are_those_that_differ_from_head(tmp_path: Path) -> None:
    git = ["git", "-c", "user.name=n", "-c", "user.email=e"]
    (tmp_path / "src").mkdir()
    for name in ("kept.py", "edited.py"):
        (tmp_path / "src" / name).write_text("x = 1\n")
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "m"]):
        subprocess.run([*git, *command], cwd=tmp_path, check=True)
    (tmp_path / "src" / "edited.py").write_text("x = 2\n")
    (tmp_path / "src" / "new.py").write_text("x = 3\n")
    assert cli.changed_files(tmp_path / "src") == {"edited.py", "new.py"}


def test_a_mutant_of_each_group_is_killed_and_the_last_lines_are_the_sums(tmp_path: Path) -> None:
    """The command as a person runs it, on a copy, since a source that is edited meanwhile would be no verdict."""
    for name in ("src", "conformance", "tests"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    only = ("dispatch.py register *-removed*twice*", "fixtures/guard.py Arena.verify call-removed*")
    command = [sys.executable, "-m", "conformance.fixtures.mutants", *(f"--only={glob}" for glob in only)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path / "src"), str(tmp_path)])}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    one = "1 mutants, 1 killed, 0 listed, 0 survived"
    assert done.stdout.splitlines()[-3:] == [
        f"checkers: {one}",
        f"product: {one}",
        "2 mutants, 2 killed, 0 listed, 0 survived",
    ], done.stdout + done.stderr
    assert done.returncode == 0


def test_judges_are_files_that_exist() -> None:
    suite = ROOT / "conformance"
    files = {judge.file for group in cli.GROUPS for topic in group.topics for judge in topic.judges}
    assert [file for file in files if not ((suite if file.startswith("cases/") else ROOT) / file).is_file()] == []
    assert Judge("cases/test_accept.py").within == ""
