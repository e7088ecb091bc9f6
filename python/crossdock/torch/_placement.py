"""Groups with logical experts: their tables, and moving the weights of experts."""

from __future__ import annotations

import collections
import contextlib
import struct
import weakref
import zlib
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy.typing as npt
import torch
from torch import nn

from crossdock._moves import Moves, OnHost, Serving, told
from crossdock._placed import Placed, read_table
from crossdock._placement import Move, Placement
from crossdock.errors import CrossdockError, from_details, from_status

from ._calls import DTYPE_CODES, current_stream, is_capturing
from ._comm import Comm
from ._membership import Membership
from ._pool import block_bytes
from ._sharding import is_share, local_tensor

__all__ = ["ExpertMove", "PlacedGroup", "into_symmetric", "move_experts", "require_uncaptured"]

# How many states a rank has, the checksum of their names, and the bytes of those to be moved.
_STATES = struct.Struct("=qqq")

# The numbers of a group's status, which grow until it is read.
_COUNTS = ("bad_ids", "dropped_rows", "unplaced_choices")


class PlacedGroup(Membership, Placed):
    """The part of a group that knows of logical experts.

    Attributes:
        num_logical_experts: as given; 0 = ids name experts.
        placement: as of ``crossdock.EpGroup``.
    """

    _SET_PLACEMENT: ClassVar[int]
    num_experts: int
    num_logical_experts: int
    _in_order: bool  # made without expert_ranks
    layer: weakref.ref[Any] | None = None  # the MoELayer whose experts it places

    def _place_first(self, expert_ranks: Sequence[int] | None) -> None:
        """Notes the table of a new group."""
        self._counted: collections.Counter[str] = collections.Counter()
        self._in_order = expert_ranks is None
        self._place_in_order(self._placed_sizes(), expert_ranks)

    def _placed_sizes(self) -> tuple[int, int, int]:
        """Ranks, slots and logical experts."""
        return self.comm.num_ranks, self.num_experts, self.num_logical_experts

    def set_placement(
        self,
        placement: Placement | npt.ArrayLike,
        *,
        choices: Sequence[Sequence[Sequence[int]]] | None = None,
    ) -> None:
        """Makes the group route by another table. Collective, of groups with logical experts.

        When weights may be overwritten, and what becomes of plans: see
        ``crossdock.EpGroup.set_placement``. On GPUs it takes its turn on the current stream, waits
        for its end, and cannot be captured; captured graphs route by the new table when it returns.
        Before that it raises what earlier operations have met: the old table is in force then, and
        the others get Mismatch.

        Args:
            placement, choices: as there.

        Raises:
            TypeError, ValueError, InvalidArgument: a bad table, and Mismatch on the others;
                Mismatch naming the ranks whose tables differ. The old table is in force then.
            Busy: low latency: a dispatch is between its halves.
            PeerLost: ranks are lost. With ``on_peer_loss="mask"`` the new table is in force; with
                ``"resume"`` the old one, also behind `enter_view`.
        """
        if self.num_logical_experts == 0:
            self.refuse(None, ValueError, "set_placement: the group has no num_logical_experts")
        if isinstance(placement, torch.Tensor):
            placement = placement.cpu()
        try:
            given, table = read_table(placement, choices, self._placed_sizes())
        except (TypeError, ValueError) as error:
            self.refuse(self._SET_PLACEMENT, type(error), str(error))
        if self.comm.device.type != "cuda":
            return self._set_table(self.core, given, table, choices)
        if not _is_captured(self.comm.device):  # else the call refuses
            try:
                self._take_errors()  # as a status tells of one alone
            except CrossdockError as error:
                self.fail_set_placement(f"set_placement: an earlier operation met: {error}")
                raise
        core = SimpleNamespace(set_placement=self._set_on_gpu)
        self._set_table(core, given, table, choices)

    def _set_on_gpu(self, *given: Any) -> None:
        """Takes the turn on the current stream, waits for its end, and raises what it met."""
        self.core.set_placement(*given, current_stream(self.comm.device))
        self._take_errors()

    def _take_errors(self) -> None:
        """Raises what operations on the current stream have met; counts stay for `status`."""
        torch.cuda.current_stream(self.comm.device).synchronize()
        if (fatal := self.comm.core.error()) is not None:
            raise from_details(fatal)
        found = self.core.status()
        if found["status"] != "XD_SUCCESS":
            raise from_status(found, self.comm.rank)
        self._counted.update({name: found[name] for name in _COUNTS if name in found})

    def status(self) -> dict[str, Any]:
        found = super().status()
        counted, self._counted = self._counted, collections.Counter()
        return found | {name: found[name] + number for name, number in counted.items()}

    def fail_set_placement(self, problem: str) -> None:
        """Takes this rank's turn in the peers' `set_placement`, which raises Mismatch there."""
        with contextlib.suppress(CrossdockError):  # it says what the caller knows
            self.core.join_failed(self._SET_PLACEMENT, problem, current_stream(self.comm.device))
            if self.comm.device.type == "cuda":
                self._take_errors()


