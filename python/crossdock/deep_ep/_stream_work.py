"""The order of a Buffer's operations among the caller's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

import torch

from ._session import Session
from .utils import EventHandle, EventOverlap

_NOTHING = contextlib.nullcontext()


class StreamWork:
    """Work on a session's stream, ordered against the caller's stream. A context manager.

    If the body raises, the caller's stream waits for what the other has been given, if anything:
    that stream uses the memory of the operation's tensors next, which die with the error.

    Args:
        session: on whose stream it runs.
        previous_event: what it waits for; None (or an empty one) = all that the caller's stream has
            enqueued.
        async_finish: whether the caller's stream goes on without waiting for it.
    """

    __slots__ = ("_session", "_cuda", "_previous", "_async", "_caller", "_behind", "_joined")

    def __init__(
        self, session: Session, previous_event: EventOverlap | None, async_finish: bool
    ) -> None:
        self._session, self._cuda, self._async = session, session.cuda, async_finish
        previous = None if previous_event is None else previous_event.event
        self._previous = None if previous is None else previous.event

    def __enter__(self) -> StreamWork:
        if self._cuda:
            self._caller = self._session.current_stream()
            # With an event the session does not wait for the caller's stream.
            self._behind = self._joined = self._previous is not None
            if self._previous is not None:
                self._session.stream.wait_event(self._previous)
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        # A stream that has not joined a capture of the caller's has nothing of it.
        if error is not None and self._cuda and self._joined:
            self._session.order(self._session.raw_stream, self._caller)

    def allocating(self) -> contextlib.AbstractContextManager[object]:
        """Within it, results are to be allocated.

        They belong to the caller's stream or, where the session has not waited for that, to the
        session's: it must not be given memory that the caller's work may still be using.
        """
        if not self._cuda:
            return _NOTHING
        if self._previous is not None:
            return torch.cuda.stream(self._session.stream)
        # Memory may come back to the caller's stream while the host waits within an operation.
        self._behind = False
        return _NOTHING

    def stream(self) -> int:
        """The stream for the operation, which waits for what is before it; 0 on the CPU."""
        if not self._cuda:
            return 0
        if not self._behind:
            self._session.order(self._caller, self._session.raw_stream)
            self._behind = self._joined = True
        return self._session.raw_stream

    def running(self) -> contextlib.AbstractContextManager[object]:
        """Within it, also torch's work goes to the session's stream."""
        if not self._cuda:
            return _NOTHING
        self.stream()
        return torch.cuda.stream(self._session.stream)

    def finish(
        self, inputs: Iterable[torch.Tensor | None], results: Iterable[object]
    ) -> EventOverlap:
        """Ends the operation: lets the caller's stream wait, or returns the event to wait for.

        Args:
            inputs: the caller's tensors that the operation reads.
            results: tensors allocated within `allocating`; what is none is left out.
        """
        if not self._cuda:
            return EventOverlap(EventHandle() if self._async else None)
        session = self._session
        if self._previous is not None:
            self._record(results, torch.cuda.current_stream(session.device))
        elif self._async:
            self._record(results, session.stream)
        if not self._async:
            session.order(session.raw_stream, self._caller)
            return EventOverlap()
        self._record(inputs, session.stream)
        return EventOverlap(EventHandle(session.stream))

    def _record(self, tensors: Iterable[object], stream: torch.cuda.Stream) -> None:
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor):
                tensor.record_stream(stream)
