"""Heads of the draft beside the target's: the Markov bias of the previous token, and confidence.

Parameters are named as checkpoints name them (``markov_w1``, ``markov_w2``, ``gate_proj``, ``joint_proj``, ``proj``).
Every linear and every elementwise operation of a Markov head rounds once to the head's dtype; confidence is fp32
(conformance/CONTRACTS.md section 10).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional

from dspark.model.config import MarkovKind
from dspark.ops import arguments


class MarkovHead(nn.Module):
    """The vanilla head: ``bias = W2 @ W1[prev]``, and what all kinds share.

    vocab_size: V, ids that it predicts (rows of W2). rank: r. prev_vocab_size: ids that may come before (rows of W1);
    None: V. With a reduced draft vocabulary W1 is indexed by target id and the rows of W2 by draft id (fault F1-21).
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        rank: int,
        hidden_size: int,
        prev_vocab_size: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        for name, value in (("vocab_size", vocab_size), ("rank", rank), ("hidden_size", hidden_size)):
            arguments.require_int(name, value, 1)
        if prev_vocab_size is not None:
            arguments.require_int("prev_vocab_size", prev_vocab_size, 1)
        self.rank, self.hidden_size = rank, hidden_size
        rows = vocab_size if prev_vocab_size is None else prev_vocab_size
        self.markov_w1 = nn.Embedding(rows, rank, dtype=dtype, device=device)
        self.markov_w2 = nn.Linear(rank, vocab_size, bias=False, dtype=dtype, device=device)
        self._add_projections(dtype, device)

    def _add_projections(self, dtype: torch.dtype | None, device: torch.device | str | None) -> None:
        """What a kind has beside W1 and W2: nothing, for the vanilla head."""

    @property
    def prev_vocab_size(self) -> int:
        """Ids ``0 .. prev_vocab_size - 1`` may come before."""
        return self.markov_w1.weight.shape[0]

    @property
    def vocab_size(self) -> int:
        """Columns of the bias."""
        return self.markov_w2.weight.shape[0]

    def start(self, batch: int, device: torch.device | str) -> torch.Tensor | None:
        """The state before the first drafted token: None, except for the rnn head."""
        return None

    def embed(self, prev: torch.Tensor) -> torch.Tensor:
        """``W1[prev]``: ``prev [...]`` integer, inside the table -> ``[..., r]``."""
        embedded: torch.Tensor = self.markov_w1(prev.to(torch.int64))
        return embedded

    def bias(
        self, prev: torch.Tensor, hidden: torch.Tensor, state: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The bias ``[..., V]`` of the token after ``prev [...]``, and the state after it.

        hidden: ``[..., H]``, the undivided hidden row of the token to come; the vanilla head does not look at it.
        state: what :meth:`start` or the call before returned.
        """
        return self._project(self.embed(prev)), state

    def _project(self, vector: torch.Tensor) -> torch.Tensor:
        projected: torch.Tensor = self.markov_w2(vector)
        return projected

    def _inputs(self, *parts: torch.Tensor) -> torch.Tensor:
        return torch.cat([part.to(self.markov_w2.weight.dtype) for part in parts], dim=-1)


class GatedMarkovHead(MarkovHead):
    """``bias = W2 @ (sigmoid(Wg [h; e] + b) * e)`` with ``e = W1[prev]``."""

    def _add_projections(self, dtype: torch.dtype | None, device: torch.device | str | None) -> None:
        self.gate_proj = nn.Linear(self.hidden_size + self.rank, self.rank, dtype=dtype, device=device)

    def bias(
        self, prev: torch.Tensor, hidden: torch.Tensor, state: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As :meth:`MarkovHead.bias`; the gate looks at ``hidden``."""
        embedded = self.embed(prev)
        gate = torch.sigmoid(self.gate_proj(self._inputs(hidden, embedded)))
        return self._project(gate * embedded), state


class RNNMarkovHead(MarkovHead):
    """A recurrent head: ``z = [s; e; h]``, ``gate, candidate, output = chunks of W z + b``,

    ``s' = sigmoid(gate) * s + (1 - sigmoid(gate)) * tanh(candidate)`` and ``bias = W2 @ tanh(output)``.
    """

    def _add_projections(self, dtype: torch.dtype | None, device: torch.device | str | None) -> None:
        self.joint_proj = nn.Linear(2 * self.rank + self.hidden_size, 3 * self.rank, dtype=dtype, device=device)

    def start(self, batch: int, device: torch.device | str) -> torch.Tensor:
        """Zeros ``[batch, r]`` in the head's dtype."""
        return torch.zeros(batch, self.rank, dtype=self.markov_w2.weight.dtype, device=device)

    def bias(
        self, prev: torch.Tensor, hidden: torch.Tensor, state: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As :meth:`MarkovHead.bias`; ``state [..., r]`` is needed."""
        if state is None:
            raise ValueError("state: got None, need the [..., r] of start() or of the call before")
        joint = self.joint_proj(self._inputs(state, self.embed(prev), hidden))
        gate, candidate, output = joint.chunk(3, dim=-1)
        kept = torch.sigmoid(gate)
        following = kept * state + (1 - kept) * torch.tanh(candidate)
        return self._project(torch.tanh(output)), following


_KINDS: dict[MarkovKind, type[MarkovHead]] = {
    MarkovKind.VANILLA: MarkovHead,
    MarkovKind.GATED: GatedMarkovHead,
    MarkovKind.RNN: RNNMarkovHead,
}


def build_markov_head(
    kind: MarkovKind | str,
    *,
    vocab_size: int,
    rank: int,
    hidden_size: int,
    prev_vocab_size: int | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> MarkovHead:
    """The Markov head of a config's kind; arguments as for :class:`MarkovHead`. ``ValueError`` for an unknown kind."""
    try:
        found = _KINDS[MarkovKind(kind)]
    except ValueError:
        raise ValueError(f"kind: got {kind!r}, need one of {', '.join(MarkovKind)}") from None
    return found(
        vocab_size=vocab_size,
        rank=rank,
        hidden_size=hidden_size,
        prev_vocab_size=prev_vocab_size,
        dtype=dtype,
        device=device,
    )


class ConfidenceHead(nn.Module):
    """How likely each drafted token, and all before it, will be accepted.

    ``raw = w . [h; e] + b`` in fp32, ``p_k = sigmoid(raw_k / tau_k)``, survival = running product of p. hidden_size: H,
    of the undivided hidden. rank: r of the Markov embedding of the previous token; 0: the head looks at h alone.
    temperatures: tau, one per drafted position; (): all 1.
    """

    def __init__(
        self,
        hidden_size: int,
        rank: int = 0,
        *,
        temperatures: Sequence[float] = (),
        dtype: torch.dtype | None = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        arguments.require_int("hidden_size", hidden_size, 1)
        arguments.require_int("rank", rank, 0)
        for tau in temperatures:
            if isinstance(tau, bool) or not isinstance(tau, int | float) or not 1e-37 <= tau <= 3e38:
                raise ValueError(f"temperatures: got {tau!r}, need positive finite numbers")
        self.rank = rank
        self.temperatures = tuple(float(tau) for tau in temperatures)
        self.proj = nn.Linear(hidden_size + rank, 1, dtype=dtype, device=device)

    def raw(self, hidden: torch.Tensor, embedded: torch.Tensor | None = None) -> torch.Tensor:
        """fp32 logits ``[...]`` of ``hidden [..., H]`` and ``embedded [..., r]``; None where r is 0."""
        if (embedded is None) != (self.rank == 0):
            raise ValueError(f"embedded: got {type(embedded).__name__}, need the [..., {self.rank}] of the Markov head")
        parts = [hidden] if embedded is None else [hidden, embedded]
        features = torch.cat([part.float() for part in parts], dim=-1)
        bias: torch.Tensor = self.proj.bias
        return functional.linear(features, self.proj.weight.float(), bias.float()).squeeze(-1)

    def forward(self, hidden: torch.Tensor, embedded: torch.Tensor | None = None) -> torch.Tensor:
        """Survival ``[B, G]`` fp32 of ``hidden [B, G, H]`` and ``embedded [B, G, r]``: in [0, 1], non-increasing in k.

        A NaN logit is no confidence: 0 from there on. ``ValueError`` for more positions than temperatures.
        """
        raw = self.raw(hidden, embedded)
        count = raw.shape[1]
        if self.temperatures and len(self.temperatures) < count:
            raise ValueError(f"temperatures: got {len(self.temperatures)}, need one for each of {count} positions")
        survival, alive = [], torch.ones_like(raw[:, 0]) if count else raw
        for k in range(count):
            column = raw[:, k]
            if self.temperatures:
                # By a tensor: CUDA multiplies by the reciprocal of a Python scalar.
                column = column / torch.full_like(column, self.temperatures[k])
            alive = alive * torch.sigmoid(column).nan_to_num(nan=0.0)
            survival.append(alive)
        return torch.stack(survival, dim=1) if survival else raw
