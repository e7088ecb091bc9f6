"""Linear layers whose weights are spread over the ranks, as functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from crossdock._gemm_config import Algo

from .._sharding import local_tensor
from ._arguments import require
from ._context import TpContext
from ._functions import (
    Activation,
    activated,
    all_gather_matmul,
    fp8_matmul,
    matmul_all_reduce,
    matmul_reduce_scatter,
    replicated_matmul,
)
from ._operands import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER

__all__ = ["column_parallel_linear", "row_parallel_linear"]


def column_parallel_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    context: TpContext,
    *,
    sequence_parallel: bool = True,
    sequence_dim: int = 0,
    activation: Activation | None = None,
    tokens_per_rank: Sequence[int] | None = None,
    save_gathered: bool = True,
    fused_wgrad: bool = False,
    fp8: bool = False,
    algo: Algo = "auto",
) -> torch.Tensor:
    """A linear layer of which each rank has some of the outputs. Collective, differentiable.

    Args:
        x: ``[..., in]``: with `sequence_parallel` this rank's tokens, which are gathered; else all
            tokens, equal on all ranks, whose gradient is summed over ranks in the backward pass.
        weight: ``[out / W, in]``, this rank's rows, or a DTensor of them.
        bias: ``[out / W]``, likewise, or None.
        context: on whose ranks.
        sequence_parallel: whether tokens are spread over the ranks.
        sequence_dim: along which they are; any but the last.
        activation: of the result: ``"gelu"`` (its tanh form) or ``"relu"``.
        tokens_per_rank: size of that dimension on each rank; None = the same everywhere.
        save_gathered: keep the gathered x for the backward pass, else gather it once more there.
        fused_wgrad: add the gradient of the weight to ``weight.main_grad``, a tensor of this rank's
            rows in the weight's dtype or float32; ``weight.grad`` stays as it is.
        fp8: make x and the weight float8_e4m3fn on the way, with a scale per tensor that is a power
            of two. Tokens travel, and are kept, as fp8; the products of the backward pass are in
            the dtype of x. With `sequence_parallel` only.
        algo: how transfer and product are interleaved; "auto" = the context's choice.

    Returns:
        ``[..., out / W]``, all tokens.

    Raises:
        As `all_gather_matmul`.
    """
    b, bias, main_grad = _parameters(context, ALL_GATHER, x, weight, bias, fused_wgrad)
    _require_spread_tokens(context, ALL_GATHER, fp8, sequence_parallel)
    if fp8:
        out = fp8_matmul(
            ALL_GATHER,
            x,
            b,
            context,
            bias=bias,
            dim=sequence_dim,
            tokens_per_rank=tokens_per_rank,
            save_gathered=save_gathered,
            main_grad=main_grad,
            algo=algo,
        )
        return activated(out, activation)
    if not sequence_parallel:
        return activated(replicated_matmul(x, b, context, bias, main_grad), activation)
    return all_gather_matmul(
        x,
        b,
        context,
        bias=bias,
        activation=activation,
        gather_dim=sequence_dim,
        tokens_per_rank=tokens_per_rank,
        save_gathered=save_gathered,
        main_grad=main_grad,
        algo=algo,
    )


def row_parallel_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    context: TpContext,
    *,
    sequence_parallel: bool = True,
    sequence_dim: int = 0,
    activation: Activation | None = None,
    tokens_per_rank: Sequence[int] | None = None,
    fused_wgrad: bool = False,
    fp8: bool = False,
    algo: Algo = "auto",
) -> torch.Tensor:
    """A linear layer of which each rank has some of the inputs. Collective, differentiable.

    Args:
        x: ``[..., in / W]``, all tokens.
        weight: ``[out, in / W]``, this rank's columns, contiguous, or a DTensor of them.
        bias: ``[out]``, equal on all ranks, or None. Each rank gets its gradient of all tokens.
        sequence_parallel: whether the result's tokens are spread over the ranks; else each rank
            gets all of them.
        tokens_per_rank: size of that dimension of each rank's result; None = equal shares.
        context, sequence_dim, activation, fused_wgrad, fp8, algo: as of `column_parallel_linear`.

    Returns:
        ``[..., out]``.

    Raises:
        As `all_gather_matmul`.
    """
    operation = REDUCE_SCATTER if sequence_parallel else ALL_REDUCE
    b, bias, main_grad = _parameters(context, operation, x, weight, bias, fused_wgrad)
    _require_spread_tokens(context, operation, fp8, sequence_parallel)
    if fp8:
        out = fp8_matmul(
            REDUCE_SCATTER,
            x,
            b,
            context,
            bias=bias,
            dim=sequence_dim,
            tokens_per_rank=tokens_per_rank,
            main_grad=main_grad,
            algo=algo,
        )
        return activated(out, activation)
    options: dict[str, Any] = {
        "bias": bias,
        "activation": activation,
        "main_grad": main_grad,
        "algo": algo,
    }
    if not sequence_parallel:
        return matmul_all_reduce(x, b, context, **options)
    options |= {"scatter_dim": sequence_dim, "tokens_per_rank": tokens_per_rank}
    return matmul_reduce_scatter(x, b, context, **options)


def _require_spread_tokens(
    context: TpContext, operation: int, fp8: bool, sequence_parallel: bool
) -> None:
    if fp8 and not sequence_parallel:
        problem = "fp8: expected False without sequence_parallel, got True"
        context.refuse(operation, ValueError, problem)


def _parameters(
    context: TpContext,
    operation: int,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    fused_wgrad: bool,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """b, bias and main_grad of a product."""
    main_grad = None
    if fused_wgrad:
        main_grad = getattr(weight, "main_grad", None)
        if main_grad is None:
            problem = "expected a tensor to add the gradient to, as fused_wgrad is set; got none"
            require(context, operation, x, weight, bias, ("x", "weight"))
            context.refuse(operation, ValueError, f"weight.main_grad: {problem}")
    own = local_tensor(weight) if isinstance(weight, torch.Tensor) else weight
    own_bias = None if bias is None else local_tensor(bias)
    require(context, operation, x, own, own_bias, ("x", "weight"))
    return own.t(), own_bias, main_grad
