"""The command ``dspark``, each call in a process of its own: Triton reads its environment once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from dspark import cli, dispatch
from dspark.doctor import SMALL_CALLS

# The operations of the model decide about layers and pools; the machine is the concern of what they call.
MACHINE_BOUND = sorted(set(SMALL_CALLS) - {"attention", "base_logits", "kv_inject"})
ROOT = Path(__file__).resolve().parent.parent


def run(*arguments: str, path: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    places = [str(ROOT / "src"), *([str(path)] if path else [])]
    kept = {name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "PYTEST_ADDOPTS")}
    return subprocess.run(
        [sys.executable, "-m", "dspark.cli", *arguments],
        env={**kept, "PYTHONPATH": os.pathsep.join(places), **environment},
        cwd=path or ROOT / "tests",
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder on the path in which the suite has the name that it has in a wheel."""
    (tmp_path / "dspark_conformance").symlink_to(ROOT / "conformance")
    return tmp_path


def test_doctor_names_every_reason_and_fails_when_an_op_is_not_fused() -> None:
    result = run("doctor", CUDA_VISIBLE_DEVICES="")
    assert result.returncode == 1
    for op in MACHINE_BOUND:
        assert f"{op}: eager" in result.stdout
    assert result.stdout.count("no-gpu-no-interpreter (got 'cpu')") == len(MACHINE_BOUND)
    assert result.stderr == ""


def test_doctor_passes_in_the_interpreter() -> None:
    result = run("doctor", CUDA_VISIBLE_DEVICES="", TRITON_INTERPRET="1")
    assert result.returncode == 0, result.stdout + result.stderr
    for op in dispatch.registry():
        assert f"{op}: fused" in result.stdout


def test_doctor_calls_every_op() -> None:
    assert set(SMALL_CALLS) == set(dispatch.registry())


def test_conformance_runs_the_installed_suite_and_passes_arguments_on(installed: Path) -> None:
    result = run("conformance", "-k", "signatures", "-q", path=installed, CUDA_VISIBLE_DEVICES="")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "partial run" in result.stdout
    assert "3 passed" in result.stdout


def test_conformance_gives_pytests_exit_status(installed: Path) -> None:
    result = run("conformance", "--lane=nonsense", path=installed)
    assert result.returncode == 4
    assert "--lane" in result.stderr


@pytest.mark.parametrize(
    ("missing", "said"), [("dspark_conformance", "not installed"), ("pytest", "pytest is missing")]
)
def test_conformance_says_what_is_missing(
    missing: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = cli.find_spec("dspark")
    monkeypatch.setattr(cli, "find_spec", lambda name: None if name == missing else real)
    assert cli.main(["conformance"]) == 2
    assert said in capsys.readouterr().err


def test_bench_passes_arguments_and_status_on() -> None:
    result = run("bench", "--op", "nothing", path=ROOT)
    assert result.returncode == 2
    assert "need names out of qk_norm_rope" in result.stderr


def test_bench_takes_no_folder_of_its_name_from_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where the benchmarks are not installed, whatever the environment of this run has."""
    found = SimpleNamespace(origin=str(tmp_path / "benchmarks" / "__init__.py"))
    monkeypatch.setattr(cli, "find_spec", lambda name: found if name == "benchmarks" else None)
    assert cli.main(["bench"]) == 2
    assert "no checkout" in capsys.readouterr().err


def test_an_unknown_command_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        cli.main(["benchmark"])
    assert error.value.code == 2
    assert "benchmark" in capsys.readouterr().err
