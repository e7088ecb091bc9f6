"""Communicators and symmetric memory."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np
import numpy.typing as npt

from crossdock import _core
from crossdock._arrays import Heap, aligned_empty, describe
from crossdock._comm_arguments import PeerLoss, grow, join, milliseconds, parse_device
from crossdock._core import constants
from crossdock._dtypes import INDICES
from crossdock._experts import ranks_of_experts
from crossdock._view import View, agree, view_of
from crossdock.errors import CrossdockError, InvalidArgument, Unsupported, from_details

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = [
    "Comm",
    "MemoryInfo",
    "RoutingLayout",
    "unique_id",
]

_CPU = constants.DEVICE_TYPES["cpu"]


def unique_id(address: str | None = None, *, port: int = 0, timeout: float | None = None) -> bytes:
    """Opens a meeting point for one communicator, served by a background thread of this process.

    Args:
        address: of this host, to listen on and on no other; None = 127.0.0.1.
        port: TCP port; 0 = any free one.
        timeout: seconds that the meeting point waits for all ranks; None = XD_TIMEOUT_MS, else 600.

    Returns:
        128 bytes for all ranks. They contain a secret: strangers must not read them.

    Raises:
        InvalidArgument, SystemFailure: the address is not this host's, or the port is taken.
    """
    return _core.unique_id(address, port, milliseconds(timeout))


@dataclasses.dataclass(frozen=True)
class MemoryInfo:
    """This rank's symmetric memory, in bytes."""

    total_bytes: int
    used_bytes: int  # allocated, rounding included
    largest_free_bytes: int  # the largest allocation that would succeed now
    segments: int  # creation and growths
    huge_pages: bool  # whether all of it is in huge pages of the host


@dataclasses.dataclass(frozen=True)
class RoutingLayout:
    """Where the tokens of one rank go. W ranks, E experts, T tokens."""

    rows_per_rank: np.ndarray  # [W] int64: tokens that go to each rank
    rows_per_expert: np.ndarray  # [E] int64: tokens that go to each expert
    token_in_rank: np.ndarray  # [T,W] bool
    bad_ids: int  # ids below -1, or E and more


class CommOptions(TypedDict, total=False):
    """The arguments of `Comm` that all ways to join have, which see."""

    device: str
    heap_bytes: int
    timeout: float | None
    name: str
    on_peer_loss: PeerLoss
    host: str | None
    net_interface: str | None
    silence_ms: int
    elastic: bool


