"""The routing of one batch, as tensors."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from ._group import EpGroup

__all__ = ["Plan", "PlanParts"]

_ALIGNED = 4  # int32 elements in 16 bytes, where every part begins


class PlanParts:
    """Where a plan's counts lie in one int32 tensor."""

    def __init__(self, num_local_experts: int, num_ranks: int) -> None:
        sizes = (num_local_experts, num_local_experts, 1, num_ranks**2)
        places = [(size + _ALIGNED - 1) // _ALIGNED * _ALIGNED for size in sizes]
        starts = [0, *itertools.accumulate(places)]
        self.num_elements = starts[-1]
        self.num_ranks = num_ranks
        self.counts, self.padded_counts, self.total, self.rank_rows = (
            slice(start, start + size) for start, size in zip(starts, sizes)
        )


class Plan:
    """The plan that `EpGroup.prepare` makes: the place of every row of a batch.

    A plan carries the order of its operations: each one takes `order` and leaves a new one, so that
    autograd and compilers see one chain. A caller that reads counts on a GPU waits for the device.

    Attributes:
        group: its EpGroup, which it keeps alive.
        data: the routing, opaque, uint8.
        info: all counts below, int32.
        offsets: ``[L + 1]`` int32: first row of each expert's zone, and the end of the last.
        order: 1 element float32 that stands for the operations so far; its value is 0.
        num_tokens: T of this rank.
        topk: K.
    """

    def __init__(
        self,
        group: EpGroup,
        data: torch.Tensor,
        info: torch.Tensor,
        offsets: torch.Tensor,
        order: torch.Tensor,
        num_tokens: int,
        topk: int,
    ) -> None:
        self.group = group
        self.data = data
        self.info = info
        self.offsets = offsets
        self.order = order
        self.num_tokens = num_tokens
        self.topk = topk

    @property
    def counts(self) -> torch.Tensor:
        """``[L]`` int32: rows per local expert without padding (rank_major: pairs)."""
        return self.info[self.group.plan_parts.counts]

    @property
    def padded_counts(self) -> torch.Tensor:
        """``[L]`` int32: rows per local expert with padding."""
        return self.info[self.group.plan_parts.padded_counts]

    @property
    def ends(self) -> torch.Tensor:
        """``[L]`` int32: one past the last row of each expert's zone; ``offsets[1:]``, copied.

        The boundaries for ``torch.bucketize`` and ``torch.searchsorted``, which torch 2.11 compiles
        wrongly for slices; `row_experts` is what they would compute.
        """
        return torch.ops.crossdock.zone_ends.default(self.offsets)

    @property
    def total(self) -> torch.Tensor:
        """``[1]`` int32: rows that this rank needs, padding included, before any are dropped."""
        return self.info[self.group.plan_parts.total]

    @property
    def rank_rows(self) -> torch.Tensor:
        """``[W, W]`` int32: rows that source s puts into the receive tensor of destination d."""
        parts = self.group.plan_parts
        return self.info[parts.rank_rows].view(parts.num_ranks, parts.num_ranks)

    def row_experts(self, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        """``[R]``: the local expert of each row of a receive tensor, padding included, else -1.

        In expert_major; in rank_major `Dispatched.topk_idx` says it. Local, without a gradient;
        also under ``torch.compile`` and in CUDA graphs.

        Args:
            dtype: torch.int64 or torch.int32.

        Raises:
            ValueError: the layout is rank_major, or another dtype.
        """
        if self.group.layout == "rank_major":
            raise ValueError(
                "row_experts: expected a plan of an expert_major group, got one of rank_major, "
                "where a row stands for several experts; Dispatched.topk_idx has them"
            )
        if dtype not in (torch.int32, torch.int64):
            raise ValueError(f"dtype: expected torch.int64 or torch.int32, got {dtype}")
        wide = dtype == torch.int64
        return torch.ops.crossdock.row_experts.default(self.data, self.group.handle, wide)

    def detach(self) -> Plan:
        """The same routing with an order of its own.

        For another backward pass over a plan: without it, the second would go through the
        operations of the first.
        """
        order = self.order.detach()
        counts = self.info, self.offsets
        return Plan(self.group, self.data, *counts, order, self.num_tokens, self.topk)

    def overwrite(self, other: Plan) -> Plan:
        """Put `other` into the memory of this plan.

        Raises:
            ValueError: it has another shape or group.
        """
        mine = (self.group.handle, self.num_tokens, self.topk)
        theirs = (other.group.handle, other.num_tokens, other.topk)
        if mine != theirs:
            raise ValueError(
                f"out: expected a plan with (group, tokens, topk) = {theirs}, got {mine}"
            )
        # In place: the version counters of these tensors tell a backward pass that saved them.
        self.data.copy_(other.data)
        self.info.copy_(other.info)
        self.offsets.copy_(other.offsets)
        self.order = other.order
        return self
