"""The training script of ``examples/``: its smoke run to the end, and its forward beside the one that is served."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from conformance.fixtures.sequences import sequence
from conformance.fixtures.tiny_models import CONFIG, DRAFT, build_target, randomise
from dspark import dispatch
from dspark.model.draft import DSparkDraftModel
from dspark.runtime.kv_pool import KVPool
from dspark.runtime.tiny import load_tiny_inkling

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module ``draft_training``, as the script imports it."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    yield importlib.import_module("draft_training")
    sys.modules.pop("draft_training")


def test_the_smoke_run_goes_to_the_end(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "train_tiny_inkling.py"), "--smoke", "--out", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    log = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [entry["phase"] for entry in log if entry.get("done")] == ["target", "generate", "draft"]
    results = {entry["rule"]: entry for entry in log if entry["phase"] == "result"}
    assert results.keys() == {"mup", "mup_dropped"}
    assert all(entry["tokens_per_step"] >= 1 and len(entry["acceptance"]) == 7 for entry in results.values())
    target, draft = load_tiny_inkling(tmp_path)
    assert (target.config.num_layers, target.target_layer_ids, draft.config.gamma) == (3, (0, 1, 2), 7)


def test_the_kept_log_has_the_figures_that_the_script_tells() -> None:
    log = [json.loads(line) for line in (EXAMPLES / "train_tiny_inkling.log.jsonl").read_text().splitlines()]
    told = " ".join((EXAMPLES / "train_tiny_inkling.py").read_text().split())
    figures = {entry["rule"]: round(entry["tokens_per_step"], 2) for entry in log if entry["phase"] == "result"}
    assert figures == {"mup": 4.62, "mup_dropped": 3.74}
    assert f"{round(log[-1]['seconds'])} seconds" in told
    assert all(str(figure) in told for figure in figures.values())


def test_what_is_trained_is_what_is_served(training: Any) -> None:
    """Random weights in fp32: hidden rows of all anchors at once, those of one block after another, and the drafts."""
    target = build_target(torch.device("cpu")).float()
    draft = DSparkDraftModel(DRAFT, CONFIG.target_config(), dtype=torch.float32)
    randomise(draft, "training/draft")
    draft.requires_grad_(False).bind(target.embed_tokens, target.lm_head)
    tokens = torch.tensor([sequence("training/0", 24), sequence("training/1", 24)])
    anchors = torch.tensor([[1, 5, 16], [3, 9, 10]])
    taps = target(tokens).taps
    trainer = training.DraftTrainer(draft, target.embed_tokens.weight, target.lm_head.weight, target.angles(32))
    trained = trainer.hidden(taps, tokens, anchors)
    drafted = {divided: trainer.drafts(taps, tokens, anchors, divided=divided) for divided in (True, False)}
    locs = torch.arange(1, 25)
    with dispatch.forced("eager"):
        for row in range(2):
            pool = KVPool(25, DRAFT.num_layers, DRAFT.num_kv_heads, DRAFT.head_dim, dtype=torch.float32)
            draft.write_context(pool, taps[row], torch.arange(24), locs)
            for column, position in enumerate(anchors[row].tolist()):
                block = (tokens[row, position, None], torch.tensor([position]), pool, locs[None])
                served = draft.hidden_block(*block)[0]
                torch.testing.assert_close(served, trained[row, column], rtol=0, atol=2e-4)
                assert draft.draft(*block).tokens[0].tolist() == drafted[True][row, column].tolist()
    assert (drafted[True] != drafted[False]).any()


def test_acceptance_walks_from_step_to_step(training: Any) -> None:
    """Anchors 0, 3 and 4: two accepted drafts, none, two (the last window is cut by nothing but the sequence)."""
    right = torch.tensor([[1, 1, 0], [0, 0, 0], [1, 1, 1], [0, 1, 1], [1, 1, 0]], dtype=torch.bool)
    counts = training.Acceptance()
    counts.add(right)
    assert counts.summary() == {"tokens_per_step": 2.3333, "steps": 3, "acceptance": [0.6667, 0.6667, 0.0]}
