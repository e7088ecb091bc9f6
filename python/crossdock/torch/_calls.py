"""The library's operations on torch tensors: every output given, nothing allocated, no autograd.

Arguments have the names, shapes and dtypes of ``crossdock/ep.h`` and ``low_latency.h``. Tensors
must be contiguous, but for those that the headers allow any strides. On the CPU an operation has
finished when `run` returns. On a GPU it has been enqueued, and tensors from torch's caching
allocator may be dropped at once: their memory is reused only by later work of that stream.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Mapping
from typing import overload

import torch

from crossdock import _core
from crossdock._core import constants

Spec = tuple[int, tuple[int, ...], int] | tuple[int, tuple[int, ...], int, tuple[int, ...]]


# As ``_core`` takes them, of the dtypes that torch has: float8_e8m0fnu from release 2.7 on,
# float4_e2m1fn_x2, two numbers in a byte, from 2.8 on.
DTYPE_CODES: dict[torch.dtype, int] = {
    getattr(torch, name): code for name, code in constants.DTYPES.items() if hasattr(torch, name)
}

# The element types that the library takes for each argument; it has the others for other arguments.
INDICES = (torch.int32, torch.int64)
SUMMABLE = (torch.bfloat16, torch.float16, torch.float32)
_FP4 = tuple(filter(None, [getattr(torch, "float4_e2m1fn_x2", None)]))
PAYLOADS = (*SUMMABLE, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8, *_FP4)
E8M0: torch.dtype = getattr(torch, "float8_e8m0fnu", torch.uint8)  # of scales that are made
SCALES = (torch.float32, *dict.fromkeys((E8M0, torch.uint8)), torch.float8_e4m3fn)

# The handle of a device's current stream without making a Stream object, where torch has it.
_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)


@overload
def spec(tensor: torch.Tensor) -> Spec: ...
@overload
def spec(tensor: torch.Tensor | None) -> Spec | None: ...
def spec(tensor: torch.Tensor | None) -> Spec | None:
    """A tensor as ``_core`` takes it: address, shape, dtype code; and strides if not packed.

    Raises:
        TypeError: the library has no such dtype.
    """
    if tensor is None:
        return None
    code = DTYPE_CODES.get(tensor.dtype)
    if code is None:
        known = ", ".join(str(dtype) for dtype in DTYPE_CODES)
        raise TypeError(f"expected a dtype of {known}; got {tensor.dtype}")
    if tensor.is_contiguous():
        return tensor.data_ptr(), tensor.shape, code
    return tensor.data_ptr(), tensor.shape, code, tensor.stride()


# Whether ``_core`` reads torch's tensors itself.
_READS = _core.reads(torch.Tensor)


def described(fields: dict[str, object]) -> dict[str, object]:
    """The fields of an operation's struct as ``_core`` takes them; tensors may be None.

    Raises:
        TypeError: as `spec`, with a torch that does not tell C code where its tensors lie.
    """
    if _READS:
        return fields
    return {
        name: spec(value) if isinstance(value, torch.Tensor) else value
        for name, value in fields.items()
    }


def current_stream(device: torch.device) -> int:
    """The CUDA stream that operations on this device go to; 0 on the CPU."""
    if device.type != "cuda":
        return 0
    if _raw_stream is not None:
        index = device.index
        return _raw_stream(torch.cuda.current_device() if index is None else index)
    return torch.cuda.current_stream(device).cuda_stream


def stream_source(device: torch.device) -> Callable[[], int]:
    """`current_stream` of this device, for callers that ask often."""
    if device.type != "cuda":
        return int
    if _raw_stream is None or device.index is None:
        return functools.partial(current_stream, device)
    return functools.partial(_raw_stream, device.index)


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


def run(
    core: object,
    operation: str,
    like: torch.Tensor,
    tensors: Mapping[str, torch.Tensor | None],
    **fields: object,
) -> None:
    """Runs an operation of a class of ``_core`` on the current stream of its device.

    Args:
        core: the group or communicator.
        operation: name of the method.
        like: a tensor on that device.
        tensors: by the names of the fields of the operation's struct in the C header.
        fields: its other ones.
    """
    if like.is_cuda:
        fields["stream"] = current_stream(like.device)
    for name, tensor in tensors.items():
        if tensor is not None:
            fields[name] = spec(tensor)
    getattr(core, operation)(fields)
