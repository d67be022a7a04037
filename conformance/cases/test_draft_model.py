"""The draft model: alignment of block and context, conventions, wiring of layers, edges of positions and batches."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import nn

from dspark import dispatch, faults
from dspark.model import draft as draft_module
from dspark.model.block_attention import attend
from dspark.model.draft import DSparkDraftModel
from dspark.model.draft_rotary import INITIAL_ROWS
from dspark.model.drafting import Drafted
from dspark.model.kv_inject import write_target_hidden_kv
from dspark.model.mlp import GatedMLP
from dspark.model.rotary import RotaryTable
from dspark.runtime.pools import KVPool, StaleRowsError

from ..fixtures.calls.layout import expect_faults, usual_share
from ..fixtures.emulation import BF16, decode, round_to
from ..fixtures.envelope import Rotation, judge
from ..fixtures.guard import Arena, to_bits
from ..fixtures.ledger import Label, expect_equal, expect_raises, expect_within
from ..fixtures.oracles.rotary import table_rows
from ..fixtures.small_drafts import CONFIG, TARGET, build, config, fill, pool_for, shared, taps, with_context
from ..fixtures.streams import Stream

LABEL = Label("draft", "-")
PATHS = ("fused", "eager")


@pytest.fixture(autouse=True)
def _eager_where_no_path_is_named(request: pytest.FixtureRequest) -> Iterator[None]:
    """Kernels are slow in the interpreter: what a case does not say about paths, it does not pay for."""
    with nullcontext() if "path" in request.fixturenames else dispatch.forced("eager"):
        yield


@dataclass
class Gate:
    """What a layer's attention gate was given, and gave."""

    positions: torch.Tensor
    hidden: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


@dataclass
class Watched:
    """What went through a model: per layer its gate, and what each submodule was given and gave, by name."""

    gates: list[Gate] = field(default_factory=list)
    calls: dict[str, tuple[tuple[Any, ...], torch.Tensor]] = field(default_factory=dict)


@contextmanager
def watching(model: DSparkDraftModel) -> Iterator[Watched]:
    seen, handles = Watched(), []

    def gate(attention: Any) -> None:
        original = attention.project_qkv

        def project(positions: torch.Tensor, hidden: torch.Tensor, *, path: str | None = None) -> Any:
            parts = original(positions, hidden, path=path)
            seen.gates.append(Gate(positions.clone(), hidden.clone(), *(part.clone() for part in parts)))
            return parts

        attention.project_qkv = project

    def keep(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, given: tuple[Any, ...], result: torch.Tensor) -> None:
            seen.calls[name] = (given, result)

        return hook

    for name, module in model.named_modules():
        handles.append(module.register_forward_hook(keep(name)))
    for attention in model.attentions:
        gate(attention)
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()
        for attention in model.attentions:
            del attention.project_qkv


def judge_rotated(
    label: Label,
    what: str,
    out: torch.Tensor,
    projected: torch.Tensor,
    weight: torch.Tensor,
    positions: npt.NDArray[np.int64],
) -> None:
    """``out [T, heads, D]`` is the norm and rotation of ``projected`` at ``positions [T]``, by the oracle's table."""
    count, dim = out.shape[1:]
    angle = np.repeat(table_rows(positions, CONFIG.rotary_dim, CONFIG.rope.theta), count, axis=0).astype(np.float64)
    half = CONFIG.rotary_dim // 2
    rotation = Rotation(angle[:, :half], angle[:, half:], CONFIG.is_neox_style)
    x, got = (decode(BF16, to_bits(part)).reshape(-1, dim) for part in (projected, out))
    verdict = judge(got, x, weight.double().cpu().numpy(), CONFIG.eps, rotation)
    expect_within(label, what, verdict, single_share=usual_share(verdict.ok.size))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("n", [0, 7, 12000])
def test_f1_14_the_block_starts_where_the_context_ends(n: int, path: str, arena: Arena) -> None:
    """Queries at n, n + 1, ..., context K at 0 .. n - 1: K of the pool and of the block, by the oracle's angles."""
    model, label = build(arena.device, config(max_position=2**14)), Label("draft", path)
    checked = np.arange(max(n - 64, 0), n)
    pool, lens, locs = long_context(model, n, checked)
    with watching(model) as seen:
        model.hidden_block(torch.tensor([5], device=arena.device), lens, pool, locs, path=path)
    expect_equal(label, "gates", len(seen.gates), CONFIG.num_layers)
    positions = np.arange(n, n + CONFIG.gamma)
    for gate, attention in zip(seen.gates, model.attentions, strict=True):
        expect_equal(label, "query positions", to_bits(gate.positions), positions)
        projected = attention.qkv_proj(gate.hidden)
        q, k, v = attention._heads(projected)
        judge_rotated(label, "Q of the block", gate.q, q, attention.q_norm.weight, positions)
        judge_rotated(label, "K of the block", gate.k, k, attention.k_norm.weight, positions)
        expect_equal(label, "V of the block", to_bits(gate.v), to_bits(v))
    context = model.fuse_taps(taps(model, len(checked)))
    for layer, attention in enumerate(model.attentions if n else []):
        k, v = attention.kv_proj_only(context)
        stored = (part[locs[0, checked]] for part in pool.get_kv_buffer(layer))
        judge_rotated(label, "K of the context", next(stored), k, attention.k_norm.weight, checked)
        expect_equal(label, "V of the context", to_bits(next(stored)), to_bits(v))


