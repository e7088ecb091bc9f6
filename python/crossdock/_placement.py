"""Where experts and their replicas go: the planner of placements."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from crossdock import _core

__all__ = ["Move", "Placement", "placement_moves", "plan_placement"]

_FLOAT_BITS = 44  # of the largest load; up to 2^16 such loads stay below the library's 2^62


class Move(NamedTuple):
    """A slot that gets another expert. Slots count over all ranks: rank times slots, plus index."""

    expert: int
    from_slot: int  # where the old placement has it, on the same rank if that can be; -1 = nowhere
    to_slot: int


@dataclasses.dataclass(frozen=True)
class Placement:
    """Which slots hold which experts.

    Attributes:
        expert_of_slot: ``[ranks, slots]`` int32, the expert in each slot of each rank, -1 = empty.
        busiest_rank: the load of the busiest rank over the mean, if each expert's load is split
            evenly between its slots.
        busiest_host: the same by host.
        busiest_rank_before: the same as busiest_rank, of the current placement; 0 where there is
            none, or where it lacks an expert.
        moves: slots that get an expert which their rank did not hold before.
        doubles: slots whose expert stands in a lower slot of their rank as well.
    """

    expert_of_slot: np.ndarray
    busiest_rank: float
    busiest_host: float
    busiest_rank_before: float
    moves: int
    doubles: int

    def slots_of_experts(self) -> tuple[np.ndarray, np.ndarray]:
        """The slots of each expert, for a router that chooses among them.

        Returns:
            ``[experts, most]`` int32, the slots of each expert in ascending order and -1 behind
            them, and ``[experts]`` int32, how many each has.
        """
        slots = self.expert_of_slot.ravel()
        counts = np.bincount(slots[slots >= 0]).astype(np.int32)
        table = np.full((len(counts), counts.max()), -1, np.int32)
        for expert in range(len(counts)):
            table[expert, : counts[expert]] = np.flatnonzero(slots == expert)
        return table, counts


def plan_placement(
    loads: npt.ArrayLike,
    num_ranks: int,
    slots_per_rank: int,
    *,
    current: Placement | npt.ArrayLike | None = None,
    rank_slots: Sequence[int] | None = None,
    rank_hosts: Sequence[int] | None = None,
    max_moves: int | None = None,
    good_enough: float = 1.01,
) -> Placement:
    """Places experts, and replicas of those with large loads, in the slots of ranks.

    A pure function: ranks that give equal arguments get equal placements. The rules are those of
    ``xd_ep_plan_placement`` in placement.h.

    Args:
        loads: ``[experts]``, what each has to do, in any unit: integers or floating-point numbers,
            as a list, an array or a tensor in host memory.
        num_ranks: number of ranks.
        slots_per_rank: experts for whose weights each rank has room.
        current: today's placement, or its ``[ranks, slots]``, from which few experts are moved.
        rank_slots: how many of its slots each rank may use, the first ones; 0 = it holds nothing.
        rank_hosts: the host of each rank, from 0 to num_ranks - 1. Replicas of an expert are spread
            over hosts.
        max_moves: with `current`: the most slots that may get an expert which their rank does not
            hold yet, from 1 on; None = any number.
        good_enough: a busiest rank of so many times the mean is not worth further moves.

    Raises:
        TypeError: loads that are no real numbers.
        ValueError: loads that are negative, not finite, or of another shape; max_moves below 1.
        InvalidArgument: what the library refuses, such as more experts than slots.
    """
    whole = _whole_loads(loads)
    if max_moves is not None and max_moves < 1:
        raise ValueError(f"max_moves: expected 1 or more, or None, got {max_moves}")
    if not 1 <= good_enough <= 1000:
        raise ValueError(f"good_enough: expected 1 to 1000, got {good_enough}")
    table, info = _core.plan_placement(
        len(whole),
        num_ranks,
        slots_per_rank,
        whole,
        None if rank_slots is None else whole_numbers("rank_slots", rank_slots),
        None if rank_hosts is None else whole_numbers("rank_hosts", rank_hosts),
        None if current is None else _current(current, (num_ranks, slots_per_rank)),
        max_moves or 0,
        round(good_enough * 1000),
    )
    return Placement(np.array(table, np.int32).reshape(num_ranks, slots_per_rank), **info)


def _current(current: Placement | npt.ArrayLike, shape: tuple[int, int]) -> list[int]:
    """Slots of today's placement, of as many ranks and slots."""
    table = expert_of_slot("current", current)
    if table.shape != shape:
        raise ValueError(f"current: expected the shape {shape}, got {table.shape}")
    return list(table.ravel().tolist())


