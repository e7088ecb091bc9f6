#!/usr/bin/env python3
"""Writes a tiny mixture-of-experts model for serving engines: ``tiny_moe.py FOLDER``.

It is a Qwen3-MoE of random weights, for which only the output layer is chosen: the model counts.
After token t of the first `COUNT` comes t + 1, and after the last of them 0. The answer is in what
experts make of a token, so rows that are lost or swapped on their way are other tokens, or other
probabilities. There is no tokenizer: prompts are lists of ids.
"""

from __future__ import annotations

import pathlib
import sys

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

COUNT = 64
_VOCABULARY = 512
_SHARPNESS = 5.0  # of the right token's logit; those of others are about 0


def make(seed: int = 7) -> Qwen3MoeForCausalLM:
    """The model, in bfloat16."""
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=_VOCABULARY,
        hidden_size=2048,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=128,
        moe_intermediate_size=256,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=None,
    )
    model = Qwen3MoeForCausalLM(config).float().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                torch.nn.init.normal_(weight, std=_size_of(name) / weight.shape[-1] ** 0.5)
        model.bfloat16().float()  # numbers that are the same in both
        _count(model)
    return model.bfloat16()


def _size_of(name: str) -> float:
    """Of what a weight makes of rows of size 1: experts decide, and attention hardly does."""
    sizes = {
        "embed_tokens": 0.1 * 2048**0.5,
        "o_proj": 0.01,
        "mlp.gate.weight": 4.0,
        "down_proj": 6.0,
    }
    return next((size for part, size in sizes.items() if part in name), 1.0)


def _count(model: Qwen3MoeForCausalLM) -> None:
    """Chooses the output layer, and tokens of which rounding does not change the experts."""
    every = torch.arange(_VOCABULARY).unsqueeze(1)
    embedding = model.model.embed_tokens.weight
    certain = _margins(model, every).argsort(descending=True)
    embedding.copy_(embedding[certain].clone())
    hidden = model.model(input_ids=every).last_hidden_state[:COUNT, 0]
    ids = torch.arange(COUNT)
    model.lm_head.weight.zero_()
    rows = hidden * _SHARPNESS / hidden.square().sum(1, keepdim=True)
    model.lm_head.weight[(ids + 1) % COUNT] = rows


def _margins(model: Qwen3MoeForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    """By token, how far its last chosen expert is ahead of the next one, in the worst layer."""
    seen: list[torch.Tensor] = []
    hooks = [
        layer.mlp.gate.register_forward_pre_hook(
            lambda gate, inputs: seen.append(
                torch.nn.functional.linear(inputs[0].reshape(len(ids), -1), gate.weight)
            )
        )
        for layer in model.model.layers
    ]
    model.model(input_ids=ids)
    for hook in hooks:
        hook.remove()
    topk = model.config.num_experts_per_tok
    best = torch.stack(seen).sort(dim=-1, descending=True).values
    return (best[..., topk - 1] - best[..., topk]).amin(0)


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(f"usage: {sys.argv[0]} FOLDER")
    folder = pathlib.Path(sys.argv[1])
    make().save_pretrained(folder)
    print(f"{folder}: {sum(path.stat().st_size for path in folder.iterdir()) >> 20} MiB")


if __name__ == "__main__":
    main()