def long_context(
    model: DSparkDraftModel, n: int, written: npt.NDArray[np.int64]
) -> tuple[KVPool, torch.Tensor, torch.Tensor]:
    """n positions of context, the last ones written; those before them share the pool row of the first that is."""
    device = model.fc.weight.device
    count, pool = len(written), pool_for(model, len(written) + 3)
    rows = torch.from_numpy(Stream("long").permutation(count + 3)[:count]).to(device)
    with dispatch.forced("eager"):
        model.ensure_positions(n)
        model.write_context(pool, taps(model, count), torch.from_numpy(written).to(device), rows)
    locs = torch.cat([rows[:1].expand(n - count), rows])[None] if n else torch.full((1, 1), 9, device=device)
    return pool, torch.tensor([n], device=device), locs


@dataclass(frozen=True)
class OneHotRows:
    """Stands for the layers: row r of every block is the unit vector r; records the widths asked for."""

    widths: list[int] = field(default_factory=list)

    def __call__(self, anchors: torch.Tensor, *given: Any, width: int, path: str | None) -> torch.Tensor:
        self.widths.append(width)
        rows = torch.eye(CONFIG.hidden_size, dtype=torch.bfloat16, device=anchors.device)[:width]
        return rows.expand(len(anchors), *rows.shape)


@pytest.mark.parametrize("gamma", [None, 1, 2, 5])
@pytest.mark.parametrize("from_anchor", [True, False])
def test_f1_15_row_r_encodes_r(from_anchor: bool, gamma: int | None, arena: Arena) -> None:
    """With the anchor's row, drafts come from rows 0 .. gamma - 1; without, from rows 1 .. gamma of gamma + 1."""
    plain = config(sample_from_anchor=from_anchor, markov_head=None, markov_rank=0, confidence_head=False)
    model = build(arena.device, plain)
    rows = OneHotRows()
    model.hidden_block = rows  # type: ignore[method-assign, assignment]
    head = nn.Linear(CONFIG.hidden_size, TARGET.padded_vocab_size, bias=False, dtype=torch.bfloat16)
    head.weight.data.copy_(torch.eye(TARGET.padded_vocab_size, CONFIG.hidden_size))
    model.bind(model._bound().embed_tokens, head.to(arena.device))
    pool, lens, locs = pool_for(model, 4), torch.tensor([2, 1]), torch.zeros(2, 3, dtype=torch.int64)
    anchors = torch.tensor([9, 11], device=arena.device)
    drafted = model.draft(anchors, lens.to(arena.device), pool, locs.to(arena.device), gamma=gamma)
    count, first = gamma or CONFIG.gamma, 0 if from_anchor else 1
    expect_equal(LABEL, "width", rows.widths, [count + first])
    expect_equal(LABEL, "drafts", drafted.tokens.tolist(), [list(range(first, first + count))] * 2)


