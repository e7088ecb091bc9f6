"""What ranks tell one another before a dispatch whose sizes are not known yet."""

from __future__ import annotations

import dataclasses
import struct

from crossdock.errors import Mismatch

from ._exchange import HostExchange

_TEXT_BYTES = 256


@dataclasses.dataclass(frozen=True)
class Request:
    """One rank's sizes of a dispatch."""

    tokens: int = 0  # T
    row_bytes: int = 0  # of x
    scale_bytes: int = 0  # of a row of scales; 0 = none
    topk: int = 0  # K; 0 = the routing is is_token_in_rank alone
    experts: int = 0  # E
    worst_tokens: int = 0  # num_worst_tokens; 0 = the host waits for the number of rows
    num_sms: int = 0
    heap_bytes: int = 0  # num_nvl_bytes, the symmetric memory to begin with


# What must be equal on all ranks: field, and what callers know it as.
_EQUAL = {
    "row_bytes": "bytes of a row of x",
    "scale_bytes": "bytes of a row of scales",
    "topk": "columns of topk_idx (0 = not given)",
    "experts": "elements of num_tokens_per_expert",
    "worst_tokens": "num_worst_tokens",
}

_RECORD = struct.Struct(f"={len(dataclasses.fields(Request))}q{_TEXT_BYTES}s")
RECORD_BYTES = _RECORD.size


def agree(exchange: HostExchange, rank: int, request: Request) -> list[Request]:
    """The requests of all ranks, by rank. Collective.

    Raises:
        Mismatch: the requests contradict one another, or some rank has called `refuse`; on all
            ranks alike, and the next dispatch works.
    """
    requests = _gather(exchange, rank, request, "")
    for field, name in _EQUAL.items():
        values = [getattr(one, field) for one in requests]
        for peer, value in enumerate(values):
            if value != values[0]:
                raise Mismatch(
                    f"dispatch: {name} = {values[0]} on rank 0 and {value} on rank {peer}, "
                    f"expected equal values (rank {rank})",
                    status="XD_ERROR_MISMATCH", rank=rank, peer=peer, operation="prepare")
    return requests


def refuse(exchange: HostExchange, rank: int, text: str) -> None:
    """Takes part in the peers' `agree` with a mistake of this rank, so that none waits for it."""
    try:
        _gather(exchange, rank, Request(), text)
    except Mismatch:
        pass  # names this rank, or one that is lower


def _gather(exchange: HostExchange, rank: int, request: Request, text: str) -> list[Request]:
    row = _RECORD.pack(*dataclasses.astuple(request), text.encode()[: _TEXT_BYTES - 1])
    requests = []
    for peer, record in enumerate(exchange.all_gather(row)):
        *fields, found = _RECORD.unpack(record)
        error = found.rstrip(b"\0").decode(errors="replace")
        if error:
            raise Mismatch(f"dispatch: rank {peer} failed: {error} (rank {rank})",
                           status="XD_ERROR_MISMATCH", rank=rank, peer=peer, operation="prepare")
        requests.append(Request(*fields))
    return requests
