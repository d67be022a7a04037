"""Tests of `conformance.fixtures.capsule`: a failing case leaves its inputs and a script that makes the call again."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_plugin import PRELUDE, REPOSITORY, Suite, server, suite  # noqa: F401  fixtures

from conformance.fixtures import capsule

CASES = """
import numpy as np
from ..fixtures.calls import accept, qk_norm_rope
from ..fixtures.guard import Arena

@pytest.mark.parametrize("path", ["eager"])
def test_window(path, arena):
    accept.run(accept.base(), Label("accept", path), arena, path)

def test_heads(arena):
    qk_norm_rope.run(qk_norm_rope.base(), Label("qk_norm_rope", "eager"), arena, "eager")

def test_no_call():
    expect_equal(LABEL, "value", 1, 2)

TRIES = []

def test_flaky():
    TRIES.append(1)
    expect_equal(LABEL, "tries", len(TRIES), 2)
"""

FAULTS = {
    "ops/accept/eager.py": ("    return correct.to", "    correct[1::2] += 1\n    return correct.to"),
    "ops/norm_rope/eager.py": ("    c, s = cos", "    cos = cos * 1.25\n    c, s = cos"),
}


def reproduce(script: Path, product: Path) -> subprocess.CompletedProcess[str]:
    """Run a capsule's script with the package below ``product``, as a person would: without the suite."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "TRITON"))}
    environment |= {"PYTHONPATH": str(product), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(script)]
    return subprocess.run(command, env=environment, cwd=script.parent, capture_output=True, text=True, check=False)


def test_a_capsule_of_a_planted_failure_reproduces_it(suite: Suite) -> None:  # noqa: F811
    shutil.copytree(
        REPOSITORY / "src" / "dspark", suite.folder / "dspark", ignore=shutil.ignore_patterns("data", "__pycache__")
    )
    for name, (sound, broken) in FAULTS.items():
        file = suite.folder / "dspark" / name
        assert sound in file.read_text()
        file.write_text(file.read_text().replace(sound, broken))
    run = suite.run({"test_planted": PRELUDE + CASES}, "--capsules=kept")
    assert set(run.outcomes.values()) == {"FAILED"}
    assert run.record["rows"]["accept/eager"]["comparisons"] == 2  # the second run is not counted
    window = suite.folder / "kept" / "test-planted.py-test-window-eager"
    if not window.is_dir():
        window = suite.folder / "kept" / "test_planted.py-test_window-eager"
    for part in (
        f"capsule:       kept/{window.name}/reproduce.py",
        "capsule:       none: the case called no public operation in this process",
        "capsule:       none: the case passed when it was run again",
    ):
        assert part in run.output
    assert sorted(file.name for file in window.iterdir()) == ["call.json", "inputs.safetensors", "reproduce.py"]
    heads = next((suite.folder / "kept").glob("*heads*"))
    for folder, words in ((window, "correct: 1 of 3 elements differ"), (heads, "outside their admissible set")):
        script = folder / "reproduce.py"
        wrong = reproduce(script, suite.folder)
        assert (wrong.returncode, wrong.stderr) == (1, "")
        assert words in wrong.stdout
        assert wrong.stdout.endswith("\nreproduced: the same came as in the failing case\n")
    mended = reproduce(window / "reproduce.py", REPOSITORY / "src")
    assert (mended.returncode, mended.stderr) == (0, "")
    assert "differs: result 0: " in mended.stdout
    assert mended.stdout.endswith("\nnot reproduced: something else came\n")


def test_what_shares_memory_shares_it_again(tmp_path: Path) -> None:
    both = torch.arange(24, dtype=torch.int64)
    calls: list[tuple[int, ...]] = []

    def operation(a: torch.Tensor, *, pair: list[torch.Tensor], eps: float) -> torch.Tensor:
        calls.append(tuple(a.stride()))
        pair[0].add_(1)
        return a + 1

    recorder = capsule.Recorder()
    view = both.as_strided((2, 3), (6, 2), 1)
    recorder.wrapped("operation", operation)(view, pair=[both[12:], both[:2]], eps=0.1)
    kept = recorder.last
    assert kept is not None
    assert list(kept.storages) == ["storage0"]
    assert torch.equal(kept.storages["storage0"].view(torch.int64), torch.arange(24))  # as before the call
    capsule.write(tmp_path, kept, "c", "f")
    call = json.loads((tmp_path / "call.json").read_text())
    assert call["args"][0]["tensor"] == {
        "storage": 0, "dtype": "int64", "offset": 1, "shape": [2, 3], "stride": [6, 2], "requires_grad": False,
    }  # fmt: skip
    assert call["kwargs"]["eps"] == {"float": (0.1).hex()}
    assert [item["tensor"]["offset"] for item in call["kwargs"]["pair"]["list"]] == [12, 0]
    assert set(call["came"]) == {"storage 0", "result 0"}


@pytest.mark.parametrize(
    ("argument", "why"),
    [
        (torch.nn.Linear(1, 1), "an argument is a Linear"),
        (object(), "an argument is a object"),
        (torch.empty(1, device="meta"), "an argument is a Tensor on meta"),
        (torch.empty(capsule.LIMIT + 1, dtype=torch.uint8), f"its inputs take {capsule.LIMIT + 1:,} bytes"),
    ],
    ids=["module", "object", "meta", "large"],
)
def test_what_no_capsule_can_hold_is_said(argument: object, why: str) -> None:
    recorder = capsule.Recorder()
    recorder.wrapped("operation", lambda value: None)(argument)
    assert recorder.last is None
    assert recorder.unfit == f"operation: {why}"


def test_the_last_call_is_kept_and_its_error() -> None:
    def refuses(number: int) -> None:
        if number == 2:
            raise ValueError("number: got 2")

    recorder = capsule.Recorder()
    call = recorder.wrapped("refuses", refuses)
    call(1)
    with pytest.raises(ValueError, match="got 2"):
        call(2)
    assert recorder.last is not None
    assert (recorder.last.plan["args"], recorder.last.came) == ([2], {"error": "ValueError: number: got 2"})


def test_an_operation_that_is_built_of_others_is_one_call() -> None:
    recorder = capsule.Recorder()
    inner = recorder.wrapped("inner", lambda: 1)
    outer = recorder.wrapped("outer", lambda: inner())
    outer()
    assert recorder.last is not None
    assert recorder.last.function == "outer"


def test_names_are_put_back() -> None:
    from conformance.fixtures.calls import accept

    before = accept.compute_dflash_correct_drafts_and_bonus
    with capsule.recorded() as recorder:
        assert accept.compute_dflash_correct_drafts_and_bonus is not before
    assert accept.compute_dflash_correct_drafts_and_bonus is before
    assert recorder.last is None


def test_caches_are_kept_by_their_attributes() -> None:
    tensor = torch.zeros(2)
    caches = SimpleNamespace(temporal=tensor, intermediate_ssm=None, conv=[tensor], intermediate_conv_window=())
    plan = capsule._planned(caches, storages := {})
    assert set(plan["namespace"]) == set(capsule.CACHES)
    assert len(storages) == 1
