"""Tests of `conformance.fixtures.certificate`: what a run writes, the page's structure, and the comparison of two."""

from __future__ import annotations

import copy
import itertools
import json
import re
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from test_plugin import PRELUDE, WORLD, Suite, server, suite  # noqa: F401  fixtures

from conformance.fixtures.certificate import data, diff
from conformance.fixtures.certificate.__main__ import main
from conformance.fixtures.certificate.page import STYLE, page

HOSTILE = "<script>alert('&amp;')</script>\"x"


def certificate(**changes: Any) -> dict[str, Any]:
    """A certificate with something in every place."""
    row = {"cases": 3, "comparisons": 9, "elements": 4000, "guarded_bytes": 70, "judged": 1000, "single_valued": 998}
    failure = {
        "op": "kv_write",
        "path": "fused",
        "what": "K of layer 1",
        "clause": "K lies in its admissible set. (CONTRACTS.md section 2)",
        "first": [3, 5],
        "wrong": 64,
        "elements": 512,
        "pattern": "every head, every 8th element from 0",
        "got": "1.0 (0x3f80)",
        "need": "one of 1.0078125 (0x3f81)",
        "explained": HOSTILE,
        "distance": {
            "unit": "ulps",
            "measured": 64,
            "median": 1.0,
            "largest": 3.0,
            "histogram": {"1": 60, "2 to 3": 4},
        },
        "case": "test_kv_write.py::test_rows[first-fused]",
        "message": f"BrokenClauseError: {HOSTILE}",
        "when": "call",
        "decisions": ["kv_write took fused once: eligible"],
        "rerun": "pytest 'conformance/cases/test_kv_write.py::test_rows[first-fused]'",
    }
    error = {
        "case": "test_a.py::test_error",
        "message": "OSError: no\nmore",
        "when": "setup",
        "decisions": [],
        "rerun": "pytest x",
    }
    cases = {
        "test_kv_write.py::test_rows[first-fused]": {"verdict": "failed", "seconds": 1.5},
        "test_kv_write.py::test_rows[second-fused]": {"verdict": "failed", "seconds": 0.5},
        "test_a.py::test_error": {"verdict": "error", "seconds": 0.1},
        **{f"test_a.py::test_many[{number}]": {"verdict": "passed", "seconds": number / 100} for number in range(30)},
        "test_device.py::test_gpu": {"verdict": "not offered", "seconds": 0.0},
    }
    found = {
        "format": data.FORMAT,
        "date": "2026-01-02T03:04:05+00:00",
        "command": "pytest conformance",
        "implementation": {"name": "dspark", "version": "0.1"},
        "versions": {"dspark": "0.1", "torch": "2.13.0", "machine": "Linux x86_64", "gpu": "NVIDIA H200"},
        "lane": "interpret",
        "contraction": "none",
        "seconds": 12.5,
        "exit_status": 1,
        "partial": "",
        "problems": ["accept: no case violates the check verify-width"],
        "rows": {"kv_write/fused": row, "kv_write/error": row | {"judged": 0, "single_valued": 0}},
        "coverage": [
            {"op": "kv_write", "path": "fused", "reason": "eligible", "calls": 7, "violated": False, "covered": True},
            {"op": "kv_write", "path": "eager", "reason": "kv-dtype", "calls": 0, "violated": False, "covered": False},
            {"op": "kv_write", "path": "refused", "reason": "pools", "calls": 0, "violated": True, "covered": True},
        ],
        "mutants": {"line": "10 mutants, 9 killed, 1 listed, 0 survived"},
        "waivers": [{"case": HOSTILE, "issue": "#1", "owner": "kernels", "expires": "2027-01-01", "failure": "f"}],
        "findings": [failure, failure | {"case": "test_kv_write.py::test_rows[second-fused]"}, error],
        "cases": cases,
    }
    return found | changes


# --- The page's structure ---------------------------------------------------------------------------------------------

VOID = {"meta", "link"}


