"""A platform's devices in JAX and XLA: custom calls, the meeting of processes, the pool."""

from __future__ import annotations

import collections
import ctypes
import socket
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from crossdock import _core, _jax
from crossdock.errors import from_details

__all__ = ["device_pool", "meeting_point", "register"]

_registered: set[str] = set()


def register(platform: str) -> None:
    """Registers types and handlers for a platform of JAX, ``"cpu"`` or ``"gpu"``, once.

    Its backend must have been initialised: JAX holds back registrations until then, and would
    replay the handlers before the types that they use.
    """
    xla_platform = {"cpu": "cpu", "gpu": "CUDA", "cuda": "CUDA"}[platform]
    if xla_platform in _registered:
        return
    known = _jax.registrations()[xla_platform]
    for name, type_registration in known["types"].items():
        jax.ffi.register_ffi_type(name, type_registration, platform=xla_platform)
    for name, stages in known["targets"].items():
        jax.ffi.register_ffi_target(name, stages, platform=xla_platform)
    _registered.add(xla_platform)


# By the name of a set, how often its processes have met. Other processes know nothing of that.
_meetings: collections.Counter[str] = collections.Counter()


def meeting_point(devices: np.ndarray, timeout_ms: int) -> bytes:
    """Opened by the process of the first rank, and told to the others. Collective, blocking.

    Args:
        devices: of one set, by rank; some of them this process's.
        timeout_ms: longest wait; 0 = the environment's ``XD_TIMEOUT_MS``, else 10 minutes.

    Raises:
        Timeout: the process of the first rank has not come.
        RuntimeError: there are several processes, and no jax.distributed between them.
    """
    mine, owner = jax.process_index(), devices[0].process_index
    if all(device.process_index == mine for device in devices):
        return _core.unique_id(timeout_ms=timeout_ms)
    tell, wait_for = _key_value_store()
    numbers = ",".join(str(device.id) for device in devices)
    name = f"crossdock/{devices[0].platform}/{numbers}"
    key = f"{name}/{_meetings[name]}"
    if owner == mine:
        unique_id = _core.unique_id(_own_address(), timeout_ms=timeout_ms)
        tell(key, unique_id)
    else:
        limit = timeout_ms or _core.default_timeout_ms()
        try:
            unique_id = wait_for(key, limit)
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
            rank = [device.process_index for device in devices].index(mine)
            text = (
                f"rank {rank} waited {limit} ms in init for rank 0, process "
                f"{owner}, to open the meeting point of devices {numbers}"
            )
            status = {"status": "XD_ERROR_TIMEOUT", "text": text}
            raise from_details(status | {"rank": rank, "peer": 0, "phase": "host"}) from error
    _meetings[name] += 1  # not when a wait was in vain: the next one is for the same meeting
    return unique_id


def _key_value_store() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """(set, blocking get) of jax.distributed, to which JAX has no public way."""
    try:
        from jax._src import distributed

        client = distributed.global_state.client
        if client is not None:
            return client.key_value_set_bytes, client.blocking_key_value_get_bytes
    except (ImportError, AttributeError) as error:
        raise RuntimeError(
            "init: several processes meet through the key-value store of jax.distributed as JAX "
            f"0.10 and 0.11 have it; JAX {jax.__version__} has it elsewhere"
        ) from error
    raise RuntimeError("init: expected jax.distributed to be initialised for several processes")


def _own_address() -> str | None:
    """The address from which this process reaches jax.distributed's coordinator; None = unknown.

    Other processes reach that coordinator as well, so they are likely to reach this address.
    """
    from jax._src import distributed

    host, _, port = (getattr(distributed.global_state, "coordinator_address", "") or "").rpartition(
        ":"
    )
    if not host:
        return None
    place = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
    with socket.socket(place[0], socket.SOCK_DGRAM) as probe:
        probe.connect(place[4])  # sends nothing
        return str(probe.getsockname()[0])


# CUpointer_attribute
_RANGE_START, _RANGE_SIZE = 11, 12


def device_pool(device: jax.Device) -> tuple[int, int]:
    """(address, bytes) of the allocation that XLA carves a device's buffers from; (0, 0) on a CPU.

    Raises:
        RuntimeError: the driver does not know.
    """
    if device.platform == "cpu":
        return 0, 0
    sample = jax.device_put(jnp.zeros(1024), device)
    pointer = jax.block_until_ready(sample).unsafe_buffer_pointer()
    return _attribute(_RANGE_START, pointer), _attribute(_RANGE_SIZE, pointer)


def _attribute(attribute: int, pointer: int) -> int:
    value = ctypes.c_uint64()
    status = ctypes.CDLL("libcuda.so.1").cuPointerGetAttribute(
        ctypes.byref(value), attribute, ctypes.c_uint64(pointer)
    )
    if status != 0:
        raise RuntimeError(f"cuPointerGetAttribute: error {status} for attribute {attribute}")
    return value.value
