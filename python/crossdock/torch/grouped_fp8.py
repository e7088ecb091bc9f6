"""Products over the zones of a receive tensor, of fp8.

`grouped_mm_scaled` takes operands that are fp8, and their scales. `grouped_mm_fp8` makes them on
the way: each row of ``x``, and each column of each matrix, has a scale of its own: a power of two,
as large as its largest element allows, so nothing is rounded but the elements themselves. Gradients
are those of `grouped_mm`, of the operands as they were before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ._custom_ops import LIBRARY
from .grouped import (
    comm_for,
    comm_of,
    define_operator,
    ends_inside,
    operands_of,
    refuse,
    run_local,
    run_product,
    zones_of,
)

__all__ = ["FP8_UNIT", "fp8_obstacle", "grouped_mm_fp8", "grouped_mm_scaled"]

_FP8 = torch.float8_e4m3fn
_LARGEST = 448.0  # of _FP8
FP8_UNIT = 16  # rows of fp8 are multiples of 16 bytes in torch's kernel
_SCALED_GROUPED_MM: Callable[..., torch.Tensor] | None = getattr(torch, "_scaled_grouped_mm", None)


def grouped_mm_fp8(
    x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor, *, grad_group: int = 0
) -> torch.Tensor:
    """Multiplies the rows of each zone by that expert's matrix, both in float8_e4m3fn.

    As `grouped_mm`, for bfloat16 with columns in multiples of 16. On a GPU it is one grouped
    kernel, which CUDA graphs can capture: the library's on Hopper, where a communicator has been
    made, else torch's (compute capability 9.0 or 10.0). On the CPU the elements are rounded alike
    and multiplied in float32. Matrices are rounded anew in each call.

    Args:
        x: ``[R, N]`` bfloat16, rows grouped by expert.
        weight: ``[L, N, M]`` bfloat16, as of `grouped_mm`.
        offsets: ``[L + 1]`` int32, as in ``Plan.offsets``.
        grad_group: as of `grouped_mm`.

    Returns:
        ``[R, M]`` bfloat16.

    Raises:
        TypeError: a dtype is wrong.
        ValueError: shapes do not fit each other, or the kernel.
        RuntimeError: there is no such kernel here (see `fp8_obstacle`).
    """
    function = "grouped_mm_fp8"
    x, weight = operands_of(function, x, weight, offsets, grad_group)
    if x.dtype != torch.bfloat16:
        problem = f"x: expected dtype torch.bfloat16, got {x.dtype}"
        refuse(function, TypeError, problem, grad_group)
    if x.shape[1] % FP8_UNIT or weight.shape[2] % FP8_UNIT:
        shape = tuple(weight.shape)
        problem = f"weight: expected rows and columns in multiples of {FP8_UNIT}, got {shape}"
        refuse(function, ValueError, problem, grad_group)
    obstacle = fp8_obstacle(x.device)
    if obstacle:
        refuse(function, RuntimeError, obstacle, grad_group)
    return torch.ops.crossdock.grouped_mm_fp8(x, weight, offsets, grad_group)


def grouped_mm_scaled(
    x: torch.Tensor,
    weight: torch.Tensor,
    offsets: torch.Tensor,
    x_scales: torch.Tensor,
    weight_scales: torch.Tensor,
    *,
    group: int = 0,
) -> torch.Tensor:
    """Multiplies the rows of each zone by that expert's matrix, both of which are fp8 already.

    For inference, with rows as `dispatch` brings them in fp8 (``Dispatched.tokens`` and
    ``scales``), and matrices of published fp8 models, whose blocks of 128 by 128 elements have a
    scale each. It has no gradient. ``xd_grouped_product`` of the library: on the CPU, and on Hopper
    GPUs as one kernel, which CUDA graphs can capture.

    Args:
        x: ``[R, N]`` float8_e4m3fn, rows grouped by expert.
        weight: ``[L, N, M]`` float8_e4m3fn, the elements of a column side by side: the transposed
            view of ``[L, M, N]``.
        offsets: ``[L + 1]`` int32, as in ``Plan.offsets``.
        x_scales, weight_scales: float32, ``[R, ceil(N / 128)]`` and ``[L, ceil(M / 128), ceil(N /
            128)]`` of blocks, or ``[R]`` and ``[L, M]`` of rows and columns.
        group: handle of the ``EpGroup`` whose rows they are; 0 = of the default communicator.

    Returns:
        ``[R, M]`` bfloat16. Rows past the last zone are undefined.

    Raises:
        TypeError: a dtype is wrong.
        ValueError, InvalidArgument: shapes, strides or devices do not fit each other.
        Unsupported: a GPU that is no Hopper.
        RuntimeError: there is no communicator (see `init`).
    """
    function = "grouped_mm_scaled"
    x, weight = operands_of(function, x, weight, offsets, group)
    if x.dtype != _FP8:
        refuse(function, TypeError, f"x: expected dtype {_FP8}, got {x.dtype}", group)
    for name, scales in (("x_scales", x_scales), ("weight_scales", weight_scales)):
        if not isinstance(scales, torch.Tensor) or scales.dtype != torch.float32:
            got = getattr(scales, "dtype", type(scales).__name__)
            refuse(function, TypeError, f"{name}: expected a float32 tensor, got {got}", group)
    return run_local(function, x, weight, offsets, x_scales, weight_scales, group)


def _grouped_mm_scaled(
    x: torch.Tensor,
    weight: torch.Tensor,
    offsets: torch.Tensor,
    x_scales: torch.Tensor,
    weight_scales: torch.Tensor,
    group: int,
) -> torch.Tensor:
    return run_product(comm_of(group), x, weight, offsets, a_scale=x_scales, b_scale=weight_scales)


define_operator(
    "grouped_mm_scaled(Tensor x, Tensor weight, Tensor offsets, Tensor x_scales, "
    "Tensor weight_scales, int group) -> Tensor",
    _grouped_mm_scaled,
)


@torch.library.register_fake("crossdock::grouped_mm_scaled", lib=LIBRARY)
def _(x, weight, offsets, x_scales, weight_scales, group):
    return x.new_empty(x.shape[0], weight.shape[2], dtype=torch.bfloat16)


def fp8_obstacle(device: torch.device) -> str:
    """Why `grouped_mm_fp8` cannot run on a device; empty where it can."""
    if device.type != "cuda":
        return ""
    if _SCALED_GROUPED_MM is None:
        return f"expected a torch with _scaled_grouped_mm, got torch {torch.__version__}"
    capability = torch.cuda.get_device_capability(device)
    if capability not in ((9, 0), (10, 0)):
        return f"expected compute capability 9.0 or 10.0, got {capability[0]}.{capability[1]}"
    return ""


def _rows_in_fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x in fp8, and for each row the number by which its elements are multiplied to give x."""
    wide = x.float()
    most = wide.abs().amax(-1)
    # Without elements but zeros any scale will do. Beside an infinite element, or NaN, none will:
    # the scale and all elements of the row become NaN.
    exponent = torch.floor(torch.log2(_LARGEST / most)).clamp_(-64, 64) + (most - most)
    scaled = wide * torch.exp2(exponent)[..., None]
    return scaled.clamp_(-_LARGEST, _LARGEST).to(_FP8), torch.exp2(-exponent)


