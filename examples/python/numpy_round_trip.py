#!/usr/bin/env python3
"""One batch to its experts and back with NumPy arrays, over two processes that it starts itself."""

import numpy as np

import crossdock.launch

RANKS, TOKENS, HIDDEN, TOPK, EXPERTS = 2, 5, 16, 2, 4


def run_rank(rank: int, meeting: bytes) -> None:
    """The part of each rank."""
    config = crossdock.EpConfig(
        num_experts=EXPERTS,
        max_topk=TOPK,
        max_tokens_per_rank=TOKENS,
        hidden=HIDDEN,
        dtype="float32",
    )
    with (
        crossdock.Comm(meeting, rank=rank, num_ranks=RANKS, heap_bytes=1 << 20) as comm,
        crossdock.EpGroup(comm, config) as group,
    ):
        random = np.random.default_rng(rank)
        tokens = random.standard_normal((TOKENS, HIDDEN), np.float32)
        topk_idx = random.random((TOKENS, EXPERTS)).argsort(axis=1)[:, :TOPK].copy()
        topk_weights = random.random((TOKENS, TOPK), np.float32)

        # Where will every row go?
        plan = group.prepare(topk_idx)
        # Tokens go to their experts: this rank's are `first_expert` and the next ones.
        received = group.dispatch(plan, tokens, topk_weights)
        first_expert = rank * EXPERTS // RANKS
        for expert in range(EXPERTS // RANKS):
            zone = slice(plan.offsets[expert], plan.offsets[expert + 1])
            received.tokens[zone] *= first_expert + expert + 1  # this expert's arithmetic
        # The results come back, weighted and summed per token.
        out = group.combine(plan, received.tokens, received.weights)

        # Without ranks: each choice's weight times what its expert does.
        expected = tokens * (topk_weights * (topk_idx + 1)).sum(axis=1, keepdims=True)
        np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)
        print(f"rank {rank}: received {plan.recv_rows} rows, sums as expected", flush=True)


def main() -> None:
    """Starts the ranks and waits for them."""
    crossdock.launch.run(RANKS, run_rank, crossdock.unique_id())


if __name__ == "__main__":
    main()
