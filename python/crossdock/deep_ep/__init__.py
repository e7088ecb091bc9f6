"""The interface of DeepEP 1.2 for its normal (high-throughput) kernels.

Code written against it changes one import::

    from crossdock import deep_ep          # was: import deep_ep
    buffer = deep_ep.Buffer(group)

See ``docs/deep_ep.md`` for what is honoured, ignored and refused.
"""

from ._arguments import topk_idx_t
from ._config import Config
from .buffer import Buffer
from .utils import EventHandle, EventOverlap

__all__ = ["Buffer", "Config", "EventHandle", "EventOverlap", "topk_idx_t"]
