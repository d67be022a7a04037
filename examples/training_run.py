"""What the phases of training share: sizes, the clock and the log, text, and the loop of optimisation."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import sysconfig
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dspark.runtime.inkling_config import InklingConfig

END = 256
"""The id after the last byte of a file."""
SKIPPED = {"site-packages", "dist-packages", "encodings", "__pycache__"}
LARGEST_FILE = 400_000


@dataclass(frozen=True)
class Scale:
    """How large everything is."""

    config: InklingConfig
    taps: tuple[int, ...]
    target_batch: int = 64
    target_length: int = 512
    generate_batch: int = 4096
    prompts: tuple[int, ...] = (32, 64, 128, 192)
    sequence: int = 320
    draft_batch: int = 64
    anchors: int = 32
    held_out_prompts: int = 512
    most_steps: int = 10**9
    most_batches: int = 10**9


FULL = Scale(InklingConfig(), (1, 2, 4))
SMOKE = Scale(
    InklingConfig(hidden_size=64, intermediate_size=64, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=16),
    (0, 1, 2),
    target_batch=4,
    target_length=64,
    generate_batch=8,
    prompts=(8, 16),
    sequence=48,
    draft_batch=4,
    anchors=4,
    held_out_prompts=8,
    most_steps=12,
    most_batches=3,
)


class Run:
    """Where it goes, how long it has taken, and the log."""

    def __init__(self, out: Path, device: torch.device, scale: Scale, total_minutes: float) -> None:
        self.out, self.device, self.scale = out, device, scale
        self.started, self.total = time.monotonic(), 60.0 * total_minutes
        out.mkdir(parents=True, exist_ok=True)
        self.file = (out / "log.jsonl").open("w", encoding="utf-8")

    def elapsed(self) -> float:
        return time.monotonic() - self.started

    def budget(self, minutes: float, reserve: float) -> float:
        """Seconds for a phase, such that ``reserve`` seconds of the total are left after it."""
        return max(1.0, min(60.0 * minutes, self.total - self.elapsed() - reserve))

    def log(self, phase: str, **values: Any) -> None:
        line = json.dumps({"phase": phase, "seconds": round(self.elapsed(), 1)} | values)
        print(line, flush=True)
        self.file.write(line + "\n")
        self.file.flush()

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16)


# --- Text ------------------------------------------------------------------------------------------------------------


def sources(limit: int | None) -> tuple[list[bytes], list[bytes]]:
    """The standard library's files: those to train on, and one in twenty, chosen by the hash of its path, held out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    train, held_out = list[bytes](), list[bytes]()
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if SKIPPED & set(relative.parts):
            continue
        text = path.read_bytes()
        if not 256 <= len(text) <= LARGEST_FILE:
            continue
        chosen = int.from_bytes(hashlib.sha256(relative.as_posix().encode()).digest()[:4], "big") % 20 == 0
        (held_out if chosen else train).append(text)
        if limit is not None and len(train) >= limit and held_out:
            break
    return train, held_out


def as_tokens(files: list[bytes], device: torch.device) -> torch.Tensor:
    """All files in one row of ids, each followed by ``END``."""
    parts = [torch.frombuffer(bytearray(text), dtype=torch.uint8).to(torch.int16) for text in files]
    end = torch.tensor([END], dtype=torch.int16)
    return torch.cat([piece for part in parts for piece in (part, end)]).to(device)


def excerpts(tokens: torch.Tensor, count: int, length: int) -> torch.Tensor:
    """``[count, length]`` int64 at random offsets."""
    starts = torch.randint(0, len(tokens) - length, (count, 1), device=tokens.device)
    return tokens[starts + torch.arange(length, device=tokens.device)].long()


# --- Optimisation ----------------------------------------------------------------------------------------------------


def initialise(model: nn.Module) -> None:
    """Matrices by their fan-in, what writes to the residual stream smaller, convolutions as identities."""
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2 or "convs" in name:
            continue
        if "embed_tokens" in name:
            std = 0.2
        elif "lm_head" in name or "markov_w1" in name:
            std = 0.5
        elif "markov_w2" in name or "confidence" in name:
            std = 0.0
        else:
            small = 0.4 if "o_proj" in name or "down_proj" in name else 1.0
            std = small * parameter.shape[1] ** -0.5
        nn.init.normal_(parameter, 0.0, std)


def optimiser(groups: list[tuple[list[nn.Parameter], float, float]], device: torch.device) -> torch.optim.AdamW:
    """AdamW over (parameters, learning rate, weight decay)."""
    made = [{"params": part, "lr": lr, "base_lr": lr, "weight_decay": decay} for part, lr, decay in groups if part]
    return torch.optim.AdamW(made, betas=(0.9, 0.95), eps=1e-10, fused=device.type == "cuda")


def compiled(
    run: Run, function: Callable[..., Any], example: tuple[Any, ...], name: str, wanted: bool, *, autocast: bool = True
) -> Any:
    """``torch.compile`` of ``function``, tried forward and backward on ``example``; as it is where that fails."""
    if not wanted:
        return function
    began = time.monotonic()
    try:
        fast = torch.compile(function, dynamic=False)
        with run.autocast() if autocast else contextlib.nullcontext():
            first = fast(*example)
        first = first[0] if isinstance(first, tuple) else first
        if first.requires_grad:
            first.backward()
    except Exception as error:  # whatever a compiler can raise: the slow way trains as well
        run.log("compile", name=name, failed=f"{type(error).__name__}: {str(error)[:300]}")
        return function
    run.log("compile", name=name, took=round(time.monotonic() - began, 1))
    return fast


def train(
    run: Run,
    phase: str,
    step: Callable[[], tuple[torch.Tensor, dict[str, Any]]],
    optimizer: torch.optim.Optimizer,
    seconds: float,
    *,
    save: Callable[[], None],
    evaluate: Callable[[], dict[str, Any]] | None = None,
) -> None:
    """Steps until the time is up; the learning rate warms up and then falls linearly with the time that is gone."""
    began = last = time.monotonic()
    saved, count, fraction = 0.0, 0, 0.0
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    while fraction < 1.0 and count < run.scale.most_steps:
        for group in optimizer.param_groups:
            group["lr"] = group["base_lr"] * min(1.0, (count + 1) / 200) * max(0.01, 1.0 - fraction)
        with run.autocast():
            loss, values = step()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        count += 1
        if count % 20 == 0 or count >= run.scale.most_steps:
            value = loss.item()  # waits for the device, so that the clock is the device's
            if not math.isfinite(value):
                raise RuntimeError(f"{phase}: loss {value} at step {count}")
            now = time.monotonic()
            fraction = (now - began) / seconds
            if now - last > 10 or fraction >= 1.0 or count >= run.scale.most_steps:
                last = now
                shown = {key: item.tolist() if isinstance(item, torch.Tensor) else item for key, item in values.items()}
                extra = evaluate() if evaluate else {}
                run.log(phase, step=count, loss=round(value, 4), share=round(fraction, 3), **shown, **extra)
            if fraction - saved > 0.25:
                saved = fraction
                save()
    save()
    run.log(phase, steps=count, done=True)
