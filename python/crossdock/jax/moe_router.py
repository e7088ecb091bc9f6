"""The choice of experts by their scores, and what it may cost an expert: local functions."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from crossdock._router import LEAST_SUM, RouterOptions

__all__ = ["Routing", "drop_over_capacity", "route", "update_router_bias", "z_loss"]


class Routing(NamedTuple):
    """Where the T tokens of a rank go: what a router returns.

    Attributes:
        topk_idx: ``[T, K]`` integers: experts; -1 = none.
        topk_weights: ``[T, K]`` float32: factors of the experts' results.
        probabilities: ``[T, E]`` float32, for the load-balancing loss.
    """

    topk_idx: jax.Array
    topk_weights: jax.Array
    probabilities: jax.Array


def route(
    logits: jax.Array,
    topk: int,
    options: RouterOptions | None = None,
    bias: jax.Array | None = None,
) -> Routing:
    """Chooses ``topk`` experts of each token, the best first.

    Args:
        logits: ``[T, E]`` float32.
        topk: experts per token.
        options: how; None = by softmax, with weights that sum to 1.
        bias: ``[E]`` float32, added to scores for the choice alone; None = none. No gradient.
    """
    options = RouterOptions() if options is None else options
    if options.scores == "softmax":
        scores = probabilities = jax.nn.softmax(logits)
    else:
        scores = jax.nn.sigmoid(logits)
        probabilities = scores / jnp.maximum(scores.sum(-1, keepdims=True), LEAST_SUM)
    rank_by = jax.lax.stop_gradient(scores if bias is None else scores + bias)
    if options.num_groups > 1:
        rank_by = _in_best_groups(rank_by, options)
    idx = jax.lax.top_k(rank_by, topk)[1]
    weights = jnp.take_along_axis(scores, idx, axis=-1)
    if options.normalize:
        weights = weights / jnp.maximum(weights.sum(-1, keepdims=True), LEAST_SUM)
    return Routing(idx, weights * options.scale, probabilities)


def _in_best_groups(scores: jax.Array, options: RouterOptions) -> jax.Array:
    """``[T, E]``: the scores of experts of the token's best groups, and -inf for the others."""
    groups = scores.reshape(scores.shape[0], options.num_groups, -1)
    best = jax.lax.top_k(groups, 2 if options.group_score == "top2" else 1)[0].sum(-1)
    chosen = jax.lax.top_k(best, options.topk_groups)[1]
    allowed = (chosen[..., None] == jnp.arange(options.num_groups)).any(-2)
    return jnp.where(allowed[..., None], groups, -jnp.inf).reshape(scores.shape)


def drop_over_capacity(routing: Routing, num_experts: int, capacity: int) -> Routing:
    """Keeps, for each expert, the ``capacity`` choices of this rank with the largest weights.

    As in Switch Transformers (arXiv:2101.03961, section 2.2), but by weight rather than position;
    of equal weights the earlier token's is kept. A dropped choice becomes -1, with weight 0.
    """
    shape = routing.topk_idx.shape
    ids = routing.topk_idx.reshape(-1)
    experts = jnp.where((ids < 0) | (ids >= num_experts), num_experts, ids)
    order = jnp.lexsort((-jax.lax.stop_gradient(routing.topk_weights).reshape(-1), experts))
    counts = jnp.zeros(num_experts + 1, jnp.int32).at[experts].add(1)
    begins = jnp.cumsum(counts) - counts
    place = jnp.arange(experts.size) - begins[experts[order]]
    kept = jnp.zeros(experts.size, bool).at[order].set(place < capacity).reshape(shape)
    return routing._replace(
        topk_idx=jnp.where(kept, routing.topk_idx, -1),
        topk_weights=jnp.where(kept, routing.topk_weights, 0),
    )


def z_loss(logits: jax.Array) -> jax.Array:
    """``mean_t (log sum_e exp logits[t, e])^2``: that of ST-MoE (arXiv:2202.08906, section 2.2)."""
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) ** 2)


def update_router_bias(bias: jax.Array, load: jax.Array, rate: float = 0.001) -> jax.Array:
    """The bias for the next step: ``bias + rate * sign(mean load - load)`` (arXiv:2408.15664).

    Args:
        bias: ``[E]`` float32, `MoEParams.router_bias`.
        load: ``[E]``, `MoEOutput.load`: the same on all ranks.
        rate: how far it moves.
    """
    return bias + rate * jnp.sign(load.mean() - load)
