"""The routed experts of a layer in one call, forward and backward."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.sharding import PartitionSpec

from crossdock import _core
from crossdock._core import constants
from crossdock._overlap import Overlap, OverlapOption, schedule_of

from . import _calls
from ._calls import Layer, LayerInputs, LayerSaved
from ._config import EpConfig
from ._group import EpGroup, programs_of
from ._limits import refuse_forward_mode, refuse_vmap
from ._mesh import EpMesh, current_mesh
from ._ops import Site, check_batch, check_payload, check_weights, plan_of
from ._order import kept
from ._plan import EpPlan
from ._where import check_split, check_varies, inside

__all__ = ["ep_moe", "schedule"]

Array: TypeAlias = jax.Array

_Way: TypeAlias = tuple[int, OverlapOption, int | None]
"""The library's number for an activation, overlap and alignment."""


def ep_moe(
    config: EpConfig,
    topk_idx: Array,
    tokens: Array,
    topk_weights: Array | None,
    w_in: Array,
    w_out: Array,
    *,
    activation: str = "silu",
    overlap: OverlapOption = False,
    alignment: int | None = None,
    after: EpPlan | Array | None = None,
    mesh: EpMesh | None = None,
) -> tuple[Array, EpPlan]:
    """Sends tokens through their experts ``(act(gate) * up) @ w_out`` and sums up the results.

    ``[gate, up] = x @ w_in``. Collective: `ep_prepare`, and then dispatch, products and combine as
    one custom call, ``xd_moe_forward`` of ``crossdock/moe.h``; its derivative is another one. The
    bits are those of the C API's single operations and products with any `overlap`. Differentiable
    once, in tokens, topk_weights, w_in and w_out; gradients of matrices and weights that nobody
    asks for are not computed.

    Args:
        config: equal on all ranks, of layout "expert_major".
        topk_idx: as of `ep_prepare`.
        tokens: ``[..., H]`` bfloat16, float16 or, on CPUs, float32, with the leading dimensions of
            topk_idx.
        topk_weights: ``[..., K]`` float32, factors of the experts' results; None = 1.
        w_in: dtype of tokens, ``[L, H, 2F]`` of a rank, gate and up projection side by side.
            Outside of ``shard_map`` ``[W * L, H, 2F]``, which is ``[E, H, 2F]`` where ranks have
            equally many, split over the axes of experts, rank by rank. The matrices behind a rank's
            own experts are not read, and have the gradient 0.
        w_out: likewise, ``[L, F, H]``. A row of F elements has a multiple of 16 bytes.
        activation: act: "silu", "gelu_tanh", "relu" or "relu2".
        overlap: False = one after another; True = in 4 parts of every rank's experts, or as many
            as L, on GPUs with transfers beside products; an `Overlap` says how many parts; "auto" =
            as ``xd_moe_schedule`` chooses for the sizes of this call, on CPUs as False.
        alignment, after, mesh: as of `ep_prepare`.

    Returns:
        ``[..., H]``, dtype of tokens, zero for a token without rows; and the batch's plan for what
        comes after.

    Raises:
        TypeError, ValueError: a bad argument, while tracing.
        jax.errors.JaxRuntimeError: as `ep_prepare`.
    """
    group = (current_mesh() if mesh is None else mesh).group(config)
    place = group.place
    if config.rank_major:
        raise ValueError(f"config: expected layout 'expert_major', got {config.layout!r}")
    if activation not in constants.ACTIVATIONS:
        expected = ", ".join(map(repr, constants.ACTIVATIONS))
        raise ValueError(f"activation: expected one of {expected}, got {activation!r}")
    schedule(group, overlap)
    order = after.order if isinstance(after, EpPlan) else after
    batch, experts = PartitionSpec(place.batch_axes), PartitionSpec(place.axes)
    given = {
        "topk_idx": (topk_idx, batch),
        "tokens": (tokens, batch),
        "topk_weights": (topk_weights, batch),
        "w_in": (w_in, experts),
        "w_out": (w_out, experts),
        "after": (order, batch),
    }
    arrays = {name: (jnp.asarray(a), s) for name, (a, s) in given.items() if a is not None}
    refuse_vmap("ep_moe", *(array for array, _ in arrays.values()))
    way = (constants.ACTIVATIONS[activation], overlap, alignment)
    with refuse_forward_mode("ep_moe"):
        return _on_ranks(group, way, arrays)(*(array for array, _ in arrays.values()))


def _on_ranks(
    group: EpGroup, way: _Way, arrays: dict[str, tuple[Array, PartitionSpec]]
) -> Callable[..., tuple[Array, EpPlan]]:
    """The call as a function of these arrays, inside or outside shard_map."""
    place, names = group.place, tuple(arrays)
    local = functools.partial(_of_rank, group, way, names)
    if inside(place):
        return local
    in_specs = check_split(place, arrays)
    programs, key = programs_of(group), (_of_rank, way, names)
    if key not in programs:
        out_specs = PartitionSpec(place.batch_axes)
        mapped = jax.shard_map(local, mesh=place.mesh, in_specs=in_specs, out_specs=out_specs)
        programs[key] = jax.jit(mapped, inline=True)
    return programs[key]


