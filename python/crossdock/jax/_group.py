"""A description of a group, for plans and traced functions. It does not keep the group alive."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from jax.sharding import Mesh

from ._config import EpConfig

__all__ = ["EpGroup", "Place", "forget_programs", "programs_of", "remember_programs"]


@dataclasses.dataclass(frozen=True)
class Place:
    """How arrays lie on a mesh.

    Attributes:
        mesh: of `init`.
        ep_axes: the axes whose devices exchange tokens.
        batch_axes: the axes that the first dimension of global arrays is split over.
        num_ranks: W.
    """

    mesh: Mesh
    ep_axes: tuple[str, ...]
    batch_axes: tuple[str, ...]
    num_ranks: int


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


# By number of a group that is open, its operations on global arrays, compiled.
_programs: dict[int, dict[Any, Callable[..., Any]]] = {}


def remember_programs(number: int) -> None:
    """Remembers, until `forget_programs`, compiled operations of a group."""
    _programs[number] = {}


def programs_of(number: int) -> dict[Any, Callable[..., Any]]:
    """Compiled operations of a group, to look up and to add to; of a closed one nothing stays."""
    return _programs.get(number, {})


def forget_programs(number: int) -> None:
    """Drops them, and with them what they keep of the group."""
    del _programs[number]
