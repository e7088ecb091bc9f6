"""The common part of groups and contexts on torch tensors: life, errors, what peers hear."""

from __future__ import annotations

import reprlib
import sys
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
from torch.autograd import forward_ad

from crossdock._stats import GroupStats, group_stats
from crossdock.errors import (
    InvalidArgument,
    from_details,
    from_status,
    in_words,
    operation_word,
)

from ._calls import current_stream, is_capturing
from ._comm import Comm

__all__ = ["Membership", "Operations", "is_told"]

# Attribute of an exception of which the peers have been told.
_TOLD = "_told"


def is_told(error: Exception) -> bool:
    """Whether `Membership.refuse` has raised it, so that the operation's turn has been taken."""
    return hasattr(error, _TOLD)


def _told(error: Exception) -> Exception:
    setattr(error, _TOLD, True)
    return error


# Groups and contexts whose last reference went while a CUDA graph was captured, when nothing may
# wait for the device: they are freed with the process.
_left_by_captures: list[Any] = []


class Operations(NamedTuple):
    """The operations of one call that is several, and its name, which errors say."""

    call: str
    numbers: list[int]


class Membership:
    """This rank's part of a group, or of a context.

    Attributes:
        comm: its Comm.
        core: the group or context of the extension.
    """

    comm: Comm
    core: Any

    def status(self) -> dict[str, Any]:
        """Reads and clears the group's non-fatal error state; never blocks.

        An error that a call has raised is not repeated: on the CPU that leaves bad_ids and
        dropped_rows.

        ``status`` (name), ``operation`` (word, or None), ``epoch``, ``rank``, ``bad_ids``,
        ``needed_rows``, ``capacity_rows``, ``dropped_rows``, ``text``: see ``xd_ep_status`` in
        ``crossdock/ep.h``. Of a LowLatencyGroup those of ``xd_ll_status`` in
        ``crossdock/low_latency.h``, of a TpContext those of ``xd_gemm_status`` in
        ``crossdock/gemm.h``.
        """
        return in_words(self.core.status())

    def errors(self) -> int:
        """How many operations of this rank have ended with a non-fatal error; any thread."""
        return self.core.errors()

    def stats(self) -> GroupStats:
        """The numbers of this rank's work so far; any thread, never blocks."""
        return group_stats(self.core.stats(), first_operation=self.core.FIRST_OPERATION)

    def set_name(self, name: str) -> None:
        """Names it for people who look: ``crossdock top``, traces, profilers, XD_LOG=stats. Local.

        A name is cut off behind 63 bytes.
        """
        self.core.set_name(name)

    def check(self) -> None:
        """Raises what operations met since the last look, if anything; never blocks.

        Needed on CUDA, where operations run after their call has returned: synchronise first to see
        the last ones. On the CPU operations raise by themselves.

        Raises:
            InvalidArgument, Mismatch, CapacityOverflow: and the group stays usable. Of a
                LowLatencyGroup also Busy, and with ``on_peer_loss="mask"`` PeerLost.
            CrossdockError: the communicator is finished; ``fatal`` is True.
        """
        fatal = self.comm.core.error()
        if fatal is not None:
            raise from_details(fatal)
        found = self.core.status()
        if found["status"] != "XD_SUCCESS":
            raise from_status(found, self.comm.rank)

    def close(self) -> None:
        """Frees its memory; on a GPU after waiting for the device's work. Local.

        Does nothing the second time.
        """
        if self.core.closed:
            return
        if self.comm.device.type == "cuda":
            torch.cuda.synchronize(self.comm.device)
        self.core.close()

    def __deepcopy__(self: _Member, memo: dict[int, object]) -> _Member:
        """Itself: layers may share a group, and so do copies of a model."""
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a group or context belongs to its process and cannot be pickled: save "
            "model.state_dict(), or use torch.distributed.checkpoint, rather than the model"
        )

    def __del__(self) -> None:
        if not hasattr(self, "core") or sys.is_finalizing():  # without it: the making failed
            return
        if is_capturing(self.comm.device):
            _left_by_captures.append(self.core)
        else:
            self.close()

    def has(self, value: object) -> bool:
        """Whether it is a dense tensor on this device, without a tangent."""
        return (
            isinstance(value, torch.Tensor)
            and value.device == self.comm.device
            and value.layout is torch.strided
            and not _has_tangent(value)
        )

    def has_or_none(self, value: object) -> bool:
        """Whether it is such a tensor, or none."""
        return value is None or self.has(value)

    def require_tensors(self, operation: int | Operations | None, **values: object) -> None:
        """Checks that the first value is such a tensor; others may also be None.

        Args:
            operation: as of `refuse`.
        """
        device = self.comm.device
        for position, (name, value) in enumerate(values.items()):
            if not isinstance(value, torch.Tensor):
                if value is not None or not position:
                    shown = f"{type(value).__name__} {reprlib.repr(value)}"
                    self.refuse(operation, TypeError, f"{name}: expected a tensor, got {shown}")
            elif value.device != device:
                problem = f"expected a tensor on {device}, got one on {value.device}"
                self.refuse(operation, ValueError, f"{name}: {problem}")
            elif value.layout is not torch.strided:
                problem = f"expected a dense tensor, got one of layout {value.layout}"
                self.refuse(operation, ValueError, f"{name}: {problem}")
            elif _has_tangent(value):
                problem = (
                    "expected a tensor without a tangent, as there are no derivatives in forward "
                    "mode (torch.func.jvp, torch.autograd.forward_ad)"
                )
                self.refuse(operation, NotImplementedError, f"{name}: {problem}")

    def refuse(
        self, operation: int | Operations | None, kind: type[Exception], problem: str
    ) -> NoReturn:
        """Raises `kind`, after telling the peers' calls of `operation`, which raise Mismatch.

        Not in a capture: what is not captured is never run, here or by the peers.

        Args:
            operation: None = no peer has to hear of it. Of a call of several, all of them: peers on
                GPUs have enqueued them before they hear of the first.
        """
        device = self.comm.device
        place = f"[rank {self.comm.rank} of {self.comm.num_ranks}]"
        if operation is None:
            raise kind(f"{problem} {place}")
        if isinstance(operation, int):
            operation = Operations(str(operation_word(operation)), [operation])
        text = f"{operation.call}: {problem} {place}"
        if not is_capturing(device):
            for one in operation.numbers[: None if device.type == "cuda" else 1]:
                try:
                    self.core.join_failed(one, text, current_stream(device))
                except InvalidArgument:
                    pass  # it says that the peers have been told
        raise _told(kind(text))  # no local name: with its traceback it would keep this group alive


def _has_tangent(tensor: torch.Tensor) -> bool:
    """Whether it has a derivative in forward mode, which would end here without a word."""
    if forward_ad._current_level < 0:
        return False
    return forward_ad.unpack_dual(tensor).tangent is not None


_Member = TypeVar("_Member", bound=Membership)
