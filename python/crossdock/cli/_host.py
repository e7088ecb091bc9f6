"""Facts about the host that a benchmark's reader and a puzzled user must know."""

from __future__ import annotations

import os
import pathlib
import platform
import resource

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
