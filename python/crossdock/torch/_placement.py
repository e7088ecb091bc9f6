"""Groups with logical experts: their tables, and moving the weights of experts."""

from __future__ import annotations

import contextlib
import struct
import weakref
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from crossdock._moves import Serving, move, told
from crossdock._placed import Placed, read_table
from crossdock._placement import Move, Placement
from crossdock.errors import CrossdockError

from ._calls import DTYPE_CODES
from ._comm import Comm
from ._membership import Membership
from ._pool import block_bytes

__all__ = ["PlacedGroup", "into_symmetric", "move_experts"]

_STATES = struct.Struct("=qq")  # how many states a rank has, and the bytes of those to be moved


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
        ``crossdock.EpGroup.set_placement``.

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
        try:
            given, table = read_table(placement, choices, self._placed_sizes())
        except (TypeError, ValueError) as error:
            self.refuse(self._SET_PLACEMENT, type(error), str(error))
        self._set_table(self.core, given, table, choices)

    def fail_set_placement(self, problem: str) -> None:
        """Takes this rank's turn in the peers' `set_placement`, which raises Mismatch there."""
        with contextlib.suppress(CrossdockError):  # it says what the caller knows
            self.core.join_failed(self._SET_PLACEMENT, problem)


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

    ``crossdock.move_experts`` of torch's tensors, on the CPU; it says more. Values alone are
    written, which autograd does not see.

    Args:
        groups: with logical experts, whose placement is `old`; several of one communicator, as for
            prefill and decode, that serve the same experts.
        tensors: weights, ``[slots, ...]`` each, contiguous, in symmetric memory
            (`empty_symmetric`).
        old, new, choices, load: as there.
        optimizer: whose states of these tensors move along: those with the shape of their
            parameter, such as moments. The first call puts them into symmetric memory. `load`
            writes the states of its experts as well.

    Raises:
        TypeError, ValueError: also another optimizer, or one with other numbers of states on
            another rank. As there.
    """
    several = (groups,) if isinstance(groups, PlacedGroup) else tuple(groups)
    if not several:
        raise ValueError("groups: expected one or more, got none")

    comm = several[0].comm
    named = {f"tensors[{i}]": one for i, one in enumerate(tensors)}
    if optimizer is not None:
        named |= _states(comm, optimizer, tensors)

    def views(num_slots: int) -> list[np.ndarray]:
        return [_bytes_of(name, one, num_slots) for name, one in named.items()]

    serving = [
        Serving(one, one.comm, one.core, one._placed_sizes(), one._in_order) for one in several
    ]
    return move(comm.core, serving, views, (old, new), choices, load)


@torch.no_grad()
def _states(
    comm: Comm, optimizer: torch.optim.Optimizer, tensors: Sequence[torch.Tensor]
) -> dict[str, torch.Tensor]:
    """An optimiser's states by slot, by names for errors, where peers can read them. Collective."""
    with told(comm.core):
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"optimizer: expected one of torch's, got {type(optimizer).__name__}")
        shapes = {one.data_ptr(): one.shape for one in tensors if isinstance(one, torch.Tensor)}
        found = {
            f"optimizer.state[{i}][{name!r}]": state
            for i, (parameter, states) in enumerate(optimizer.state.items())
            if shapes.get(parameter.data_ptr()) == parameter.shape
            for name, state in states.items()
            if isinstance(state, torch.Tensor) and state.shape == parameter.shape
        }
        elsewhere = [state for state in found.values() if not comm.pool.owns(state)]
        for state in elsewhere:
            if state.dtype not in DTYPE_CODES:
                raise TypeError(f"optimizer: expected states of other dtypes, got {state.dtype}")
        mine = _STATES.pack(len(found), sum(block_bytes(state.nbytes) for state in elsewhere))
    every = [_STATES.unpack(one) for one in comm.core.all_gather(mine)]
    numbers = [number for number, _ in every]
    if len(set(numbers)) > 1:
        raise ValueError(f"optimizer: expected as many states on all ranks, got {numbers}")
    if any(num_bytes for _, num_bytes in every):
        comm.reserve(every[comm.rank][1])
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


def _bytes_of(name: str, tensor: torch.Tensor, num_slots: int) -> np.ndarray:
    """A view ``[slots, bytes]`` of weights."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(tensor).__name__}")
    if tensor.device.type != "cpu":
        raise ValueError(f"{name}: expected a tensor on the CPU, got one on {tensor.device}")
    if tensor.dim() < 1 or tensor.shape[0] != num_slots:
        raise ValueError(f"{name}: expected [{num_slots}, ...], got shape {tuple(tensor.shape)}")
    if not tensor.is_contiguous():
        raise ValueError(f"{name}: expected a contiguous tensor")
    return tensor.detach().reshape(num_slots, -1).view(torch.uint8).numpy()
