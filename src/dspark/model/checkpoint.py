"""Reading and writing draft checkpoints: safetensors, single or sharded, every tensor accounted for (fault F1-26).

A tensor is copied as it comes, so a reader may use one buffer for all of them. What a checkpoint holds beyond the
model's tensors is an error, as are tensors that are missing, come twice, or have another shape or dtype; what is to be
left out is named by the caller. The target's own head and embedding, which many checkpoints carry along, are compared
with the target's (conformance/CONTRACTS.md section 10).
"""

from __future__ import annotations

import fnmatch
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from dspark.model.checkpoint_names import EMBEDDING, LM_HEAD, TARGET_MASK, Coverage, canonical, pieces, places, rows_of
from dspark.model.config import DSparkConfig, TargetConfig
from dspark.model.draft import DSparkDraftModel, Shared
from dspark.model.head_scale import METADATA_KEY, CheckpointError, HeadScale, require_same_embedding, require_same_head
from dspark.model.norm import RMSNorm

logger = logging.getLogger("dspark")

FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
WIDENED = {torch.float32: (torch.bfloat16, torch.float16), torch.int64: (torch.int32,)}
"""Dtypes that a parameter takes without loss, beside its own."""


@dataclass(frozen=True)
class LoadReport:
    """Names of a checkpoint's tensors, as it spells them: each is in exactly one of the three.

    loaded: copied into the model. compared: the target's, found equal. skipped: named by the caller.
    """

    loaded: tuple[str, ...]
    compared: tuple[str, ...]
    skipped: tuple[str, ...]


def load_draft(
    folder: str | Path,
    target: TargetConfig,
    embed_tokens: Any,
    lm_head: Any,
    *,
    skip: Sequence[str] = (),
    rotary: Any = None,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str | None = None,
) -> DSparkDraftModel:
    """The draft of a folder with ``config.json`` and safetensors, bound to the target's embedding and head.

    skip: as for :func:`load_weights`. rotary, dtype, device: as for :class:`DSparkDraftModel`.
    ``ValueError`` for a config that is wrong or does not fit; :class:`CheckpointError` for the tensors.
    """
    folder = Path(folder)
    model = DSparkDraftModel(DSparkConfig.from_file(folder), target, rotary=rotary, dtype=dtype, device=device)
    model.bind(embed_tokens, lm_head)
    files = tensor_files(folder)
    load_weights(model, read_tensors(files), skip=skip, head_scale=read_head_scale(files))
    return model.eval().requires_grad_(False)


def tensor_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder: ``model.safetensors``, or the shards of its index, in order of their names."""
    index, single = folder / INDEX, folder / FILE
    if single.is_file() and index.is_file():
        raise CheckpointError(f"{folder}: got {FILE} and {INDEX}, need one of them")
    if single.is_file():
        return [single]
    if not index.is_file():
        raise CheckpointError(f"{folder}: got neither {FILE} nor {INDEX}")
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        shards = sorted(set(weight_map.values()))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise CheckpointError(f"{index}: need a JSON object with a weight_map of tensor names to files") from None
    listed: dict[str, set[str]] = {shard: set() for shard in shards}
    for name, shard in weight_map.items():
        listed[shard].add(name)
    for shard, names in listed.items():
        if Path(shard).name != shard:
            raise CheckpointError(f"{index}: got {shard!r}, need the name of a file beside the index")
        with _opened(folder / shard) as file:
            differing = sorted(names ^ set(file.keys()))
        if differing:
            raise CheckpointError(f"{differing[0]}: {INDEX} and {shard} disagree on whether it is there")
    return [folder / shard for shard in shards]


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: {error}") from error


def read_tensors(files: Sequence[Path]) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and tensors of the files, one at a time, on the CPU."""
    for path in files:
        with _opened(path) as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                yield name, file.get_tensor(name)


def read_head_scale(files: Sequence[Path]) -> HeadScale | None:
    """The fingerprint in the files' metadata, if one has it; two that differ are a :class:`CheckpointError`."""
    texts: set[str] = set()
    for path in files:
        with _opened(path) as file:
            texts |= {value for key, value in (file.metadata() or {}).items() if key == METADATA_KEY}
    if len(texts) > 1:
        raise CheckpointError(f"{METADATA_KEY}: got {len(texts)} fingerprints that differ, need one")
    return HeadScale.from_text(texts.pop()) if texts else None


