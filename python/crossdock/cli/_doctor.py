"""``crossdock doctor``: what this machine has, what works on it, and what is missing and why."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import pathlib
import platform
import runpy
import time
from collections.abc import Iterable, Iterator
from typing import Any

import crossdock
from crossdock import _core
from crossdock.cli import _console, _gpus, _host, _rank, _report
from crossdock.cli._launch import run_ranks
from crossdock.cli._usage import FAILED, OK, CommandError
from crossdock.cli._workload import Workload

FEATURES = (
    "cpu",
    "cuda",
    "network",
    "gemm",
    "cublasmp",
    "cuda_wire",
    "cuda_placement",
    "cuda_ll_machines",
)
_OLDEST_TORCH = (2, 6)
_OLDEST_JAX = (0, 10)
_TRIAL_SECONDS = 120

Fact = tuple[str, "bool | None", str]


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds ``doctor`` to the commands."""
    parser = commands.add_parser(
        "doctor",
        help="what this machine has, what works, and what is missing and why",
        description="Shows devices, links, versions, limits and features, and lets ranks exchange "
        "a few tokens on every kind of device. Exit code 0: something can run; 1: nothing can.",
    )
    parser.add_argument("--no-trial", action="store_true", help="look only, start no ranks")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="all facts")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Prints the report; OK if some kind of device can run."""
    gpus, why_none = _gpus.find()
    adapters, why_no_adapters = _find_adapters()
    print(f"crossdock {crossdock.__version__} in {_host.installed_at()}")
    told: dict[str, list[Fact]] = {}

    def tell(title: str, facts: Iterable[Fact]) -> None:
        told[title] = list(facts)
        _console.facts(title, told[title])

    tell("Versions", _versions())
    tell("Features", ((name, *feature(name)) for name in FEATURES))
    tell("Host", _host_facts())
    tell("Network", _network_facts(adapters, why_no_adapters))
    tell("GPUs", _gpu_facts(gpus, why_none))
    if arguments.no_trial:
        usable = [name for name in ("cpu", "cuda") if feature(name)[0]]
    else:
        tell("Trial", _trials(_gpus.usable_count(gpus)))
        usable = [name for name, good, _ in told["Trial"] if good]
    if arguments.json:
        _report.write_json(_as_json(told, adapters, usable), arguments.json)
    print(
        f"Crossdock can run here on: {', '.join(usable)}"
        if usable
        else "Nothing can run here: see what is missing above"
    )
    return OK if usable else FAILED


def _as_json(
    told: dict[str, list[Fact]], adapters: list[dict[str, Any]], usable: list[str]
) -> dict[str, Any]:
    """Sections with their facts, where `good` is null for what is neither good nor bad."""
    sections = {
        title.lower(): [{"name": name, "good": good, "text": text} for name, good, text in facts]
        for title, facts in told.items()
    }
    return {"crossdock": crossdock.__version__, **sections, "adapters": adapters, "usable": usable}


def _find_adapters() -> tuple[list[dict[str, Any]], str]:
    """(network adapters and interfaces as libfabric tells of them, why there are none)."""
    try:
        return _core.net_adapters(), ""
    except crossdock.CrossdockError as error:
        return [], error.text


def feature(name: str) -> tuple[bool, str]:
    """(available, what is missing or "available") as the library answers."""
    return crossdock.feature_available(name), crossdock.feature_reason(name)


def _version_of(package: str) -> str:
    """Its version; empty if it is not installed. Imports nothing."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _versions() -> Iterator[Fact]:
    yield "python", None, platform.python_version()
    yield "numpy", True, _version_of("numpy")
    yield _torch_fact()
    yield _jax_fact()
    for package, use in (
        ("ml_dtypes", "bf16 and fp8 in NumPy"),
        ("rich", "progress bars"),
        ("matplotlib", "plots"),
    ):
        version = _version_of(package)
        yield package, bool(version), version or f"not installed: no {use}"


