"""The objects that a Buffer's operations need, as long as it or one of its handles lives."""

from __future__ import annotations

import functools
import struct
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from crossdock import _core
from crossdock._core import constants
from crossdock.errors import CrossdockError, Unsupported
from crossdock.torch._calls import is_capturing, stream_source

from ._agreement import EqualNumber, require_equal
from ._arguments import Checks
from ._memory import ReceiveMemory, leave_unused

AllGather = Callable[[bytes], list[bytes]]

_CPU = torch.device("cpu")
_TERMS = struct.Struct("=qqq")  # host, low_latency_mode, num_rdma_bytes
_NUMBER = struct.Struct("=q")

# Groups that were let go of during the capture of a CUDA graph, when nothing may wait for a stream:
# they are freed with the process.
_left_by_captures: list[_core.Group | _core.LowLatencyGroup] = []


class HostNumbers(NamedTuple):
    """Numbers that the device writes for the host, int32."""

    total: torch.Tensor  # [1]
    counts: torch.Tensor  # [L]
    # NumPy reads numbers of the host in a fraction of torch's time.
    total_here: np.ndarray[Any, np.dtype[np.int32]]
    counts_here: np.ndarray[Any, np.dtype[np.int32]]

    @classmethod
    def of(cls, total: torch.Tensor, counts: torch.Tensor) -> HostNumbers:
        return cls(total, counts, total.numpy(), counts.numpy())

    def read(self) -> tuple[int, list[int]]:
        """Both, once the device has written them."""
        return int(self.total_here[0]), self.counts_here.tolist()


