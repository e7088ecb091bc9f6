"""Layers of published models over ranks, against their formulas in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import crossdock.torch as xd
from moe_formulas import CONFIGS, EXPERTS, FORMULAS, HIDDEN, PROJECTIONS, draw_weights
from support import Rank, on_ranks
from torch_support import joined, where

TOKENS = 12  # of all ranks


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """All ranks' tokens, and the gradient of all outputs."""
    generator = torch.Generator("cpu").manual_seed(8)
    options: Any = {"generator": generator, "dtype": torch.float32, "device": "cpu"}
    return torch.randn(TOKENS, HIDDEN, **options), torch.randn(TOKENS, HIDDEN, **options)


def in_names_of_model(model: str, layer: xd.MoELayer, what: str) -> dict[str, torch.Tensor]:
    """A layer's parameters of this rank, or their gradients, as the model's files name them."""

    def of(parameter: torch.nn.Parameter) -> torch.Tensor:
        return xd.local_tensor(getattr(parameter, what)).detach()

    found = {"gate.weight": of(layer.router.weight)}
    networks = {
        f"experts.{layer.first_expert + local}": pair
        for local, pair in enumerate(zip(of(layer.experts.w_in), of(layer.experts.w_out)))
    }
    if layer.shared is not None:
        networks["shared_experts"] = (of(layer.shared.w_in), of(layer.shared.w_out))
    for name, (w_in, w_out) in networks.items():
        matrices = (*w_in.chunk(2, dim=1), w_out)
        for projection, matrix in zip(PROJECTIONS[model], matrices):
            found[f"{name}.{projection}.weight"] = matrix.T
    return found


@pytest.mark.parametrize("model", CONFIGS)
@on_ranks(1, 4)
def test_layers_are_their_formulas(me: Rank, model: str) -> None:
    weights = {name: value.requires_grad_() for name, value in draw_weights(model).items()}
    x, grad = batch()
    whole = x.clone().requires_grad_()
    expected = FORMULAS[model](weights, whole)
    expected.backward(grad)

    def mine(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.tensor_split(me.num_ranks)[me.rank].to(where())

    def close(got: torch.Tensor, wanted: torch.Tensor, name: str) -> None:
        message = lambda text: f"{name}: {text}"  # noqa: E731
        torch.testing.assert_close(got.cpu(), wanted, rtol=2e-5, atol=2e-6, msg=message)

    with joined() as comm:
        layer = xd.model_layer(
            CONFIGS[model],
            comm=comm,
            max_tokens_per_rank=TOKENS,
            dtype=torch.float32,
            aux_loss_weight=0,
        )
        plain = {f"layer.{name}": value.detach() for name, value in weights.items()}
        xd.load_pretrained(layer, plain, "layer.", model)
        part = mine(x).requires_grad_()
        output = layer(part)
        output.hidden.backward(mine(grad))
        close(output.hidden, mine(expected).cpu(), "output")
        close(part.grad, mine(whole.grad).cpu(), "x.grad")
        for parameter in (layer.router, layer.shared):
            for shared in [] if parameter is None else parameter.parameters():
                dist.all_reduce(shared.grad)
        gradients = in_names_of_model(model, layer, "grad")
        assert len(gradients) == 1 + 3 * (EXPERTS // me.num_ranks + (layer.shared is not None))
        for name, gradient in gradients.items():
            close(gradient, weights[name].grad, name)


@on_ranks(1)
def test_configs_and_weights_that_do_not_fit_are_named(me: Rank) -> None:
    with joined() as comm:
        options: Any = {"comm": comm, "max_tokens_per_rank": 4, "dtype": torch.float32}
        with pytest.raises(ValueError, match="config.model_type: expected one of .* got 'gpt2'"):
            xd.model_layer({"model_type": "gpt2"}, **options)
        with pytest.raises(ValueError, match="config: expected an attribute hidden_size, got none"):
            xd.model_layer({"model_type": "mixtral"}, **options)
        layer = xd.model_layer(CONFIGS["mixtral"], **options)
        weights = draw_weights("mixtral")
        with pytest.raises(ValueError, match="model_type: expected one of .* got 'gpt2'"):
            xd.load_pretrained(layer, weights, "", "gpt2")
        wrong = weights | {"experts.7.w2.weight": torch.zeros(3, 2)}
        with pytest.raises(
            ValueError, match=r"experts.7.w2.weight: expected shape \(16, 24\), got"
        ):
            xd.load_pretrained(layer, wrong, "", "mixtral")
        nearest = "expected 'experts.0.w1.weight', got no such name, the nearest there is 'gate.w"
        with pytest.raises(KeyError, match=nearest):
            xd.load_pretrained(layer, {"gate.weight": weights["gate.weight"]}, "", "mixtral")
        named = {f"model.moe.{name}": value for name, value in weights.items()}
        dot = (
            "expected 'model.moegate.weight', .* but 'model.moe.gate.weight': prefix lacks its dot"
        )
        with pytest.raises(KeyError, match=dot):
            xd.load_pretrained(layer, named, "model.moe", "mixtral")
        with pytest.raises(KeyError, match="got no such name, nor any other"):
            xd.load_pretrained(layer, {}, "", "mixtral")
