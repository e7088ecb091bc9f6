"""Rank processes of this host: start them, hear what they say, leave none behind.

The parent is no rank. A rank is a fresh interpreter (never a fork: neither CUDA nor threads survive
one) that gets its task on standard input and answers with lines of JSON on a pipe of its own, so
that whatever a library prints cannot be taken for an answer. It lives in a session of its own, out
of reach of the terminal's Ctrl-C, and ends itself when its standard input does: with the parent.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from crossdock.cli import _host
from crossdock.cli._errors import CommandError

# Errors that only repeat what another rank did; the rank that did it says more, if it can, within
# so many seconds.
_GRACE = 2.0
_ECHOES = ("Mismatch", "PeerLost", "Timeout", "Aborted")

Message = dict[str, Any]
Hear = Callable[[int, Message], None]


def _free_port() -> int:
    """A port that nobody listens on now. The ranks try those behind it, should it be taken."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _meeting(num_ranks: int) -> dict[str, str]:
    """What the environment of all ranks says about where they meet."""
    return {
        "WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "XD_JOB_SECRET": secrets.token_hex(16),
        # As torchrun: ranks that each take all cores only get into one another's way.
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }


class _Rank:
    """One rank process and what has been heard of it."""

    def __init__(self, rank: int, meeting: dict[str, str], task: Message) -> None:
        self.rank = rank
        self.finished = False  # it has said its last word
        self._partial = b""
        self._output = tempfile.TemporaryFile()
        self.answers, write_end = os.pipe()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "crossdock.cli._rank", str(write_end)],
                stdin=subprocess.PIPE,
                stdout=self._output,
                stderr=self._output,
                pass_fds=(write_end,),
                # First on the rank's path, so that it imports the crossdock that runs here.
                cwd=_host.installed_at().parent,
                env=os.environ | meeting | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                start_new_session=True,
            )
        finally:
            os.close(write_end)
        assert self._process.stdin is not None  # a pipe, as was asked for
        self._stdin = self._process.stdin
        with contextlib.suppress(BrokenPipeError):  # it has ended: its last words say why
            self._stdin.write(json.dumps(task).encode() + b"\n")
            self._stdin.flush()

    def read(self) -> tuple[list[Message], bool]:
        """(new messages, whether more may come); waits for some."""
        piece = os.read(self.answers, 1 << 16)
        *lines, self._partial = (self._partial + piece).split(b"\n")
        return [json.loads(line) for line in lines], bool(piece)

    def last_words(self) -> str:
        """Why a process that gave no answer ended."""
        code = self._process.wait()
        self._output.seek(0)
        lines = self._output.read().decode(errors="replace").strip().splitlines()
        said = f": {lines[-1]}" if lines else ""
        if code < 0:
            hint = " (is memory short?)" if -code == signal.SIGKILL else ""
            return f"ended by {signal.Signals(-code).name}{hint}{said}"
        return f"ended with code {code}{said}"

    def close(self) -> None:
        """Ends the process, whatever it is doing."""
        self._process.kill()
        self._process.wait()
        with contextlib.suppress(BrokenPipeError):
            self._stdin.close()
        self._output.close()
        os.close(self.answers)


class _Conversation:
    """What all ranks have said so far."""

    def __init__(self, num_ranks: int, on_message: Hear) -> None:
        self.results: list[Any] = [None] * num_ranks
        self._failures: list[tuple[int, str, str]] = []  # rank, exception, text
        self._on_message = on_message

    def hear(self, rank: _Rank) -> bool:
        """Takes in what a rank says now; False when it will say no more."""
        messages, more = rank.read()
        for message in messages:
            if "result" in message:
                self.results[rank.rank] = message["result"]
            elif "error" in message:
                self._failures.append((rank.rank, message["error"], message["text"]))
            else:
                self._on_message(rank.rank, message)
                continue
            rank.finished = True
        if not more and not rank.finished:
            rank.finished = True
            self._failures.append((rank.rank, "", rank.last_words()))
        return more

    def failure(self) -> tuple[str, bool]:
        """(what has gone wrong first, or empty; whether that is a cause and no echo of one)."""
        if not self._failures:
            return "", False
        rank, kind, text = min(self._failures, key=lambda failure: failure[1] in _ECHOES)
        return f"rank {rank}: {text}", kind not in _ECHOES


def run_ranks(
    num_ranks: int,
    task: Message,
    *,
    limit: float,
    on_message: Hear = lambda rank, message: None,
) -> list[Any]:
    """Runs `task` ("job": a name that _rank.py knows, and that job's own fields) on all ranks.

    Returns what each rank's job returned. `on_message` gets (rank, message) of everything that a
    rank tells before. Raises CommandError with the text of the rank that failed, or when `limit`
    seconds have passed. No process is left either way.
    """
    ranks: list[_Rank] = []
    try:
        meeting = _meeting(num_ranks)
        for rank in range(num_ranks):
            try:
                ranks.append(_Rank(rank, meeting, task))
            except OSError as error:
                raise CommandError(f"rank {rank} cannot be started: {error}") from None
        return _listen(ranks, time.monotonic() + limit, on_message)
    finally:
        for started in ranks:
            started.close()


def _listen(ranks: list[_Rank], deadline: float, on_message: Hear) -> list[Any]:
    conversation = _Conversation(len(ranks), on_message)
    with selectors.DefaultSelector() as selector:
        for rank in ranks:
            selector.register(rank.answers, selectors.EVENT_READ, rank)
        while selector.get_map():
            ready = selector.select(max(0.0, deadline - time.monotonic()))
            for key, _ in ready:
                if not conversation.hear(key.data):
                    selector.unregister(key.fd)
            text, is_cause = conversation.failure()
            if is_cause or not ready:
                break
            if text:
                deadline = min(deadline, time.monotonic() + _GRACE)
    text, _ = conversation.failure()
    silent = [str(rank.rank) for rank in ranks if not rank.finished]
    if text or silent:
        raise CommandError(text or f"no answer in time from rank {', '.join(silent)}")
    return conversation.results
