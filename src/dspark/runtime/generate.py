"""``dspark generate``: text from the tiny Inkling, as its tokens are accepted, and what speculation gained."""

from __future__ import annotations

import codecs
import logging
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TextIO

import torch

from dspark import dispatch, machine
from dspark.ops import arguments
from dspark.runtime.acceptance import greedy_tokens
from dspark.runtime.prefill import Progress
from dspark.runtime.statistics import WorkerStats
from dspark.runtime.tiny import END, load_tiny_inkling, to_bytes, to_tokens
from dspark.runtime.worker import DSparkWorker

BAR = 30
"""Characters of a progress bar."""


@dataclass(frozen=True)
class Options:
    """What the command line asks for. prompt: the text as bytes. gamma: None: the draft's own. model: a folder for
    :func:`dspark.runtime.tiny.load_tiny_inkling`; None: the package's."""

    prompt: bytes
    max_new_tokens: int = 256
    dispatch: str = "auto"
    gamma: int | None = None
    min_survival: float | None = None
    plain: bool = False
    stats: bool = False
    model: str | None = None


def plain_tokens(target: Any, prompt: Sequence[int], max_new_tokens: int, eos: Sequence[int] = ()) -> Iterator[int]:
    """Greedy decoding of ``prompt`` by the target alone, token by token: what a worker's output must equal.

    target: see :class:`dspark.runtime.target.TinyInkling`. Ends as a worker's request does: after max_new_tokens, after
    an id of ``eos``, or at the target's last position. ``ValueError`` for a prompt that is empty or too long.
    """
    arguments.require_int("max_new_tokens", max_new_tokens, 1)
    limit, device = target.config.max_position, target.device
    if not 1 <= len(prompt) <= limit:
        raise ValueError(f"prompt: got {len(prompt)} tokens, need 1 to {limit}")
    positions = min(len(prompt) + max_new_tokens, limit)
    cache = target.new_cache(1, positions + 1, width=1)
    if cache.state_pool is not None:
        cache.state_pool.admit(0)
    locs = torch.arange(1, positions + 1, device=device)
    ids = torch.tensor(list(prompt), dtype=torch.int64, device=device)
    token = int(greedy_tokens(target.prefill(cache, 0, ids, locs[: len(prompt)]).logits[-1]))
    yield token
    row = torch.zeros(1, dtype=torch.int64, device=device)
    for length in range(len(prompt), min(len(prompt) + max_new_tokens - 1, limit)):
        if token in eos:
            return
        output = target.decode(cache, row, row + token, row + length, locs[None])
        token = int(greedy_tokens(output.logits[0]))
        yield token


class ProgressBar:
    """A bar on ``stream``, where that is a terminal; nothing elsewhere. Erased when all is done."""

    def __init__(self, stream: TextIO, label: str) -> None:
        self._stream, self._label = stream, label
        self.shown = stream.isatty()

    def __call__(self, done: int, total: int) -> None:
        if not self.shown:
            return
        filled = BAR * done // total
        line = f"{self._label} [{'#' * filled}{'.' * (BAR - filled)}] {done}/{total}"
        self._stream.write(f"\r{line}" if done < total else "\r" + " " * len(line) + "\r")
        self._stream.flush()


def generate(options: Options, out: TextIO, err: TextIO) -> None:
    """Write the continuation of the prompt to ``out`` as it comes, and with ``stats`` what it took to ``err``.

    ``ValueError``, :class:`dspark.dispatch.FallbackError` and :class:`dspark.runtime.tiny.MissingWeightsError` for what
    the caller can change.
    """
    logging.getLogger("dspark").setLevel(logging.ERROR)  # said once at the end, not once per operation
    device = "cuda" if machine.facts().cuda else "cpu"
    target, draft = load_tiny_inkling(options.model, device=device)
    prompt = to_tokens(options.prompt)
    started = time.monotonic()
    with dispatch.forced(options.dispatch), single_thread():
        if options.plain:
            pieces: Iterator[list[int]] = (
                [token] for token in plain_tokens(target, prompt, options.max_new_tokens, (END,))
            )
            stats = None
        else:
            worker = DSparkWorker(target, draft, gamma=options.gamma, min_survival=options.min_survival, eos=(END,))
            bar = ProgressBar(err, "prefill")
            # A prefill that reports comes in small windows: no loss where tokens are computed alone anyway.
            progress: Progress | None = bar if bar.shown and device == "cpu" else None
            pieces = worker.stream(prompt, options.max_new_tokens, progress=progress)
            stats = worker.stats
        tokens, first = _write(pieces, out)
    ended = time.monotonic()
    if options.stats:
        for line in report(tokens, stats, first - started, ended - first):
            err.write(line + "\n")
    elif line := fallbacks():
        err.write(line + "\n")
    err.flush()


@contextmanager
def single_thread() -> Iterator[None]:
    """One thread for the products of one token: more of them wait for each other longer than they compute."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _write(pieces: Iterator[list[int]], out: TextIO) -> tuple[int, float]:
    """How many tokens there were, and when the first came. A character is written when its last byte has come."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    count, first = 0, 0.0
    for piece in pieces:
        first = first or time.monotonic()
        count += len(piece)
        out.write(decoder.decode(to_bytes(piece)))
        out.flush()
    out.write(decoder.decode(b"", final=True) + "\n")
    out.flush()
    return count, first


def report(tokens: int, stats: WorkerStats | None, prefill: float, decode: float) -> list[str]:
    """What ``--stats`` prints: tokens per step, acceptance by position, seconds, and the path census."""
    lines = []
    if stats is not None:
        shares = " ".join(f"{share:.2f}" for share in stats.acceptance)
        lines += [
            f"tokens per step: {stats.tokens_per_step:.2f} ({stats.tokens} tokens in {stats.request_steps} steps)",
            f"acceptance by position: {shares or 'no draft was verified'}",
        ]
    rate = f", {(tokens - 1) / decode:.1f} tokens/s" if tokens > 1 and decode > 0 else ""
    lines.append(f"seconds: {prefill:.2f} to the first token, {decode:.2f} for {tokens - 1} more{rate}")
    counts = sorted(dispatch.census().items())
    return lines + ["paths:"] * bool(counts) + [f"  {key.op}: {key.path} {n} ({key.reason})" for key, n in counts]


def fallbacks() -> str:
    """One line that says which operations fell back to eager, and why; empty where none did."""
    reasons: Counter[str] = Counter()
    for key in dispatch.census():
        if key.path is dispatch.Path.EAGER and key.reason != dispatch.REQUESTED:
            reasons[key.reason] += 1
    if not reasons:
        return ""
    listed = ", ".join(f"{reason} ({count} operations)" for reason, count in sorted(reasons.items()))
    return f"dspark: computed without fused kernels: {listed}; `dspark doctor` says more"
