"""Tiny Inkling: a byte-level decoder with what makes Inkling special, small enough to ship and to check exactly.

Grouped-query attention with per-head norms and RoPE, four short-convolution streams per layer, muP logits, and a true
vocabulary smaller than the padded one. A cache holds K and V by position and the windows of the convolutions by
request; :meth:`TinyInkling.verify` leaves the windows after each token of its window and commits none of them.

On the CPU a token is always computed alone, by the same operations on operands of the same shapes, layouts and
alignment (:mod:`dspark.runtime.row_exact`): prefill, decode and verify give the same bits, whatever the batch and the
window. Elsewhere rows are batched, and equal only within the numerics of a batched product.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from dspark.model.base_logits import divide_hidden
from dspark.model.norm import RMSNorm
from dspark.model.rotary import RotaryTable
from dspark.model.vocabulary import crop_to_vocabulary
from dspark.ops import arguments
from dspark.runtime.batched_rows import batched_rows
from dspark.runtime.inkling_config import InklingConfig
from dspark.runtime.inkling_layers import InklingLayer
from dspark.runtime.kv_pool import KVPool
from dspark.runtime.row_exact import RowExact
from dspark.runtime.state_pool import NO_SLOT, StateLayout, StatePool, VerifyStates

WEIGHTS = "model.safetensors"


class TargetOutput(NamedTuple):
    """logits ``[..., V]`` of the true vocabulary; taps ``[..., n * H]``, outputs of the tapped layers, ascending."""

    logits: torch.Tensor
    taps: torch.Tensor


@dataclass(frozen=True)
class TargetCache:
    """What a target keeps of its requests.

    kv_pool: K and V of all layers, row 0 reserved. state_pool: committed windows, a slot per request and one for
    tracking. states: the windows after each token of a verify step of at most ``states.width`` tokens.
    """

    kv_pool: KVPool
    state_pool: StatePool
    states: VerifyStates


class TinyInkling(nn.Module):
    """The target. ``target_layer_ids``, set by the caller, says which layers are tapped (after layer i, fault F1-4)."""

    def __init__(
        self,
        config: InklingConfig,
        *,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        rows, size = config.padded_vocab_size, config.hidden_size
        self.embed_tokens = nn.Embedding(rows, size, dtype=dtype, device=device)
        self.layers = nn.ModuleList(
            [InklingLayer(config, dtype=dtype, device=device) for _ in range(config.num_layers)]
        )
        self.norm = RMSNorm(size, config.eps, dtype=dtype, device=device)
        self.lm_head = nn.Linear(size, rows, bias=False, dtype=dtype, device=device)
        self.rotary = RotaryTable(config.head_dim, config.rope_theta, config.max_position, device=device or "cpu")
        self._tapped: tuple[int, ...] = ()
        self._exact: RowExact | None = None

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return self.embed_tokens.weight.device

    @property
    def target_layer_ids(self) -> tuple[int, ...]:
        """Layers whose outputs are in ``taps``, ascending; the last layer's is taken before the final norm."""
        return self._tapped

    @target_layer_ids.setter
    def target_layer_ids(self, ids: Sequence[int]) -> None:
        tapped = tuple(arguments.require_int("target_layer_ids", layer, 0) for layer in ids)
        if list(tapped) != sorted(set(tapped)) or any(layer >= self.config.num_layers for layer in tapped):
            raise ValueError(
                f"target_layer_ids: got {list(tapped)}, need ascending layers, each once, below "
                f"{self.config.num_layers}"
            )
        self._tapped = tapped

    @property
    def state_layout(self) -> StateLayout:
        """The windows that a request keeps: this target is a hybrid."""
        config = self.config
        dtype = self.embed_tokens.weight.dtype
        return StateLayout(config.num_layers, config.conv_dims, config.conv_kernel, conv_dtype=dtype)

    def angles(self, count: int) -> torch.Tensor:
        """Rows ``[count, D]`` of the RoPE table, on the device of the parameters."""
        if self.rotary.cos_sin_cache.device != self.device:
            self.rotary.cos_sin_cache = self.rotary.cos_sin_cache.to(self.device)
        if count > self.rotary.rows:
            raise ValueError(f"tokens: got {count} positions, need at most max_position, {self.rotary.rows}")
        return self.rotary.cos_sin_cache[:count]

    # --- Whole sequences ---------------------------------------------------------------------------------------------

    def forward(self, tokens: torch.Tensor) -> TargetOutput:
        """Whole sequences ``tokens [B, T]`` from position 0 on, differentiable, without a cache: ``[B, T, ...]``."""
        hidden: torch.Tensor = self.embed_tokens(tokens)
        angles = self.angles(tokens.shape[1])
        outputs = []
        for layer in self.layers:
            hidden = layer(hidden, angles)[0]
            outputs.append(hidden)
        return TargetOutput(self.logits_of(self.norm(hidden)), self.taps_of(outputs))

    def logits_of(self, normed: torch.Tensor) -> torch.Tensor:
        """``[..., V]`` of the normed hidden: one division, the head, the true vocabulary (section 10)."""
        logits = self.lm_head(divide_hidden(normed, self.config.logits_mup_width_multiplier))
        return crop_to_vocabulary("lm_head", logits, self.config.vocab_size)

    def taps_of(self, outputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """The tapped ones of all layers' ``outputs [..., H]``, concatenated."""
        if not self._tapped:
            return outputs[0][..., :0]
        return torch.cat([outputs[layer] for layer in self._tapped], dim=-1)

    # --- With a cache ------------------------------------------------------------------------------------------------

    def new_cache(self, requests: int, max_tokens_rows: int, *, width: int, dedup: bool = True) -> TargetCache:
        """Pools for ``requests`` requests and ``max_tokens_rows`` tokens, one of which is the reserved row 0.

        width: W, most tokens of a verify step. dedup: how :class:`VerifyStates` stores its windows.
        """
        config = self.config
        pool = KVPool(
            max_tokens_rows,
            config.num_layers,
            config.num_kv_heads,
            config.head_dim,
            dtype=self.embed_tokens.weight.dtype,
            reserved_rows=1,
            device=self.device,
        )
        states = StatePool(self.state_layout, requests, 1 + 2 * requests, self.device)
        return TargetCache(pool, states, VerifyStates(states, width, dedup=dedup))

    @torch.no_grad()
    def prefill(self, cache: TargetCache, request_row: int, tokens: torch.Tensor, locs: torch.Tensor) -> TargetOutput:
        """The first T tokens of an admitted request: commits K and V at ``locs [T]`` and the windows. ``[T, ...]``."""
        count = tokens.shape[0]
        arguments.require_shape("locs", locs, (count,), "[T] of tokens")
        if not 1 <= count <= self.config.max_position:
            raise ValueError(f"tokens: got {count} tokens, need 1 to {self.config.max_position}")
        slot = int(cache.state_pool.state_indices[request_row])
        if slot == NO_SLOT:
            raise ValueError(f"request_row: got {request_row}, which has no slot, need an admitted request")
        zeros = torch.zeros(1, dtype=torch.int64, device=self.device)
        rows = torch.full_like(zeros, request_row)
        output, inputs = self._rows(cache, rows, tokens[None], zeros, zeros + count, locs[None])
        self._commit_windows(cache, rows, inputs)
        return TargetOutput(output.logits[0], output.taps[0])

    @torch.no_grad()
    def decode(
        self,
        cache: TargetCache,
        rows: torch.Tensor,
        tokens: torch.Tensor,
        seq_lens: torch.Tensor,
        locs_table: torch.Tensor,
    ) -> TargetOutput:
        """One token of each request of ``rows [R]``, at positions ``seq_lens [R]``; commits. ``[R, ...]``.

        tokens: ``[R]``. locs_table: ``[R, N]``, the pool row of each position up to ``seq_lens``, that one included.
        """
        lens = (seq_lens >= 0).to(torch.int64)
        output, inputs = self._rows(cache, rows.to(torch.int64), tokens[:, None], seq_lens, lens, locs_table)
        live = torch.nonzero(lens).flatten()
        self._commit_windows(cache, rows.to(torch.int64)[live], [x[:, live] for x in inputs])
        return TargetOutput(output.logits[:, 0], output.taps[:, 0])

    @torch.no_grad()
    def verify(
        self,
        cache: TargetCache,
        tokens: torch.Tensor,
        seq_lens: torch.Tensor,
        lens: torch.Tensor,
        locs_table: torch.Tensor,
    ) -> TargetOutput:
        """Windows ``tokens [R, W]`` of all request rows of the cache, at positions from ``seq_lens [R]`` on.

        lens: ``[R]``, how many tokens of each window exist. locs_table: ``[R, N]``, the pool row of each position up to
        ``seq_lens + lens - 1``. Writes K and V of the tokens that exist and their windows into ``cache.states``, and
        commits nothing. A row with ``seq_lens < 0`` or ``lens == 0`` is padded: nothing of it is read or written, and
        its results, like those of tokens that do not exist, are zeros.
        """
        requests = cache.state_pool.requests
        if tokens.dim() != 2 or tokens.shape[0] != requests or tokens.shape[1] != cache.states.width:
            raise ValueError(f"tokens: got {tuple(tokens.shape)}, need {(requests, cache.states.width)} of the cache")
        for name, lengths in (("seq_lens", seq_lens), ("lens", lens)):
            arguments.require_shape(name, lengths, (requests,), "[R] of tokens")
        rows = torch.arange(requests, device=self.device)
        lens = torch.where(seq_lens < 0, 0, lens.to(torch.int64))
        output, inputs = self._rows(cache, rows, tokens, seq_lens, lens, locs_table)
        for kind, dim in enumerate(self.config.conv_dims):
            for layer in range(self.config.num_layers):
                cache.states.put_conv(kind, layer, inputs[kind][layer][..., :dim])
        return output

    def _rows(
        self,
        cache: TargetCache,
        rows: torch.Tensor,
        tokens: torch.Tensor,
        seq_lens: torch.Tensor,
        lens: torch.Tensor,
        locs_table: torch.Tensor,
    ) -> tuple[TargetOutput, list[torch.Tensor]]:
        """Output ``[R, W, ...]`` of windows after the committed ones, and the stream inputs ``[L, R, W, dim]``."""
        arguments.require_shape("seq_lens", seq_lens, (tokens.shape[0],), "[R] of tokens")
        arguments.require_rank("locs_table", locs_table, 2)
        slots = cache.state_pool.state_indices[rows].clamp(min=0)
        windows = [cache.state_pool.layout.channels_first(conv)[:, slots] for conv in cache.state_pool.conv]
        if self.device.type == "cpu":
            if self._exact is None or self._exact.stale():
                self._exact = RowExact(self)
            logits, taps, inputs = self._exact.rows(cache.kv_pool, windows, tokens, seq_lens, lens, locs_table)
        else:
            logits, taps, inputs = batched_rows(self, cache.kv_pool, windows, tokens, seq_lens, lens, locs_table)
        return TargetOutput(logits, taps), inputs

    def _commit_windows(self, cache: TargetCache, rows: torch.Tensor, inputs: Sequence[torch.Tensor]) -> None:
        """Shift ``inputs [L, R, W, dim]``, all of which are accepted, into the committed windows of ``rows``."""
        layout = cache.state_pool.layout
        slots = cache.state_pool.state_indices[rows]
        for conv, fresh in zip(cache.state_pool.conv, inputs, strict=True):
            windows = layout.channels_first(conv)
            shifted = torch.cat([windows[:, slots], fresh.transpose(-1, -2)], dim=-1)
            windows[:, slots] = shifted[..., -layout.taps :]

    # --- Files -------------------------------------------------------------------------------------------------------

    def save(self, folder: str | Path) -> None:
        """Write ``config.json`` and bf16 ``model.safetensors``."""
        from safetensors.torch import save_file

        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config.to_config(), indent=2) + "\n", encoding="utf-8")
        tensors = {
            name: tensor.detach().to("cpu", torch.bfloat16).contiguous() for name, tensor in self.state_dict().items()
        }
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})

    @classmethod
    def load(cls, folder: str | Path, *, device: torch.device | str = "cpu") -> TinyInkling:
        """The target that :meth:`save` wrote. ``ValueError`` for tensors that are missing, unknown or misshapen."""
        from safetensors.torch import load_file

        folder = Path(folder)
        target = cls(InklingConfig.from_file(folder), device=device)
        try:
            target.load_state_dict(load_file(folder / WEIGHTS, device=str(device)))
        except RuntimeError as error:
            raise ValueError(f"{folder / WEIGHTS}: {error}") from error
        return target.requires_grad_(False)
