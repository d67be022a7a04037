"""Tests of :mod:`dspark.faults`, with kinds, words and devices that exist only here; no GPU is needed."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import dspark
from dspark import faults
from dspark.faults import CaptureError, IndexFaultError

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)
SOURCE = Path(faults.__file__).parents[1]


@pytest.fixture(autouse=True)
def _own_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """No kind is declared, no word is built, debug mode is off; afterwards everything is as it was."""
    monkeypatch.setattr(faults, "_kinds", [])
    monkeypatch.setattr(faults, "_cpu", threading.local())
    monkeypatch.setattr(faults, "_cuda_words", {})
    monkeypatch.setattr(faults, "_debug", False)


@pytest.fixture
def capturing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU whose current stream is being captured into a graph."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)


def bad(*values: bool) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.bool)


def in_thread(work: Callable[[], Any]) -> Any:
    """What ``work`` returns in a thread of its own."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()
    thread.join()
    return results[0]


# --- declare ----------------------------------------------------------------------------------------------------------


def test_every_kind_has_a_bit_of_its_own() -> None:
    masks = [faults.declare("one", "low"), faults.declare("one", "high"), faults.declare("two", "low")]
    assert masks == [1, 2, 4]
    assert faults.declared() == (("one", "low"), ("one", "high"), ("two", "low"))


def test_a_kind_is_declared_once() -> None:
    faults.declare("one", "low")
    with pytest.raises(ValueError, match="one/low is declared twice"):
        faults.declare("one", "low")
    assert faults.declared() == (("one", "low"),)


def test_the_word_holds_63_kinds_and_every_one_of_them_works() -> None:
    kinds = [("op", f"kind-{position}") for position in range(63)]
    masks = [faults.declare(*kind) for kind in kinds]
    with pytest.raises(ValueError, match="op/one-too-many: all 63 bits"):
        faults.declare("op", "one-too-many")
    assert faults.declared() == tuple(kinds)
    for mask in masks:
        faults.set_where(bad(True), mask)
    assert faults.peek() == tuple(kinds)
    with pytest.raises(IndexFaultError) as raised:
        faults.check()
    assert raised.value.kinds == tuple(kinds)
    assert faults.word(CPU).item() == 0


# --- words ------------------------------------------------------------------------------------------------------------


def test_a_word_is_one_int64_that_is_built_once(monkeypatch: pytest.MonkeyPatch) -> None:
    word = faults.word(CPU)
    assert (word.dtype, tuple(word.shape), word.device, word.item()) == (torch.int64, (1,), CPU, 0)
    faults._cuda_words[0] = torch.zeros(1, dtype=torch.int64)
    monkeypatch.setattr(torch, "zeros", lambda *args, **kwargs: pytest.fail("built again"))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert faults.word(CPU) is word
    assert faults.word(CUDA) is faults.word(torch.device("cuda")) is faults._cuda_words[0]


def test_the_cpu_word_belongs_to_its_thread() -> None:
    mask = faults.declare("op", "kind")
    faults.set_where(bad(True), mask)
    assert in_thread(faults.peek) == ()
    assert in_thread(lambda: faults.set_where(bad(True), mask) or faults.peek()) == (("op", "kind"),)
    faults.word(CPU).zero_()
    in_thread(lambda: faults.set_where(bad(True), mask))
    assert faults.peek() == ()


def test_a_word_that_is_built_in_inference_mode_serves_outside_too() -> None:
    with torch.inference_mode():
        faults.warmup("cpu")
    faults.set_where(bad(True), faults.declare("op", "kind"))
    with pytest.raises(IndexFaultError):
        faults.check()


def test_the_cpu_word_is_on_the_cpu_whatever_the_default_device() -> None:
    with torch.device("meta"):
        assert faults.word(CPU).device == CPU


def test_warmup_builds_the_word_and_takes_a_device_or_its_name() -> None:
    def warmed(device: torch.device | str) -> bool:
        dspark.warmup(device)
        return hasattr(faults._cpu, "word")

    assert not in_thread(lambda: hasattr(faults._cpu, "word"))
    assert in_thread(lambda: warmed("cpu"))
    assert in_thread(lambda: warmed(CPU))


# --- set, peek, check -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "is_set"),
    [((), False), ((False, False), False), ((False, True, False), True), ((True, True), True)],
    ids=["empty", "none", "one", "all"],
)
def test_set_where_sets_the_bit_if_any_element_is_true(values: tuple[bool, ...], is_set: bool) -> None:
    faults.declare("op", "other")
    faults.set_where(bad(*values), faults.declare("op", "kind"))
    assert faults.peek() == ((("op", "kind"),) if is_set else ())


def test_a_bit_is_sticky() -> None:
    first, second = faults.declare("op", "first"), faults.declare("op", "second")
    faults.set_where(bad(True), second)
    faults.set_where(bad(False), second)
    faults.set_where(bad(True), first)
    faults.set_where(torch.tensor([[False, False], [False, True]]), first)
    assert faults.peek() == (("op", "first"), ("op", "second"))


