"""The ranks of a mesh over which matrices are spread, and their contexts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import jax
from jax.sharding import Mesh

from crossdock import GemmConfig, GemmPlan, _jax
from crossdock._gemm_config import Algo, GemmOperation

from .._group import Place
from .._joined import JoinedMesh, join

__all__ = ["TpContext", "TpMesh", "current_mesh", "init"]

_current: TpMesh | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class TpContext:
    """One config on the ranks of a mesh, by a number that no other context of the process ever has.

    The context lives in its `TpMesh` and in executables. This describes it, in all that JAX
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


class TpMesh(JoinedMesh[GemmConfig, TpContext]):
    """The communicators of a mesh, and their contexts of products. Made by `init`.

    Executables keep what they use: after `close`, or when another `init` has taken its place, what
    has been compiled still runs, and the last executable to go frees the context.

    Attributes:
        mesh: as given.
        tp_axes: the axes over whose devices matrices are spread.
        num_ranks: W, the devices of one set.
        devices: this process's devices in the mesh.
    """

    def __init__(self, place: Place, ranks: _jax.Ranks, devices: list[jax.Device]) -> None:
        super().__init__(place, ranks, devices)
        self.tp_axes = place.axes

    def context(self, config: GemmConfig) -> TpContext:
        """The context of a config, the same for equal configs. Local."""
        return self._of(config)[0]

    def explain(
        self,
        operation: GemmOperation,
        a: Any,
        b: Any,
        *,
        activation: Literal["gelu", "relu"] | None = None,
        transpose_b: bool = False,
        save_gathered: bool = True,
        allow_tf32: bool = False,
        algo: Algo = "auto",
        config: GemmConfig | None = None,
    ) -> GemmPlan:
        """Says what a product would do: its algorithm, estimates, and why others cannot run. Local.

        Args:
            operation: "all_gather", "reduce_scatter" or "all_reduce".
            a: one rank's ``[..., K]``; an array, or a ``jax.ShapeDtypeStruct``.
            b: one rank's ``[K, N]``, likewise.
            activation, transpose_b, save_gathered, allow_tf32, algo, config: as of the product.

        Raises:
            TypeError, ValueError, InvalidArgument, Unsupported: as the product would here.
            RuntimeError: the context has not been made yet, by a product or by `create`.
        """
        from ._explain import explain
        from ._run import Options

        options = Options(transpose_b, activation, allow_tf32, algo, save_gathered)
        return explain(self, operation, a, b, options, config)

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


def current_mesh() -> TpMesh:
    """The mesh of the last `init`.

    Raises:
        RuntimeError: there is none.
    """
    if _current is None:
        raise RuntimeError("crossdock.jax.tp.init(mesh, tp_axis) has not been called")
    return _current


def init(
    mesh: Mesh,
    tp_axis: str | Sequence[str],
    *,
    data_axes: str | Sequence[str] = (),
    timeout: float | None = None,
    name: str = "",
) -> TpMesh:
    """Joins the ranks of a mesh. Collective, blocking.

    Matrices are spread over the devices along `tp_axis`; every index of the other axes (data,
    expert, pipeline) has such a set of its own. A process may hold one device (``jax.distributed``)
    or several. The result serves every operation that names no other.

    Args:
        mesh: devices of one host, CPUs or GPUs. Functions in ``shard_map`` use this mesh, or one
            with the same devices in the same order.
        tp_axis: its axis of tensor parallelism, or several, the first one counting slowest.
        data_axes: for calls outside ``shard_map``: the axes over which the first dimension of
            tokens is split, before `tp_axis` if that splits it too.
        timeout: longest wait for a peer, here and in every operation, in seconds; None = the
            environment's ``XD_TIMEOUT_MS``, else 10 minutes.
        name: shown in logs.

    Raises:
        TypeError, ValueError: a bad argument (InvalidArgument).
        Timeout: not all ranks came.
        Unsupported: no such device in this build or on this machine.
    """
    global _current
    joined = join("crossdock.jax.tp.init", mesh, "tp_axis", tp_axis, data_axes, timeout, name)
    _current = TpMesh(*joined)
    return _current
