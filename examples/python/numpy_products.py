#!/usr/bin/env python3
"""An MLP whose weights are spread over two processes, with every transfer beside a product."""

import numpy as np

import crossdock.launch

RANKS, TOKENS, HIDDEN, INNER = 2, (5, 3), 16, 24  # tokens of each rank; inner columns of all ranks


def run_rank(rank: int, meeting: bytes) -> None:
    """The part of each rank."""
    config = crossdock.GemmConfig(
        max_tokens=max(TOKENS), max_k=HIDDEN, max_n=HIDDEN, dtype="float32"
    )
    with (
        crossdock.Comm(meeting, rank=rank, num_ranks=RANKS, heap_bytes=1 << 20) as comm,
        crossdock.GemmContext(comm, config) as context,
    ):
        random = np.random.default_rng(0)  # every rank knows the whole layer
        x, w_in, w_out = (
            random.standard_normal(shape, np.float32)
            for shape in ((sum(TOKENS), HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER))
        )
        first, share = sum(TOKENS[:rank]), INNER // RANKS
        own_tokens = slice(first, first + TOKENS[rank])
        own_inner = slice(rank * share, (rank + 1) * share)

        # The tokens of all ranks come while this rank multiplies its own.
        inner = context.all_gather(
            x[own_tokens].copy(), w_in[own_inner].copy(), epilogue="relu", tokens_per_rank=TOKENS
        )
        # Each rank has some of the summands of all tokens; its own tokens' sums stay here.
        out = context.reduce_scatter(inner, w_out[:, own_inner].copy(), tokens_per_rank=TOKENS)

        # Without ranks.
        expected = np.maximum(x @ w_in.T, 0) @ w_out.T
        np.testing.assert_allclose(out, expected[own_tokens], rtol=1e-4, atol=1e-4)
        print(f"rank {rank}: {len(out)} of {len(expected)} rows as expected", flush=True)


def main() -> None:
    """Starts the ranks and waits for them."""
    crossdock.launch.run(RANKS, run_rank, crossdock.unique_id())


if __name__ == "__main__":
    main()
