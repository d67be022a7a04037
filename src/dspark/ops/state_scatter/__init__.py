"""``state_scatter``: the state of each request's accepted step goes to its slot, and that of its track step to another.

One operation with four entries: SSM states, one type of conv window, all types of conv windows, and everything that a
verify step commits.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple, Protocol

import torch

from dspark import dispatch, faults, machine
from dspark.ops import arguments
from dspark.ops.launch import Launch
from dspark.ops.plans import Plan, Plans, layouts, requires_grad
from dspark.ops.state_scatter.checks import OP, Pair, RowSet, facts_of
from dspark.ops.state_scatter.eager import report_duplicates, state_scatter_eager

_COMMIT = ("dst_indices_raw", "step_indices_raw")
_TRACK = ("dst_indices2_raw", "step_indices2_raw")
_OF_CACHES = (
    "state_indices_tensor",
    "last_correct_step_indices",
    "mamba_track_indices",
    "mamba_steps_to_track",
)


class MambaCaches(Protocol):
    """Pools and per-step states of a hybrid target: SSM ``[L, S, *st]`` and ``[L, Rq, W, *st]``, and a conv window
    pool ``[L, S, a, b]`` and its per-step windows ``[L, Rq, W, a, b]`` for each type."""

    @property
    def temporal(self) -> torch.Tensor: ...
    @property
    def intermediate_ssm(self) -> torch.Tensor: ...
    @property
    def conv(self) -> Sequence[torch.Tensor]: ...
    @property
    def intermediate_conv_window(self) -> Sequence[torch.Tensor]: ...


def fused_mamba_state_scatter_with_mask(
    dst: torch.Tensor,
    src: torch.Tensor,
    dst_indices_raw: torch.Tensor,
    step_indices_raw: torch.Tensor,
    src_indices_raw: torch.Tensor | None = None,
    *,
    path: str | None = None,
) -> None:
    """``dst[:, slot] = src[:, source, step]`` for every live row, raw bits (conformance/CONTRACTS.md section 8).

    dst: ``[L, S, *st]``, dense inside an entry ``st``; layer and slot strides are free. src: ``[L, Rq, W, *st]``, dense
    or a view whose steps overlap. bf16, fp16 or fp32; other dtypes are copied by the eager path.
    dst_indices_raw, step_indices_raw, src_indices_raw: ``[N]`` int32 or int64, any stride: slot, step and source row of
    row i (source None: i itself). N may exceed Rq as long as the rows beyond are not live.
    path: ``auto``, ``fused``, ``eager`` or None (see :mod:`dspark.dispatch`).

    A row with a negative slot, step or source is skipped. Otherwise one beyond its tensor sets a fault
    (``state_scatter/slot-out-of-range``, ``step-``, ``source-``) and the row is not written. Two rows that write one
    slot are undefined, and reported in debug mode (``state_scatter/duplicate-slot``).

    Raises ``ValueError``, before anything is written, for shapes, dtypes and devices that no path can compute.
    """
    pairs = (Pair(dst, src, "dst", "src"),)
    _scatter(pairs, _Indices(dst_indices_raw, step_indices_raw, src_indices_raw), _COMMIT, path)


def fused_conv_window_scatter_with_mask(
    dst: torch.Tensor,
    src: torch.Tensor,
    dst_indices_raw: torch.Tensor,
    step_indices_raw: torch.Tensor,
    src_indices_raw: torch.Tensor | None = None,
    *,
    path: str | None = None,
) -> None:
    """The same for one type of conv window (conformance/CONTRACTS.md section 8).

    dst: ``[L, S, dim, K-1]`` or ``[L, S, K-1, dim]``. src: ``[L, Rq, W, ...]``, step t being the window after token t;
    dense, or an overlapping view of rows of W+K-2 tokens. Everything else, the ``path:`` argument, skips, faults and
    ``ValueError`` included, as in :func:`fused_mamba_state_scatter_with_mask`.
    """
    pairs = (Pair(dst, src, "dst", "src", window=True),)
    _scatter(pairs, _Indices(dst_indices_raw, step_indices_raw, src_indices_raw), _COMMIT, path)


def fused_conv_window_scatter_multi(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
    dst_indices_raw: torch.Tensor,
    step_indices_raw: torch.Tensor,
    dst_indices2_raw: torch.Tensor | None = None,
    step_indices2_raw: torch.Tensor | None = None,
    *,
    path: str | None = None,
) -> None:
    """All types of conv windows and both index sets at once (conformance/CONTRACTS.md section 8).

    pairs: (dst, src) of each type, as in :func:`fused_conv_window_scatter_with_mask`, any number; L, S, Rq and W are
    the same in all.
    dst_indices_raw, step_indices_raw: the commit set, ``[N]`` int32 or int64; row i comes from source row i.
    dst_indices2_raw, step_indices2_raw: the track set, ``[N]`` too, or neither.
    path: ``auto``, ``fused``, ``eager`` or None (see :mod:`dspark.dispatch`).

    The result is that of the commit set followed by the track set: where both write a slot, track wins. Skips, faults
    and ``ValueError`` as in :func:`fused_mamba_state_scatter_with_mask`; a row is written in all types or in none.
    """
    items: Sequence[Any] = pairs
    given: list[Pair] = []
    for index, item in enumerate(items):
        if not isinstance(item, (tuple, list)) or len(item) != 2:
            _require_pairs(given)
            raise ValueError(f"pairs[{index}]: got {item!r:.80}, need (dst, src)")
        dst, src = item
        given.append(Pair(dst, src, *_names("pairs[{}][0]", "pairs[{}][1]", index), window=True))
    indices = _Indices(dst_indices_raw, step_indices_raw, None, dst_indices2_raw, step_indices2_raw)
    _scatter(tuple(given), indices, (*_COMMIT, *_TRACK), path)


def scatter_mamba_states_after_mtp_verify(
    mamba_caches: MambaCaches,
    state_indices_tensor: torch.Tensor,
    last_correct_step_indices: torch.Tensor,
    mamba_track_indices: torch.Tensor | None,
    mamba_steps_to_track: torch.Tensor | None,
    *,
    path: str | None = None,
) -> None:
    """Everything that a verify step commits: SSM states and all conv windows (conformance/CONTRACTS.md section 8).

    mamba_caches: ``.temporal``, ``.intermediate_ssm`` (skipped when ``temporal`` has no elements), ``.conv`` and
    ``.intermediate_conv_window``, see :class:`MambaCaches`; L, S, Rq and W are the same in all.
    state_indices_tensor, last_correct_step_indices: the commit set, ``[N]`` int32 or int64: slot and step of request i,
    -1 for nothing. mamba_track_indices, mamba_steps_to_track: the track set, ``[N]`` too, or None for both.
    path: ``auto``, ``fused``, ``eager`` or None (see :mod:`dspark.dispatch`).

    Order, skips, faults and ``ValueError`` as in :func:`fused_conv_window_scatter_multi`.
    """
    pairs: list[Pair] = []
    if mamba_caches.temporal.numel():
        states = (mamba_caches.temporal, mamba_caches.intermediate_ssm)
        pairs.append(Pair(*states, "temporal", "intermediate_ssm"))
    pools, windows = mamba_caches.conv, mamba_caches.intermediate_conv_window
    if len(pools) != len(windows):
        _require_pairs(pairs)
        raise ValueError(f"intermediate_conv_window: got {len(windows)} types, need {len(pools)}, the types of conv")
    for index, (dst, src) in enumerate(zip(pools, windows, strict=True)):
        pairs.append(Pair(dst, src, *_names("conv[{}]", "intermediate_conv_window[{}]", index), window=True))
    indices = _Indices(state_indices_tensor, last_correct_step_indices, None, mamba_track_indices, mamba_steps_to_track)
    _scatter(tuple(pairs), indices, _OF_CACHES, path)


class _Indices(NamedTuple):
    """The index tensors of a call: the commit set with its sources, and the track set."""

    slots: torch.Tensor
    steps: torch.Tensor
    sources: torch.Tensor | None
    track_slots: torch.Tensor | None = None
    track_steps: torch.Tensor | None = None

    def sets(self) -> tuple[RowSet, ...]:
        """The commit set, then the track set if there is one."""
        commit = RowSet(self.slots, self.steps, self.sources)
        if self.track_slots is None or self.track_steps is None:
            return (commit,)
        return commit, RowSet(self.track_slots, self.track_steps)


@dataclass(slots=True)
class _Plan(Plan):
    """live: which pairs have elements; None for all of them. empty: there is nothing to write.

    launches: those of a fused call, each with its table of the addresses, which are part of the key; None until then.
    """

    live: tuple[int, ...] | None
    empty: bool
    launches: list[tuple[Launch, torch.Tensor]] | None = None


_plans: Plans[_Plan] = Plans()


def _scatter(pairs: tuple[Pair, ...], indices: _Indices, names: tuple[str, ...], path: str | None) -> None:
    """Validate, decide and call. names: of the arguments in ``indices``, those of the commit set first."""
    key = _key(pairs, indices)
    plan = _plans.find(key) or _plans.keep(key, _validated(pairs, indices, names))
    taken = dispatch.take(plan.decision, path)
    if not plan.empty:
        if plan.live is not None:
            pairs = tuple(pairs[index] for index in plan.live)
        sets = indices.sets()
        if faults.debugging():
            for rows in sets:
                report_duplicates(rows, pairs[0])
        if taken is dispatch.Path.FUSED:
            if plan.launches is None:
                plan.launches = _kernel().launches(pairs, sets)
            _kernel().state_scatter_fused(plan.launches, sets)
        else:
            state_scatter_eager(pairs, sets)
    faults.finish(indices.slots.device)


@cache
def _kernel() -> ModuleType:
    from dspark.ops.state_scatter import kernel

    return kernel


def _key(pairs: tuple[Pair, ...], indices: _Indices) -> Hashable:
    """All that the plan is made of; None for what cannot be read, or would lose a gradient."""
    try:
        if torch.is_grad_enabled() and any(requires_grad(pair.dst, pair.src) for pair in pairs):
            return None
        states = [(layouts(dst, src), dst.data_ptr(), src.data_ptr(), window) for dst, src, _, _, window in pairs]
        return tuple(states), layouts(*indices)
    except Exception:
        return None


def _validated(pairs: tuple[Pair, ...], indices: _Indices, names: tuple[str, ...]) -> _Plan:
    _require_pairs(pairs)
    commit = dict(zip(names[:2], (indices.slots, indices.steps), strict=True))
    others: dict[str, torch.Tensor]
    if indices.sources is not None:
        others = {"src_indices_raw": indices.sources}
    else:
        others = _both_or_neither(dict(zip(names[2:], (indices.track_slots, indices.track_steps), strict=False)))
    given = {**commit, **others}
    _require_indices(given)
    _require_one_pool(pairs)
    tensors = {pair.dst_name: pair.dst for pair in pairs} | {pair.src_name: pair.src for pair in pairs}
    arguments.require_one_device(**tensors, **given)
    arguments.require_no_grad(**tensors)
    live = tuple(index for index, pair in enumerate(pairs) if pair.elements)
    device = indices.slots.device
    facts = facts_of(machine.facts(), device, tuple(pairs[index] for index in live))
    empty = not live or not indices.slots.numel()
    every = len(live) == len(pairs)
    return _Plan(facts.machine, dispatch.decide(OP, facts), None if every else live, empty)


@cache
def _names(dst: str, src: str, index: int) -> tuple[str, str]:
    return dst.format(index), src.format(index)


def _require_pairs(pairs: Sequence[Pair]) -> None:
    for pair in pairs:
        if pair.window:
            arguments.require_rank(pair.dst_name, pair.dst, 4)
        _require_pair(pair.dst, pair.src, pair.dst_name, pair.src_name)


def _require_pair(dst: torch.Tensor, src: torch.Tensor, dst_name: str, src_name: str) -> None:
    """A destination and a source that belong together: ``[L, S, *st]`` and ``[L, Rq, W, *st]`` of one dtype."""
    arguments.require_tensor(dst_name, dst)
    if dst.dim() < 2:
        raise ValueError(f"{dst_name}: got shape {tuple(dst.shape)}, need [L, S, *st]")
    arguments.require_rank(src_name, src, dst.dim() + 1)
    need = (dst.shape[0], *src.shape[1:3], *dst.shape[2:])
    arguments.require_shape(src_name, src, need, f"[L, Rq, W, *st] with the layers and the entry of {dst_name}")
    arguments.require_dtype(src_name, src, (dst.dtype,))
    _require_apart(dst_name, dst)


def _require_apart(name: str, tensor: torch.Tensor) -> None:
    """No two elements share memory: each stride steps over everything that the smaller ones reach."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= reach and tensor.numel():
            raise ValueError(
                f"{name}: got strides {tensor.stride()} for shape {tuple(tensor.shape)}, "
                "need elements that do not share memory"
            )
        reach += (size - 1) * stride


