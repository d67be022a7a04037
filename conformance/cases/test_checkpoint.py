"""Draft checkpoints: every tensor accounted for, every spelling, streaming, sharding, 1 + w, and the scale guard."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from safetensors import safe_open
from torch import nn

from dspark.model.checkpoint import LoadReport, load_draft, load_weights, save_draft, written_tensors
from dspark.model.config import DSparkConfig, MarkovKind, TargetConfig
from dspark.model.draft import DSparkDraftModel
from dspark.model.head_scale import METADATA_KEY, CheckpointError, HeadScale

from ..fixtures.emulation import BF16, FP32, decode, round_to
from ..fixtures.guard import Arena, to_bits
from ..fixtures.ledger import Label, expect_equal, expect_raises
from ..fixtures.small_drafts import CONFIG, TARGET, build, config, shared
from ..fixtures.streams import Stream

LABEL = Label("checkpoint", "-")
State = dict[str, torch.Tensor]
Change = Callable[[State], State]
REDUCED = config(vocab_size=4, reduced_from=40)
OFFSETS = torch.tensor([3, 5, 29, 30])


def state(made: DSparkConfig = CONFIG) -> State:
    """The tensors of a checkpoint, in the spelling of most: separate projections."""
    return written_tensors(build(torch.device("cpu"), made))


def bits(model: nn.Module) -> dict[str, bytes]:
    return {name: to_bits(tensor).tobytes() for name, tensor in model.state_dict().items()}


def blank(device: torch.device, made: DSparkConfig = CONFIG, target: TargetConfig = TARGET) -> DSparkDraftModel:
    """A bound model whose tensors hold none of the values to be loaded."""
    model = DSparkDraftModel(made, target, device=device)
    for tensor in model.state_dict().values():
        tensor.fill_(0 if tensor.dtype == torch.int64 else float("nan"))
    model.bind(*shared(device, target))
    return model


def fingerprint(target: TargetConfig = TARGET) -> HeadScale:
    found = HeadScale.of(shared(torch.device("cpu"), target)[1], target)
    assert found is not None
    return found


def load(given: State, device: torch.device, made: DSparkConfig = CONFIG, **options: Any) -> DSparkDraftModel:
    model = blank(device, made)
    load_weights(model, given.items(), head_scale=fingerprint(), **options)
    return model


def renamed(rename: Callable[[str], str]) -> Change:
    return lambda given: {rename(name): tensor for name, tensor in given.items()}


def packed(given: State) -> State:
    """Q, K, V and gate, up as one tensor each."""
    found = dict(given)
    for layer in range(CONFIG.num_layers):
        for part, names in (("self_attn.qkv_proj", "qkv"), ("mlp.gate_up_proj", ("gate", "up"))):
            owner = f"layers.{layer}.{part.split('.')[0]}"
            whole = [found.pop(f"{owner}.{name}_proj.weight") for name in names]
            found[f"layers.{layer}.{part}.weight"] = torch.cat(whole)
    return found


def encoder(name: str) -> str:
    return {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}.get(name, name)


SPELLINGS: dict[str, Change] = {
    "plain": lambda given: given,
    "reversed": lambda given: dict(reversed(given.items())),
    "F1-26-prefix-model": renamed(lambda name: f"model.{name}"),
    "F1-26-prefix-of-some": renamed(lambda name: f"model.{name}" if name.startswith(("layers", "markov")) else name),
    "F1-26-prefix-dspark": renamed(lambda name: f"dspark.{name}"),
    "F1-26-prefix-model-dspark": renamed(lambda name: f"model.dspark.{name}"),
    "F1-26-prefix-language-model": renamed(lambda name: f"language_model.model.dspark.{name}"),
    "F1-26-prefix-draft-model": renamed(lambda name: f"draft_model.{name}"),
    "F1-26-confidence-head-without-proj": renamed(
        lambda name: name.replace("confidence_head.proj.", "confidence_head.")
    ),
    "final-norm": renamed(lambda name: "model.final_norm.weight" if name == "norm.weight" else name),
    "encoder-names": renamed(encoder),
    "decoder-layer": renamed(
        lambda name: name.replace(".mlp.", ".decoder_layer.mlp.").replace(".self_attn.", ".decoder_layer.self_attn.")
    ),
    "packed": packed,
    "packed-and-prefixed": lambda given: renamed(lambda name: f"model.{name}")(packed(given)),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_gives_the_same_model(spelling: str, arena: Arena) -> None:
    model, need = blank(arena.device), build(arena.device)
    given = SPELLINGS[spelling](state())
    report = load_weights(model, given.items(), head_scale=fingerprint())
    expect_equal(LABEL, "tensors", bits(model), bits(need))
    expect_equal(LABEL, "report", report, LoadReport(tuple(given), (), ()))


@pytest.mark.parametrize("kind", [*MarkovKind, None], ids=str)
def test_every_markov_head_by_its_published_names(kind: MarkovKind | None, arena: Arena) -> None:
    """The gate of a Markov head is called like the gate of an MLP, and is none."""
    with_head = kind is not None
    made = config(markov_head=kind, markov_rank=4 if with_head else 0, confidence_head=with_head)
    given = state(made)
    names = {name for name in given if not name.startswith(("layers.", "fc.", "norm.", "hidden_norm."))}
    vanilla = {"markov_head.markov_w1.weight", "markov_head.markov_w2.weight"}
    extra = {"gated": "gate_proj", "rnn": "joint_proj"}.get(str(kind))
    own = {f"markov_head.{extra}.{part}" for part in ("weight", "bias")} if extra else set()
    confidence = {"confidence_head.proj.weight", "confidence_head.proj.bias"}
    expect_equal(LABEL, "names", names, vanilla | own | confidence if with_head else set())
    expect_equal(LABEL, "tensors", bits(load(given, arena.device, made)), bits(build(arena.device, made)))


def test_f5_7_the_projections_are_where_the_attention_reads_them(arena: Arena) -> None:
    """Compared with the checkpoint directly: Q rows first, then K, then V; gate, then up; and still one buffer."""
    given, made = state(), CONFIG
    model = load(given, arena.device)
    sizes = [made.num_heads * made.head_dim, *[made.num_kv_heads * made.head_dim] * 2]
    for index, attention in enumerate(model.attentions):
        layer = f"layers.{index}"
        for name, part in zip("qkv", attention.qkv_proj.weight.split(sizes), strict=True):
            expect_equal(
                LABEL, f"{layer} {name}", to_bits(part), to_bits(given[f"{layer}.self_attn.{name}_proj.weight"])
            )
        mlp: Any = model.layers[index].mlp
        for name, part in zip(("gate", "up"), mlp.gate_up_proj.weight.chunk(2), strict=True):
            expect_equal(LABEL, f"{layer} {name}", to_bits(part), to_bits(given[f"{layer}.mlp.{name}_proj.weight"]))
    storages = {part.qkv_proj.weight.untyped_storage().data_ptr() for part in model.attentions}
    expect_equal(LABEL, "storages of the QKV weights", len(storages), 1)


def test_a_reader_may_use_one_buffer_for_all_tensors(arena: Arena) -> None:
    """Streamed: each tensor is overwritten when the next is asked for, and only one is alive at a time."""
    given, asked = state(REDUCED), []
    given["d2t"] = OFFSETS
    given["t2d"] = torch.zeros(40, dtype=torch.bool)
    given["t2d"][torch.arange(4) + OFFSETS] = True
    given["lm_head.weight"] = folded()[torch.arange(4) + OFFSETS]
    buffer = torch.empty(max(tensor.nbytes for tensor in given.values()), dtype=torch.uint8)

    def reader() -> Iterator[tuple[str, torch.Tensor]]:
        for name in sorted(given, reverse=True):
            buffer.fill_(0x7F)
            asked.append(name)
            view = buffer[: given[name].nbytes].view(given[name].dtype).view(given[name].shape)
            yield name, view.copy_(given[name])
        buffer.fill_(0x7F)

    model = blank(arena.device, REDUCED)
    report = load_weights(model, reader())
    need = build(arena.device, REDUCED).state_dict() | {"d2t": OFFSETS}
    expect_equal(LABEL, "tensors", bits(model), {name: to_bits(t).tobytes() for name, t in need.items()})
    expect_equal(LABEL, "each once", asked, sorted(given, reverse=True))
    compared = ("t2d", "lm_head.weight")
    own = tuple(name for name in asked if name not in compared)
    expect_equal(LABEL, "report", report, LoadReport(own, compared, ()))


def without(*names: str) -> Change:
    return lambda given: {name: tensor for name, tensor in given.items() if name not in names}


def put(name: str, make: Callable[[State], torch.Tensor]) -> Change:
    return lambda given: {**given, name: make(given)}


Q, GATE, W1 = "layers.1.self_attn.q_proj.weight", "layers.0.mlp.gate_proj.weight", "markov_head.markov_w1.weight"
BAD: dict[str, tuple[tuple[str, ...], Change]] = {
    "unknown": (("extra.weight", "unknown", "skip"), put("extra.weight", lambda g: g["fc.weight"])),
    "unknown-layer": (
        ("layers.2.mlp.down_proj.weight", "unknown"),
        put("layers.2.mlp.down_proj.weight", lambda g: g[GATE]),
    ),
    "unknown-bias": (("q_proj.bias", "unknown"), put("layers.1.self_attn.q_proj.bias", lambda g: torch.zeros(64))),
    "unknown-rotary-buffer": (
        ("rotary_emb.inv_freq", "unknown"),
        put("layers.0.self_attn.rotary_emb.inv_freq", lambda g: torch.zeros(4)),
    ),
    "unknown-prefix-twice": (
        ("model.model.fc.weight", "unknown"),
        put("model.model.fc.weight", lambda g: g["fc.weight"]),
    ),
    "unknown-two-prefixes": (
        ("dspark.model.fc.weight", "unknown"),
        put("dspark.model.fc.weight", lambda g: g["fc.weight"]),
    ),
    "unknown-map-without-a-reduced-vocabulary": (("d2t", "unknown"), put("d2t", lambda g: torch.zeros(40).long())),
    "missing": (("fc.weight", "missing"), without("fc.weight")),
    "missing-bias": (("confidence_head.proj.bias", "missing"), without("confidence_head.proj.bias")),
    "missing-piece": ((Q, "missing"), without(Q)),
    "missing-two": ((GATE, W1, "missing", "2"), without(GATE, W1)),
    "missing-all-pieces": (
        ("layers.1.self_attn.qkv_proj.weight", "missing"),
        without(*(f"layers.1.self_attn.{name}_proj.weight" for name in "qkv")),
    ),
    "missing-everything": (("missing", "first of 23"), lambda given: {}),
    "duplicate-under-a-prefix": (("model.fc.weight", "duplicate"), put("model.fc.weight", lambda g: g["fc.weight"])),
    "duplicate-confidence": (
        ("confidence_head.weight", "duplicate", "proj"),
        put("confidence_head.weight", lambda g: g["confidence_head.proj.weight"]),
    ),
    "duplicate-packed-and-a-piece": (
        ("layers.1.self_attn.qkv_proj.weight", "duplicate"),
        put("layers.1.self_attn.qkv_proj.weight", lambda g: torch.zeros(128, 32).bfloat16()),
    ),
    "shape": (("fc.weight", "(32, 95)", "(32, 96)"), put("fc.weight", lambda g: g["fc.weight"][:, 1:])),
    "shape-of-a-piece": ((Q, "(63, 32)", "(64, 32)"), put(Q, lambda g: g[Q][1:])),
    "shape-transposed": ((W1, "(4, 40)", "(40, 4)"), put(W1, lambda g: g[W1].T)),
    "shape-of-a-vector": (
        ("confidence_head.proj.weight", "(36,)", "(1, 36)"),
        put("confidence_head.proj.weight", lambda g: g["confidence_head.proj.weight"][0]),
    ),
    "dtype-wider": (("fc.weight", "float32", "bfloat16"), put("fc.weight", lambda g: g["fc.weight"].float())),
    "dtype-half": ((Q, "float16", "bfloat16"), put(Q, lambda g: g[Q].half())),
    "dtype-double": (("norm.weight", "float64"), put("norm.weight", lambda g: g["norm.weight"].double())),
    "dtype-fp8": ((GATE, "float8_e4m3fn"), put(GATE, lambda g: g[GATE].to(torch.float8_e4m3fn))),
    "dtype-integer": ((W1, "int16", "bfloat16"), put(W1, lambda g: g[W1].view(torch.int16))),
    "embedding-of-another-width": (
        ("embed_tokens.weight", "(44, 31)", "32"),
        put("embed_tokens.weight", lambda g: torch.zeros(44, 31)),
    ),
    "embedding-without-the-mask-row": (
        ("embed_tokens.weight", "(43, 32)", ">= 44"),
        put("embed_tokens.weight", lambda g: torch.zeros(43, 32)),
    ),
    "head-of-another-width": (
        ("lm_head.weight", "(44, 31)", "32"),
        put("lm_head.weight", lambda g: torch.zeros(44, 31)),
    ),
    "head-without-all-rows": (
        ("lm_head.weight", "(39, 32)", ">= 40"),
        put("lm_head.weight", lambda g: torch.zeros(39, 32)),
    ),
}


@pytest.mark.parametrize("bad", BAD)
def test_f1_26_nothing_is_dropped_or_guessed(bad: str, arena: Arena) -> None:
    names, change = BAD[bad]
    expect_raises(LABEL, CheckpointError, names, lambda: load(change(state()), arena.device))


def test_no_confidence_head_wanted_means_none_supplied(arena: Arena) -> None:
    made = config(confidence_head=False)
    expect_raises(
        LABEL, CheckpointError, ["confidence_head.proj", "unknown"], lambda: load(state(), arena.device, made)
    )


SKIPS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "by-name": (("model.extra.weight", "other.bias"), ("model.extra.weight", "other.bias")),
    "by-pattern": (("*.extra.*", "other.bias", "never.there"), ("model.extra.weight", "other.bias")),
}


@pytest.mark.parametrize("kind", SKIPS)
def test_f5_7_consumed_is_supplied_less_the_explicit_skips(kind: str, arena: Arena) -> None:
    skip, skipped = SKIPS[kind]
    given = state() | {"model.extra.weight": torch.zeros(1), "other.bias": torch.zeros(1)}
    given["embed_tokens.weight"] = shared(torch.device("cpu"))[0].weight.detach()
    given["model.lm_head.weight"] = folded()
    model = blank(arena.device)
    report = load_weights(model, given.items(), skip=skip)
    expect_equal(LABEL, "skipped", report.skipped, skipped)
    expect_equal(LABEL, "compared", report.compared, ("embed_tokens.weight", "model.lm_head.weight"))
    expect_equal(LABEL, "consumed", len(report.loaded) + len(report.compared), len(given) - len(skipped))
    expect_equal(LABEL, "each once", sorted((*report.loaded, *report.compared, *skipped)), sorted(given))
    expect_equal(LABEL, "tensors", bits(model), bits(build(arena.device)))


def test_a_skip_is_for_the_name_as_it_is_spelled(arena: Arena) -> None:
    """``extra`` does not skip ``extra.weight``, and a model tensor that is skipped is missing."""
    given = put("extra.weight", lambda g: g["fc.weight"])(state())
    expect_raises(LABEL, CheckpointError, ["extra.weight"], lambda: load(given, arena.device, skip=("extra",)))
    expect_raises(LABEL, CheckpointError, ["fc.weight", "missing"], lambda: load(state(), arena.device, skip=("fc.*",)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_f2_12_one_is_added_to_w_exactly_once_in_fp32(dtype: torch.dtype, arena: Arena) -> None:
    """w = 2^-9 among them, which is nothing beside 1 in bf16; norms of heads and of rows alike, nothing else."""
    made, given = config(gemma_norm=True), {}
    for name, tensor in state().items():
        is_norm = name.endswith("norm.weight")
        w = round_to(BF16, Stream(f"gemma/{name}").normal(tuple(tensor.shape)) / 20)
        w.flat[0] = 2.0**-9
        given[name] = torch.from_numpy(w).to(dtype) if is_norm else tensor
    model = load(given, arena.device, made)
    norms = 0
    for name, tensor in model.state_dict().items():
        if name.endswith("norm.weight"):
            need = round_to(FP32, 1 + given[name].double().numpy())
            expect_equal(LABEL, name, decode(FP32, to_bits(tensor)).tolist(), need.tolist())
            norms += 1
    expect_equal(LABEL, "norms", norms, 2 + 4 * made.num_layers)
    expect_equal(LABEL, "fc", to_bits(model.fc.weight), to_bits(given["fc.weight"]))


def folded(scale: float = 24.0) -> torch.Tensor:
    """The target's head with its multiplier folded in, as it would be stored."""
    return (shared(torch.device("cpu"))[1].weight.detach().double() / scale).to(torch.bfloat16)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "dspark" and "checkpoint" in record.msg]


