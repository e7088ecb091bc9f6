"""Runs a case on 4 ranks: processes with a device each, or the devices of one process.

They are parts of the CPU, or as many GPUs as the environment's XD_JAX_GPUS says.

A case is a module-level function ``case(world, *args)``. It is run by every process, knows the
inputs of all ranks, and looks at the results of the ranks that the process has.
"""

from __future__ import annotations

import functools
import os
import pathlib
import subprocess
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

import crossdock.jax as xd
from programs import mapped, place
from support import Rank, as_test, run_ranks
from xla_flags import QUICK_TO_COMPILE

RANKS = int(os.environ.get("XD_JAX_GPUS", 4))
ON_GPUS = "XD_JAX_GPUS" in os.environ
EXPERTS, TOPK, HIDDEN = 8, 3, 16
# The last rank holds no expert, unless it is the only one; the others hold unequally many.
UNEQUAL = tuple(0 if e % 2 else (e // 2) % max(1, RANKS - 1) for e in range(EXPERTS))


class World:
    """All ranks along the axis "ep" of a mesh, as seen by one process."""

    def __init__(self) -> None:
        self.mesh = Mesh(np.array(jax.devices()[:RANKS]), ("ep",))
        self.ep = xd.init(self.mesh, "ep")

    def put(self, parts: list[np.ndarray]) -> jax.Array:
        """The global array of the ranks' parts, one after another."""
        whole = np.concatenate([np.asarray(part) for part in parts])
        return place(self.mesh, whole, PartitionSpec("ep"))

    def parts(self, array: jax.Array) -> dict[int, np.ndarray]:
        """By rank the parts of this process's ranks."""
        devices = list(self.mesh.devices)
        return {
            devices.index(shard.device): np.asarray(shard.data)
            for shard in array.addressable_shards
        }

    def equal(self, array: jax.Array, expected: Callable[[int], np.ndarray]) -> None:
        """The part of each rank of this process is exactly what is expected of it."""
        equal(self.parts(array), expected)

    def on_ranks(self, function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        """A function of one rank's parts as a compiled one of global arrays."""
        return mapped(self.mesh, function, PartitionSpec("ep"), PartitionSpec("ep"), **options)


def run(where: str, case: Callable[..., Any], *args: Any) -> None:
    """Runs the case in one process with several devices, or in processes with one each."""
    if where == "processes":
        run_ranks(RANKS, _process, case, args, timeout=120)
    elif ON_GPUS:  # this process leaves their memory alone
        run_ranks(1, _alone, case, args, timeout=120, among=1)  # not one of jax.distributed
    else:
        _run(case, args)


def ranked(case: Callable[..., None]) -> Callable[..., None]:
    """Makes a test of a case, which has the argument `where` besides the case's."""
    return as_test(case, lambda case, *args, where: run(where, case, *args), own=("where",))


def everywhere(case: Callable[..., None]) -> Callable[..., None]:
    """Makes a test of a case, which runs in processes and on the devices of one."""
    return pytest.mark.parametrize("where", ["devices", "processes"])(ranked(case))


def on_devices(case: Callable[..., None]) -> Callable[..., None]:
    """Makes a test of a case, which runs on the devices of one process."""
    return as_test(case, functools.partial(run, "devices"))


def on_processes(case: Callable[..., None]) -> Callable[..., None]:
    """Makes a test of a case, which runs in processes with a device each."""
    return as_test(case, functools.partial(run, "processes"))


def _run(case: Callable[..., Any], args: tuple[Any, ...]) -> None:
    world = World()
    try:
        case(world, *args)
    finally:
        world.ep.close()
        jax.clear_caches()


def distributed(me: Rank) -> None:
    """Makes this process one of jax.distributed with one device."""
    if not jax.distributed.is_initialized():
        if not ON_GPUS:
            os.environ["XLA_FLAGS"] = QUICK_TO_COMPILE
        jax.distributed.initialize(
            f"127.0.0.1:{os.environ['MASTER_PORT']}",
            me.num_ranks,
            me.rank,
            local_device_ids=[me.rank] if ON_GPUS else None,
        )


def _process(me: Rank, case: Callable[..., Any], args: tuple[Any, ...]) -> None:
    distributed(me)
    _run(case, args)


def _alone(me: Rank, case: Callable[..., Any], args: tuple[Any, ...]) -> None:
    _run(case, args)


def routing(seed: int, tokens: int, experts: int, topk: int, kind: str) -> list[np.ndarray]:
    """Per rank ``[tokens, topk]`` int32 experts: uniform, or skewed to the first ones, with -1s."""
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    liking = np.zeros(experts) if kind == "uniform" else -np.arange(experts) * 0.7
    parts = []
    for _ in range(RANKS):
        scores = liking + rng.gumbel(size=(tokens, experts))
        ids = np.argsort(-scores, axis=1)[:, :topk].astype(np.int32)
        parts.append(np.where(rng.random(ids.shape) < 0.1, np.int32(-1), ids))
    return parts


def whole(rng: np.random.Generator, *shape: int, dtype: Any = np.float32) -> list[np.ndarray]:
    """Per rank small whole numbers, of which sums and products are exact in any order."""
    return [rng.integers(-4, 5, shape).astype(jnp.dtype(dtype)) for _ in range(RANKS)]


def config_of(tokens: int, **options: Any) -> xd.EpConfig:
    """A config of so many tokens on each rank, in float32 unless `options` say otherwise."""
    sizes = {"num_experts": EXPERTS, "hidden": HIDDEN, "max_topk": TOPK, "dtype": np.float32}
    return xd.EpConfig(max_tokens_per_rank=tokens, **sizes | options)


def low_latency_config_of(tokens: int, **options: Any) -> xd.LowLatencyConfig:
    """The same for `ll_dispatch`."""
    sizes = {"num_experts": EXPERTS, "hidden": HIDDEN, "max_topk": TOPK, "dtype": np.float32}
    return xd.LowLatencyConfig(max_tokens_per_rank=tokens, **sizes | options)


def by_expert(numbers: Any, expert_ranks: tuple[int, ...] | None, extra: int = 0) -> np.ndarray:
    """A rank's numbers by expert, int32, as JAX has them: as many as the rank with the most.

    Args:
        extra: behind the last expert's; what follows is like it then, else 0.
    """
    given = np.array(numbers, np.int32)
    ranks = expert_ranks or [e * RANKS // EXPERTS for e in range(EXPERTS)]
    missing = int(np.bincount(ranks).max()) + extra - len(given)
    return np.pad(given, (0, missing), constant_values=given[-1] if extra else 0)


class Batch:
    """Inputs of all ranks; rows and weights are small whole numbers."""

    def __init__(
        self,
        seed: int,
        tokens: int,
        *,
        topk: int = TOPK,
        hidden: int = HIDDEN,
        kind: str = "uniform",
        dtype: Any = np.float32,
    ) -> None:
        rng = np.random.default_rng(seed)
        self.ids = routing(seed, tokens, EXPERTS, topk, kind)
        self.x = whole(rng, tokens, hidden, dtype=dtype)
        self.weights = whole(rng, tokens, topk)

    def on(self, world: World) -> tuple[jax.Array, ...]:
        """Choices, rows and weights as global arrays."""
        return tuple(world.put(parts) for parts in (self.ids, self.x, self.weights))

    def together(self) -> tuple[np.ndarray, ...]:
        """The same, not on any device."""
        return tuple(np.concatenate(parts) for parts in (self.ids, self.x, self.weights))

    def factors(self, rank: int) -> np.ndarray:
        """[T,1] that `round_trip` multiplies rows by: the weights of those choices that are one."""
        kept = np.where(self.ids[rank] < 0, np.float32(0), self.weights[rank])
        return kept.sum(1, keepdims=True)


def round_trip(
    config: xd.EpConfig, ids: Any, x: Any, weights: Any = None, after: Any = None
) -> jax.Array:
    """Rows to experts that leave them as they are, and back."""
    plan = xd.ep_prepare(config, ids, after=after)
    tokens, weights, _, plan = xd.ep_dispatch(plan, x, weights)
    return xd.ep_combine(plan, tokens, weights)[0]


def works(world: World, function: Callable[..., jax.Array], seed: int, tokens: int) -> None:
    """The function, which is a compiled or plain `round_trip`, gives what it should."""
    batch = Batch(seed, tokens)
    out = function(*batch.on(world))
    world.equal(out, lambda rank: batch.x[rank] * batch.factors(rank))


def in_a_process(script: str) -> str:
    """The output of a program that may import tests, in a process of its own; it must succeed."""
    here = pathlib.Path(__file__).parent
    paths = f"import sys; sys.path[:0] = {[str(here), str(here.parent)]}\n"
    ended = subprocess.run(
        [sys.executable, "-c", paths + textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def equal(got: dict[int, np.ndarray], expected: Callable[[int], np.ndarray]) -> None:
    """Every rank's part is exactly what is expected of it."""
    assert got
    for rank, part in got.items():
        wanted = np.asarray(expected(rank))
        assert part.dtype == wanted.dtype
        np.testing.assert_array_equal(
            part.astype(np.float64), wanted.astype(np.float64), err_msg=f"rank {rank}"
        )