class Reader(HTMLParser):
    """Every element with its attributes and text; an element that is not closed as it was opened is an error."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append((self.open[-1] if self.open else "", data))

    def text(self, tag: str) -> list[str]:
        return [text for one, text in self.texts if one == tag]

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for one, attributes in self.elements if one == tag]


def read(found: dict[str, Any]) -> Reader:
    reader = Reader()
    reader.feed(page(found))
    reader.close()
    assert reader.open == []
    return reader


@pytest.fixture(params=["full", "empty"])
def found(request: pytest.FixtureRequest) -> dict[str, Any]:
    if request.param == "full":
        return certificate()
    empty: dict[str, Any] = {"problems": [], "findings": [], "waivers": [], "mutants": None, "cases": {}, "rows": {}}
    return certificate(**empty, exit_status=0, coverage=[])


def test_the_page_needs_nothing_but_itself(found: dict[str, Any]) -> None:
    reader = read(found)
    assert not {"script", "img", "iframe", "object", "base", "form"} & {tag for tag, _ in reader.elements}
    for tag, attributes in reader.elements:
        for name, value in attributes.items():
            assert not name.startswith("on")
            assert name != "src"
            assert name != "href" or value == "data:," or (tag == "a" and str(value).startswith("#"))
    style = STYLE.read_text()
    assert "url(" not in style
    assert "@import" not in style
    (policy,) = [meta["content"] for meta in reader.of("meta") if meta.get("http-equiv")]
    assert str(policy).startswith("default-src 'none'")


def test_the_page_has_headings_in_order_and_links_that_lead_somewhere(found: dict[str, Any]) -> None:
    reader = read(found)
    headings = [int(tag[1]) for tag, _ in reader.elements if re.fullmatch("h[1-6]", tag)]
    assert headings.count(1) == 1
    assert headings[0] == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(headings))
    ids = [attributes["id"] for _, attributes in reader.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    links = [str(link["href"]).removeprefix("#") for link in reader.of("a")]
    assert links == ids
    assert reader.of("html") == [{"lang": "en"}]
    assert len(reader.of("main")) == 1


def test_every_table_has_a_caption_and_headers(found: dict[str, Any]) -> None:
    reader = read(found)
    tables = len(reader.of("table"))
    assert tables == len(reader.of("caption")) == len(reader.of("thead"))
    scopes = [attributes.get("scope") for attributes in reader.of("th")]
    assert set(scopes) <= {"col", "row"}
    rows = [tag for tag, _ in reader.elements if tag == "tr"]
    assert scopes.count("row") == len(rows) - tables


def test_texts_are_escaped() -> None:
    reader = read(certificate())
    assert HOSTILE in reader.text("dd")
    assert HOSTILE in reader.text("th")


def test_the_page_says_what_the_run_found() -> None:
    reader = read(certificate())
    texts = [text for _, text in reader.texts]
    assert reader.text("h1") == ["Conformance certificate: dspark 0.1, interpret lane"]
    assert reader.text("h3") == [
        "kv_write, fused: K lies in its admissible set. (CONTRACTS.md section 2)",
        "OSError: no",
    ]
    for part in (
        "Not conformant: the run failed",
        "Cases: 30 passed, 2 failed, 1 error, 1 not offered.",
        "1 more cases",
        "index (3, 5)",
        "ulps from the admissible set: 60 at 1, 4 at 2 to 3",
        "99.800%",
        "\u2713 eligible 7x",
        "\u2717 kv-dtype",
        "\u2713 pools",
        "10 mutants, 9 killed, 1 listed, 0 survived",
        "accept: no case violates the check verify-width",
        "Linux x86_64, NVIDIA H200",
    ):
        assert part in texts, part
    slowest = page(certificate()).split('id="slowest"')[1].split("</section>")[0]
    assert slowest.count('scope="row"') == 20
    assert slowest.index("test_rows[first-fused]") < slowest.index("test_rows[second-fused]") < slowest.index("[29]")


@pytest.mark.parametrize(
    ("status", "partial", "kind", "word"),
    [
        (0, "", "good", "Conformant: a complete run, and green"),
        (0, "3 cases were deselected", "warn", "No verdict on the whole: a partial run"),
        (1, "", "bad", "Not conformant: the run failed"),
        (1, "3 cases were deselected", "bad", "Not conformant: the run failed"),
        (2, "", "bad", "Not conformant: the run failed"),
    ],
)
def test_only_a_complete_green_run_is_conformant(status: int, partial: str, kind: str, word: str) -> None:
    reader = read(certificate(exit_status=status, partial=partial))
    assert word in reader.text("strong")
    assert f"verdict {kind}" in [one.get("class") for one in reader.of("div")]
    assert (f"Partial: {partial}" in reader.text("div")) is bool(partial)


def colours(scheme: str) -> dict[str, str]:
    """The variables of the style sheet in a colour scheme."""
    light, dark = STYLE.read_text().split("@media (prefers-color-scheme: dark)")
    pattern = r"--([a-z-]+): (#[0-9a-f]{6})"
    return dict(re.findall(pattern, light)) | (dict(re.findall(pattern, dark)) if scheme == "dark" else {})


def luminance(colour: str) -> float:
    parts = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_what_a_part_did_not_see_is_no_fault() -> None:
    texts = read(certificate(partial="a part", exit_status=0)).text("li")
    assert "\u00b7 kv-dtype" in texts
    assert "\u2713 eligible 7x" in texts


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_from_its_background(scheme: str) -> None:
    """WCAG 2 asks for a contrast of 4.5 for text."""
    named = colours(scheme)
    pairs = [(ink, back) for ink in ("ink", "soft", "link", "bad") for back in ("back", "card")]
    pairs += [(kind, f"{kind}-back") for kind in ("good", "bad", "warn")]
    for ink, back in pairs:
        light, dark = sorted((luminance(named[ink]), luminance(named[back])), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5, (ink, back)


# --- What a run writes ------------------------------------------------------------------------------------------------

MIXED = """
import numpy as np

