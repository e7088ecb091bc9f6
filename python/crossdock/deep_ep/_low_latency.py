"""A Buffer's low-latency dispatch and combine."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, NoReturn

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from crossdock._core import constants
from crossdock._halves import Half, OpenHalves
from crossdock._quantise import WAYS, QuantiseWay
from crossdock.torch import _calls
from crossdock.torch._calls import current_stream, is_capturing

from ._arguments import Checks
from ._slot_groups import Shape, SlotGroup, SlotGroups
from ._stream_scope import StreamScope, StreamWork
from .utils import EventOverlap

_BOTH, _SEND, _RECEIVE = (constants.PHASES[half] for half in ("both", "send", "receive"))
_PACKED = 4  # e8m0 scales in an int32
_MOST = "num_max_dispatch_tokens_per_rank"

Hook = Callable[[], None]

# By the first tensor of a handle: its routing.
_routings: Any = WeakTensorKeyDictionary()


class SlotRouting(NamedTuple):
    """The library's part of a low-latency handle."""

    group: SlotGroup
    plan: torch.Tensor
    num_tokens: int  # T
    topk: int  # K


class SlotHandle(tuple[Any, ...]):
    """DeepEP's handle of a low-latency dispatch, and the routing that combine goes by.

    Its elements are ``src_info`` [L,S] int32, each row's token at its source; ``layout_range``
    [L,W] int64, each source's first slot << 32 | its rows; num_max_dispatch_tokens_per_rank, hidden
    and num_experts. Any tuple or list of them is good as a handle.

    Attributes:
        routing: the library's part.
    """

    routing: SlotRouting

    def __new__(
        cls, src_info: torch.Tensor, layout_range: torch.Tensor, routing: SlotRouting
    ) -> SlotHandle:
        shape = routing.group.shape
        elements = (src_info, layout_range, shape.max_tokens, shape.hidden, shape.experts)
        handle = super().__new__(cls, elements)
        handle.routing = routing
        _routings[src_info] = routing
        return handle

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "a handle of crossdock.deep_ep.Buffer serves in the process that made it "
            "only: it cannot be copied or pickled"
        )


def slot_routing(checks: Checks, groups: SlotGroups, handle: Any) -> SlotRouting:
    """The routing of a handle of one of these groups."""
    found = getattr(handle, "routing", None)
    if not isinstance(handle, SlotHandle):
        found = None
        if isinstance(handle, tuple | list) and len(handle) == 5 and torch.is_tensor(handle[0]):
            found = _routings.get(handle[0])
    if found is None or not groups.has(found.group):
        expected = "what low_latency_dispatch of this Buffer returned"
        checks.fail("handle", expected, type(handle).__name__)
    return found


class Received(NamedTuple):
    """The results of dispatch."""

    x: torch.Tensor  # [L,S,H]
    scales: torch.Tensor | None
    counts: torch.Tensor  # [L]
    handle: SlotHandle


class _Once:
    """A hook: the second half of an operation, to be called once, on the stream of the caller.

    Args:
        halves: of the group's operations of this kind, of which this one has been sent.
        receive: enqueues the second half.
        results: what it writes.
    """

    def __init__(
        self,
        group: SlotGroup,
        halves: OpenHalves,
        receive: Callable[[], None],
        results: list[torch.Tensor],
    ) -> None:
        self._group = group
        self._receive = receive
        self._results = results
        self._stream = current_stream(group.device)
        self._halves = halves
        self._half = Half()
        if not is_capturing(group.device):  # a captured operation has not been sent
            halves.add(self._half)

    def __call__(self) -> None:
        self._halves.require_oldest(self._half, "hook")
        self._halves.take(self._half)
        if current_stream(self._group.device) != self._stream:
            for tensor in self._results:
                tensor.record_stream(torch.cuda.current_stream(self._group.device))
        self._receive()
        self._group.check()


