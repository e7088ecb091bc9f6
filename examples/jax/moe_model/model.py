"""The language model: a decoder of attention and mixture-of-experts blocks over bytes.

Plain functions on global arrays. The caller gives the functions by which a block uses what may be
spread over a mesh: those of crossdock_layers.py, or the plain ones of plain_layers.py.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .settings import Settings

BYTES = 256

Params = dict[str, Any]


class Layers(NamedTuple):
    """The functions that a block computes with."""

    # (x [..., K], weights [K, N]) -> [..., N]: before attention, whose heads may be spread, and
    # behind it
    to_heads: Callable[[jax.Array, jax.Array], jax.Array]
    from_heads: Callable[[jax.Array, jax.Array], jax.Array]
    # (parameters of the layer, tokens [..., H]) -> output [..., H], auxiliary loss [], load [E]
    moe: Callable[[Params, jax.Array], tuple[jax.Array, jax.Array, jax.Array]]


class Prediction(NamedTuple):
    """The model's predictions for a batch."""

    logits: jax.Array  # [sequences, context, 256]
    aux_loss: jax.Array  # [], summed over layers
    load: jax.Array  # [layers, E]


def init_params(settings: Settings) -> Params:
    """Float32 parameters that depend on the settings alone, stacked over the blocks."""
    s = settings
    keys = iter(jax.random.split(jax.random.key(s.seed), 8))

    def drawn(*shape: int, scale: float = 1.0) -> jax.Array:
        return scale * jax.random.normal(next(keys), shape) / math.sqrt(shape[-2])

    layers, hidden = s.layers, s.hidden
    return {
        "embedding": 0.02 * jax.random.normal(next(keys), (BYTES, hidden)),
        "before_output": jnp.ones(hidden),
        "blocks": {
            "before_attention": jnp.ones((layers, hidden)),
            "near": jnp.zeros((layers, 4, hidden)),
            "qkv": drawn(layers, hidden, 3 * hidden),
            "out": drawn(layers, hidden, hidden, scale=0.1),  # a block changes little at first
            "before_experts": jnp.ones((layers, hidden)),
            "moe": {
                "router": drawn(layers, hidden, s.experts),
                "experts_in": drawn(layers, s.experts, hidden, 2 * s.ffn),
                "experts_out": drawn(layers, s.experts, s.ffn, hidden, scale=0.1),
            },
        },
    }


def predict(params: Params, inputs: jax.Array, heads: int, layers: Layers) -> Prediction:
    """``inputs``: bytes, ``[sequences, context]`` int32."""

    # Nothing of a block is kept for its backward pass but what went in, and Crossdock's order.
    @functools.partial(
        jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names("crossdock_order")
    )
    def block(x: jax.Array, p: Params) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        x = x + _attention(p, _normalized(x, p["before_attention"]), heads, layers)
        out, aux_loss, load = layers.moe(p["moe"], _normalized(x, p["before_experts"]))
        return x + out, (aux_loss, load)

    x, (aux_losses, loads) = jax.lax.scan(block, params["embedding"][inputs], params["blocks"])
    logits = _normalized(x, params["before_output"]) @ params["embedding"].T
    return Prediction(logits, aux_losses.sum(), loads)


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Mean loss per byte in nats; ``targets`` ``[sequences, context]`` int32."""
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return (jax.nn.logsumexp(logits, axis=-1) - chosen).mean()


def _normalized(x: jax.Array, scale: jax.Array) -> jax.Array:
    x = x - x.mean(-1, keepdims=True)
    return scale * x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5)


def _attention(p: Params, x: jax.Array, heads: int, layers: Layers) -> jax.Array:
    """Causal self-attention with rotary positions, which reads each token with the three before.

    That short convolution lets the first steps learn which bytes follow each other.
    """
    sequences, context, hidden = x.shape
    before = jnp.pad(x, ((0, 0), (3, 0), (0, 0)))
    x = x + sum(before[:, i : i + context] * p["near"][i] for i in range(4))
    # Columns of a head lie together, so that heads can be dealt out.
    qkv = layers.to_heads(x, p["qkv"]).reshape(sequences, context, heads, 3, hidden // heads)
    q, k, v = _rotated(qkv[..., 0, :]), _rotated(qkv[..., 1, :]), qkv[..., 2, :]
    scores = jnp.einsum("sqhc,skhc->shqk", q, k) / math.sqrt(hidden // heads)
    seen = jnp.tril(jnp.ones((context, context), bool))
    odds = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
    seen_values = jnp.einsum("shqk,skhc->sqhc", odds, v).reshape(x.shape)
    return layers.from_heads(seen_values, p["out"])


def _rotated(x: jax.Array) -> jax.Array:
    """``[sequences, context, heads, columns]``: pairs of columns turned by their position."""
    context, half = x.shape[1], x.shape[-1] // 2
    rates = 10000.0 ** (-jnp.arange(half) / half)
    angles = (jnp.arange(context)[:, None] * rates)[:, None]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate((a * cos - b * sin, a * sin + b * cos), axis=-1)
