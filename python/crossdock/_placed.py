"""The table by which a group routes logical experts, as its rank knows it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from crossdock._placement import Placement, expert_of_slot, table_and_lists
from crossdock.errors import PeerLost

__all__ = ["Choices", "Placed", "digest_of", "read_table"]

Choices = Sequence[Sequence[Sequence[int]]]


class Placed:
    """The part of a group, of arrays of any kind, that knows its table.

    Attributes:
        placement: the table in force, ``[ranks, slots]`` int32; None without logical experts, and
            with ``expert_ranks`` until the first `set_placement`.
        choices: the lists in force, as `set_placement` was given them.
        table: a digest of `placement`.
    """

    placement: np.ndarray | None = None
    choices: Choices | None = None
    table = ""
    _first_table = ""
    # Whether a loss that is not fatal leaves the old table in force: low latency masks the rank and
    # has the new one.
    _BREAKS: ClassVar[bool] = False

    @property
    def has_moved(self) -> bool:
        """Whether another table is in force than that of a new group."""
        return self.table != self._first_table

    def _place_in_order(self, sizes: tuple[int, int, int], expert_ranks: object) -> None:
        """Notes the table of a new group of so many ranks, slots and logical experts."""
        ranks, slots, experts = sizes
        if expert_ranks is not None or experts == 0:
            return
        table = np.arange(slots)
        table[experts:] = -1
        self._note_table(table.reshape(ranks, -1), None)
        self._first_table = self.table

    def _note_table(self, table: npt.ArrayLike, choices: Choices | None) -> None:
        self.placement, self.choices = np.array(table, np.int32), choices
        self.table = digest_of(self.placement).hex()

    def _set_table(
        self, core: Any, given: tuple[Any, Any], table: np.ndarray, choices: Choices | None
    ) -> None:
        """Takes the turn of all ranks, and notes what is in force then."""
        try:
            core.set_placement(*given)
        except PeerLost as error:
            if not error.fatal and not self._BREAKS:
                self._note_table(table, choices)
            raise
        self._note_table(table, choices)


def read_table(
    placement: Placement | npt.ArrayLike, choices: Choices | None, sizes: tuple[int, int, int]
) -> tuple[tuple[Any, Any], np.ndarray]:
    """The arguments of a raw group's ``set_placement``, and its table ``[ranks, slots]``."""
    given = table_and_lists(placement, choices, sizes)
    return given, expert_of_slot("placement", placement)


def digest_of(table: np.ndarray) -> bytes:
    """Eight bytes, equal for equal tables."""
    whole = np.ascontiguousarray(table, np.int64)
    return hashlib.blake2b(repr(table.shape).encode() + whole.tobytes(), digest_size=8).digest()
