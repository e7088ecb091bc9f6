"""dispatch and combine of few tokens, as torch operators and for users.

The operators write tensors that their callers have made. Their schema says that they also change
`order`, a tensor of the group: so a compiler keeps all operations of a group, and in their order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from crossdock import _core
from crossdock._comm_arguments import number_of_32_bits
from crossdock._core import constants
from crossdock._halves import Half, OpenHalves
from crossdock._quantise import QuantiseWay, quantise_way
from crossdock._wire import Wire, wire_of_rows
from crossdock.errors import CrossdockError, InvalidArgument

from . import _calls
from ._calls import INDICES, PAYLOADS, SCALES, SUMMABLE
from ._custom_ops import LIBRARY, as_packed, as_rows
from ._direct import FUNCTIONS, unobserved
from ._low_latency import LowLatencyGroup, SlotPlan, Slots, low_latency_group_of
from ._parts import raise_versions
from ._unseen import unseen

__all__ = [
    "SentCombine",
    "SentDispatch",
    "ll_combine",
    "ll_combine_send",
    "ll_dispatch",
    "ll_dispatch_send",
]

_BOTH, _SEND, _RECEIVE = (constants.PHASES[half] for half in ("both", "send", "receive"))
_METHODS = {constants.LL_DISPATCH: "dispatch", constants.LL_COMBINE: "combine"}
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)

# ---- Operators -----------------------------------------------------------------------------------


def _operator(schema: str) -> Any:
    """Defines an operator without results, and what it runs on the CPU and on CUDA devices."""
    name = schema.partition("(")[0]

    def define(kernel: Any) -> Any:
        LIBRARY.define(schema, tags=_TAGS)
        FUNCTIONS[name] = unseen(kernel)
        for key in ("CPU", "CUDA"):
            LIBRARY.impl(name, FUNCTIONS[name], key)
        torch.library.register_fake(f"crossdock::{name}", lambda *args: None, lib=LIBRARY)
        return kernel

    return define


@_operator(
    "ll_dispatch(Tensor? tokens, Tensor? topk_idx, Tensor? topk_weights, Tensor? scales, "
    "Tensor(a!)? plan, Tensor(b!)? recv_tokens, Tensor(c!)? recv_scales, Tensor(d!)? counts, "
    "Tensor(e!)? source_ranges, Tensor(f!)? source_tokens, Tensor(g!)? expert_load, "
    "Tensor(h!)? wait_ns, Tensor(i!)? row_offsets, Tensor(j!)? recv_weights, "
    "Tensor(k!)? recv_topk_idx, Tensor(l!) order, int group, int phase, int quantise, "
    "int max_tokens) -> ()"
)
def _dispatch(
    tokens: Tensor | None,
    topk_idx: Tensor | None,
    topk_weights: Tensor | None,
    scales: Tensor | None,
    plan: Tensor | None,
    recv_tokens: Tensor | None,
    recv_scales: Tensor | None,
    counts: Tensor | None,
    source_ranges: Tensor | None,
    source_tokens: Tensor | None,
    expert_load: Tensor | None,
    wait_ns: Tensor | None,
    row_offsets: Tensor | None,
    recv_weights: Tensor | None,
    recv_topk_idx: Tensor | None,
    order: Tensor,
    group: int,
    phase: int,
    quantise: int,
    max_tokens: int,
) -> None:
    given = {
        "tokens": as_rows(tokens),
        "topk_idx": as_packed(topk_idx),
        "topk_weights": as_packed(topk_weights),
        "scales": scales,
        "plan": plan,
        "recv_tokens": recv_tokens,
        "recv_scales": recv_scales,
        "counts": counts,
        "source_ranges": source_ranges,
        "source_tokens": source_tokens,
        "expert_load": expert_load,
        "wait_ns": wait_ns,
        "row_offsets": row_offsets,
        "recv_weights": recv_weights,
        "recv_topk_idx": recv_topk_idx,
    }
    numbers = {"phase": phase, "quantise": quantise, "max_tokens": max_tokens}
    _run(group, constants.LL_DISPATCH, given, **numbers)


@_operator(
    "ll_combine(Tensor plan, Tensor? expert_out, Tensor? topk_weights, Tensor(a!)? out, "
    "Tensor(b!)? wait_ns, Tensor(c!) order, int group, int phase, int wire=0) -> ()"
)
def _combine(
    plan: Tensor,
    expert_out: Tensor | None,
    topk_weights: Tensor | None,
    out: Tensor | None,
    wait_ns: Tensor | None,
    order: Tensor,
    group: int,
    phase: int,
    wire: int = 0,
) -> None:
    given = {
        "plan": plan,
        "expert_out": expert_out,
        "topk_weights": as_packed(topk_weights),
        "out": out,
        "wait_ns": wait_ns,
    }
    _run(group, constants.LL_COMBINE, given, phase=phase, wire=wire)


def _run(group: int, operation: int, tensors: dict[str, Tensor | None], **numbers: int) -> None:
    """Calls the library; of what it cannot be called with, the peers hear."""
    found = low_latency_group_of(group)
    try:
        _calls.run(found.core, _METHODS[operation], found.order, tensors, **numbers)
    except TypeError as error:  # a dtype that the library has no number for
        found.refuse(None if numbers["phase"] == _RECEIVE else operation, TypeError, str(error))


# ---- For users -----------------------------------------------------------------------------------


class SentDispatch:
    """The rows that `ll_dispatch_send` has sent; `receive` takes those that have come.

    Receive halves come in the order of their send halves, which `receive` checks except while a
    CUDA graph is captured. Between the halves nothing of the
    operation runs on a GPU.
    """

    def __init__(
        self,
        group: LowLatencyGroup,
        given: dict[str, Any],
        way: QuantiseWay | None,
        max_tokens: int,
    ) -> None:
        tokens, topk_idx, topk_weights, scales = given.values()
        self._group = group
        self._weighted = topk_weights is not None
        self._max_tokens = max_tokens
        self._num_tokens, self._hidden = tokens.shape
        self._topk = topk_idx.shape[1]
        self._dtype = tokens.dtype
        self._scales = None if scales is None else (scales.shape[1], scales.dtype)
        self._way = way
        self._half = Half()

    def receive(
        self,
        *,
        packed_scales: bool = False,
        sources: bool = False,
        expert_load: Tensor | None = None,
        wait_ns: Tensor | None = None,
        out: Slots | None = None,
    ) -> Slots:
        """The second half of `ll_dispatch`, whose arguments these are.

        A bad argument that is found in Python leaves it to be called again. Of one that the library
        finds the peers do not hear, and the operation has ended.

        Raises:
            ValueError: also where an older dispatch of the group waits for its second half.
        """
        halves = self._group.dispatch_halves
        halves.require_oldest(self._half, "receive")
        slots = self._slots(packed_scales, sources, out)
        _require_slots(self._group, None, slots, expert_load, wait_ns)
        halves.take(self._half)
        self._fill(slots, (None,) * 4, _RECEIVE, expert_load, wait_ns)
        _tell_graphs(out, expert_load, wait_ns)
        return slots

    def _slots(self, packed_scales: bool, sources: bool, out: Slots | None) -> Slots:
        if out is not None:
            return out
        return self._group.slots(
            self._hidden,
            self._dtype,
            self._way,
            packed_scales=packed_scales,
            scales=self._scales,
            sources=sources,
            topk=self._topk,
            weighted=self._weighted,
            max_tokens=self._max_tokens,
        )

    def _fill(
        self,
        slots: Slots,
        inputs: tuple[Tensor | None, ...],
        phase: int,
        expert_load: Tensor | None,
        wait_ns: Tensor | None,
    ) -> None:
        tokens, scales, counts, plan, ranges, sources, *beside = slots
        outputs = (
            plan.data,
            tokens,
            scales,
            counts,
            ranges,
            sources,
            expert_load,
            wait_ns,
            *beside,
        )
        numbers = (phase, 0 if self._way is None else self._way.code, self._max_tokens)
        if torch.compiler.is_compiling():
            _call_dispatch(self._group, inputs, outputs, numbers)
        else:
            try:
                _call_dispatch(self._group, inputs, outputs, numbers)
            except CrossdockError:
                _read_batch(plan)  # bad ids and lost ranks leave one that is complete
                raise
        plan.num_tokens, plan.topk = self._num_tokens, self._topk


class SentCombine:
    """The results that `ll_combine_send` has sent; `receive` sums those that have come."""

    def __init__(self, plan: SlotPlan, expert_out: Tensor, wire: int) -> None:
        self._plan = plan
        self._wire = wire
        self._hidden = expert_out.shape[-1]
        self._dtype = expert_out.dtype
        self._half = Half()

    def receive(self, *, wait_ns: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """The second half of `ll_combine`; mistakes are taken as by `SentDispatch.receive`."""
        plan, group = self._plan, self._plan.group
        group.combine_halves.require_oldest(self._half, "receive")
        out = _sums(plan, self._hidden, self._dtype) if out is None else out
        group.require_tensors(None, out=out, wait_ns=wait_ns)
        group.combine_halves.take(self._half)
        _call_combine(plan, None, None, out, wait_ns, _RECEIVE, self._wire)
        _tell_graphs(None, out, wait_ns)
        return out


def ll_dispatch(
    group: LowLatencyGroup,
    tokens: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor | None = None,
    *,
    scales: Tensor | None = None,
    quantise: bool | str = False,
    packed_scales: bool = False,
    sources: bool = False,
    expert_load: Tensor | None = None,
    wait_ns: Tensor | None = None,
    max_tokens: int = 0,
    out: Slots | None = None,
) -> Slots:
    """Copies each token's row to a slot of every expert that it has chosen. Collective.

    Or to its place without gaps, where the group's ``receive`` says so.

    For inference: there is no gradient. Nothing waits for the host. It may be captured in a CUDA
    graph, whose replays follow the routing that `topk_idx` holds then.

    Args:
        tokens: ``[T, H]`` of any dtype that `dispatch` takes, contiguous. T may differ per rank,
            and be 0.
        topk_idx: ``[T, K]`` int32 or int64, the expert of each choice; -1 = none.
        topk_weights: ``[T, K]`` float32, for an `ll_combine` that is given none; without slots they
            arrive beside the rows instead. On all ranks or on none.
        scales: ``[T, S]`` that arrive beside the rows, as of `dispatch`, bit for bit; both together
            have at most the bytes of the group's row. On all ranks or on none.
        quantise: receive bfloat16 rows as float8_e4m3fn with scales, H a multiple of 128.
            "fp8_block128" (or True): a float32 per 128 columns; "fp8_block128_pow2": these are
            powers of two; "fp8_block128_e8m0": as float8_e8m0fnu.
        packed_scales: with "fp8_block128_e8m0": as int32, each four of these bytes.
        sources: whether the result has source_ranges and source_tokens.
        expert_load: ``[L]`` int32 or int64, to which the counts are added.
        wait_ns: ``[W]`` int64, to which is added how long each source was waited for, in
            nanoseconds.
        max_tokens: without slots: the most tokens that a rank has in this call, which bounds N; 0 =
            max_tokens_per_rank. Equal on all ranks.
        out: from `LowLatencyGroup.slots`: tensors to receive into, which lie anywhere on the
            device; None = new ones, which are lost where the call raises.

    Raises:
        TypeError, ValueError: a bad argument, such as one that requires a gradient while gradients
            are recorded; no row has moved, and the peers get Mismatch.
        InvalidArgument: also on all ranks, where some rank has ids out of range, or repeated in a
            row. ``out`` is complete then.
        Mismatch: the ranks' arguments disagree, or another rank's are bad.
        Busy: too many operations are between their halves. Nothing has happened.
        PeerLost: with ``on_peer_loss="mask"`` not fatal: ``out`` lacks that rank's share.
        CrossdockError: the others of ``crossdock.errors``. On CUDA, all but bad arguments are
            raised by `LowLatencyGroup.check` or by a later call.
    """
    given = {"tokens": tokens, "topk_idx": topk_idx, "topk_weights": topk_weights, "scales": scales}
    sent = _new_dispatch(group, given, quantise, max_tokens)
    try:
        slots = sent._slots(packed_scales, sources, out)
    except RuntimeError as error:  # no memory
        group.refuse(constants.LL_DISPATCH, type(error), str(error))
    _require_slots(group, constants.LL_DISPATCH, slots, expert_load, wait_ns)
    sent._fill(slots, tuple(given.values()), _BOTH, expert_load, wait_ns)
    _tell_graphs(out, expert_load, wait_ns)
    return slots


def ll_dispatch_send(
    group: LowLatencyGroup,
    tokens: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor | None = None,
    *,
    scales: Tensor | None = None,
    quantise: bool | str = False,
    max_tokens: int = 0,
) -> SentDispatch:
    """The first half of `ll_dispatch`: sends, and has read its arguments when it ends.

    `SentDispatch.receive` is the second half. At most ``in_flight`` dispatches of the group may be
    between their halves.
    """
    given = {"tokens": tokens, "topk_idx": topk_idx, "topk_weights": topk_weights, "scales": scales}
    sent = _new_dispatch(group, given, quantise, max_tokens)
    code = 0 if sent._way is None else sent._way.code
    _call_dispatch(group, tuple(given.values()), (None,) * 11, (_SEND, code, sent._max_tokens))
    _add_half(group, group.dispatch_halves, sent._half)
    return sent


def ll_combine(
    plan: SlotPlan,
    expert_out: Tensor,
    topk_weights: Tensor | None = None,
    *,
    wire: Wire = "same",
    wait_ns: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Brings the experts' results back and sums them per token. Collective, without a gradient.

    Sums are in float32 in a fixed order: equal inputs give equal bits.

    Args:
        plan: ``Slots.plan``; it may be combined several times.
        expert_out: ``[L, S, H]`` bfloat16, float16 or float32, of any strides over L and S,
            anywhere on the device. Slots behind the rows are not read. Without slots ``[N, H]``, as
            many rows as came, or more.
        topk_weights: ``[T, K]`` float32, in place of those that `ll_dispatch` had; without either a
            row counts once. On all ranks or on none. Not where rows came by rank.
        wire: the form in which sums cross, as of `combine`, with the same bits.
        wait_ns: as of `ll_dispatch`.
        out: ``[T, H]`` to write; None = a new one.

    Returns:
        ``[T, H]``, dtype of expert_out; zero for a token without rows.

    Raises:
        As `ll_dispatch`.
    """
    _require_results(plan, expert_out, topk_weights)
    number = _wire(plan, wire, expert_out)
    try:
        out = _sums(plan, expert_out.shape[-1], expert_out.dtype) if out is None else out
    except RuntimeError as error:  # no memory
        plan.group.refuse(constants.LL_COMBINE, type(error), str(error))
    if not (plan.group.has(out) and plan.group.has_or_none(wait_ns)):
        plan.group.require_tensors(constants.LL_COMBINE, out=out, wait_ns=wait_ns)
    _call_combine(plan, expert_out, topk_weights, out, wait_ns, _BOTH, number)
    _tell_graphs(None, out, wait_ns)
    return out