def test_set_where_reads_nothing_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading a meta tensor raises, as reading a CUDA tensor during a capture does."""
    monkeypatch.setattr(faults, "word", lambda device: torch.zeros(1, dtype=torch.int64, device=device))
    faults.set_where(torch.zeros(3, dtype=torch.bool, device="meta"), 1)


def test_peek_clears_nothing_and_check_clears_what_it_raises() -> None:
    faults.check()
    faults.declare("op", "unset")
    faults.set_where(bad(True), faults.declare("op", "kind"))
    assert faults.peek() == faults.peek("cpu") == faults.peek(CPU) == (("op", "kind"),)
    with pytest.raises(IndexError, match=r"out of range: op/kind$") as raised:
        faults.check()
    assert type(raised.value) is IndexFaultError is dspark.IndexFaultError
    assert raised.value.kinds == (("op", "kind"),)
    assert faults.peek() == ()
    faults.check()


def test_the_error_survives_a_process_boundary() -> None:
    copy = pickle.loads(pickle.dumps(IndexFaultError((("op", "kind"), ("op", "other")))))
    assert copy.kinds == (("op", "kind"), ("op", "other"))
    assert str(copy) == "index values out of range: op/kind, op/other"


class RacingWord:
    """A word in which another stream sets ``late`` bits just after it was read."""

    def __init__(self, bits: int, late: int) -> None:
        self.bits, self.late = bits, late

    def item(self) -> int:
        seen, self.bits = self.bits, self.bits | self.late
        return seen

    def bitwise_and_(self, mask: int) -> None:
        self.bits &= mask


def test_check_does_not_lose_a_bit_that_is_set_while_it_reads() -> None:
    early, late = faults.declare("op", "early"), faults.declare("op", "late")
    faults._cuda_words[0] = RacingWord(early, late)  # type: ignore[assignment]
    with pytest.raises(IndexFaultError) as raised:
        faults.check()
    assert raised.value.kinds == (("op", "early"),)
    assert faults._cuda_words[0].bits == late  # type: ignore[attr-defined]


def test_without_a_device_every_word_is_read_and_with_one_only_its_own() -> None:
    on_cpu, on_gpu = faults.declare("op", "cpu"), faults.declare("op", "gpu")
    faults.set_where(bad(True), on_cpu)
    faults._cuda_words[0] = torch.tensor([on_gpu])
    faults._cuda_words[1] = torch.tensor([on_cpu])
    assert faults.peek() == (("op", "cpu"), ("op", "gpu"))
    assert faults.peek(CUDA) == (("op", "gpu"),)
    with pytest.raises(IndexFaultError, match=r"op/cpu$"):
        faults.check("cpu")
    with pytest.raises(IndexFaultError, match=r"op/gpu$"):
        faults.check("cuda:0")
    assert faults.peek() == (("op", "cpu"),)
    faults.set_where(bad(True), on_gpu)
    with pytest.raises(IndexFaultError, match=r"op/cpu, op/gpu$"):
        faults.check()
    assert faults.peek() == ()


# --- the end of an operation ------------------------------------------------------------------------------------------


def test_finish_raises_on_the_cpu() -> None:
    faults.finish(CPU)
    faults.set_where(bad(True), faults.declare("op", "kind"))
    with pytest.raises(IndexFaultError):
        faults.finish(CPU)
    faults.finish(CPU)


@pytest.mark.parametrize("debug", [False, True])
def test_finish_on_cuda_reads_its_word_in_debug_mode_only(monkeypatch: pytest.MonkeyPatch, debug: bool) -> None:
    monkeypatch.setattr(faults, "_debug", debug)
    assert faults.debugging() is debug
    faults.set_where(bad(True), faults.declare("op", "of-the-cpu"))
    faults._cuda_words[0] = torch.tensor([faults.declare("op", "kind")])
    if debug:
        with pytest.raises(IndexFaultError, match=r"op/kind$"):
            faults.finish(CUDA)
    else:
        monkeypatch.setattr(faults, "check", lambda device: pytest.fail("synchronised"))
        faults.finish(CUDA)
    assert faults.peek("cpu") == (("op", "of-the-cpu"),)


@pytest.mark.parametrize(("value", "flag"), [("", False), ("0", False), ("1", True)])
def test_flags(value: str, flag: bool) -> None:
    assert faults.parse_flag(value, "VARIABLE") is flag


@pytest.mark.parametrize("value", ["yes", "true", "2", " 1", "01"])
def test_other_flags_are_refused(value: str) -> None:
    with pytest.raises(ValueError, match=f"VARIABLE: got {value!r}, need 0 or 1"):
        faults.parse_flag(value, "VARIABLE")


def test_a_bad_flag_in_the_environment_stops_the_import() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import dspark"],
        env={**os.environ, "PYTHONPATH": str(SOURCE), "DSPARK_DEBUG": "yes"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "ValueError: DSPARK_DEBUG: got 'yes', need 0 or 1" in done.stderr


# --- capture ----------------------------------------------------------------------------------------------------------


def test_what_would_be_built_during_a_capture_is_named(capturing: None) -> None:
    with pytest.raises(CaptureError, match=r"a table of doors would be built during CUDA graph capture: .*warmup"):
        faults.refuse_in_capture("a table of doors")


@pytest.mark.parametrize(("available", "in_capture"), [(True, False), (False, True)])
def test_outside_a_capture_nothing_is_refused(
    monkeypatch: pytest.MonkeyPatch, available: bool, in_capture: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: in_capture)
    faults.refuse_in_capture("a table of doors")


def test_a_cuda_word_is_not_built_during_a_capture(capturing: None) -> None:
    with pytest.raises(CaptureError, match="the fault word of cuda:0"):
        dspark.warmup("cuda:0")
    assert faults._cuda_words == {}
    faults._cuda_words[0] = torch.zeros(1, dtype=torch.int64)
    dspark.warmup("cuda:0")
