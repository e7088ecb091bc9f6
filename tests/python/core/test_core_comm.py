"""Communicators and symmetric memory: lifetimes, waiting without the GIL, ways to meet."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import crossdock
import support
from core_support import config_of
from crossdock import _core, launch
from support import Rank, on_ranks


def alone(**options: object) -> crossdock.Comm:
    return crossdock.Comm(crossdock.unique_id(), rank=0, num_ranks=1, **options)


def waiting_rank(me: Rank) -> int:
    """Rank 0 waits for rank 1 for half a second, while a thread of rank 0's counts."""
    comm = me.comm()
    counted = 0
    if me.rank == 0:
        done = threading.Event()

        def count() -> None:
            nonlocal counted
            while not done.is_set():
                counted += 1
                time.sleep(0.01)

        thread = threading.Thread(target=count)
        thread.start()
        comm.barrier()
        done.set()
        thread.join()
    else:
        time.sleep(0.5)
        comm.barrier()
    comm.close()
    return counted


def test_waiting_releases_the_gil() -> None:
    counted, _ = support.run_ranks(2, waiting_rank)
    assert counted > 10, f"the other thread ran {counted} times in half a second"


def test_rank_threads_join_although_each_waits_for_the_other() -> None:
    def body(me: Rank) -> tuple[int, int, int]:
        with me.comm() as comm:
            comm.barrier()
            return comm.rank, comm.num_ranks, comm.local_ranks

    assert support.run_threads(3, body) == [(0, 3, 3), (1, 3, 3), (2, 3, 3)]


def from_environment(me: Rank) -> None:
    with crossdock.Comm.from_environment(heap_bytes=1 << 16) as comm:
        assert (comm.rank, comm.num_ranks, comm.device) == (me.rank, me.num_ranks, "cpu")
        comm.barrier()


def test_ranks_meet_through_the_environment() -> None:
    support.run_ranks(2, from_environment)


def test_all_gather_gives_every_rank_the_bytes_of_all_or_a_mismatch() -> None:
    def body(me: Rank) -> None:
        with me.comm() as comm:
            row = f"rank {me.rank} \0".encode()
            assert comm.all_gather(row) == [f"rank {r} \0".encode() for r in range(3)]
            assert comm.all_gather(b"") == [b"", b"", b""]
            with pytest.raises(crossdock.Mismatch, match="bytes = .* expected equal values"):
                comm.all_gather(bytes(2 if me.rank == 1 else 3))
            with pytest.raises(TypeError):
                comm.all_gather(3)  # type: ignore[arg-type]
            assert comm.all_gather(bytes([me.rank])) == [b"\0", b"\1", b"\2"]

    support.run_threads(3, body)


class Board:
    """An all-gather between threads."""

    def __init__(self, num_ranks: int) -> None:
        self._slots = [b""] * num_ranks
        self._barrier = threading.Barrier(num_ranks, timeout=20)

    def all_gather(self, rank: int, sent: bytes) -> list[bytes]:
        self._slots[rank] = sent
        self._barrier.wait()
        gathered = list(self._slots)
        self._barrier.wait()
        return gathered


def test_ranks_meet_through_an_all_gather() -> None:
    board = Board(2)

    def body(me: Rank) -> None:
        with crossdock.Comm.from_all_gather(
            lambda sent: board.all_gather(me.rank, sent), rank=me.rank, num_ranks=2
        ) as comm:
            comm.barrier()

    support.run_threads(2, body)


def test_what_an_all_gather_raises_is_raised() -> None:
    def broken(sent: bytes) -> list[bytes]:
        raise KeyError("no such peer")

    with pytest.raises(KeyError, match="no such peer"):
        crossdock.Comm.from_all_gather(broken, rank=0, num_ranks=2)
    with pytest.raises(TypeError, match="all_gather: expected a result with one item per rank"):
        crossdock.Comm.from_all_gather(lambda sent: [sent], rank=0, num_ranks=2)
    with pytest.raises(TypeError, match="all_gather: expected items that are bytes"):
        crossdock.Comm.from_all_gather(lambda sent: [sent, b""], rank=0, num_ranks=2)


