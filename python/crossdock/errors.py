"""Exceptions: one class per status of the library, each carrying what is known about the failure.

"Fatal" errors finish the communicator: every later operation on it raises the same error, and only
closing it is left. After any other error nothing is lost and the next call works.
"""

from __future__ import annotations

from typing import Any

from crossdock._core import constants

__all__ = [
    "Aborted",
    "Busy",
    "CapacityOverflow",
    "CrossdockError",
    "Internal",
    "InvalidArgument",
    "Mismatch",
    "OutOfMemory",
    "PeerLost",
    "SystemFailure",
    "Timeout",
    "Unsupported",
]


class CrossdockError(RuntimeError):
    """A failed call.

    Attributes:
        status: name of the status, such as ``"XD_ERROR_TIMEOUT"``.
        text: the library's sentence: call, argument, expected, got, rank.
        rank: rank that raises this error, or None outside a communicator.
        peer: rank that the error is about (lost, waited for, or that aborted), or None.
        phase: where a wait stood when a fatal error ended it: ``"host"``, ``"entry"``,
            ``"counts"``, ``"rows"``, ``"done"``, ``"credit"``, or None.
        group: number of the group or context on its communicator, in order of creation, or None.
        operation: ``"prepare"``, ``"dispatch"``, ``"combine"``, ``"dispatch_bwd"``,
            ``"combine_bwd"``, ``"ll_dispatch"``, ``"ll_combine"``, ``"ll_reset"``,
            ``"gemm_all_gather"``, ``"gemm_reduce_scatter"``, ``"gemm_all_reduce"``,
            ``"gemm_bulk"``, ``"gemm_start_all_gather"``, or None.
        expected_epoch: of a timeout, the epoch waited for, else None.
        seen_epoch: of a timeout, the last epoch seen of that peer, else None.
        needed_rows: of an overflow that a call has raised, the rows that `peer` would have
            received, else None.
        capacity_rows: likewise, its capacity.
        fatal: whether the communicator is finished.
    """

    def __init__(
        self,
        text: str = "",
        *,
        status: str | None = None,
        rank: int | None = None,
        peer: int | None = None,
        phase: str | None = None,
        group: int | None = None,
        operation: str | None = None,
        expected_epoch: int | None = None,
        seen_epoch: int | None = None,
        needed_rows: int | None = None,
        capacity_rows: int | None = None,
        fatal: bool = False,
    ) -> None:
        super().__init__(text)
        self.text = text
        self.status = status
        self.rank = rank
        self.peer = peer
        self.phase = phase
        self.group = group
        self.operation = operation
        self.expected_epoch = expected_epoch
        self.seen_epoch = seen_epoch
        self.needed_rows = needed_rows
        self.capacity_rows = capacity_rows
        self.fatal = fatal

    def __reduce__(self) -> tuple[Any, ...]:
        # Exceptions cross processes (multiprocessing, torch.multiprocessing) with their attributes.
        return (type(self), (self.text,), self.__dict__)


class InvalidArgument(CrossdockError, ValueError):
    """An argument of this rank; the text says argument, expected and got."""


class Mismatch(CrossdockError):
    """Ranks disagree on operation, plan, shapes, dtypes or version, or a peer's call failed."""


class CapacityOverflow(CrossdockError):
    """More rows than a receive capacity, in a group with ``overflow="error"``."""


class Timeout(CrossdockError, TimeoutError):
    """A bounded wait ran out. Fatal, except while a communicator is being created."""


class PeerLost(CrossdockError, ConnectionError):
    """A peer's process ended, or the peer has left. Fatal.

    Not fatal in a group with ``on_peer_loss="mask"``, which goes on without the peer, and where the
    peer may also be late only, or have masked this rank; nor in one with ``"resume"``, which goes
    on after its ``enter_view``.
    """


class Aborted(CrossdockError):
    """Some rank called abort(). Fatal."""


class Busy(CrossdockError):
    """A group was used by two threads at once. Fatal.

    Not fatal where ``in_flight`` operations are between their halves, and another one was sent.
    """


class OutOfMemory(CrossdockError, MemoryError):
    """Memory is exhausted; the text has the sizes."""


class Unsupported(CrossdockError):
    """Not built in, or not possible on this machine; the text says which need is missing."""


class SystemFailure(CrossdockError):
    """A call of the operating system failed; the text has the call and the reason."""


class Internal(CrossdockError):
    """A bug in the library: please report it with the text."""


_CLASSES: dict[str, type[CrossdockError]] = {
    "XD_ERROR_INVALID_ARGUMENT": InvalidArgument,
    "XD_ERROR_MISMATCH": Mismatch,
    "XD_ERROR_OVERFLOW": CapacityOverflow,
    "XD_ERROR_TIMEOUT": Timeout,
    "XD_ERROR_PEER_LOST": PeerLost,
    "XD_ERROR_ABORTED": Aborted,
    "XD_ERROR_BUSY": Busy,
    "XD_ERROR_OUT_OF_MEMORY": OutOfMemory,
    "XD_ERROR_UNSUPPORTED": Unsupported,
    "XD_ERROR_SYSTEM": SystemFailure,
    "XD_ERROR_INTERNAL": Internal,
}

# By number; the numbers of the families of operations differ.
_OPERATIONS: dict[int, str] = {
    **dict(enumerate(constants.OPERATIONS)),
    **{number: f"gemm_{word}" for word, number in constants.GEMM_OPERATIONS.items()},
}


def operation_word(number: int) -> str | None:
    """The word for an operation, as of CrossdockError; None for a number that is none."""
    return _OPERATIONS.get(number)


def in_words(found: dict[str, Any]) -> dict[str, Any]:
    """``status()`` of the extension, its operation as a word; None without an error."""
    word = operation_word(found["operation"])
    return found | {"operation": None if found["status"] == "XD_SUCCESS" else word}


def from_status(found: dict[str, Any], rank: int | None = None) -> CrossdockError:
    """The exception for what a group or a context remembers: ``status()`` of the extension's.

    Args:
        found: the fields of ``xd_ep_status`` or ``xd_gemm_status``; an error is in it.
        rank: whose group it is.
    """
    details = {name: found[name] for name in ("status", "text", "operation")}
    peer = None if found["rank"] < 0 else found["rank"]
    return from_details(details | {"rank": rank, "peer": peer})


def from_details(details: dict[str, Any]) -> CrossdockError:
    """The exception for a failure; the extension raises what this returns.

    Args:
        details: the attributes of CrossdockError that are known; ``operation`` as its number. A
            status that this package does not know gives a plain CrossdockError.
    """
    known = dict(details)
    operation = known.pop("operation", None)
    if operation is not None:
        known["operation"] = operation_word(operation)
    return _CLASSES.get(known["status"], CrossdockError)(known.pop("text"), **known)
