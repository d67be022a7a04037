"""The scale guard: a draft is served with the head scale that it was trained on (conformance/CONTRACTS.md section 10).

A muP target divides hidden rows by its multiplier m before its head W, so what a draft is trained on is ``W / m``:
either as a head with m folded in, or as the unfolded head after the division. Served with another scale, its base
logits are off by a factor that greedy drafting without a Markov bias does not show (fault F1-10).
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

import torch

from dspark.model.config import TargetConfig

METADATA_KEY = "dspark_head_scale"
"""Where a fingerprint stands in the metadata of a safetensors file."""
SAMPLED_ROWS = 1024
AGREEMENT = 2.0**-6
"""Relative difference up to which two fingerprints are one scale: storing a head in fp8 changes it by less."""
FOLDED = 2.0**-7
"""Relative difference up to which an element of a folded head is ``W / m``: one rounding to bf16 changes it by less."""
CHUNK_ROWS = 8192


class CheckpointError(ValueError):
    """A checkpoint that does not fit the model or the target; the message starts with the tensor or file."""


@dataclass(frozen=True)
class HeadScale:
    """The fingerprint of a head as a draft sees it.

    rms: root mean square of the elements of ``W / m`` over the rows 0, s, 2 s, ... of the true vocabulary V, with
    ``s = max(1, V // 1024)``, in float64. multiplier: m, for the message only; None: 1.
    As text it is a JSON object ``{"multiplier": m or null, "rms": number}`` that round-trips bit for bit.
    """

    multiplier: float | None
    rms: float

    @classmethod
    def of(cls, lm_head: Any, target: TargetConfig) -> HeadScale | None:
        """The fingerprint of the target's head; None where its weight cannot be read (quantized, sharded)."""
        weight = readable_weight(lm_head, target.vocab_size)
        if weight is None:
            return None
        rows = weight.detach()[: target.vocab_size : max(1, target.vocab_size // SAMPLED_ROWS)]
        rms = rows.to(torch.float64).square().mean().sqrt().item()
        return cls(target.logits_mup_width_multiplier, rms / (target.logits_mup_width_multiplier or 1.0))

    @classmethod
    def from_text(cls, text: str) -> HeadScale:
        """``CheckpointError`` for anything but what :meth:`to_text` writes."""
        try:
            found = json.loads(text)
            multiplier, rms = found["multiplier"], found["rms"]
            numbers = [rms] if multiplier is None else [rms, multiplier]
            if set(found) != {"multiplier", "rms"} or any(type(number) is not float for number in numbers):
                raise ValueError
            if not all(math.isfinite(number) and number > 0 for number in numbers):
                raise ValueError
        except (ValueError, KeyError, TypeError):
            raise CheckpointError(f"{METADATA_KEY}: got {text!r}, need a fingerprint of a head's scale") from None
        return cls(multiplier, rms)

    def to_text(self) -> str:
        return json.dumps({"multiplier": self.multiplier, "rms": self.rms})

    def require(self, served: HeadScale) -> None:
        """``CheckpointError`` unless the draft with this fingerprint may be served with the head of ``served``."""
        if abs(self.rms - served.rms) <= AGREEMENT * served.rms:
            return
        raise CheckpointError(
            f"{METADATA_KEY}: the draft was trained on a head of scale {self.rms:.6g} (multiplier {self.multiplier}), "
            f"the target's is {served.rms:.6g} (multiplier {served.multiplier}), {_times(self.rms, served.rms)}"
        )


def _times(own: float, served: float) -> str:
    return f"a factor of {own / served:.6g}" if served else "all zeros"


def readable_weight(module: Any, rows: int) -> torch.Tensor | None:
    """The module's floating weight ``[>= rows, H]``, or None where only its own method knows what it means."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, torch.Tensor) or getattr(module, "quant_method", None) is not None:
        return None
    plain = weight.dtype in (torch.bfloat16, torch.float16, torch.float32)
    return weight if plain and weight.dim() == 2 and weight.shape[0] >= rows and weight.device.type != "meta" else None


def require_same_head(name: str, own: torch.Tensor, rows: torch.Tensor, lm_head: Any, target: TargetConfig) -> None:
    """``CheckpointError`` unless ``own [len(rows), H]`` is ``W / m`` of the target's head at ``rows``, to a rounding.

    A draft that was trained on an unfolded head without the division carries W itself, m times as large.
    """
    weight = readable_weight(lm_head, target.vocab_size)
    if weight is None:
        raise CheckpointError(
            f"{name}: cannot be compared with the target's {type(lm_head).__name__}, whose weight is no plain matrix: "
            "check the scale and name the tensor in skip"
        )
    multiplier = target.logits_mup_width_multiplier or 1.0
    differing, own_square, served_square = 0, 0.0, 0.0
    for low in range(0, len(rows), CHUNK_ROWS):
        at = rows[low : low + CHUNK_ROWS]
        served = weight.detach()[at.to(weight.device)].to(torch.float64) / multiplier
        part = own[low : low + CHUNK_ROWS].to(served)
        differing += int((~((part - served).abs() <= FOLDED * served.abs())).any(dim=1).sum())
        own_square += float(part.square().sum())
        served_square += float(served.square().sum())
    if not differing:
        return
    own_rms, served_rms = (math.sqrt(square / own.numel()) for square in (own_square, served_square))
    raise CheckpointError(
        f"{name}: differs in {differing} of {len(rows)} rows from the target's head divided by its multiplier "
        f"({target.logits_mup_width_multiplier}); their scales are {own_rms:.6g} and {served_rms:.6g}, "
        f"{_times(own_rms, served_rms)}. A draft trained on a folded head is served with the multiplier, one trained "
        "on an unfolded head without"
    )


def require_same_embedding(name: str, own: torch.Tensor, embed_tokens: Any, rows: torch.Tensor) -> None:
    """``CheckpointError`` unless ``own`` has the target's embedding in each of ``rows``, in the target's dtype."""
    needed = int(rows.max()) + 1
    weight = readable_weight(embed_tokens, needed)
    if weight is None:
        raise CheckpointError(
            f"{name}: cannot be compared with the target's {type(embed_tokens).__name__}, whose weight is no plain "
            "matrix: check it and name the tensor in skip"
        )
    if own.dim() != 2 or own.shape[1] != weight.shape[1] or own.shape[0] < needed:
        raise CheckpointError(f"{name}: got shape {tuple(own.shape)}, need [>= {needed}, {weight.shape[1]}]")
    differing: list[int] = []
    for at in rows.split(CHUNK_ROWS):
        served = weight.detach()[at.to(weight.device)]
        differing += at[(own[at.to(own.device)].to(served) != served).any(dim=1).cpu()].tolist()
    if differing:
        raise CheckpointError(
            f"{name}: differs from the target's embedding, which the draft uses, in {len(differing)} of {len(rows)} "
            f"rows, the first {differing[0]}; name it in skip if that is meant"
        )
