"""Products as torch operators, with shapes for tracing. Derivatives: _derivatives.py.

Each takes its context as an integer, and changes `order`, a tensor of the context, as its schema
says: so compilers keep all operations of a context, in their order, also on a rank whose results
have no elements. A matrix b is ``[K, N]`` of any strides: the transposed view of a weight
``[N, K]`` is multiplied where it lies. Outputs that were not asked for are tensors without
elements: compilers take no None from operators that change something. Arguments are checked where
an operator runs, so also inside compiled graphs: most of them by the library.

The operators are defined by schema rather than by ``torch.library.custom_op``, whose wrappers cost
up to 60 microseconds a call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from crossdock._core import constants
from crossdock.errors import CrossdockError

from .._calls import current_stream, spec
from .._custom_ops import LIBRARY, as_rows
from .._direct import FUNCTIONS
from .._unseen import unseen
from ._context import TpContext, context_of, rows_of_d
from ._operands import ALL_GATHER, ALL_REDUCE, BULK, REDUCE_SCATTER, Operands

__all__ = ["define", "scaled_matmul", "shapes_of"]

# Inputs keep the strides that the model gave them.
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)


def define(
    schema: str, operation_of: Callable[..., int]
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Defines an operator by its schema and what it runs on the CPU and on CUDA devices.

    Args:
        operation_of: the operation that peers are in, by the operator's arguments.
    """
    name, arguments = schema.partition(") ->")[0].split("(", 1)
    position = arguments.split(", ").index("int context")

    def decorate(kernel: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            try:
                return kernel(*args)
            except (RuntimeError, TypeError, ValueError) as error:
                if isinstance(error, CrossdockError):
                    raise
                # The operation has not begun: a bad argument, or torch has no memory for a result.
                context = context_of(args[position])
                context.refuse(operation_of(*args), type(error), str(error))

        LIBRARY.define(schema, tags=_TAGS)
        FUNCTIONS[name] = unseen(run)
        for key in ("CPU", "CUDA"):
            LIBRARY.impl(name, FUNCTIONS[name], key)
        return kernel

    return decorate


def shapes_of(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers what an operator returns when only shapes and dtypes are known."""
    return torch.library.register_fake(f"crossdock::{name}", lib=LIBRARY)


# ---- Products ------------------------------------------------------------------------------------

_PRODUCT = (
    "(Tensor a, Tensor b, Tensor? bias, Tensor? main_grad, Tensor(a!) order, int context, "
    "SymInt[]? tokens, int epilogue, int algo, bool keep_gathered, int needs) "
    "-> (Tensor, Tensor, Tensor)"
)


def _define_product(name: str, word: str) -> None:
    """Defines one of the three products. Results: d, gathered, and x before the activation.

    `main_grad` is for the derivative alone. `needs` says which gradients there will be, by bits of
    `Needs`, and with them what runs in the backward pass: ranks that differ learn it here.
    """
    operation = constants.GEMM_OPERATIONS[word]

    @define(name + _PRODUCT, lambda *_: operation)
    def kernel(
        a: Tensor,
        b: Tensor,
        bias: Tensor | None,
        main_grad: Tensor | None,
        order: Tensor,
        context: int,
        tokens: Sequence[int] | None,
        epilogue: int,
        algo: int,
        keep_gathered: bool,
        needs: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        tp = context_of(context)
        operands = Operands(a, b)
        d = a.new_empty((rows_of_d(tp, operation, a.shape[0], tokens), b.shape[1]))
        args = operands.options()
        args["d"] = spec(d)
        if bias is not None:
            bias = bias.contiguous()
            args["bias"] = spec(bias)
        if tokens is not None:
            args["tokens_per_rank"] = tokens
        if algo:
            args["algo"] = algo
        gathered = x = a.new_empty(0)
        if epilogue:
            args["epilogue"] = epilogue
            if needs:
                x = torch.empty_like(d)
                args["pre_activation"] = spec(x)
        if keep_gathered:
            gathered = a.new_empty((d.shape[0], a.shape[1]))
            args["gathered"] = spec(gathered)
        args["tag"] = tp.take_tag(needs and 2 * needs + int(keep_gathered))
        getattr(tp.core, word)(args | {"stream": current_stream(a.device)})
        return d, gathered, a.new_empty(0) if x is gathered else x

    @shapes_of(name)
    def shapes(
        a,
        b,
        bias,
        main_grad,
        order,
        context,
        tokens,
        epilogue,
        algo,
        keep_gathered,
        needs,
    ):
        rows = rows_of_d(context_of(context), operation, a.shape[0], tokens)
        d = a.new_empty((rows, b.shape[1]))
        gathered = a.new_empty((rows, a.shape[1]) if keep_gathered else 0)
        return d, gathered, torch.empty_like(d) if epilogue and needs else a.new_empty(0)


_define_product("tp_all_gather_matmul", "all_gather")
_define_product("tp_matmul_reduce_scatter", "reduce_scatter")
_define_product("tp_matmul_all_reduce", "all_reduce")


@define(
    "tp_replicated_matmul(Tensor a, Tensor b, Tensor? bias, Tensor? main_grad, Tensor(a!) order, "
    "int context, int needs) -> Tensor",
    lambda *_: ALL_REDUCE,
)
def _replicated_matmul(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    main_grad: Tensor | None,
    order: Tensor,
    context: int,
    needs: int,
) -> Tensor:
    """A product of this rank alone. In the backward pass the gradient of a is summed over ranks.

    Whether there will be one, the ranks compare with the context's next operation.
    """
    context_of(context).add_tag(needs)
    return torch.mm(a, b) if bias is None else torch.addmm(bias, a, b)


@shapes_of("tp_replicated_matmul")
def _replicated_matmul_shapes(a, b, bias, main_grad, order, context, needs):
    return a.new_empty((a.shape[0], b.shape[1]))


# ---- Products of fp8 -----------------------------------------------------------------------------


@define(
    "tp_scaled_matmul(Tensor a, Tensor b, Tensor? a_scale, Tensor? b_scale, Tensor? bias, "
    "Tensor? out_scale, Tensor(a!) order, int context, SymInt[]? tokens, int operation, "
    "int epilogue, int algo, bool keep_gathered, ScalarType out_dtype, bool fast_accumulate) "
    "-> (Tensor, Tensor, Tensor)",
    lambda *args: args[9],
)
def scaled_matmul(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor | None,
    b_scale: Tensor | None,
    bias: Tensor | None,
    out_scale: Tensor | None,
    order: Tensor,
    context: int,
    tokens: Sequence[int] | None,
    operation: int,
    epilogue: int,
    algo: int,
    keep_gathered: bool,
    out_dtype: torch.dtype,
    fast_accumulate: bool,
    needs: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """-> d, gathered, and the scales of gathered. `needs`: as of the products above."""
    tp = context_of(context)
    operands = Operands(a, b)
    rows = rows_of_d(tp, operation, a.shape[0], tokens)
    d = a.new_empty((rows, b.shape[1]), dtype=out_dtype)
    gathered = a.new_empty((rows, a.shape[1]) if keep_gathered else 0)
    gathered_scale = _gathered_scale(tp, a, a_scale, rows, keep_gathered)
    beside = {
        "a_scale": a_scale,
        "b_scale": b_scale,
        "bias": bias,
        "d_scale": out_scale,
    }
    packed = {name: t.contiguous() for name, t in beside.items() if t is not None}
    args = operands.options() | {name: spec(tensor) for name, tensor in packed.items()}
    if keep_gathered:
        args["gathered"] = spec(gathered)
        if a_scale is not None:
            args["gathered_scale"] = spec(gathered_scale)
    words = {number: word for word, number in constants.GEMM_OPERATIONS.items()}
    args |= {
        "d": spec(d),
        "epilogue": epilogue,
        "algo": algo,
        "tokens_per_rank": tokens,
        "fast_accumulate": int(fast_accumulate),
        "tag": tp.take_tag(needs and 2 * needs + int(keep_gathered)),
        "stream": current_stream(a.device),
    }
    getattr(tp.core, words[operation])(args)
    return d, gathered, gathered_scale


def _gathered_scale(
    context: TpContext, a: Tensor, a_scale: Tensor | None, rows: Any, wanted: bool
) -> Tensor:
    """A number of each rank, or scales of all ranks' rows."""
    if not wanted or a_scale is None:
        return a.new_empty(0, dtype=torch.float32)
    single = a_scale.dim() == 1 and a_scale.shape[0] == 1
    shape = (context.num_ranks,) if single else (rows, *a_scale.shape[1:])
    return a_scale.new_empty(shape)


@shapes_of("tp_scaled_matmul")
def _scaled_matmul_shapes(
    a,
    b,
    a_scale,
    b_scale,
    bias,
    out_scale,
    order,
    context,
    tokens,
    operation,
    epilogue,
    algo,
    keep_gathered,
    out_dtype,
    fast_accumulate,
):
    rows = rows_of_d(context_of(context), operation, a.shape[0], tokens)
    d = a.new_empty((rows, b.shape[1]), dtype=out_dtype)
    gathered = a.new_empty((rows, a.shape[1]) if keep_gathered else 0)
    return d, gathered, _gathered_scale(context_of(context), a, a_scale, rows, keep_gathered)


# ---- Transfers beside a product ------------------------------------------------------------------


@define(
    "tp_bulk(Tensor array, Tensor? a, Tensor? b, Tensor(b!)? accumulate, Tensor(a!) order, "
    "int context, SymInt[]? tokens, bool reduces) -> (Tensor, Tensor)",
    lambda *_: BULK,
)
def _bulk(
    array: Tensor,
    a: Tensor | None,
    b: Tensor | None,
    accumulate: Tensor | None,
    order: Tensor,
    context: int,
    tokens: Sequence[int] | None,
    reduces: bool,
) -> tuple[Tensor, Tensor]:
    """Gathers or reduces `array` beside a @ b, which is added to `accumulate` if that is given.

    -> the array, and the product unless it has been added.
    """
    tp = context_of(context)
    rows = as_rows(array)
    collective = REDUCE_SCATTER if reduces else ALL_GATHER
    out = array.new_empty((rows_of_d(tp, collective, array.shape[0], tokens), array.shape[1]))
    product: dict[str, Any] | None = None
    d = array.new_empty(0)
    if a is not None and b is not None:
        d = a.new_empty((a.shape[0], b.shape[1])) if accumulate is None else accumulate
        if 0 in (*a.shape, *b.shape):  # the library has no products without columns
            if accumulate is None:
                d.zero_()
        else:
            operands = Operands(a, b, own=True)
            product = operands.options() | {"d": spec(d)}
            if accumulate is not None:
                product |= {"c": product["d"], "beta": 1.0}
    tp.core.bulk(
        {
            "product": product,
            "collective": collective,
            "in": spec(rows),
            "out": spec(out),
            "tokens_per_rank": tokens,
            "tag": tp.take_tag(0),
            "stream": current_stream(array.device),
        }
    )
    return out, d if accumulate is None else array.new_empty(0)


@shapes_of("tp_bulk")
def _bulk_shapes(array, a, b, accumulate, order, context, tokens, reduces):
    collective = REDUCE_SCATTER if reduces else ALL_GATHER
    rows = rows_of_d(context_of(context), collective, array.shape[0], tokens)
    out = array.new_empty((rows, array.shape[1]))
    if a is None or b is None or accumulate is not None:
        return out, array.new_empty(0)
    return out, a.new_empty((a.shape[0], b.shape[1]))
