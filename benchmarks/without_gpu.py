"""What can be timed where there is no GPU: the suite itself, the seconds that its cases of each operation take.

Nothing of this says how fast an operation is; Triton's interpreter runs the kernels.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from . import suite

Row = dict[str, Any]
CASES = {
    "qk_norm_rope": ("test_qk_norm_rope.py", "test_qk_exact.py"),
    "kv_write": ("test_kv_write.py",),
    "state_scatter": ("test_state_scatter.py", "test_state_errors.py"),
    "accept": ("test_accept.py",),
    "commit_indices": ("test_commit_indices.py",),
    "accept_commit": ("test_accept_commit.py",),
    "write_target_hidden_kv": ("test_kv_inject.py",),
}
"""The case files that call an operation and little else."""
QUICK = "test_error"
"""With ``--quick``: cases of this name only."""


def run(ops: Sequence[str], quick: bool, say: Callable[[str], None]) -> list[Row]:
    """A row for each operation: cases, failures, their seconds, and the slowest case."""
    return [_timed(op, quick, say) for op in ops]


def _timed(op: str, quick: bool, say: Callable[[str], None]) -> Row:
    folder = suite.folder()
    files = [str(folder / "cases" / name) for name in CASES[op]]
    with tempfile.TemporaryDirectory() as place:
        report = Path(place) / "cases.xml"
        options = ["-p", "no:cacheprovider", "-q", f"--rootdir={folder}", f"--junitxml={report}", "-n", "0"]
        command = [sys.executable, "-m", "pytest", *options, *(["-k", QUICK] if quick else []), *files]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        if not report.is_file():
            reason = (done.stderr or done.stdout).strip().rpartition("\n")[2][:240]
            return {"op": op, "status": "failed", "reason": reason}
        cases = [
            (float(case.get("time", 0)), f"{case.get('classname', '').rpartition('.')[2]}.py::{case.get('name')}", case)
            for case in ElementTree.parse(report).iter("testcase")
        ]
    failures = sum(case.find("failure") is not None or case.find("error") is not None for _, _, case in cases)
    seconds, slowest = sum(time for time, _, _ in cases), max(cases, key=lambda case: case[0], default=(0.0, "", None))
    row = {
        "op": op,
        "status": "ok" if cases and not failures else "failed",
        "cases": len(cases),
        "failures": failures,
        "seconds": seconds,
        "slowest": slowest[1],
        "slowest_seconds": slowest[0],
    }
    say(f"{op}: {len(cases)} cases in {seconds:.1f} s, slowest {slowest[0]:.1f} s {slowest[1]}")
    return row
