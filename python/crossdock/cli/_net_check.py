"""``crossdock net-check``: whether the ranks of a job reach each other between hosts, and how fast.

It runs as the job does, one process for each rank; each step proves what the next one needs.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

import crossdock
from crossdock.cli import _engine
from crossdock.cli._usage import OK, CommandError, HelpWithDefaults, UsageError, number
from crossdock.cli._workload import Workload, choices, volume

_ALONE = "all {} ranks are on one host ({}): start some of them on another one"
_USAGE = """Start it on every host as the job is started, for instance

  torchrun --nnodes 2 --node-rank N --master-addr A --master-port 29500 \\
    --no-python crossdock net-check

or once for each rank, with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set;
and XD_JOB_SECRET, in any case. Of a host alone:

  XD_NET_IFACE   the interface, or the address, that other hosts reach;
                 default: the one from which this rank reaches MASTER_ADDR
  XD_NET_DEVICE  the network adapter that carries rows, as crossdock doctor
                 names it; default: the one of that interface
  XD_SILENCE_MS  milliseconds without an answer until another host is lost;
                 default: 10000

Times are those of the slowest rank with a barrier behind it. Exit code 0: every
element came as it must; 1: a step failed, and each rank says what it knows of
it."""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds ``net-check`` to the commands."""
    parser = commands.add_parser(
        "net-check",
        help="whether the ranks of a job reach each other between hosts, and how fast",
        description=_USAGE,
        formatter_class=HelpWithDefaults,
    )
    parser.add_argument(
        "--tokens", type=number(1), default=512, help="of each rank in the larger batch"
    )
    parser.add_argument("--hidden", type=number(1), default=7168, help="elements of a token")
    parser.add_argument("--iters", type=number(1), default=10, help="calls that are timed")
    parser.add_argument("--timeout", type=number(1), default=60, help="seconds of every wait")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Joins the other ranks and goes through the steps; the first rank prints them."""
    rank = os.environ.get("RANK", "?")
    with _step(rank, "meeting"):
        comm = crossdock.Comm.from_environment(timeout=arguments.timeout, name="net-check")
    with comm:
        with _step(rank, "a barrier"):
            comm.barrier()
        if comm.num_hosts == 1:
            raise UsageError(_ALONE.format(comm.num_ranks, os.uname().nodename))
        say = print if comm.rank == 0 else _nothing
        say(f"meeting    ok  {comm.num_ranks} ranks on {comm.num_hosts} hosts")
        with _step(rank, "connecting"):
            group = _connect(comm, _batch(comm, arguments.tokens, arguments))
        with group:
            say("connecting ok")
            for tokens in sorted({min(8, arguments.tokens), arguments.tokens}):
                with _step(rank, f"{tokens} tokens"):
                    _check(comm, group, _batch(comm, tokens, arguments), say)
    return OK


def _nothing(*_: Any) -> None:
    pass


@contextmanager
def _step(rank: str, name: str) -> Iterator[None]:
    """Tells a failure of its body with the rank and the step."""
    try:
        yield
    except crossdock.InvalidArgument as error:
        raise UsageError(f"rank {rank}: {name}: {error}; see net-check --help") from None
    except RuntimeError as error:
        raise CommandError(f"rank {rank}: {name}: {error}") from None


def _batch(comm: crossdock.Comm, tokens: int, arguments: argparse.Namespace) -> Workload:
    return Workload(
        ranks=comm.num_ranks,
        tokens=tokens,
        hidden=arguments.hidden,
        topk=min(8, 2 * comm.num_ranks),
        experts=8 * comm.num_ranks,
        layout="rank_major",
        dtype="fp16",
        routing="uniform",
        seed=1,
        device="cpu",
        through="numpy",
        iters=arguments.iters,
        warmup=2,
        timeout=arguments.timeout,
    )


def _connect(comm: crossdock.Comm, batch: Workload) -> crossdock.EpGroup:
    """A group that has room for the batch."""
    config = crossdock.EpConfig(
        num_experts=batch.experts,
        max_topk=batch.topk,
        max_tokens_per_rank=batch.tokens,
        hidden=batch.hidden,
        dtype="float16",
        layout=batch.layout,
        recv_capacity=max(volume(batch).received),
    )
    return crossdock.EpGroup(comm, config)


def _check(
    comm: crossdock.Comm, group: crossdock.EpGroup, batch: Workload, say: Callable[[str], None]
) -> None:
    """Sends a batch there and back, and times it."""
    tokens = _engine.token_values(batch, comm.rank).astype(np.float16)
    plan = group.prepare(choices(batch, comm.rank))
    sent = group.dispatch(plan, tokens)
    out = group.combine(plan, sent.tokens)
    _engine.require_equal(batch, comm.rank, out.astype(np.float32))
    comm.barrier()
    say(f"{batch.tokens:4} tokens ok  out and back, every element right")
    calls: dict[str, Callable[[], Any]] = {
        "dispatch": lambda: group.dispatch(plan, tokens, out=sent),
        "combine": lambda: group.combine(plan, sent.tokens, out=out),
    }
    for name, call in calls.items():
        say(_measure(comm, group, batch, call).line(name))


@dataclasses.dataclass(frozen=True)
class _Measured:
    seconds: float
    net_bytes: float  # bytes that this rank put into other machines

    def line(self, name: str) -> str:
        """Of the report."""
        return (
            f"{'':15}{name:9}{self.seconds * 1e6:10.0f} us   rank 0 sends other hosts"
            f" {self.net_bytes / 1e6:.3f} MB: {self.net_bytes / self.seconds / 1e9:.2f} GB/s"
        )


def _measure(
    comm: crossdock.Comm, group: crossdock.EpGroup, batch: Workload, call: Callable[[], Any]
) -> _Measured:
    """The median of calls that all ranks begin together."""
    times = []
    before = 0
    for iteration in range(batch.warmup + batch.iters):
        if iteration == batch.warmup:
            before = group.stats().net_bytes
        comm.barrier()
        begin = time.perf_counter()
        call()
        comm.barrier()
        times.append(time.perf_counter() - begin)
    sent = group.stats().net_bytes - before
    return _Measured(statistics.median(times[batch.warmup :]), sent / batch.iters)
