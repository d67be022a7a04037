"""From what a draft's config says to the fields of DSparkConfig, and back: defaults of formats, what follows."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from .config_spellings import DRAFT, Found, Spellings, agreed, missing
from .config_values import MarkovKind, positive
from .rope_scaling import RopeParameters

if TYPE_CHECKING:
    from .config import DSparkConfig

ASSUMABLE = frozenset({"eps", "rope_theta", "rotary_dim", "is_neox_style"})
"""Fields that are filled when a draft's config lacks them, and are then named in ``assumed``."""
_EPS, _THETA = 1e-6, 1e6


def read_draft(found: Spellings) -> dict[str, Any]:
    """The fields of a :class:`DSparkConfig`. ``ValueError`` as its ``from_config`` says."""
    head_dim, num_layers = found.require("head_dim"), found.require("num_layers")
    eps, neox, rotary_dim = found.get("eps"), found.get("is_neox_style"), _rotary_dim(found, head_dim)
    rope, theta_given = _rope(found)
    given = {"eps": eps, "rope_theta": theta_given, "rotary_dim": rotary_dim, "is_neox_style": neox}
    kind, rank = _markov(found)
    confident = _confidence(found, rank)
    sample_from_anchor = _sample_from_anchor(found, rank)
    trained, gamma = _block(found, _block_counts_anchor(found, sample_from_anchor, rank))
    window, causal = _attention(found, num_layers)
    vocab_size, reduced_from = _vocabulary(found)
    return {
        "hidden_size": found.require("hidden_size"),
        "intermediate_size": found.require("intermediate_size"),
        "num_layers": num_layers,
        "num_heads": found.require("num_heads"),
        "num_kv_heads": found.require("num_kv_heads"),
        "head_dim": head_dim,
        "eps": _EPS if eps is None else eps,
        "rope": rope,
        "rotary_dim": head_dim if rotary_dim is None else rotary_dim,
        "is_neox_style": True if neox is None else neox,
        "max_position": found.require("max_position"),
        "vocab_size": vocab_size,
        "mask_token_id": found.require("mask_token_id"),
        "target_layer_ids": found.require("target_layer_ids"),
        "gamma": gamma,
        "trained_block": trained,
        "sample_from_anchor": sample_from_anchor,
        "causal": causal,
        "sliding_window": window,
        "markov_head": kind,
        "markov_rank": rank,
        "confidence_head": confident,
        "confidence_temperatures": found.get("confidence_temperatures") or (),
        "gemma_norm": bool(found.get("gemma_norm")),
        "assumed": frozenset(name for name, value in given.items() if value is None),
        "num_target_layers": found.get("num_target_layers"),
        "reduced_from": reduced_from,
    }


def _rope(found: Spellings) -> tuple[RopeParameters, float | None]:
    """The settings, in which a nested theta beats a flat one (F2-17), and the theta that was given, if any."""
    settings = {name: found.get(name) or {} for name in ("rope_parameters", "rope_scaling")}
    theta = found.get("rope_theta")
    given = next((one["rope_theta"] for one in settings.values() if "rope_theta" in one), theta)
    flat = {"original_max_position_embeddings": found.get("original_max_position")}
    return RopeParameters.from_config({**settings, **flat, "rope_theta": _THETA if theta is None else theta}), given


def _rotary_dim(found: Spellings, head_dim: int) -> int | None:
    """Rotated columns of a head: said as such, or as a part of head_dim, also within the RoPE settings."""

    def columns(key: str, factor: float) -> int:
        width = factor * head_dim
        if width != int(width):
            raise ValueError(f"{key}: got {factor}, need a whole number of the {head_dim} columns of head_dim")
        return int(width)

    def candidates() -> Iterator[Found]:
        yield from found.all("rotary_dim")
        for key, factor in found.all("partial_rotary_factor"):
            yield Found(key, columns(key, factor))
        for settings in (*found.all("rope_parameters"), *found.all("rope_scaling")):
            if "partial_rotary_factor" in settings.value:
                key = f"{settings.key}.partial_rotary_factor"
                yield Found(key, columns(key, positive(key, settings.value["partial_rotary_factor"])))

    width: int | None = agreed("rotary_dim", candidates())
    return width