def ll_combine_send(
    plan: SlotPlan,
    expert_out: Tensor,
    topk_weights: Tensor | None = None,
    *,
    wire: Wire = "same",
) -> SentCombine:
    """The first half of `ll_combine`: sends, and has read its arguments when it ends.

    `SentCombine.receive` is the second half. At most ``in_flight`` combines of the group may be
    between their halves.
    """
    _require_results(plan, expert_out, topk_weights)
    number = _wire(plan, wire, expert_out)
    _call_combine(plan, expert_out, topk_weights, None, None, _SEND, number)
    sent = SentCombine(plan, expert_out, number)
    _add_half(plan.group, plan.group.combine_halves, sent._half)
    return sent


# ---- Arguments -----------------------------------------------------------------------------------


def _new_dispatch(
    group: LowLatencyGroup, given: dict[str, Any], quantise: bool | str, max_tokens: int
) -> SentDispatch:
    """A dispatch to be sent, with inputs that the operator takes."""
    if not isinstance(group, LowLatencyGroup):
        raise TypeError(f"group: expected a LowLatencyGroup, got {type(group).__name__}")
    operation = constants.LL_DISPATCH
    tokens, topk_idx, topk_weights, scales = given.values()
    optional = (topk_weights, scales)
    if not (group.has(tokens) and group.has(topk_idx) and all(map(group.has_or_none, optional))):
        group.require_tensors(operation, tokens=tokens)
        group.require_tensors(
            operation, topk_idx=topk_idx, topk_weights=topk_weights, scales=scales
        )
    _refuse_gradients(group, operation, given)
    allowed = {"tokens": PAYLOADS, "topk_idx": INDICES, "topk_weights": (torch.float32,)}
    _require_dtypes(group, operation, given, allowed | {"scales": SCALES})
    for name in ("tokens", "topk_idx", "scales"):
        if given[name] is not None and given[name].dim() != 2:
            problem = f"expected 2 dimensions, got shape {tuple(given[name].shape)}"
            group.refuse(operation, ValueError, f"{name}: {problem}")
    try:
        way = quantise_way(quantise)
        most = number_of_32_bits("max_tokens", max_tokens)
        group.rows(most)
    except InvalidArgument as error:
        group.refuse(operation, ValueError, str(error))
    except (TypeError, ValueError) as error:
        group.refuse(operation, type(error), str(error))
    return SentDispatch(group, given, way, most)


