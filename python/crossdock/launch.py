"""Starts ranks on this host: processes that run a function, and that never outlive their parent.

    def train(rank: int, steps: int) -> float:
        with crossdock.Comm.from_environment() as comm:
            ...

    if __name__ == "__main__":
        losses = crossdock.launch.run(4, train, 100)  # one of each rank

A rank is a fresh interpreter, never a fork: neither CUDA nor threads survive one. Its environment
says what torchrun's would (RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and
MASTER_PORT) and has a secret of the job, so `Comm.from_environment`, ``crossdock.torch.init`` and
``torch.distributed.init_process_group`` need no arguments. It has no standard input, and the
terminal's Ctrl-C reaches the parent only, which ends its ranks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing.connection
import multiprocessing.process
import multiprocessing.spawn
import os
import pathlib
import pickle
import random
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

__all__ = ["Failure", "RankFailed", "Ranks", "free_port", "run", "tell"]

# Errors that only repeat what another rank did.
_ECHOES = ("Mismatch", "PeerLost", "Timeout", "Aborted")
_LEAVE_SECONDS = 10  # for a rank to end by itself when nothing is left to do
_PARENT = pathlib.Path(__file__).absolute().parents[1]  # where a rank finds this package
_PROGRAM = """
import sys
sys.path.insert(0, sys.argv[2])
from crossdock import launch
launch._serve()
"""


def free_port() -> int:
    """A TCP port of this host on which no program listens now. Another program may take it first.

    It lies below the ports that the system gives to connections (where it leaves some), because one
    of those would be taken by the next connection of any program.
    """
    for port in (*random.SystemRandom().sample(_ports_of_no_connection(), 64), 0):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return probe.getsockname()[1]
    raise OSError("this host has no free TCP port")


def _ports_of_no_connection() -> range:
    """Ports without privileges that the system gives to no connection, or those that it gives."""
    try:
        text = pathlib.Path("/proc/sys/net/ipv4/ip_local_port_range").read_text()
        first, last = (int(word) for word in text.split())
    except (OSError, ValueError):
        first, last = 32768, 60999  # Linux's own choice
    return range(10000, first) if first >= 12000 else range(first, last + 1)


@dataclasses.dataclass(frozen=True)
class Failure:
    """How one rank failed.

    Attributes:
        rank: which.
        text: in one line.
        error: what it raised; None if it ended, did not answer, or raised what cannot be pickled or
            not be made again here.
        answered: whether it has ended or raised; else the time was over.
        traceback: of `error`, with a line break at its end, or empty.
    """

    rank: int
    text: str
    error: BaseException | None = None
    answered: bool = True
    traceback: str = ""

    @property
    def is_echo(self) -> bool:
        """Whether it may only repeat what another rank did."""
        return type(self.error).__name__ in _ECHOES


class RankFailed(RuntimeError):
    """Some rank failed. The text has every rank's failure with its traceback.

    Attributes:
        failures: of the ranks that failed, those first that do not repeat another one's.
    """

    def __init__(self, failures: list[Failure]) -> None:
        self.failures = sorted(failures, key=lambda failure: failure.is_echo)
        super().__init__(
            "\n".join(
                f"rank {failure.rank}: {failure.text}\n{failure.traceback}".rstrip()
                for failure in self.failures
            )
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.failures,)


def run(
    num_ranks: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout: float | None = None,
    hear: Callable[[int, Any], None] = lambda rank, message: None,
    quiet: bool = False,
) -> list[Any]:
    """Runs ``fn(rank, *args)`` on `num_ranks` new processes and returns what it returned on each.

    Args:
        num_ranks: how many.
        fn: a function that a rank can import: of a module, or of a program that starts its work
            under ``if __name__ == "__main__"``. It, `args` and what it returns are pickled. A rank
            that calls ``sys.exit(0)`` in it has returned None.
        args: for it.
        timeout: seconds that all of it may take; None = any time.
        hear: called with (rank, message) for everything that a rank tells by `tell`.
        quiet: what ranks print is kept from the terminal; the last line says why one has died.

    Raises:
        RankFailed: a rank raised, died, or was not done in time. No rank is left, and no process
            that one has started, but for those that have left its process group.
        OSError: no more processes can be started.
    """
    with Ranks(num_ranks, quiet=quiet) as ranks:
        return ranks.run(fn, *args, timeout=timeout, hear=hear)


class Ranks:
    """Processes that run one function after another; see `run`. A context manager.

    After a failure they are not fit for another call.
    """

    def __init__(self, num_ranks: int, *, quiet: bool = False) -> None:
        self._ranks: list[_Rank] = []
        self._failed = False
        # The library of a rank reads it once, in whichever call needs it first.
        self._secret = secrets.token_hex(16)
        try:
            for rank in range(num_ranks):
                self._ranks.append(_Rank(rank, num_ranks, quiet))
        except BaseException:
            self.kill()
            raise

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def alive(self) -> bool:
        """Whether all of them run and can be called."""
        return not self._failed and not any(rank.has_ended() for rank in self._ranks)

    def run(
        self,
        fn: Callable[..., Any],
        *args: Any,
        timeout: float | None = None,
        grace: float = 2,
        hear: Callable[[int, Any], None] = lambda rank, message: None,
    ) -> list[Any]:
        """Runs ``fn(rank, *args)`` on all of them; as the function `run`.

        Args:
            fn, args, timeout, hear: as there.
            grace: seconds that the others get after the first failure, to say what they know.
        """
        self._failed = True  # until all of them have returned
        deadline = time.monotonic() + timeout if timeout is not None else float("inf")
        meeting = {"MASTER_PORT": str(free_port()), "XD_JOB_SECRET": self._secret}
        waiting = {}
        for rank in self._ranks:
            rank.begin(fn, args, meeting)
            waiting[rank.pipe] = rank
        while waiting:
            left = max(0.0, deadline - time.monotonic())
            ready = multiprocessing.connection.wait(
                list(waiting), None if left == float("inf") else left
            )
            if not ready:
                break
            for pipe in ready:
                rank = waiting[pipe]  # type: ignore[index]
                rank.hear(hear)
                if rank.answered:
                    del waiting[rank.pipe]
                if rank.failure:
                    deadline = min(deadline, time.monotonic() + grace)
        failures = [
            rank.failure or Failure(rank.rank, "no answer in time", answered=False)
            for rank in self._ranks
            if rank.failure or not rank.answered
        ]
        if failures:
            raise RankFailed(failures)
        self._failed = False
        return [rank.result for rank in self._ranks]

    def close(self) -> None:
        """Lets them end by themselves for up to 10 seconds; after a failure ends them at once.

        Processes that they have started, and that are left, end then.
        """
        for rank in self._ranks:
            rank.pipe.close()  # the end of its work
        deadline = time.monotonic() + (0 if self._failed else _LEAVE_SECONDS)
        for rank in self._ranks:
            while not rank.has_ended() and time.monotonic() < deadline:
                time.sleep(0.005)
        self.kill()

    def kill(self) -> None:
        """Ends them, whatever they are doing, with all processes that they have started.

        Processes that have left a rank's process group are not found.
        """
        for rank in self._ranks:
            rank.kill()


class _Rank:
    """One process and what has been heard of it."""

    def __init__(self, rank: int, num_ranks: int, quiet: bool) -> None:
        self.rank = rank
        self.answered = False
        self.result: Any = None
        self.failure: Failure | None = None
        place = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": num_ranks,
            "LOCAL_WORLD_SIZE": num_ranks,
        }
        environment = os.environ | {name: str(number) for name, number in place.items()}
        environment["MASTER_ADDR"] = "127.0.0.1"
        # As torchrun: ranks that each take all cores only get into one another's way.
        environment.setdefault("OMP_NUM_THREADS", "1")
        self._output = tempfile.TemporaryFile() if quiet else None
        self.pipe, theirs = multiprocessing.Pipe()
        with theirs:
            # The rank ends when its standard input does: with this process, however that ends.
            self.process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, str(theirs.fileno()), str(_PARENT)],
                stdin=subprocess.PIPE,
                stdout=self._output,
                stderr=self._output,
                pass_fds=(theirs.fileno(),),
                env=environment,
                start_new_session=True,
            )
        with contextlib.suppress(BrokenPipeError):  # it has ended: that is told by run()
            self.pipe.send(_preparation())

    def begin(self, fn: Callable[..., Any], args: tuple[Any, ...], meeting: dict[str, str]) -> None:
        """Hands the rank a task."""
        self.answered, self.result, self.failure = False, None, None
        with contextlib.suppress(BrokenPipeError):
            self.pipe.send(meeting)
            self.pipe.send((fn, args))

    def hear(self, hear: Callable[[int, Any], None]) -> None:
        """Takes in one message, or that there will be none."""
        try:
            kind, *content = self.pipe.recv()
        except (EOFError, ConnectionResetError):
            self.answered = True
            self.failure = Failure(self.rank, self._last_words())
            return
        except Exception as error:  # its result cannot be made here
            kind, content = "raised", [error, str(error), traceback.format_exc()]
        if kind == "told":
            hear(self.rank, content[0])
            return
        self.answered = True
        if kind == "returned":
            self.result = content[0]
        else:
            raised, text, told = content
            if isinstance(raised, bytes):
                raised = _unpickled(raised)
            self.failure = Failure(self.rank, text, raised, traceback=told)

    def _last_words(self) -> str:
        """Why a process that gave no answer ended."""
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)
        code = self._end_group()
        said = ""
        if self._output:
            self._output.seek(0)
            lines = self._output.read().decode(errors="replace").strip().splitlines()
            said = f": {lines[-1]}" if lines else ""
        if code < 0:
            hint = " (is memory short?)" if -code == signal.SIGKILL else ""
            return f"ended by {signal.Signals(-code).name}{hint}{said}"
        return f"ended with code {code}{said}"

    def has_ended(self) -> bool:
        """Whether the process runs no more."""
        if self.process.returncode is not None:
            return True
        try:
            state = os.WEXITED | os.WNOHANG | os.WNOWAIT
            return os.waitid(os.P_PID, self.process.pid, state) is not None
        except ChildProcessError:  # another part of this program has waited for it
            return self.process.poll() is not None

    def _end_group(self) -> int:
        """Ends the process, and those that it has started, and returns its code."""
        # Nothing has waited for the process, so its number, which is that of its session and group,
        # is nobody else's, even if it has ended by itself.
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
        return self.process.wait()

    def kill(self) -> None:
        """Ends the process and those that it has started."""
        self._end_group()
        assert self.process.stdin is not None  # a pipe, as was asked for
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.pipe.close()
        if self._output:
            self._output.close()


def _unpickled(raised: bytes) -> BaseException | None:
    """The exception of a rank, if it can be made here: many a class takes other arguments."""
    try:
        return pickle.loads(raised)
    except Exception:
        return None


def _preparation() -> dict[str, Any]:
    """Settings by which another interpreter finds this one's modules, as for multiprocessing."""
    data = multiprocessing.spawn.get_preparation_data("rank")
    data["authkey"] = bytes(data["authkey"])
    return data