def _torch_fact() -> Fact:
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return "torch", False, "not installed: no crossdock.torch, no crossdock.deep_ep"
    # Importing PyTorch takes seconds; its version file is plain assignments.
    version = runpy.run_path(str(pathlib.Path(spec.submodule_search_locations[0]) / "version.py"))
    text = version["__version__"]
    if _release(text) < _OLDEST_TORCH:
        return "torch", False, f"{text} is too old: crossdock.torch needs 2.6 or later"
    return "torch", True, f"{text}, CUDA {version.get('cuda') or 'not built in: CPU only'}"


def _jax_fact() -> Fact:
    version = _version_of("jax")
    if not version:
        return "jax", False, "not installed: no crossdock.jax"
    if _release(version) < _OLDEST_JAX:
        return "jax", False, f"{version} is too old: crossdock.jax needs 0.10 or later"
    if importlib.util.find_spec("crossdock._jax") is None:
        why = (
            f"{version}, but no crossdock.jax: crossdock was built where there was no jaxlib; in "
            "its source folder, pip install --no-build-isolation . builds it where there is one"
        )
        return "jax", False, why
    return "jax", True, version


def _release(version: str) -> tuple[int, ...]:
    """The first two numbers of a version."""
    return tuple(int(part) for part in version.split(".")[:2])


def _host_facts() -> Iterator[Fact]:
    yield "processor", None, _host.processor()
    yield "memory", None, _host.memory()
    error = _host.shared_memory_error()
    yield "shared mem", not error, error or "anonymous (memfd), so the size of /dev/shm is no limit"
    yield "huge pages", None, _host.huge_pages()
    yield (
        "limits",
        None,
        (f"locked memory {_host.locked_memory()}, open files {_host.open_files()}"),
    )


def _network_facts(adapters: list[dict[str, Any]], why_none: str) -> Iterator[Fact]:
    """The means of ranks on several hosts to meet here, if the feature `network` is available."""
    for name, text in _host.interfaces():
        yield name, None, text
    yield "rdma", None, _host.rdma_devices()
    if feature("network")[0]:
        yield from _adapter_facts(adapters, why_none)
    secret = bool(os.environ.get("XD_JOB_SECRET"))
    yield "job secret", None, "set" if secret else "XD_JOB_SECRET is not set: no ranks on two hosts"
    for variable in ("XD_NET_IFACE", "XD_NET_DEVICE", "FI_PROVIDER"):
        chosen = os.environ.get(variable)
        if chosen:
            yield "chosen", None, f"{variable}={chosen}"
    yield "try it", None, "crossdock net-check, as the ranks of a job"


def _adapter_facts(adapters: list[dict[str, Any]], why_none: str) -> Iterator[Fact]:
    """The adapters that libfabric can use, but for interfaces, of which others tell already."""
    if why_none:
        yield "adapters", False, why_none
        return
    shown = [one for one in adapters if one["cuda_devices"] or not _is_tcp(one)]
    for one in shown:
        yield one["name"], one["is_up"] or None, _adapter(one)
    if not shown and _host.rdma_devices() != "none":
        providers = sorted({one["provider"] for one in adapters})
        yield "adapters", None, f"none of RDMA that libfabric can use: {' '.join(providers)}"


def _is_tcp(adapter: dict[str, Any]) -> bool:
    return str(adapter["provider"]).startswith("tcp")


def _adapter(one: dict[str, Any]) -> str:
    """Its facts, and the devices whose ranks would take it, by CUDA's numbers."""
    facts = [one["provider"]]
    if one["address"]:
        facts.append(one["address"])
    if one["bits_per_second"]:
        facts.append(f"{one['bits_per_second'] / 1e9:g} Gbit/s")
    if one["is_up"] is False:
        facts.append("down")
    if one["numa_node"] >= 0:
        facts.append(f"NUMA node {one['numa_node']}")
    facts.append(one["pci_path"] or "place on PCI buses not known")
    text = ", ".join(facts)
    takers = ", ".join(map(str, one["cuda_devices"]))
    return f"{text}; of CUDA devices {takers}" if takers else text


