"""The routed experts of a layer in one call, forward and backward."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.sharding import PartitionSpec

from crossdock import _core
from crossdock._core import constants

from . import _calls
from ._calls import Layer
from ._config import EpConfig
from ._group import EpGroup, programs_of
from ._limits import refuse_forward_mode, refuse_vmap
from ._mesh import EpMesh, current_mesh
from ._ops import Site, check_batch, check_payload, check_weights, plan_of
from ._order import kept
from ._plan import EpPlan
from ._where import check_split, check_varies, inside

__all__ = ["Overlap", "check_overlap", "ep_moe"]

Array: TypeAlias = jax.Array
Overlap: TypeAlias = int | Literal["serial", "auto"]

_Way: TypeAlias = tuple[int, Overlap, int | None, int | None]
"""The library's number for an activation, and overlap, num_sms and alignment."""

# Multiprocessors of transfers beside products, where neither the caller nor "auto" says.
_DEFAULT_SMS = 16


def ep_moe(
    config: EpConfig,
    topk_idx: Array,
    tokens: Array,
    topk_weights: Array | None,
    w_in: Array,
    w_out: Array,
    *,
    activation: str = "silu",
    overlap: Overlap = "serial",
    num_sms: int | None = None,
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
            Outside of ``shard_map`` ``[E, H, 2F]``, split over the axes of experts, rank by rank.
        w_out: likewise, ``[L, F, H]``. A row of F elements has a multiple of 16 bytes.
        activation: act: "silu", "gelu_tanh", "relu" or "relu2".
        overlap: "serial" = one after another; a number P = in P parts of every rank's experts, on
            GPUs with transfers beside products, 1 to 16 and at most L; "auto" = as
            ``xd_moe_schedule`` chooses for the sizes of this call, on CPUs "serial".
        num_sms: GPUs: multiprocessors of transfers beside products; None = 16, or as "auto"
            chooses; at most the config's.
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
    check_overlap(group, overlap, num_sms)
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
    way = (constants.ACTIVATIONS[activation], overlap, num_sms, alignment)
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


def check_overlap(group: EpGroup, overlap: Any, num_sms: Any) -> None:
    """Refuses what is no schedule of a group."""
    most = min(constants.MAX_PARTS, _local_experts(group))
    number = type(overlap) is int and 1 <= overlap <= most  # bool is no number here
    if not number and overlap not in ("serial", "auto"):
        raise ValueError(
            f"overlap: expected 'serial', 'auto' or a number of parts from 1 to {most}, the "
            f"experts of a rank or {constants.MAX_PARTS}; got {overlap!r}"
        )
    if num_sms is not None and (type(num_sms) is not int or num_sms < 1 or overlap == "serial"):
        wanted = "None with overlap = 'serial'" if overlap == "serial" else "1 or more, or None"
        raise ValueError(f"num_sms: expected {wanted}, got {num_sms!r}")


def _of_rank(
    group: EpGroup, way: _Way, names: tuple[str, ...], *arrays: Array
) -> tuple[Array, EpPlan]:
    """`ep_moe` of one rank's arrays, which have these names."""
    given = dict(zip(names, arrays))
    topk_idx, tokens, w_in, w_out = (
        given[name] for name in ("topk_idx", "tokens", "w_in", "w_out")
    )
    topk_weights = given.get("topk_weights")
    activation, overlap, num_sms, alignment = way
    _check_rows(group, tokens, w_in, w_out)
    sizes = (tokens.size // tokens.shape[-1], topk_idx.shape[-1], w_out.shape[1])
    layer = Layer(activation, *_schedule(group, overlap, num_sms, *sizes))
    plan = plan_of(group, topk_idx, alignment, given.get("after"), layer.parts)
    site = Site(group, plan.shape, plan.topk)
    check_batch(site, "tokens", tokens, None)
    if topk_weights is not None:
        check_weights("topk_weights", topk_weights)
        check_batch(site, "topk_weights", topk_weights, site.topk)
    inputs = (plan.data, plan.offsets, tokens, topk_weights, w_in, w_out, plan.order)
    out, order = _moe(site, layer, *_calls.uniform(*inputs))
    return out, plan.after(order)


def _schedule(
    group: EpGroup, overlap: Overlap, num_sms: int | None, tokens: int, topk: int, ffn: int
) -> tuple[int, int]:
    """`parts` and `num_sms` of the C API."""
    if overlap == "serial":
        return 0, 0
    most_sms = group.config.num_sms
    if overlap != "auto":
        return overlap, num_sms or min(_DEFAULT_SMS, most_sms or _DEFAULT_SMS)
    sizes = group.config.sizes(group.place.num_ranks) | {"max_topk": topk}
    sizes["device_type"] = group.place.device_type
    chosen = _core.moe_schedule(ffn, min(tokens, group.config.max_tokens_per_rank), **sizes)
    return chosen["parts"], num_sms or chosen["num_sms"]


# ---- Derivative ---------------------------------------------------------------------------------
# Its order: _order.py.


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _moe(
    site: Site,
    layer: Layer,
    plan: Array,
    offsets: Array,
    tokens: Array,
    topk_weights: Array | None,
    w_in: Array,
    w_out: Array,
    order: Array,
) -> tuple[Array, Array]:
    given = (plan, offsets, tokens, topk_weights, w_in, w_out, order)
    *_, out, order = _calls.moe_forward(site.group, layer, site.shape, *given)
    return out, order


def _moe_fwd(site, layer, *given):
    values: list[Any] = [None if one is None else one.value for one in given]
    plan, offsets, _, _, w_in, w_out, order = values
    recv_tokens, recv_weights, inner, activated, expert_out, out, done = _calls.moe_forward(
        site.group, layer, site.shape, *values
    )
    # An array that only the gradient of one argument needs is kept if that has one.
    weights_need, in_needs, out_needs = (one is not None and one.perturbed for one in given[3:6])
    saved = (
        *(plan, offsets, w_in, w_out),
        recv_tokens if in_needs else None,
        recv_weights,
        inner,
        activated if out_needs else None,
        expert_out if weights_need else None,
        kept(done, order),
    )
    return (out, done), saved


def _moe_bwd(site, layer, saved, grads):
    plan, offsets, *kept_arrays, order = saved
    grad_out, grad_order = (
        jnp.zeros(grad.shape, grad.dtype) if isinstance(grad, SymbolicZero) else grad
        for grad in grads
    )
    static = (site.group, layer, site.shape, site.topk)
    arrays = _calls.uniform(plan, offsets, grad_out, *kept_arrays, grad_order + order)
    return None, None, *_calls.moe_backward(*static, *arrays)


_moe.defvjp(_moe_fwd, _moe_bwd, symbolic_zeros=True)


# ---- Arguments ----------------------------------------------------------------------------------


def _local_experts(group: EpGroup) -> int:
    return group.config.num_experts // group.place.num_ranks


def _check_rows(group: EpGroup, tokens: Array, w_in: Array, w_out: Array) -> None:
    """Refuses rows, or matrices of one rank, that do not fit one another."""
    check_payload("tokens", tokens, group.config)
    if group.place.device_type != constants.DEVICE_TYPES["cpu"] and tokens.dtype == jnp.float32:
        raise TypeError("tokens: expected bfloat16 or float16 on GPUs, got float32")
    local, hidden = _local_experts(group), tokens.shape[-1]
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
