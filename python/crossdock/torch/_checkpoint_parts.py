"""What a checkpoint has of parameters with parts on ranks, or with several names."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ._held import spread_parameters
from ._sharding import is_share

__all__ = ["Parts", "aliases_of", "gather_parts", "part_of_rank", "spread_shares"]

# Of each parameter the whole values: its own by "", those of its optimiser's state by their keys.
Parts = dict[torch.Tensor, dict[str, Any]]


def spread_shares(model: nn.Module) -> set[torch.Tensor]:
    """The parameters that are parts of tensor parallelism, as DTensors over these ranks alone.

    Raises:
        ValueError: ranks have parts that only torch.distributed could put together.
    """
    shares = set()
    for parameter, how in spread_parameters(model).items():
        share: Any = parameter
        if is_share(share):
            if share.device_mesh.ndim == 1:
                shares.add(parameter)
        elif how.dim is not None and how.comm.num_ranks > 1:
            raise ValueError(
                "model: expected layers of tensor parallelism over torch.distributed, which puts "
                "their weights together; got a communicator without it"
            )
    return shares


@torch.no_grad()
def gather_parts(model: nn.Module, optimizer: torch.optim.Optimizer | None, *, keep: bool) -> Parts:
    """What the ranks of each layer hold of its parameters, put together on the CPU. Collective.

    Args:
        keep: whether this rank wants them; the others only send.
    """
    parts: Parts = {}
    shares = spread_shares(model)
    for parameter in model.parameters():
        if parameter in shares:
            state = {} if optimizer is None else optimizer.state.get(parameter, {})
            whole = {key: _whole(value) for key, value in {"": parameter, **state}.items()}
            if keep:
                parts[parameter] = {
                    key: value.cpu() if isinstance(value, torch.Tensor) else value
                    for key, value in whole.items()
                }
    return parts


def _whole(value: Any) -> Any:
    return value.full_tensor() if is_share(value) else value


def part_of_rank(value: Any, parameter: Any) -> Any:
    """This rank's part of what belongs to a whole DTensor; else the value as it is, everywhere."""
    from torch.distributed.tensor import Replicate, distribute_tensor

    if not isinstance(value, torch.Tensor) or value.ndim == 0:
        return value
    mesh, placements = parameter.device_mesh, parameter.placements
    if value.shape != parameter.shape:  # means of rows or of columns
        placements = [Replicate()] * mesh.ndim
    # From no rank: all of them have the whole value.
    return distribute_tensor(value.to(parameter.device), mesh, placements, src_data_rank=None)


def aliases_of(model: nn.Module, names: dict[str, nn.Parameter]) -> dict[str, str]:
    """Further names of parameters in a state dict, and the one that is written."""
    first = {parameter: name for name, parameter in names.items()}
    every = model.named_parameters(remove_duplicate=False)
    return {name: first[parameter] for name, parameter in every if first[parameter] != name}
