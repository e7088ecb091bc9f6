"""The programs that bench-net measures, each started on hosts that are network namespaces."""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from net_hosts import NetHosts

__all__ = ["Case", "Programs", "environment", "median"]

_PATIENCE_S = 300.0


def median(values: Sequence[float]) -> float:
    """The p50 as the other benchmarks of the project take it."""
    return sorted(values)[(len(values) + 1) // 2 - 1]


@dataclasses.dataclass(frozen=True)
class Case:
    """A problem, and its ranks: as many on each host."""

    hosts: int
    ranks_per_host: int
    tokens: int
    iters: int
    warmup: int
    hidden: int = 7168
    topk: int = 8
    experts: int = 32
    combine_wire: str = "same"

    @property
    def ranks(self) -> int:
        """Ranks in all."""
        return self.hosts * self.ranks_per_host

    @property
    def options(self) -> list[str]:
        """The case as the programs of bench/ take it."""
        numbers = {"tokens": self.tokens, "hidden": self.hidden, "topk": self.topk}
        numbers |= {"experts": self.experts, "iters": self.iters, "warmup": self.warmup}
        words = [word for name, n in numbers.items() for word in (f"--{name}", str(n))]
        return words + ["--combine-wire", self.combine_wire]


class Programs:
    """Programs of a build folder on the hosts of a measurement."""

    def __init__(self, build: Path, hosts: NetHosts) -> None:
        self.bench, self.hosts = build / "bench", hosts
        self._port = 29500

    def crossdock(self, case: Case, command: str, **more: str) -> list[dict[str, Any]]:
        """The lines of crossdock-bench-net: ep, idle, links or tcp."""
        program = str(self.bench / "crossdock-bench-net")
        size = int(subprocess.check_output([program, "results-bytes"]))
        with tempfile.NamedTemporaryFile(dir="/dev/shm") as board:
            board.truncate(size)
            env = {
                "XD_BENCH_BOARD": board.name,
                "XD_BENCH_HOSTS": str(case.hosts),
                "XD_RUN_KIND": "processes",
                "XD_JOB_SECRET": secrets.token_hex(16),
                **more,
            }
            return self._ranks(case, [program, command, *case.options], env)

    def gloo(self, case: Case, facts: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The lines of gloo_peer.py."""
        words = [sys.executable, str(Path(__file__).with_name("gloo_peer.py"))]
        words += ["--rows", json.dumps(facts["rows"]), "--row-bytes", str(facts["row_bytes"])]
        words += ["--tokens", str(case.tokens), "--iters", str(case.iters)]
        words += ["--warmup", str(case.warmup)]
        return self._ranks(case, words, {"GLOO_SOCKET_IFNAME": "eth0"})

    def mpi(self, case: Case) -> list[dict[str, Any]]:
        """The lines of the MPI peer, of the faster of its two kinds of stores."""
        with tempfile.TemporaryDirectory() as folder:
            agent = Path(folder, "agent")
            agent.write_text(
                "#!/bin/sh\n# In the place of ssh: hosts are namespaces.\n"
                'while [ "${1#-}" != "$1" ]; do shift; done\nhost=$1; shift\n'
                'exec ip netns exec "$host" unshare --uts sh -c "hostname $host && $*"\n'
            )
            agent.chmod(0o755)
            names = [self.hosts.name(h) for h in range(case.hosts)]
            words = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
            words += ["-n", str(case.ranks), "--map-by", "slot", "--timeout", str(int(_PATIENCE_S))]
            words += ["--host", ",".join(f"{name}:{case.ranks_per_host}" for name in names)]
            for key, value in {
                "plm_rsh_agent": str(agent),
                "oob_tcp_if_include": "eth0",
                "btl": "self,vader,tcp",
                "btl_tcp_if_include": "eth0",
                "mpi_yield_when_idle": "1",  # there are more ranks than cores
            }.items():
                words += ["--mca", key, value]
            words += [str(self.bench / "crossdock-bench-mpi"), *case.options]
            started = self.hosts.start(0, words, {}, stdout=subprocess.PIPE)
            text, _ = started.communicate(timeout=_PATIENCE_S + 30)
            if started.returncode != 0:
                raise RuntimeError(f"failed: {shlex.join(words)}")
        return list(_lines_of_mpi(text))

    def has_mpi(self) -> bool:
        """Whether the peer can be started."""
        return (self.bench / "crossdock-bench-mpi").exists() and shutil.which("mpirun") is not None

    def _ranks(
        self, case: Case, words: Sequence[str], env: Mapping[str, str]
    ) -> list[dict[str, Any]]:
        self._port += 20  # a port may be in use for a while after the last run
        ranks = []
        for rank in range(case.ranks):
            host = rank // case.ranks_per_host
            place = {
                "RANK": str(rank),
                "WORLD_SIZE": str(case.ranks),
                "MASTER_ADDR": self.hosts.address(0),
                "MASTER_PORT": str(self._port),
                "XD_BENCH_ADDRESS": self.hosts.address(host),
                "XD_BENCH_PEER": self.hosts.address((host + case.hosts // 2) % case.hosts),
            }
            # Two spinning ranks on one core would measure how its time is shared.
            alone = case.ranks <= (os.cpu_count() or 1)
            pinned = ["taskset", "-c", str(rank), *words] if alone else words
            ranks.append(self.hosts.start(host, pinned, {**env, **place}, stdout=subprocess.PIPE))
        # One that fails keeps the others waiting, for a bounded time.
        stop = threading.Timer(_PATIENCE_S, lambda: [rank.kill() for rank in ranks])
        stop.start()
        try:
            texts = [rank.communicate()[0] for rank in ranks]
        finally:
            stop.cancel()
        failed = [r for r, rank in enumerate(ranks) if rank.returncode != 0]
        if failed:
            raise RuntimeError(f"ranks {failed} failed: {shlex.join(words)}")
        return [json.loads(line) for line in texts[0].splitlines()]


def _lines_of_mpi(text: str) -> Iterator[dict[str, Any]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for line in text.splitlines():
        key, *rest = line.split(" ")
        if key == "time":
            seconds = [float(number) for number in rest[1:]]
            found.setdefault(rest[0], []).append({"step": rest[0], "seconds": seconds})
        elif key == "cpu":
            found[rest[0]][-1]["cpu"] = [float(number) for number in rest[1:]]
        elif key == "version":
            yield {"version": " ".join(rest)}
        elif key == "rank":
            # As the other program prints it.
            yield {"rank": int(rest[0]), "checksum": float(int(rest[1]) >> 16)}
    for variants in found.values():
        yield min(variants, key=lambda variant: median(variant["seconds"]))


def environment() -> str:
    """The machine, in a line."""
    names = [
        line.split(":", 1)[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return f"{names[0] if names else 'unknown processor'}, {os.cpu_count()} cores"
