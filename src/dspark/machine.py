"""What this machine can run: CUDA, Triton, Triton's interpreter, and whether that interpreter converts bf16 rightly.

Every fused path asks :func:`facts` before it is taken, so a fact is a value that a test can replace (:func:`injected`).
Importing this module imports no Triton and touches no CUDA device; both happen on the first call of :func:`facts`.

The interpreter. As shipped (3.6 to 3.9) it cuts fp32 to bf16 instead of rounding it, turns a NaN whose payload lies in
the lower half into infinity, and loses the leading bits of subnormals in both directions. The contracts know one
rounding, to nearest even, so under the interpreter :func:`facts`

1. probes the conversions with small kernels (:func:`probe_interpreter_bf16`);
2. where the probe fails, and only there, replaces the interpreter's conversion function in this process, for the two
   pairs fp32 -> bf16 and bf16 -> fp32;
3. probes again. ``interpreter_faithful`` is that verdict; a correction that does not pass is taken out again.

Not covered, and left as shipped: conversions to bf16 from anything but fp32 and fp16 (fp64 and integers do not pass the
conversion function at all; the interpreter stores their integer value as the pattern), and arithmetic on bf16, which it
does on the patterns. Kernels here convert to fp32 first and back last.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

if TYPE_CHECKING:
    import triton.language as tl

logger = logging.getLogger("dspark")

_Bits16 = npt.NDArray[np.uint16]
_Bits32 = npt.NDArray[np.uint32]

# The class of a decorated kernel under the interpreter, by name: where Triton compiles, its module is not imported.
_INTERPRETED = "InterpretedFunction"
# The one function of triton/runtime/interpreter.py that converts fp32 to bf16 and back, for casts, loads and stores.
_PATCH_POINT = "_convert_float"
_MARK = "rounds_bf16_to_nearest_even"

# The interpreter pays per program, not per element: each program takes every bf16 pattern at once.
_BLOCK = 1 << 16
# For each upper half: the value itself, its neighbours in fp32, and the tie towards the next bf16 with its neighbours.
_LOW_HALVES = (0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF)
_UNWRITTEN = 0x5555


@dataclass(frozen=True)
class MachineFacts:
    """What this process can run. Equal facts give equal decisions.

    ``triton_version`` is None when Triton cannot be imported, and ``triton_error`` is then the reason in one line.
    ``interpreter``: Triton runs its interpreter, that is, ``TRITON_INTERPRET`` was set when Triton was imported.
    ``interpreter_faithful``: its bf16 conversions are proven right; False too where there is no interpreter.
    ``interpreter_fix``: this process runs the corrected conversion. ``cuda``: torch sees a CUDA device.
    """

    triton_version: str | None
    triton_error: str | None
    interpreter: bool
    interpreter_faithful: bool
    interpreter_fix: bool
    cuda: bool


_injected: ContextVar[MachineFacts | None] = ContextVar("dspark_machine_facts", default=None)
_lock = threading.Lock()
_real: MachineFacts | None = None


def facts() -> MachineFacts:
    """The injected facts if there are any, else those of this machine, found on the first call. Thread-safe."""
    global _real
    replaced = _injected.get()
    if replaced is not None:
        return replaced
    if _real is None:
        with _lock:
            if _real is None:
                _real = _observe()
    return _real


def injected(**changes: Any) -> AbstractContextManager[MachineFacts]:
    """Within the block, :func:`facts` gives its present answer with ``changes``; blocks nest.

    A ContextVar holds them: other threads do not see them, and a thread started inside does not inherit them.
    ``TypeError`` for a name that is no field of :class:`MachineFacts`.
    """
    fields = [field.name for field in dataclasses.fields(MachineFacts)]
    unknown = sorted(set(changes) - set(fields))
    if unknown:
        raise TypeError(f"injected: got {', '.join(unknown)}, need fields of MachineFacts: {', '.join(fields)}")
    return _injection(changes)


@contextmanager
def _injection(changes: dict[str, Any]) -> Iterator[MachineFacts]:
    replacement = dataclasses.replace(facts(), **changes)
    token = _injected.set(replacement)
    try:
        yield replacement
    finally:
        _injected.reset(token)


def _observe() -> MachineFacts:
    cuda = torch.cuda.is_available()
    try:
        version, interpreter = _import_triton()
    except Exception as error:  # a broken installation fails in other ways than ImportError
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        return MachineFacts(None, reason, False, False, False, cuda)
    faithful, fix = (False, False) if interpreter is None else _make_faithful(interpreter)
    return MachineFacts(version, None, interpreter is not None, faithful, fix, cuda)


def _import_triton() -> tuple[str, Any | None]:
    """Triton's version, and its interpreter module where Triton runs that; raises whatever the import raises."""
    import triton
    import triton.language

    # The environment may have changed since: what counts is how Triton's own functions were decorated on its import.
    kinds = {type(function).__name__ for function in vars(triton.language).values()}
    if _INTERPRETED not in kinds:
        return str(triton.__version__), None
    import triton.runtime.interpreter

    return str(triton.__version__), triton.runtime.interpreter


