"""Vocabulary shards in two processes over gloo; over NCCL they are a case of the lane ``second-gpu``."""

from __future__ import annotations

from pathlib import Path

import pytest

from conformance.fixtures import ranks


def test_two_ranks_give_the_bits_of_one(tmp_path: Path) -> None:
    ended = ranks.run("gloo", tmp_path)
    assert [(one.status, one.out) for one in ended] == [(0, ranks.EQUAL)] * 2, ended


def test_a_rank_that_differs_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With ranks that hold each other's shards."""
    text = Path(ranks.__file__).read_text(encoding="utf-8").replace("WORLD, rank)\n", "WORLD, 1 - rank)\n")
    (tmp_path / "swapped_ranks.py").write_text(text, encoding="utf-8")
    monkeypatch.setattr(ranks, "__name__", "swapped_ranks")
    monkeypatch.setattr(ranks, "__file__", str(tmp_path / "a" / "b" / "ranks.py"))
    ended = ranks.run("gloo", tmp_path)
    # Not always 1: gloo's threads may abort a process whose peer has left before its error is raised to the end.
    assert [(one.status != 0, "logits in torch.bfloat16" in one.err) for one in ended] == [(True, True)] * 2, ended
