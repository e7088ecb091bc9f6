"""The ranks of a mesh: who meets whom, and their groups."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh

from crossdock import _jax
from crossdock._comm import milliseconds
from crossdock._core import constants
from crossdock.errors import from_details, from_status

from ._config import EpConfig
from ._group import EpGroup, Place, forget_programs, remember_programs
from ._masks import mask, mask_set, require_masks, reset
from ._platform import device_pool, meeting_point, register

__all__ = ["EpMesh", "current_mesh", "init"]

_ANY = -1  # the ordinal of a process's only device of a platform

_Value = TypeVar("_Value")

_current: EpMesh | None = None


class EpMesh:
    """The communicators of a mesh, and their groups. Made by `init`.

    Executables keep what they use: after `close`, or when another `init` has taken its place, what
    has been compiled still runs, and the last executable to go frees the group.

    Attributes:
        mesh: as given.
        ep_axes: the axes whose devices exchange tokens.
        num_ranks: W, the devices of one set.
        devices: this process's devices in the mesh.
    """

    def __init__(self, place: Place, ranks: _jax.Ranks, devices: list[jax.Device]) -> None:
        self.mesh = place.mesh
        self.ep_axes = place.ep_axes
        self.num_ranks = place.num_ranks
        self.devices = tuple(devices)
        self._place = place
        self._ranks = ranks
        self._groups: dict[EpConfig, tuple[EpGroup, _jax.Group]] = {}
        self._finalizer = weakref.finalize(self, _leave, self._groups, ranks)

    def group(self, config: EpConfig) -> EpGroup:
        """The group of a config, the same for equal configs. Local."""
        return self._group(config)[0]

    def _group(self, config: EpConfig) -> tuple[EpGroup, _jax.Group]:
        if config not in self._groups:
            sizes = config.sizes(self.num_ranks)
            text = " ".join(f"{name}={value}" for name, value in sizes.items())
            core = _jax.Group(self._ranks, text, **sizes)
            rows, plan_bytes = config.rows(self.num_ranks), config.plan_bytes(self.num_ranks)
            group = EpGroup(core.number, config, self._place, rows, plan_bytes, text)
            self._groups[config] = group, core
            remember_programs(core.number)
        return self._groups[config]

    def create(self, config: EpConfig) -> None:
        """Makes a config's group now, rather than with the first executable that uses it.

        Collective, blocking.

        Raises:
            InvalidArgument: sizes that do not fit (Mismatch on the other ranks).
            Mismatch: sizes differ between ranks.
            OutOfMemory: no memory left here (Mismatch on the others).
        """
        self._group(config)[1].create()

    def status(self, config: EpConfig) -> dict[jax.Device, dict[str, Any]]:
        """Reads and clears the non-fatal error state of this process's ranks; never blocks.

        Returns:
            By device the fields of ``xd_ep_status`` in ``crossdock/ep.h``; nothing before the group
            has been made.
        """
        core = self._group(config)[1]
        return self._by_device(core.status)

    def errors(self, config: EpConfig) -> dict[jax.Device, int]:
        """Counts the operations that have ended with a non-fatal error; any thread, never blocks.

        Returns:
            By device; nothing before the group has been made. Numbers only grow.
        """
        core = self._group(config)[1]
        return self._by_device(core.errors)

    def mask(self, config: EpConfig) -> dict[jax.Device, np.ndarray]:
        """Which ranks the ranks of this process have masked: neither sent to nor waited for.

        For groups with ``on_peer_loss="mask"``, as are the next two. Call these when what was
        called before has ended: see ``jax.block_until_ready``.

        Returns:
            By this process's devices: ``[W]`` int32, 1 = masked.

        Raises:
            ValueError: a group that does not mask.
        """
        require_masks(config)
        return mask(self.group(config))

    def mask_set(self, config: EpConfig, rank: int, masked: bool = True) -> None:
        """Masks or unmasks a rank from the next operation on, as the ranks of this process see it.

        Local; the rank itself does nothing.

        Raises:
            ValueError: no rank, or a group that does not mask.
        """
        require_masks(config)
        mask_set(self.group(config), rank, bool(masked))

    def reset(self, config: EpConfig) -> None:
        """Brings the ranks that are not masked back into step. Collective over those.

        Forgets what is between halves; plans stay good. Needed after a rank has been unmasked on
        both sides.

        Raises:
            ValueError: a group that does not mask.
            jax.errors.JaxRuntimeError: on the CPU: a rank did not come, and is masked now. On a GPU
                see `check`.
        """
        require_masks(config)
        reset(self.group(config))

    def _by_device(self, read: Callable[[int], _Value | None]) -> dict[jax.Device, _Value]:
        """The facts about this process's ranks, by their index."""
        found = {device: read(index) for index, device in enumerate(self.devices)}
        return {device: value for device, value in found.items() if value is not None}

    def check(self) -> None:
        """Raises what operations met since the last look, if anything; never blocks.

        Needed on GPUs, where operations run after their call has returned: call
        ``jax.block_until_ready`` first. On the CPU programs fail by themselves.

        Raises:
            InvalidArgument, Mismatch, CapacityOverflow: and the group stays usable.
            CrossdockError: the communicator is finished; ``fatal`` is True.
        """
        fatal = self._ranks.error()
        if fatal is not None:
            raise from_details({"status": fatal[0], "text": fatal[1], "fatal": True})
        for config in self._groups:
            for status in self.status(config).values():
                if status["status"] != "XD_SUCCESS":
                    raise from_status(status)

    def register_memory(self) -> None:
        """Lets operations on GPUs use XLA's buffers in place, without copies. Collective, blocking.

        Makes the allocation that XLA's allocator carves a device's buffers from part of symmetric
        memory: with the default preallocation that is its whole pool. Memory that it allocates
        beside the pool goes through the groups' memory, as without this call. Where XLA takes its
        pool with ``cudaMalloc`` (it does not with JAX 0.11), a process that ends without `close`
        may take its peers' device contexts with it.

        Raises:
            Unsupported: the memory cannot be shared, as with ``cuda_async`` as allocator, or on the
                CPU.
        """
        ranges = [device_pool(device) for device in self.devices]
        self._ranks.register_memory([start for start, _ in ranges], [size for _, size in ranges])

    def abort(self) -> None:
        """Gives up: ends every wait of this process and finishes its communicators everywhere."""
        self._ranks.abort()

    def close(self) -> None:
        """Leaves, as soon as no executable uses a group any more. Does nothing the second time."""
        global _current
        if _current is self:
            _current = None
        self._finalizer()

    def __repr__(self) -> str:
        axes = ", ".join(self.ep_axes)
        return f"EpMesh({dict(self.mesh.shape)}, {self.num_ranks} ranks along {axes})"


