"""Marks operator implementations, so that Dynamo does not trace into them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

try:  # torch 2.7 and later
    from torch._C._dynamo.eval_frame import (
        _FrameAction,
        _FrameExecStrategy,
        set_code_exec_strategy,
    )
except ImportError:
    _SKIP: Any = None
else:
    _SKIP = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)

__all__ = ["unseen"]

_Function = TypeVar("_Function", bound=Callable[..., Any])


def unseen(function: _Function) -> _Function:
    """A Python function into which ``torch.compile`` never looks, nor into what it calls.

    As ``torch.compiler.disable``, which costs several microseconds at each call, and imports the
    compiler at the first.

    Args:
        function: one that is defined here, as all functions of one definition are marked.
    """
    if _SKIP is None:
        disabled: Any = torch._disable_dynamo(function)
        return disabled
    set_code_exec_strategy(function.__code__, _SKIP)
    return function
