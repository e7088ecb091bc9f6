"""The gated activation between the two products of experts, as one operator with a derivative."""

from __future__ import annotations

from typing import Any

import torch

from crossdock._core import constants
from crossdock._quantise import WAYS

from . import _calls
from ._custom_ops import LIBRARY
from ._group import group_of
from .grouped import comm_of, define_operator, refuse, run_local

__all__ = ["FUSED", "gated", "gated_fp8"]

FUSED: dict[str, int] = constants.ACTIVATIONS
"""The activations that are computed so, by their names in `ACTIVATIONS`."""

_BLOCK = WAYS["fp8_block128"].block  # columns that share a scale


def gated(
    inner: torch.Tensor,
    offsets: torch.Tensor,
    activation: str,
    *,
    group: int,
    weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """``act(gate) * up``, for ``[gate, up]`` side by side, up to the end of the last zone.

    One pass each for it and its derivative, in float32 with one rounding at the end; what lies
    behind the last zone is neither read nor written. Differentiable once in ``inner`` and
    ``weights``; works under ``torch.compile`` and in CUDA graphs.

    Args:
        inner: ``[R, 2F]`` bfloat16, float16 or float32: F columns of gates, then F of the others.
        offsets: ``[L + 1]`` int32, as in ``Plan.offsets``.
        activation: one of `FUSED`.
        group: handle of an ``EpGroup`` on the device of ``inner``.
        weights: ``[R]`` float32, a factor of each row; None = 1.

    Returns:
        ``[R, F]``, undefined behind the last zone.

    Raises:
        InvalidArgument, TypeError, ValueError: tensors that do not fit; nothing has been computed.
    """
    _check("gated", inner, activation, group)
    return run_local("gated", inner, offsets, weights, FUSED[activation], group)


def gated_fp8(
    inner: torch.Tensor,
    offsets: torch.Tensor,
    activation: str = "silu",
    *,
    weights: torch.Tensor | None = None,
    powers: bool = False,
    group: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``act(gate) * up`` as fp8 with a scale per 128 columns, as `grouped_mm_scaled` takes it.

    For inference: it has no gradient. One pass, from float32, up to the end of the last zone.
    `quantise.h` says how a block is rounded; an element that is not finite becomes a NaN.

    Args:
        inner: ``[R, 2F]`` bfloat16, float16 or float32: F columns of gates, then F of the others;
            F is a multiple of 128.
        offsets: ``[L + 1]`` int32, as in ``Plan.offsets``.
        activation: ``"silu"``, ``"gelu_tanh"``, ``"relu"`` or ``"relu2"``.
        weights: ``[R]`` float32, a factor of each row; None = 1.
        powers: whether scales are powers of two.
        group: handle of the ``EpGroup`` whose rows they are; 0 = of the default communicator.

    Returns:
        ``[R, F]`` float8_e4m3fn and ``[R, F / 128]`` float32, undefined behind the last zone.

    Raises:
        InvalidArgument, TypeError, ValueError: tensors that do not fit; nothing has been computed.
        RuntimeError: there is no communicator (see `init`).
    """
    _check("gated_fp8", inner, activation, group)
    if inner.shape[1] % (2 * _BLOCK):
        problem = f"inner: expected 2 F columns, F a multiple of {_BLOCK}, got {inner.shape[1]}"
        refuse("gated_fp8", ValueError, problem, group)
    way = WAYS["fp8_block128_pow2" if powers else "fp8_block128"].code
    return run_local("gated_fp8", inner, offsets, weights, FUSED[activation], way, group)


def _check(function: str, inner: torch.Tensor, activation: str, group: int) -> None:
    """Refuses what neither of these functions takes."""
    if activation not in FUSED:
        problem = f"activation: expected one of {sorted(FUSED)}, got {activation!r}"
        refuse(function, ValueError, problem, group)
    if inner.dim() != 2 or inner.shape[1] % 2:
        problem = f"inner: expected shape [rows, 2 F], got {tuple(inner.shape)}"
        refuse(function, ValueError, problem, group)


def _gated(
    inner: torch.Tensor,
    offsets: torch.Tensor,
    weights: torch.Tensor | None,
    activation: int,
    group: int,
) -> torch.Tensor:
    gate, up = inner.chunk(2, dim=-1)
    out = inner.new_empty(gate.shape)
    given = {"gate": gate, "up": up, "weights": weights, "offsets": offsets, "out": out}
    _calls.run(group_of(group).comm.core, "gated", inner, given, activation=activation)
    return out


define_operator(
    "gated(Tensor inner, Tensor offsets, Tensor? weights, int activation, int group) -> Tensor",
    _gated,
)


@torch.library.register_fake("crossdock::gated", lib=LIBRARY)
def _(inner, offsets, weights, activation, group):
    return inner.new_empty(inner.shape[0], inner.shape[1] // 2)


def _gated_fp8(
    inner: torch.Tensor,
    offsets: torch.Tensor,
    weights: torch.Tensor | None,
    activation: int,
    quantise: int,
    group: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    gate, up = inner.chunk(2, dim=-1)
    out, scales = _coded(inner)
    given = {"gate": gate, "up": up, "weights": weights, "offsets": offsets, "out": out}
    numbers = {"activation": activation, "quantise": quantise}
    _calls.run(comm_of(group).core, "gated", inner, given | {"out_scales": scales}, **numbers)
    return out, scales


def _coded(inner: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = inner.shape[0], inner.shape[1] // 2
    out = inner.new_empty(rows, columns, dtype=torch.float8_e4m3fn)
    return out, inner.new_empty(rows, columns // _BLOCK, dtype=torch.float32)


define_operator(
    "gated_fp8(Tensor inner, Tensor offsets, Tensor? weights, int activation, int quantise, "
    "int group) -> (Tensor, Tensor)",
    _gated_fp8,
)


@torch.library.register_fake("crossdock::gated_fp8", lib=LIBRARY)
def _(inner, offsets, weights, activation, quantise, group):
    return _coded(inner)


def _gated_bwd(
    grad: torch.Tensor,
    inner: torch.Tensor,
    offsets: torch.Tensor,
    weights: torch.Tensor | None,
    activation: int,
    group: int,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    gate, up = inner.chunk(2, dim=-1)
    grad_inner = inner.new_empty(inner.shape)
    grad_gate, grad_up = grad_inner.chunk(2, dim=-1)
    grad_weights = None if weights is None else torch.empty_like(weights)
    given = {"grad_out": grad, "gate": gate, "up": up, "weights": weights, "offsets": offsets}
    given |= {"grad_gate": grad_gate, "grad_up": grad_up, "grad_weights": grad_weights}
    _calls.run(group_of(group).comm.core, "gated_bwd", inner, given, activation=activation)
    return grad_inner, grad_weights


define_operator(
    "gated_bwd(Tensor grad, Tensor inner, Tensor offsets, Tensor? weights, int activation, "
    "int group) -> (Tensor, Tensor?)",
    _gated_bwd,
)


@torch.library.register_fake("crossdock::gated_bwd", lib=LIBRARY)
def _(grad, inner, offsets, weights, activation, group):
    grad_weights = None if weights is None else torch.empty_like(weights)
    return inner.new_empty(inner.shape), grad_weights


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    inner, offsets, weights, ctx.activation, ctx.group = inputs
    ctx.save_for_backward(inner, offsets, weights)


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    inner, offsets, weights = ctx.saved_tensors
    grads = torch.ops.crossdock.gated_bwd(grad, inner, offsets, weights, ctx.activation, ctx.group)
    return grads[0], None, grads[1], None, None


torch.library.register_autograd(
    "crossdock::gated", _backward, setup_context=_setup_context, lib=LIBRARY
)
