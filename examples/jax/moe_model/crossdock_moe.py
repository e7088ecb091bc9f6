"""The layer whose experts are spread over the mesh, with Crossdock."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

import crossdock.jax as xd

from .model import MoE, Params
from .settings import Settings


def make_mesh(settings: Settings) -> Mesh:
    """The first devices, as rows along "data" and columns along "expert"."""
    s = settings
    devices = np.array(jax.devices()[: s.ranks]).reshape(s.data, s.experts_axis)
    return Mesh(devices, ("data", "expert"))


def make_moe(settings: Settings, mesh: Mesh) -> MoE:
    """The layer of a model. Each row of the mesh holds all experts, each device its share."""
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

    return moe
