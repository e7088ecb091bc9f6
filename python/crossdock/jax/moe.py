"""A mixture-of-experts layer whose experts are spread over ranks: the operations at work."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from crossdock._overlap import OverlapOption
from crossdock._router import RouterOptions, capacity_of

from ._config import EpConfig
from ._experts import ep_moe, schedule
from ._group import EpGroup, Place
from ._mesh import EpMesh, current_mesh
from ._ops import ep_combine, ep_dispatch, ep_prepare
from ._where import on_each_rank
from .moe_router import Routing, drop_over_capacity, route, z_loss

__all__ = ["MoEOutput", "MoEParams", "moe_layer"]


class MoEParams(NamedTuple):
    """Parameters of `moe_layer`. Inside ``shard_map`` a rank has L experts of W * L.

    L is the config's ``local_experts``, E / W unless ranks hold unequal numbers of experts. N
    experts are routed to: the logical ones, or all E.

    Attributes:
        router: ``[H, N]`` on every rank, inside ``shard_map``, too.
        experts_in: ``[W * L, H, 2F]`` along the expert axes, rank by rank; gate and up projection
            side by side.
        experts_out: ``[W * L, F, H]`` along the expert axes.
        router_bias: ``[N]`` float32 on every rank, with ``RouterOptions(bias=True)``, else None. It
            gets no gradient: see `update_router_bias`.
    """

    router: jax.Array
    experts_in: jax.Array
    experts_out: jax.Array
    router_bias: jax.Array | None = None


Router = Callable[[jax.Array], Routing]
"""A router of the caller's, from logits ``[T, N]`` float32."""


class MoEOutput(NamedTuple):
    """The results of `moe_layer`.

    Attributes:
        hidden: shape and dtype of its ``x``.
        aux_loss: ``[]`` float32, 1 if all experts are used alike, more if not: the load-balancing
            loss of the whole batch, plus the weighted z-loss. Add it to the loss with a factor such
            as 0.01.
        load: ``[N]`` float32: share of all choices that went to each expert; no gradient.
        order: stands for the layer's operations, for the ``after`` of a layer beside it.
    """

    hidden: jax.Array
    aux_loss: jax.Array
    load: jax.Array
    order: jax.Array


def moe_layer(
    config: EpConfig,
    params: MoEParams,
    x: jax.Array,
    *,
    router: RouterOptions | Router | None = None,
    capacity_factor: float | None = None,
    z_loss_weight: float = 0.0,
    overlap: OverlapOption = False,
    after: jax.Array | None = None,
    mesh: EpMesh | None = None,
) -> MoEOutput:
    """Sends each token of ``x`` through the ``config.max_topk`` SwiGLU experts of its choice.

    Differentiable in ``params`` and ``x``. Given global arrays, gradients are those of the whole
    batch. Inside ``jax.shard_map`` over the whole mesh all arrays are one rank's, and JAX adds up
    the gradients of what lies on several ranks.

    Args:
        config: sizes, of layout "expert_major". Its dtype is that of the experts' arithmetic; the
            router computes in float32.
        params: see `MoEParams`.
        x: ``[..., H]``, the first dimension along the mesh's data and expert axes.
        router: how experts are chosen; None = ``RouterOptions()``. Or a function that takes logits
            ``[T, N]`` float32 of a rank's tokens and gives a `Routing`.
        capacity_factor: an expert takes at most that many times its even share of a rank's tokens:
            see `drop_over_capacity`. ``EpConfig(recv_capacity=capacity_rows(...))`` has room for
            what is left. None = no limit.
        z_loss_weight: factor of `z_loss` in `MoEOutput.aux_loss`, beside the load-balancing loss,
            whose factor there is 1.
        overlap: as of `ep_moe`, which is called where this gives parts. Where it does not, as with
            False, dispatch, ``jax.lax.ragged_dot`` and combine come one after another.
        after: the order of a layer whose operations come before these, forward, and after these,
            backward. Needed where neither layer's input depends on the other's output.
        mesh: from `init`; None = the last one.

    Raises:
        ValueError: shapes that do not fit, or arrays that lie otherwise on the mesh; the latter as
            ``jax.errors.JaxRuntimeError`` where only XLA knows how they lie.
    """
    group = (current_mesh() if mesh is None else mesh).group(config)
    place = group.place
    if config.rank_major:
        raise ValueError(f"config: expected layout 'expert_major', got {config.layout!r}")
    schedule(group, overlap)
    if capacity_factor is not None and not 0 < capacity_factor < float("inf"):
        raise ValueError(f"capacity_factor: expected a positive number, got {capacity_factor}")
    choose = _chooser(config, RouterOptions() if router is None else router, params.router_bias)
    experts, batch = PartitionSpec(place.axes), PartitionSpec(place.batch_axes)
    arrays = {
        "params.router": (params.router, PartitionSpec()),
        "params.experts_in": (params.experts_in, experts),
        "params.experts_out": (params.experts_out, experts),
        "x": (x, batch),
    }
    if params.router_bias is not None:
        arrays["params.router_bias"] = (params.router_bias, PartitionSpec())
    if after is not None:
        arrays["after"] = (after, batch)
    layer = _Layer(group, mesh, choose, capacity_factor, z_loss_weight, overlap, tuple(arrays))
    return on_each_rank(
        place,
        functools.partial(_layer_of_rank, layer),
        arrays,
        out_specs=MoEOutput._make((batch, PartitionSpec(), PartitionSpec(), batch)),
    )


