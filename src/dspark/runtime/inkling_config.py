"""The shape of a tiny Inkling, read from and written to a ``config.json``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspark.model.base_logits import require_multiplier
from dspark.model.config import TargetConfig
from dspark.ops import arguments

CONV_KINDS = ("k", "v", "attention", "mlp")
"""The short-convolution streams of a layer, in the order of ``StateLayout.conv_dims``."""
MULTIPLE = 16
"""Widths are multiples of it, so that every row of every activation starts at the same alignment."""


@dataclass(frozen=True)
class InklingConfig:
    """A byte-level hybrid decoder. Every field is checked; ``ValueError`` names the field, the value and the need.

    vocab_size: ids that exist, the 256 bytes first. padded_vocab_size: rows of embedding and head. num_heads,
    num_kv_heads, head_dim: NQ, NK, D. conv_kernel: K of the short convolutions. max_position: positions that exist.
    logits_mup_width_multiplier: m of CONTRACTS.md section 10; None: no division.
    """

    hidden_size: int = 192
    intermediate_size: int = 512
    num_layers: int = 5
    num_heads: int = 6
    num_kv_heads: int = 2
    head_dim: int = 32
    vocab_size: int = 258
    padded_vocab_size: int = 320
    conv_kernel: int = 4
    max_position: int = 2048
    rope_theta: float = 10000.0
    eps: float = 1e-6
    logits_mup_width_multiplier: float | None = 24.0

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_heads", "num_kv_heads", "head_dim", "max_position"):
            arguments.require_int(name, getattr(self, name), 1)
        for name in ("hidden_size", "intermediate_size", "padded_vocab_size"):
            if arguments.require_int(name, getattr(self, name), MULTIPLE) % MULTIPLE:
                raise ValueError(f"{name}: got {getattr(self, name)}, need a multiple of {MULTIPLE}")
        if self.head_dim % MULTIPLE or self.head_dim & (self.head_dim - 1):
            raise ValueError(f"head_dim: got {self.head_dim}, need a power of two from {MULTIPLE} on")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads: got {self.num_heads}, need a multiple of num_kv_heads, {self.num_kv_heads}")
        arguments.require_int("vocab_size", self.vocab_size, 1)
        if self.vocab_size > self.padded_vocab_size:
            raise ValueError(f"vocab_size: got {self.vocab_size}, need at most {self.padded_vocab_size} padded rows")
        arguments.require_int("conv_kernel", self.conv_kernel, 2)
        require_multiplier("logits_mup_width_multiplier", self.logits_mup_width_multiplier)
        for name in ("rope_theta", "eps"):
            if require_multiplier(name, getattr(self, name)) is None:
                raise ValueError(f"{name}: got None, need a positive finite number")

    @property
    def kv_size(self) -> int:
        """NK * D."""
        return self.num_kv_heads * self.head_dim

    @property
    def conv_dims(self) -> tuple[int, ...]:
        """Channels of each stream of ``CONV_KINDS``."""
        return (self.kv_size, self.kv_size, self.hidden_size, self.hidden_size)

    def target_config(self) -> TargetConfig:
        """What a draft must know of this target."""
        return TargetConfig(
            hidden_size=self.hidden_size,
            num_layers=self.num_layers,
            vocab_size=self.vocab_size,
            padded_vocab_size=self.padded_vocab_size,
            logits_mup_width_multiplier=self.logits_mup_width_multiplier,
        )

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> InklingConfig:
        """The config that :meth:`to_config` wrote. ``ValueError`` for a missing or unknown key."""
        names = {theirs: ours for ours, theirs in _SPELLINGS.items()}
        given = {key: value for key, value in config.items() if key not in _MARKS}
        if unknown := sorted(given.keys() - names.keys()):
            raise ValueError(f"{', '.join(unknown)}: got unknown keys, need none but {sorted(names)}")
        if missing := sorted(names.keys() - given.keys()):
            raise ValueError(f"{', '.join(missing)}: got nothing, need a value")
        if config.get("model_type", MODEL_TYPE) != MODEL_TYPE:
            raise ValueError(f"model_type: got {config['model_type']!r}, need {MODEL_TYPE!r}")
        return cls(**{names[key]: value for key, value in given.items()})

    @classmethod
    def from_file(cls, path: str | Path) -> InklingConfig:
        """The config of a ``config.json``, or of the folder that holds one. ``ValueError`` starts with the file."""
        file = Path(path)
        file = file / "config.json" if file.is_dir() else file
        try:
            config = json.loads(file.read_text(encoding="utf-8"))
            if not isinstance(config, dict):
                raise ValueError(f"got {type(config).__name__}, need an object")
            return cls.from_config(config)
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from error

    def to_config(self) -> dict[str, Any]:
        """Hugging Face style keys; ``from_config(to_config())`` is this config."""
        return {"model_type": MODEL_TYPE} | {theirs: getattr(self, ours) for ours, theirs in _SPELLINGS.items()}


MODEL_TYPE = "tiny_inkling"
_MARKS = ("model_type",)
_SPELLINGS = {
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "vocab_size": "vocab_size",
    "padded_vocab_size": "padded_vocab_size",
    "conv_kernel": "conv_kernel",
    "max_position": "max_position_embeddings",
    "rope_theta": "rope_theta",
    "eps": "rms_norm_eps",
    "logits_mup_width_multiplier": "logits_mup_width_multiplier",
}
