"""Which ids exist: the true vocabulary, a draft's reduced vocabulary, and the rows of a sharded table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from dspark.ops import arguments


def crop_to_vocabulary(name: str, logits: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """The first ``vocab_size`` columns of ``logits [..., >= vocab_size]``: padded ids can never win (fault F1-1).

    ``ValueError`` naming ``name`` when there are fewer.
    """
    if logits.shape[-1] < vocab_size:
        raise ValueError(f"{name}: got {logits.shape[-1]} columns, need at least the vocabulary, {vocab_size}")
    return logits[..., :vocab_size]


@dataclass(frozen=True)
class ReducedVocabulary:
    """The ids of the target's vocabulary that a draft can propose (fault F1-21).

    target_ids: ``[N]`` int64, ascending and distinct, all below ``target_vocab_size``.
    draft_ids: ``[N]`` int64, the row of the draft's head that predicts each; None: 0, 1, ..., N - 1.
    The draft's previous-token table is indexed by target id, the rows of its head by draft id.
    """

    target_ids: torch.Tensor
    draft_ids: torch.Tensor | None
    target_vocab_size: int

    @classmethod
    def from_offsets(cls, offsets: torch.Tensor, target_vocab_size: int) -> ReducedVocabulary:
        """The map ``target = draft + offsets[draft]`` that checkpoints call ``d2t``: ``[N]``, any signed integer dtype.

        Waits for the device. ``ValueError`` for a map that is empty, leaves the target's vocabulary, or names an id
        twice.
        """
        arguments.require_rank("offsets", offsets, 1)
        arguments.require_dtype("offsets", offsets, arguments.SIGNED_DTYPES)
        arguments.require_int("target_vocab_size", target_vocab_size, 1)
        count = offsets.numel()
        if not count:
            raise ValueError("offsets: got an empty map, need at least one draft id")
        ids = torch.arange(count, device=offsets.device) + offsets.to(torch.int64)
        outside = torch.nonzero((ids < 0) | (ids >= target_vocab_size)).flatten().tolist()
        if outside:
            raise ValueError(
                f"offsets: draft id {outside[0]} maps to {int(ids[outside[0]])}, need 0 .. {target_vocab_size - 1}"
            )
        # Ties go to the lowest target id, whatever the order of the draft's rows.
        ascending, order = ids.sort()
        twice = torch.nonzero(ascending[1:] == ascending[:-1]).flatten().tolist()
        if twice:
            raise ValueError(f"offsets: two draft ids map to {int(ascending[twice[0]])}, need distinct target ids")
        return cls(ascending, None if bool((ascending == ids).all()) else order, target_vocab_size)

    def __len__(self) -> int:
        return self.target_ids.numel()

    def to(self, device: torch.device | str) -> ReducedVocabulary:
        """The same map on ``device``."""
        draft_ids = None if self.draft_ids is None else self.draft_ids.to(device)
        return ReducedVocabulary(self.target_ids.to(device), draft_ids, self.target_vocab_size)

    def of_target(self, logits: torch.Tensor) -> torch.Tensor:
        """The candidates' columns of ``logits [..., target_vocab_size]``, in ascending target id: ``[..., N]``."""
        return logits.index_select(-1, self.target_ids)

    def of_draft(self, bias: torch.Tensor) -> torch.Tensor:
        """The same of ``bias [..., >= N]``, whose columns are draft ids; ``ValueError`` for fewer."""
        cropped = crop_to_vocabulary("markov", bias, len(self))
        return cropped if self.draft_ids is None else cropped.index_select(-1, self.draft_ids)

    def expand(self, logits: torch.Tensor) -> torch.Tensor:
        """``logits [..., N]`` as ``[..., target_vocab_size]``: -Inf for every id that is no candidate."""
        wide = logits.new_full((*logits.shape[:-1], self.target_vocab_size), float("-inf"))
        return wide.index_copy_(-1, self.target_ids, logits)


def shard_rows(padded_rows: int, world_size: int, rank: int) -> range:
    """The rows of a table of ``padded_rows`` that ``rank`` holds; all ranks hold as many, padded tail included.

    ``ValueError`` for a table that cannot be divided evenly, and for a rank outside ``0 .. world_size - 1``.
    """
    arguments.require_int("padded_rows", padded_rows, 1)
    arguments.require_int("world_size", world_size, 1)
    arguments.require_int("rank", rank, 0)
    if rank >= world_size:
        raise ValueError(f"rank: got {rank}, need less than world_size, which is {world_size}")
    if padded_rows % world_size:
        raise ValueError(f"padded_rows: got {padded_rows}, need a multiple of world_size, which is {world_size}")
    size = padded_rows // world_size
    return range(rank * size, (rank + 1) * size)


def lookup_rows(ids: torch.Tensor, shard: torch.Tensor, *, group: Any = None) -> torch.Tensor:
    """Rows ``[..., H]`` of a table of which every rank of ``group`` holds a shard (:func:`shard_rows`), bit for bit.

    ids: int32 or int64, any shape, equal on all ranks. shard: ``[rows of this rank, H]``, floating. An id that no rank
    holds gives zeros. group: a ``torch.distributed`` group; None: the shard is the whole table.
    """
    arguments.require_rank("shard", shard, 2)
    arguments.require_floating("shard", shard)
    arguments.require_tensor("ids", ids)
    arguments.require_dtype("ids", ids, arguments.INDEX_DTYPES)
    first = 0
    if group is not None:
        arguments.require_no_grad(shard=shard)
        first = _distributed().get_rank(group) * shard.shape[0]
    local = ids.to(torch.int64) - first
    own = (local >= 0) & (local < shard.shape[0])
    rows = shard[local.clamp(0, shard.shape[0] - 1)]
    if group is None:
        return rows.masked_fill(~own[..., None], 0)
    # Bytes are added, not values: a row of one rank keeps its -0 and NaN bits when zeros are added to them.
    bits = rows.contiguous().view(torch.uint8).to(torch.int32).masked_fill(~own[..., None], 0)
    _distributed().all_reduce(bits, group=group)
    return bits.to(torch.uint8).view(shard.dtype)


def gather_columns(part: torch.Tensor, group: Any) -> torch.Tensor:
    """``part [N, rows of this rank]`` of every rank of ``group``, side by side in the order of ranks, bit for bit."""
    # Bytes are exchanged: not every backend knows every floating dtype.
    mine = part.contiguous().view(torch.uint8)
    parts = [torch.empty_like(mine) for _ in range(_distributed().get_world_size(group))]
    _distributed().all_gather(parts, mine, group=group)
    return torch.cat([piece.view(part.dtype) for piece in parts], dim=-1)


def _distributed() -> Any:
    # Imported by those who shard, and by nobody else.
    import torch.distributed

    return torch.distributed
