"""Groups live as long as what uses them, and not longer."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import pathlib
import time

import jax
import numpy as np
import pytest

import crossdock.jax as xd
import jax_support
from jax_support import (
    ON_GPUS,
    RANKS,
    Batch,
    World,
    config_of,
    everywhere,
    in_a_process,
    round_trip,
)

TOKENS = 11
LIVES = 6
CONFIG = config_of(TOKENS)


def threads(name: str) -> int:
    """Threads of this process that have this name."""
    found = 0
    for file in pathlib.Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(OSError):  # it has just ended
            found += file.read_text() == f"{name}\n"
    return found


def workers() -> int:
    """Threads that run operations in this process: see `workers_of`."""
    return threads("crossdock-jax")


def workers_of(ranks: int) -> int:
    """Worker threads of a group of ranks of this process, while it lives: GPUs have streams."""
    return 0 if ON_GPUS else ranks


def mappings() -> int:
    """Pieces of memory shared with other ranks that this process has mapped."""
    maps = pathlib.Path("/proc/self/maps").read_text()
    return sum("memfd:" in line or "/dev/shm" in line for line in maps.splitlines())


def program(world: World):
    return world.on_ranks(functools.partial(round_trip, CONFIG))


works = functools.partial(jax_support.works, tokens=TOKENS)


def free_everything() -> None:
    jax.clear_caches()
    gc.collect()


@everywhere
def test_another_init_while_an_executable_lives(world: World) -> None:
    """The old executable keeps its group, the new one has another, both run in turn."""
    before = workers()
    ranks = workers_of(len(world.ep.devices))
    old = program(world)
    works(world, old, 91)
    old_number = world.ep.group(CONFIG).number
    assert workers() == before + ranks
    successor = World()
    assert successor.ep.group(CONFIG).number != old_number
    new = program(successor)
    for seed in (92, 93):
        works(successor, new, seed)
        works(world, old, seed)
    assert workers() == before + 2 * ranks

    world.ep.close()  # the executable still holds the group
    works(world, old, 94)
    assert workers() == before + 2 * ranks
    del old
    free_everything()
    assert workers() == before + ranks
    works(successor, new, 95)

    successor.ep.close()
    del new, successor
    free_everything()
    assert workers() == before


@everywhere
def test_groups_that_are_dropped_leave_nothing(world: World) -> None:
    def count() -> tuple[int, int, int]:
        # Meetings of earlier tests, to which nobody came, hold a socket each until their time is
        # over, and end during this test.
        return workers(), mappings(), len(os.listdir("/proc/self/fd")) - threads("xd-meeting")

    world.ep.close()
    counts = []
    for seed in range(LIVES):
        other = World()
        function = program(other)
        works(other, function, seed)
        other.ep.close()
        del other, function
        free_everything()
        counts.append(count())

    def grown() -> bool:
        """By one a life at least; less is others' files, such as those of JAX's own service."""
        return any(last - first >= LIVES - 2 for first, last in zip(counts[1], counts[-1]))

    # A thread that has served a meeting ends by itself, soon after the ranks have met.
    deadline = time.monotonic() + 5
    while grown() and time.monotonic() < deadline:
        time.sleep(0.05)
        counts[-1] = count()
    assert not grown(), counts


def test_operations_outside_of_jit_keep_nothing():
    before = workers()
    world = World()
    ids, x, _ = Batch(98, TOKENS).together()
    plan = xd.ep_prepare(CONFIG, ids)
    out, plan = xd.ep_combine(plan, xd.ep_dispatch(plan, x).tokens)
    np.testing.assert_array_equal(np.asarray(out), x * (ids >= 0).sum(1, keepdims=True))
    assert workers() == before + workers_of(RANKS)
    world.ep.close()
    gc.collect()
    assert workers() == before  # the plan is data


def test_what_is_closed_cannot_be_compiled():
    world = World()
    lowered = program(world).lower(*Batch(96, TOKENS).on(world))
    world.ep.close()
    with pytest.raises(jax.errors.JaxRuntimeError, match="INVALID_ARGUMENT.*is closed"):
        lowered.compile()


def test_another_mesh_takes_over():
    """Two sets of ranks after one of them all."""
    World()
    devices = jax.devices()[:RANKS]
    mesh = jax.sharding.Mesh(np.array(devices).reshape(2, -1), ("data", "ep"))
    ep = xd.init(mesh, "ep", data_axes="data")
    try:
        assert (ep.num_ranks, ep.devices) == (RANKS // 2, tuple(devices))
        ids, x, _ = Batch(99, TOKENS).together()
        plan = xd.ep_prepare(CONFIG, ids)
        out, _ = xd.ep_combine(plan, xd.ep_dispatch(plan, x).tokens)
        np.testing.assert_array_equal(np.asarray(out), x * (ids >= 0).sum(1, keepdims=True))
        # The sets know nothing of each other: each has all experts.
        totals = np.asarray(plan.total).reshape(2, -1).sum(1)
        np.testing.assert_array_equal(totals, (ids.reshape(2, -1) >= 0).sum(1))
    finally:
        ep.close()


EXIT = """
    import os
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
    import test_jax_life as tests
    world = tests.World()
    function = tests.program(world)
    tests.works(world, function, 97)
    print("at the end")
"""


def test_a_process_ends_with_everything_alive():
    assert in_a_process(EXIT).endswith("at the end\n")


NO_EXTENSION = """
    import sys
    sys.modules["crossdock._jax"] = None
    import crossdock
    try:
        import crossdock.jax
    except ImportError as error:
        print(error)
"""


def test_without_the_extension_the_import_says_how_to_get_it():
    said = in_a_process(NO_EXTENSION)
    assert "needs the extension crossdock._jax" in said
    assert "source folder, pip install --no-build-isolation .\n" in said