def test_f1_10_base_logits_divide_once_and_the_heads_see_the_undivided_rows(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(arena.device)
    given: dict[str, tuple[Any, ...]] = {}

    def base_logits(hidden: torch.Tensor, lm_head: Any, **options: Any) -> torch.Tensor:
        given["base"] = (hidden, lm_head, options)
        return torch.zeros(*hidden.shape[:2], TARGET.vocab_size, device=hidden.device)

    def greedy(base: torch.Tensor, hidden: torch.Tensor, anchors: torch.Tensor, *heads: Any, **options: Any) -> Drafted:
        given["greedy"] = (hidden, anchors, heads, options)
        return Drafted(torch.zeros(hidden.shape[:2], dtype=torch.int64), None, None)

    monkeypatch.setattr(draft_module, "compute_base_logits", base_logits)
    monkeypatch.setattr(draft_module, "draft_greedy", greedy)
    pool, lens, locs = with_context(model, [3, -1], 4)
    anchors = torch.tensor([5, 6], device=arena.device)
    model.draft(anchors, lens, pool, locs, keep_logits=True, path="eager", group="ranks")
    hidden, head, options = given["base"]
    expect_equal(LABEL, "the head is the target's", head is model._bound().lm_head, True)
    multiplier = TARGET.logits_mup_width_multiplier
    need = {"vocab_size": 40, "mup_width_multiplier": multiplier, "group": "ranks", "path": "eager"}
    expect_equal(LABEL, "options of the base logits", options, need)
    rows, cleaned, heads, options = given["greedy"]
    expect_equal(LABEL, "one hidden for both", rows is hidden, True)
    whole = model.hidden_block(anchors, lens, pool, locs, path="eager")
    expect_equal(LABEL, "undivided", to_bits(hidden), to_bits(whole))
    expect_equal(LABEL, "anchors, -1 where padded", cleaned.tolist(), [5, -1])
    expect_equal(LABEL, "heads", [head is own for head, own in zip(heads, owned(model), strict=True)], [True, True])
    expect_equal(LABEL, "options of the chain", options, {"vocabulary": None, "keep_logits": True})


def owned(model: DSparkDraftModel) -> list[Any]:
    return [model.markov_head, model.confidence_head]


@pytest.mark.parametrize("path", PATHS)
def test_what_each_part_is_given(path: str, arena: Arena) -> None:
    """The wiring by bits: pre-norm, attention over context and block, residual, pre-norm, MLP, residual, norm."""
    model, label = build(arena.device), Label("draft", path)
    pool, lens, locs = with_context(model, [4, 0, 2], 5)
    anchors = torch.tensor([5, 6, 0], device=arena.device)
    with watching(model) as seen:
        result = model.hidden_block(anchors, lens, pool, locs, path=path)
    mask = torch.full((3, 2), CONFIG.mask_token_id, device=arena.device)
    stream = model._bound().embed_tokens(torch.cat([anchors[:, None], mask], dim=1))
    for index, attention in enumerate(model.attentions):
        layer = f"layers.{index}"
        stream = after(label, seen, layer, stream)
        expect_equal(label, f"rows of gate {index}", to_bits(seen.gates[index].hidden), to_bits(flat(seen, layer)))
        mixed = attention_of(model, pool, lens, locs, seen.gates[index], index)
        expect_equal(label, f"{layer} mixed", to_bits(seen.calls[f"{layer}.self_attn.o_proj"][0][0]), to_bits(mixed))
        expect_equal(label, f"{layer} heads", attention.layer_id, index)
    expect_equal(label, "input of the final norm", to_bits(seen.calls["norm"][0][0]), to_bits(stream))
    expect_equal(label, "result", to_bits(result), to_bits(seen.calls["norm"][1]))
    expect_equal(label, "shape", tuple(result.shape), (3, CONFIG.gamma, CONFIG.hidden_size))


def flat(seen: Watched, layer: str) -> torch.Tensor:
    return seen.calls[f"{layer}.input_layernorm"][1].flatten(0, 1)


def after(label: Label, seen: Watched, layer: str, stream: torch.Tensor) -> torch.Tensor:
    """The residual stream after a layer; what its parts were given is compared on the way."""
    calls = seen.calls
    for norm, part in (("input_layernorm", "self_attn"), ("post_attention_layernorm", "mlp")):
        expect_equal(label, f"{layer}.{norm}", to_bits(calls[f"{layer}.{norm}"][0][0]), to_bits(stream))
        normed, given = calls[f"{layer}.{norm}"][1], calls[f"{layer}.{part}"][0][0]
        expect_equal(label, f"input of {layer}.{part}", to_bits(given), to_bits(normed))
        both = (decode(BF16, to_bits(addend)) for addend in (stream, calls[f"{layer}.{part}"][1]))
        total = torch.from_numpy(round_to(BF16, sum(both))).to(torch.bfloat16).to(stream.device)
        stream = total
    return stream


def attention_of(
    model: DSparkDraftModel, pool: KVPool, lens: torch.Tensor, locs: torch.Tensor, gate: Gate, layer: int
) -> torch.Tensor:
    """Attention of each request alone, over exactly its context rows: what the batched call must equal by bits of the
    keys it may see. Masked columns are left out here, so the products are compared on the same number of terms."""
    requests, columns = locs.shape
    width = len(gate.q) // requests
    q, k, v = (part.unflatten(0, (requests, width)) for part in (gate.q, gate.k, gate.v))
    rows = locs.clone()
    seen = torch.arange(columns, device=locs.device) < lens[:, None]
    rows[~seen] = int(locs[0, 0])
    context = [part[rows] for part in pool.get_kv_buffer(layer)]
    visible = torch.cat([seen, torch.ones(requests, width, dtype=torch.bool, device=locs.device)], dim=1)
    keys, values = (torch.cat(pair, dim=1) for pair in zip(context, (k, v), strict=True))
    return attend(q, keys, values, visible[:, None].expand(-1, width, -1)).flatten(2)


@pytest.mark.parametrize(("causal", "window"), [(True, None), (False, 3), (True, 2), (False, None)])
def test_causal_and_window_come_from_the_config(causal: bool, window: int | None, arena: Arena) -> None:
    model = build(arena.device, config(causal=causal, sliding_window=window))
    pool, lens, locs = with_context(model, [4], 5)
    with watching(model) as seen:
        model.hidden_block(torch.tensor([5], device=arena.device), lens, pool, locs)
    at, keys = np.arange(4, 7)[:, None], np.concatenate([np.arange(5), np.arange(4, 7)])[None]
    exists = np.arange(8)[None] != 4
    need = exists & ~(causal & (keys > at)) & (at - keys < (window or 99))
    for layer in range(CONFIG.num_layers):
        given = seen.calls[f"layers.{layer}"][0]
        expect_equal(LABEL, f"seen in layer {layer}", to_bits(given[4][0]), need)


def test_taps_are_fused_in_ascending_order_of_their_layers(arena: Arena) -> None:
    """Column block i is tap i: integer taps through integer weights that differ by tap, then the norm."""
    model = build(arena.device)
    weight = Stream("fc").integers(-3, 4, tuple(model.fc.weight.shape)).astype(np.float64)
    rows = Stream("rows").integers(-4, 5, (5, weight.shape[1])).astype(np.float64)
    model.fc.weight.data.copy_(torch.from_numpy(weight))
    fused = model.fuse_taps(torch.from_numpy(rows).to(torch.bfloat16).to(arena.device))
    size = TARGET.hidden_size
    blocks = [rows[:, i * size : (i + 1) * size] @ weight[:, i * size : (i + 1) * size].T for i in range(3)]
    nothing = Rotation(np.zeros((5, 0)), np.zeros((5, 0)), True)
    own = model.hidden_norm.weight.double().cpu().numpy()
    verdict = judge(decode(BF16, to_bits(fused)), round_to(BF16, sum(blocks)), own, CONFIG.eps, nothing)
    expect_within(LABEL, "hidden rows", verdict, single_share=usual_share(verdict.ok.size))


@pytest.mark.parametrize("path", PATHS)
def test_context_is_the_fused_rows_through_every_attention_layer(path: str, arena: Arena) -> None:
    """With a committed window; one projection serves all layers, since the layers' weights lie in one buffer."""
    model, label = build(arena.device), Label("draft", path)
    rows, positions = taps(model, 8), torch.arange(3, 11, device=arena.device)
    locs = torch.from_numpy(Stream("locs").permutation(12)[:8]).to(arena.device)
    lens = torch.tensor([4, 1], device=arena.device)
    pools = [pool_for(model, 12), pool_for(model, 12)]
    with dispatch.forced(path), dispatch.observed() as outcomes:
        model.write_context(pools[0], rows, positions, locs, lens, 4)
    write = [outcome for outcome in outcomes if outcome.decision.op == "kv_inject"]
    expect_equal(label, "decisions", [(str(o.path), o.decision.reasons) for o in write], [(path, ())])
    with dispatch.forced(path), torch.no_grad():
        write_target_hidden_kv(model.attentions, pools[1], model.fuse_taps(rows), positions, locs.view(2, 4), lens)
    for layer in range(CONFIG.num_layers):
        for got, need in zip(*(pool.get_kv_buffer(layer) for pool in pools), strict=True):
            expect_equal(label, f"layer {layer}", to_bits(got), to_bits(need))
    written = np.zeros(12, np.bool_)
    written[to_bits(locs)[[0, 1, 2, 3, 4]]] = True
    expect_equal(label, "rows", to_bits(pools[0].valid_rows), written)


@pytest.mark.parametrize("path", PATHS)
def test_f2_12_norms_of_one_plus_w_are_plain_multipliers_in_fp32(path: str, arena: Arena) -> None:
    """1 + 2^-9 is no bf16: the parameter holds it, and the table paths take it without a reason against it."""
    model, label = build(arena.device, config(gemma_norm=True)), Label("draft", path)
    norms = {name: part.weight for name, part in model.named_modules() if name.endswith("norm")}
    expect_equal(label, "dtypes", {str(weight.dtype) for weight in norms.values()}, {"torch.float32"})
    expect_equal(label, "norms", len(norms), 2 + 4 * CONFIG.num_layers)
    for weight in norms.values():
        weight.data.fill_(1 + 2**-9)
    pool = pool_for(model, 8)
    rows = taps(model, 6)
    index = torch.arange(6, device=arena.device)
    with dispatch.forced(path), dispatch.observed() as outcomes:
        model.write_context(pool, rows, index, index)
        seq, anchor = torch.tensor([6], device=arena.device), torch.tensor([1], device=arena.device)
        model.hidden_block(anchor, seq, pool, index[None])
    gates = [o for o in outcomes if o.decision.op in ("kv_inject", "attention", "qk_norm_rope", "kv_write")]
    expect_equal(label, "reasons", {o.decision.reasons for o in gates}, {()})
    expect_equal(label, "paths", {str(o.path) for o in gates}, {path})
    for layer, attention in enumerate(model.attentions):
        k, _ = attention.kv_proj_only(model.fuse_taps(rows))
        stored = pool.get_key_buffer(layer)[:6]
        judge_rotated(label, "K", stored, k, attention.k_norm.weight, np.arange(6))


@pytest.mark.parametrize("width", [3, 5])
@pytest.mark.parametrize("n", [60, 61, 63, 64])
def test_f1_9_a_block_that_crosses_max_position(n: int, width: int, arena: Arena) -> None:
    """No fault: rows that exist keep their positions, those past the end share the last one."""
    model = build(arena.device)
    pool, lens, locs = with_context(model, [n, 2], 64)
    with watching(model) as seen:
        anchors = torch.tensor([5, 6], device=arena.device)
        hidden = model.hidden_block(anchors, lens, pool, locs, width=width)
    need = np.concatenate([np.minimum(np.arange(n, n + width), 63), np.arange(2, 2 + width)])
    expect_equal(LABEL, "positions", to_bits(seen.gates[0].positions), need)
    expect_equal(LABEL, "finite", bool(torch.isfinite(hidden).all()), True)
    expect_equal(LABEL, "rows of the table", model.rotary.rows, 64)


def test_f1_9_context_is_written_up_to_max_position_and_no_further(arena: Arena) -> None:
    model, index = build(arena.device), torch.arange(62, 66, device=arena.device)
    rows, locs = taps(model, 4), torch.arange(4, device=arena.device)
    pool = pool_for(model, 128)
    model.write_context(pool, rows, index, locs, torch.tensor([2], device=arena.device), 4)
    expect_equal(LABEL, "rows", pool.valid_rows.nonzero()[:, 0].tolist(), [0, 1])
    expect_equal(LABEL, "rows of the table", model.rotary.rows, 64)
    op = "kv_write"
    expect_faults(LABEL, lambda: model.write_context(pool, rows, index, locs), [(op, "position-out-of-range")])


def test_the_table_grows_with_the_positions_in_use(arena: Arena) -> None:
    """By the pool's rows and the columns of the context, for all layers; rows that were there keep their bits."""
    model = build(arena.device, config(max_position=20_000))
    old = model.rotary.cos_sin_cache
    expect_equal(LABEL, "rows at first", model.rotary.rows, INITIAL_ROWS)
    index, rows = torch.tensor([8000], device=arena.device), taps(model, 1)
    model.write_context(pool_for(model, 8001), rows, index, index)
    expect_equal(LABEL, "rows for the pool", model.rotary.rows, 2 * INITIAL_ROWS)
    lens, locs = torch.tensor([0], device=arena.device), torch.full((1, 8192), -1, device=arena.device)
    model.hidden_block(torch.tensor([1], device=arena.device), lens, pool_for(model, 64), locs)
    expect_equal(LABEL, "rows for the block", model.rotary.rows, 4 * INITIAL_ROWS)
    model.ensure_positions(10**9)
    expect_equal(LABEL, "rows at most", model.rotary.rows, 20_000)
    expect_equal(LABEL, "one table", {id(part.rotary_emb) for part in model.attentions}, {id(model.rotary)})
    expect_equal(LABEL, "old rows", to_bits(model.rotary.cos_sin_cache[:INITIAL_ROWS]), to_bits(old))


def test_the_targets_table_is_used_where_it_has_one(arena: Arena) -> None:
    table = RotaryTable(CONFIG.rotary_dim, 5e5, 64, device="meta")
    model = DSparkDraftModel(CONFIG, TARGET, rotary=table, device=arena.device)
    expect_equal(LABEL, "one object", {id(part.rotary_emb) for part in model.attentions}, {id(table)})
    model.to(arena.device)
    expect_equal(LABEL, "the target's table stays where it is", table.cos_sin_cache.device.type, "meta")


def test_f1_18_padded_rows_leave_the_others_their_bits(arena: Arena) -> None:
    """Whatever a padded row holds: a negative length, no locs, ids of no vocabulary."""
    model = build(arena.device)
    pool, lens, locs = with_context(model, [4, -1, 3, -1], 5)
    locs[1] = 2**40  # A negative length alone makes a padded row, and so do locs that are all negative (row 3).
    results = []
    for junk in (0, 0x7F7F7F7F7F7F7F7F, -7):
        anchors = torch.tensor([5, junk, 6, junk], device=arena.device)
        lens[3], lens[1] = 2, -1 if junk >= 0 else junk
        drafted = model.draft(anchors, lens, pool, locs, keep_logits=True)
        assert drafted.logits is not None
        tokens = drafted.tokens
        inside = bool(((tokens >= 0) & (tokens < TARGET.vocab_size)).all())
        expect_equal(LABEL, "inside the vocabulary", inside, True)
        results.append((tokens[[0, 2]].tolist(), to_bits(drafted.logits[[0, 2]])))
    for chosen, logits in results[1:]:
        expect_equal(LABEL, "tokens", chosen, results[0][0])
        expect_equal(LABEL, "logits", logits, results[0][1])


def test_entries_past_the_length_are_never_looked_at(arena: Arena) -> None:
    model = build(arena.device)
    pool, lens, locs = with_context(model, [4, 2], 6)
    anchors = torch.tensor([5, 6], device=arena.device)
    results = []
    for junk in (2**40, -1, 0, -(2**62)):
        given = locs.clone()
        given[0, 4:], given[1, 2:] = junk, junk
        results.append(to_bits(model.hidden_block(anchors, lens, pool, given)))
    for result in results[1:]:
        expect_equal(LABEL, "hidden", result, results[0])


@pytest.mark.lanes("interpret")
def test_f1_5_a_stale_row_of_the_context_is_refused(arena: Arena) -> None:
    """On the CPU always; on a GPU with DSPARK_DEBUG=1."""
    model = build(arena.device)
    pool, lens, locs = with_context(model, [4], 6)
    pool.free(locs[0, 1:2])
    anchors = torch.tensor([5], device=arena.device)
    row = int(locs[0, 1])
    expect_raises(LABEL, StaleRowsError, [f"[{row}]"], lambda: model.draft(anchors, lens, pool, locs))


@pytest.mark.parametrize(
    ("anchor", "length", "loc", "kind"),
    [
        (40, 4, 0, "anchor-out-of-range"),
        (-1, 4, 0, "anchor-out-of-range"),
        (2**40, 4, 0, "anchor-out-of-range"),
        (5, 7, 0, "seq-len-out-of-range"),
        (5, 4, 99, "loc-out-of-range"),
        (39, 4, 0, None),
        (40, 0, 0, "anchor-out-of-range"),
    ],
    ids=str,
)
def test_index_faults(anchor: int, length: int, loc: int, kind: str | None, arena: Arena) -> None:
    model = build(arena.device)
    pool, _, locs = with_context(model, [6], 6)
    locs[0, 2] += loc
    lens = torch.tensor([length], device=arena.device)
    anchors = torch.tensor([anchor], device=arena.device)
    expect_faults(LABEL, lambda: model.draft(anchors, lens, pool, locs), [("draft", kind)] if kind else [])


def test_pool_row_zero_is_a_row_too(arena: Arena) -> None:
    """A request whose context is pool row 0 alone is not a padded one: its anchor is looked at."""
    model = build(arena.device)
    pool, _, _ = with_context(model, [1], 2)
    pool.valid_rows[0] = True
    lens, locs = torch.tensor([1], device=arena.device), torch.tensor([[0, -1]], device=arena.device)
    anchors = torch.tensor([40], device=arena.device)
    expect_faults(LABEL, lambda: model.draft(anchors, lens, pool, locs), [("draft", "anchor-out-of-range")])


def test_logits_are_kept_where_they_are_asked_for(arena: Arena) -> None:
    model = build(arena.device)
    pool, lens, locs = with_context(model, [2], 4)
    anchors = torch.tensor([3], device=arena.device)
    kept = model.draft(anchors, lens, pool, locs, keep_logits=True)
    found = [drafted.logits is not None for drafted in (model.draft(anchors, lens, pool, locs), kept)]
    expect_equal(LABEL, "logits", found, [False, True])


def test_a_table_that_grows_is_refused_during_a_capture(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that are there are no growth."""
    model, asked = build(arena.device), list[str]()
    monkeypatch.setattr(faults, "refuse_in_capture", asked.append)
    model.ensure_positions(model.rotary.rows)
    expect_equal(LABEL, "refused", asked, [])
    model.config = replace(model.config, max_position=2 * model.rotary.rows)
    model.ensure_positions(model.rotary.rows + 1)
    expect_equal(LABEL, "refused", len(asked), 1)


def test_f1_21_a_new_reduced_draft_has_a_vocabulary(arena: Arena) -> None:
    """The first ids, until a map is loaded."""
    vocabulary = build(arena.device, config(vocab_size=4, reduced_from=40)).vocabulary
    expect_equal(LABEL, "ids", None if vocabulary is None else vocabulary.target_ids.tolist(), [0, 1, 2, 3])


def test_f1_21_a_reduced_vocabulary_maps_draft_ids_to_target_ids(arena: Arena) -> None:
    """Of 40 target ids the draft proposes four, whatever the base logits prefer; the map follows a load and a move."""
    model = build(arena.device, config(vocab_size=4, reduced_from=40))
    assert model.markov_head is not None
    expect_equal(LABEL, "rows of W1, of W2", [len(p) for p in model.markov_head.parameters()], [40, 4])
    state = model.state_dict()
    state["d2t"] = torch.tensor([3, 5, 29, 30])
    model.load_state_dict(state)
    pool, lens, locs = with_context(model, [4, 2], 6)
    drafted = model.draft(torch.tensor([39, 0], device=arena.device), lens, pool, locs, keep_logits=True)
    assert drafted.logits is not None
    expect_equal(LABEL, "ids", set(drafted.tokens.flatten().tolist()) <= {3, 6, 31, 33}, True)
    finite = torch.isfinite(drafted.logits).all(dim=(0, 1)).nonzero()[:, 0].tolist()
    expect_equal(LABEL, "candidates", finite, [3, 6, 31, 33])
    moved = copy.deepcopy(model).to("meta")
    assert moved.vocabulary is not None
    expect_equal(LABEL, "device of the map", moved.vocabulary.target_ids.device.type, "meta")


def test_the_targets_modules_are_shared_and_not_owned(arena: Arena) -> None:
    model = build(arena.device)
    embed, head = model._bound().embed_tokens, model._bound().lm_head
    owned = {id(part) for part in model.modules()}
    expect_equal(LABEL, "modules", [id(embed) in owned, id(head) in owned], [False, False])
    expect_equal(LABEL, "names", [n for n in model.state_dict() if "embed" in n or "lm_head" in n], [])
    twin = copy.deepcopy(model)
    expect_equal(LABEL, "of a copy", [twin._bound().embed_tokens is embed, twin._bound().lm_head is head], [True, True])
    expect_equal(LABEL, "a copy has its own table, one for all", len({id(p.rotary_emb) for p in twin.attentions}), 1)
    expect_equal(LABEL, "which is not the original's", twin.rotary is model.rotary, False)
    expect_equal(LABEL, "and is the model's", twin.attentions[0].rotary_emb is twin.rotary, True)


def test_a_model_from_the_meta_device_gets_its_table(arena: Arena) -> None:
    """And keeps it in fp32 when its parameters are narrowed."""
    source, model = build(arena.device), DSparkDraftModel(CONFIG, TARGET, device="meta")
    expect_equal(LABEL, "on meta", {p.device.type for p in model.parameters()}, {"meta"})
    model.to_empty(device=arena.device).load_state_dict(source.state_dict())
    model.bind(*shared(arena.device))
    expect_equal(LABEL, "table", to_bits(model.rotary.cos_sin_cache), to_bits(source.rotary.cos_sin_cache))
    pool, lens, locs = with_context(model, [4], 6)
    anchors = torch.tensor([5], device=arena.device)
    same = [to_bits(part.hidden_block(anchors, lens, pool, locs)) for part in (model, source)]
    expect_equal(LABEL, "hidden", same[0], same[1])
    model.float().to(torch.bfloat16)
    expect_equal(LABEL, "dtype of the table", str(model.rotary.cos_sin_cache.dtype), "torch.float32")


def test_a_pool_that_divided_by_a_scale_is_multiplied_by_it(arena: Arena) -> None:
    """Context in fp8 over a scale of 4, and the same values in bf16: the same block."""
    model = build(arena.device)
    _, lens, locs = with_context(model, [4], 6)
    pools = [pool_for(model, 16), pool_for(model, 16, dtype=torch.float8_e4m3fn)]
    shape = (CONFIG.num_layers, 2, 16, CONFIG.num_kv_heads, CONFIG.head_dim)
    values = torch.from_numpy(Stream("fp8").integers(-8, 9, shape) / 4.0).to(arena.device)
    for factor, pool in zip((4.0, 1.0), pools, strict=True):
        pool.valid_rows[:] = True
        for layer in range(CONFIG.num_layers):
            for buffer, part in zip(pool.get_kv_buffer(layer), values[layer], strict=True):
                buffer.copy_((part * factor).to(buffer.dtype))
    anchors = torch.tensor([5], device=arena.device)
    plain = model.hidden_block(anchors, lens, pools[0], locs)
    for attention in model.attentions:
        attention.k_scale = attention.v_scale = 4.0
    expect_equal(LABEL, "hidden", to_bits(model.hidden_block(anchors, lens, pools[1], locs)), to_bits(plain))


def test_the_mlp_gates_the_first_half(arena: Arena) -> None:
    """silu is 0 at 0 and -256, and x at 256 and above, exactly; integer rows, so every product is exact."""
    mlp = GatedMLP(4, 3, dtype=torch.bfloat16, device=arena.device)
    gate = np.array([[256, 0, 0, 0], [0, -256, 0, 0], [0, 0, 512, 0]])
    up = np.array([[1, 2, 3, 4], [5, 6, 7, 8], [-1, 0, 2, 1]])
    down = np.array([[1, 2, 3], [0, -1, 1], [2, 0, 0], [1, 1, 1]])
    mlp.gate_up_proj.weight.data.copy_(torch.from_numpy(np.concatenate([gate, up])))
    mlp.down_proj.weight.data.copy_(torch.from_numpy(down))
    x = np.array([[1, 2, 0, 1], [2, 1, 1, 0], [0, 3, 1, 1]])
    opened = x @ gate.T
    product = round_to(BF16, (np.where(opened > 0, opened, 0) * (x @ up.T)).astype(np.float64))
    got = mlp(torch.from_numpy(x).to(torch.bfloat16).to(arena.device)).detach()
    expect_equal(LABEL, "rows", decode(BF16, to_bits(got)).tolist(), round_to(BF16, product @ down.T).tolist())


def test_the_mlp_rounds_its_product_once(arena: Arena) -> None:
    """silu(1) * up for 4096 values of up: bf16 of the fp32 product, which rounding silu first misses in a third."""
    count = 1024
    mlp = GatedMLP(1, count, dtype=torch.bfloat16, device=arena.device)
    up = round_to(BF16, 1 + Stream("mlp/up").uniform((count,)))
    mlp.gate_up_proj.weight.data.copy_(torch.from_numpy(np.concatenate([np.ones(count), up]))[:, None])
    given: list[torch.Tensor] = []
    mlp.down_proj.register_forward_pre_hook(lambda module, rows: given.append(rows[0]))
    mlp(torch.ones(1, 1, dtype=torch.bfloat16, device=arena.device))
    exact = up / (1 + np.exp(-1.0))
    low, high = (round_to(BF16, exact * (1 + sign * 2.0**-21)) for sign in (-1, 1))
    got = decode(BF16, to_bits(given[0]))[0]
    expect_equal(LABEL, "products inside their rounding", ((low <= got) & (got <= high)).tolist(), [True] * count)
    expect_equal(LABEL, "single valued", bool((low == high).mean() > 0.99), True)
    twice = round_to(BF16, up * round_to(BF16, 1 / (1 + np.exp(np.array([-1.0])))))
    expect_equal(LABEL, "two roundings would show", bool(((twice < low) | (twice > high)).mean() > 0.1), True)


def test_the_layers_are_differentiable(arena: Arena) -> None:
    """What a training step needs: gradients through attention, norms and rotation to every parameter of a layer."""
    model = build(arena.device).requires_grad_(True)
    layer = model.layers[1]
    shape = (1, 4, CONFIG.num_kv_heads, CONFIG.head_dim)
    keys, values = (torch.ones(shape, dtype=torch.bfloat16, device=arena.device) for _ in range(2))
    hidden = torch.from_numpy(Stream("grad").normal((1, 3, CONFIG.hidden_size))).to(torch.bfloat16).to(arena.device)
    visible = torch.ones(1, 3, 7, dtype=torch.bool, device=arena.device)
    positions = torch.arange(4, 7, device=arena.device)[None]
    layer(hidden, positions, keys, values, visible, path="eager").float().square().sum().backward()
    without = [name for name, p in layer.named_parameters() if p.grad is None or not bool(p.grad.abs().sum() > 0)]
    expect_equal(LABEL, "parameters without a gradient", without, [])


class NoAccessors:
    """A pool that cannot be read."""


def good(model: DSparkDraftModel) -> dict[str, Any]:
    pool, lens, locs = with_context(model, [4, 2], 6)
    return {"anchors": torch.tensor([5, 6], device=lens.device), "seq_lens": lens, "pool": pool, "context_locs": locs}


BAD: dict[str, tuple[type[Exception], tuple[str, ...], Callable[[dict[str, Any]], dict[str, Any]]]] = {
    "gamma-beyond-the-trained-block": (ValueError, ("gamma", "6", "5"), lambda a: {"gamma": 6}),
    "anchors-of-another-batch": (ValueError, ("anchors", "(3,)", "(2,)"), lambda a: {"anchors": torch.zeros(3)}),
    "anchors-floating": (ValueError, ("anchors", "float32"), lambda a: {"anchors": a["anchors"].float()}),
    "lens-of-another-batch": (ValueError, ("seq_lens", "(1,)"), lambda a: {"seq_lens": a["seq_lens"][:1]}),
    "locs-flat": (ValueError, ("context_locs", "2 dim"), lambda a: {"context_locs": a["context_locs"][0]}),
    "pool-that-cannot-be-read": (ValueError, ("pool", "NoAccessors", "get_key"), lambda a: {"pool": NoAccessors()}),
    "unknown-path": (ValueError, ("path", "quick"), lambda a: {"path": "quick"}),
}


@pytest.mark.parametrize("bad", BAD)
def test_error(bad: str, arena: Arena) -> None:
    kind, names, change = BAD[bad]
    model = build(arena.device)
    arguments = good(model)
    expect_raises(LABEL, kind, names, lambda: model.draft(**{**arguments, **change(arguments)}))


def test_errors_of_building_and_binding(arena: Arena) -> None:
    model = DSparkDraftModel(CONFIG, TARGET, device=arena.device)
    fill(model, "unbound")
    arguments = good(model)
    expect_raises(LABEL, RuntimeError, ["bind(embed_tokens, lm_head)"], lambda: model.draft(**arguments))
    narrow, few = (nn.Embedding(*size, device=arena.device) for size in ((44, 31), (43, 32)))
    _, head = shared(arena.device)
    expect_raises(LABEL, ValueError, ["embed_tokens", "31", "32"], lambda: model.bind(narrow, head))
    expect_raises(LABEL, ValueError, ["embed_tokens", "43 rows", "row 43"], lambda: model.bind(few, head))
    rows = torch.zeros(2, 95, dtype=torch.bfloat16, device=arena.device)
    expect_raises(LABEL, ValueError, ["taps", "95", "96", "[1, 3, 4]"], lambda: model.fuse_taps(rows))
    wide = replace(TARGET, hidden_size=64)
    expect_raises(LABEL, ValueError, ["hidden_size", "32", "64"], lambda: DSparkDraftModel(CONFIG, wide))
