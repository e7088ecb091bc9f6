"""The layers without Crossdock: one device holds all. The training is compared with them.

Shares no code with ``crossdock.jax.moe_layer``: parameters and outputs are the same.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from .model import Layers, Params
from .settings import Settings


def make_plain_layers(settings: Settings) -> Layers:
    """The layers of a model."""
    moe = functools.partial(plain_moe, topk=settings.topk, aux_loss_weight=settings.aux_loss_weight)
    return Layers(jnp.matmul, jnp.matmul, moe)


def plain_moe(
    params: Params, x: jax.Array, topk: int, aux_loss_weight: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Output like ``x`` ``[..., H]``, auxiliary loss, and load ``[E]`` of the experts."""
    tokens = x.reshape(-1, x.shape[-1])
    probabilities = jax.nn.softmax(tokens @ params["router"])
    weights, chosen = jax.lax.top_k(probabilities, topk)
    weights = weights / weights.sum(-1, keepdims=True)
    experts = probabilities.shape[-1]
    out = jnp.zeros_like(tokens)
    for expert in range(experts):  # each on all tokens, most of them with weight 0
        gate, up = jnp.split(tokens @ params["experts_in"][expert], 2, axis=-1)
        result = (jax.nn.silu(gate) * up) @ params["experts_out"][expert]
        out += result * jnp.where(chosen == expert, weights, 0).sum(-1, keepdims=True)
    load = (chosen[..., None] == jnp.arange(experts)).mean((0, 1))
    aux_loss = experts * load @ probabilities.mean(0)
    return out.reshape(x.shape), aux_loss_weight * aux_loss, load
