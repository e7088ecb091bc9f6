"""Changes of vLLM by which its values for DeepEP mean Crossdock's own classes."""

from __future__ import annotations

import importlib
import sys
from typing import Any

__all__ = ["put_in_place"]

_LAYERS = "vllm.model_executor.layers.fused_moe"
_CHOOSER = f"{_LAYERS}.all2all_utils"
_MANAGERS = ("DeepEPHTAll2AllManager", "DeepEPLLAll2AllManager", "DeepEPV2All2AllManager")
# By the name that vLLM knows it by, the module here and the name in it.
_CLASSES = {
    "DeepEPHTPrepareAndFinalize": ("_standard", "CrossdockStandard"),
    "DeepEPV2PrepareAndFinalize": ("_standard", "CrossdockStandard"),
    "DeepEPLLPrepareAndFinalize": ("_batched", "CrossdockBatched"),
    "DEEPEP_QUANT_BLOCK_SHAPE": ("_layers", "BLOCK"),
}


def __getattr__(name: str) -> Any:
    """Gives the names of vLLM's modules for DeepEP, in whose place this module stands.

    They are imported by modules that the classes here need, so these are looked for late.
    """
    if name not in _CLASSES:
        raise AttributeError(name)
    module, found = _CLASSES[name]
    return getattr(importlib.import_module(f"crossdock.vllm.{module}"), found)


def put_in_place() -> bool:
    """Lets vLLM use the classes here; False if that has been done before."""
    imports: Any = importlib.import_module("vllm.utils.import_utils")
    managers: Any = importlib.import_module("vllm.distributed.device_communicators.all2all")
    if imports.has_deep_ep is _is_here:
        return False
    from ._manager import CrossdockAll2AllManager

    chooser = sys.modules.get(_CHOOSER)
    if chooser is not None:  # may raise, so it comes before all changes of vLLM
        vars(chooser).update({name: __getattr__(name) for name in _CLASSES})
    for name in ("deepep_ht", "deepep_ll", "deepep_v2"):
        sys.modules[f"{_LAYERS}.prepare_finalize.{name}"] = sys.modules[__name__]
    for name in _MANAGERS:
        setattr(managers, name, CrossdockAll2AllManager)
    imports.has_deep_ep_v2 = imports.has_deep_ep = _is_here  # last: it says that all has been done
    return True


def _is_here() -> bool:
    """Whether there is a DeepEP: its values mean Crossdock."""
    return True
