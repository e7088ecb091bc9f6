"""Hosts that are network namespaces of this machine: made, throttled and removed, as root.

Each has one interface, eth0, at a bridge that is a namespace of its own. Namespaces are named after
the process that has made them; those of processes that are gone are removed.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

__all__ = ["NetHosts", "made", "why_not"]

_OURS = re.compile(r"xdb(\d+)h\d+")


def _run(script: str) -> None:
    done = subprocess.run(["sh", "-e"], input=script, text=True, capture_output=True)
    if done.returncode != 0:
        raise RuntimeError(f"failed: {script}\n{done.stderr}")


def why_not() -> str:
    """The reason why this process can make none; empty if it can."""
    if os.geteuid() != 0:
        return "network namespaces are made by root"
    if shutil.which("ip") is None or shutil.which("tc") is None:
        return "the programs ip and tc are not there (package iproute2)"
    try:
        with made(1) as hosts:
            hosts.throttle(1e9)
    except RuntimeError as error:
        return f"network namespaces cannot be made here: {error}"
    return ""


class NetHosts:
    """Hosts 0 to count - 1."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._prefix = f"xdb{os.getpid()}h"

    def name(self, host: int) -> str:
        """The name of the host's namespace."""
        return f"{self._prefix}{host}"

    def address(self, host: int) -> str:
        """The host's address."""
        return f"10.96.0.{host + 1}"

    def throttle(self, bits_per_second: float | None) -> None:
        """Lets every host send at most that much; None = as much as the machine can."""
        for host in range(self.count):
            tc = f"tc -n {self.name(host)} qdisc"
            if bits_per_second is None:
                _run(f"{tc} del dev eth0 root 2>/dev/null || true")
            else:
                # A bucket's contents are sent at once: a millisecond's worth. A smaller one than
                # two of TCP's segments of 64 KiB would cut them up, which costs much time here.
                burst = max(int(bits_per_second / 8 / 1000), 131072)
                _run(
                    f"{tc} replace dev eth0 root tbf rate {int(bits_per_second)}bit"
                    f" burst {burst} limit 4mb"
                )

    def inside(self, host: int, words: Sequence[str]) -> list[str]:
        """A command line that runs another one on the host, under this machine's name."""
        return ["ip", "netns", "exec", self.name(host), *words]

    def command(self, host: int, words: Sequence[str]) -> list[str]:
        """A command line that runs another one on the host, as a host of its own name."""
        script = f'hostname {self.name(host)} && exec "$@"'
        return self.inside(host, ["unshare", "--uts", "sh", "-c", script, "sh", *words])

    def start(
        self, host: int, words: Sequence[str], env: Mapping[str, str], **options: object
    ) -> subprocess.Popen[str]:
        """Starts a program on the host; options are Popen's."""
        return subprocess.Popen(  # type: ignore[call-overload,no-any-return]
            self.command(host, words), env={**os.environ, **env}, text=True, **options
        )

    def _make(self) -> None:
        bridge = self.name(self.count)
        lines = [
            f"ip netns add {bridge}",
            f"ip -n {bridge} link add bridge type bridge",
            f"ip -n {bridge} link set bridge up",
        ]
        for host in range(self.count):
            name = self.name(host)
            lines += [
                f"ip netns add {name}",
                f"ip link add eth0 netns {name} type veth peer name port{host} netns {bridge}",
                f"ip -n {bridge} link set port{host} master bridge up",
                f"ip -n {name} link set lo up",
                f"ip -n {name} addr add {self.address(host)}/24 dev eth0",
                f"ip -n {name} link set eth0 up",
            ]
        _run("\n".join(lines))

    def _remove(self) -> None:
        _run("\n".join(f"ip netns del {self.name(h)} || true" for h in range(self.count + 1)))


def _remove_leftovers() -> None:
    folder = Path("/run/netns")
    for entry in folder.iterdir() if folder.is_dir() else ():
        ours = _OURS.fullmatch(entry.name)
        if ours and not Path("/proc", ours[1]).exists():
            subprocess.run(["ip", "netns", "del", entry.name], capture_output=True)


@contextlib.contextmanager
def made(count: int) -> Iterator[NetHosts]:
    """Makes hosts, and removes them."""
    _remove_leftovers()
    hosts = NetHosts(count)
    try:
        hosts._make()
        yield hosts
    finally:
        hosts._remove()
