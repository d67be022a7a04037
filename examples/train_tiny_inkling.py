"""Train the tiny Inkling and its DSPARK draft on the sources of this Python's standard library.

    python examples/train_tiny_inkling.py --out build/tiny_inkling            # one GPU, under nine minutes
    python examples/train_tiny_inkling.py --out /tmp/smoke --smoke            # seconds, on a CPU

Four phases, each within a budget of minutes: the target on next bytes; greedy continuations by the target, which are
the draft's text and labels; the draft on the target's taps; simulated speculation on files that nothing was trained on.
Writes ``target/`` and ``draft/`` (bf16 safetensors and config.json) and ``log.jsonl`` to the output folder.

What shipped came from one run of 352 seconds on an H200, whose log is ``train_tiny_inkling.log.jsonl``: 4.62 tokens per
step on the held-out files, 3.74 with the muP division of the base logits dropped. Phases end by the clock, so another
machine, or ``--compile`` (whose first calls took over 110 of those seconds), gives other weights.
"""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from draft_training import Acceptance, DraftTrainer
from target_training import continuations, generate, train_target
from torch import nn
from training_run import FULL, SMOKE, Run, Scale, as_tokens, compiled, excerpts, initialise, optimiser, sources, train

from dspark.model.config import DSparkConfig, MarkovKind
from dspark.model.draft import DSparkDraftModel
from dspark.model.rope_scaling import RopeParameters
from dspark.runtime.target import TinyInkling

DECAY = 0.88
"""The weight of a draft position's loss, to that of the one before."""
MASK = 300
"""The mask token: a padded row of the embedding."""


# --- Phase 3: the draft ----------------------------------------------------------------------------------------------


def draft_config(scale: Scale, rank: int, layers: int) -> DSparkConfig:
    config = scale.config
    return DSparkConfig(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=layers,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        eps=config.eps,
        rope=RopeParameters(config.rope_theta),
        rotary_dim=config.head_dim,
        is_neox_style=True,
        max_position=config.max_position,
        vocab_size=config.vocab_size,
        mask_token_id=MASK,
        target_layer_ids=scale.taps,
        gamma=7,
        trained_block=7,
        sample_from_anchor=True,
        markov_head=MarkovKind.VANILLA,
        markov_rank=rank,
        confidence_head=True,
        num_target_layers=config.num_layers,
    )


def save_all(run: Run, target: TinyInkling, trainer: DraftTrainer) -> None:
    """The draft in bf16, and the target again, whose embedding of the mask token the draft has learnt."""
    from dspark.model.checkpoint import save_draft

    with torch.no_grad():
        target.embed_tokens.weight[MASK] = trainer.mask.to(target.embed_tokens.weight.dtype)
    target.save(run.out / "target")
    shipped = TinyInkling.load(run.out / "target")
    draft = DSparkDraftModel(trainer.draft.config, trainer.draft.target, dtype=torch.bfloat16)
    draft.load_state_dict({name: tensor.detach().cpu() for name, tensor in trainer.draft.state_dict().items()})
    draft.bind(shipped.embed_tokens, shipped.lm_head)
    save_draft(draft, run.out / "draft")


