"""``--impl``: another implementation is judged, what it lacks is listed, and its findings are compared with a file."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from conformance.fixtures import explain
from conformance.fixtures.implementations import NotOfferedError, adapted, findings
from conformance.fixtures.implementations import __main__ as pages

ROOT = Path(__file__).resolve().parent.parent
TOY = """
import os, signal
import torch

class Toy:
    name, version = "toy", "1"
    offers = {"compute_dflash_correct_drafts_and_bonus": ("fused",)}

    def compute_dflash_correct_drafts_and_bonus(self, *, candidates, target_predict):
        if not isinstance(candidates, torch.Tensor) or candidates.ndim != 2:
            raise ValueError("candidates")
        if FAULT == "crash" and candidates.shape[1] == 1024:
            os.kill(os.getpid(), signal.SIGSEGV)
        matches = (candidates[:, 1:] == target_predict[:, :-1]).int().cumprod(dim=1).sum(dim=1)
        bonus = target_predict.gather(1, matches[:, None].long())[:, 0].long()
        return matches.int(), bonus + (FAULT == "bonus")

toy = Toy()
"""


def environment(*folders: Path) -> dict[str, str]:
    paths = [str(path) for path in (ROOT / "src", ROOT, *folders)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}


def run(folder: Path, fault: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The cases of ``accept`` named by ``arguments``, on the toy with ``fault``."""
    (folder / "toy_implementation.py").write_text(f"FAULT = {fault!r}\n{TOY}")
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--tb=no", "-p", "no:cacheprovider", "--impl=toy_implementation:toy"]
        + list(arguments),
        cwd=ROOT,
        env=environment(folder),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def window(id: str) -> str:
    return f"conformance/cases/test_accept.py::test_window[{id}]"


def test_a_right_one_holds(tmp_path: Path) -> None:
    done = run(tmp_path, "", window("window/B7-W8-fused"))
    assert done.returncode == 0, done.stdout
    assert "1 cases hold, 0 do not: 0 findings" in done.stdout


def test_a_broken_clause_is_caught_and_named(tmp_path: Path) -> None:
    done = run(tmp_path, "bonus", window("window/B7-W8-fused"))
    assert done.returncode == 1
    function, case = "compute_dflash_correct_drafts_and_bonus", "test_accept.py::test_window[window/B7-W8-fused]"
    assert f"[wrong] {function}: an ordinary call: 1 cases, {case}" in done.stdout
    assert "bonus is the target's token at the index correct. (CONTRACTS.md section 6)" in done.stdout


def test_a_crash_is_a_finding_and_the_run_goes_on(tmp_path: Path) -> None:
    done = run(tmp_path, "crash", window("window/B5-W1024-fused"), window("window/B7-W8-fused"))
    assert done.returncode == 1
    assert "1 cases hold, 1 do not: 1 findings" in done.stdout
    assert "the process ended by SIGSEGV" in done.stdout


def test_workers_find_the_same(tmp_path: Path) -> None:
    """What is collected is counted by workers, what is found by the controller."""
    file = tmp_path / "toy.json"
    cases = ("conformance/cases/test_accept.py", "-k", "test_error or B7-W8", f"--findings={file}")
    assert run(tmp_path, "bonus", *cases).returncode == 1
    alone = json.loads(file.read_text())
    assert (alone["broken"], alone["about_dspark_itself"], alone["other_paths"]) == (8, 1, 62)
    assert run(tmp_path, "bonus", *cases, "-n1").returncode == 0


def test_what_is_lacking_is_listed_and_not_passed(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        "",
        window("verify-lens-int64-strided-fused"),
        "conformance/cases/test_commit_indices.py::test_rows[no-rows-fused]",
        "conformance/cases/test_commit_indices.py::test_rows_do_not_depend_on_the_tile[fused]",
    )
    assert "0 cases hold, 0 do not: 0 findings" in done.stdout
    assert "compute_dflash_correct_drafts_and_bonus: the argument verify_lens (1 cases)" in done.stdout
    assert "not offered, not passed: the function fused_commit_track_indices (1 cases)" in done.stdout
    assert "about dspark itself: test_commit_indices.py::test_rows_do_not_depend_on_the_tile (1)" in done.stdout


def test_a_path_that_is_not_offered_is_not_collected(tmp_path: Path) -> None:
    done = run(tmp_path, "bonus", window("window/B7-W8-eager"))
    assert "1 on other paths" in done.stdout


@pytest.mark.parametrize("fault", ["", "bonus"])
def test_findings_are_compared_with_the_file(fault: str, tmp_path: Path) -> None:
    """Written first and exit 1; then equal and exit 0, broken clauses or not; a change is exit 1."""
    file = tmp_path / "toy.json"
    arguments = (f"--findings={file}", window("window/B7-W8-fused"))
    assert run(tmp_path, fault, *arguments).returncode == 1
    assert len(json.loads(file.read_text())["findings"]) == (fault == "bonus")
    assert run(tmp_path, fault, *arguments).returncode == 0
    assert run(tmp_path, "" if fault else "bonus", *arguments).returncode == 1


