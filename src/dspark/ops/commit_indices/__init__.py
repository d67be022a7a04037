"""``commit_indices``: the step whose state each request commits, and the step that completes a track interval."""

from __future__ import annotations

from collections.abc import Hashable
from functools import cache
from types import ModuleType

import torch

from dspark import dispatch, faults, machine
from dspark.ops import arguments
from dspark.ops.commit_indices.checks import OP, Facts
from dspark.ops.commit_indices.eager import commit_indices_eager
from dspark.ops.plans import KernelPlan, Plans, layouts

MAX_INTERVAL = 1 << 62
"""The sum of a remainder and an accepted length stays below 2^63."""

_plans: Plans[KernelPlan] = Plans()


def require_interval(interval: int) -> None:
    """``mamba_track_interval`` must be an int from 1 to ``MAX_INTERVAL``."""
    arguments.require_int("mamba_track_interval", interval, 1)
    if interval > MAX_INTERVAL:
        raise ValueError(f"mamba_track_interval: got {interval}, need at most {MAX_INTERVAL}")


def fused_commit_track_indices(
    accept_index: torch.Tensor,
    accept_lens: torch.Tensor,
    seq_lens: torch.Tensor | None,
    draft_token_num: int,
    mamba_track_interval: int,
    *,
    path: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Last correct step and track step of each request (conformance/CONTRACTS.md section 7).

    accept_index: ``[B, depth]`` int32 or int64, flat node ids ``b * draft_token_num + i``; entries from
    ``accept_lens[b]`` on are never used. accept_lens: ``[B]`` int32 or int64, accepted tokens of this step.
    seq_lens: ``[B]`` int32 or int64, lengths *before* this step, or None where nothing is tracked. Any strides.
    draft_token_num: nodes per request. mamba_track_interval: tokens between tracked states, for ``seq_lens`` only.
    path: ``auto``, ``fused``, ``eager`` or None (see :mod:`dspark.dispatch`).

    Returns ``last [B]`` int64, the step of the last accepted token, and ``track``, None without ``seq_lens``, else
    ``[B]`` int64: the step after which the request holds its last crossed multiple of the interval, -1 where it crosses
    none. A row with ``accept_lens <= 0`` gives -1 in both.

    Raises ``ValueError`` for ranks, lengths or devices that disagree, indices that are not int32 or int64, and with
    ``seq_lens`` an interval outside 1..2^62. An ``accept_lens`` beyond depth (fault
    ``commit_indices/accept-len-out-of-range``) and a negative length of a row that accepts something
    (``commit_indices/seq-len-negative``) give -1 in both outputs.
    """
    call = (accept_index, accept_lens, seq_lens, draft_token_num, mamba_track_interval)
    key = _key(*call)
    plan = _plans.find(key) or _plans.keep(key, _validated(*call))
    taken = dispatch.take(plan.decision, path)
    inputs = (accept_index, accept_lens, seq_lens, draft_token_num, 1 if seq_lens is None else mamba_track_interval)
    result: tuple[torch.Tensor, torch.Tensor | None]
    if taken is dispatch.Path.FUSED:
        result = _kernel().commit_indices_fused(plan, *inputs)
    else:
        result = commit_indices_eager(*inputs)
    faults.finish(accept_index.device)
    return result


@cache
def _kernel() -> ModuleType:
    from dspark.ops.commit_indices import kernel

    return kernel


def _key(
    accept_index: torch.Tensor,
    accept_lens: torch.Tensor,
    seq_lens: torch.Tensor | None,
    draft_token_num: int,
    mamba_track_interval: int,
) -> Hashable:
    """All that the plan is made of; None for what cannot be read."""
    try:
        numbers = (draft_token_num, type(draft_token_num), mamba_track_interval, type(mamba_track_interval))
        return layouts(accept_index, accept_lens, seq_lens), numbers
    except Exception:
        return None


def _validated(
    accept_index: torch.Tensor,
    accept_lens: torch.Tensor,
    seq_lens: torch.Tensor | None,
    draft_token_num: int,
    mamba_track_interval: int,
) -> KernelPlan:
    arguments.require_rank("accept_index", accept_index, 2)
    batch, depth = accept_index.shape
    arguments.require_shape("accept_lens", accept_lens, (batch,), "[B] of accept_index")
    tensors = {"accept_index": accept_index, "accept_lens": accept_lens}
    if seq_lens is not None:
        arguments.require_shape("seq_lens", seq_lens, (batch,), "[B] of accept_index")
        tensors["seq_lens"] = seq_lens
        require_interval(mamba_track_interval)
    for name, tensor in tensors.items():
        arguments.require_dtype(name, tensor, arguments.INDEX_DTYPES)
    arguments.require_one_device(**tensors)
    arguments.require_int("draft_token_num", draft_token_num, 1)
    facts = Facts(machine.facts(), accept_index.device.type, depth)
    return KernelPlan(facts.machine, dispatch.decide(OP, facts))
