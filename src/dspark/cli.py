"""The command ``dspark``: ``generate`` decodes with speculation, ``doctor`` shows which path each operation takes and
why, ``conformance`` runs the suite, ``explain`` says what a case is about, ``certificate diff`` compares two runs,
``bench`` measures the operations."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from dspark import dispatch
from dspark.doctor import doctor
from dspark.runtime.generate import Options, generate

SUITE = "dspark_conformance"
"""The package that the suite is installed as."""
TOOLS = {"certificate": f"{SUITE}.fixtures.certificate", "explain": f"{SUITE}.fixtures.explain"}
"""Commands that are the suite's own: the modules that run them."""
BENCHMARKS = ("dspark_benchmarks", "benchmarks")
"""The package of the benchmarks, installed and in a checkout."""


def installed_suite() -> Path | None:
    """The folder of the installed suite; None, and a line that says so, where there is none."""
    spec = find_spec(SUITE)
    if spec is None or spec.origin is None:
        print("dspark: the suite is not installed; from a checkout run pytest conformance/", file=sys.stderr)
        return None
    if find_spec("pytest") is None:
        print("dspark: pytest is missing; install dspark[conformance]", file=sys.stderr)
        return None
    return Path(spec.origin).parent


def conformance(arguments: Sequence[str]) -> int:
    """Run the installed suite, or the files and cases of it that ``arguments`` name (``cases/test_x.py::test_y``), with
    pytest's ``arguments``; its exit status. 2 when the suite is not installed."""
    suite = installed_suite()
    if suite is None:
        return 2
    given = [str(suite / one) if names_a_case(suite, one) else one for one in arguments]
    everything = [] if given != list(arguments) else [str(suite)]
    # A process of its own: Triton reads TRITON_INTERPRET when it is imported, and this process may have imported it.
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--rootdir", str(suite), *everything, *given]
    return subprocess.run(command, check=False).returncode


def names_a_case(suite: Path, argument: str) -> bool:
    """Whether a relative ``argument`` is a file of the suite, or a case in one."""
    name = argument.partition("::")[0]
    return name.endswith(".py") and not Path(name).is_absolute() and (suite / name).is_file()


def tool(name: str, arguments: Sequence[str]) -> int:
    """Run one of the suite's own commands; its exit status. 2 when the suite is not installed."""
    if installed_suite() is None:
        return 2
    return subprocess.run([sys.executable, "-m", TOOLS[name], *arguments], check=False).returncode


def bench(arguments: Sequence[str]) -> int:
    """Run the benchmarks: those that are installed, else those of this checkout; 2 where there are none."""
    package, in_checkout = BENCHMARKS
    if find_spec(package) is None:
        # Any folder of that name could be on the path: only the one beside this file's is ours.
        spec, root = find_spec(in_checkout), Path(__file__).resolve().parents[2]
        if spec is None or spec.origin is None or not Path(spec.origin).resolve().is_relative_to(root):
            print("dspark: the benchmarks are not installed, and this is no checkout", file=sys.stderr)
            return 2
        package = in_checkout
    return subprocess.run([sys.executable, "-m", package, *arguments], check=False).returncode


def speak(arguments: argparse.Namespace) -> int:
    """Run ``dspark generate``; 2 for what the user can change, with one line that says what."""
    try:
        prompt = Path(arguments.file).read_bytes() if arguments.file is not None else os.fsencode(arguments.prompt)
        options = Options(
            prompt,
            max_new_tokens=arguments.max_new_tokens,
            dispatch=arguments.dispatch,
            gamma=arguments.gamma,
            min_survival=arguments.min_survival,
            plain=arguments.plain,
            stats=arguments.stats,
            model=arguments.model,
        )
        generate(options, sys.stdout, sys.stderr)
    except BrokenPipeError:
        # The reader has left; what is still buffered must not be tried again when the interpreter closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except (ValueError, OSError, dispatch.FallbackError) as error:
        print(f"dspark: {error}", file=sys.stderr)
        return 2
    return 0


def add_generate(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The arguments of ``dspark generate``."""
    parser = commands.add_parser("generate", help="continue a text with the tiny Inkling, by speculative decoding")
    text = parser.add_mutually_exclusive_group(required=True)
    text.add_argument("prompt", nargs="?", metavar="PROMPT", help="the text to continue")
    text.add_argument("--file", metavar="FILE", help="take the prompt from a file")
    parser.add_argument("--max-new-tokens", type=int, default=256, metavar="N", help="bytes to write (default: 256)")
    parser.add_argument(
        "--dispatch", choices=[*dispatch.Mode], default="auto", help="which path operations take (default: auto)"
    )
    parser.add_argument(
        "--gamma", type=int, metavar="N", help="drafts per step (default: what the draft was trained for)"
    )
    parser.add_argument(
        "--min-survival", type=float, metavar="P", help="verify only drafts at least this likely to be kept; same text"
    )
    parser.add_argument(
        "--model", metavar="FOLDER", help="a folder with target/ and draft/ (default: what ships with dspark)"
    )
    parser.add_argument("--plain", action="store_true", help="decode with the target alone, for comparison; same text")
    parser.add_argument(
        "--stats", action="store_true", help="then print tokens per step, acceptance, seconds and paths"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; ``argv`` without the program's name."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    # Everything after `conformance` is pytest's, options included.
    if arguments[:1] == ["conformance"]:
        return conformance(arguments[1:])
    if arguments[:1] == ["bench"]:
        return bench(arguments[1:])
    if arguments and arguments[0] in TOOLS:
        return tool(arguments[0], arguments[1:])
    parser = argparse.ArgumentParser(prog="dspark", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    add_generate(commands)
    commands.add_parser("doctor", help="print which path each operation takes on this machine, and why")
    commands.add_parser("conformance", help="run the installed conformance suite; further arguments go to pytest")
    commands.add_parser("bench", help="measure the operations against each other's paths and SGLang's; bench --help")
    commands.add_parser("explain", help="print what a case of the suite is about: CASE_ID")
    commands.add_parser("certificate", help="compare the certificates of two runs: diff A B")
    parsed = parser.parse_args(arguments)
    return speak(parsed) if parsed.command == "generate" else doctor()


if __name__ == "__main__":
    raise SystemExit(main())
