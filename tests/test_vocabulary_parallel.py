"""Base logits and embedding rows over vocabulary shards in two processes, bit-equal to one rank (gloo)."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WORKER = textwrap.dedent(
    """
    import sys
    from types import SimpleNamespace

    import torch
    import torch.distributed

    from dspark.model.base_logits import compute_base_logits
    from dspark.model.vocabulary import lookup_rows, shard_rows

    rank, world, meeting = int(sys.argv[1]), 2, sys.argv[2]
    torch.distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
    group = torch.distributed.group.WORLD
    # Padded to 64 rows; the vocabulary ends inside the last shard, and row 60, the mask row, lies in its padded tail.
    rows, vocabulary, mask, width = 64, 41, 60, 32
    generator = torch.Generator().manual_seed(7)
    shard = shard_rows(rows, world, rank)

    def same(found, expected, what):
        assert found.dtype == expected.dtype and found.shape == expected.shape, what
        bits = [part.contiguous().view(torch.uint8) for part in (found, expected)]
        assert torch.equal(*bits), what

    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        whole = torch.randint(-3, 4, (rows, width), generator=generator).to(dtype)
        whole[vocabulary:] = 7
        hidden = torch.randint(-8, 9, (3, 2, width), generator=generator).to(dtype) * 16
        part = whole[shard.start : shard.stop].clone()
        for path in ("fused", "eager"):
            common = dict(vocab_size=vocabulary, mup_width_multiplier=16, path=path)
            alone = compute_base_logits(hidden, SimpleNamespace(weight=whole), **common)
            shared = compute_base_logits(hidden, SimpleNamespace(weight=part), group=group, **common)
            same(shared, alone, f"logits in {dtype} by {path}")
        method = SimpleNamespace(apply=lambda head, rows: rows @ head.weight.t())
        quantized = SimpleNamespace(weight=part, quant_method=method)
        common = dict(vocab_size=vocabulary, mup_width_multiplier=16)
        same(compute_base_logits(hidden, quantized, group=group, **common), alone, "logits of a quantized head")
        assert compute_base_logits(hidden[:0], SimpleNamespace(weight=part), group=group, **common).shape == (0, 2, 41)
        # Special bits: -0, NaN with a payload, subnormals.
        table = torch.randint(0, 1 << 8, (rows, width * dtype.itemsize), generator=generator, dtype=torch.uint8)
        table = table.view(dtype)
        table[mask, 0] = -0.0
        ids = torch.tensor([[0, 31, 32], [mask, 63, 5]])
        own = table[shard.start : shard.stop].clone()
        same(lookup_rows(ids, own, group=group), table[ids], f"rows in {dtype}")
        outside = lookup_rows(torch.tensor([-1, 64]), own, group=group)
        assert not outside.view(torch.uint8).any(), "ids that no rank holds"
    try:
        compute_base_logits(hidden, SimpleNamespace(weight=part), vocab_size=65, mup_width_multiplier=1, group=group)
    except ValueError as error:
        assert "vocab_size: got 65" in str(error), error
    else:
        raise AssertionError("a vocabulary larger than all shards was accepted")
    torch.distributed.destroy_process_group()
    print("equal")
    """
)


def test_two_ranks_give_the_bits_of_one(tmp_path: Path) -> None:
    workers = [
        subprocess.Popen(
            [sys.executable, "-W", "error", "-c", WORKER, str(rank), str(tmp_path / "meeting")],
            env={"PYTHONPATH": str(ROOT / "src"), "PATH": "", "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        ended = [worker.communicate(timeout=120) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    for worker, (out, err) in zip(workers, ended, strict=True):
        assert worker.returncode == 0, err
        assert out == "equal\n"
