"""The networks of a mixture-of-experts layer: experts by zones of rows, and shared experts."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from crossdock._overlap import Overlap

from .._autocast import cast
from .._calls import SUMMABLE
from .._group import Plan
from .._sharding import local_tensor
from ..gated import FUSED, gated
from ..grouped import grouped_mm
from ..grouped_fp8 import FP8_UNIT, fp8_obstacle, grouped_mm_fp8
from .overlap import moe

__all__ = ["ACTIVATIONS", "Activation", "GroupedExperts", "SharedExperts"]

_PER_16_BYTES = 8  # bfloat16 elements: a row of torch's grouped kernel has a multiple of them


def _squared_relu(x: torch.Tensor) -> torch.Tensor:
    return F.relu(x).square()


def _tanh_gelu(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": _tanh_gelu,
    "relu": F.relu,
    "relu2": _squared_relu,
}
"""Activations by name."""

Activation = str | Callable[[torch.Tensor], torch.Tensor]


class _FeedForward(nn.Module):
    """The common part of both kinds: the activation between the two products."""

    def __init__(self, activation: Activation, gated: bool) -> None:
        super().__init__()
        if not callable(activation) and activation not in ACTIVATIONS:
            known = sorted(ACTIVATIONS)
            raise ValueError(f"activation: expected a function or of {known}, got {activation!r}")
        self.activation, self.gated = activation, gated

    def activate(self, inner: torch.Tensor) -> torch.Tensor:
        """``[..., 2F]`` to ``[..., F]`` if gated, the first half gating the second."""
        name = self.activation
        function = name if callable(name) else ACTIVATIONS[name]
        if not self.gated:
            return function(inner)
        gate, up = inner.chunk(2, dim=-1)
        return function(gate) * up


class GroupedExperts(_FeedForward):
    """L experts of two matrices each, on rows that are grouped by expert.

    ``act(gate) * up @ w_out`` where ``[gate, up] = x @ w_in`` if gated (SwiGLU with "silu",
    arXiv:2002.05202), else ``act(x @ w_in) @ w_out``; with a bias after each product, if wanted.

    Attributes:
        w_in: parameter ``[L, H, 2F]``, ``[L, H, F]`` if not gated.
        w_out: parameter ``[L, F, H]``.
        b_in, b_out: with ``bias`` parameters ``[L, 2F]`` (or F) and ``[L, H]``, else None.
        ffn: F, as given.

    Args:
        num_local_experts: L.
        hidden: H.
        ffn: F.
        activation: a name of `ACTIVATIONS`, or a function of each element.
        gated: whether half of w_in's columns gate the others.
        bias: whether there are biases. They begin as zeros.
        fp8: whether both products round their operands to fp8 on the way (`grouped_mm_fp8`), with a
            scale for each row and each column; of bfloat16 rows only, with parameters of bfloat16
            or float32, H and F multiples of 16.
        dtype, device: of the parameters, which are cast to the dtype of the rows.

    Raises:
        ValueError: an unknown activation; sizes, a dtype or a device that ``fp8`` has not.
    """

    def __init__(
        self,
        num_local_experts: int,
        hidden: int,
        ffn: int,
        *,
        activation: Activation = "silu",
        gated: bool = True,
        bias: bool = False,
        fp8: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(activation, gated)
        inner = 2 * ffn if gated else ffn
        self.fp8, self.ffn = fp8, ffn
        if fp8:
            _check_fp8(hidden, ffn, dtype, device)
        shapes: dict[str, tuple[int, ...] | None] = {
            "w_in": (hidden, inner),
            "w_out": (ffn, hidden),
            "b_in": (inner,) if bias else None,
            "b_out": (hidden,) if bias else None,
        }
        for name, shape in shapes.items():
            value = None
            if shape is not None:
                zeros = torch.zeros(num_local_experts, *shape, dtype=dtype, device=device)
                value = nn.Parameter(zeros)
            self.register_parameter(name, value)

    def forward(
        self,
        rows: torch.Tensor,
        plan: Plan,
        *,
        topk_weights: torch.Tensor | None = None,
        overlap: Overlap | None = None,
    ) -> torch.Tensor:
        """``[R, H]`` to ``[R, H]``, in the same dtype; rows past the last zone give anything.

        With `overlap` it is ``[T, H]`` to ``[T, H]``: `moe` of these experts.

        Args:
            rows: from `dispatch`; with `overlap` tokens.
            plan: their plan.
            topk_weights: as of `moe`, with `overlap` only.
            overlap: a schedule, where `overlap_obstacle` finds nothing against it.
        """
        if overlap is not None:
            w_in, w_out = (
                cast(local_tensor(weight), rows.dtype) for weight in (self.w_in, self.w_out)
            )
            activation = str(self.activation)
            return moe(
                plan, rows, topk_weights, w_in, w_out, activation=activation, overlap=overlap
            )
        handle = plan.group.handle
        inner = self._product(rows, self.w_in, plan, grad_group=handle)
        if self.b_in is not None:
            inner = inner + _of_each_row(local_tensor(self.b_in), inner, plan.offsets)
        out = self._product(self._activated(inner, plan), self.w_out, plan, out_group=handle)
        if self.b_out is not None:
            out = out + _of_each_row(local_tensor(self.b_out), out, plan.offsets)
        return out

    def overlap_obstacle(self) -> str:
        """A property of these experts that `moe` has not; empty if there is none."""
        if not self.gated or self.activation not in FUSED:
            gate = "gated" if self.gated else "not gated"
            return f"{self.activation!r}, {gate}; expected a gated one of {sorted(FUSED)}"
        if self.b_in is not None:
            return "bias; expected none"
        return "fp8; expected fp8=False" if self.fp8 else ""

    def _activated(self, inner: torch.Tensor, plan: Plan) -> torch.Tensor:
        """`activate`, in one pass up to the last zone's end where the library has the function."""
        name = self.activation
        if not self.gated or name not in FUSED or inner.dtype not in SUMMABLE:
            return self.activate(inner)
        return gated(inner, plan.offsets, str(name), group=plan.group.handle)

    def _product(
        self,
        rows: torch.Tensor,
        weight: Any,
        plan: Plan,
        out_group: int = 0,
        grad_group: int = 0,
    ) -> torch.Tensor:
        matrices = cast(local_tensor(weight), rows.dtype)
        if self.fp8:  # torch's kernel makes its result by itself
            return grouped_mm_fp8(rows, matrices, plan.offsets, grad_group=grad_group)
        return grouped_mm(rows, matrices, plan.offsets, out_group=out_group, grad_group=grad_group)

    @torch.no_grad()
    def draw(self, first_seed: int) -> None:
        """Draws the matrices of each expert by a seed of its own: `first_seed`, and the next."""
        pairs = zip(local_tensor(self.w_in), local_tensor(self.w_out))
        for number, matrices in enumerate(pairs):
            generator = torch.Generator("cpu").manual_seed(first_seed + number)
            for matrix in matrices:
                fill(matrix, generator)


