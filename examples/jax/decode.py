"""A few tokens of each rank to their experts and back, in jax.shard_map, as in decoding."""

import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"  # where there is no GPU

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import crossdock.jax as xd

RANKS, EXPERTS, TOKENS, HIDDEN, TOPK = 4, 8, 4, 32, 2

mesh = jax.make_mesh((RANKS,), ("expert",), axis_types=(jax.sharding.AxisType.Auto,))
xd.init(mesh, "expert")
config = xd.LowLatencyConfig(
    num_experts=EXPERTS,
    hidden=HIDDEN,
    max_topk=TOPK,
    max_tokens_per_rank=TOKENS,
    dtype=jnp.float32,
)


def layer(x, topk_idx, topk_weights):  # arrays of one rank
    slots = xd.ll_dispatch(config, x, topk_idx, topk_weights)
    # Rows of local expert e are slots.tokens[e, : slots.counts[e]]; here all are doubled.
    y, _ = xd.ll_combine(slots.plan, 2 * slots.tokens)
    return y


step = jax.jit(jax.shard_map(layer, mesh=mesh, in_specs=P("expert"), out_specs=P("expert")))
topk_idx = jnp.arange(RANKS * TOKENS * TOPK, dtype=jnp.int32).reshape(-1, TOPK) % EXPERTS
topk_weights = jnp.full((RANKS * TOKENS, TOPK), 0.5)
x = jnp.ones((RANKS * TOKENS, HIDDEN))
for number in range(1, 4):
    x = step(x, topk_idx, topk_weights)
    if not (x == 2**number).all():
        raise SystemExit(f"step {number} differs")
print("three steps as expected")
