#!/usr/bin/env python3
"""Captures a step in a CUDA graph and replays it with other routing. Needs a GPU per rank.

torchrun --nproc-per-node 2 torch_graph.py
"""

import torch

import crossdock.torch as xd

TOKENS, HIDDEN, TOPK, EXPERTS = 64, 128, 2, 8


def main() -> None:
    """Compares every replay with the same step outside the graph."""
    comm = xd.init()
    if comm.device.type != "cuda":
        raise SystemExit("torch_graph.py: needs a GPU per rank: the CPU has no CUDA graphs")
    torch.cuda.set_device(comm.device)
    group = xd.EpGroup(
        num_experts=EXPERTS, hidden=HIDDEN, max_topk=TOPK, max_tokens_per_rank=TOKENS
    )
    x = torch.randn(TOKENS, HIDDEN, device=comm.device, dtype=torch.bfloat16)
    logits = torch.randn(TOKENS, EXPERTS, device=comm.device)

    def step() -> torch.Tensor:
        topk_weights, topk_idx = logits.softmax(dim=-1).topk(TOPK)
        plan = group.prepare(topk_idx)
        received = xd.dispatch(plan, x, topk_weights)
        return xd.combine(plan, torch.nn.functional.silu(received.tokens), received.weights)

    warm_up = torch.cuda.Stream()
    warm_up.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm_up):
        step()
    torch.cuda.current_stream().wait_stream(warm_up)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for _ in range(3):
        x.normal_()
        logits.normal_()  # other routing, and so other numbers of rows
        graph.replay()
        torch.testing.assert_close(out, step(), rtol=0, atol=0)
    torch.cuda.synchronize()
    group.check()
    print(f"rank {comm.rank}: replays agree\n", end="", flush=True)


if __name__ == "__main__":
    main()
