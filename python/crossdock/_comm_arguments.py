"""Arguments of communicators as the library takes them."""

from __future__ import annotations

import contextlib
import numbers
import operator
import re
from typing import Any, Literal

from crossdock import _core
from crossdock._core import constants
from crossdock.errors import CrossdockError

__all__ = ["PeerLoss", "grow", "join", "milliseconds", "number_of_32_bits", "parse_device"]

PeerLoss = Literal["fatal", "mask"]

_CPU, _CUDA = constants.DEVICE_TYPES["cpu"], constants.DEVICE_TYPES["cuda"]
_MOST_BYTES = 1 << 62
_IMPOSSIBLE = 1 << 63  # bytes: more than any machine has, so that asking for them fails


def milliseconds(timeout: float | None) -> int:
    """A timeout in seconds as the library takes it; None = its default.

    Raises:
        ValueError: not above zero, or beyond 2^31 milliseconds.
    """
    if timeout is None:
        return 0
    if not isinstance(timeout, numbers.Real):
        raise TypeError(f"timeout: expected seconds or None, got {timeout!r}")
    if not 0 < timeout < 2**31 / 1000:
        raise ValueError(
            f"timeout: expected seconds above 0, below {2**31 / 1000:.0f}, got {timeout}"
        )
    return max(1, round(timeout * 1000))


def join(*, heap_bytes: int = 0, **options: Any) -> _core.Comm:
    """``_core.Comm``; a bad `heap_bytes` raises here, and Mismatch at once on the other ranks.

    Raises:
        TypeError, ValueError: as `_byte_count`; a rank, number of ranks, name, host, interface or
            number of milliseconds that is none.
        CrossdockError: as ``xd_comm_create``.
    """
    for argument in ("rank", "num_ranks", "silence_ms"):
        if argument in options:
            options[argument] = number_of_32_bits(argument, options[argument])
    options["on_peer_loss"] = _peer_loss(options.get("on_peer_loss", "fatal"))
    elastic = options.get("elastic", False)
    if not isinstance(elastic, bool):
        raise TypeError(f"elastic: expected a bool, got {elastic!r}")
    name = options.get("name", "")
    if not isinstance(name, str):
        raise TypeError(f"name: expected a str, got {name!r}")
    for argument in ("host", "net_interface"):
        text = options.get(argument)
        if not isinstance(text, str | None):
            raise TypeError(f"{argument}: expected a str or None, got {text!r}")
        if text is not None and "\0" in text:
            raise ValueError(f"{argument}: expected a text without NUL, got {text!r}")
    try:
        wanted = _byte_count("heap_bytes", heap_bytes)
    except (TypeError, ValueError):
        with contextlib.suppress(CrossdockError):  # the caller has to hear of the mistake
            _core.Comm(heap_bytes=_IMPOSSIBLE, **options)
        raise
    return _core.Comm(heap_bytes=wanted, **options)


def _peer_loss(word: Any) -> int:
    """The library's number for it.

    Raises:
        ValueError: there is no such word.
    """
    known = constants.COMM_PEER_LOSSES
    if not isinstance(word, str) or word not in known:
        raise ValueError(f"on_peer_loss: expected {' or '.join(map(repr, known))}, got {word!r}")
    return known[word]


def number_of_32_bits(name: str, given: Any) -> int:
    """A whole number as the library takes it, which checks whether it is a fitting one.

    Raises:
        TypeError, ValueError: no whole number, or one that has more bits.
    """
    try:
        number = operator.index(given)
    except TypeError:
        raise TypeError(f"{name}: expected a whole number, got {given!r}") from None
    if not -(1 << 31) <= number < 1 << 31:
        raise ValueError(f"{name}: expected a number of 32 bits, got {given}")
    return number


def _byte_count(name: str, given: Any) -> int:
    """A number of bytes as the library takes it.

    Raises:
        TypeError, ValueError: no whole number, negative, or more than there can be.
    """
    try:
        number = operator.index(given)
    except TypeError:
        raise TypeError(f"{name}: expected a whole number of bytes, got {given!r}") from None
    if not 0 <= number <= _MOST_BYTES:
        raise ValueError(f"{name}: expected 0 to 2^62 bytes, got {given!r}")
    return number


def grow(comm: _core.Comm, num_bytes: int) -> None:
    """``mem_grow``; a bad `num_bytes` raises here, and Mismatch at once on the other ranks.

    Raises:
        TypeError, ValueError: as `_byte_count`; no rank's memory has grown.
        CrossdockError: as ``xd_mem_grow``.
    """
    try:
        wanted = _byte_count("num_bytes", num_bytes)
    except (TypeError, ValueError):
        with contextlib.suppress(CrossdockError):  # the caller has to hear of the mistake
            comm.mem_grow(_IMPOSSIBLE)
        raise
    comm.mem_grow(wanted)


def parse_device(device: str) -> tuple[int, int]:
    """DLPack's (device type, number) of ``"cpu"``, ``"cuda"`` (-1 = LOCAL_RANK) or ``"cuda:0"``.

    Raises:
        TypeError, ValueError: no text, or any other.
    """
    if not isinstance(device, str):
        raise TypeError(f"device: expected a str, got {device!r}")
    found = re.fullmatch(r"(cpu)|cuda(?::(\d+))?", device)
    if not found:
        raise ValueError(f"device: expected 'cpu', 'cuda' or 'cuda:<number>', got {device!r}")
    if found[1]:
        return _CPU, 0
    return _CUDA, -1 if found[2] is None else int(found[2])
