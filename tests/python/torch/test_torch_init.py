"""Communicators from torch.distributed, from torchrun's environment, and of one rank."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

import crossdock.torch as xd
from crossdock import launch
from crossdock.errors import InvalidArgument, Mismatch, PeerLost
from crossdock.torch import _comm
from crossdock.torch.tp._groups import comm_of_group
from support import Rank, on_ranks
from torch_support import Batch, assert_equal, distributed, layer, ragged

SEED = 8


def _round_trip(rank: int, comm: xd.Comm, batch: Batch) -> None:
    topk_idx, x, weights, _ = batch.local(rank)
    out = layer(batch.group(comm=comm).prepare(topk_idx), x, weights)
    assert_equal("out", out, batch.expected(rank)[0])


@on_ranks(4)
def test_process_groups(me: Rank) -> None:
    with distributed():
        with xd.init(timeout=timedelta(seconds=30)) as comm:
            assert (comm.rank, comm.num_ranks) == (me.rank, 4)
            assert comm.process_group is dist.group.WORLD
            assert comm.core.timeout_ms == 30000
            _round_trip(me.rank, comm, Batch(SEED, ragged(me)))
            # A group of some ranks, in another order than the world's: numbers are the group's.
            odd = dist.new_group([3, 1])
            if me.rank in (1, 3):
                with xd.init(odd) as part:
                    assert part.num_ranks == 2
                    assert part.rank == dist.get_rank(odd)
                    _round_trip(part.rank, part, Batch(SEED + 1, ((5, 3), 8, 3, 32)))
            comm.barrier()


@on_ranks(4)
def test_errors_name_the_place_in_the_mesh_and_global_ranks(me: Rank) -> None:
    with distributed():
        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "expert"))
        said = {
            0: r"rank 1 has left.*\[rank 0 of 2 in 'data=0'\]$",
            2: r"rank 1 \(global rank 3\) has left.*"
            r"\[rank 0 of 2 \(global rank 2\) in 'data=1'\]$",
        }
        with xd.init(mesh["expert"], timeout=30) as comm:
            if comm.rank == 0:
                with pytest.raises(PeerLost, match=said[me.rank]):
                    comm.barrier()
        with xd.init(mesh["expert"], name="mine", timeout=30) as named:
            if named.rank == 0:
                with pytest.raises(PeerLost, match="in 'mine'"):
                    named.barrier()
        dist.barrier()


@pytest.mark.parametrize("error", [None, {"status": "XD_ERROR_PEER_LOST"}])
def test_exit_waits_for_the_device_unless_the_communicator_is_finished(
    monkeypatch: pytest.MonkeyPatch, error: dict[str, str] | None
) -> None:
    """Others' kernels may wait there for a rank that was lost, and never end."""
    device = SimpleNamespace(type="cuda")
    comm = SimpleNamespace(device=device, core=SimpleNamespace(error=lambda: error))
    waits: list[SimpleNamespace] = []
    monkeypatch.setattr(_comm, "open_comms", lambda: [comm])
    monkeypatch.setattr("torch.cuda.synchronize", waits.append)
    _comm._finish_work()
    assert waits == ([device] if error is None else [])


def _threads_of_gloo() -> list[str]:
    names = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    return [name for name in names if "gloo" in name]


def _keep_no_destroyed_group(me: Rank, meeting: Path) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=me.rank, world_size=me.num_ranks
    )
    comm = xd.init()
    comm.replicas = dist.new_group()
    comm.barrier()
    dist.barrier()
    assert _threads_of_gloo() != []
    dist.destroy_process_group()
    assert _threads_of_gloo() == []
    for read in (lambda: comm.process_group, lambda: comm.replicas):
        with pytest.raises(RuntimeError, match="expected a process group, got one that has been"):
            read()
    comm.replicas = None
    assert comm.replicas is None
    comm.close()


def _have_communicators_of_their_own(me: Rank, meetings: list[Path]) -> None:
    kept, comms = [], []
    for meeting in meetings:
        dist.init_process_group(
            "gloo", init_method=f"file://{meeting}", rank=me.rank, world_size=me.num_ranks
        )
        if me.rank == 0:
            kept.append(dist.group.WORLD)
        comms.append(comm_of_group(None))
        assert comm_of_group(None) is comms[-1]
        comms[-1].barrier()
        comms[-1].replicas = dist.init_device_mesh("cpu", (me.num_ranks,))
        assert comms[-1].replicas is dist.group.WORLD
        dist.destroy_process_group()
    assert comms[0] is not comms[1]


