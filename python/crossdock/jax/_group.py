"""Descriptions of meshes and groups, for traced functions. They do not keep a group alive."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeAlias

from jax.sharding import Mesh

from crossdock._core import constants

from ._config import EpConfig, LowLatencyConfig

__all__ = [
    "AnyGroup",
    "EpGroup",
    "LowLatencyGroup",
    "Place",
    "forget_programs",
    "programs_of",
    "remember_programs",
]


@dataclasses.dataclass(frozen=True)
class Place:
    """How arrays lie on a mesh.

    Attributes:
        init: the name of the function that made it.
        mesh: of `init`.
        axes: the axes whose devices are the ranks of a set.
        data_axes: the axes of independent sets that global arrays are split over.
        num_ranks: W.
    """

    init: str
    mesh: Mesh
    axes: tuple[str, ...]
    data_axes: tuple[str, ...]
    num_ranks: int

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """The axes that the first dimension of tokens is split over."""
        return self.data_axes + self.axes

    @property
    def device_type(self) -> int:
        """DLPack's number for the mesh's devices."""
        platform = self.mesh.devices.flat[0].platform
        return constants.DEVICE_TYPES["cpu" if platform == "cpu" else "cuda"]


@dataclasses.dataclass(frozen=True, eq=False)
class EpGroup:
    """One config on the ranks of a mesh, by a number that no other group of the process ever has.

    The group lives in its `EpMesh` and in executables. This describes it, in plans and in all that
    JAX remembers of functions, for as long as JAX likes.

    Attributes:
        number: by which custom calls find the group.
        config: its sizes.
        place: its ranks.
        rows: R, the rows of every receive array of a rank.
        plan_bytes: bytes of a rank's plan.
        text: the config as executables name it.
    """

    number: int
    config: EpConfig
    place: Place
    rows: int
    plan_bytes: int
    text: str

    def __repr__(self) -> str:
        return f"EpGroup({self.number}: {self.config}, {self.place.num_ranks} ranks)"


@dataclasses.dataclass(frozen=True, eq=False)
class LowLatencyGroup:
    """The same of one `LowLatencyConfig`.

    Attributes:
        num_slots: S, the slots of each expert, in groups that have some.
        number, config, place, plan_bytes, text: as of `EpGroup`.
    """

    number: int
    config: LowLatencyConfig
    place: Place
    num_slots: int
    plan_bytes: int
    text: str

    @property
    def has_slots(self) -> bool:
        """Whether rows are received in slots."""
        return self.config.receive == "slots"

    def places(self, tokens: int) -> tuple[int, ...]:
        """The leading dimensions of a rank's received rows: ``(L, S)``, or without slots ``(N,)``.

        Args:
            tokens: of each rank in the call.
        """
        ranks = self.place.num_ranks
        if self.has_slots:
            return self.config.local_experts(ranks), self.num_slots
        return (self.config.recv_bound(ranks, tokens),)

    def __repr__(self) -> str:
        return f"LowLatencyGroup({self.number}: {self.config}, {self.place.num_ranks} ranks)"


AnyGroup: TypeAlias = EpGroup | LowLatencyGroup

# By group, or context, that is open, its operations on global arrays, compiled.
_programs: dict[Any, dict[Any, Callable[..., Any]]] = {}


def remember_programs(group: Any) -> None:
    """Remembers, until `forget_programs`, compiled operations of a group."""
    _programs[group] = {}


def programs_of(group: Any) -> dict[Any, Callable[..., Any]]:
    """Compiled operations of a group, to look up and to add to; of a closed one nothing stays."""
    return _programs.get(group, {})


def forget_programs(group: Any) -> None:
    """Drops them, and with them what they keep of the group."""
    del _programs[group]
