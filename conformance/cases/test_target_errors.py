"""The tiny Inkling refuses what it cannot run, before anything is written, with an error that names it
(CONTRACTS.md section 9; F1-4, F1-9, F5-4)."""

from __future__ import annotations

import copy
import functools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dspark.runtime.inkling_config import InklingConfig
from dspark.runtime.state_pool import StateLayout
from dspark.runtime.target import TinyInkling

from ..fixtures.guard import to_bits
from ..fixtures.lane import Lane
from ..fixtures.ledger import Label, expect_equal, expect_raises
from ..fixtures.sequences import tensors_of
from ..fixtures.teacher_forced import BatchedInkling
from ..fixtures.tiny_models import CONFIG, build_target

LABEL = Label("target", "error")
pytestmark = pytest.mark.lanes(Lane.INTERPRET)

# --- The config ------------------------------------------------------------------------------------------------------

NUMBERS = ("num_layers", "num_heads", "num_kv_heads", "head_dim", "max_position", "vocab_size")
FIELDS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    **{f"{name}-{value!r}": ((name, repr(value)), {name: value}) for name in NUMBERS for value in (0, 1.0, True)},
    **{
        f"{name}-{value!r}": ((name, str(value)), {name: value})
        for name in ("hidden_size", "intermediate_size", "padded_vocab_size")
        for value in (0, 8, 24, 65, 64.0, True)
    },
    **{f"head_dim-{value}": (("head_dim", str(value), "power of two"), {"head_dim": value}) for value in (8, 24, 48)},
    "heads-in-unequal-groups": (("num_heads", "4", "num_kv_heads, 3"), {"num_kv_heads": 3}),
    "more-ids-than-rows": (("vocab_size", "65", "64"), {"vocab_size": 65}),
    **{f"conv_kernel-{value!r}": (("conv_kernel", repr(value)), {"conv_kernel": value}) for value in (1, 0, 4.0, True)},
    **{
        f"{name}-{value!r}": ((name, repr(value)), {name: value})
        for name in ("logits_mup_width_multiplier", "rope_theta", "eps")
        for value in (0, -24.0, math.nan, math.inf, True, "24")
    },
    **{f"{name}-None": ((name, "None"), {name: None}) for name in ("rope_theta", "eps")},
}


@pytest.mark.parametrize("name", FIELDS)
def test_fields(name: str) -> None:
    names, changes = FIELDS[name]
    expect_raises(LABEL, ValueError, names, lambda: InklingConfig(**vars(CONFIG) | changes))


KEYS: dict[str, tuple[tuple[str, ...], Callable[[dict[str, Any]], Any]]] = {
    "missing": (("num_key_value_heads", "nothing"), lambda c: c.pop("num_key_value_heads")),
    "a-missing-multiplier": (("logits_mup_width_multiplier",), lambda c: c.pop("logits_mup_width_multiplier")),
    "unknown": (("tie_word_embeddings", "unknown"), lambda c: c.update(tie_word_embeddings=False)),
    "another-model": (("model_type", "'llama'", "'tiny_inkling'"), lambda c: c.update(model_type="llama")),
    "a-field-out-of-range": (("num_layers", "0"), lambda c: c.update(num_hidden_layers=0)),
}


@pytest.mark.parametrize("name", KEYS)
def test_keys(name: str, tmp_path: Path) -> None:
    """From a mapping; from a file, whose name then comes first."""
    names, change = KEYS[name]
    config = CONFIG.to_config()
    change(config)
    expect_raises(LABEL, ValueError, names, lambda: InklingConfig.from_config(config))
    (tmp_path / "config.json").write_text(json.dumps(config))
    for path in (tmp_path, tmp_path / "config.json"):
        error = expect_raises(LABEL, ValueError, names, functools.partial(InklingConfig.from_file, path))
        expect_equal(LABEL, "what comes first", str(error).startswith(f"{tmp_path / 'config.json'}: "), True)


