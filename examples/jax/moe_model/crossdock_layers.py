"""The layers that are spread over the mesh, with Crossdock."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import crossdock.jax as xd
from crossdock.jax import tp

from .model import Layers, Params
from .settings import Settings

_TOKENS = P("data", "expert")  # of sequences whose context is split
_HEADS = P("data", None, "expert")  # of whole sequences, some heads on each rank


def make_mesh(settings: Settings) -> Mesh:
    """The first devices, as rows along "data" and columns along "expert"."""
    s = settings
    devices = np.array(jax.devices()[: s.ranks]).reshape(s.data, s.experts_axis)
    return Mesh(devices, ("data", "expert"))


def make_layers(settings: Settings, mesh: Mesh) -> Layers:
    """The layers of a model. Each row of the mesh holds all experts, each device its share.

    With tensor parallelism each row also shares its sequences: a device has a part of their
    context, and in attention all of it for some of the heads.
    """
    s = settings
    xd.init(mesh, "expert", data_axes="data")
    config = xd.EpConfig(
        num_experts=s.experts,
        hidden=s.hidden,
        max_topk=s.topk,
        max_tokens_per_rank=s.sequences // s.ranks * s.context,
        dtype=jnp.float32,
    )

    def moe(params: Params, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        out = xd.moe_layer(config, xd.MoEParams(**params), x)
        return out.hidden, s.aux_loss_weight * out.aux_loss, out.load

    if not s.tensor_parallel:
        return Layers(jnp.matmul, jnp.matmul, moe)
    tp.init(mesh, "expert", data_axes="data")
    experts = {"router": P(), "experts_in": P("expert"), "experts_out": P("expert")}
    of_parts = jax.shard_map(
        moe, mesh=mesh, in_specs=(experts, _TOKENS), out_specs=(_TOKENS, P(), P())
    )
    return Layers(
        functools.partial(_to_heads, mesh), functools.partial(_from_heads, mesh), of_parts
    )


def _to_heads(mesh: Mesh, x: jax.Array, weights: jax.Array) -> jax.Array:
    x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, _TOKENS))
    return tp.all_gather_matmul(x, weights, gather_dim=1).out


def _from_heads(mesh: Mesh, x: jax.Array, weights: jax.Array) -> jax.Array:
    x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, _HEADS))
    return tp.matmul_reduce_scatter(x, weights, scatter_dim=1).out
