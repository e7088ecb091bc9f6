"""Products under the names and signatures that ``torch.ops.symm_mem`` has.

They are functional, and name a process group instead of a context: the context is found, or made by
the first call of such sizes. Ranks have equal shares. There are no derivatives: compiled programs
get these operators after autograd, by `enable_async_tp`; `all_gather_matmul` and
`matmul_reduce_scatter` have derivatives.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._custom_ops import LIBRARY
from .._unseen import unseen
from ._context import TpContext
from ._derivatives import refuse_gradients
from ._functions import (
    all_gather_matmul,
    bulk_all_gather,
    bulk_reduce_scatter,
    matmul_reduce_scatter,
    scaled,
    scaled_fold,
    scaled_matmul_reduce_scatter,
)
from ._groups import comm_of_group, context_of_group, process_group
from ._operands import ALL_GATHER

__all__ = [
    "fused_all_gather_matmul",
    "fused_all_gather_scaled_matmul",
    "fused_matmul_reduce_scatter",
    "fused_scaled_matmul_reduce_scatter",
]

_OPS = torch.ops.crossdock
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)


def fused_all_gather_matmul(
    A_shard: Tensor,
    Bs: Sequence[Tensor],
    gather_dim: int,
    group_name: str,
    *,
    return_A: bool = True,
) -> tuple[Tensor | None, list[Tensor]]:
    """``torch.ops.symm_mem.fused_all_gather_matmul``: A is gathered once for all Bs.

    The transfer runs beside the product with the largest B.

    Args:
        A_shard: ``[..., K]``, this rank's part along `gather_dim`, which may be any dimension.
        Bs: ``[K, N]`` each; along the last dimension K is that of all ranks.
        group_name: of a process group.
        return_A: whether the gathered A is wanted, too.

    Returns:
        The gathered A or None, and its product with each B: `gather_dim` is outermost in memory.
    """
    A, outputs = _OPS.fused_all_gather_matmul.default(
        A_shard, list(Bs), gather_dim, group_name, return_A=return_A
    )
    return A, outputs


def fused_matmul_reduce_scatter(
    A: Tensor, B: Tensor, reduce_op: str, scatter_dim: int, group_name: str
) -> Tensor:
    """``torch.ops.symm_mem.fused_matmul_reduce_scatter``.

    Args:
        A: ``[..., K]``.
        B: ``[K, N]``.
        reduce_op: "sum" or "avg".
        scatter_dim: any dimension of the product, the last one included.
        group_name: of a process group.

    Returns:
        This rank's part of the sum, or of the mean, of ``A @ B`` over the ranks, contiguous.
    """
    return _OPS.fused_matmul_reduce_scatter.default(A, B, reduce_op, scatter_dim, group_name)


def fused_all_gather_scaled_matmul(
    A: Tensor,
    Bs: Sequence[Tensor],
    A_scale: Tensor,
    B_scales: Sequence[Tensor],
    gather_dim: int,
    group_name: str,
    biases: Sequence[Tensor | None],
    result_scales: Sequence[Tensor | None],
    out_dtypes: Sequence[torch.dtype | None],
    use_fast_accum: Sequence[bool],
) -> tuple[Tensor, list[Tensor]]:
    """``torch.ops.symm_mem.fused_all_gather_scaled_matmul``: A is gathered once for all Bs.

    Args:
        A: ``[..., K]`` in fp8, this rank's part along `gather_dim`, any but the last dimension.
        Bs: ``[K, N]`` each.
        A_scale: a single number, equal on all ranks; or one per row, ``[..., 1]``, of this rank's
            rows or of all ranks'.
        B_scales: a single number, or one per column ``[1, N]``, for each B.
        group_name: of a process group.
        biases, result_scales, out_dtypes, use_fast_accum: as of ``torch._scaled_mm``, for each B.

    Returns:
        The gathered A, and its product with each B.
    """
    return _OPS.fused_all_gather_scaled_matmul.default(
        A,
        list(Bs),
        A_scale,
        list(B_scales),
        gather_dim,
        group_name,
        list(biases),
        list(result_scales),
        list(out_dtypes),
        list(use_fast_accum),
    )


def fused_scaled_matmul_reduce_scatter(
    A: Tensor,
    B: Tensor,
    A_scale: Tensor,
    B_scale: Tensor,
    reduce_op: str,
    orig_scatter_dim: int,
    scatter_dim_after_maybe_reshape: int,
    group_name: str,
    output_shape: Sequence[int] | None,
    bias: Tensor | None = None,
    result_scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> Tensor:
    """``torch.ops.symm_mem.fused_scaled_matmul_reduce_scatter``.

    Args:
        A: ``[..., K]`` in fp8, perhaps flattened to two dimensions.
        B: ``[K, N]``.
        A_scale: a single number, or one per row of A.
        B_scale: a single number, or one per column of B.
        reduce_op: "sum" or "avg".
        orig_scatter_dim: dimension of `output_shape`, any but the last.
        scatter_dim_after_maybe_reshape: not read: `output_shape` says it.
        group_name: of a process group.
        output_shape: of ``A @ B`` before it was flattened; None = that of A, with N columns.
        bias: None; each rank would add it.
        result_scale, out_dtype, use_fast_accum: as of ``torch._scaled_mm``.

    Returns:
        As of `fused_matmul_reduce_scatter`.
    """
    return _OPS.fused_scaled_matmul_reduce_scatter.default(
        A,
        B,
        A_scale,
        B_scale,
        reduce_op,
        orig_scatter_dim,
        scatter_dim_after_maybe_reshape,
        group_name,
        None if output_shape is None else list(output_shape),
        bias,
        result_scale,
        out_dtype,
        use_fast_accum,
    )


# ---- Operators -----------------------------------------------------------------------------------


def _operator(schema: str, kernel: Any, shapes: Any) -> None:
    name = schema.partition("(")[0]

    def run(*args: Any, **options: Any) -> Any:
        with torch.no_grad():
            return kernel(*args, **options)

    LIBRARY.define(schema, tags=_TAGS)
    for key in ("CPU", "CUDA"):
        LIBRARY.impl(name, unseen(run), key)
    torch.library.register_fake(f"crossdock::{name}", shapes, lib=LIBRARY)
    refuse_gradients(name)


def _dim(name: str, given: int, tensor: Tensor) -> int:
    if not -tensor.dim() <= given < tensor.dim():
        raise ValueError(f"{name}: expected a dimension of {tuple(tensor.shape)}, got {given}")
    return given % tensor.dim()


def _rows_of(tensor: Tensor) -> int:
    return tensor.numel() // max(1, tensor.shape[-1])


def _check_matrices(Bs: Sequence[Tensor], columns: int) -> None:
    if len(Bs) == 0:
        raise ValueError("Bs: expected one matrix or more, got none")
    for B in Bs:
        if B.dim() != 2 or B.shape[0] != columns:
            raise ValueError(f"Bs: expected shapes [{columns}, N], got {tuple(B.shape)}")


def _all_gather_matmul(
    A_shard: Tensor, Bs: list[Tensor], gather_dim: int, group_name: str, *, return_A: bool = True
) -> tuple[Tensor | None, list[Tensor]]:
    ranks = comm_of_group(group_name).num_ranks
    dim = _dim("gather_dim", gather_dim, A_shard)
    last = dim == A_shard.dim() - 1
    _check_matrices(Bs, A_shard.shape[-1] * (ranks if last else 1))
    widest = max(range(len(Bs)), key=lambda index: Bs[index].shape[1])
    context = context_of_group(
        group_name, _rows_of(A_shard), A_shard.shape[-1], Bs[widest].shape[1], A_shard.dtype
    )
    if last:
        A = _gather_columns(A_shard, context)
        return (A if return_A else None), [torch.matmul(A, B) for B in Bs]
    wanted = return_A or len(Bs) > 1
    made = all_gather_matmul(A_shard, Bs[widest], context, gather_dim=dim, return_gathered=wanted)
    product, gathered = made if wanted else (made, A_shard)
    moved = gathered.movedim(dim, 0)
    outputs = [
        product if index == widest else torch.matmul(moved, B).movedim(0, dim)
        for index, B in enumerate(Bs)
    ]
    return (_laid(gathered, dim) if return_A else None), [_laid(out, dim) for out in outputs]


def _gather_columns(A_shard: Tensor, context: TpContext) -> Tensor:
    """A whose columns the ranks have: gathered as rows, and put side by side."""
    rows = A_shard.reshape(-1, A_shard.shape[-1])
    gathered, _ = bulk_all_gather(rows, context)
    parts = gathered.view(context.num_ranks, *A_shard.shape)
    return torch.cat(parts.unbind(0), -1)


def _laid(out: Tensor, dim: int) -> Tensor:
    """A result as `_outermost` says that it lies, which it does but for one rank's."""
    return out.movedim(dim, 0).contiguous().movedim(0, dim)


