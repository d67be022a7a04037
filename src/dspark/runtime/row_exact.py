"""Rows of the tiny Inkling on the CPU: each has the same bits whatever the batch and the window.

What is correctly rounded (sums, products, quotients, roots, casts of single elements) is computed for all rows at once.
What is not, or adds in an order that a library chooses, is computed for each row alone: products, softmax and silu, on
operands of the same shapes, strides and alignment for every row (attention: for the same number of keys). Products are
fp32 of the parameters' values, rounded once to their dtype; everything between is fp32, rounded once.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.nn import functional

from dspark.model.base_logits import divide_hidden
from dspark.model.vocabulary import crop_to_vocabulary
from dspark.runtime.inkling_config import CONV_KINDS

if TYPE_CHECKING:
    from dspark.runtime.inkling_layers import InklingLayer
    from dspark.runtime.kv_pool import KVPool
    from dspark.runtime.target import TinyInkling


def _wide(weight: torch.Tensor) -> torch.Tensor:
    return weight.detach().to(torch.float32, copy=True).contiguous()


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    words = {2: torch.int16, 4: torch.int32, 8: torch.int64}[one.element_size()]
    return torch.equal(one.detach().view(words), other.view(words))


class _Weights:
    """fp32 copies of a layer's weights."""

    def __init__(self, layer: InklingLayer) -> None:
        self.input_norm, self.post_norm = (
            _wide(layer.input_layernorm.weight),
            _wide(layer.post_attention_layernorm.weight),
        )
        self.q_norm, self.k_norm = _wide(layer.q_norm.weight), _wide(layer.k_norm.weight)
        self.qkv, self.out = _wide(layer.qkv_proj.weight), _wide(layer.o_proj.weight)
        self.gate_up, self.down = _wide(layer.mlp.gate_up_proj.weight), _wide(layer.mlp.down_proj.weight)
        # [K, dim]: the terms of a convolution are added in the order of its rows.
        self.convs = [_wide(layer.convs[kind].weight.t()) for kind in CONV_KINDS]  # type: ignore[operator]


class Span(NamedTuple):
    """Consecutive tokens of one request.

    row: of the batch. start: position of the first. tokens: ``[T]``. locs: ``[start + T]`` int64, the pool row of each
    position up to the last.
    """

    row: int
    start: int
    tokens: torch.Tensor
    locs: torch.Tensor


class Rows(NamedTuple):
    """Logits ``[N, V]``; by layer the outputs ``[N, H]`` and the inputs ``[N, dim]`` of each stream."""

    logits: torch.Tensor
    outputs: list[torch.Tensor]
    inputs: list[list[torch.Tensor]]