OTHER = replace(TARGET, logits_mup_width_multiplier=None)
GUARD: dict[str, tuple[TargetConfig, Callable[[], torch.Tensor] | None, HeadScale | None, tuple[str, ...] | int]] = {
    "own-head-folded": (TARGET, folded, None, 0),
    "own-head-folded-in-fp32": (TARGET, lambda: folded(1.0).float() / 24.0, None, 0),
    "own-head-unfolded": (TARGET, lambda: folded(1.0), None, ("lm_head.weight", "40 of 40", "24.0", "factor of 24")),
    "own-head-folded-twice": (TARGET, lambda: folded(576.0), None, ("lm_head.weight", "factor of 0.0416")),
    "own-head-unfolded-without-multiplier": (OTHER, lambda: folded(1.0), None, 0),
    "own-head-folded-without-multiplier": (OTHER, folded, None, ("lm_head.weight", "None", "factor of 0.0416")),
    "own-head-of-another-model": (
        TARGET,
        lambda: folded().flip(0),
        None,
        ("lm_head.weight", "40 of 40 rows", "factor of 0.99"),
    ),
    "own-head-with-one-other-element": (
        TARGET,
        lambda: changed(folded(), 39),
        None,
        ("lm_head.weight", "1 of 40 rows"),
    ),
    "own-head-with-other-padding": (TARGET, lambda: changed(folded(), 40), None, 0),
    "own-head-of-nan": (TARGET, lambda: folded() * float("nan"), None, ("lm_head.weight", "40 of 40 rows")),
    "own-head-of-the-true-vocabulary": (TARGET, lambda: folded()[:40], None, 0),
    "fingerprint": (TARGET, None, fingerprint(), 0),
    "fingerprint-unfolded": (
        TARGET,
        None,
        fingerprint(OTHER),
        (METADATA_KEY, "multiplier None", "24.0", "factor of 24"),
    ),
    "fingerprint-of-1.02-times": (TARGET, None, HeadScale(24.0, fingerprint().rms * 1.02), (METADATA_KEY, "1.02")),
    "fingerprint-of-0.98-times": (TARGET, None, HeadScale(24.0, fingerprint().rms * 0.98), (METADATA_KEY, "0.98")),
    "fingerprint-of-an-fp8-head": (TARGET, None, HeadScale(24.0, fingerprint().rms * 1.005), 0),
    "fingerprint-without-multiplier": (OTHER, None, fingerprint(OTHER), 0),
    "fingerprint-folded-without-multiplier": (OTHER, None, fingerprint(), (METADATA_KEY, "0.0416")),
    "both": (TARGET, folded, fingerprint(), 0),
    "both-fingerprint-wrong": (TARGET, folded, fingerprint(OTHER), (METADATA_KEY,)),
    "both-head-wrong": (TARGET, lambda: folded(1.0), fingerprint(), ("lm_head.weight",)),
    "neither": (TARGET, None, None, 1),
    "neither-without-multiplier": (OTHER, None, None, 1),
}