def _markov(found: Spellings) -> tuple[MarkovKind | None, int]:
    """Kind and rank. Rank 0, or neither key: no head. A flat ``dspark_markov_rank`` alone means a vanilla head."""
    kind, rank = found.get("markov_head"), found.get("markov_rank")
    if rank is None and kind is not None:
        raise missing("markov_rank", DRAFT["markov_rank"])
    if not rank:
        return None, 0
    if kind is None and found.has("dspark_markov_rank"):
        kind = MarkovKind.VANILLA
    if kind is None:
        raise missing("markov_head", DRAFT["markov_head"])
    return kind, rank


def _confidence(found: Spellings, rank: int) -> bool:
    """Whether there is a confidence head. One that does not read the Markov embedding is refused."""
    if not found.get("confidence_head"):
        return False
    with_markov = found.get("confidence_head_with_markov")
    if not (rank > 0 if with_markov is None else with_markov):
        raise ValueError("confidence_head_with_markov: got False, need True and a Markov head")
    return True


def _is_dspark(found: Spellings, rank: int) -> bool:
    """Whether a DSpark trainer made this draft, not a DFlash one: their blocks differ where nothing is said."""
    speculators = found.get("speculators_model_type")
    if speculators is not None:
        return bool(speculators == "dspark")
    named = any("dspark" in one.lower() for one in found.get("architectures") or ())
    return rank > 0 or named or found.get("projector_type") == "dspark"


def _sample_from_anchor(found: Spellings, rank: int) -> bool:
    """What the config says; else true for DSpark, false for a DFlash draft of the speculators format, else unknown."""
    given: bool | None = found.get("sample_from_anchor")
    if given is not None:
        return given
    if _is_dspark(found, rank):
        return True
    if found.get("speculators_model_type") is not None:
        return False
    raise ValueError(
        "sample_from_anchor: missing, need true or false: DFlash drafts without a Markov head are in use in both block "
        "conventions"
    )


def _block_counts_anchor(found: Spellings, sample_from_anchor: bool, rank: int) -> bool:
    """Whether ``block_size`` counts the anchor's row, which predicts nothing: in DFlash and the speculators format."""
    speculators = found.get("speculators_model_type") is not None
    return not sample_from_anchor and (speculators or not _is_dspark(found, rank))


def _block(found: Spellings, counts_anchor: bool) -> tuple[int, int]:
    """Trained proposals and gamma. ``block_size`` is gamma where nothing else is, and what was trained likewise."""
    extra = 1 if counts_anchor else 0
    block, trained, gamma = found.get("block_size"), found.get("trained_block"), found.get("gamma")
    if block is None and trained is None:
        raise missing("block_size", [*DRAFT["block_size"], *DRAFT["trained_block"]])
    proposals = (trained if block is None else block) - extra
    most = (block if trained is None else trained) - extra
    if not 1 <= proposals <= most:
        raise ValueError(f"block_size: got {block or trained}, need {1 + extra} to {most + extra} rows")
    return most, proposals if gamma is None else gamma


def _attention(found: Spellings, num_layers: int) -> tuple[int | None, bool]:
    """Window and causality of the block, the same in every layer."""
    window = found.get("sliding_window")
    sliding = _sliding(found, num_layers, window)
    if sliding and window is None:
        raise missing("sliding_window", DRAFT["sliding_window"])
    return (window if sliding else None), _causal(found, sliding)


