"""Changes of vLLM by which its code for DeepEP takes `crossdock.deep_ep`."""

from __future__ import annotations

import datetime
import functools
import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from crossdock import _core, deep_ep

_LAYERS = "vllm.model_executor.layers.fused_moe"
_CHOOSER = f"{_LAYERS}.all2all_utils"


def open_gates() -> bool:
    """Lets vLLM find DeepEP here; False if that has been done before.

    Raises:
        ImportError: another ``deep_ep`` has been imported before; nothing has been changed.
    """
    imports: Any = importlib.import_module("vllm.utils.import_utils")
    managers: Any = importlib.import_module("vllm.distributed.device_communicators.all2all")
    if imports.deep_ep_v2_unavailable_reason is _no_reason:
        return False
    forget = imports._has_module.cache_clear
    deep_ep.install()
    forget()  # the answer may have been "no"
    names = _names_of_chooser()  # may raise, so it comes before all changes of vLLM
    if names:
        vars(sys.modules[_CHOOSER]).update(names)
    _replace(managers.DeepEPHTAll2AllManager, "set_num_sms", _of_even_numbers)
    _replace(managers.DeepEPLLAll2AllManager, "clean_buffers", _and_back_in_step)
    # DeepEP 2 needs a certain NCCL in the process and its GIN. Nothing here does.
    os.environ["EP_DISABLE_GIN"] = "1"
    imports.deep_ep_v2_unavailable_reason = _no_reason  # last: it says that all has been done
    return True


def _no_reason() -> str | None:
    """Why DeepEP 2 is not available."""
    return None


def _replace(owner: type, name: str, change: Callable[..., Any]) -> None:
    setattr(owner, name, change(getattr(owner, name)))


def _names_of_chooser() -> dict[str, Any]:
    """The names that the module that chooses a class imports where it finds DeepEP."""
    if _CHOOSER not in sys.modules:
        return {}  # it will find DeepEP
    names = {}
    for module, wanted in {
        "deepep_ht": ("DeepEPHTPrepareAndFinalize",),
        "deepep_ll": ("DeepEPLLPrepareAndFinalize", "DEEPEP_QUANT_BLOCK_SHAPE"),
        "deepep_v2": ("DeepEPV2PrepareAndFinalize",),
    }.items():
        found = importlib.import_module(f"{_LAYERS}.prepare_finalize.{module}")
        names.update({name: getattr(found, name) for name in wanted})
    return names


def _of_even_numbers(set_num_sms: Callable[[Any, int], None]) -> Callable[[Any, int], None]:
    """Takes odd numbers, which vLLM may be given and DeepEP refuses: rounded down, but not to 0."""

    @functools.wraps(set_num_sms)
    def rounded(self: Any, num_sms: int) -> None:
        set_num_sms(self, 2 if num_sms == 1 else num_sms - num_sms % 2)

    return rounded


def _and_back_in_step(clean_buffers: Callable[[Any], None]) -> Callable[[Any], None]:
    """Brings all ranks into step once more, for which clearing memory is not enough here.

    vLLM calls this on all ranks after a fault, and cleans the Buffer that it has made last. Each
    rank must have cleared its mask before one may wait for it. If some do not come, the error on
    the group's first rank names all of them.
    """

    @functools.wraps(clean_buffers)
    def cleaned(self: Any) -> None:
        clean_buffers(self)
        buffers = list(self.handle_cache._cache.values())
        for buffer in buffers:
            buffer.low_latency_clean_mask_buffer()
        patience = datetime.timedelta(milliseconds=_core.default_timeout_ms())
        dist.monitored_barrier(self.cpu_group, patience, wait_all_ranks=True)
        for buffer in buffers:
            buffer._bring_back_in_step()

    return cleaned
