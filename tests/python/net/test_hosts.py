"""Ranks of the command, torch and JAX on two hosts: see two_hosts.py."""

from __future__ import annotations

import importlib.util
import re
import subprocess
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


def check(
    hosts: Hosts, rank: int, port: int, timeout: str = "60", **settings: str
) -> subprocess.Popen[str]:
    """A rank of `crossdock net-check`."""
    return hosts.start(
        rank // 2,
        [*("-m", "crossdock.cli", "net-check"), *("--tokens", "40", "--timeout", timeout)],
        {"WORLD_SIZE": str(RANKS), "MASTER_PORT": str(port), "RANK": str(rank), **settings},
    )


def test_net_check(hosts: Hosts) -> None:
    port = launch.free_port()
    text, *others = outputs([check(hosts, rank, port) for rank in range(RANKS)], SECONDS)
    assert text.startswith("meeting    ok  4 ranks on 2 hosts\nconnecting ok\n")
    for tokens in (8, 40):
        assert f"{tokens:4} tokens ok  out and back, every element right\n" in text
    # Rows of 7168 fp16 with what goes with them, to the one other host; each token at most once.
    sent = [float(mb) for mb in re.findall(r"sends other hosts (\S+) MB", text)]
    assert len(sent) == 4
    for mb, tokens in zip(sent, (8, 8, 40, 40)):
        assert tokens / 2 < mb / 14400e-6 < tokens + 1
    assert others == [""] * (RANKS - 1)


def test_net_check_tells_what_failed_on_each_rank(hosts: Hosts) -> None:
    port = launch.free_port()
    secrets = ["one", "one", "another", "another"]
    ranks = [check(hosts, r, port, "5", XD_JOB_SECRET=secrets[r]) for r in range(RANKS)]
    texts = [rank.communicate(timeout=SECONDS)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [1] * RANKS
    for rank, text in enumerate(texts):
        told = text.splitlines()[-1]  # warnings come before
        assert told.startswith(f"crossdock: rank {rank}: meeting: ")
        assert "secret" in told.lower()


def needs(package: str) -> pytest.MarkDecorator:
    missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(missing, reason=f"{package} is not installed")


@needs("torch")
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
            {"XD_HOST_ID": f"host {node}"},
        )
        for node in range(2)
    ]
    text = "".join(outputs(started, SECONDS))
    for rank in range(RANKS):
        assert f"rank {rank}: host {rank // 2} of 2" in text
        assert f"rank {rank}: a Buffer on host {rank // 2} of 2" in text


@needs("jax")
def test_jax_distributed(hosts: Hosts) -> None:
    text = run(hosts, "jax_rank.py")
    assert all(f"rank {rank}: done" in text for rank in range(RANKS))