def _interrupt_a_meeting(me: Rank) -> None:
    dist.init_process_group("gloo")
    if me.rank == 0:
        return  # and does not come
    # A shell has jobs in the background ignore it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    since = time.monotonic()
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        xd.init(timeout=60)
    assert time.monotonic() - since < 3


@on_ranks(2, fresh=True)
def test_process_groups_that_end_leave_nothing_and_ctrl_c_ends_a_meeting(
    me: Rank, tmp_path: Path
) -> None:
    """Communicators keep no destroyed group, and groups of one name have each their own."""
    _keep_no_destroyed_group(me, tmp_path / "destroyed")
    _have_communicators_of_their_own(me, [tmp_path / "first", tmp_path / "second"])
    _interrupt_a_meeting(me)


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Python with these arguments, in a process of its own."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(
        [sys.executable, *arguments], env=env, capture_output=True, text=True, timeout=120
    )


# Callbacks at exit run in the opposite order, so this one comes after crossdock's.
PROGRAM = """
import atexit, os, pathlib

@atexit.register
def show():
    tasks = pathlib.Path("/proc/self/task").iterdir()
    names = sorted((task / "comm").read_text().strip() for task in tasks)
    os.write(1, f"at exit: {[name for name in names if 'gloo' in name]}\\n".encode())

import torch, torch.distributed as dist, crossdock.torch as xd

with xd.init() as comm:
    group = xd.EpGroup(
        num_experts=4, hidden=32, max_topk=2, max_tokens_per_rank=8, dtype=torch.float32
    )
    plan = group.prepare(torch.tensor([[0, 3], [1, 2]]))
    x = torch.full((2, 32), float(comm.rank + 1))
    out = xd.combine(plan, xd.dispatch(plan, x).tokens)
    # In one piece: the ranks write to the same pipe.
    os.write(1, f"rank {comm.rank} of {comm.num_ranks} has {out.unique().tolist()}\\n".encode())

dist.init_process_group("gloo")
xd.init()
layer = xd.MoELayer(8, ffn=8, num_experts=4, topk=2, max_tokens_per_rank=4)
optimizer = torch.optim.AdamW(layer.parameters())
layer(torch.ones(4, 8)).hidden.sum().backward()
xd.average_gradients(layer)
optimizer.step()
dist.destroy_process_group()
"""


def test_torchrun_starts_it_and_no_destroyed_process_group_lives_beyond_the_exit(tmp_path):
    # A thread of gloo that lives on may want the interpreter's lock when there is no interpreter
    # any more, which ends the process by SIGABRT.
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    ended = _run(
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        f"--master-port={launch.free_port()}",
        str(program),
    )
    assert ended.returncode == 0, ended.stderr
    assert sorted(ended.stdout.splitlines()) == [
        *["at exit: []"] * 2,
        "rank 0 of 2 has [2.0]",
        "rank 1 of 2 has [4.0]",
    ]


@on_ranks(2)
def test_environment_without_torch_distributed(me: Rank) -> None:
    with xd.init(timeout=20.5) as comm:
        assert (comm.rank, comm.num_ranks) == (me.rank, 2)
        assert comm.process_group is None
        assert comm.core.timeout_ms == 20500
        _round_trip(me.rank, comm, Batch(SEED + 2, ((5, 3), 8, 3, 32)))


def test_small_groups_after_many_large_ones():
    """Memory is provided ahead for groups of the present size: smaller ones then need no more."""
    with xd.init() as comm:
        grown = []
        for num_bytes in [1 << 16] * 34 + [4096] * 8:
            before = comm.core.mem_info()["total_bytes"]
            comm.provide(num_bytes)
            grown.append(comm.core.mem_info()["total_bytes"] - before)
        assert all(grown[:34])
        assert not any(grown[34:])


@pytest.mark.parametrize("value", [-1, "1M", 2**63])
def test_heap_of_no_size(value):
    with pytest.raises((TypeError, ValueError), match="heap_bytes: expected .*got"):
        xd.init(heap_bytes=value)


