"""The options of an EpGroup as the library takes them; peers hear of one that cannot be read."""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable
from typing import Any

import torch

from crossdock import _core
from crossdock.errors import InvalidArgument

from ._calls import DTYPE_CODES, PAYLOADS

__all__ = ["read_config"]


def _number(name: str, given: Any, least: int = -(1 << 31)) -> int:
    """Of 32 bits; what the library refuses of these it names itself."""
    try:
        number = operator.index(given)
    except TypeError:
        raise TypeError(f"{name}: expected a whole number, got {given!r}") from None
    if not least <= number < 1 << 31:
        raise ValueError(f"{name}: expected a whole number from {least} below 2^31, got {given!r}")
    return number


def _rows(name: str, given: Any) -> int:
    if given is None:
        return 0
    number = _number(name, given)
    if number < 1:
        raise ValueError(f"{name}: expected at least 1, or None; got {given}")
    return number


def _choice(known: dict[Any, int], name: str, given: Any) -> int:
    if given not in known:
        raise ValueError(f"{name}: expected one of {list(known)}, got {given!r}")
    return known[given]


# By argument: the library's name of it, and what makes a number of it.
_READERS: dict[str, tuple[str, Callable[[str, Any], int]]] = {
    "num_experts": ("num_experts", _number),
    "hidden": ("hidden", _number),
    "topk": ("max_topk", _number),
    "max_tokens": ("max_tokens_per_rank", _number),
    "layout": ("layout", functools.partial(_choice, {"expert_major": 0, "rank_major": 1})),
    "dtype": ("dtype", functools.partial(_choice, {d: DTYPE_CODES[d] for d in PAYLOADS})),
    "capacity": ("recv_capacity", _rows),
    "overflow": ("overflow", functools.partial(_choice, {"error": 0, "drop": 1})),
    "alignment": ("alignment", _number),
    "duplicate_ids": ("duplicate_ids", functools.partial(_choice, {"error": 0, "collapse": 1})),
    "on_error": ("on_error", functools.partial(_choice, {"status": 0, "fatal": 1})),
    "staging": ("staging", lambda _, given: 0 if given else 1),
    "zero_tail": ("zero_tail", lambda _, given: 1 if given else 0),
    "num_sms": ("num_sms", _number),
    "symmetric_tensors": ("", functools.partial(_number, least=0)),  # it knows nothing of these
}


def read_config(core: _core.Comm, **given: Any) -> dict[str, int]:
    """The options of ``_core.Group`` for arguments of EpGroup. Collective where one is bad.

    Raises:
        TypeError, ValueError: a bad argument, by its name; the peers, which are making their
            groups, get Mismatch.
    """
    config = {}
    for name, value in given.items():
        field, read = _READERS[name]
        try:
            number = read(name, value)
        except (TypeError, ValueError):
            _tell_peers(core, field or "recv_capacity")
            raise
        if field:
            config[field] = number
    return config


def _tell_peers(core: _core.Comm, field: str) -> None:
    """Takes part in the making of a group whose `field` is bad: it is what the peers are told."""
    good = {
        "num_experts": core.num_ranks,
        "max_topk": 1,
        "max_tokens_per_rank": 1,
        "hidden": 16,
        "dtype": DTYPE_CODES[torch.float32],
    }
    with contextlib.suppress(InvalidArgument):
        _core.Group(core, **(good | {field: -1}))
