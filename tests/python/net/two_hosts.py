"""Two hosts for ranks: network namespaces of this machine where root can make them, else declared.

Declared hosts share no memory (``XD_NET_TEST=apart``, of the tests' library) and reach one another
over loopback; ``XD_TEST_HOSTS=declared`` asks for them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import spread

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[2] / "tools"))

import net_hosts  # noqa: E402  (of this tree)


class Hosts:
    """Two hosts, on which processes are started.

    Attributes:
        namespaces: they; None where they are declared.
        first_address: where the first one is reached.
    """

    def __init__(self, namespaces: net_hosts.NetHosts | None) -> None:
        self.namespaces = namespaces
        self.first_address = namespaces.address(0) if namespaces else "127.0.0.1"

    def start(
        self, host: int, arguments: list[str], settings: Mapping[str, str]
    ) -> subprocess.Popen[str]:
        """Starts a Python program on a host; both of its streams are piped."""
        path = os.pathsep.join(
            [
                *(str(HERE.parent / part) for part in ("", "torch", "deep_ep")),
                os.environ["PYTHONPATH"],
            ]
        )
        environment = {
            **os.environ,
            "PYTHONPATH": path,
            "XD_JOB_SECRET": "a secret of the test",
            "MASTER_ADDR": self.first_address,
            "GLOO_SOCKET_IFNAME": "eth0" if self.namespaces else "lo",  # not the host's name
            **settings,
        }
        command = [sys.executable, *arguments]
        if self.namespaces:
            command = self.namespaces.inside(host, command)
        else:
            environment |= spread.environment() | {
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
    declared = os.environ.get("XD_TEST_HOSTS") == "declared"
    why_not = "XD_TEST_HOSTS says so" if declared else net_hosts.why_not()
    if why_not:
        print("hosts are declared:", why_not)
        yield Hosts(None)
    else:
        print("hosts are network namespaces")
        with net_hosts.made(2) as namespaces:
            yield Hosts(namespaces)


def outputs(processes: list[subprocess.Popen[str]], seconds: float) -> list[str]:
    """The texts of the processes; fails with all of them unless each ends with 0 in time."""
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
