"""Weak references to process groups, so that Crossdock keeps none alive.

torch.distributed holds its groups until then. If anybody else did, gloo's threads would go on, and
one that lets go of a tensor while the interpreter ends waits for the interpreter's lock, which ends
the process by SIGABRT ("terminate called without an active exception").
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, overload

import torch

if torch.distributed.is_available():
    # Its functions have the default group of the moment of its import as a default argument, and
    # torch's compiler imports it: now there hardly is a group.
    import torch.distributed.nn.functional  # noqa: F401

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["WeakGroup", "empty_meshes", "remembered"]


class WeakGroup:
    """An attribute: a group of torch.distributed, or None.

    It may be set by a DeviceMesh of one dimension. Reading it raises RuntimeError once the group is
    gone.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._name, self._slot = f"{owner.__name__}.{name}", f"_weak_{name}"

    @overload
    def __get__(self, holder: None, owner: type) -> WeakGroup: ...
    @overload
    def __get__(self, holder: object, owner: type) -> ProcessGroup | None: ...
    def __get__(self, holder: object | None, owner: type) -> WeakGroup | ProcessGroup | None:
        if holder is None:
            return self
        reference: Any = getattr(holder, self._slot)
        if reference is None:
            return None
        group: ProcessGroup | None = reference()
        if group is None:
            raise RuntimeError(
                f"{self._name}: expected a process group, got one that has been destroyed"
            )
        return group

    def __set__(self, holder: object, group: ProcessGroup | DeviceMesh | None) -> None:
        given: Any = group
        if hasattr(given, "get_group"):
            given = given.get_group()
        setattr(holder, self._slot, None if given is None else weakref.ref(given))

    def is_group(self, holder: object, group: ProcessGroup) -> bool:
        """Whether it is that group; False, too, where it is gone."""
        reference: Any = getattr(holder, self._slot)
        return reference is not None and reference() is group


_meshes: list[weakref.ref[DeviceMesh]] = []


def remembered(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh, which `empty_meshes` will empty."""
    _meshes.append(weakref.ref(mesh))
    return mesh


def empty_meshes() -> None:
    """Takes groups that have been destroyed from meshes, at exit, when nobody uses them any more.

    torch's caches of what operators do with DTensors keep meshes for as long as the process lives,
    and newer versions of torch keep groups in a mesh, or in the one it is part of.
    """
    if not _meshes or torch.distributed.is_initialized():
        return
    for mesh in filter(None, (reference() for reference in _meshes)):
        for one in (mesh, getattr(mesh, "_root_mesh", None)):
            groups = getattr(one, "_pg_registry", None)
            if isinstance(groups, dict):
                groups.clear()
