"""The hosts that a Buffer's ranks are on."""

from __future__ import annotations

import dataclasses
import struct

import torch

from crossdock import _core
from crossdock.errors import Unsupported

from ._agreement import require_equal

_RECORD = struct.Struct("=qqq")  # host, low_latency_mode, num_rdma_bytes


@dataclasses.dataclass(frozen=True)
class Terms:
    """The arguments of a Buffer on which its ranks must agree if they are on several hosts."""

    low_latency_mode: bool
    num_rdma_bytes: int


class Hosts:
    """Which rank is on which host. Ranks that have named no hosts are on that of their machine.

    Attributes:
        num: how many there are.
        num_local: ranks of this rank's host.
        apart: whether they are on several machines, so that not all ranks share memory.
    """

    def __init__(self, host_of: list[int], rank: int, apart: bool, device: torch.device) -> None:
        self.num = 1 + max(host_of)
        self.num_local = host_of.count(host_of[rank])
        self.apart = apart
        members = [[host == number for number in range(self.num)] for host in host_of]
        self._members = torch.tensor(members, device=device)  # [W,N] bool

    def count_tokens(self, in_rank: torch.Tensor, out: torch.Tensor) -> None:
        """out, [N] int32, = the tokens that go to each host, each once.

        Args:
            in_rank: [T,W] bool, whether a token goes to a rank.
        """
        in_host = (in_rank.unsqueeze(2) & self._members).any(1)  # [T,N]
        torch.sum(in_host, 0, dtype=torch.int32, out=out)


def agree_on_hosts(comm: _core.Comm, terms: Terms, device: torch.device, shrink: bool) -> Hosts:
    """The hosts of all ranks. Collective if there are several.

    Raises:
        Mismatch: the terms contradict one another; on all ranks alike.
        Unsupported: low-latency operations between machines are on CPUs, and leave out no rank; on
            all ranks alike.
    """
    rank, apart = comm.rank, comm.near_ranks < comm.num_ranks
    if comm.num_hosts == 1:
        return Hosts([0] * comm.num_ranks, rank, apart, device)
    mine = _RECORD.pack(comm.host, terms.low_latency_mode, terms.num_rdma_bytes)
    host_of, modes, sizes = zip(*map(_RECORD.unpack, comm.all_gather(mine)))
    require_equal("Buffer", "low_latency_mode", [bool(mode) for mode in modes], rank)
    require_equal("Buffer", "num_rdma_bytes", sizes, rank)
    if apart and terms.low_latency_mode and (shrink or device.type != "cpu"):
        what = "enable_shrink" if shrink else "low_latency_mode"
        raise Unsupported(
            f"Buffer: {what} = True, expected False, as the ranks are on several machines "
            f"({comm.near_ranks} of {comm.num_ranks} on this one): low-latency operations between "
            f"machines are on CPUs, and leave out no rank (rank {rank})",
            status="XD_ERROR_UNSUPPORTED",
            rank=rank,
        )
    return Hosts(list(host_of), rank, apart, device)
