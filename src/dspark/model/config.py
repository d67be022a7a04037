"""What a draft and its target are: one parser for every spelling in use feeds every builder (CONTRACTS.md section 10).

Tables of spellings: ``config_spellings``; what follows from what: ``config_reading``.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .config_reading import ASSUMABLE, read_draft, write_draft
from .config_spellings import Spellings
from .config_values import MarkovKind, flag, listed, positive, whole
from .rope_scaling import RopeParameters

__all__ = ["ASSUMABLE", "DSparkConfig", "MarkovKind", "TargetConfig"]


@dataclass(frozen=True)
class TargetConfig:
    """What a draft must know of its target.

    hidden_size: width of its taps and of the head's input. num_layers: taps are below it. vocab_size: the true
    vocabulary; no id at or above it is ever drafted. padded_vocab_size: rows of embedding and head. One number divides
    the hidden of the base logits, ``logits_mup_width_multiplier``; None: no division. ``ValueError`` names the field.
    """

    hidden_size: int
    num_layers: int
    vocab_size: int
    padded_vocab_size: int
    logits_mup_width_multiplier: float | None

    def __post_init__(self) -> None:
        for name in ("hidden_size", "num_layers", "vocab_size", "padded_vocab_size"):
            whole(1)(name, getattr(self, name))
        if self.padded_vocab_size < self.vocab_size:
            raise ValueError(
                f"padded_vocab_size: got {self.padded_vocab_size}, need >= vocab_size, which is {self.vocab_size}"
            )
        if self.logits_mup_width_multiplier is not None:
            positive("logits_mup_width_multiplier", self.logits_mup_width_multiplier)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> TargetConfig:
        """The target of a Hugging Face style config, plain or nested in ``text_config``.

        Vocabularies are spelled in two ways: ``vocab_size`` true beside ``padded_vocab_size``, or ``vocab_size`` padded
        beside ``unpadded_vocab_size``. ``ValueError`` for a missing or bad field and for values that differ.
        """
        found = Spellings.of_target(config)
        size, padded, unpadded = (
            found.require("vocab_size"),
            found.get("padded_vocab_size"),
            found.get("unpadded_vocab_size"),
        )
        true = size if unpadded is None else unpadded
        rows = padded if padded is not None else size
        if size not in (true, rows):
            raise ValueError(f"vocab_size: got {size}, need unpadded_vocab_size, {true}, or padded_vocab_size, {rows}")
        return cls(
            hidden_size=found.require("hidden_size"),
            num_layers=found.require("num_layers"),
            vocab_size=true,
            padded_vocab_size=rows,
            logits_mup_width_multiplier=found.get("logits_mup_width_multiplier"),
        )


_POSITIVE = (
    "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim",
    "rotary_dim", "max_position", "vocab_size", "gamma", "trained_block",
)  # fmt: skip
_CHECKS = (
    (_POSITIVE, whole(1)),
    (("mask_token_id", "markov_rank"), whole(0)),
    (("is_neox_style", "sample_from_anchor", "causal", "confidence_head", "gemma_norm"), flag),
    (("eps",), positive),
)


@dataclass(frozen=True)
class DSparkConfig:
    """A draft. Every field is checked, however it was made; ``ValueError`` names the field, the value and the need.

    eps: of every norm. rope, rotary_dim, is_neox_style: the draft's own pairing, never the target's (F2-7).
    max_position: positions that exist. vocab_size: ids that the heads predict. mask_token_id: a row of the target's
    embedding (F1-16). target_layer_ids: taps, after layer i, ascending (F1-4). gamma: proposals per step, at most
    trained_block. sample_from_anchor: block row k predicts position n+k+1 (DeepSpec), else row 0 is dropped and row k
    predicts n+k (F1-15). causal: block rows attend to no later block row. sliding_window: how many positions a row
    attends to, its own among them; None: all. markov_head, markov_rank: None and 0 together. confidence_temperatures:
    one per drafted position from the first, at least gamma; () are ones. gemma_norm: norms hold w of 1 + w (F2-12).
    assumed: fields that the config lacked (:data:`ASSUMABLE`). num_target_layers: the target's depth, where the config
    says it. reduced_from: rows of the vocabulary of which ``vocab_size`` ids are a selection; None: not reduced.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    rope: RopeParameters
    rotary_dim: int
    is_neox_style: bool
    max_position: int
    vocab_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    gamma: int
    trained_block: int
    sample_from_anchor: bool = True
    causal: bool = False
    sliding_window: int | None = None
    markov_head: MarkovKind | None = None
    markov_rank: int = 0
    confidence_head: bool = False
    confidence_temperatures: tuple[float, ...] = ()
    gemma_norm: bool = False
    assumed: frozenset[str] = frozenset()
    num_target_layers: int | None = None
    reduced_from: int | None = None

    def __post_init__(self) -> None:
        for names, read in _CHECKS:
            for name in names:
                read(name, getattr(self, name))
        for name in ("sliding_window", "num_target_layers", "reduced_from"):
            if getattr(self, name) is not None:
                whole(1)(name, getattr(self, name))
        self._check_attention()
        self._check_taps()
        self._check_block()
        self._check_heads()

    def _check_attention(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads: got {self.num_heads}, need a multiple of num_kv_heads, {self.num_kv_heads}")
        if self.rotary_dim % 2 or self.rotary_dim > self.head_dim:
            raise ValueError(f"rotary_dim: got {self.rotary_dim}, need an even int <= head_dim, {self.head_dim}")
        unknown = sorted(self.assumed - ASSUMABLE)
        if unknown:
            raise ValueError(f"assumed: got {unknown}, need fields of {sorted(ASSUMABLE)}")

    def _check_taps(self) -> None:
        taps = listed(whole(0))("target_layer_ids", self.target_layer_ids)
        object.__setattr__(self, "target_layer_ids", taps)
        if not taps or any(after <= before for before, after in itertools.pairwise(taps)):
            raise ValueError(f"target_layer_ids: got {list(taps)}, need at least one layer, ascending, each once")
        if self.num_target_layers is not None and taps[-1] >= self.num_target_layers:
            raise ValueError(f"target_layer_ids: got {list(taps)}, need layers below {self.num_target_layers}")

    def _check_block(self) -> None:
        if self.gamma > self.trained_block:
            raise ValueError(f"gamma: got {self.gamma}, need at most the trained block, {self.trained_block}")
        temperatures = listed(positive)("confidence_temperatures", self.confidence_temperatures)
        object.__setattr__(self, "confidence_temperatures", temperatures)
        if temperatures and not (self.confidence_head and self.gamma <= len(temperatures) <= self.trained_block):
            raise ValueError(
                f"confidence_temperatures: got {len(temperatures)}, need none, or a confidence head and one for each "
                f"of {self.gamma} to {self.trained_block} drafted positions"
            )

    def _check_heads(self) -> None:
        if self.markov_head is not None and not isinstance(self.markov_head, MarkovKind):
            raise ValueError(f"markov_head: got {self.markov_head!r}, need a MarkovKind or None")
        if (self.markov_head is None) != (self.markov_rank == 0):
            raise ValueError(f"markov_rank: got {self.markov_rank}, need > 0 with a Markov head and 0 without")
        if self.confidence_head and self.markov_head is None:
            raise ValueError("confidence_head: got True, need a Markov head, whose embedding it reads")
        if self.reduced_from is not None and self.reduced_from <= self.vocab_size:
            raise ValueError(f"reduced_from: got {self.reduced_from}, need > vocab_size, which is {self.vocab_size}")

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> DSparkConfig:
        """The draft of a Hugging Face style config, in any spelling of ``config_spellings``.

        ``ValueError`` names a field that is missing and its spellings, two keys whose values differ, a key of the
        draft's own namespaces that is unknown, and a key that asks for what is not implemented.
        """
        return cls(**read_draft(Spellings.of_draft(config)))

    @classmethod
    def from_file(cls, path: str | Path) -> DSparkConfig:
        """The draft of a ``config.json``, or of the folder that holds one. ``ValueError`` starts with the file."""
        file = Path(path)
        file = file / "config.json" if file.is_dir() else file
        try:
            config = json.loads(file.read_text(encoding="utf-8"), object_pairs_hook=_once)
            if not isinstance(config, dict):
                raise ValueError(f"got {type(config).__name__}, need an object")
            return cls.from_config(config)
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from error

    @property
    def query_width(self) -> int:
        """Rows of the query block: gamma, and the anchor's own row where it predicts nothing."""
        return self.gamma if self.sample_from_anchor else self.gamma + 1

    @property
    def prev_vocab_size(self) -> int:
        """Ids that a Markov head can follow: of the whole vocabulary, also where the draft predicts a selection."""
        return self.vocab_size if self.reduced_from is None else self.reduced_from

    def require_target(self, target: TargetConfig) -> None:
        """``ValueError`` unless this draft can draft for ``target``: width, taps, mask token and vocabulary fit."""
        if self.hidden_size != target.hidden_size:
            raise ValueError(f"hidden_size: got {self.hidden_size}, need the target's {target.hidden_size}")
        if self.num_target_layers not in (None, target.num_layers):
            raise ValueError(f"num_target_layers: got {self.num_target_layers}, need the target's {target.num_layers}")
        if self.target_layer_ids[-1] >= target.num_layers:
            raise ValueError(
                f"target_layer_ids: got {list(self.target_layer_ids)}, need layers below "
                f"the target's {target.num_layers}"
            )
        if self.mask_token_id >= target.padded_vocab_size:
            raise ValueError(
                f"mask_token_id: got {self.mask_token_id}, need < {target.padded_vocab_size}, the rows of the target's "
                "embedding"
            )
        if not target.vocab_size <= self.prev_vocab_size <= target.padded_vocab_size:
            raise ValueError(
                f"vocab_size: got {self.prev_vocab_size}, need the target's {target.vocab_size} to "
                f"{target.padded_vocab_size}"
            )

    def with_gamma(self, gamma: int) -> DSparkConfig:
        """The same draft with ``gamma`` proposals per step; ``ValueError`` beyond the trained block."""
        return dataclasses.replace(self, gamma=gamma)

    def to_config(self) -> dict[str, Any]:
        """The one canonical spelling: ``from_config(to_config())`` is this config. Assumed fields stay absent."""
        return write_draft(self)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object in which no key occurs twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = sorted({key for key, _ in pairs if sum(key == other for other, _ in pairs) > 1})
        raise ValueError(f"{', '.join(twice)}: got the key twice in one object, need it once")
    return found
