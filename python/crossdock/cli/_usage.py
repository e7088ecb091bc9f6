"""Parts that commands share: types of options, how a command may end, and its exit codes."""

from __future__ import annotations

import argparse
from collections.abc import Callable

OK = 0
FAILED = 1  # the command was understood, and what it tried did not work
USAGE = 2  # the command line cannot mean anything on this machine; argparse's own code, too
INTERRUPTED = 130  # Ctrl-C, as shells count: 128 + SIGINT


class CommandError(Exception):
    """Ends a command with one line for the user instead of a stack trace."""

    exit_code = FAILED


class UsageError(CommandError):
    """The user asked for something that cannot be done; the text says what can."""

    exit_code = USAGE


class HelpWithDefaults(
    argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter
):
    """Shows what each option is where it is not given, and leaves the description as it is."""


def number(least: int) -> Callable[[str], int]:
    """Parses whole numbers from `least` on."""

    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            expected = f"expected a whole number from {least} on"
            raise argparse.ArgumentTypeError(f"{expected}, got {text!r}")
        return int(text)

    return parse


def add_number(
    group: argparse._ActionsContainer,
    option: str,
    metavar: str,
    text: str,
    default: int | None = None,
    least: int = 1,
) -> None:
    """Adds an option whose value is a whole number; `text` says what it is."""
    shown = "" if default is None else " (default: %(default)s)"
    group.add_argument(
        option, type=number(least), default=default, metavar=metavar, help=text + shown
    )


def numbers(least: int) -> Callable[[str], list[int]]:
    """Parses whole numbers from `least` on, separated by commas."""
    one = number(least)
    return lambda text: [one(part) for part in text.split(",")]
