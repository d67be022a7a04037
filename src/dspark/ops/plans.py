"""What the validation of a call leads to, found once and used again by every call that looks the same to it.

Whether a call is legal, which path may serve it, and numbers such as eps in fp32 follow from what the validation reads:
types, shapes, strides, dtypes and devices of tensors, numbers, and the machine. An operation writes all of that down as
a key, and keeps what it found as a :class:`Plan` under that key. So

- a key names everything that the validation and the launch of a kernel read, each number with its type (``True == 1 ==
  1.0`` are equal keys, and a bool is refused), each tensor with its type (an array has a shape and a dtype, too);
- a plan holds no tensor of a caller: it would keep the memory alive;
- what neither reads goes from the call to the computation, never from a plan;
- a call that would be refused has no plan: it is validated each time, in the same order, with the same error;
- a call with gradients to lose, and one whose arguments cannot be read, have no key.
"""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch

from dspark import machine
from dspark.dispatch import Decision
from dspark.machine import MachineFacts
from dspark.ops.launch import Launch

LIMIT = 4096
"""Plans of one operation; with one more all are forgotten, so that lengths seen once do not fill memory for good."""


@dataclass(slots=True)
class Plan:
    """The decision of calls that look alike, on the machine whose facts it was made with."""

    machine: MachineFacts
    decision: Decision


@dataclass(slots=True)
class KernelPlan(Plan):
    """launch: of the operation's kernel, found when a call takes the fused path. The key names all it is made of."""

    launch: Launch | None = field(default=None, kw_only=True)


P = TypeVar("P", bound=Plan)


class Plans(Generic[P]):
    """The plans of one operation."""

    def __init__(self) -> None:
        self._plans: dict[Hashable, P] = {}

    def find(self, key: Hashable) -> P | None:
        """The plan under ``key``, if it was made with the present facts of the machine (the same object)."""
        try:
            plan = self._plans.get(key)
        except TypeError:  # an argument that has no hash, e.g. a list for a number: the validation says what it is
            return None
        return plan if plan is not None and plan.machine is machine.facts() else None

    def keep(self, key: Hashable, plan: P) -> P:
        """``plan``, which from now on is the one of ``key``; None and what has no hash are no key."""
        if len(self._plans) >= LIMIT:
            self._plans.clear()
        if key is not None:
            with suppress(TypeError):
                self._plans[key] = plan
        return plan


def layouts(*tensors: torch.Tensor | None) -> Hashable:
    """Type, shape, strides, dtype and device of each tensor, as part of a key; raises for what has none of them."""
    return tuple([None if t is None else (type(t), t.shape, t.stride(), t.dtype, t.device) for t in tensors])


def requires_grad(*tensors: torch.Tensor | None) -> bool:
    """Whether a tensor requires grad: with grad mode on, the validation refuses the call."""
    return any(tensor is not None and tensor.requires_grad for tensor in tensors)