def in_fp8(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Both operands as torch's kernel takes them, and their scales ``[R]`` and ``[L, M]``."""
    rows, row_scales = _rows_in_fp8(x.contiguous())
    columns, column_scales = _rows_in_fp8(weight.transpose(1, 2).contiguous())
    return rows, columns.transpose(1, 2), row_scales, column_scales


def _grouped_mm_fp8(
    x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor, grad_group: int
) -> torch.Tensor:
    rows, matrices, row_scales, column_scales = in_fp8(x, weight)
    comm = comm_for(grad_group, rows, matrices) if x.is_cuda else None
    if comm is not None:
        scales = {"a_scale": row_scales, "b_scale": column_scales}
        return run_product(comm, rows, matrices, offsets, **scales)
    if x.is_cuda and x.shape[0]:
        assert _SCALED_GROUPED_MM is not None
        return _SCALED_GROUPED_MM(
            rows,
            matrices,
            row_scales,
            column_scales,
            offs=ends_inside(x, offsets),
            out_dtype=x.dtype,
        )
    out = x.new_empty(x.shape[0], weight.shape[2])
    for expert, zone in zones_of(offsets) if x.shape[0] else ():
        product = rows[zone].float() @ matrices[expert].float()
        out[zone] = (product * row_scales[zone, None] * column_scales[expert]).to(x.dtype)
    return out


define_operator(
    "grouped_mm_fp8(Tensor x, Tensor weight, Tensor offsets, int grad_group) -> Tensor",
    _grouped_mm_fp8,
)


@torch.library.register_fake("crossdock::grouped_mm_fp8", lib=LIBRARY)
def _(x, weight, offsets, grad_group):
    return x.new_empty(x.shape[0], weight.shape[2])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, weight, offsets, ctx.grad_group = inputs
    ctx.save_for_backward(x, weight, offsets)


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    x, weight, offsets = ctx.saved_tensors
    grad, operators = grad.contiguous(), torch.ops.crossdock
    grad_x = grad_weight = None
    if ctx.needs_input_grad[0]:
        grad_x = operators.grouped_mm(grad, weight, offsets, True, ctx.grad_group, 0)
    if ctx.needs_input_grad[1]:
        grad_weight = operators.grouped_outer(x, grad, offsets, ctx.grad_group)
    return grad_x, grad_weight, None, None


torch.library.register_autograd(
    "crossdock::grouped_mm_fp8", _backward, setup_context=_setup_context, lib=LIBRARY
)
