"""Layers with weights of Hugging Face's models, as their files and their modules name them."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch

import crossdock.torch as xd
from support import Rank, run_ranks
from torch_support import joined, where

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

HIDDEN, TOKENS = 16, 10
SIZES = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 16,
    "num_experts_per_tok": 2,
}


def make_model(kind: str) -> Any:
    """A model of one small layer, with random weights."""
    torch.manual_seed(5)
    if kind == "mixtral":
        config = transformers.MixtralConfig(intermediate_size=24, num_local_experts=4, **SIZES)
        model = transformers.MixtralForCausalLM(config)
    elif kind == "qwen3_moe":
        config = transformers.Qwen3MoeConfig(
            moe_intermediate_size=24, num_experts=4, norm_topk_prob=True, head_dim=8, **SIZES
        )
        model = transformers.Qwen3MoeForCausalLM(config)
    else:
        config = transformers.DeepseekV3Config(
            moe_intermediate_size=24,
            n_routed_experts=8,
            n_shared_experts=1,
            n_group=4,
            topk_group=2,
            routed_scaling_factor=2.5,
            first_k_dense_replace=0,
            q_lora_rank=8,
            kv_lora_rank=8,
            qk_rope_head_dim=4,
            qk_nope_head_dim=4,
            v_head_dim=8,
            **SIZES,
        )
        model = transformers.DeepseekV3ForCausalLM(config)
    generator = torch.Generator("cpu").manual_seed(6)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                tensor.copy_(torch.randn(tensor.shape, generator=generator) / HIDDEN**0.5)
    return model


def check_layer(
    me: Rank, config: dict[str, Any], arrays: dict[str, dict], rows: Any, expected: Any
) -> None:
    x, want = torch.from_numpy(rows), torch.from_numpy(expected)
    states = {p: {n: torch.from_numpy(v) for n, v in state.items()} for p, state in arrays.items()}
    with joined() as comm:
        options: Any = {"comm": comm, "max_tokens_per_rank": TOKENS, "dtype": torch.float32}
        for prefix, state in states.items():
            layer = xd.model_layer(config, **options)
            xd.load_pretrained(layer, state, prefix, config["model_type"])
            here = slice(me.rank * 5, me.rank * 5 + 5)
            got = layer(x[here].to(where())).hidden
            torch.testing.assert_close(got.cpu(), want[here], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "deepseek_v3"])
def test_weights_of_files_and_of_modules_load(kind: str, tmp_path: pathlib.Path) -> None:
    from safetensors.torch import load_file

    model = make_model(kind)
    x = torch.randn(TOKENS, HIDDEN, generator=torch.Generator("cpu").manual_seed(7))
    with torch.no_grad():
        expected = model.model.layers[0].mlp(x[None])[0]
    model.save_pretrained(tmp_path)
    block = "model.layers.0.mlp."
    in_files = load_file(tmp_path / "model.safetensors")
    in_modules = {name.removeprefix(block): value for name, value in model.state_dict().items()}
    of_files = block.replace("mlp", "block_sparse_moe") if kind == "mixtral" else block
    assert any(name.startswith(f"{of_files}experts.1.") for name in in_files)
    assert "experts.gate_up_proj" in in_modules
    states = {of_files: in_files, "": in_modules}
    # As arrays: a tensor's memory is handed to one process only.
    arrays = {p: {n: v.numpy() for n, v in state.items()} for p, state in states.items()}
    run_ranks(2, check_layer, model.config.to_dict(), arrays, x.numpy(), expected.numpy())
