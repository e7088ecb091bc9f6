"""Tags of products, by which the library tells that ranks come to them in different orders.

A tag says where a program's source calls a product, and how often it has before: so it is the same
in every process that runs the same source, whatever its interpreter makes of it, and however often
each of them traces it.
"""

from __future__ import annotations

import collections
import functools
import itertools
import os
import sys
import threading
import types
import zlib
from typing import Any

import jax
from jax.extend.core import get_opaque_trace_state

__all__ = ["tag_of_call"]

# Remembered where JAX does not tell which traces have ended: more than are under way at a time.
_MOST_TRACES = 4096
_Counts = collections.Counter[str]


class _Traces(threading.local):
    """By trace, how many products each line has called. JAX only lets traces be compared."""

    def __init__(self) -> None:
        self.known: list[tuple[Any, _Counts]] = []

    def counts(self) -> _Counts:
        """Of the function that is being traced."""
        state = get_opaque_trace_state()
        for known, counts in reversed(self.known):
            if known == state:
                return counts
        self.known = [pair for pair in self.known if not _has_ended(pair[0])][1 - _MOST_TRACES :]
        self.known.append((state, _Counts()))
        return self.known[-1][1]


def _has_ended(state: Any) -> bool:
    """Whether a trace is known to have ended."""
    trace = getattr(state, "_trace_ref", None)
    return trace is not None and trace() is None


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
    """The call outside this package: its file, function, line and column.

    Folders are left out, which may differ between hosts. A function of this package that JAX calls
    has no line.
    """
    frame = sys._getframe(1)
    while frame.f_back and _package(frame) == "crossdock":
        frame = frame.f_back
    if _package(frame) == "jax":
        return ""
    code = frame.f_code
    place = _place_in_source(code, frame.f_lasti)
    return f"{os.path.basename(code.co_filename)}:{code.co_name}:{place}"


@functools.lru_cache(maxsize=4096)
def _place_in_source(code: types.CodeType, instruction: int) -> str:
    """Line and column of what an instruction stands for: places of instructions mean nothing.

    They differ between interpreters, and with what these leave out, such as assertions.
    """
    places = itertools.islice(code.co_positions(), instruction // 2, None)
    line, _, column, _ = next(places, (None, None, None, None))
    return f"{line}:{column}"


def _package(frame: Any) -> str:
    return frame.f_globals.get("__name__", "").partition(".")[0]
