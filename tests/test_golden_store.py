"""The golden files' loader in this process: every damage, orphan and stale source by name, on copies of the files.

``test_golden.py`` proves the same from outside, by runs of the gate; here the functions that find it are called.
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_golden import DAMAGE, both, edited_sidecar, flipped, rewrite

from conformance.fixtures.golden import chain, contents, digests, store

OP = "accept"


@dataclass(frozen=True)
class Copy:
    """A copy of the golden files that may be damaged."""

    folder: Path

    @property
    def golden(self) -> Path:
        return self.folder / "conformance" / "golden"


@pytest.fixture
def copy(tmp_path: Path) -> Copy:
    others = shutil.ignore_patterns("[b-zA-B]*", "accept_*")
    shutil.copytree(store.FOLDER, tmp_path / "conformance" / "golden", ignore=others)
    return Copy(tmp_path)


def found(copy: Copy) -> list[str]:
    return store.damage(OP, copy.golden) + store.orphans(copy.golden)


def test_whole_files_have_no_damage(copy: Copy) -> None:
    assert sorted(path.name for path in copy.golden.iterdir()) == ["CHANGELOG.md", "accept.json", "accept.safetensors"]
    assert found(copy) == []
    assert store.stale(OP, copy.golden) == []
    assert store.recomputed(OP, contents.contents(OP), copy.golden) == []


REMEDY = "; restore it, or after an intended change run `pytest conformance --regen-golden=accept --reason=TEXT`"


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_found_by_name_and_with_its_remedy(copy: Copy, name: str) -> None:
    damage, messages = DAMAGE[name]
    damage(copy)  # type: ignore[arg-type]
    problems = found(copy)
    for message in messages:
        assert any(message in problem for problem in problems), problems
    assert all(problem.endswith((REMEDY, "it belongs to no operation; delete it")) for problem in problems)


# What is said, whole: neither a problem less nor one more.
EXACTLY: dict[str, tuple[int, str]] = {
    "payload-missing": (1, r"accept\.safetensors: missing"),
    "sidecar-missing": (1, r"accept\.json: missing"),
    "log-missing": (1, r"CHANGELOG\.md: missing"),
    "payload-truncated": (
        2,
        r"accept\.safetensors: (is \{'bytes': \d+, 'sha256': '[0-9a-f]{64}'\}, but|cannot be read)",
    ),
    "sidecar-not-json": (1, r"accept\.json: is not JSON"),
    "sidecar-reformatted": (1, r"accept\.json: was edited: it is not in canonical form"),
    "sidecar-without-a-tensor": (1, r"accept\.json: window/W8/bonus: the payload holds"),
    "sidecar-with-another-reason": (1, r"accept\.json: reason is 'Another\.', but CHANGELOG\.md says"),
    "sidecar-with-another-oracle-hash": (1, r"accept\.json: was edited: the oracle's hash"),
    "sidecar-of-another-operation": (1, r"accept\.json: op is 'rotary', need 'accept'"),
    "sidecar-with-a-field-more": (1, r"accept\.json: needs exactly the fields"),
    "payload-and-sidecar-replaced": (1, r"accept\.json: payload is '[0-9a-f]{64}', but CHANGELOG\.md says"),
}


@pytest.mark.parametrize("name", EXACTLY)
def test_one_damage_is_one_problem(copy: Copy, name: str) -> None:
    count, pattern = EXACTLY[name]
    DAMAGE[name][0](copy)  # type: ignore[arg-type]
    problems = store.damage(OP, copy.golden)
    assert len(problems) == count, problems
    assert all(re.match(f"conformance/golden/{pattern}", problem) for problem in problems), problems


@pytest.mark.parametrize("text", ["5", "[]", '"format"', "null", "{}", '{"format": 1}'])
def test_a_sidecar_that_is_no_sidecar_is_named_once(copy: Copy, text: str) -> None:
    (copy.golden / "accept.json").write_text(text)
    fields = "format, op, oracle, payload, previous, reason, tensors"
    assert store.damage(OP, copy.golden) == [
        f"conformance/golden/accept.json: needs exactly the fields {fields}{REMEDY}"
    ]


def test_a_tampered_payload_is_named_by_its_hash_and_by_its_tensor(copy: Copy) -> None:
    rewrite("accept.safetensors", flipped)(copy)  # type: ignore[arg-type]
    whole, tensor = store.damage(OP, copy.golden)
    raw = (copy.golden / "accept.safetensors").read_bytes()
    assert f"is {{'bytes': {len(raw)}, 'sha256': '{store.sha256(raw)}'}}, but its sidecar names" in whole
    assert re.match(r"conformance/golden/accept\.safetensors: \S+/\S+: the payload holds \{'dtype': ", tensor)


def test_a_tensor_that_only_the_payload_holds_is_named(copy: Copy) -> None:
    added = edited_sidecar(lambda data: data["tensors"].update({"more/bonus": {}}))
    rewrite("accept.json", added)(copy)  # type: ignore[arg-type]
    (problem,) = store.damage(OP, copy.golden)
    assert "accept.json: more/bonus: the payload holds None, the sidecar names {}" in problem


@pytest.mark.parametrize(
    ("lost", "gained", "said"),
    [("every-verify-len/W4", None, "{}: the case every-verify-len/W4 is an orphan: the suite has no such case"),
     (None, "brand-new", "{}: the case brand-new is missing")],
    ids=["orphan", "missing"],
)  # fmt: skip
def test_a_case_that_the_suite_lost_or_gained_is_named(
    copy: Copy, lost: str | None, gained: str | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = {id: build for id, build in store.CASES[OP].items() if id != lost}
    if lost is not None:
        assert lost in store.CASES[OP]
    if gained is not None:
        cases[gained] = next(iter(cases.values()))
    monkeypatch.setitem(store.CASES, OP, cases)  # type: ignore[arg-type]
    (problem,) = store.damage(OP, copy.golden)
    assert problem == said.format("conformance/golden/accept.safetensors") + REMEDY


def test_a_log_without_the_operation_is_named(copy: Copy) -> None:
    log = copy.golden / chain.NAME
    log.write_text(log.read_text().replace(" accept\n", " another\n"))
    (problem,) = store.damage(OP, copy.golden)
    assert problem == f"conformance/golden/accept.json: {chain.NAME} tells of no regeneration of accept{REMEDY}"
    (problem,) = store.recomputed(OP, {}, copy.golden)
    assert problem.startswith("conformance/golden/CHANGELOG.md: no entry of accept; run `pytest conformance ")


# --- Stale sources, and bytes that differ -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "changed"),
    [
        ({"oracles.accept": "0" * 64}, "fixtures/oracles/accept.py"),
        ({"oracles.gone": "0" * 64}, "fixtures/oracles/gone.py"),
        ({"streams": None}, "fixtures/streams.py"),
        ({"streams": None, "golden.accept": "0" * 64}, "fixtures/golden/accept.py, fixtures/streams.py"),
    ],
    ids=["edited", "no-longer-used", "newly-used", "two"],
)
def test_sources_that_changed_are_named(copy: Copy, change: dict[str, str | None], changed: str) -> None:
    sidecar = copy.golden / "accept.json"
    data = json.loads(sidecar.read_text())
    for module, digest in change.items():
        data["oracle"]["modules"].pop(module, None)
        if digest is not None:
            data["oracle"]["modules"][module] = digest
    sidecar.write_text(store.canonical(data))
    assert store.stale(OP, copy.golden) == [
        f"conformance/golden/accept.json: stale: {changed} changed since it was made; run "
        "`pytest conformance --regen-golden=accept --reason=TEXT`"
    ]


def test_recomputed_bytes_are_compared_in_both_files(copy: Copy) -> None:
    made = contents.contents(OP)
    differs = "differs from what the oracle gives now; run `pytest conformance --regen-golden=accept --reason=TEXT`"
    names = [f"conformance/golden/accept.{ending}: {differs}" for ending in ("safetensors", "json")]
    other = {**made, "window/W8": {**made["window/W8"], "bonus": made["window/W8"]["bonus"] + 1}}
    assert store.recomputed(OP, other, copy.golden) == names
    for name, change in (("accept.safetensors", flipped), ("accept.json", lambda raw: raw + b"\n")):
        original = (copy.golden / name).read_bytes()
        (copy.golden / name).write_bytes(change(original))
        assert store.recomputed(OP, made, copy.golden) == [line for line in names if f"/{name}:" in line]
        (copy.golden / name).unlink()
        assert store.recomputed(OP, made, copy.golden) == [line for line in names if f"/{name}:" in line]
        (copy.golden / name).write_bytes(original)


def test_only_whole_files_are_loaded(copy: Copy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "FOLDER", copy.golden)
    monkeypatch.setattr(store.damage, "__defaults__", (copy.golden,))
    load = store.load.__wrapped__  # what was loaded before is kept
    assert sorted(load(OP)) == sorted(store.CASES[OP])
    both(flipped)(copy)  # type: ignore[arg-type]
    with pytest.raises(store.GoldenError, match=r"payload is '.*but CHANGELOG\.md says"):
        load(OP)


# --- The oracles against the files ------------------------------------------------------------------------------------

QUICK = [(op, id) for op in ("accept", "accept_commit", "commit_indices", "state_scatter") for id in contents.CASES[op]]


@pytest.mark.parametrize(("op", "id"), QUICK, ids=[f"{op}/{id}" for op, id in QUICK])
def test_the_oracle_gives_what_the_file_holds(op: str, id: str) -> None:
    file, made = store.load(op)[id], contents.build(op, id)
    assert {name: (values.dtype.str, values.shape, values.tobytes()) for name, values in made.items()} == {
        name: (values.dtype.str, values.shape, values.tobytes()) for name, values in file.items()
    }


# --- Digests ----------------------------------------------------------------------------------------------------------


def digest(**inputs: Any) -> bytes:
    return digests.of_inputs(inputs).tobytes()


def test_a_digest_of_inputs_tells_names_dtypes_shapes_and_every_byte_apart() -> None:
    one = np.arange(6, dtype=np.int64).reshape(2, 3)
    other = np.zeros(2, np.int32)
    seen = [
        digest(a=one, b=other),
        digest(a=one, c=other),
        digest(a=one),
        digest(a=one.ravel(), b=other),
        digest(a=one.astype(np.int32), b=other),
        digest(a=one.view(np.uint64), b=other),
        digest(a=one + (np.arange(6).reshape(2, 3) == 5), b=other),
    ]
    assert len(set(seen)) == len(seen)
    assert digest(b=other, a=one) == seen[0]
    assert digest(a=one.astype(">i8"), b=other) == seen[0]
    assert digest(a=np.asfortranarray(one), b=other) == seen[0]


def test_digests_of_parts_follow_the_axis() -> None:
    array = np.arange(24, dtype=np.uint16).reshape(2, 3, 4)
    along = digests.of_parts(array, 1)
    assert along.shape == (3, 32)
    assert along.dtype == np.uint8
    want = [bytes.fromhex(store.sha256(np.ascontiguousarray(array[:, i]).tobytes())) for i in range(3)]
    assert [row.tobytes() for row in along] == want
    assert [row.tobytes() for row in digests.of_parts(array.astype(">u2"), 1)] == want
    assert digests.of_parts(array[:, :0], 1).shape == (0, 32)
