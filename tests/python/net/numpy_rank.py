"""A rank of NumPy: two batches through dispatch and combine; every element is checked."""

from __future__ import annotations

import numpy as np

import crossdock

EXPERTS, TOPK, HIDDEN, TOKENS = 8, 3, 64, 40


def main() -> None:
    """Says which host the rank is on."""
    with crossdock.Comm.from_environment(timeout=60) as comm:
        config = crossdock.EpConfig(
            num_experts=EXPERTS,
            hidden=HIDDEN,
            max_topk=TOPK,
            max_tokens_per_rank=TOKENS,
            dtype=np.float32,
        )
        with crossdock.EpGroup(comm, config) as group:
            for seed in range(2):
                batch(comm, group, np.random.default_rng(10 * seed + comm.rank))
        comm.barrier()
        print(f"rank {comm.rank}: host {comm.host} of {comm.num_hosts}")


def batch(comm: crossdock.Comm, group: crossdock.EpGroup, rng: np.random.Generator) -> None:
    """Expert e multiplies by e + 1; the sums of whole numbers are exact."""
    tokens = int(rng.integers(0, TOKENS + 1))
    ids = np.array([rng.permutation(EXPERTS)[:TOPK] for _ in range(tokens)], np.int64)
    ids = ids.reshape(tokens, TOPK)
    x = rng.integers(-4, 5, (tokens, HIDDEN)).astype(np.float32)
    weights = rng.integers(-4, 5, (tokens, TOPK)).astype(np.float32)
    plan = group.prepare(ids)
    received = group.dispatch(plan, x, weights)
    per_rank = EXPERTS // comm.num_ranks
    for expert in range(per_rank):
        zone = slice(plan.offsets[expert], plan.offsets[expert + 1])
        received.tokens[zone] *= comm.rank * per_rank + expert + 1
    out = group.combine(plan, received.tokens, received.weights)
    np.testing.assert_array_equal(out, x * ((ids + 1) * weights).sum(1, keepdims=True))


main()
