"""The routing of one batch."""

from __future__ import annotations

import dataclasses

import numpy as np

from crossdock import _core
from crossdock._arrays import Spec, describe

__all__ = ["Plan", "SlotPlan"]


@dataclasses.dataclass(frozen=True)
class _PlanBytes:
    """Bytes that are a plan, in host memory."""

    data: np.ndarray

    def place(self, name: str = "plan") -> Spec:
        """The plan's bytes, as crossdock._core takes them.

        Args:
            name: of the argument that this plan is, for errors.

        Raises:
            TypeError, ValueError: `data` is no array of contiguous bytes.
        """
        return describe(f"{name}.data", self.data, ("uint8",))

    def info(self) -> dict[str, int]:
        """The plan's own numbers.

        They are rank, num_ranks, num_experts, num_tokens, topk, recv_rows, bad_ids, bad_id_rank,
        fingerprint and epoch; of a Plan also layout, alignment, total_rows, capacity_rows,
        overflow_rank and parts.

        Raises:
            InvalidArgument: `data` holds no such plan of this library version.
        """
        return self._read(self.place()[0], self.data.nbytes)

    @staticmethod
    def _read(address: int, size: int) -> dict[str, int]:
        return _core.plan_info(address, size)

    @property
    def num_tokens(self) -> int:
        """T: tokens of this rank."""
        return self.info()["num_tokens"]

    @property
    def topk(self) -> int:
        """K: choices per token."""
        return self.info()["topk"]


@dataclasses.dataclass(frozen=True)
class Plan(_PlanBytes):
    """The routing of one batch, made by EpGroup.prepare, or by EpGroup.empty_plan to be filled.

    W ranks, L local experts. Nothing is kept in the group, so that any number of plans may be in
    use at a time, and copies of one serve as well.

    Attributes:
        data: uint8 bytes of the plan; it holds no pointer.
        counts: [L] int64 rows per local expert (rank_major: pairs of token and expert), without
            padding and dropped rows.
        padded_counts: [L] int64, the same with padding.
        offsets: [L+1] int64 first row of each zone, and the end of the last.
        total: [1] int64 rows that this rank would need, padding included, before any drop.
        rank_rows: [W,W] int64 rows that each source puts into each destination.
    """

    counts: np.ndarray
    padded_counts: np.ndarray
    offsets: np.ndarray
    total: np.ndarray
    rank_rows: np.ndarray

    @property
    def recv_rows(self) -> int:
        """R: rows that a receive array needs, padding included and dropped rows excluded."""
        return self.info()["recv_rows"]


@dataclasses.dataclass(frozen=True)
class SlotPlan(_PlanBytes):
    """The routing of one batch, made by `LowLatencyGroup.dispatch`.

    Nothing is kept in the group, so that any number of plans may be in use at a time, and copies of
    one serve as well.

    Attributes:
        data: uint8 bytes of the plan; it holds no pointer.
    """

    @staticmethod
    def _read(address: int, size: int) -> dict[str, int]:
        return _core.ll_plan_info(address, size)
