"""The conformance suite, under the name that it has here: beside this folder in a checkout, installed in a wheel."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

INSTALLED = __package__.startswith("dspark_")
NAME = "dspark_conformance" if INSTALLED else "conformance"
PACKAGE = "dspark_benchmarks" if INSTALLED else "benchmarks"


def fixture(name: str) -> Any:
    """A module of the suite's fixtures: oracles, the envelope, the loader of SGLang's kernels."""
    return importlib.import_module(f"{NAME}.fixtures.{name}")


def folder() -> Path:
    """Where the suite lies."""
    module = importlib.import_module(NAME)
    assert module.__file__ is not None
    return Path(module.__file__).parent