def move_experts(
    groups: PlacedGroup | Sequence[PlacedGroup],
    tensors: Sequence[torch.Tensor],
    old: Placement | npt.ArrayLike,
    new: Placement | npt.ArrayLike,
    *,
    choices: Sequence[Sequence[Sequence[int]]] | None = None,
    load: Callable[[int, int], object] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> list[Move]:
    """Moves experts' weights to where `new` has them, and makes groups route by it.

    ``crossdock.move_experts`` of torch's tensors, on the communicator's device; it says more.
    Values alone are written, which autograd does not see. On GPUs copies go by copy engines on a
    stream of the library's own; it waits for them, and for the current stream.

    Args:
        groups: with logical experts, whose placement is `old`; several of one communicator, as for
            prefill and decode, that serve the same experts.
        tensors: weights, ``[slots, ...]`` each, contiguous, in symmetric memory
            (`empty_symmetric`).
        old, new, choices, load: as there.
        optimizer: all tensors are parameters of, whose states of them move along: those of
            ``[slots, ...]``, such as moments. One element for all slots, such as a number of
            steps, stays. The first call puts states into symmetric memory. `load` writes those of
            its experts as well. Gradients do not move: call it behind ``step()`` and
            ``zero_grad()``.

    Raises:
        TypeError, ValueError: also an optimizer that does not have a tensor, states that do not
            lie by slots or are no plain tensors, or other states on another rank. As there.
    """
    several = _several(groups)
    named = _named(tensors)
    if optimizer is not None:
        named |= _states(several[0].comm, optimizer, tensors)
    whole = Moves(*_move_of(several, named, (old, new), choices, load, None))
    whole.step()
    return whole.moves


class ExpertMove(Moves):
    """`move_experts` in steps of few bytes, between which groups go on serving.

    ``crossdock.ExpertMove`` of torch's tensors; it says more. On GPUs steps copy beside what the
    current stream does, and the last one waits for both. Not for training: weights stay as they are
    until it is done. Writes that autograd would notice are found; those through ``.data`` or NumPy,
    and to inference tensors, are not.

    Args:
        groups, tensors, old, new, choices, load: as of `move_experts`; collective likewise.
        bytes_per_step: what a rank copies in a step, at most; None = all in one.

    Attributes:
        moves: into this rank's slots.
        done: whether the new placement is in force.

    Raises:
        As `move_experts`. ValueError: bytes_per_step.
    """

    def __init__(
        self,
        groups: PlacedGroup | Sequence[PlacedGroup],
        tensors: Sequence[torch.Tensor],
        old: Placement | npt.ArrayLike,
        new: Placement | npt.ArrayLike,
        *,
        bytes_per_step: int | None = None,
        choices: Sequence[Sequence[Sequence[int]]] | None = None,
        load: Callable[[int, int], object] | None = None,
    ) -> None:
        self._named, placements = _named(tensors), (old, new)
        super().__init__(
            *_move_of(_several(groups), self._named, placements, choices, load, bytes_per_step)
        )

    def _marks(self) -> object:
        every = self._named.values()
        return [(one.data_ptr(), one.is_inference() or one._version) for one in every]


def _several(groups: PlacedGroup | Sequence[PlacedGroup]) -> tuple[PlacedGroup, ...]:
    several = (groups,) if isinstance(groups, PlacedGroup) else tuple(groups)
    if not several:
        raise ValueError("groups: expected one or more, got none")
    return several


def _named(tensors: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"tensors[{i}]": one for i, one in enumerate(tensors)}


def _move_of(
    groups: Sequence[PlacedGroup],
    named: dict[str, torch.Tensor],
    placements: tuple[Placement | npt.ArrayLike, Placement | npt.ArrayLike],
    choices: Sequence[Sequence[Sequence[int]]] | None,
    load: Callable[[int, int], object] | None,
    bytes_per_step: int | None,
) -> tuple[Any, ...]:
    """The arguments of `Moves` for tensors, by names for errors."""
    comm = groups[0].comm
    on_gpu = comm.device.type == "cuda"

    def views(num_slots: int) -> list[Any]:
        bytes_of = [_bytes_of(name, one, num_slots, comm.device) for name, one in named.items()]
        return bytes_of if on_gpu else [one.numpy() for one in bytes_of]

    serving = [
        Serving(one, one.comm, one.core, one._placed_sizes(), one._in_order) for one in groups
    ]
    kind = _OnGpu(comm) if on_gpu else OnHost()
    return comm.core, kind, serving, views, placements, choices, load, bytes_per_step


class _OnGpu(OnHost):
    """Tensors ``[bytes]`` uint8 on a communicator's GPU; copies go beside the current stream."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm

    @property
    def stream(self) -> int:
        return self._comm.beside.cuda_stream

    def address(self, weights: torch.Tensor) -> int:
        return weights.data_ptr()

    def empty_like(self, weights: torch.Tensor) -> torch.Tensor:
        with torch.cuda.stream(self._comm.beside):  # the memory is its own until `wait` returns
            return torch.empty_like(weights)

    def write(self, slot: torch.Tensor, weights: torch.Tensor) -> None:
        with torch.inference_mode():  # weights may be tensors of that mode
            slot.copy_(weights)

    def wait(self) -> None:
        require_uncaptured(self._comm.device, "move_experts, ExpertMove")
        self.wait_for_copies()
        torch.cuda.current_stream(self._comm.device).synchronize()

    def wait_for_copies(self) -> None:
        self._comm.beside.synchronize()


def _is_captured(device: torch.device) -> bool:
    """Whether the device's current stream is, whichever device is the current one."""
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):
        return is_capturing(device)


