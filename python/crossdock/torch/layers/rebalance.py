"""Layers whose experts move between ranks while they serve."""

from __future__ import annotations

import numpy.typing as npt

from crossdock._placement import Move, plan_placement

from .._placement import move_experts
from .._sharding import local_tensor
from .layer import MoELayer

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
    ``num_logical_experts`` and serves no other layer; their weights lie in symmetric memory. Load
    their weights before the first call: then expert e is in slot e, and ``state_dict`` holds slots.

    Args:
        layer: in eval mode. Gradients of replicas would not be added up.
        loads: ``[num_experts]``, equal on all ranks; None = as ``layer.group.loads`` has counted
            them since the last call. Forward passes with ``decode`` are not in it.
        max_moves, good_enough: as of ``crossdock.plan_placement``.

    Returns:
        The moves into this rank's slots.

    Raises:
        ValueError: a layer in training mode, or a group without logical experts.
        As `move_experts` and ``crossdock.plan_placement``.
    """
    group = layer.group
    if layer.training or not group.num_logical_experts or group.placement is None:
        raise ValueError(
            "layer: expected one in eval mode whose group has num_logical_experts, got "
            f"training={layer.training}, num_logical_experts={group.num_logical_experts}"
        )
    if loads is None:
        loads = group.loads(clear=True).sum(dim=0)
    ranks, slots = group.placement.shape
    new = plan_placement(
        loads,
        ranks,
        slots,
        current=group.placement,
        max_moves=max_moves,
        good_enough=good_enough,
    )
    groups = [one for one in (group, layer.decode_group) if one is not None]
    weights = [local_tensor(parameter) for parameter in layer.expert_parameters()]
    return move_experts(groups, weights, group.placement, new)
