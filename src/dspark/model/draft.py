"""The DSPARK draft model: taps to context K and V, a block of queries to hidden rows, hidden rows to draft tokens.

A request has n committed tokens at positions 0..n-1, whose draft K and V lie in the pool, and an anchor: the known
token at position n. The block is the anchor and mask tokens at positions n.., so its positions and those of its context
never meet (fault F1-14). Context K and V come from the target's hidden rows alone, not through the draft's layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dspark import faults
from dspark.model.attention import plain_table
from dspark.model.base_logits import compute_base_logits
from dspark.model.block_attention import block_context
from dspark.model.config import DSparkConfig, TargetConfig
from dspark.model.draft_layer import DraftAttention, DSparkDecoderLayer, build_norm, context_kv
from dspark.model.draft_rotary import build_rotary, grow_rotary, move_rotary
from dspark.model.drafting import Drafted, draft_greedy
from dspark.model.heads import ConfidenceHead, build_markov_head
from dspark.model.kv_inject import write_target_hidden_kv
from dspark.model.kv_inject_checks import KVAccessors
from dspark.model.rotary import RotaryTable
from dspark.model.stacked import StackedLayers
from dspark.model.vocabulary import ReducedVocabulary
from dspark.ops import arguments

STACKED = ("self_attn.qkv_proj.weight", "self_attn.k_norm.weight")
ANCHOR_FAULT = faults.declare("draft", "anchor-out-of-range")


@dataclass(frozen=True)
class Shared:
    """What belongs to the target and is used by the draft: never registered, never copied with the draft."""

    embed_tokens: Any
    lm_head: Any

    def __deepcopy__(self, memo: dict[int, Any]) -> Shared:
        return self


class DSparkDraftModel(nn.Module):
    """A DSPARK draft (conformance/CONTRACTS.md sections 5 and 10).

    rotary: where the target has a RoPE table, its object (section 2); None: a :class:`RotaryTable` of the config's
    rope parameters, one for all layers, which grows as positions come into use and moves with the model.
    dtype: of the parameters, except the norms of a ``gemma_norm`` config (fp32, see :func:`build_norm`). Change it by
    loading again, not by ``.to(dtype)``, which would narrow those. device: may be ``meta``.

    ``ValueError`` for a config that does not fit the target (:meth:`DSparkConfig.require_target`).
    """

    def __init__(
        self,
        config: DSparkConfig,
        target: TargetConfig,
        *,
        rotary: Any = None,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        config.require_target(target)
        self.config, self.target = config, target
        self._owns_rotary = rotary is None
        self.rotary: Any = rotary if rotary is not None else build_rotary(config, device)
        size, taps = config.hidden_size, len(config.target_layer_ids) * target.hidden_size
        self.fc = nn.Linear(taps, size, bias=False, dtype=dtype, device=device)
        self.hidden_norm = build_norm(config, size, dtype, device)
        self.layers = StackedLayers(
            [
                DSparkDecoderLayer(config, self.rotary, layer_id=index, dtype=dtype, device=device)
                for index in range(config.num_layers)
            ],
            STACKED,
        )
        self.norm = build_norm(config, size, dtype, device)
        self.markov_head = None
        if config.markov_head is not None:
            self.markov_head = build_markov_head(
                config.markov_head,
                vocab_size=config.vocab_size,
                rank=config.markov_rank,
                prev_vocab_size=config.prev_vocab_size,
                hidden_size=size,
                dtype=dtype,
                device=device,
            )
        self.confidence_head = None
        if config.confidence_head:
            self.confidence_head = ConfidenceHead(
                size, config.markov_rank, temperatures=config.confidence_temperatures, device=device
            )
        offsets = None
        if config.reduced_from is not None:
            offsets = torch.zeros(config.vocab_size, dtype=torch.int64, device=device)
        self.d2t: torch.Tensor | None
        self.register_buffer("d2t", offsets)
        self.vocabulary: ReducedVocabulary | None = None
        self.refresh_vocabulary()
        self.register_load_state_dict_post_hook(_refresh_after_load)  # type: ignore[no-untyped-call]
        self.shared: Shared | None = None

    @property
    def attentions(self) -> list[DraftAttention]:
        """The attention layers, in order: what ``write_target_hidden_kv`` takes."""
        return [layer.self_attn for layer in self.layers]  # type: ignore[misc]

    def bind(self, embed_tokens: Any, lm_head: Any) -> None:
        """Use the target's embedding and head; they stay the target's (no submodules, not in ``state_dict``).

        embed_tokens: ids ``[B, Wq]`` -> ``[B, Wq, H]``. lm_head: as :func:`compute_base_logits` takes it.
        ``ValueError`` for an embedding without the mask token's row or of another width.
        """
        weight = getattr(embed_tokens, "weight", None)
        if isinstance(weight, torch.Tensor):
            if weight.shape[-1] != self.config.hidden_size:
                raise ValueError(f"embed_tokens: got width {weight.shape[-1]}, need {self.config.hidden_size}")
            if weight.shape[0] <= self.config.mask_token_id:
                raise ValueError(f"embed_tokens: got {weight.shape[0]} rows, need row {self.config.mask_token_id} too")
        self.shared = Shared(embed_tokens, lm_head)

    def fuse_taps(self, taps: torch.Tensor) -> torch.Tensor:
        """The context hidden rows ``[T, H]`` of ``taps [T, n_taps * H_target]``: ``hidden_norm(fc(taps))``.

        taps: outputs of the target's layers ``config.target_layer_ids``, concatenated in ascending order of the layers.
        """
        width = self.fc.in_features
        if taps.shape[-1] != width:
            raise ValueError(
                f"taps: got {taps.shape[-1]} columns, need {width}, {self.target.hidden_size} for each of the layers "
                f"{list(self.config.target_layer_ids)}"
            )
        fused: torch.Tensor = self.hidden_norm(self.fc(taps))
        return fused

    @torch.no_grad()
    def write_context(
        self,
        pool: Any,
        taps: torch.Tensor,
        positions: torch.Tensor,
        locs: torch.Tensor,
        commit_lens: torch.Tensor | None = None,
        locs_row_width: int | None = None,
    ) -> None:
        """Write draft K and V of target rows: :meth:`fuse_taps`, then :func:`write_target_hidden_kv` (same arguments).

        Makes RoPE rows for as many positions as the pool has rows; a pool whose rows are used again for later
        positions needs :meth:`ensure_positions` first. Positions from ``config.max_position`` on are an index fault.
        """
        if isinstance(pool, KVAccessors):
            self.ensure_positions(pool.get_key_buffer(0).shape[0])
        write_target_hidden_kv(
            self.attentions, pool, self.fuse_taps(taps), positions, locs, commit_lens, locs_row_width
        )

    def ensure_positions(self, count: int) -> None:
        """Make positions ``0 .. min(count, config.max_position) - 1`` available to every layer.

        Growth binds a new table and is refused during CUDA graph capture: call this before it.
        """
        if isinstance(self.rotary, RotaryTable):
            grow_rotary(self.rotary, count, self.config.max_position)

    def block_positions(self, seq_lens: torch.Tensor, width: int, columns: int) -> torch.Tensor:
        """Positions ``[B, width]`` of the blocks: n, n + 1, ...; int64.

        A block that crosses the end of the table keeps its rows that exist; those past the end are given the last
        position, since nothing can be committed there (their drafts are never asked for by a worker).
        """
        self.ensure_positions(columns + width)
        first = seq_lens.to(torch.int64).clamp(0, columns)
        positions = first[:, None] + torch.arange(width, device=seq_lens.device)
        table = plain_table(self.rotary)
        return positions if table is None else positions.clamp(max=table.shape[0] - 1)

    @torch.no_grad()
    def hidden_block(
        self,
        anchors: torch.Tensor,
        seq_lens: torch.Tensor,
        pool: Any,
        context_locs: torch.Tensor,
        *,
        width: int | None = None,
        path: str | None = None,
    ) -> torch.Tensor:
        """Final hidden rows ``[B, Wq, H]`` of the blocks ``[anchor, mask, ...]`` at positions n, n + 1, ...

        anchors: ``[B]``, the token at position n. seq_lens: ``[B]``, n. pool: offers ``get_key_buffer`` and
        ``get_value_buffer``; with ``require_valid``, rows without draft K and V are refused
        (:meth:`BlockContext.require_valid`). context_locs: ``[B, N]``, see :func:`block_context`; entries from n on are
        never looked at. All int32 or int64. width: Wq; None: ``config.query_width``. path: of the projections.

        Padded rows (n < 0, or no loc >= 0) are computed from the block alone; their values mean nothing.
        Index faults of :func:`block_context`, and an anchor outside the target's vocabulary (0 is used).
        """
        width = self.config.query_width if width is None else arguments.require_int("width", width, 1)
        if not isinstance(pool, KVAccessors):
            raise ValueError(f"pool: got {type(pool).__name__}, need get_key_buffer and get_value_buffer")
        rows = pool.get_key_buffer(0).shape[0]
        window = self.config.sliding_window
        context = block_context(seq_lens, context_locs, width, rows, causal=self.config.causal, sliding_window=window)
        context.require_valid(pool)
        ids = torch.full((len(seq_lens), width), self.config.mask_token_id, dtype=torch.int64, device=anchors.device)
        ids[:, 0] = self._anchors(anchors, seq_lens, context_locs).clamp(min=0)
        positions = self.block_positions(seq_lens, width, context_locs.shape[1])
        hidden: torch.Tensor = self._bound().embed_tokens(ids)
        for layer in self.layers:
            keys, values = context_kv(layer.self_attn, pool, context)  # type: ignore[arg-type]
            hidden = layer(hidden, positions, keys, values, context.visible, path=path)
        normed: torch.Tensor = self.norm(hidden)
        return normed

    def _anchors(self, anchors: torch.Tensor, seq_lens: torch.Tensor, context_locs: torch.Tensor) -> torch.Tensor:
        """``anchors`` as int64, -1 for a padded row and for one that is no id of the vocabulary (then a fault)."""
        arguments.require_shape("anchors", anchors, tuple(seq_lens.shape), "[B] of seq_lens")
        arguments.require_dtype("anchors", anchors, arguments.INDEX_DTYPES)
        outside = (anchors < 0) | (anchors >= self.target.vocab_size)
        without_context = (context_locs < 0).all(dim=1)
        faults.set_where(outside & (seq_lens >= 0) & ~without_context, ANCHOR_FAULT)
        return anchors.to(torch.int64).masked_fill(outside | (seq_lens < 0), -1)

    def draft(
        self,
        anchors: torch.Tensor,
        seq_lens: torch.Tensor,
        pool: Any,
        context_locs: torch.Tensor,
        *,
        gamma: int | None = None,
        keep_logits: bool = False,
        group: Any = None,
        path: str | None = None,
    ) -> Drafted:
        """gamma draft tokens per request, chosen greedily; the other arguments as for :meth:`hidden_block`.

        With ``config.sample_from_anchor`` row k of the block predicts position n + k + 1, gamma rows in all; otherwise
        row 0 is dropped and row k predicts position n + k. gamma: None: ``config.gamma``; more than the trained block
        is a ``ValueError``. group: of vocabulary shards, see :func:`compute_base_logits`.
        """
        config = self.config if gamma is None else self.config.with_gamma(gamma)
        shared = self._bound()
        hidden = self.hidden_block(anchors, seq_lens, pool, context_locs, width=config.query_width, path=path)
        with torch.no_grad():
            rows = hidden if config.sample_from_anchor else hidden[:, 1:]
            base = compute_base_logits(
                rows,
                shared.lm_head,
                vocab_size=self.target.vocab_size,
                mup_width_multiplier=self.target.logits_mup_width_multiplier,
                group=group,
                path=path,
            )
            cleaned = self._anchors(anchors, seq_lens, context_locs)
            heads = (self.markov_head, self.confidence_head)
            return draft_greedy(base, rows, cleaned, *heads, vocabulary=self.vocabulary, keep_logits=keep_logits)

    def _bound(self) -> Shared:
        if self.shared is None:
            raise RuntimeError("DSparkDraftModel: no embedding and head, call bind(embed_tokens, lm_head) first")
        return self.shared

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> DSparkDraftModel:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        device = self.fc.weight.device
        if self._owns_rotary:
            move_rotary(self.rotary, device)
        if self.vocabulary is not None:
            self.vocabulary = self.vocabulary.to(device)
        return self

    def refresh_vocabulary(self) -> None:
        """Take over the map ``d2t`` of a reduced vocabulary, after it was changed in place (loading does this).

        ``ValueError`` for a map that leaves the target's vocabulary or names an id twice. Waits for the device.
        """
        if self.d2t is not None and self.d2t.device.type != "meta":
            self.vocabulary = ReducedVocabulary.from_offsets(self.d2t, self.target.vocab_size)


def _refresh_after_load(module: nn.Module, keys: object) -> None:
    assert isinstance(module, DSparkDraftModel)
    module.refresh_vocabulary()
