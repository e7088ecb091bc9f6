"""The facts that ranks tell one another before a dispatch whose sizes are not known yet."""

from __future__ import annotations

import contextlib
import ctypes
import struct
import zlib
from collections.abc import Sequence
from typing import NamedTuple

from crossdock import _core
from crossdock.errors import Mismatch

_TEXT_BYTES = 256


class Request(NamedTuple):
    """One rank's sizes of a dispatch."""

    tokens: int = 0  # T
    most_tokens: int = 0  # the largest T of any rank, equal on all; 0 = only the requests tell
    row_bytes: int = 0  # of x
    scale_bytes: int = 0  # of a row of scales; 0 = none
    topk: int = 0  # K; 0 = the routing is is_token_in_rank alone
    experts: int = 0  # E
    worst_tokens: int = 0  # num_worst_tokens; 0 = the host waits for the number of rows
    zones: int = 0  # alignment of experts' zones; 0 = rows by rank
    few: int = 0  # 1 = the low-latency operations run it
    num_sms: int = 0
    heap_bytes: int = 0  # num_nvl_bytes, the symmetric memory to begin with


# Fields that must be equal on all ranks, with the names that callers know.
_EQUAL = {
    "most_tokens": "num_max_tokens_per_rank",
    "worst_tokens": "num_worst_tokens",
    "few": "ElasticBuffer.few_tokens allows it (1 = yes)",
    "row_bytes": "bytes of a row of x",
    "scale_bytes": "bytes of a row of scales",
    "topk": "columns of topk_idx (0 = not given)",
    "experts": "num_experts, elements of num_tokens_per_expert",
    "zones": "alignment of zones (0 = no do_expand)",
}

_RECORD = struct.Struct(f"={len(Request._fields)}q{_TEXT_BYTES}s")


def _equal_fields(request: Request) -> dict[str, str]:
    """_EQUAL; where all ranks know the most tokens they know the multiprocessors, too."""
    return _EQUAL | ({"num_sms": "num_sms"} if request.most_tokens else {})


def equal_numbers(request: Request) -> str:
    """The numbers of a request that must be equal on all ranks, in words."""
    names = _equal_fields(request).items()
    return ", ".join(f"{name} = {getattr(request, field)}" for field, name in names)


def hash_of(request: Request) -> int:
    """32 bits of the numbers that must be equal on all ranks."""
    fields = _equal_fields(request)
    return zlib.crc32(repr([getattr(request, field) for field in fields]).encode())


def agree(comm: _core.Comm, request: Request, text: str = "") -> list[Request]:
    """The requests of all ranks, by rank. Collective.

    Args:
        text: a mistake of this rank, of which the peers hear in place of its request.

    Raises:
        Mismatch: the requests contradict one another, or some rank has a mistake; on all ranks
            alike, and the next dispatch works.
    """
    row = _RECORD.pack(*request, text.encode()[: _TEXT_BYTES - 1])
    requests = []
    for peer, record in enumerate(comm.all_gather(row)):
        *fields, found = _RECORD.unpack(record)
        error = found.rstrip(b"\0").decode(errors="replace")
        if error:
            raise mismatch("dispatch", f"rank {peer} failed: {error}", comm.rank, peer)
        requests.append(Request(*fields))
    for field, name in _equal_fields(request).items():
        require_equal("dispatch", name, [getattr(one, field) for one in requests], comm.rank)
    return requests


def text_of(error: BaseException) -> str:
    """The text of an error for the peers, which is never empty."""
    return str(error) or repr(error)


def refuse(comm: _core.Comm, text: str) -> None:
    """Takes part in the peers' `agree` with a mistake of this rank, so that none waits for it."""
    with contextlib.suppress(Mismatch):  # names this rank, or one that is lower
        agree(comm, Request(), text)


def mismatch(
    call: str, text: str, rank: int, peer: int, operation: str | None = "prepare"
) -> Mismatch:
    """The error that this rank and a peer do not come to a call alike."""
    return Mismatch(
        f"{call}: {text} (rank {rank})",
        status="XD_ERROR_MISMATCH",
        rank=rank,
        peer=peer,
        operation=operation,
    )


def require_equal(
    call: str,
    name: str,
    values: Sequence[object],
    rank: int,
    operation: str | None = "prepare",
) -> None:
    """Raises Mismatch, on all ranks alike, unless all ranks' values of an argument are equal.

    Args:
        call: whose argument it is.
        name: the argument.
        values: by rank.
        rank: this one.
        operation: as of ``CrossdockError``.
    """
    for peer, value in enumerate(values):
        if value != values[0]:
            text = f"{name} = {values[0]} on rank 0 and {value} on rank {peer}"
            raise mismatch(call, f"{text}, expected equal values", rank, peer, operation)


class FirstValues:
    """Numbers that the first rank to make a call leaves there for all, where no rank waits.

    They lie in words of memory that the ranks share. A rank that comes more than a thousand calls
    late, as can happen when hosts run ahead of their GPUs, finds nothing, and its own number.

    A word has a number and, in the bits above it, the call's. Where those wrap around, as they do
    beside long numbers, all calls must be made: a word that none has written for long misleads.

    Args:
        comm: on the CPU; `BYTES` of rank 0's symmetric memory are used. Making one is collective.
        bits: of a number.
    """

    _SLOTS = 1024  # words: one a call, in turn
    BYTES = 8 * _SLOTS
    _PLACE = struct.Struct("=iiQ")  # the handle of ``mem_export``

    def __init__(self, comm: _core.Comm, bits: int) -> None:
        self._bits = bits
        place = self._PLACE.pack(0, 0, 0)
        if comm.rank == 0:
            words = comm.mem_alloc(self.BYTES)
            ctypes.memset(words, 0, self.BYTES)
            place = self._PLACE.pack(*comm.mem_export(words))
        self._words = comm.mem_import(*self._PLACE.unpack(comm.all_gather(place)[0]))

    def of(self, call: int, number: int) -> int:
        """The number of the first rank that has come to this call, counted from 1."""
        word = self._words + 8 * (call % self._SLOTS)
        return _core.first_value(word, call, self._bits, number)


class EqualNumber:
    """A number that all ranks have to give to a call alike, compared without waiting for any.

    Args:
        comm: on the CPU; `BYTES` of rank 0's symmetric memory are used. Making one is collective.
    """

    BYTES = FirstValues.BYTES
    _NUMBERS = 1 << 32  # a value is rank * _NUMBERS + number
    _RANK_BITS = 10

    def __init__(self, comm: _core.Comm) -> None:
        self._values = FirstValues(comm, 32 + self._RANK_BITS)
        self._rank = comm.rank
        self.calls = 0

    def of_first(self, number: int) -> tuple[int, int]:
        """The value that the first rank of this call has given, and that rank."""
        kept = min(number, self._NUMBERS - 1)
        self.calls += 1
        value = self._values.of(self.calls, self._rank * self._NUMBERS + kept)
        first, rank = value % self._NUMBERS, value // self._NUMBERS
        return number if first == kept else first, rank