def _of_rank(
    group: EpGroup, way: _Way, names: tuple[str, ...], *arrays: Array
) -> tuple[Array, EpPlan]:
    """`ep_moe` of one rank's arrays, which have these names."""
    given = dict(zip(names, arrays))
    topk_idx, tokens, w_in, w_out = (
        given[name] for name in ("topk_idx", "tokens", "w_in", "w_out")
    )
    topk_weights = given.get("topk_weights")
    activation, overlap, alignment = way
    _check_rows(group, tokens, w_in, w_out)
    sizes = (tokens.size // tokens.shape[-1], topk_idx.shape[-1], w_out.shape[1])
    chosen = schedule(group, overlap, *sizes)
    parts, num_sms = (0, 0) if chosen is None else (chosen.parts, chosen.sms or 0)
    layer = Layer(activation, parts, num_sms)
    plan = plan_of(group, topk_idx, alignment, given.get("after"), layer.parts)
    site = Site(group, plan.shape, plan.topk)
    check_batch(site, "tokens", tokens, None)
    if topk_weights is not None:
        check_weights("topk_weights", topk_weights)
        check_batch(site, "topk_weights", topk_weights, site.topk)
    inputs: Any = (plan.data, plan.offsets, tokens, topk_weights, w_in, w_out, plan.order)
    out, order = _called(site, layer, LayerInputs(*_calls.uniform(*inputs)))
    return out, plan.after(order)


def _called(site: Site, layer: Layer, given: LayerInputs) -> tuple[Array, Array]:
    try:
        return _moe(site, layer, given)
    except NotImplementedError as error:
        # Eager code in shard_map, of which nothing asks for a derivative: JAX has no rule for one
        # that knows which gradients are wanted, and says so before anything runs.
        if "symbolic_zeros" not in str(error):
            raise
        return _forward(site, layer, given)


def schedule(
    group: EpGroup, overlap: OverlapOption, tokens: int = 1, topk: int = 1, ffn: int = 16
) -> Overlap | None:
    """The schedule of a call of these sizes; None = one after another.

    Raises:
        TypeError, ValueError: an option that a group cannot have, whatever the sizes are.
    """
    config = group.config

    def automatic() -> dict[str, Any]:
        sizes = config.sizes(group.place.num_ranks) | {"max_topk": topk}
        sizes["device_type"] = group.place.device_type
        return _core.moe_schedule(ffn, min(tokens, config.max_tokens_per_rank), **sizes)

    fewest = min(config.held_experts(group.place.num_ranks))
    return schedule_of(overlap, fewest, config.num_sms, automatic)


# ---- Derivative ---------------------------------------------------------------------------------
# Its order: _order.py.


def _forward(site: Site, layer: Layer, given: LayerInputs) -> tuple[Array, Array]:
    *_, out, order = _calls.moe_forward(site.group, layer, site.shape, given)
    return out, order


_moe = jax.custom_vjp(_forward, nondiff_argnums=(0, 1))


def _moe_fwd(site, layer, given):
    given_values: list[Any] = [None if one is None else one.value for one in given]
    values = LayerInputs(*given_values)
    recv_tokens, recv_weights, inner, activated, expert_out, out, done = _calls.moe_forward(
        site.group, layer, site.shape, values
    )

    def has_gradient(one: Any) -> bool:
        return one is not None and one.perturbed

    # An array that only the gradient of one argument needs is kept if that has one.
    saved = LayerSaved(
        *(values.plan, values.offsets, values.w_in, values.w_out),
        recv_tokens if has_gradient(given.w_in) else None,
        recv_weights,
        inner,
        activated if has_gradient(given.w_out) else None,
        expert_out if has_gradient(given.topk_weights) else None,
    )
    return (out, done), (saved, kept(done, values.order))


def _moe_bwd(site, layer, kept_arrays, grads):
    saved, order = kept_arrays
    grad_out, grad_order = (
        jnp.zeros(grad.shape, grad.dtype) if isinstance(grad, SymbolicZero) else grad
        for grad in grads
    )
    *arrays, grad_out, order = _calls.uniform(*saved, grad_out, grad_order + order)
    static = (site.group, layer, site.shape, site.topk)
    found = _calls.moe_backward(*static, LayerSaved(*arrays), grad_out, order)
    grads_of_all: list[Any] = [None, None, *found]  # of plan and offsets there are none
    return (LayerInputs(*grads_of_all),)


_moe.defvjp(_moe_fwd, _moe_bwd, symbolic_zeros=True)


# ---- Arguments ----------------------------------------------------------------------------------


def _check_rows(group: EpGroup, tokens: Array, w_in: Array, w_out: Array) -> None:
    """Refuses rows, or matrices of one rank, that do not fit one another."""
    check_payload("tokens", tokens, group.config)
    if group.place.device_type != constants.DEVICE_TYPES["cpu"] and tokens.dtype == jnp.float32:
        raise TypeError("tokens: expected bfloat16 or float16 on GPUs, got float32")
    local, hidden = group.config.local_experts(group.place.num_ranks), tokens.shape[-1]
    for name, array in (("w_in", w_in), ("w_out", w_out)):
        if inside(group.place):
            check_varies(group.place, name, array)
        if array.dtype != tokens.dtype:
            raise TypeError(f"{name}: expected {tokens.dtype}, as tokens, got {array.dtype}")
    if w_out.ndim != 3 or w_out.shape[::2] != (local, hidden) or w_out.shape[1] < 1:
        raise ValueError(
            f"w_out: expected shape ({local}, F, {hidden}) on a rank, got {w_out.shape}"
        )
    ffn = w_out.shape[1]
    if w_in.shape != (local, hidden, 2 * ffn):
        raise ValueError(
            f"w_in: expected shape {(local, hidden, 2 * ffn)} on a rank, [L, H, 2F] with w_out's "
            f"F = {ffn}; got {w_in.shape}"
        )
    if ffn * tokens.dtype.itemsize % constants.ROW_ALIGNMENT:
        raise ValueError(
            f"w_out: expected rows of F elements of a multiple of {constants.ROW_ALIGNMENT} bytes, "
            f"got F = {ffn} of {tokens.dtype}"
        )
