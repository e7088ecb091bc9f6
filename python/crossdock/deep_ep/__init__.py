"""The interface of DeepEP 1.2: its normal (high-throughput) kernels and its low-latency ones.

Code written against it changes one import::

    from crossdock import deep_ep          # was: import deep_ep
    buffer = deep_ep.Buffer(group)

Where it is a framework that imports ``deep_ep``, `install` lets that name be this package.
See ``docs/deep_ep.md`` for what is honoured, ignored and refused.
"""

from typing import NoReturn

from ._arguments import topk_idx_t
from ._config import Config
from ._install import install
from ._missing import ELASTIC_BUFFER
from .buffer import Buffer
from .utils import EventHandle, EventOverlap

__all__ = ["Buffer", "Config", "EventHandle", "EventOverlap", "install", "topk_idx_t"]


def __getattr__(name: str) -> NoReturn:
    if name == "ElasticBuffer":
        raise AttributeError(ELASTIC_BUFFER)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
