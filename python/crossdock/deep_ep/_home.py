"""The objects that a Buffer's operations need, as long as it or one of its handles lives."""

from __future__ import annotations

import sys
import threading
import weakref
from typing import Any, Protocol

import torch

from crossdock import _core
from crossdock.torch._calls import is_capturing

from ._memory import ReceiveMemory
from ._stream_scope import StreamScope


class Group(Protocol):
    """A group of a `Home`."""

    close: Any


class Home:
    """A communicator with its memory, its stream and its groups.

    Attributes:
        comm: the ``crossdock._core.Comm``.
        device: what tensors are on.
        memory: where results lie.
        scope: where operations run.
        leases: the groups that are alive, which it closes when it ends.
        net_buffer_bytes: of each group, for rows of other machines; 0 = the library's choice.
    """

    def __init__(self, comm: _core.Comm, device: torch.device, net_buffer_bytes: int) -> None:
        self.comm = comm
        self.net_buffer_bytes = net_buffer_bytes
        self.device = device
        self.memory = ReceiveMemory(comm, device)
        self.scope = StreamScope(device)
        self.leases: weakref.WeakSet[Group] = weakref.WeakSet()
        self._lock = threading.RLock()  # a handle may die, on any thread, inside it
        self._handles = 0
        self._ended = False

    def serve(self, handle: object) -> None:
        """Stays as long as this object lives, also when the Buffer has ended."""
        with self._lock:
            self._handles += 1
        # At exit the extension leaves by itself.
        weakref.finalize(handle, self._let_go).atexit = False

    def end(self) -> None:
        """The Buffer ends: all is closed, now or when the last handle dies. Waits for no peer."""
        self._wait()
        with self._lock:
            self._ended = True
            unused = self._handles == 0
        if unused:
            self._close()

    def _let_go(self) -> None:
        with self._lock:
            self._handles -= 1
            unused = self._ended and self._handles == 0
        if unused and not sys.is_finalizing():
            self._close()

    def _close(self) -> None:
        self._wait()
        for lease in list(self.leases):
            lease.close()
        self.memory.close()

    def _wait(self) -> None:
        """Until this rank's operations have ended; in a capture nothing may wait."""
        if not is_capturing(self.device):
            self.scope.synchronize()
