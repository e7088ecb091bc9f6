"""Facts about the host that a benchmark's reader and a puzzled user must know."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import pathlib
import platform
import resource
import socket

import crossdock

GIB = 1 << 30


def _first(path: str, start: str = "") -> str:
    """The first line of a file that starts with `start`; empty if there is none."""
    try:
        with open(path, encoding="utf-8", errors="replace") as lines:
            return next((line.strip() for line in lines if line.startswith(start)), "")
    except OSError:
        return ""


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def processor() -> str:
    """Name of the processor and how much of it may be used."""
    name = _first("/proc/cpuinfo", "model name").partition(":")[2].strip()
    system = f"{platform.system()} {platform.release()}"
    return f"{name or platform.machine()}, {cores()} cores, {system}"


def memory() -> str:
    """Memory of the machine, and what the control group leaves of it."""
    values = {}
    for name in ("MemTotal", "MemAvailable"):
        words = _first("/proc/meminfo", name + ":").split()
        values[name] = int(words[1]) << 10 if len(words) > 1 else 0
    text = f"{values['MemTotal'] / GIB:.1f} GiB, {values['MemAvailable'] / GIB:.1f} GiB available"
    limit = _first("/sys/fs/cgroup/memory.max")
    if limit.isdigit():
        text += f"; control group: at most {int(limit) / GIB:.1f} GiB"
    return text


def _limit(kind: int, unit: int, suffix: str) -> str:
    soft = resource.getrlimit(kind)[0]
    return "unlimited" if soft == resource.RLIM_INFINITY else f"{soft // unit}{suffix}"


def locked_memory() -> str:
    """The limit on locked memory, which pinned and registered buffers count against."""
    return _limit(resource.RLIMIT_MEMLOCK, 1 << 10, " KiB")


def open_files() -> str:
    """The limit on open files: each peer takes a few of them."""
    return _limit(resource.RLIMIT_NOFILE, 1, "")


def shared_memory_error() -> str:
    """Why anonymous shared memory cannot be had; empty if it can."""
    try:
        descriptor = os.memfd_create("crossdock-doctor")
    except OSError as error:
        return f"memfd_create: {error.strerror}"
    try:
        os.posix_fallocate(descriptor, 0, 1 << 20)
    except OSError as error:
        return f"allocating 1 MiB of shared memory: {error.strerror}"
    finally:
        os.close(descriptor)
    return ""


def huge_pages() -> str:
    """Whether shared memory may come in huge pages."""
    text = _first("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    chosen = text[text.find("[") + 1 : text.find("]")] if "[" in text else "unknown"
    reserved = _first("/proc/meminfo", "HugePages_Total:").split()
    return f"transparent for shared memory: {chosen}; reserved: {reserved[1] if reserved else '0'}"


def interfaces() -> list[tuple[str, str]]:
    """(name, addresses and speed) of the interfaces that have addresses and reach other hosts."""
    found = []
    for _, name in socket.if_nameindex():
        addresses = [*_ipv4(name), *_ipv6(name)]
        if not addresses or name == "lo":
            continue
        folder = f"/sys/class/net/{name}"
        speed = _first(f"{folder}/speed")
        facts = [*addresses, f"MTU {_first(f'{folder}/mtu') or 'unknown'}"]
        if speed.isdecimal():  # -1 where nobody knows
            facts.append(f"{speed} Mbit/s")
        if _first(f"{folder}/operstate") == "down":
            facts.append("down")
        found.append((name, ", ".join(facts)))
    return found


_SIOCGIFADDR = 0x8915


def _ipv4(name: str) -> list[str]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        request = name.encode().ljust(256, b"\0")
        try:
            return [socket.inet_ntoa(fcntl.ioctl(one, _SIOCGIFADDR, request)[20:24])]
        except OSError:  # it has none
            return []


def _ipv6(name: str) -> list[str]:
    """Without those that hold on one link only."""
    try:
        lines = pathlib.Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:
        return []
    words = [line.split() for line in lines]
    found = [ipaddress.IPv6Address(int(one[0], 16)) for one in words if one[-1] == name]
    return [str(address) for address in found if not address.is_link_local]


def rdma_devices() -> str:
    """The devices of InfiniBand, RoCE and EFA."""
    try:
        return ", ".join(sorted(os.listdir("/sys/class/infiniband"))) or "none"
    except OSError:
        return "none"


def doubts(ranks: int, device: str) -> list[str]:
    """Reasons to doubt what a benchmark measures here."""
    found = []
    if device == "cpu" and ranks > cores():
        found.append(f"{ranks} ranks share {cores()} cores: times include waiting for a core")
    governor = _first("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
    if governor not in ("", "performance"):
        found.append(f"frequency scaling: governor {governor}")
    if " hypervisor" in _first("/proc/cpuinfo", "flags"):
        found.append("virtual machine: clocks and neighbours are unknown")
    load = os.getloadavg()[0]
    if load > 0.5 * cores():
        found.append(f"the machine was busy before: load {load:.2f}")
    return found


def installed_at() -> pathlib.Path:
    """Folder of the package that runs. Links are not followed: the extension lies beside them."""
    return pathlib.Path(crossdock.__file__).absolute().parent
