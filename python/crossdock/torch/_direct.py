"""Which calls of operators may go to their functions directly, past torch's dispatcher.

The dispatcher takes longer than all that the library does on the host. It serves tools that look at
operators: compilers, tracers, modes, transforms, profilers, autocast, and tensors that are more
than their elements. Without any of them, and without a derivative, it would only call the function.
Torch has no public name for that question. Where its private names are missing, or do not tell what
they are asked, every call goes through the dispatcher.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import profiler as _profiler
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode, has_torch_function
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["FUNCTIONS", "shown", "unobserved", "why_seen"]

# The functions that operators run, by their names and with their arguments, without torch's
# dispatcher. Where no order is wanted, that of prepare, dispatch and combine may be None.
FUNCTIONS: dict[str, Callable[..., Any]] = {}

# The keys that a thread adds to the dispatch keys of its tensors in no mode, no transform and no
# tracer.
_THREAD_KEYS = ("ADInplaceOrView", "BackendSelect")
# The dispatch keys of a tensor that is its elements in memory. Others stand for a subclass, a
# transform's wrapper, or a view of elements that are negated when they are read, for instance.
_TENSOR_KEYS = (
    "CPU",
    "CUDA",
    "ADInplaceOrView",
    "AutogradCPU",
    "AutogradCUDA",
    "AutocastCPU",
    "AutocastCUDA",
)


def _bits(names: tuple[str, ...]) -> int:
    """A set of dispatch keys, in torch's bits."""
    bits: int = 0
    for name in names:
        bits |= torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name)).raw_repr()
    return bits


class _DispatchMode(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


class _FunctionMode(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


def _tell_observers() -> bool:
    """Whether this torch's private names are there and tell observers from their absence."""
    try:
        tensor = torch.empty(0, dtype=torch.float32, device="cpu")
        with _FunctionMode():
            function_mode = has_torch_function((tensor,))
        with _DispatchMode():
            dispatch_mode = _keys_of_thread().raw_repr() & _OTHER_THREAD
        with torch.autocast("cpu", dtype=torch.bfloat16):
            autocast = _autocasts()
        negated = _keys_of(torch._neg_view(tensor)).raw_repr() & _OTHER_TENSOR
        profilers = (_profiles(), _profiler._is_profiler_enabled)
    except (AttributeError, TypeError, RuntimeError):
        return False
    known = all(isinstance(profiler, bool) for profiler in profilers)
    return bool(function_mode and dispatch_mode and autocast and negated and known)


try:
    _OTHER_THREAD, _OTHER_TENSOR = ~_bits(_THREAD_KEYS), ~_bits(_TENSOR_KEYS)
    _keys_of_thread = torch._C._dispatch_tls_local_include_set
    _keys_of = torch._C._dispatch_keys
    _autocasts = torch._C._is_any_autocast_enabled
    _profiles = torch._C._autograd._profiler_enabled
    _num_function_modes = torch._C._len_torch_function_stack
    _function_mode_at = torch._C._get_function_stack_at
    from torch.utils._device import DeviceContext as _DefaultDevice
except (AttributeError, ImportError, TypeError):
    _TRUSTED = False
else:
    _TRUSTED = _tell_observers()


def unobserved(own: Tensor, *tensors: Tensor | None) -> bool:
    """Whether nothing of torch looks at an operator that takes these tensors.

    Derivatives are another matter: see `requires_grad`.

    Args:
        own: one that the library has made, so it is its elements unless it is of another type.
    """
    if (
        not _TRUSTED
        or torch.compiler.is_compiling()
        or type(own) is not Tensor
        or _keys_of_thread().raw_repr() & _OTHER_THREAD
        or has_torch_function(tensors)
        or _autocasts()
        # The first knows of this thread only, the second of torch.profiler only.
        or _profiles()
        or _profiler._is_profiler_enabled
    ):
        return False
    for tensor in tensors:
        if tensor is not None and _keys_of(tensor).raw_repr() & _OTHER_TENSOR:
            return False
    return True


def why_seen(**tensors: Tensor | None) -> str | None:
    """Why a call with `part`, `num_sms` or `out` must not take these tensors here; None = it may.

    No operator stands for such a call, so it has no other way than the function. Autocast, torch's
    default device and profilers change nothing that the function does; see `shown` for the last.
    Modes are found where torch's private names are there.
    """
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if type(tensor) not in (Tensor, Parameter):
            got = f"a {type(tensor).__name__}"
        elif tensor.is_neg() or tensor.is_conj():
            got = "a negated or conjugated view, see torch.Tensor.resolve_neg"
        elif _TRUSTED and _keys_of(tensor).raw_repr() & _OTHER_TENSOR:
            got = f"one of torch's {_keys_of(tensor)}"
        else:
            continue
        return f"{name}: expected a torch.Tensor that is its elements in memory, got {got}"
    if _TRUSTED and (_keys_of_thread().raw_repr() & _OTHER_THREAD or _has_function_mode()):
        where = "modes, tracers and transforms of torch, which would miss the call"
        return f"part, num_sms, out: expected none in {where}"
    return None


def _has_function_mode() -> bool:
    """Whether a function mode is on; torch's default device is one that does not count."""
    modes = map(_function_mode_at, range(_num_function_modes()))
    return any(not isinstance(mode, _DefaultDevice) for mode in modes)


def shown(name: str) -> contextlib.AbstractContextManager[object]:
    """Shows a call that is no operator to torch's profilers, under the name of an operator."""
    if _TRUSTED and not (_profiles() or _profiler._is_profiler_enabled):
        return contextlib.nullcontext()
    return torch.profiler.record_function(name)
