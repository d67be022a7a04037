"""Configs of targets, and drafts that fit them or do not (CONTRACTS.md section 10; F1-3, F1-4, F1-16)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from dspark.model.config import DSparkConfig, TargetConfig

from ..fixtures.configs import SMALL, changed
from ..fixtures.ledger import Label, expect_equal, expect_raises

LABEL = Label("config", "-")

INKLING = {"hidden_size": 6144, "num_hidden_layers": 66, "vocab_size": 200058, "padded_vocab_size": 201024}


def against(target: dict[str, Any], **changes: Any) -> Callable[[], object]:
    return lambda: DSparkConfig.from_config(changed(**changes)).require_target(TargetConfig.from_config(target))


@pytest.mark.parametrize("mask", [0, 200057, 200058, 200064, 201023])
def test_f1_16_masks_in_padded_rows_fit(mask: int) -> None:
    big = {"hidden_size": 6144, "vocab_size": 201024, "mask_token_id": mask}
    expect_equal(LABEL, f"mask {mask}", against(INKLING, **big)(), None)
    renamed = {**INKLING, "vocab_size": 201024, "padded_vocab_size": None, "unpadded_vocab_size": 200058}
    expect_equal(LABEL, f"mask {mask}", against(renamed, **big)(), None)


UNFIT: dict[str, tuple[tuple[str, ...], dict[str, Any], dict[str, Any]]] = {
    "F1-16-a-mask-beyond-the-padded-rows": (
        ("mask_token_id", "201024"),
        INKLING,
        {"hidden_size": 6144, "vocab_size": 201024, "mask_token_id": 201024},
    ),
    "F1-16-a-mask-beyond-the-only-rows": (
        ("mask_token_id", "200058"),
        {**INKLING, "padded_vocab_size": None},
        {"hidden_size": 6144, "vocab_size": 200058, "mask_token_id": 200058},
    ),
    "F1-4-a-tap-beyond-the-last-layer": (("target_layer_ids", "36"), SMALL, {"target_layer_ids": [1, 36]}),
    "another-depth": (("num_target_layers", "40", "36"), SMALL, {"num_target_layers": 40}),
    "another-width": (("hidden_size", "4096", "2560"), {**SMALL, "hidden_size": 2560}, {}),
    "a-vocabulary-too-small": (("vocab_size", "151936", "151937"), {**SMALL, "vocab_size": 151937}, {}),
    "a-vocabulary-too-large": (("vocab_size", "151936", "151935"), {**SMALL, "vocab_size": 151935}, {}),
    "a-selection-of-another-vocabulary": (
        ("vocab_size", "151936", "151937"),
        {**SMALL, "vocab_size": 151937},
        {"draft_vocab_size": 32000},
    ),
}


@pytest.mark.parametrize("name", UNFIT)
def test_a_draft_must_fit_its_target(name: str) -> None:
    names, target, changes = UNFIT[name]
    expect_raises(LABEL, ValueError, names, against(target, **changes))


FIT: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "the-last-layer": (SMALL, {"target_layer_ids": [1, 35]}),
    "the-same-depth": (SMALL, {"num_target_layers": 36}),
    "a-selection": (SMALL, {"draft_vocab_size": 32000}),
    "the-true-vocabulary": ({**SMALL, "padded_vocab_size": 152064}, {}),
    "the-padded-vocabulary": ({**SMALL, "vocab_size": 151669, "padded_vocab_size": 151936}, {}),
    "between-the-two": ({**SMALL, "vocab_size": 151669, "padded_vocab_size": 152064}, {}),
}


@pytest.mark.parametrize("name", FIT)
def test_drafts_that_fit(name: str) -> None:
    target, changes = FIT[name]
    expect_equal(LABEL, name, against(target, **changes)(), None)


TARGETS: dict[str, tuple[dict[str, Any], TargetConfig]] = {
    "plain": (SMALL, TargetConfig(4096, 36, 151936, 151936, None)),
    "padded": ({**INKLING, "logits_mup_width_multiplier": 24}, TargetConfig(6144, 66, 200058, 201024, 24.0)),
    "nested": ({"model_type": "mm", "text_config": INKLING}, TargetConfig(6144, 66, 200058, 201024, None)),
    "unpadded": (
        {**SMALL, "vocab_size": 201024, "unpadded_vocab_size": 200058},
        TargetConfig(4096, 36, 200058, 201024, None),
    ),
    "both-spellings": ({**INKLING, "unpadded_vocab_size": 200058}, TargetConfig(6144, 66, 200058, 201024, None)),
    "all-three": (
        {**INKLING, "vocab_size": 201024, "unpadded_vocab_size": 200058},
        TargetConfig(6144, 66, 200058, 201024, None),
    ),
    "equal-in-both-places": ({**SMALL, "text_config": SMALL}, TargetConfig(4096, 36, 151936, 151936, None)),
    "null-multiplier": ({**SMALL, "logits_mup_width_multiplier": None}, TargetConfig(4096, 36, 151936, 151936, None)),
    "multiplier-one": ({**SMALL, "logits_mup_width_multiplier": 1.0}, TargetConfig(4096, 36, 151936, 151936, 1.0)),
    "multiplier-16": ({**SMALL, "logits_mup_width_multiplier": 16.0}, TargetConfig(4096, 36, 151936, 151936, 16.0)),
    "a-draft-within": ({**SMALL, "dspark_block_size": 5}, TargetConfig(4096, 36, 151936, 151936, None)),
}


@pytest.mark.parametrize("name", TARGETS)
def test_targets(name: str) -> None:
    spelled, expected = TARGETS[name]
    found = TargetConfig.from_config(spelled)
    expect_equal(LABEL, "target", found, expected)
    expect_equal(LABEL, "multiplier", found.logits_mup_width_multiplier, expected.logits_mup_width_multiplier)


BAD_TARGETS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    **{
        f"F1-3-multiplier-{value!r}": (
            ("logits_mup_width_multiplier", repr(value)),
            {"logits_mup_width_multiplier": value},
        )
        for value in (0, 0.0, -24.0, math.nan, math.inf, True, "24")
    },
    "no-width": (("hidden_size: missing",), {"hidden_size": None}),
    "no-depth": (("num_layers: missing", "num_hidden_layers"), {"num_hidden_layers": None}),
    "no-vocabulary": (("vocab_size: missing",), {"vocab_size": None}),
    "padded-below-true": (("padded_vocab_size", "9", "151936"), {"padded_vocab_size": 9}),
    "unpadded-above-the-rows": (("padded_vocab_size", "151936", "151937"), {"unpadded_vocab_size": 151937}),
    "three-vocabularies": (
        ("vocab_size", "151936", "151669", "152064"),
        {"unpadded_vocab_size": 151669, "padded_vocab_size": 152064},
    ),
    "bool-vocabulary": (("vocab_size", "True"), {"vocab_size": True}),
    "two-widths": (("hidden_size", "text_config.hidden_size", "4096", "2560"), {"text_config": {"hidden_size": 2560}}),
    "text-that-is-no-mapping": (("text_config", "3"), {"text_config": 3}),
}


@pytest.mark.parametrize("name", BAD_TARGETS)
def test_bad_targets(name: str) -> None:
    names, changes = BAD_TARGETS[name]
    spelled = {key: value for key, value in {**SMALL, **changes}.items() if value is not None}
    expect_raises(LABEL, ValueError, names, lambda: TargetConfig.from_config(spelled))


@pytest.mark.parametrize("at", range(4))
def test_sizes_are_checked_however_a_target_is_made(at: int) -> None:
    sizes = [64, 2, 100, 128]
    sizes[at] = 0
    names = [["hidden_size", "num_layers", "vocab_size", "padded_vocab_size"][at], "got 0"]
    call = lambda: TargetConfig(sizes[0], sizes[1], sizes[2], sizes[3], None)  # noqa: E731
    expect_raises(LABEL, ValueError, names, call)


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf, True])
def test_multipliers_are_checked_however_a_target_is_made(value: float) -> None:
    call = lambda: TargetConfig(64, 2, 100, 128, value)  # noqa: E731
    expect_raises(LABEL, ValueError, ["logits_mup_width_multiplier", repr(value)], call)