def changed(head: torch.Tensor, row: int) -> torch.Tensor:
    head[row, 3] = head[row, 3] * 1.0625 + 2**-20
    return head


@pytest.mark.parametrize("guard", GUARD)
def test_f1_10_the_scale_guard(guard: str, arena: Arena, caplog: pytest.LogCaptureFixture) -> None:
    """A mismatch is refused by name; one WARNING where nothing could be compared, none where it was."""
    target, own, scale, outcome = GUARD[guard]
    given = state() | ({} if own is None else {"lm_head.weight": own()})
    model = blank(arena.device, CONFIG, target)
    with caplog.at_level(logging.WARNING, "dspark"):
        if isinstance(outcome, tuple):
            call = lambda: load_weights(model, given.items(), head_scale=scale)  # noqa: E731
            expect_raises(LABEL, CheckpointError, outcome, call)
            outcome = 0
        else:
            load_weights(model, given.items(), head_scale=scale)
    found = warnings(caplog)
    expect_equal(LABEL, "warnings", len(found), outcome)
    if outcome:
        multiplier = str(target.logits_mup_width_multiplier)
        expect_equal(
            LABEL, "its text", all(part in found[0] for part in ("neither", "rests on the config", multiplier)), True
        )


class Quantized(nn.Module):
    """A head that only its own method can apply."""

    quant_method = "packed"

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(44, 32, dtype=torch.bfloat16))


