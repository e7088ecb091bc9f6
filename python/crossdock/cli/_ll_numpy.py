"""The steps of ``crossdock bench ll`` on NumPy arrays."""

from __future__ import annotations

import collections
from collections.abc import Mapping
from typing import Any

import numpy as np

import crossdock
from crossdock.cli import _engine, _ll_steps
from crossdock.cli._engine import Timed
from crossdock.cli._engine_numpy import NumpyEngine
from crossdock.cli._workload import Workload


class NumpyLowLatency(NumpyEngine):
    """Implements `Engine` by crossdock.LowLatencyGroup, the three calls by crossdock.EpGroup."""

    def __init__(self, workload: Workload) -> None:
        super().__init__(workload)
        self._few = crossdock.LowLatencyGroup(self._comm, _ll_steps.config(workload))
        self._groups.append(self._few)
        self._calls = self._make_calls()

    def check(self) -> None:
        """A round trip by each way."""
        for way in (self._calls.whole(), self._calls.in_halves(), self._calls.three_calls()):
            _engine.require_equal(self._workload, self._rank, way().astype(np.float32))

    def operations(self) -> Mapping[Any, Timed]:
        """The steps, by `Step`."""
        return _ll_steps.steps(self._workload, self._calls)

    def _make_calls(self) -> _ll_steps.Calls:
        """Low latency in ordinary memory; the tensors of the three calls in symmetric memory."""
        few, group, tokens, ids = self._few, self._group, self._tokens, self._ids
        slots, out = few.slots(), np.empty_like(tokens)
        plan = group.prepare(ids)
        rows = group.dispatch(plan, tokens)
        sums = group.combine(plan, rows.tokens)
        sent = collections.deque[Any]()
        quantise = _ll_steps.QUANTISE
        fp8 = few.slots(quantise=quantise) if self._workload.dtype == "bf16" else None
        return _ll_steps.Calls(
            dispatch=lambda: few.dispatch(tokens, ids, out=slots),
            dispatch_quantised=lambda: few.dispatch(tokens, ids, quantise=quantise, out=fp8),
            combine=lambda: few.combine(slots.plan, slots.tokens, out=out),
            experts=lambda: _touch_slots(slots),
            experts_quantised=lambda: _touch_slots(fp8),
            dispatch_send=lambda: sent.append(few.dispatch_send(tokens, ids)),
            dispatch_receive=lambda: sent.popleft().receive(out=slots),
            combine_send=lambda: sent.append(few.combine_send(slots.plan, slots.tokens)),
            combine_receive=lambda: sent.popleft().receive(out=out),
            prepare=lambda: group.prepare(ids, out=plan),
            major_dispatch=lambda: group.dispatch(plan, tokens, out=rows),
            major_combine=lambda: group.combine(plan, rows.tokens, out=sums),
            major_experts=lambda: _touch(rows.tokens[: plan.total[0]]),
        )


def _touch_slots(slots: Any) -> None:
    for expert, count in enumerate(slots.counts):
        _touch(slots.tokens[expert, :count])


def _touch(rows: np.ndarray) -> None:
    """Reads and writes every byte."""
    words = rows.view(np.uint8)
    np.bitwise_or(words, 0, out=words)
