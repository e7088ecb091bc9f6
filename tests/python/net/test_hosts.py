"""Ranks of NumPy, torch and JAX on two hosts: see two_hosts.py."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

from crossdock import launch
from two_hosts import HERE, Hosts, outputs, two_hosts

RANKS = 4  # two on each host
SECONDS = 120


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    """Two hosts, other ones for each test."""
    with two_hosts() as made:
        yield made


def run(hosts: Hosts, program: str) -> str:
    """Runs a program on all ranks; what they have written."""
    settings = {"WORLD_SIZE": str(RANKS), "MASTER_PORT": str(launch.free_port())}
    started = [
        hosts.start(rank // 2, [str(HERE / program)], {**settings, "RANK": str(rank)})
        for rank in range(RANKS)
    ]
    return "".join(outputs(started, SECONDS))


def expect_hosts(text: str) -> None:
    """Each rank has said where it is."""
    for rank in range(RANKS):
        assert f"rank {rank}: host {rank // 2} of 2" in text


def test_numpy(hosts: Hosts) -> None:
    expect_hosts(run(hosts, "numpy_rank.py"))


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
def test_torchrun_with_two_nodes(hosts: Hosts) -> None:
    port = str(launch.free_port())
    started = [
        hosts.start(
            node,
            [
                *("-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2"),
                *("--node-rank", str(node), "--master-addr", hosts.first_address),
                *("--master-port", port, str(HERE / "torch_rank.py")),
            ],
            {},
        )
        for node in range(2)
    ]
    expect_hosts("".join(outputs(started, SECONDS)))


@pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="jax is not installed")
def test_jax_distributed(hosts: Hosts) -> None:
    text = run(hosts, "jax_rank.py")
    assert all(f"rank {rank}: done" in text for rank in range(RANKS))