def test_a_head_that_cannot_be_read_cannot_be_compared(arena: Arena, caplog: pytest.LogCaptureFixture) -> None:
    model = blank(arena.device)
    model.bind(model._bound().embed_tokens, Quantized())
    with caplog.at_level(logging.WARNING, "dspark"):
        load_weights(model, state().items(), head_scale=fingerprint())
    expect_equal(LABEL, "warnings", ["cannot be read" in text for text in warnings(caplog)], [True])
    given = state() | {"lm_head.weight": folded()}
    names = ["lm_head.weight", "Quantized", "skip"]
    expect_raises(LABEL, CheckpointError, names, lambda: load_weights(model, given.items()))
    expect_equal(LABEL, "a sharded head has no fingerprint", HeadScale.of(nn.Linear(32, 22), TARGET), None)
    integers = SimpleNamespace(weight=torch.ones(44, 32, dtype=torch.uint8))
    expect_equal(LABEL, "nor has one of integers", HeadScale.of(integers, TARGET), None)


def test_the_fingerprint_is_of_every_vth_row_divided(arena: Arena) -> None:
    """By its definition, in float64: rows 0, s, 2 s, ... of the true vocabulary; the padding counts for nothing."""
    vocab = 5000
    weight = round_to(BF16, Stream("fingerprint").normal((vocab + 8, 32)))
    weight[vocab:] = 1e30
    head = nn.Linear(32, vocab + 8, bias=False, dtype=torch.bfloat16, device=arena.device)
    head.weight.data.copy_(torch.from_numpy(weight))
    target = replace(TARGET, vocab_size=vocab, padded_vocab_size=vocab + 8)
    found = HeadScale.of(head, target)
    assert found is not None
    exact = np.sqrt((weight[:vocab:4] ** 2).mean()) / 24
    expect_equal(LABEL, "rms, to 40 bits", round(found.rms * 2**44), round(float(exact) * 2**44))
    expect_equal(LABEL, "text and back", HeadScale.from_text(found.to_text()), found)
    expect_equal(
        LABEL, "text and back without", HeadScale.from_text(HeadScale(None, 0.5).to_text()), HeadScale(None, 0.5)
    )


