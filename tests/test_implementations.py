"""``--impl``: another implementation is judged, what it lacks is listed, and its findings are compared with a file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

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


def run(folder: Path, fault: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The cases of ``accept`` named by ``arguments``, on the toy with ``fault``."""
    (folder / "toy_implementation.py").write_text(f"FAULT = {fault!r}\n{TOY}")
    paths = [str(ROOT / "src"), str(ROOT), str(folder)]
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--tb=no", "-p", "no:cacheprovider", "--impl=toy_implementation:toy"]
        + list(arguments),
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
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
    assert "1 cases hold, 0 broke 0 clauses" in done.stdout


def test_a_broken_clause_is_caught_and_named(tmp_path: Path) -> None:
    done = run(tmp_path, "bonus", window("window/B7-W8-fused"))
    assert done.returncode == 1
    assert (
        "accept: the result is the contract's: 1 cases, test_accept.py::test_window[window/B7-W8-fused]" in done.stdout
    )


def test_a_crash_is_a_finding_and_the_run_goes_on(tmp_path: Path) -> None:
    done = run(tmp_path, "crash", window("window/B5-W1024-fused"), window("window/B7-W8-fused"))
    assert done.returncode == 1
    assert "1 cases hold, 1 broke 1 clauses" in done.stdout
    assert "the process ended by SIGSEGV" in done.stdout


def test_what_is_lacking_is_listed_and_not_passed(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        "",
        window("verify-lens-int64-strided-fused"),
        "conformance/cases/test_commit_indices.py::test_rows[no-rows-fused]",
        "conformance/cases/test_accept.py::test_a_verify_len_out_of_range_is_clamped[fused]",
    )
    assert "0 cases hold, 0 broke 0 clauses" in done.stdout
    assert "compute_dflash_correct_drafts_and_bonus: the argument verify_lens (1 cases)" in done.stdout
    assert "not offered, not passed: the function fused_commit_track_indices (1 cases)" in done.stdout
    assert "about dspark itself: test_accept.py::test_a_verify_len_out_of_range_is_clamped (1)" in done.stdout


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
