"""Contexts of layers, on whose bounds the ranks agree before one of them waits for the others."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from crossdock._gemm_config import whole_number
from crossdock.errors import CrossdockError, Mismatch

from .._comm import Comm, default_comm
from ._context import OPERANDS, TpContext, find_shared, shared_context

__all__ = ["agreed_context", "told_to_peers"]

_ROW_BYTES = 4096  # of a rank, equal on all; in ASCII an error of 400 characters fits in


@contextmanager
def told_to_peers(context: TpContext | None, comm: Comm | None) -> Iterator[None]:
    """Lets the peers of a layer that makes its context hear of a mistake: Mismatch there.

    Args:
        context: the caller's; then nobody is waiting.
        comm: None = the default communicator.
    """
    try:
        yield
    except CrossdockError:  # they have heard
        raise
    except (TypeError, ValueError) as error:
        where = default_comm() if comm is None else comm
        if context is None and where.num_ranks > 1:
            text = f"a layer of tensor parallelism: {error} [rank {where.rank}]"
            with suppress(CrossdockError):
                _gather(where, {"error": text[:400]})
        raise


def agreed_context(
    comm: Comm | None, max_tokens: int | None, max_k: int, max_n: int, dtype: torch.dtype
) -> TpContext:
    """`shared_context`, after a comparison of the bounds. Collective, blocking.

    Raises:
        TypeError, ValueError: a bad bound; the peers are not told.
        Mismatch: bounds differ between ranks, or another rank has made a mistake.
    """
    comm = default_comm() if comm is None else comm
    if max_tokens is None:
        raise ValueError("max_tokens: expected a number, as no context is given; got None")
    if dtype not in OPERANDS:
        raise ValueError(f"dtype: expected one of {list(OPERANDS)}, got {dtype!r}")
    bounds = {"max_tokens": max_tokens, "max_k": max_k, "max_n": max_n}
    for name, value in bounds.items():
        whole_number(name, value, 31)
    if comm.num_ranks > 1:
        found = find_shared(comm, max_tokens, max_k, max_n, dtype)
        _compare(comm, bounds | {"dtype": OPERANDS.index(dtype), "a shared context": found})
    return shared_context(comm, max_tokens, max_k, max_n, dtype)


def _compare(comm: Comm, mine: dict[str, int]) -> None:
    def mismatch(text: str) -> Mismatch:
        where = f"[rank {comm.rank} of {comm.num_ranks}]"
        return Mismatch(f"{text} {where}", status="XD_ERROR_MISMATCH", rank=comm.rank)

    of_rank = _gather(comm, mine)
    for rank, said in enumerate(of_rank):
        if "error" in said:
            raise mismatch(f"rank {rank} failed: {said['error']}")
    for name in mine:
        values = [said[name] for said in of_rank]
        if len(set(values)) > 1:
            raise mismatch(
                f"{name}: expected layers with equal bounds on all ranks, got {values} on ranks 0 "
                f"to {comm.num_ranks - 1}"
            )


def _gather(comm: Comm, mine: dict[str, int] | dict[str, str]) -> list[dict[str, Any]]:
    """The words of every rank, by rank. Collective."""
    row = json.dumps(mine).encode().ljust(_ROW_BYTES)
    return [json.loads(other) for other in comm.all_gather(row)]
