"""Tags of products, by which the library tells that ranks come to them in different orders.

A tag says where a program calls a product, and how often it has before: so it is the same in every
process that runs the same program, however often each of them traces it.
"""

from __future__ import annotations

import collections
import os
import sys
import threading
import zlib
from typing import Any

import jax
from jax.extend.core import get_opaque_trace_state

__all__ = ["tag_of_call"]

# What is traced inside one another at a time is less.
_MOST_TRACES = 64
_Counts = collections.Counter[str]


class _Traces(threading.local):
    """By trace, how many products each line has called. JAX only lets traces be compared."""

    def __init__(self) -> None:
        self.known: collections.deque[tuple[Any, _Counts]] = collections.deque(maxlen=_MOST_TRACES)

    def counts(self) -> _Counts:
        """Of the function that is being traced."""
        state = get_opaque_trace_state()
        for known, counts in self.known:
            if known == state:
                return counts
        self.known.append((state, _Counts()))
        return self.known[-1][1]


_traces = _Traces()


def tag_of_call(*arrays: Any) -> int:
    """A number below 2^32 for the product that the caller's caller asks for, even."""
    site = _site()
    if any(isinstance(array, jax.core.Tracer) for array in arrays):
        counts = _traces.counts()
        counts[site] += 1
        site += f":{counts[site]}"
    return zlib.crc32(site.encode()) & ~1


def _site() -> str:
    """The line outside this package that calls, and the place in it.

    Folders are left out, which may differ between hosts. A function of this package that JAX calls
    has no line.
    """
    frame = sys._getframe(1)
    while frame.f_back and _package(frame) == "crossdock":
        frame = frame.f_back
    if _package(frame) == "jax":
        return ""
    code = frame.f_code
    return f"{os.path.basename(code.co_filename)}:{code.co_name}:{frame.f_lineno}:{frame.f_lasti}"


def _package(frame: Any) -> str:
    return frame.f_globals.get("__name__", "").partition(".")[0]
