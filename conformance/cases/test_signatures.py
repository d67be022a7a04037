"""Public names, parameter order and defaults are the committed ones: the functions are drop-in."""

from __future__ import annotations

import inspect
from pathlib import Path

import dspark.ops

from ..fixtures.ledger import Label, expect_equal

PUBLIC = sorted(name for name in dspark.ops.__all__ if name.islower())
COMMITTED = Path(__file__).parent.parent / "fixtures" / "signatures.txt"


def shown(name: str) -> str:
    """``name`` with its parameters and defaults, without annotations."""
    signature = inspect.signature(getattr(dspark.ops, name))
    bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()]
    return name + str(inspect.Signature(bare))


def test_public_signatures_are_the_committed_ones() -> None:
    lines = COMMITTED.read_text().splitlines()
    expect_equal(Label("signatures", "-"), "public functions", [shown(name) for name in PUBLIC], lines)


def test_docstrings_give_shapes_errors_and_the_rule() -> None:
    for name in PUBLIC:
        text = inspect.getdoc(getattr(dspark.ops, name)) or ""
        for part in ("CONTRACTS.md section", "ValueError", "path:"):
            expect_equal(Label("signatures", "-"), f"{name}: {part!r} in the docstring", part in text, True)
