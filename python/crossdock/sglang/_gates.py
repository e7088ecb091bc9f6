"""Changes of SGLang by which its dispatchers for DeepEP take `crossdock.deep_ep`."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from crossdock import deep_ep

_DISPATCHERS = "sglang.srt.layers.moe.token_dispatcher"
_QUANTISER = "sglang_per_token_group_quant_fp8"


def open_gates() -> bool:
    """Lets SGLang's dispatchers be on Crossdock; False if they are already.

    A scheduler's process loads plug-ins when it has imported the dispatchers, and with them the
    DeepEP that SGLang has brought along. They get the names here that they have imported from it.

    Raises:
        ImportError: another ``deep_ep`` has been imported, and not by the dispatchers; or SGLang's
            quantising kernel is missing. Nothing has been changed.
    """
    first = sys.modules.get(f"{_DISPATCHERS}.deepep")
    second = sys.modules.get(f"{_DISPATCHERS}.deepep_v2")
    if first is None or second is None:
        before = sys.modules.get("deep_ep") is deep_ep
        deep_ep.install()
        return not before
    if first.use_deepep and first.Buffer is deep_ep.Buffer:
        return False
    kernels = importlib.import_module("sglang.kernels.ops.quantization.fp8_kernel")
    both: dict[str, Any] = {_QUANTISER: getattr(kernels, _QUANTISER)}
    vars(first).update(
        both,
        Buffer=deep_ep.Buffer,
        Config=deep_ep.Config,
        use_deepep=True,
        _deepep_import_error=None,
    )
    vars(second).update(
        both,
        ElasticBuffer=deep_ep.ElasticBuffer,
        use_deepep_v2=True,
        _deepep_v2_import_error=None,
    )
    return True
