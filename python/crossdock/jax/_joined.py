"""The communicators of a mesh, and what is made on them: groups, or contexts of products."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeAlias, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh

from crossdock import _jax
from crossdock._comm_arguments import milliseconds
from crossdock._place import other_numbers, place_name
from crossdock.errors import from_details, from_status

from ._group import Place, forget_programs, remember_programs
from ._platform import device_pool, meeting_point, register

__all__ = ["JoinedMesh", "join"]

_ANY = -1  # the ordinal of a process's only device of a platform

_Core: TypeAlias = "_jax.Group | _jax.LowLatencyGroup | _jax.Context"
_Config = TypeVar("_Config")
_Described = TypeVar("_Described")  # facts that traced functions know of a group
_Value = TypeVar("_Value")


class JoinedMesh(Generic[_Config, _Described]):
    """The communicators of a mesh, and what is made on them, by its config.

    Executables keep what they use: after `close`, or when another call of the same ``init`` has
    taken its place, what has been compiled still runs, and the last executable to go frees it.

    Attributes:
        mesh: as given.
        place: who meets whom, and how arrays lie.
        num_ranks: W, the devices of one set.
        devices: this process's devices in the mesh.
    """

    def __init__(self, place: Place, ranks: _jax.Ranks, devices: list[jax.Device]) -> None:
        self.mesh = place.mesh
        self.num_ranks = place.num_ranks
        self.devices = tuple(devices)
        self.place = place
        self._ranks = ranks
        self._made: dict[_Config, tuple[_Described, _Core]] = {}
        self._finalizer = weakref.finalize(self, _leave, self._made, ranks)

    def _make(self, config: _Config) -> tuple[_Described, _Core]:
        """Local: the ranks meet in its `create`."""
        raise NotImplementedError

    def _of(self, config: _Config) -> tuple[_Described, _Core]:
        """The objects that a config describes, the same for equal configs. Local."""
        if config not in self._made:
            self._made[config] = self._make(config)
            remember_programs(self._made[config][0])
        return self._made[config]

    def create(self, config: _Config) -> None:
        """Makes what a config describes now, rather than with the first executable that uses it.

        Collective, blocking.

        Raises:
            InvalidArgument: sizes that do not fit (Mismatch on the other ranks).
            Mismatch: sizes differ between ranks.
            OutOfMemory: no memory left here (Mismatch on the others).
        """
        self._of(config)[1].create()

    def status(self, config: _Config) -> dict[jax.Device, dict[str, Any]]:
        """Reads and clears the non-fatal error state of this process's ranks; never blocks.

        Returns:
            By device the fields of ``xd_ep_status`` in ``crossdock/ep.h``, ``xd_ll_status`` in
            ``crossdock/low_latency.h``, or ``xd_gemm_status`` in ``crossdock/gemm.h``; nothing
            before the config is in use.
        """
        return self._by_device(self._of(config)[1].status)

    def errors(self, config: _Config) -> dict[jax.Device, int]:
        """Counts the operations that have ended with a non-fatal error; any thread, never blocks.

        Returns:
            By device; nothing before the config is in use. Numbers only grow.
        """
        return self._by_device(self._of(config)[1].errors)

    def _by_device(self, read: Callable[[int], _Value | None]) -> dict[jax.Device, _Value]:
        """The facts about this process's ranks, by their index."""
        found = {device: read(index) for index, device in enumerate(self.devices)}
        return {device: value for device, value in found.items() if value is not None}

    def check(self) -> None:
        """Raises what operations met since the last look, if anything; never blocks.

        Needed on GPUs, where operations run after their call has returned: call
        ``jax.block_until_ready`` first. On the CPU programs fail by themselves.

        Raises:
            InvalidArgument, Mismatch, CapacityOverflow: and the operations stay usable.
            CrossdockError: the communicator is finished; ``fatal`` is True.
        """
        fatal = self._ranks.error()
        if fatal is not None:
            raise from_details({"status": fatal[0], "text": fatal[1], "fatal": True})
        for config in self._made:
            for status in self.status(config).values():
                if status["status"] != "XD_SUCCESS":
                    raise from_status(status)

    def register_memory(self) -> None:
        """Lets operations on GPUs use XLA's buffers in place, without copies. Collective, blocking.

        Makes the allocation that XLA's allocator carves a device's buffers from part of symmetric
        memory: with the default preallocation that is its whole pool. Memory that it allocates
        beside the pool goes through the library's memory, as without this call. Where XLA takes its
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
        """Leaves, as soon as no executable needs it any more. Does nothing the second time."""
        self._finalizer()

    def __repr__(self) -> str:
        axes = ", ".join(self.place.axes)
        name = type(self).__name__
        return f"{name}({dict(self.mesh.shape)}, {self.num_ranks} ranks along {axes})"


def _leave(made: dict[Any, tuple[Any, _Core]], ranks: _jax.Ranks) -> None:
    for described, core in made.values():
        forget_programs(described)
        core.close()
    made.clear()
    ranks.close()


def join(
    init: str,
    mesh: Mesh,
    argument: str,
    axes: str | Sequence[str],
    data_axes: str | Sequence[str],
    timeout: float | None,
    name: str,
) -> tuple[Place, _jax.Ranks, list[jax.Device]]:
    """Joins the devices along `axes`, which the caller has as `argument`. Collective, blocking.

    Args:
        init: the caller's name, for errors.
        mesh, axes, data_axes, timeout, name: as of ``crossdock.jax.init``, which see.

    Returns:
        The parts of a `JoinedMesh`.
    """
    if not isinstance(mesh, Mesh):
        raise TypeError(f"mesh: expected a jax.sharding.Mesh, got {type(mesh).__name__}")
    timeout_ms = milliseconds(timeout)
    place = _place(init, mesh, argument, axes, data_axes)
    platform = mesh.devices.flat[0].platform
    if platform not in ("cpu", "gpu"):
        raise ValueError(f"mesh: expected CPU or GPU devices, got {platform}")
    register(platform)
    devices, rank_infos = _rank_infos(place, timeout_ms, name)
    if not rank_infos:
        raise ValueError(f"mesh: expected devices of process {jax.process_index()}, got {mesh}")
    return place, _jax.Ranks(place.device_type, rank_infos, timeout_ms), devices


def _place(
    init: str,
    mesh: Mesh,
    argument: str,
    given: str | Sequence[str],
    data_axes: str | Sequence[str],
) -> Place:
    axes = (given,) if isinstance(given, str) else tuple(given)
    data = (data_axes,) if isinstance(data_axes, str) else tuple(data_axes)
    for name, named in ((argument, axes), ("data_axes", data)):
        for axis in named:
            if axis not in mesh.axis_names:
                raise ValueError(f"{name}: expected axes of {mesh.axis_names}, got {axis!r}")
    if not axes:
        raise ValueError(f"{argument}: expected an axis of the mesh, got none")
    if len(set(data + axes)) != len(data + axes):
        raise ValueError(f"data_axes: expected axes other than {axes}, each once, got {data}")
    num_ranks = int(np.prod([mesh.shape[axis] for axis in axes]))
    return Place(init, mesh, axes, data, num_ranks)


_RankInfo = tuple[int, int, int, int, bytes, str, list[int]]


def _rank_infos(
    place: Place, timeout_ms: int, name: str
) -> tuple[list[jax.Device], list[_RankInfo]]:
    """This process's devices, and what tells each one its rank, as of ``_jax.Ranks``."""
    names = place.mesh.axis_names
    others = [axis for axis in names if axis not in place.axes]
    order = [names.index(axis) for axis in (*others, *place.axes)]
    sets = place.mesh.devices.transpose(order).reshape(-1, place.num_ranks)
    sizes = [place.mesh.shape[axis] for axis in others]
    mine = jax.process_index()
    found: list[jax.Device] = []
    rank_infos: list[_RankInfo] = []
    for number, devices in enumerate(sets):
        if all(device.process_index != mine for device in devices):
            continue
        indices = np.unravel_index(number, sizes) if sizes else ()
        told = name or place_name(dict(zip(others, map(int, indices))), dict(zip(others, sizes)))
        unique_id = meeting_point(devices, timeout_ms)
        for rank, device in enumerate(devices):
            if device.process_index == mine:
                found.append(device)
                rank_info = (
                    *_numbers(device),
                    rank,
                    place.num_ranks,
                    unique_id,
                    told,
                    _known_as(list(devices)),
                )
                rank_infos.append(rank_info)
    return found, rank_infos


def _known_as(devices: Sequence[jax.Device]) -> list[int]:
    """The numbers by which a program knows the ranks; none where they are the ranks.

    They are indices of processes, or where a process has several of the devices, of devices.
    """
    processes = [device.process_index for device in devices]
    one_each = len(set(processes)) == len(processes)
    return other_numbers(processes if one_each else [device.id for device in devices])


def _numbers(device: jax.Device) -> tuple[int, int]:
    """XLA's number of a device in custom calls, and the device's number in the library."""
    if device.platform == "cpu":
        ordinal, number = device.id, 0
    else:
        ordinal = number = device.local_hardware_id
    return (_ANY if device.client.local_device_count() == 1 else ordinal), number
