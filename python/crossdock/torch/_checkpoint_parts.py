"""The parts of a checkpoint for parameters with parts on ranks, or with several names."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ._held import spread_parameters
from ._sharding import is_share, local_tensor

__all__ = [
    "Parts",
    "aliases_of",
    "gather_parts",
    "has_slices",
    "is_own",
    "own_part",
    "part_of_rank",
    "shares_of",
    "spread_shares",
    "state_shapes",
]

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
def shares_of(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Parts:
    """This rank's parts of tensor parallelism, as DTensors where they differ by rank.

    Raises:
        ValueError: ranks have parts, or state of them, that nothing says how to put together.
    """
    shares, found = spread_shares(model), Parts()
    for name, parameter in model.named_parameters():
        if parameter in shares:
            state = {} if optimizer is None else optimizer.state.get(parameter, {})
            found[parameter] = {"": parameter} | {
                key: _as_share(f"{key!r} of {name}", value, parameter)
                for key, value in sorted(state.items())
            }
    return found


def _as_share(what: str, value: Any, parameter: Any) -> Any:
    """One entry of a part's state: plain tensors of this rank's shape are parts, too."""
    if not is_own(value, parameter):
        return value
    from torch.distributed.tensor import DTensor

    own, whole = parameter.to_local().shape, parameter.shape
    sharded = [placement.dim for placement in parameter.placements if placement.is_shard()]
    fits = value.ndim == len(own) and all(v in (1, o) for v, o in zip(value.shape, own))
    if not fits or any(value.shape[dim] != own[dim] for dim in sharded):
        raise ValueError(
            f"optimizer: expected {what} to be a DTensor, or of shape {tuple(own)} as this rank's "
            f"part or {tuple(whole)} as the whole; got {tuple(value.shape)}, of which nothing says "
            "how ranks share it"
        )
    shape = torch.Size(w if v == o else v for v, o, w in zip(value.shape, own, whole))
    return DTensor.from_local(
        value.contiguous(),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=shape,
        stride=torch.empty(shape, dtype=value.dtype, device="meta").stride(),
    )


def is_own(value: Any, parameter: Any) -> bool:
    """Whether a plain tensor of state is about this rank's part of a parameter alone."""
    return (
        is_share(parameter)
        and isinstance(value, torch.Tensor)
        and not is_share(value)
        and value.numel() > 1
        and value.shape != parameter.shape
    )


@torch.no_grad()
def gather_parts(shares: Parts, *, keep: bool) -> Parts:
    """Puts the parts of each layer's parameters together, on the CPU. Collective.

    Args:
        shares: what this rank holds, of `shares_of`.
        keep: whether this rank wants them; the others only send.
    """
    parts: Parts = {}
    for parameter, values in shares.items():
        whole = {key: _whole(value) for key, value in values.items()}
        if keep:
            parts[parameter] = {
                key: value.cpu() if isinstance(value, torch.Tensor) else value
                for key, value in whole.items()
            }
    return parts


def _whole(value: Any) -> Any:
    return value.full_tensor() if is_share(value) else value


def part_of_rank(value: Any, parameter: Any, own: bool = False) -> Any:
    """This rank's part of what belongs to a whole DTensor; else the value as it is, everywhere.

    Args:
        own: whether it is about one rank's part, and becomes a plain tensor.
    """
    from torch.distributed.tensor import Replicate, distribute_tensor

    if not isinstance(value, torch.Tensor) or value.ndim == 0:
        return value
    mesh, placements = parameter.device_mesh, parameter.placements
    if value.shape != parameter.shape and not own:  # means of rows or of columns
        placements = [Replicate()] * mesh.ndim
    # From no rank: all of them have the whole value.
    placed = distribute_tensor(value.to(parameter.device), mesh, placements, src_data_rank=None)
    return placed.to_local() if own else placed


def aliases_of(model: nn.Module, names: dict[str, nn.Parameter]) -> dict[str, str]:
    """Further names of parameters in a state dict, and the one that is written."""
    first = {parameter: name for name, parameter in names.items()}
    every = model.named_parameters(remove_duplicate=False)
    return {name: first[parameter] for name, parameter in every if first[parameter] != name}


def has_slices(value: Any, shape: torch.Size) -> bool:
    """Whether state of a parameter of experts, which has this shape, has a slice for each expert.

    It has as many dimensions, each of them whole or reduced to 1 (means of rows or of columns), and
    the first one whole.
    """
    return (
        isinstance(value, torch.Tensor)
        and value.ndim == len(shape)
        and value.shape[0] == shape[0]
        and all(mine in (1, whole) for mine, whole in zip(value.shape, shape))
    )


def own_part(value: Any, parameter: Any) -> Any:
    """This rank's part of a parameter's state: its own experts' slices if the state has slices.

    Means of rows and of columns are made by torch's optimisers whole on every rank, also of a
    parameter that is sharded.
    """
    if is_share(value) and is_share(parameter) and has_slices(value, parameter.shape):
        value = value.redistribute(placements=parameter.placements)
    return local_tensor(value)


def state_shapes(state: dict[str, Any]) -> dict[str, list[int] | None]:
    """The shape of each tensor of one parameter's state; None for what is none."""
    return {
        key: list(value.shape) if isinstance(value, torch.Tensor) else None
        for key, value in state.items()
    }