@pytest.mark.parametrize("text", ["[]", "3", "{", ""])
def test_files_that_are_no_config(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    expect_raises(LABEL, ValueError, [str(tmp_path)], lambda: InklingConfig.from_file(tmp_path))


def test_what_was_written_is_read(tmp_path: Path) -> None:
    """Else the errors above could come from the config that they change."""
    for config in (CONFIG, InklingConfig(), InklingConfig(logits_mup_width_multiplier=None, conv_kernel=2)):
        (tmp_path / "config.json").write_text(json.dumps(config.to_config()))
        expect_equal(LABEL, "config", InklingConfig.from_file(tmp_path), config)
        expect_equal(LABEL, "without a mark", InklingConfig.from_config(_without_type(config)), config)


def _without_type(config: InklingConfig) -> dict[str, Any]:
    return {key: value for key, value in config.to_config().items() if key != "model_type"}


def test_a_convolution_without_a_window_has_no_layout() -> None:
    expect_raises(LABEL, ValueError, ["conv_kernel", "1"], lambda: StateLayout(1, (4,), 1))


# --- Taps ------------------------------------------------------------------------------------------------------------

TAPS = {"[0, 2]": (0, 2), "[1, 0]": (1, 0), "[0, 0]": (0, 0), "-1": (-1,), "True": (True,), "1.0": (1.0,)}


@pytest.mark.parametrize("shown", TAPS)
def test_f1_4_taps(shown: str) -> None:
    target = TinyInkling(CONFIG, device="meta")
    target.target_layer_ids = (0, 1)
    ids: Any = TAPS[shown]
    expect_raises(LABEL, ValueError, ["target_layer_ids", shown], lambda: setattr(target, "target_layer_ids", ids))
    expect_equal(LABEL, "the taps before", target.target_layer_ids, (0, 1))


# --- Calls -----------------------------------------------------------------------------------------------------------


@functools.cache
def _target() -> TinyInkling:
    return build_target(torch.device("cpu"))


class _Call:
    """Arguments of the three calls on a cache of two requests, the first of which holds four tokens."""

    def __init__(self) -> None:
        self.target = _target()
        self.cache = self.target.new_cache(3, 1 + 130, width=3)
        self.locs = 1 + torch.arange(130).view(2, 65)
        for request in (0, 1):
            self.cache.state_pool.admit(request)
            self.prefill(row=request)
        self.before = self.bits()

    def bits(self) -> list[bytes]:
        states = (*self.cache.states.intermediate_conv_window, *tensors_of(self.cache).values())
        return [to_bits(tensor).tobytes() for tensor in states]

    def prefill(self, row: int = 0, tokens: int = 4, locs: Any = None) -> Any:
        held = self.locs[row % 2, :tokens] if locs is None else locs
        return self.target.prefill(self.cache, row, torch.full((tokens,), 3), held)

    def decode(self, lens: Any = (4, 4), table: Any = None) -> Any:
        locs = self.locs[:, :64] if table is None else table
        return self.target.decode(self.cache, torch.arange(2), torch.tensor([5, 6]), torch.tensor(lens), locs)

    def verify(self, tokens: Any = (3, 3), lens: Any = (4, 4, -1), counts: Any = (3, 3, 0), table: Any = None) -> Any:
        locs = self.locs.repeat(2, 1)[:3] if table is None else table
        ids = torch.full(tokens, 7)
        return self.target.verify(self.cache, ids, torch.tensor(lens), torch.tensor(counts), locs)

    def table(self, row: int, column: int, loc: int) -> torch.Tensor:
        table = self.locs.repeat(2, 1)[:3].clone()
        table[row, column] = loc
        return table


CALLS: dict[str, tuple[tuple[str, ...], Callable[[_Call], object]]] = {
    "forward-past-the-last-position": (("65", "max_position, 64"), lambda c: c.target(torch.zeros(1, 65).long())),
    "prefill-of-nothing": (("tokens", "0 tokens", "64"), lambda c: c.prefill(tokens=0)),
    "F1-9-prefill-past-the-last-position": (("tokens", "65 tokens", "64"), lambda c: c.prefill(tokens=65)),
    "prefill-of-a-request-without-a-slot": (("request_row", "2", "slot"), lambda c: c.prefill(row=2)),
    "prefill-without-locs-enough": (("locs", "(3,)", "(4,)"), lambda c: c.prefill(locs=torch.arange(1, 4))),
    "prefill-with-a-table": (("locs", "(1, 4)"), lambda c: c.prefill(locs=torch.arange(1, 5)[None])),
    "prefill-into-the-reserved-row": (("locs_table", "[1, 0, 2, 3]"), lambda c: c.prefill(locs=_rows(1, 0, 2, 3))),
    "prefill-into-a-negative-row": (("locs_table", "-1"), lambda c: c.prefill(locs=_rows(1, 2, 3, -1))),
    "prefill-behind-the-pool": (("locs_table", "131"), lambda c: c.prefill(locs=_rows(1, 2, 3, 131))),
    "decode-with-other-lengths": (("seq_lens", "(3,)", "(2,)"), lambda c: c.decode(lens=(4, 4, 4))),
    "F1-25-decode-with-lengths-in-rows": (("seq_lens", "(1, 2)"), lambda c: c.decode(lens=((4, 4),))),
    "decode-with-flat-locs": (("locs_table", "(64,)"), lambda c: c.decode(table=c.locs[0, :64])),
    "decode-past-the-table": (("seq_lens", "4 and 1", "row 0", "below 4"), lambda c: c.decode(table=c.locs[:, :4])),
    "F1-9-decode-past-the-last-position": (("seq_lens", "64", "row 1"), lambda c: c.decode(lens=(4, 64))),
    "F5-4-more-requests": (("tokens", "(4, 3)", "(3, 3)"), lambda c: c.verify((4, 3), (4,) * 4, (3,) * 4)),
    "F5-4-fewer-requests": (("tokens", "(2, 3)", "(3, 3)"), lambda c: c.verify((2, 3), (4, 4), (3, 3))),
    "F5-4-a-wider-window": (("tokens", "(3, 4)", "(3, 3)"), lambda c: c.verify((3, 4))),
    "F5-4-a-narrower-window": (("tokens", "(3, 2)", "(3, 3)"), lambda c: c.verify((3, 2))),
    "verify-of-flat-tokens": (("tokens", "(9,)", "(3, 3)"), lambda c: c.verify((9,))),
    "verify-with-other-lengths": (("seq_lens", "(2,)", "(3,)"), lambda c: c.verify(lens=(4, 4), counts=(3, 3))),
    "verify-with-lengths-of-one": (("lens", "(1,)", "(3,)"), lambda c: c.verify(lens=(4,), counts=(3,))),
    "verify-with-one-count": (("lens: got shape (1,)", "(3,)"), lambda c: c.verify(counts=(3,))),
    "F1-9-verify-past-the-last-position": (("62 and 3", "row 1", "64"), lambda c: c.verify(lens=(4, 62, -1))),
    "verify-through-the-reserved-row": (("locs_table", "row 1"), lambda c: c.verify(table=c.table(1, 2, 0))),
    "verify-through-a-negative-row": (("locs_table", "-1", "row 0"), lambda c: c.verify(table=c.table(0, 6, -1))),
    "verify-behind-the-pool": (("locs_table", "131", "row 1"), lambda c: c.verify(table=c.table(1, 0, 131))),
    "a-cache-without-rows": (("rows", "0"), lambda c: c.target.new_cache(1, 0, width=1)),
}


def _rows(*rows: int) -> torch.Tensor:
    return torch.tensor(rows)


@pytest.mark.parametrize("name", CALLS)
def test_calls(name: str) -> None:
    """Not even of a request before the one that is refused is anything written."""
    names, call = CALLS[name]
    made = _Call()
    expect_raises(LABEL, ValueError, names, lambda: call(made))
    expect_equal(LABEL, "that nothing was written", made.bits() == made.before, True)


@pytest.mark.parametrize("call", [_Call.prefill, _Call.decode, _Call.verify], ids=["prefill", "decode", "verify"])
def test_the_calls_as_they_are(call: Callable[[_Call], Any]) -> None:
    """Else the errors above could come from the call that they change. Rows that nobody asks for may be anything."""
    made = _Call()
    expect_equal(LABEL, "ids", call(made).logits.shape[-1], 50)
    made.verify(table=made.table(0, 7, -1))
    made.decode(lens=(63, -1))


def test_what_lies_in_columns_that_nobody_asks_for_is_not_looked_up_in_a_batch() -> None:
    """As elsewhere than on the CPU: the row behind the pool, in the column after the window."""
    made, other = _Call(), _Call()
    for call in (made, other):
        call.target = copy.copy(call.target)
        call.target.__class__ = BatchedInkling
    need = other.verify().logits
    expect_equal(LABEL, "logits", made.verify(table=made.table(0, 7, 131)).logits.tolist(), need.tolist())


def test_a_layer_returns_what_its_streams_were_given() -> None:
    """K, V, the attention's output and the MLP's: what was added to the hidden row follows from the last two."""
    target = _target()
    layer: Any = target.layers[0]
    hidden = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    output, _, inputs = layer(hidden, target.angles(5))
    expect_equal(LABEL, "widths", tuple(stream.shape[-1] for stream in inputs), CONFIG.conv_dims)
    added = hidden + layer.convs["attention"](inputs[2]).to(hidden.dtype)
    added = added + layer.convs["mlp"](inputs[3]).to(hidden.dtype)
    expect_equal(LABEL, "output", added.tolist(), output.tolist())


def test_every_padded_row_may_be_an_id() -> None:
    whole = InklingConfig(**vars(CONFIG) | {"vocab_size": CONFIG.padded_vocab_size})
    expect_equal(LABEL, "ids", whole.vocab_size, 64)


# --- Files -----------------------------------------------------------------------------------------------------------


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    target = build_target(torch.device("cpu"))
    target.save(tmp_path / "new" / "folder")
    loaded = TinyInkling.load(tmp_path / "new" / "folder")
    expect_equal(LABEL, "config", loaded.config, target.config)
    expect_equal(LABEL, "names", list(loaded.state_dict()), list(target.state_dict()))
    for name, tensor in target.state_dict().items():
        expect_equal(LABEL, name, to_bits(loaded.state_dict()[name]), to_bits(tensor))
    expect_equal(LABEL, "frozen", any(parameter.requires_grad for parameter in loaded.parameters()), False)


@pytest.mark.parametrize("fault", ["missing", "unknown", "misshapen"])
def test_weights_that_do_not_fit(fault: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    build_target(torch.device("cpu")).save(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = "layers.1.k_norm.weight"
    if fault == "unknown":
        name = "layers.2.k_norm.weight"
        tensors[name] = torch.ones(16)
    elif fault == "missing":
        del tensors[name]
    else:
        tensors[name] = torch.ones(17)
    save_file(tensors, file)
    error = expect_raises(LABEL, ValueError, [str(file), name], lambda: TinyInkling.load(tmp_path))
    expect_equal(LABEL, "what comes first", str(error).startswith(f"{file}: "), True)
