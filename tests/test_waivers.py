"""Waivers excuse one exact failure for a while, and nothing else."""

from __future__ import annotations

import datetime
import json
from pathlib import Path

import pytest

from conformance.fixtures import waivers
from conformance.fixtures.waivers import Waiver

TODAY = datetime.date(2026, 11, 29)
GOOD = {
    "case": "test_a.py::test_x[one/*]",
    "issue": "12",
    "owner": "kernel maintainer",
    "expires": "2026-12-31",
    "failure": "got 1, need 2",
}


def written(folder: Path, entries: object) -> Path:
    path = folder / "waivers.json"
    path.write_text(json.dumps(entries))
    return path


def test_the_committed_file_is_valid() -> None:
    assert isinstance(waivers.load(), tuple)


def test_a_glob_reads_brackets_as_they_are(tmp_path: Path) -> None:
    (waiver,) = waivers.load(written(tmp_path, [GOOD]))
    assert waiver.matches("test_a.py::test_x[one/two]")
    assert not waiver.matches("test_a.py::test_xo")
    assert waivers.waiver_of((waiver,), "test_a.py::test_x[one/two]") is waiver
    assert waivers.waiver_of((waiver,), "test_b.py::test_x[one/two]") is None


@pytest.mark.parametrize(
    "entry",
    [
        {key: value for key, value in GOOD.items() if key != "owner"},
        {**GOOD, "note": "more"},
        {**GOOD, "failure": " "},
        {**GOOD, "issue": 12},
        {**GOOD, "expires": "soon"},
    ],
    ids=["missing-key", "unknown-key", "empty-text", "number", "bad-date"],
)
def test_bad_entries_are_refused(entry: dict[str, object], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"waivers\.json|isoformat"):
        waivers.load(written(tmp_path, [entry]))


def test_expired_and_unmatched_waivers_are_problems() -> None:
    waiver = Waiver(**GOOD)
    case = "test_a.py::test_x[one/two]"
    assert waivers.problems((waiver,), [case], TODAY) == []
    assert waivers.problems((waiver,), None, TODAY) == []
    assert waivers.problems((waiver,), [case], datetime.date(2026, 12, 31)) == []
    (expired,) = waivers.problems((waiver,), [case], datetime.date(2027, 1, 1))
    assert "expired" in expired
    assert waiver.owner in expired
    (unmatched,) = waivers.problems((waiver,), ["test_a.py::test_y"], TODAY)
    assert "matches no case" in unmatched
