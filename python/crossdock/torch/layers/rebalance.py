"""Layers whose experts move between ranks while they serve."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from crossdock._moves import told
from crossdock._placement import Move, plan_placement
from crossdock.errors import InvalidArgument

from .._placement import ExpertMove
from .._sharding import local_tensor
from .layer import MoELayer
from .placed import note_table, table_of

__all__ = ["Rebalance", "rebalance"]


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
    move = _Move(layer, loads, max_moves, good_enough, None)
    move.step()
    if loads is None:
        layer.group.loads(clear=True)
    return move.moves


class Rebalance:
    """`rebalance` of all serving layers of a model, a few bytes at a time beside forward passes.

    One layer after another: its experts' weights are copied in steps, from which forward passes see
    nothing, and the step that ends it changes its tables. Weights must stay as they are until then.

    Args:
        model: with layers as of `rebalance`, at least one, and the same on all ranks.
        bytes_per_step: what a rank copies in a step, at most. The step that ends a layer also moves
            what was staged into its slots, in this rank's memory.
        max_moves, good_enough: as of `rebalance`, for each layer.

    Attributes:
        done: whether all layers have been rebalanced.

    Raises:
        ValueError: a model without such layers, of which peers do not hear.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        bytes_per_step: int,
        max_moves: int | None = None,
        good_enough: float = 1.05,
    ) -> None:
        self._left = [
            one
            for one in model.modules()
            if isinstance(one, MoELayer) and one.group.num_logical_experts
        ]
        if not self._left:
            raise ValueError(
                "model: expected a MoELayer whose group has num_logical_experts, got none"
            )
        self._options = (max_moves, good_enough, bytes_per_step)
        self._move: _Move | None = None

    @property
    def done(self) -> bool:
        return not self._left

    def step(self) -> bool:
        """Goes on with one layer, between two forward passes. It does nothing when `done`.

        Collective. A layer is planned in its first step, by the loads counted until then.

        Returns:
            `done`.

        Raises:
            As `rebalance`, and as ``crossdock.ExpertMove.step``. The layer keeps its table, unless
            the error says otherwise, and the next step begins anew with it.
        """
        if not self._left:
            return True
        layer, move = self._left[0], self._move
        self._move = None  # unless all goes well
        if move is None:
            move = _Move(layer, None, *self._options)
        try:
            if not move.step():
                self._move = move
        finally:
            if move.done:  # also where ranks were lost in its turn
                layer.group.loads(clear=True)
                del self._left[0]
        return self.done


class _Move(ExpertMove):
    """A layer's experts on their way to where the loads are even."""

    def __init__(
        self,
        layer: MoELayer,
        loads: npt.ArrayLike | None,
        max_moves: int | None,
        good_enough: float,
        bytes_per_step: int | None,
    ) -> None:
        self._layer, group = layer, layer.group
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
        old = table_of(layer)
        super().__init__(groups, weights, old, new, bytes_per_step=bytes_per_step)

    def _marks(self) -> object:
        here = [local_tensor(one).data_ptr() for one in self._layer.expert_parameters()]
        return super()._marks(), here  # a parameter may have been replaced

    def step(self) -> bool:
        group = self._layer.group
        before = group.table
        try:
            return super().step()
        finally:
            if group.table != before:  # also where ranks were lost
                note_table(self._layer)


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