class SharedExperts(_FeedForward):
    """A dense network that every token passes, equal on all ranks: S experts side by side.

    Attributes:
        w_in: parameter ``[H, 2F]``, ``[H, F]`` if not gated.
        w_out: parameter ``[F, H]``.

    Args:
        hidden: H.
        ffn: F, columns of all shared experts together.
        activation, gated, dtype, device: as of `GroupedExperts`.
    """

    def __init__(
        self,
        hidden: int,
        ffn: int,
        *,
        activation: Activation = "silu",
        gated: bool = True,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(activation, gated)
        inner = 2 * ffn if gated else ffn
        self.w_in = nn.Parameter(torch.zeros(hidden, inner, dtype=dtype, device=device))
        self.w_out = nn.Parameter(torch.zeros(ffn, hidden, dtype=dtype, device=device))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """``[T, H]`` to ``[T, H]``, in the dtype of the tokens."""
        return self.activate(tokens @ cast(self.w_in, tokens.dtype)) @ cast(
            self.w_out, tokens.dtype
        )

    @torch.no_grad()
    def draw(self, generator: torch.Generator) -> None:
        """Draws both matrices."""
        for matrix in (self.w_in, self.w_out):
            fill(matrix, generator)


def _check_fp8(
    hidden: int, ffn: int, dtype: torch.dtype | None, device: torch.device | str | None
) -> None:
    """Refuses what `grouped_mm_fp8` would, before any rank waits for the experts of this one."""
    dtype = dtype or torch.get_default_dtype()
    if dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"fp8: expected dtype torch.bfloat16 or torch.float32, got {dtype}")
    if hidden % FP8_UNIT or ffn % FP8_UNIT:
        raise ValueError(
            f"fp8: expected hidden and ffn in multiples of {FP8_UNIT}, got {hidden} and {ffn}"
        )
    obstacle = fp8_obstacle(torch.device(device or torch.get_default_device()))
    if obstacle:
        raise ValueError(f"fp8: {obstacle}")


def fill(matrix: torch.Tensor, generator: torch.Generator) -> None:
    """Normal values with variance 1 / rows; drawn on the CPU, so equal on every device."""
    values = torch.randn(matrix.shape, generator=generator, dtype=torch.float32, device="cpu")
    values /= math.sqrt(matrix.shape[0])
    matrix.copy_(values)


def _of_each_row(bias: torch.Tensor, like: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """``[R, N]``: for each row the bias ``[L, N]`` of its expert.

    As a product, whose gradient, unlike that of an index, is summed in one order.
    """
    bias = bias.to(like.dtype)
    ones = F.pad(like.new_ones(like.shape[0], 1), (0, _PER_16_BYTES - 1))
    return grouped_mm(ones, F.pad(bias[:, None], (0, 0, 0, _PER_16_BYTES - 1)), offsets)