def _sliding(found: Spellings, num_layers: int, window: int | None) -> bool:
    """Whether the window applies: as the layer types say, else as the switches say, else when there is one."""
    kinds = found.get("layer_types")
    if kinds is None:
        switch: bool | None = agreed("use_sliding_window", [*found.all("use_sliding_window"), *found.all("use_swa")])
        return window is not None if switch is None else switch
    if len(kinds) != num_layers or len(set(kinds)) != 1 or kinds[0] not in ("full_attention", "sliding_attention"):
        raise ValueError(
            f"layer_types: got {list(kinds)}, need {num_layers} times full_attention or {num_layers} times "
            "sliding_attention"
        )
    sliding = bool(kinds[0] == "sliding_attention")
    # transformers writes use_sliding_window = true beside full layers where no layer is late enough to use its window.
    switches = [*found.all("use_swa"), *(found.all("use_sliding_window") if sliding else ())]
    agreed("use_sliding_window", [Found("layer_types", sliding), *switches])
    return sliding


def _causal(found: Spellings, sliding: bool) -> bool:
    """What the config says; else causal where a window slides, unless ``sliding_window_non_causal``."""
    given: bool | None = found.get("causal")
    non_causal = found.get("sliding_window_non_causal")
    if given is not None:
        if sliding and non_causal is not None and non_causal == given:
            raise ValueError(f"causal: got {given} beside sliding_window_non_causal = {non_causal}, need one value")
        return given
    return sliding and not non_causal


def _vocabulary(found: Spellings) -> tuple[int, int | None]:
    """Ids that the draft predicts, and the vocabulary that they are a selection of, if they are."""
    whole, drafted = found.require("vocab_size"), found.get("draft_vocab_size")
    if drafted is None or drafted == whole:
        return whole, None
    if drafted > whole:
        raise ValueError(f"draft_vocab_size: got {drafted}, need at most vocab_size, which is {whole}")
    return drafted, whole


def write_draft(config: DSparkConfig) -> dict[str, Any]:
    """The canonical spelling: plain names, nothing that was assumed, no absent field."""
    sliding = config.sliding_window is not None
    spelled = {
        "architectures": ["DSparkDraftModel"],
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": None if "eps" in config.assumed else config.eps,
        "use_gemma_norm": config.gemma_norm,
        "rope_parameters": _write_rope(config),
        "rotary_dim": None if "rotary_dim" in config.assumed else config.rotary_dim,
        "rope_is_neox_style": None if "is_neox_style" in config.assumed else config.is_neox_style,
        "max_position_embeddings": config.max_position,
        "vocab_size": config.prev_vocab_size,
        "draft_vocab_size": None if config.reduced_from is None else config.vocab_size,
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.target_layer_ids),
        "num_target_layers": config.num_target_layers,
        "block_size": config.trained_block,
        "num_speculative_tokens": config.gamma,
        "sample_from_anchor": config.sample_from_anchor,
        "is_causal": config.causal,
        "layer_types": ["sliding_attention" if sliding else "full_attention"] * config.num_layers,
        "sliding_window": config.sliding_window,
        "markov_head_type": None if config.markov_head is None else str(config.markov_head),
        "markov_rank": config.markov_rank,
        "enable_confidence_head": config.confidence_head,
        "confidence_head_with_markov": config.confidence_head,
        "confidence_temperatures": list(config.confidence_temperatures) or None,
    }
    return {key: value for key, value in spelled.items() if value is not None}


def _write_rope(config: DSparkConfig) -> dict[str, Any]:
    names = {"theta": "rope_theta", "original_max_position": "original_max_position_embeddings"}
    plain = RopeParameters(config.rope.theta)
    changed = {
        names.get(field.name, field.name): getattr(config.rope, field.name)
        for field in dataclasses.fields(plain)
        if field.name != "scaling" and getattr(config.rope, field.name) != getattr(plain, field.name)
    }
    theta = {} if "rope_theta" in config.assumed else {"rope_theta": config.rope.theta}
    return {"rope_type": str(config.rope.scaling), **theta, **changed}
