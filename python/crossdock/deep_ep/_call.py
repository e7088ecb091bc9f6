"""One call of a Buffer: its operations, where they run, and what peers hear if it fails."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import TracebackType
from typing import Any

from crossdock.errors import CrossdockError, InvalidArgument
from crossdock.torch._calls import is_capturing

from ._groups import Lease, in_callers_words
from ._stream_scope import StreamWork
from .utils import EventOverlap

Events = tuple[EventOverlap | None, bool]  # previous_event, async_finish


class Call:
    """The operations of one call, in which this rank takes all its turns, even after an error.

    If the body raises before it has run them all, the rank takes part in the others with its
    mistake, so that no peer waits for it. On the CPU that is the next one only, in which the peers
    raise, and none if they raise already. On CUDA peers enqueue all before they can know.

    Args:
        lease: whose group runs them.
        turns: in order, operations as ``_calls`` names them. Or, where peers wait for something
            else, what tells them there that this rank has failed.
        host_waits: whether the caller hears of a failure before the last operation. It is not told
            again by later calls then.
    """

    def __init__(
        self, lease: Lease, *turns: int | Callable[[], object], host_waits: bool = False
    ) -> None:
        self._lease = lease
        self._owed = list(turns)
        self._host_waits = host_waits
        self._in_call = False

    def in_scope(self, previous_event: EventOverlap | None, async_finish: bool) -> StreamWork:
        """The work of this call, to be ordered against the caller's stream: see `StreamWork`."""
        return StreamWork(self._lease.scope, previous_event, async_finish)

    def begin(self) -> None:
        """The next turn, which is no operation, is being taken."""
        self._owed.pop(0)

    def run(self, call: Callable[..., None], *args: Any, **options: Any) -> None:
        """The next operation: a function of ``_calls`` and its arguments behind the group."""
        self._owed.pop(0)
        self._in_call = True  # the library itself takes this turn if arguments are bad
        try:
            call(self._lease.group, *args, **options)
        except InvalidArgument as error:
            error.text = in_callers_words(error.text)
            error.args = (error.text,)
            raise
        self._in_call = False

    def __enter__(self) -> Call:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            return
        if not self._lease.scope.cuda:
            self._owed = [] if self._in_call else self._owed[:1]
        for turn in self._owed:
            # This gives the text again, or the communicator is finished and no rank waits.
            with contextlib.suppress(CrossdockError):
                self._fail_in(turn, str(error))
        if self._host_waits and isinstance(error, Exception):
            self._forget()

    def _fail_in(self, turn: int | Callable[[], object], text: str) -> None:
        if callable(turn):
            turn()
        else:
            self._lease.group.join_failed(turn, text, self._lease.scope.raw_stream)

    def _forget(self) -> None:
        """Clears what the group remembers of the failure that the caller hears of now."""
        scope = self._lease.scope
        if is_capturing(scope.device):
            return  # nothing may wait now
        scope.wait_for_host_data()
        with contextlib.suppress(CrossdockError):
            self._lease.failure()
