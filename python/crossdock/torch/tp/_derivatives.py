"""Derivatives of the products, whose transfers run beside products as well.

Whether an operation runs in the backward pass must be the same on all ranks. It follows from the
inputs that require grad, never from the gradients that happen to arrive. There are no second
derivatives: asking for them raises an error.

With y = gathered(x) @ b, of each rank's own b:
  the gradient of x is grad @ b.T, summed and scattered; that of b is gathered(x).T @ grad.
With y = scattered(sum over ranks of x @ b):
  the gradient of x is gathered(grad) @ b.T, that of b is x.T @ gathered(grad).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from crossdock._core import constants

from .._custom_ops import LIBRARY
from .._derivatives import differentiated, register, requires_grad
from .._unseen import unseen
from . import _operators  # noqa: F401  (defines the operators)
from ._context import context_of
from ._operands import is_transposed

__all__ = ["Saved", "gathered_grads", "refuse_gradients", "scattered_grads"]

_OPS = torch.ops.crossdock
_EPILOGUES = {number: word for word, number in constants.GEMM_EPILOGUES.items()}
_below_autograd = torch._C._AutoDispatchBelowAutograd


class Saved:
    """The facts that the backward pass of a product needs beside tensors."""

    def __init__(
        self,
        needs: tuple[bool, ...],
        order: Tensor,
        main_grad: Tensor | None,
        context: int,
        tokens: Sequence[int] | None,
    ) -> None:
        self.a_needs, self.b_needs, self.bias_needs = needs
        # Not among the saved tensors: operations change it, and its value is nothing.
        self.order = order
        self.main_grad = main_grad
        self.handle = context
        self.context = context_of(context)  # lives until the backward pass
        self.tokens = tokens

    def bulk(
        self,
        array: Tensor,
        a: Tensor | None = None,
        b: Tensor | None = None,
        *,
        reduces: bool,
        accumulate: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """A transfer beside a product."""
        return differentiated(
            _OPS.tp_bulk.default,
            array,
            a,
            b,
            accumulate,
            self.order,
            self.handle,
            self.tokens,
            reduces,
        )

    def product(self, operator: Any, a: Tensor, b: Tensor, keep_gathered: bool = False) -> Any:
        """One of the three products."""
        tokens = None if operator is _OPS.tp_matmul_all_reduce.default else self.tokens
        return differentiated(
            operator, a, b, None, None, self.order, self.handle, tokens, 0, 0, keep_gathered, 0
        )

    def weight_operands(self, a: Tensor, grad: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """The factors of the gradient of b, or of b transposed where b is stored so."""
        return (grad.t(), a) if is_transposed(b) else (a.t(), grad)

    def weight_grad(self, product: Tensor, b: Tensor) -> Tensor | None:
        """The gradient of b from that product; None where it has been added to main_grad."""
        if self.main_grad is not None:
            return None
        return product.t() if is_transposed(b) else product

    def local_weight_grad(self, a: Tensor, grad: Tensor, b: Tensor) -> Tensor | None:
        """The gradient of b where nothing is left to transfer."""
        left, right = self.weight_operands(a, grad, b)
        main = self.main_grad
        if main is None:
            return self.weight_grad(torch.mm(left, right), b)
        if main.dtype == left.dtype:
            main.addmm_(left, right)
        elif left.is_cuda and _MM_WIDENS:
            main.add_(torch.mm(left, right, out_dtype=main.dtype))
        else:
            main.add_(torch.mm(left.to(main.dtype), right.to(main.dtype)))
        return None


# torch.mm(out_dtype=), which sums 16-bit operands into float32, on CUDA.
_MM_WIDENS = any(overload == "dtype" for overload in torch.ops.aten.mm.overloads())


def _before_activation(grad: Tensor, x: Tensor, epilogue: int) -> Tensor:
    """The gradient of what the activation was applied to."""
    word = _EPILOGUES[epilogue]
    if word == "relu":
        return torch.ops.aten.threshold_backward(grad, x, 0)
    if word == "gelu":
        return torch.ops.aten.gelu_backward(grad, x, approximate="tanh")
    return grad


def _bias_grad(grad: Tensor, bias: Tensor | None, needs: bool) -> Tensor | None:
    if bias is None or not needs:
        return None
    return grad.sum(0, dtype=torch.float32).to(bias.dtype)


class _AllGatherMatmul(torch.autograd.Function):
    """The gathered rows are kept from the forward pass, or gathered once more."""

    @staticmethod
    def forward(ctx, a, b, bias, main_grad, order, context, tokens, epilogue, algo, keep, needs):
        with _below_autograd():
            d, gathered, x = _OPS.tp_all_gather_matmul.default(
                a, b, bias, main_grad, order, context, tokens, epilogue, algo, keep, needs
            )
        ctx.saved = Saved(ctx.needs_input_grad[:3], order, main_grad, context, tokens)
        ctx.epilogue, ctx.keep = epilogue, keep
        rows = gathered if keep else a
        ctx.save_for_backward(rows if ctx.saved.b_needs else None, b, bias, x if epilogue else None)
        ctx.mark_non_differentiable(gathered, x)
        return d, gathered, x

    @staticmethod
    def backward(ctx, grad, grad_gathered, grad_x):
        rows, b, bias, x = ctx.saved_tensors
        grad = _before_activation(grad, x, ctx.epilogue)
        return (*gathered_grads(ctx.saved, ctx.keep, rows, b, bias, grad), *(None,) * 8)


def gathered_grads(
    saved: Saved,
    kept: bool,
    rows: Tensor | None,
    b: Tensor,
    bias: Tensor | None,
    grad: Tensor,
) -> tuple[Tensor | None, ...]:
    """The gradients of a, b and bias of a product of gathered rows.

    Args:
        kept: whether `rows` are those of all ranks, else they are this rank's.
        rows: None where b needs no gradient.
    """
    grad_a = grad_b = None
    # A gradient that lies neither way round (as that of a sum) would be copied with rows of M
    # elements where it is taken transposed, and M need not fill whole 16 bytes.
    grad = grad.contiguous()
    if not saved.b_needs or rows is None:
        if saved.a_needs:
            grad_a = saved.product(_OPS.tp_matmul_reduce_scatter.default, grad, b.t())[0]
    else:
        summand = None
        if kept:
            gathered = rows
            if saved.a_needs:
                summand = torch.mm(grad, b.t())
        elif saved.a_needs:
            gathered, summand = saved.bulk(rows, grad, b.t(), reduces=False)
        else:
            gathered, _ = saved.bulk(rows, reduces=False)
        if summand is None:
            grad_b = saved.local_weight_grad(gathered, grad, b)
        else:
            factors = saved.weight_operands(gathered, grad, b)
            grad_a, product = saved.bulk(
                summand, *factors, reduces=True, accumulate=saved.main_grad
            )
            grad_b = saved.weight_grad(product, b)
    return grad_a, grad_b, _bias_grad(grad, bias, saved.bias_needs)


def _run_summing(operator, ctx, a, b, bias, main_grad, order, context, tokens, epilogue, *others):
    """Runs a product that is summed over the ranks, and keeps what its gradient needs."""
    with _below_autograd():
        outputs = operator(a, b, bias, main_grad, order, context, tokens, epilogue, *others)
    ctx.saved = Saved(ctx.needs_input_grad[:3], order, main_grad, context, tokens)
    ctx.epilogue = epilogue
    _, gathered, x = outputs
    ctx.save_for_backward(a if ctx.saved.b_needs else None, b, bias, x if epilogue else None)
    ctx.mark_non_differentiable(gathered, x)
    return outputs


class _MatmulReduceScatter(torch.autograd.Function):
    """The gradient is gathered once, beside its first product. The bias is equal on all ranks."""

    @staticmethod
    def forward(ctx, *args):
        return _run_summing(_OPS.tp_matmul_reduce_scatter.default, ctx, *args)

    @staticmethod
    def backward(ctx, grad, grad_gathered, grad_x):
        a, b, bias, x = ctx.saved_tensors
        grad = _before_activation(grad, x, ctx.epilogue)
        return (*scattered_grads(ctx.saved, a, b, bias, grad), *(None,) * 8)


def scattered_grads(
    saved: Saved, a: Tensor | None, b: Tensor, bias: Tensor | None, grad: Tensor
) -> tuple[Tensor | None, ...]:
    """The gradients of a, b and bias of a product whose rows have been scattered."""
    grad_a = grad_b = None
    if saved.a_needs:
        keep = saved.b_needs or saved.bias_needs
        operator = _OPS.tp_all_gather_matmul.default
        grad_a, gathered, _ = saved.product(operator, grad, b.t(), keep)
    else:
        gathered, _ = saved.bulk(grad, reduces=False)
    if saved.b_needs and a is not None:
        grad_b = saved.local_weight_grad(a, gathered, b)
    return grad_a, grad_b, _bias_grad(gathered, bias, saved.bias_needs)


class _MatmulAllReduce(torch.autograd.Function):
    """The gradient is equal on all ranks: nothing is transferred."""

    @staticmethod
    def forward(ctx, *args):
        return _run_summing(_OPS.tp_matmul_all_reduce.default, ctx, *args)

    @staticmethod
    def backward(ctx, grad, grad_gathered, grad_x):
        a, b, bias, x = ctx.saved_tensors
        saved = ctx.saved
        grad = _before_activation(grad, x, ctx.epilogue)
        grad_a = torch.mm(grad, b.t()) if saved.a_needs else None
        grad_b = saved.local_weight_grad(a, grad, b) if saved.b_needs else None
        grads = grad_a, grad_b, _bias_grad(grad, bias, saved.bias_needs)
        return (*grads, *(None,) * 8)


class _ReplicatedMatmul(torch.autograd.Function):
    """a is equal on all ranks, whose products are of different columns: its gradient is a sum."""

    @staticmethod
    def forward(ctx, a, b, bias, main_grad, order, context, needs):
        with _below_autograd():
            d = _OPS.tp_replicated_matmul.default(a, b, bias, main_grad, order, context, needs)
        ctx.saved = Saved(ctx.needs_input_grad[:3], order, main_grad, context, None)
        ctx.save_for_backward(a if ctx.saved.b_needs else None, b, bias)
        return d

    @staticmethod
    def backward(ctx, grad):
        a, b, bias = ctx.saved_tensors
        saved = ctx.saved
        grad_a = None
        if saved.a_needs:
            grad_a = saved.product(_OPS.tp_matmul_all_reduce.default, grad, b.t())[0]
        grad_b = saved.local_weight_grad(a, grad, b) if saved.b_needs else None
        grads = grad_a, grad_b, _bias_grad(grad, bias, saved.bias_needs)
        return (*grads, None, None, None, None)


def refuse_gradients(name: str) -> None:
    """Lets an operator without a derivative say so."""
    operator = getattr(_OPS, name).default

    def plain(*args: Any, **options: Any) -> Any:
        if requires_grad(args):
            raise RuntimeError(
                f"{name}: expected tensors that require no gradient, as the operation has none; "
                "use torch.no_grad()"
            )
        with _below_autograd():
            return operator(*args, **options)

    LIBRARY.impl(name, unseen(plain), "Autograd")


register("tp_all_gather_matmul", _AllGatherMatmul)
register("tp_matmul_reduce_scatter", _MatmulReduceScatter)
register("tp_matmul_all_reduce", _MatmulAllReduce)
register("tp_replicated_matmul", _ReplicatedMatmul)
refuse_gradients("tp_scaled_matmul")
refuse_gradients("tp_bulk")
