"""Mixture-of-experts layers of published models by their formulas: one process, plain PyTorch.

Weights are dicts with the names that files of the models have. Shares no code with the library.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

HIDDEN, FFN, EXPERTS, TOPK, SHARED = 16, 24, 8, 3, 2
GROUPS, TOPK_GROUPS, SCALE = 4, 2, 2.5

COMMON = {"hidden_size": HIDDEN, "num_experts_per_tok": TOPK, "hidden_act": "silu"}
CONFIGS = {
    "mixtral": COMMON
    | {"model_type": "mixtral", "num_local_experts": EXPERTS, "intermediate_size": FFN},
    "qwen3_moe": COMMON
    | {
        "model_type": "qwen3_moe",
        "num_experts": EXPERTS,
        "moe_intermediate_size": FFN,
        "norm_topk_prob": False,
    },
    "deepseek_v3": COMMON
    | {
        "model_type": "deepseek_v3",
        "n_routed_experts": EXPERTS,
        "moe_intermediate_size": FFN,
        "n_shared_experts": SHARED,
        "n_group": GROUPS,
        "topk_group": TOPK_GROUPS,
        "routed_scaling_factor": SCALE,
        "norm_topk_prob": True,
    },
}
PROJECTIONS = {name: ("gate_proj", "up_proj", "down_proj") for name in CONFIGS}
PROJECTIONS["mixtral"] = ("w1", "w3", "w2")

Weights = dict[str, torch.Tensor]


def draw_weights(model: str) -> Weights:
    """Random weights on the CPU."""
    generator = torch.Generator("cpu").manual_seed(7)

    def drawn(*shape: int) -> torch.Tensor:
        values = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
        return values / shape[-1] ** 0.5

    weights = {"gate.weight": drawn(EXPERTS, HIDDEN)}
    gate, up, down = PROJECTIONS[model]
    names = {f"experts.{expert}": FFN for expert in range(EXPERTS)}
    if model == "deepseek_v3":
        weights["gate.e_score_correction_bias"] = 0.3 * drawn(EXPERTS)
        names["shared_experts"] = SHARED * FFN
    for name, ffn in names.items():
        weights[f"{name}.{gate}.weight"] = drawn(ffn, HIDDEN)
        weights[f"{name}.{up}.weight"] = drawn(ffn, HIDDEN)
        weights[f"{name}.{down}.weight"] = drawn(HIDDEN, ffn)
    return weights


def mixtral(weights: Weights, x: torch.Tensor) -> torch.Tensor:
    """The softmax of the best logits weighs their experts (arXiv:2401.04088, section 2.1)."""
    best, chosen = (x @ weights["gate.weight"].T).topk(TOPK)
    factors = torch.zeros(len(x), EXPERTS).scatter(1, chosen, best.softmax(-1))
    return sum_of_experts("mixtral", weights, x, factors)


def qwen3_moe(weights: Weights, x: torch.Tensor) -> torch.Tensor:
    """The best of the softmax over all experts, here not normalised."""
    best, chosen = (x @ weights["gate.weight"].T).softmax(-1).topk(TOPK)
    factors = torch.zeros(len(x), EXPERTS).scatter(1, chosen, best)
    return sum_of_experts("qwen3_moe", weights, x, factors)


def deepseek_v3(weights: Weights, x: torch.Tensor) -> torch.Tensor:
    """arXiv:2412.19437, equations 12 to 16, with the choice of groups; token by token."""
    scores = torch.sigmoid(x @ weights["gate.weight"].T)
    factors = []
    for row in scores:
        biased = (row + weights["gate.e_score_correction_bias"]).detach()
        groups = biased.view(GROUPS, -1)
        best = sorted(range(GROUPS), key=lambda g: -groups[g].sort().values[-2:].sum())
        size = EXPERTS // GROUPS
        allowed = [g * size + i for g in best[:TOPK_GROUPS] for i in range(size)]
        chosen = sorted(allowed, key=lambda e: -biased[e])[:TOPK]
        total = sum(row[e] for e in chosen)
        factors.append(
            torch.stack(
                [SCALE * row[e] / total if e in chosen else 0 * row[e] for e in range(EXPERTS)]
            )
        )
    routed = sum_of_experts("deepseek_v3", weights, x, torch.stack(factors))
    return routed + swiglu("deepseek_v3", weights, "shared_experts", x)


def sum_of_experts(
    model: str, weights: Weights, x: torch.Tensor, factors: torch.Tensor
) -> torch.Tensor:
    """Every expert computes every token; factors ``[T, E]`` are 0 for those not chosen."""
    return sum(
        factors[:, expert, None] * swiglu(model, weights, f"experts.{expert}", x)
        for expert in range(EXPERTS)
    )


def swiglu(model: str, weights: Weights, name: str, x: torch.Tensor) -> torch.Tensor:
    gate, up, down = (weights[f"{name}.{one}.weight"] for one in PROJECTIONS[model])
    return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T


FORMULAS = {"mixtral": mixtral, "qwen3_moe": qwen3_moe, "deepseek_v3": deepseek_v3}
