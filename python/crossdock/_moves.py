"""Moves experts' weights to the slots where another placement has them."""

from __future__ import annotations

import collections
import contextlib
import operator
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from crossdock import _core
from crossdock._group import EpGroup
from crossdock._low_latency import LowLatencyGroup
from crossdock._membership import of_kind
from crossdock._placed import Choices, digest_of
from crossdock._placement import (
    Move,
    Placement,
    expert_of_slot,
    placement_moves,
    table_and_lists,
)
from crossdock.errors import Busy, CrossdockError, PeerLost

__all__ = ["ExpertMove", "Moves", "OnHost", "Serving", "move_experts", "told"]


class OnHost:
    """A move treats weights of one kind by this: NumPy arrays ``[bytes]``, or their like."""

    @property
    def stream(self) -> int:
        """The one that copies follow."""
        return 0

    def address(self, weights: Any) -> int:
        """Where they are."""
        return int(weights.ctypes.data)

    def empty_like(self, weights: Any) -> Any:
        """As many bytes elsewhere."""
        return np.empty_like(weights)

    def write(self, slot: Any, weights: Any) -> None:
        """Copies bytes into a slot."""
        slot[:] = weights

    def wait(self) -> None:
        """Returns when what was enqueued so far, on `stream` or by the caller, has been done."""

    def wait_for_copies(self) -> None:
        """The same on `stream` alone."""


