"""Ranks of tests on two hosts, which share no memory and talk over the loopback interface.

The first half of the ranks, rounded up, is on the first host. They are processes of this machine
all the same.
"""

from __future__ import annotations

import os

_VARIABLE = "XD_HOST_ID"  # which no process has where ranks are on one host


def declare(rank: int, num_ranks: int) -> None:
    """Puts this process, which is that rank, on its host. Before the library is used."""
    os.environ["XD_NET_TEST"] = "apart"
    os.environ["XD_NET_IFACE"] = "127.0.0.1"
    os.environ[_VARIABLE] = f"host {_host_of(rank, num_ranks)}"


def hosts(num_ranks: int) -> list[int]:
    """The host of each rank, as this process, a rank, knows it: 0 where ranks are on one."""
    apart = _VARIABLE in os.environ
    return [_host_of(rank, num_ranks) if apart else 0 for rank in range(num_ranks)]


def _host_of(rank: int, num_ranks: int) -> int:
    return 2 * rank // num_ranks
