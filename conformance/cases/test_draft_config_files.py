"""Configs of drafts as files: what is read, and the one spelling that is written (CONTRACTS.md section 10)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dspark.model.config import DSparkConfig

from ..fixtures.configs import WINDOW, changed
from ..fixtures.ledger import Label, expect_equal, expect_raises

LABEL = Label("config", "-")
WRITTEN = {
    "architectures": ["DSparkDraftModel"],
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 5,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "use_gemma_norm": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "rotary_dim": 64,
    "rope_is_neox_style": True,
    "max_position_embeddings": 40960,
    "vocab_size": 151936,
    "mask_token_id": 151669,
    "target_layer_ids": [1, 9, 17, 25, 33],
    "block_size": 7,
    "num_speculative_tokens": 7,
    "sample_from_anchor": True,
    "is_causal": True,
    "layer_types": ["sliding_attention"] * 5,
    "sliding_window": 512,
    "markov_head_type": "vanilla",
    "markov_rank": 256,
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}


def test_the_one_spelling_that_is_written() -> None:
    """In full, for other readers: this parser would fill some of it."""
    found = DSparkConfig.from_config(changed(**WINDOW, rotary_dim=64))
    expect_equal(LABEL, "written", found.to_config(), WRITTEN)


@pytest.mark.parametrize("place", ["folder", "file", "text"])
def test_files(place: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(changed()))
    given: dict[str, Path | str] = {"folder": tmp_path, "file": file, "text": str(tmp_path)}
    expect_equal(LABEL, "read", DSparkConfig.from_file(given[place]), DSparkConfig.from_config(changed()))


FILES: dict[str, tuple[str, tuple[str, ...]]] = {
    "not-json": ("{", ("line 1",)),
    "a-list": ("[]", ("list", "object")),
    "a-key-twice": ('{"block_size": 7, "zzz": 0, "block_size": 8}', ("block_size: got the key twice",)),
    "a-nested-key-twice": ('{"dspark_config": {"markov_rank": 7, "markov_rank": 7}}', ("markov_rank", "twice")),
    "a-bad-value": (json.dumps(changed(block_size=0)), ("block_size: got 0",)),
}


@pytest.mark.parametrize("name", FILES)
def test_bad_files_are_named(name: str, tmp_path: Path) -> None:
    text, names = FILES[name]
    (tmp_path / "config.json").write_text(text)
    expect_raises(LABEL, ValueError, [str(tmp_path / "config.json"), *names], lambda: DSparkConfig.from_file(tmp_path))


def test_no_file(tmp_path: Path) -> None:
    expect_raises(LABEL, FileNotFoundError, ["config.json"], lambda: DSparkConfig.from_file(tmp_path))
