"""crossdock doctor: what it reports, and what it concludes."""

from __future__ import annotations

import json
import os
import pathlib
import resource
import shutil
import subprocess

import pytest

import crossdock
from commands import process, run, wide_lines
from crossdock.cli import _doctor, _gpus, _host

# The output of nvidia-smi on a host of four GPUs of which the last hangs on the host's bridge only.
QUERY = "".join(f"{gpu}, NVIDIA H200, 143771 MiB, 9.0, Disabled, 580.95.05\n" for gpu in range(4))
TOPOLOGY = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tNV18\tSYS\tPIX\t0-47\t0\t\tN/A
GPU1\tNV18\t X \tNV18\tSYS\tPIX\t0-47\t0\t\tN/A
GPU2\tNV18\tNV18\t X \tSYS\tSYS\t48-95\t1\t\tN/A
GPU3\tSYS\tSYS\tSYS\t X \tSYS\t48-95\t1\t\tN/A
NIC0\tPIX\tPIX\tSYS\tSYS\t X

Legend:

  X    = Self
"""
PEERS = """\
 \tGPU0\tGPU1\tGPU2\tGPU3\t
 GPU0\tX\tOK\tOK\tOK\t
 GPU1\tOK\tX\tOK\tOK\t
 GPU2\tOK\tOK\tX\tOK\t
 GPU3\tOK\tOK\tOK\tX\t

Legend:

  X    = Self
  OK   = Status Ok
"""


@pytest.fixture
def host_with_gpus(tmp_path: pathlib.Path) -> dict[str, str]:
    """An environment whose nvidia-smi tells of four GPUs."""
    for name, text in (("query", QUERY), ("topology", TOPOLOGY), ("peers", PEERS)):
        (tmp_path / name).write_text(text)
    program = tmp_path / "nvidia-smi"
    program.write_text(f"""#!/bin/sh
case "$*" in
  --query-gpu=*) cat {tmp_path}/query ;;
  "topo -m") cat {tmp_path}/topology ;;
  "topo -p2p n") cat {tmp_path}/peers ;;
  *) echo "no such option: $*"; exit 2 ;;
