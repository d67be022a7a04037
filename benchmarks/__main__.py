"""``dspark bench``: measure, print a short table last, and keep the record."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import platform
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import dspark

from . import peer, runner, table, without_gpu
from .case import AGAINST, COMPILE, SGLANG, Asked, Peer
from .ops import OPS

QUICK = {"rows": (8, 4096), "batches": (8,)}


def names(choices: Sequence[str]) -> Any:
    """A parser of comma-separated names out of ``choices``."""

    def parse(text: str) -> list[str]:
        given = [name for name in text.split(",") if name]
        unknown = sorted(set(given) - set(choices))
        if unknown or not given:
            raise argparse.ArgumentTypeError(f"got {text!r}, need names out of {', '.join(choices)}")
        return given

    return parse


def sizes(text: str) -> list[int]:
    """Comma-separated sizes of at least 1."""
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = [0]
    if min(found) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, need sizes of at least 1, like 8,512")
    return found


def parser() -> argparse.ArgumentParser:
    """The arguments of ``dspark bench``."""
    found = argparse.ArgumentParser(prog="dspark bench", description=__doc__)
    found.add_argument("--op", action="extend", type=names(list(OPS)), metavar="OP", help=f"of {', '.join(OPS)}")
    found.add_argument("--against", type=names(AGAINST), metavar="WHO", help=f"of {', '.join(AGAINST)} (default: all)")
    found.add_argument("--sglang", metavar="PATH", help="a checkout or an unpacked wheel (default: what is installed)")
    found.add_argument("--json", type=Path, metavar="FILE", help="write the record")
    found.add_argument("--rows", type=sizes, help="sizes of the operations that count rows")
    found.add_argument("--batches", type=sizes, help="sizes of the operations that count requests")
    found.add_argument("--quick", action="store_true", help="few sizes, no growth, torch.compile only if named")
    found.add_argument(
        "--compile-seconds",
        type=float,
        default=200.0,
        metavar="S",
        help="stop compiling after S seconds (default: 200)",
    )
    return found


def heading(argv: Sequence[str]) -> dict[str, Any]:
    """What a record starts with."""
    versions = {"dspark": dspark.__version__, "python": platform.python_version(), "torch": torch.__version__}
    with contextlib.suppress(ImportError):
        import triton

        versions["triton"] = triton.__version__
    versions["machine"] = f"{platform.system()} {platform.machine()}"
    if torch.cuda.is_available():
        versions |= {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda or ""}
    return {
        "kind": "bench",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": command(argv),
        "versions": versions,
    }


def write(path: Path | None, record: dict[str, Any]) -> None:
    """Replace the record at ``path``, so that what is there is always whole."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(record, indent=1) + "\n")
    part.replace(path)


def plan_of(arguments: argparse.Namespace) -> runner.Plan:
    """What is asked for."""
    against = arguments.against or [name for name in AGAINST if not arguments.quick or name != COMPILE]
    found = peer.load(arguments.sglang) if SGLANG in against else Peer()
    quick = QUICK if arguments.quick else {"rows": None, "batches": None}
    return runner.Plan(
        ops=arguments.op or tuple(OPS),
        rows=arguments.rows or quick["rows"],
        batches=arguments.batches or quick["batches"],
        asked=Asked(frozenset(against), found),
        compile_seconds=arguments.compile_seconds,
        growth=not arguments.quick and arguments.rows is None,
    )


def on_gpu(arguments: argparse.Namespace, record: dict[str, Any]) -> int:
    """Measure; 1 when a result of the fused path is wrong or missing."""
    plan = plan_of(arguments)
    record["peer"] = plan.asked.peer.version or plan.asked.peer.reason

    def say(text: str) -> None:
        print(text, flush=True)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        record |= runner.run(plan, runner.current_device(), say, lambda part: write(arguments.json, record | part))
    write(arguments.json, record)
    print(f"\n{record['versions']['gpu']}, torch {record['versions']['torch']}, {record['seconds']:.0f} s")
    print("\n".join(table.lines(record)))
    rows = [*record["checks"], *record["measurements"], *record["growth"]]
    return int(any(row["contender"] == "fused" and row["status"] != runner.OK for row in rows))


def on_cpu(arguments: argparse.Namespace, record: dict[str, Any]) -> int:
    """Time the suite, and say that this is no benchmark of the operations."""
    print("No CUDA device: kernels run in Triton's interpreter, so only the suite itself is timed, not the operations.")
    record["suite"] = without_gpu.run(arguments.op or tuple(OPS), arguments.quick, print)
    write(arguments.json, record)
    for row in record["suite"]:
        if row["status"] != "ok":
            print(f"{row['op']}: {row.get('reason') or str(row['failures']) + ' cases failed'}", file=sys.stderr)
    return int(any(row["status"] != "ok" for row in record["suite"]))


def command(argv: Sequence[str]) -> str:
    """What was called, for a reader elsewhere: of a path its last part."""
    return " ".join(["dspark bench", *(Path(word).name if "/" in word else word for word in argv)])


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; ``argv`` without the program's name."""
    given = list(sys.argv[1:] if argv is None else argv)
    arguments = parser().parse_args(given)
    record = heading(given)
    return on_gpu(arguments, record) if torch.cuda.is_available() else on_cpu(arguments, record)


if __name__ == "__main__":
    raise SystemExit(main())
