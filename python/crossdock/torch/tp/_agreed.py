"""Contexts of layers, on whose bounds the ranks agree before one of them waits for the others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch

from crossdock._gemm_config import whole_number
from crossdock.errors import CrossdockError, InvalidArgument, Mismatch

from .._calls import current_stream
from .._comm import Comm, default_comm
from ._context import OPERANDS, TpContext, find_shared, shared_context
from ._functions import bulk_all_gather
from ._operands import BULK

__all__ = ["agreed_context", "told_to_peers"]


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
            with suppress(InvalidArgument):  # it says that the peers have been told
                stream = current_stream(where.device)
                _agreement(where).core.join_failed(BULK, text, stream)
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
    agreement = _agreement(comm)
    row = torch.tensor([[*mine.values(), 0, 0, 0]], dtype=torch.int64, device=comm.device)
    rows, _ = bulk_all_gather(row, agreement)
    if comm.device.type == "cuda":
        torch.cuda.synchronize(comm.device)
        agreement.check()
    for name, values in zip(mine, rows.t().tolist()):
        if len(set(values)) > 1:
            raise Mismatch(
                f"{name}: expected layers with equal bounds on all ranks, got {values} on ranks 0 "
                f"to {comm.num_ranks - 1} [rank {comm.rank} of {comm.num_ranks}]",
                status="XD_ERROR_MISMATCH",
                rank=comm.rank,
            )


def _agreement(comm: Comm) -> TpContext:
    """A small context; collective where there is none yet."""
    if comm.agreement is None:
        comm.agreement = TpContext(
            max_tokens=1,
            max_k=16,
            max_n=16,
            dtype=torch.float32,
            operations=("all_gather", "bulk"),
            comm=comm,
        )
    agreement: TpContext = comm.agreement
    return agreement
