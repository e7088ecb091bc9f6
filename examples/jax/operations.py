"""One batch to its experts and back, in jax.shard_map: gradients of tokens and router weights.

Then the same batch through SwiGLU experts, in one call.
"""

import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"  # where there is no GPU

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import crossdock.jax as xd

RANKS, EXPERTS, TOKENS, HIDDEN, FFN, TOPK = 4, 8, 16, 32, 64, 2

mesh = jax.make_mesh((RANKS,), ("expert",), axis_types=(jax.sharding.AxisType.Auto,))
xd.init(mesh, "expert")
config = xd.EpConfig(
    num_experts=EXPERTS,
    hidden=HIDDEN,
    max_topk=TOPK,
    max_tokens_per_rank=TOKENS,
    dtype=jnp.bfloat16,  # on GPUs ep_moe takes rows of 16 bits
)


def layer(topk_idx, x, topk_weights):  # arrays of one rank
    plan = xd.ep_prepare(config, topk_idx)
    tokens, weights, _, plan = xd.ep_dispatch(plan, x, topk_weights)
    # Rows of local expert e are plan.offsets[e] to plan.offsets[e + 1]; here all are doubled.
    y, plan = xd.ep_combine(plan, 2 * tokens, weights)
    return y


def loss(topk_idx, x, topk_weights):  # arrays of all ranks, one after the other
    y = jax.shard_map(layer, mesh=mesh, in_specs=P("expert"), out_specs=P("expert"))(
        topk_idx, x, topk_weights
    )
    return (y * y).sum()


topk_idx = jnp.arange(RANKS * TOKENS * TOPK, dtype=jnp.int32).reshape(-1, TOPK) % EXPERTS
x = jnp.ones((RANKS * TOKENS, HIDDEN), jnp.bfloat16)
topk_weights = jnp.full((RANKS * TOKENS, TOPK), 0.5)
grad_x, grad_weights = jax.jit(jax.grad(loss, (1, 2)))(topk_idx, x, topk_weights)
if not ((grad_x == 8).all() and (grad_weights == 8 * HIDDEN).all()):
    raise SystemExit("gradients differ")
print("gradients as expected")


def experts(topk_idx, x, topk_weights, w_in, w_out):  # the latter [L, H, 2F] and [L, F, H]
    y, plan = xd.ep_moe(config, topk_idx, x, topk_weights, w_in, w_out, overlap="auto")
    return y


in_map = jax.shard_map(experts, mesh=mesh, in_specs=P("expert"), out_specs=P("expert"))
w_in = jnp.full((EXPERTS, HIDDEN, 2 * FFN), 1 / HIDDEN, jnp.bfloat16)
w_out = jnp.full((EXPERTS, FFN, HIDDEN), 1 / FFN, jnp.bfloat16)
y = jax.jit(in_map)(topk_idx, x, topk_weights, w_in, w_out)
if not jnp.allclose(y, jax.nn.silu(1.0), rtol=0.01):  # of gates and values that are 1
    raise SystemExit("results differ")
print("experts as expected")
