"""Which path an operation takes, as a value that can be read, counted and refused.

An operation owns an ordered tuple of :class:`Check`. :func:`decide` turns the facts of one call into a
:class:`Decision`; :func:`take` applies what the caller asked for, counts the outcome in the census and warns the
first time a reason sends the operation to its fallback. :func:`choose` is both. This module knows no operation and no
kernel.

What the caller can ask for, strongest first: the ``path=`` argument, ``with forced(...)``, the environment variable
``DSPARK_DISPATCH`` (read once, when this module is imported). Each is ``auto`` (fused where eligible), ``fused``
(fused or :class:`FallbackError`) or ``eager``.
"""

from __future__ import annotations

import enum
import logging
import os
import re
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple

logger = logging.getLogger("dspark")

ELIGIBLE = "eligible"
"""Census reason of a fused call: every check held."""
REQUESTED = "requested"
"""Census reason of an eager call that the caller asked for."""

_SLUG = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")


class Path(enum.StrEnum):
    """The two ways an operation can be computed."""

    FUSED = "fused"
    EAGER = "eager"


class Mode(enum.StrEnum):
    """What a caller can ask for."""

    AUTO = "auto"
    FUSED = "fused"
    EAGER = "eager"


def parse_mode(value: str, source: str) -> Mode:
    """``value`` as a :class:`Mode`; ``ValueError`` naming ``source`` (the argument or variable) for anything else."""
    try:
        return Mode(value)
    except ValueError:
        raise ValueError(f"{source}: got {value!r}, need one of {', '.join(Mode)}") from None


@dataclass(frozen=True)
class Check:
    """One condition that one path of an operation needs and that the other does not.

    id: short slug, e.g. ``qkv-dtype``; it is the reason in the census.
    requires: a sentence that tells a person what to change.
    holds: facts of the call -> (whether the condition holds, the value that was looked at).
    after: ids of earlier checks of the same operation; when one of them failed, this check is not evaluated.
    path: the path that needs the condition: the fused one, except where only the fused path can serve a kind of call.
    """

    id: str
    requires: str
    holds: Callable[[Any], tuple[bool, Hashable]]
    after: tuple[str, ...] = ()
    path: Path = Path.FUSED


@dataclass(frozen=True)
class Failure:
    """A check that did not hold, with the value that failed it."""

    check: Check
    value: Hashable

    def __str__(self) -> str:
        return f"{self.check.id} (got {self.value!r}): {self.check.requires}"


@dataclass(frozen=True)
class Decision:
    """The path that the facts of a call allow, and every check that forbids a path.

    path: fused where nothing forbids it, else eager where nothing forbids that, else None: no path can serve the call.
    failed: what forbids the fused path. eager_failed: what forbids the eager one (almost always nothing).
    """

    op: str
    path: Path | None
    failed: tuple[Failure, ...]
    eager_failed: tuple[Failure, ...] = ()

    @property
    def reasons(self) -> tuple[str, ...]:
        """Ids of the failed checks, in the operation's order."""
        return tuple(failure.check.id for failure in self.failed)

    @cached_property
    def counted(self) -> tuple[CensusKey, ...]:
        """The census rows of a call that takes :attr:`path`."""
        assert self.path is not None
        return tuple(CensusKey(self.op, self.path, reason) for reason in self.reasons or (ELIGIBLE,))


class Outcome(NamedTuple):
    """What :func:`take` did: the decision, and the path that was then taken."""

    decision: Decision
    path: Path


class CensusKey(NamedTuple):
    """One row of the census."""

    op: str
    path: Path
    reason: str


class FallbackError(RuntimeError):
    """The path that was asked for, or every path, is not eligible; the message lists every reason."""

    def __init__(self, decision: Decision, asked: str, failed: tuple[Failure, ...]) -> None:
        self.decision = decision
        self.reasons = tuple(failure.check.id for failure in failed)
        listed = "; ".join(str(failure) for failure in failed)
        super().__init__(f"{decision.op}: {asked} is not eligible: {listed}")
        self._asked, self._failed = asked, failed

    def __reduce__(self) -> tuple[type[FallbackError], tuple[Decision, str, tuple[Failure, ...]]]:
        return type(self), (self.decision, self._asked, self._failed)


# A member of an enum costs a look-up that shows in the time of a call.
_STRICT, _REQUESTED, _EAGER = Mode.FUSED, Mode.EAGER, Path.EAGER
_mode = parse_mode(os.environ.get("DSPARK_DISPATCH", Mode.AUTO), "DSPARK_DISPATCH")
_forced: ContextVar[Mode | None] = ContextVar("dspark_forced", default=None)
_observer: ContextVar[list[Outcome] | None] = ContextVar("dspark_observer", default=None)
_lock = threading.Lock()
_registry: dict[str, tuple[Check, ...]] = {}
_census: Counter[CensusKey] = Counter()
_warned: set[tuple[str, str]] = set()


