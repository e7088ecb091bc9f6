"""The entry points that serving engines load, in each of their processes.

They stand outside of the package, and import it only where it is wanted: engines log an entry point
that cannot be imported, and go on without it.
"""

from __future__ import annotations

import importlib.util
import os
import pathlib
import sys
from collections.abc import Callable
from typing import Any, NoReturn

_PLUGIN = "crossdock"  # the name of the entry points
_VARIABLE = "XD_ENGINE"
_DEEP_EP = "deep_ep"  # the engine's own classes for DeepEP, on crossdock.deep_ep
_LAYER = "srt/layers/moe/fused_moe_triton/layer.py"
_MAKER = "create_moe_dispatcher"


def vllm() -> None:
    """Loads `crossdock.vllm` if it is wanted.

    Raises:
        Exception: what `crossdock.vllm.register` raises, or its import; vLLM tries again then.
        ValueError: a bad value of ``XD_ENGINE``.
    """
    try:
        way = _wanted("VLLM_PLUGINS")
        if way:
            from crossdock import vllm

            vllm.register_deep_ep() if way == _DEEP_EP else vllm.register()
    except Exception:
        plugins: Any = sys.modules.get("vllm.plugins")
        if hasattr(plugins, "plugins_loaded"):
            plugins.plugins_loaded = False  # which vLLM sets before it calls
        raise


def sglang() -> None:
    """Loads `crossdock.sglang` if it is wanted.

    SGLang logs what a plug-in raises, and goes on. So what is raised here is raised once more when
    SGLang makes a dispatcher.

    Raises:
        Exception: what `crossdock.sglang.register` raises, or its import.
        ValueError: a bad value of ``XD_ENGINE``.
        SystemExit: of the former, in an SGLang that does not know the hooks that raise later.
    """
    try:
        way = _wanted("SGLANG_PLUGINS")
        if way:
            from crossdock import sglang

            sglang.register_deep_ep() if way == _DEEP_EP else sglang.register()
    except Exception as error:
        _refuse_dispatchers(error)
        raise


def _wanted(allowed: str) -> str:
    """How this plug-in is wanted: as ``XD_ENGINE`` says, or 1 if `allowed` names it; "" = not.

    Args:
        allowed: the engine's variable.
    """
    value = os.environ.get(_VARIABLE, "")
    if value not in ("", "0", "1", _DEEP_EP):
        raise ValueError(f"{_VARIABLE}: expected 0, 1 or {_DEEP_EP}, got {value!r}")
    named = map(str.strip, os.environ.get(allowed, "").split(","))
    if not value:
        return "1" if _PLUGIN in named else ""
    return "" if value == "0" else value


def _refuse_dispatchers(error: Exception) -> None:
    """Lets SGLang raise this when it makes a dispatcher."""

    def refuse(maker: Callable[..., Any], *args: Any, **options: Any) -> NoReturn:
        raise RuntimeError(f"crossdock.sglang: {error}") from error

    try:
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        spec: Any = importlib.util.find_spec("sglang")
        layer = pathlib.Path(spec.submodule_search_locations[0], _LAYER)
        if f"def {_MAKER}(" not in layer.read_text(encoding="utf-8"):
            raise ImportError(f"{layer} has no {_MAKER}")
        module = f"sglang/{_LAYER}".removesuffix(".py").replace("/", ".")
        HookRegistry.register(f"{module}.{_MAKER}", refuse, HookType.AROUND)
    except Exception as other:
        raise SystemExit(
            f"crossdock.sglang: {error}; and SGLang cannot refuse it later: {other}"
        ) from error