def test_a_communicator_of_nccl_is_an_address() -> None:
    for wrong in (0, -1, None, "1"):
        with pytest.raises(ValueError, match="nccl_comm: expected the address of an ncclComm_t"):
            crossdock.Comm.from_nccl(wrong)


@pytest.mark.parametrize(
    "join",
    [
        crossdock.Comm.from_environment,
        lambda **options: crossdock.Comm.from_nccl(1, **options),
        lambda **options: crossdock.Comm.from_all_gather(list, rank=0, num_ranks=1, **options),
    ],
    ids=["environment", "nccl", "all_gather"],
)
def test_no_way_to_join_takes_an_argument_that_it_has_not(join: Callable[..., Any]) -> None:
    for wrong in ("devise", "unique_id", "bootstrap"):
        with pytest.raises(TypeError, match=f"{wrong}: expected no argument but device, heap_byt"):
            join(**{wrong: "cpu"})


def test_no_error_shows_the_secret_of_a_meeting() -> None:
    given = crossdock.unique_id()
    for wrong in (given[:-1], bytearray(given + b"1"), list(given), memoryview(given)):
        with pytest.raises(TypeError, match="unique_id: expected 128 bytes from .*, got") as raised:
            crossdock.Comm(wrong, rank=0, num_ranks=1)
        text = str(raised.value)
        assert type(wrong).__name__ in text and len(text) < 100, text
    with crossdock.Comm(bytearray(given), rank=0, num_ranks=1):
        pass

    def wrong_gather(sent: bytes) -> list[bytes]:
        return [sent, sent[:-1]]

    with pytest.raises(TypeError, match="all_gather: expected items .*, got bytes of length"):
        crossdock.Comm.from_all_gather(wrong_gather, rank=0, num_ranks=2)


def test_unique_ids_are_bytes_and_differ() -> None:
    first, second = crossdock.unique_id(), crossdock.unique_id(timeout=5)
    assert type(first) is bytes and len(first) == 128 and first != second


def test_arrays_in_symmetric_memory() -> None:
    with alone(heap_bytes=1 << 16) as comm:
        array = comm.empty((3, 5), "bfloat16")
        assert array.shape == (3, 5) and array.dtype.name == "bfloat16"
        assert array.flags.c_contiguous and array.flags.writeable
        assert array.ctypes.data % 256 == 0
        assert comm.core().mem_export(array.ctypes.data) == (0, 0, 0)
        assert comm.empty(0).shape == (0,)
        with pytest.raises(crossdock.OutOfMemory, match="largest free"):
            comm.empty(1 << 20)
        comm.grow(1 << 22)
        comm.empty(1 << 20)[:] = 1
        for shape in (1 << 61, (1 << 40, 1 << 30), (1 << 62,), (1 << 63,)):
            with pytest.raises(crossdock.OutOfMemory, match="asked"):
                comm.empty(shape)
        for shape, kind, text in (
            ((-1,), ValueError, r"shape: expected numbers of at least 0, got \(-1,\)"),
            (-1, ValueError, "shape: expected numbers of at least 0, got -1"),
            ((1.5,), TypeError, r"shape: expected a whole number or a tuple .*, got \(1.5,\)"),
            ("3", TypeError, "shape: expected a whole number or a tuple of them, got '3'"),
        ):
            with pytest.raises(kind, match=text):
                comm.empty(shape)
        assert comm.memory().segments == 2


def test_memory_is_given_back_with_the_last_view() -> None:
    with alone(heap_bytes=1 << 16) as comm:
        array = comm.empty(100)
        view = array[10:].reshape(9, 10)[::2]
        del array
        assert comm.memory().used_bytes > 0
        del view
        assert comm.memory().used_bytes == 0


