"""`crossdock top`: what it shows of ranks that work, and of ranks that wait."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

import crossdock
from commands import process, run
from crossdock import _stats
from crossdock.cli import _top
from support import Rank, run_threads


def _seen(**changes) -> _stats.SeenGroup:
    calls = {"prepare": 10, "dispatch": 10}
    nothing = ("failed_calls", "bad_ids", "dropped_rows", "net_puts", "net_bytes", "staged_tensors")
    stats = crossdock.GroupStats(
        calls=calls,
        call_ns=dict.fromkeys(calls, 1),
        tokens=100,
        token_bytes=1_000_000,
        rows=None,
        row_bytes=None,
        wait_ns=(0, 0, 0, 0),
        **dict.fromkeys(nothing, 0),
    )
    seen = _stats.SeenGroup(
        pid=7,
        place=0,
        rank=1,
        num_ranks=4,
        is_context=False,
        number=2,
        device="cpu",
        comm="ep",
        name="",
        detail="EXPERT_MAJOR, E=8",
        operation=None,
        operation_ns=0,
        waits_for=None,
        stats=stats,
    )
    return dataclasses.replace(seen, **changes)


def test_rows_tell_rates_between_two_looks():
    before = _seen()
    stats = dataclasses.replace(
        before.stats,
        calls={"prepare": 20, "dispatch": 20},
        tokens=4100,
        token_bytes=9_000_000,
        wait_ns=(500_000_000, 0, 0, 1_000_000_000),
    )
    now = _seen(stats=stats, operation="dispatch", operation_ns=3_200_000_000, waits_for=3)
    assert _top.rows([before], [now], 2.0, 80) == [
        ("1/4", "7", "ep#2 experts", "dispatch 3.2s>3", "10", "2.0k", "4.0M", "50%>3")
    ]
    wide = _top.rows([before], [now], 2.0, 100)[0]
    assert wide[2] == "ep#2 EXPERT_MAJOR"
    assert _top.rows([], [now], 2.0, 80) == []  # it came meanwhile


def test_groups_whose_tensors_are_staged_stand_out():
    before = _seen(device="cuda")
    now = _seen(device="cuda", stats=dataclasses.replace(before.stats, staged_tensors=2))
    assert [_top.rows([before], [one], 1.0, 80)[0][3] for one in (before, now)] == ["-", "staged"]


def _received(*rows: int | None, comm: str = "ep", first_pid: int = 10) -> list[_stats.SeenGroup]:
    """The ranks of a group, which have received so many rows."""
    return [
        _seen(
            pid=first_pid + rank,
            rank=rank,
            num_ranks=len(rows),
            comm=comm,
            stats=dataclasses.replace(_seen().stats, rows=count),
        )
        for rank, count in enumerate(rows)
    ]


def test_the_rank_of_a_group_with_the_most_rows_stands_out():
    before, now = _received(5, 5, 5, 5), _received(15, 105, 35, 25)

    def shown(before: list[_stats.SeenGroup], now: list[_stats.SeenGroup]) -> list[str]:
        return [row[3] for row in _top.rows(before, now, 1.0, 80)]

    assert shown(before, now) == ["-", "2.5x rows", "-", "-"]  # 100 of 10, 100, 30 and 20
    other, later = (_received(*n, comm="other", first_pid=20) for n in ((0, 0), (30, 10)))
    assert shown(before + other, now + later) == ["-", "2.5x rows", "-", "-", "1.5x rows", "-"]
    twin, grown = (_received(*n, first_pid=20) for n in ((0, 0, 0, 0), (1, 9, 1, 1)))
    for few, more in (
        (before[:3], now[:3]),  # a rank elsewhere
        (before + twin, now + grown),  # another job like this one
        (before, before),
        (_received(0, 0), _received(100, 110)),  # even
        (_received(None, None), _received(None, None)),  # not counted
    ):
        assert set(shown(few, more)) == {"-"}
    waits = [dataclasses.replace(one, operation="combine", operation_ns=10**9) for one in now]
    assert shown(before, waits) == ["combine 1.0s"] * 4


def test_a_name_is_shown_and_waits_that_are_not_measured_are_not():
    gpu = _seen(name="layer 3 of a model with many", device="cuda")
    gpu = dataclasses.replace(gpu, stats=dataclasses.replace(gpu.stats, wait_ns=None))
    row = _top.rows([gpu], [gpu], 1.0, 80)[0]
    assert row[2] == "layer 3 of …" and row[-1] == "?"


def test_a_process_that_is_stopped_is_shown_as_stopped():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        os.kill(child.pid, signal.SIGSTOP)
        _, status = os.waitpid(child.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        seen = _seen(pid=child.pid, operation="dispatch", operation_ns=10**10, waits_for=0)
        assert _top.rows([seen], [seen], 1.0, 80)[0][3] == "stopped"
    finally:
        child.kill()
        child.communicate()


@pytest.mark.parametrize("comm", ["", "data=1,pipe=0"])
def test_kinds_of_groups_differ_however_little_room_there_is(comm):
    kinds = ("EXPERT_MAJOR, E=8", "RANK_MAJOR, E=8", "low latency, E=8", "products, T<=8")
    for columns in (40, 80, 90):
        seen = [_seen(comm=comm, detail=detail) for detail in kinds]
        names = {_top.rows([one], [one], 1.0, columns)[0][2] for one in seen}
        assert len(names) == len(kinds)
        assert all(len(name) <= max(12, columns - 68) for name in names)


def test_without_processes_it_says_so():
    ended = run("top", "--once", "--interval", "0.01", str(os.getppid()))
    assert ended.returncode == 1
    assert ended.stderr == "crossdock: top: none of these processes has groups or contexts\n"


def test_bad_intervals_are_refused():
    for interval in ("0", "nan", "often"):
        ended = run("top", "--once", "--interval", interval)
        assert ended.returncode == 2 and "expected seconds" in ended.stderr


def _shown_elsewhere(me: Rank) -> str:
    """The line, in a file, of a group without a name."""
    config = crossdock.LowLatencyConfig(num_experts=1, max_topk=1, max_tokens_per_rank=1, hidden=8)
    with me.comm() as comm, crossdock.LowLatencyGroup(comm, config):
        ended = process("top", "--once", "--interval", "0.1", str(os.getpid()))
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_nothing_is_cut_where_there_is_no_terminal():
    assert "#0 low latency " in run_threads(1, _shown_elsewhere)[0]


def _late(me: Rank) -> str:
    config = crossdock.EpConfig(
        num_experts=2, max_topk=1, max_tokens_per_rank=1, hidden=4, dtype="float32"
    )
    shown = ""
    with me.comm() as comm, crossdock.EpGroup(comm, config) as group:
        group.set_name(f"of rank {me.rank}")
        if me.rank == 0:
            deadline = time.monotonic() + 10
            while not any(one.waits_for == 0 for one in _stats.seen_groups([os.getpid()])):
                assert time.monotonic() < deadline
                time.sleep(0.005)
            ended = process("top", "--once", "--interval", "0.1", str(os.getpid()))
            assert ended.returncode == 0, ended.stderr
            shown = ended.stdout
        group.prepare(np.zeros((1, 1), np.int64))
    return shown


def test_it_shows_of_another_process_who_waits_for_whom():
    header, *lines = run_threads(2, _late)[0].splitlines()
    assert len(lines) == 2
    assert header.split() == ["rank", "pid", "group", "now", *_top._HEADER[4:]]
    waiting = next(line for line in lines if "of rank 1" in line)
    assert waiting.startswith("1/2 ") and "prepare" in waiting and ">0" in waiting
    assert all(len(line) <= 80 for line in lines)