def _outermost(
    like: Tensor, shape: Sequence[Any], dim: int, dtype: torch.dtype | None = None
) -> Tensor:
    """A tensor of this shape that lies with `dim` outermost, unless that is the last one."""
    dtype = like.dtype if dtype is None else dtype
    if dim % len(shape) == len(shape) - 1:
        return like.new_empty(shape, dtype=dtype)
    dim = dim % len(shape)
    moved = [shape[dim], *shape[:dim], *shape[dim + 1 :]]
    return like.new_empty(moved, dtype=dtype).movedim(0, dim)


def _all_gather_matmul_shapes(A_shard, Bs, gather_dim, group_name, *, return_A=True):
    shape = list(A_shard.shape)
    shape[gather_dim] = shape[gather_dim] * process_group(group_name).size()
    A = _outermost(A_shard, shape, gather_dim) if return_A else None
    shapes = [[*shape[:-1], B.shape[1]] for B in Bs]
    return A, [_outermost(A_shard, one, gather_dim) for one in shapes]


_operator(
    "fused_all_gather_matmul(Tensor A, Tensor[] Bs, int gather_dim, str group_name, *, "
    "bool return_A=True) -> (Tensor?, Tensor[])",
    _all_gather_matmul,
    _all_gather_matmul_shapes,
)