def dispatch(
    checks: Checks,
    scope: StreamScope,
    groups: SlotGroups,
    x: Any,
    topk_idx: Any,
    sizes: tuple[Any, Any],
    stats: tuple[Any, Any],
    forms: tuple[bool, bool, bool],
    async_finish: bool,
    return_recv_hook: bool,
) -> tuple[Received, EventOverlap, Hook | None]:
    """Sends each token to the slots of its experts. Nothing waits for the host.

    Args:
        sizes: num_max_dispatch_tokens_per_rank, num_experts.
        stats: of rows per expert, and of nanoseconds per source.
        forms: use_fp8, round_scale, use_ue8m0.
    """
    shape = None
    try:
        _check_finish(checks, async_finish, return_recv_hook)
        shape = _read_shape(checks, x, topk_idx, sizes)
        if len(x) > shape.max_tokens:
            checks.fail("x", f"at most {_MOST} = {shape.max_tokens} rows", len(x))
        way = _read_way(checks, shape.hidden, forms)
        load, wait = _read_stats(checks, shape, *stats)
    except Exception as error:
        groups.refuse_dispatch(shape, str(error))
        raise
    group = groups.of(shape)

    def make() -> tuple[Received, list[torch.Tensor]]:
        received = _allocate(group, way, forms[2], len(x))
        tensors = [part for part in (*received[:3], *received.handle[:2]) if part is not None]
        return received, [*tensors, received.handle.routing.plan]

    def run(phase: int, received: Received) -> None:
        given = {
            "tokens": x if phase != _RECEIVE else None,
            "topk_idx": topk_idx if phase != _RECEIVE else None,
            "plan": received.handle.routing.plan,
            "recv_tokens": received.x,
            "recv_scales": received.scales,
            "counts": received.counts,
            "source_ranges": received.handle[1],
            "source_tokens": received.handle[0],
            "expert_load": load,
            "wait_ns": wait,
        }
        code = 0 if way is None else way.code
        group.run(_calls.run, "dispatch", received.x, given, phase=phase, quantise=code)

    beside = [tensor for tensor in (load, wait) if tensor is not None]
    inputs = [x, topk_idx, *beside]
    halves = group.dispatch_halves if return_recv_hook else None
    return _operate(scope, group, make, run, inputs, async_finish, halves)


def combine(
    checks: Checks,
    scope: StreamScope,
    routing: SlotRouting,
    x: Any,
    topk_idx: Any,
    topk_weights: Any,
    zero_copy: bool,
    async_finish: bool,
    return_recv_hook: bool,
    out: Any,
    stats: Any,
) -> tuple[torch.Tensor, EventOverlap, Hook | None]:
    """Sums each token's weighted results. Nothing waits for the host."""
    group, shape = routing.group, routing.group.shape
    with telling(group):
        _check_finish(checks, async_finish, return_recv_hook)
        slots = (group.local_experts, group.num_slots, shape.hidden)
        checks.tensor(x, "x", slots, (torch.bfloat16,))
        batch = (routing.num_tokens, routing.topk)
        checks.tensor(topk_idx, "topk_idx", batch, (torch.int64,))
        checks.tensor(topk_weights, "topk_weights", batch, (torch.float32,))
        sums = (routing.num_tokens, shape.hidden)
        if out is not None:
            checks.tensor(out, "out", sums, (torch.bfloat16,))
        _, wait = _read_stats(checks, shape, None, stats, "combine_wait_recv_cost_stats")
    rows = group.combine_buffer() if zero_copy else x

    def make() -> tuple[torch.Tensor, list[torch.Tensor]]:
        result = out
        if result is None:
            result = torch.empty(sums, dtype=torch.bfloat16, device=group.device)
        return result, [result]

    def run(phase: int, result: torch.Tensor) -> None:
        given = {
            "plan": routing.plan,
            "expert_out": rows if phase != _RECEIVE else None,
            "topk_weights": topk_weights if phase != _RECEIVE else None,
            "out": result,
            "wait_ns": wait,
        }
        group.run(_calls.run, "combine", result, given, phase=phase)

    inputs = [rows, topk_weights, routing.plan, *([] if wait is None else [wait])]
    halves = group.combine_halves if return_recv_hook else None
    return _operate(scope, group, make, run, inputs, async_finish, halves)


