"""Contexts of products on the ranks of a mesh over which matrices are spread."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from crossdock import GemmConfig, _jax

from .._group import Place
from .._joined import JoinedMesh

__all__ = ["Contexts", "TpContext", "current_mesh", "make_current"]

_current: Contexts | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class TpContext:
    """One config on the ranks of a mesh, by a number that no other context of the process ever has.

    The context lives in its mesh and in executables. This describes it, in all that JAX
    remembers of functions, for as long as JAX likes.

    Attributes:
        number: by which custom calls find the context.
        config: its bounds.
        place: its ranks.
        text: the config as executables name it.
    """

    number: int
    config: GemmConfig
    place: Place
    text: str

    def __repr__(self) -> str:
        return f"TpContext({self.number}: {self.config}, {self.place.num_ranks} ranks)"


class Contexts(JoinedMesh[GemmConfig, TpContext]):
    """The communicators of a mesh, and their contexts of products: a `TpMesh` but for `explain`."""

    def __init__(self, place: Place, ranks: _jax.Ranks, devices: list[jax.Device]) -> None:
        super().__init__(place, ranks, devices)
        self.tp_axes = place.axes

    def context(self, config: GemmConfig) -> TpContext:
        """The context of a config, the same for equal configs. Local."""
        return self._of(config)[0]

    def core(self, context: TpContext) -> _jax.Context:
        """The context of the extension."""
        core = self._of(context.config)[1]
        assert isinstance(core, _jax.Context)
        return core

    def _make(self, config: GemmConfig) -> tuple[TpContext, _jax.Context]:
        if not isinstance(config, GemmConfig):
            raise TypeError(f"config: expected a GemmConfig, got {type(config).__name__}")
        options: dict[str, Any] = config.options()
        text = " ".join(f"{name}={value}" for name, value in options.items())
        core = _jax.Context(self._ranks, text, **options)
        return TpContext(core.number, config, self.place, text), core

    def close(self) -> None:
        """Leaves, as soon as no executable uses a context any more.

        Does nothing the second time.
        """
        global _current
        if _current is self:
            _current = None
        super().close()


def current_mesh() -> Contexts:
    """The mesh of the last `init`.

    Raises:
        RuntimeError: there is none.
    """
    if _current is None:
        raise RuntimeError("crossdock.jax.tp.init(mesh, tp_axis) has not been called")
    return _current


def make_current(mesh: Contexts) -> None:
    """Lets `current_mesh` return this one, until another one comes or it is closed."""
    global _current
    _current = mesh