def _require_indices(indices: dict[str, torch.Tensor]) -> None:
    """int32 or int64, one dimension, all of the length of the first."""
    first_name, first = next(iter(indices.items()))
    arguments.require_rank(first_name, first, 1)
    for name, index in indices.items():
        arguments.require_shape(name, index, (first.numel(),), f"[N] of {first_name}")
        arguments.require_dtype(name, index, arguments.INDEX_DTYPES)


def _both_or_neither(indices: dict[str, torch.Tensor | None]) -> dict[str, torch.Tensor]:
    given = {name: index for name, index in indices.items() if index is not None}
    if len(given) == 1:
        raise ValueError(f"{', '.join(indices)}: got only {next(iter(given))}, need both or neither")
    return given


def _require_one_pool(pairs: tuple[Pair, ...]) -> None:
    """Layers, slots, requests and width are the same in every pair: a row is written in all types or in none."""
    for pair in pairs[1:]:
        for name, sizes, need, meaning in (
            (pair.dst_name, pair.dst.shape[:2], pairs[0].dst.shape[:2], f"[L, S] of {pairs[0].dst_name}"),
            (pair.src_name, pair.src.shape[1:3], pairs[0].src.shape[1:3], f"[Rq, W] of {pairs[0].src_name}"),
        ):
            if sizes != need:
                raise ValueError(f"{name}: got {tuple(sizes)}, need {tuple(need)}, {meaning}")
