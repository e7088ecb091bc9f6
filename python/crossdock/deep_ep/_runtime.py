"""The state that all operations of one Buffer share."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import NoReturn, cast

import torch

from crossdock import _core
from crossdock._core import constants
from crossdock.errors import CrossdockError, Mismatch
from crossdock.torch._calls import is_capturing

from ._agreement import EqualNumber, GatheredNumber, Request, agree, refuse
from ._arguments import Checks
from ._call import Call
from ._groups import Groups, Lease
from ._home import Home
from ._hosts import Terms, agree_on_hosts
from ._memory import leave_unused
from ._slot_groups import SlotGroups

AllGather = Callable[[bytes], list[bytes]]


class Runtime:
    """Communicators, memory, groups and stream of one Buffer. Making one is collective.

    Attributes:
        home: communicator, memory and stream, which handles share.
        scope, memory: its stream and its memory.
        host: the communicator of the ranks' processes, on the CPU.
        hosts: that the ranks are on.
        slots: the groups of low-latency operations.

    Args:
        rank, num_ranks: the place of this rank.
        all_gather: gathers bytes from all ranks; used here only.
        device: what tensors are on.
        heap_bytes: symmetric memory to begin with.
        terms: other arguments that all ranks have alike.
        shrink: whether low-latency operations go on when a rank is lost.
    """

    def __init__(
        self,
        rank: int,
        num_ranks: int,
        all_gather: AllGather,
        device: torch.device,
        heap_bytes: int,
        terms: Terms,
        shrink: bool = False,
    ) -> None:
        self.rank = rank
        self.num_ranks = num_ranks
        self.device = device
        self.checks = Checks(rank, num_ranks, device)
        self._heap_bytes = heap_bytes
        self._shrink = shrink
        leave_unused()
        cpu = torch.device("cpu")
        shared = 2 * EqualNumber.BYTES
        comm = self._meet(all_gather, device, heap_bytes + (shared if device == cpu else 0))
        # Ranks agree over the host, also where tensors are on GPUs.
        self.host = comm if device == cpu else self._meet(all_gather, cpu, shared)
        # Ranks of one host have not agreed on it, and need none.
        self.home = Home(comm, device, terms.num_rdma_bytes if comm.num_hosts > 1 else 0)
        self.scope, self.memory = self.home.scope, self.home.memory
        self._captured = False  # whether some combine was: its replays are not counted
        self._groups = Groups(self.home)
        self.slots = SlotGroups(self.home, shrink)
        self._numbers = torch.empty(0, dtype=torch.int32, device="cpu")
        try:
            self.hosts = agree_on_hosts(self.host, terms, device, shrink)
        except CrossdockError:
            self.close()
            raise
        self._weight_columns: EqualNumber | GatheredNumber
        # Between machines all ranks agree in each dispatch, whatever number they give.
        self._worst_tokens: EqualNumber | None = None
        if self.hosts.apart:
            self._weight_columns = GatheredNumber(self.host)
        else:
            self._worst_tokens = EqualNumber(self.host)
            self._weight_columns = EqualNumber(self.host)

    def _meet(self, all_gather: AllGather, device: torch.device, heap_bytes: int) -> _core.Comm:
        return _core.Comm(
            bootstrap="all_gather",
            rank=self.rank,
            num_ranks=self.num_ranks,
            all_gather=all_gather,
            device_type=constants.DEVICE_TYPES[device.type],
            device_id=device.index or 0,
            heap_bytes=heap_bytes,
            on_peer_loss=constants.COMM_PEER_LOSSES["mask" if self._shrink else "fatal"],
            name=f"deep_ep {device.type}",
        )

    def lease_for(self, request: Request) -> Lease:
        """The group for an uncached dispatch.

        Collective, unless all ranks know it already and are on one machine.

        Raises:
            Mismatch: ranks disagree, in ``num_worst_tokens`` say, or a peer has refused.
            CrossdockError: an operation on the GPU has failed since the last agreement; its peers
                get Mismatch.
        """
        if self._worst_tokens is not None:
            first, peer = self._worst_tokens.of_first(request.worst_tokens)
            if first != request.worst_tokens:
                self._refuse_unequal(request, first, peer)
            if request.worst_tokens > 0:
                lease = self._groups.agreed_before(request)
                if lease is not None:
                    return lease
        failure = self._groups.failure()
        if failure is not None:
            refuse(self.host, f"an earlier operation: {failure}")
            raise failure
        request = dataclasses.replace(request, heap_bytes=self._heap_bytes)
        return self._groups.for_requests(agree(self.host, request))

    def weight_columns_of_first(self, columns: int) -> tuple[int, int]:
        """The columns of topk_weights that the first rank of this combine has, and that rank.

        Once this rank has captured a combine in a CUDA graph, it compares no more: peers may call
        what it replays, so that equal numbers of calls mean nothing.
        """
        self._captured = self._captured or is_capturing(self.device)
        return (columns, self.rank) if self._captured else self._weight_columns.of_first(columns)

    def refuse(self, worst_tokens: object, text: str) -> None:
        """Tells peers in an uncached dispatch that this rank's arguments are bad.

        Args:
            worst_tokens: the argument ``num_worst_tokens``.
            text: what is bad.
        """
        lease = None
        if self._worst_tokens is not None:
            known = isinstance(worst_tokens, int) and worst_tokens >= 0
            first, _ = self._worst_tokens.of_first(cast(int, worst_tokens) if known else 0)
            lease = self._groups.expected_by_peers(first)
        self._fail_with_peers(lease, text)

    def _refuse_unequal(self, request: Request, first: int, peer: int) -> NoReturn:
        """Ends a dispatch to which `peer` has come with `first` as ``num_worst_tokens``."""
        as_peers = dataclasses.replace(request, worst_tokens=first)
        lease = self._groups.agreed_before(as_peers) if first > 0 else None
        text = (
            f"num_worst_tokens = {request.worst_tokens} on rank {self.rank} and {first} on "
            f"rank {peer}, expected equal values"
        )
        self._fail_with_peers(lease, text)
        raise Mismatch(
            f"dispatch: {text} (rank {self.rank})",
            status="XD_ERROR_MISMATCH",
            rank=self.rank,
            peer=peer,
            operation="prepare",
        )

    def _fail_with_peers(self, lease: Lease | None, text: str) -> None:
        """Takes part in a dispatch with a failure, so that no peer waits.

        Args:
            lease: the group that the peers use without an agreement; None = they agree first.
            text: what is wrong.
        """
        if lease is None:
            refuse(self.host, text)
            return
        call = Call(lease, constants.PREPARE, constants.DISPATCH)
        with contextlib.suppress(ValueError), call:
            raise ValueError(text)

    def host_numbers(self, count: int) -> torch.Tensor:
        """[count] int32 in memory that host and device write; good until the next call."""
        if self._numbers.numel() < count:
            self._numbers = torch.empty(
                count, dtype=torch.int32, device="cpu", pin_memory=self.scope.cuda
            )
        return self._numbers[:count]

    def use(self, lease: Lease) -> None:
        """An operation of this group, which may be another Buffer's, is about to run."""
        self._groups.use(lease)

    def close(self) -> None:
        """Ends all that runs, then leaves: with the last handle. Local: waits for no peer."""
        self._groups.close()
        self.slots.close()
        if self.host is not self.home.comm:
            self.host.close()
        self.home.end()
