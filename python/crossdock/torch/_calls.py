"""The library's operations on torch tensors: every output given, nothing allocated, no autograd.

Each function runs one operation of a ``crossdock._core.Group`` on the current stream of the plan's
device. Arguments have the names, shapes and dtypes of ``crossdock/ep.h``; optional ones may be
None. Tensors must be contiguous, but for scales, which may have any strides. On the CPU an
operation has finished when its function returns. On a GPU it has been enqueued, and tensors from
torch's caching allocator may be dropped at once: their memory is reused only by later work of that
stream.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import overload

import torch

from crossdock import _core
from crossdock._core import constants

Spec = tuple[int, tuple[int, ...], int] | tuple[int, tuple[int, ...], int, tuple[int, ...]]


# As ``_core`` takes them, of the dtypes that torch has: float8_e8m0fnu from release 2.7 on.
DTYPE_CODES: dict[torch.dtype, int] = {
    getattr(torch, name): code for name, code in constants.DTYPES.items() if hasattr(torch, name)
}

# The element types that the library takes for each argument; it has the others for other arguments.
INDICES = (torch.int32, torch.int64)
SUMMABLE = (torch.bfloat16, torch.float16, torch.float32)
PAYLOADS = (*SUMMABLE, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8)
E8M0: torch.dtype = getattr(torch, "float8_e8m0fnu", torch.uint8)  # of scales that are made
SCALES = (torch.float32, *dict.fromkeys((E8M0, torch.uint8)))

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


def prepare(
    group: _core.Group,
    topk_idx: torch.Tensor,
    plan: torch.Tensor,
    counts: torch.Tensor | None = None,
    padded_counts: torch.Tensor | None = None,
    offsets: torch.Tensor | None = None,
    total: torch.Tensor | None = None,
    rank_rows: torch.Tensor | None = None,
    alignment: int = 0,
) -> None:
    """``xd_ep_prepare``. `plan` is uint8 with at least ``_core.plan_size`` elements."""
    group.prepare(
        spec(topk_idx),
        plan.data_ptr(),
        plan.numel(),
        spec(counts),
        spec(padded_counts),
        spec(offsets),
        spec(total),
        spec(rank_rows),
        current_stream(plan.device),
        alignment,
    )


def row_experts(group: _core.Group, plan: torch.Tensor, out: torch.Tensor) -> None:
    """``xd_ep_plan_row_experts``. Local: no peer has to call it."""
    group.row_experts(plan.data_ptr(), plan.numel(), spec(out), current_stream(plan.device))


def routing_layout(
    comm: _core.Comm,
    num_experts: int,
    topk_idx: torch.Tensor,
    rows_per_rank: torch.Tensor | None = None,
    rows_per_expert: torch.Tensor | None = None,
    token_in_rank: torch.Tensor | None = None,
    bad_ids: torch.Tensor | None = None,
    *,
    expert_ranks: tuple[int, ...] | None = None,
) -> None:
    """``xd_ep_routing_layout``. Local: no peer has to call it. `token_in_rank` is bool or uint8."""
    flags = token_in_rank
    if flags is not None and flags.dtype == torch.bool:
        flags = flags.view(torch.uint8)
    comm.routing_layout(
        num_experts,
        spec(topk_idx),
        spec(rows_per_rank),
        spec(rows_per_expert),
        spec(flags),
        spec(bad_ids),
        current_stream(topk_idx.device),
        expert_ranks,
    )


def dispatch(
    group: _core.Group,
    plan: torch.Tensor,
    tokens: torch.Tensor,
    recv_tokens: torch.Tensor,
    *,
    scales: torch.Tensor | None = None,
    topk_weights: torch.Tensor | None = None,
    recv_scales: torch.Tensor | None = None,
    recv_weights: torch.Tensor | None = None,
    recv_topk_idx: torch.Tensor | None = None,
    quantise: int = 0,
) -> None:
    """``xd_ep_dispatch``."""
    group.dispatch(
        plan.data_ptr(),
        plan.numel(),
        spec(tokens),
        spec(scales),
        spec(topk_weights),
        spec(recv_tokens),
        spec(recv_scales),
        spec(recv_weights),
        spec(recv_topk_idx),
        quantise,
        current_stream(plan.device),
    )


def combine(
    group: _core.Group,
    plan: torch.Tensor,
    expert_out: torch.Tensor,
    out: torch.Tensor,
    *,
    weights: torch.Tensor | None = None,
) -> None:
    """``xd_ep_combine``."""
    group.combine(
        plan.data_ptr(),
        plan.numel(),
        spec(expert_out),
        spec(weights),
        spec(out),
        current_stream(plan.device),
    )


def dispatch_bwd(
    group: _core.Group,
    plan: torch.Tensor,
    *,
    grad_recv_tokens: torch.Tensor | None = None,
    grad_recv_weights: torch.Tensor | None = None,
    grad_tokens: torch.Tensor | None = None,
    grad_topk_weights: torch.Tensor | None = None,
) -> None:
    """``xd_ep_dispatch_bwd``."""
    group.dispatch_bwd(
        plan.data_ptr(),
        plan.numel(),
        spec(grad_recv_tokens),
        spec(grad_recv_weights),
        spec(grad_tokens),
        spec(grad_topk_weights),
        current_stream(plan.device),
    )


def combine_bwd(
    group: _core.Group,
    plan: torch.Tensor,
    grad_out: torch.Tensor,
    grad_expert_out: torch.Tensor,
    *,
    expert_out: torch.Tensor | None = None,
    weights: torch.Tensor | None = None,
    grad_weights: torch.Tensor | None = None,
) -> None:
    """``xd_ep_combine_bwd``."""
    group.combine_bwd(
        plan.data_ptr(),
        plan.numel(),
        spec(grad_out),
        spec(expert_out),
        spec(weights),
        spec(grad_expert_out),
        spec(grad_weights),
        stream=current_stream(plan.device),
    )


def ll_dispatch(
    group: _core.LowLatencyGroup,
    phase: int,
    *,
    tokens: torch.Tensor | None = None,
    topk_idx: torch.Tensor | None = None,
    topk_weights: torch.Tensor | None = None,
    quantise: int = 0,
    plan: torch.Tensor | None = None,
    recv_tokens: torch.Tensor | None = None,
    recv_scales: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
    source_ranges: torch.Tensor | None = None,
    source_tokens: torch.Tensor | None = None,
    expert_load: torch.Tensor | None = None,
    wait_ns: torch.Tensor | None = None,
) -> None:
    """``xd_ll_dispatch``; `phase` is one of ``constants.PHASES``, and needs its tensors only.

    recv_tokens and recv_scales may have any strides over experts and slots.
    """
    group.dispatch(
        phase,
        spec(tokens),
        spec(topk_idx),
        spec(topk_weights),
        quantise,
        0 if plan is None else plan.data_ptr(),
        0 if plan is None else plan.numel(),
        spec(recv_tokens),
        spec(recv_scales),
        spec(counts),
        spec(source_ranges),
        spec(source_tokens),
        spec(expert_load),
        spec(wait_ns),
        _stream_of(tokens, plan),
    )


def ll_combine(
    group: _core.LowLatencyGroup,
    phase: int,
    plan: torch.Tensor,
    *,
    expert_out: torch.Tensor | None = None,
    topk_weights: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    wait_ns: torch.Tensor | None = None,
) -> None:
    """``xd_ll_combine``. expert_out may have any strides over experts and slots."""
    group.combine(
        phase,
        plan.data_ptr(),
        plan.numel(),
        spec(expert_out),
        spec(topk_weights),
        spec(out),
        spec(wait_ns),
        current_stream(plan.device),
    )


def _stream_of(*tensors: torch.Tensor | None) -> int:
    """The current stream of the device that the first of these tensors lies on."""
    return next(current_stream(tensor.device) for tensor in tensors if tensor is not None)
