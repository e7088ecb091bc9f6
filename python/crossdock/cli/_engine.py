"""How one rank does a workload's operations, with NumPy arrays or with tensors of PyTorch."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from crossdock.cli._workload import Workload, choices, sum_of_copies

Call = Callable[[], Any]
Tell = Callable[[float], None]
_TELL_INTERVAL = 0.25  # seconds: drawing progress takes a core from a rank


@dataclasses.dataclass(frozen=True)
class Timed:
    """A call that is timed, and what has to follow each without being timed.

    Where there is a `then`, the time is that of both, each from a start of its own.
    """

    call: Call
    rest: Call | None = None
    then: Timed | None = None

    def parts(self) -> list[Timed]:
        """All whose times are added."""
        return [self, *(self.then.parts() if self.then else ())]


@dataclasses.dataclass(frozen=True)
class Share:
    """How often a round calls what is timed."""

    warmup: int  # without being timed, before the others
    iters: int


def shares(workload: Workload, rounds: int) -> list[Share]:
    """A workload's iterations, divided over the rounds; the warm-up likewise."""
    ends = [workload.iters * number // rounds for number in range(rounds + 1)]
    warmup = -(-workload.warmup // rounds)
    return [Share(warmup, end - begin) for begin, end in zip(ends, ends[1:]) if end > begin]


class Engine(Protocol):
    """The operations of one rank over memory that stays the same from call to call."""

    def check(self) -> None:
        """Sends tokens out and back; RuntimeError if any element differs from what must come."""

    def operations(self) -> Mapping[Any, Timed]:
        """The timed operations, in this order, by name or by what else the report knows them by."""

    def time(self, timed: Timed, share: Share, tell: Tell) -> list[float]:
        """Seconds of every timed iteration of a round on this rank. Collective.

        `tell` hears the share that is done.
        """

    def versions(self) -> dict[str, str]:
        """Packages that had a part in it."""


def wall_times(share: Share, barrier: Call, timed: Timed, tell: Tell) -> list[float]:
    """Times calls that have finished when they return, each from a common start."""
    times = []
    told = time.monotonic()
    for iteration in range(share.warmup + share.iters):
        if time.monotonic() - told >= _TELL_INTERVAL:
            told = time.monotonic()
            tell(iteration / (share.warmup + share.iters))
        spent = 0.0
        for part in timed.parts():
            barrier()
            begin = time.perf_counter()
            part.call()
            spent += time.perf_counter() - begin
            if part.rest:
                part.rest()
        times.append(spent)
    return times[share.warmup :]


def token_values(workload: Workload, rank: int) -> np.ndarray:
    """Tokens of this rank, float32 [T,H]: integers from -3 to 3.

    Up to 32 copies of one add up to an integer that even bf16 has, so sums can be compared exactly.
    """
    token = np.arange(workload.tokens)[:, None] + 5 * rank
    return ((3 * token + np.arange(workload.hidden)) % 7 - 3).astype(np.float32)


def expected_sums(workload: Workload, rank: int) -> np.ndarray:
    """The result of the round trip of `token_values` if the experts change nothing."""
    return token_values(workload, rank) * sum_of_copies(workload, rank)[:, None]


def require_equal(workload: Workload, rank: int, got: np.ndarray) -> None:
    """RuntimeError that counts wrong elements and shows the first."""
    wrong = np.argwhere(got != expected_sums(workload, rank))
    if len(wrong):
        token, column = wrong[0]
        raise RuntimeError(
            f"wrong result of a round trip: {len(wrong)} of {got.size} elements, the first at "
            f"token {token}, column {column}: {got[token, column]}, expected "
            f"{expected_sums(workload, rank)[token, column]}"
        )


def topk(workload: Workload, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """(ids int64 [T,K], weights float32 [T,K]) of this rank."""
    ids = choices(workload, rank)
    weights = np.random.default_rng([workload.seed, rank, 1]).random(ids.shape, np.float32)
    return ids, weights
