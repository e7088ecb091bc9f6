"""Where XLA's memory pool of a device lies."""

from __future__ import annotations

import ctypes

import jax
import jax.numpy as jnp

__all__ = ["device_pool"]

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
