"""Runs the package under another default device or dtype of torch than its tests.

``XD_TEST_TORCH_DEFAULTS`` says which: a device such as meta or cuda, a dtype such as float64, or
both with a comma between. Tensors that the package makes without naming a device or dtype have the
default one then; the tests' tensors stay as they are. Tensors that the package hands to the library
must be on the CPU or on its GPU, so a tensor made without naming that ends in an error, or in wrong
results.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

VARIABLE = "XD_TEST_TORCH_DEFAULTS"

_active: list[Any] = []  # modes, which end with their thread


def apply(alone: bool = True) -> None:
    """Sets what the environment asks for, for the calling thread.

    Args:
        alone: whether other threads make no tensors: they share the default dtype.
    """
    wanted = os.environ.get(VARIABLE, "")
    if wanted:
        import torch
        from torch.overrides import TorchFunctionMode
        from torch.utils._device import _device_constructors

        class Defaults(TorchFunctionMode):
            """As ``torch.set_default_device`` and ``torch.set_default_dtype``."""

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
                if device and func in _device_constructors() and kwargs.get("device") is None:
                    kwargs = {**kwargs, "device": device[0]}
                if not dtype:
                    return func(*args, **kwargs)
                usual = torch.get_default_dtype()
                torch.set_default_dtype(dtype[0])
                try:
                    return func(*args, **kwargs)
                finally:
                    torch.set_default_dtype(usual)

        dtype, device = [], []
        for name in wanted.split(","):
            found = getattr(torch, name, None)
            if isinstance(found, torch.dtype):
                dtype.extend([found] if alone else [])
            else:
                device.append(torch.device(name))
        mode = Defaults()
        mode.__enter__()
        _active.append(mode)


def _called_by_package() -> bool:
    """Whether the package, itself or through torch's own Python code, made this call."""
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name != "torch" and not name.startswith("torch."):
            return name.split(".")[0] == "crossdock"
        frame = frame.f_back
    return False
