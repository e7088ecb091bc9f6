"""Processes that meet, or do not, and the time that they wait."""

from __future__ import annotations

import functools
import math
import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

import crossdock.jax as xd
from crossdock import _core, _jax, errors
from crossdock.jax import _joined, _platform
from jax_support import RANKS, World, config_of, distributed, on_processes, round_trip, works
from support import Rank, run_ranks

CONFIG = config_of(4)


# ---- Arguments ----------------------------------------------------------------------------------


@pytest.mark.parametrize("timeout", [0, -1, math.inf, math.nan, 2**31 / 1000])
def test_timeouts_that_are_none(timeout):
    mesh = Mesh(np.array(jax.devices()), ("ep",))
    with pytest.raises(ValueError, match=f"timeout: expected seconds above 0, .* got {timeout}"):
        xd.init(mesh, "ep", timeout=timeout)


def test_meshes_and_axes_that_there_are_not():
    for wrong in (None, ("ep",), jax.sharding.AbstractMesh((4,), ("ep",))):
        with pytest.raises(TypeError, match=f"mesh: expected .*Mesh, got {type(wrong).__name__}"):
            xd.init(wrong, "ep")
    mesh = Mesh(np.array(jax.devices()), ("ep",))
    with pytest.raises(ValueError, match=r"ep_axis: expected axes of \('ep',\), got 'experts'"):
        xd.init(mesh, "experts")
    with pytest.raises(ValueError, match="data_axes: expected axes other than"):
        xd.init(mesh, "ep", data_axes="ep")


@pytest.mark.parametrize(("devices", "ordinal"), [(1, -1), (4, 2)])
def test_devices_are_counted_on_their_own_platform(monkeypatch, devices, ordinal):
    """CPUs of a process whose default devices are something else."""
    monkeypatch.setattr(jax, "local_device_count", lambda *_: 5 - devices)
    client = types.SimpleNamespace(local_device_count=lambda: devices)
    cpu = types.SimpleNamespace(platform="cpu", id=2, client=client)
    assert _joined._numbers(cpu) == (ordinal, 0)


# ---- Meetings -----------------------------------------------------------------------------------


@on_processes
def test_init_waits_no_longer_than_its_timeout(world: World) -> None:
    """The first rank does not come in time, then all do."""
    world.ep.close()
    if jax.process_index() > 0:
        start = time.monotonic()
        with pytest.raises(errors.Timeout, match=r"waited 300 ms .* rank 0, process 0") as caught:
            xd.init(world.mesh, "ep", timeout=0.3)
        assert time.monotonic() - start < 5
        error = caught.value
        assert (error.status, error.rank, error.peer, error.phase, error.fatal) == (
            "XD_ERROR_TIMEOUT",
            jax.process_index(),
            0,
            "host",
            False,
        )
    tell, wait_for = _platform._key_value_store()
    tell(f"has waited/{jax.process_index()}", b"")
    for process in range(RANKS):
        wait_for(f"has waited/{process}", 20_000)
    again = World()
    works(again, again.on_ranks(functools.partial(round_trip, CONFIG)), 3, 4)
    again.ep.close()


def some_then_all(me: Rank) -> None:
    distributed(me)
    devices = np.array(jax.devices())
    if me.rank < 2:
        for _ in range(2):
            some = xd.init(Mesh(devices[:2], ("ep",)), "ep", timeout=20)
            some.create(CONFIG)
            some.close()
    everyone = xd.init(Mesh(devices, ("ep",)), "ep", timeout=20)
    assert everyone.num_ranks == 3
    everyone.create(xd.EpConfig(num_experts=9, hidden=16, max_topk=2, max_tokens_per_rank=4))
    everyone.close()


def test_a_mesh_of_all_processes_after_meshes_of_some():
    run_ranks(3, some_then_all, timeout=60, fresh=True)


def test_a_jax_without_the_key_value_store_is_named(monkeypatch):
    monkeypatch.delattr("jax._src.distributed.global_state")
    with pytest.raises(RuntimeError, match=rf"0\.10 and 0\.11 have it; JAX {jax.__version__} has"):
        _platform._key_value_store()


# ---- While others are awaited -------------------------------------------------------------------


def test_status_does_not_wait_for_a_group_that_is_being_made():
    meeting = _core.unique_id()

    def join(rank: int) -> _jax.Ranks:
        return _jax.Ranks(1, [(-1, 0, rank, 2, meeting, "", [])], timeout_ms=5000)

    with ThreadPoolExecutor(2) as pool:  # both are ranks of this process
        ranks = list(pool.map(join, range(2)))
    first, second = (_jax.Group(each, "", **CONFIG.sizes(2)) for each in ranks)
    making = threading.Thread(target=first.create)
    making.start()
    end = time.monotonic() + 0.5
    looked = 0
    while time.monotonic() < end:
        assert first.status(0) is None
        looked += 1
    second.create()  # in time
    making.join()
    assert looked > 10
    assert first.status(0)["status"] == "XD_SUCCESS"
    for each in (first, second, *ranks):
        each.close()