def test_arrays_outlive_their_communicator() -> None:
    comm = alone(heap_bytes=1 << 16)
    array = comm.empty(100)
    view = array[50:]
    array[:] = 7
    core = weakref.ref(comm.core())
    comm.close()
    del array, comm
    gc.collect()
    assert (view == 7).all() and not core().closed
    del view
    assert core() is None


def test_communicator_leaves_with_its_last_reference() -> None:
    comm = alone()
    core = weakref.ref(comm.core())
    del comm
    assert core() is None


def test_group_keeps_its_communicator_alive() -> None:
    comm = alone()
    core = weakref.ref(comm.core())
    group = crossdock.EpGroup(comm, config_of())
    del comm
    plan = group.prepare(np.array([[1]]))
    assert group.dispatch(plan, np.ones((1, 8), np.float32)).tokens.tolist() == [[1.0] * 8]
    del group
    assert core() is None


def test_closing_twice_and_using_after_close() -> None:
    comm = alone(heap_bytes=1 << 16)
    group = crossdock.EpGroup(comm, config_of())
    comm.close()
    comm.close()
    assert comm.closed
    for call in (
        comm.barrier,
        comm.memory,
        lambda: comm.empty(1),
        lambda: group.prepare(np.array([[1]])),
    ):
        with pytest.raises(crossdock.InvalidArgument, match="closed"):
            call()
    group.close()
    group.close()


@on_ranks(2)
def test_close_refuses_while_another_thread_waits(me: Rank) -> None:
    comm = me.comm()
    if me.rank == 0:
        caught: list[BaseException] = []

        def wait() -> None:
            try:
                comm.barrier()
            except crossdock.Aborted as error:
                caught.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        time.sleep(0.2)
        with pytest.raises(crossdock.InvalidArgument, match="running in another thread"):
            comm.close()
        comm.abort()
        thread.join()
        assert len(caught) == 1
    else:
        time.sleep(1)
        with pytest.raises(crossdock.Aborted):
            comm.barrier()
    comm.close()


def test_exit_says_goodbye_for_communicators_that_are_still_referenced() -> None:
    """A cycle through a module keeps the communicator alive past the interpreter's last line."""
    program = """
import crossdock, sys
comm = crossdock.Comm(bytes.fromhex(sys.argv[1]), rank=1, num_ranks=2)
array = None
sys.modules["kept"] = keep = type(sys)("kept")
keep.comm, keep.self = comm, keep
"""
    unique_id = crossdock.unique_id()
    peer = subprocess.Popen([sys.executable, "-c", program, unique_id.hex()])
    with crossdock.Comm(unique_id, rank=0, num_ranks=2, timeout=30) as comm:
        assert peer.wait() == 0
        with pytest.raises(crossdock.PeerLost, match="left"):
            comm.barrier()


def test_dlpack_capsule_keeps_its_owner_until_the_consumer_lets_go() -> None:
    class Owner:
        pass

    class Exporter:
        """Hands one capsule to numpy.from_dlpack."""

        def __init__(self, owner: Owner) -> None:
            self._owner = owner

        def __dlpack__(self, **_: object) -> object:
            return _core.as_dlpack(ctypes.addressof(memory), (2, 3), 2 << 8 | 32, 1, 0, self._owner)

        def __dlpack_device__(self) -> tuple[int, int]:
            return 1, 0

    memory = (ctypes.c_float * 6)(*range(6))
    owner = Owner()
    alive = weakref.ref(owner)
    array = np.from_dlpack(Exporter(owner))
    unused = _core.as_dlpack(ctypes.addressof(memory), (6,), 2 << 8 | 32, 1, 0, owner)
    del owner
    assert array.tolist() == [[0, 1, 2], [3, 4, 5]]
    del array
    assert alive() is not None
    del unused
    assert alive() is None


