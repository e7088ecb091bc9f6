"""The operations as torch operators, with shapes for tracing.

They are functional, so that compilers may handle them like any other: each takes the group as an
integer, and takes and returns a small tensor `order`. Order tensors make the operations of one plan
a chain of data dependencies, and their gradients a chain in the other direction; their value is 0.
Outputs that were not asked for are tensors without elements. Derivatives: _derivatives.py.

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

from crossdock._quantize import QUANTIZATIONS, Quantization
from crossdock.errors import CrossdockError

from . import _calls
from ._calls import INDICES, PAYLOADS, SCALES, SUMMABLE
from ._group import EpGroup, group_of

__all__ = ["LIBRARY"]

LIBRARY = torch.library.Library("crossdock", "FRAGMENT")

_FLOAT32 = torch.float32
_WEIGHTS = (_FLOAT32,)
_ROW_ALIGNMENT = 16  # bytes
_WAYS = {way.code: way for way in QUANTIZATIONS.values()}  # operators carry numbers; 0 = none
# Inputs keep the strides that the model gave them: the library takes contiguous rows.
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)


def _operator(schema: str) -> Callable[[Callable[..., object]], Callable[..., object]]:
    """Defines an operator by its schema and what it runs on the CPU and on CUDA devices."""
    name, arguments = schema.partition(")")[0].split("(")
    operation = _calls.OPERATIONS.index(name)
    group_position = arguments.split(", ").index("int group")

    def define(kernel: Callable[..., object]) -> Callable[..., object]:
        def run(*args: Any) -> object:
            try:
                return kernel(*args)
            except RuntimeError as error:
                if isinstance(error, CrossdockError):
                    raise
                # Torch's, of memory for an output mostly: the operation has not begun.
                group_of(args[group_position]).refuse(operation, type(error), str(error))

        LIBRARY.define(schema, tags=_TAGS)
        for key in ("CPU", "CUDA"):
            # Compilers look at the operator, never into it.
            LIBRARY.impl(name, torch._disable_dynamo(run), key)
        return kernel

    return define


def _shapes(name: str) -> Callable[[Callable[..., object]], Callable[..., object]]:
    """Registers what an operator returns when only shapes and dtypes are known."""
    return torch.library.register_fake(f"crossdock::{name}", lib=LIBRARY)


def _absent(like: Tensor) -> Tensor:
    return like.new_empty(0)


def _given(output: Tensor | None, like: Tensor) -> Tensor:
    """An optional output as operators return it."""
    return _absent(like) if output is None else output


@overload
def _rows(tensor: Tensor) -> Tensor: ...
@overload
def _rows(tensor: Tensor | None) -> Tensor | None: ...
def _rows(tensor: Tensor | None) -> Tensor | None:
    """Rows as the library takes them: slices begin anywhere, gradients have any strides."""
    if tensor is None or (tensor.is_contiguous() and tensor.data_ptr() % _ROW_ALIGNMENT == 0):
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def _packed(tensor: Tensor | None) -> Tensor | None:
    """What lies beside rows, as the library takes it: it may begin at any element."""
    return None if tensor is None else tensor.contiguous()


def _check(
    group: EpGroup,
    operation: int,
    strided: tuple[str, ...] = (),
    **tensors: tuple[Tensor | None, int, tuple[torch.dtype, ...]],
) -> None:
    """Refuses tensors on another device, not contiguous, of foreign dtypes or dimensions.

    Args:
        strided: arguments that need not be contiguous.
        tensors: by argument (tensor, number of dimensions, dtypes that it may have).
    """
    kind: type[Exception]
    for name, (tensor, dimensions, dtypes) in tensors.items():
        if tensor is None:
            continue
        if tensor.device != group.comm.device:
            kind = ValueError
            problem = f"expected a tensor on {group.comm.device}, got one on {tensor.device}"
        elif tensor.dtype not in dtypes:
            kind = TypeError
            known = ", ".join(str(dtype) for dtype in dtypes)
            problem = f"expected a dtype of {known}; got {tensor.dtype}"
        elif tensor.dim() != dimensions:
            kind = ValueError
            problem = f"expected {dimensions} dimensions, got shape {tuple(tensor.shape)}"
        elif name not in strided and not tensor.is_contiguous():
            kind = ValueError
            problem = (
                f"expected a contiguous tensor, got shape {tuple(tensor.shape)} with strides "
                f"{tensor.stride()}: call .contiguous()"
            )
        else:
            continue
        group.refuse(operation, kind, f"{name}: {problem}")


def _check_tokens(group: EpGroup, operation: int, name: str, rows: Tensor, expected: int) -> None:
    if rows.shape[0] != expected:
        problem = f"expected the plan's {expected} tokens, got shape {tuple(rows.shape)}"
        group.refuse(operation, ValueError, f"{name}: {problem}")


def _scale_dtype(way: Quantization) -> torch.dtype:
    return _FLOAT32 if way.scale == "float32" else _calls.E8M0


def _check_rows(group: EpGroup, x: Tensor, way: Quantization | None) -> None:
    """Refuses an x whose rows the group cannot take, under the name that it has here."""
    columns, row_bytes = x.shape[1], x.shape[1] * x.element_size()
    most = group.hidden * group.dtype.itemsize
    if way is not None and (
        x.dtype != torch.bfloat16 or columns == 0 or columns % way.block != 0
    ):
        problem = (
            f"expected bfloat16 with a multiple of {way.block} columns, to be quantised; got "
            f"{x.dtype} of shape {tuple(x.shape)}"
        )
    elif not 0 < row_bytes <= most or row_bytes % _ROW_ALIGNMENT != 0:
        problem = (
            f"expected rows of a positive multiple of {_ROW_ALIGNMENT} bytes and at most the "
            f"group's {most}, got {row_bytes}: {x.dtype} of shape {tuple(x.shape)}"
        )
    else:
        return
    group.refuse(_calls.DISPATCH, ValueError, f"x: {problem}")


def _check_scales(group: EpGroup, scales: Tensor) -> None:
    """Refuses scales whose rows the group cannot take, under the name that they have here."""
    row_bytes, most = scales.shape[1] * scales.element_size(), group.max_scale_bytes
    if not 0 < row_bytes <= most:
        problem = (
            f"expected rows of 1 to {most} bytes, got {row_bytes}: {scales.dtype} of shape "
            f"{tuple(scales.shape)}"
        )
        group.refuse(_calls.DISPATCH, ValueError, f"scales: {problem}")


# ---- prepare ------------------------------------------------------------------------------------


@_operator(
    "prepare(Tensor topk_idx, Tensor order, int group, int alignment) "
    "-> (Tensor, Tensor, Tensor, Tensor)"
)
def _prepare(
    topk_idx: Tensor, order: Tensor, group: int, alignment: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """-> plan, counts (see PlanParts), offsets, order.

    Offsets have memory of their own: for GPUs torch 2.11 compiles ``bucketize`` and
    ``searchsorted`` so that boundaries are read from where their memory begins.
    """
    ep = group_of(group)
    _check(ep, _calls.PREPARE, topk_idx=(topk_idx, 2, INDICES))
    parts = ep.plan_parts
    plan = topk_idx.new_empty(ep.plan_bytes, dtype=torch.uint8)
    info, offsets = _counts_like(topk_idx, ep)
    # On a GPU an operation may fail after its call, and offsets are read all the same.
    torch._foreach_zero_((info, offsets))
    order = torch.zeros_like(order)
    _calls.prepare(
        ep.core,
        topk_idx.contiguous(),
        plan,
        info[parts.counts],
        info[parts.padded_counts],
        offsets,
        info[parts.total],
        info[parts.rank_rows].view(parts.num_ranks, parts.num_ranks),
        alignment=alignment,
    )
    return plan, info, offsets, order


@_shapes("prepare")
def _prepare_shapes(topk_idx, order, group, alignment):
    ep = group_of(group)
    plan = topk_idx.new_empty(ep.plan_bytes, dtype=torch.uint8)
    return plan, *_counts_like(topk_idx, ep), torch.empty_like(order)


def _counts_like(like: Tensor, ep: EpGroup) -> tuple[Tensor, Tensor]:
    """What prepare counts, of undefined content: see PlanParts, and the zones' offsets."""
    sizes = ep.plan_parts.num_elements, ep.num_local_experts + 1
    info, offsets = (like.new_empty(size, dtype=torch.int32) for size in sizes)
    return info, offsets


