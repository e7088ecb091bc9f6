"""The options of a group as the library takes them; peers hear of one that cannot be read."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

from crossdock import _core
from crossdock._config import EP_WORDS, fail_group, number_of
from crossdock._experts import ranks_of_experts
from crossdock._wire import wire_formats

from ._calls import DTYPE_CODES, PAYLOADS

__all__ = ["read_config"]


_OWN = "symmetric_tensors"  # an option that the library knows nothing of


def _number(name: str, given: Any, least: int = -(1 << 31)) -> int:
    """A 32-bit number. Its range is checked by the library."""
    try:
        number = operator.index(given)
    except TypeError:
        raise TypeError(f"{name}: expected a whole number, got {given!r}") from None
    if not least <= number < 1 << 31:
        raise ValueError(f"{name}: expected a whole number from {least} below 2^31, got {given!r}")
    return number


def _payload(name: str, given: Any) -> int:
    if given not in PAYLOADS:
        raise ValueError(f"{name}: expected one of {list(PAYLOADS)}, got {given!r}")
    return DTYPE_CODES[given]


# By argument what makes a number of it; expert_ranks needs another argument too.
_READERS: dict[str, Callable[[str, Any], Any]] = {
    "num_experts": _number,
    "hidden": _number,
    "max_topk": _number,
    "max_tokens_per_rank": _number,
    "layout": number_of,
    "dtype": _payload,
    "recv_capacity": functools.partial(_number, least=0),
    "overflow": number_of,
    "alignment": _number,
    "duplicate_ids": number_of,
    "on_error": number_of,
    "staging": number_of,
    "zero_tail": lambda _, given: 1 if given else 0,
    "num_sms": _number,
    "in_flight": _number,
    "on_peer_loss": number_of,
    "wait_timeout_ms": _number,
    "receive": number_of,
    "num_logical_experts": functools.partial(_number, least=0),
    "net_buffer_bytes": functools.partial(_number, least=0),
    "wire_formats": lambda _, given: wire_formats(given),
    _OWN: functools.partial(_number, least=0),
}


def read_config(
    core: _core.Comm, make: type[_core.Group] | type[_core.LowLatencyGroup], **given: Any
) -> dict[str, Any]:
    """The options of `make` for arguments of a group. Collective where one is bad.

    Raises:
        TypeError, ValueError: a bad argument, by its name; the peers, which are making their
            groups, get Mismatch.
    """
    config = {}
    readers = _READERS | {
        "expert_ranks": lambda _, ranks: ranks_of_experts(ranks, given["num_experts"])
    }
    if make is _core.Group:
        readers["on_peer_loss"] = functools.partial(number_of, words=EP_WORDS)
    for name, value in given.items():
        try:
            number = readers[name](name, value)
        except (TypeError, ValueError):
            fail_group(core, make, "recv_capacity" if name == _OWN else name)
            raise
        if name != _OWN:
            config[name] = number
    return config
