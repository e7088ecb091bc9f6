"""A workload's operations on NumPy arrays in symmetric memory."""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any

import numpy as np

import crossdock
from crossdock.cli import _engine
from crossdock.cli._engine import Call, Share, Tell, Timed
from crossdock.cli._workload import Workload, volume

_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


class NumpyEngine:
    """Implements `Engine` by crossdock.EpGroup."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        rank_rows = volume(workload)
        capacity = max(rank_rows.received)
        self._comm = comm = crossdock.Comm.from_environment(
            heap_bytes=_heap_bytes(workload, capacity),
            timeout=workload.timeout,
            name=workload.name,
        )
        rank = self._rank = comm.rank
        dtype = _DTYPES[workload.dtype]
        self._group = crossdock.EpGroup(
            comm,
            crossdock.EpConfig(
                num_experts=workload.experts,
                max_topk=workload.topk,
                max_tokens_per_rank=workload.tokens,
                hidden=workload.hidden,
                dtype=dtype,
                layout=workload.layout,
                recv_capacity=capacity,
            ),
        )
        self._groups: list[crossdock.EpGroup | crossdock.LowLatencyGroup] = [self._group]
        self._wire_bytes = rank_rows.wire_rows[rank] * workload.row_bytes
        self._ids, self._weights = _engine.topk(workload, rank)
        self._tokens = comm.empty((workload.tokens, workload.hidden), dtype)
        self._tokens[...] = _engine.token_values(workload, rank)

    def __enter__(self) -> NumpyEngine:
        return self

    def __exit__(
        self, kind: type | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        for group in reversed(self._groups):
            group.close()
        self._comm.close()

    def check(self) -> None:
        """One unweighted round trip in which the experts change nothing."""
        plan = self._group.prepare(self._ids)
        out = self._group.combine(plan, self._group.dispatch(plan, self._tokens).tokens)
        _engine.require_equal(self._workload, self._rank, out.astype(np.float32))

    def operations(self) -> Mapping[Any, Timed]:
        """By name; the copy that the others are compared with comes first.

        Forward into arrays that are given, backward into new ones of symmetric memory.
        """
        group, again = self._group, self._group.empty_plan()
        plan = group.prepare(self._ids)
        sent = group.dispatch(plan, self._tokens, self._weights)
        weights = sent.weights if self._workload.layout == "expert_major" else None
        out = group.combine(plan, sent.tokens, weights)
        source, target = np.zeros((2, self._wire_bytes), np.uint8)
        calls: dict[str, Call] = {
            "copy": lambda: np.copyto(target, source),
            "prepare": lambda: group.prepare(self._ids, out=again),
            "dispatch": lambda: group.dispatch(plan, self._tokens, self._weights, out=sent),
            "combine": lambda: group.combine(plan, sent.tokens, weights, out=out),
            "combine_bwd": lambda: group.combine_bwd(plan, out, weights=weights),
            "dispatch_bwd": lambda: group.dispatch_bwd(plan, sent.tokens),
        }
        return {name: Timed(call) for name, call in calls.items()}

    def time(self, timed: Timed, share: Share, tell: Tell) -> list[float]:
        """Every call has finished when it returns."""
        return _engine.wall_times(share, self._comm.barrier, timed, tell)

    def versions(self) -> dict[str, str]:
        """NumPy."""
        return {"numpy": np.__version__}


def _heap_bytes(workload: Workload, capacity: int) -> int:
    """Symmetric memory for what is alive at a time, and for what the heap rounds up.

    Alive are tokens, their sum and its gradient; rows received and their gradient; weights.
    """
    rows = 3 * workload.tokens + 2 * capacity
    return rows * workload.row_bytes + capacity * workload.topk * 16 + (1 << 20)
