"""The operations as torch operators, with shapes for tracing.

They are functional, so that compilers may handle them like any other: each takes the group as an
integer, and takes and returns a small tensor `order`. Order tensors make the operations of one plan
a chain of data dependencies, and their gradients a chain in the other direction; their value is 0.
Outputs that were not asked for are None. Derivatives: _derivatives.py. Calls that nothing of torch
has to see go to an operator's function directly: _direct.py.

Receive tensors come from the symmetric pool, others from torch's allocator, on the current stream.
Arguments are checked where an operation runs, so also inside compiled graphs: what the library
cannot see in an address, a shape and a dtype is checked here, the rest by the library.

The operators are defined by schema rather than by ``torch.library.custom_op``, whose wrappers cost
up to 60 microseconds a call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, overload

import torch
from torch import Tensor

from crossdock._core import constants
from crossdock._quantise import WAYS, QuantiseWay
from crossdock.errors import CrossdockError, InvalidArgument

from . import _calls, _outputs
from ._calls import INDICES, PAYLOADS, SCALES, SUMMABLE
from ._direct import FUNCTIONS
from ._group import EpGroup, group_of, keep_prepared
from ._membership import Operations, is_told
from ._parts import WHOLE, Portion
from ._unseen import unseen

__all__ = ["LIBRARY", "as_packed", "as_rows", "check", "operator", "shapes"]

LIBRARY = torch.library.Library("crossdock", "FRAGMENT")

_FLOAT32 = torch.float32
_WEIGHTS = (_FLOAT32,)
_ROW_ALIGNMENT = constants.ROW_ALIGNMENT
_WAYS = {way.code: way for way in WAYS.values()}  # operators carry numbers; 0 = none
# Inputs keep the strides that the model gave them: the library takes contiguous rows.
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)


def operator(
    schema: str, operations: Callable[..., Operations] | None = None
) -> Callable[[Callable[..., object]], Callable[..., object]]:
    """Defines an operator by its schema and what it runs on the CPU and on CUDA devices.

    Args:
        schema: with `group`, the group's handle, among its arguments.
        operations: given its arguments, those in which the peers hear of its failure; None = the
            one of the schema's name.
    """
    name, arguments = schema.partition(")")[0].split("(")
    own = None if operations else constants.OPERATIONS.index(name)
    group_position = arguments.split(", ").index("int group")

    def define(kernel: Callable[..., object]) -> Callable[..., object]:
        def run(*args: Any) -> object:
            try:
                return kernel(*args)
            except CrossdockError:
                raise
            except Exception as error:
                if is_told(error):
                    raise
                # Of memory for an output mostly, or of an argument that the extension does not
                # take: the operation has not begun.
                joined = operations(*args) if operations else own
                group_of(args[group_position]).refuse(joined, type(error), str(error))

        LIBRARY.define(schema, tags=_TAGS)
        FUNCTIONS[name] = unseen(run)
        for key in ("CPU", "CUDA"):
            LIBRARY.impl(name, FUNCTIONS[name], key)
        return kernel

    return define


def shapes(name: str) -> Callable[[Callable[..., object]], Callable[..., object]]:
    """Registers what an operator returns when only shapes and dtypes are known."""
    return torch.library.register_fake(f"crossdock::{name}", lib=LIBRARY)


@overload
def as_rows(tensor: Tensor) -> Tensor: ...
@overload
def as_rows(tensor: Tensor | None) -> Tensor | None: ...
def as_rows(tensor: Tensor | None) -> Tensor | None:
    """Rows as the library takes them: slices begin anywhere, gradients have any strides."""
    if tensor is None or (tensor.is_contiguous() and tensor.data_ptr() % _ROW_ALIGNMENT == 0):
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def as_packed(tensor: Tensor | None) -> Tensor | None:
    """A tensor beside rows, as the library takes it: it may begin at any element."""
    return None if tensor is None else tensor.contiguous()


def check(
    group: EpGroup,
    operation: int | Operations,
    name: str,
    tensor: Tensor | None,
    dimensions: int,
    dtypes: tuple[torch.dtype, ...],
    strided: bool = False,
) -> None:
    """Refuses a tensor of foreign dtypes or dimensions, or, unless `strided`, not contiguous."""
    kind: type[Exception]
    if tensor is None:
        return
    if tensor.dtype not in dtypes:
        kind = TypeError
        known = ", ".join(str(dtype) for dtype in dtypes)
        problem = f"expected a dtype of {known}; got {tensor.dtype}"
    elif tensor.dim() != dimensions:
        kind = ValueError
        problem = f"expected {dimensions} dimensions, got shape {tuple(tensor.shape)}"
    elif not strided and not tensor.is_contiguous():
        kind = ValueError
        problem = (
            f"expected a contiguous tensor, got shape {tuple(tensor.shape)} with strides "
            f"{tensor.stride()}: call .contiguous()"
        )
    else:
        return
    group.refuse(operation, kind, f"{name}: {problem}")


def _next(order: Tensor | None) -> Tensor | None:
    """The order that an operation leaves. Made before it: memory may be exhausted."""
    return None if order is None else torch.zeros_like(order)


def _check_tokens(group: EpGroup, operation: int, name: str, rows: Tensor, expected: int) -> None:
    if rows.shape[0] != expected:
        problem = f"expected the plan's {expected} tokens, got shape {tuple(rows.shape)}"
        group.refuse(operation, ValueError, f"{name}: {problem}")


def _check_rows(group: EpGroup, tokens: Tensor, way: QuantiseWay | None) -> None:
    """Refuses tokens whose rows the group cannot take, under the name that they have here."""
    columns, row_bytes = tokens.shape[1], tokens.shape[1] * tokens.element_size()
    most = group.hidden * group.dtype.itemsize
    if way is not None and (
        tokens.dtype != torch.bfloat16 or columns == 0 or columns % way.block != 0
    ):
        problem = (
            f"expected bfloat16 with a multiple of {way.block} columns, to be quantised; got "
            f"{tokens.dtype} of shape {tuple(tokens.shape)}"
        )
    elif not 0 < row_bytes <= most or row_bytes % _ROW_ALIGNMENT != 0:
        problem = (
            f"expected rows of a positive multiple of {_ROW_ALIGNMENT} bytes and at most "
            f"{most} (the group's {group.hidden} elements of {group.dtype}), got {row_bytes}: "
            f"{tokens.dtype} of shape {tuple(tokens.shape)}"
        )
    else:
        return
    group.refuse(constants.DISPATCH, ValueError, f"tokens: {problem}")


def _check_scales(group: EpGroup, scales: Tensor) -> None:
    """Refuses scales whose rows the group cannot take, under the name that they have here."""
    row_bytes, most = scales.shape[1] * scales.element_size(), group.max_scale_bytes
    if not 0 < row_bytes <= most:
        problem = (
            f"expected rows of 1 to {most} bytes, the group's max_scale_bytes, got {row_bytes}: "
            f"{scales.dtype} of shape {tuple(scales.shape)}"
        )
        group.refuse(constants.DISPATCH, ValueError, f"scales: {problem}")


# ---- prepare ------------------------------------------------------------------------------------


@operator(
    "prepare(Tensor topk_idx, Tensor order, int group, int alignment, int parts=1) "
    "-> (Tensor, Tensor, Tensor, Tensor)"
)
def _prepare(
    topk_idx: Tensor, order: Tensor | None, group: int, alignment: int, parts: int = 1
) -> tuple[Tensor | None, ...]:
    """-> plan, info, offsets, order."""
    ep = group_of(group)
    check(ep, constants.PREPARE, "topk_idx", topk_idx, 2, INDICES)
    made = _outputs.make(_outputs.prepare(ep), ep.comm.pool, ep.first_order)
    plan, info, offsets = made.values()
    order = _next(order)
    # On a GPU an operation may fail after its call, and its offsets are read nevertheless.
    torch._foreach_zero_((info, offsets))
    places = ep.plan_parts
    if plan.is_cpu:
        plan[:_ROW_ALIGNMENT].zero_()  # see keep_prepared(): memory may hold an older plan
    try:
        given = {
            "topk_idx": topk_idx.contiguous(),
            "plan": plan,
            "counts": info[places.counts],
            "padded_counts": info[places.padded_counts],
            "offsets": offsets,
            "total": info[places.total],
            "rank_rows": info[places.rank_rows].view(places.num_ranks, places.num_ranks),
        }
        _calls.run(ep.core, "prepare", plan, given, alignment=alignment, parts=parts)
    except InvalidArgument as error:
        keep_prepared(error, plan, info, offsets)
        raise
    return plan, info, offsets, order


@shapes("prepare")
def _prepare_shapes(topk_idx, order, group, alignment, parts=1):
    return _outputs.traced(_outputs.prepare(group_of(group)), order)


# ---- Local calls --------------------------------------------------------------------------------


def _local(schema: str) -> Callable[[Callable[..., object]], Callable[..., object]]:
    """Defines an operator that concerns this rank alone: no peer hears of its mistakes."""

    def define(kernel: Callable[..., object]) -> Callable[..., object]:
        LIBRARY.define(schema, tags=_TAGS)
        for key in ("CPU", "CUDA"):
            LIBRARY.impl(schema.partition("(")[0], unseen(kernel), key)
        return kernel

    return define


def _row_experts_like(plan: Tensor, group: int, wide: bool) -> Tensor:
    dtype = torch.int64 if wide else torch.int32
    return plan.new_empty(group_of(group).rows, dtype=dtype)


@_local("row_experts(Tensor plan, int group, bool wide) -> Tensor")
def _row_experts(plan: Tensor, group: int, wide: bool) -> Tensor:
    out = _row_experts_like(plan, group, wide)
    given = {"plan": plan, "row_experts": out}
    _calls.run(group_of(group).core, "row_experts", plan, given)
    return out


shapes("row_experts")(_row_experts_like)


@_local("zone_ends(Tensor offsets) -> Tensor")
def _zone_ends(offsets: Tensor) -> Tensor:
    return offsets[1:].clone()


@shapes("zone_ends")
def _zone_ends_shapes(offsets):
    return offsets.new_empty(offsets.shape[0] - 1)


@_local("routing_layout(Tensor topk_idx, int group) -> (Tensor, Tensor, Tensor, Tensor)")
def _routing_layout(topk_idx: Tensor, group: int) -> tuple[Tensor, ...]:
    """-> rows_per_rank, rows_per_expert, token_in_rank, bad_ids."""
    ep = group_of(group)
    outputs = _outputs.routing_layout(ep, topk_idx.shape[0])
    made = _outputs.make(outputs, ep.comm.pool, topk_idx)
    given = made | {
        "topk_idx": topk_idx.contiguous(),
        "token_in_rank": made["token_in_rank"].view(torch.uint8),
    }
    experts = {"num_experts": ep.num_experts, "expert_ranks": ep.expert_ranks}
    _calls.run(ep.comm.core, "routing_layout", topk_idx, given, **experts)
    return tuple(made.values())


@shapes("routing_layout")
def _routing_layout_shapes(topk_idx, group):
    outputs = _outputs.routing_layout(group_of(group), topk_idx.shape[0])
    return _outputs.traced(outputs, topk_idx, ordered=False)


# ---- dispatch -----------------------------------------------------------------------------------


@operator(
    "dispatch(Tensor plan, Tensor tokens, Tensor? topk_weights, Tensor? scales, Tensor order, "
    "int group, SymInt num_tokens, SymInt topk, int quantise) "
    "-> (Tensor, Tensor?, Tensor?, Tensor?, Tensor?, Tensor)"
)
def _dispatch(
    plan: Tensor,
    tokens: Tensor,
    topk_weights: Tensor | None,
    scales: Tensor | None,
    order: Tensor | None,
    group: int,
    num_tokens: int,
    topk: int,
    quantise: int,
    portion: Portion = WHOLE,
) -> tuple[Tensor | None, ...]:
    """-> recv_tokens, recv_weights, recv_topk_idx, recv_scales, link, order.

    The operator has no `portion`: see _parts.py.
    """
    ep, way = group_of(group), _WAYS.get(quantise)
    operation = constants.DISPATCH
    check(ep, operation, "tokens", tokens, 2, PAYLOADS)
    check(ep, operation, "topk_weights", topk_weights, 2, _WEIGHTS)
    check(ep, operation, "scales", scales, 2, SCALES, strided=True)
    _check_tokens(ep, operation, "tokens", tokens, num_tokens)
    _check_rows(ep, tokens, way)
    if scales is not None:
        _check_scales(ep, scales)
    outputs = _outputs.dispatch(ep, tokens, topk_weights, scales, topk, way)
    made = portion.outputs(ep, operation, outputs) or _outputs.make(outputs, ep.comm.pool, plan)
    results = (*made.values(), _next(order))
    del made["link"]
    made |= {
        "plan": plan,
        "tokens": as_rows(tokens),
        "scales": scales,
        "topk_weights": as_packed(topk_weights),
    }
    _calls.run(ep.core, "dispatch", plan, made, quantise=quantise, **portion.fields())
    return results


@shapes("dispatch")
def _dispatch_shapes(plan, tokens, topk_weights, scales, order, group, num_tokens, topk, quantise):
    ep, way = group_of(group), _WAYS.get(quantise)
    outputs = _outputs.dispatch(ep, tokens, topk_weights, scales, topk, way)
    return _outputs.traced(outputs, order)


@operator(
    "dispatch_bwd(Tensor plan, Tensor? grad_recv_tokens, Tensor? grad_recv_weights, "
    "Tensor order, int group, SymInt num_tokens, SymInt topk) -> (Tensor?, Tensor?, Tensor)"
)
def _dispatch_bwd(
    plan: Tensor,
    grad_recv_tokens: Tensor | None,
    grad_recv_weights: Tensor | None,
    order: Tensor,
    group: int,
    num_tokens: int,
    topk: int,
) -> tuple[Tensor | None, ...]:
    """-> grad_tokens, grad_topk_weights, order."""
    ep = group_of(group)
    outputs = _outputs.dispatch_bwd(grad_recv_tokens, grad_recv_weights, num_tokens, topk)
    made = _outputs.make(outputs, ep.comm.pool, order)
    order = torch.zeros_like(order)
    given = {
        "plan": plan,
        "grad_recv_tokens": as_rows(grad_recv_tokens),
        "grad_recv_weights": as_packed(grad_recv_weights),
        **made,
    }
    _calls.run(ep.core, "dispatch_bwd", plan, given)
    return (*made.values(), order)


@shapes("dispatch_bwd")
def _dispatch_bwd_shapes(plan, grad_recv_tokens, grad_recv_weights, order, group, num_tokens, topk):
    outputs = _outputs.dispatch_bwd(grad_recv_tokens, grad_recv_weights, num_tokens, topk)
    return _outputs.traced(outputs, order)


# ---- combine ------------------------------------------------------------------------------------


@operator(
    "combine(Tensor plan, Tensor expert_out, Tensor? weights, Tensor order, int group, "
    "SymInt num_tokens, int wire=0) -> (Tensor, Tensor)"
)
def _combine(
    plan: Tensor,
    expert_out: Tensor,
    weights: Tensor | None,
    order: Tensor | None,
    group: int,
    num_tokens: int,
    wire: int = 0,
    portion: Portion = WHOLE,
) -> tuple[Tensor | None, ...]:
    """-> out, order. The operator has no `portion`: see _parts.py."""
    ep, operation = group_of(group), constants.COMBINE
    if weights is not None and ep.layout == "rank_major":
        expected = "expected None in rank_major, where a row stands for several experts, summed"
        problem = f"weights: {expected}; got shape {tuple(weights.shape)}"
        ep.refuse(operation, ValueError, problem)
    check(ep, operation, "expert_out", expert_out, 2, SUMMABLE)
    check(ep, operation, "weights", weights, 1, _WEIGHTS)
    outputs = _outputs.combine(expert_out, num_tokens)
    made = portion.outputs(ep, operation, outputs) or _outputs.make(outputs, ep.comm.pool, plan)
    order = _next(order)
    given = {"plan": plan, "expert_out": as_rows(expert_out), "weights": as_packed(weights), **made}
    _calls.run(ep.core, "combine", plan, given, wire=wire, **portion.fields())
    return (*made.values(), order)


@shapes("combine")
def _combine_shapes(plan, expert_out, weights, order, group, num_tokens, wire=0):
    return _outputs.traced(_outputs.combine(expert_out, num_tokens), order)


@operator(
    "combine_bwd(Tensor plan, Tensor grad_out, Tensor? expert_out, Tensor? weights, Tensor order, "
    "int group, SymInt rows) -> (Tensor, Tensor?, Tensor)"
)
def _combine_bwd(
    plan: Tensor,
    grad_out: Tensor,
    expert_out: Tensor | None,
    weights: Tensor | None,
    order: Tensor,
    group: int,
    rows: int,
) -> tuple[Tensor | None, ...]:
    """-> grad_expert_out, grad_weights (given expert_out and weights), order."""
    ep = group_of(group)
    outputs = _outputs.combine_bwd(grad_out, expert_out, weights, rows)
    made = _outputs.make(outputs, ep.comm.pool, order)
    order = torch.zeros_like(order)
    given = {
        "plan": plan,
        "grad_out": as_rows(grad_out),
        "expert_out": as_rows(expert_out),
        "weights": as_packed(weights),
        **made,
    }
    _calls.run(ep.core, "combine_bwd", plan, given)
    return (*made.values(), order)


@shapes("combine_bwd")
def _combine_bwd_shapes(plan, grad_out, expert_out, weights, order, group, rows):
    outputs = _outputs.combine_bwd(grad_out, expert_out, weights, rows)
    return _outputs.traced(outputs, order)
