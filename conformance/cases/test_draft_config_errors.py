"""Configs of drafts that are refused: unknown, missing, wrong or not implemented, each named (section 10)."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from dspark.model.config import DSparkConfig

from ..fixtures.configs import WINDOW, changed
from ..fixtures.ledger import Label, expect_equal, expect_raises

LABEL = Label("config", "-")


def parsed(**changes: Any) -> DSparkConfig:
    """A real draft with ``changes`` of its config."""
    return DSparkConfig.from_config(changed(**changes))


def dflash(**changes: Any) -> dict[str, Any]:
    return {"architectures": ["DFlashDraftModel"], "markov_rank": 0, "enable_confidence_head": False, **changes}


REFUSED: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "F1-15-a-convention-that-nothing-tells": (("sample_from_anchor", "missing"), dflash()),
    "F1-15-an-unknown-convention": (("sample_from_anchor", "'maybe'"), {"sample_from_anchor": "maybe"}),
    "F1-15-a-convention-that-is-a-number": (("sample_from_anchor", "1"), {"sample_from_anchor": 1}),
    "F1-15-another-projector": (
        ("dflash_config.projector_type", "'domino'"),
        {"dflash_config": {"projector_type": "domino"}},
    ),
    "F1-15-another-speculator": (("speculators_model_type", "'eagle3'"), {"speculators_model_type": "eagle3"}),
    "an-architecture-that-is-a-number": (("architectures", "need a string"), {"architectures": [7]}),
    "F1-4-no-taps": (("target_layer_ids", "[]"), {"target_layer_ids": []}),
    "F1-4-taps-descend": (("target_layer_ids", "[3, 1]"), {"target_layer_ids": [3, 1]}),
    "F1-4-a-tap-twice": (("target_layer_ids", "[1, 1]"), {"target_layer_ids": [1, 1]}),
    "F1-4-a-negative-tap": (("target_layer_ids[0]", "-1"), {"target_layer_ids": [-1, 3]}),
    "F1-4-the-embedding-as-a-tap": (
        ("aux_hidden_state_layer_ids[0]", "0"),
        {"target_layer_ids": None, "aux_hidden_state_layer_ids": [0, 3]},
    ),
    "F1-4-a-bool-tap": (("target_layer_ids[1]", "True"), {"target_layer_ids": [0, True]}),
    "F1-4-a-fractional-tap": (("target_layer_ids[1]", "3.0"), {"target_layer_ids": [1, 3.0]}),
    "F1-4-taps-that-are-a-number": (("target_layer_ids", "3"), {"target_layer_ids": 3}),
    "F1-4-a-tap-beyond-the-target": (
        ("target_layer_ids", "36"),
        {"target_layer_ids": [1, 36], "num_target_layers": 36},
    ),
    "F1-16-no-mask": (("mask_token_id", "noise_token_id", "missing"), {"mask_token_id": None, "pad_token_id": 0}),
    "F1-16-only-the-text-of-the-mask": (
        ("mask_token_id", "missing"),
        {"mask_token_id": None, "dflash_config": {"mask_token": "<|MASK|>"}},
    ),
    "F1-16-a-bool-mask": (("mask_token_id", "True"), {"mask_token_id": True}),
    "F1-16-a-fractional-mask": (("mask_token_id", "1.0"), {"mask_token_id": 1.0}),
    "F1-16-a-negative-mask": (("mask_token_id", "-1"), {"mask_token_id": -1}),
    "F1-16-a-mask-in-words": (("dspark_noise_token_id", "'9'"), {"mask_token_id": None, "dspark_noise_token_id": "9"}),
    "F2-17-unknown-scaling": (("rope_type", "'dynamic'"), {"rope_scaling": {"type": "dynamic", "factor": 2.0}}),
    "F2-17-two-nested-ropes": (
        ("rope_parameters", "rope_scaling"),
        {"rope_parameters": {"rope_theta": 1e6}, "rope_scaling": {"rope_theta": 1e4}},
    ),
    "rope-for-each-layer-type": (
        ("rope_parameters", "full_attention"),
        {"rope_parameters": {"full_attention": {"rope_theta": 1e6}, "rope_theta": None}},
    ),
    "rope-that-is-no-mapping": (("rope_scaling", "'yarn'"), {"rope_scaling": "yarn"}),
    "gamma-beyond-the-trained-block": (("gamma", "8", "7"), {"num_speculative_tokens": 8}),
    "block-beyond-the-trained-block": (("block_size", "7", "5"), {"training_block_size": 5}),
    "a-block-of-an-anchor-alone": (("block_size", "1", "2"), dflash(sample_from_anchor=False, block_size=1)),
    "no-block": (("block_size", "trained_block", "missing"), {"block_size": None}),
    "zero-gamma": (("num_speculative_tokens", "0"), {"num_speculative_tokens": 0}),
    "unknown-markov-head": (("markov_head_type", "'lstm'", "vanilla, gated, rnn"), {"markov_head_type": "lstm"}),
    "another-fixup-head": (("dspark_fixup_head_type", "'gru'"), {"dspark_fixup_head_type": "gru"}),
    "a-rank-without-a-kind": (("markov_head_type", "missing"), {"markov_head_type": None}),
    "a-nested-rank-without-a-kind": (
        ("markov_head_type", "missing"),
        {"markov_head_type": None, "markov_rank": None, "dspark_config": {"markov_rank": 256}},
    ),
    "a-kind-without-a-rank": (("markov_rank", "missing"), {"markov_rank": None}),
    "a-negative-rank": (("markov_rank", "-1"), {"markov_rank": -1}),
    "confidence-without-the-markov-embedding": (
        ("confidence_head_with_markov", "False"),
        {"confidence_head_with_markov": False},
    ),
    "confidence-without-a-markov-head": (
        ("confidence_head_with_markov",),
        {"markov_rank": 0, "confidence_head_with_markov": None},
    ),
    "confidence-that-claims-a-markov-head": (("confidence_head", "Markov"), {"markov_rank": 0}),
    "too-few-temperatures": (("confidence_temperatures", "6"), {"confidence_temperatures": [1.0] * 6}),
    "too-many-temperatures": (("confidence_temperatures", "8"), {"confidence_temperatures": [1.0] * 8}),
    "temperatures-without-a-head": (
        ("confidence_temperatures", "7"),
        {"confidence_temperatures": [1.0] * 7, "enable_confidence_head": False},
    ),
    "a-zero-temperature": (("confidence_temperatures[6]", "0"), {"confidence_temperatures": [1.0] * 6 + [0]}),
    "a-negative-temperature": (("confidence_temperatures[0]", "-1.0"), {"confidence_temperatures": [-1.0] * 7}),
    "a-window-without-a-width": (("sliding_window", "missing"), {"layer_types": ["sliding_attention"] * 5}),
    "a-switched-on-window-without-a-width": (("sliding_window", "missing"), {"dflash_config": {"use_swa": True}}),
    "a-window-of-nothing": (("sliding_window", "0"), {"sliding_window": 0}),
    "mixed-layers": (
        ("layer_types", "full_attention"),
        {**WINDOW, "layer_types": ["sliding_attention"] * 4 + ["full_attention"]},
    ),
    "too-few-layer-types": (("layer_types", "5 times"), {"layer_types": ["full_attention"] * 4}),
    "unknown-layer-type": (("layer_types", "'linear_attention'"), {"layer_types": ["linear_attention"] * 5}),
    "causal-both-ways": (
        ("causal", "sliding_window_non_causal"),
        {**WINDOW, "is_causal": True, "sliding_window_non_causal": True},
    ),
    "not-causal-both-ways": (
        ("causal", "sliding_window_non_causal"),
        {**WINDOW, "is_causal": False, "sliding_window_non_causal": False},
    ),
    "heads-that-do-not-divide": (("num_heads", "32", "5"), {"num_key_value_heads": 5}),
    "odd-rotary": (("rotary_dim", "63"), {"rotary_dim": 63}),
    "rotary-beyond-the-head": (("rotary_dim", "256", "128"), {"partial_rotary_factor": 2.0}),
    "a-part-of-a-column": (("partial_rotary_factor", "0.3", "128"), {"partial_rotary_factor": 0.3}),
    "a-part-of-a-column-within-rope": (
        ("rope_scaling.partial_rotary_factor", "'half'"),
        {"rope_scaling": {"partial_rotary_factor": "half"}},
    ),
    "a-draft-vocabulary-beyond-the-whole": (("draft_vocab_size", "151937"), {"draft_vocab_size": 151937}),
    "zero-eps": (("rms_norm_eps", "0"), {"rms_norm_eps": 0}),
    "bool-eps": (("rms_norm_eps", "True"), {"rms_norm_eps": True}),
    "nan-eps": (("rms_norm_eps", "nan"), {"rms_norm_eps": math.nan}),
    "infinite-eps": (("rms_norm_eps", "inf"), {"rms_norm_eps": math.inf}),
    "eps-beyond-a-float": (("rms_norm_eps", "000"), {"rms_norm_eps": 10**400}),
    "pairing-that-is-a-number": (("rope_is_neox_style", "0"), {"rope_is_neox_style": 0}),
    "a-number-for-a-switch": (("attention_bias", "0"), {"attention_bias": 0}),
    "a-switch-for-a-number": (("dflash_config.selector_rank", "False"), {"dflash_config": {"selector_rank": False}}),
    "a-namespace-that-is-no-mapping": (("dspark_config", "[]"), {"dspark_config": []}),
    "unknown-flat-key": (("dspark_blokc_size", "dspark_block_size"), {"dspark_blokc_size": 7}),
    "unknown-flat-dflash-key": (("dflash_warp", "unknown"), {"dflash_warp": 1}),
    "unknown-nested-key": (("dspark_config.makrov_rank", "markov_rank"), {"dspark_config": {"makrov_rank": 256}}),
    "unknown-dflash-key": (("dflash_config.tree", "unknown"), {"dflash_config": {"tree": True}}),
    "unknown-key-with-a-null": (("dspark_config.experts", "unknown"), {"dspark_config": {"experts": None}}),
    "experts-of-a-bundled-draft": (("dspark_n_routed_experts",), {"dspark_n_routed_experts": 128}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    names, changes = REFUSED[name]
    expect_raises(LABEL, ValueError, names, lambda: parsed(**changes))


REQUIRED = {
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "max_position_embeddings": "max_position",
    "vocab_size": "vocab_size",
    "mask_token_id": "mask_token_id",
    "target_layer_ids": "target_layer_ids",
    "block_size": "block_size",
}


@pytest.mark.parametrize("key", REQUIRED)
def test_missing_fields_are_named_with_their_spellings(key: str) -> None:
    names = [f"{REQUIRED[key]}: missing", key, "dspark_config"]
    expect_raises(LABEL, ValueError, names, lambda: parsed(**{key: None}))


@pytest.mark.parametrize("value", [True, 7.0, -1, "7"], ids=repr)
@pytest.mark.parametrize("key", [key for key in REQUIRED if key != "target_layer_ids"])
def test_values_of_another_kind_are_named_with_their_key(key: str, value: Any) -> None:
    expect_raises(
        LABEL, ValueError, [f"dflash_config.{key}: got {value!r}"], lambda: parsed(dflash_config={key: value})
    )


UNSUPPORTED: dict[str, tuple[Any, Any]] = {
    "attention_bias": (True, False),
    "attention_mode": ("mla", "gqa"),
    "attention_sink_bias": (True, False),
    "attention_value_scale": (0.5, 1.0),
    "enable_qwen35_gated_q_proj": (True, False),
    "fc_layernorm": (True, False),
    "final_logit_softcapping": (30.0, 0),
    "hidden_act": ("gelu", "silu"),
    "hidden_activation": ("gelu_pytorch_tanh", "silu"),
    "kv_lora_rank": (512, None),
    "log_snr_conditioning": (True, False),
    "mlp_bias": (True, False),
    "output_multiplier": (2.0, 1.0),
    "q_lora_rank": (1024, None),
}


@pytest.mark.parametrize("key", UNSUPPORTED)
def test_what_is_not_computed_is_refused_not_ignored(key: str) -> None:
    refused, accepted = UNSUPPORTED[key]
    expect_raises(LABEL, ValueError, [f"{key}: got {refused!r}"], lambda: parsed(**{key: refused}))
    named = f"dflash_config.{key}: got {refused!r}"
    expect_raises(LABEL, ValueError, [named], lambda: parsed(dflash_config={key: refused}))
    for place in ({key: accepted}, {"dflash_config": {key: accepted}}):
        expect_equal(LABEL, "the value that changes nothing", parsed(**place), parsed())


@pytest.mark.parametrize("key", ["conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"])
def test_parts_of_other_drafts_are_refused_in_the_drafts_own_keys_only(key: str) -> None:
    expect_raises(LABEL, ValueError, [f"dflash_config.{key}: got 2"], lambda: parsed(dflash_config={key: 2}))
    expect_raises(LABEL, ValueError, [f"dspark_{key}: got 2"], lambda: parsed(**{f"dspark_{key}": 2}))
    expect_equal(LABEL, "another module's key", parsed(**{key: 2}), parsed())


FIELDS: dict[str, tuple[tuple[Any, str], ...]] = {
    "hidden_size": ((0, "hidden_size: got 0"), (True, "hidden_size: got True"), (1.0, "hidden_size: got 1.0")),
    "intermediate_size": ((0, "intermediate_size: got 0"),),
    "num_layers": ((0, "num_layers: got 0"),),
    "num_heads": ((0, "num_heads: got 0"), (33, "num_heads: got 33")),
    "num_kv_heads": ((0, "num_kv_heads: got 0"),),
    "head_dim": ((0, "head_dim: got 0"), (64.0, "head_dim: got 64.0")),
    "eps": ((0.0, "eps: got 0.0"), (math.nan, "eps: got nan"), (True, "eps: got True"), ("1", "eps: got '1'")),
    "rotary_dim": ((0, "rotary_dim: got 0"), (63, "rotary_dim: got 63"), (130, "rotary_dim: got 130")),
    "is_neox_style": ((1, "is_neox_style: got 1"), (None, "is_neox_style: got None")),
    "max_position": ((0, "max_position: got 0"),),
    "vocab_size": ((0, "vocab_size: got 0"),),
    "mask_token_id": tuple((value, f"mask_token_id: got {value!r}") for value in (-1, True, 1.0, None)),
    "target_layer_ids": (
        ((), "target_layer_ids: got []"),
        ((3, 1), "target_layer_ids: got [3, 1]"),
        ((1, 1), "target_layer_ids: got [1, 1]"),
        ((True, 3), "target_layer_ids[0]: got True"),
        ((-1, 3), "target_layer_ids[0]: got -1"),
        (3, "target_layer_ids: got 3"),
    ),
    "gamma": ((0, "gamma: got 0"), (8, "gamma: got 8, need at most the trained block, 7"), (True, "gamma: got True")),
    "trained_block": ((0, "trained_block: got 0"), (6, "gamma: got 7, need at most the trained block, 6")),
    "sample_from_anchor": ((None, "sample_from_anchor: got None"), (1, "sample_from_anchor: got 1")),
    "causal": ((0, "causal: got 0"),),
    "sliding_window": ((0, "sliding_window: got 0"), (True, "sliding_window: got True")),
    "markov_head": (("vanilla", "markov_head: got 'vanilla'"), (None, "markov_rank: got 256")),
    "markov_rank": ((0, "markov_rank: got 0"), (-1, "markov_rank: got -1"), (True, "markov_rank: got True")),
    "confidence_head": ((1, "confidence_head: got 1"),),
    "confidence_temperatures": (
        ((1.0,) * 6, "confidence_temperatures: got 6"),
        ((1.0,) * 8, "confidence_temperatures: got 8"),
        ((1.0, 0.0), "confidence_temperatures[1]: got 0.0"),
        ((math.inf,), "confidence_temperatures[0]: got inf"),
        (1.0, "confidence_temperatures: got 1.0"),
    ),
    "gemma_norm": ((1, "gemma_norm: got 1"),),
    "assumed": ((frozenset({"gamma"}), "assumed: got ['gamma']"),),
    "num_target_layers": ((0, "num_target_layers: got 0"), (33, "target_layer_ids: got [1, 9, 17, 25, 33]")),
    "reduced_from": (
        (0, "reduced_from: got 0"),
        (151936, "reduced_from: got 151936"),
        (True, "reduced_from: got True"),
    ),
}
"""Values, and how the error begins."""


@pytest.mark.parametrize("name", FIELDS)
def test_fields_are_checked_however_a_config_is_made(name: str) -> None:
    for value, named in FIELDS[name]:
        expect_raises(LABEL, ValueError, [named], partial(replace, parsed(), **{name: value}))


def test_a_confidence_head_needs_a_markov_head() -> None:
    call = lambda: replace(parsed(), markov_head=None, markov_rank=0)  # noqa: E731
    expect_raises(LABEL, ValueError, ["confidence_head", "Markov"], call)


def test_lists_become_tuples_and_temperatures_numbers() -> None:
    made = replace(parsed(), target_layer_ids=[1, 3], confidence_temperatures=[2] * 7)  # type: ignore[arg-type]
    expect_equal(LABEL, "taps", made.target_layer_ids, (1, 3))
    expect_equal(LABEL, "temperatures", made.confidence_temperatures, (2.0,) * 7)


def test_the_least_block_and_the_largest_number_are_accepted() -> None:
    found = parsed(block_size=1)
    expect_equal(LABEL, "a block of one proposal", (found.gamma, found.trained_block), (1, 1))
    largest = sys.float_info.max
    expect_equal(LABEL, "the largest number", parsed(rms_norm_eps=largest).eps, largest)
