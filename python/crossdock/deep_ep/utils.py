"""Events that order a Buffer's operations against the caller's stream."""

from __future__ import annotations

import torch

__all__ = ["EventHandle", "EventOverlap"]


class EventHandle:
    """A point in the current CUDA stream at the time of construction.

    Where CUDA is not in use there is nothing to wait for: operations have ended when they return.

    Args:
        stream: another one than the current.

    Attributes:
        event: the ``torch.cuda.Event``, or None where CUDA is not in use.
    """

    def __init__(self, stream: torch.cuda.Stream | None = None) -> None:
        self.event: torch.cuda.Event | None = None
        if torch.cuda.is_initialized():
            self.event = torch.cuda.Event()
            self.event.record(stream)

    def current_stream_wait(self) -> None:
        """Lets the current stream wait for this point. The host does not wait."""
        if self.event is not None:
            torch.cuda.current_stream().wait_event(self.event)


class EventOverlap:
    """An event, and tensors that shall live until it is dropped.

    As a context manager it lets the current stream wait when the block ends, so that what the block
    enqueues overlaps with the operation:

        with event:
            other_work()
        # from here on the operation's results may be used

    Args:
        event: the point to wait for; None = nothing to wait for.
        extra_tensors: kept alive as long as this object.
    """

    def __init__(
        self,
        event: EventHandle | None = None,
        extra_tensors: tuple[torch.Tensor, ...] | None = None,
    ) -> None:
        self.event = event
        self.extra_tensors = extra_tensors

    def current_stream_wait(self) -> None:
        """Lets the current stream wait for the event.

        Raises:
            ValueError: there is no event, as in what operations return without ``async_finish``.
        """
        if self.event is None:
            raise ValueError(
                "event: expected one to wait for, got None: operations without async_finish have "
                "already been waited for"
            )
        self.event.current_stream_wait()

    def __enter__(self) -> EventOverlap:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if self.event is not None:
            self.event.current_stream_wait()
