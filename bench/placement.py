#!/usr/bin/env python3
"""Measures placements that the planner makes: how even, how many slots moved, how long it takes.

  PYTHONPATH=build/python bench/placement.py [--draws 100] [--json FILE]

Loads are exp(normal), as of no model in particular. Then each is multiplied by exp(0.2 normal), and
the placement follows: from scratch, from the current one, and so with bounds on the moves. Numbers
are medians over draws; times are of plan_placement in Python, on one core.
"""

from __future__ import annotations

import argparse
import datetime
import json
import pathlib
import statistics
import time

import numpy as np

import crossdock
from crossdock.cli import _host

SHAPES = [(256, 8, 33), (256, 32, 9), (256, 64, 5), (64, 8, 9)]  # experts, ranks, slots of a rank
BOUNDS = [1, 2, 4, 8, 16, 24, 32, 48, 64]  # of moves


def slots_moved(old: crossdock.Placement, new: crossdock.Placement) -> int:
    """The slots of ranks that did not hold their expert before."""
    pairs = zip(old.expert_of_slot, new.expert_of_slot)
    return sum(int((~np.isin(now, before)).sum()) for before, now in pairs)


def draw(seed: int, experts: int, ranks: int, slots: int) -> dict[str, tuple[float, int, float]]:
    """Of each way: the busiest rank over the mean, slots moved, microseconds."""
    random = np.random.default_rng(seed)
    loads = np.exp(random.standard_normal(experts))
    first = crossdock.plan_placement(loads, ranks, slots)
    loads *= np.exp(0.2 * random.standard_normal(experts))
    given = [int(load) for load in loads * 1e6]
    found = {}
    ways = {"from scratch": {}, "from the current one": {"current": first}}
    ways |= {f"at most {n} moves": {"current": first, "max_moves": n} for n in BOUNDS}
    for way, arguments in ways.items():
        begin = time.perf_counter()
        planned = crossdock.plan_placement(given, ranks, slots, **arguments)
        us = (time.perf_counter() - begin) * 1e6
        found[way] = (planned.busiest_rank, slots_moved(first, planned), us)
    found["not planned again"] = (planned.busiest_rank_before, 0, 0.0)
    return found


def measure(draws: int) -> list[dict[str, object]]:
    """A row for each shape and way."""
    rows = []
    for experts, ranks, slots in SHAPES:
        found = [draw(seed, experts, ranks, slots) for seed in range(draws)]
        for way in found[0]:
            busiest, moved, us = zip(*(one[way] for one in found))
            row = {"experts": experts, "ranks": ranks, "slots": slots, "plan": way}
            row |= {"busiest": round(statistics.median(busiest), 5)}
            row |= {"busiest_worst": round(max(busiest), 5)}
            row |= {"moved_percent": round(100 * statistics.median(moved) / (ranks * slots), 2)}
            rows.append(row | {"p50_us": round(statistics.median(us), 1)})
    return rows


def main() -> None:
    """Measures, and prints a line for each row."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--draws", type=int, default=100)
    parser.add_argument("--json", type=pathlib.Path, help="file for all rows")
    options = parser.parse_args()
    rows = measure(options.draws)
    for row in rows:
        shape = f"{row['experts']} experts, {row['ranks']} ranks of {row['slots']} slots"
        print(
            f"{shape:38} {row['plan']:22} {row['busiest']:.4f} ({row['busiest_worst']:.4f})", end=""
        )
        print(f" {row['moved_percent']:6.1f} % {row['p50_us']:8.0f} us")
    if options.json:
        head = {"title": "bench/placement.py", "machine": _host.processor(), "draws": options.draws}
        lines = ",\n".join(map(json.dumps, rows))
        head |= {"date": datetime.date.today().isoformat()}
        begin = json.dumps(head).removesuffix("}")
        options.json.write_text(f'{begin}, "rows": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