def placement_moves(old: Placement | npt.ArrayLike, new: Placement | npt.ArrayLike) -> list[Move]:
    """Lists the slots that get another expert on the way to a new placement, in ascending order.

    Every `from_slot` means what that slot holds before the first move: a slot may be read by one
    move and be overwritten by another.

    Args:
        old, new: placements, or their ``[ranks, slots]``.

    Raises:
        TypeError, ValueError: no table of whole numbers, or tables of different shapes.
    """
    before, after = expert_of_slot("old", old), expert_of_slot("new", new)
    if before.shape != after.shape:
        raise ValueError(f"new: expected the shape {before.shape} of old, got {after.shape}")
    ranks, slots = before.shape
    found = _core.placement_moves(ranks, slots, before.ravel().tolist(), after.ravel().tolist())
    return [Move(*move) for move in found]


def _whole_loads(loads: npt.ArrayLike) -> list[int]:
    """Loads as whole numbers; those of floating point in units of the largest."""
    given = np.asarray(loads)
    if given.ndim != 1:
        raise ValueError(f"loads: expected a number for each expert, got shape {given.shape}")
    if given.dtype.kind in "iu":
        return [int(load) for load in given]
    if given.dtype.kind != "f":
        raise TypeError(f"loads: expected integers or floating-point numbers, got {given.dtype}")
    real = given.astype(np.float64)
    bad = np.flatnonzero(~np.isfinite(real) | (real < 0))
    if len(bad):
        raise ValueError(f"loads[{bad[0]}]: expected 0 or more, finite, got {real[bad[0]]}")
    _, exponent = math.frexp(real.max(initial=0))
    # By powers of two and one rounding, which are the same on all machines.
    return [int(load) for load in np.rint(np.ldexp(real, _FLOAT_BITS - exponent))]


def whole_numbers(name: str, given: npt.ArrayLike) -> list[int]:
    """A list of integers of any type."""
    numbers = np.asarray(given)
    if numbers.dtype.kind not in "iu":
        raise TypeError(f"{name}: expected whole numbers, got {numbers.dtype}")
    return [int(number) for number in numbers.ravel()]


def expert_of_slot(name: str, given: Placement | npt.ArrayLike) -> np.ndarray:
    """The table of a placement, ``[ranks, slots]``."""
    table = given.expert_of_slot if isinstance(given, Placement) else np.asarray(given)
    if table.ndim != 2 or table.dtype.kind not in "iu":
        raise TypeError(
            f"{name}: expected the expert of each slot, [ranks, slots] of whole numbers, "
            f"got shape {table.shape} of {table.dtype}"
        )
    return table


def table_and_lists(
    placement: Placement | npt.ArrayLike,
    choices: Sequence[Sequence[Sequence[int]]] | None,
    sizes: tuple[int, int, int],
    name: str = "placement",
) -> tuple[list[int], tuple[list[int], list[int]] | None]:
    """The arguments of ``set_placement`` as crossdock._core takes them.

    Args:
        placement, choices: as callers give them; `name`: as they call the former.
        sizes: of the group: ranks, slots of all ranks, logical experts.

    Raises:
        TypeError, ValueError: no table, or of another size.
    """
    ranks, slots, experts = sizes
    table = expert_of_slot(name, placement)
    if table.shape != (ranks, slots // ranks):
        raise ValueError(
            f"{name}: expected the expert of each of {slots} slots, "
            f"{[ranks, slots // ranks]}, got shape {list(table.shape)}"
        )
    numbers = _of_32_bits(name, table.ravel().tolist())
    if choices is None:
        return numbers, None
    if len(choices) != ranks or any(len(lists) != experts for lists in choices):
        raise ValueError(f"choices: expected a list for each of [{ranks} ranks, {experts} experts]")
    every = [one for lists in choices for one in lists]
    flat = [whole_numbers("choices", one) if len(one) else [] for one in every]
    first = np.cumsum([0, *map(len, flat)])
    listed = _of_32_bits("choices", [slot for one in flat for slot in one])
    return numbers, (first.tolist(), listed)


def _of_32_bits(name: str, numbers: list[int]) -> list[int]:
    for number in numbers:
        if not -(1 << 31) <= number < 1 << 31:
            raise ValueError(f"{name}: expected numbers of 32 bits, got {number}")
    return numbers
