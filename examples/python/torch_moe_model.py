#!/usr/bin/env python3
"""A DeepSeek-V3 layer: weights by the names of its files, and training with a bias for the load.

torchrun --nproc-per-node 2 torch_moe_model.py
"""

import torch
import torch.distributed as dist
from torch.nn import functional as F

import crossdock.torch as xd

HIDDEN, FFN, EXPERTS, TOKENS, STEPS = 32, 48, 8, 64, 30

# As in config.json, or from transformers: any object with these attributes.
CONFIG = {
    "model_type": "deepseek_v3",
    "hidden_size": HIDDEN,
    "moe_intermediate_size": FFN,
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
}


def weights_of_file() -> dict[str, torch.Tensor]:
    """The weights that a file of the model would have; here random, and equal on all ranks."""
    generator = torch.Generator().manual_seed(1)
    shapes = {"gate.weight": (EXPERTS, HIDDEN), "gate.e_score_correction_bias": (EXPERTS,)}
    for network in ["shared_experts", *(f"experts.{number}" for number in range(EXPERTS))]:
        shapes[f"{network}.gate_proj.weight"] = shapes[f"{network}.up_proj.weight"] = (FFN, HIDDEN)
        shapes[f"{network}.down_proj.weight"] = (HIDDEN, FFN)
    return {
        f"model.layers.3.mlp.{name}": torch.randn(shape, generator=generator) / HIDDEN**0.5
        for name, shape in shapes.items()
    }


def main() -> None:
    """Learns to turn columns around."""
    dist.init_process_group()
    comm = xd.init()
    layer = xd.model_layer(CONFIG, max_tokens_per_rank=TOKENS, aux_loss_weight=0)
    # Of the experts, this rank's own are read.
    xd.load_pretrained(layer, weights_of_file(), "model.layers.3.mlp.", "deepseek_v3")
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2)

    torch.manual_seed(2 + comm.rank)
    losses, busiest = [], []
    for _ in range(STEPS):
        x = torch.randn(TOKENS, HIDDEN, device=comm.device)
        out = layer(x)
        loss = F.mse_loss(out.hidden, x.flip(-1))
        loss.backward()
        xd.average_gradients(layer)
        optimizer.step()
        optimizer.zero_grad()
        # Experts with more than their share become less likely, the others more.
        xd.update_router_bias(layer, rate=0.05)
        losses.append(loss.item())
        busiest.append(out.load.max().item())

    if losses[-1] > 0.9 * losses[0] or busiest[-1] > busiest[0]:
        raise SystemExit(f"rank {comm.rank}: learned nothing: {losses}, {busiest}")
    print(
        f"rank {comm.rank}: loss {losses[0]:.2f} at first, {losses[-1]:.2f} at last; busiest "
        f"expert {busiest[0]:.0%} of all choices, then {busiest[-1]:.0%}\n",
        end="",
        flush=True,
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
