"""qk_norm_rope on rows whose every partial result is dyadic and order-free, hand values, properties without an oracle,
and bad input (CONTRACTS.md sections 2, 3 and 9; F2-6, F2-7, F1-25)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from dspark import faults

from ..fixtures.calls.qk_norm_rope import OP, Call, random_call, run
from ..fixtures.emulation import BF16, decode, encode, round_to
from ..fixtures.envelope import norm
from ..fixtures.guard import Arena, to_bits
from ..fixtures.implementations.ops import table_qk_norm_rope_
from ..fixtures.ledger import Label, expect_equal, expect_fault, expect_raises
from ..fixtures.streams import Stream

PATHS = ("fused", "eager")
QUARTERS = np.array([[1, 0], [0, 1], [-1, 0], [0, -1]], np.float64)
"""cos and sin of 0, 1, 2 and 3 right angles."""


def quarter_table(half: int) -> np.ndarray:
    """Row p turns pair i by (p + i) right angles; cos columns first, then sin columns."""
    turns = (np.arange(4)[:, None] + np.arange(half)[None, :]) % 4
    return np.concatenate([QUARTERS[turns, 0], QUARTERS[turns, 1]], axis=1).astype(np.float32)


def exact_call(stream: Stream, dim: int, rotary: int, neox: bool) -> Call:
    """x is +-2^k for one k per head, so mean square and inv are powers of two and y is +-w exactly."""
    call = random_call(stream, 8, 3, 2, dim, rotary_dim=rotary, neox=neox, eps=0.0, table_rows=4)
    scale = np.exp2(stream.integers(-6, 7, (8, call.rows.shape[1] // dim + 1))).repeat(dim, axis=1)
    sign = stream.choice([-1.0, 1.0], call.rows.shape)
    weights = [stream.integers(1, 128, (dim,)) / 64.0 for _ in range(2)]
    return replace(
        call,
        rows=sign * scale[:, : call.rows.shape[1]],
        q_weight=weights[0],
        k_weight=-weights[1],
        table=quarter_table(rotary // 2),
    )


def exact_result(call: Call) -> np.ndarray:
    """Q and K heads ``[T, heads, D]`` by copying and negating, with no arithmetic that could round."""
    heads = call.q_heads + call.k_heads
    sign = np.sign(call.rows[:, : heads * call.head_dim]).reshape(8, heads, call.head_dim)
    weight = np.stack([call.q_weight] * call.q_heads + [call.k_weight] * call.k_heads)
    y = sign * weight[None]
    out, half = y.copy(), call.rotated // 2
    for token, position in enumerate(call.positions):
        for pair in range(half):
            i, k = (pair, pair + half) if call.neox else (2 * pair, 2 * pair + 1)
            cos, sin = QUARTERS[(position + pair) % 4]
            out[token, :, i] = y[token, :, i] * cos - y[token, :, k] * sin
            out[token, :, k] = y[token, :, k] * cos + y[token, :, i] * sin
    return out


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("neox", [True, False], ids=["neox", "interleaved"])
@pytest.mark.parametrize(("dim", "rotary"), [(8, 8), (64, 64), (96, 48), (128, 64), (256, 256)])
def test_f2_6_exact_rows_table_is_cos_then_sin(dim: int, rotary: int, neox: bool, path: str, arena: Arena) -> None:
    call = exact_call(Stream(f"exact/{dim}/{rotary}/{neox}"), dim, rotary, neox)
    out = run(call, Label(OP, path), arena, path)
    expected = encode(BF16, exact_result(call)).reshape(8, -1)
    expect_equal(Label(OP, path), "Q and K heads", out[:, : expected.shape[1]], expected)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("neox", "expected"),
    [(True, [-3, -4, 1, 2]), (False, [-2, 1, -4, 3])],
    ids=["neox", "interleaved"],
)
def test_f2_7_hand_values(neox: bool, expected: list[int], path: str, arena: Arena) -> None:
    """[1, 2, 3, 4] turned by a right angle, over sqrt(7.5)."""
    call = Call(
        rows=np.array([[1.0, 2, 3, 4] * 3]),
        positions=np.array([0]),
        q_weight=np.ones(4),
        k_weight=np.ones(4),
        q_heads=1,
        k_heads=1,
        head_dim=4,
        eps=1e-9,
        neox=neox,
        table_rows=1,
        table=np.array([[0, 0, 1, 1]], np.float32),
        single_share=1.0,
    )
    out = run(call, Label(OP, path), arena, path)
    hand = encode(BF16, round_to(BF16, np.array(expected * 2) / np.sqrt(7.5)))
    expect_equal(Label(OP, path), "Q and K head", out[0, :8], hand)


def property_call() -> Call:
    return random_call(Stream("properties"), 24, 6, 3, 64, rotary_dim=48, table_rows=1024)


@pytest.mark.parametrize("path", PATHS)
def test_permuting_rows_permutes_results(path: str, arena: Arena) -> None:
    call, label = property_call(), Label(OP, path)
    order = Stream("properties/order").permutation(24)
    straight = run(call, label, arena, path)
    permuted = replace(call, rows=call.rows[order], positions=call.positions[order])
    expect_equal(label, "permuted rows", run(permuted, label, Arena(arena.device), path), straight[order])


@pytest.mark.parametrize("path", PATHS)
def test_a_row_does_not_depend_on_other_rows(path: str, arena: Arena) -> None:
    call, label = property_call(), Label(OP, path)
    straight = run(call, label, arena, path)
    rows = call.rows.copy()
    rows[1::2] = np.nan
    odd_rows_poisoned = run(replace(call, rows=rows), label, Arena(arena.device), path)
    expect_equal(label, "even rows", odd_rows_poisoned[::2], straight[::2])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("parts", [(1, 23), (7, 17), (12, 12)], ids=str)
def test_split_is_whole_where_the_norm_leaves_no_choice(parts: tuple[int, int], path: str, arena: Arena) -> None:
    """Another tile may sum in another order; that may show only in heads with an element of two admissible values."""
    call, label = property_call(), Label(OP, path)
    whole = run(call, label, arena, path)
    first, rest = slice(0, parts[0]), slice(parts[0], None)
    pieces = [
        run(replace(call, rows=call.rows[part], positions=call.positions[part]), label, Arena(arena.device), path)
        for part in (first, rest)
    ]
    split = np.concatenate(pieces)
    rows = round_to(BF16, call.rows)
    for start, count, weight in ((0, 6, call.q_weight), (6, 3, call.k_weight)):
        columns = slice(start * 64, (start + count) * 64)
        settled = norm(rows[:, columns].reshape(-1, 64), round_to(BF16, weight), call.eps).single.all(axis=1)
        a, b = (bits[:, columns].reshape(-1, 64)[settled] for bits in (split, whole))
        expect_equal(label, "heads without a choice", a, b)
        expect_equal(label, "most heads have none", bool(np.count_nonzero(settled) > 0.8 * settled.size), True)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("neox", [True, False], ids=["neox", "interleaved"])
def test_rotation_keeps_pair_norms(neox: bool, path: str, arena: Arena) -> None:
    """|o| / |x w| of every pair of a head is the same inv: y and o are each rounded once, by at most 2^-8 relative."""
    call = replace(property_call(), rotary_dim=64, neox=neox)
    out = decode(BF16, run(call, Label(OP, path), arena, path))
    i = np.arange(32)
    first, second = (i, i + 32) if neox else (2 * i, 2 * i + 1)
    for start, count, weight in ((0, 6, call.q_weight), (6, 3, call.k_weight)):
        columns = slice(start * 64, (start + count) * 64)
        o = out[:, columns].reshape(-1, 64)
        xw = round_to(BF16, call.rows[:, columns]).reshape(-1, 64) * round_to(BF16, weight)
        ratio = np.hypot(o[:, first], o[:, second]) / np.hypot(xw[:, first], xw[:, second])
        spread = ratio.max(axis=1) / ratio.min(axis=1)
        limit = (1 + 2.0**-8) ** 2 / (1 - 2.0**-8) ** 2 * (1 + 2.0**-18)
        expect_equal(Label(OP, path), "one inv per head", spread <= limit, np.ones(spread.shape, np.bool_))


def arguments(device: torch.device) -> dict[str, Any]:
    """Arguments of a good call of 2 Q heads and 1 K head of 8 elements."""
    return {
        "qkv": torch.ones(3, 32, dtype=torch.bfloat16, device=device),
        "positions": torch.zeros(3, dtype=torch.int64, device=device),
        "q_weight": torch.ones(8, dtype=torch.bfloat16, device=device),
        "k_weight": torch.ones(8, dtype=torch.bfloat16, device=device),
        "cos_sin_cache": torch.ones(4, 8, dtype=torch.float32, device=device),
        "num_q_heads": 2,
        "num_k_heads": 1,
        "head_dim": 8,
        "eps": 1e-6,
    }


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype, device="meta")


Change = Callable[[dict[str, Any]], dict[str, Any]]
BAD_CALLS: dict[str, tuple[tuple[str, ...], Change]] = {
    "F1-25-positions-of-two-dimensions": (
        ("positions", "1 dimension"),
        lambda a: {"positions": a["positions"].expand(3, 3)},
    ),
    "F1-20-fewer-positions-than-rows": (("positions", "(2,)", "(3,)"), lambda a: {"positions": a["positions"][:2]}),
    "positions-floating": (("positions", "float32"), lambda a: {"positions": a["positions"].float()}),
    "positions-bool": (("positions", "bool"), lambda a: {"positions": a["positions"].bool()}),
    "positions-uint8": (("positions", "uint8"), lambda a: {"positions": a["positions"].to(torch.uint8)}),
    "positions-int16": (("positions", "int16"), lambda a: {"positions": a["positions"].to(torch.int16)}),
    "positions-a-list": (("positions", "list"), lambda a: {"positions": [0, 0, 0]}),
    "qkv-of-three-dimensions": (("qkv", "2 dimensions"), lambda a: {"qkv": a["qkv"][None]}),
    "qkv-too-narrow": (("qkv", "31 columns", "32"), lambda a: {"qkv": a["qkv"][:, :31]}),
    "qkv-of-int32": (("qkv", "int32"), lambda a: {"qkv": a["qkv"].int()}),
    "qkv-of-float64": (("qkv", "float64"), lambda a: {"qkv": a["qkv"].double()}),
    "qkv-rows-share-memory": (("qkv", "strides"), lambda a: {"qkv": a["qkv"][:1].expand(3, 32)}),
    "qkv-requires-grad": (("qkv", "requires grad"), lambda a: {"qkv": a["qkv"].requires_grad_()}),
    "q-weight-requires-grad": (("q_weight", "requires grad"), lambda a: {"q_weight": a["q_weight"].requires_grad_()}),
    "k-weight-requires-grad": (("k_weight", "requires grad"), lambda a: {"k_weight": a["k_weight"].requires_grad_()}),
    "q-weight-too-long": (("q_weight", "(9,)", "(8,)"), lambda a: {"q_weight": torch.ones(9)}),
    "k-weight-too-short": (("k_weight", "(7,)", "(8,)"), lambda a: {"k_weight": torch.ones(7)}),
    "k-weight-of-two-dimensions": (("k_weight", "1 dimension"), lambda a: {"k_weight": torch.ones(1, 8)}),
    "q-weight-integer": (("q_weight", "int32"), lambda a: {"q_weight": a["q_weight"].int()}),
    "k-weight-integer": (("k_weight", "int64"), lambda a: {"k_weight": a["k_weight"].long()}),
    "table-of-another-rotary-dim": (
        ("cos_sin_cache", "(4, 6)"),
        lambda a: {"cos_sin_cache": a["cos_sin_cache"][:, :6]},
    ),
    "table-of-no-dimension": (("cos_sin_cache", "2 dimensions"), lambda a: {"cos_sin_cache": a["cos_sin_cache"][0, 0]}),
    "table-of-one-dimension": (("cos_sin_cache", "2 dimensions"), lambda a: {"cos_sin_cache": a["cos_sin_cache"][0]}),
    "table-integer": (("cos_sin_cache", "int32"), lambda a: {"cos_sin_cache": a["cos_sin_cache"].int()}),
    "rotary-dim-odd": (("rotary_dim", "5", "even"), lambda a: {"rotary_dim": 5}),
    "rotary-dim-above-head-dim": (("rotary_dim", "10", "8"), lambda a: {"rotary_dim": 10}),
    "rotary-dim-zero": (("rotary_dim", "0"), lambda a: {"rotary_dim": 0}),
    "rotary-dim-bool": (("rotary_dim", "True"), lambda a: {"rotary_dim": True}),
    "head-dim-zero": (("head_dim", "0"), lambda a: {"head_dim": 0}),
    "negative-q-heads": (("num_q_heads", "-1"), lambda a: {"num_q_heads": -1}),
    "fractional-k-heads": (("num_k_heads", "1.0"), lambda a: {"num_k_heads": 1.0}),
    "eps-negative": (("eps", "-1e-06"), lambda a: {"eps": -1e-6}),
    "eps-nan": (("eps", "nan"), lambda a: {"eps": float("nan")}),
    "eps-infinite": (("eps", "inf"), lambda a: {"eps": float("inf")}),
    "eps-a-string": (("eps", "'1e-6'"), lambda a: {"eps": "1e-6"}),
    "k-eps-negative": (("k_eps", "-1"), lambda a: {"k_eps": -1}),
    "qkv-on-another-device": (("positions", "device", "meta"), lambda a: {"qkv": meta(3, 32)}),
    "q-weight-on-another-device": (("q_weight", "device meta"), lambda a: {"q_weight": meta(8)}),
    "k-weight-on-another-device": (("k_weight", "device meta"), lambda a: {"k_weight": meta(8)}),
    "table-on-another-device": (
        ("cos_sin_cache", "device meta"),
        lambda a: {"cos_sin_cache": meta(4, 8, dtype=torch.float32)},
    ),
    "unknown-path": (("path", "'triton'", "fused"), lambda a: {"path": "triton"}),
}


@pytest.mark.parametrize("bad", BAD_CALLS)
def test_error(bad: str, arena: Arena) -> None:
    names, change = BAD_CALLS[bad]
    good = arguments(arena.device)
    before = good["qkv"].clone()
    expect_raises(Label(OP, "error"), ValueError, names, lambda: table_qk_norm_rope_(**{**good, **change(good)}))
    unchanged = bool(torch.equal(good["qkv"].detach(), before))
    expect_equal(Label(OP, "error"), "nothing is written before the error", unchanged, True)


@pytest.mark.parametrize("path", PATHS)
def test_parameters_that_require_grad_are_served_without_grad_mode(path: str, arena: Arena) -> None:
    """A model's norm weights are parameters; a server runs it under no_grad, where nothing could be cut off."""
    label = Label(OP, path)
    results = []
    for grad in (False, True):
        call = arguments(arena.device)
        weight = torch.nn.Parameter(call["q_weight"] * 1.5, requires_grad=grad)
        with torch.no_grad():
            table_qk_norm_rope_(**{**call, "q_weight": weight, "path": path})
        results.append(call["qkv"].float().cpu().numpy().tolist())
    expect_equal(label, "result", results[1], results[0])


@pytest.mark.parametrize("path", PATHS)
def test_a_table_without_rows_makes_every_position_a_fault(path: str, arena: Arena) -> None:
    rows = torch.ones(2, 12, dtype=torch.bfloat16, device=arena.device)
    one = torch.ones(4, device=arena.device)
    positions = torch.tensor([0, 1], device=arena.device)
    label = Label(OP, path)

    def call() -> None:
        table_qk_norm_rope_(rows, positions, one, one, torch.ones(0, 4, device=arena.device), 1, 1, 4, 1e-6, path=path)
        faults.check()

    error = expect_raises(label, faults.IndexFaultError, ["position-out-of-range"], call)
    expect_fault(label, error, [(OP, "position-out-of-range")])
    expect_equal(label, "rows", to_bits(rows), np.full((2, 12), 0x3F80, np.uint16))
