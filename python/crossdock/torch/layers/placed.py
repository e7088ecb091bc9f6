"""Layers on a group with logical experts: whose weights lie in which slot."""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from .._group import EpGroup
from .._placement import PlacedGroup, into_symmetric

__all__ = [
    "experts_here",
    "note_table",
    "place_experts",
    "require_free",
    "require_placed",
    "table_of",
]


class PlacedLayer(Protocol):
    """The parts of a MoELayer that this needs."""

    group: EpGroup
    placement: torch.Tensor
    _host_table: tuple[object, np.ndarray] | None
    first_expert: int
    num_local_experts: int

    def register_buffer(self, name: str, tensor: torch.Tensor, /) -> None: ...


def require_free(group: PlacedGroup) -> None:
    """Refuses a group whose table places the experts of another layer."""
    if group.layer is not None and group.layer() is not None:
        raise ValueError(
            "group: expected one of the layer's own, as it has num_logical_experts and its table "
            "is of one layer's experts; got the group of another layer"
        )


def place_experts(layer: PlacedLayer, experts: nn.Module) -> None:
    """Lets the experts of a new layer move, if its group has logical ones; then collective."""
    group = layer.group
    if not group.num_logical_experts:
        return
    if names := [name for name, _ in experts.named_buffers()]:
        raise ValueError(
            f"experts.{names[0]}: expected parameters only, [L, ...] each, in a group with "
            "num_logical_experts, as buffers would not move with them; got a buffer"
        )
    into_symmetric(experts, group.comm)
    # A state dict has it beside the weights, which lie by slot.
    table = torch.from_numpy(_table(group).copy()).to(group.comm.device)
    layer.register_buffer("placement", table)
    group.layer = weakref.ref(layer)


def note_table(layer: PlacedLayer) -> None:
    """Says that the weights are where the group's table has them."""
    layer.placement.copy_(torch.from_numpy(_table(layer.group)))
    layer._host_table = None


def table_of(layer: PlacedLayer) -> np.ndarray:
    """The table by which the weights lie. From a GPU it is copied once, until it is written."""
    table = layer.placement
    if table.device.type == "cpu":
        return table.numpy()
    mark = table.data_ptr(), table.is_inference() or table._version
    if layer._host_table is None or layer._host_table[0] != mark:
        layer._host_table = mark, table.cpu().numpy()
    return layer._host_table[1]


def experts_here(layer: PlacedLayer) -> list[tuple[int, int]]:
    """The slots of this rank that are not empty, from 0 on, and the expert in each."""
    group = layer.group
    if group.num_logical_experts:
        held = _table(group)[group.comm.rank].tolist()
    else:
        held = range(layer.first_expert, layer.first_expert + layer.num_local_experts)
    return [(slot, expert) for slot, expert in enumerate(held) if expert >= 0]


def require_placed(layer: PlacedLayer, few: PlacedGroup | None, at: Any) -> None:
    """Refuses a forward pass by a table that is not the weights'; the peers get Mismatch.

    Compilers do not look into the buffer.
    """
    group = layer.group
    if not group.num_logical_experts:
        return
    if few is not None and few.table != group.table:
        at.refuse(
            ValueError,
            "decode: expected group and decode_group to have equal placements, got others; call "
            "decode_group.set_placement(group.placement) on all ranks",
        )
    if torch.is_grad_enabled() and group.has_moved:
        at.refuse(
            ValueError,
            "layer: expected torch.no_grad() or torch.inference_mode(), as gradients and optimiser "
            "states do not follow experts that have moved; got a call that records gradients",
        )
    if torch.compiler.is_compiling():
        return
    if not np.array_equal(table_of(layer), _table(group)):
        at.refuse(
            ValueError,
            "layer.placement: expected the group's placement, as weights lie by it, got another; "
            "call set_placement(layer.placement) of group and decode_group on all ranks, or load "
            "the weights by load_pretrained",
        )


def _table(group: PlacedGroup) -> np.ndarray:
    assert group.placement is not None  # it has logical experts, and no expert_ranks
    return group.placement
