"""The command ``dspark``: ``doctor`` shows which path each operation takes and why, ``conformance`` runs the suite."""

from __future__ import annotations

import argparse
import logging
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

import torch

from dspark import dispatch, machine
from dspark.ops import compute_dflash_correct_drafts_and_bonus, table_qk_norm_rope_


def _accept(device: torch.device) -> None:
    ids = torch.tensor([[1, 2], [3, 4]], device=device)
    compute_dflash_correct_drafts_and_bonus(candidates=ids, target_predict=ids)


def _qk_norm_rope(device: torch.device) -> None:
    qkv = torch.ones(2, 3 * 8, dtype=torch.bfloat16, device=device)
    weight = torch.ones(8, dtype=torch.bfloat16, device=device)
    table = torch.ones(2, 8, dtype=torch.float32, device=device)
    positions = torch.arange(2, device=device)
    table_qk_norm_rope_(qkv, positions, weight, weight, table, 1, 1, 8, 1e-6)


SMALL_CALLS: dict[str, Callable[[torch.device], None]] = {"accept": _accept, "qk_norm_rope": _qk_norm_rope}
"""One small call of each operation."""


def doctor() -> int:
    """Make one small call of each operation and print each decision with its reasons; 0 when every one is fused."""
    logging.getLogger("dspark").setLevel(logging.ERROR)  # the reasons are printed below, in full
    facts = machine.facts()
    device = torch.device("cuda" if facts.cuda else "cpu")
    triton = facts.triton_version or f"not importable ({facts.triton_error})"
    kind = "interpreter" if facts.interpreter else "compiled"
    print(f"torch {torch.__version__}, triton {triton}, {kind}, device {device}")
    fused = 0
    for op, call in SMALL_CALLS.items():
        with dispatch.observed() as outcomes:
            call(device)
        for outcome in outcomes:
            print(f"{op}: {outcome.path}")
            for failure in outcome.decision.failed:
                print(f"  {failure}")
            fused += outcome.path is dispatch.Path.FUSED
    return 0 if fused == len(SMALL_CALLS) else 1


def conformance(arguments: Sequence[str]) -> int:
    """Run the installed suite with pytest's ``arguments``; its exit status. 2 when the suite is not installed."""
    spec = find_spec("dspark_conformance")
    if spec is None or spec.origin is None:
        print("dspark: the suite is not installed; from a checkout run pytest conformance/", file=sys.stderr)
        return 2
    if find_spec("pytest") is None:
        print("dspark: pytest is missing; install dspark[conformance]", file=sys.stderr)
        return 2
    suite = str(Path(spec.origin).parent)
    # A process of its own: Triton reads TRITON_INTERPRET when it is imported, and this process may have imported it.
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--rootdir", suite, suite, *arguments]
    return subprocess.run(command, check=False).returncode


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; ``argv`` without the program's name."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    # Everything after `conformance` is pytest's, options included.
    if arguments[:1] == ["conformance"]:
        return conformance(arguments[1:])
    parser = argparse.ArgumentParser(prog="dspark", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("doctor", help="print which path each operation takes on this machine, and why")
    commands.add_parser("conformance", help="run the installed conformance suite; further arguments go to pytest")
    parser.parse_args(arguments)
    return doctor()


if __name__ == "__main__":
    raise SystemExit(main())