esac
""")
    program.chmod(0o755)
    return {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}


def test_says_what_the_library_says_of_every_feature():
    text = run("doctor", "--no-trial").stdout
    for name in (
        "cpu",
        "cuda",
        "network",
        "gemm",
        "cublasmp",
        "cuda_wire",
        "cuda_placement",
        "cuda_ll_machines",
    ):
        mark = "ok" if crossdock.feature_available(name) else "no"
        line = next(line for line in text.splitlines() if line.split()[:1] == [name])
        assert line.split(maxsplit=2) == [name, mark, crossdock.feature_reason(name)]


@pytest.mark.skipif(shutil.which("ip") is None, reason="ip is not installed")
def test_interfaces_have_the_addresses_that_ip_shows():
    shown = subprocess.run(["ip", "-j", "address"], stdout=subprocess.PIPE, check=True).stdout
    expected = {}
    for one in json.loads(shown):
        addresses = {
            address["local"]
            for address in one["addr_info"]
            if address["scope"] != "link" and not address.get("secondary")
        }
        if addresses and one["ifname"] != "lo":
            expected[one["ifname"]] = addresses | {f"MTU {one['mtu']}"}
    found = {name: set(text.split(", ")) for name, text in _host.interfaces()}
    assert found.keys() == expected.keys()
    assert all(facts <= found[name] for name, facts in expected.items())


def test_tells_what_ranks_on_several_hosts_need():
    text = run("doctor", "--no-trial", environment={"XD_JOB_SECRET": "x", "XD_NET_IFACE": "eth7"})
    assert "job secret      set\n" in text.stdout
    assert "XD_NET_IFACE=eth7" in text.stdout
    text = run("doctor", "--no-trial", environment={"XD_JOB_SECRET": ""})
    assert "XD_JOB_SECRET is not set" in text.stdout


# A host of two GPUs with an adapter each, and an interface, as libfabric could tell of it.
ADAPTERS = [
    {
        "name": "mlx5_0",
        "provider": "verbs;ofi_rxm",
        "address": "10.1.0.1",
        "pci_path": "pci0000:15/0000:15:01.0/0000:16:00.0",
        "bits_per_second": 400_000_000_000,
        "cuda_devices": [0, 1],
        "numa_node": 0,
        "is_up": True,
    },
    {
        "name": "rdmap16s27-rdm",
        "provider": "efa",
        "address": "",
        "pci_path": "",
        "bits_per_second": 0,
        "cuda_devices": [],
        "numa_node": -1,
        "is_up": False,
    },
    {
        "name": "eth0",
        "provider": "tcp",
        "address": "10.0.0.1",
        "pci_path": "",
        "bits_per_second": 0,
        "cuda_devices": [],
        "numa_node": -1,
        "is_up": None,
    },
]


def test_tells_adapters_and_whose_they_are(monkeypatch):
    monkeypatch.setattr(_host, "rdma_devices", lambda: "mlx5_0")
    assert list(_doctor._adapter_facts(ADAPTERS, "")) == [
        (
            "mlx5_0",
            True,
            "verbs;ofi_rxm, 10.1.0.1, 400 Gbit/s, NUMA node 0, "
            "pci0000:15/0000:15:01.0/0000:16:00.0; of CUDA devices 0, 1",
        ),
        ("rdmap16s27-rdm", None, "efa, down, place on PCI buses not known"),
    ]
    assert list(_doctor._adapter_facts(ADAPTERS[2:], "")) == [
        ("adapters", None, "none of RDMA that libfabric can use: tcp")
    ]
    assert list(_doctor._adapter_facts([], "XD_NET_DEVICE = x")) == [
        ("adapters", False, "XD_NET_DEVICE = x")
    ]


@pytest.mark.skipif(not crossdock.feature_available("network"), reason="no libfabric")
def test_json_has_all_facts_and_the_adapters_that_are_here(tmp_path):
    file = tmp_path / "doctor.json"
    ended = run("doctor", "--no-trial", "--json", str(file))
    told = json.loads(file.read_text())
    assert told["crossdock"] == crossdock.__version__ and "cpu" in told["usable"]
    assert [one["name"] for one in told["features"]] == list(_doctor.FEATURES)
    assert all(one["text"] in ended.stdout for one in told["features"])
    by_name = {one["name"]: one for one in told["adapters"]}
    assert by_name["lo"].keys() == ADAPTERS[0].keys()
    assert by_name["lo"]["provider"].startswith("tcp") and by_name["lo"]["cuda_devices"] == []


@pytest.mark.skipif(not crossdock.feature_available("network"), reason="no libfabric")
def test_an_adapter_that_is_none_is_told_with_those_that_are_here():
    ended = process("doctor", "--no-trial", environment={"XD_NET_DEVICE": "eth-9"})
    text = " ".join(ended.stdout.split())
    assert "adapters no xd_net_adapters: XD_NET_DEVICE = eth-9, expected an adapter that" in text
    assert "lo (tcp" in text and "XD_NET_DEVICE=eth-9" in text


NO_EXTENSION = (
    "no crossdock.jax: crossdock was built where there was no jaxlib; in its source folder, "
    "pip install --no-build-isolation . builds it where there is one"
)


@pytest.mark.parametrize(
    "version, has_extension, fact",
    [
        ("", True, (False, "not installed: no crossdock.jax")),
        ("0.9.2", True, (False, "0.9.2 is too old: crossdock.jax needs 0.10 or later")),
        ("0.10.2", False, (False, f"0.10.2, but {NO_EXTENSION}")),
        ("0.10.2", True, (True, "0.10.2")),
    ],
)
def test_jax_is_there_where_crossdock_jax_is(version, has_extension, fact, monkeypatch):
    def find_spec(name: str) -> object:
        assert name == "crossdock._jax"
        return object() if has_extension else None

    monkeypatch.setattr(_doctor, "_version_of", {"jax": version}.get)
    monkeypatch.setattr(_doctor.importlib.util, "find_spec", find_spec)
    assert _doctor._jax_fact() == ("jax", *fact)


def test_ranks_exchange_tokens_on_this_machine():
    ended = run("doctor", environment={"COLUMNS": "80"})
    assert ended.returncode == 0 and wide_lines(ended.stdout) == []
    assert "2 ranks exchanged tokens, every element right" in ended.stdout
    assert "Crossdock can run here on: cpu" in ended.stdout
    assert len(ended.stdout.splitlines()) <= 40  # one screen


def test_exit_code_1_where_nothing_can_run():
    def no_shared_memory() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))

    ended = process("doctor", preexec_fn=no_shared_memory)
    assert ended.returncode == 1
    assert "shared mem  no  allocating 1 MiB of shared memory: File too large" in ended.stdout
    assert "Nothing can run here" in ended.stdout


def test_tells_gpus_their_links_and_peer_access(host_with_gpus):
    text = run("doctor", "--no-trial", environment=host_with_gpus).stdout
    assert "GPU 0-3" in text
    assert "NVIDIA H200, 143771 MiB, compute capability 9.0, driver 580.95.05" in text
    assert "GPU 0 to 1: NV18, 2: NV18, 3: SYS" in text
    assert "GPU 3 to 0: SYS, 1: SYS, 2: SYS" in text
    assert "peer access ok  every pair: OK" in text


@pytest.mark.parametrize(
    "chosen, said",
    [
        ("2,3", "usable      ok  2 of them: CUDA_VISIBLE_DEVICES is '2,3'"),
        ("", "usable      no  0 of them: CUDA_VISIBLE_DEVICES is ''"),
        ("1,-1,2", "usable      ok  1 of them"),
        ("0,1,2,3", None),
    ],
)
def test_counts_the_gpus_that_cuda_shows(host_with_gpus, chosen, said):
    environment = host_with_gpus | {"CUDA_VISIBLE_DEVICES": chosen}
    text = run("doctor", "--no-trial", environment=environment).stdout
    assert (said or "GPU 0-3") in text
    assert ("usable " in text) == bool(said)


@pytest.mark.parametrize(
    "variable, settings, said",
    [
        ("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64, expandable_segments:True", "no copy is"),
        ("PYTORCH_ALLOC_CONF", "expandable_segments:True", "PYTORCH_ALLOC_CONF has expandable_seg"),
        ("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync", "deep_ep returns are copied once"),
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:False", None),
    ],
)
def test_tells_where_torchs_allocator_adds_a_copy(host_with_gpus, variable, settings, said):
    cleared = dict.fromkeys(("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"), "")
    environment = host_with_gpus | cleared | {variable: settings, "COLUMNS": "400"}
    text = run("doctor", "--no-trial", environment=environment).stdout
    assert (said or "GPU 0-3") in text
    assert ("torch memory" in text) == bool(said)


def test_a_broken_nvidia_smi_is_quoted(tmp_path):
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'Failed to initialize NVML: no driver'; exit 9\n")
    program.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    text = run("doctor", "--no-trial", environment={"PATH": path}).stdout
    assert "nvidia-smi: Failed to initialize NVML: no driver" in text


def test_a_matrix_leaves_out_what_is_no_gpu():
    cells = _gpus.parse_matrix(TOPOLOGY)
    assert len(cells) == 4 * 3
    assert cells[0, 3] == "SYS" and cells[2, 1] == "NV18"
