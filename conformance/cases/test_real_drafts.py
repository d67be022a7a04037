"""Configs of real drafts become models: tensors of the right shapes, and the path of each operation (F5-5, F2-7)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dspark import dispatch
from dspark.model.config import DSparkConfig, TargetConfig
from dspark.model.draft import DSparkDraftModel
from dspark.model.kv_inject import write_target_hidden_kv

from ..fixtures.calls.drafts import AccessiblePool
from ..fixtures.configs import DRAFTS, STYLES, Draft, changed
from ..fixtures.guard import Arena, to_bits
from ..fixtures.ledger import Label, expect_equal

LABEL = Label("config", "-")
COMMITTED = Path(__file__).parent.parent / "fixtures" / "draft_paths.txt"
KINDS = {"bf16": torch.bfloat16, "bf16-gemma": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def target_of(config: DSparkConfig) -> TargetConfig:
    """A target that the draft fits."""
    return TargetConfig(config.hidden_size, 100, config.vocab_size, config.vocab_size, None)


def layer_shapes(draft: Draft) -> dict[str, tuple[int, ...]]:
    """What a layer of the draft holds."""
    row = draft.row
    hidden, dim = row["hidden"], row["head_dim"]
    return {
        "input_layernorm.weight": (hidden,),
        "self_attn.qkv_proj.weight": ((row["q_heads"] + 2 * row["kv_heads"]) * dim, hidden),
        "self_attn.q_norm.weight": (dim,),
        "self_attn.k_norm.weight": (dim,),
        "self_attn.o_proj.weight": (hidden, row["q_heads"] * dim),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_up_proj.weight": (2 * row["intermediate"], hidden),
        "mlp.down_proj.weight": (hidden, row["intermediate"]),
    }


def shapes(draft: Draft) -> dict[str, tuple[int, ...]]:
    """Every tensor of the draft, from its row of shapes.json."""
    row = draft.row
    hidden, rank, vocab = row["hidden"], row["markov_rank"], row["vocab"]
    layers = {f"layers.{i}.{name}": shape for i in range(row["layers"]) for name, shape in layer_shapes(draft).items()}
    return {
        "fc.weight": (hidden, len(row["taps"]) * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
        "markov_head.markov_w1.weight": (vocab, rank),
        "markov_head.markov_w2.weight": (vocab, rank),
        "confidence_head.proj.weight": (1, hidden + rank),
        "confidence_head.proj.bias": (1,),
        **layers,
    }


@pytest.mark.parametrize("draft", DRAFTS, ids=lambda draft: draft.id)
def test_a_model_of_the_config_has_the_drafts_tensors(draft: Draft) -> None:
    config = DSparkConfig.from_config(STYLES["everywhere"](draft.row))
    model = DSparkDraftModel(config, target_of(config), device="meta")
    found = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    expect_equal(LABEL, "tensors", found, shapes(draft))
    devices = {str(tensor.device) for tensor in (*model.state_dict().values(), model.rotary.cos_sin_cache)}
    expect_equal(LABEL, "devices", devices, {"meta"})
    expect_equal(LABEL, "F2-7: pairing", model.rotary.is_neox_style, draft.row.get("neox", True))
    expect_equal(LABEL, "rotary_dim", model.rotary.rotary_dim, draft.row.get("rotary_dim", draft.row["head_dim"]))
    one = all(layer.rotary_emb is model.rotary for layer in model.attentions)
    expect_equal(LABEL, "F2-7: one rotary for Q, K and the K that is written", one, True)
    eps = {model.norm.variance_epsilon, *(layer.k_norm.variance_epsilon for layer in model.attentions)}
    expect_equal(LABEL, "eps", eps, {draft.row.get("eps", 1e-6)})


def pool_of(model: DSparkDraftModel, rows: int) -> AccessiblePool:
    """Zeroed buffers of all layers."""
    device = model.fc.weight.device
    shapes = [(rows, layer.num_kv_heads, layer.head_dim) for layer in model.attentions]
    keys, values = ([torch.zeros(shape, dtype=torch.bfloat16, device=device) for shape in shapes] for _ in range(2))
    return AccessiblePool(keys, values)


def lines(draft: Draft, device: torch.device) -> Sequence[str]:
    """What each kind of the draft led to. Width and rows decide nothing: here the one is small, and there are none."""
    found = []
    for name, dtype in KINDS.items():
        read = DSparkConfig.from_config(STYLES["plain"](draft.row))
        config = replace(read, hidden_size=2, intermediate_size=2, vocab_size=8, mask_token_id=7, max_position=32)
        config = replace(config, gemma_norm=name.endswith("gemma"), markov_rank=2)
        model = DSparkDraftModel(config, target_of(config), dtype=dtype, device=device)
        hidden = torch.ones(0, 2, dtype=dtype, device=device)
        index = torch.zeros(0, dtype=torch.int64, device=device)
        with torch.no_grad(), dispatch.observed() as outcomes:
            model.attentions[0].project_qkv(index, hidden)
            write_target_hidden_kv(model.attentions, pool_of(model, 2), hidden, index, index)
        taken = [
            f"{outcome.decision.op}={outcome.path}" + "".join(f"!{reason}" for reason in outcome.decision.reasons)
            for outcome in outcomes
        ]
        found.append(" ".join([draft.row["name"], name, "->", *taken]))
    return found


def test_f5_5_paths_of_real_drafts_are_the_committed_ones(arena: Arena) -> None:
    found = [line for draft in DRAFTS for line in lines(draft, arena.device)]
    expect_equal(LABEL, "path table", found, COMMITTED.read_text().splitlines())


@pytest.mark.parametrize("path", ["fused", "eager"])
@pytest.mark.parametrize("neox", [True, False], ids=["neox", "interleaved"])
def test_f2_7_the_configs_pairing_reaches_queries_keys_and_written_keys(neox: bool, path: str, arena: Arena) -> None:
    """A quarter turn of rows 1 2 3 4: what comes out is what no turn gives, moved as the pairing says."""
    shape = {"hidden_size": 4, "head_dim": 4, "num_attention_heads": 1, "num_key_value_heads": 1, "vocab_size": 8}
    rest = {"intermediate_size": 4, "mask_token_id": 7, "markov_rank": 2, "max_position_embeddings": 2}
    config = DSparkConfig.from_config(changed(**shape, **rest, rope_is_neox_style=neox))
    target = TargetConfig.from_config({**shape, "num_hidden_layers": 40, "rope_is_neox_style": not neox})
    model = DSparkDraftModel(config, target, device=arena.device)
    table = torch.tensor([[1, 1, 0, 0], [0, 0, 1, 1]], dtype=torch.float32, device=arena.device)
    model.rotary.cos_sin_cache = table
    hidden = torch.tensor([[1, 2, 3, 4]] * 2, dtype=torch.bfloat16, device=arena.device)
    index = torch.arange(2, device=arena.device)
    pool = pool_of(model, 2)
    with torch.no_grad(), dispatch.forced(path):
        for layer in model.attentions:
            layer.qkv_proj.weight.copy_(torch.eye(4, dtype=torch.bfloat16).repeat(3, 1))
        query, key, _ = model.attentions[0].project_qkv(index, hidden)
        write_target_hidden_kv(model.attentions, pool, hidden, index, index)
    written = pool.keys[0] if path == "fused" else pool.handed[0][2]
    for name, rows in (("query", query), ("key", key), ("written key", written)):
        still, turned = rows.reshape(2, 4).float()
        moved = still[[2, 3, 0, 1]] if neox else still[[1, 0, 3, 2]]
        sign = torch.tensor([-1, -1, 1, 1] if neox else [-1, 1, -1, 1], device=arena.device)
        expect_equal(Label("config", path), name, to_bits(turned), to_bits(moved * sign))
        expect_equal(
            Label("config", path), f"{name} is normed", bool((still > 0.3).all() and (still < 1.5).all()), True
        )
