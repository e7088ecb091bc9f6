"""A mixture-of-experts layer whose experts are spread over ranks: the operations at work."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ._config import EpConfig
from ._group import Place
from ._mesh import EpMesh, current_mesh
from ._ops import ep_combine, ep_dispatch, ep_prepare
from ._where import on_each_rank

__all__ = ["MoEOutput", "MoEParams", "moe_layer"]


class MoEParams(NamedTuple):
    """Parameters of `moe_layer`. E counts all experts; inside ``shard_map`` a rank has L of them.

    Attributes:
        router: ``[H, E]`` on every rank, inside ``shard_map``, too.
        experts_in: ``[E, H, 2F]`` along the expert axes; gate and up projection side by side.
        experts_out: ``[E, F, H]`` along the expert axes.
    """

    router: jax.Array
    experts_in: jax.Array
    experts_out: jax.Array


class MoEOutput(NamedTuple):
    """The results of `moe_layer`.

    Attributes:
        hidden: shape and dtype of its ``x``.
        aux_loss: ``[]`` float32, 1 if all experts are used alike, more if not: the load-balancing
            loss of the whole batch. Add it to the loss with a factor such as 0.01.
        load: ``[E]`` float32: share of all choices that went to each expert; no gradient.
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
    normalize_weights: bool = True,
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
        normalize_weights: whether a token's K weights are scaled to sum to 1.
        after: the order of a layer whose operations come before these, forward, and after these,
            backward. Needed where neither layer's input depends on the other's output.
        mesh: from `init`; None = the last one.

    Raises:
        ValueError: shapes that do not fit, or arrays that lie otherwise on the mesh; the latter as
            ``jax.errors.JaxRuntimeError`` where only XLA knows how they lie.
    """
    place = (current_mesh() if mesh is None else mesh).group(config).place
    if config.rank_major:
        raise ValueError(f"config: expected layout 'expert_major', got {config.layout!r}")
    experts, batch = PartitionSpec(place.axes), PartitionSpec(place.batch_axes)
    arrays = {
        "params.router": (params.router, PartitionSpec()),
        "params.experts_in": (params.experts_in, experts),
        "params.experts_out": (params.experts_out, experts),
        "x": (x, batch),
    }
    if after is not None:
        arrays["after"] = (after, batch)
    return on_each_rank(
        place,
        functools.partial(_layer_of_rank, config, place, mesh, normalize_weights),
        arrays,
        out_specs=MoEOutput._make((batch, PartitionSpec(), PartitionSpec(), batch)),
    )


def _layer_of_rank(
    config: EpConfig,
    place: Place,
    mesh: EpMesh | None,
    normalize_weights: bool,
    router: jax.Array,
    experts_in: jax.Array,
    experts_out: jax.Array,
    x: jax.Array,
    after: jax.Array | None = None,
) -> MoEOutput:
    params = MoEParams(router, experts_in, experts_out)
    _check_shapes(config, place, params, x)
    tokens = x.reshape(-1, x.shape[-1])
    logits = tokens.astype(jnp.float32) @ params.router.astype(jnp.float32)
    probabilities = jax.nn.softmax(logits)
    weights, topk_idx = jax.lax.top_k(probabilities, config.max_topk)
    if normalize_weights:
        weights = weights / weights.sum(-1, keepdims=True)
    chosen = topk_idx[..., None] == jnp.arange(config.num_experts)
    # Means over all ranks, which have equally many tokens.
    load = jax.lax.pmean(chosen.mean((0, 1), dtype=jnp.float32), place.batch_axes)
    mean = jax.lax.pmean(probabilities.mean(0), place.batch_axes)

    plan = ep_prepare(config, topk_idx, after=after, mesh=mesh)
    received = ep_dispatch(plan, tokens.astype(config.dtype), weights)
    rows = _experts(config, params, received.tokens, plan.padded_counts)
    out, plan = ep_combine(received.plan, rows, received.weights)
    aux_loss = config.num_experts * load @ mean
    return MoEOutput(out.astype(x.dtype).reshape(x.shape), aux_loss, load, plan.order)


def _experts(config: EpConfig, params: MoEParams, rows: jax.Array, counts: jax.Array) -> jax.Array:
    """``[R, H]``, ``counts[e]`` rows for each local expert e, through the experts.

    A grouped product leaves any values in rows behind the last expert's. Neither combine nor a
    product's derivative reads them.
    """
    experts_in, experts_out = (
        weights.astype(config.dtype) for weights in (params.experts_in, params.experts_out)
    )
    gate, up = jnp.split(jax.lax.ragged_dot(rows, experts_in, counts), 2, axis=-1)
    return jax.lax.ragged_dot(jax.nn.silu(gate) * up, experts_out, counts)


def _check_shapes(config: EpConfig, place: Place, params: MoEParams, x: jax.Array) -> None:
    """Raises if one rank's arrays do not fit the config."""
    if config.expert_ranks is not None:
        raise ValueError(
            "config: expected experts in order, as the layer's parameters have them, got "
            "expert_ranks"
        )
    hidden, local = x.shape[-1], config.num_experts // place.num_ranks
    ffn = params.experts_out.shape[1] if params.experts_out.ndim == 3 else 0
    expected = ((hidden, config.num_experts), (local, hidden, 2 * ffn), (local, ffn, hidden))
    for name, array, shape in zip(MoEParams._fields, params, expected):
        if array.shape != shape:
            raise ValueError(f"params.{name}: expected shape {shape} on a rank, got {array.shape}")
