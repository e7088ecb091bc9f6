"""The steps of ``crossdock bench ll`` on tensors of PyTorch, on the CPU or on a GPU per rank."""

from __future__ import annotations

import collections
from collections.abc import Mapping
from typing import Any

import torch

import crossdock.torch as xd
from crossdock.cli import _engine, _ll_steps
from crossdock.cli._engine import Timed
from crossdock.cli._engine_torch import DTYPES, TorchEngine
from crossdock.cli._workload import Workload


class TorchLowLatency(TorchEngine):
    """Implements `Engine` by the functional interface of crossdock.torch."""

    def __init__(self, workload: Workload) -> None:
        super().__init__(workload)
        self._few = xd.LowLatencyGroup(
            num_experts=workload.experts,
            hidden=workload.hidden,
            max_topk=workload.topk,
            max_tokens_per_rank=workload.tokens,
            dtype=DTYPES[workload.dtype],
            comm=self._comm,
        )
        self._tokens.requires_grad_(False)
        self._groups.append(self._few)
        self._calls = self._make_calls()

    def check(self) -> None:
        """A round trip by each way."""
        for way in (self._calls.whole(), self._calls.in_halves(), self._calls.three_calls()):
            got = way().to("cpu", torch.float32).numpy()
            _engine.require_equal(self._workload, self._rank, got)

    def operations(self) -> Mapping[Any, Timed]:
        """The steps, by `Step`."""
        return _ll_steps.steps(self._workload, self._calls)

    def _make_calls(self) -> _ll_steps.Calls:
        """The three calls as a model makes them, with new tensors of symmetric memory."""
        few, group, tokens, ids = self._few, self._group, self._tokens, self._ids
        slots, out = few.slots(), torch.empty_like(tokens)
        sent = collections.deque[Any]()
        quantise = _ll_steps.QUANTISE
        fp8 = few.slots(quantise=quantise) if self._workload.dtype == "bf16" else None
        plans = collections.deque([group.prepare(ids)], maxlen=1)
        rows = collections.deque([xd.dispatch(plans[0], tokens)], maxlen=1)
        return _ll_steps.Calls(
            dispatch=lambda: xd.ll_dispatch(few, tokens, ids, out=slots),
            dispatch_quantised=lambda: xd.ll_dispatch(few, tokens, ids, quantise=quantise, out=fp8),
            combine=lambda: xd.ll_combine(slots.plan, slots.tokens, out=out),
            experts=lambda: _touch_slots(slots),
            experts_quantised=lambda: _touch_slots(fp8),
            dispatch_send=lambda: sent.append(xd.ll_dispatch_send(few, tokens, ids)),
            dispatch_receive=lambda: sent.popleft().receive(out=slots),
            combine_send=lambda: sent.append(xd.ll_combine_send(slots.plan, slots.tokens)),
            combine_receive=lambda: sent.popleft().receive(out=out),
            prepare=lambda: plans.append(group.prepare(ids)),
            major_dispatch=lambda: rows.append(xd.dispatch(plans[0], tokens)),
            major_combine=lambda: xd.combine(plans[0], rows[0].tokens),
            major_experts=lambda: _touch(rows[0].tokens),
        )


def _touch_slots(slots: Any) -> None:
    if slots.tokens.is_cuda:  # kernels would wait for the host to know the counts
        return
    for expert, count in enumerate(slots.counts.tolist()):
        _touch(slots.tokens[expert, :count])


def _touch(rows: torch.Tensor) -> None:
    """Reads and writes every byte."""
    if not rows.is_cuda:
        rows.view(torch.uint8).bitwise_or_(0)
