"""A workload's operations on tensors of PyTorch, on the CPU or on a GPU per rank."""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

import crossdock.torch as xd
from crossdock.cli import _engine
from crossdock.cli._engine import Call, Share, Tell, Timed
from crossdock.cli._workload import Workload, volume

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class TorchEngine:
    """Implements `Engine` by the functional interface of crossdock.torch."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._comm = xd.init(timeout=workload.timeout, name=workload.name)
        rank = self._rank = self._comm.rank
        device = self._device = self._comm.device
        if device.type == "cuda":
            torch.cuda.set_device(device)  # events are recorded on its stream
        self._group = xd.EpGroup(
            num_experts=workload.experts,
            hidden=workload.hidden,
            max_topk=workload.topk,
            max_tokens_per_rank=workload.tokens,
            layout=workload.layout,
            dtype=DTYPES[workload.dtype],
            recv_capacity=max(volume(workload).received[rank], 1),
            comm=self._comm,
        )
        self._groups: list[xd.EpGroup | xd.LowLatencyGroup] = [self._group]
        ids, weights = _engine.topk(workload, rank)
        self._ids = torch.from_numpy(ids).to(device)
        self._weights = torch.from_numpy(weights).to(device)
        values = torch.from_numpy(_engine.token_values(workload, rank))
        self._tokens = values.to(device, DTYPES[workload.dtype]).requires_grad_()

    def __enter__(self) -> TorchEngine:
        return self

    def __exit__(
        self, kind: type | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        for group in reversed(self._groups):
            group.close()
        self._comm.close()

    def check(self) -> None:
        """One unweighted round trip in which the experts change nothing."""
        with torch.no_grad():
            plan = self._group.prepare(self._ids)
            out = xd.combine(plan, xd.dispatch(plan, self._tokens).tokens)
        got = out.to("cpu", torch.float32).numpy()
        _engine.require_equal(self._workload, self._rank, got)

    def operations(self) -> Mapping[Any, Timed]:
        """By name; the copy that the others are compared with comes first.

        The calls of a training step; backward passes are called as autograd calls
        them.
        """
        plan = self._group.prepare(self._ids)
        sent = xd.dispatch(plan, self._tokens, self._weights)
        experts = sent.tokens.detach().requires_grad_()
        weights = None
        if sent.weights is not None and self._workload.layout == "expert_major":
            weights = sent.weights.detach()
        plan = plan.detach()  # so that combine's backward pass ends there
        out = xd.combine(plan, experts, weights)
        grad_out = torch.ones_like(out)
        # In symmetric memory, where the experts' backward pass leaves it.
        grad_sent = self._comm.empty_symmetric(sent.tokens.shape, sent.tokens.dtype).fill_(1)
        calls: dict[str, Call] = {
            "copy": self._copy(),
            "prepare": lambda: self._group.prepare(self._ids),
            "dispatch": _without_grad(lambda: xd.dispatch(plan, self._tokens, self._weights)),
            "combine": _without_grad(lambda: xd.combine(plan, experts, weights)),
            "combine_bwd": lambda: torch.autograd.grad(out, experts, grad_out, retain_graph=True),
            "dispatch_bwd": lambda: torch.autograd.grad(
                sent.tokens, self._tokens, grad_sent, retain_graph=True
            ),
        }
        return {name: Timed(call) for name, call in calls.items()}

    def _copy(self) -> Call:
        """As many bytes as this rank sends to others: within its memory, or to the next GPU."""
        size = volume(self._workload).wire_rows[self._rank] * self._workload.row_bytes
        source = torch.zeros(size, dtype=torch.uint8, device=self._device)
        target = self._device
        if target.type == "cuda":
            target = torch.device("cuda", (target.index + 1) % self._workload.ranks)
        copy = torch.zeros(size, dtype=torch.uint8, device=target)
        return lambda: copy.copy_(source, non_blocking=True)

    def time(self, timed: Timed, share: Share, tell: Tell) -> list[float]:
        """On a GPU by events between calls that follow one another without a gap.

        Every operation ends on all ranks at once, and so the next one starts.
        """
        if self._device.type != "cuda":
            return _engine.wall_times(share, self._comm.barrier, timed, tell)
        torch.cuda.synchronize(self._device)
        self._comm.barrier()
        spans: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = []
        begin = _now()
        for _ in range(share.warmup + share.iters):
            spans.append([])
            for part in timed.parts():
                part.call()
                end = _now()
                spans[-1].append((begin, end))
                begin = end
                if part.rest:
                    part.rest()
                    begin = _now()
        torch.cuda.synchronize(self._device)
        for group in self._groups:
            group.check()
        tell(1.0)
        times = [sum(begin.elapsed_time(end) for begin, end in parts) / 1e3 for parts in spans]
        return times[share.warmup :]

    def versions(self) -> dict[str, str]:
        """PyTorch and what it was built with; the GPU."""
        found = {"torch": torch.__version__, "numpy": np.__version__}
        if self._device.type == "cuda":
            found["GPU"] = torch.cuda.get_device_name(self._device)
        return found


def _now() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _without_grad(call: Call) -> Call:
    def run() -> object:
        with torch.no_grad():
            return call()

    return run
