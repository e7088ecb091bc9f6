"""Groups live as long as what uses them, and not longer."""

from __future__ import annotations

import contextlib
import gc
import os
import pathlib
import subprocess
import sys
import textwrap
import time

import jax
import numpy as np
import pytest

import crossdock.jax as xd
from jax_support import ON_GPUS, RANKS, World, equal, everywhere, routing, run, whole

EXPERTS, TOPK, HIDDEN, TOKENS = 8, 2, 16, 11
CONFIG = xd.EpConfig(
    num_experts=EXPERTS, hidden=HIDDEN, max_topk=TOPK, max_tokens_per_rank=TOKENS, dtype=np.float32
)


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
    def trip(ids, x, weights):
        tokens, weights, _, plan = xd.ep_dispatch(xd.ep_prepare(CONFIG, ids), x, weights)
        return xd.ep_combine(plan, tokens, weights)[0]

    return world.on_ranks(trip)


def works(world: World, function, seed: int) -> None:
    ids = routing(seed, TOKENS, EXPERTS, TOPK, "uniform")
    rng = np.random.default_rng(seed)
    x, weights = whole(rng, TOKENS, HIDDEN), whole(rng, TOKENS, TOPK)
    out = function(world.put(ids), world.put(x), world.put(weights))
    sums = [np.where(i < 0, np.float32(0), w).sum(1, keepdims=True) for i, w in zip(ids, weights)]
    equal(world.parts(out), lambda rank: x[rank] * sums[rank])


def free_everything() -> None:
    jax.clear_caches()
    gc.collect()


def again(world: World) -> None:
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
def test_another_init_while_an_executable_lives(where):
    run(where, again)


def many(world: World) -> None:
    def count() -> tuple[int, int, int]:
        # Meetings of earlier tests, to which nobody came, hold a socket each until their time is
        # over, and end during this test.
        return workers(), mappings(), len(os.listdir("/proc/self/fd")) - threads("xd-meeting")

    world.ep.close()
    counts = []
    for seed in range(8):
        other = World()
        function = program(other)
        works(other, function, seed)
        other.ep.close()
        del other, function
        free_everything()
        counts.append(count())
    slack = 3 if ON_GPUS else 0  # the driver has files of its own

    def same() -> bool:
        return all(abs(last - first) <= slack for first, last in zip(counts[1], counts[-1]))

    # A thread that has served a meeting ends by itself, soon after the ranks have met.
    deadline = time.monotonic() + 5
    while not same() and time.monotonic() < deadline:
        time.sleep(0.05)
        counts[-1] = count()
    assert same(), counts


@everywhere
def test_groups_that_are_dropped_leave_nothing(where):
    run(where, many)


def test_operations_outside_of_jit_keep_nothing():
    before = workers()
    world = World()
    ids = np.zeros((RANKS * TOKENS, 1), np.int32)
    x = np.ones((RANKS * TOKENS, HIDDEN), np.float32)
    plan = xd.ep_prepare(CONFIG, ids)
    out, plan = xd.ep_combine(plan, xd.ep_dispatch(plan, x).tokens)
    np.testing.assert_array_equal(np.asarray(out), x)
    assert workers() == before + workers_of(RANKS)
    world.ep.close()
    gc.collect()
    assert workers() == before  # the plan is data


def test_what_is_closed_cannot_be_compiled():
    world = World()
    lowered = program(world).lower(
        *(
            world.put(parts)
            for parts in (
                routing(96, TOKENS, EXPERTS, TOPK, "uniform"),
                whole(np.random.default_rng(96), TOKENS, HIDDEN),
                whole(np.random.default_rng(96), TOKENS, TOPK),
            )
        )
    )
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
        ids = np.arange(RANKS * TOKENS, dtype=np.int32).reshape(-1, 1) % EXPERTS
        x = np.arange(RANKS * TOKENS * HIDDEN, dtype=np.float32).reshape(-1, HIDDEN)
        plan = xd.ep_prepare(CONFIG, ids)
        out, _ = xd.ep_combine(plan, xd.ep_dispatch(plan, x).tokens)
        np.testing.assert_array_equal(np.asarray(out), x)
        # The sets know nothing of each other: each has all experts.
        totals = np.asarray(plan.total).reshape(2, -1).sum(1)
        np.testing.assert_array_equal(totals, 2 * [RANKS // 2 * TOKENS])
    finally:
        ep.close()


EXIT = """
    import sys
    sys.path[:0] = PATHS
    import os
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
    import test_jax_life as tests
    world = tests.World()
    function = tests.program(world)
    tests.works(world, function, 97)
    print("at the end")
"""


def test_a_process_ends_with_everything_alive():
    here = os.path.dirname(__file__)
    script = textwrap.dedent(EXIT).replace("PATHS", repr([here, os.path.dirname(here)]))
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "at the end"), done.stderr


def test_without_the_extension_the_import_says_how_to_get_it():
    script = """if True:
        import sys
        sys.modules["crossdock._jax"] = None
        import crossdock
        try:
            import crossdock.jax
        except ImportError as error:
            print(error)
    """
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    assert "needs the extension crossdock._jax" in done.stdout
    assert "source folder, pip install --no-build-isolation .\n" in done.stdout
