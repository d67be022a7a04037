"""Calls whose kernels are not launched, so that what is timed is the host: validation, decision, census."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from importlib import import_module
from unittest import mock

import torch

from dspark import faults

OPS = ("accept", "accept_commit", "commit_indices", "kv_write", "qk_norm_rope", "state_scatter")


def nothing(*arguments: object) -> None:
    """Stands for a launcher, and for the look at the CPU's fault word that a GPU does not have."""


@contextlib.contextmanager
def without_launches() -> Iterator[None]:
    """Replace every launcher by :func:`nothing`, and a batched product by the first one of its shape."""
    product, made = torch.bmm, dict[torch.Size, torch.Tensor]()

    def once(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        found = made.get(first.shape)
        if found is None:
            found = made[first.shape] = product(first, second)
        return found

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(faults, "check", nothing))
        stack.enter_context(mock.patch.object(torch, "bmm", once))
        for op in OPS:
            stack.enter_context(mock.patch.object(import_module(f"dspark.ops.{op}.kernel"), f"{op}_fused", nothing))
        yield
