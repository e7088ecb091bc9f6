"""Layers of published models: their sizes and choices, and weights under the names they have.

A config is an object, or a dict, with the attributes that Hugging Face's configs of these models
have; transformers itself is not needed.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch

from crossdock._router import RouterOptions

from .._sharding import local_tensor
from .experts import GroupedExperts, SharedExperts
from .layer import MoELayer
from .placed import experts_here, note_table
from .router import Router

__all__ = ["load_pretrained", "model_layer"]


class _Model(NamedTuple):
    """Where a config says what; and how weights of experts are called in files of the model."""

    num_experts: tuple[str, ...]
    ffn: tuple[str, ...]
    options: Callable[[Callable[..., Any]], RouterOptions]
    projections: tuple[str, str, str]  # gate, up, down


def _softmax(get: Callable[..., Any]) -> RouterOptions:
    return RouterOptions(normalize=bool(get("norm_topk_prob", default=True)))


def _deepseek_v3(get: Callable[..., Any]) -> RouterOptions:
    return RouterOptions(
        scores="sigmoid",
        normalize=bool(get("norm_topk_prob", default=True)),
        scale=float(get("routed_scaling_factor")),
        num_groups=get("n_group"),
        topk_groups=get("topk_group"),
        bias=True,
    )


_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_MODELS = {
    # arXiv:2401.04088
    "mixtral": _Model(("num_local_experts",), ("intermediate_size",), _softmax, ("w1", "w3", "w2")),
    # arXiv:2505.09388
    "qwen3_moe": _Model(
        ("num_experts", "num_local_experts"), ("moe_intermediate_size",), _softmax, _PROJECTIONS
    ),
    # arXiv:2412.19437
    "deepseek_v3": _Model(
        ("n_routed_experts", "num_local_experts"),
        ("moe_intermediate_size",),
        _deepseek_v3,
        _PROJECTIONS,
    ),
}


def model_layer(config: Any, **options: Any) -> MoELayer:
    """The mixture-of-experts layer of a model that ``config.model_type`` names. Collective.

    "mixtral", "qwen3_moe" or "deepseek_v3": experts, top-k, activation, router and shared experts
    are the config's. Its losses are not read: the layer has those of `MoELayer`, a load-balancing
    loss of weight 0.01, unless ``aux_loss_weight`` says otherwise. Nor is its ``torch_dtype`` or
    ``dtype``: give ``dtype``, or the layer has the group's or torch's default.

    Args:
        config: such as ``transformers.MixtralConfig``.
        options: further arguments of `MoELayer`: ``max_tokens_per_rank``, ``comm``, ``dtype`` ...

    Raises:
        ValueError: another model, or a config that lacks something.
    """

    def get(*names: str, **default: Any) -> Any:
        return _attribute(config, names, **default)

    model = _MODELS.get(get("model_type"))
    if model is None:
        expected = f"expected one of {sorted(_MODELS)}"
        raise ValueError(f"config.model_type: {expected}, got {get('model_type')!r}")
    hidden, ffn = get("hidden_size"), get(*model.ffn)
    activation = get("hidden_act", default="silu")
    if activation != "silu":
        raise ValueError(f"config.hidden_act: expected 'silu', got {activation!r}")
    shared = get("n_shared_experts", default=0) or 0
    return MoELayer(
        hidden,
        ffn,
        get(*model.num_experts),
        get("num_experts_per_tok"),
        router=model.options(get),
        shared_experts=shared,
        **options,
    )


def _attribute(config: Any, names: Iterable[str], **default: Any) -> Any:
    for name in names:
        value = config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
        if value is not None:
            return value
    if "default" in default:
        return default["default"]
    raise ValueError(f"config: expected an attribute {' or '.join(names)}, got none")


@torch.no_grad()
def load_pretrained(
    layer: MoELayer, state: Mapping[str, torch.Tensor], prefix: str, model_type: str
) -> None:
    """Copies a layer's weights from a model's state dict; of the experts, those of this rank.

    It understands the names that models have in files (``experts.7.gate_proj.weight``,
    of Mixtral ``experts.7.w1.weight``), and those that transformers gives them in memory
    (``experts.gate_up_proj``). With ``num_logical_experts`` an expert goes to the slots where the
    group's table has it.

    Args:
        layer: as `model_layer` makes it: built-in router, experts and shared experts.
        state: name to tensor of any dtype and device. Only what is needed is looked up, once, so
            that a mapping may read from files.
        prefix: of the layer's names, such as ``"model.layers.3.mlp."``; of Mixtral's files
            ``"model.layers.3.block_sparse_moe."``.
        model_type: "mixtral", "qwen3_moe" or "deepseek_v3".

    Raises:
        KeyError: a name is missing: names it, and the one there that is most like it. Parameters
            that come before it have been copied.
        ValueError: a shape does not fit, another model, or a layer with parts of the caller's.
    """
    model = _MODELS.get(model_type)
    if model is None:
        raise ValueError(f"model_type: expected one of {sorted(_MODELS)}, got {model_type!r}")
    router, experts, shared = layer.router, layer.experts, layer.shared
    if not isinstance(router, Router) or not isinstance(experts, GroupedExperts):
        raise ValueError("layer: expected its own router and experts, got parts of the caller's")

    def get(name: str) -> torch.Tensor:
        try:
            return state[prefix + name]
        except KeyError:
            raise KeyError(_missing(state, prefix, name)) from None

    _copy(router.weight, get("gate.weight"), "gate.weight")
    if router.bias is not None:
        name = "gate.e_score_correction_bias"
        _copy(router.bias, get(name), name)
    w_in, w_out = local_tensor(experts.w_in), local_tensor(experts.w_out)
    if prefix + "experts.gate_up_proj" in state:
        for name, weights in (("gate_up_proj", w_in), ("down_proj", w_out)):
            every = get(f"experts.{name}")
            for local, expert in experts_here(layer):
                here = weights[local : local + 1].mT
                _copy(here, every[expert : expert + 1], f"experts.{name}")
    else:
        for local, expert in experts_here(layer):
            names = [f"experts.{expert}.{one}.weight" for one in model.projections]
            _copy_projections(w_in[local], w_out[local], names, get)
    if isinstance(shared, SharedExperts):
        names = [f"shared_experts.{one}.weight" for one in _PROJECTIONS]
        _copy_projections(shared.w_in, shared.w_out, names, get)
    if layer.group.num_logical_experts:
        note_table(layer)


def _missing(state: Mapping[str, torch.Tensor], prefix: str, name: str) -> str:
    """The error where a name of a model's is not in its state dict."""
    text = f"state: expected {prefix + name!r}, got no such name"
    if f"{prefix}.{name}" in state:
        return f"{text}, but {f'{prefix}.{name}'!r}: prefix lacks its dot"
    nearest = difflib.get_close_matches(prefix + name, list(state), n=1, cutoff=0)
    return f"{text}, the nearest there is {nearest[0]!r}" if nearest else f"{text}, nor any other"


def _copy_projections(
    w_in: torch.Tensor, w_out: torch.Tensor, names: list[str], get: Callable[[str], torch.Tensor]
) -> None:
    """Matrices ``[F, H]``, ``[F, H]`` and ``[H, F]`` of a linear layer each, as two products."""
    gate, up = w_in.chunk(2, dim=1)
    for target, name in zip((gate, up, w_out), names):
        _copy(target.mT, get(name), name)


def _copy(target: torch.Tensor, value: torch.Tensor, name: str) -> None:
    if target.shape != value.shape:
        expected, got = tuple(target.shape), tuple(value.shape)
        raise ValueError(f"{name}: expected shape {expected}, got {got}")
    target.copy_(value)