def test_scales_that_differ_by_just_so_much_agree() -> None:
    served = HeadScale(None, 1.0)
    HeadScale(None, 1.0 + 2.0**-6).require(served)
    other = HeadScale(None, 1.0 + 2.0**-6 + 2.0**-20)
    expect_raises(LABEL, CheckpointError, [METADATA_KEY], lambda: other.require(served))


def test_a_zero_of_the_targets_head_is_a_zero_of_the_folded_one(arena: Arena) -> None:
    model = blank(arena.device)
    head = model._bound().lm_head
    head.weight.data[3] = 0
    own = folded()
    own[3] = 0
    report = load_weights(model, (state() | {"lm_head.weight": own}).items())
    expect_equal(LABEL, "compared", report.compared, ("lm_head.weight",))


def test_an_embedding_that_cannot_be_read_cannot_be_compared(arena: Arena) -> None:
    model = blank(arena.device)
    packed = Quantized()
    packed.weight = nn.Parameter(torch.ones(44, 32, dtype=torch.uint8), requires_grad=False)
    model.bind(packed, model._bound().lm_head)
    given = state() | {"embed_tokens.weight": torch.ones(44, 32, dtype=torch.bfloat16)}
    names = ["embed_tokens.weight", "Quantized", "skip"]
    expect_raises(LABEL, CheckpointError, names, lambda: load_weights(model, given.items(), head_scale=fingerprint()))


