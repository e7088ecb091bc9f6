"""The foreseen course of a product, by the context of this process's first rank."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from crossdock import GemmConfig, GemmPlan
from crossdock._core import constants
from crossdock._dtypes import pack
from crossdock._gemm_config import gemm_word

from ._run import (
    ALL_GATHER,
    ALL_REDUCE,
    REDUCE_SCATTER,
    Options,
    check_kinds,
    sizes_of,
    way_of,
)

__all__ = ["explain"]

_KINDS = {"all_gather": ALL_GATHER, "reduce_scatter": REDUCE_SCATTER, "all_reduce": ALL_REDUCE}


def explain(
    mesh: Any, operation: str, a: Any, b: Any, options: Options, config: GemmConfig | None
) -> GemmPlan:
    """As `TpMesh.explain`, which see."""
    number = gemm_word("operation", operation, {k: constants.GEMM_OPERATIONS[k] for k in _KINDS})
    kind, dtype = _KINDS[operation], np.dtype(a.dtype)
    check_kinds(a, b)
    rows = math.prod(a.shape[:-1]), a.shape[-1]
    sizes = sizes_of(kind, mesh.place, 0, options, {"a": rows, "b": b.shape}, dtype)
    way = way_of(kind, mesh, sizes, dtype, options, config)
    tokens = sizes.tokens if kind.tokens_out else rows[0]
    result = (tokens * mesh.num_ranks if kind.tokens_in else tokens), sizes.n

    def spec(shape: tuple[int, ...]) -> tuple[int, tuple[int, ...], int]:
        return 0, shape, pack(dtype.name)

    found = mesh.core(way.context).explain(
        0,
        number,
        a=spec(rows),
        b=spec(b.shape),
        d=spec(result),
        transpose_b=int(way.transpose_b),
        allow_tf32=int(way.allow_tf32),
        epilogue=constants.GEMM_EPILOGUES[way.activation or "none"],
        algo=constants.GEMM_ALGOS[way.algo],
    )
    if found is None:
        raise RuntimeError(
            f"{way.context} has not been made: run the product, or call create() with its config "
            "on all ranks"
        )
    return GemmPlan.of(found)
