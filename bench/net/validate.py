"""Compares the model of tools/model with what is measured between network namespaces.

    python3 bench/net/validate.py --build build/release

Two hosts of two ranks and four of one, over links of 0.2, 0.5 and 1 Gbit/s. The model is told the
rate of the link, less what TCP adds to it, and, from one run over links that are not throttled, how
fast ranks get on. Exit code 0: all within 15 %; 1: not; 77: it cannot measure here, and says why.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "tools/model")]

import net_hosts  # noqa: E402  (of this tree)
import net_model as model  # noqa: E402
from programs import Case, Programs  # noqa: E402

RATES = (0.2e9, 0.5e9, 1e9)
# Bytes of a stream in a frame of MTU 1500, which on the wire has 14 more.
EFFICIENCY = 1448 / 1514
TOLERANCE = 0.15
TRIES = 4  # other programs only make times longer, so the best of these counts


def seconds_of(programs: Programs, case: Case) -> dict[str, float]:
    """The shortest of all iterations, by step."""
    found: dict[str, float] = {}
    for line in programs.crossdock(case, "ep"):
        if "seconds" in line:
            found[line["step"]] = min(line["seconds"])
    return found


def latency_of(build: Path) -> float:
    """One way of an empty put. Two ranks: with more of them than cores it is the scheduler's."""
    with net_hosts.made(2) as hosts:
        lines = Programs(build, hosts).crossdock(Case(2, 1, 8, 20, 5), "links")
    pings = [line for line in lines if line.get("step") == "ping"]
    return min(pings[0]["seconds"]) / 200


def machines_of(
    programs: Programs, case: Case, problem: model.Problem, latency: float
) -> model.Machines:
    """The facts about this machine for the model, from links that are not throttled."""
    programs.hosts.throttle(None)
    dispatch = min(seconds_of(programs, case)["dispatch"] for _ in range(3))
    # Each rank packs its rows, and stores those that come to it and its own; the network itself is
    # work of the processor here.
    shares = model.shares_of(problem)
    far = problem.tokens * sum(shares.hosts[1:])
    rows = far + problem.tokens * sum(h * r for h, r in zip(shares.hosts, shares.ranks_if_any))
    return model.Machines(
        wire=model.Wire(bytes_per_s=0, latency_s=latency),
        near_bytes_per_s=rows * problem.row_bytes / dispatch,
        wire_per_rank=False,
    )


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build", type=Path, default=ROOT / "build/release")
    options = parser.parse_args()
    why = net_hosts.why_not()
    if why:
        print(f"The model is not compared with measurements: {why}")
        return 77
    worst, build = 0.0, options.build.resolve()
    latency = latency_of(build)
    for hosts, ranks in ((2, 2), (4, 1)):
        case = Case(hosts, ranks, 512, 3, 1)
        problem = model.Problem(hosts, ranks, case.tokens, case.topk, case.experts)
        with net_hosts.made(hosts) as made:
            programs = Programs(build, made)
            machines = machines_of(programs, case, problem, latency)
            print(
                f"{hosts} hosts of {ranks}: latency {machines.wire.latency_s * 1e6:.0f} us,"
                f" near {machines.near_bytes_per_s * 1e-9:.2f} GB/s"
            )
            for rate in RATES:
                made.throttle(rate)
                wire = model.dataclasses.replace(machines.wire, bytes_per_s=rate / 8 * EFFICIENCY)
                there = model.dataclasses.replace(machines, wire=wire)
                predicted = {
                    step: model.simulate(problem, there, step).seconds
                    for step in ("dispatch", "combine")
                }
                measured: dict[str, float] = {}
                for _ in range(TRIES):
                    now = seconds_of(programs, case)
                    measured = {s: min(now[s], measured.get(s, now[s])) for s in predicted}
                worst = max(worst, *(abs(predicted[s] / measured[s] - 1) for s in predicted))
                for s in predicted:
                    print(
                        f"  {rate * 1e-9:.1f} Gbit/s {s:9} predicted {predicted[s] * 1e3:7.1f} ms,"
                        f" measured {measured[s] * 1e3:7.1f} ms, ratio"
                        f" {predicted[s] / measured[s]:.3f}"
                    )
    print(f"worst: {worst:.1%}, expected at most {TOLERANCE:.0%}")
    return 0 if worst <= TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())