def _gpu_facts(gpus: list[_gpus.Gpu], why_none: str) -> Iterator[Fact]:
    if not gpus:
        yield "devices", False, why_none
        return
    kinds: dict[str, list[int]] = {}
    for gpu in gpus:
        mig = "" if gpu.mig in ("Disabled", "[N/A]") else f", MIG {gpu.mig}"
        text = (
            f"{gpu.name}, {gpu.memory}, compute capability {gpu.compute_capability}{mig}, "
            f"driver {gpu.driver}"
        )
        kinds.setdefault(text, []).append(gpu.index)
    for text, indices in kinds.items():
        yield _numbers(indices), None, text
    usable = _gpus.usable_count(gpus)
    if usable != len(gpus):
        chosen = os.environ["CUDA_VISIBLE_DEVICES"]
        yield "usable", usable > 0, f"{usable} of them: CUDA_VISIBLE_DEVICES is '{chosen}'"
    yield from _allocator_facts()
    if len(gpus) > 1:
        yield from _pair_facts("links", *_gpus.links())
        yield from _pair_facts("peer access", *_gpus.peer_access(), good="OK")


def _allocator_facts() -> Iterator[Fact]:
    """Settings of torch's allocator beside which rows may be copied once more."""
    for variable in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        settings = os.environ.get(variable, "").replace(" ", "").split(",")
        if "backend:cudaMallocAsync" in settings:
            yield "torch memory", None, f"{variable} has {_ASYNC}"
        elif "expandable_segments:True" in settings:
            yield "torch memory", None, f"{variable} has {_EXPANDABLE}"


_ASYNC = "backend:cudaMallocAsync: rows that crossdock.deep_ep returns are copied once more"
_EXPANDABLE = (
    "expandable_segments:True: no copy is added (torch 2.11, on H200); where torch does not take "
    "symmetric memory, rows that crossdock.deep_ep returns are copied once more, and the log says "
    "so"
)


def _pair_facts(
    name: str, cells: dict[tuple[int, int], str], why_none: str, good: str = ""
) -> Iterator[Fact]:
    """One line if all pairs are alike, else a line per GPU."""
    if not cells:
        yield name, None, why_none or "unknown"
        return
    values = set(cells.values())
    if len(values) == 1:
        value = values.pop()
        yield name, value == good if good else None, f"every pair: {value}"
        return
    for row in sorted({row for row, _ in cells}):
        mine = {column: cell for (source, column), cell in sorted(cells.items()) if source == row}
        state = all(cell == good for cell in mine.values()) if good else None
        yield name, state, f"GPU {row} to " + ", ".join(f"{c}: {v}" for c, v in mine.items())


def _numbers(indices: list[int]) -> str:
    if len(indices) == 1:
        return f"GPU {indices[0]}"
    return (
        f"GPU {indices[0]}-{indices[-1]}"
        if indices[-1] - indices[0] + 1 == len(indices)
        else ("GPU " + ",".join(map(str, indices)))
    )


def _trials(num_gpus: int) -> Iterator[Fact]:
    """Ranks that exchange tokens and check every element, on each kind of device."""
    available, reason = feature("cpu")
    yield _trial("cpu", 2, "numpy") if available else ("cpu", False, reason)
    available, reason = feature("cuda")
    if not available:
        yield "cuda", False, reason
    elif not _torch_fact()[1]:
        yield "cuda", False, "not tried: that takes PyTorch"
    else:
        yield _trial("cuda", max(1, num_gpus), "torch")


def _trial(device: str, ranks: int, through: str) -> Fact:
    workload = Workload(
        ranks=ranks,
        tokens=64,
        hidden=128,
        topk=2,
        experts=4 * ranks,
        layout="expert_major",
        dtype="fp32",
        routing="uniform",
        seed=1,
        device=device,
        through=through,
        iters=1,
        warmup=0,
        timeout=_TRIAL_SECONDS,
    )
    begin = time.monotonic()
    try:
        run_ranks(ranks, _rank.trial, workload, limit=_TRIAL_SECONDS)
    except CommandError as error:
        return device, False, str(error)
    return (
        device,
        True,
        (
            f"{ranks} rank{'s' * (ranks > 1)} exchanged tokens, every element right, "
            f"{time.monotonic() - begin:.1f} s"
        ),
    )
