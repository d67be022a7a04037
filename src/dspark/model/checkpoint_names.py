"""Where each tensor of a draft's checkpoint belongs: the spellings in use, and which rows of a parameter each fills."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn

from dspark.model.attention import DFlashAttention
from dspark.model.head_scale import CheckpointError
from dspark.model.mlp import GatedMLP

PREFIXES = ("language_model.model.dspark.", "model.dspark.", "dspark.", "draft_model.", "model.")
"""What a name may begin with, longest first; one of them is taken off."""
ALIASES = {
    "encoder.fc.weight": "fc.weight",
    "encoder.output_norm_enc.weight": "hidden_norm.weight",
    "final_norm.weight": "norm.weight",
    "confidence_head.weight": "confidence_head.proj.weight",
    "confidence_head.bias": "confidence_head.proj.bias",
    "draft_id_to_target_id": "d2t",
}
"""Whole names that mean another one, after the prefix."""
LM_HEAD, EMBEDDING, TARGET_MASK = "lm_head.weight", "embed_tokens.weight", "t2d"
"""What the draft does not own, compared and not loaded: the target's tensors, and the inverse of a map ``d2t``."""


def canonical(name: str) -> str:
    """The name that :func:`places` knows; a name in no known spelling stays as it is."""
    for prefix in PREFIXES:
        if name.startswith(prefix):
            name = name.removeprefix(prefix)
            break
    if name.startswith("layers."):
        name = name.replace(".decoder_layer.", ".", 1)
    return ALIASES.get(name, name)


@dataclass(frozen=True)
class Place:
    """Rows ``start .. stop - 1`` of the parameter or buffer ``target``."""

    target: str
    start: int
    stop: int


def pieces(model: nn.Module) -> dict[str, dict[str, Place]]:
    """For each packed parameter of ``model`` the separate tensors that make it up, in the order of its rows."""
    found: dict[str, dict[str, Place]] = {}
    for prefix, module in model.named_modules():
        if isinstance(module, DFlashAttention):
            packed, sizes = "qkv_proj", {"q_proj": module.q_size, "k_proj": module.kv_size, "v_proj": module.kv_size}
        elif isinstance(module, GatedMLP):
            half = module.gate_up_proj.out_features // 2
            packed, sizes = "gate_up_proj", {"gate_proj": half, "up_proj": half}
        else:
            continue
        target, start = f"{prefix}.{packed}.weight", 0
        found[target] = {}
        for piece, size in sizes.items():
            found[target][f"{prefix}.{piece}.weight"] = Place(target, start, start + size)
            start += size
    return found


def places(model: nn.Module) -> dict[str, Place]:
    """The canonical name of every tensor that a checkpoint of ``model`` may hold, packed or in pieces."""
    found = {name: Place(name, 0, len(tensor)) for name, tensor in model.state_dict().items()}
    for parts in pieces(model).values():
        found |= parts
    return found


@dataclass
class Coverage:
    """Which rows of which tensor were filled, and by which tensors of the checkpoint."""

    filled: dict[str, list[tuple[Place, str]]] = field(default_factory=dict)

    def add(self, place: Place, name: str) -> None:
        """``CheckpointError`` when another tensor has filled one of the rows."""
        others = self.filled.setdefault(place.target, [])
        for other, other_name in others:
            if place.start < other.stop and other.start < place.stop:
                raise CheckpointError(f"{name}: duplicate, {other_name} has filled {place.target} already")
        others.append((place, name))

    def missing(self, model: nn.Module) -> list[str]:
        """Names of what nothing has filled: pieces where some of them came, else the whole."""
        absent: list[str] = []
        parts = pieces(model)
        for target in model.state_dict():
            got = [place for place, _ in self.filled.get(target, [])]
            if not got:
                absent.append(target)
            elif got[0] in parts.get(target, {}).values():
                absent += [name for name, place in parts[target].items() if place not in got]
        return absent


def rows_of(tensors: dict[str, torch.Tensor], place: Place) -> torch.Tensor:
    """The rows of a place, as a view."""
    return tensors[place.target][place.start : place.stop]
