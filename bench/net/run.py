"""Measures expert parallelism between two hosts, which are network namespaces of this machine.

    python3 bench/net/run.py --build build/release --json FILE

Dispatch and combine of the library, also with sums that cross as fp8, beside pack + MPI_Alltoallv
+ unpack of the same routing, torch's all_to_all_single over gloo, one TCP connection for each rank,
and puts of the library's links. They take turns, in several rounds, over a link of 1 Gbit/s and
over one that is as fast as the machine. As root; needs iproute2, and takes about five minutes.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import net_hosts  # noqa: E402  (of this tree)
from programs import Case, Programs, environment, median  # noqa: E402

GIGABIT = 1e9
FP8_SUMS = "fp8_block128"
ALONE = "a core for each rank"
WIRES: dict[str, float | None] = {"1 Gbit/s": GIGABIT, "unthrottled": None}

# At most this, in the order of the table; the words for people are in the JSON, too.
TARGETS = {
    "bytes put / bytes of unique (token, host) rows": 1.02,
    "idle, of a core": 0.005,
    "8 tokens: dispatch in one-way puts": 6.0,
    "1 Gbit/s: combine of fp8 sums, time against bf16": 0.60,
    "1 Gbit/s: dispatch, time against MPI": 0.50,
    "1 Gbit/s: combine, time against MPI": 0.50,
    "unthrottled: dispatch, time against MPI": 0.80,
    "unthrottled: combine, time against MPI": 0.80,
}
# At least this.
SHARES = {
    "1 Gbit/s: dispatch, share of the wire": 0.88,
    "1 Gbit/s: combine, share of the wire": 0.88,
}


@dataclasses.dataclass
class Found:
    """The findings of all rounds about one step of one program."""

    medians: list[float]  # by round
    all: list[float]
    cpu: list[float]
    counts: dict[str, float]

    @property
    def p50(self) -> float:
        """The lowest of the rounds' medians: what else the machine did only adds to times."""
        return min(self.medians)

    @property
    def p99(self) -> float:
        """Of all iterations."""
        return sorted(self.all)[max(0, -(-99 * len(self.all) // 100) - 1)]


class Findings:
    """Lines of all programs, by wire, tokens, program and step."""

    def __init__(self) -> None:
        self.found: dict[tuple[str, str, str, str], Found] = {}
        self.facts: dict[str, Any] = {}
        self.notes: list[str] = []
        self.idle = 0.0

    def add(self, wire: str, case: str, by: str, lines: list[dict[str, Any]]) -> None:
        """Takes what a program has printed."""
        sums = {line["rank"]: line["checksum"] for line in lines if "rank" in line}
        for line in lines:
            if "facts" in line:
                self.facts[case] = line["facts"]
            if "version" in line:
                note = f"MPI: {line['version']}"
                self.notes += [] if note in self.notes else [note]
            if "seconds" not in line:
                continue
            found = self.found.setdefault((wire, case, by, line["step"]), Found([], [], [], {}))
            found.medians.append(median(line["seconds"]))
            found.all += line["seconds"]
            found.cpu.append(median(line["cpu"]))
            found.counts = {k: line[k] for k in ("puts", "bytes", "wire") if k in line}
        if sums and [sums[r] for r in sorted(sums)] != self.facts[case]["checksums"]:
            raise RuntimeError(f"{case}: MPI and the library have brought different bytes")

    def p50(self, wire: str, case: str, by: str, step: str) -> float | None:
        """The time of a step; None = it was not measured."""
        found = self.found.get((wire, case, by, step))
        return found.p50 if found else None


def measure(programs: Programs, rounds: int, tell: Callable[[str], None]) -> Findings:
    """All rounds, of all programs in turn."""
    findings = Findings()
    # Two ranks of a host; and one, so that each has a core and may spin.
    large, small = Case(2, 2, 1024, 5, 1), Case(2, 2, 8, 60, 10)
    alone = dataclasses.replace(small, ranks_per_host=1)
    has_mpi = programs.has_mpi()
    has_torch = importlib.util.find_spec("torch") is not None
    if not has_mpi:
        findings.notes.append("MPI left out: libopenmpi-dev or openmpi-bin is not there")
    if not has_torch:
        findings.notes.append("gloo left out: this Python has no torch")

    def turn(wire: str, name: str, case: Case, *, peers: bool = True) -> None:
        add = lambda by, lines: findings.add(wire, name, by, lines)  # noqa: E731
        add("crossdock", programs.crossdock(case, "ep"))
        add("links", programs.crossdock(case, "links"))
        add("TCP", programs.crossdock(case, "tcp"))
        if has_mpi and peers:
            add("MPI", programs.mpi(case))
        if has_torch and peers:
            add("gloo", programs.gloo(case, findings.facts[name]))

    # Sums cross in a wire's form where one rank of a host has rows of the token.
    lone = dataclasses.replace(large, ranks_per_host=1)
    coded = dataclasses.replace(lone, combine_wire=FP8_SUMS)

    for i in range(rounds):
        tell(f"round {i + 1} of {rounds}")
        for wire, rate in WIRES.items():
            programs.hosts.throttle(rate)
            turn(wire, "1024 tokens", large)
            for by, case in (("crossdock", lone), ("fp8 sums", coded)):
                lines = programs.crossdock(case, "ep")
                findings.add(wire, f"1024 tokens, {ALONE}", by, lines)
            if rate is None:
                turn(wire, "8 tokens", small)
                # Short enough to find a quiet moment by trying.
                for _ in range(4):
                    turn(wire, f"8 tokens, {ALONE}", alone, peers=False)
    findings.idle = next(
        line["core"] for line in programs.crossdock(large, "idle") if line["step"] == "idle"
    )
    return findings


def rows_of(findings: Findings) -> list[dict[str, Any]]:
    """The table."""
    rows = []
    for (wire, case, by, step), found in sorted(findings.found.items()):
        facts = findings.facts[case]
        unique = sum(facts["host_rows"]) * facts["row_bytes"]
        row: dict[str, Any] = {"wire": wire, "case": case, "step": step, "by": by}
        row |= {"p50_us": round(found.p50 * 1e6, 1), "p99_us": round(found.p99 * 1e6, 1)}
        row["cpu_us"] = round(min(found.cpu) * 1e6, 1)
        row["rounds_us"] = [round(m * 1e6, 1) for m in found.medians]
        if step == "ping":  # a hundred of them, there and back
            row |= {k: round(row[k] / 200, 2) for k in ("p50_us", "p99_us", "cpu_us")}
            row["rounds_us"] = [round(m / 200, 2) for m in row["rounds_us"]]
        elif step != "prepare" and wire == "1 Gbit/s":
            # Rows that a host sends at least; MPI and gloo send more.
            row["wire_share"] = round(unique / 2 * 8 / GIGABIT / found.p50, 3)
        if found.counts.get("bytes") and step != "prepare":
            row["put_share"] = round(found.counts["bytes"] / unique, 4)
            row["puts"] = round(found.counts["puts"], 1)
        if found.counts.get("wire") and step != "prepare":
            row["interface_share"] = round(found.counts["wire"] / unique, 4)
        peer = findings.p50(wire, case, "MPI", step)
        if by == "crossdock" and peer is not None:
            row["of_mpi"] = round(found.p50 / peer, 3)
        rows.append(row)
    return rows


def targets_of(findings: Findings, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The project's aims, and the measurements beside them."""
    large = [r for r in rows if r["by"] == "crossdock" and r["case"] == "1024 tokens"]
    values: dict[str, float] = {
        "bytes put / bytes of unique (token, host) rows": max(
            r["put_share"] for r in large if "put_share" in r
        ),
        "idle, of a core": round(findings.idle, 5),
    }
    for row in large:
        for key, words in (("of_mpi", "time against MPI"), ("wire_share", "share of the wire")):
            if key in row:
                values[f"{row['wire']}: {row['step']}, {words}"] = row[key]
    case = f"8 tokens, {ALONE}"
    dispatch = findings.p50("unthrottled", case, "crossdock", "dispatch")
    ping = findings.p50("unthrottled", case, "links", "ping")
    if dispatch and ping:
        values["8 tokens: dispatch in one-way puts"] = round(dispatch / (ping / 200), 2)
    coded, plain = (
        findings.p50("1 Gbit/s", f"1024 tokens, {ALONE}", by, "combine")
        for by in ("fp8 sums", "crossdock")
    )
    if coded and plain:
        values["1 Gbit/s: combine of fp8 sums, time against bf16"] = round(coded / plain, 3)
    result = []
    for name, limit in {**TARGETS, **SHARES}.items():
        if name not in values:
            continue
        met = values[name] >= limit if name in SHARES else values[name] <= limit
        bound = "at least" if name in SHARES else "at most"
        result.append({"target": name, bound: limit, "measured": values[name], "met": met})
    return result


def show(rows: list[dict[str, Any]], targets: list[dict[str, Any]], notes: list[str]) -> None:
    """Prints the tables."""
    keys = {"p50_us": 11, "p99_us": 11, "cpu_us": 11, "wire_share": 11, "put_share": 10}
    keys |= {"interface_share": 16, "of_mpi": 7}
    head = "".join(f"{key:>{width}}" for key, width in keys.items())
    last = None
    for row in rows:
        if (row["wire"], row["case"]) != last:
            last = row["wire"], row["case"]
            print(f"\n{row['case']}, {row['wire']}\n{'':21}{head}")
        cells = "".join(f"{row.get(key, '-'):>{width}}" for key, width in keys.items())
        print(f"{row['step']:10}{row['by']:11}{cells}")
    print()
    for t in targets:
        bound = "at least" if "at least" in t else "at most"
        verdict = "met" if t["met"] else "MISSED"
        print(f"{t['target']:50} {bound} {t[bound]:<6} measured {t['measured']:<8} {verdict}")
    for note in notes:
        print(note)


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build", type=Path, default=ROOT / "build/release")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    why = net_hosts.why_not()
    if why:
        print(f"bench-net: cannot measure here: {why}", file=sys.stderr)
        return 1
    with net_hosts.made(2) as hosts:
        programs = Programs(options.build.resolve(), hosts)
        findings = measure(programs, options.rounds, lambda text: print(text, file=sys.stderr))
    rows = rows_of(findings)
    targets = targets_of(findings, rows)
    machine = environment() + ", hosts are its network namespaces"
    title = "2 hosts of 2 ranks (a core for each rank: of 1), K=8 E=32 H=7168 bf16"
    print(f"bench-net: {title}\nmachine  {machine}")
    show(rows, targets, findings.notes)
    if options.json:
        head = {"title": title, "machine": machine, "date": datetime.date.today().isoformat()}
        head |= {"rounds": options.rounds, "notes": findings.notes}
        lines = [head, *targets, *rows]
        options.json.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
