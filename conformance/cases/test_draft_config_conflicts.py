"""Configs of drafts in which two spellings differ: an error that names both keys and both values, never first-wins."""

from __future__ import annotations

from typing import Any

import pytest

from dspark.model.config import DSparkConfig

from ..fixtures.configs import WINDOW, changed
from ..fixtures.ledger import Label, expect_raises

LABEL = Label("config", "-")

CONFLICTS: dict[str, tuple[tuple[str, str], dict[str, Any]]] = {
    "pairing": (
        ("True from rope_is_neox_style", "False from is_neox_style"),
        {"rope_is_neox_style": True, "is_neox_style": False},
    ),
    "pairing-inverted": (
        ("True from rope_is_neox_style", "False from rope_interleave"),
        {"rope_is_neox_style": True, "rope_interleave": True},
    ),
    "mask": (
        ("151669 from mask_token_id", "4 from dspark_config.mask_token_id"),
        {"dspark_config": {"mask_token_id": 4}},
    ),
    "mask-as-noise": (
        ("3 from dspark_noise_token_id", "4 from dflash_config.mask_token_id"),
        {"mask_token_id": None, "dspark_noise_token_id": 3, "dflash_config": {"mask_token_id": 4}},
    ),
    "mask-as-pard": (("151669 from mask_token_id", "4 from pard_token"), {"pard_token": 4}),
    "taps": (
        ("(1, 9, 17, 25, 33) from target_layer_ids", "(1, 4) from dflash_config.target_layer_ids"),
        {"dflash_config": {"target_layer_ids": [1, 4]}},
    ),
    "F1-4-taps-counted-ahead": (
        ("(1, 3) from target_layer_ids", "(0, 2) from eagle_aux_hidden_state_layer_ids"),
        {"target_layer_ids": [1, 3], "eagle_aux_hidden_state_layer_ids": [1, 3]},
    ),
    "block": (("7 from block_size", "8 from dspark_block_size"), {"dspark_block_size": 8}),
    "nested-blocks": (
        ("7 from dspark_config.block_size", "8 from dflash_config.block_size"),
        {"block_size": None, "dspark_config": {"block_size": 7}, "dflash_config": {"block_size": 8}},
    ),
    "gamma": (
        ("3 from num_speculative_tokens", "4 from dspark_gamma"),
        {"num_speculative_tokens": 3, "dspark_gamma": 4},
    ),
    "F1-15-convention": (
        ("True from sample_from_anchor", "False from dflash_config.sample_from_anchor"),
        {"sample_from_anchor": True, "dflash_config": {"sample_from_anchor": False}},
    ),
    "F1-15-convention-inverted": (
        ("False from sample_from_anchor", "True from dspark_bonus_anchor"),
        {"sample_from_anchor": False, "dspark_bonus_anchor": False},
    ),
    "F1-15-convention-as-shift": (
        ("True from dspark_config.sample_from_anchor", "False from dflash_config.shift_label"),
        {"dflash_config": {"shift_label": False}, "dspark_config": {"sample_from_anchor": True}},
    ),
    "rank": (("256 from markov_rank", "512 from dspark_markov_rank"), {"dspark_markov_rank": 512}),
    "kind": (
        ("'vanilla'> from markov_head_type", "'gated'> from dspark_config.markov_head_type"),
        {"dspark_config": {"markov_head_type": "gated"}},
    ),
    "confidence": (
        ("True from enable_confidence_head", "False from dflash_config.use_confidence_head"),
        {"dflash_config": {"use_confidence_head": False}},
    ),
    "temperatures": (
        ("1.0) from confidence_temperatures", "2.0) from dspark_config.sts_temperatures"),
        {"confidence_temperatures": [1.0] * 7, "dspark_config": {"sts_temperatures": [2.0] * 7}},
    ),
    "causal": (
        ("True from is_causal", "False from dflash_query_causal"),
        {"is_causal": True, "dflash_query_causal": False},
    ),
    "window": (
        ("512 from sliding_window", "1024 from dflash_config.swa_window_size"),
        {"sliding_window": 512, "dflash_config": {"swa_window_size": 1024}},
    ),
    "switches": (
        ("True from use_sliding_window", "False from dflash_config.use_swa"),
        {"use_sliding_window": True, "dflash_config": {"use_swa": False}, "sliding_window": 512},
    ),
    "full-layers-and-a-switch": (
        ("False from layer_types", "True from dflash_config.use_swa"),
        {"layer_types": ["full_attention"] * 5, "dflash_config": {"use_swa": True}, "sliding_window": 512},
    ),
    "sliding-layers-and-a-switch": (
        ("True from layer_types", "False from use_sliding_window"),
        {**WINDOW, "use_sliding_window": False},
    ),
    "layer-types": (
        ("'full_attention') from layer_types", "'sliding_attention') from dflash_config.layer_types"),
        {"layer_types": ["full_attention"] * 5, "dflash_config": {"layer_types": ["sliding_attention"] * 5}},
    ),
    "layers": (
        ("5 from num_hidden_layers", "6 from dflash_config.num_hidden_layers"),
        {"dflash_config": {"num_hidden_layers": 6}},
    ),
    "depth": (
        ("36 from num_target_layers", "40 from dflash_config.num_target_layers"),
        {"num_target_layers": 36, "dflash_config": {"num_target_layers": 40}},
    ),
    "backbone": (
        ("4096 from hidden_size", "5120 from transformer_layer_config.hidden_size"),
        {"transformer_layer_config": {"hidden_size": 5120}},
    ),
    "eps": (("1e-06 from rms_norm_eps", "1e-05 from norm_eps"), {"norm_eps": 1e-5}),
    "base": (
        ("1000000.0 from rope_theta", "10000.0 from transformer_layer_config.rope_theta"),
        {"transformer_layer_config": {"rope_theta": 1e4}},
    ),
    "rotary": (
        ("64 from rotary_dim", "32 from partial_rotary_factor"),
        {"rotary_dim": 64, "partial_rotary_factor": 0.25},
    ),
    "rotary-within-rope": (
        ("64 from rotary_dim", "32 from rope_parameters.partial_rotary_factor"),
        {"rotary_dim": 64, "rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 0.25}},
    ),
    "positions": (
        ("40960 from max_position_embeddings", "4096 from model_max_length"),
        {"model_max_length": 4096},
    ),
    "vocabulary": (
        ("151936 from vocab_size", "151669 from dspark_config.vocab_size"),
        {"dspark_config": {"vocab_size": 151669}},
    ),
    "F2-12-gemma-norm": (
        ("True from use_gemma_norm", "False from dflash_config.use_gemma_norm"),
        {"use_gemma_norm": True, "dflash_config": {"use_gemma_norm": False}},
    ),
}


@pytest.mark.parametrize("name", CONFLICTS)
def test_two_values_are_an_error_that_names_both(name: str) -> None:
    names, changes = CONFLICTS[name]
    expect_raises(LABEL, ValueError, names, lambda: DSparkConfig.from_config(changed(**changes)))
