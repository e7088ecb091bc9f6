"""The results of operators: shapes and dtypes, written once for running and for tracing.

Names are those of the functions of ``_calls`` that write them; R rows, T tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from crossdock._quantise import QuantiseWay

from . import _calls
from ._group import EpGroup
from ._pool import SymmetricPool

__all__ = ["Outputs"]

_FLOAT32, _INT32 = torch.float32, torch.int32


class Output(NamedTuple):
    """A tensor that an operator returns."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    symmetric: bool = False  # whether it comes from the pool of symmetric memory
    repeated: bool = False  # whether it is one zero that stands for all elements


class Outputs:
    """The results of one call of an operator, in their order but for the order tensor.

    Args:
        outputs: by name; None = not asked for, which is returned as a tensor without elements.
    """

    def __init__(self, **outputs: Output | None) -> None:
        self._outputs = outputs

    def make(self, pool: SymmetricPool, like: Tensor) -> dict[str, Tensor | None]:
        """Tensors to write, on the device of `like`, with undefined content; None if absent."""

        def made(output: Output) -> Tensor:
            if output.symmetric:
                return pool.empty(output.shape, output.dtype)
            return _plain(output, like)

        return {
            name: None if output is None else made(output) for name, output in self._outputs.items()
        }

    def traced(self, like: Tensor, ordered: bool = True) -> tuple[Tensor, ...]:
        """The results of the operator where only shapes and dtypes are known.

        Args:
            like: the order, or another tensor of the device.
            ordered: whether the order is among the results.
        """
        plain = {
            name: None if output is None else _plain(output, like)
            for name, output in self._outputs.items()
        }
        return results(plain, torch.empty_like(like) if ordered else None)


def results(made: dict[str, Tensor | None], order: Tensor | None = None) -> tuple[Tensor, ...]:
    """The results of the operator: tensors from `make`, and the order if it takes part in one."""
    if order is None:
        return tuple(tensor for tensor in made.values() if tensor is not None)
    return (*(order.new_empty(0) if tensor is None else tensor for tensor in made.values()), order)


def _plain(output: Output, like: Tensor) -> Tensor:
    if output.repeated:
        return like.new_zeros(1, dtype=output.dtype).expand(output.shape)
    return like.new_empty(output.shape, dtype=output.dtype)


def prepare(ep: EpGroup) -> Outputs:
    """`info` has the counts: see PlanParts.

    Offsets have memory of their own: for GPUs torch 2.11 compiles ``bucketize`` and
    ``searchsorted`` so that boundaries are read from where their memory begins.
    """
    return Outputs(
        plan=Output((ep.plan_bytes,), torch.uint8),
        info=Output((ep.plan_parts.num_elements,), _INT32),
        offsets=Output((ep.num_local_experts + 1,), _INT32),
    )


def routing_layout(ep: EpGroup, num_tokens: int) -> Outputs:
    """The fields of RoutingLayout."""
    ranks = ep.comm.num_ranks
    return Outputs(
        rows_per_rank=Output((ranks,), _INT32),
        rows_per_expert=Output((ep.num_experts,), _INT32),
        token_in_rank=Output((num_tokens, ranks), torch.bool),
        bad_ids=Output((1,), _INT32),
    )


def dispatch(
    ep: EpGroup,
    tokens: Tensor,
    topk_weights: Tensor | None,
    scales: Tensor | None,
    topk: int,
    way: QuantiseWay | None,
) -> Outputs:
    """`link` stands for quantised tokens in autograd: fp8 tensors cannot have wider gradients."""
    rows, columns, rank_major = ep.rows, tokens.shape[1], ep.layout == "rank_major"
    recv_scales = weights = idx = link = None
    if way is not None:
        dtype = _FLOAT32 if way.scale == "float32" else _calls.E8M0
        recv_scales = Output((rows, columns // way.block), dtype, symmetric=True)
        link = Output((rows, columns), tokens.dtype, repeated=True)
    elif scales is not None:
        recv_scales = Output((rows, scales.shape[1]), scales.dtype, symmetric=True)
    if topk_weights is not None:
        weights = Output((rows, topk) if rank_major else (rows,), _FLOAT32, symmetric=True)
    if rank_major:
        idx = Output((rows, topk), _INT32, symmetric=True)
    received = tokens.dtype if way is None else torch.float8_e4m3fn
    return Outputs(
        recv_tokens=Output((rows, columns), received, symmetric=True),
        recv_weights=weights,
        recv_topk_idx=idx,
        recv_scales=recv_scales,
        link=link,
    )


def dispatch_bwd(
    grad_recv_tokens: Tensor | None, grad_recv_weights: Tensor | None, num_tokens: int, topk: int
) -> Outputs:
    """The gradients that those given lead to."""
    rows, weights = grad_recv_tokens, grad_recv_weights
    return Outputs(
        grad_tokens=None if rows is None else Output((num_tokens, rows.shape[1]), rows.dtype),
        grad_topk_weights=None if weights is None else Output((num_tokens, topk), weights.dtype),
    )


def combine(expert_out: Tensor, num_tokens: int) -> Outputs:
    """``[T, H]``."""
    return Outputs(out=Output((num_tokens, expert_out.shape[1]), expert_out.dtype))


def combine_bwd(
    grad_out: Tensor, expert_out: Tensor | None, weights: Tensor | None, rows: int
) -> Outputs:
    """The gradient of weights needs both `expert_out` and `weights`."""
    grad_weights = None
    if expert_out is not None and weights is not None:
        grad_weights = Output(tuple(weights.shape), _FLOAT32, symmetric=True)
    return Outputs(
        grad_expert_out=Output((rows, grad_out.shape[1]), grad_out.dtype, symmetric=True),
        grad_weights=grad_weights,
    )
