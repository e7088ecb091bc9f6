"""The common part of groups and contexts of NumPy arrays: their life, errors and arguments."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, ClassVar, Generic, TypeVar, cast

import numpy as np
import numpy.typing as npt

from crossdock import _core
from crossdock._arrays import Spec, aligned_empty, describe
from crossdock._comm import Comm
from crossdock._config import EpConfig, LowLatencyConfig, fail_group
from crossdock._placed import Placed, read_table
from crossdock._placement import Placement
from crossdock._stats import GroupStats, group_stats
from crossdock.errors import (
    CrossdockError,
    OutOfMemory,
    Unsupported,
    in_words,
    operation_word,
)

__all__ = ["EpStatus", "LowLatencyStatus", "Member", "Membership", "of_kind", "optional"]


_Config = TypeVar("_Config", EpConfig, LowLatencyConfig)
_Status = TypeVar("_Status")


@dataclasses.dataclass(frozen=True)
class EpStatus:
    """The non-fatal error state of an EpGroup since it was last read.

    Operations on the CPU raise their errors, which are not repeated here: only numbers are left.
    """

    status: str  # name of the first error's status; "XD_SUCCESS" = none
    operation: str | None  # the operation that met it, as of CrossdockError; None = no error
    epoch: int  # its number in the group, from 1
    rank: int  # the lowest rank it is about; -1 = none
    bad_ids: int  # expert ids out of range or repeated in a row, over all ranks
    needed_rows: int  # overflow: padded rows that `rank` would have received ...
    capacity_rows: int  # ... and its capacity
    dropped_rows: int  # rows this rank did not receive, with overflow="drop"
    text: str
    unplaced_choices: int  # of this rank, whose logical expert had no slot: they count as -1


@dataclasses.dataclass(frozen=True)
class LowLatencyStatus:
    """The same of a LowLatencyGroup, and which ranks are masked now."""

    status: str
    operation: str | None
    epoch: int  # the operation's number among those of its kind, from 1
    rank: int
    bad_ids: int
    masked: tuple[int, ...]  # ranks that this rank has masked,
    masked_by: tuple[int, ...]  # and those that have said that they have masked this rank
    text: str
    unplaced_choices: int


class Member:
    """This rank's part of a group or of a context. A context manager."""

    _core: Any  # the one of the raw layer

    def __init__(self, comm: Comm) -> None:
        of_kind("comm", comm, Comm)
        if comm.device != "cpu":
            raise Unsupported(
                f"{type(self).__name__}: NumPy arrays lie on the CPU, the communicator on "
                f"{comm.device}",
                status="XD_ERROR_UNSUPPORTED",
                rank=comm.rank,
            )
        self._comm = comm

    @property
    def comm(self) -> Comm:
        """The communicator."""
        return self._comm

    def errors(self) -> int:
        """How many operations of this rank have ended with a non-fatal error; any thread."""
        return self._core.errors()

    def stats(self) -> GroupStats:
        """The numbers of its work so far; any thread, never blocks."""
        return group_stats(self._core.stats(), first_operation=self._core.FIRST_OPERATION)

    def set_name(self, name: str) -> None:
        """Names it for people who look: ``crossdock top``, traces, profilers, XD_LOG=stats. Local.

        A name is cut off behind 63 bytes.
        """
        self._core.set_name(name)

    def close(self) -> None:
        """Frees its memory. Local; before or after the communicator's close().

        Raises:
            InvalidArgument: an operation is running in another thread.
        """
        self._core.close()

    def __enter__(self: _AnyMember) -> _AnyMember:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> np.ndarray:
        """A new output: in symmetric memory while it lasts, else in ordinary memory."""
        try:
            return self._comm.empty(shape, dtype)
        except OutOfMemory:
            return aligned_empty(shape, dtype)

    @contextlib.contextmanager
    def _naming(self, call: str) -> Iterator[None]:
        """Puts the call and the rank into the text of a mistake that is found in Python."""
        try:
            yield
        except (TypeError, ValueError) as error:
            if type(error) in (TypeError, ValueError):  # the library's texts have both
                rank, num_ranks = self._comm.rank, self._comm.num_ranks
                error.args = (f"{call}: {error} [rank {rank} of {num_ranks}]",)
            raise

    @contextlib.contextmanager
    def _joining(self, operation: int) -> Iterator[None]:
        """Tells the peers at once of a mistake that is found before the call can be made."""
        self._comm.core()
        with self._naming(str(operation_word(operation))):
            try:
                yield
            except Exception as error:
                with contextlib.suppress(CrossdockError):  # the caller has to hear of `error`
                    self._core.join_failed(operation, str(error))
                raise


