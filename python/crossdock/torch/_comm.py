"""Communicators made from torch.distributed, from torchrun's environment, or of one rank."""

from __future__ import annotations

import atexit
import functools
import importlib
import itertools
import os
import threading
import weakref
from collections.abc import Callable, Iterable
from contextlib import nullcontext, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from crossdock import _core
from crossdock._comm_arguments import PeerLoss, join as meet, milliseconds
from crossdock._core import constants
from crossdock._view import View, agree, view_of
from crossdock.errors import Unsupported

from ._calls import DTYPE_CODES, current_stream
from ._launcher import require_no_other_launcher
from ._mesh_place import names_of
from ._pool import SymmetricPool
from ._weak_group import WeakGroup, empty_meshes, remembered

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Comm", "default_comm", "empty_symmetric", "init", "join", "open_comms"]

_GROWTHS_FOR_ONE = 32  # growths of symmetric memory that provide for one group

_default: Comm | None = None
_made: weakref.WeakValueDictionary[int, Comm] = weakref.WeakValueDictionary()
_numbers = itertools.count()


class Comm:
    """A set of ranks, each with its device, and this rank's pool of symmetric memory.

    Made by `init` or `join`. EpGroups and tensors of the pool keep it alive.

    Attributes:
        rank: this rank.
        num_ranks: number of ranks.
        device: the torch device that this rank computes on.
        process_group: the torch.distributed group of the same ranks; None without one. It is not
            kept: when torch.distributed has destroyed it, and nobody else holds it, reading it
            raises RuntimeError.
        mesh: the DeviceMesh of these ranks over which a layer's experts are sharded; None without a
            process group, and of one rank.
        replicas: the process group of the ranks that hold the same experts, or the same parts of
            layers of tensor parallelism, as the caller sets it, also by a mesh of one dimension;
            else None. Of models of `data_parallel` it need not be set. Not kept either.
        pool: where tensors in symmetric memory come from.
        contexts: of products, by their bounds, which layers share; see ``crossdock.torch.tp``.
        core: the communicator of the extension.
    """

    process_group = WeakGroup()
    replicas = WeakGroup()

    def __init__(
        self,
        core: _core.Comm,
        device: torch.device,
        process_group: ProcessGroup | None,
        mesh: DeviceMesh | None = None,
    ) -> None:
        self.core = core
        self.device = device
        self.process_group = process_group
        self.replicas = None
        self._mesh = None if mesh is None else remembered(mesh)
        self.rank: int = core.rank
        self.num_ranks: int = core.num_ranks
        self.pool = SymmetricPool(core, device)
        self.contexts: dict[Any, Any] = {}
        self._growths = 0
        self._groups_provided = 0
        self._missing_bytes = 0
        _made[next(_numbers)] = self

    @functools.cached_property
    def beside(self) -> torch.cuda.Stream:
        """On a GPU: a stream of the library, for copies beside what the current one does."""
        return torch.cuda.Stream(self.device)

    @property
    def mesh(self) -> DeviceMesh | None:
        """See the class."""
        if self.num_ranks > 1 and self._mesh is None and self.process_group is not None:
            from torch.distributed.device_mesh import DeviceMesh

            mesh = DeviceMesh.from_group(self.process_group, self.device.type)
            self._mesh = remembered(mesh)
        return self._mesh if self.num_ranks > 1 else None

    def empty_symmetric(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor of undefined content in symmetric memory. Local.

        It lies in ordinary memory when the pool is exhausted; results are the same, and operations
        copy it. Its memory is used again when the tensor, and its last view, have died.

        Args:
            shape: any, usually ``[R, H]`` with R = ``EpGroup.rows``; it may differ per rank.
            dtype: bfloat16, float16, float32, fp8, int8, uint8, int32 or int64.

        Raises:
            TypeError, ValueError: another dtype; a size below 0.
            InvalidArgument: the communicator has been closed.
            RuntimeError: torch's, if ordinary memory is exhausted as well.
        """
        if dtype not in DTYPE_CODES:
            known = ", ".join(map(str, DTYPE_CODES))
            raise TypeError(f"dtype: expected one of {known}; got {dtype}")
        if any(size < 0 for size in shape):
            raise ValueError(f"shape: expected sizes from 0 on, got {tuple(shape)}")
        return self.pool.empty(shape, dtype)

    def record_stream(self, tensor: torch.Tensor, stream: torch.cuda.Stream) -> None:
        """``tensor.record_stream(stream)`` that also knows tensors in symmetric memory.

        Needed where a tensor that the library made is used on another stream than the one that was
        current when it was made, and dropped before that use has ended.
        """
        self.pool.record_stream(tensor, stream)

    def reserve(self, num_bytes: int) -> None:
        """Adds symmetric memory to the pool. Collective, blocking; may differ per rank.

        Raises:
            TypeError, ValueError: a bad number (Mismatch on the others); nothing has grown.
            OutOfMemory: this rank has no memory left (Mismatch on the others); nothing has grown.
        """
        self.pool.reserve(num_bytes)

    def provide(self, num_bytes: int) -> None:
        """Adds symmetric memory for one more group. Collective, blocking; may differ per rank.

        A communicator can grow 4096 times and have more groups than that: from the 32nd on, growths
        provide ever more groups to come, of the size of the present one.
        """
        missing = self._missing_bytes + num_bytes
        if self._groups_provided:
            self._groups_provided -= 1
            self._missing_bytes = missing
            return
        ahead = max(0, self._growths - _GROWTHS_FOR_ONE)
        # Nothing where larger groups have been provided for than came.
        granted = max(0, missing + ahead * num_bytes)
        self.reserve(granted)
        self._growths += 1
        self._groups_provided = ahead
        self._missing_bytes = missing - granted

    def invite(self) -> bytes:
        """An invitation for `join`; see ``crossdock.Comm.invite``. Local; any thread.

        Raises:
            InvalidArgument: the communicator is not elastic, or has one rank.
        """
        return self.core.invite()

    def barrier(self) -> None:
        """Returns when all ranks have called it. It waits for no CUDA stream."""
        self.core.barrier()

    def all_gather(self, data: bytes) -> list[bytes]:
        """Gives every rank the bytes of all, by rank; see ``crossdock.Comm.all_gather``."""
        return self.core.all_gather(data)

    @property
    def lost(self) -> tuple[int, ...]:
        """The ranks that take part in nothing any more, ascending; see ``crossdock.Comm.lost``."""
        return self.core.lost()

    @property
    def view(self) -> View:
        """The latest view that this rank has found."""
        return view_of(self.core)

    def agree(
        self,
        *,
        step: int = 0,
        ok: bool = True,
        leave: bool = False,
        leave_out: Iterable[int] = (),
        timeout: float | None = None,
    ) -> View:
        """Decides on the next view with the others; see ``crossdock.Comm.agree``.

        It waits for no CUDA stream, and refuses while the current one is captured.
        """
        return agree(
            self.core,
            step=step,
            ok=ok,
            leave=leave,
            leave_out=leave_out,
            timeout_ms=milliseconds(timeout),
            stream=current_stream(self.device),
        )

    def abort(self) -> None:
        """Gives up: releases every wait of this rank and finishes the communicator everywhere."""
        self.core.abort()

    def close(self) -> None:
        """Leaves. Local and bounded; on a GPU it waits for the device's work first.

        Does nothing the second time. Tensors in symmetric memory stay good: with some alive, the
        communicator is left when the last of them dies.
        """
        global _default
        if _default is self:
            _default = None
        if self.device.type == "cuda" and not self.core.closed:
            torch.cuda.synchronize(self.device)
        self.contexts.clear()
        self.pool.close()

    def __deepcopy__(self, memo: dict[int, object]) -> Comm:
        """Itself: what is copied with a model, for an average of its parameters say, shares it."""
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a Comm belongs to its process and cannot be pickled: save model.state_dict(), "
            "or use torch.distributed.checkpoint, rather than the model itself"
        )

    def __enter__(self) -> Comm:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Comm(rank={self.rank}, num_ranks={self.num_ranks}, device={self.device})"


def open_comms() -> list[Comm]:
    """The communicators of this process that have not been closed, in the order of their making."""
    return [comm for comm in _made.values() if not comm.core.closed]


@atexit.register
def _finish_work() -> None:
    """Runs before the extension leaves, at exit, what is still open: no operation may run then.

    Operations of a finished communicator end by themselves. It is not waited for, since others'
    kernels on its device, such as a collective of NCCL's that needs the rank that was lost, may
    never end. Threads of groups that torch.distributed has destroyed end here, too.
    """
    for comm in open_comms():
        if comm.device.type == "cuda" and comm.core.error() is None:
            with suppress(RuntimeError):  # a device that is lost has nothing running
                torch.cuda.synchronize(comm.device)
    empty_meshes()


def init(
    process_group: ProcessGroup | DeviceMesh | None = None,
    device: torch.device | str | None = None,
    *,
    heap_bytes: int = 0,
    timeout: float | timedelta | None = None,
    name: str = "",
    on_peer_loss: PeerLoss = "fatal",
    host: str | None = None,
    net_interface: str | None = None,
    silence_ms: int = 0,
    elastic: bool = False,
) -> Comm:
    """Joins a communicator. Collective, blocking.

    The ranks are those of `process_group`, of any backend; without one those of torch.distributed's
    default group if it is initialised; else those of torchrun's environment (``RANK``,
    ``WORLD_SIZE``, ``MASTER_ADDR``, ``MASTER_PORT``); else one rank, unless mpirun or srun have
    started several. The first communicator that is open serves every EpGroup that names none.

    Args:
        process_group: torch.distributed group whose members call this; or a DeviceMesh of one
            dimension, such as ``mesh["expert"]``, which FSDP over another dimension needs.
        device: what this rank computes on; None = ``cuda:LOCAL_RANK`` where the library can use
            CUDA, else the CPU. The same kind on all ranks.
        heap_bytes: symmetric memory to begin with; EpGroups add what they need.
        timeout: longest wait for a peer, here and in every operation, in seconds; None = the
            environment's ``XD_TIMEOUT_MS``, else 10 minutes.
        name: shown in logs and behind error texts; needed where several communicators meet through
            the environment at the same time. Equal on all ranks. By default of a mesh that is part
            of another one the indices of the other dimensions, such as ``"data=1"``. Errors that
            end waits tell the global rank beside the rank where the two differ.
        on_peer_loss, host, net_interface, silence_ms, elastic: as of ``crossdock.Comm``.

    Raises:
        TypeError, ValueError: a bad argument; of `heap_bytes` the others hear by Mismatch.
        RuntimeError: another launcher than torchrun has started several ranks, and
            torch.distributed, through which they could meet, is not initialised.
        CrossdockError: see ``crossdock.errors``: Timeout names the ranks that did not come;
            Unsupported says what this machine lacks.
    """
    where = _device(device)
    options: dict[str, Any] = {
        "device_type": constants.DEVICE_TYPES[where.type],
        "device_id": where.index or 0,
        "heap_bytes": heap_bytes,
        "timeout_ms": _milliseconds(timeout),
        "name": name,
        "on_peer_loss": on_peer_loss,
        "host": host,
        "net_interface": net_interface,
        "silence_ms": silence_ms,
        "elastic": elastic,
    }
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if process_group is None and distributed:
        process_group = torch.distributed.group.WORLD
    process_group, mesh = _group_and_mesh(process_group)
    if process_group is not None:
        options |= names_of(process_group, mesh, name)
    _import_compiler()
    if process_group is not None:
        core = _meet_through(process_group, where, options)
    elif "WORLD_SIZE" in os.environ:
        core = meet(bootstrap="environment", **options)
    else:
        require_no_other_launcher()
        core = meet(
            bootstrap="unique_id", rank=0, num_ranks=1, unique_id=_core.unique_id(), **options
        )
    return _as_default(Comm(core, where, process_group, mesh))


def join(
    invitation: bytes, *, rank: int = -1, timeout: float | timedelta | None = None, name: str = ""
) -> Comm:
    """Takes the place of a rank whose process has ended, while the others work. On the CPU.

    Blocking; not collective: the others call nothing. It returns when all that live have let this
    process in, for which they must have agreed on a view without the place. The view has only this
    rank until `Comm.agree` takes it in. The communicator is the default if no other is open. It has
    no process group and no mesh, and serves LowLatencyGroups with masks alone, made in the order of
    the others': collective calls, EpGroups, layers and products raise Unsupported.

    Args:
        invitation: from `Comm.invite` of any of them.
        rank: the place that is taken; -1 = the lowest that is free.
        timeout: longest wait for a peer, here and in every operation, in seconds; as of `init`.
        name: shown in logs and behind error texts.

    Raises:
        TypeError, ValueError: an argument of a wrong kind; a timeout out of range.
        InvalidArgument: no invitation, no such place, or the place's process lives.
        Mismatch: another version of the library, or another secret.
        PeerLost: none of the invitation's ranks lives, or one has ended meanwhile: try again.
        Timeout: naming the rank that has not let this process in.
        Unsupported: the system cannot tell the end of the place's process.
    """
    _import_compiler()
    core = meet(
        bootstrap="join",
        unique_id=invitation,
        rank=rank,
        device_type=constants.DEVICE_TYPES["cpu"],
        device_id=0,
        timeout_ms=_milliseconds(timeout),
        name=name,
    )
    return _as_default(Comm(core, torch.device("cpu"), None))


def _as_default(comm: Comm) -> Comm:
    """Notes a new communicator as the default, where there is none."""
    global _default
    if _default is None:
        _default = comm
    return comm


def _import_compiler() -> None:
    """To be called before ranks meet: what takes seconds on a slow disk peers must not wait for.

    torch imports its compiler when an operator that compilers must not look into is first called.
    """
    importlib.import_module("torch._dynamo")


def default_comm() -> Comm:
    """The communicator that EpGroups use when none is named.

    Raises:
        RuntimeError: `init` has not been called, or what it gave has been closed.
    """
    if _default is None:
        raise RuntimeError("no communicator: call crossdock.torch.init() first, on all ranks")
    return _default


def empty_symmetric(
    shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16, *, comm: Comm | None = None
) -> torch.Tensor:
    """A contiguous tensor of undefined content in symmetric memory, on this rank's device. Local.

    `Comm.empty_symmetric`, which says more, of `comm`, or of the default communicator.

    Raises:
        RuntimeError: there is no default communicator.
        TypeError, ValueError, InvalidArgument: as of the method.
    """
    return (comm or default_comm()).empty_symmetric(shape, dtype)


def _meet_through(
    process_group: ProcessGroup, device: torch.device, options: dict[str, Any]
) -> _core.Comm:
    dist = torch.distributed
    size = dist.get_world_size(process_group)

    def gather(piece: bytes, pieces: list[bytes]) -> None:
        # Object collectives of NCCL go through the current CUDA device.
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            dist.all_gather_object(pieces, piece, group=process_group)

    def all_gather(piece: bytes) -> list[bytes]:
        pieces: list[bytes] = [b""] * size
        _on_a_thread(lambda: gather(piece, pieces))
        return pieces

    return meet(
        bootstrap="all_gather",
        rank=dist.get_rank(process_group),
        num_ranks=size,
        all_gather=all_gather,
        **options,
    )


def _on_a_thread(work: Callable[[], None]) -> None:
    """Runs it where Ctrl-C need not wait for its end, as torch's own waits let it."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join()
    if failures:
        raise failures[0]


