"""Calls whose use of torch is their own affair."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

_P = ParamSpec("_P")
_T = TypeVar("_T")


def plain(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """A function within which torch's function modes see nothing.

    Of such a mode, as ``torch.set_default_device`` is one, Python code runs in each function of
    torch, and with each look at a shape or a dtype.
    """

    @functools.wraps(function)
    def run(*args: _P.args, **options: _P.kwargs) -> _T:
        with torch._C.DisableTorchFunction():
            return function(*args, **options)

    return run