# ---- Local calls --------------------------------------------------------------------------------


def _local(schema: str) -> Callable[[Callable[..., object]], Callable[..., object]]:
    """Defines an operator that concerns this rank alone: no peer hears of its mistakes."""

    def define(kernel: Callable[..., object]) -> Callable[..., object]:
        LIBRARY.define(schema, tags=_TAGS)
        for key in ("CPU", "CUDA"):
            LIBRARY.impl(schema.partition("(")[0], torch._disable_dynamo(kernel), key)
        return kernel

    return define


def _row_experts_like(plan: Tensor, group: int, wide: bool) -> Tensor:
    dtype = torch.int64 if wide else torch.int32
    return plan.new_empty(group_of(group).rows, dtype=dtype)


@_local("row_experts(Tensor plan, int group, bool wide) -> Tensor")
def _row_experts(plan: Tensor, group: int, wide: bool) -> Tensor:
    out = _row_experts_like(plan, group, wide)
    _calls.row_experts(group_of(group).core, plan, out)
    return out


_shapes("row_experts")(_row_experts_like)


@_local("zone_ends(Tensor offsets) -> Tensor")
def _zone_ends(offsets: Tensor) -> Tensor:
    return offsets[1:].clone()


@_shapes("zone_ends")
def _zone_ends_shapes(offsets):
    return offsets.new_empty(offsets.shape[0] - 1)


