"""Configs of drafts: every spelling in use, and the conventions of the formats (CONTRACTS.md section 10)."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from dspark.model.config import DSparkConfig, MarkovKind, TargetConfig
from dspark.model.rope_scaling import RopeParameters, Scaling

from ..fixtures.configs import DRAFTS, SMALL, STYLES, WINDOW, Draft, changed
from ..fixtures.ledger import Label, expect_equal, expect_raises

LABEL = Label("config", "-")


def parsed(**changes: Any) -> DSparkConfig:
    """A real draft with ``changes`` of its config."""
    return DSparkConfig.from_config(changed(**changes))


def fields(found: DSparkConfig, names: Iterable[str]) -> dict[str, Any]:
    return {name: getattr(found, name) for name in names}


@pytest.mark.parametrize("draft", DRAFTS, ids=lambda draft: draft.id)
def test_real_drafts_in_every_spelling(draft: Draft) -> None:
    for style, spell in STYLES.items():
        found = DSparkConfig.from_config(spell(draft.row))
        expect_equal(LABEL, f"{style}: fields", fields(found, draft.expected), draft.expected)
        expect_equal(LABEL, f"{style}: rope", found.rope, RopeParameters(draft.theta))
        expect_equal(LABEL, f"{style}: Markov head", found.markov_head, MarkovKind.VANILLA)
        expect_equal(LABEL, f"{style}: written and read", DSparkConfig.from_config(found.to_config()), found)


ROUND_TRIPS: dict[str, dict[str, Any]] = {
    "yarn": {"rope_scaling": {"type": "yarn", "factor": 32.0, "original_max_position_embeddings": 8192}},
    "llama3": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 2.0,
            "high_freq_factor": 5.0,
            "original_max_position_embeddings": 8192,
        }
    },
    "attention-factor": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4,
            "attention_factor": 1.5,
            "beta_fast": 16.0,
            "beta_slow": 2.0,
            "original_max_position_embeddings": 4096,
        }
    },
    "window": WINDOW,
    "not-from-anchor": {"sample_from_anchor": False},
    "no-heads": {"markov_rank": 0, "enable_confidence_head": False, "sample_from_anchor": False},
    "gated": {"markov_head_type": "gated"},
    "rnn": {"markov_head_type": "RNN"},
    "reduced-vocabulary": {"draft_vocab_size": 32000},
    "temperatures": {"confidence_temperatures": [1.5, 0.9, 1.5, 1.6, 0.9, 1.4, 2]},
    "F2-12-gemma-norm": {"use_gemma_norm": True},
    "causal": {"is_causal": True},
    "smaller-gamma": {"num_speculative_tokens": 3},
    "depth-of-the-target": {"num_target_layers": 36},
    "partial-rotary": {"partial_rotary_factor": 0.5},
    "nothing-known": {"rms_norm_eps": None, "rope_theta": None, "rope_is_neox_style": None},
    "yarn-of-assumed-base": {
        "rope_theta": None,
        "rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 8192},
    },
}


@pytest.mark.parametrize("name", ROUND_TRIPS)
def test_written_and_read_again(name: str) -> None:
    """Through JSON, and canonical: written again, the same text."""
    found = parsed(**ROUND_TRIPS[name])
    text = json.dumps(found.to_config())
    expect_equal(LABEL, "read again", DSparkConfig.from_config(json.loads(text)), found)
    expect_equal(LABEL, "written again", json.dumps(DSparkConfig.from_config(json.loads(text)).to_config()), text)
    expect_equal(LABEL, "hashable", hash(found), hash(parsed(**ROUND_TRIPS[name])))


READ: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "F2-17-nested-base-beats-a-stale-flat-one": (
        {"rope_parameters": {"rope_theta": 1e7, "rope_type": "default"}, "rope_theta": 1e4},
        {"rope": RopeParameters(1e7)},
    ),
    "F2-17-null-scaling-is-the-plain-table": ({"rope_scaling": None}, {"rope": RopeParameters(1e6)}),
    "F2-17-yarn": (
        {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}},
        {"rope": RopeParameters(1e6, Scaling.YARN, 4.0, 2048)},
    ),
    "flat-original-positions": (
        {"rope_scaling": {"type": "yarn", "factor": 4.0}, "original_max_position_embeddings": 2048},
        {"rope": RopeParameters(1e6, Scaling.YARN, 4.0, 2048)},
    ),
    "null-base-in-nested-rope": (
        {"rope_parameters": {"rope_theta": None, "rope_type": "default"}},
        {"rope": RopeParameters(1e6), "assumed": frozenset({"rotary_dim"})},
    ),
    "rotary-dim": ({"rotary_dim": 64}, {"rotary_dim": 64, "assumed": frozenset()}),
    "partial-rotary-within-rope": (
        {"rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 0.25}},
        {"rotary_dim": 32, "assumed": frozenset()},
    ),
    "three-equal-rotary-spellings": (
        {"rotary_dim": 64, "partial_rotary_factor": 0.5, "rope_scaling": {"partial_rotary_factor": 0.5}},
        {"rotary_dim": 64},
    ),
    "layer-types-slide": (WINDOW, {"sliding_window": 512, "causal": True}),
    "a-window-alone-applies": ({"sliding_window": 512}, {"sliding_window": 512, "causal": True}),
    "a-window-that-is-switched-off": (
        {"sliding_window": 512, "use_sliding_window": False},
        {"sliding_window": None, "causal": False},
    ),
    "a-window-that-no-layer-uses": (
        {"sliding_window": 512, "use_sliding_window": True, "layer_types": ["full_attention"] * 5},
        {"sliding_window": None, "causal": False},
    ),
    "nested-window": (
        {"dflash_config": {"use_swa": True, "swa_window_size": 1024, "causal": True}},
        {"sliding_window": 1024, "causal": True},
    ),
    "a-window-both-ways": ({**WINDOW, "sliding_window_non_causal": True}, {"sliding_window": 512, "causal": False}),
    "a-window-one-way": ({**WINDOW, "sliding_window_non_causal": False}, {"sliding_window": 512, "causal": True}),
    "full-layers-are-not-asked-about-windows": ({"sliding_window_non_causal": False}, {"causal": False}),
    "full-layers-are-not-asked-although-told": (
        {"sliding_window_non_causal": False, "is_causal": False},
        {"causal": False},
    ),
    "a-window-said-to-be-not-causal": ({**WINDOW, "is_causal": False}, {"causal": False}),
    "causal-in-agreement": ({**WINDOW, "is_causal": True, "sliding_window_non_causal": False}, {"causal": True}),
    "causal-full-layers": ({"dflash_query_causal": True, "dspark_causal_head": True}, {"causal": True}),
    "no-markov-head-of-rank-0": (
        {"markov_rank": 0, "enable_confidence_head": False},
        {"markov_head": None, "markov_rank": 0, "sample_from_anchor": True},
    ),
    "confidence-reads-the-markov-embedding-unless-told": (
        {"confidence_head_with_markov": None},
        {"confidence_head": True},
    ),
    "confidence-head-by-its-short-name": (
        {"enable_confidence_head": None, "dspark_confidence_head": True},
        {"confidence_head": True},
    ),
    "no-confidence-head-unless-told": ({"enable_confidence_head": None}, {"confidence_head": False}),
    "temperatures-of-the-draft": (
        {"confidence_temperatures": [1, 2, 3, 4, 5, 6, 7]},
        {"confidence_temperatures": (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0)},
    ),
    "temperatures-beyond-gamma": (
        {"num_speculative_tokens": 2, "dspark_config": {"sts_temperatures": [1.0, 2.0, 3.0]}},
        {"confidence_temperatures": (1.0, 2.0, 3.0), "gamma": 2},
    ),
    "trained-further-than-it-proposes": ({"training_block_size": 15}, {"gamma": 7, "trained_block": 15}),
    "gamma-in-other-words": ({"speculative_tokens": 3}, {"gamma": 3, "trained_block": 7}),
    "a-trained-block-alone": ({"block_size": None, "trained_block": 5}, {"gamma": 5, "trained_block": 5}),
    "gamma-within-a-wider-block": (
        {"training_block_size": 15, "num_speculative_tokens": 11},
        {"gamma": 11, "trained_block": 15},
    ),
    "reduced-vocabulary": ({"draft_vocab_size": 32000}, {"vocab_size": 32000, "prev_vocab_size": 151936}),
    "whole-vocabulary": ({"draft_vocab_size": 151936}, {"vocab_size": 151936, "reduced_from": None}),
    "F2-12-gemma-norm": ({"dflash_config": {"use_gemma_norm": True}}, {"gemma_norm": True}),
    "the-mask-as-pard-token": ({"mask_token_id": None, "pard_token": 990}, {"mask_token_id": 990}),
    "text-of-the-mask-changes-nothing": ({"dflash_config": {"mask_token": "<|MASK|>"}}, {"mask_token_id": 151669}),
    "plain-keys-of-others": ({"vision_config": {"depth": 27}, "num_anchors": 512, "conv_kernel_size": 4}, {"gamma": 7}),
    "F2-7-a-copy-of-the-target-decides-nothing": (
        {"text_config": {"rope_is_neox_style": False, "num_hidden_layers": 36, "dspark_block_size": 3}},
        {"is_neox_style": True, "num_layers": 5, "gamma": 7},
    ),
    "empty-namespaces": ({"dspark_config": {}, "dflash_config": {}}, {"gamma": 7}),
    "no-scaling-of-values": ({"attention_value_scale": 1, "final_logit_softcapping": 0}, {"gamma": 7}),
    "no-convolution": ({"dflash_config": {"conv_kernel_size": 0, "selector_rank": 0}}, {"gamma": 7}),
}


@pytest.mark.parametrize("name", READ)
def test_what_is_read(name: str) -> None:
    changes, expected = READ[name]
    expect_equal(LABEL, "fields", fields(parsed(**changes), expected), expected)


@pytest.mark.parametrize(
    ("key", "value"), [*itertools.product(("rope_is_neox_style", "is_neox_style"), (True, False)), ("", True)]
)
def test_f2_7_the_drafts_own_config_decides_the_pairing(key: str, value: bool) -> None:
    """Beside a target of the opposite pairing, also one that the draft's config carries a copy of."""
    pairing = {"rope_is_neox_style": None, **({key: value} if key else {})}
    opposite = {**SMALL, "rope_is_neox_style": not value, "is_neox_style": not value}
    draft = parsed(**pairing, text_config=opposite, target_config=opposite)
    draft.require_target(TargetConfig.from_config(opposite))
    expect_equal(LABEL, "pairing", draft.is_neox_style, value)
    expect_equal(LABEL, "assumed", "is_neox_style" in draft.assumed, not key)
    expect_equal(LABEL, "interleaved", parsed(rope_is_neox_style=None, rope_interleave=not value).is_neox_style, value)