def _require_slots(
    group: LowLatencyGroup,
    operation: int | None,
    slots: Slots,
    expert_load: Tensor | None,
    wait_ns: Tensor | None,
) -> None:
    """Refuses outputs that the operator does not take, where `operation` is not None with peers."""
    if not isinstance(slots, Slots):
        group.refuse(operation, TypeError, f"out: expected Slots, got {type(slots).__name__}")
    if slots.plan.group is not group:
        group.refuse(operation, ValueError, "out.plan: expected one of this group")
    tokens, scales, counts, plan, ranges, sources, offsets, weights, experts = slots
    every = (tokens, counts, plan.data)
    optional = (scales, ranges, sources, offsets, weights, experts, expert_load, wait_ns)
    if all(map(group.has, every)) and all(map(group.has_or_none, optional)):
        return
    group.require_tensors(operation, **{"out.tokens": tokens, "out.scales": scales})
    group.require_tensors(operation, **{"out.counts": counts, "out.plan.data": plan.data})
    beside = {"expert_load": expert_load, "wait_ns": wait_ns}
    beside |= {"out.source_ranges": ranges, "out.source_tokens": sources}
    beside |= {"out.row_offsets": offsets, "out.weights": weights, "out.topk_idx": experts}
    group.require_tensors(operation, **{"out.counts": counts}, **beside)