def _layout_like(
    topk_idx: Tensor, group: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    ep = group_of(group)
    per_rank = topk_idx.new_empty(ep.comm.num_ranks, dtype=torch.int32)
    per_expert = topk_idx.new_empty(ep.num_experts, dtype=torch.int32)
    in_rank = topk_idx.new_empty((topk_idx.shape[0], ep.comm.num_ranks), dtype=torch.bool)
    return per_rank, per_expert, in_rank, topk_idx.new_empty(1, dtype=torch.int32)


@_local("routing_layout(Tensor topk_idx, int group) -> (Tensor, Tensor, Tensor, Tensor)")
def _routing_layout(topk_idx: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """-> rows_per_rank, rows_per_expert, token_in_rank, bad_ids."""
    ep = group_of(group)
    outputs = _layout_like(topk_idx, group)
    _calls.routing_layout(ep.comm.core, ep.num_experts, topk_idx.contiguous(), *outputs)
    return outputs


_shapes("routing_layout")(_layout_like)


# ---- dispatch -----------------------------------------------------------------------------------


@_operator(
    "dispatch(Tensor plan, Tensor x, Tensor? topk_weights, Tensor? scales, Tensor order, "
    "int group, SymInt num_tokens, SymInt topk, int quantize) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
def _dispatch(
    plan: Tensor,
    x: Tensor,
    topk_weights: Tensor | None,
    scales: Tensor | None,
    order: Tensor,
    group: int,
    num_tokens: int,
    topk: int,
    quantize: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """-> tokens, weights, topk_idx, scales, link, order.

    `link` stands for quantised tokens in autograd: fp8 tensors cannot have wider gradients.
    """
    ep, way = group_of(group), _WAYS.get(quantize)
    operation = _calls.DISPATCH
    _check(
        ep,
        operation,
        strided=("scales",),
        x=(x, 2, PAYLOADS),
        topk_weights=(topk_weights, 2, _WEIGHTS),
        scales=(scales, 2, SCALES),
    )
    _check_tokens(ep, operation, "x", x, num_tokens)
    _check_rows(ep, x, way)
    if scales is not None:
        _check_scales(ep, scales)
    pool, rows = ep.comm.pool, ep.rows
    rank_major = ep.layout == "rank_major"
    dtype = x.dtype if way is None else torch.float8_e4m3fn
    tokens = pool.empty((rows, x.shape[1]), dtype)
    weights = idx = recv_scales = link = None
    if topk_weights is not None:
        weights = pool.empty((rows, topk) if rank_major else (rows,), _FLOAT32)
    if rank_major:
        idx = pool.empty((rows, topk), torch.int32)
    if way is not None:
        recv_scales = pool.empty((rows, x.shape[1] // way.block), _scale_dtype(way))
        link = _link(x, rows)
    elif scales is not None:
        recv_scales = pool.empty((rows, scales.shape[1]), scales.dtype)
    order = torch.zeros_like(order)
    _calls.dispatch(
        ep.core,
        plan,
        _rows(x),
        tokens,
        scales=scales,
        topk_weights=_packed(topk_weights),
        recv_scales=recv_scales,
        recv_weights=weights,
        recv_topk_idx=idx,
        quantise=quantize,
    )
    optional = _given(weights, x), _given(idx, x), _given(recv_scales, x), _given(link, x)
    return (tokens, *optional, order)


def _link(x: Tensor, rows: int) -> Tensor:
    """As many elements as the received rows have, in the memory of one."""
    return x.new_zeros(1).expand(rows, x.shape[1])


@_shapes("dispatch")
def _dispatch_shapes(plan, x, topk_weights, scales, order, group, num_tokens, topk, quantize):
    ep, way = group_of(group), _WAYS.get(quantize)
    rank_major = ep.layout == "rank_major"
    rows, columns = ep.rows, x.shape[1]
    weights, idx, recv_scales, link = (_absent(x) for _ in range(4))
    if topk_weights is not None:
        weights = x.new_empty((rows, topk) if rank_major else (rows,), dtype=_FLOAT32)
    if rank_major:
        idx = x.new_empty((rows, topk), dtype=torch.int32)
    if way is not None:
        recv_scales = x.new_empty((rows, columns // way.block), dtype=_scale_dtype(way))
        link = _link(x, rows)
    elif scales is not None:
        recv_scales = scales.new_empty((rows, scales.shape[1]))
    tokens = x.new_empty((rows, columns), dtype=x.dtype if way is None else torch.float8_e4m3fn)
    return tokens, weights, idx, recv_scales, link, torch.empty_like(order)


@_operator(
    "dispatch_bwd(Tensor plan, Tensor? grad_recv_tokens, Tensor? grad_recv_weights, "
    "Tensor order, int group, SymInt num_tokens, SymInt topk) -> (Tensor, Tensor, Tensor)"
)
def _dispatch_bwd(
    plan: Tensor,
    grad_recv_tokens: Tensor | None,
    grad_recv_weights: Tensor | None,
    order: Tensor,
    group: int,
    num_tokens: int,
    topk: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """-> grad_tokens, grad_topk_weights, order."""
    ep = group_of(group)
    grad_tokens = grad_topk_weights = None
    if grad_recv_tokens is not None:
        grad_tokens = grad_recv_tokens.new_empty(num_tokens, grad_recv_tokens.shape[1])
    if grad_recv_weights is not None:
        grad_topk_weights = grad_recv_weights.new_empty(num_tokens, topk)
    order = torch.zeros_like(order)
    _calls.dispatch_bwd(
        ep.core,
        plan,
        grad_recv_tokens=_rows(grad_recv_tokens),
        grad_recv_weights=_packed(grad_recv_weights),
        grad_tokens=grad_tokens,
        grad_topk_weights=grad_topk_weights,
    )
    return _given(grad_tokens, order), _given(grad_topk_weights, order), order


@_shapes("dispatch_bwd")
def _dispatch_bwd_shapes(plan, grad_recv_tokens, grad_recv_weights, order, group, num_tokens, topk):
    grad_tokens = grad_topk_weights = None
    if grad_recv_tokens is not None:
        grad_tokens = grad_recv_tokens.new_empty(num_tokens, grad_recv_tokens.shape[1])
    if grad_recv_weights is not None:
        grad_topk_weights = grad_recv_weights.new_empty(num_tokens, topk)
    return _given(grad_tokens, order), _given(grad_topk_weights, order), torch.empty_like(order)


# ---- combine ------------------------------------------------------------------------------------


@_operator(
    "combine(Tensor plan, Tensor expert_out, Tensor? weights, Tensor order, int group, "
    "SymInt num_tokens) -> (Tensor, Tensor)"
)
def _combine(
    plan: Tensor,
    expert_out: Tensor,
    weights: Tensor | None,
    order: Tensor,
    group: int,
    num_tokens: int,
) -> tuple[Tensor, Tensor]:
    """-> out, order."""
    ep = group_of(group)
    if weights is not None and ep.layout == "rank_major":
        expected = "expected None in rank_major, where a row stands for several experts, summed"
        problem = f"weights: {expected}; got shape {tuple(weights.shape)}"
        ep.refuse(_calls.COMBINE, ValueError, problem)
    _check(
        ep, _calls.COMBINE, expert_out=(expert_out, 2, SUMMABLE), weights=(weights, 1, _WEIGHTS)
    )
    out = expert_out.new_empty(num_tokens, expert_out.shape[1])
    order = torch.zeros_like(order)
    _calls.combine(ep.core, plan, _rows(expert_out), out, weights=_packed(weights))
    return out, order


@_shapes("combine")
def _combine_shapes(plan, expert_out, weights, order, group, num_tokens):
    return expert_out.new_empty(num_tokens, expert_out.shape[1]), torch.empty_like(order)


@_operator(
    "combine_bwd(Tensor plan, Tensor grad_out, Tensor? expert_out, Tensor? weights, Tensor order, "
    "int group, SymInt rows) -> (Tensor, Tensor, Tensor)"
)
def _combine_bwd(
    plan: Tensor,
    grad_out: Tensor,
    expert_out: Tensor | None,
    weights: Tensor | None,
    order: Tensor,
    group: int,
    rows: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """-> grad_expert_out, grad_weights (given expert_out and weights), order."""
    ep = group_of(group)
    grad_expert_out = ep.comm.pool.empty((rows, grad_out.shape[1]), grad_out.dtype)
    grad_weights = None
    if expert_out is not None and weights is not None:
        grad_weights = ep.comm.pool.empty(weights.shape, _FLOAT32)
    order = torch.zeros_like(order)
    _calls.combine_bwd(
        ep.core,
        plan,
        _rows(grad_out),
        grad_expert_out,
        expert_out=_rows(expert_out),
        weights=_packed(weights),
        grad_weights=grad_weights,
    )
    return grad_expert_out, _given(grad_weights, order), order


@_shapes("combine_bwd")
def _combine_bwd_shapes(plan, grad_out, expert_out, weights, order, group, rows):
    grad_weights = None if expert_out is None else torch.empty_like(weights)
    return (
        grad_out.new_empty(rows, grad_out.shape[1]),
        _given(grad_weights, order),
        torch.empty_like(order),
    )