class Moving:
    """Weights on their way from the slots of one placement to those of another.

    Making one exchanges addresses, and is collective. `pull` copies what this rank's slots need,
    and overwrites no slot that is in use. When all ranks have all of it, `finish` writes the rest.

    Args:
        comm: a rank's communicator.
        kind: of the tensors.
        tensors: ``[slots, bytes]`` uint8 each, C-contiguous, in symmetric memory.
        old, new: ``[ranks, slots]``, equal on all ranks.

    Raises:
        InvalidArgument: a tensor lies elsewhere. ValueError: its slots have another size on another
            rank, or `old` or `new` differs there. Mismatch: another rank has other numbers of
            tensors, or has raised.
    """

    _TABLES = struct.Struct("=8s8s")
    _PLACE = struct.Struct("=iQQ")

    def __init__(
        self,
        comm: _core.Comm,
        kind: OnHost,
        tensors: Sequence[Any],
        old: np.ndarray,
        new: np.ndarray,
    ) -> None:
        self._comm, self._kind, self._tensors, self._old = comm, kind, tensors, old
        with told(comm):
            own = [(*comm.mem_export(kind.address(one))[1:], one.shape[1]) for one in tensors]
            kind.wait()  # peers read what has been written here
        mine = self._TABLES.pack(digest_of(old), digest_of(new))
        every = comm.all_gather(mine + b"".join(self._PLACE.pack(*place) for place in own))
        tables = [self._TABLES.unpack_from(of_rank) for of_rank in every]
        for name, digests in zip(("old", "new"), zip(*tables, strict=True), strict=True):
            for rank, digest in enumerate(digests):
                if digest != digests[0]:
                    raise ValueError(
                        f"{name}: expected equal placements on all ranks, got another on rank "
                        f"{rank} than on rank 0"
                    )
        places = [of_rank[self._TABLES.size :] for of_rank in every]
        self._places = [list(self._PLACE.iter_unpack(of_rank)) for of_rank in places]
        sizes = [[place[2] for place in places] for places in self._places]
        for rank, of_rank in enumerate(sizes):
            if of_rank != sizes[0]:
                raise ValueError(
                    f"arrays: slots have {sizes[0]} bytes on rank 0 and {of_rank} on rank {rank}"
                )
        moves = placement_moves(old, new)
        self.moves = [move for move in moves if move.to_slot // old.shape[1] == comm.rank]
        self._staged: list[tuple[Any, Any]] = []
        self._missing = collections.deque(self._pieces())

    def _pieces(self) -> Iterator[tuple[Any, bool, int, int, int]]:
        """Slots, whether they are in use, and the rank, segment and offset of their weights."""
        num_slots = self._old.shape[1]
        for move in self.moves:
            if move.from_slot < 0:
                continue
            rank, index = divmod(move.from_slot, num_slots)
            in_use = bool(self._old.flat[move.to_slot] >= 0)
            for tensor, (segment, offset, size) in zip(self._tensors, self._places[rank]):
                yield tensor[move.to_slot % num_slots], in_use, rank, segment, offset + index * size

    def pull(self, most_bytes: int | None) -> bool:
        """Copies weights, no more than so many bytes of them; returns whether all are there.

        Into slots that are empty, and into staging for the others.
        """
        kind, room = self._kind, most_bytes
        while self._missing and room != 0:
            to, in_use, rank, segment, offset = self._missing.popleft()
            if in_use:
                self._staged.append((to, kind.empty_like(to)))
                to = self._staged[-1][1]
            size = len(to) if room is None else min(room, len(to))
            self._comm.mem_copy(kind.address(to), rank, segment, offset, size, kind.stream)
            if size < len(to):
                self._missing.appendleft((to[size:], False, rank, segment, offset + size))
            room = None if room is None else room - size
        if self._missing:
            return False
        kind.wait_for_copies()
        return True

    def abandon(self) -> None:
        """Returns when no copy is under way any more."""
        self._kind.wait_for_copies()

    def finish(self) -> None:
        """Writes what was staged."""
        try:
            for slot, weights in self._staged:
                self._kind.write(slot, weights)
        finally:
            self._kind.wait()  # staging is free when this returns
        self._staged.clear()

    def load(self, load: Callable[[int, int], object], *, into_empty: bool) -> None:
        """Lets `load` write experts that were in no slot, into slots that were empty or others."""
        for one in self.moves:
            if one.from_slot < 0 and (self._old.flat[one.to_slot] < 0) == into_empty:
                load(one.expert, one.to_slot % self._old.shape[1])


@contextlib.contextmanager
def told(comm: _core.Comm) -> Iterator[None]:
    """Lets the peers, which gather bytes next, hear of a mistake that is found before."""
    try:
        yield
    except Exception:
        with contextlib.suppress(CrossdockError):  # the caller has to hear of the mistake
            comm.all_gather(b"!")  # they have another number of bytes
        raise


def move_experts(
    group: EpGroup | LowLatencyGroup,
    arrays: Sequence[np.ndarray],
    old: Placement | npt.ArrayLike,
    new: Placement | npt.ArrayLike,
    *,
    choices: Choices | None = None,
    load: Callable[[int, int], object] | None = None,
) -> list[Move]:
    """Moves experts' weights to where `new` has them, and makes the group route by it.

    Collective, between batches: none that was prepared before may still wait for its experts. Each
    rank copies what it needs out of the others' memory, straight into slots that were empty, and
    through staging into others. For ranks of one machine.

    Args:
        group: with logical experts and without ``expert_ranks``, whose placement is `old`.
        arrays: weights, ``[slots, ...]`` each, C-contiguous, in symmetric memory (``comm.empty``).
        old, new: placements, equal on all ranks.
        choices: as of ``set_placement``.
        load: called as ``load(expert, slot)`` for each slot of this rank, from 0 on, whose expert
            was in no slot: it writes the weights from elsewhere. Slots that were empty come before
            the table changes, others behind that. None = there is no such expert.

    Returns:
        The moves into this rank's slots.

    Raises:
        TypeError, ValueError, InvalidArgument: a bad argument, and Mismatch on the other ranks;
            ValueError on all where `old` or `new` differ. No slot in use has changed then, and
            `old` is in force. So it is after an exception of `load` for a slot that was empty.
        Unsupported: weights lie on another machine.
        Busy: as ``set_placement``, and Mismatch on the other ranks, if it is not full of halves.
        PeerLost: ranks are lost. If they were in the turn of a group that masks, `new` is in force,
            and all weights are in their slots. If that group resumes, or they were lost before it,
            no slot in use has changed, and `old` is in force; of several groups that resume, those
            whose turn had ended keep `new`, as their ``placement`` says: set `old` on all of them
            behind ``enter_view``.
        Exceptions of `load` for a slot that was in use leave `new` in force. That slot, and those
        that it was not yet called for, hold other experts, or parts of one.
    """
    whole = ExpertMove(group, arrays, old, new, choices=choices, load=load)
    whole.step()
    return whole.moves


class Serving(NamedTuple):
    """A group whose experts move, of arrays of any kind."""

    group: Any  # has set_placement, fail_set_placement, placement and choices
    comm: object
    core: Any  # its part of the raw layer
    sizes: tuple[int, int, int]  # ranks, slots, logical experts
    in_order: bool  # made without expert_ranks

    def check(self, old: np.ndarray) -> None:
        """Refuses a group whose experts cannot move from where `old` has them."""
        if self.core.closed:
            raise ValueError("group: expected one that is open, got one that was closed")
        if self.sizes[2] == 0:
            raise ValueError("group: expected one with num_logical_experts, got one without")
        if not self.in_order:
            raise ValueError("group: expected slots in order, got a group with expert_ranks")
        if not np.array_equal(self.group.placement, old):
            raise ValueError("old: expected the group's placement, got another")


class Moves:
    """`ExpertMove`, of tensors of any kind.

    Args:
        comm: of the first group.
        kind: of the weights.
        groups: all of which route by the placements.
        views: gives the weights as ``[slots, bytes]`` uint8, for so many slots of each rank.
        placements: the old one and the new one.
        choices, load, bytes_per_step: as of `ExpertMove`.
    """

    def __init__(
        self,
        comm: _core.Comm,
        kind: OnHost,
        groups: Sequence[Serving],
        views: Callable[[int], Sequence[Any]],
        placements: tuple[Placement | npt.ArrayLike, Placement | npt.ArrayLike],
        choices: Choices | None,
        load: Callable[[int, int], object] | None,
        bytes_per_step: int | None,
    ) -> None:
        with told(comm):
            if bytes_per_step is not None:
                bytes_per_step = _whole("bytes_per_step", bytes_per_step)
            old, new = (  # the caller's may change before the last step
                np.array(expert_of_slot(name, one))
                for name, one in zip(("old", "new"), placements, strict=True)
            )
            for group in groups:
                if group.comm is not groups[0].comm or group.sizes != groups[0].sizes:
                    raise ValueError(
                        "groups: expected one communicator and equal numbers of experts"
                    )
                group.check(old)
            _check_new(old, new, choices, groups[0].sizes, load is not None)
            tensors = views(old.shape[1])
        self._comm, self._groups, self._choices, self._load = comm, groups, choices, load
        self._bytes_per_step, self._loaded = bytes_per_step, False
        self._old, self._new = old, new
        self._in_force = [one.group.placement for one in groups]  # set anew, it is another object
        self._first_marks = self._marks()
        self._moving: Moving | None = Moving(comm, kind, tensors, old, new)
        self.moves: list[Move] = self._moving.moves
        self.done = False

    def step(self) -> bool:
        """Copies some bytes; when all ranks have all, makes the groups route by the new placement.

        Collective. It does nothing when `done`.

        Returns:
            `done`.

        Raises:
            ValueError: a group's table has been set since, or weights are seen to have been
                written, and Mismatch on the other ranks; or an earlier step has raised.
            As `move_experts`. The move has ended then.
        """
        if self.done:
            return True
        moving, self._moving = self._moving, None  # back in place if all goes well
        if moving is None:  # as on all ranks
            raise ValueError("step: expected a move whose steps have not raised")
        try:
            with told(self._comm):
                ready = self._prepare(moving)
            every = self._comm.all_gather(b"done" if ready else b"more")
        except BaseException:
            moving.abandon()
            raise
        if any(one != b"done" for one in every):
            self._moving = moving
            return False
        lost = _take_turns([one.group for one in self._groups], self._new, self._choices)
        self.done = True
        moving.finish()
        if self._load is not None:
            moving.load(self._load, into_empty=False)
        if lost is not None:
            raise lost
        return True

    def _prepare(self, moving: Moving) -> bool:
        """Copies, and loads what comes from elsewhere; whether nothing of it is missing."""
        for group, placement in zip(self._groups, self._in_force):
            group.check(self._old)
            if group.group.placement is not placement:
                raise ValueError("group: expected the table of the first step, got one set since")
        if self._marks() != self._first_marks:
            raise ValueError("weights: expected those of the first step, got some written since")
        ready = moving.pull(self._bytes_per_step)
        if ready and self._load is not None and not self._loaded:
            moving.load(self._load, into_empty=True)
            self._loaded, self._first_marks = True, self._marks()
        return ready

    def _marks(self) -> object:
        """Gives a value that another one follows where weights are seen to be written."""
        return None


def _whole(name: str, number: object) -> int:
    """A number of bytes."""
    try:
        whole = 0 if isinstance(number, bool) else operator.index(number)  # type: ignore[arg-type]
    except TypeError:
        whole = 0
    if whole < 1:
        raise ValueError(f"{name}: expected an int above 0, got {number}")
    return whole


class ExpertMove(Moves):
    """`move_experts` in steps of few bytes, between which the group goes on serving.

    Each step copies into empty slots and into staging, which batches do not read. The last one, the
    same on all ranks, changes the table, and writes what was staged into its slots. Weights must
    stay as they are until then, which is not checked. Without the last step nothing has changed but
    slots that are empty.

    Args:
        group, arrays, old, new, choices, load: as of `move_experts`; collective likewise.
        bytes_per_step: what a rank copies in a step, at most; None = all in one.

    Attributes:
        moves: into this rank's slots.
        done: whether the new placement is in force.

    Raises:
        As `move_experts`. ValueError: bytes_per_step.
    """

    def __init__(
        self,
        group: EpGroup | LowLatencyGroup,
        arrays: Sequence[np.ndarray],
        old: Placement | npt.ArrayLike,
        new: Placement | npt.ArrayLike,
        *,
        bytes_per_step: int | None = None,
        choices: Choices | None = None,
        load: Callable[[int, int], object] | None = None,
    ) -> None:
        if not isinstance(group, (EpGroup, LowLatencyGroup)):
            raise TypeError(f"group: expected a group, got {type(group).__name__}")

        def views(num_slots: int) -> list[np.ndarray]:
            return [_bytes_of(f"arrays[{i}]", one, num_slots) for i, one in enumerate(arrays)]

        config = group.config
        sizes = (group.comm.num_ranks, config.num_experts, config.num_logical_experts)
        serving = Serving(group, group.comm, group._core, sizes, config.expert_ranks is None)
        comm = group.comm.core()
        given = (views, (old, new), choices, load, bytes_per_step)
        super().__init__(comm, OnHost(), [serving], *given)


def _check_new(
    old: np.ndarray,
    new: np.ndarray,
    choices: Choices | None,
    sizes: tuple[int, int, int],
    loads: bool,
) -> None:
    table_and_lists(new, choices, sizes, "new")
    if new.max() >= sizes[2]:
        raise ValueError(f"new: expected logical experts, 0 to {sizes[2] - 1}, got {new.max()}")
    nowhere = [move.expert for move in placement_moves(old, new) if move.from_slot < 0]
    if nowhere and not loads:
        raise ValueError(f"old: expected a slot of expert {nowhere[0]}, or load, got neither")


def _take_turns(groups: list[Any], table: np.ndarray, choices: Choices | None) -> PeerLost | None:
    """Lets groups route by a table, or none of them; an error after which all do so.

    None, but for those that resume and had their turn before a loss broke that of another.
    """
    lost = None
    done: list[tuple[Any, np.ndarray, Choices | None]] = []
    for group in groups:
        before = (group, group.placement, group.choices)
        try:
            group.set_placement(table, choices=choices)
        except CrossdockError as error:
            if isinstance(error, PeerLost):
                if error.fatal:
                    raise
                if np.array_equal(group.placement, table):  # it masks
                    lost = lost or error
                    done.append(before)
                    continue
            if isinstance(error, Busy):  # of which peers have not heard
                group.fail_set_placement(f"move_experts: {error}")
            for earlier, old, lists in done:
                with contextlib.suppress(CrossdockError):  # the caller has to hear of `error`
                    earlier.set_placement(old, choices=lists)
            raise
        done.append(before)
    return lost


def _bytes_of(name: str, array: np.ndarray, num_slots: int) -> np.ndarray:
    """A view ``[slots, bytes]`` of weights."""
    of_kind(name, array, np.ndarray)
    if array.ndim < 1 or len(array) != num_slots:
        raise ValueError(f"{name}: expected [{num_slots}, ...], got shape {array.shape}")
    if not array.flags.c_contiguous or not array.flags.writeable:
        raise ValueError(f"{name}: expected a C-contiguous array that can be written")
    return array.reshape(num_slots, -1).view(np.uint8)
