"""A Buffer's low-latency dispatch and combine."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from crossdock._core import constants
from crossdock._halves import Half, OpenHalves
from crossdock._quantise import WAYS, QuantiseWay
from crossdock.torch._calls import current_stream, is_capturing

from ._agreement import text_of
from ._arguments import Checks
from ._groups import Groups
from ._handle import RoutedTuple, routing_of
from ._plain import plain
from ._slot_group import Shape, SlotGroup
from ._stream_work import StreamWork
from .utils import EventOverlap

_BOTH, _SEND, RECEIVE = (constants.PHASES[half] for half in ("both", "send", "receive"))
_PACKED = 4  # e8m0 scales in an int32
MOST = "num_max_dispatch_tokens_per_rank"

Hook = Callable[[], None]


class SlotRouting(NamedTuple):
    """The library's part of a low-latency handle."""

    group: SlotGroup
    plan: torch.Tensor
    num_tokens: int  # T
    topk: int  # K


class SlotHandle(RoutedTuple):
    """A handle as of DeepEP's low-latency dispatch.

    Its elements are ``src_info`` [L,S] int32, each row's token at its source; ``layout_range``
    [L,W] int64, each source's first slot << 32 | its rows; num_max_dispatch_tokens_per_rank, hidden
    and num_experts.
    """


def slot_routing(groups: Groups, handle: Any) -> SlotRouting:
    """The routing of a handle of one of these groups."""
    found = routing_of(handle, SlotRouting, 5)
    if found is None or not groups.has_slots(found.group):
        expected = "what low_latency_dispatch of this Buffer returned"
        groups.session.checks.fail("handle", expected, type(handle).__name__)
    return found


class Received(NamedTuple):
    """The results of dispatch."""

    x: torch.Tensor  # [L,S,H]
    scales: torch.Tensor | None
    counts: torch.Tensor  # [L]
    handle: SlotHandle


def operate(
    group: SlotGroup,
    run: Callable[[int], None],
    inputs: list[torch.Tensor | None],
    results: list[torch.Tensor | None],
    async_finish: bool,
    halves: OpenHalves | None,
) -> tuple[EventOverlap, Hook | None]:
    """Runs an operation in one of the three ways of waiting for it.

    With a hook, and without any wish, on the current stream; with an event on the Buffer's.

    Args:
        run: runs a phase.
        inputs, results: its tensors.
        halves: of the group's operations of this kind, where a hook is wanted.
    """
    event = EventOverlap()
    if halves is not None:
        run(_SEND)
        return event, _hook(group, halves, lambda: run(RECEIVE), results)
    if async_finish:
        with StreamWork(group.session, None, True) as work:
            with work.running():
                run(_BOTH)
            event = work.finish(inputs, results)
            group.check()
        return event, None
    run(_BOTH)
    group.check()
    return event, None


def _hook(
    group: SlotGroup,
    halves: OpenHalves,
    receive: Callable[[], None],
    results: list[torch.Tensor | None],
) -> Hook:
    """The second half of an operation that has been sent, to be called once, on any stream.

    Args:
        halves: of the group's operations of this kind.
        receive: enqueues the second half.
        results: what it writes.
    """
    half, device = Half(), group.device
    stream = current_stream(device)
    if not is_capturing(device):  # a captured operation has not been sent
        halves.add(half)

    @plain
    def hook() -> None:
        halves.require_oldest(half, "hook")
        halves.take(half)
        if current_stream(device) != stream:
            for tensor in results:
                if tensor is not None:
                    tensor.record_stream(torch.cuda.current_stream(device))
        receive()
        group.check()

    return hook


def allocate(group: SlotGroup, way: QuantiseWay | None, packed: bool, num_tokens: int) -> Received:
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
            (
                torch.empty(local, slots, dtype=torch.int32, device=device),
                torch.empty(local, group.session.num_ranks, dtype=torch.int64, device=device),
                shape.max_tokens,
                shape.hidden,
                shape.experts,
            ),
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
        group.join_failed(constants.LL_COMBINE, text_of(error))
        raise


def check_finish(checks: Checks, async_finish: bool, return_recv_hook: bool) -> None:
    """Refuses two ways of waiting at once."""
    if async_finish and return_recv_hook:
        checks.fail("return_recv_hook", "False, as async_finish is set", True)


def read_shape(checks: Checks, x: Any, topk_idx: Any, max_tokens: Any, experts: Any) -> Shape:
    """The sizes of a dispatch."""
    checks.at_least(max_tokens, MOST, 1, constants.LL_MAX_TOKENS)
    checks.experts(experts, "num_experts")
    checks.tensor(x, "x", ("T", "H"), (torch.bfloat16,))
    checks.topk_idx(topk_idx, len(x))
    unit = constants.ROW_ALIGNMENT // x.element_size()
    if x.shape[1] < 1 or x.shape[1] % unit != 0:
        checks.fail("x", f"a positive multiple of {unit} columns", x.shape[1])
    return Shape(max_tokens, x.shape[1], experts, topk_idx.shape[1])


def read_way(
    checks: Checks, hidden: int, use_fp8: bool, round_scale: bool, use_ue8m0: bool
) -> QuantiseWay | None:
    """How rows are quantised; None = they are not."""
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
