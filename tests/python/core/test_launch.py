"""Ranks that crossdock.launch starts: what they return, and how they end."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import pytest

import crossdock
import spread
from crossdock import launch


def _place(rank: int, factor: int) -> tuple[int, list[str], str]:
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR"]
    return rank * factor, [os.environ[name] for name in names], sys.stdin.read()


def test_results_come_by_rank_and_each_has_torchruns_environment():
    assert launch.run(3, _place, 10, timeout=60) == [
        (10 * rank, [str(rank), str(rank), "3", "3", "127.0.0.1"], "") for rank in range(3)
    ]


def _meet(rank: int) -> tuple[int, int, int]:
    with crossdock.Comm.from_environment(timeout=30) as comm:
        comm.barrier()
        return comm.rank, comm.num_ranks, os.getpid()


def test_the_same_processes_meet_again_and_again():
    with launch.Ranks(2) as ranks:
        first, second = ranks.run(_meet, timeout=60), ranks.run(_meet, timeout=60)
        assert ranks.alive()
    assert first == second and [place[:2] for place in first] == [(0, 2), (1, 2)]
    assert not any(_exists(process) for _, _, process in first)


def _meet_apart(rank: int, ranks: tuple[int, ...]) -> int:
    spread.declare(rank, 2)
    if rank not in ranks:
        return 0
    if len(ranks) == 1:  # which reads the secret of the job
        return crossdock.Comm(crossdock.unique_id(), rank=0, num_ranks=1).num_hosts
    with crossdock.Comm.from_environment(timeout=30) as comm:
        return comm.num_hosts


def test_the_secret_of_a_job_is_that_of_all_its_calls():
    with spread.starting():
        started = launch.Ranks(2)
    with started as ranks:
        assert ranks.run(_meet_apart, (0,), timeout=60) == [1, 0]
        assert ranks.run(_meet_apart, (0, 1), timeout=60) == [2, 2]


def _exists(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def _leave_waiting(rank: int) -> None:
    with crossdock.Comm.from_environment(timeout=30) as comm:
        if rank == 1:
            raise ValueError("of rank 1\nand more")
        comm.barrier()


def test_the_first_failure_named_is_no_echo_of_another():
    with pytest.raises(
        launch.RankFailed, match="rank 1: ValueError: of rank 1\nTraceback"
    ) as caught:
        launch.run(2, _leave_waiting, timeout=60)
    first = caught.value.failures[0]
    assert (first.rank, first.text, type(first.error)) == (1, "ValueError: of rank 1", ValueError)


def _die(rank: int, how: str) -> object:
    if rank == 0 and how == "killed":
        print("the last words")
        sys.stdout.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 0 and how == "exit":
        os._exit(3)
    if how == "sys.exit":
        sys.exit("a word for people")
    if how == "unpicklable":
        return lambda: None
    if rank == 1:
        time.sleep(60)
    return None


@pytest.mark.parametrize(
    "how, said",
    [
        ("killed", r"rank 0: ended by SIGKILL \(is memory short\?\): the last words"),
        ("exit", "rank 0: ended with code 3"),
        ("sys.exit", "^rank 0: a word for people\nrank 1: a word for people$"),
        ("unpicklable", "rank 0: what it returned cannot be sent: "),
        ("slow", "^rank 1: no answer in time$"),
    ],
)
def test_a_failed_rank_is_named_with_the_reason_and_none_is_left(how, said):
    grace = 20 if how in ("sys.exit", "unpicklable") else 0.1  # where both ranks fail
    with launch.Ranks(2, quiet=True) as ranks:
        ranks.run(_exit, 0, timeout=60)  # they have started, which may take long
        began = time.monotonic()
        with pytest.raises(launch.RankFailed, match=said):
            ranks.run(_die, how, timeout=5 if how == "slow" else 30, grace=grace)
    assert time.monotonic() - began < 30 and not ranks.alive()


def _exit(rank: int, code: object) -> int:
    if rank == 0:
        sys.exit(code)
    return rank


@pytest.mark.parametrize("code", [None, 0])
def test_a_rank_that_exits_without_an_error_has_returned_none(code):
    with launch.Ranks(2) as ranks:
        assert ranks.run(_exit, code, timeout=60) == [None, 1]
        assert ranks.alive() and ranks.run(_exit, code, timeout=60) == [None, 1]


def test_a_rank_that_exits_with_a_number_has_failed():
    with pytest.raises(launch.RankFailed, match="^rank 0: ended with code 3$"):
        launch.run(2, _exit, 3, timeout=60)


class _Mistake(Exception):
    """Pickled as its class and its one text, which the class does not take."""

    def __init__(self, file: str, line: int) -> None:
        super().__init__(f"{file}:{line}: a negative rate")


def _mistake(rank: int) -> None:
    raise _Mistake("train.yaml", 12)


def test_what_a_rank_raised_is_told_even_if_it_cannot_be_made_again():
    with pytest.raises(launch.RankFailed) as caught:
        launch.run(1, _mistake, timeout=60)
    failure = caught.value.failures[0]
    assert failure.text == "_Mistake: train.yaml:12: a negative rate" and failure.error is None
    assert "in _mistake\n" in failure.traceback
    assert failure.traceback.rstrip() in str(caught.value)


def _leave_a_child(rank: int, how: str) -> None:
    child = subprocess.Popen(["sleep", "60"])
    launch.tell(child.pid)
    if how == "dies":
        os._exit(1)
    if how == "raises":
        raise ValueError("of a rank")


def _runs(process: int) -> bool:
    try:
        stat = pathlib.Path(f"/proc/{process}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def _assert_gone(processes: list[int]) -> None:
    """None of the processes, which have been sent a signal, runs any more."""
    deadline = time.monotonic() + 20
    while any(map(_runs, processes)) and time.monotonic() < deadline:
        time.sleep(0.02)
    left = list(filter(_runs, processes))
    for process in left:
        os.kill(process, signal.SIGKILL)
    assert not left


@pytest.mark.parametrize("how", ["returns", "dies", "raises"])
def test_what_a_rank_has_started_ends_with_it(how):
    children: list[int] = []
    failing = contextlib.nullcontext() if how == "returns" else pytest.raises(launch.RankFailed)
    with failing:
        launch.run(
            2, _leave_a_child, how, timeout=60, hear=lambda rank, child: children.append(child)
        )
    assert len(children) == 2
    _assert_gone(children)


def _tell_three(rank: int) -> None:
    for number in range(3):
        launch.tell({"number": number})


def test_everything_told_is_heard_in_order():
    heard: list[tuple[int, object]] = []
    launch.run(2, _tell_three, timeout=60, hear=lambda rank, said: heard.append((rank, said)))
    for rank in range(2):
        assert [said for of, said in heard if of == rank] == [{"number": n} for n in range(3)]


PARENT = """
import os, subprocess, time
from crossdock import launch

def wait(rank):
    child = subprocess.Popen(["sleep", "60"])
    # One write, as the ranks share this pipe: print may write its words one by one.
    os.write(1, f"{os.getpid()} {child.pid}\\n".encode())
    time.sleep(60)

if __name__ == "__main__":
    launch.run(2, wait)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_ranks_of_a_program_end_with_it(tmp_path, number):
    program = tmp_path / "parent.py"
    program.write_text(PARENT)
    with subprocess.Popen(
        [sys.executable, program],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        stderr=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as parent:
        assert parent.stdout is not None
        processes = [int(word) for _ in range(2) for word in parent.stdout.readline().split()]
        parent.send_signal(number)
        parent.wait(20)
        assert len(processes) == 4
        _assert_gone(processes)


def test_free_ports_are_not_those_that_connections_are_given():
    text = pathlib.Path("/proc/sys/net/ipv4/ip_local_port_range").read_text()
    first = int(text.split()[0])
    ports = {launch.free_port() for _ in range(50)}
    assert len(ports) > 25, ports  # picked at random
    for port in ports:
        with socket.socket() as listener:
            listener.bind(("", port))
        assert 10000 <= port < first or first < 12000, (port, text)