# --- The probe -------------------------------------------------------------------------------------------------------
#
# The two kernels run under the interpreter only. They are plain functions here, because decorating them needs Triton.


def _narrow_kernel(source_ptr, explicit_ptr, rtne_ptr, stored_ptr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """fp32 [BLOCK] -> bf16 [BLOCK], by the default cast, by the cast with its rounding named, and by the store."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(source_ptr + offsets)
    tl.store(explicit_ptr + offsets, values.to(tl.bfloat16))
    tl.store(rtne_ptr + offsets, values.to(tl.bfloat16, fp_downcast_rounding="rtne"))
    tl.store(stored_ptr + offsets, values)


def _widen_kernel(source_ptr, widened_ptr, returned_ptr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """bf16 [BLOCK] -> fp32 [BLOCK], and back to bf16."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(source_ptr + offsets).to(tl.float32)
    tl.store(widened_ptr + offsets, values)
    tl.store(returned_ptr + offsets, values.to(tl.bfloat16))


def probe_interpreter_bf16() -> tuple[str, ...]:
    """The properties that the interpreter's bf16 conversions lack, sorted; empty when they are faithful.

    fp32 -> bf16 is tried on every bf16 pattern with six low halves (exact values, ties to both parities, one fp32 ulp
    to either side of a tie), both signs, subnormals, overflow and NaN payloads included; by the default cast
    (``to-bf16-*``), the cast with ``rtne`` named (``to-bf16-rtne-*``) and the implicit cast of a store
    (``store-cast-*``). bf16 -> fp32 is tried on every pattern (``to-fp32-*``), and back (``round-trip-*``). NaNs
    compare as a class. ``interpreter-runs`` alone: there is no interpreter here, or a probe kernel raised.
    """
    try:
        if _import_triton()[1] is None:
            return ("interpreter-runs",)
        return tuple(sorted(_failing_narrow() + _failing_widen()))
    except Exception:
        logger.debug("the probe of the interpreter's bf16 conversions did not run", exc_info=True)
        return ("interpreter-runs",)


def _launch(body: Callable[..., None], source: torch.Tensor, *outputs: torch.Tensor) -> None:
    import triton

    # The interpreter adds its own globals to those of a kernel's module, so this one gets a namespace apart.
    namespace = {"__name__": __name__, "tl": triton.language}
    kernel = triton.jit(types.FunctionType(body.__code__, namespace, body.__name__))
    if type(kernel).__name__ != _INTERPRETED:
        raise RuntimeError("TRITON_INTERPRET was unset after Triton was imported: kernels are compiled from now on")
    kernel[(source.numel() // _BLOCK,)](source, *outputs, BLOCK=_BLOCK)


def _failing_narrow() -> list[str]:
    upper, low = (half.ravel() for half in np.meshgrid(np.arange(1 << 16), _LOW_HALVES, indexing="ij"))
    source = torch.from_numpy(((upper << 16) | low).astype(np.uint32).view(np.int32)).view(torch.float32)
    routes = {route: np.full(upper.shape, _UNWRITTEN, np.uint16) for route in ("to-bf16", "to-bf16-rtne", "store-cast")}
    tensors = (torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16) for bits in routes.values())
    _launch(_narrow_kernel, source, *tensors)

    magnitude = upper & 0x7FFF
    is_nan = (magnitude > 0x7F80) | ((magnitude == 0x7F80) & (low > 0))
    # The halves of each input are known, so no arithmetic of the correction is needed to know its nearest neighbour.
    expected = upper + ((low > 0x8000) | ((low == 0x8000) & (upper % 2 == 1)))
    overflow = (magnitude == 0x7F7F) & (low >= 0x8000)
    normal = (magnitude >= 0x0080) & (magnitude < 0x7F80) & ~overflow
    classes = {
        "nan": is_nan,
        "infinity": (magnitude == 0x7F80) & (low == 0),
        "overflow": overflow,
        "zero": (magnitude == 0) & (low == 0),
        "subnormal": (magnitude < 0x0080) & (magnitude + low > 0),
        "exact": normal & (low == 0),
        "beside-exact": normal & ((low == 0x0001) | (low == 0xFFFF)),
        "ties": normal & (low == 0x8000),
        "near-ties": normal & ((low == 0x7FFF) | (low == 0x8001)),
    }
    failing = []
    for route, got in routes.items():
        wrong = np.where(is_nan, (got & 0x7FFF) <= 0x7F80, got != expected)
        failing += [f"{route}-{name}" for name, members in classes.items() if wrong[members].any()]
    return failing


def _failing_widen() -> list[str]:
    patterns = np.arange(1 << 16, dtype=np.uint32)
    widened = np.full(patterns.shape, _UNWRITTEN, np.uint32)
    returned = np.full(patterns.shape, _UNWRITTEN, np.uint16)
    _launch(
        _widen_kernel,
        torch.from_numpy(patterns.astype(np.uint16).view(np.int16)).view(torch.bfloat16),
        torch.from_numpy(widened.view(np.int32)).view(torch.float32),
        torch.from_numpy(returned.view(np.int16)).view(torch.bfloat16),
    )
    is_nan = (patterns & 0x7FFF) > 0x7F80
    verdicts = {
        "to-fp32-all-patterns": (widened == patterns << 16) | is_nan,
        "to-fp32-nan": ((widened & 0x7FFFFFFF) > 0x7F800000) | ~is_nan,
        "round-trip-all-patterns": (returned == patterns) | is_nan,
        "round-trip-nan": ((returned & 0x7FFF) > 0x7F80) | ~is_nan,
    }
    return [name for name, holds in verdicts.items() if not holds.all()]


# --- The correction --------------------------------------------------------------------------------------------------


def _make_faithful(interpreter: Any) -> tuple[bool, bool]:
    """(faithful, corrected): probes, corrects where that fails, and probes again."""
    stock = getattr(interpreter, _PATCH_POINT, None)
    if not probe_interpreter_bf16():
        return True, getattr(stock, _MARK, False)
    if not callable(stock):
        return False, False
    setattr(interpreter, _PATCH_POINT, _corrected(stock))
    if not probe_interpreter_bf16():
        return True, True
    setattr(interpreter, _PATCH_POINT, stock)
    return False, False


def _corrected(stock: Callable[..., Any]) -> Callable[..., Any]:
    """``stock`` with fp32 -> bf16 and bf16 -> fp32 replaced; every other pair of formats is still its business."""

    def convert_float(values: Any, source: Any, target: Any, rounding_mode: Any) -> Any:
        pair = (source.name, target.name)
        if pair == ("fp32", "bf16"):
            # No mode is given where the compiler's default applies, which is to nearest even.
            return _fp32_to_bf16(values, truncate=getattr(rounding_mode, "name", None) == "RTZ")
        if pair == ("bf16", "fp32"):
            return _bf16_to_fp32(values)
        return stock(values, source, target, rounding_mode)

    setattr(convert_float, _MARK, True)
    return convert_float


def _fp32_to_bf16(values: npt.NDArray[Any], truncate: bool) -> _Bits16:
    """bf16 patterns of fp32 ``values``, to nearest even or towards zero; a NaN is made quiet and keeps its sign."""
    bits: _Bits32 = np.asarray(values).view(np.uint32)
    magnitude = bits & 0x7FFFFFFF
    # Half an ulp, less the tie that must go down. It carries through exponents, from subnormals up to infinity.
    bias = 0 if truncate else 0x7FFF + ((magnitude >> 16) & 1)
    rounded = np.where(magnitude > 0x7F800000, (magnitude >> 16) | 0x0040, (magnitude + bias) >> 16)
    return np.asarray(rounded | ((bits >> 16) & 0x8000)).astype(np.uint16)


def _bf16_to_fp32(patterns: npt.NDArray[Any]) -> _Bits32:
    """fp32 patterns of bf16 ``patterns``: bf16 is the upper half of fp32, so this is exact, payloads included."""
    return np.asarray(patterns).view(np.uint16).astype(np.uint32) << np.uint32(16)
