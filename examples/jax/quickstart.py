"""Trains one mixture-of-experts layer on a mesh of 2 x 2 devices: GPUs, or parts of the CPU."""

import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"  # where there is no GPU

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P

import crossdock.jax as xd

mesh = jax.make_mesh((2, 2), ("data", "expert"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
xd.init(mesh, "expert", data_axes="data")
config = xd.EpConfig(
    num_experts=8, hidden=32, max_topk=2, max_tokens_per_rank=64, dtype=jnp.float32
)

keys = jax.random.split(jax.random.key(1), 4)
params = xd.MoEParams(
    router=jax.random.normal(keys[0], (32, 8)),
    experts_in=jax.random.normal(keys[1], (8, 32, 128)) / 6,
    experts_out=jax.random.normal(keys[2], (8, 64, 32)) / 8,
)
places = xd.MoEParams(*(NamedSharding(mesh, spec) for spec in (P(), P("expert"), P("expert"))))
params = jax.device_put(params, places)
tokens = jax.random.normal(keys[3], (256, 32))
tokens = jax.device_put(tokens, NamedSharding(mesh, P(("data", "expert"))))


@jax.jit
def step(params, x):
    def loss(params):
        out = xd.moe_layer(config, params, x)
        return jnp.mean((out.hidden - x[:, ::-1]) ** 2) + 0.01 * out.aux_loss

    value, gradients = jax.value_and_grad(loss)(params)
    return value, jax.tree.map(lambda p, g: p - 0.5 * g, params, gradients)


for number in range(40):
    value, params = step(params, tokens)
    if number % 13 == 0:
        print(f"step {number}  loss {value:.3f}")