BAD_TEXTS = ("", "7", "[]", "{}", '{"rms": 1.0}', '{"rms": 1, "multiplier": null}', '{"rms": NaN, "multiplier": null}')


@pytest.mark.parametrize(
    "text",
    [
        *BAD_TEXTS,
        '{"rms": 0.0, "multiplier": null}',
        '{"rms": -1.0, "multiplier": null}',
        '{"rms": 1.0, "multiplier": true}',
    ],
)
def test_a_fingerprint_that_is_none(text: str, arena: Arena) -> None:
    expect_raises(LABEL, CheckpointError, [METADATA_KEY], lambda: HeadScale.from_text(text))


EMBEDDINGS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], tuple[str, ...]]] = {
    "equal": (lambda e: e, ()),
    "equal-in-fp32": (lambda e: e.float(), ()),
    "more-rows": (lambda e: torch.cat([e, e]), ()),
    "other-padding": (lambda e: torch.cat([e[:40], e[:3], e[43:]]), ()),
    "another-mask-row": (lambda e: torch.cat([e[:43], e[:1]]), ("embed_tokens.weight", "1 of 41", "43")),
    "another-first-row": (lambda e: torch.cat([e[1:2], e[1:]]), ("embed_tokens.weight", "1 of 41", "first 0", "skip")),
    "nan": (lambda e: e * float("nan"), ("embed_tokens.weight", "41 of 41")),
}


@pytest.mark.parametrize("kind", EMBEDDINGS)
def test_an_embedding_in_the_checkpoint_must_be_the_targets(kind: str, arena: Arena) -> None:
    """True ids and the mask token count; the rest of the padding is nobody's."""
    make, names = EMBEDDINGS[kind]
    given = state() | {"model.embed_tokens.weight": make(shared(torch.device("cpu"))[0].weight.detach())}
    if names:
        expect_raises(LABEL, CheckpointError, names, lambda: load(given, arena.device))
    else:
        expect_equal(LABEL, "tensors", bits(load(given, arena.device)), bits(build(arena.device)))


def test_what_is_compared_needs_a_target(arena: Arena) -> None:
    model = DSparkDraftModel(CONFIG, TARGET, device=arena.device)
    for name in ("lm_head.weight", "embed_tokens.weight"):
        given = [(name, torch.zeros(44, 32))]
        expect_raises(LABEL, CheckpointError, [name, "bind"], functools.partial(load_weights, model, given))
    twice = [
        (name, shared(torch.device("cpu"))[0].weight) for name in ("embed_tokens.weight", "model.embed_tokens.weight")
    ]
    expect_raises(LABEL, CheckpointError, ["duplicate"], lambda: load_weights(blank(arena.device), twice))


