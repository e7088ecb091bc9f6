"""Tuning parameters in DeepEP's form."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any, TypeVar

_T = TypeVar("_T")

_RANKS_PER_HOST = 8  # as DeepEP takes it
# Of ``net_buffer_bytes`` of a group.
_PIECES, _USUAL_PIECE = 8, 256 << 10  # for each other machine; bytes

# DeepEP's own names for the positional parameters, which callers may use as keywords.
_LONG_NAMES = {
    "num_max_nvl_chunked_send_tokens": "nvl_send_tokens",
    "num_max_nvl_chunked_recv_tokens": "nvl_recv_tokens",
    "num_max_rdma_chunked_send_tokens": "rdma_send_tokens",
    "num_max_rdma_chunked_recv_tokens": "rdma_recv_tokens",
}


def also_named(**names: str) -> Callable[[Callable[..., _T]], Callable[..., _T]]:
    """Lets callers use other keywords too: name in DeepEP = parameter of the function.

    The function's attribute ``also_named`` has them.
    """

    def rename(function: Callable[..., _T]) -> Callable[..., _T]:
        @functools.wraps(function)
        def renamed(*args: Any, **options: Any) -> _T:
            for other, name in names.items():
                if other in options:
                    if name in options:
                        raise TypeError(f"{name}: given twice, also as {other}")
                    options[name] = options.pop(other)
            return function(*args, **options)

        vars(renamed)["also_named"] = frozenset(names)
        return renamed

    return rename


@dataclasses.dataclass(frozen=True, init=False)
class Config:
    """How many multiprocessors operations may use.

    The chunk sizes tune queues that Crossdock does not have: they are kept, checked, and otherwise
    ignored.

    Args:
        num_sms: multiprocessors of the GPU, an even number; 0 = chosen by the library.
        nvl_send_tokens, nvl_recv_tokens, rdma_send_tokens, rdma_recv_tokens: positive; each may
            also be given by its name in DeepEP, such as ``num_max_nvl_chunked_send_tokens``.

    Raises:
        ValueError: a number out of range.
        TypeError: an unknown name, or a `num_sms` that is no whole number.
    """

    num_sms: int
    nvl_send_tokens: int
    nvl_recv_tokens: int
    rdma_send_tokens: int
    rdma_recv_tokens: int

    @also_named(**_LONG_NAMES)
    def __init__(
        self,
        num_sms: int = 20,
        nvl_send_tokens: int = 6,
        nvl_recv_tokens: int = 256,
        rdma_send_tokens: int = 6,
        rdma_recv_tokens: int = 256,
    ) -> None:
        queues = {
            "nvl_send_tokens": nvl_send_tokens,
            "nvl_recv_tokens": nvl_recv_tokens,
            "rdma_send_tokens": rdma_send_tokens,
            "rdma_recv_tokens": rdma_recv_tokens,
        }
        require_sms(num_sms, "num_sms")
        require_positive(**queues)
        for name, value in {"num_sms": num_sms, **queues}.items():
            object.__setattr__(self, name, value)

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Bytes to give to Buffer as ``num_nvl_bytes``: room for `nvl_recv_tokens` rows per rank.

        A Buffer with less works too: it takes what its first dispatch turns out to need.
        """
        require_positive(hidden_bytes=hidden_bytes, num_ranks=num_ranks)
        return self.nvl_recv_tokens * num_ranks * hidden_bytes

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Bytes to give to Buffer as ``num_rdma_bytes``: what 0 stands for, on hosts of 8 ranks."""
        require_positive(hidden_bytes=hidden_bytes, num_ranks=num_ranks)
        other_hosts = (num_ranks - 1) // _RANKS_PER_HOST
        return other_hosts * _PIECES * max(_USUAL_PIECE, hidden_bytes)


def require_sms(num_sms: int, name: str) -> None:
    """Raises TypeError or ValueError unless `num_sms` is an even number that a group takes."""
    try:
        operator.index(num_sms)
    except TypeError:
        raise TypeError(f"{name}: expected a whole number, got {num_sms!r}") from None
    if not 0 <= num_sms <= 4096 or num_sms % 2 != 0:
        raise ValueError(f"{name}: expected an even number from 0 to 4096, got {num_sms}")


def require_positive(**numbers: int) -> None:
    """Raises ValueError unless all of them are."""
    for name, number in numbers.items():
        if number < 1:
            raise ValueError(f"{name}: expected at least 1, got {number}")
