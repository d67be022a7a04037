"""Tests of :mod:`dspark.machine`.

What a process can run is settled when Triton is imported, so most of this needs processes of its own. Starting one
costs seconds (torch), forking one does not: the module fixture starts this file once as a script, which imports torch
and forks a child per scenario. A scenario measures and returns plain data; the tests below judge it.
"""

from __future__ import annotations

import dataclasses
import importlib
import io
import json
import logging
import os
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from dspark import machine

if TYPE_CHECKING:
    import triton.language as tl

Report = dict[str, Any]

ROUTES = ("to-bf16", "to-bf16-rtne", "store-cast")
LOW_HALVES = np.array([0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
STOCK_FAILS = {
    *(f"{route}-{kind}" for route in ROUTES for kind in ("ties", "near-ties", "overflow", "subnormal", "nan")),
    "to-fp32-all-patterns",
}
FACTS_WITHOUT_TRITON = {
    "triton_version": None,
    "interpreter": False,
    "interpreter_faithful": False,
    "interpreter_fix": False,
}

# --- Scenarios: each runs in a forked child ---------------------------------------------------------------------------

BROKEN_INSTALLATIONS = {
    "ImportError": "raise ImportError('libtriton.so: undefined symbol\\n  (second line)')",
    "OSError": "raise OSError('libcuda.so.1: cannot open shared object file')",
    "AttributeError": "raise AttributeError('module knobs has no attribute runtime')",
    "ModuleNotFoundError": "",
}


def _facts_from_threads(count: int = 8) -> list[machine.MachineFacts]:
    found: list[machine.MachineFacts] = []
    start = threading.Barrier(count)

    def ask() -> None:
        start.wait()
        found.append(machine.facts())

    threads = [threading.Thread(target=ask) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def broken_installation(source: str) -> Report:
    """A package `triton` that shadows the real one, counts its imports and then runs ``source``."""
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder, "triton")
        package.mkdir()
        package.joinpath("__init__.py").write_text(
            "import pathlib, time\n"
            "with pathlib.Path(__file__).with_name('imports').open('a') as log: log.write('x')\n"
            f"time.sleep(0.02)\n{source}\n"
        )
        sys.path.insert(0, folder)
        found = _facts_from_threads()
        imports = len(package.joinpath("imports").read_text())
    return {
        "facts": dataclasses.asdict(found[0]),
        "distinct_objects": len(set(map(id, found))),
        "imports": imports,
        "probe": machine.probe_interpreter_bf16(),
    }


def compiled() -> Report:
    """Triton imported without the variable, which is set only afterwards."""
    import triton

    os.environ["TRITON_INTERPRET"] = "1"
    return {
        "facts": dataclasses.asdict(machine.facts()),
        "version": triton.__version__,
        "probe": machine.probe_interpreter_bf16(),
        "interpreter_imported": "triton.runtime.interpreter" in sys.modules,
    }


def _interpreter() -> Any:
    import triton.runtime.interpreter

    return triton.runtime.interpreter


def stock() -> Report:
    """The interpreter as shipped."""
    names = set(vars(machine))
    before = machine.probe_interpreter_bf16()
    probes = []
    real_probe = machine.probe_interpreter_bf16

    def counted_probe() -> tuple[str, ...]:
        probes.append(real_probe())
        return probes[-1]

    machine.probe_interpreter_bf16 = counted_probe
    started = time.process_time()
    found = _facts_from_threads()
    return {
        "before": before,
        "facts": dataclasses.asdict(found[0]),
        "distinct_objects": len(set(map(id, found))),
        "probes": probes,
        "after": real_probe(),
        "seconds": time.process_time() - started,
        "names_added": sorted(set(vars(machine)) - names - {"_real"}),
    }


def unset_later() -> Report:
    """Triton imported with the variable, which is unset before the facts are asked for."""
    del os.environ["TRITON_INTERPRET"]
    shipped = _interpreter()._convert_float
    log = io.StringIO()
    machine.logger.addHandler(logging.StreamHandler(log))
    machine.logger.setLevel(logging.DEBUG)
    return {
        "facts": dataclasses.asdict(machine.facts()),
        "untouched": _interpreter()._convert_float is shipped,
        "probe": machine.probe_interpreter_bf16(),
        "log": log.getvalue(),
    }


def reloaded() -> Report:
    """The module imported a second time in a process that it has corrected."""
    first = dataclasses.asdict(machine.facts())
    corrected = _interpreter()._convert_float
    importlib.reload(machine)
    return {
        "first": first,
        "second": dataclasses.asdict(machine.facts()),
        "untouched": _interpreter()._convert_float is corrected,
    }


def conversions() -> Report:
    """Wrong elements per route after the correction, against torch's own conversion."""
    global tl
    import triton
    import triton.language as tl

    @triton.jit  # type: ignore[untyped-decorator]
    def narrow(  # type: ignore[no-untyped-def]
        source_ptr, default_ptr, rtne_ptr, stored_ptr, rtz_ptr, half_ptr, SIZE: tl.constexpr
    ):
        offsets = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
        values = tl.load(source_ptr + offsets)
        tl.store(default_ptr + offsets, values.to(tl.bfloat16))
        tl.store(rtne_ptr + offsets, values.to(tl.bfloat16, fp_downcast_rounding="rtne"))
        tl.store(stored_ptr + offsets, values)
        tl.store(rtz_ptr + offsets, values.to(tl.bfloat16, fp_downcast_rounding="rtz"))
        tl.store(half_ptr + offsets, values.to(tl.bfloat16).to(tl.float16))

    @triton.jit  # type: ignore[untyped-decorator]
    def transposed_and_scalar(  # type: ignore[no-untyped-def]
        source_ptr, tile_ptr, scalar_ptr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
    ):
        rows = tl.arange(0, ROWS)[:, None]
        columns = tl.arange(0, COLUMNS)[None, :]
        tile = tl.trans(tl.load(source_ptr + rows * COLUMNS + columns))
        tl.store(tile_ptr + tl.trans(rows * COLUMNS + columns), tile.to(tl.bfloat16))
        tl.store(scalar_ptr, tl.load(source_ptr).to(tl.bfloat16))

    assert machine.facts().interpreter_fix
    generator = np.random.default_rng(20)
    patterns = np.concatenate(
        [
            ((np.arange(1 << 16, dtype=np.uint32)[:, None] << np.uint32(16)) | LOW_HALVES).ravel(),
            generator.integers(0, 1 << 32, 1 << 16, dtype=np.uint32),
        ]
    )
    source = torch.from_numpy(patterns.view(np.int32)).view(torch.float32)
    default, rtne, stored, rtz = (torch.full(source.shape, -1.0, dtype=torch.bfloat16) for _ in range(4))
    half = torch.full(source.shape, -1.0, dtype=torch.float16)
    narrow[(source.numel() >> 16,)](source, default, rtne, stored, rtz, half, SIZE=1 << 16)
    nearest = source.to(torch.bfloat16)
    upper_half = torch.from_numpy((patterns >> 16).astype(np.uint16).view(np.int16)).view(torch.bfloat16)
    cut = torch.where(source.isnan(), torch.nan, upper_half)

    tile_source = source[12345 * 6 : 12345 * 6 + 8 * 16].reshape(8, 16)
    tile = torch.zeros(8, 16, dtype=torch.bfloat16)
    scalar = torch.zeros(1, dtype=torch.bfloat16)
    transposed_and_scalar[(1,)](tile_source, tile, scalar, ROWS=8, COLUMNS=16)
    return {
        "to-bf16": _wrong(default, nearest),
        "to-bf16-rtne": _wrong(rtne, nearest),
        "store-cast": _wrong(stored, nearest),
        "to-bf16-rtz": _wrong(rtz, cut),
        "to-fp16-from-bf16": _wrong(half, nearest.to(torch.float16)),
        "transposed-tile": _wrong(tile, tile_source.to(torch.bfloat16)),
        "scalar": _wrong(scalar, tile_source[0, :1].to(torch.bfloat16)),
        "inputs": patterns.size,
        "ties_that_rounding_moves": int((nearest.view(torch.int16) != cut.view(torch.int16)).sum()),
    }


def _wrong(got: torch.Tensor, expected: torch.Tensor) -> int:
    """How many elements differ in their bits; NaNs are one class."""
    same = (got.view(torch.int16) == expected.view(torch.int16)) | (got.isnan() & expected.isnan())
    return int((~same).sum())


def other_formats() -> Report:
    """Whether each conversion that is not between fp32 and bf16 still gives the stock bits."""
    interpreter = _interpreter()
    shipped = interpreter._convert_float
    assert machine.facts().interpreter_fix
    conversions = (shipped, interpreter._convert_float)
    language = interpreter.tl
    formats = {
        "fp16": (language.float16, np.arange(1 << 16, dtype=np.uint16)),
        "fp32": (language.float32, np.arange(1 << 16, dtype=np.uint32) * np.uint32(65521)),
        "fp64": (language.float64, np.arange(1 << 16, dtype=np.uint64) * np.uint64(281474976710597)),
        "bf16": (language.bfloat16, np.arange(1 << 16, dtype=np.uint16)),
        "fp8e5": (language.float8e5, np.arange(1 << 8, dtype=np.uint8)),
        "fp8e4nv": (language.float8e4nv, np.arange(1 << 8, dtype=np.uint8)),
    }
    report: Report = {}
    for source_name, (source, values) in formats.items():
        for target_name, (target, _) in formats.items():
            if source is target or {source_name, target_name} == {"fp32", "bf16"}:
                continue
            for mode in (None, interpreter._ir.ROUNDING_MODE.RTNE, interpreter._ir.ROUNDING_MODE.RTZ):
                outcomes = {_outcome(convert, values, source, target, mode) for convert in conversions}
                report[f"{source_name}-to-{target_name}-{mode}"] = len(outcomes) == 1
    return report


def _outcome(convert: Callable[..., Any], *arguments: Any) -> bytes | str:
    """The converted bits, or the error: the stock function refuses some pairs."""
    try:
        with np.errstate(all="ignore"):
            return bytes(convert(*arguments).tobytes())
    except Exception as error:
        return repr(error)


def already_right() -> Report:
    """An interpreter whose own conversion is right (torch does it)."""
    interpreter = _interpreter()
    shipped = interpreter._convert_float

    def right(values: Any, source: Any, target: Any, mode: Any) -> Any:
        if (source.name, target.name) == ("fp32", "bf16"):
            narrowed = torch.from_numpy(np.array(values, np.float32)).to(torch.bfloat16)
            return narrowed.view(torch.int16).numpy().view(np.uint16)
        if (source.name, target.name) == ("bf16", "fp32"):
            patterns = torch.from_numpy(np.array(values).view(np.int16))
            return patterns.view(torch.bfloat16).to(torch.float32).numpy().view(np.uint32)
        return shipped(values, source, target, mode)

    interpreter._convert_float = right
    return {
        "facts": dataclasses.asdict(machine.facts()),
        "untouched": interpreter._convert_float is right,
        "probe": machine.probe_interpreter_bf16(),
    }


def patch_point_missing(conversion_still_runs: bool) -> Report:
    """The conversion is wrong and under another name, or is nowhere."""
    interpreter = _interpreter()
    builder = interpreter.InterpreterBuilder
    if conversion_still_runs:
        elsewhere = dict(vars(interpreter))
        for name in ("cast_impl", "create_fp_to_fp"):
            setattr(builder, name, types.FunctionType(getattr(builder, name).__code__, elsewhere, name))
    del interpreter._convert_float
    return {
        "facts": dataclasses.asdict(machine.facts()),
        "probe": machine.probe_interpreter_bf16(),
        "created": hasattr(interpreter, "_convert_float"),
    }


def _narrowing(change: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    right = machine._fp32_to_bf16
    return lambda values, truncate: change(values.view(np.uint32), right(values, truncate)).astype(np.uint16)


def _widening(change: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    right = machine._bf16_to_fp32
    return lambda patterns: change(patterns, right(patterns)).astype(np.uint32)


WRONG_CORRECTIONS: dict[str, tuple[str, Callable[..., Any], str]] = {
    "truncates": ("_fp32_to_bf16", _narrowing(lambda bits, _: bits >> 16), "near-ties"),
    "ties away from zero": (
        "_fp32_to_bf16",
        _narrowing(lambda bits, right: np.where(bits & 0xFFFF == 0x8000, (bits >> 16) + 1, right)),
        "ties",
    ),
    "flushes subnormals": (
        "_fp32_to_bf16",
        _narrowing(lambda bits, right: np.where(bits & 0x7F800000 == 0, (bits >> 16) & 0x8000, right)),
        "subnormal",
    ),
    "saturates": (
        "_fp32_to_bf16",
        _narrowing(lambda bits, right: np.where((right & 0x7FFF == 0x7F80) & (bits & 0xFFFF != 0), right - 1, right)),
        "overflow",
    ),
    "NaN to infinity": (
        "_fp32_to_bf16",
        _narrowing(lambda bits, right: np.where(bits & 0x7FFFFFFF > 0x7F800000, right & 0xFF80, right)),
        "nan",
    ),
    "infinity to NaN": (
        "_fp32_to_bf16",
        _narrowing(lambda bits, right: np.where(bits & 0x7FFFFFFF == 0x7F800000, right | 1, right)),
        "infinity",
    ),
    "loses the sign of zero": (
        "_fp32_to_bf16",
        _narrowing(lambda bits, right: np.where(bits == 0x80000000, 0, right)),
        "zero",
    ),
    "widening flushes subnormals": (
        "_bf16_to_fp32",
        _widening(lambda patterns, right: np.where(patterns & 0x7F80 == 0, right & 0x80000000, right)),
        "to-fp32-all-patterns",
    ),
    "widening NaN to infinity": (
        "_bf16_to_fp32",
        _widening(lambda patterns, right: np.where(right & 0x7FFFFFFF > 0x7F800000, right & 0xFF800000, right)),
        "to-fp32-nan",
    ),
}


def wrong_correction(attribute: str, replacement: Callable[..., Any]) -> Report:
    interpreter = _interpreter()
    shipped = interpreter._convert_float
    setattr(machine, attribute, replacement)
    found = machine.facts()
    restored = interpreter._convert_float is shipped
    interpreter._convert_float = machine._corrected(shipped)
    return {
        "facts": dataclasses.asdict(found),
        "restored": restored,
        "failing": machine.probe_interpreter_bf16(),
    }


SINGLE_ELEMENTS = {
    0x00000001: "subnormal",
    0x00008000: "subnormal",
    0x80018000: "subnormal",
    0x007F8000: "subnormal",
    0x00808000: "ties",
    0x00FF8000: "ties",
    0x3F808000: "ties",
    0x3F818000: "ties",
    0xBF807FFF: "near-ties",
    0x3F818001: "near-ties",
    0x7F7F7FFF: "near-ties",
    0x7F7F8000: "overflow",
    0xFF7FFFFF: "overflow",
    0x7F800001: "nan",
    0xFFFF8000: "nan",
    0x7F800000: "infinity",
    0x80000000: "zero",
    0x40490000: "exact",
    0x40490001: "beside-exact",
}


def single_wrong_elements() -> Report:
    """What the probe says of a conversion that is wrong for one fp32 pattern out of all."""
    interpreter = _interpreter()
    assert machine.facts().interpreter_fix
    right = interpreter._convert_float
    report: Report = {}
    for pattern, kind in SINGLE_ELEMENTS.items():

        def wrong(values: Any, source: Any, target: Any, mode: Any, pattern: int = pattern, kind: str = kind) -> Any:
            converted = right(values, source, target, mode)
            if target.name == "bf16":
                hit = values.view(np.uint32) == pattern
                converted = np.where(hit, 0x7F80 if kind == "nan" else converted ^ 1, converted).astype(np.uint16)
            return converted

        interpreter._convert_float = wrong
        report[f"{pattern:08X}"] = machine.probe_interpreter_bf16()
    return report


def one_wrong_route(route: str) -> Report:
    """A semantic layer that truncates in one of the three ways to reach bf16."""
    semantic = _interpreter().TritonSemantic
    bfloat16 = _interpreter().tl.bfloat16
    assert machine.facts().interpreter_fix
    cast, store = semantic.cast, semantic.store

    def cutting_cast(self: Any, value: Any, target: Any, rounding: str | None = None) -> Any:
        return cast(self, value, target, "rtz" if rounding == "rtne" else rounding)

    def cutting_store(self: Any, pointer: Any, value: Any, *rest: Any) -> Any:
        if pointer.dtype.element_ty == bfloat16 and value.dtype != bfloat16:
            value = cast(self, value, bfloat16, "rtz")
        return store(self, pointer, value, *rest)

    if route == "to-bf16-rtne":
        semantic.cast = cutting_cast
    else:
        semantic.store = cutting_store
    return {"failing": machine.probe_interpreter_bf16()}


def _forked(scenario: Callable[[], Report]) -> Report:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            report = scenario()
        except BaseException:
            report = {"error": traceback.format_exc()}
        with os.fdopen(writing, "w") as pipe:
            json.dump(report, pipe)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return dict(json.loads(text)) if text else {"error": "the child died"}


def run_scenarios() -> dict[str, Report]:
    """All reports by name; this process has imported torch and :mod:`dspark.machine`, nothing else of note."""
    initialised: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    reports: dict[str, Report] = {
        "import": {"triton": "triton" in sys.modules, "cuda_initialised": initialised},
        "compiled": _forked(compiled),
    }
    for name, source in BROKEN_INSTALLATIONS.items():
        reports[name] = _forked(partial(broken_installation, source))
    os.environ["TRITON_INTERPRET"] = "1"
    _interpreter()
    reports["stock"] = _forked(stock)
    reports["unset_later"] = _forked(unset_later)
    reports["reloaded"] = _forked(reloaded)
    reports["conversions"] = _forked(conversions)
    reports["other_formats"] = _forked(other_formats)
    reports["already_right"] = _forked(already_right)
    reports["renamed"] = _forked(partial(patch_point_missing, True))
    reports["gone"] = _forked(partial(patch_point_missing, False))
    reports["single_elements"] = _forked(single_wrong_elements)
    for route in ("to-bf16-rtne", "store-cast"):
        reports[route] = _forked(partial(one_wrong_route, route))
    for name, (attribute, replacement, _) in WRONG_CORRECTIONS.items():
        reports[name] = _forked(partial(wrong_correction, attribute, replacement))
    return reports


# --- Tests ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reports() -> dict[str, Report]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    script = subprocess.run(
        [sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert script.returncode == 0, script.stderr
    found: dict[str, Report] = json.loads(script.stdout)
    errors = [f"{name}: {report['error']}" for name, report in found.items() if "error" in report]
    if errors:
        pytest.fail("\n".join(errors), pytrace=False)
    return found


def test_importing_the_module_imports_no_triton_and_touches_no_device(reports: dict[str, Report]) -> None:
    assert reports["import"] == {"triton": False, "cuda_initialised": False}


@pytest.mark.parametrize("kind", BROKEN_INSTALLATIONS)
def test_a_triton_that_does_not_import_is_a_fact_with_its_reason(reports: dict[str, Report], kind: str) -> None:
    report = reports[kind]
    reason = report["facts"].pop("triton_error")
    assert reason.startswith(f"{kind}: ")
    assert "\n" not in reason
    assert report["facts"] == FACTS_WITHOUT_TRITON | {"cuda": report["facts"]["cuda"]}
    assert report["probe"] == ["interpreter-runs"]


@pytest.mark.parametrize("kind", BROKEN_INSTALLATIONS)
def test_threads_that_ask_at_once_get_one_answer_found_once(reports: dict[str, Report], kind: str) -> None:
    assert reports[kind]["distinct_objects"] == 1
    if kind != "ModuleNotFoundError":  # an import that succeeds is cached by Python, so its count says nothing
        assert reports[kind]["imports"] == 1


def test_compiled_triton_is_no_interpreter_even_when_the_variable_is_set_later(reports: dict[str, Report]) -> None:
    report = reports["compiled"]
    assert report["facts"]["triton_version"] == report["version"]
    assert report["facts"]["triton_error"] is None
    assert not report["facts"]["interpreter"]
    assert not report["facts"]["interpreter_faithful"]
    assert not report["facts"]["interpreter_fix"]
    assert report["probe"] == ["interpreter-runs"]
    assert not report["interpreter_imported"]


def test_the_stock_interpreter_is_corrected_and_proven(reports: dict[str, Report]) -> None:
    report = reports["stock"]
    assert set(report["before"]) >= STOCK_FAILS
    assert report["facts"]["interpreter"]
    assert report["facts"]["interpreter_faithful"]
    assert report["facts"]["interpreter_fix"]
    assert report["after"] == []


def test_an_interpreter_stays_one_but_is_not_proven_when_the_variable_is_unset_later(
    reports: dict[str, Report],
) -> None:
    report = reports["unset_later"]
    assert report["facts"]["interpreter"]
    assert not report["facts"]["interpreter_faithful"], "kernels decorated from now on are compiled"
    assert not report["facts"]["interpreter_fix"]
    assert report["untouched"]
    assert report["probe"] == ["interpreter-runs"]
    assert "TRITON_INTERPRET was unset after Triton was imported" in report["log"]


def test_a_second_import_knows_the_correction_of_the_first(reports: dict[str, Report]) -> None:
    report = reports["reloaded"]
    assert report["second"] == report["first"]
    assert report["second"]["interpreter_fix"]
    assert report["untouched"]


def test_the_facts_of_the_interpreter_are_found_once_and_cost_little(reports: dict[str, Report]) -> None:
    report = reports["stock"]
    assert report["distinct_objects"] == 1
    assert [bool(failing) for failing in report["probes"]] == [True, False]
    assert report["seconds"] < 3, "about 0.3 s on an idle laptop core"
    assert report["names_added"] == [], "the interpreter's globals leaked into the module"


@pytest.mark.parametrize("route", [*ROUTES, "to-bf16-rtz", "to-fp16-from-bf16", "transposed-tile", "scalar"])
def test_corrected_conversions_give_the_bits_that_torch_gives(reports: dict[str, Report], route: str) -> None:
    assert reports["conversions"]["inputs"] == 7 * 65_536
    assert reports["conversions"]["ties_that_rounding_moves"] > 100_000
    assert reports["conversions"][route] == 0


def test_other_formats_keep_the_stock_conversion(reports: dict[str, Report]) -> None:
    assert len(reports["other_formats"]) == (6 * 5 - 2) * 3
    assert {name for name, same in reports["other_formats"].items() if not same} == set()


def test_an_interpreter_that_is_right_is_left_alone(reports: dict[str, Report]) -> None:
    report = reports["already_right"]
    assert report["facts"]["interpreter_faithful"]
    assert not report["facts"]["interpreter_fix"]
    assert report["untouched"]
    assert report["probe"] == []


@pytest.mark.parametrize("kind", ["renamed", "gone"])
def test_an_interpreter_without_the_patch_point_is_unfaithful(reports: dict[str, Report], kind: str) -> None:
    report = reports[kind]
    assert report["facts"]["interpreter"]
    assert not report["facts"]["interpreter_faithful"]
    assert not report["facts"]["interpreter_fix"]
    assert not report["created"]
    assert report["probe"] == ["interpreter-runs"] if kind == "gone" else set(report["probe"]) >= STOCK_FAILS


@pytest.mark.parametrize("name", WRONG_CORRECTIONS)
def test_a_correction_that_is_wrong_itself_is_found_and_taken_out(reports: dict[str, Report], name: str) -> None:
    report = reports[name]
    kind = WRONG_CORRECTIONS[name][2]
    expected = {kind} if kind.startswith("to-fp32") else {f"{route}-{kind}" for route in ROUTES}
    assert expected <= set(report["failing"])
    assert report["facts"]["interpreter"]
    assert not report["facts"]["interpreter_faithful"]
    assert not report["facts"]["interpreter_fix"]
    assert report["restored"]


@pytest.mark.parametrize("pattern", [f"{pattern:08X}" for pattern in SINGLE_ELEMENTS])
def test_one_wrong_element_is_enough_for_the_probe(reports: dict[str, Report], pattern: str) -> None:
    failing = set(reports["single_elements"][pattern]) - {"round-trip-all-patterns"}
    assert failing == {f"{route}-{SINGLE_ELEMENTS[int(pattern, 16)]}" for route in ROUTES}


@pytest.mark.parametrize("route", ["to-bf16-rtne", "store-cast"])
def test_one_wrong_route_is_named(reports: dict[str, Report], route: str) -> None:
    kinds = ("beside-exact", "near-ties", "overflow", "subnormal", "ties")
    assert reports[route]["failing"] == [f"{route}-{kind}" for kind in kinds]


@pytest.mark.parametrize("shape", [(), (1,), (2, 3), (0, 4)])
def test_the_corrected_conversions_keep_the_shape(shape: tuple[int, ...]) -> None:
    values = np.ones(shape, np.float32).T
    narrowed = machine._fp32_to_bf16(values, truncate=False)
    assert (narrowed.shape, narrowed.dtype) == (values.shape, np.dtype(np.uint16))
    widened = machine._bf16_to_fp32(narrowed)
    assert (widened.shape, widened.dtype) == (values.shape, np.dtype(np.uint32))
    assert (narrowed == 0x3F80).all()
    assert (widened == 0x3F800000).all()


def test_injected_facts_nest_and_are_restored() -> None:
    real = machine.facts()
    with machine.injected(triton_version="9.9", cuda=not real.cuda) as outer:
        assert machine.facts() is outer
        assert outer == dataclasses.replace(real, triton_version="9.9", cuda=not real.cuda)
        with machine.injected(triton_version=None):
            assert machine.facts() == dataclasses.replace(outer, triton_version=None)
        assert machine.facts() is outer
    assert machine.facts() is real


def test_injected_facts_are_restored_after_an_exception() -> None:
    real = machine.facts()
    with pytest.raises(ZeroDivisionError), machine.injected(cuda=not real.cuda):
        _ = 1 // 0
    assert machine.facts() is real


def test_injected_facts_belong_to_their_thread() -> None:
    real = machine.facts()
    with machine.injected(cuda=not real.cuda):
        assert all(found is real for found in _facts_from_threads(2))


def test_injecting_an_unknown_field_names_it_and_the_fields() -> None:
    real = machine.facts()
    with pytest.raises(TypeError, match=r"injected: got gpu, need fields of MachineFacts: triton_version, .*cuda"):
        machine.injected(cuda=True, gpu=True)
    assert machine.facts() is real


def test_facts_are_frozen_and_hashable() -> None:
    real = machine.facts()
    assert {real: 1}[dataclasses.replace(real)] == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        real.cuda = True  # type: ignore[misc]


if __name__ == "__main__":
    print(json.dumps(run_scenarios()))