def _operate(
    scope: StreamScope,
    group: SlotGroup,
    make: Callable[[], tuple[Any, list[torch.Tensor]]],
    run: Callable[[int, Any], None],
    inputs: list[torch.Tensor],
    async_finish: bool,
    halves: OpenHalves | None,
) -> tuple[Any, EventOverlap, Hook | None]:
    """Runs an operation in one of the three ways of waiting for it.

    With a hook, and without any wish, on the current stream; with an event on the Buffer's.

    Args:
        make: makes the results, and lists their tensors.
        run: runs a phase that writes them.
        halves: of the group's operations of this kind, where a hook is wanted.
    """
    if not async_finish:
        result, tensors = make()
        if halves is not None:
            run(_SEND, result)
            hook = _Once(group, halves, lambda: run(_RECEIVE, result), tensors)
            return result, EventOverlap(), hook
        run(_BOTH, result)
        group.check()
        return result, EventOverlap(), None
    with StreamWork(scope, None, True) as work:
        with work.allocating():
            result, tensors = make()
        with work.running():
            run(_BOTH, result)
        event = work.finish(inputs, tensors)
    group.check()
    return result, event, None


def _allocate(group: SlotGroup, way: QuantiseWay | None, packed: bool, num_tokens: int) -> Received:
    """Results whose content is undefined. Scales lie column by column, as DeepGEMM takes them."""
    local, slots, shape, device = group.local_experts, group.num_slots, group.shape, group.device
    scales = None
    if way is not None:
        columns = shape.hidden // way.block // (_PACKED if packed else 1)
        kind = torch.int32 if packed else torch.float32
        scales = torch.empty(local, columns, slots, dtype=kind, device=device).transpose(1, 2)
    kind = torch.bfloat16 if way is None else torch.float8_e4m3fn
    plan = torch.empty(group.plan_bytes, dtype=torch.uint8, device=device)
    return Received(
        torch.empty(local, slots, shape.hidden, dtype=kind, device=device),
        scales,
        torch.empty(local, dtype=torch.int32, device=device),
        SlotHandle(
            torch.empty(local, slots, dtype=torch.int32, device=device),
            torch.empty(local, group.num_ranks, dtype=torch.int64, device=device),
            SlotRouting(group, plan, num_tokens, shape.topk),
        ),
    )


# ---- Arguments -----------------------------------------------------------------------------------


@contextlib.contextmanager
def telling(group: SlotGroup) -> Iterator[None]:
    """Tells the peers' combine of a mistake that is found within."""
    try:
        yield
    except Exception as error:
        group.join_failed(constants.LL_COMBINE, str(error))
        raise


def _check_finish(checks: Checks, async_finish: bool, return_recv_hook: bool) -> None:
    if async_finish and return_recv_hook:
        checks.fail("return_recv_hook", "False, as async_finish is set", True)


def _read_shape(checks: Checks, x: Any, topk_idx: Any, sizes: tuple[Any, Any]) -> Shape:
    max_tokens = checks.at_least(sizes[0], _MOST, 1)
    if max_tokens > constants.LL_MAX_TOKENS:
        checks.fail(_MOST, f"at most {constants.LL_MAX_TOKENS}", max_tokens)
    experts = checks.experts(sizes[1], "num_experts")
    checks.tensor(x, "x", ("T", "H"), (torch.bfloat16,))
    checks.topk_idx(topk_idx, len(x))
    unit = constants.ROW_ALIGNMENT // x.element_size()
    if x.shape[1] < 1 or x.shape[1] % unit != 0:
        checks.fail("x", f"a positive multiple of {unit} columns", x.shape[1])
    return Shape(max_tokens, x.shape[1], experts, topk_idx.shape[1])


def _read_way(checks: Checks, hidden: int, forms: tuple[bool, bool, bool]) -> QuantiseWay | None:
    use_fp8, round_scale, use_ue8m0 = forms
    if not use_fp8:
        return None
    if use_ue8m0 and not round_scale:
        checks.fail("round_scale", "True, as use_ue8m0 is set", False)
    name = "fp8_block128_pow2" if round_scale else "fp8_block128"
    way = WAYS["fp8_block128_e8m0" if use_ue8m0 else name]
    unit = way.block * (_PACKED if use_ue8m0 else 1)
    if hidden % unit != 0:
        checks.fail("x", f"a multiple of {unit} columns, as they are quantised", hidden)
    return way


def _read_stats(
    checks: Checks,
    shape: Shape,
    load: Any,
    wait: Any,
    wait_name: str = "dispatch_wait_recv_cost_stats",
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Statistics of rows per local expert, and of nanoseconds per source."""
    if load is not None:
        local = shape.experts // checks.num_ranks
        checks.tensor(load, "cumulative_local_expert_recv_stats", (local,), (torch.int32,))
    if wait is not None:
        checks.tensor(wait, wait_name, (checks.num_ranks,), (torch.int64,))
    return load, wait
