"""The command ``dspark``: ``doctor`` shows which path each operation takes and why, ``conformance`` runs the suite."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from dspark.doctor import doctor


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
