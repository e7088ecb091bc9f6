"""An error that SGLang would only log: it ends the making of dispatchers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from ._known import MAKER, OF_HOOKS


def refuse_dispatchers(error: Exception) -> None:
    """Lets SGLang raise this when it makes a dispatcher.

    Raises:
        SystemExit: SGLang has no such hooks.
    """
    try:
        OF_HOOKS.require()
    except ImportError as other:
        raise SystemExit(f"{error}; {other}") from error
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def refuse(maker: Callable[..., Any], *args: Any, **options: Any) -> NoReturn:
        raise RuntimeError(f"crossdock.sglang: {error}") from error

    HookRegistry.register(
        f"sglang.srt.layers.moe.fused_moe_triton.layer.{MAKER}", refuse, HookType.AROUND
    )