_Choice = Callable[[jax.Array, jax.Array | None], Routing]


class _Layer(NamedTuple):
    """The options of `moe_layer`, and the names of its arrays."""

    group: EpGroup
    mesh: EpMesh | None
    choose: _Choice
    capacity_factor: float | None
    z_loss_weight: float
    overlap: OverlapOption
    names: tuple[str, ...]


def _chooser(config: EpConfig, router: RouterOptions | Router, bias: jax.Array | None) -> _Choice:
    """The router as a function of logits and bias."""
    if not isinstance(router, RouterOptions):
        if bias is not None:
            raise ValueError("params.router_bias: expected None beside a router of the caller's")
        return lambda logits, _: router(logits)
    router.check(config.routed_experts, config.max_topk)
    if router.bias != (bias is not None):
        expected = "an array, as RouterOptions.bias is set" if router.bias else "None"
        raise ValueError(f"params.router_bias: expected {expected}, got {bias}")
    return lambda logits, bias: route(logits, config.max_topk, router, bias)


def _layer_of_rank(layer: _Layer, *arrays: jax.Array) -> MoEOutput:
    config, place = layer.group.config, layer.group.place
    given = dict(zip(layer.names, arrays))
    x, after = given["x"], given.get("after")
    found: list[Any] = [given.get(f"params.{name}") for name in MoEParams._fields]
    params = MoEParams(*found)
    _check_shapes(config, place, params, x)
    tokens = x.reshape(-1, x.shape[-1])
    logits = tokens.astype(jnp.float32) @ params.router.astype(jnp.float32)
    routing = layer.choose(logits, params.router_bias)
    experts = config.routed_experts
    chosen = routing.topk_idx[..., None] == jnp.arange(experts)
    if layer.capacity_factor is not None:
        sizes = (tokens.shape[0], config.max_topk, experts)
        capacity = capacity_of(layer.capacity_factor, *sizes)
        routing = drop_over_capacity(routing, experts, capacity)
    # Means over all ranks, which have equally many tokens.
    load = jax.lax.pmean(chosen.mean((0, 1), dtype=jnp.float32), place.batch_axes)
    mean = jax.lax.pmean(routing.probabilities.mean(0), place.batch_axes)
    aux_loss = experts * load @ mean
    if layer.z_loss_weight:
        aux_loss += layer.z_loss_weight * jax.lax.pmean(z_loss(logits), place.batch_axes)

    tokens, w_in, w_out = (
        array.astype(config.dtype) for array in (tokens, params.experts_in, params.experts_out)
    )
    idx, weights = routing.topk_idx, routing.topk_weights
    options: dict[str, Any] = {"after": after, "mesh": layer.mesh}
    sizes = (tokens.shape[0], idx.shape[-1], w_out.shape[1])
    if overlap := schedule(layer.group, layer.overlap, *sizes):
        out, plan = ep_moe(config, idx, tokens, weights, w_in, w_out, overlap=overlap, **options)
    else:
        plan = ep_prepare(config, idx, **options)
        received = ep_dispatch(plan, tokens, weights)
        rows = _experts(w_in, w_out, received.tokens, plan.padded_counts)
        out, plan = ep_combine(received.plan, rows, received.weights)
    return MoEOutput(out.astype(x.dtype).reshape(x.shape), aux_loss, load, plan.order)


def _experts(
    experts_in: jax.Array, experts_out: jax.Array, rows: jax.Array, counts: jax.Array
) -> jax.Array:
    """``[R, H]``, ``counts[e]`` rows for each local expert e, through the experts.

    A grouped product leaves any values in rows behind the last expert's. Neither combine nor a
    product's derivative reads them.
    """
    gate, up = jnp.split(jax.lax.ragged_dot(rows, experts_in, counts), 2, axis=-1)
    return jax.lax.ragged_dot(jax.nn.silu(gate) * up, experts_out, counts)


def _check_shapes(config: EpConfig, place: Place, params: MoEParams, x: jax.Array) -> None:
    """Raises if one rank's arrays do not fit the config."""
    hidden, local = x.shape[-1], config.local_experts(place.num_ranks)
    ffn = params.experts_out.shape[1] if params.experts_out.ndim == 3 else 0
    expected = {
        "router": (hidden, config.routed_experts),
        "experts_in": (local, hidden, 2 * ffn),
        "experts_out": (local, ffn, hidden),
        "router_bias": (config.routed_experts,),
    }
    for name, shape in expected.items():
        array = getattr(params, name)
        if array is not None and array.shape != shape:
            raise ValueError(f"params.{name}: expected shape {shape} on a rank, got {array.shape}")
