"""Parameters of which each rank holds its share, in the form that torch's own tools understand.

Where a communicator stands on torch.distributed, a layer's experts, and weights that are spread,
are ``DTensor``s, sharded by a dimension over a mesh of the communicator's ranks. Checkpoints,
norms, optimisers and FSDP then see what they are: tools that know DTensors do the right thing, and
those that do not refuse them. Plain tensors of equal names and shapes would be taken for copies of
one another.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

    from ._comm import Comm

__all__ = [
    "as_share",
    "convert_loaded",
    "is_share",
    "like",
    "local_tensor",
    "ranks_of",
    "sharded_dims",
]


def is_share(tensor: torch.Tensor) -> bool:
    """Whether it is a DTensor, without importing those. Of its type, torch.compile knows that."""
    return hasattr(type(tensor), "to_local")


def local_tensor(tensor: Any) -> torch.Tensor:
    """This rank's part of a parameter or gradient; a plain tensor is returned as it is.

    Differentiable, and no copy: of `MoELayer.experts_in` the slices ``[L, H, 2F]`` of this rank's
    experts.
    """
    return tensor.to_local() if is_share(tensor) else tensor


def as_share(local: torch.Tensor, comm: Comm, dim: int = 0) -> torch.Tensor:
    """This rank's slices along `dim` as part of all ranks' tensor; as they are without a mesh."""
    mesh = comm.mesh
    if mesh is None:
        return local
    from torch.distributed.tensor import DTensor, Shard

    return DTensor.from_local(local, mesh, [Shard(dim)], run_check=False)


def like(local: torch.Tensor, other: DTensor) -> DTensor:
    """A DTensor laid out as `other` whose share here is `local`."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local,
        other.device_mesh,
        other.placements,
        run_check=False,
        shape=other.size(),
        stride=other.stride(),
    )


def ranks_of(mesh: DeviceMesh) -> set[int]:
    """The global ranks of a mesh."""
    return set(mesh.mesh.flatten().tolist())


def sharded_dims(tensor: DTensor) -> tuple[int, ...]:
    """The dimensions of its mesh whose ranks hold different parts.

    Raises:
        ValueError: ranks hold summands of it.
    """
    if any(placement.is_partial() for placement in tensor.placements):
        raise ValueError(f"expected a reduced tensor, got placements {tensor.placements}")
    return tuple(
        dim for dim, placement in enumerate(tensor.placements) if not placement.is_replicate()
    )


def convert_loaded(value: Any, parameter: torch.Tensor, first: int, dim: int = 0) -> Any:
    """A value from a state dict in the form that the parameter has.

    Args:
        value: a DTensor like the parameter; or a plain tensor: this rank's slices, or all ranks'.
        parameter: of a layer.
        first: number of this rank's first slice.
        dim: along which it is sliced.
    """
    if not is_share(parameter) or not isinstance(value, torch.Tensor) or is_share(value):
        return value
    share: Any = parameter
    here = share.to_local().shape
    if share.device_mesh.ndim == 1 and value.shape == share.shape != here:
        value = value.narrow(dim, first, here[dim])
    if value.shape != here:
        return value  # torch names the parameter whose shape does not fit
    return like(value.to(share.device), share)
