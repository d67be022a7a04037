"""``accept_commit``: everything between verify and commit of a chain of drafts, in one launch."""

from __future__ import annotations

from collections.abc import Hashable
from functools import cache
from types import ModuleType

import torch

from dspark import dispatch, faults, machine
from dspark.ops import arguments
from dspark.ops.accept import require_verify_window
from dspark.ops.accept.checks import Facts
from dspark.ops.accept_commit.checks import OP
from dspark.ops.accept_commit.eager import accept_commit_eager
from dspark.ops.accept_commit.result import AcceptCommit
from dspark.ops.commit_indices import require_interval
from dspark.ops.plans import KernelPlan, Plans, layouts

_plans: Plans[KernelPlan] = Plans()


def fused_accept_commit(
    *,
    candidates: torch.Tensor,
    target_predict: torch.Tensor,
    seq_lens: torch.Tensor,
    verify_lens: torch.Tensor | None = None,
    eos_ids: torch.Tensor | None = None,
    mamba_track_interval: int | None = None,
    path: str | None = None,
) -> AcceptCommit:
    """What each request of a verified window accepts, emits and commits (conformance/CONTRACTS.md section 7b).

    candidates: ``[B, W]`` signed integer token ids, column 0 the current token, columns 1.. a chain of drafts.
    target_predict: ``[B, W]`` signed integer, the target's token after each column. Any strides, dtypes may differ.
    seq_lens: ``[B]`` int32 or int64, lengths *before* this step; a negative one marks a padded row.
    verify_lens: ``[B]`` signed integer or None; only the first ``verify_lens[b]`` columns of row b count.
    eos_ids: ``[E]`` signed integer or None; nothing after the first of these is committed.
    mamba_track_interval: tokens between tracked states, or None where nothing is tracked.
    path: ``auto``, ``fused``, ``eager`` or None (see :mod:`dspark.dispatch`).

    Returns :class:`AcceptCommit`: what :func:`dspark.ops.compute_dflash_correct_drafts_and_bonus` and
    :func:`dspark.ops.fused_commit_track_indices` give for this window, and the lengths between and after them.

    Raises ``ValueError`` for ranks, shapes or devices that disagree, an empty batch or width, dtypes that are not
    allowed, and an interval outside 1..2^62. A ``verify_lens`` outside 1..W is clamped, and in a row that is not padded
    it sets the fault ``accept_commit/verify-len-out-of-range``.
    """
    call = (candidates, target_predict, seq_lens, verify_lens, eos_ids, mamba_track_interval)
    key = _key(*call)
    plan = _plans.find(key) or _plans.keep(key, _validated(*call))
    result: AcceptCommit
    if dispatch.take(plan.decision, path) is dispatch.Path.FUSED:
        result = _kernel().accept_commit_fused(plan, *call)
    else:
        result = accept_commit_eager(*call)
    faults.finish(candidates.device)
    return result


@cache
def _kernel() -> ModuleType:
    from dspark.ops.accept_commit import kernel

    return kernel


def _key(
    candidates: torch.Tensor,
    target_predict: torch.Tensor,
    seq_lens: torch.Tensor,
    verify_lens: torch.Tensor | None,
    eos_ids: torch.Tensor | None,
    mamba_track_interval: int | None,
) -> Hashable:
    """All that the plan is made of; None for what cannot be read."""
    try:
        tensors = layouts(candidates, target_predict, seq_lens, verify_lens, eos_ids)
        return tensors, mamba_track_interval, type(mamba_track_interval)
    except Exception:
        return None


def _validated(
    candidates: torch.Tensor,
    target_predict: torch.Tensor,
    seq_lens: torch.Tensor,
    verify_lens: torch.Tensor | None,
    eos_ids: torch.Tensor | None,
    mamba_track_interval: int | None,
) -> KernelPlan:
    batch, width = require_verify_window(candidates, target_predict, verify_lens)
    arguments.require_shape("seq_lens", seq_lens, (batch,), "[B] of candidates")
    arguments.require_dtype("seq_lens", seq_lens, arguments.INDEX_DTYPES)
    if eos_ids is not None:
        arguments.require_rank("eos_ids", eos_ids, 1)
        arguments.require_dtype("eos_ids", eos_ids, arguments.SIGNED_DTYPES)
    if mamba_track_interval is not None:
        require_interval(mamba_track_interval)
    arguments.require_one_device(
        candidates=candidates,
        target_predict=target_predict,
        seq_lens=seq_lens,
        verify_lens=verify_lens,
        eos_ids=eos_ids,
    )
    facts = Facts(machine.facts(), candidates.device.type, width)
    return KernelPlan(facts.machine, dispatch.decide(OP, facts))


__all__ = ["AcceptCommit", "fused_accept_commit"]
