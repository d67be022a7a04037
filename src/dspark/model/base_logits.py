"""Base logits of hidden rows: the muP division, the target's head, vocabulary shards, the true vocabulary.

Two paths to the head's product. Fused: one product in the head's own dtype, for a head whose whole effect is a plain
matrix. Eager: whatever the head's quantization method does, or, for a plain head, the definition: operands widened to
fp32, the result rounded once (conformance/CONTRACTS.md section 10).
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.nn import functional

from dspark import dispatch
from dspark.dispatch import Check
from dspark.model.vocabulary import crop_to_vocabulary, gather_columns
from dspark.ops import arguments

_WIDENED_ELEMENTS = 1 << 24
"""The eager path widens this many elements of a plain head at a time: 64 MiB of fp32."""


class LMHead(Protocol):
    """What is needed of a head: ``weight [rows, H]`` and, where it is not a plain matrix, a ``quant_method`` with
    ``apply(head, hidden [N, H]) -> [N, rows]``."""

    weight: torch.Tensor


@dataclass(frozen=True)
class Facts:
    """What one call looks like to the checks: for each, the value that speaks against it, or None."""

    lm_head: Hashable = None
    dtypes: Hashable = None


def _plain_head(facts: Facts) -> tuple[bool, Hashable]:
    return facts.lm_head is None, facts.lm_head


def _same_dtype(facts: Facts) -> tuple[bool, Hashable]:
    return facts.dtypes is None, facts.dtypes


CHECKS = (
    Check(
        "lm-head-not-plain",
        "lm_head.weight must be a plain floating matrix, and lm_head must have no quant_method",
        _plain_head,
    ),
    Check("hidden-dtype", "hidden must have the dtype of lm_head.weight", _same_dtype, after=("lm-head-not-plain",)),
)
OP = dispatch.register("base_logits", CHECKS)


def compute_base_logits(
    hidden: torch.Tensor,
    lm_head: Any,
    *,
    vocab_size: int,
    mup_width_multiplier: float | None,
    group: Any = None,
    path: str | None = None,
) -> torch.Tensor:
    """Logits ``[..., vocab_size]`` of ``hidden [..., H]`` by the target's head (CONTRACTS.md section 10).

    hidden: bf16, fp16 or fp32; not modified. lm_head: an :class:`LMHead`. vocab_size: the true vocabulary; columns of
    padded rows are cropped. mup_width_multiplier: m, ``h' = RN(RN32(fp32(hidden) / fp32(m)))``, or None: no division.
    group: a ``torch.distributed`` group whose ranks hold equally many consecutive rows of the head each, in the order
    of ranks; all ranks call with the same hidden and get the same logits. path: ``auto``, ``fused``, ``eager`` or None.

    Result: the head's dtype (what ``quant_method`` returns, where there is one). Gradients flow, except through a
    group. ``ValueError`` for a multiplier that is not a positive number, a head that is neither a plain matrix nor has
    a quant_method (F1-3), a head with a bias, one of another width, or fewer rows than the vocabulary.
    """
    arguments.require_tensor("hidden", hidden)
    if hidden.dim() == 0:
        raise ValueError("hidden: got shape (), need [..., H]")
    arguments.require_dtype("hidden", hidden, arguments.ROW_DTYPES)
    arguments.require_int("vocab_size", vocab_size, 1)
    multiplier = require_multiplier("mup_width_multiplier", mup_width_multiplier)
    facts = _gather(hidden, lm_head)
    if group is not None:
        weight = getattr(lm_head, "weight", None)
        arguments.require_no_grad(hidden=hidden, lm_head=weight if isinstance(weight, torch.Tensor) else None)
    taken = dispatch.choose(OP, facts, path)
    rows = divide_hidden(hidden, multiplier).reshape(-1, hidden.shape[-1])
    logits = base_logits_fused(rows, lm_head) if taken is dispatch.Path.FUSED else base_logits_eager(rows, lm_head)
    if group is not None:
        logits = gather_columns(logits, group)
    _require_rows(logits.shape[-1], vocab_size)
    return crop_to_vocabulary("lm_head", logits, vocab_size).reshape(*hidden.shape[:-1], vocab_size)


def require_multiplier(name: str, value: object) -> float | None:
    """``value``, None or a number that is positive and finite in fp32; ``ValueError`` otherwise (bool is no number)."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 1e-37 <= value <= 3e38:
        raise ValueError(f"{name}: got {value!r}, need a positive finite number, or None for no division")
    return float(value)


def divide_hidden(hidden: torch.Tensor, multiplier: float | None) -> torch.Tensor:
    """``RN(RN32(fp32(hidden) / fp32(multiplier)))`` in hidden's dtype, any shape; None: ``hidden`` itself."""
    if multiplier is None:
        return hidden
    # By a tensor on the same device: CUDA multiplies by the reciprocal of a Python scalar or of a tensor on the CPU.
    divisor = torch.full((), multiplier, dtype=torch.float32, device=hidden.device)
    return (hidden.float() / divisor).to(hidden.dtype)


def base_logits_fused(rows: torch.Tensor, lm_head: LMHead) -> torch.Tensor:
    """``[N, rows of the head]`` of a plain head: one product, accumulated in fp32 and rounded once."""
    return functional.linear(rows, lm_head.weight)


def base_logits_eager(rows: torch.Tensor, lm_head: Any) -> torch.Tensor:
    """The same by the head's own method, or by the definition, some rows of the head at a time."""
    if getattr(lm_head, "quant_method", None) is not None:
        applied: torch.Tensor = lm_head.quant_method.apply(lm_head, rows)
        return applied
    weight, wide = lm_head.weight, rows.float()
    step = max(1, _WIDENED_ELEMENTS // max(1, weight.shape[1]))
    return torch.cat([functional.linear(wide, part.float()).to(weight.dtype) for part in weight.split(step)], dim=-1)


def _gather(hidden: torch.Tensor, lm_head: Any) -> Facts:
    """The facts of a call; ``ValueError`` for a head that no path can apply."""
    weight, method = getattr(lm_head, "weight", None), getattr(lm_head, "quant_method", None)
    described = _describe(weight)
    if method is not None:
        if not callable(getattr(method, "apply", None)):
            raise ValueError(f"lm_head: got the quant_method {method!r}, need one with apply(lm_head, hidden)")
        return Facts(lm_head=f"{type(method).__name__}, {described}")
    if not isinstance(weight, torch.Tensor) or weight.dim() != 2 or weight.dtype not in arguments.ROW_DTYPES:
        raise ValueError(f"lm_head: got {described}, need a plain floating matrix [rows, H], or a quant_method")
    if weight.shape[1] != hidden.shape[-1]:
        raise ValueError(f"lm_head: got {described}, need {hidden.shape[-1]} columns, the width of hidden")
    if getattr(lm_head, "bias", None) is not None:
        raise ValueError("lm_head: got a head with a bias, need one without: its logits are the product alone")
    arguments.require_one_device(hidden=hidden, lm_head=weight)
    dtypes = (str(hidden.dtype), str(weight.dtype))
    return Facts(dtypes=None if hidden.dtype == weight.dtype else dtypes)


def _describe(weight: object) -> str:
    if not isinstance(weight, torch.Tensor):
        return f"a weight of type {type(weight).__name__}"
    return f"a weight {tuple(weight.shape)} of {str(weight.dtype).removeprefix('torch.')}"


def _require_rows(rows: int, vocab_size: int) -> None:
    if rows < vocab_size:
        raise ValueError(f"vocab_size: got {vocab_size}, need at most {rows}, the rows of lm_head")
