"""The checks on the machine that every fused path shares."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Protocol

from dspark.dispatch import Check
from dspark.machine import MachineFacts


class _Facts(Protocol):
    @property
    def machine(self) -> MachineFacts: ...
    @property
    def device_type(self) -> str: ...


def _triton(facts: _Facts) -> tuple[bool, Hashable]:
    machine = facts.machine
    return machine.triton_version is not None, machine.triton_error


def _gpu_or_interpreter(facts: _Facts) -> tuple[bool, Hashable]:
    machine = facts.machine
    return machine.interpreter or (machine.cuda and facts.device_type == "cuda"), facts.device_type


def _faithful(facts: _Facts) -> tuple[bool, Hashable]:
    machine = facts.machine
    return machine.interpreter_faithful or not machine.interpreter, machine.triton_version


MACHINE_CHECKS = (
    Check("no-triton", "Triton must import: install the version in constraints.txt", _triton),
    Check(
        "no-gpu-no-interpreter",
        "the tensors must be on a CUDA device, or TRITON_INTERPRET=1 must be set before Triton is imported",
        _gpu_or_interpreter,
        after=("no-triton",),
    ),
    Check(
        "interpreter-unfaithful",
        "the interpreter must convert fp32 to bf16 by rounding to nearest even; use a supported Triton version",
        _faithful,
        after=("no-triton", "no-gpu-no-interpreter"),
    ),
)
