"""How configs in use spell the fields of a draft and of its target: one table, and one lookup that refuses conflicts.

A field may stand at the top level as plain Hugging Face name, there with the prefix ``dspark_`` or ``dflash_``, and in
a mapping ``dspark_config`` or ``dflash_config``; the whole backbone may be nested in ``transformer_layer_config`` or
``text_config``. A null is the same as an absent key. Values that differ between two spellings are an error; so is a key
of the draft's own namespaces that this table does not know.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from .config_values import Reader, flag, hooked_before, inverted, listed, markov_kind, positive, rope, text, whole

BACKBONE: dict[str, dict[str, Reader]] = {
    "hidden_size": {"hidden_size": whole(1)},
    "num_layers": {"num_hidden_layers": whole(1)},
    "vocab_size": {"vocab_size": whole(1)},
}
TARGET: dict[str, dict[str, Reader]] = {
    **BACKBONE,
    "padded_vocab_size": {"padded_vocab_size": whole(1)},
    "unpadded_vocab_size": {"unpadded_vocab_size": whole(1)},
    "logits_mup_width_multiplier": {"logits_mup_width_multiplier": positive},
}
DRAFT: dict[str, dict[str, Reader]] = {
    **BACKBONE,
    "intermediate_size": {"intermediate_size": whole(1)},
    "num_heads": {"num_attention_heads": whole(1)},
    "num_kv_heads": {"num_key_value_heads": whole(1)},
    "head_dim": {"head_dim": whole(1)},
    "eps": {"rms_norm_eps": positive, "norm_eps": positive},
    "gemma_norm": {"use_gemma_norm": flag},
    "rope_theta": {"rope_theta": positive},
    "rope_parameters": {"rope_parameters": rope},
    "rope_scaling": {"rope_scaling": rope},
    "original_max_position": {"original_max_position_embeddings": whole(1)},
    "rotary_dim": {"rotary_dim": whole(2)},
    "partial_rotary_factor": {"partial_rotary_factor": positive},
    "is_neox_style": {"rope_is_neox_style": flag, "is_neox_style": flag, "rope_interleave": inverted},
    "max_position": {"max_position_embeddings": whole(1), "model_max_length": whole(1)},
    "draft_vocab_size": {"draft_vocab_size": whole(1)},
    "mask_token_id": {"mask_token_id": whole(0), "noise_token_id": whole(0), "pard_token": whole(0)},
    "target_layer_ids": {
        "target_layer_ids": listed(whole(0)),
        "aux_hidden_state_layer_ids": hooked_before,
        "eagle_aux_hidden_state_layer_ids": hooked_before,
    },
    "num_target_layers": {"num_target_layers": whole(1)},
    "gamma": {"num_speculative_tokens": whole(1), "speculative_tokens": whole(1), "gamma": whole(1)},
    "block_size": {"block_size": whole(1)},
    "trained_block": {"training_block_size": whole(1), "trained_block": whole(1)},
    "sample_from_anchor": {"sample_from_anchor": flag, "bonus_anchor": inverted, "shift_label": flag},
    "causal": {"causal": flag, "is_causal": flag, "query_causal": flag, "causal_head": flag},
    "sliding_window_non_causal": {"sliding_window_non_causal": flag},
    "layer_types": {"layer_types": listed(text)},
    "sliding_window": {"sliding_window": whole(1), "swa_window_size": whole(1)},
    "use_sliding_window": {"use_sliding_window": flag},
    "use_swa": {"use_swa": flag},
    "markov_head": {"markov_head_type": markov_kind},
    "markov_rank": {"markov_rank": whole(0)},
    "confidence_head": {"enable_confidence_head": flag, "use_confidence_head": flag, "confidence_head": flag},
    "confidence_head_with_markov": {"confidence_head_with_markov": flag},
    "confidence_temperatures": {"confidence_temperatures": listed(positive), "sts_temperatures": listed(positive)},
    "projector_type": {"projector_type": text},
    "speculators_model_type": {"speculators_model_type": text},
    "architectures": {"architectures": listed(text)},
}
FIXED: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False,),
    "attention_mode": ("gqa",),
    "attention_sink_bias": (False,),
    "attention_value_scale": (1.0,),
    "enable_qwen35_gated_q_proj": (False,),
    "fc_layernorm": (False,),
    "final_logit_softcapping": (0.0,),
    "fixup_head_type": ("markov",),
    "hidden_act": ("silu", "swish"),
    "hidden_activation": ("silu", "swish"),
    "kv_lora_rank": (),
    "log_snr_conditioning": (False,),
    "mlp_bias": (False,),
    "output_multiplier": (1.0,),
    "projector_type": ("dspark",),
    "q_lora_rank": (),
    "speculators_model_type": ("dspark", "dflash"),
}
"""Keys that change what a draft computes, and the values under which it computes what this package does."""
FIXED_OWN: dict[str, tuple[Any, ...]] = {
    "backbone_conv_enabled": (False,),
    "conv_group_size": (0,),
    "conv_kernel_size": (0,),
    "selector_rank": (0,),
    "selector_top_k": (0,),
}
"""The same for keys that say something else outside the draft's own namespaces."""
INERT = frozenset({"confidence_head_alpha", "confidence_threshold", "mask_token", "max_anchors", "num_anchors"})
"""Keys of the draft's own namespaces that change nothing: knobs of training and scheduling, and the mask's text."""

