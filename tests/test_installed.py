"""The suite as a user has it: from a wheel, in an empty folder, by the command ``dspark``.

The wheel is unpacked as ``pip install --target`` would; the packages it needs are those of this environment.
"""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CASE = "cases/test_signatures.py"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the wheel installs."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder / "site")
    return folder / "site"


def dspark(site: Path, empty: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "TRITON", "DSPARK"))}
    own = {"PYTHONPATH": str(site), "PYTHONSAFEPATH": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", "from dspark.cli import main; raise SystemExit(main())", *arguments]
    return subprocess.run(command, env=kept | own, cwd=empty, capture_output=True, text=True, check=False)


def test_a_named_part_runs_in_an_empty_folder_and_writes_its_certificate(site: Path, tmp_path: Path) -> None:
    result = dspark(site, tmp_path, "conformance", CASE, "-q", "--certificate=certificate")
    assert result.returncode == 0, result.stdout + result.stderr
    assert " passed" in result.stdout
    assert "not collected: test_accept.py" in result.stdout
    assert {path.name for path in tmp_path.iterdir()} <= {"certificate", ".hypothesis"}
    assert (tmp_path / "certificate" / "certificate.html").exists()
    same = dspark(site, tmp_path, "certificate", "diff", "certificate", "certificate")
    assert (same.returncode, same.stdout, same.stderr) == (0, "no differences\n", "")


def test_a_case_is_explained_with_the_command_of_the_installed_suite(site: Path, tmp_path: Path) -> None:
    result = dspark(site, tmp_path, "explain", "test_accept.py::test_window[graph-fused]")
    assert result.returncode == 0, result.stderr
    assert "contract: CONTRACTS.md section 6. " in result.stdout
    assert "run: dspark conformance 'cases/test_accept.py::test_window[graph-fused]'\n" in result.stdout


@pytest.mark.parametrize("arguments", [("explain", "nothing"), ("certificate", "diff", "a", "b"), ("certificate",)])
def test_the_status_is_the_tools_own(arguments: tuple[str, ...], site: Path, tmp_path: Path) -> None:
    result = dspark(site, tmp_path, *arguments)
    assert result.returncode == 2
    assert f"dspark {arguments[0]}: " in result.stderr


def test_the_benchmarks_come_with_it(site: Path, tmp_path: Path) -> None:
    result = dspark(site, tmp_path, "bench", "--op", "accept", "--quick", "--json", "record.json")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "only the suite itself is timed" in result.stdout
    assert (tmp_path / "record.json").exists()
