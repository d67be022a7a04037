"""Public names, parameter order and defaults are the committed ones: the functions are drop-in."""

from __future__ import annotations

import inspect
from importlib import import_module
from pathlib import Path
from typing import Any

import dspark.ops

from ..fixtures.ledger import Label, expect_equal

PUBLIC = sorted(name for name in dspark.ops.__all__ if name.islower())
FIXTURES = Path(__file__).parent.parent / "fixtures"
COMMITTED, OF_MODELS = FIXTURES / "signatures.txt", FIXTURES / "signatures_models.txt"


def shown(name: str, function: Any) -> str:
    """``name`` with the parameters and defaults of ``function``, without annotations."""
    signature = inspect.signature(function)
    bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()]
    return name + str(inspect.Signature(bare))


def test_public_signatures_are_the_committed_ones() -> None:
    lines = COMMITTED.read_text().splitlines()
    found = [shown(name, getattr(dspark.ops, name)) for name in PUBLIC]
    expect_equal(Label("signatures", "-"), "public functions", found, lines)


def test_signatures_of_model_and_runtime_are_the_committed_ones() -> None:
    lines = OF_MODELS.read_text().splitlines()
    names = [line.partition("(")[0] for line in lines]
    found = [shown(name, getattr(import_module(name.rpartition(".")[0]), name.rpartition(".")[2])) for name in names]
    expect_equal(Label("signatures", "-"), "functions and classes", found, lines)


def test_docstrings_give_shapes_errors_and_the_rule() -> None:
    for name in PUBLIC:
        text = inspect.getdoc(getattr(dspark.ops, name)) or ""
        for part in ("CONTRACTS.md section", "ValueError", "path:"):
            expect_equal(Label("signatures", "-"), f"{name}: {part!r} in the docstring", part in text, True)
