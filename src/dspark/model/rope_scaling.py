"""RoPE settings of a model config: which angle each position and pair has, before any table is built."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch


class Scaling(enum.StrEnum):
    """How inverse frequencies are stretched for contexts longer than those trained on."""

    DEFAULT = "default"
    LINEAR = "linear"
    LLAMA3 = "llama3"
    YARN = "yarn"


@dataclass(frozen=True)
class RopeParameters:
    """What decides every angle (conformance/CONTRACTS.md section 2).

    theta: base. scaling: the kind; the other fields are read by the kinds that use them. factor: by how much the
    context is stretched. original_max_position: positions trained on. low_freq_factor, high_freq_factor: llama3.
    beta_fast, beta_slow: yarn, in turns over the trained context. attention_factor: what yarn multiplies cos and sin
    with; None: ``0.1 ln(factor) + 1``.
    """

    theta: float
    scaling: Scaling = Scaling.DEFAULT
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None

    def __post_init__(self) -> None:
        for name in ("theta", "factor"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                raise ValueError(f"{name}: got {value!r}, need a finite number > 0")
        if self.scaling in (Scaling.LLAMA3, Scaling.YARN) and self.original_max_position < 1:
            raise ValueError(f"original_max_position: got {self.original_max_position}, need >= 1 for {self.scaling}")

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> RopeParameters:
        """The settings of a Hugging Face style config.

        A nested ``rope_parameters`` or ``rope_scaling`` wins over flat keys (a stale flat ``rope_theta`` is common,
        fault F2-17). No ``rope_scaling``, or one of type ``default``: the plain table. ``ValueError`` for an unknown
        type, for both nested mappings at once with different content, and for a missing theta.
        """
        nested = [dict(config[key]) for key in ("rope_parameters", "rope_scaling") if config.get(key)]
        if len(nested) == 2 and nested[0] != nested[1]:
            raise ValueError(f"rope_parameters, rope_scaling: got {nested[0]} and {nested[1]}, need one, or equal ones")
        found = nested[0] if nested else {}
        kind = found.get("rope_type", found.get("type", "default"))
        if kind not in tuple(Scaling):
            raise ValueError(f"rope_type: got {kind!r}, need one of {', '.join(Scaling)}")
        theta = found.get("rope_theta", config.get("rope_theta"))
        if theta is None:
            raise ValueError("rope_theta: missing in the config and in its rope_parameters")
        known = {
            "factor": found.get("factor"),
            "original_max_position": found.get(
                "original_max_position_embeddings", config.get("original_max_position_embeddings")
            ),
            "low_freq_factor": found.get("low_freq_factor"),
            "high_freq_factor": found.get("high_freq_factor"),
            "beta_fast": found.get("beta_fast"),
            "beta_slow": found.get("beta_slow"),
            "attention_factor": found.get("attention_factor"),
        }
        return cls(theta, Scaling(kind), **{name: value for name, value in known.items() if value is not None})

    @property
    def amplitude(self) -> float:
        """What cos and sin are multiplied with: 1, or yarn's attention factor."""
        if self.scaling is not Scaling.YARN:
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        return 0.1 * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0

    def inverse_frequencies(self, rotary_dim: int) -> torch.Tensor:
        """fp32 ``[R/2]`` on the CPU: ``1 / theta^(2i/R)``, stretched as the scaling says, each rounded once.

        ``ValueError`` for a rotary_dim that is not a positive even int.
        """
        if not isinstance(rotary_dim, int) or rotary_dim <= 0 or rotary_dim % 2:
            raise ValueError(f"rotary_dim: got {rotary_dim!r}, need a positive even int")
        exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim
        plain = 1.0 / torch.pow(torch.tensor(self.theta, dtype=torch.float64), exponents)
        stretch = {
            Scaling.DEFAULT: lambda: plain,
            Scaling.LINEAR: lambda: plain / self.factor,
            Scaling.LLAMA3: lambda: self._llama3(plain),
            Scaling.YARN: lambda: self._yarn(plain, rotary_dim),
        }
        return stretch[self.scaling]().to(torch.float32)

    def _llama3(self, plain: torch.Tensor) -> torch.Tensor:
        """Pairs that turn often keep their frequency, slow ones are stretched, those between are blended."""
        turns = self.original_max_position * plain / (2 * math.pi)
        share = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        kept = share.clamp(0, 1)
        return kept * plain + (1 - kept) * plain / self.factor

    def _yarn(self, plain: torch.Tensor, rotary_dim: int) -> torch.Tensor:
        """A ramp over pair indices between those that turn beta_fast and beta_slow times in the trained context."""

        def pair_turning(turns: float) -> float:
            trained = self.original_max_position / (turns * 2 * math.pi)
            return rotary_dim * math.log(trained) / (2 * math.log(self.theta))

        low = max(math.floor(pair_turning(self.beta_fast)), 0)
        high = min(math.ceil(pair_turning(self.beta_slow)), rotary_dim - 1)
        index = torch.arange(rotary_dim // 2, dtype=torch.float64)
        stretched = ((index - low) / (high - low if high > low else 0.001)).clamp(0, 1)
        return stretched * plain / self.factor + (1 - stretched) * plain
