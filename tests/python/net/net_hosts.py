"""Two hosts for ranks: network namespaces of this machine where root can make them, else declared.

Declared hosts share no memory (``XD_NET_TEST=apart``) and reach one another over loopback;
``XD_TEST_HOSTS=declared`` asks for them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).parent
_PREFIX = f"xd{os.getpid()}h"  # as tests/net has them, which removes those of dead processes


def _ip(*words: str) -> bool:
    return subprocess.run(("ip", *words), capture_output=True, check=False).returncode == 0


def _make_namespaces() -> bool:
    if os.environ.get("XD_TEST_HOSTS") == "declared":
        return False
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    first, second = _PREFIX + "0", _PREFIX + "1"
    made = _ip("netns", "add", first) and _ip("netns", "add", second)
    made = made and _ip(
        *("link", "add", "eth0", "netns", first, "type", "veth"),
        *("peer", "name", "eth0", "netns", second),
    )
    for number, name in enumerate((first, second), start=1):
        made = made and _ip("-n", name, "addr", "add", f"10.96.0.{number}/24", "dev", "eth0")
        made = made and _ip("-n", name, "link", "set", "eth0", "up")
        made = made and _ip("-n", name, "link", "set", "lo", "up")
    return made


class Hosts:
    """Two hosts, on which processes are started.

    Attributes:
        are_namespaces: whether they are; else they are declared.
        first_address: where the first one is reached.
    """

    def __init__(self, are_namespaces: bool) -> None:
        self.are_namespaces = are_namespaces
        self.first_address = "10.96.0.1" if are_namespaces else "127.0.0.1"

    def start(
        self, host: int, arguments: list[str], settings: Mapping[str, str]
    ) -> subprocess.Popen[str]:
        """Starts a Python program on a host; both of its streams are piped."""
        path = os.pathsep.join(
            [*(str(HERE.parent / part) for part in ("", "torch")), os.environ["PYTHONPATH"]]
        )
        environment = {
            **os.environ,
            "PYTHONPATH": path,
            "XD_JOB_SECRET": "a secret of the test",
            "MASTER_ADDR": self.first_address,
            "GLOO_SOCKET_IFNAME": "eth0" if self.are_namespaces else "lo",  # not the host's name
            **settings,
        }
        command = [sys.executable, *arguments]
        if self.are_namespaces:
            command = ["ip", "netns", "exec", f"{_PREFIX}{host}", *command]
        else:
            environment |= {
                "XD_NET_TEST": "apart",
                "XD_HOST_ID": f"host {host}",
                "XD_NET_IFACE": "127.0.0.1",
            }
        return subprocess.Popen(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )


@contextmanager
def two_hosts() -> Iterator[Hosts]:
    """The hosts, which are removed afterwards."""
    try:
        hosts = Hosts(_make_namespaces())
        print("hosts are", "network namespaces" if hosts.are_namespaces else "declared")
        yield hosts
    finally:
        for host in range(2):
            _ip("netns", "del", f"{_PREFIX}{host}")


def outputs(processes: list[subprocess.Popen[str]], seconds: float) -> list[str]:
    """What the processes have written; fails with all of it unless each ends with 0 in time."""
    texts: list[str] = []
    for process in processes:
        try:
            texts.append(process.communicate(timeout=seconds)[0])
        except subprocess.TimeoutExpired:
            for late in processes:
                late.kill()
            texts.append(process.communicate()[0] + "\nno end in time")
    if any(process.returncode != 0 for process in processes):
        raise AssertionError("\n---\n".join(texts))
    return texts