def test_dlpack_capsule_says_when_the_consumer_has_let_go(monkeypatch) -> None:
    memory = (ctypes.c_float * 6)()
    released: list[object] = []

    def capsule(released: Callable[[object], object]) -> object:
        place = ctypes.addressof(memory), (6,), 2 << 8 | 32, 1, 0
        return _core.as_dlpack(*place, "owner", released)

    kept = capsule(released.append)
    assert not released
    del kept
    assert released == ["owner"]

    def failing(_: object) -> None:
        raise ValueError("not released")

    unraisable: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda seen: unraisable.append(str(seen.exc_value)))
    with pytest.raises(KeyError, match="another"):  # an error under way goes on
        kept = [capsule(failing)]
        try:
            raise KeyError("another")
        finally:
            kept.clear()
    assert unraisable == ["not released"]


def test_features_say_what_is_missing() -> None:
    assert crossdock.feature_available("cpu") and crossdock.feature_reason("cpu") == "available"
    if not crossdock.feature_available("cuda"):
        assert len(crossdock.feature_reason("cuda")) > 10
    assert crossdock.__version__ == _core.version


@pytest.mark.parametrize(
    ("text", "expected"),
    [("1234", 1234), (None, 600_000), ("x", 600_000), ("0", 600_000), ("-5", 600_000)],
)
def test_default_timeout_is_the_environments(text: str | None, expected: int) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    environment.pop("XD_TIMEOUT_MS")
    environment |= {} if text is None else {"XD_TIMEOUT_MS": text}
    code = "from crossdock import _core; print(_core.default_timeout_ms())"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, text=True, check=True, stdout=subprocess.PIPE
    )
    assert int(done.stdout) == expected


def outlive(me: Rank) -> None:
    comm = me.comm(on_peer_loss="mask", timeout=30, heap_bytes=1 << 16)
    assert comm.lost == ()
    # Behind it all have their communicator. Rank 0 may die before a rank has heard of all others.
    with contextlib.suppress(crossdock.PeerLost):
        comm.barrier()
    if me.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    while 0 not in comm.lost:
        time.sleep(0.001)
    for call in (comm.barrier, lambda: comm.grow(1)):
        with pytest.raises(crossdock.PeerLost, match="rank 0 has been lost") as lost:
            call()
        assert not lost.value.fatal
    assert comm.error() is None
    assert comm.view.members == (0, 1, 2)
    view = comm.agree(step=10 + me.rank, ok=me.rank == 1, timeout=30)
    assert view == crossdock.View(1, (1, 2), (), (0,), False, 11, 12)
    assert comm.view == view
    with pytest.raises(ValueError, match="leave_out has rank 3, expected ranks 0 to 2"):
        comm.agree(leave_out=[3])
    view = comm.agree(leave_out=[2] if me.rank == 1 else [], leave=me.rank == 2)
    assert view.members == (1,)
    assert view.gone == (2,)
    comm.empty(1)


def test_a_rank_that_dies_is_remembered_where_losses_are_masked() -> None:
    with pytest.raises(launch.RankFailed) as caught:
        support.run_ranks(3, outlive, fresh=True)
    assert [failure.rank for failure in caught.value.failures] == [0], caught.value


def hosts_of(me: Rank, hosts: list[str | None]) -> tuple[int, int]:
    with me.comm(host=hosts[me.rank]) as comm:
        assert comm.near_ranks == me.num_ranks  # they may name any hosts
        return comm.num_hosts, comm.host


def test_ranks_name_the_hosts_that_they_count_to() -> None:
    assert support.run_threads(3, lambda me: hosts_of(me, [None] * 3)) == [(1, 0)] * 3
    named = support.run_threads(4, lambda me: hosts_of(me, ["west", "east", "west", "east"]))
    assert named == [(2, 0), (2, 1), (2, 0), (2, 1)]


def test_settings_of_the_network_matter_between_machines_only() -> None:
    for value in (0, -1, 1000, 2**31 - 1):
        with alone(net_interface="none", silence_ms=value) as comm:
            comm.barrier()
