"""The differentiable forward of a draft: many anchors of a sequence in one batch, and what its drafts would earn.

The ops of ``dspark.ops`` refuse gradients, so attention is written here with the parameters of ``DSparkDraftModel``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from dspark.model.base_logits import divide_hidden
from dspark.model.draft import DSparkDraftModel
from dspark.ops.norm_rope.eager import rotate_heads


class DraftTrainer(nn.Module):
    """A draft, the frozen embedding and head of its target, and the embedding of the mask token, which it may learn."""

    def __init__(self, draft: DSparkDraftModel, embedding: torch.Tensor, head: torch.Tensor, angles: torch.Tensor):
        super().__init__()
        self.draft = draft
        self.width = draft.config.query_width
        self.register_buffer("embedding", embedding.detach().float())
        self.register_buffer("head", head.detach().float()[: draft.target.vocab_size].contiguous())
        self.register_buffer("angles", angles.float())
        self.mask = nn.Parameter(self.embedding[draft.config.mask_token_id].clone())

    def hidden(self, taps: torch.Tensor, tokens: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
        """Final hidden rows ``[B, A, W, H]`` of blocks at ``anchors [B, A]`` over ``taps [B, T, C]`` before each."""
        batch, count = anchors.shape
        width, draft = self.width, self.draft
        context = draft.hidden_norm(draft.fc(taps))
        length = context.shape[1]
        first = self.embedding[tokens.gather(1, anchors)]
        hidden = torch.cat([first[:, :, None], self.mask.expand(batch, count, width - 1, -1)], dim=2).flatten(1, 2)
        positions = (anchors[..., None] + torch.arange(width, device=anchors.device)).flatten(1)
        seen = torch.arange(length, device=anchors.device) < anchors[..., None]
        seen = seen[:, :, None].expand(batch, count, width, length).flatten(1, 2)
        block = torch.arange(count * width, device=anchors.device) // width
        own = (block[:, None] == block).expand(batch, -1, -1)
        visible = torch.cat([seen, own], dim=2)[:, None]
        query_angles = self.angles[positions.flatten()]
        context_angles = self.angles[:length].repeat(batch, 1)
        for layer in draft.layers:
            attention = layer.self_attn
            heads, groups, dim = attention.num_heads, attention.num_kv_heads, attention.head_dim
            sizes = [heads * dim, groups * dim, groups * dim]
            query, key, value = attention.qkv_proj(layer.input_layernorm(hidden)).split(sizes, dim=-1)
            rows = attention.qkv_proj.weight[heads * dim :]
            context_key, context_value = functional.linear(context, rows).chunk(2, dim=-1)
            query = self._rotate(query, attention.q_norm, query_angles, heads)
            key = self._rotate(key, attention.k_norm, query_angles, groups)
            context_key = self._rotate(context_key, attention.k_norm, context_angles, groups)
            keys = torch.cat([context_key, key], dim=1)
            values = torch.cat([context_value, value], dim=1).unflatten(-1, (groups, dim))
            mixed = functional.scaled_dot_product_attention(
                query.transpose(1, 2),
                keys.repeat_interleave(heads // groups, 2).transpose(1, 2),
                values.repeat_interleave(heads // groups, 2).transpose(1, 2),
                attn_mask=visible,
            )
            hidden = hidden + attention.o_proj(mixed.transpose(1, 2).flatten(2))
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return draft.norm(hidden).unflatten(1, (count, width))

    @staticmethod
    def _rotate(x: torch.Tensor, norm: nn.Module, angles: torch.Tensor, heads: int) -> torch.Tensor:
        rows = norm(x.unflatten(-1, (heads, -1))).flatten(0, 1)
        half = angles.shape[1] // 2
        return rotate_heads(rows, angles[:, :half], angles[:, half:], 2 * half, True).unflatten(0, x.shape[:2])

    def base_logits(self, hidden: torch.Tensor, *, divided: bool = True) -> torch.Tensor:
        """The target's logits of hidden rows, by the rule of inference; ``divided=False`` drops the muP division."""
        multiplier = self.draft.target.logits_mup_width_multiplier if divided else None
        return functional.linear(divide_hidden(hidden, multiplier), self.head)

    def losses(
        self, taps: torch.Tensor, tokens: torch.Tensor, anchors: torch.Tensor, decay: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Cross entropy (position k weighs ``decay ** k``), confidence BCE, and the share of right drafts ``[W]``."""
        hidden = self.hidden(taps, tokens, anchors)
        offsets = torch.arange(self.width + 1, device=tokens.device)
        window = tokens.gather(1, (anchors[..., None] + offsets).flatten(1)).unflatten(1, (-1, self.width + 1))
        previous, labels = window[..., :-1], window[..., 1:]
        embedded = self.draft.markov_head.markov_w1(previous)
        logits = (self.base_logits(hidden) + self.draft.markov_head.markov_w2(embedded)).float()
        loss = functional.cross_entropy(logits.flatten(0, 2), labels.flatten(), reduction="none").view(labels.shape)
        weights = decay ** offsets[:-1].float()
        right = logits.argmax(-1) == labels
        proj = self.draft.confidence_head.proj
        with torch.autocast(tokens.device.type, enabled=False):
            features = torch.cat([hidden.float(), embedded.float()], dim=-1).detach()
            raw = functional.linear(features, proj.weight.float(), proj.bias.float())[..., 0]
            confidence = functional.binary_cross_entropy_with_logits(raw, right.float())
        return (loss * weights).sum(-1).mean() / weights.sum(), confidence, right.float().mean((0, 1))

    @torch.no_grad()
    def drafts(
        self, taps: torch.Tensor, tokens: torch.Tensor, anchors: torch.Tensor, *, divided: bool = True
    ) -> torch.Tensor:
        """Draft tokens ``[B, A, W]``: each follows the drafted one before it, as in inference."""
        base = self.base_logits(self.hidden(taps, tokens, anchors), divided=divided)
        previous, drafted = tokens.gather(1, anchors), []
        markov = self.draft.markov_head
        for k in range(self.width):
            previous = (base[:, :, k] + markov.markov_w2(markov.markov_w1(previous))).argmax(-1)
            drafted.append(previous)
        return torch.stack(drafted, dim=-1)


@dataclass
class Acceptance:
    """Counts over simulated decoding: steps, tokens that they emitted, and accepted drafts by position."""

    steps: int = 0
    tokens: int = 0
    accepted: list[int] | None = None

    def add(self, right: torch.Tensor) -> None:
        """One sequence: ``right [N, W]`` says whether draft k at anchor n is the token that came."""
        correct = right.long().cumprod(-1).sum(-1).tolist()
        self.accepted = self.accepted or [0] * right.shape[1]
        at = 0
        while at < len(correct):
            for k in range(correct[at]):
                self.accepted[k] += 1
            self.steps += 1
            self.tokens += correct[at] + 1
            at += correct[at] + 1

    def summary(self) -> dict[str, object]:
        """Mean tokens per step, and for each position the share of steps whose draft there was accepted."""
        steps = max(self.steps, 1)
        shares = [round(count / steps, 4) for count in self.accepted or []]
        return {"tokens_per_step": round(self.tokens / steps, 4), "steps": self.steps, "acceptance": shares}
