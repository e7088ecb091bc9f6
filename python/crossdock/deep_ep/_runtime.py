"""What all operations of one Buffer share."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import torch

from crossdock import _core
from crossdock.torch import _calls
from crossdock.torch._capture import is_capturing
from crossdock.torch._pool import SymmetricPool

from ._agreement import RECORD_BYTES, Request, agree, refuse
from ._arguments import Checks
from ._exchange import HostExchange
from ._groups import Groups, Lease, Sequence
from ._lane import Lane

_DEVICE_TYPES = {"cpu": 1, "cuda": 2}  # DLPack's

AllGather = Callable[[bytes], list[bytes]]


class Routing(NamedTuple):
    """What a handle says besides its tensors."""

    lease: Lease
    num_tokens: int  # T
    topk: int  # K; 0 = made from is_token_in_rank alone
    num_rows: int  # N, of receive tensors


class Handle(NamedTuple):
    """A batch's routing, for later operations on it."""

    rank_prefix_matrix: torch.Tensor  # [W,W] int32: [s,d] = rows of d from sources up to s
    plan: torch.Tensor
    routing: Routing


class Runtime:
    """Communicators, memory, groups and stream of one Buffer. Making one is collective.

    Args:
        rank, num_ranks: the place of this rank.
        all_gather: gathers bytes from all ranks; used here only.
        device: what tensors are on.
        heap_bytes: symmetric memory to begin with.
    """

    def __init__(self, rank: int, num_ranks: int, all_gather: AllGather, device: torch.device,
                 heap_bytes: int) -> None:
        self.rank = rank
        self.num_ranks = num_ranks
        self.device = device
        self.checks = Checks(rank, num_ranks, device)
        self._heap_bytes = heap_bytes
        self._comm = self._meet(all_gather, device, heap_bytes)
        cpu = torch.device("cpu")
        # Ranks agree over the host, also where tensors are on GPUs.
        self._host = self._comm if device == cpu else self._meet(all_gather, cpu, 0)
        self.pool = SymmetricPool(self._comm, device)
        self.lane = Lane(device, self.pool)
        self.exchange = HostExchange(self._host, RECORD_BYTES)
        self._groups = Groups(self._comm, self.lane)
        self._numbers = torch.empty(0, dtype=torch.int32)

    def _meet(self, all_gather: AllGather, device: torch.device, heap_bytes: int) -> _core.Comm:
        return _core.Comm(
            bootstrap="all_gather",
            rank=self.rank,
            num_ranks=self.num_ranks,
            all_gather=all_gather,
            device_type=_DEVICE_TYPES[device.type],
            device_id=device.index or 0,
            heap_bytes=heap_bytes,
            name=f"deep_ep {device.type}",
        )

    def lease_for(self, request: Request) -> Lease:
        """The group for an uncached dispatch. Collective, unless all ranks know it already.

        Raises:
            Mismatch: ranks disagree, or a peer has refused.
            CrossdockError: an operation on the GPU has failed since the last agreement; its peers
                get Mismatch.
        """
        if request.worst_tokens > 0:
            lease = self._groups.agreed_before(request)
            if lease is not None:
                return lease
        failure = self._groups.failure()
        if failure is not None:
            refuse(self.exchange, self.rank, f"an earlier operation: {failure}")
            raise failure
        request = dataclasses.replace(request, heap_bytes=self._heap_bytes)
        return self._groups.for_requests(agree(self.exchange, self.rank, request))

    def refuse(self, worst_tokens: object, text: str) -> None:
        """Tells peers in an uncached dispatch that this rank's arguments are bad.

        Args:
            worst_tokens: the argument ``num_worst_tokens``.
            text: what is bad.
        """
        lease = self._groups.expected_by_peers(worst_tokens)
        if lease is None:
            refuse(self.exchange, self.rank, text)
            return
        with contextlib.suppress(ValueError), Sequence(lease, _calls.PREPARE, _calls.DISPATCH):
            raise ValueError(text)

    def host_numbers(self, count: int) -> torch.Tensor:
        """[count] int32 in memory that host and device write; good until the next call."""
        if self._numbers.numel() < count:
            self._numbers = torch.empty(count, dtype=torch.int32, pin_memory=self.lane.cuda)
        return self._numbers[:count]

    def close(self) -> None:
        """Ends all that runs, then leaves. Local: waits for no peer."""
        self._groups.close()
        if not is_capturing(self.device):
            self.lane.synchronize()
        self.exchange.close()
        if self._host is not self._comm:
            self._host.close()
        self.pool.close()
