"""Streams and events of a Buffer's operations."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import cast

import torch

from .utils import EventHandle, EventOverlap


class StreamScope:
    """The stream that all operations of a Buffer run on, one after another.

    On the CPU operations run in the calling thread, and there is nothing to order.

    Attributes:
        stream: a ``torch.cuda.Stream`` of high priority, or a ``torch.cpu.Stream``.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.cuda = device.type == "cuda"
        stream = torch.cuda.Stream(device, priority=-1) if self.cuda else torch.cpu.Stream()
        self.stream = cast(torch.cuda.Stream, stream)  # a stand-in on the CPU: nothing asks it

    @property
    def raw_stream(self) -> int:
        """The stream as ``crossdock._core`` takes it."""
        return self.stream.cuda_stream if self.cuda else 0

    def synchronize(self) -> None:
        """The host waits until all operations have ended."""
        if self.cuda:
            self.stream.synchronize()

    def wait_for_host_data(self) -> None:
        """The host waits, without the GIL, for the work that has been enqueued so far."""
        if self.cuda:
            event = torch.cuda.Event()
            event.record(self.stream)
            event.synchronize()


class StreamWork:
    """Work on the scope, ordered against the caller's stream. A context manager.

    If the body raises, the caller's stream waits for what the scope has been given: that stream
    uses the memory of the operation's tensors next, which die with the error.

    Args:
        scope: where it runs.
        previous_event: what it waits for; None (or an empty one) = all that the caller's stream has
            enqueued.
        async_finish: whether the caller's stream goes on without waiting for it.
    """

    def __init__(
        self, scope: StreamScope, previous_event: EventOverlap | None, async_finish: bool
    ) -> None:
        self._stream_scope = scope
        self._previous = previous_event.event if previous_event is not None else None
        self._async = async_finish

    def __enter__(self) -> StreamWork:
        scope, previous = self._stream_scope, self._previous
        if not scope.cuda:
            return self
        self._caller = torch.cuda.current_stream(scope.device)
        if previous is None or previous.event is None:
            scope.stream.wait_stream(self._caller)
            self._allocator = self._caller
        else:
            # The scope does not wait for the caller's stream, so it must not be given memory that
            # work of that stream may still be using.
            scope.stream.wait_event(previous.event)
            self._allocator = scope.stream
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None and self._stream_scope.cuda:
            self._caller.wait_stream(self._stream_scope.stream)

    @contextlib.contextmanager
    def allocating(self) -> Iterator[None]:
        """Within it, results are to be allocated."""
        if not self._stream_scope.cuda:
            yield
            return
        with torch.cuda.stream(self._allocator):
            yield
        if self._allocator is self._caller:
            # Memory may come back to the caller's stream while the host waits within an operation.
            self._stream_scope.stream.wait_stream(self._caller)

    def running(self) -> contextlib.AbstractContextManager[object]:
        """Within it, work goes to the scope."""
        if not self._stream_scope.cuda:
            return contextlib.nullcontext()
        return torch.cuda.stream(self._stream_scope.stream)

    def finish(
        self, inputs: Iterable[torch.Tensor | None], results: Iterable[torch.Tensor | None]
    ) -> EventOverlap:
        """Ends the operation: lets the caller's stream wait, or returns the event to wait for.

        Args:
            inputs: the caller's tensors that the operation reads.
            results: tensors allocated within `allocating`.
        """
        if not self._stream_scope.cuda:
            return EventOverlap(EventHandle() if self._async else None)
        if self._allocator is self._stream_scope.stream:
            self._record(results, self._caller)
        elif self._async:
            self._record(results, self._stream_scope.stream)
        if not self._async:
            self._caller.wait_stream(self._stream_scope.stream)
            return EventOverlap()
        self._record(inputs, self._stream_scope.stream)
        with self.running():
            return EventOverlap(EventHandle())

    def _record(self, tensors: Iterable[torch.Tensor | None], stream: torch.cuda.Stream) -> None:
        for tensor in tensors:
            if tensor is not None:
                tensor.record_stream(stream)