def _require_results(plan: SlotPlan, expert_out: Tensor, topk_weights: Tensor | None) -> None:
    if not isinstance(plan, SlotPlan):
        raise TypeError(f"plan: expected a SlotPlan, got {type(plan).__name__}")
    given = {"expert_out": expert_out, "topk_weights": topk_weights}
    if not (plan.group.has(expert_out) and plan.group.has_or_none(topk_weights)):
        plan.group.require_tensors(constants.LL_COMBINE, **given)
    _refuse_gradients(plan.group, constants.LL_COMBINE, given)
    allowed = {"expert_out": SUMMABLE, "topk_weights": (torch.float32,)}
    _require_dtypes(plan.group, constants.LL_COMBINE, given, allowed)


def _require_dtypes(
    group: LowLatencyGroup,
    operation: int,
    given: dict[str, Any],
    allowed: dict[str, tuple[torch.dtype, ...]],
) -> None:
    for name, dtypes in allowed.items():
        tensor = given[name]
        if tensor is not None and tensor.dtype not in dtypes:
            known = ", ".join(str(dtype) for dtype in dtypes)
            problem = f"expected a dtype of {known}; got {tensor.dtype}"
            group.refuse(operation, TypeError, f"{name}: {problem}")


def _refuse_gradients(group: LowLatencyGroup, operation: int, given: dict[str, Any]) -> None:
    if not torch.is_grad_enabled():
        return
    for name, tensor in given.items():
        if tensor is not None and tensor.requires_grad:
            problem = (
                "expected a tensor that requires no gradient, as the operation has none; use "
                "torch.no_grad(), or an EpGroup to train"
            )
            group.refuse(operation, ValueError, f"{name}: {problem}")


