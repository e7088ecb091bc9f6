"""Groups of a Buffer, made when a dispatch needs them and replaced when one has outgrown them."""

from __future__ import annotations

import dataclasses
import weakref

import torch

from crossdock import _core
from crossdock._core import constants
from crossdock.errors import (
    CrossdockError,
    Mismatch,
    OutOfMemory,
    from_status,
)
from crossdock.torch import _calls
from crossdock.torch._calls import is_capturing

from ._agreement import Request
from ._home import Home
from ._memory import set_bytes
from ._stream_scope import StreamScope

_SETS = 2  # sets of receive tensors that symmetric memory has room for


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Bounds of a group, equal on all ranks."""

    experts: int
    topk: int
    tokens: int
    row_bytes: int
    scale_bytes: int
    num_sms: tuple[int, ...]  # by rank

    @classmethod
    def of(cls, requests: list[Request]) -> Sizes:
        """The sizes that all ranks' requests need."""
        first, ranks = requests[0], len(requests)
        tokens = max(max(one.tokens, -(-one.worst_tokens // ranks)) for one in requests)
        return cls(
            # Without choices of experts, each rank is one expert, and a token's ranks its choices.
            experts=first.experts if first.topk else ranks,
            topk=first.topk or ranks,
            tokens=max(1, tokens),
            row_bytes=first.row_bytes,
            scale_bytes=first.scale_bytes,
            num_sms=tuple(one.num_sms for one in requests),
        )

    def serve(self, need: Sizes) -> bool:
        """Whether a group of these sizes is good enough."""
        return (
            self.experts == need.experts
            and self.num_sms == need.num_sms
            and self.topk >= need.topk
            and self.tokens >= need.tokens
            and self.row_bytes >= need.row_bytes
            and self.scale_bytes >= need.scale_bytes
        )

    def grown_to(self, need: Sizes) -> Sizes:
        """Sizes for `need` and for all that these serve; tokens grow geometrically."""
        tokens = self.tokens
        if tokens < need.tokens:
            tokens = max(need.tokens, tokens * 3 // 2)
        return dataclasses.replace(
            need,
            tokens=tokens,
            topk=max(self.topk, need.topk),
            row_bytes=max(self.row_bytes, need.row_bytes),
            scale_bytes=max(self.scale_bytes, need.scale_bytes),
        )

    def set_bytes(self) -> int:
        """Memory for the receive tensors of a dispatch."""
        rows = len(self.num_sms) * self.tokens
        weights, indices = 4 * self.topk, 8 * self.topk
        return set_bytes(
            [rows * one for one in (self.row_bytes, self.scale_bytes, weights, indices)]
        )


class Lease:
    """A group; closed when the Buffer and all handles have let go of it.

    Attributes:
        group: the ``crossdock._core.Group``.
        sizes: its bounds.
        plan_bytes: bytes of a plan.
        home: its communicator, memory and stream.
        scope: where its operations run.
        close: closes the group now.
    """

    def __init__(self, home: Home, sizes: Sizes) -> None:
        comm, scope = home.comm, home.scope
        config = {
            "num_experts": sizes.experts,
            "max_topk": sizes.topk,
            "max_tokens_per_rank": sizes.tokens,
            "hidden": sizes.row_bytes,
            "dtype": _calls.DTYPE_CODES[torch.uint8],
            "max_scale_bytes": sizes.scale_bytes,
            "layout": constants.LAYOUTS["rank_major"],
            "duplicate_ids": constants.DUPLICATE_IDS["collapse"],
            "zero_tail": 1,
            "num_sms": sizes.num_sms[comm.rank],
            "net_buffer_bytes": home.net_buffer_bytes,
        }
        self.sizes = sizes
        self.group = _core.Group(comm, **config)
        self.plan_bytes = _core.plan_size(num_ranks=comm.num_ranks, **config)
        self.home = home
        self.scope = scope
        self.close = weakref.finalize(self, _close, self.group, scope)
        home.leases.add(self)

    def failure(self) -> CrossdockError | None:
        """The error that operations on the GPU have met since the last look; on the CPU they raise.

        Raises:
            CrossdockError: the communicator is finished.
        """
        if not self.scope.cuda:
            return None
        comm = self.home.comm
        if comm.error() is not None:
            comm.mem_grow(0)  # a call that meets a fatal error raises all that is known
        status = self.group.status()
        if status["status"] == "XD_SUCCESS":
            return None
        return from_status(status | {"text": in_callers_words(status["text"])}, comm.rank)


def in_callers_words(text: str) -> str:
    """An error of the library, about the Buffer's argument.

    Receive tensors are made with as many rows as there are, or as the caller says.
    """
    return text.replace("recv_tokens: has", "num_worst_tokens: recv_x has")


# Groups that were let go of during the capture of a CUDA graph, when nothing may wait for a stream:
# they are freed with the process.
_left_by_captures: list[_core.Group] = []


def _close(group: _core.Group, scope: StreamScope) -> None:
    if is_capturing(scope.device):
        _left_by_captures.append(group)
        return
    scope.synchronize()  # the library wants no operation to be running
    group.close()


class Groups:
    """The current groups of a Buffer: one for choices of experts, one for ``is_token_in_rank``."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self._ranks = home.comm.num_ranks
        self._current: dict[bool, Lease] = {}
        self._used: weakref.WeakSet[Lease] = weakref.WeakSet()  # also those that handles keep
        self._reserved = 0  # bytes of symmetric memory

    def agreed_before(self, request: Request) -> Lease | None:
        """The group that serves `request` by what was agreed before, if it does.

        All ranks come to the same answer, as ``num_worst_tokens`` is equal on all, and as long as
        ``config.num_sms`` changes on all at once: tokens, which differ, play no part.
        """
        lease = self._current.get(request.topk > 0)
        if lease is None:
            return None
        need = Sizes.of([dataclasses.replace(request, tokens=0)] * self._ranks)
        sizes = lease.sizes
        mine = sizes.num_sms[self._home.comm.rank] == request.num_sms
        serves = mine and sizes.serve(dataclasses.replace(need, num_sms=sizes.num_sms))
        return lease if serves else None

    def expected_by_peers(self, worst_tokens: int) -> Lease | None:
        """The group that peers with such a ``num_worst_tokens`` use, if they need not agree.

        A guess, for a rank whose own request is no good.
        """
        lease = self._current.get(True)
        if lease is None or worst_tokens < 1:
            return None
        return lease if lease.sizes.tokens * self._ranks >= worst_tokens else None

    def for_requests(self, requests: list[Request]) -> Lease:
        """The group that serves the requests of all ranks. Collective if it has to be made."""
        by_experts = requests[0].topk > 0
        need = Sizes.of(requests)
        lease = self._current.get(by_experts)
        if lease is not None and lease.sizes.serve(need):
            return lease
        sizes = lease.sizes.grown_to(need) if lease is not None else need
        # Before the new group is made, so that two need not fit into memory.
        self._current.pop(by_experts, None)
        del lease
        self._reserve(sizes, min(one.heap_bytes for one in requests))
        lease = self._current[by_experts] = Lease(self._home, sizes)
        self.use(lease)
        return lease

    def use(self, lease: Lease) -> None:
        """From now on `failure` also tells of this group's operations."""
        self._used.add(lease)

    def _reserve(self, sizes: Sizes, heap_bytes: int) -> None:
        """Sees to symmetric memory for receive tensors of these sizes. Collective."""
        self._reserved = max(self._reserved, heap_bytes)
        more, needed = 0, _SETS * sizes.set_bytes()
        if self._reserved < needed:
            # Geometrically, as a communicator can grow 4096 times only.
            more = self._reserved = max(needed, self._reserved * 5 // 4)
        try:
            self._home.memory.reserve(more, sizes.set_bytes())
        except (OutOfMemory, Mismatch):
            pass  # some rank has no memory left: tensors are ordinary ones, which are staged

    def failure(self) -> CrossdockError | None:
        """The error that operations have met on the GPU since the last look."""
        failures = [lease.failure() for lease in self._used]
        return next((failure for failure in failures if failure is not None), None)

    def close(self) -> None:
        """Lets go of the groups; those that handles refer to stay."""
        self._current.clear()
