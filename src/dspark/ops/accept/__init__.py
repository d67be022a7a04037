"""``accept``: how many drafted tokens the target confirms, and the token it adds."""

from __future__ import annotations

from collections.abc import Hashable
from functools import cache
from types import ModuleType

import torch

from dspark import dispatch, faults, machine
from dspark.ops import arguments
from dspark.ops.accept.checks import OP, Facts
from dspark.ops.accept.eager import accept_eager
from dspark.ops.plans import KernelPlan, Plans, layouts

_plans: Plans[KernelPlan] = Plans()


def require_verify_window(
    candidates: torch.Tensor, target_predict: torch.Tensor, verify_lens: torch.Tensor | None
) -> tuple[int, int]:
    """B and W of a verify window; ``ValueError`` for what section 6 of conformance/CONTRACTS.md refuses but devices."""
    arguments.require_rank("candidates", candidates, 2)
    batch, width = candidates.shape
    if batch <= 0 or width <= 0:
        raise ValueError(f"candidates: got shape {tuple(candidates.shape)}, need B > 0 and W > 0")
    arguments.require_shape("target_predict", target_predict, (batch, width), "[B, W] of candidates")
    arguments.require_dtype("candidates", candidates, arguments.SIGNED_DTYPES)
    arguments.require_dtype("target_predict", target_predict, arguments.SIGNED_DTYPES)
    if verify_lens is not None:
        arguments.require_shape("verify_lens", verify_lens, (batch,), "[B] of candidates")
        arguments.require_dtype("verify_lens", verify_lens, arguments.SIGNED_DTYPES)
    return batch, width


def compute_dflash_correct_drafts_and_bonus(
    *,
    candidates: torch.Tensor,
    target_predict: torch.Tensor,
    verify_lens: torch.Tensor | None = None,
    path: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Leading-match count and bonus token of each request's verify window (conformance/CONTRACTS.md section 6).

    candidates: ``[B, W]`` signed integer token ids, column 0 the current token, columns 1.. the drafts.
    target_predict: ``[B, W]`` signed integer, the target's token after each column. Any strides, dtypes may differ.
    verify_lens: ``[B]`` signed integer or None; only the first ``verify_lens[b]`` columns of row b count.
    path: ``auto``, ``fused``, ``eager`` or None (see :mod:`dspark.dispatch`).

    Returns ``correct [B]`` int32, the number of leading k with ``candidates[:, k+1] == target_predict[:, k]`` (capped
    at ``verify_lens - 1``), and ``bonus [B]`` int64, ``target_predict[b, correct[b]]``.

    Raises ``ValueError`` for ranks, shapes or devices that disagree, an empty batch or width, and dtypes that are not
    signed integers. A ``verify_lens`` outside 1..W is clamped and sets the fault ``accept/verify-len-out-of-range``.
    """
    key = _key(candidates, target_predict, verify_lens)
    plan = _plans.find(key) or _plans.keep(key, _validated(candidates, target_predict, verify_lens))
    result: tuple[torch.Tensor, torch.Tensor]
    if dispatch.take(plan.decision, path) is dispatch.Path.FUSED:
        result = _kernel().accept_fused(plan, candidates, target_predict, verify_lens)
    else:
        result = accept_eager(candidates, target_predict, verify_lens)
    faults.finish(candidates.device)
    return result


@cache
def _kernel() -> ModuleType:
    from dspark.ops.accept import kernel

    return kernel


def _key(candidates: torch.Tensor, target_predict: torch.Tensor, verify_lens: torch.Tensor | None) -> Hashable:
    """All that the plan is made of; None for what cannot be read."""
    try:
        return layouts(candidates, target_predict, verify_lens)
    except Exception:
        return None


def _validated(candidates: torch.Tensor, target_predict: torch.Tensor, verify_lens: torch.Tensor | None) -> KernelPlan:
    _, width = require_verify_window(candidates, target_predict, verify_lens)
    arguments.require_one_device(candidates=candidates, target_predict=target_predict, verify_lens=verify_lens)
    facts = Facts(machine.facts(), candidates.device.type, width)
    return KernelPlan(facts.machine, dispatch.decide(OP, facts))
