"""A group of a Buffer's low-latency operations."""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Callable

import torch

from crossdock import _core
from crossdock._core import constants
from crossdock._halves import OpenHalves
from crossdock.errors import CrossdockError, PeerLost, from_status
from crossdock.torch._calls import capture_id, current_stream, described, is_capturing, spec

from ._session import Session
from ._wire import formats_on


@dataclasses.dataclass(frozen=True)
class Shape:
    """The sizes that all ranks' calls have alike: a group serves one such set."""

    max_tokens: int  # num_max_dispatch_tokens_per_rank
    hidden: int
    experts: int
    topk: int

    def sizes(self, mask: bool) -> dict[str, int]:
        """The fields of ``xd_ll_config``."""
        return {
            "num_experts": self.experts,
            "max_topk": self.topk,
            "max_tokens_per_rank": self.max_tokens,
            "hidden": self.hidden,
            "dtype": constants.DTYPES["bfloat16"],
            "duplicate_ids": constants.DUPLICATE_IDS["collapse"],
            "on_peer_loss": constants.PEER_LOSSES["mask" if mask else "fatal"],
        }


class SlotGroup:
    """A group of low-latency operations. Making one is collective.

    Attributes:
        session: where its operations run.
        shape: what it serves.
        core: the ``crossdock._core.LowLatencyGroup``.
        local_experts, num_slots: L and S.
        plan_bytes: bytes of a plan.
        device: what tensors are on.
        dispatch_halves, combine_halves: the operations that wait for their hooks.
    """

    def __init__(self, session: Session, shape: Shape) -> None:
        comm = session.comm
        wires = formats_on(session.device, session.apart)
        sizes = shape.sizes(session.shrink) | {"wire_formats": wires}
        self.session = session
        self.shape = shape
        self.device = session.device
        self.local_experts = shape.experts // comm.num_ranks
        self.core = _core.LowLatencyGroup(comm, **sizes)
        self.num_slots = comm.num_ranks * shape.max_tokens
        self.plan_bytes = _core.ll_plan_size(num_ranks=comm.num_ranks, **sizes)
        self.dispatch_halves = OpenHalves(0)
        self.combine_halves = OpenHalves(0)
        self._last_stream: int | None = None  # of the latest operation,
        self._last_capture = 0  # and the capture that it is part of
        self._errors = 0  # errors that operations had met at the last look
        self._combine_buffer: torch.Tensor | None = None
        self.close = weakref.finalize(self, session.close_group, self.core, True)

    def run(self, operation: str, fields: dict[str, object]) -> None:
        """Runs an operation on the current stream, behind those so far.

        A group that leaves out lost ranks goes on when one is lost, and says nothing of it.

        Args:
            operation: its name in ``_core``.
            fields: of its struct.
        """
        fields["stream"] = current_stream(self.device)
        self._behind(lambda: getattr(self.core, operation)(described(fields)))

    def _behind(self, call: Callable[[], None]) -> None:
        self.follow()
        try:
            call()
        except PeerLost as error:
            if error.fatal or not self.session.shrink:
                raise

    def follow(self) -> None:
        """Lets the current stream wait for the operations so far."""
        if self.device.type != "cuda":
            return
        stream = current_stream(self.device)
        capture = capture_id(self.device, stream)
        last = self._last_stream
        # Operations outside of a capture, or in another one, are over before its replays begin.
        if last is not None and last != stream and capture == self._last_capture:
            self.session.order(last, stream)
        self._last_stream, self._last_capture = stream, capture

    def check(self) -> None:
        """Raises what operations on the GPU have met since the last look; on the CPU they raise.

        The loss of a rank that is left out is no error.
        """
        if self.device.type != "cuda" or is_capturing(self.device):
            return
        errors = self.core.errors()
        if errors == self._errors:
            return
        self._errors = errors
        status = self.core.status()
        if status["status"] not in ("XD_SUCCESS", "XD_ERROR_PEER_LOST"):
            raise from_status(status, self.session.rank)

    def join_failed(self, operation: int, text: str) -> None:
        """Takes this rank's turn with a mistake, of which the peers hear."""
        if is_capturing(self.device):
            return  # a call that is not captured is never run, here or by the peers
        self.follow()
        with contextlib.suppress(CrossdockError):  # this gives the text again
            self.core.join_failed(operation, text, current_stream(self.device))

    def combine_buffer(self) -> torch.Tensor:
        """[L,S,H] bfloat16, the same each time; the current stream may write to it.

        One is enough: a combine has read it when it, or its first half, has ended, and the current
        stream waits for that.
        """
        if self._combine_buffer is None:
            self._combine_buffer = torch.empty(
                self.local_experts,
                self.num_slots,
                self.shape.hidden,
                dtype=torch.bfloat16,
                device=self.device,
            )
        self.follow()
        return self._combine_buffer

    def add_mask(self, status: torch.Tensor) -> None:
        """Sets the elements of status, [W] int32, of the ranks that this group leaves out."""
        mask = torch.empty_like(status)
        self.core.mask_get(spec(mask), current_stream(self.device))
        torch.maximum(status, mask, out=status)

    def set_mask(self, rank: int, masked: bool) -> None:
        """Leaves out a rank, or no longer."""
        self.core.mask_set(rank, int(masked), current_stream(self.device))

    def reset(self) -> None:
        """Waits for the ranks that are not left out, and clears what is under way. Collective."""
        self._behind(lambda: self.core.reset(current_stream(self.device)))
        self.dispatch_halves.forget()
        self.combine_halves.forget()