class RowExact:
    """Widened weights of a target on the CPU, made when it first decodes, and again once a parameter has changed."""

    def __init__(self, target: TinyInkling) -> None:
        self.target, self.config = target, target.config
        self._made_from = [parameter.detach().clone() for parameter in target.parameters()]
        self.layers = [_Weights(layer) for layer in target.layers]  # type: ignore[arg-type]
        self.norm, self.head = _wide(target.norm.weight), _wide(target.lm_head.weight)

    @property
    def embedding(self) -> torch.Tensor:
        """The target's own, whose rows need no copies."""
        weight: torch.Tensor = self.target.embed_tokens.weight.detach()
        return weight

    def stale(self) -> bool:
        """Whether a parameter has other bits than when the copies were made (fault F1-23).

        The bits are compared: a write through ``parameter.data`` moves neither the address nor the version of a tensor.
        """
        current = list(self.target.parameters())
        return len(current) != len(self._made_from) or not all(map(_same_bits, current, self._made_from))

    def rows(
        self,
        pool: KVPool,
        windows: list[torch.Tensor],
        tokens: torch.Tensor,
        seq_lens: torch.Tensor,
        lens: torch.Tensor,
        locs_table: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        """Logits ``[R, W, V]``, taps and stream inputs ``[L, R, W, dim]`` of windows ``tokens [R, W]``.

        windows: ``[L, R, dim, K - 1]`` of each stream, the committed ones. Arguments as for ``TinyInkling.verify``;
        tokens that do not exist give zeros. ``ValueError`` for positions and pool rows that do not exist.
        """
        config, dtype, leading = self.config, self.embedding.dtype, tuple(tokens.shape)
        logits = torch.zeros(*leading, config.vocab_size, dtype=dtype)
        taps = torch.zeros(*leading, len(self.target.target_layer_ids) * config.hidden_size, dtype=dtype)
        inputs = [torch.zeros(config.num_layers, *leading, dim, dtype=dtype) for dim in config.conv_dims]
        limit = min(config.max_position, locs_table.shape[1])
        if spans := _spans(pool, tokens, seq_lens, lens, locs_table, limit):
            computed = self.run(pool, windows, spans)
            at = torch.tensor([span.row for span in spans for _ in span.tokens])
            columns = torch.cat([torch.arange(len(span.tokens)) for span in spans])
            logits[at, columns] = computed.logits
            taps[at, columns] = self.target.taps_of(computed.outputs)
            for layer, fresh in enumerate(computed.inputs):
                for stream, x in zip(inputs, fresh, strict=True):
                    stream[layer, at, columns] = x
        return logits, taps, inputs

    def run(self, pool: KVPool, windows: list[torch.Tensor], spans: list[Span]) -> Rows:
        """Run the tokens of ``spans`` and write their K and V; the rows of all spans, one after the other.

        windows: ``[L, R, dim, K - 1]`` of each stream, the committed ones of all request rows.
        """
        step = _Step(self, spans)
        hidden = self.embedding[torch.cat([span.tokens for span in spans])].to(torch.float32)
        outputs, inputs = [], []
        for index, weights in enumerate(self.layers):
            before = [[window[index, span.row].t().to(torch.float32) for span in spans] for window in windows]
            hidden = step.layer(weights, hidden, pool.get_kv_buffer(index), before)
            outputs.append(hidden.to(self.embedding.dtype))
            inputs.append([fresh.to(self.embedding.dtype) for fresh in step.inputs])
        for span in spans:
            pool.valid_rows[span.locs[span.start :]] = True
        return Rows(self._logits(hidden), outputs, inputs)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        normed = rms_norm(hidden, self.norm, self.config.eps).to(self.embedding.dtype)
        divided = divide_hidden(normed, self.config.logits_mup_width_multiplier)
        logits = by_row(self.head, divided.to(torch.float32)).to(self.embedding.dtype)
        return crop_to_vocabulary("lm_head", logits, self.config.vocab_size)

    def rounded(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` rounded to the dtype of the parameters, in fp32."""
        return x.to(self.embedding.dtype).to(torch.float32)


def _spans(
    pool: KVPool,
    tokens: torch.Tensor,
    seq_lens: torch.Tensor,
    lens: torch.Tensor,
    locs_table: torch.Tensor,
    limit: int,
) -> list[Span]:
    """The tokens that exist, at positions below ``limit``."""
    spans = []
    for row, (start, count) in enumerate(zip(seq_lens.tolist(), lens.tolist(), strict=True)):
        if start < 0 or count <= 0:
            continue
        if start + count > limit:
            raise ValueError(f"seq_lens: got {start} and {count} tokens in row {row}, need positions below {limit}")
        locs = locs_table[row, : start + count].to(torch.int64)
        if int(locs.min()) < pool.reserved_rows or int(locs.max()) >= pool.rows:
            raise ValueError(f"locs_table: got {locs.tolist()} in row {row}, need pool rows")
        spans.append(Span(row, start, tokens[row, :count].to(torch.int64), locs))
    return spans


class _Step:
    """The tokens of some spans, ``[N, ...]``; all values are fp32 tensors that hold what the parameters' dtype can."""

    def __init__(self, rows: RowExact, spans: list[Span]) -> None:
        self.rows, self.spans, self.config = rows, spans, rows.config
        self.counts = [len(span.tokens) for span in spans]
        positions = torch.cat([torch.arange(span.start, len(span.locs)) for span in spans])
        angles = rows.target.angles(int(positions.max()) + 1)[positions][:, None]
        self.cos, self.sin = angles.chunk(2, dim=-1)
        # Of a stream's inputs, a span's window before its own: where the first input of each token's window lies.
        taps = self.config.conv_kernel - 1
        starts = [sum(self.counts[:i]) + i * taps for i in range(len(spans))]
        self.first = torch.cat([start + torch.arange(count) for start, count in zip(starts, self.counts, strict=True)])
        self.inputs: list[torch.Tensor] = []

    def layer(
        self,
        weights: _Weights,
        hidden: torch.Tensor,
        buffers: tuple[torch.Tensor, torch.Tensor],
        windows: list[list[torch.Tensor]],
    ) -> torch.Tensor:
        """The layer's outputs ``[N, H]``. K and V go into ``buffers``. windows: ``[K - 1, dim]`` by stream and span."""
        rounded, config = self.rows.rounded, self.config
        self.inputs = []
        normed = rounded(rms_norm(hidden, weights.input_norm, config.eps))
        projected = rounded(by_row(weights.qkv, normed))
        sizes = [projected.shape[1] - 2 * config.kv_size, config.kv_size, config.kv_size]
        query, key, value = projected.split(sizes, dim=1)
        key, value = (self._convolved(weights, windows, x) for x in (key, value))
        query, key = self._rotated(query, weights.q_norm), self._rotated(key, weights.k_norm)
        mixed = self._attention(query, key, value.view_as(key), buffers)
        attended = rounded(by_row(weights.out, mixed))
        hidden = rounded(hidden + self._convolved(weights, windows, attended))
        normed = rounded(rms_norm(hidden, weights.post_norm, config.eps))
        gate, up = rounded(by_row(weights.gate_up, normed)).chunk(2, dim=1)
        # The exponential of a vector library differs from that of its remainder loop: rows of one length, one by one.
        gated = torch.stack([functional.silu(row) for row in gate])
        fed = rounded(by_row(weights.down, rounded(gated * up)))
        return rounded(hidden + self._convolved(weights, windows, fed))

    def _convolved(self, weights: _Weights, windows: list[list[torch.Tensor]], x: torch.Tensor) -> torch.Tensor:
        """The next stream's outputs for its inputs ``x [N, dim]``."""
        kind = len(self.inputs)
        self.inputs.append(x)
        pairs = zip(windows[kind], x.split(self.counts), strict=True)
        stream = torch.cat([part for pair in pairs for part in pair])
        mixed = stream[self.first] * weights.convs[kind][0]
        for j in range(1, self.config.conv_kernel):
            mixed = mixed + stream[self.first + j] * weights.convs[kind][j]
        return self.rows.rounded(x + mixed)

    def _rotated(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """``[N, heads, D]`` of ``x [N, heads * D]``, normed and rotated."""
        heads = self.rows.rounded(rms_norm(x.unflatten(1, (-1, self.config.head_dim)), weight, self.config.eps))
        first, second = heads.chunk(2, dim=-1)
        rotated = [first * self.cos - second * self.sin, second * self.cos + first * self.sin]
        return self.rows.rounded(torch.cat(rotated, dim=-1))

    def _attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        buffers: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """``[N, NQ * D]``: each token over exactly its own keys, those of the pool and of its span up to itself."""
        scale, mixed = 1.0 / math.sqrt(self.config.head_dim), torch.empty_like(query)
        at = 0
        for span, count in zip(self.spans, self.counts, strict=True):
            histories = []
            for buffer, fresh in zip(buffers, (key[at : at + count], value[at : at + count]), strict=True):
                buffer[span.locs[span.start :]] = fresh.to(buffer.dtype)
                histories.append(buffer[span.locs].to(torch.float32))
            keys, values = histories[0].permute(1, 2, 0), histories[1].transpose(0, 1)
            for seen in range(span.start + 1, len(span.locs) + 1):
                grouped = query[at].view(self.config.num_kv_heads, -1, self.config.head_dim)
                weights = torch.softmax(torch.bmm(grouped, keys[:, :, :seen]) * scale, dim=-1)
                mixed[at] = torch.bmm(weights, values[:, :seen]).view_as(query[at])
                at += 1
        return self.rows.rounded(mixed).flatten(1)


def by_row(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """``x [N, K]`` times the transpose of ``weight [M, K]``, a product of its own for each row: fp32 ``[N, M]``."""
    x = x.contiguous()
    result = x.new_empty(len(x), len(weight))
    for row, out in zip(x, result, strict=True):
        torch.mv(weight, row, out=out)
    return result


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``x`` normed over the last dimension, fp32 and not rounded.

    The squares are added in pairs by whole operations, so that no library chooses the order.
    """
    squares, count = x * x, x.shape[-1]
    while count % 2 == 0:
        count //= 2
        squares = squares[..., :count] + squares[..., count:]
    total = squares[..., :1]
    for i in range(1, count):
        total = total + squares[..., i : i + 1]
    return x * (1.0 / torch.sqrt(total / x.shape[-1] + eps)) * weight
