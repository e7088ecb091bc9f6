"""``crossdock top``: what the ranks of this machine's jobs are doing, while they do it."""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Iterator, Sequence

from crossdock import _stats
from crossdock._stats import SeenGroup
from crossdock.cli import _console
from crossdock.cli._usage import OK, CommandError, UsageError, number
from crossdock.errors import CrossdockError

_HEADER = ("rank", "pid", "group", "now", "calls/s", "tokens/s", "B/s", "waited")
_RIGHT = 4  # columns of numbers
_WIDTH = 80  # of a table whose groups have their least width
_UNBOUNDED = 1 << 20
_GROUP_WIDTH, _NOW_WIDTH = 12, 17
_SHOWN_AFTER_NS = 1_000_000  # shorter calls come and go between two looks
_UNEVEN = 1.1  # the most rows of a rank by the mean that is worth a word

Rows = list[tuple[str, ...]]
"""Cells of a table under _HEADER."""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds ``top`` to the commands."""
    parser = commands.add_parser(
        "top",
        help="watch the groups of running jobs",
        description="Shows the groups and contexts of this user's processes on this machine: what "
        "each rank is doing and whom it waits for, and what it has done per second since the last "
        "look. 'dispatch 3.2s>3': that call has lasted 3.2 seconds, and waits for rank 3; "
        "'stopped': a signal or a debugger has stopped the process; 'staged': between calls, of "
        "which some had tensors outside symmetric memory, whose rows are copied once more; "
        "'1.8x rows': likewise, and of the group's ranks this one has received the most rows, 1.8 "
        "times their mean (on the CPU, where all ranks of the group are on this machine). "
        "'50%>3': half of the time"
        " it has waited for rank 3, longer than for any other. The processes need no "
        "preparation and do not notice. Waits are measured on the CPU alone.",
    )
    parser.add_argument(
        "pids",
        nargs="*",
        type=number(1),
        metavar="PID",
        help="processes to look at (default: all that have groups)",
    )
    parser.add_argument(
        "--interval",
        type=_seconds,
        default=1.0,
        metavar="S",
        help="seconds between two looks (default: %(default)s)",
    )
    parser.add_argument(
        "--once",
        action="store_true",
        help="look for one interval, print a table, and end (default without a terminal)",
    )
    parser.set_defaults(run=run)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.01 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"expected seconds from 0.01 to 3600, got {text!r}")
    return seconds


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


# Words that tell groups without a name apart where there is little room.
_SHORT = {
    "EXPERT_MAJOR": "experts",
    "RANK_MAJOR": "ranks",
    "low latency": "ll",
}


def _name(seen: SeenGroup, width: int) -> str:
    """The group's name; without one its communicator, number and kind, of which the last stay."""
    if seen.name:
        return _cut(seen.name, width)
    comm, kind = seen.comm or "comm", seen.detail.split(",")[0]
    if len(f"{comm}#{seen.number} {kind}") > width:
        kind = _SHORT.get(kind, kind)
    rest = f"#{seen.number} {kind}"
    return _cut(_cut(comm, max(1, width - len(rest))) + rest, width)


def _duration(ns: int) -> str:
    return f"{ns / 1e9:.1f}s" if ns >= 1_000_000_000 else f"{ns / 1e6:.0f}ms"


def _count(number: float) -> str:
    """In at most 5 characters."""
    for unit in ("", "k", "M", "G"):
        if number < 999.5:
            return f"{number:.0f}{unit}" if not unit or number >= 99.95 else f"{number:.1f}{unit}"
        number /= 1000
    return f"{number:.0f}T"


def _place(seen: SeenGroup) -> tuple[int, ...]:
    return seen.pid, seen.place, seen.rank, seen.number


def _most_rows(looks: Sequence[tuple[SeenGroup, SeenGroup]]) -> dict[tuple[int, ...], str]:
    """By the place of the rank that has received the most rows of a group: these by their mean."""
    groups: dict[tuple[int, str, int, str], dict[int, list[tuple[int, SeenGroup]]]] = {}
    for old, seen in looks:
        if seen.stats.rows is not None and old.stats.rows is not None:
            kind = seen.detail.split(",")[0]
            ranks = groups.setdefault((seen.num_ranks, seen.comm, seen.number, kind), {})
            ranks.setdefault(seen.rank, []).append((seen.stats.rows - old.stats.rows, seen))
    found = {}
    for (num_ranks, *_), ranks in groups.items():
        # Jobs whose communicators have one name, or none, are not told apart.
        if len(ranks) < num_ranks or any(len(one) > 1 for one in ranks.values()):
            continue
        most, seen = max((one[0] for one in ranks.values()), key=lambda one: one[0])
        mean = sum(one[0][0] for one in ranks.values()) / len(ranks)
        if mean > 0 and most >= _UNEVEN * mean:
            found[_place(seen)] = f"{most / mean:.1f}x rows"
    return found


