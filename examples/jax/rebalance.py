"""Experts that move between two steps of one compiled program; tokens notice nothing."""

import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P

import crossdock
import crossdock.jax as xd

RANKS, TOKENS, HIDDEN, TOPK = 4, 64, 16, 2
EXPERTS, SLOTS = 16, 5  # each rank has room for 5 experts, one more than its share

mesh = jax.make_mesh((RANKS,), ("expert",), axis_types=(jax.sharding.AxisType.Auto,))
ep = xd.init(mesh, "expert")
config = xd.EpConfig(
    num_experts=RANKS * SLOTS,  # slots
    num_logical_experts=EXPERTS,  # ids in topk_idx name these
    hidden=HIDDEN,
    max_topk=TOPK,
    max_tokens_per_rank=TOKENS,
    dtype=jnp.float32,
)


@jax.jit
@jax.shard_map(mesh=mesh, in_specs=P("expert"), out_specs=P("expert"))
def layer(topk_idx, x, weights):  # weights: [SLOTS, HIDDEN] of a rank
    plan = xd.ep_prepare(config, topk_idx)
    tokens, _, _, plan = xd.ep_dispatch(plan, x)
    rows = tokens * weights[plan.row_experts()]
    return xd.ep_combine(plan, rows)[0], plan.counts.sum(keepdims=True)


# Each rank begins with its share of the experts, and a slot to spare.
placement = np.full((RANKS, SLOTS), -1)
placement[:, : EXPERTS // RANKS] = np.arange(EXPERTS).reshape(RANKS, -1)
ep.set_placement(config, placement)
weights = 1.0 + np.repeat(placement.reshape(-1, 1), HIDDEN, axis=1)  # expert e multiplies by 1 + e
weights = jax.device_put(jnp.float32(weights), NamedSharding(mesh, P("expert")))

random = np.random.default_rng(0)
popular = 1 / np.arange(1, EXPERTS + 1)  # expert 0 is chosen most often
rows = []
for step in range(6):
    if step == 3:
        loads = next(iter(ep.loads(config).values())).sum(axis=0)  # the same on all devices
        new = crossdock.plan_placement(loads, RANKS, SLOTS, current=placement)
        weights = xd.move_experts(config, weights, new)
    scores = random.exponential(1 / popular, (RANKS * TOKENS, EXPERTS))
    topk_idx = np.int32(scores.argsort(axis=1)[:, :TOPK])
    x = np.float32(random.integers(-4, 5, (RANKS * TOKENS, HIDDEN)))
    out, received = layer(topk_idx, x, weights)
    np.testing.assert_array_equal(out, x * (1 + topk_idx).sum(axis=1, keepdims=True))
    rows.append(int(received.max()))  # of the busiest rank

before, after = sum(rows[:3]), sum(rows[3:])
print(f"rows of the busiest rank: {before} in 3 steps, {after} in 3 later ones")
if after >= before:
    raise SystemExit("the placement is no better")
print("sums as expected")