class Membership(Member, Placed, Generic[_Config, _Status]):
    """This rank's part of a group.

    Attributes:
        placement: the table in force, as of `set_placement`, ``[ranks, slots]`` int32; None without
            logical experts, and with ``expert_ranks`` until the first call.
    """

    _MAKE: ClassVar[type[_core.Group] | type[_core.LowLatencyGroup]]
    _CONFIG: ClassVar[type[EpConfig] | type[LowLatencyConfig]]
    _STATUS: ClassVar[type[EpStatus] | type[LowLatencyStatus]]
    _SET_PLACEMENT: ClassVar[int]

    def __init__(self, comm: Comm, config: _Config) -> None:
        super().__init__(comm)
        self._core = self._make(config)
        self._config: _Config = config
        self._plan_size = config.plan_size(comm.num_ranks)
        self._place_in_order(self._placed_sizes(), config.expert_ranks)

    def _make(self, config: _Config) -> Any:
        """The group of the raw layer; of a mistake that is found in Python the peers hear."""
        core = self._comm.core()
        try:
            return self._MAKE(core, **of_kind("config", config, self._CONFIG).options())
        except CrossdockError:  # the library has told them
            raise
        except Exception:
            fail_group(core, self._MAKE)
            raise

    @property
    def config(self) -> _Config:
        """The sizes the group was made with."""
        return self._config

    def set_placement(
        self,
        placement: Placement | npt.ArrayLike,
        *,
        choices: Sequence[Sequence[Sequence[int]]] | None = None,
    ) -> None:
        """Makes the group route by another table. Collective, of groups with logical experts.

        Until the first call expert e is in slot e. Plans made before stay good. When it returns no
        rank routes by the old table any more, and what each rank did before its call is done. The
        weights of a slot may be overwritten only when no batch that was prepared before still waits
        for its experts.

        Args:
            placement: the expert in each slot, ``[ranks, slots]``, -1 = empty. An expert may have
                no slot: choices of it count as -1, and `status` counts them.
            choices: ``choices[s][e]``: the slots that tokens of rank s which choose expert e take
                in turn; None, and for each empty list: those of the own rank, else all.

        Raises:
            TypeError, ValueError, InvalidArgument: a bad table, and Mismatch on the others;
                Mismatch naming the ranks whose tables differ. The old table is in force then.
            Busy: low latency: a dispatch is between its halves.
            PeerLost: ranks are lost. With ``on_peer_loss="mask"`` the new table is in force; with
                ``"resume"`` the old one, also behind `enter_view`.
        """
        if self._config.num_logical_experts == 0:
            raise ValueError("set_placement: the group's config has no num_logical_experts")
        with self._joining(self._SET_PLACEMENT):
            given, table = read_table(placement, choices, self._placed_sizes())
        self._set_table(self._core, given, table, choices)

    def _placed_sizes(self) -> tuple[int, int, int]:
        """Ranks, slots and logical experts."""
        config = self._config
        return self._comm.num_ranks, config.num_experts, config.num_logical_experts

    def fail_set_placement(self, problem: str) -> None:
        """Takes this rank's turn in the peers' `set_placement`, which raises Mismatch there."""
        with contextlib.suppress(CrossdockError):  # it says what the caller knows
            self._core.join_failed(self._SET_PLACEMENT, problem)

    def status(self) -> _Status:
        """Reads and clears the group's non-fatal error state. Never blocks."""
        return cast(_Status, self._STATUS(**in_words(self._core.status())))


_AnyMember = TypeVar("_AnyMember", bound=Member)
_Kind = TypeVar("_Kind")


def of_kind(name: str, value: Any, kind: type[_Kind]) -> _Kind:
    """The value of the argument `name`. Raises TypeError where it is none of the kind."""
    if not isinstance(value, kind):
        article = "an" if kind.__name__[0] in "AEIOU" else "a"
        raise TypeError(f"{name}: expected {article} {kind.__name__}, got {type(value).__name__}")
    return value


def optional(
    name: str, array: Any, dtypes: Sequence[str], *, write: bool = False, strided: bool = False
) -> Spec | None:
    """`describe`, or None for None."""
    if array is None:
        return None
    return describe(name, array, dtypes, write=write, strided=strided)
