"""What a benchmark is made of: a case (operation, shape, size), its inputs in rotated copies, and the contenders."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .timing import Call

FUSED, EAGER, COMPILE, SGLANG = "fused", "eager", "compile", "sglang"
AGAINST = (SGLANG, EAGER, COMPILE)
COMPILED_ROWS = (8, 512, 4096, 16384)
"""The sizes that torch.compile is tried at: it takes seconds for each."""
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Contender:
    """A way to compute a case; ``calls`` has one call for each copy of the inputs.

    captured: a graph can hold it; False for what waits for the device. judged: its result is the case's (False for a
    part of the work that is timed for comparison). public: what a person would call, so its host time says something.
    """

    name: str
    calls: Sequence[Call]
    captured: bool = True
    judged: bool = True
    public: bool = True


@dataclass(frozen=True)
class Absent:
    """A contender that cannot run, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class Peer:
    """SGLang's own functions by name; none, and the reason, where they cannot be had."""

    version: str = ""
    functions: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    reason: str = "not asked for"

    def __bool__(self) -> bool:
        return bool(self.functions)


@dataclass(frozen=True)
class Asked:
    """Who competes."""

    against: frozenset[str] = frozenset({EAGER})
    peer: Peer = Peer()

    def compiled(self, calls: Callable[[], Sequence[Call]], size: int) -> list[Contender | Absent]:
        """The contender ``compile``, if it was asked for; ``calls`` are built only where it is tried."""
        if COMPILE not in self.against:
            return []
        if size not in COMPILED_ROWS:
            return [Absent(COMPILE, f"compiled at {', '.join(map(str, COMPILED_ROWS))} only: each size takes seconds")]
        return [Contender(COMPILE, calls(), public=False)]

    def sglang(
        self, function: str, calls: Callable[[Callable[..., Any]], Sequence[Call]], name: str = SGLANG
    ) -> list[Contender | Absent]:
        """SGLang's ``function``, if it was asked for, or why it cannot compete; ``calls`` binds the copies to it."""
        if SGLANG not in self.against:
            return []
        if not self.peer:
            return [Absent(name, self.peer.reason)]
        if function not in self.peer.functions:
            return [Absent(name, f"{self.peer.version} has no {function}")]
        return [Contender(name, calls(self.peer.functions[function]))]


class Inputs(abc.ABC):
    """The inputs of a case in all their copies: the same memory for every contender."""

    @abc.abstractmethod
    def contenders(self, asked: Asked) -> list[Contender | Absent]:
        """Everyone who was asked for, ``fused`` first."""

    def reset(self) -> None:  # noqa: B027  most operations return their results
        """Put back what calls write in place."""

    @abc.abstractmethod
    def outputs(self, returned: Any) -> Tensors:
        """What a call of copy 0 left behind: copies of it, so that the next call cannot change them."""

    @abc.abstractmethod
    def reference(self) -> Tensors:
        """What copy 0 must leave behind, from the definition in plain torch."""

    @abc.abstractmethod
    def judge(self, got: Tensors) -> str:
        """What the suite's oracle has against copy 0; empty: nothing."""

    def compare(self, got: Tensors, need: Tensors) -> str:
        """What speaks against ``got`` where the reference has ``need``; empty: nothing. Exact unless overridden."""
        return "; ".join(filter(None, (unequal(name, got[name], value) for name, value in need.items())))

    def extra(self, contender: Contender) -> dict[str, int]:
        """More that is measured of a contender, by name."""
        return {}


def unequal(name: str, got: torch.Tensor, need: torch.Tensor) -> str:
    """How many elements differ in their bits; empty: none."""
    if got.dtype != need.dtype or got.shape != need.shape:
        return f"{name}: {got.dtype} {tuple(got.shape)}, need {need.dtype} {tuple(need.shape)}"
    raw = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[got.element_size()]
    if torch.equal(got.view(raw), need.view(raw)):
        return ""
    return f"{name}: {int((got.view(raw) != need.view(raw)).sum())} of {got.numel()} elements differ"


@dataclass(frozen=True)
class Case:
    """One operation at one size.

    floor_bytes: what must move between the device memory and the chip, each input read once, each output written once.
    counted: how they are counted. build: the inputs on a device, in so many copies.
    """

    op: str
    shape: str
    axis: str
    size: int
    floor_bytes: int
    build: Callable[[torch.device, int], Inputs]
    counted: str = "bytes"

    @property
    def name(self) -> str:
        return f"{self.op} {self.shape} {self.axis} {self.size}"


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` by torch.compile at its best, made to round to bf16 where the source says so.

    Without ``emulate_precision_casts`` the compiler drops the rounding between norm and RoPE: another function.
    """
    import torch._dynamo
    import torch._inductor

    torch._dynamo.reset()
    options = torch._inductor.list_mode_options("max-autotune-no-cudagraphs") | {"emulate_precision_casts": True}
    return torch.compile(function, fullgraph=True, dynamic=False, options=options)
