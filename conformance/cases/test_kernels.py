"""What kernels are written and run like: conversions of this lane, source rules, process isolation, contraction
(faults F4-1, F4-2, F4-4, F4-6, F4-7, F4-11)."""

from __future__ import annotations

import importlib
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from dspark import machine
from dspark.ops.launch import launching

from ..fixtures.calls import kv_write, qk_norm_rope
from ..fixtures.emulation import BF16, FP32, decode, encode, round_to
from ..fixtures.guard import Arena, to_bits
from ..fixtures.kernel_source import KERNEL_FILES, breaches, contraction, source_of
from ..fixtures.lane import Lane
from ..fixtures.ledger import Label, expect_equal
from ..fixtures.streams import Stream

LABEL = Label("kernels", "-")


@triton.jit  # type: ignore[untyped-decorator]
def narrow(source_ptr, cast_ptr, stored_ptr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """fp32 -> bf16 by a cast and by a store."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(source_ptr + offsets).to(tl.float32)
    tl.store(cast_ptr + offsets, values.to(tl.bfloat16))
    tl.store(stored_ptr + offsets, values)


@triton.jit  # type: ignore[untyped-decorator]
def widen(source_ptr, out_ptr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """bf16 -> fp32."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + offsets, tl.load(source_ptr + offsets).to(tl.float32))


def bf16_values(bits: np.ndarray) -> np.ndarray:
    """NaN as one class: every NaN pattern becomes the quiet one."""
    return encode(BF16, decode(BF16, bits))


def test_f4_2_narrowing_rounds_to_nearest_even(arena: Arena) -> None:
    """The four patterns of the report, every neighbourhood of random ties, both signs, subnormals, overflow and NaN."""
    reported = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x3FFF8000], np.uint32)
    upper = Stream("F4-2").bits(np.uint16, (8_000,)).astype(np.uint32) << 16
    near = (upper[:, None] + np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)).ravel()
    patterns = np.concatenate([reported, near])
    patterns = np.concatenate([patterns, np.zeros(-len(patterns) % 4096, np.uint32)])
    source = torch.from_numpy(patterns.view(np.int32)).view(torch.float32).to(arena.device)
    cast, stored = (torch.empty(len(patterns), dtype=torch.bfloat16, device=arena.device) for _ in range(2))
    machine.facts()  # installs the interpreter's correction, as every public operation does before its launch
    with launching(arena.device):
        narrow[(len(patterns) // 4096,)](source, cast, stored, BLOCK=4096, enable_fp_fusion=False)
    expected = encode(BF16, round_to(BF16, decode(FP32, patterns)))
    expect_equal(LABEL, "cast", bf16_values(to_bits(cast)), expected)
    expect_equal(LABEL, "store", bf16_values(to_bits(stored)), expected)
    expect_equal(LABEL, "the reported patterns", to_bits(cast)[:4].tolist(), [0x3F80, 0x3F82, 0x3F81, 0x4000])


def test_widening_is_exact_for_every_pattern(arena: Arena) -> None:
    patterns = np.arange(1 << 16, dtype=np.uint32)
    source = torch.from_numpy(patterns.astype(np.uint16).view(np.int16)).view(torch.bfloat16).to(arena.device)
    out = torch.empty(1 << 16, dtype=torch.float32, device=arena.device)
    machine.facts()
    with launching(arena.device):
        widen[(16,)](source, out, BLOCK=4096, enable_fp_fusion=False)
    got, need = decode(FP32, to_bits(out)), decode(FP32, patterns << 16)
    expect_equal(LABEL, "bits of fp32", encode(FP32, got), encode(FP32, need))


@pytest.mark.parametrize("file", KERNEL_FILES, ids=lambda file: file.parent.name)
def test_kernel_source_keeps_the_rules(file: Path) -> None:
    expect_equal(LABEL, f"breaches in {file.parent.name}", breaches(source_of(file)), [])


@pytest.mark.parametrize("file", KERNEL_FILES, ids=lambda file: file.parent.name)
def test_f4_7_kernel_source_declares_contraction_off(file: Path) -> None:
    """The interpreter contracts nothing, so this lane can only read the declaration; the cuda lane reads the PTX."""
    name, source = file.parent.name, source_of(file)
    need = ["False"] if f"def {name}_kernel(" in source else []  # others are called by kernels, and launch nothing
    expect_equal(LABEL, f"contraction in {name}", contraction(source), need)


BROKEN = {
    "a masked load says what masked lanes hold": "x = tl.load(p, mask=m).to(tl.float32)",
    "a loaded value is widened before anything else": "x = tl.load(p) * 2",
    "a reduction names its axis": "x = tl.sum(y)",
    "a bf16 value is stored or widened, never computed with": "x = y.to(tl.bfloat16) * 2",
    "a kernel that is launched waits before anything else": "rows = tl.program_id(0)",
    "no // or % on run-time values: the interpreter and the compiler round them differently": "x = y // BLOCK",
}


@pytest.mark.parametrize("rule", BROKEN)
def test_source_rules_see_a_breach(rule: str) -> None:
    name = "launched_kernel" if "launched" in rule else "kernel"
    kernel = f"@triton.jit\ndef {name}(p, y, m, BLOCK):\n    {BROKEN[rule]}\n"
    expect_equal(LABEL, rule, [breach.rule for breach in breaches(kernel)], [rule])


@pytest.mark.parametrize(
    ("rule", "launch"),
    [
        ("a launch declares its FP contraction", "with launching(device):\n        kernel[grid](x)"),
        ("a launch declares its FP contraction", "made = Launch(kernel, grid, (), {'WIDE': 1}, {'num_warps': 4})"),
        ("a launch is surrounded by launching(device)", "kernel[grid](x, enable_fp_fusion=False)"),
    ],
)
def test_launch_rules_see_a_breach(rule: str, launch: str) -> None:
    found = breaches(f"def launch(x):\n    {launch}\n")
    expect_equal(LABEL, rule, [breach.rule for breach in found], [rule])


def test_f4_11_this_process_has_its_own_cache_and_its_lane(lane: Lane) -> None:
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    cache = Path(os.environ["TRITON_CACHE_DIR"])
    expect_equal(LABEL, f"own cache of {worker or 'the only process'}", cache.is_dir(), True)
    expect_equal(LABEL, "interpreter", machine.facts().interpreter, lane is Lane.INTERPRET)
    expect_equal(LABEL, "TRITON_INTERPRET", os.environ.get("TRITON_INTERPRET"), "1" if lane is Lane.INTERPRET else None)
    expect_equal(LABEL, "triton is imported", "triton" in sys.modules, True)


@pytest.mark.lanes(Lane.INTERPRET)
def test_interpreter_is_proven_faithful() -> None:
    expect_equal(LABEL, "properties that fail", machine.probe_interpreter_bf16(), ())
    expect_equal(LABEL, "faithful", machine.facts().interpreter_faithful, True)


def compiled_ptx(kernel: Any) -> list[str]:
    """The PTX of every specialisation of ``kernel`` that this process has compiled."""
    return [compiled.asm["ptx"] for cache in kernel.device_caches.values() for compiled in cache[0].values()]


@pytest.mark.lanes(Lane.CUDA)
@pytest.mark.parametrize("neox", [True, False], ids=["neox", "interleaved"])
@pytest.mark.parametrize("call", [qk_norm_rope, kv_write], ids=lambda module: module.OP)
def test_f4_7_declared_contraction_shows_in_the_ptx(call: Any, neox: bool, arena: Arena) -> None:
    """Contraction is declared off: no fused multiply-add of fp32, and conversions to bf16 round to nearest."""
    call.run(replace(call.base(), neox=neox), Label(call.OP, "fused"), arena, "fused")
    module = importlib.import_module(f"dspark.ops.{call.OP}.kernel")
    texts = compiled_ptx(getattr(module, f"{call.OP}_kernel"))
    expect_equal(LABEL, "kernels compiled", bool(texts), True)
    # One comparison for all of them: how many a process has compiled depends on the cases that it was given.
    expect_equal(LABEL, "declared contraction", module.FP_CONTRACTION, False)
    expect_equal(LABEL, "fma.rn.f32 in the PTX", any("fma.rn.f32" in text for text in texts), False)
    expect_equal(LABEL, "conversions to bf16 round to nearest", all("cvt.rn.bf16" in text for text in texts), True)
    for approximate in ("sqrt.approx", "div.full", "div.approx", "rsqrt.approx", "ex2.approx", "cos.approx"):
        expect_equal(LABEL, f"{approximate} in the PTX", any(approximate in text for text in texts), False)