def require_uncaptured(device: torch.device, call: str) -> None:
    """Refuses a call that waits for the current stream while that is captured."""
    if _is_captured(device):
        raise ValueError(f"{call}: expected a current stream that is not captured into a graph")


def _states_by_slot(
    optimizer: torch.optim.Optimizer, tensors: Sequence[torch.Tensor]
) -> dict[str, torch.Tensor]:
    """An optimiser's states by slot of these tensors, in their order, by names for errors.

    Raises:
        TypeError, ValueError: a tensor is no parameter of it, or has a state that cannot move.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer: expected one of torch's, got {type(optimizer).__name__}")
    parameters = {
        local_tensor(one).data_ptr(): one
        for group in optimizer.param_groups
        for one in group["params"]
    }
    found = {}
    for i, tensor in enumerate(tensors):
        if not isinstance(tensor, torch.Tensor):
            continue  # an error that comes
        parameter = parameters.get(tensor.data_ptr())
        if parameter is None or local_tensor(parameter).shape != tensor.shape:
            raise ValueError(f"tensors[{i}]: expected a parameter of the optimizer, got another")
        for name, state in sorted(optimizer.state.get(parameter, {}).items()):
            if not isinstance(state, torch.Tensor) or state.numel() == 1:
                continue  # one for all slots, such as a number of steps
            what = f"optimizer.state of tensors[{i}]: {name!r}"
            if is_share(state) or type(state) is not torch.Tensor:
                raise TypeError(f"{what}: expected a plain tensor, got {type(state).__name__}")
            if state.shape[:1] != tensor.shape[:1] or state.dtype not in DTYPE_CODES:
                raise TypeError(
                    f"{what}: expected [{len(tensor)}, ...] of other dtypes, "
                    f"got {tuple(state.shape)}, {state.dtype}"
                )
            found[what] = state
    return found


@torch.no_grad()
def _states(
    comm: Comm, optimizer: torch.optim.Optimizer, tensors: Sequence[torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The same where peers can read them. Collective."""
    with told(comm.core):
        found = _states_by_slot(optimizer, tensors)
        elsewhere = [state for state in found.values() if not comm.pool.owns(state)]
        names = zlib.crc32("\n".join(found).encode())
        num_bytes = sum(block_bytes(state.nbytes) for state in elsewhere)
        mine = _STATES.pack(len(found), names, num_bytes)
    every = [_STATES.unpack(one) for one in comm.core.all_gather(mine)]
    if len({names for _, names, _ in every}) > 1:
        numbers = [number for number, *_ in every]
        raise ValueError(f"optimizer: expected equal states on all ranks, got {numbers} of them")
    if any(num_bytes for *_, num_bytes in every):
        comm.reserve(every[comm.rank][2])
    for state in elsewhere:
        state.data = comm.empty_symmetric(tuple(state.shape), state.dtype).copy_(state)
    return found


@torch.no_grad()
def into_symmetric(module: nn.Module, comm: Comm) -> None:
    """Moves a module's parameters to where peers can read them. Collective."""
    parameters = list(module.parameters())
    comm.reserve(sum(block_bytes(one.nbytes) for one in parameters))
    for parameter in parameters:
        shape = tuple(parameter.shape)
        parameter.data = comm.empty_symmetric(shape, parameter.dtype).copy_(parameter)


def _bytes_of(
    name: str, tensor: torch.Tensor, num_slots: int, device: torch.device
) -> torch.Tensor:
    """A view ``[slots, bytes]`` of weights."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(tensor).__name__}")
    if tensor.device != device:
        raise ValueError(f"{name}: expected a tensor on {device}, got one on {tensor.device}")
    if tensor.dim() < 1 or tensor.shape[0] != num_slots:
        raise ValueError(f"{name}: expected [{num_slots}, ...], got shape {tuple(tensor.shape)}")
    if not tensor.is_contiguous():
        raise ValueError(f"{name}: expected a contiguous tensor")
    return tensor.data.reshape(num_slots, -1).view(torch.uint8)  # of which autograd knows nothing
