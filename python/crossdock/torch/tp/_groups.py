"""Communicators and contexts for process groups of torch.distributed, which have names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from .._calls import is_capturing
from .._comm import Comm, init, open_comms
from ._context import TpContext, shared_context

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["comm_of_group", "context_of_group", "name_of_group", "process_group"]

_by_name: dict[str, Comm] = {}


def name_of_group(given: ProcessGroup | DeviceMesh | str | None) -> str:
    """The name of a process group, of a mesh of one dimension, or of the default group.

    Raises:
        ValueError: the mesh has more dimensions, or torch.distributed is not initialised.
    """
    if isinstance(given, str):
        return given
    group: Any = torch.distributed.group.WORLD if given is None else given
    if group is None:
        raise ValueError("group: expected one, or torch.distributed to be initialised; got None")
    if hasattr(group, "get_group"):
        if group.ndim != 1:
            raise ValueError(f"group: expected a mesh of one dimension, got {group}")
        group = group.get_group()
    return str(group.group_name)


def process_group(name: str) -> Any:
    """The process group of that name."""
    from torch.distributed import distributed_c10d

    resolve: Any = distributed_c10d._resolve_process_group
    return resolve(name)


def comm_of_group(given: ProcessGroup | DeviceMesh | str | None) -> Comm:
    """The communicator of a process group's ranks. Collective where there is none yet."""
    name = name_of_group(given)
    # Groups are compared, as a later one may have the name of one that has been destroyed. All
    # ranks decide alike, whoever still holds that one.
    group = process_group(name)
    for comm in [*filter(None, [_by_name.get(name)]), *open_comms()]:
        if not comm.core.closed and Comm.process_group.is_group(comm, group):
            _by_name[name] = comm
            return comm
    _by_name[name] = comm = init(group)
    return comm


def context_of_group(
    name: str, rows: int, columns: int, results: int, dtype: torch.dtype
) -> TpContext:
    """A context with room for a product, for tokens up to the next power of two.

    Collective where there is none yet, which a CUDA graph cannot capture.

    Args:
        name: of the process group.
        rows: tokens of a rank.
        columns: that are gathered.
        results: columns of the product.
        dtype: of what is transferred.
    """
    comm = comm_of_group(name)
    capturing = is_capturing(comm.device)
    context = shared_context(
        comm, 1 << max(0, rows - 1).bit_length(), columns, results, dtype, may_make=not capturing
    )
    if context is None:
        raise RuntimeError(
            "a product of these sizes runs for the first time, and makes a context, which a CUDA "
            "graph cannot capture: run the step once before capturing"
        )
    return context
