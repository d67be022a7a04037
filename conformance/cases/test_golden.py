"""Golden files: whole, fresh, and in agreement with the oracle and with both paths, case by case.

Four vote on each case: the file, the recomputed oracle, eager and fused. A failure says which one is odd; where that is
the file, after an intended change, `pytest conformance --regen-golden=OP --reason=TEXT` rewrites it.
"""

from __future__ import annotations

import pytest

from ..fixtures.golden import contents, product, sets, store, votes
from ..fixtures.guard import Arena
from ..fixtures.ledger import Label, expect_equal, expect_within

HEADS = ("kv_write", "qk_norm_rope")
VOTED = [(op, id) for op, cases in contents.CASES.items() if op != "rotary" for id in cases]
PATHS = ("eager", "fused")


def label(op: str) -> Label:
    return Label(op, "golden")


@pytest.mark.parametrize("op", contents.CASES)
def test_files_are_whole_and_fresh(op: str) -> None:
    damage = store.damage(op)
    expect_equal(label(op), "damage", damage, [])
    expect_equal(label(op), "stale sources", store.stale(op), [])


def test_no_file_belongs_to_no_operation() -> None:
    expect_equal(Label("golden", "-"), "orphans", store.orphans(), [])


def test_all_files_together_are_small() -> None:
    size = sum(path.stat().st_size for path in store.FOLDER.iterdir())
    expect_equal(Label("golden", "-"), f"{size:,} bytes are below 2.5 MB", size < 2_500_000, True)


def verdict(op: str, voters: tuple[str, ...], found: votes.Disagreements) -> str:
    """Who is odd, with the file and the command that an intended change needs."""
    text = votes.sentence(voters, found)
    if text == votes.AGREED:
        return text
    return f"{text}; golden: {store.name(store.paths(op)[0])}, after an intended change: `{store.command(op)}`"


@pytest.mark.parametrize(("op", "id"), VOTED, ids=[f"{op}/{id}" for op, id in VOTED])
def test_votes(op: str, id: str, arena: Arena) -> None:
    file, oracle = store.load(op)[id], contents.build(op, id)
    got = {path: product.run(op, id, file, path, Arena(arena.device)) for path in PATHS}
    judge = votes.by_envelope if op in HEADS else votes.by_equality
    found = votes.disagreements(file, oracle, got, judge)
    expect_equal(label(op), "votes", verdict(op, (votes.FILE, votes.ORACLE, *PATHS), found), votes.AGREED)
    for path, arrays in got.items():
        for name, values in arrays.items():
            if name == "out":
                share = float(file["share"][0])
                expect_within(label(op), f"{path} in the file's sets", sets.judge(file, values), single_share=share)
            else:
                expect_equal(label(op), f"{path}: {name}", values, file[name])


@pytest.mark.parametrize("id", contents.CASES["rotary"])
def test_table_votes(id: str) -> None:
    """A table has one maker for both paths, so three vote on it."""
    op = "rotary"
    file, oracle = store.load(op)[id], contents.build(op, id)
    found = votes.table_disagreements(file, oracle, "table", product.table(id, file))
    expect_equal(label(op), "votes", verdict(op, (votes.FILE, votes.ORACLE, "table"), found), votes.AGREED)
