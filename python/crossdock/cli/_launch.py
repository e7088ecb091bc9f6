"""Rank processes of a command: their failures, as the user is told of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from crossdock import launch
from crossdock.cli._usage import CommandError


def run_ranks(
    num_ranks: int,
    job: Callable[..., Any],
    *args: Any,
    limit: float,
    hear: Callable[[int, Any], None] = lambda rank, message: None,
) -> list[Any]:
    """Runs ``job(rank, *args)`` on all ranks and returns what each of them returned.

    `hear` gets (rank, message) of everything that a rank tells before. Raises CommandError with the
    text of the rank that failed, or when `limit` seconds have passed. No process is left either
    way.
    """
    try:
        return launch.run(num_ranks, job, *args, timeout=limit, hear=hear, quiet=True)
    except launch.RankFailed as error:
        told = [failure for failure in error.failures if failure.answered]
        if told:
            raise CommandError(f"rank {told[0].rank}: {told[0].text}") from None
        silent = ", ".join(str(failure.rank) for failure in error.failures)
        raise CommandError(f"no answer in time from rank {silent}") from None
    except OSError as error:
        raise CommandError(f"a rank cannot be started: {error}") from None
