"""Counters of groups and contexts, of this process and of others."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

from crossdock import _core
from crossdock._core import constants
from crossdock.errors import InvalidArgument

__all__ = ["GroupStats", "SeenGroup", "group_stats", "processes", "seen_groups"]


@dataclasses.dataclass(frozen=True)
class GroupStats:
    """The counters of this rank's part of a group, or of a context, since it was made.

    Numbers only grow. On CUDA a call is counted when it has been enqueued, and replays of graphs
    are not.
    """

    calls: dict[str, int]  # by operation, those that failed among them; a half is a call
    call_ns: dict[str, int]  # how long they lasted: on CUDA, how long they took to enqueue
    failed_calls: int
    tokens: int  # groups: [T, H] of operations that move rows
    token_bytes: int  # without scales and weights
    rows: int | None  # groups on the CPU: rows of receive tensors in these; None = not counted
    row_bytes: int | None
    bad_ids: int  # in all plans, over all ranks
    dropped_rows: int
    net_puts: int  # into memory of other machines, on the CPU
    net_bytes: int  # of these puts
    staged_tensors: int  # groups: receive tensors of calls that lay outside symmetric memory
    wait_ns: tuple[int, ...] | None  # by rank: how long it was waited for; None = not measured


@dataclasses.dataclass(frozen=True)
class SeenGroup:
    """A group or context of any process, and what it is doing."""

    pid: int
    place: int  # tells it from the others of the process
    rank: int
    num_ranks: int
    is_context: bool
    number: int  # in its communicator
    device: str
    comm: str
    name: str
    detail: str  # its kind and sizes
    operation: str | None  # the one whose call has begun and not returned
    operation_ns: int  # for how long
    waits_for: int | None  # the rank that it waits for
    stats: GroupStats


_FIRST_OF_CONTEXTS = min(constants.GEMM_OPERATIONS.values())


def _operations(first: int) -> tuple[str, ...]:
    """The operations of a kind, from its first one on."""
    if first == _FIRST_OF_CONTEXTS:
        return tuple(constants.GEMM_OPERATIONS)
    return constants.OPERATIONS[first:]


def group_stats(fields: dict[str, Any], *, first_operation: int) -> GroupStats:
    """The numbers that the raw layer gives by their fields.

    Args:
        first_operation: the number of the first operation that is counted, by which kinds of groups
            and contexts differ.
    """
    words = _operations(first_operation)
    counted = fields["counts_rows"]
    return GroupStats(
        calls={word: n for word, n in zip(words, fields["calls"]) if n},
        call_ns={word: ns for word, ns in zip(words, fields["call_ns"]) if ns},
        rows=fields["rows"] if counted else None,
        row_bytes=fields["row_bytes"] if counted else None,
        wait_ns=fields["wait_ns"] if fields["measures_waits"] else None,
        **{
            name: fields[name]
            for name in (
                "failed_calls",
                "tokens",
                "token_bytes",
                "bad_ids",
                "dropped_rows",
                "net_puts",
                "net_bytes",
                "staged_tensors",
            )
        },
    )


def _seen(pid: int, fields: dict[str, Any]) -> SeenGroup:
    first = fields["first_operation"]
    operation = fields["operation"]
    words = {number: word for word, number in constants.DEVICE_TYPES.items()}
    return SeenGroup(
        pid=pid,
        device=words.get(fields["device_type"], "?"),
        operation=None if operation < 0 else _operations(first)[operation - first],
        waits_for=None if fields["waits_for"] < 0 else fields["waits_for"],
        is_context=first == _FIRST_OF_CONTEXTS,
        stats=group_stats(fields, first_operation=first),
        **{
            name: fields[name]
            for name in (
                "place",
                "rank",
                "num_ranks",
                "number",
                "comm",
                "name",
                "detail",
                "operation_ns",
            )
        },
    )


def processes() -> list[int]:
    """The processes of this user that have groups or contexts, by what the system tells of them."""
    return sorted(
        int(entry.name)
        for entry in Path("/proc").iterdir()
        if entry.name.isdecimal() and _has_stats(entry / "fd")
    )


def is_stopped(pid: int) -> bool:
    """True if the process does not run, by a signal or a debugger."""
    try:
        # Behind the command's name, which may hold anything, brackets among it.
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state in "Tt"


def _has_stats(descriptors: Path) -> bool:
    try:
        entries = list(descriptors.iterdir())
    except OSError:  # the process has ended, or is none of ours
        return False
    for entry in entries:
        try:
            if os.readlink(entry).startswith("/memfd:crossdock-stats"):
                return True
        except OSError:  # it has been closed meanwhile
            continue
    return False


def seen_groups(pids: list[int]) -> list[SeenGroup]:
    """The groups and contexts of these processes, as they are now; none of those that have ended.

    Raises:
        Unsupported: a process uses another version of the library.
    """
    found = []
    for pid in pids:
        try:
            fields = _core.Monitor(pid).read()
        except InvalidArgument:
            continue
        found += [_seen(pid, one) for one in fields]
    return sorted(found, key=lambda seen: (seen.comm, seen.number, seen.rank, seen.pid))
