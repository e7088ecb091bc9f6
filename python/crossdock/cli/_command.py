"""The command line: which subcommands there are, and how each of them may end."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from crossdock import __version__
from crossdock.cli import _bench, _demo, _doctor, _net_check, _top, _trace
from crossdock.cli._usage import FAILED, INTERRUPTED, OK, CommandError

_EPILOG = """exit codes: 0 done, 1 failed, 2 the command line makes no sense here, 130 Ctrl-C"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="crossdock",
        description="Expert parallelism between ranks: look at this machine, measure, try it.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"crossdock {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for module in (_doctor, _bench, _net_check, _top, _trace, _demo):
        module.add_command(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command with these arguments (default: those of the process).

    Returns the exit code; only argparse's own ``--help`` and refusals leave by SystemExit, with
    0 and 2.
    """
    parser = _parser()
    arguments, unknown = parser.parse_known_args(argv)
    if unknown and hasattr(arguments, "passed_on"):  # options of a program that it starts
        arguments.passed_on = unknown
    elif unknown:
        hint = ""
        if arguments.run is _demo.run:
            example = f"'demo -- {unknown[0]} ...'"
            hint = f": options of the training program go behind --, as in {example}"
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    if not hasattr(arguments, "run"):
        parser.print_help()
        return OK
    try:
        code = arguments.run(arguments)
        sys.stdout.flush()  # here, where a reader that is gone is understood
        return code
    except CommandError as error:
        print(f"crossdock: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader (head, less) has seen enough. Output that is still buffered must not fail at
        # exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
