"""Tests of `conformance.fixtures.explain`: what a case is about, from the suite's own files."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from conformance.fixtures import explain

ROOT = Path(__file__).resolve().parents[1]


def explained(case: str) -> str:
    return "\n".join(explain.lines(explain.find(case)))


def test_a_case_names_contract_oracle_provenance_and_command() -> None:
    text = explained("conformance/cases/test_accept.py::test_window[F1-1-graph-padding-rows-fused]")
    for part in (
        "case: test_accept.py::test_window[F1-1-graph-padding-rows-fused]",
        "topic: accept: leading matches",
        "contract: CONTRACTS.md section 6. compute_dflash_correct_drafts_and_bonus(",
        "called by: fixtures/calls/accept.py",
        "oracle: fixtures/oracles/accept.py",
        "provenance: fault F1-1 (sglang#37472)\n  Symptom: ",
        "defined in: cases/test_accept.py:",
        "run: pytest 'conformance/cases/test_accept.py::test_window[F1-1-graph-padding-rows-fused]'",
    ):
        assert part in text, part


def test_a_fault_in_the_name_of_a_function_counts() -> None:
    name = "test_f2_2_the_other_rounding_contract_fails_on_a_fifth_of_elements"
    text = explained(f"test_sensitivity.py::{name}")
    assert "provenance: fault F2-2 (vllm#42379)" in text
    assert "section 0" not in text.replace("faults section 0.5", "")
    assert "about: " not in text


@pytest.mark.parametrize(
    ("file", "sections"),
    [
        ("test_accept.py", ["6"]),
        ("test_accept_commit.py", ["7b", "9"]),
        ("test_memory.py", ["3", "4", "6", "7", "7b", "8"]),
        ("test_kv_write.py", ["2", "4", "9"]),
        ("test_base_logits.py", ["10"]),
        ("test_qk_norm_rope.py", ["2", "3"]),
        ("test_sensitivity.py", []),
    ],
)
def test_the_sections_are_those_of_the_file_or_of_its_operation(file: str, sections: list[str]) -> None:
    name = next(
        node.name
        for node in ast.parse((explain.SUITE / "cases" / file).read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    )
    assert explain.sections(explain.find(f"{file}::{name}")) == sections


def test_a_golden_case_names_its_file() -> None:
    text = explained("test_golden.py::test_votes[accept/every-verify-len/W10]")
    assert "provenance: golden/accept.safetensors: every-verify-len/W10" in text
    assert "golden/" not in explained("test_golden.py::test_votes[accept/no-such-case]").split("provenance")[-1]


def test_every_case_can_be_explained() -> None:
    cases = 0
    for file in sorted((explain.SUITE / "cases").glob("test_*.py")):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                text = explained(f"{file.name}::{node.name}")
                assert "topic: " in text
                assert "has no such section" not in text, f"{file.name}::{node.name}"
                assert "not in FAULTS.md" not in text, f"{file.name}::{node.name}"
                cases += 1
    assert cases > 100


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("test_nothing.py::test_x", "no file 'test_nothing.py' of cases; there are test_accept.py"),
        ("test_accept.py::test_x[y]", "no case 'test_x' in test_accept.py; there are "),
        ("test_accept.py", "no case '' in test_accept.py"),
        ("", "no file ''"),
    ],
)
def test_an_unknown_case_is_refused(case: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert explain.main([case]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("dspark explain: ")
    assert said in err


def test_the_command_prints_the_explanation(capsys: pytest.CaptureFixture[str]) -> None:
    assert explain.main(["test_accept.py::test_window"]) == 0
    assert capsys.readouterr().out.startswith("case: test_accept.py::test_window\n")