class Session:
    """The communicators, memory and stream of one Buffer. Making one is collective.

    All operations but those of low latency run on its stream, one after another. On the CPU they
    run in the calling thread, and there is nothing to order.

    Attributes:
        rank, num_ranks: the place of this rank.
        device: what tensors are on; `cuda`: whether that is a GPU.
        checks: of arguments.
        comm: the communicator of the device.
        host: that of the ranks' processes, on the CPU, over which ranks agree.
        num_hosts, num_local: hosts that the ranks are on, and ranks of this one's. Ranks that have
            named no hosts are on that of their machine.
        apart: whether ranks are on several machines, so that not all share memory.
        memory: where results lie.
        stream: a ``torch.cuda.Stream`` of high priority, or a ``torch.cpu.Stream``; `raw_stream`:
            its handle, 0 on the CPU.
        current_stream: tells the handle of the caller's stream.
        order: lets the second of two streams, given by handle, wait for the first.
        heap_bytes: symmetric memory to begin with.
        shrink: whether low-latency operations go on when a rank is lost.
        net_buffer_bytes: of each group, for rows of other machines; 0 = the library's choice.
        open_groups: those of bulk operations that are alive, which it closes when it ends.

    Args:
        rank, num_ranks, device, heap_bytes, shrink: the attributes.
        all_gather: gathers bytes from all ranks; used here only.
        low_latency_mode, num_rdma_bytes: of the Buffer; ranks on several hosts have them alike.

    Raises:
        Mismatch: those two contradict one another; on all ranks alike.
        Unsupported: low-latency operations between machines leave out no rank; on all ranks alike.
    """

    def __init__(
        self,
        rank: int,
        num_ranks: int,
        all_gather: AllGather,
        device: torch.device,
        heap_bytes: int,
        low_latency_mode: bool,
        num_rdma_bytes: int,
        shrink: bool,
    ) -> None:
        self.rank, self.num_ranks = rank, num_ranks
        self.device, self.cuda = device, device.type == "cuda"
        self.checks = Checks(rank, num_ranks, device)
        self.heap_bytes, self.shrink = heap_bytes, shrink
        leave_unused()
        shared = 3 * EqualNumber.BYTES  # one here, two of Groups
        self.comm = self._meet(all_gather, device, heap_bytes + (0 if self.cuda else shared))
        # Ranks agree over the host, also where tensors are on GPUs.
        self.host = self._meet(all_gather, _CPU, shared) if self.cuda else self.comm
        self.apart = self.host.near_ranks < num_ranks
        # Ranks of one host have not agreed on it, and need none.
        self.net_buffer_bytes = num_rdma_bytes if self.comm.num_hosts > 1 else 0
        stream = torch.cuda.Stream(device, priority=-1) if self.cuda else torch.cpu.Stream()
        self.stream = cast(torch.cuda.Stream, stream)  # a stand-in on the CPU: nothing asks it
        self.raw_stream = self.stream.cuda_stream if self.cuda else 0
        self.current_stream = stream_source(device)
        self.order = functools.partial(_core.order_streams, device.index or 0)
        self._reached = torch.cuda.Event() if self.cuda else None
        self.memory = ReceiveMemory(self.comm, device)
        self.open_groups: weakref.WeakSet[Any] = weakref.WeakSet()
        self._captured = False  # whether some combine was: its replays are not counted
        self._numbers: dict[int, HostNumbers] = {}  # by count
        self._lock = threading.RLock()  # a handle may die, on any thread, inside it
        self._handles: set[weakref.ref[object]] = set()  # only living ones
        self._ended = False
        try:
            self._agree_on_hosts(low_latency_mode, num_rdma_bytes)
            self._weight_columns = None if self.apart else EqualNumber(self.host)
        except CrossdockError:
            self.end()
            raise

    def _meet(self, all_gather: AllGather, device: torch.device, heap_bytes: int) -> _core.Comm:
        return _core.Comm(
            bootstrap="all_gather",
            rank=self.rank,
            num_ranks=self.num_ranks,
            all_gather=all_gather,
            device_type=constants.DEVICE_TYPES[device.type],
            device_id=device.index or 0,
            heap_bytes=heap_bytes,
            on_peer_loss=constants.COMM_PEER_LOSSES["mask" if self.shrink else "fatal"],
            name=f"deep_ep {device.type}",
        )

    # ---- Hosts -----------------------------------------------------------------------------------

    def _agree_on_hosts(self, low_latency_mode: bool, num_rdma_bytes: int) -> None:
        """Learns the hosts of all ranks. Collective if there are several."""
        host = self.host
        host_of: tuple[int, ...] = (0,) * self.num_ranks
        if host.num_hosts > 1:
            mine = _TERMS.pack(host.host, low_latency_mode, num_rdma_bytes)
            host_of, modes, sizes = zip(*map(_TERMS.unpack, host.all_gather(mine)))
            require_equal("Buffer", "low_latency_mode", list(map(bool, modes)), self.rank, None)
            require_equal("Buffer", "num_rdma_bytes", sizes, self.rank, None)
            if self.apart and low_latency_mode and self.shrink:
                raise Unsupported(
                    "Buffer: enable_shrink = True, expected False, as the ranks are on several "
                    f"machines ({host.near_ranks} of {self.num_ranks} on this one): low-latency "
                    f"operations between machines leave out no rank (rank {self.rank})",
                    status="XD_ERROR_UNSUPPORTED",
                    rank=self.rank,
                )
        self.num_hosts = 1 + max(host_of)
        self.num_local = host_of.count(host_of[self.rank])
        members = [[one == number for number in range(self.num_hosts)] for one in host_of]
        self._members = torch.tensor(members, device=self.device)  # [W,N] bool

    def count_by_host(self, in_rank: torch.Tensor, out: torch.Tensor) -> None:
        """out, [N] int32, = the tokens that go to each host, each once; in_rank: [T,W] bool."""
        in_host = (in_rank.unsqueeze(2) & self._members).any(1)  # [T,N]
        torch.sum(in_host, 0, dtype=torch.int32, out=out)

    # ---- Stream ----------------------------------------------------------------------------------

    def synchronize(self) -> None:
        """The host waits until all operations have ended."""
        if self.cuda:
            self.stream.synchronize()

    def wait_for_host_data(self) -> None:
        """The host waits, without the GIL, for the work that has been enqueued so far."""
        if self._reached is not None:
            self._reached.record(self.stream)
            self._reached.synchronize()

    def host_numbers(self, count: int) -> HostNumbers:
        """Memory for `count` counts that host and device write; good until the next call."""
        found = self._numbers.get(count)
        if found is None:
            begin = constants.ROW_ALIGNMENT // torch.int32.itemsize  # behind the total
            memory = torch.empty(
                begin + count, dtype=torch.int32, device="cpu", pin_memory=self.cuda
            )
            found = self._numbers[count] = HostNumbers.of(memory[:1], memory[begin:])
        return found

    def weight_columns_of_first(self, columns: int) -> tuple[int, int]:
        """The columns of topk_weights that the first rank of this combine has, and that rank.

        Between machines, where ranks share no word, all wait for all. Once this rank has captured a
        combine in a CUDA graph, it compares no more: peers may call what it replays, so that equal
        numbers of calls mean nothing.
        """
        self._captured = self._captured or is_capturing(self.device)
        if self._captured:
            return columns, self.rank
        if self._weight_columns is not None:
            return self._weight_columns.of_first(columns)
        return _NUMBER.unpack(self.host.all_gather(_NUMBER.pack(columns))[0])[0], 0

    # ---- End -------------------------------------------------------------------------------------

    def serve(self, handle: object) -> None:
        """Stays as long as this object lives, also when the Buffer has ended."""
        with self._lock:  # a ``weakref.finalize`` would take several times as long to make
            self._handles.add(weakref.ref(handle, self._let_go))

    def end(self) -> None:
        """The Buffer ends: all is closed, now or when the last handle dies. Waits for no peer."""
        if self.host is not self.comm:
            self.host.close()
        self._wait()
        with self._lock:
            self._ended = True
            unused = not self._handles
        if unused:
            self._close()

    def close_group(
        self, group: _core.Group | _core.LowLatencyGroup, everywhere: bool = False
    ) -> None:
        """Closes a group when its operations have ended.

        Args:
            everywhere: whether they run on the caller's streams; else on this object's own.
        """
        if is_capturing(self.device):
            _left_by_captures.append(group)
            return
        if self.cuda and everywhere:
            torch.cuda.synchronize(self.device)
        else:
            self.synchronize()
        group.close()

    def _let_go(self, handle: weakref.ref[object]) -> None:
        with self._lock:
            self._handles.discard(handle)
            unused = self._ended and not self._handles
        if unused and not sys.is_finalizing():
            self._close()

    def _close(self) -> None:
        self._wait()
        for group in list(self.open_groups):
            group.close()
        self.memory.close()

    def _wait(self) -> None:
        """Until this rank's operations have ended; in a capture nothing may wait."""
        if not is_capturing(self.device):
            self.synchronize()
