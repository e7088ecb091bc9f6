"""Arguments of products: checked before anything starts, and brought into rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ._context import TpContext, rows_of_d
from ._operands import is_transposed

__all__ = [
    "Fold",
    "needs_of",
    "read_tokens",
    "require",
    "require_fitting",
    "require_main_grad",
    "word_number",
]


class Fold:
    """Tokens of any number of dimensions as rows, the ranks' dimension outermost."""

    def __init__(
        self,
        context: TpContext,
        operation: int,
        argument: str,
        a: torch.Tensor,
        dim: int,
        tokens_per_rank: Sequence[int] | None,
    ) -> None:
        """`argument`: the name of `dim`."""
        most = a.dim() - 2
        if most < 0:
            problem = f"a: expected 2 or more dimensions, got shape {tuple(a.shape)}"
            context.refuse(operation, ValueError, problem)
        if not isinstance(dim, int) or not -a.dim() <= dim <= most or dim == -1:
            problem = f"expected a dimension of a before its last, 0 to {most}, got {dim!r}"
            context.refuse(operation, ValueError, f"{argument}: {problem}")
        self.context, self.operation = context, operation
        self.dim = dim % a.dim()
        moved = a if self.dim == 0 else a.movedim(self.dim, 0)
        self.between = moved.shape[1:-1]
        self.rows = moved.reshape(-1, a.shape[-1]) if most else a
        self.tokens = tokens = read_tokens(context, operation, tokens_per_rank)
        if most:
            self.size = rows_of_d(context, operation, moved.shape[0], tokens)
        if most and tokens is not None:
            self.tokens = [count * math.prod(self.between) for count in tokens]

    def back(self, d: torch.Tensor) -> torch.Tensor:
        """A result, its rows as the dimensions that they come from."""
        if len(self.between) == 0:
            return d
        out = d.view(self.size, *self.between, d.shape[1])
        return out if self.dim == 0 else out.movedim(0, self.dim)


def read_tokens(
    context: TpContext, operation: int, given: Sequence[int] | None
) -> list[int] | None:
    if given is None:
        return None
    if isinstance(given, (int, str, torch.Tensor)):
        problem = f"tokens_per_rank: expected a sequence of whole numbers, got {given!r}"
        context.refuse(operation, TypeError, problem)
    if len(given) != context.num_ranks:
        problem = f"expected the tokens of {context.num_ranks} ranks, got {len(given)}"
        context.refuse(operation, ValueError, f"tokens_per_rank: {problem}")
    return list(given)


def require(
    context: Any,
    operation: int,
    a: Any,
    b: Any,
    bias: Any = None,
    names: tuple[str, str] = ("a", "b"),
) -> None:
    """Refuses what is no context, no tensor of its device, or no matrix."""
    if not isinstance(context, TpContext):
        raise TypeError(f"context: expected a TpContext, got {type(context).__name__}")
    if not (context.has(a) and context.has(b) and context.has_or_none(bias)):
        context.require_tensors(operation, **{names[0]: a})
        context.require_tensors(operation, **{names[1]: b, "bias": bias})
    if b.dim() != 2:
        problem = f"{names[1]}: expected 2 dimensions, got shape {tuple(b.shape)}"
        context.refuse(operation, ValueError, problem)


def require_fitting(
    context: TpContext,
    operation: int,
    max_tokens: int | None,
    x: Any,
    tokens_per_rank: Sequence[int] | None,
    own: bool,
) -> None:
    """Refuses more tokens than a layer was made for, whatever its context has room for.

    Args:
        max_tokens: of a rank; None = whatever fits the context.
        x: of a layer; what is no tensor of tokens is refused elsewhere.
        tokens_per_rank: as of the layer.
        own: whether x is of this rank's tokens, or else of all ranks'.
    """
    if max_tokens is None or not isinstance(x, torch.Tensor) or x.dim() < 2:
        return
    tokens = math.prod(x.shape[:-1])
    if not own:
        counts = read_tokens(context, operation, tokens_per_rank) or [1] * context.num_ranks
        # A number that is rounded up has fewer tokens than ranks, in one of the dimensions beside.
        tokens = -(-tokens * max(counts) // max(1, sum(counts)))
    if tokens > max_tokens:
        problem = f"expected at most the layer's max_tokens = {max_tokens} of a rank, got {tokens}"
        context.refuse(operation, ValueError, f"x: {problem}")


def word_number(
    context: TpContext, operation: int, name: str, given: Any, known: dict[str, int]
) -> int:
    if not isinstance(given, str) or given not in known:
        problem = f"expected one of {', '.join(map(repr, known))}, got {given!r}"
        context.refuse(operation, ValueError, f"{name}: {problem}")
    return known[given]


def needs_of(*tensors: torch.Tensor | None) -> int:
    """Which of a, b and bias will have a gradient, by bits from 1 on."""
    if not torch.is_grad_enabled():
        return 0
    return sum(1 << bit for bit, t in enumerate(tensors) if t is not None and t.requires_grad)


def require_main_grad(
    context: TpContext, operation: int, main_grad: torch.Tensor | None, b: torch.Tensor
) -> None:
    """Refuses what the gradient of b cannot be added to."""
    if main_grad is None:
        return
    context.require_tensors(operation, main_grad=main_grad)
    shape = tuple(b.t().shape if is_transposed(b) else b.shape)
    if tuple(main_grad.shape) != shape or not main_grad.is_contiguous():
        got = f"{tuple(main_grad.shape)} of strides {main_grad.stride()}"
        problem = f"main_grad: expected shape {shape}, as b is stored, contiguous; got {got}"
        context.refuse(operation, ValueError, problem)
    if main_grad.dtype not in (b.dtype, torch.float32):
        problem = f"main_grad: expected {b.dtype} or torch.float32, got {main_grad.dtype}"
        context.refuse(operation, TypeError, problem)
