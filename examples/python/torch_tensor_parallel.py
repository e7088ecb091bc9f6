#!/usr/bin/env python3
"""An MLP whose weights are spread over the ranks: `torchrun --nproc-per-node 2`, CPU or GPUs."""

import torch
from torch.nn import functional as F

import crossdock.torch as xd
from crossdock.torch import tp

HIDDEN, INNER, TOKENS = 64, 256, 32  # tokens of each rank; INNER columns of all ranks


def main() -> None:
    comm = xd.init()  # this rank's GPU, or the CPU where there is none
    context = tp.TpContext(max_tokens=TOKENS, max_k=HIDDEN, max_n=INNER, dtype=torch.float32)

    torch.manual_seed(0)  # every rank knows the whole layer
    x, w_in, w_out = (
        torch.randn(shape, device=comm.device)
        for shape in ((TOKENS * comm.num_ranks, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER))
    )
    own_tokens = x.chunk(comm.num_ranks)[comm.rank].clone().requires_grad_()
    own_in = w_in.chunk(comm.num_ranks)[comm.rank].clone().requires_grad_()
    own_out = w_out.chunk(comm.num_ranks, dim=1)[comm.rank].clone().requires_grad_()

    # The tokens of all ranks come while this rank multiplies its own.
    inner = tp.all_gather_matmul(own_tokens, own_in.t(), context, activation="gelu")
    # Each rank has some of the summands of all tokens; its own tokens' sums stay here.
    out = tp.matmul_reduce_scatter(inner, own_out.t(), context)
    # In the backward pass each transfer is beside a product, too.
    out.sum().backward()

    # Without ranks.
    x.requires_grad_()
    expected = F.linear(F.gelu(F.linear(x, w_in), approximate="tanh"), w_out)
    expected.sum().backward()
    for got, whole in ((out, expected), (own_tokens.grad, x.grad)):
        want = whole.chunk(comm.num_ranks)[comm.rank]
        assert torch.allclose(got, want, rtol=1e-2, atol=0.1), (got - want).abs().max()
    print(f"rank {comm.rank}: {len(out)} rows and their gradient as expected", flush=True)
    comm.close()


if __name__ == "__main__":
    main()
