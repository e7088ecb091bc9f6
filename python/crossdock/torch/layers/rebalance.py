"""Layers whose experts move between ranks while they serve."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from crossdock._moves import told
from crossdock._placement import Move, plan_placement
from crossdock.errors import InvalidArgument

from .._placement import move_experts
from .._sharding import local_tensor
from .layer import MoELayer
from .placed import note_table

__all__ = ["rebalance"]


def rebalance(
    layer: MoELayer,
    loads: npt.ArrayLike | None = None,
    *,
    max_moves: int | None = None,
    good_enough: float = 1.05,
) -> list[Move]:
    """Moves a serving layer's experts, and replicas of them, to where their loads are even.

    Collective, between two forward passes. For layers whose `MoELayer.group` has
    ``num_logical_experts``; their weights lie in symmetric memory. ``state_dict`` holds slots, and
    `MoELayer.placement` beside them; `load_pretrained` loads into the slots of the table in force.

    Args:
        layer: in eval mode. Gradients of replicas would not be added up.
        loads: ``[num_experts]``, equal on all ranks; None = as ``layer.group.loads`` has counted
            them since the last call. Forward passes with ``decode`` are not in it.
        max_moves, good_enough: as of ``crossdock.plan_placement``.

    Returns:
        The moves into this rank's slots.

    Raises:
        ValueError: a layer in training mode, or a group without logical experts, or of another
            layer; Mismatch on the other ranks. The loads stay counted.
        As `move_experts` and ``crossdock.plan_placement``.
    """
    group = layer.group
    with told(group.comm.core):
        ranks, slots = _placement_of(layer).shape
        new = plan_placement(
            group.loads().sum(dim=0) if loads is None else loads,
            ranks,
            slots,
            current=group.placement,
            max_moves=max_moves,
            good_enough=good_enough,
        )
        weights = [_symmetric(layer, one) for one in layer.expert_parameters()]
        groups = [one for one in (group, layer.decode_group) if one is not None]
        before = group.table
    try:
        moves = move_experts(groups, weights, layer.placement.numpy(), new)
    finally:
        if group.table != before:  # also where ranks were lost
            note_table(layer)
    if loads is None:
        group.loads(clear=True)
    return moves


def _placement_of(layer: MoELayer) -> np.ndarray:
    """The placement of a layer whose experts can move."""
    group = layer.group
    if layer.training or group.placement is None:
        raise ValueError(
            "layer: expected one in eval mode whose group has num_logical_experts, got "
            f"training={layer.training}, num_logical_experts={group.num_logical_experts}"
        )
    if group.layer is None or group.layer() is not layer:
        raise ValueError("layer: expected the one that its group was given to, got a copy of it")
    return group.placement


def _symmetric(layer: MoELayer, parameter: nn.Parameter) -> torch.Tensor:
    """Weights that peers can read."""
    weights = local_tensor(parameter)
    try:
        layer.group.comm.core.mem_export(weights.data_ptr())
    except InvalidArgument as error:
        raise ValueError(
            "layer: expected experts in symmetric memory, where MoELayer has put them, got a "
            "parameter elsewhere, as layer.bfloat16() and load_state_dict(assign=True) leave it; "
            "make the layer with dtype= or param_dtype=, and load its weights without assign"
        ) from error
    return weights