def _averaged(out: Tensor, reduce_op: str, ranks: int) -> Tensor:
    if reduce_op == "sum":
        return out
    return out.div_(ranks) if out.dtype.itemsize > 1 else (out.float() / ranks).to(out.dtype)


def _check_reduce_op(reduce_op: str) -> None:
    if reduce_op not in ("sum", "avg"):
        raise ValueError(f"reduce_op: expected 'sum' or 'avg', got {reduce_op!r}")


def _matmul_reduce_scatter(
    A: Tensor, B: Tensor, reduce_op: str, scatter_dim: int, group_name: str
) -> Tensor:
    _check_reduce_op(reduce_op)
    _check_matrices([B], A.shape[-1])
    dim = _dim("scatter_dim", scatter_dim, A)
    ranks = comm_of_group(group_name).num_ranks
    rows, columns = _rows_of(A), B.shape[1]
    if dim == A.dim() - 1:
        # Columns of the product are scattered as rows: each rank's, one after the other.
        context = context_of_group(group_name, rows, columns, columns, A.dtype)
        parts = torch.stack(torch.matmul(A, B).chunk(ranks, -1))
        own, _ = bulk_reduce_scatter(parts.flatten(0, -2), context)
        out = own.view(*A.shape[:-1], columns // ranks)
    else:
        context = context_of_group(group_name, -(-rows // ranks), A.shape[-1], columns, A.dtype)
        out = matmul_reduce_scatter(A, B, context, scatter_dim=dim).contiguous()
    return _averaged(out, reduce_op, ranks)


def _scattered_shape(shape: Sequence[Any], dim: int, group_name: str) -> list[Any]:
    sizes = list(shape)
    sizes[dim] = sizes[dim] // process_group(group_name).size()
    return sizes


_operator(
    "fused_matmul_reduce_scatter(Tensor A, Tensor B, str reduce_op, int scatter_dim, "
    "str group_name) -> Tensor",
    _matmul_reduce_scatter,
    lambda A, B, reduce_op, scatter_dim, group_name: A.new_empty(
        _scattered_shape([*A.shape[:-1], B.shape[1]], scatter_dim, group_name)
    ),
)


def _all_gather_scaled_matmul(
    A: Tensor,
    Bs: list[Tensor],
    A_scale: Tensor,
    B_scales: list[Tensor],
    gather_dim: int,
    group_name: str,
    biases: list[Tensor | None],
    result_scales: list[Tensor | None],
    out_dtypes: list[torch.dtype | None],
    use_fast_accum: list[bool],
) -> tuple[Tensor, list[Tensor]]:
    _check_matrices(Bs, A.shape[-1])
    dim = _dim("gather_dim", gather_dim, A)
    if dim == A.dim() - 1:
        raise ValueError("gather_dim: expected any but the last dimension of A in fp8")
    given: dict[str, Sequence[Any]] = {
        "B_scales": B_scales,
        "biases": biases,
        "result_scales": result_scales,
        "out_dtypes": out_dtypes,
        "use_fast_accum": use_fast_accum,
    }
    for name, values in given.items():
        if len(values) != len(Bs):
            raise ValueError(f"{name}: expected one for each of {len(Bs)} Bs, got {len(values)}")
    comm = comm_of_group(group_name)
    if A_scale.numel() > 1 and A_scale.shape[dim] == A.shape[dim] * comm.num_ranks:
        A_scale = A_scale.chunk(comm.num_ranks, dim)[comm.rank]  # replicated: this rank's rows
    widest = max(range(len(Bs)), key=lambda index: Bs[index].shape[1])
    context = context_of_group(
        group_name, _rows_of(A), A.shape[-1], Bs[widest].shape[1], torch.bfloat16
    )
    fold = scaled_fold(context, ALL_GATHER, "gather_dim", A, Bs[widest], dim, None)

    def options(index: int) -> tuple[Tensor | None, Tensor | None, torch.dtype, bool]:
        dtype = _dtype(out_dtypes[index]) or Bs[index].dtype
        return biases[index], result_scales[index], dtype, use_fast_accum[index]

    product, rows, scales = scaled(
        fold, Bs[widest], A_scale, B_scales[widest], *options(widest), "auto", True
    )
    if B_scales[widest].numel() == 1:
        scales = A_scale.reshape(1)  # one of the tensor, equal on all ranks
    outputs = [
        product
        if index == widest
        else _scaled_mm(rows, B, scales, B_scales[index], *options(index))
        for index, B in enumerate(Bs)
    ]
    return fold.back(rows), [fold.back(output) for output in outputs]


@functools.cache
def _dtype(given: torch.dtype | int | None) -> torch.dtype | None:
    """Of what an operator finds in a list of dtypes, which is torch's number for it."""
    if given is None or isinstance(given, torch.dtype):
        return given
    number: Any = given
    return torch.ops.aten.empty.memory_format([0], dtype=number, device="cpu").dtype


def _scaled_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None,
    scale_result: Tensor | None,
    out_dtype: torch.dtype,
    use_fast_accum: bool,
) -> Tensor:
    """A product of this rank alone."""
    if scale_a.numel() > 1:
        scale_a = scale_a[:, None]
    if a.is_cuda:
        if (scale_a.numel() > 1) != (scale_b.numel() > 1):  # torch wants both of a kind
            scale_a = scale_a.expand(a.shape[0], 1).contiguous()
            scale_b = scale_b.reshape(1, -1).expand(1, b.shape[1]).contiguous()
        return torch._scaled_mm(
            a,
            b,
            scale_a,
            scale_b,
            bias=bias,
            scale_result=scale_result,
            out_dtype=out_dtype,
            use_fast_accum=use_fast_accum,
        )
    out = torch.mm(a.float() * scale_a, b.float() * scale_b.reshape(1, -1))
    if bias is not None:
        out += bias
    if out_dtype.itemsize == 1:
        most = torch.finfo(out_dtype).max
        out = (out if scale_result is None else out * scale_result).clamp(-most, most)
    return out.to(out_dtype)


def _all_gather_scaled_matmul_shapes(
    A,
    Bs,
    A_scale,
    B_scales,
    gather_dim,
    group_name,
    biases,
    result_scales,
    out_dtypes,
    use_fast_accum,
):
    shape = list(A.shape)
    shape[gather_dim] = shape[gather_dim] * process_group(group_name).size()
    outputs = [
        _outermost(A, [*shape[:-1], B.shape[1]], gather_dim, _dtype(dtype) or B.dtype)
        for B, dtype in zip(Bs, out_dtypes)
    ]
    return _outermost(A, shape, gather_dim), outputs


_operator(
    "fused_all_gather_scaled_matmul(Tensor A, Tensor[] Bs, Tensor A_scale, Tensor[] B_scales, "
    "int gather_dim, str group_name, Tensor?[] biases, Tensor?[] result_scales, "
    "ScalarType?[] out_dtypes, bool[] use_fast_accum) -> (Tensor, Tensor[])",
    _all_gather_scaled_matmul,
    _all_gather_scaled_matmul_shapes,
)


def _scaled_matmul_reduce_scatter(
    A: Tensor,
    B: Tensor,
    A_scale: Tensor,
    B_scale: Tensor,
    reduce_op: str,
    orig_scatter_dim: int,
    scatter_dim_after_maybe_reshape: int,
    group_name: str,
    output_shape: list[int] | None,
    bias: Tensor | None = None,
    result_scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> Tensor:
    _check_reduce_op(reduce_op)
    _check_matrices([B], A.shape[-1])
    if bias is not None:
        raise ValueError("bias: expected None, as each rank would add it")
    leading = list(A.shape if output_shape is None else output_shape)[:-1]
    A = A.reshape(*leading, A.shape[-1])
    if A_scale.numel() > 1:
        A_scale = A_scale.reshape(*leading, A_scale.shape[-1])
    dim = _dim("orig_scatter_dim", orig_scatter_dim, A)
    if dim == A.dim() - 1:
        raise ValueError("orig_scatter_dim: expected any but the last dimension of A in fp8")
    ranks, dtype = comm_of_group(group_name).num_ranks, out_dtype or B.dtype
    context = context_of_group(
        group_name,
        -(-_rows_of(A) // ranks),
        A.shape[-1],
        B.shape[1],
        torch.float32 if dtype == torch.float32 else torch.bfloat16,
    )
    out = scaled_matmul_reduce_scatter(
        A,
        B,
        context,
        scale_a=A_scale,
        scale_b=B_scale,
        scale_result=result_scale,
        out_dtype=dtype,
        use_fast_accum=use_fast_accum,
        scatter_dim=dim,
    )
    return _averaged(out.contiguous(), reduce_op, ranks)


def _scaled_matmul_reduce_scatter_shapes(
    A,
    B,
    A_scale,
    B_scale,
    reduce_op,
    orig_scatter_dim,
    scatter_dim_after_maybe_reshape,
    group_name,
    output_shape,
    bias=None,
    result_scale=None,
    out_dtype=None,
    use_fast_accum=False,
):
    leading = (A.shape if output_shape is None else output_shape)[:-1]
    shape = _scattered_shape([*leading, B.shape[1]], orig_scatter_dim, group_name)
    return A.new_empty(shape, dtype=out_dtype or B.dtype)


_operator(
    "fused_scaled_matmul_reduce_scatter(Tensor A, Tensor B, Tensor A_scale, Tensor B_scale, "
    "str reduce_op, int orig_scatter_dim, int scatter_dim_after_maybe_reshape, str group_name, "
    "SymInt[]? output_shape, Tensor? bias=None, Tensor? result_scale=None, "
    "ScalarType? out_dtype=None, bool use_fast_accum=False) -> Tensor",
    _scaled_matmul_reduce_scatter,
    _scaled_matmul_reduce_scatter_shapes,
)
