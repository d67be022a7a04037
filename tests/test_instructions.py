"""Tests of `conformance.fixtures.instructions`: the table keeps its contracts, and a changed kernel does not.

The compiler runs in processes of its own: in this one Triton may have been imported with its interpreter.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import conformance
import dspark
from conformance.fixtures.instructions import jobs
from conformance.fixtures.instructions.compiler import Compiled
from conformance.fixtures.instructions.contracts import AMD_MODE, CONTRACTS
from conformance.fixtures.instructions.rules import breaches, instructions, masked_loads, narrow_products
from conformance.fixtures.instructions.table import ROWS, TARGETS
from conformance.fixtures.instructions.ttir import Function

SOURCE = Path(dspark.__file__).parent
SUITE = Path(conformance.__path__[0]).parent


def compile_table(tmp_path: Path, *arguments: str, source: Path = SOURCE, **environment: str) -> tuple[str, Any]:
    """What the report says (errors included), and its outcomes as data, with ``dspark`` from ``source``."""
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    paths = {"PYTHONPATH": f"{source.parent}{os.pathsep}{SUITE}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    report = tmp_path / "outcomes.json"
    run = subprocess.run(
        [sys.executable, "-m", "conformance.fixtures.instructions", "--json", str(report), *arguments],
        env={**inherited, **paths, "TRITON_CACHE_DIR": str(tmp_path / "cache"), **environment},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    return run.stdout + run.stderr, json.loads(report.read_text()) if report.exists() else None


@pytest.mark.parametrize("op", CONTRACTS)
def test_every_specialisation_keeps_its_contract(op: str, tmp_path: Path) -> None:
    """On every architecture; every declaration of the contract is used, and every stride is 64-bit in some row."""
    printed, outcomes = compile_table(tmp_path, "--jobs", "2", "--only", f"{op}/*")
    assert outcomes is not None, printed
    assert [
        (outcome["row"], outcome["target"], outcome["breaches"]) for outcome in outcomes if outcome["breaches"]
    ] == []
    assert Counter((outcome["row"], outcome["target"]) for outcome in outcomes) == Counter(
        (job.row_id, job.target.name) for job in jobs() if job.row.op == op
    )
    used = {name for outcome in outcomes for name in (*outcome["masked_loads"], *outcome["narrow_products"])}
    assert used == {*CONTRACTS[op].others, *CONTRACTS[op].narrow_products}
    kinds = {(name, kind) for outcome in outcomes for name, kind in outcome["signature"].items() if "stride" in name}
    assert {name for name, _ in kinds} == {name for name, kind in kinds if kind == "i64"}
    indices = {kind for outcome in outcomes for name, kind in outcome["signature"].items() if name in INDICES}
    assert {"*i32", "*i64"} <= indices


INDICES = {"positions_ptr", "locs_ptr", "candidates_ptr", "accept_index_ptr", "slots_ptr"}


def test_the_table_is_of_the_promised_size_and_its_rows_differ() -> None:
    ids = {job.row_id for job in jobs()}
    assert len(ids) == len(ROWS) >= 40
    assert {job.row.op for job in jobs()} == set(CONTRACTS)
    assert [target.name for target in TARGETS] == ["sm_80", "sm_90", "sm_100", "gfx942"]


@dataclass(frozen=True)
class Change:
    """A changed line of a kernel; every compilation of ``row`` for ``targets`` must have a breach like ``seen_as``."""

    file: str
    old: str
    new: str
    row: str
    targets: str
    seen_as: str


KV, QK = "kv_write/inkling-draft/committed*", "qk_norm_rope/inkling-draft/*"
CHANGES = {
    "contraction of kv_write": Change(
        "kv_write", "FP_CONTRACTION = False", "FP_CONTRACTION = True", KV, "sm_*", "fma.rn.f32"
    ),
    "contraction of qk_norm_rope on gfx942": Change(
        "qk_norm_rope", "FP_CONTRACTION = False", "FP_CONTRACTION = True", QK, "gfx942", "v_fma_f32, v_fmaak_f32"
    ),
    "contraction declared by an integer kernel": Change(
        "accept",
        '"enable_fp_fusion": False',
        '"enable_fp_fusion": True',
        "accept/inkling*",
        "sm_90",
        "contraction: launched",
    ),
    "another value in masked lanes": Change(
        "kv_write",
        "mask=row_in_batch, other=-1",
        "mask=row_in_batch, other=0",
        KV,
        "sm_90",
        "load from locs_ptr: other is 0",
    ),
    "nothing said of masked lanes": Change(
        "norm_rope",
        "second[None, None, :], mask=pair_read, other=0.0",
        "second[None, None, :], mask=pair_read",
        QK,
        "sm_90",
        "load from qkv_ptr: nothing",
    ),
    "rows in 32 bits": Change(
        "qk_norm_rope",
        "tl.program_id(0).to(tl.int64) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS).to(tl.int64)",
        "tl.program_id(0) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)",
        QK,
        "sm_90",
        "made of constant, program id x",
    ),
    "a layer in 32 bits": Change(
        "kv_write", "tl.program_id(2).to(tl.int64)", "tl.program_id(2)", KV, "sm_90", "kv_layer_stride, program id z"
    ),
    "a position in 32 bits": Change(
        "kv_write",
        "tl.load(positions_ptr + rows * positions_stride, mask=row_in_batch, other=0).to(tl.int64)",
        "tl.load(positions_ptr + rows * positions_stride, mask=row_in_batch, other=0)",
        "kv_write/inkling-draft-tp8/*",
        "sm_90",
        "made of load from positions_ptr, table_stride",
    ),
    "a quotient in 32 bits": Change(
        "index_math",
        "(numerator // denominator).to(tl.int64)",
        "numerator // denominator",
        "state_scatter/inkling-tp8/nothing*",
        "sm_90",
        "32-bit product in an address",
    ),
    "an approximate root": Change("norm_rope", "tl.sqrt_rn(", "tl.sqrt(", QK, "*", "sqrt.approx|roots account for"),
    "an approximate quotient": Change(
        "norm_rope",
        "tl.div_rn(tl.full(root.shape, 1.0, tl.float32), root)",
        "1.0 / root",
        QK,
        "sm_*",
        "div.full.f32",
    ),
    "a rounding less": Change(
        "norm_rope", ".to(tl.bfloat16).to(tl.float32)", "", KV, "sm_90", "in the IR: 2, declared 4"
    ),
    "no wait": Change(
        "state_scatter",
        "    wait_for_prerequisite_grids(DEPENDENT_LAUNCH)\n",
        "",
        "state_scatter/inkling/commit-set",
        "sm_90",
        "griddepcontrol.wait: got ld.global",
    ),
    "a wait after the first load": Change(
        "commit_indices",
        "    wait_for_prerequisite_grids(DEPENDENT_LAUNCH)\n",
        "    first = tl.load(accept_lens_ptr).to(tl.int64)\n    wait_for_prerequisite_grids(DEPENDENT_LAUNCH)\n"
        "    tl.store(last_ptr, first)\n",
        "commit_indices/inkling-draft/last*",
        "sm_100",
        "griddepcontrol.wait: got ld.global",
    ),
    "the next kernel let in": Change(
        "dependent_launch",
        "        tl.extra.cuda.gdc_wait()\n",
        "        tl.extra.cuda.gdc_wait()\n        tl.extra.cuda.gdc_launch_dependents()\n",
        "accept/inkling*",
        "sm_90",
        "griddepcontrol.wait: got griddepcontrol.wait, griddepcontrol.launch_dependents",
    ),
    "a wait where nothing can wait": Change(
        "dependent_launch",
        "if DEPENDENT_LAUNCH:",
        "if True:",
        "accept/inkling*",
        "sm_80",
        "does not compile|griddepcontrol",
    ),
    "floating arithmetic on integers": Change(
        "accept",
        "correct * target_stride_column",
        "(correct.to(tl.float32) * target_stride_column).to(tl.int64)",
        "accept/inkling*",
        "*",
        "not among the allowed",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_kernel_breaks_its_contract(name: str, tmp_path: Path) -> None:
    change = CHANGES[name]
    source = tmp_path / "changed" / "dspark"
    shutil.copytree(SOURCE, source, ignore=shutil.ignore_patterns("__pycache__"))
    file = source / "ops" / change.file / "kernel.py"
    text = file.read_text()
    assert text.count(change.old) == 1
    file.write_text(text.replace(change.old, change.new))
    arguments = ("--jobs", "1", "--only", change.row, "--target", change.targets)
    printed, outcomes = compile_table(tmp_path, *arguments, source=source)
    assert outcomes, printed
    for outcome in outcomes:
        assert any(re.search(change.seen_as, breach) for breach in outcome["breaches"]), outcome


def test_a_process_with_the_interpreter_is_refused(tmp_path: Path) -> None:
    printed, outcomes = compile_table(tmp_path, TRITON_INTERPRET="1")
    assert outcomes is None
    assert "RuntimeError: TRITON_INTERPRET: set" in printed


LOOP = """
  tt.func public @kernel(%p: !tt.ptr<i32> loc("p"(#loc1)), %stride: i32 loc("s"(#loc1))) attributes {noinline = false} {
    %c0 = arith.constant 0 : i32 loc(#loc)
    %first = arith.constant 1 : i64 loc(#loc)
    %mask = arith.constant dense<true> : tensor<4xi1> loc(#loc)
    %row = arith.muli %c0, %stride : i32 loc(#loc)
    %wide = arith.extsi %row : i32 to i64 loc(#loc)
    %0 = scf.while (%at = %first) : (i64) -> i64 {
      %1 = arith.cmpi slt, %at, %first : i64 loc(#loc)
      scf.condition(%1) %at : i64 loc(#loc)
    } do {
    ^bb0(%at: i64 loc("at"(#loc1))):
      %2 = arith.addi %at, %wide : i64 loc(#loc)
      scf.yield %2 : i64 loc(#loc)
    } loc(#loc)
    %3 = scf.for %k = %c0 to %c0 step %c0 iter_args(%acc = %0) -> (i64)  : i32 {
      %4 = tt.addptr %p, %acc : !tt.ptr<i32>, i64 loc(#loc)
      %5 = tt.load %4, %mask : !tt.ptr<i32> loc(#loc)
      scf.yield %acc : i64 loc(#loc)
    } loc(#loc)
    tt.return loc(#loc)
  } loc(#loc)
"""


def test_an_address_is_followed_through_loops() -> None:
    function = Function(LOOP)
    assert list(function.arguments) == ["p", "stride"]
    assert list(narrow_products(function)) == ["constant, stride"]
    assert masked_loads(function) == {"p": {None}}


BRANCH = """
  tt.func public @kernel(%p: !tt.ptr<i32>, %n: i32, %yes: i1) attributes {noinline = false} {
    %0 = scf.if %yes -> (i32) {
      %x = arith.muli %n, %n : i32
      scf.yield %x : i32
    } else {
      %x = arith.addi %n, %n : i32
      scf.yield %x : i32
    }
    %x = arith.constant 7 : i32
    %1 = tt.addptr %p, %0 : !tt.ptr<i32>, i32
    %2 = tt.load %1, %yes, %x : !tt.ptr<i32>
"""


def test_names_belong_to_their_branch() -> None:
    function = Function(BRANCH)
    assert narrow_products(function) == {"n": "arith.muli %n, %n : i32"}
    assert masked_loads(function) == {"p": {7.0}}


def test_instructions_are_named_with_their_rounding_and_counted() -> None:
    ptx = "\n".join(
        [
            "\tmul.f32 \t%f1, %f2, %f3;",
            "@%p1 fma.rn.ftz.f32 %f1, %f2, %f3, %f4;",
            "\tadd.s32 %r1, %r2, %r3;",
            "\tmul.f32 a",
        ]
    )
    compiled = Compiled({"ptx": ptx}, 0, False, {}, 0.0)
    assert instructions(compiled) == {"mul.f32": 2, "fma.rn.ftz.f32": 1}
    compiled = Compiled({"amdgcn": "\tv_mul_f32_e32 v1, v2, v3\n\tv_add_u32_e32 v1, v2, v3\n"}, 0, False, {}, 0.0)
    assert instructions(compiled) == {"v_mul_f32": 1}


@pytest.mark.parametrize(
    ("llvm", "seen"),
    [
        ("  %1 = bitcast <2 x i32> %0 to <2 x float>\n  %2 = insertelement <2 x float> %1, float 0.0, i64 1\n", False),
        ("  %1 = bitcast i32 %0 to float\n  %2 = fadd float %1, %1\n", True),
        ("  %1 = sitofp i32 %0 to float\n", True),
        ("  %1 = add i32 %0, %0\n", False),
    ],
)
def test_an_integer_kernel_may_move_bits_as_floats_and_no_more(llvm: str, seen: bool) -> None:
    modes = "".join(f"\t{name} {value}\n" for name, value in AMD_MODE.items())
    compiled = Compiled({"amdgcn": modes, "llir": llvm}, 0, False, {}, 0.0)
    found = breaches(compiled, Function(""), CONTRACTS["accept"], TARGETS[-1], False)
    assert found == ["a floating type in LLVM's IR of an integer kernel"] * seen
