"""The order of a Buffer's operations among the caller's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch

from ._session import Session
from .utils import EventHandle, EventOverlap


class StreamWork:
    """Work on a session's stream, ordered against the caller's stream. A context manager.

    If the body raises, the caller's stream waits for what the other has been given: that stream
    uses the memory of the operation's tensors next, which die with the error.

    Args:
        session: on whose stream it runs.
        previous_event: what it waits for; None (or an empty one) = all that the caller's stream has
            enqueued.
        async_finish: whether the caller's stream goes on without waiting for it.
    """

    def __init__(
        self, session: Session, previous_event: EventOverlap | None, async_finish: bool
    ) -> None:
        self._device, self._cuda, self._stream = session.device, session.cuda, session.stream
        self._previous = previous_event.event if previous_event is not None else None
        self._async = async_finish

    def __enter__(self) -> StreamWork:
        previous = self._previous
        if not self._cuda:
            return self
        self._caller = torch.cuda.current_stream(self._device)
        if previous is None or previous.event is None:
            self._stream.wait_stream(self._caller)
            self._allocator = self._caller
        else:
            # The session does not wait for the caller's stream, so it must not be given memory that
            # work of that stream may still be using.
            self._stream.wait_event(previous.event)
            self._allocator = self._stream
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is not None and self._cuda:
            self._caller.wait_stream(self._stream)

    @contextlib.contextmanager
    def allocating(self) -> Iterator[None]:
        """Within it, results are to be allocated."""
        if not self._cuda:
            yield
            return
        with torch.cuda.stream(self._allocator):
            yield
        if self._allocator is self._caller:
            # Memory may come back to the caller's stream while the host waits within an operation.
            self._stream.wait_stream(self._caller)

    def running(self) -> contextlib.AbstractContextManager[object]:
        """Within it, work goes to the session's stream."""
        if not self._cuda:
            return contextlib.nullcontext()
        return torch.cuda.stream(self._stream)

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
        if self._allocator is self._stream:
            self._record(results, self._caller)
        elif self._async:
            self._record(results, self._stream)
        if not self._async:
            self._caller.wait_stream(self._stream)
            return EventOverlap()
        self._record(inputs, self._stream)
        with self.running():
            return EventOverlap(EventHandle())

    def _record(self, tensors: Iterable[object], stream: torch.cuda.Stream) -> None:
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor):
                tensor.record_stream(stream)