REDUCED_BAD: dict[str, tuple[tuple[str, ...], Change]] = {
    "map-missing": (("d2t", "missing"), without("d2t")),
    "map-of-another-length": (("d2t", "(3,)", "(4,)"), put("d2t", lambda g: OFFSETS[:3])),
    "map-floating": (("d2t", "float32"), put("d2t", lambda g: OFFSETS.float())),
    "F1-21-map-out-of-range": (("d2t", "40"), put("d2t", lambda g: OFFSETS + torch.tensor([0, 0, 0, 7]))),
    "F1-21-map-with-an-id-twice": (("d2t", "two draft ids"), put("d2t", lambda g: torch.tensor([3, 2, 29, 30]))),
    "mask-of-other-ids": (("t2d",), put("t2d", lambda g: torch.ones(40, dtype=torch.bool))),
    "head-of-other-rows": (("lm_head.weight",), put("lm_head.weight", lambda g: folded()[:4])),
}


@pytest.mark.parametrize("bad", REDUCED_BAD)
def test_a_reduced_vocabulary_needs_its_map(bad: str, arena: Arena) -> None:
    names, change = REDUCED_BAD[bad]
    given = change(state(REDUCED) | {"d2t": OFFSETS})
    expect_raises(LABEL, CheckpointError, names, lambda: load(given, arena.device, REDUCED))


@pytest.mark.parametrize("name", ["d2t", "model.draft_id_to_target_id"])
def test_f1_21_the_map_is_in_use_after_loading(name: str, arena: Arena) -> None:
    model = load(without("d2t")(state(REDUCED)) | {name: OFFSETS.int()}, arena.device, REDUCED)
    assert model.vocabulary is not None
    expect_equal(LABEL, "ids", model.vocabulary.target_ids.tolist(), [3, 6, 31, 33])


SAVED = {
    "plain": CONFIG,
    "gated": config(markov_head=MarkovKind.GATED),
    "rnn-and-no-confidence": config(markov_head=MarkovKind.RNN, confidence_head=False),
    "no-heads": config(markov_head=None, markov_rank=0, confidence_head=False),
    "F2-12-gemma": config(gemma_norm=True),
    "window-and-convention": config(sliding_window=9, causal=True, sample_from_anchor=False),
    "reduced": REDUCED,
}