def _what_now(seen: SeenGroup, before: SeenGroup, otherwise: str) -> str:
    if _stats.is_stopped(seen.pid):
        return "stopped"
    if seen.operation is None or seen.operation_ns < _SHOWN_AFTER_NS:
        return "staged" if seen.stats.staged_tensors > before.stats.staged_tensors else otherwise
    who = "" if seen.waits_for is None else f">{seen.waits_for}"
    return _cut(f"{seen.operation} {_duration(seen.operation_ns)}{who}", _NOW_WIDTH)


def _waited(seen: SeenGroup, before: SeenGroup, ns: float) -> str:
    if seen.stats.wait_ns is None or before.stats.wait_ns is None:
        return "?"
    waits = [new - old for new, old in zip(seen.stats.wait_ns, before.stats.wait_ns)]
    longest = max(range(len(waits)), key=waits.__getitem__)
    return f"{waits[longest] / ns:.0%}>{longest}" if waits[longest] else "-"


def rows(
    before: Sequence[SeenGroup], now: Sequence[SeenGroup], seconds: float, columns: int
) -> Rows:
    """A row for each group that was there at both looks, `seconds` apart, for so many columns."""
    width = _GROUP_WIDTH + max(0, columns - _WIDTH)
    known = {_place(seen): seen for seen in before}
    looks = [(known[_place(seen)], seen) for seen in now if _place(seen) in known]
    most = _most_rows(looks)
    found: Rows = []
    for old, seen in looks:
        calls = sum(seen.stats.calls.values()) - sum(old.stats.calls.values())
        found.append(
            (
                f"{seen.rank}/{seen.num_ranks}",
                str(seen.pid),
                _name(seen, width),
                _what_now(seen, old, most.get(_place(seen), "-")),
                _count(calls / seconds),
                _count((seen.stats.tokens - old.stats.tokens) / seconds),
                _count((seen.stats.token_bytes - old.stats.token_bytes) / seconds),
                _waited(seen, old, seconds * 1e9),
            )
        )
    return found


def _columns() -> int:
    """The terminal's width; elsewhere lines are not cut, as their reader has no others."""
    return shutil.get_terminal_size((_WIDTH, 24)).columns if sys.stdout.isatty() else _UNBOUNDED


def _looks(pids: Sequence[int], interval: float) -> Iterator[Rows]:
    """A table after each interval, for ever."""
    before = _stats.seen_groups(list(pids) or _stats.processes())
    begun = time.monotonic()
    while True:
        time.sleep(interval)
        now = _stats.seen_groups(list(pids) or _stats.processes())
        ended = time.monotonic()
        yield rows(before, now, ended - begun, _columns())
        before, begun = now, ended


def _watch(pids: Sequence[int], interval: float) -> None:
    """Redraws the table until Ctrl-C."""
    try:
        from rich.live import Live
        from rich.text import Text
    except ImportError:
        raise UsageError("top: needs rich on a terminal (pip install rich), or --once") from None
    with Live(Text("looking ..."), screen=True, auto_refresh=False) as live:
        for found in _looks(pids, interval):
            shown = _console.grid(_HEADER, found, right=_RIGHT) if found else Text(_nobody(pids))
            live.update(shown, refresh=True)


def _nobody(pids: Sequence[int]) -> str:
    of_whom = "none of these processes has" if pids else "no process of this user has"
    return f"{of_whom} groups or contexts"


def run(arguments: argparse.Namespace) -> int:
    """Runs ``crossdock top``."""
    try:
        if not arguments.once and sys.stdout.isatty():
            _watch(arguments.pids, arguments.interval)
            return OK
        found = next(_looks(arguments.pids, arguments.interval))
    except CrossdockError as error:
        raise CommandError(f"top: {error}") from None
    if not found:
        raise CommandError(f"top: {_nobody(arguments.pids)}")
    _console.table(_HEADER, found, right=_RIGHT)
    return OK
