"""SGLang's kernels for the benchmark, loaded by file as the suite does, without the wrapper that the suite needs."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

from .case import Peer
from .suite import fixture


def load(place: str | None) -> Peer:
    """The release at ``place`` (None: the installed one); without one, a peer that says why."""
    implementations = fixture("implementations")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = fixture("implementations.sglang").load(place)
    except implementations.ImplementationError as error:
        return Peer(reason=str(error).removeprefix("--impl="))
    functions = {name: inspect.unwrap(getattr(found, name)) for name in found.offers}
    if not torch.cuda.is_available():
        functions = {name: _believing(function) for name, function in functions.items()}
    return Peer(f"sglang {found.version}", functions, "")


def _believing(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` in the interpreter, which it refuses unless its tensors say that they are on CUDA."""

    @functools.wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        with mock.patch.object(torch.Tensor, "is_cuda", True, create=True):
            return function(*args, **named)

    return call
