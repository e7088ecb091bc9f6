"""Dtypes under ``torch.autocast``."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["autocast", "autocast_dtype", "cast"]


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype that ``F.linear`` would compute in on a device; None where autocast is off."""
    if not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)


def cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``tensor.to(dtype)``; without an operator where it has the dtype, as it mostly does."""
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def autocast(*tensors: torch.Tensor | None) -> Any:
    """The tensors in autocast's dtype, where that is on, as ``F.linear`` takes them."""
    first = tensors[0]
    dtype = autocast_dtype(torch.device("cpu") if first is None else first.device)
    if dtype is None:
        return tensors
    return tuple(_cast(tensor, dtype) for tensor in tensors)


def _cast(tensor: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    if tensor is None or not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return tensor
    return cast(tensor, dtype)