@pytest.mark.parametrize("kind", SAVED)
def test_what_is_saved_is_read_back_bit_for_bit(
    kind: str, arena: Arena, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = SAVED[kind]
    model = build(arena.device, made)
    if made.gemma_norm:
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.data.copy_(1 + (parameter - 1).bfloat16().float())
    folder = tmp_path / "new" / "draft"
    save_draft(model, folder)
    expect_equal(LABEL, "files", sorted(path.name for path in folder.iterdir()), ["config.json", "model.safetensors"])
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        names, text = set(file.keys()), file.metadata()[METADATA_KEY]
    served = HeadScale.of(model._bound().lm_head, TARGET)
    expect_equal(LABEL, "fingerprint", HeadScale.from_text(text), served)
    expect_equal(LABEL, "packed names in the file", [name for name in names if "qkv" in name or "gate_up" in name], [])
    with caplog.at_level(logging.WARNING, "dspark"):
        back = load_draft(folder, TARGET, *shared(arena.device), device=arena.device)
    expect_equal(LABEL, "tensors", bits(back), bits(model))
    expect_equal(LABEL, "config", back.config, made)
    expect_equal(LABEL, "warnings", warnings(caplog), [])
    expect_equal(LABEL, "for serving", (back.training, any(p.requires_grad for p in back.parameters())), (False, False))
    unfolded = replace(TARGET, logits_mup_width_multiplier=None)
    refused = lambda: load_draft(folder, unfolded, *shared(arena.device), device=arena.device)  # noqa: E731
    expect_raises(LABEL, CheckpointError, [METADATA_KEY, "multiplier 24.0", "multiplier None"], refused)


def test_saving_what_cannot_be_read_back(arena: Arena, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    unbound = DSparkDraftModel(CONFIG, TARGET, device=arena.device)
    expect_raises(LABEL, CheckpointError, ["bind"], lambda: save_draft(unbound, tmp_path / "unbound"))
    gemma = build(arena.device, config(gemma_norm=True))
    gemma.norm.weight.data[0] = 0.1
    expect_raises(LABEL, CheckpointError, ["norm.weight", "1 + w"], lambda: save_draft(gemma, tmp_path / "gemma"))
    model = build(arena.device)
    model.bind(model._bound().embed_tokens, Quantized())
    with caplog.at_level(logging.WARNING, "dspark"):
        save_draft(model, tmp_path / "quantized")
    expect_equal(LABEL, "warnings", ["no fingerprint" in text for text in warnings(caplog)], [True])
    with safe_open(tmp_path / "quantized" / "model.safetensors", framework="pt") as file:
        expect_equal(LABEL, "metadata", METADATA_KEY in file.metadata(), False)


def sharded(folder: Path, change: Callable[[dict[str, Any]], dict[str, Any]] = lambda index: index) -> Path:
    """A checkpoint in three shards with an index, which ``change`` may spoil."""
    given = state()
    weight_map: dict[str, str] = {}
    (folder / "config.json").write_text(json.dumps(CONFIG.to_config()))
    for number in range(3):
        shard = f"model-{number + 1:05}-of-00003.safetensors"
        part = {name: given[name] for name in sorted(given)[number::3]}
        metadata = {METADATA_KEY: fingerprint().to_text()} if number == 1 else None
        safetensors.torch.save_file(part, folder / shard, metadata=metadata)
        weight_map |= dict.fromkeys(part, shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps(change({"metadata": {}, "weight_map": weight_map})))
    return folder


def read(folder: Path, arena: Arena) -> DSparkDraftModel:
    return load_draft(folder, TARGET, *shared(arena.device), device=arena.device)


def test_shards_are_one_checkpoint(arena: Arena, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "dspark"):
        model = read(sharded(tmp_path), arena)
    expect_equal(LABEL, "tensors", bits(model), bits(build(arena.device)))
    expect_equal(LABEL, "warnings", warnings(caplog), [])


def mapped(change: Callable[[dict[str, str]], dict[str, str]]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda index: {**index, "weight_map": change(index["weight_map"])}


def moved(weight_map: dict[str, str]) -> dict[str, str]:
    return {**weight_map, "fc.weight": sorted(set(weight_map.values()) - {weight_map["fc.weight"]})[0]}


INDEXES: dict[str, tuple[tuple[str, ...], Callable[[dict[str, Any]], dict[str, Any]]]] = {
    "names-a-tensor-that-is-nowhere": (
        ("extra", "disagree"),
        mapped(lambda m: {**m, "extra": "model-00001-of-00003.safetensors"}),
    ),
    "leaves-a-tensor-out": (
        ("fc.weight", "disagree"),
        mapped(lambda m: {n: s for n, s in m.items() if n != "fc.weight"}),
    ),
    "names-another-shard": (("fc.weight", "disagree"), mapped(moved)),
    "names-a-file-that-is-not-there": (("gone.safetensors",), mapped(lambda m: {**m, "fc.weight": "gone.safetensors"})),
    "leaves-the-folder": (("../", "beside the index"), mapped(lambda m: {**m, "fc.weight": "../x.safetensors"})),
    "no-map": (("index.json", "weight_map"), lambda index: {}),
    "map-a-list": (("index.json", "weight_map"), lambda index: {"weight_map": ["a"]}),
    "file-not-a-name": (("index.json", "weight_map"), mapped(lambda m: {**m, "fc.weight": 7})),  # type: ignore[dict-item]
}


@pytest.mark.parametrize("bad", INDEXES)
def test_an_index_that_is_wrong(bad: str, arena: Arena, tmp_path: Path) -> None:
    names, change = INDEXES[bad]
    folder = sharded(tmp_path, change)
    expect_raises(LABEL, CheckpointError, names, lambda: read(folder, arena))


def test_files_that_are_wrong(arena: Arena, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG.to_config()))
    expect_raises(LABEL, CheckpointError, ["neither", "model.safetensors"], lambda: read(tmp_path, arena))
    (tmp_path / "model.safetensors").write_bytes(b"\0" * 40)
    expect_raises(LABEL, CheckpointError, ["model.safetensors"], lambda: read(tmp_path, arena))
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    expect_raises(LABEL, CheckpointError, ["need one of them"], lambda: read(tmp_path, arena))


def test_shards_with_two_fingerprints(arena: Arena, tmp_path: Path) -> None:
    folder = sharded(tmp_path)
    shard = folder / "model-00003-of-00003.safetensors"
    part = safetensors.torch.load_file(shard)
    for scale, fails in ((fingerprint(), False), (fingerprint(OTHER), True)):
        safetensors.torch.save_file(part, shard, metadata={METADATA_KEY: scale.to_text()})
        if fails:
            expect_raises(LABEL, CheckpointError, [METADATA_KEY, "2 fingerprints"], lambda: read(folder, arena))
        else:
            expect_equal(LABEL, "tensors", bits(read(folder, arena)), bits(build(arena.device)))


def test_a_wider_model_takes_what_is_stored(arena: Arena, tmp_path: Path) -> None:
    save_draft(build(arena.device), tmp_path)
    model = load_draft(tmp_path, TARGET, *shared(arena.device), dtype=torch.float32, device=arena.device)
    need = {name: tensor.float() for name, tensor in build(arena.device).state_dict().items()}
    expect_equal(LABEL, "tensors", bits(model), {name: to_bits(tensor).tobytes() for name, tensor in need.items()})