class Comm:
    """One rank's membership in a set of ranks: threads, or processes of one host.

    A context manager. One thread may use it at a time, except for abort(); each rank calls the
    collective methods in the same order. It belongs to the process that made it.

    Args:
        unique_id: from unique_id() of any process; good for one communicator.
        rank: 0 <= rank < num_ranks.
        num_ranks: 1 to 1024.
        device: what this rank computes on: ``"cpu"``, ``"cuda:0"``, or ``"cuda"`` for the device
            number in LOCAL_RANK. NumPy arrays and EpGroup need ``"cpu"``.
        heap_bytes: this rank's symmetric memory, rounded up to pages; may differ per rank.
        timeout: longest wait for a peer, here and in every later call, in seconds;
            None = XD_TIMEOUT_MS, else 600.
        name: shown in logs and behind error texts; tells apart communicators that meet through the
            same environment at the same time. Equal on all ranks.
        on_peer_loss: what the end of a rank's process means to the others. ``"fatal"``: it finishes
            the communicator. ``"mask"``: the rank is only remembered, see `lost`; a collective call
            raises PeerLost and finishes nothing, but an operation that needs all ranks cannot go
            on, and does. Equal on all ranks.
        host: the host that this rank counts to: ranks that give equal names, of up to 63 bytes, are
            on one. It decides the order of sums of expert parallelism and nothing else; the ranks
            are on one machine all the same. All ranks name their hosts, or none does;
            None = XD_HOST_ID, else one host of all ranks.
        net_interface: several machines only: the interface, such as ``"eth0"``, or the address at
            which other machines reach this rank; None = XD_NET_IFACE, else the address from which
            it reaches the meeting point, or with an all-gather the machine's only address.
        silence_ms: several machines only: milliseconds, at least 1000, after which the ranks of a
            machine that does not answer are lost; 0 = XD_SILENCE_MS, else 10000; -1 = never.
        elastic: another process may take the place of a rank whose process has ended, see
            `invite`. On the CPU of one machine, with ``on_peer_loss="mask"``. Equal on all ranks.

    Raises:
        TypeError, ValueError: a bad heap_bytes, of which the others hear by Mismatch; another
            argument of a wrong kind, of which nobody hears.
        InvalidArgument; Timeout naming the ranks that did not come; Mismatch (another num_ranks,
        another kind of device or on_peer_loss, a host on some ranks only, a rank taken twice, a
        peer that failed); PeerLost; Unsupported (no such device here, ranks on different machines);
        OutOfMemory; SystemFailure.
    """

    def __init__(
        self,
        unique_id: bytes | bytearray,
        *,
        rank: int,
        num_ranks: int,
        device: str = "cpu",
        heap_bytes: int = 0,
        timeout: float | None = None,
        name: str = "",
        on_peer_loss: PeerLoss = "fatal",
        host: str | None = None,
        net_interface: str | None = None,
        silence_ms: int = 0,
        elastic: bool = False,
    ) -> None:
        options: CommOptions = {
            "device": device,
            "heap_bytes": heap_bytes,
            "timeout": timeout,
            "name": name,
            "on_peer_loss": on_peer_loss,
            "host": host,
            "net_interface": net_interface,
            "silence_ms": silence_ms,
            "elastic": elastic,
        }
        self._join(
            options, bootstrap="unique_id", unique_id=unique_id, rank=rank, num_ranks=num_ranks
        )

    @classmethod
    def from_environment(cls, **options: Unpack[CommOptions]) -> Comm:
        """Joins through the environment variables of a launcher.

        They are RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT and LOCAL_RANK, as torchrun sets them.
        Set XD_JOB_SECRET to the same unguessable text on all ranks when the host has other
        users. Arguments and errors as of Comm.
        """
        return cls.__new__(cls)._join(options, bootstrap="environment")

    @classmethod
    def from_all_gather(
        cls,
        all_gather: Callable[[bytes], Sequence[bytes]],
        *,
        rank: int,
        num_ranks: int,
        **options: Unpack[CommOptions],
    ) -> Comm:
        """Joins through a caller's all-gather, as mpi4py's ``MPI.COMM_WORLD.allgather``.

        Args:
            all_gather: gets this rank's bytes and returns every rank's, by rank; called a few
                times, during this call only. Its exceptions are raised here. The bytes are secret.

        Other arguments and errors as of Comm.
        """
        return cls.__new__(cls)._join(
            options,
            bootstrap="all_gather",
            all_gather=all_gather,
            rank=rank,
            num_ranks=num_ranks,
        )

    @classmethod
    def from_nccl(cls, nccl_comm: int, **options: Unpack[CommOptions]) -> Comm:
        """Joins through a communicator of NCCL's, which says rank and number of ranks.

        Args:
            nccl_comm: its ncclComm_t, as a number. It stays the caller's, is used during this call
                only, and must not be used by others meanwhile. After Timeout, abort it.
            device: as of Comm, but ``"cuda"`` stands for the device of nccl_comm.

        Other arguments and errors as of Comm; Unsupported: no CUDA or no NCCL in this process.
        """
        if not isinstance(nccl_comm, int) or nccl_comm <= 0:
            raise ValueError(f"nccl_comm: expected the address of an ncclComm_t, got {nccl_comm!r}")
        return cls.__new__(cls)._join(options, bootstrap="nccl", nccl_comm=nccl_comm)

    @classmethod
    def join(
        cls,
        invitation: bytes | bytearray,
        *,
        rank: int = -1,
        timeout: float | None = None,
        name: str = "",
    ) -> Comm:
        """Takes the place of a rank whose process has ended, while the others work.

        Returns when all that live have let this process in, for which they must have agreed on a
        view without the place. Its view has only itself until `agree` takes it in. Its low-latency
        groups are made in the order of the others', whose arguments must be equal, and go on alone
        until the members set their masks and reset them.

        Args:
            invitation: from `invite` of any of them.
            rank: the place that is taken; -1 = the lowest that is free.
            timeout, name: as of Comm.

        Raises:
            InvalidArgument: no invitation, or the place's process lives.
            Mismatch: another version of the library, or another secret.
            PeerLost: none of the invitation's ranks lives, or one has ended meanwhile: try again.
            Timeout: naming the rank that has not let this process in.
        """
        options: CommOptions = {"timeout": timeout, "name": name}
        return cls.__new__(cls)._join(options, bootstrap="join", unique_id=invitation, rank=rank)

    def _join(self, options: CommOptions, **bootstrap: Any) -> Comm:
        for name in options:
            if name not in CommOptions.__annotations__:
                known = ", ".join(CommOptions.__annotations__)
                raise TypeError(f"{name}: expected no argument but {known}")
        given: dict[str, Any] = {"device": "cpu", "timeout": None, **options}
        device_type, device_id = parse_device(given.pop("device"))
        self._core = join(
            device_type=device_type,
            device_id=device_id,
            timeout_ms=milliseconds(given.pop("timeout")),
            **given,
            **bootstrap,
        )
        self._heap = Heap(self._core)
        self._closed = False
        return self

    @property
    def rank(self) -> int:
        """This rank."""
        return self._core.rank

    @property
    def num_ranks(self) -> int:
        """Ranks of the communicator."""
        return self._core.num_ranks

    @property
    def device(self) -> str:
        """The device that this rank computes on: ``"cpu"`` or ``"cuda:0"``."""
        return "cpu" if self._core.device_type == _CPU else f"cuda:{self._core.device_id}"

    @property
    def timeout(self) -> float:
        """Longest wait for a peer, in seconds."""
        return self._core.timeout_ms / 1000

    @property
    def local_ranks(self) -> int:
        """Ranks of the communicator that live in this process."""
        return self._core.local_ranks

    @property
    def num_hosts(self) -> int:
        """Hosts that the ranks have named; 1 where they have named none."""
        return self._core.num_hosts

    @property
    def host(self) -> int:
        """The number of this rank's host. Hosts are numbered by their lowest ranks."""
        return self._core.host

    @property
    def near_ranks(self) -> int:
        """Ranks on this rank's machine, which share memory with it; it is one of them."""
        return self._core.near_ranks

    @property
    def closed(self) -> bool:
        """Whether close() has been called."""
        return self._closed

    def core(self) -> _core.Comm:
        """The communicator of the raw layer. Raises InvalidArgument once closed."""
        if self._closed:
            raise InvalidArgument(
                "this communicator has been closed",
                status="XD_ERROR_INVALID_ARGUMENT",
                rank=self.rank,
            )
        return self._core

    def invite(self) -> bytes:
        """An invitation for `join`: 128 bytes, which strangers must not read.

        Good any number of times, while this rank lives or one of the next three that live now.
        For communicators with ``elastic=True``. Local; any thread.
        """
        return self.core().invite()

    def barrier(self) -> None:
        """Returns when all ranks have called it. Collective. No operation needs it."""
        self.core().barrier()

    def all_gather(self, data: bytes) -> list[bytes]:
        """Gives every rank the bytes of all, by rank. Collective; blocks on the host.

        For agreeing about sizes, exchanging addresses and the like; it is not fast.

        Args:
            data: equally long on all ranks; may be empty.

        Raises:
            Mismatch: lengths differ, or a rank is in another collective call. On all ranks.
            Timeout, PeerLost, Aborted: a rank did not come. Fatal for the communicator.
        """
        return self.core().all_gather(data)

    def abort(self) -> None:
        """Gives up.

        Every wait of this rank ends with Aborted, the peers are told, and the communicator is
        finished on all ranks. Any thread; does not block.
        """
        self.core().abort()

    def error(self) -> CrossdockError | None:
        """The fatal error of this communicator as the exception that calls raise, or None."""
        found = self.core().error()
        return None if found is None else from_details(found)

    @property
    def lost(self) -> tuple[int, ...]:
        """The ranks that take part in nothing any more, ascending.

        Their processes have ended, or they have left. Each rank learns of it by itself.
        """
        return self.core().lost()

    @property
    def view(self) -> View:
        """The latest view that this rank has found."""
        return view_of(self.core())

    def agree(
        self,
        *,
        step: int = 0,
        ok: bool = True,
        leave: bool = False,
        leave_out: Iterable[int] = (),
        timeout: float | None = None,
    ) -> View:
        """Decides on the next view with the others, of which some may end meanwhile.

        Its members are the ranks that vote by this call within ``timeout`` seconds. None: see
        xd_comm_agree. For communicators with ``on_peer_loss="mask"``; blocks on the host.

        Args:
            step, ok: this rank's, for the view's ``first_step``, ``last_step`` and ``all_ok``.
            leave: this rank wants to be no member.
            leave_out: ranks that shall be no members, though they vote.

        Raises:
            PeerLost: the others have gone on without this rank, or it cannot decide without
                those that are missing. Not fatal: called again, the rank waits to be taken in.
        """
        ms = milliseconds(timeout)
        return agree(self.core(), step=step, ok=ok, leave=leave, leave_out=leave_out, timeout_ms=ms)

    def empty(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike = np.float32) -> np.ndarray:
        """An array in symmetric memory, its content undefined.

        Operations move rows straight into and out of such arrays, and stage others. Local and
        cheap; calls need not match across ranks. The memory is given back when the last array over
        it dies; until then it stays valid, even past close().

        Args:
            shape: one number, or a tuple.
            dtype: a NumPy dtype, one of ml_dtypes, or its name, such as ``"bfloat16"``.

        Raises:
            TypeError, ValueError: `shape` is no whole numbers, or some are negative.
            OutOfMemory: with asked, largest free and total bytes; nothing is grown.
            Unsupported: this communicator is not on the CPU.
        """
        core = self.core()
        if core.device_type != _CPU:
            raise Unsupported(
                f"Comm.empty: NumPy arrays lie on the CPU, this communicator on {self.device}",
                status="XD_ERROR_UNSUPPORTED",
                rank=self.rank,
            )
        return self._heap.empty(shape, dtype)

    def grow(self, num_bytes: int) -> None:
        """Adds `num_bytes` to this rank's symmetric memory. Collective.

        The number is rounded up to pages, may differ per rank, and may be 0. Nothing moves. An
        array never spans two growths.

        Raises:
            TypeError, ValueError: on the rank with a bad number, and OutOfMemory on one that has
                none; Mismatch naming it on the others. Then no rank's memory has grown.
        """
        grow(self.core(), num_bytes)

    def routing_layout(
        self,
        topk_idx: np.ndarray,
        num_experts: int,
        expert_ranks: Sequence[int] | None = None,
    ) -> RoutingLayout:
        """Counts where this rank's tokens go, without a plan. Local: peers need not call it.

        Args:
            topk_idx: [T,K] int32 or int64, K up to 32; -1 = none. An expert's second and later
                mentions in a row, and ids out of range, count as none.
            num_experts: E; without `expert_ranks` a multiple of the number of ranks.
            expert_ranks: the rank of each expert; None = equally many on every rank, in order.

        Raises:
            TypeError, ValueError, InvalidArgument: a bad argument.
            Unsupported: this communicator is not on the CPU.
        """
        core = self.core()
        if core.device_type != _CPU:
            raise Unsupported(
                f"Comm.routing_layout: NumPy arrays lie on the CPU, this "
                f"communicator on {self.device}",
                status="XD_ERROR_UNSUPPORTED",
                rank=self.rank,
            )
        ids = describe("topk_idx", topk_idx, INDICES)
        experts = operator.index(num_experts)
        per_rank = aligned_empty(self.num_ranks, np.int64)
        # The library itself refuses a number that is no number of experts.
        per_expert = aligned_empty(max(0, min(experts, constants.MAX_EXPERTS)), np.int64)
        in_rank = np.empty((len(topk_idx), self.num_ranks), np.bool_)
        bad_ids = aligned_empty(1, np.int64)
        core.routing_layout(
            {
                "num_experts": experts,
                "topk_idx": ids,
                "rows_per_rank": describe("rows_per_rank", per_rank, INDICES),
                "rows_per_expert": describe("rows_per_expert", per_expert, INDICES),
                "token_in_rank": describe("token_in_rank", in_rank.view(np.uint8), ("uint8",)),
                "bad_ids": describe("bad_ids", bad_ids, INDICES),
                "expert_ranks": ranks_of_experts(expert_ranks, experts),
            }
        )
        return RoutingLayout(per_rank, per_expert, in_rank, int(bad_ids[0]))

    def memory(self) -> MemoryInfo:
        """The state of this rank's symmetric memory."""
        return MemoryInfo(**self.core().mem_info())

    def close(self) -> None:
        """Leaves.

        Local and bounded: says goodbye, waits for no peer, except at most a second for those that
        have not read earlier messages; peers that need this rank later get PeerLost. A second call
        does nothing. Arrays from empty() that are still alive stay valid, and the goodbye waits for
        the last of them.

        Raises:
            InvalidArgument: a call is running in another thread; abort() ends it.
        """
        if not self._closed:
            self._heap.close()
            self._closed = True

    def __enter__(self) -> Comm:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else self.device
        return f"<crossdock.Comm rank {self.rank} of {self.num_ranks}, {state}>"
