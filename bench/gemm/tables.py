#!/usr/bin/env python3
"""Makes docs/gemm.md's tables of what crossdock-bench gemm --json FILE has measured.

  gemm/tables.py FILE... [--aims]

Prints two tables in Markdown: the times of every algorithm beside the product alone and both steps
one after the other, and what AUTO costs. Ways that have been captured count by their graphs. Below
them stand the points at which AUTO takes more than 1.03 times as long as the best algorithm, or
longer than a way without overlap that is not its own; with --aims the script fails where there are
any.
"""

import argparse
import json
import pathlib
import sys

PRODUCT, APART, AUTO = "product alone", "one after the other", "AUTO"
CUBLASMP = "CUBLASMP"  # and the names that begin with it
ALGORITHMS = ("SEQUENTIAL", "SPLIT", "SPLIT_P2P", "DIRECT")
MOST_OVER_BEST = 1.03


class Point:
    """The measurements of one layer with one number of tokens."""

    def __init__(self, rows):
        self.ways = {row["way"]: row for row in rows}
        self.shape, self.tokens = rows[0]["shape"], rows[0]["tokens"]

    def way(self, name):
        """A way as it is used: its graph, where there is one."""
        return self.ways.get(f"{name}, graph") or self.ways.get(name)

    def p50(self, name):
        row = self.way(name)
        return row["p50_us"] if row else None

    def best(self):
        """The shortest time of an algorithm, and its name."""
        times = [(self.p50(name), name) for name in ALGORITHMS if self.p50(name)]
        return min(times, default=(None, None))

    def best_of_cublasmp(self):
        """The shortest time of one of cuBLASMp's algorithms, by calls."""
        return min(
            (self.p50(name) for name in self.ways if name.startswith(CUBLASMP)), default=None
        )

    def misses(self):
        """In what AUTO has not done what it aims at."""
        auto, (best, name) = self.p50(AUTO), self.best()
        if auto and best and auto > MOST_OVER_BEST * best:
            yield f"{auto / best:.3f} times as long as {name}"
        for way in (APART, "SEQUENTIAL"):
            other = self.p50(way)
            if auto and other and auto > other and self.way(AUTO)["algo"] != way:
                yield f"{auto / other:.3f} times as long as {way}"


def points_of(rows):
    """The points that rows belong to, in order."""
    points = {}
    for row in rows:
        points.setdefault((row["shape"], row["tokens"]), []).append(row)
    return [Point(rows) for rows in points.values()]


def read(paths):
    """(the reports, the points of all of them in order)."""
    reports = [json.loads(path.read_text()) for path in paths]
    return reports, points_of(row for report in reports for row in report["rows"])


def time(microseconds):
    if microseconds is None:
        return "–"
    return f"{microseconds:.1f}" if microseconds < 100 else f"{microseconds:.0f}"


def ratio(dividend, divisor, digits=2):
    return f"{dividend / divisor:.{digits}f}" if dividend and divisor else "–"


def number(row, key, digits=0):
    value = row.get(key) if row else None
    return "–" if value is None else f"{value:.{digits}f}"


def print_table(columns, rows):
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for row in rows:
        print(f"| {' | '.join(map(str, row))} |")
    print()


def times_of(point, names, cublasmp):
    times = [time(point.p50(name)) for name in (PRODUCT, APART, *names)]
    times += [time(point.best_of_cublasmp())] * cublasmp
    return [f"`{point.shape}`", point.tokens, *times, ratio(point.best()[0], point.p50(PRODUCT))]


def auto_of(point):
    auto, call = point.way(AUTO), point.ways.get(AUTO)
    p50 = point.p50(AUTO)
    memory = call.get("memory_bytes") if call else None
    return [
        f"`{point.shape}`",
        point.tokens,
        call.get("algo", "–") if call else "–",
        time(p50),
        time(auto["p99_us"] if auto else None),
        ratio(p50, point.best()[0]),
        ratio(p50, point.p50(PRODUCT)),
        number(auto, "overlap", 2),
        number(call, "host_us", 1),
        number(point.ways.get(f"{AUTO}, graph"), "host_us", 1),
        "–" if memory is None else f"{memory * 1e-6:.0f}",
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("files", nargs="+", type=pathlib.Path)
    parser.add_argument("--aims", action="store_true", help="fail where AUTO misses its aims")
    arguments = parser.parse_args()
    reports, points = read(arguments.files)
    for report in reports:
        print(f"{report['title']}; {report['build']}")
    print()
    names = [name for name in ALGORITHMS if any(point.p50(name) for point in points)]
    columns = ["Layer", "M", PRODUCT, "NCCL and product" if "gpus" in reports[0] else APART]
    cublasmp = any(point.best_of_cublasmp() for point in points)
    columns += [*names, *["cuBLASMp, its best"] * cublasmp, "best / product alone"]
    print_table(columns, [times_of(point, names, cublasmp) for point in points])
    columns = "Layer|M|AUTO takes|p50|p99|/ best|/ product alone|overlap|host, call".split("|")
    print_table([*columns, "host, graph", "MB per rank"], [auto_of(point) for point in points])
    misses = [(point, miss) for point in points for miss in point.misses()]
    for point, miss in misses:
        print(f"AUTO, {point.shape}, M = {point.tokens}: {miss}")
    print(f"AUTO misses its aims {len(misses)} times, at {len(points)} points.")
    return 1 if misses and arguments.aims else 0


if __name__ == "__main__":
    sys.exit(main())
