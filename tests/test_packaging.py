"""What is shipped, and what the documents promise."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import dspark.model.kv_inject  # noqa: F401  registers the checks of the draft path
from dspark import dispatch

ROOT = Path(__file__).resolve().parent.parent
COMMAND = "python3 -m venv .venv && .venv/bin/pip install -q -c constraints.txt tox && .venv/bin/tox run"


def test_ci_runs_the_test_command_of_the_readme() -> None:
    readme = (ROOT / "README.md").read_text().splitlines()
    assert COMMAND in readme
    assert f"{COMMAND} -e gate" in readme
    assert COMMAND in (ROOT / ".ci" / "run").read_text().splitlines()


def test_the_wheel_carries_the_suite_under_its_own_name(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    suite = {path.relative_to(ROOT / "conformance").as_posix() for path in (ROOT / "conformance").rglob("*.*")}
    expected = {f"dspark_conformance/{name}" for name in suite if "__pycache__" not in name}
    assert expected <= names
    benchmarks = {path.relative_to(ROOT / "benchmarks").as_posix() for path in (ROOT / "benchmarks").rglob("*.py")}
    assert {f"dspark_benchmarks/{name}" for name in benchmarks} <= names
    assert {"dspark/py.typed", "dspark/ops/accept/kernel.py"} <= names
    assert not [name for name in names if name.startswith(("conformance/", "benchmarks/", "tests/"))]


def test_every_dependency_is_pinned_and_only_the_core_is_required() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    core = {requirement.split(">")[0].split(";")[0] for requirement in project["dependencies"]}
    assert core == {"torch", "triton", "numpy", "safetensors"}
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {line.split("==")[0].lower() for line in lines if "==" in line}
    extras = [name for group in project["optional-dependencies"].values() for name in group]
    wanted = core | {name.split(">")[0] for name in extras if not name.startswith("dspark")}
    assert wanted <= pinned


@pytest.mark.parametrize("document", ["README.md", "conformance/README.md", "CHANGELOG.md", "conformance/CONTRACTS.md"])
def test_documents_name_files_that_exist(document: str) -> None:
    text = (ROOT / document).read_text()
    for name in ("conformance/README.md", "conformance/CONTRACTS.md", "benchmarks/gpu_check.sh"):
        if name in text:
            assert (ROOT / name).exists()


def test_gpu_records_name_versions_date_and_command() -> None:
    for record in (ROOT / "benchmarks" / "records").glob("*.json"):
        data = json.loads(record.read_text())
        assert {"date", "command", "versions"} <= set(data)
        assert data["versions"]["gpu"]
        if "kind" in data:
            assert record.stem.endswith(data["kind"])  # NAME-bench.json, NAME-tune.json
            assert data["measurements" if data["kind"] == "bench" else "rows"]
        else:
            assert data["lane"] == "cuda"
            assert data["exit_status"] == 0
            assert data["rows"]


def test_the_table_of_conditions_names_every_check_of_the_draft_path() -> None:
    table = (ROOT / "conformance" / "README.md").read_text()
    for op in ("kv_inject", "kv_write", "attention", "qk_norm_rope"):
        for check in dispatch.registry()[op]:
            assert f"`{check.id}`" in table, f"{op}: {check.id}"


@pytest.mark.parametrize("version", ["3.6.0", "3.9.0"])
def test_the_other_constraints_differ_in_triton_only(version: str) -> None:
    usual, other = (
        (ROOT / name).read_text().splitlines()[1:] for name in ("constraints.txt", f"constraints-triton-{version}.txt")
    )
    differing = [(a, b) for a, b in zip(usual, other, strict=True) if a != b]
    assert differing == [("triton==3.7.1", f"triton=={version}")]
