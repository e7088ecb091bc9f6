"""The ranks of a mesh over which matrices are spread, and what a product of theirs would do."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from jax.sharding import Mesh

from crossdock import GemmConfig, GemmPlan
from crossdock._core import constants
from crossdock._dtypes import pack
from crossdock._gemm_config import Algo, GemmOperation, gemm_word

from .._joined import join
from ._contexts import Contexts, make_current
from ._run import (
    ALL_GATHER,
    ALL_REDUCE,
    REDUCE_SCATTER,
    Options,
    check_kinds,
    sizes_of,
    way_of,
)

__all__ = ["TpMesh", "init"]

_KINDS = {"all_gather": ALL_GATHER, "reduce_scatter": REDUCE_SCATTER, "all_reduce": ALL_REDUCE}
_NUMBERS = {word: constants.GEMM_OPERATIONS[word] for word in _KINDS}


class TpMesh(Contexts):
    """The communicators of a mesh, and their contexts of products. Made by `init`.

    Executables keep what they use: after `close`, or when another `init` has taken its place, what
    has been compiled still runs, and the last executable to go frees the context.

    Attributes:
        mesh: as given.
        tp_axes: the axes over whose devices matrices are spread.
        num_ranks: W, the devices of one set.
        devices: this process's devices in the mesh.
    """

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
        options = Options(transpose_b, activation, allow_tf32, algo, save_gathered)
        number = gemm_word("operation", operation, _NUMBERS)
        kind, dtype = _KINDS[operation], np.dtype(a.dtype)
        check_kinds(a, b)
        rows = math.prod(a.shape[:-1]), a.shape[-1]
        sizes = sizes_of(kind, self.place, 0, options, {"a": rows, "b": b.shape}, dtype)
        way = way_of(kind, self, sizes, dtype, options, config)
        tokens = sizes.tokens if kind.tokens_out else rows[0]
        result = (tokens * self.num_ranks if kind.tokens_in else tokens), sizes.n

        def spec(shape: tuple[int, ...]) -> tuple[int, tuple[int, ...], int]:
            return 0, shape, pack(dtype.name)

        fields = {
            "a": spec(rows),
            "b": spec(b.shape),
            "d": spec(result),
            "transpose_b": int(way.transpose_b),
            "allow_tf32": int(way.allow_tf32),
            "epilogue": constants.GEMM_EPILOGUES[way.activation or "none"],
            "algo": constants.GEMM_ALGOS[way.algo],
        }
        found = self.core(way.context).explain(0, number, fields)
        if found is None:
            raise RuntimeError(
                f"{way.context} has not been made: run the product, or call create() with its "
                "config on all ranks"
            )
        return GemmPlan.of(found)


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
    joined = join("crossdock.jax.tp.init", mesh, "tp_axis", tp_axis, data_axes, timeout, name)
    made = TpMesh(*joined)
    make_current(made)
    return made