FORMATS: dict[str, tuple[dict[str, Any], tuple[int, int, bool]]] = {
    "deepspec-absent": ({}, (7, 7, True)),
    "deepspec-without-heads": ({"markov_rank": 0, "enable_confidence_head": False}, (7, 7, True)),
    "dspark-true": ({"sample_from_anchor": True}, (7, 7, True)),
    "dspark-false": ({"sample_from_anchor": False}, (7, 8, False)),
    "dspark-bonus": ({"dspark_bonus_anchor": True}, (7, 8, False)),
    "markov-under-a-dflash-name": ({"architectures": ["DFlashDraftModel"]}, (7, 7, True)),
    "speculators-dspark-absent": ({"speculators_model_type": "dspark"}, (7, 7, True)),
    "speculators-dspark-false": ({"speculators_model_type": "dspark", "sample_from_anchor": False}, (6, 7, False)),
    "speculators-dflash-absent": (
        {"speculators_model_type": "dflash", "markov_rank": 0, "enable_confidence_head": False},
        (6, 7, False),
    ),
    "speculators-dflash-with-markov-absent": ({"speculators_model_type": "dflash"}, (6, 7, False)),
    "dflash-false": (
        {
            "architectures": ["DFlashDraftModel"],
            "markov_rank": 0,
            "enable_confidence_head": False,
            "sample_from_anchor": False,
            "block_size": 16,
        },
        (15, 16, False),
    ),
    "dflash-true": (
        {
            "architectures": ["DFlashDraftModel"],
            "markov_rank": 0,
            "enable_confidence_head": False,
            "sample_from_anchor": True,
        },
        (7, 7, True),
    ),
    "dflash-tagged-dspark": (
        {
            "architectures": None,
            "markov_rank": 0,
            "enable_confidence_head": False,
            "dflash_config": {"projector_type": "dspark"},
        },
        (7, 7, True),
    ),
}


@pytest.mark.parametrize("name", FORMATS)
def test_f1_15_block_conventions_of_the_formats(name: str) -> None:
    changes, expected = FORMATS[name]
    found = parsed(**changes)
    expect_equal(
        LABEL, "gamma, rows, from anchor", (found.gamma, found.query_width, found.sample_from_anchor), expected
    )


@pytest.mark.parametrize("trained", [7, 15])
def test_gamma_can_be_any_within_the_trained_block(trained: int) -> None:
    draft = parsed(training_block_size=trained)
    for gamma in range(1, trained + 1):
        expect_equal(LABEL, "gamma", draft.with_gamma(gamma), replace(draft, gamma=gamma))
    for gamma, need in ((trained + 1, str(trained)), (0, ">= 1"), (True, ">= 1")):
        expect_raises(LABEL, ValueError, ["gamma", str(gamma), need], partial(draft.with_gamma, gamma))