# In a rank: the pipe to its parent, and the lock by which any thread may call tell().
_parent: multiprocessing.connection.Connection | None = None
_telling = threading.Lock()


def tell(message: Any) -> None:
    """Tells the parent something, from a rank while it runs a function; see `run`.

    Anywhere else nobody hears it.
    """
    if _parent:
        with _telling:
            _parent.send(("told", message))


def _serve() -> None:
    """A rank's life."""
    global _parent
    lifeline = os.dup(0)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    threading.Thread(target=_end_with_parent, args=(lifeline,), daemon=True).start()
    os.set_inheritable(int(sys.argv[1]), False)
    _parent = multiprocessing.connection.Connection(int(sys.argv[1]))
    try:
        multiprocessing.spawn.prepare(_parent.recv())
        while True:
            os.environ.update(_parent.recv())
            _answer(_outcome(_parent.recv_bytes()))
    except EOFError:  # nothing left to do
        return


def _outcome(task: bytes) -> tuple[Any, ...]:
    try:
        fn, args = pickle.loads(task)
        return "returned", fn(int(os.environ["RANK"]), *args)
    except SystemExit as error:
        if error.code is None or (isinstance(error.code, int) and error.code == 0):
            return "returned", None
        # Words there are for people.
        text = f"ended with code {error.code}" if isinstance(error.code, int) else str(error)
        return "raised", _pickled(error.with_traceback(None)), text, ""
    except BaseException as error:  # exceptions of test frameworks, too
        first_line = str(error).partition("\n")[0]
        text, told = f"{type(error).__name__}: {first_line}", traceback.format_exc()
        return "raised", _pickled(error.with_traceback(None)), text, told


def _answer(outcome: tuple[Any, ...]) -> None:
    assert _parent  # only a rank answers
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    with _telling:
        try:
            _parent.send(outcome)
        except Exception as error:  # its result cannot be pickled
            text = f"what it returned cannot be sent: {error}"
            _parent.send(("raised", None, text, traceback.format_exc()))


def _pickled(error: BaseException) -> bytes | None:
    """An exception as bytes of their own, so that its words arrive where it cannot be made."""
    try:
        return pickle.dumps(error)
    except Exception:
        return None


def _end_with_parent(lifeline: int) -> None:
    while os.read(lifeline, 1):
        pass
    os.killpg(os.getpid(), signal.SIGKILL)  # with the processes that this rank has started
