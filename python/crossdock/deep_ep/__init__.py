"""The interfaces of DeepEP 1.2, `Buffer`, and of DeepEP 2, `ElasticBuffer`.

Code written against it changes one import:

    from crossdock import deep_ep          # was: import deep_ep
    buffer = deep_ep.Buffer(group)

Where it is a framework that imports ``deep_ep``, `install` lets that name be this package.
See ``docs/deep_ep.md`` for what is honoured, ignored and refused.
"""

import crossdock.torch  # noqa: F401 - first, since it says it if PyTorch is missing

from ._arguments import topk_idx_t
from ._config import Config
from ._elastic_handle import EPHandle
from ._install import install
from .buffer import Buffer
from .elastic import ElasticBuffer
from .utils import EventHandle, EventOverlap

__all__ = [
    "Buffer",
    "Config",
    "EPHandle",
    "ElasticBuffer",
    "EventHandle",
    "EventOverlap",
    "install",
    "topk_idx_t",
]
