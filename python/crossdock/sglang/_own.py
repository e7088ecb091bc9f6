"""Changes of SGLang by which its dispatcher for DeepEP calls Crossdock's operations."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["put_in_place"]

_DISPATCHER = "sglang.srt.layers.moe.token_dispatcher.deepep"


def put_in_place() -> bool:
    """Lets dispatchers that are made from now on have our classes; False if they have already."""
    module: Any = importlib.import_module(_DISPATCHER)
    from ._dispatchers import CrossdockLowLatency, CrossdockNormal

    if module._DeepEPDispatcherImplNormal is CrossdockNormal:
        return False
    module._DeepEPDispatcherImplLowLatency = CrossdockLowLatency
    module._DeepEPDispatcherImplNormal = CrossdockNormal
    return True