@pytest.mark.parametrize("number", range(4))
def test_many(number):
    expect_equal(LABEL, "ids", np.array([1, number]), np.array([1, 2]) if number == 3 else np.array([1, number]))

def test_error(no_such_fixture): pass

def test_cannot_be_described():
    from ..fixtures.ledger import expect_within
    class Verdict:
        ok = single = np.array([False])
        def explain(self, index):
            assert not hasattr(self, "asked"), "asked twice"
            self.asked = True
            return "first"
    expect_within(LABEL, "set", Verdict(), single_share=0)

def test_of_another_implementation(request):
    expect_equal(LABEL, "value", 1, 1)
    row = {"op": "accept", "clause": "it holds", "came": "1", "need": "2", "input": "a stride", "kind": "choice"}
    request.node.user_properties.append(("finding", row))
    pytest.fail("accept: it holds: 1", pytrace=False)

def test_cannot_be_kept(arena):
    from ..fixtures.calls import accept
    accept.run(accept.base(), Label("accept", "eager"), arena, "eager")
    expect_equal(LABEL, "value", 1, 2)

@pytest.mark.lanes("cuda")
def test_gpu(): pass
"""


@pytest.fixture
def written(suite: Suite) -> Any:  # noqa: F811
    def write(cases: dict[str, str], *arguments: str, folder: str = "seal", **environment: str) -> dict[str, Any]:
        run = suite.run(cases, f"--certificate={folder}", *arguments, **environment)
        assert f"certificate: {folder}/certificate.html" in run.output, run.output
        assert "<!DOCTYPE html>" in (suite.folder / folder / "certificate.html").read_text()
        return data.read(suite.folder / folder)

    return write


def test_a_run_writes_what_it_found_with_workers_or_without(written: Any, suite: Suite) -> None:  # noqa: F811
    cases = {"test_mixed": PRELUDE + MIXED}
    (suite.folder / "file").write_text("")
    one = written(cases, "--capsules=file")
    two = written(cases, "--capsules=file", "-n", "1", folder="two")
    assert "capsule:       none: NotADirectoryError" in (suite.folder / "output.txt").read_text()
    for found in (one, two):
        verdicts = {name: case["verdict"] for name, case in found["cases"].items() if "mixed" in name}
        assert verdicts == {
            **{f"test_mixed.py::test_many[{number}]": "passed" for number in range(3)},
            "test_mixed.py::test_many[3]": "failed",
            "test_mixed.py::test_error": "error",
            "test_mixed.py::test_cannot_be_described": "failed",
            "test_mixed.py::test_cannot_be_kept": "failed",
            "test_mixed.py::test_of_another_implementation": "failed",
            "test_mixed.py::test_gpu": "not offered",
        }
        assert (found["lane"], found["exit_status"], found["partial"]) == ("interpret", 1, "")
        assert found["implementation"]["name"] == "dspark"
        assert found["command"].startswith("pytest -v -p no:cacheprovider ")
        assert "seal" not in found["command"]
        assert "accept: no case violates the check verify-width" in found["problems"]
        failed = {one["case"].rpartition("::")[2]: one for one in found["findings"]}
        assert len(failed) == 5
        other = failed["test_of_another_implementation"]
        assert (other["op"], other["got"], other["need"]) == ("accept", "1", "2")
        assert other["clause"] == "it holds [choice]"
        assert failed["test_cannot_be_described"]["undescribed"].startswith("AssertionError: asked twice")
        assert (failed["test_many[3]"]["pattern"], failed["test_many[3]"]["first"]) == ("one row, 1", [1])
        assert failed["test_many[3]"]["rerun"] == "pytest 'conformance/cases/test_mixed.py::test_many[3]'"
    assert list(diff.lines(one, two)) == ["no differences"]


def test_a_green_run_of_a_part_has_no_verdict_on_the_whole(written: Any) -> None:
    found = written({"test_world": WORLD}, "-k", "planted")
    assert found["exit_status"] == 0
    assert "deselected" in found["partial"]
    assert found["findings"] == []
    assert [case["verdict"] for case in found["cases"].values()] == ["passed"]
    (planted,) = [one for one in found["coverage"] if one["covered"]]
    assert (planted["path"], planted["reason"], planted["calls"]) == ("fused", "eligible", 1)


def test_a_run_that_writes_none_when_not_asked(suite: Suite) -> None:  # noqa: F811
    run = suite.run({"test_more": PRELUDE + "def test_passes(): expect_equal(LABEL, 'value', 1, 1)"})
    assert run.status == 1  # the world is not closed
    assert "certificate:" not in run.output
    assert not list(suite.folder.rglob("certificate.html"))


# --- Two certificates -------------------------------------------------------------------------------------------------


def test_the_same_certificates_have_no_differences() -> None:
    assert list(diff.lines(certificate(), certificate())) == ["no differences"]


def test_every_kind_of_difference_is_said() -> None:
    a, b = certificate(), copy.deepcopy(certificate())
    b["versions"]["torch"] = "2.11.0"
    del b["versions"]["gpu"]
    b["lane"], b["implementation"] = "cuda", {"name": "sglang", "version": "0.5.23"}
    del b["cases"]["test_a.py::test_many[0]"]
    b["cases"]["test_b.py::test_new"] = {"verdict": "passed", "seconds": 0.0}
    b["cases"]["test_a.py::test_many[1]"]["verdict"] = "failed"
    b["cases"]["test_a.py::test_many[2]"]["seconds"] = 99.0
    b["rows"]["kv_write/fused"]["elements"] = 3000
    b["coverage"][0]["covered"] = False
    assert list(diff.lines(a, b)) == [
        "facts that differ: 5",
        "  gpu: NVIDIA H200 -> none",
        "  implementation name: dspark -> sglang",
        "  implementation version: 0.1 -> 0.5.23",
        "  lane: interpret -> cuda",
        "  torch: 2.13.0 -> 2.11.0",
        "verdicts that differ: 1",
        "  test_a.py::test_many[1]: passed -> failed",
        "cases only in the first: 1",
        "  test_a.py::test_many[0]",
        "cases only in the second: 1",
        "  test_b.py::test_new",
        "counts that differ: 1",
        "  kv_write/fused: elements 4,000 -> 3,000",
        "reasons seen in one only: 1",
        "  kv_write/fused/eligible: only in the first",
    ]


@pytest.mark.parametrize(("verdict", "status"), [("passed", 0), ("failed", 1)])
def test_the_exit_status_is_about_verdicts(
    verdict: str, status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = certificate(), copy.deepcopy(certificate(lane="cuda"))
    b["cases"]["test_a.py::test_many[1]"]["verdict"] = verdict
    (tmp_path / "folder").mkdir()
    data.write(tmp_path / "folder" / "certificate.json", a)
    data.write(tmp_path / "b.json", b)
    assert main(["diff", str(tmp_path / "folder"), str(tmp_path / "b.json")]) == status
    assert "  lane: interpret -> cuda\n" in capsys.readouterr().out


@pytest.mark.parametrize("content", ["", "[]", '{"format": 0}', json.dumps({"rows": {}})])
def test_what_is_no_certificate_is_refused(content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.json").write_text(content)
    assert main(["diff", str(tmp_path / "a.json"), str(tmp_path / "missing.json")]) == 2
    assert capsys.readouterr().err.startswith("dspark certificate: ")


# --- The workflow -----------------------------------------------------------------------------------------------------


def test_the_workflow_runs_the_script_of_ci_and_uploads_the_certificate() -> None:
    """Structure only: no YAML parser is among the dependencies."""
    root = Path(__file__).resolve().parents[1]
    text = (root / ".github" / "workflows" / "gate.yml").read_text()
    assert "\t" not in text
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    indents = [len(line) - len(line.lstrip()) for line in lines]
    assert all(indent % 2 == 0 for indent in indents)
    assert [line for line, indent in zip(lines, indents, strict=True) if not indent] == [
        "name: gate", "on:", "permissions:", "concurrency:", "jobs:",
    ]  # fmt: skip
    assert all(re.fullmatch(r"(- )?[\w-]+:( .+)?|- .+", line.strip()) for line in lines)
    assert "        run: .ci/run" in lines
    uses = re.findall(r"uses: (\S+)", text)
    assert uses == ["actions/checkout@v4", "actions/setup-python@v5", "actions/upload-artifact@v4"]
    assert "secrets" not in text
    assert "DSPARK_CERTIFICATE: ${{ github.workspace }}/certificate" in text
    assert "pass_env = DSPARK_CERTIFICATE" in (root / "tox.ini").read_text()
    assert (root / ".ci" / "run").stat().st_mode & 0o111
    ignored = subprocess.run(
        ["git", "check-ignore", "-q", "--no-index", ".capsules/x"], cwd=root, check=False
    ).returncode  # 128: not a checkout
    assert ignored in (0, 128)
