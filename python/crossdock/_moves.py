"""Moves experts' weights to the slots where another placement has them."""

from __future__ import annotations

import contextlib
import functools
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from crossdock import _core
from crossdock._group import EpGroup
from crossdock._low_latency import LowLatencyGroup
from crossdock._membership import of_kind
from crossdock._placement import Move, Placement, expert_of_slot, placement_moves
from crossdock.errors import CrossdockError

__all__ = ["Turn", "move", "move_experts"]


class Moving:
    """Weights on their way from the slots of one placement to those of another.

    Making one exchanges addresses, and is collective. `pull` copies what this rank's slots need,
    and overwrites no slot that is in use. When all ranks have done so, `finish` writes the rest.

    Args:
        comm: a rank's communicator on the CPU.
        tensors: ``[slots, bytes]`` uint8 each, C-contiguous, in symmetric memory.
        old, new: ``[ranks, slots]``, equal on all ranks.

    Raises:
        InvalidArgument: a tensor lies elsewhere. ValueError: its slots have another size on another
            rank. Mismatch: another rank has other numbers of tensors, or has raised.
    """

    _PLACE = struct.Struct("=iQQ")

    def __init__(
        self,
        comm: _core.Comm,
        tensors: Sequence[np.ndarray],
        old: np.ndarray,
        new: np.ndarray,
    ) -> None:
        self._comm, self._tensors, self._old = comm, tensors, old
        with told(comm):
            own = [(*comm.mem_export(one.ctypes.data)[1:], one.shape[1]) for one in tensors]
        every = comm.all_gather(b"".join(self._PLACE.pack(*place) for place in own))
        self._places = [list(self._PLACE.iter_unpack(of_rank)) for of_rank in every]
        sizes = [[place[2] for place in places] for places in self._places]
        for rank, of_rank in enumerate(sizes):
            if of_rank != sizes[0]:
                raise ValueError(
                    f"arrays: slots have {sizes[0]} bytes on rank 0 and {of_rank} on rank {rank}"
                )
        moves = placement_moves(old, new)
        self.moves = [move for move in moves if move.to_slot // old.shape[1] == comm.rank]
        self._staged: list[tuple[np.ndarray, np.ndarray]] = []

    def pull(self) -> None:
        """Copies weights into slots that are empty, and for the others into staging."""
        num_slots = self._old.shape[1]
        for move in self.moves:
            if move.from_slot < 0:
                continue
            rank, index = divmod(move.from_slot, num_slots)
            for tensor, (segment, offset, size) in zip(self._tensors, self._places[rank]):
                to = tensor[move.to_slot % num_slots]
                if self._old.flat[move.to_slot] >= 0:
                    self._staged.append((to, np.empty_like(to)))
                    to = self._staged[-1][1]
                self._comm.mem_copy(to.ctypes.data, rank, segment, offset + index * size, size)

    def finish(self) -> None:
        """Writes what was staged."""
        for slot, weights in self._staged:
            slot[:] = weights
        self._staged.clear()


@contextlib.contextmanager
def told(comm: _core.Comm) -> Iterator[None]:
    """Lets the peers hear of a mistake that is found before a `Moving` can be made."""
    try:
        yield
    except Exception:
        with contextlib.suppress(CrossdockError):  # the caller has to hear of the mistake
            comm.all_gather(b"!")  # no place has so many bytes
        raise


def move_experts(
    group: EpGroup | LowLatencyGroup,
    arrays: Sequence[np.ndarray],
    old: Placement | npt.ArrayLike,
    new: Placement | npt.ArrayLike,
    *,
    choices: Sequence[Sequence[Sequence[int]]] | None = None,
    load: Callable[[int, int], object] | None = None,
) -> list[Move]:
    """Moves experts' weights to where `new` has them, and makes the group route by it.

    Collective, between batches: none that was prepared before may still wait for its experts. Each
    rank copies what it needs out of the others' memory, straight into slots that were empty, and
    through staging into others. For ranks of one machine.

    Args:
        group: with logical experts, whose placement is `old`.
        arrays: weights, ``[slots, ...]`` each, C-contiguous, in symmetric memory (``comm.empty``).
        old, new: placements, equal on all ranks.
        choices: as of ``set_placement``.
        load: called as ``load(expert, slot)`` for each slot of this rank, from 0 on, whose expert
            was in no slot: it writes the weights from elsewhere. None = there is no such expert.

    Returns:
        The moves into this rank's slots.

    Raises:
        TypeError, ValueError, InvalidArgument: a bad argument, and Mismatch on the other ranks. No
            slot in use has changed then, and `old` is in force.
        Unsupported: weights lie on another machine.
        As ``set_placement``.
    """
    if not isinstance(group, (EpGroup, LowLatencyGroup)):
        raise TypeError(f"group: expected a group, got {type(group).__name__}")

    def views(num_slots: int) -> list[np.ndarray]:
        return [_bytes_of(f"arrays[{i}]", one, num_slots) for i, one in enumerate(arrays)]

    turn = Turn(functools.partial(group.set_placement, choices=choices), group.fail_set_placement)
    return move(group.comm.core(), views, (old, new), turn, load)


class Turn(NamedTuple):
    """The turn of a group in which ranks change tables."""

    take: Callable[[np.ndarray], None]
    fail: Callable[[str], None]  # takes it with this mistake, which the peers hear of


def move(
    comm: _core.Comm,
    views: Callable[[int], list[np.ndarray]],
    placements: tuple[Placement | npt.ArrayLike, Placement | npt.ArrayLike],
    turn: Turn,
    load: Callable[[int, int], object] | None,
) -> list[Move]:
    """`move_experts`, of tensors of any kind.

    Args:
        views: gives them as ``[slots, bytes]`` uint8, for so many slots of each rank.
        placements: the old one and the new one.
        turn: of all groups which route by them.
    """
    with told(comm):
        old, new = (
            expert_of_slot(name, one) for name, one in zip(("old", "new"), placements, strict=True)
        )
        _check_tables(old, new, comm.num_ranks, load is not None)
        tensors = views(old.shape[1])
    moving = Moving(comm, tensors, old, new)
    try:
        moving.pull()
    except Exception as error:  # the peers are in their turn
        turn.fail(f"move_experts: {error}")
        raise
    turn.take(new)
    moving.finish()
    for one in moving.moves:
        if one.from_slot < 0 and load is not None:
            load(one.expert, one.to_slot % old.shape[1])
    return moving.moves


def _check_tables(old: np.ndarray, new: np.ndarray, num_ranks: int, loads: bool) -> None:
    for name, table in (("old", old), ("new", new)):
        if len(table) != num_ranks:
            raise ValueError(f"{name}: expected the slots of {num_ranks} ranks, got {len(table)}")
    nowhere = [move.expert for move in placement_moves(old, new) if move.from_slot < 0]
    if nowhere and not loads:
        raise ValueError(f"old: expected a slot of expert {nowhere[0]}, or load, got neither")


def _bytes_of(name: str, array: np.ndarray, num_slots: int) -> np.ndarray:
    """A view ``[slots, bytes]`` of weights."""
    of_kind(name, array, np.ndarray)
    if array.ndim < 1 or len(array) != num_slots:
        raise ValueError(f"{name}: expected [{num_slots}, ...], got shape {array.shape}")
    if not array.flags.c_contiguous or not array.flags.writeable:
        raise ValueError(f"{name}: expected a C-contiguous array that can be written")
    return array.reshape(num_slots, -1).view(np.uint8)