def _group_and_mesh(given: Any) -> tuple[ProcessGroup | None, DeviceMesh | None]:
    """The process group and the mesh of either, or of None."""
    if not hasattr(given, "get_group"):
        return given, None
    if given.ndim != 1:
        raise ValueError(f"process_group: expected a mesh of one dimension, got {given}")
    return given.get_group(), given


def _device(given: torch.device | str | None) -> torch.device:
    """The device with its index."""
    if given is None:
        local_rank = os.environ.get("LOCAL_RANK", "0")
        if not local_rank.isdecimal():
            problem = f"expected a number, got {local_rank!r}"
            raise ValueError(f"LOCAL_RANK in the environment: {problem}")
        usable = torch.cuda.is_available() and _core.feature_available("cuda")
        return torch.device("cuda", int(local_rank)) if usable else torch.device("cpu")
    device = torch.device(given)
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device: expected a CPU or CUDA device, got {device}")
    if device.type == "cuda" and not torch.cuda.is_available():
        problem = f"PyTorch {torch.__version__} can use no CUDA device here"
        raise Unsupported(f"device: {device}: {problem}", status="XD_ERROR_UNSUPPORTED")
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _milliseconds(timeout: float | timedelta | None) -> int:
    if timeout is None:
        return 0
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
    if not 0 < seconds < 2**31 / 1000:
        raise ValueError(f"timeout: expected seconds above 0 and below 2147483, got {timeout}")
    return max(1, round(seconds * 1000))
