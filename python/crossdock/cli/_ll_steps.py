"""The timed steps of ``crossdock bench ll``.

They are those of ``crossdock-bench ll``, but for its expert-major steps on ordinary memory.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from crossdock._config import LowLatencyConfig
from crossdock._quantise import WAYS
from crossdock.cli._engine import Call, Timed
from crossdock.cli._workload import Workload

LOW_LATENCY = "low latency"
THREE_CALLS = "expert-major, zero-copy"
ROUNDS = 5  # in which all steps take turns
QUANTISE = "fp8_block128"
SCALED_COLUMNS = WAYS[QUANTISE].block
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


class Step(NamedTuple):
    """What is timed."""

    operation: str
    by: str  # LOW_LATENCY, or the layout that takes three calls
    rows: str  # their type on the way


@dataclasses.dataclass(frozen=True, kw_only=True)
class Calls:
    """One rank's calls on a batch, into memory that stays the same.

    The combines, and the receive half of combine, return the sums. Experts read and write all rows
    that have been received, and change none: so they lie in this rank's caches, in no other's.
    """

    dispatch: Call
    dispatch_quantised: Call  # receives rows of QUANTISE
    combine: Call
    experts: Call
    experts_quantised: Call
    dispatch_send: Call
    dispatch_receive: Call
    combine_send: Call
    combine_receive: Call
    # Of the expert-major layout: with the plan of `prepare`, with the rows of `major_dispatch`.
    prepare: Call
    major_dispatch: Call
    major_combine: Call
    major_experts: Call

    def whole(self) -> Call:
        """A round trip."""
        return _all(self.dispatch, self.combine)

    def in_halves(self) -> Call:
        """A round trip."""
        return _all(
            self.dispatch_send, self.dispatch_receive, self.combine_send, self.combine_receive
        )

    def three_calls(self) -> Call:
        """A round trip by the other layout."""
        return _all(self.prepare, self.major_dispatch, self.major_combine)


def config(workload: Workload) -> LowLatencyConfig:
    """The sizes of the low-latency group of a workload."""
    return LowLatencyConfig(
        num_experts=workload.experts,
        max_topk=workload.topk,
        max_tokens_per_rank=workload.tokens,
        hidden=workload.hidden,
        dtype=_DTYPES[workload.dtype],
    )


def steps(workload: Workload, calls: Calls) -> dict[Step, Timed]:
    """The steps of a workload. Quantised rows are those of bf16 tokens."""
    rows = workload.dtype
    experts = calls.experts
    both = Timed(calls.dispatch, experts, Timed(calls.combine))
    major = Timed(
        _all(calls.prepare, calls.major_dispatch), calls.major_experts, Timed(calls.major_combine)
    )
    found = {
        Step("dispatch", LOW_LATENCY, rows): Timed(calls.dispatch, experts),
        Step("dispatch", LOW_LATENCY, "fp8"): Timed(
            calls.dispatch_quantised, calls.experts_quantised
        ),
        Step("combine", LOW_LATENCY, rows): Timed(calls.combine, experts),
        Step("dispatch + combine", LOW_LATENCY, rows): both,
        **_halves("dispatch", rows, calls.dispatch_send, calls.dispatch_receive, experts),
        **_halves("combine", rows, calls.combine_send, calls.combine_receive, experts),
        Step("prepare", THREE_CALLS, "-"): Timed(calls.prepare),
        Step("dispatch", THREE_CALLS, rows): Timed(calls.major_dispatch, calls.major_experts),
        Step("combine", THREE_CALLS, rows): Timed(calls.major_combine, calls.major_experts),
        Step("prepare + dispatch + combine", THREE_CALLS, rows): major,
    }
    if workload.dtype != "bf16":
        del found[Step("dispatch", LOW_LATENCY, "fp8")]
    return found


def _halves(
    operation: str, rows: str, send: Call, receive: Call, experts: Call
) -> dict[Step, Timed]:
    return {
        Step(f"{operation}, send half", LOW_LATENCY, rows): Timed(send, _all(receive, experts)),
        Step(f"{operation}, both halves", LOW_LATENCY, rows): Timed(_all(send, receive), experts),
    }


def _all(*calls: Call) -> Call:
    def run() -> object:
        *before, last = calls
        for call in before:
            call()
        return last()

    return run
