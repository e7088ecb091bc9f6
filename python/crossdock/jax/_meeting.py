"""Where the processes of a set of devices meet, told through jax.distributed's key-value store."""

from __future__ import annotations

import collections
import os
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from crossdock import _core
from crossdock.errors import from_details

__all__ = ["meeting_point"]

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
        unique_id = _core.unique_id(timeout_ms=timeout_ms)
        tell(key, unique_id)
    else:
        limit = timeout_ms or _default_ms()
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


def _default_ms() -> int:
    """The timeout that the library takes for 0 (src/base/env.def)."""
    try:
        limit = int(os.environ["XD_TIMEOUT_MS"])
    except (KeyError, ValueError):
        return 600_000
    return limit if limit > 0 else 600_000


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