@torch.no_grad()
def load_weights(
    model: DSparkDraftModel,
    weights: Iterable[tuple[str, torch.Tensor]],
    *,
    skip: Sequence[str] = (),
    head_scale: HeadScale | None = None,
) -> LoadReport:
    """Copy every tensor of ``weights`` into ``model``; a tensor is not used again once the next one is asked for.

    Names may begin with a known prefix; Q, K, V and gate, up may be separate or packed; ``confidence_head.weight`` is
    ``confidence_head.proj.weight`` (``checkpoint_names``). A dtype must be the model's, or widen to it (``WIDENED``).
    Norms of a ``gemma_norm`` config are read as w and kept as 1 + w (fault F2-12).
    skip: names as the checkpoint spells them, or patterns as of ``fnmatch``; nothing else is ever left out.

    The scale guard: ``lm_head.weight`` and the fingerprint ``head_scale`` must be those of the target's head; one
    WARNING when there is neither, or nothing to compare with. ``embed_tokens.weight`` must be the target's.

    Raises :class:`CheckpointError` by name: unknown, duplicate or missing tensor, shape, dtype, another head or
    embedding. The model is then left partly loaded.
    """
    where, tensors, coverage = places(model), model.state_dict(), Coverage()
    norms = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, RMSNorm)}
    comparisons = _comparisons(model)
    loaded: list[str] = []
    compared: dict[str, str] = {}
    held: list[tuple[str, torch.Tensor]] = []
    skipped: list[str] = []
    for name, tensor in weights:
        plain = canonical(name)
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in skip):
            skipped.append(name)
        elif plain in comparisons:
            if plain in compared:
                raise CheckpointError(f"{name}: duplicate, {compared[plain]} came before")
            compared[plain] = name
            if model.d2t is None or plain == EMBEDDING:
                comparisons[plain](name, tensor)
            else:  # What the map says is known when it was loaded; the head of a reduced vocabulary is small.
                held.append((plain, tensor.clone()))
        elif plain in where:
            place = where[plain]
            coverage.add(place, name)
            _copy(rows_of(tensors, place), name, tensor, one_plus=model.config.gemma_norm and place.target in norms)
            loaded.append(name)
        else:
            raise CheckpointError(f"{name}: unknown, no tensor of the model has this name; name it in skip if meant")
    if missing := coverage.missing(model):
        raise CheckpointError(f"{missing[0]}: missing, the first of {len(missing)}: {', '.join(missing[:8])}")
    try:
        model.refresh_vocabulary()
    except ValueError as error:
        raise CheckpointError(f"d2t: {error}") from error
    for plain, tensor in held:
        comparisons[plain](compared[plain], tensor)
    _guard_scale(model, head_scale, own_head=LM_HEAD in compared)
    return LoadReport(tuple(loaded), tuple(compared.values()), tuple(skipped))


def _copy(rows: torch.Tensor, name: str, tensor: torch.Tensor, *, one_plus: bool) -> None:
    if tensor.shape != rows.shape:
        raise CheckpointError(f"{name}: got shape {tuple(tensor.shape)}, need {tuple(rows.shape)}")
    if tensor.dtype != rows.dtype and tensor.dtype not in WIDENED.get(rows.dtype, ()):
        raise CheckpointError(
            f"{name}: got {tensor.dtype}, need {rows.dtype}, or what widens to it without loss: load with another "
            "dtype, or convert the checkpoint"
        )
    rows.copy_(1 + tensor.to(rows.dtype) if one_plus else tensor)


