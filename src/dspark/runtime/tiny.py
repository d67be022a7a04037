"""The tiny Inkling and its draft that ship with the package: bytes in, bytes out."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import torch

from dspark.model.checkpoint import load_draft
from dspark.model.draft import DSparkDraftModel
from dspark.runtime.target import TinyInkling

END = 256
"""The id after the last byte of a text; ids below it are bytes."""


class MissingWeightsError(FileNotFoundError):
    """The package was installed without its weights."""


def weights_folder() -> Path:
    """``data/tiny_inkling`` of the package: ``target/`` and ``draft/``, each with ``config.json`` and safetensors."""
    return Path(str(resources.files("dspark").joinpath("data", "tiny_inkling")))


def load_tiny_inkling(
    folder: str | Path | None = None, *, device: torch.device | str = "cpu"
) -> tuple[TinyInkling, DSparkDraftModel]:
    """The target, tapped as the draft needs it, and the draft, bound to it. folder: None: the package's own.

    :class:`MissingWeightsError` names the first file that is not there; ``ValueError`` for one that does not fit.
    """
    place = weights_folder() if folder is None else Path(folder)
    for part in ("target", "draft"):
        for name in ("config.json", "model.safetensors"):
            if not (place / part / name).is_file():
                raise MissingWeightsError(f"{place / part / name}: not found, so there is no tiny Inkling to run")
    target = TinyInkling.load(place / "target", device=device)
    config = target.config.target_config()
    draft = load_draft(place / "draft", config, target.embed_tokens, target.lm_head, device=device)
    target.target_layer_ids = draft.config.target_layer_ids
    return target, draft


def to_tokens(text: bytes) -> list[int]:
    """One token per byte."""
    return list(text)


def to_bytes(tokens: list[int]) -> bytes:
    """The bytes among ``tokens``; ids that are no bytes have no text."""
    return bytes(token for token in tokens if token < END)