OWN = ("dspark", "dflash")
PLACES = "plain, with the prefix dspark_ or dflash_, in dspark_config or in dflash_config"


class Found(NamedTuple):
    """A value and where it stood."""

    key: str
    value: Any


class Source(NamedTuple):
    """A mapping of the config; ``prefix`` + key is how a key is written in messages."""

    prefix: str
    values: Mapping[str, Any]
    own: bool
    """One of the draft's own namespaces, in which an unknown key is an error."""


class Spellings:
    """One config, asked for fields by their canonical names."""

    def __init__(self, table: Mapping[str, Mapping[str, Reader]], sources: Iterable[Source]) -> None:
        self._table, self._sources = table, tuple(sources)

    @classmethod
    def of_target(cls, config: Mapping[str, Any]) -> Spellings:
        """A target: the top level and ``text_config``."""
        return cls(TARGET, [Source("", config, False), *_nested("", config, ("text_config",), False)])

    @classmethod
    def of_draft(cls, config: Mapping[str, Any]) -> Spellings:
        """A draft. ``ValueError`` for a key that is unknown, or that asks for what this package does not compute.

        ``text_config`` is the draft's only where the top level has no backbone; else it is a copy of the target's,
        which decides nothing (fault F2-7).
        """
        inner = (
            ("transformer_layer_config",) if "hidden_size" in config else ("transformer_layer_config", "text_config")
        )
        containers = [Source("", config, False), *_nested("", config, inner, False)]
        found = cls(DRAFT, [source for container in containers for source in (container, *_own(container))])
        found._refuse_unknown()
        found._refuse_unsupported()
        return found

    def all(self, name: str) -> Iterator[Found]:
        """Every place in which field ``name`` stands."""
        for source in self._sources:
            for spelling, read in self._table[name].items():
                value = source.values.get(spelling)
                if value is not None:
                    key = source.prefix + spelling
                    yield Found(key, read(key, value))

    def get(self, name: str) -> Any:
        """The value of field ``name``, or None. ``ValueError`` names two keys with different values."""
        return agreed(name, self.all(name))

    def require(self, name: str) -> Any:
        """The value of field ``name``; ``ValueError`` with the accepted spellings when it is missing."""
        value = self.get(name)
        if value is None:
            raise missing(name, self._table[name])
        return value

    def has(self, key: str) -> bool:
        """Whether a key that is written exactly so has a value."""
        return any(
            source.prefix + name == key and value is not None
            for source in self._sources
            for name, value in source.values.items()
        )

    def _refuse_unknown(self) -> None:
        known = {spelling for spellings in self._table.values() for spelling in spellings}
        known |= {*FIXED, *FIXED_OWN, *INERT}
        for source in self._sources:
            for name in source.values if source.own else ():
                if name not in known:
                    close = difflib.get_close_matches(str(name), sorted(known), 1)
                    hint = f"; the nearest known is {source.prefix}{close[0]}" if close else ""
                    raise ValueError(f"{source.prefix}{name}: unknown key{hint}")

    def _refuse_unsupported(self) -> None:
        for source in self._sources:
            for name, allowed in {**FIXED, **(FIXED_OWN if source.own else {})}.items():
                value = source.values.get(name)
                if value is not None and not any(_same(value, one) for one in allowed):
                    need = " or ".join([*map(repr, allowed), "no such key"])
                    raise ValueError(f"{source.prefix}{name}: got {value!r}, need {need}: nothing else is implemented")


def agreed(name: str, found: Iterable[Found]) -> Any:
    """The one value of ``found``, or None of nothing; ``ValueError`` naming both keys where two differ."""
    first: Found | None = None
    for one in found:
        if first is None:
            first = one
        elif one.value != first.value:
            raise ValueError(
                f"{name}: got {first.value!r} from {first.key} and {one.value!r} from {one.key}, need one value"
            )
    return None if first is None else first.value


def missing(name: str, spellings: Iterable[str]) -> ValueError:
    """The error of a field that no spelling gives."""
    return ValueError(f"{name}: missing, need {' or '.join(spellings)} ({PLACES})")


def _same(value: Any, allowed: Any) -> bool:
    return isinstance(value, bool) == isinstance(allowed, bool) and bool(value == allowed)


def _nested(prefix: str, values: Mapping[str, Any], names: Iterable[str], own: bool) -> Iterator[Source]:
    for name in names:
        value = values.get(name)
        if value is not None:
            if not isinstance(value, Mapping):
                raise ValueError(f"{prefix}{name}: got {value!r}, need a mapping")
            yield Source(f"{prefix}{name}.", value, own)


def _own(container: Source) -> Iterator[Source]:
    """The namespaces of the draft in one container: flat prefixes and nested mappings."""
    nested = tuple(f"{namespace}_config" for namespace in OWN)
    for namespace in OWN:
        prefix = f"{namespace}_"
        flat = {
            key.removeprefix(prefix): value
            for key, value in container.values.items()
            if key.startswith(prefix) and key not in nested
        }
        yield Source(container.prefix + prefix, flat, True)
    yield from _nested(container.prefix, container.values, nested, True)
