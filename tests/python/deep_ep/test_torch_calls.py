"""A call asks little of torch, which is where the host's time goes.

A function mode, as of a default device, runs Python code in each function of torch that it sees,
and so sees none. Operators are counted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import deep_ep_cases as cases
import low_latency_cases
from crossdock.deep_ep import Buffer, ElasticBuffer
from deep_ep_reference import make_batch
from support import Rank, on_ranks

SEED = 95


class Functions(TorchFunctionMode):
    """The functions of torch that are called within it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(getattr(func, "__qualname__", str(func)))
        return func(*args, **(kwargs or {}))


class Operators(TorchDispatchMode):
    """The operators that run within it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def require(most: int, call: Callable[[], object]) -> None:
    """Fails unless a call shows function modes nothing, and runs at most so many operators."""
    call()
    with Functions() as functions:
        call()
    assert functions.seen == []
    with torch.device("meta"):  # tensors that follow the default device would be of no use
        call()
    with Operators() as operators:
        call()
    assert len(operators.seen) <= most, operators.seen


@on_ranks(1)
def test_a_call_asks_little_of_torch(me: Rank) -> None:
    with cases.process_group(), cases.new_buffer(**low_latency_cases.LOW_LATENCY) as buffer:
        calls_of_buffer(buffer)
    with cases.process_group():
        calls_of_elastic_buffer()


def calls_of_buffer(buffer: Buffer) -> None:
    batch = make_batch(SEED, buffer.group_size)
    caller = cases.Caller(buffer, batch)
    layout, topk = caller.layout(), caller.topk()
    rows, _, weights, _, handle, _ = buffer.dispatch(caller.x, **layout, **topk)
    pair = caller.x.to(torch.float8_e4m3fn), torch.ones(len(caller.x), 1)
    require(5, lambda: buffer.get_dispatch_layout(caller.topk_idx, batch.num_experts))
    require(1, lambda: buffer.dispatch(caller.x, handle))
    require(4, lambda: buffer.dispatch(pair, handle))
    require(1, lambda: buffer.combine(rows, handle))
    require(6, lambda: buffer.combine(rows, handle, weights))  # padded to 16 bytes
    # On the CPU two look whether the numbers of tokens are right.
    require(9, lambda: buffer.dispatch(caller.x, **layout, **topk))
    few = (caller.x, caller.topk_idx, 32, batch.num_experts)
    plain = {"use_fp8": False}
    x, _, slots, *_ = buffer.low_latency_dispatch(*few, **plain)
    require(6, lambda: buffer.low_latency_dispatch(*few, **plain))
    sums = (x, caller.topk_idx, caller.topk_weights, slots)
    require(1, lambda: buffer.low_latency_combine(*sums))


def calls_of_elastic_buffer() -> None:
    batch = make_batch(SEED, 1)
    most = len(batch.x[0])
    buffer = ElasticBuffer(
        torch.distributed.group.WORLD,
        num_max_tokens_per_rank=most,
        hidden=batch.x[0].shape[1],
        explicitly_destroy=True,
    )
    x, idx, weights = batch.x[0], batch.topk_idx[0], batch.topk_weights[0]
    given = {"num_experts": batch.num_experts, "do_handle_copy": False}
    rows, *_, handle, _ = buffer.dispatch(x, idx, weights, **given)
    require(20, lambda: buffer.dispatch(x, idx, weights, **given))
    require(2, lambda: buffer.dispatch(x, handle=handle))
    require(1, lambda: buffer.combine(rows, handle))
    buffer.destroy()
