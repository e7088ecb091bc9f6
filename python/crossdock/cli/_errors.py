"""The ways in which a command may end, and the exit code of each."""

from __future__ import annotations

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
