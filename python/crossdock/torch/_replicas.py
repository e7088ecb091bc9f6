"""The ranks that hold the same parts of a model.

`data_parallel` is told of them, and remembers them with the model: on the modules that have parts,
so that another model on the same communicator knows nothing of them. Without it the caller sets
`Comm.replicas`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ._comm import Comm
from ._weak_group import WeakGroup

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["remember_replicas", "replicas_of"]

_MARK = "_crossdock_replicas"


class _Told:
    """The replicas of one communicator's parts."""

    group = WeakGroup()

    def __init__(self, comm: Comm, group: ProcessGroup) -> None:
        self.comm, self.group = comm, group

    def __deepcopy__(self, memo: dict[int, object]) -> _Told:
        """Itself: the copy of a model has the same replicas."""
        return self


def remember_replicas(
    model: nn.Module, homes: Mapping[torch.Tensor, Comm], told: Mapping[Comm, ProcessGroup]
) -> None:
    """Remembers the replicas of each communicator on the modules that have parts over it.

    Args:
        homes: the parameters of which ranks hold different parts, and the communicator of each.
    """
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            comm = homes.get(parameter)
            if comm is not None and comm in told:
                setattr(module, _MARK, _Told(comm, told[comm]))


def replicas_of(model: nn.Module) -> Callable[[Comm], ProcessGroup | None]:
    """Gives the replicas of a communicator's parts in a model; None where nobody has told them."""
    marks: Collection[Any] = [getattr(module, _MARK, None) for module in model.modules()]
    told = {mark.comm: mark for mark in marks if mark is not None}
    return lambda comm: told[comm].group if comm in told else comm.replicas