def test_an_unknown_implementation_is_a_usage_error(tmp_path: Path) -> None:
    done = run(tmp_path, "", window("window/B7-W8-fused"), "--impl=nowhere:thing")
    assert done.returncode == 4
    assert "need dspark, sglang[=PATH] or module:object" in done.stderr + done.stdout


def ended(**changes: str) -> dict[str, str]:
    """How a case of commit_indices ended, as its child tells it."""
    found = {"outcome": "broken", "function": "fused_commit_track_indices", "what": "last", "error": "", "got": "5"}
    return {**found, "need": "1", "extent": "1 of 2 elements, the first at index 0: ", "message": ""} | changes


@pytest.mark.parametrize(
    ("name", "changes", "kind", "came"),
    [
        ("test_rows[tree/B4]", {}, "wrong", "last: 1 of 2 elements, the first at index 0: 5"),
        ("test_rows[lengths-at-the-limit-of-int64]", {}, "wrong", "last: another value"),
        (
            "test_rows[tree/B4]",
            {"what": "last of rows that accept nothing"},
            "choice",
            "last of rows that accept nothing: 1 of 2 elements, the first at index 0: 5",
        ),
        ("test_rows[F4-4-minus-one-is-negative]", {}, "unchecked", "last: another value"),
        (
            "test_rows[tree/B4]",
            {"outcome": "raised", "error": "IndexError: list\n0x7f1234567890"},
            "raises",
            "IndexError: list",
        ),
        ("test_rows[tree/B4]", {"outcome": "crashed", "message": "the process ended"}, "wrong", "the process ended"),
        ("test_rows[F4-4]", {"outcome": "crashed", "message": "the process ended"}, "unchecked", "the process ended"),
        ("test_error[ids-floating]", {"what": "error"}, "unchecked", "no error"),
        ("test_error[no-nodes]", {"outcome": "crashed", "what": "how the child ended"}, "unchecked", "no error"),
        ("test_error[ids-a-list]", {"what": "error", "error": "TypeError: 5"}, "choice", "TypeError: 5"),
        ("test_error[ids-a-list]", {"what": "error", "error": "InterpreterError: 5"}, "choice", "InterpreterError"),
        ("test_error[no-nodes]", {"what": "nothing is written"}, "unchecked", "an error, after something was written"),
    ],
)
def test_kinds_of_finding(name: str, changes: dict[str, str], kind: str, came: str) -> None:
    row = findings.finding(f"test_commit_indices.py::{name}", ended(**changes))
    assert (row["kind"], row["came"]) == (kind, came)


def test_another_implementation_cannot_be_chosen_too_late() -> None:
    """Who holds one of dspark's own functions already would judge it under the other's name."""
    code = (
        "from conformance.fixtures import implementations as i\n"
        "i.function('table_qk_norm_rope_')\n"
        "try: i.choose('sglang')\n"
        "except i.ImplementationError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert "dspark's own functions are in use: table_qk_norm_rope_" in done.stdout


def test_the_kernels_of_another_round_bf16_rightly(tmp_path: Path) -> None:
    """The interpreter as shipped cuts fp32 to bf16: what it does wrong would be blamed on the implementation."""
    (tmp_path / "toy_implementation.py").write_text(f"FAULT = ''\n{TOY}")
    code = (
        "from conformance.fixtures import implementations as i\n"
        "from dspark import machine\n"
        "i.choose('toy_implementation:toy')\n"
        "print('lacks', machine.probe_interpreter_bf16())\n"
    )
    where = {**environment(tmp_path), "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=where, capture_output=True, text=True)
    assert done.stdout == "lacks ()\n", done.stderr


def test_an_argument_with_the_value_that_it_defaults_to_asks_for_nothing_more() -> None:
    given: list[dict[str, object]] = []

    def theirs(*, head_dim: int) -> None:
        given.append({"head_dim": head_dim})

    def ours(head_dim: int, rotary_dim: int | None = None) -> None: ...

    call = adapted("it", theirs, inspect.signature(ours), ("fused",))
    call(64, rotary_dim=64)
    assert given == [{"head_dim": 64}]
    with pytest.raises(NotOfferedError, match="the argument rotary_dim"):
        call(64, rotary_dim=32)


def test_the_page_is_what_the_committed_findings_give() -> None:
    assert pages.PAGE.read_text(encoding="utf-8") == pages.page()


@pytest.mark.parametrize("file", sorted(pages.FINDINGS.glob("*.json")), ids=lambda file: file.stem)
def test_committed_findings_name_cases_that_there_are(file: Path) -> None:
    data = json.loads(file.read_text(encoding="utf-8"))
    assert file.name == f"{data['implementation']}-{data['version']}.json"
    assert data["broken"] == sum(len(row["cases"]) for row in data["findings"])
    for case in {case for row in data["findings"] for case in row["cases"]}:
        assert explain.find(case).function.name in case


def test_two_releases_are_committed() -> None:
    assert [file.name for file in sorted(pages.FINDINGS.glob("*.json"))] == ["sglang-0.5.19.json", "sglang-0.5.23.json"]
