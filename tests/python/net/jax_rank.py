"""A process of jax.distributed: dispatch, combine and their gradients; every element is checked."""

from __future__ import annotations

import os

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import crossdock.jax as xd

EXPERTS, TOPK, HIDDEN, TOKENS = 8, 3, 32, 6
CONFIG = xd.EpConfig(
    num_experts=EXPERTS, hidden=HIDDEN, max_topk=TOPK, max_tokens_per_rank=TOKENS, dtype=np.float32
)


def main() -> None:
    """Each process knows the inputs of all, and compares its own part of the results."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    jax.distributed.initialize(
        f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}", ranks, rank
    )
    mesh = Mesh(np.array(jax.devices()), ("ep",))
    joined = xd.init(mesh, "ep", timeout=60)
    rng = np.random.default_rng(3)
    ids = np.array([rng.permutation(EXPERTS)[:TOPK] for _ in range(ranks * TOKENS)], np.int32)
    x = rng.integers(-4, 5, (ranks * TOKENS, HIDDEN)).astype(np.float32)
    spec = PartitionSpec("ep")
    sharding = NamedSharding(mesh, spec)

    def put(whole: np.ndarray) -> jax.Array:
        return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])

    def layer(ids: jax.Array, x: jax.Array) -> jax.Array:
        received = xd.ep_dispatch(xd.ep_prepare(CONFIG, ids), x)
        return xd.ep_combine(received.plan, received.tokens)[0]

    def value_and_gradient(ids: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        out, pull = jax.vjp(lambda x: layer(ids, x), x)
        return out, pull(2 * x)[0]

    mapped = jax.jit(
        jax.shard_map(value_and_gradient, mesh=mesh, in_specs=spec, out_specs=(spec, spec))
    )
    for got, factor in zip(mapped(put(ids), put(x)), (TOPK, 2 * TOPK)):
        for shard in got.addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), factor * x[shard.index])
    joined.close()
    print(f"rank {rank}: done")


main()
