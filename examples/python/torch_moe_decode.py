#!/usr/bin/env python3
"""A Mixtral layer that reads a prompt by the operations for many tokens, then decodes.

torchrun --nproc-per-node 2 torch_moe_decode.py
"""

import torch
import torch.distributed as dist

import crossdock.torch as xd

PROMPT, SEQUENCES = 32, 4

CONFIG = {
    "model_type": "mixtral",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}


def main() -> None:
    """Compares both ways bit by bit."""
    dist.init_process_group()
    comm = xd.init()
    torch.manual_seed(1)
    layer = xd.model_layer(CONFIG, max_tokens_per_rank=PROMPT, decode_tokens=SEQUENCES).eval()

    torch.manual_seed(2 + comm.rank)
    for _ in range(3):
        x = torch.randn(PROMPT, CONFIG["hidden_size"], device=comm.device)
        with torch.inference_mode():
            prompt = layer(x)  # many tokens: prepare, dispatch, combine
            step = layer(x[:SEQUENCES], decode=True)
            same = layer(x[:SEQUENCES])
        if prompt.hidden.shape != x.shape or not torch.equal(step.hidden, same.hidden):
            raise SystemExit(f"rank {comm.rank}: decoding gives other bits")
    print(f"rank {comm.rank}: decodes with the same bits\n", end="", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