def _leave(groups: dict[EpConfig, tuple[EpGroup, _jax.Group]], ranks: _jax.Ranks) -> None:
    for group, core in groups.values():
        forget_programs(group.number)
        core.close()
    groups.clear()
    ranks.close()


def current_mesh() -> EpMesh:
    """The mesh of the last `init`.

    Raises:
        RuntimeError: there is none.
    """
    if _current is None:
        raise RuntimeError("crossdock.jax.init(mesh, ep_axis) has not been called")
    return _current


def init(
    mesh: Mesh,
    ep_axis: str | Sequence[str],
    *,
    data_axes: str | Sequence[str] = (),
    timeout: float | None = None,
    name: str = "",
) -> EpMesh:
    """Joins the ranks of a mesh. Collective, blocking.

    The devices along `ep_axis` exchange tokens and share the experts; every index of the other axes
    (data, tensor, pipeline) has such a set of its own. A process may hold one device
    (``jax.distributed``) or several. The result serves every `ep_prepare` that names no other.

    Args:
        mesh: devices of one host, CPUs or GPUs. Functions in ``shard_map`` use this mesh, or one
            with the same devices in the same order.
        ep_axis: its axis of experts, or several, the first one counting slowest.
        data_axes: for calls outside ``shard_map``: the axes over which, before `ep_axis`, the first
            dimension of arrays is split.
        timeout: longest wait for a peer, here and in every operation, in seconds; None = the
            environment's ``XD_TIMEOUT_MS``, else 10 minutes.
        name: shown in logs.

    Raises:
        TypeError, ValueError: a bad argument (InvalidArgument).
        Timeout: not all ranks came.
        Unsupported: no such device in this build or on this machine.
    """
    global _current
    if not isinstance(mesh, Mesh):
        raise TypeError(f"mesh: expected a jax.sharding.Mesh, got {type(mesh).__name__}")
    timeout_ms = milliseconds(timeout)
    place = _place(mesh, ep_axis, data_axes)
    platform = mesh.devices.flat[0].platform
    if platform not in ("cpu", "gpu"):
        raise ValueError(f"mesh: expected CPU or GPU devices, got {platform}")
    register(platform)
    devices, seats = _seats(place, timeout_ms)
    if not seats:
        raise ValueError(f"mesh: expected devices of process {jax.process_index()}, got {mesh}")
    device_type = constants.DEVICE_TYPES["cpu" if platform == "cpu" else "cuda"]
    ranks = _jax.Ranks(device_type, seats, timeout_ms, name)
    _current = EpMesh(place, ranks, devices)
    return _current


def _place(mesh: Mesh, ep_axis: str | Sequence[str], data_axes: str | Sequence[str]) -> Place:
    ep_axes = (ep_axis,) if isinstance(ep_axis, str) else tuple(ep_axis)
    data = (data_axes,) if isinstance(data_axes, str) else tuple(data_axes)
    for argument, axes in (("ep_axis", ep_axes), ("data_axes", data)):
        for axis in axes:
            if axis not in mesh.axis_names:
                raise ValueError(f"{argument}: expected axes of {mesh.axis_names}, got {axis!r}")
    if not ep_axes:
        raise ValueError("ep_axis: expected an axis of the mesh, got none")
    batch = data + ep_axes
    if len(set(batch)) != len(batch):
        raise ValueError(f"data_axes: expected axes other than {ep_axes}, each once, got {data}")
    num_ranks = int(np.prod([mesh.shape[axis] for axis in ep_axes]))
    return Place(mesh, ep_axes, batch, num_ranks)


def _seats(
    place: Place, timeout_ms: int
) -> tuple[list[jax.Device], list[tuple[int, int, int, int, bytes]]]:
    """This process's devices, and of each one (ordinal, device, rank, ranks, meeting point)."""
    names = place.mesh.axis_names
    others = [axis for axis in names if axis not in place.ep_axes]
    order = [names.index(axis) for axis in (*others, *place.ep_axes)]
    sets = place.mesh.devices.transpose(order).reshape(-1, place.num_ranks)
    mine = jax.process_index()
    found, seats = [], []
    for devices in sets:
        if all(device.process_index != mine for device in devices):
            continue
        unique_id = meeting_point(devices, timeout_ms)
        for rank, device in enumerate(devices):
            if device.process_index == mine:
                found.append(device)
                seats.append((*_numbers(device), rank, place.num_ranks, unique_id))
    return found, seats


def _numbers(device: jax.Device) -> tuple[int, int]:
    """XLA's number of a device in custom calls, and the device's number in the library."""
    if device.platform == "cpu":
        ordinal, number = device.id, 0
    else:
        ordinal = number = device.local_hardware_id
    return (_ANY if device.client.local_device_count() == 1 else ordinal), number
