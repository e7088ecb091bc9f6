"""The ranks of a mesh that exchange tokens, and their groups."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh

from crossdock import _jax
from crossdock._core import constants
from crossdock._membership import of_kind
from crossdock._placed import Choices, Placed, read_table
from crossdock._placement import Placement
from crossdock.errors import CrossdockError, Unsupported

from ._config import AnyConfig, EpConfig, LowLatencyConfig
from ._group import AnyGroup, EpGroup, LowLatencyGroup, Place
from ._joined import JoinedMesh, join
from ._masks import mask, mask_set, require_masks, reset

__all__ = ["EpMesh", "current_mesh", "init"]

_current: EpMesh | None = None


class EpMesh(JoinedMesh[AnyConfig, AnyGroup]):
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
        super().__init__(place, ranks, devices)
        self.ep_axes = place.axes
        self._tables: dict[AnyConfig, _Table] = {}

    def group(self, config: EpConfig) -> EpGroup:
        """The group of a config, the same for equal configs. Local.

        Raises:
            TypeError: it is none of this kind of groups.
        """
        return cast(EpGroup, self._of(of_kind("config", config, EpConfig))[0])

    def low_latency_group(self, config: LowLatencyConfig) -> LowLatencyGroup:
        """The same for `ll_dispatch`."""
        return cast(LowLatencyGroup, self._of(of_kind("config", config, LowLatencyConfig))[0])

    def described(self, config: AnyConfig) -> AnyGroup:
        """The group of a config of either kind. Local."""
        return self._of(config)[0]

    def _make(self, config: AnyConfig) -> tuple[AnyGroup, _jax.Group | _jax.LowLatencyGroup]:
        if config.num_logical_experts and self.place.device_type != constants.DEVICE_TYPES["cpu"]:
            # A change of the table would have to come behind programs on streams of XLA.
            raise Unsupported("config: expected num_logical_experts = 0 in JAX on GPUs")
        sizes = config.sizes(self.num_ranks)
        text = " ".join(f"{name}={value}" for name, value in sizes.items())
        plan_bytes = config.plan_bytes(self.num_ranks)
        if isinstance(config, LowLatencyConfig):
            slots = _jax.LowLatencyGroup(self._ranks, text, **sizes)
            num_slots = config.num_slots(self.num_ranks)
            return (
                LowLatencyGroup(slots.number, config, self.place, num_slots, plan_bytes, text),
                slots,
            )
        core = _jax.Group(self._ranks, text, **sizes)
        rows = config.rows(self.num_ranks)
        return EpGroup(core.number, config, self.place, rows, plan_bytes, text), core

    def set_placement(
        self,
        config: AnyConfig,
        placement: Placement | npt.ArrayLike,
        *,
        choices: Choices | None = None,
    ) -> None:
        """Makes the group of a config with logical experts route by another table. Collective.

        Outside of ``jit``. Programs that have been compiled route by it from their next run on, and
        plans that have been made stay good. Call it when the programs that were called before have
        ended: see ``jax.block_until_ready``. Until the first call expert e is in slot e. All layers
        of the config route by one table.

        Args:
            config: of either kind.
            placement: the expert in each slot, ``[ranks, slots]``, -1 = empty. An expert may have
                no slot: choices of it count as -1, and `status` counts them (unplaced_choices).
            choices: ``choices[s][e]``: the slots that tokens of rank s which choose expert e take
                in turn; None, and for each empty list: those of the own rank, else all.

        Raises:
            TypeError, ValueError, InvalidArgument: a bad table, and Mismatch in other processes;
                Mismatch naming the ranks whose tables differ. The old table is in force then.
            Busy: low latency: a dispatch is between its halves.
            PeerLost: with ``on_peer_loss="mask"``: ranks are lost; the new table is in force.
            Unsupported: on GPUs.
            ValueError: the mesh is of several processes, and has other axes beside the experts',
                whose sets of ranks could take different tables.
        """
        self.check_sets()
        table = self._table(config)
        core: Any = self._of(config)[1]
        try:
            given, slots = read_table(placement, choices, table.sizes)
        except (TypeError, ValueError) as error:
            self.fail_set_placement(config, str(error))
            raise

        def set_placement(*given: Any) -> None:
            try:
                core.set_placement(*given)
            except CrossdockError as error:  # the extension does not tell
                error.fatal = self._ranks.error() is not None
                raise

        table.set(SimpleNamespace(set_placement=set_placement), given, slots, choices)

    def fail_set_placement(self, config: AnyConfig, problem: str) -> None:
        """Takes this process's part in the peers' `set_placement`, which raises Mismatch there."""
        core: Any = self._of(config)[1]
        with contextlib.suppress(CrossdockError):  # it says what the caller knows
            core.fail_set_placement(problem)

    def check_sets(self) -> None:
        """Raises ValueError where sets of ranks could take different tables. Local."""
        others = {
            axis: size
            for axis, size in self.mesh.shape.items()
            if axis not in self.ep_axes and size > 1
        }
        if others and len({device.process_index for device in self.mesh.devices.flat}) > 1:
            raise ValueError(
                f"mesh: expected no axes but {self.ep_axes} where several processes set a "
                f"placement, or one process alone, got {others} too: each of their sets of ranks "
                "could take another table"
            )

    def placement(self, config: AnyConfig) -> np.ndarray:
        """The table in force, as of `set_placement`: ``[ranks, slots]`` int32."""
        placement = self._table(config).placement
        assert placement is not None  # the config has logical experts
        return placement.copy()

    def choices(self, config: AnyConfig) -> Choices | None:
        """The lists in force, as `set_placement` was given them."""
        return self._table(config).choices

    def loads(self, config: EpConfig, *, clear: bool = False) -> dict[jax.Device, np.ndarray]:
        """Counts how often each logical expert was chosen, in all plans so far. Never blocks.

        Choices without a row are not counted: -1, bad ids, experts without a slot. With low latency
        add up `Slots.counts` by the table.

        Args:
            clear: count anew from 0.

        Returns:
            By this process's devices: ``[W, N]`` int64, by the rank of the tokens, equal for all
            devices of a set of ranks behind the same `ep_prepare`; nothing before the config is in
            use.
        """
        ranks, _, experts = self._table(of_kind("config", config, EpConfig)).sizes
        core: Any = self._of(config)[1]
        found = self._by_device(lambda index: core.loads(index, ranks, experts, bool(clear)))
        return {d: np.array(each, np.int64).reshape(ranks, -1) for d, each in found.items()}

    def _table(self, config: AnyConfig) -> _Table:
        if _of_any_kind(config).num_logical_experts == 0:
            raise ValueError(f"config: expected num_logical_experts, got none in {config}")
        self._of(config)  # which refuses sizes that do not fit
        if config not in self._tables:
            sizes = (self.num_ranks, config.num_experts, config.num_logical_experts)
            self._tables[config] = _Table(sizes)
        return self._tables[config]

    def mask(self, config: LowLatencyConfig) -> dict[jax.Device, np.ndarray]:
        """Which ranks the ranks of this process have masked: neither sent to nor waited for.

        For groups with ``on_peer_loss="mask"``, as are the next two. Call these when what was
        called before has ended: see ``jax.block_until_ready``.

        Returns:
            By this process's devices: ``[W]`` int32, 1 = masked.

        Raises:
            TypeError, ValueError: a group that does not mask.
        """
        require_masks(config)
        return mask(self.low_latency_group(config))

    def mask_set(self, config: LowLatencyConfig, rank: int, masked: bool = True) -> None:
        """Masks or unmasks a rank from the next operation on, as the ranks of this process see it.

        Local; the rank itself does nothing.

        Raises:
            TypeError, ValueError: no rank, or a group that does not mask.
        """
        require_masks(config)
        mask_set(self.low_latency_group(config), rank, bool(masked))

    def reset(self, config: LowLatencyConfig) -> None:
        """Brings the ranks that are not masked back into step. Collective over those.

        Forgets what is between halves; plans stay good. Needed after a rank has been unmasked on
        both sides.

        Raises:
            TypeError, ValueError: a group that does not mask.
            jax.errors.JaxRuntimeError: on the CPU: a rank did not come, and is masked now. On a GPU
                see `check`.
        """
        require_masks(config)
        reset(self.low_latency_group(config))

    def close(self) -> None:
        """Leaves, as soon as no executable uses a group any more. Does nothing the second time."""
        global _current
        if _current is self:
            _current = None
        super().close()


def _of_any_kind(config: AnyConfig) -> AnyConfig:
    """The config. Raises TypeError where it is none."""
    if not isinstance(config, (EpConfig, LowLatencyConfig)):
        raise TypeError(f"config: expected one of a group, got {type(config).__name__}")
    return config


class _Table(Placed):
    """The table of one config's group, as this process has set it."""

    def __init__(self, sizes: tuple[int, int, int]) -> None:
        self.sizes = sizes  # ranks, slots of all, logical experts
        self._place_in_order(sizes, None)

    def set(
        self, core: Any, given: tuple[Any, Any], slots: np.ndarray, choices: Choices | None
    ) -> None:
        self._set_table(core, given, slots, choices)


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
        mesh: CPUs, also of several hosts, or GPUs of one. Functions in ``shard_map`` use this mesh,
            or one with the same devices in the same order.
        ep_axis: its axis of experts, or several, the first one counting slowest.
        data_axes: for calls outside ``shard_map``: the axes over which, before `ep_axis`, the first
            dimension of arrays is split.
        timeout: longest wait for a peer, here and in every operation, in seconds; None = the
            environment's ``XD_TIMEOUT_MS``, else 10 minutes.
        name: shown in logs and behind error texts; by default the indices of the other axes, such
            as ``"data=1"``. Where it is not the rank, errors that end waits also tell a rank's
            process index, or where a process has several of the devices the device's id.

    Raises:
        TypeError, ValueError: a bad argument (InvalidArgument).
        Timeout: not all ranks came.
        Unsupported: no such device in this build or on this machine.
    """
    global _current
    joined = join("crossdock.jax.init", mesh, "ep_axis", ep_axis, data_axes, timeout, name)
    _current = EpMesh(*joined)
    return _current
