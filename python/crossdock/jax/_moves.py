"""Moves experts' weights to the slots where another placement has them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.sharding import PartitionSpec

from crossdock._placed import Choices
from crossdock._placement import Move, Placement, expert_of_slot, placement_moves
from crossdock.errors import Busy, CrossdockError, PeerLost

from ._config import AnyConfig, LowLatencyConfig
from ._group import Place, programs_of
from ._mesh import EpMesh, current_mesh
from ._where import check_split

__all__ = ["move_experts"]

_Weights = TypeVar("_Weights")


def move_experts(
    configs: AnyConfig | Sequence[AnyConfig],
    weights: _Weights,
    placement: Placement | npt.ArrayLike,
    *,
    choices: Choices | None = None,
    mesh: EpMesh | None = None,
) -> _Weights:
    """Makes groups route by another table, and gives the weights that belong to it. Collective.

    Outside of ``jit``, when the programs that were called before have ended. All layers of one
    config have one table: give the weights of all of them in one call. Each slot that gets another
    expert is copied from a slot that holds it, bit for bit; the others keep what they hold. The
    arrays that are given stay as they are, so plans made before still fit them, and both trees are
    in memory until you drop the old one.

    Args:
        configs: one, or several with equal experts, as of prefill and decode, whose tables are
            equal: all change, or none.
        weights: any pytree of arrays ``[E, ...]`` by slot, split over the axes of experts and no
            others, such as experts' parameters together with the moments of these alone. Layers
            that are stacked for ``scan`` have slots first, ``[E, layers, ...]``.
        placement, choices: as of `EpMesh.set_placement`. Every expert that a slot gets is in some
            slot already.
        mesh: from `init`; None = the last one.

    Returns:
        The same tree, with new arrays.

    Raises:
        TypeError, ValueError: weights that do not fit, or lie otherwise on the mesh; a bad table,
            or groups whose tables differ. Mismatch in other processes, and the old table is in
            force. Of a first config that is none, or has no logical experts, others do not hear.
            The mesh as of `EpMesh.set_placement`.
        Mismatch, Busy, PeerLost, Unsupported: as `EpMesh.set_placement`, but the old table is in
            force, as it is behind all that JAX raises here, such as where memory ends: Mismatch in
            other processes then. Processes that wait for weights of this one hear of it when XLA's
            collectives give up; later than `init`'s timeout the communicator is finished. Where a
            rank is lost while the old table is set again, or in the last turn, `EpMesh.placement`
            says which table this process has, and operations raise Mismatch until all have set the
            same one.
    """
    joined = current_mesh() if mesh is None else mesh
    joined.check_sets()
    several = list(configs) if isinstance(configs, Sequence) else [configs]
    if not several:
        raise ValueError("configs: expected one or more, got none")
    old = joined.placement(several[0])
    with _told(joined, several[0]):
        for config in several:
            if not np.array_equal(joined.placement(config), old):
                raise ValueError("configs: expected groups of equal tables, got others")
        new = expert_of_slot("placement", placement)
        routes = _Routes.of(_moves(old, new), *old.shape)
        leaves, tree = _leaves(joined.place, weights, old.size)
        jax.block_until_ready(leaves)
    with _all_or_none(joined, several, old):
        lost = _take_turns(joined, several, new, choices)
        last = min(several, key=_masks)
        with _told(joined, last):
            run = _mover(joined, several[0])
            moved = [jax.block_until_ready(run(*routes, leaf)) for leaf in leaves]
            if _masks(last):
                _meet(joined, last)
            if lost is not None:
                raise lost
        joined.set_placement(last, new, choices=choices)  # all have copied, or all hear of it
    return jax.tree.unflatten(tree, moved)


class _Routes(NamedTuple):
    """The ways of slots, sorted by how many ranks further they go (modulo W).

    Of each distance a rank sends at most one slot in a round, and takes at most one.

    Attributes:
        take: ``[W, W, S]`` by sender, distance and round: which of its slots it sends.
        put: ``[W, W, S]`` by receiver, distance and round: where it puts what comes; S = nowhere.
        rounds: ``[W]`` by distance.
    """

    take: np.ndarray
    put: np.ndarray
    rounds: np.ndarray

    @classmethod
    def of(cls, moves: list[Move], ranks: int, slots: int) -> _Routes:
        """The ways of the moves between so many slots of each rank."""
        take = np.zeros((ranks, ranks, slots), np.int32)
        put = np.full_like(take, slots)
        used = np.zeros((ranks, ranks), np.int32)  # rounds, by sender and distance
        for move in moves:
            sender, source = divmod(move.from_slot, slots)
            receiver, target = divmod(move.to_slot, slots)
            distance = (receiver - sender) % ranks
            number = used[sender, distance]
            take[sender, distance, number] = source
            put[receiver, distance, number] = target
            used[sender, distance] += 1
        return cls(take, put, used.max(axis=0))


def _moves(old: np.ndarray, new: np.ndarray) -> list[Move]:
    moves = placement_moves(old, new)
    for move in moves:
        if move.from_slot < 0:
            raise ValueError(
                f"placement: expected experts that the old one has, got {move.expert} in slot "
                f"{move.to_slot}"
            )
    return moves


def _leaves(place: Place, weights: Any, slots: int) -> tuple[list[jax.Array], Any]:
    """The arrays of a tree, all of which are by slot, and its structure."""
    spec = PartitionSpec(place.axes)
    found, tree = jax.tree_util.tree_flatten_with_path(weights)
    leaves = []
    for path, leaf in found:
        name = f"weights{jax.tree_util.keystr(path)}"
        if isinstance(leaf, jax.core.Tracer):
            raise TypeError(f"{name}: expected an array, as outside of jit, got {leaf}")
        array = jnp.asarray(leaf)
        if isinstance(leaf, np.ndarray) and array.dtype != leaf.dtype:
            raise ValueError(f"{name}: expected a dtype that JAX has here, got {leaf.dtype}")
        if array.ndim < 1 or len(array) != slots:
            raise ValueError(f"{name}: expected [{slots}, ...] by slot, got shape {array.shape}")
        check_split(place, {name: (array, spec)})
        leaves.append(array)
    return leaves, tree


@contextlib.contextmanager
def _told(joined: EpMesh, config: AnyConfig, kinds: type[Exception] = Exception) -> Iterator[None]:
    """Lets peers, which set a table of this config next, hear of a mistake that is made before."""
    try:
        yield
    except kinds as error:
        joined.fail_set_placement(config, f"move_experts: {error}")
        raise


@contextlib.contextmanager
def _all_or_none(joined: EpMesh, configs: list[AnyConfig], old: np.ndarray) -> Iterator[None]:
    """Sets the old tables again if not all groups get the new one, or weights cannot be moved.

    All processes do, as all of them hear of what has failed in one.
    """
    choices = [joined.choices(config) for config in configs]
    try:
        yield
    except Exception:
        for config, before in zip(configs, choices, strict=True):
            same = np.array_equal(joined.placement(config), old)
            if not same or joined.choices(config) is not before:
                with contextlib.suppress(CrossdockError):  # the caller has to hear of the first one
                    joined.set_placement(config, old, choices=before)
        raise


def _take_turns(
    joined: EpMesh, configs: list[AnyConfig], table: np.ndarray, choices: Choices | None
) -> PeerLost | None:
    """Lets groups route by a table; an error after which all do so, of which peers do not hear."""
    lost = None
    for config in configs:
        try:
            with _told(joined, config, Busy):
                joined.set_placement(config, table, choices=choices)
        except PeerLost as error:
            if error.fatal:
                raise
            lost = lost or error
    return lost


def _masks(config: AnyConfig) -> bool:
    """Whether a late rank is left out of the group's turns, which are short then."""
    return isinstance(config, LowLatencyConfig) and config.on_peer_loss == "mask"


