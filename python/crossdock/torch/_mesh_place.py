"""The name of a communicator and its ranks' numbers, by its process group and its mesh."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from crossdock._place import other_numbers, place_name

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["names_of"]


def names_of(process_group: ProcessGroup, mesh: DeviceMesh | None, name: str) -> dict[str, Any]:
    """The arguments ``name`` and ``global_ranks`` of a communicator; a caller's `name` stays."""
    global_ranks = torch.distributed.get_process_group_ranks(process_group)
    return {
        "name": _place_of(mesh) if name == "" and mesh is not None else name,
        "global_ranks": other_numbers(global_ranks),
    }


def _place_of(mesh: DeviceMesh) -> str:
    """The indices at which a mesh lies in the one it is part of: ``"data=1"``, or ``""``."""
    root = getattr(mesh, "_root_mesh", None)
    if root is None or root.mesh_dim_names is None:
        return ""
    at = torch.isin(root.mesh, mesh.mesh).nonzero()  # [W, dimensions of root]
    low, high = at.amin(dim=0).tolist(), at.amax(dim=0).tolist()
    dimensions = enumerate(root.mesh_dim_names)
    indices = {axis: low[d] for d, axis in dimensions if low[d] == high[d]}
    return place_name(indices, dict(zip(root.mesh_dim_names, root.mesh.shape)))
