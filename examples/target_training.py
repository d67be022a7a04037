"""Phases 1 and 2: the target on next bytes, and its greedy continuations, which are the draft's text and labels."""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from training_run import Run, compiled, excerpts, initialise, optimiser, train

from dspark.runtime.target import TinyInkling

EMBEDDING_LR, HEAD_LR = 1.0, 16.0
"""Times the matrices' learning rate; the head's follows its scale, since its inputs are divided by m."""


# --- Phase 1: the target ---------------------------------------------------------------------------------------------


def train_target(run: Run, text: torch.Tensor, held_out: torch.Tensor, args: argparse.Namespace) -> TinyInkling:
    scale, config = run.scale, run.scale.config
    target = TinyInkling(config, dtype=torch.float32, device=run.device)
    initialise(target)
    run.log("target", parameters=sum(parameter.numel() for parameter in target.parameters()))
    named = dict(target.named_parameters())
    matrices = [p for name, p in named.items() if name.startswith("layers") and p.dim() == 2 and "convs" not in name]
    small = [p for name, p in named.items() if p.dim() == 1 or "convs" in name]
    optimizer = optimiser(
        [
            (matrices, args.lr, 0.1),
            (small, args.lr, 0.0),
            ([target.embed_tokens.weight], EMBEDDING_LR * args.lr, 0.0),
            ([target.lm_head.weight], HEAD_LR * args.lr, 0.0),
        ],
        run.device,
    )

    def loss_of(tokens: torch.Tensor) -> torch.Tensor:
        logits = target(tokens[:, :-1]).logits.float()
        return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def batch(source: torch.Tensor) -> torch.Tensor:
        return excerpts(source, scale.target_batch, scale.target_length + 1)

    fixed = [batch(held_out) for _ in range(4)]

    def evaluate() -> dict[str, Any]:
        with torch.no_grad(), run.autocast():
            return {"held_out": round(sum(loss_of(tokens).item() for tokens in fixed) / len(fixed), 4)}

    fast = compiled(run, loss_of, (batch(text),), "target", args.compile)
    optimizer.zero_grad(set_to_none=True)
    seconds = run.budget(args.minutes_target, 60.0 * (args.minutes_generate + args.minutes_draft) + 90.0)
    train(
        run,
        "target",
        lambda: (fast(batch(text)), {}),
        optimizer,
        seconds,
        save=lambda: target.save(run.out / "target"),
        evaluate=evaluate,
    )
    with torch.no_grad():  # rows of ids that never occur: as long as the others
        rows = target.embed_tokens.weight
        rows[config.vocab_size :] *= rows[:256].norm(dim=1).median() / rows[config.vocab_size :].norm(
            dim=1, keepdim=True
        )
    target.save(run.out / "target")
    return target


# --- Phase 2: greedy continuations -----------------------------------------------------------------------------------


@torch.no_grad()
def continuations(target: TinyInkling, prompts: torch.Tensor, length: int) -> torch.Tensor:
    """``prompts [B, P]`` greedily continued to ``[B, length]``, in the dtype of the parameters."""
    config, (batch, start) = target.config, prompts.shape
    groups, taps = config.num_kv_heads, config.conv_kernel - 1
    angles = target.angles(length)
    hidden, caches, windows = target.embed_tokens(prompts), [], []
    for layer in target.layers:
        hidden, (key, value), inputs = layer(hidden, angles[:start])
        cache = key.new_empty(2, batch, groups, length, config.head_dim)
        cache[0, :, :, :start], cache[1, :, :, :start] = key.transpose(1, 2), value.transpose(1, 2)
        caches.append(cache)
        windows.append([functional.pad(x, (0, 0, taps, 0))[:, -taps:].clone() for x in inputs])
    tokens = torch.cat([prompts, prompts.new_empty(batch, length - start)], dim=1)
    hidden = hidden[:, -1:]
    for at in range(start, length):
        tokens[:, at] = target.logits_of(target.norm(hidden))[:, 0].argmax(-1)
        if at == length - 1:
            break
        hidden = target.embed_tokens(tokens[:, at : at + 1])
        for layer, cache, window in zip(target.layers, caches, windows, strict=True):
            hidden = _decode(layer, hidden, angles[at : at + 1].expand(batch, -1), cache, window, at)
    return tokens


def _decode(
    layer: nn.Module,
    hidden: torch.Tensor,
    angles: torch.Tensor,
    cache: torch.Tensor,
    window: list[torch.Tensor],
    at: int,
) -> torch.Tensor:
    kinds = list(layer.convs)

    def convolved(kind: int, x: torch.Tensor) -> torch.Tensor:
        both = torch.cat([window[kind], x], dim=1)
        window[kind] = both[:, 1:]
        return layer.convs[kinds[kind]].windowed(both)

    query, key, value = layer.project(hidden)
    key, value = convolved(0, key), convolved(1, value)
    query, key = layer.rotate(query[:, 0], key[:, 0], angles)
    cache[0, :, :, at] = key
    cache[1, :, :, at] = value.view_as(key)
    grouped = query.unflatten(1, (cache.shape[2], -1))
    mixed = functional.scaled_dot_product_attention(grouped, cache[0, :, :, : at + 1], cache[1, :, :, : at + 1])
    hidden = hidden + convolved(2, layer.o_proj(mixed.flatten(1)[:, None]))
    return hidden + convolved(3, layer.mlp(layer.post_attention_layernorm(hidden)))


def generate(run: Run, target: TinyInkling, text: torch.Tensor, minutes: float) -> dict[int, torch.Tensor]:
    """Sequences ``[N, length]`` by the length of their prompts, until the time is up."""
    scale, seconds = run.scale, run.budget(minutes, 120.0)
    began, found, batches = time.monotonic(), dict[int, list[torch.Tensor]](), 0
    while batches < scale.most_batches and (time.monotonic() - began < seconds or batches < len(scale.prompts)):
        length = scale.prompts[batches % len(scale.prompts)]
        made = continuations(target, excerpts(text, scale.generate_batch, length), scale.sequence)
        found.setdefault(length, []).append(made.to(torch.int16))
        batches += 1
        if batches <= 4 or batches % 8 == 0:
            last = bytes(token for token in made[0].tolist() if token < 256).decode("utf-8", "replace")
            run.log("generate", batches=batches, sample=last[:length] + "<|>" + last[length:])
    result = {length: torch.cat(parts) for length, parts in found.items()}
    run.log("generate", done=True, tokens=sum(part[:, p:].numel() for p, part in result.items()), batches=batches)
    return result