def _comparisons(model: DSparkDraftModel) -> dict[str, Callable[[str, torch.Tensor], None]]:
    """For each tensor that is not the draft's own: what its values must be."""

    def shared(name: str) -> Shared:
        if model.shared is None:
            raise CheckpointError(f"{name}: nothing to compare it with, bind the target's embedding and head first")
        return model.shared

    def head(name: str, tensor: torch.Tensor) -> None:
        ids = torch.arange(model.target.vocab_size)
        if model.d2t is not None:
            ids = torch.arange(len(model.d2t)) + model.d2t.cpu()
        if tensor.dim() != 2 or tensor.shape[1] != model.target.hidden_size or tensor.shape[0] < len(ids):
            need = f"[>= {len(ids)}, {model.target.hidden_size}]"
            raise CheckpointError(f"{name}: got shape {tuple(tensor.shape)}, need {need}")
        require_same_head(name, tensor[: len(ids)], ids, shared(name).lm_head, model.target)

    def embedding(name: str, tensor: torch.Tensor) -> None:
        ids = torch.cat([torch.arange(model.target.vocab_size), torch.tensor([model.config.mask_token_id])]).unique()
        require_same_embedding(name, tensor, shared(name).embed_tokens, ids)

    def mask(name: str, tensor: torch.Tensor) -> None:
        assert model.vocabulary is not None
        if tensor.dim() != 1 or not torch.equal(tensor.nonzero()[:, 0].cpu(), model.vocabulary.target_ids.cpu()):
            raise CheckpointError(f"{name}: got other ids than those that d2t maps to")

    found: dict[str, Callable[[str, torch.Tensor], None]] = {LM_HEAD: head, EMBEDDING: embedding}
    return found if model.d2t is None else {**found, TARGET_MASK: mask}


def _guard_scale(model: DSparkDraftModel, head_scale: HeadScale | None, *, own_head: bool) -> None:
    served = HeadScale.of(model.shared.lm_head, model.target) if model.shared is not None else None
    if head_scale is not None and served is not None:
        head_scale.require(served)
    elif not own_head:
        what = "neither a head of its own nor a fingerprint of the head's scale"
        if head_scale is not None:
            what = "a fingerprint of the head's scale, but the target's head cannot be read to compare it"
        logger.warning(
            "draft checkpoint: %s: the scale of the base logits rests on the config (logits_mup_width_multiplier %s)",
            what,
            model.target.logits_mup_width_multiplier,
        )


def save_draft(model: DSparkDraftModel, folder: str | Path) -> None:
    """Write ``config.json`` and ``model.safetensors``, which :func:`load_draft` reads back bit for bit.

    Q, K, V and gate, up are written as separate tensors, the spelling that every reader knows; norms of a
    ``gemma_norm`` config as w in fp32. The fingerprint of the bound head (:class:`HeadScale`) goes into the file's
    metadata under ``dspark_head_scale``. :class:`CheckpointError` for a model that is not bound, and for a norm whose
    w does not give the same 1 + w back.
    """
    if model.shared is None:
        raise CheckpointError("head: nothing to take a fingerprint of, call bind(embed_tokens, lm_head) before saving")
    scale = HeadScale.of(model.shared.lm_head, model.target)
    if scale is None:
        logger.warning("draft checkpoint: the target's head cannot be read, no fingerprint of its scale is written")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(model.config.to_config(), indent=2) + "\n", encoding="utf-8")
    metadata = {"format": "pt"} | ({} if scale is None else {METADATA_KEY: scale.to_text()})
    save_file(written_tensors(model), folder / FILE, metadata=metadata)


def written_tensors(model: DSparkDraftModel) -> dict[str, torch.Tensor]:
    """Copies of the model's tensors on the CPU, as a checkpoint spells and holds them."""
    parts, found = pieces(model), {}
    tensors = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    for name, tensor in tensors.items():
        for piece, place in parts.get(name, {}).items():
            found[piece] = rows_of(tensors, place)
        if name not in parts:
            found[name] = tensor
    if model.config.gemma_norm:
        for name, module in model.named_modules():
            if isinstance(module, RMSNorm):
                found[f"{name}.weight"] = _less_one(f"{name}.weight", module.weight.detach())
    return {name: tensor.to("cpu", copy=True).contiguous() for name, tensor in found.items()}


def _less_one(name: str, weight: torch.Tensor) -> torch.Tensor:
    less = weight - 1
    if not torch.equal(1 + less, weight):
        raise CheckpointError(f"{name}: got multipliers that no w of 1 + w gives; save with gemma_norm false")
    return less
