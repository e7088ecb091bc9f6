"""Which CUDA graph is being captured, if any."""

from __future__ import annotations

import ctypes
import functools

import torch


def is_capturing(device: torch.device) -> bool:
    """Whether the current stream records a CUDA graph instead of running."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def capture_id(device: torch.device, stream: int) -> int:
    """A number of the capture that `stream`, the current one, is part of; 0 = none.

    Different captures have different numbers, which torch does not tell.
    """
    if not is_capturing(device):
        return 0
    status, number = ctypes.c_int(), ctypes.c_uint64()
    error = _driver().cuStreamGetCaptureInfo_v2(
        ctypes.c_void_p(stream), ctypes.byref(status), ctypes.byref(number), None, None, None
    )
    if error:
        raise RuntimeError(f"cuStreamGetCaptureInfo_v2: CUDA driver error {error}")
    return number.value


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