def train_draft(
    run: Run, target: TinyInkling, texts: dict[int, torch.Tensor], args: argparse.Namespace
) -> DraftTrainer:
    scale = run.scale
    config = draft_config(scale, args.markov_rank, args.draft_layers)
    draft = DSparkDraftModel(config, scale.config.target_config(), dtype=torch.float32, device=run.device)
    initialise(draft)
    nn.init.zeros_(draft.confidence_head.proj.bias)
    trainer = DraftTrainer(draft, target.embed_tokens.weight, target.lm_head.weight, target.angles(scale.sequence + 8))
    with torch.no_grad():
        draft.norm.weight.copy_(target.norm.weight)
    run.log("draft", parameters=sum(parameter.numel() for parameter in draft.parameters()))
    matrices = [p for name, p in trainer.named_parameters() if p.dim() == 2 and "markov" not in name]
    others = [p for name, p in trainer.named_parameters() if p.dim() == 1 or "markov" in name]
    optimizer = optimiser([(matrices, args.draft_lr, 0.1), (others, args.draft_lr, 0.0)], run.device)
    lengths = list(texts)

    def batch() -> tuple[torch.Tensor, torch.Tensor]:
        length = lengths[int(torch.randint(len(lengths), ()))]
        part = texts[length]
        tokens = part[torch.randint(len(part), (scale.draft_batch,), device=run.device)].long()
        room = scale.sequence - config.gamma - length
        return tokens, length + torch.randint(room, (scale.draft_batch, scale.anchors), device=run.device)

    def taps_of(tokens: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return target(tokens).taps

    def losses(taps: torch.Tensor, tokens: torch.Tensor, anchors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        loss, confidence, right = trainer.losses(taps, tokens, anchors, DECAY)
        return loss + 0.2 * confidence, loss.detach(), confidence.detach(), right

    tokens, anchors = batch()
    fast_taps = compiled(run, taps_of, (tokens,), "taps", args.compile, autocast=False)
    fast = compiled(run, losses, (taps_of(tokens), tokens, anchors), "draft", args.compile)
    optimizer.zero_grad(set_to_none=True)

    def step() -> tuple[torch.Tensor, dict[str, Any]]:
        tokens, anchors = batch()
        with torch.autocast(run.device.type, enabled=False):
            taps = fast_taps(tokens)
        loss, entropy, confidence, right = fast(taps, tokens, anchors)
        return loss, {"cross_entropy": entropy, "confidence": confidence, "right": right}

    seconds = run.budget(args.minutes_draft, 45.0)
    train(run, "draft", step, optimizer, seconds, save=lambda: save_all(run, target, trainer))
    return trainer


# --- Phase 4: simulated speculation ----------------------------------------------------------------------------------


def held_out_sequences(run: Run, target: TinyInkling, held_out: torch.Tensor) -> tuple[int, torch.Tensor]:
    length = run.scale.prompts[-2]
    prompts = excerpts(held_out, run.scale.held_out_prompts, length)
    return length, continuations(target, prompts, run.scale.sequence)


@torch.no_grad()
def simulate(
    run: Run, target: TinyInkling, trainer: DraftTrainer, start: int, texts: torch.Tensor, **rule: bool
) -> Any:
    """Acceptance over continuations whose prompts end at ``start``, drafting at every anchor and walking the steps."""
    counts, width = Acceptance(), trainer.width
    for tokens in texts.split(8):
        anchors = torch.arange(start, texts.shape[1] - width, device=run.device).expand(len(tokens), -1)
        taps = target(tokens).taps
        with run.autocast():
            drafted = trainer.drafts(taps, tokens, anchors, **rule)
        right = drafted == tokens.unfold(1, width, 1)[:, start + 1 : start + 1 + anchors.shape[1]]
        for sequence in right.cpu():
            counts.add(sequence)
    return counts.summary()


def rows(run: Run) -> Iterator[str]:
    """The log as a short table."""
    for line in (run.out / "log.jsonl").read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        if entry["phase"] in ("result", "failure") or entry.get("done"):
            rest = {key: value for key, value in entry.items() if key not in ("phase", "seconds", "done")}
            yield f"{entry['phase']:10s} {entry['seconds']:7.1f} s  {json.dumps(rest)}"


def phases(run: Run, args: argparse.Namespace) -> None:
    train_files, held_out_files = sources(20 if args.smoke else None)
    text, held_out = as_tokens(train_files, run.device), as_tokens(held_out_files, run.device)
    run.log(
        "text",
        python=sys.version.split()[0],
        torch=torch.__version__,
        device=torch.cuda.get_device_name() if run.device.type == "cuda" else "cpu",
        train_files=len(train_files),
        train_bytes=len(text),
        held_out_files=len(held_out_files),
        held_out_bytes=len(held_out),
    )
    if args.resume_target:
        (run.out / "target").mkdir(exist_ok=True)
    else:
        train_target(run, text, held_out, args)
    # From here on the target is what ships: its weights in bf16.
    target = TinyInkling.load(args.resume_target or run.out / "target", device=run.device)
    target.target_layer_ids = run.scale.taps
    trainer = train_draft(run, target, generate(run, target, text, args.minutes_generate), args)
    start, texts = held_out_sequences(run, target, held_out)
    for name, divided in (("mup", True), ("mup_dropped", False)):
        run.log("result", rule=name, **simulate(run, target, trainer, start, texts, divided=divided))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes-target", type=float, default=3.3)
    parser.add_argument("--minutes-generate", type=float, default=0.5)
    parser.add_argument("--minutes-draft", type=float, default=3.0)
    parser.add_argument("--total-minutes", type=float, default=8.8, help="phases shrink so that this holds")
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--draft-lr", type=float, default=3e-3)
    parser.add_argument("--draft-layers", type=int, default=2)
    parser.add_argument("--markov-rank", type=int, default=64)
    parser.add_argument("--resume-target", type=Path, help="a folder with a trained target: phase 1 is left out")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=False, help="slow to begin with")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes and few steps")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    run = Run(args.out, device, SMOKE if args.smoke else FULL, args.total_minutes)
    failed = False
    try:
        phases(run, args)
    except Exception as error:  # what earlier phases wrote stays
        failed = True
        traceback.print_exc()
        run.log("failure", error=f"{type(error).__name__}: {error}")
    print("\n".join(rows(run)), flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