def _tell_graphs(slots: Slots | None, *tensors: Tensor | None) -> None:
    """Lets a backward pass that has saved what was overwritten know; compilers know by themselves.

    Args:
        slots: those that the caller gave; new ones are in no graph.
    """
    if not torch.compiler.is_compiling():
        if slots is not None:
            raise_versions(*(one.data if isinstance(one, SlotPlan) else one for one in slots))
        raise_versions(*tensors)


def _add_half(group: LowLatencyGroup, halves: OpenHalves, half: Half) -> None:
    """Adds a half, unless it is captured: then it has not been sent, and perhaps never will be."""
    if torch.compiler.is_compiling() or not _calls.is_capturing(group.comm.device):
        halves.add(half)


def _read_batch(plan: SlotPlan) -> None:
    """Makes the plan's sizes those that its bytes say, whatever batch they are of.

    On a GPU no operation fails in its call once it has begun.
    """
    if plan.data.device.type != "cpu":
        return
    try:
        info = _core.ll_plan_info(plan.data.data_ptr(), plan.data.numel())
    except InvalidArgument:  # they are no plan
        return
    plan.num_tokens, plan.topk = info["num_tokens"], info["topk"]


def _sums(plan: SlotPlan, hidden: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(plan.num_tokens, hidden, dtype=dtype, device=plan.data.device)


def _call_dispatch(
    group: LowLatencyGroup,
    inputs: tuple[Tensor | None, ...],
    outputs: tuple[Tensor | None, ...],
    numbers: tuple[int, int, int],
) -> None:
    _call("ll_dispatch", group, *inputs, *outputs, group.order, group.handle, *numbers)


def _call_combine(
    plan: SlotPlan,
    expert_out: Tensor | None,
    topk_weights: Tensor | None,
    out: Tensor | None,
    wait_ns: Tensor | None,
    phase: int,
    wire: int,
) -> None:
    group = plan.group
    given = (plan.data, expert_out, topk_weights, out, wait_ns)
    _call("ll_combine", group, *given, group.order, group.handle, phase, wire)


def _wire(plan: SlotPlan, wire: Wire, expert_out: Tensor) -> int:
    """The number of a wire; the peers hear of one that cannot be."""
    try:
        return wire_of_rows(wire, plan.group.wire_formats, expert_out.shape, "group")
    except ValueError as error:
        plan.group.refuse(constants.LL_COMBINE, ValueError, str(error))


def _call(name: str, group: LowLatencyGroup, *args: Any) -> None:
    """Runs an operator, directly where nothing of torch looks at it."""
    tensors = [one for one in args if isinstance(one, Tensor)]
    if unobserved(group.order, *tensors):
        FUNCTIONS[name](*args)
    else:
        getattr(torch.ops.crossdock, name).default(*args)
