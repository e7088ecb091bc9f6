"""The groups of a framework's layers, which need no more than one for each kind of traffic."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

import crossdock.torch as xd

__all__ = ["Groups"]


class Groups:
    """Communicators by their ranks, and groups by ranks and sizes, made when first asked for.

    Layers of equal sizes share a group: they run one after the other. It iterates over groups.

    Attributes:
        closed: whether they have been closed. Layers that ask then make none without their peers.
    """

    closed = False

    def __init__(self) -> None:
        self._groups: dict[tuple[Any, ...], xd.EpGroup] = {}
        self._comms: dict[Any, xd.Comm] = {}

    def of(
        self, process_group: Any, device: torch.device, mesh: Any = None, **sizes: Any
    ) -> xd.EpGroup:
        """The group of these ranks with these sizes. Collective the first time.

        Args:
            process_group: of torch.distributed.
            device: of this rank.
            mesh: that of the process group, if there is one.
            sizes: arguments of ``EpGroup``.

        Raises:
            RuntimeError: they have been closed.
        """
        if self.closed:
            raise RuntimeError(
                "groups: expected open ones, got those that this layer was built with, which have "
                "been closed: build the model anew"
            )
        key = (process_group, *sorted(sizes.items()))
        if key not in self._groups:
            if process_group not in self._comms:
                self._comms[process_group] = xd.init(mesh or process_group, device)
            self._groups[key] = xd.EpGroup(comm=self._comms[process_group], **sizes)
        return self._groups[key]

    def __iter__(self) -> Iterator[xd.EpGroup]:
        return iter(self._groups.values())

    def close(self) -> None:
        """Closes them all, and makes no other ones."""
        self.closed = True
        while self._groups:
            self._groups.popitem()[1].close()
        while self._comms:
            self._comms.popitem()[1].close()