def register(op: str, checks: tuple[Check, ...]) -> str:
    """Declare the checks of operation ``op`` and return its name.

    ``ValueError`` for a second registration, an id that is no slug or occurs twice, an empty sentence, and an ``after``
    that names no earlier check of the same path.
    """
    seen: set[str] = set()
    for check in checks:
        if not _SLUG.fullmatch(check.id) or check.id in seen or check.id in (ELIGIBLE, REQUESTED):
            raise ValueError(f"{op}: check id {check.id!r} must be a slug of its own")
        if not check.requires.strip():
            raise ValueError(f"{op}: check {check.id!r} must say what it requires")
        if unknown := set(check.after) - seen:
            raise ValueError(f"{op}: check {check.id!r} comes after {sorted(unknown)}, which are not earlier checks")
        crossing = [earlier.id for earlier in checks if earlier.id in check.after and earlier.path is not check.path]
        if crossing:
            # An unevaluated check opens its path, so what it waits for must close the same one.
            raise ValueError(f"{op}: check {check.id!r} of the {check.path} path comes after {crossing} of the other")
        seen.add(check.id)
    with _lock:
        if op in _registry:
            raise ValueError(f"operation {op!r} is registered twice")
        _registry[op] = checks
    return op


def registry() -> Mapping[str, tuple[Check, ...]]:
    """Every registered operation and its checks: the closed world that the conformance suite counts against."""
    return MappingProxyType(_registry)


@lru_cache(maxsize=4096)
def decide(op: str, facts: Hashable) -> Decision:
    """The decision that ``facts`` lead to: pure, and memoised on its arguments.

    ``failed`` carries every failing check, except those whose prerequisite in ``after`` failed.
    """
    failed: dict[Path, list[Failure]] = {path: [] for path in Path}
    blocked: set[str] = set()
    for check in _registry[op]:
        if blocked.intersection(check.after):
            blocked.add(check.id)
            continue
        holds, value = check.holds(facts)
        if not holds:
            blocked.add(check.id)
            failed[check.path].append(Failure(check, value))
    open_path = next((path for path in (Path.FUSED, Path.EAGER) if not failed[path]), None)
    return Decision(op, open_path, tuple(failed[Path.FUSED]), tuple(failed[Path.EAGER]))


def choose(op: str, facts: Hashable, path: str | None = None) -> Path:
    """:func:`take` with the decision that ``facts`` lead to."""
    return take(decide(op, facts), path)


def take(decision: Decision, path: str | None = None) -> Path:
    """The path that a call with this decision takes; counts it, and warns when a reason is new.

    path: the caller's ``path=`` argument, or None for the surrounding :func:`forced` block or the environment.
    Raises ``ValueError`` for an unknown ``path``, and :class:`FallbackError` when the path that is asked for, or every
    path, is not eligible.
    """
    mode = parse_mode(path, "path") if path is not None else _forced.get() or _mode
    if mode is _STRICT and decision.failed:
        raise FallbackError(decision, "the fused path, which was requested,", decision.failed)
    if mode is _REQUESTED and decision.eager_failed:
        raise FallbackError(decision, "the eager path, which was requested,", decision.eager_failed)
    taken = decision.path
    if taken is None:
        raise FallbackError(decision, "any path", decision.failed + decision.eager_failed)
    if mode is _REQUESTED:
        taken = _EAGER
        _count((CensusKey(decision.op, taken, REQUESTED),))
    else:
        _count(decision.counted)
        if taken is _EAGER:
            _warn(decision)
    observer = _observer.get()
    if observer is not None:
        observer.append(Outcome(decision, taken))
    return taken


def _count(rows: tuple[CensusKey, ...]) -> None:
    with _lock:
        for row in rows:
            _census[row] += 1


def _warn(decision: Decision) -> None:
    for failure in decision.failed:
        key = (decision.op, failure.check.id)
        with _lock:
            if key in _warned:
                continue
            _warned.add(key)
        logger.warning("%s: falls back to eager: %s", decision.op, failure)


def census() -> dict[CensusKey, int]:
    """How many calls took which path for which reason, since the process started or :func:`reset`.

    A call with several failing checks counts once under each of them.
    """
    with _lock:
        return dict(_census)


def reset() -> None:
    """Forget the census and which reasons were warned about; decisions and registrations stay."""
    with _lock:
        _census.clear()
        _warned.clear()


@contextmanager
def forced(mode: str) -> Iterator[None]:
    """Within the block (this thread or task only), every call without ``path=`` behaves as if it asked for ``mode``."""
    token = _forced.set(parse_mode(mode, "forced"))
    try:
        yield
    finally:
        _forced.reset(token)


@contextmanager
def observed() -> Iterator[list[Outcome]]:
    """Collect the outcome of every call made within the block (this thread or task only), in order."""
    outcomes: list[Outcome] = []
    token = _observer.set(outcomes)
    try:
        yield outcomes
    finally:
        _observer.reset(token)