@on_ranks(2)
def test_heap_of_no_size_is_told_to_the_others(me: Rank) -> None:
    bad = me.rank == 1
    kind, words = (ValueError, "heap_bytes: expected") if bad else (Mismatch, "rank 1")
    with pytest.raises(kind, match=words):
        xd.init(heap_bytes=-1 if bad else 1 << 16)
    with xd.init(heap_bytes=1 << 16) as comm:
        comm.barrier()


def test_the_name_of_a_host_reaches_the_communicator():
    with pytest.raises(InvalidArgument, match="config.host = 'h+' of 64 bytes"):
        xd.init(device="cpu", host="h" * 64)
    xd.init(device="cpu", host="east").close()


def test_what_the_network_needs_reaches_the_communicator():
    with pytest.raises(
        InvalidArgument, match=r"config\.silence_ms = 7, expected -1, 0 or at least"
    ):
        xd.init(device="cpu", silence_ms=7)
    xd.init(device="cpu", net_interface="eth0", silence_ms=-1).close()  # one machine


LAUNCHERS = {
    "Open MPI": {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"},
    "MPICH": {"PMI_SIZE": "4", "PMI_RANK": "3"},
    "PMIx": {"PMIX_RANK": "1"},
    "srun": {"SLURM_NTASKS": "2", "SLURM_PROCID": "1"},
    "srun's first": {"SLURM_NTASKS": "2", "SLURM_PROCID": "0", "SLURM_STEP_ID": "0"},
    "part of srun": {
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_NTASKS": "8",
        "SLURM_PROCID": "0",
        "SLURM_STEP_ID": "3",
    },
}
ALONE = {
    "an allocation's shell": {"SLURM_NTASKS": "2"},
    "an interactive step": {
        "SLURM_NTASKS": "2",
        "SLURM_STEP_NUM_TASKS": "1",
        "SLURM_PROCID": "0",
        "SLURM_STEP_ID": "4294967290",
    },
    "a batch script": {"SLURM_NTASKS": "2", "SLURM_PROCID": "0"},
    "mpirun -n 1": {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"},
}


def _launched(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]) -> None:
    """As a process finds itself that was not started by torchrun."""
    for name in list(os.environ):
        if name.startswith(("OMPI_", "PMI", "SLURM_", "MV2_")) or name in ("RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_ranks_of_another_launcher_are_never_communicators_of_one(launcher, monkeypatch):
    _launched(monkeypatch, LAUNCHERS[launcher])
    with pytest.raises(RuntimeError, match="communicator of one. Initialise torch.distributed"):
        xd.init(device="cpu")


@pytest.mark.parametrize("place", ALONE)
def test_one_process_of_a_launcher_is_one_rank(place, monkeypatch):
    _launched(monkeypatch, ALONE[place])
    with xd.init(device="cpu") as comm:
        assert comm.num_ranks == 1


def test_no_operation_imports_torchs_compiler_and_a_process_may_just_end():
    """The import takes seconds on a slow disk, and peers would wait for it inside an operation.

    At the end nothing is closed by hand, and tensors are alive: no crash, no message.
    """
    code = (
        "import sys, torch, crossdock.torch as xd\n"
        "from crossdock.torch import _comm\n"
        "meet = _comm.meet\n"
        "def checked(**options):\n"
        "    assert 'torch._dynamo' in sys.modules\n"
        "    return meet(**options)\n"
        "assert 'torch._dynamo' not in sys.modules\n"
        "_comm.meet = checked\n"
        "comm = xd.init(heap_bytes=1 << 20)\n"
        "sizes = dict(num_experts=4, hidden=32, max_topk=2, max_tokens_per_rank=8)\n"
        "group = xd.EpGroup(**sizes, dtype=torch.float32)\n"
        "before = set(sys.modules)\n"
        "plan = group.prepare(torch.tensor([[0, 3]]))\n"
        "x = torch.ones(1, 32, requires_grad=True)\n"
        "received = xd.dispatch(plan, x)\n"
        "xd.combine(plan, received.tokens).sum().backward()\n"
        "late = [name for name in set(sys.modules) - before if name.startswith('torch')]\n"
        "assert not late, late\n"
    )
    done = _run("-c", code)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_without_torch_the_import_says_what_to_install():
    code = "import sys; sys.modules['torch'] = None; import crossdock.torch"
    done = _run("-c", code)
    assert "ImportError: crossdock.torch needs PyTorch 2.6 or newer: pip install" in done.stderr
