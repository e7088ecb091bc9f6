"""Runs the package under another default device and dtype of torch than its tests.

Tensors that the package makes without naming a device or dtype have the default one then; the
tests' tensors stay as they are. Tensors that the package hands to the library must be on the CPU or
on its GPU, so a tensor made without naming that ends in an error, or in wrong results.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors


class OtherDefaults(TorchFunctionMode):
    """As ``torch.set_default_device`` and ``torch.set_default_dtype``, for one thread's calls."""

    def __init__(self, device: str, dtype: torch.dtype) -> None:
        super().__init__()
        self._device, self._dtype = torch.device(device), dtype

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        # A compiler traces this function too, and knows no frames.
        if torch.compiler.is_compiling() or not _called_by_package():
            return func(*args, **kwargs)
        if func in _device_constructors() and kwargs.get("device") is None:
            kwargs = {**kwargs, "device": self._device}
        usual = torch.get_default_dtype()
        torch.set_default_dtype(self._dtype)
        try:
            return func(*args, **kwargs)
        finally:
            torch.set_default_dtype(usual)


def _called_by_package() -> bool:
    """Whether the package, itself or through torch's own Python code, made this call."""
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name != "torch" and not name.startswith("torch."):
            return name.split(".")[0] == "crossdock"
        frame = frame.f_back
    return False