def _meet(joined: EpMesh, config: AnyConfig) -> None:
    """Waits for all ranks, by XLA."""
    place = joined.place
    programs = programs_of(joined.described(config))
    if _meet not in programs:
        programs[_meet] = jax.jit(
            jax.shard_map(
                lambda: jax.lax.psum(jax.lax.axis_index(place.axes), place.axes),
                mesh=place.mesh,
                in_specs=(),
                out_specs=PartitionSpec(),
                check_vma=False,
            )
        )
    jax.block_until_ready(programs[_meet]())


def _mover(joined: EpMesh, config: AnyConfig) -> Callable[..., jax.Array]:
    """A compiled function of routes and weights, for routes of every placement."""
    place = joined.place
    programs = programs_of(joined.described(config))
    if _mover not in programs:
        split = PartitionSpec(place.axes)
        programs[_mover] = jax.jit(
            jax.shard_map(
                lambda *given: _moved(place, *given),
                mesh=place.mesh,
                in_specs=(*[PartitionSpec()] * 3, split),
                out_specs=split,
                check_vma=False,
            )
        )
    return programs[_mover]


def _moved(
    place: Place, take: jax.Array, put: jax.Array, rounds: jax.Array, weights: jax.Array
) -> jax.Array:
    """The weights of a rank's slots under the new table."""
    ranks, rank = place.num_ranks, jax.lax.axis_index(place.axes)
    old = moved = _bits(weights)
    for distance in range(ranks):
        ways = [(sender, (sender + distance) % ranks) for sender in range(ranks)]

        def one_round(
            number: jax.Array,
            moved: jax.Array,
            distance: int = distance,
            ways: list[tuple[int, int]] = ways,
        ) -> jax.Array:
            slot = jax.lax.dynamic_index_in_dim(old, take[rank, distance, number], keepdims=False)
            if distance:
                slot = jax.lax.ppermute(slot, place.axes, ways)
            return moved.at[put[rank, distance, number]].set(slot, mode="drop")

        moved = jax.lax.fori_loop(0, rounds[distance], one_round, moved)
    if moved.dtype == weights.dtype:
        return moved
    return jax.lax.bitcast_convert_type(moved, weights.dtype)


def _bits(weights: jax.Array) -> jax.Array:
    """Floating-point numbers as whole ones of their size, which nothing on their way rounds."""
    bits = 8 * weights.dtype.itemsize
    if not jnp.issubdtype(weights.dtype, jnp.floating) or jnp.finfo(weights.dtype).bits != bits:
        return weights
    return jax.lax.bitcast_convert_type(weights, jnp.dtype(f"uint{bits}"))
