"""What is launched under compute-sanitizer, and the reading of its reports."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from conformance.fixtures.sanitizer import table
from conformance.fixtures.sanitizer.calls import ENDED, KERNELS, TOOLS

ROOT = Path(__file__).resolve().parent.parent
LAUNCHED = "".join(f"launched {kernel}: 3 calls\n" for kernel in KERNELS) + ENDED + "\n"
CLEAN = "========= COMPUTE-SANITIZER\n" + LAUNCHED + "========= ERROR SUMMARY: 0 errors\n"
READ = """========= Invalid __global__ read of size 4 bytes
=========     at kv_write_kernel+0x1d0 in kernel.py:88
=========     by thread (124,0,0) in block (0,0,0)
=========     Access at 0x7f0 is out of bounds
=========     Saved host backtrace up to driver entry point at kernel launch time
=========         Host Frame: launch_kv_write_kernel [0x1234] in launcher.so
"""
RACE = """========= Error: Race reported between Write access at state_scatter_kernel+0x70 in kernel.py:12
=========     and Read access at state_scatter_kernel+0x90 in kernel.py:13 [96 hazards]
"""


def test_every_kernel_is_launched() -> None:
    sources = (ROOT / "src" / "dspark").rglob("kernel.py")
    names = {name for file in sources for name in re.findall(r"^def (\w+_kernel)\(", file.read_text(), re.MULTILINE)}
    assert set(KERNELS) == names


def test_the_calls_are_right_in_the_interpreter() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "conformance.fixtures.sanitizer.calls"],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    assert re.sub(r"\d+ calls", "3 calls", run.stdout) == LAUNCHED


@pytest.mark.parametrize("tool", TOOLS)
def test_a_clean_log(tool: str) -> None:
    log = CLEAN if tool != "racecheck" else CLEAN.replace("ERROR", "RACECHECK").replace("errors", "hazards displayed")
    said = table.read(tool, log)
    assert said.problems == ()
    assert set(said.errors.values()) == {0}
    assert list(said.errors) == [*KERNELS, table.OTHERS]


def summary(count: int) -> str:
    return CLEAN.replace("SUMMARY: 0", f"SUMMARY: {count}")


@pytest.mark.parametrize(
    ("tool", "log", "problems"),
    [
        ("memcheck", READ * 2 + summary(2), ("2 errors in kv_write_kernel",)),
        ("memcheck", READ.replace("kv_write", "fill") + summary(1), ("1 errors in other kernels",)),
        ("memcheck", summary(3), ("3 errors in other kernels",)),
        ("initcheck", READ.replace("kv_write", "fill") + summary(1), ()),
        ("initcheck", READ + READ.replace("kv_write", "fill") + summary(2), ("1 errors in kv_write_kernel",)),
        (
            "racecheck",
            RACE + LAUNCHED + "========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)\n",
            ("1 errors in state_scatter_kernel",),
        ),
        ("memcheck", LAUNCHED, ("the tool did not end with a summary",)),
        (
            "memcheck",
            CLEAN.replace("launched accept_kernel:", "").replace(ENDED, ""),
            ("accept_kernel was not launched", "the calls did not end"),
        ),
    ],
)
def test_what_is_no_clean_run(tool: str, log: str, problems: tuple[str, ...]) -> None:
    assert table.read(tool, log).problems == problems


def test_a_planted_fault_has_a_row_of_its_own() -> None:
    said = table.read("memcheck", READ.replace("kv_write", "planted_memcheck") + summary(1), planted=True)
    assert said.errors["planted_memcheck_kernel"] == 1
    assert said.problems == ("1 errors in planted_memcheck_kernel",)


def test_the_table_and_the_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for tool in TOOLS:
        (tmp_path / f"{tool}.log").write_text(CLEAN)
    assert table.main([str(tmp_path)]) == 0
    assert re.search(r"^racecheck +state_scatter_kernel +0$", capsys.readouterr().out, re.MULTILINE)
    (tmp_path / "initcheck.log").write_text(READ + summary(1))
    assert table.main([str(tmp_path)]) == 1
    (tmp_path / "initcheck.log").unlink()
    assert table.main([str(tmp_path)]) == 1
    assert "FAILED initcheck: the tool did not end with a summary" in capsys.readouterr().out


def test_a_missing_tool_is_said_and_fails(tmp_path: Path) -> None:
    """With a PATH that holds nothing but what the script itself calls, and no package that brings the tool."""
    for name in ("bash", "dirname", "mkdir", "find", "head", "env"):
        (tmp_path / name).symlink_to(
            next(path for path in (Path("/usr/bin"), Path("/bin")) if (path / name).exists()) / name
        )
    (tmp_path / "python3").write_text("#!/bin/bash\necho /nowhere\n")
    (tmp_path / "python3").chmod(0o755)
    script = ROOT / "benchmarks" / "sanitize.sh"
    run = subprocess.run(
        [script, tmp_path / "out"], env={"PATH": str(tmp_path)}, capture_output=True, text=True, timeout=60
    )
    present = next(Path("/usr/local").glob("cuda*/bin/compute-sanitizer"), None)
    assert present is not None or (run.returncode, "was not found" in run.stderr) == (3, True), run.stderr
